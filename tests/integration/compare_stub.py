"""A stand-in for ./run_train.sh: trains nothing, but writes event files, progress and checkpoints as a real run does.

The loss of step s is 8 - s/10 plus the variable OFFSET. FAIL_AT and HANG_AT name a step; it hangs once per folder.
Every start adds a line to starts.log beside the run's folder.
"""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

from tensorboard.compat.proto.event_pb2 import Event
from tensorboard.compat.proto.summary_pb2 import Summary
from tensorboard.summary.writer.event_file_writer import EventFileWriter

LOSS, GRAD_NORM = "loss_metrics/global_avg_loss", "grad_norm"


def write_scalars(folder: Path, tag: str, values: dict[int, float], wall_time: float = 1.0) -> None:
    """Write one event file with one tag."""
    writer = EventFileWriter(str(folder))
    for step, value in values.items():
        summary = Summary(value=[Summary.Value(tag=tag, simple_value=value)])
        writer.add_event(Event(step=step, wall_time=wall_time, summary=summary))
    writer.close()


def get_flag(argv: list[str], flag: str) -> str | None:
    return next((value for name, value in zip(argv[-2::-1], argv[:0:-1]) if name == flag), None)


def main(argv: list[str]) -> int:
    folder, steps = Path(get_flag(argv, "--job.dump_folder")), int(get_flag(argv, "--training.steps"))
    with open(folder.parent / "starts.log", "a") as file:
        file.write(f"{folder.name}\n")
    interval = int(get_flag(argv, "--checkpoint.interval") or 0)
    checkpoints = folder / "checkpoint"
    if "--checkpoint.create_seed_checkpoint" in argv:
        (checkpoints / "step-0").mkdir(parents=True)
        return 0
    if seed_checkpoint := get_flag(argv, "--checkpoint.initial_load_path"):
        assert Path(seed_checkpoint).is_dir() and not (interval and checkpoints.exists())
    done = max((int(path.name[5:]) for path in checkpoints.glob("step-*")), default=0)
    for step in range(done + 1, steps + 1):
        print(f"step: {step}", flush=True)
        if step == int(os.environ.get("FAIL_AT", 0)):
            print("the last words")
            return 3
        if step == int(os.environ.get("HANG_AT", 0)) and not (folder.parent / "hung").exists():
            (folder.parent / "hung").write_text(str(os.getpid()))
            time.sleep(120)
        values = {LOSS: 8 - step / 10 + float(os.environ.get("OFFSET", 0)), GRAD_NORM: 1 + step / 7}
        for tag, value in values.items():
            write_scalars(folder / "tb", tag, {step: value}, time.time())
        Path(os.environ["SIMPLEFSDP_PROGRESS"]).write_text(f"{step} {steps}\n")
        if interval and step % interval == 0:
            (checkpoints / f"step-{step}").mkdir(parents=True)
            (checkpoints / f"step-{step}" / ".metadata").touch()
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
