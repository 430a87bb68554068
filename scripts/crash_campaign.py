"""Kill a run again and again with SIGKILL, restart it each time, and compare it with one that was left alone.

    python scripts/crash_campaign.py [--kills 20 | --at-steps 10 14] [--steps 80] [--markdown FILE] [-- FLAGS FOR BOTH RUNS]

The debug model is saved every 2 steps. Each start of the run is killed at a random moment: in turn while it trains or
saves, while it saves, again while it trains or saves, and while it starts; or as soon as a given step was logged. The
victim is the launcher or one of the ranks, by chance. At the end loss, gradient norm, learning rate and tokens seen of
every step must be those of the undisturbed run, bit for bit, and no start may have lost more than the steps since the
last save. Exit code 1 if that does not hold.
"""

from __future__ import annotations

import argparse
import os
import random
import re
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import NamedTuple

REPOSITORY = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(REPOSITORY))

from torchtitan_simplefsdp.compare.scalars import METRICS, read_all_scalars  # noqa: E402
from torchtitan_simplefsdp.stop import find_children  # noqa: E402

INTERVAL = 2
TAGS = (*METRICS.values(), "lr", "n_tokens_seen")
BASE_FLAGS = (
    "--training.seq_len 64 --training.local_batch_size 2 --training.global_batch_size 8 --debug.seed 42 --checkpoint.enable "
    f"--checkpoint.interval {INTERVAL} --checkpoint.keep_latest_k 3 --checkpoint.no_last_save_model_only"
).split()


class Life(NamedTuple):
    """One start of the run and its end."""

    victim: str  # "" for the one that came to its end
    resumed: int
    reached: int  # last step that was logged
    skipped: tuple[str, ...]  # checkpoints found unfinished, as the log says


class Run:
    """A ./run_train.sh in a folder of its own."""

    def __init__(self, folder: Path, flags: list[str], log: Path) -> None:
        self._log = log
        with log.open("wb") as output:
            self._process = subprocess.Popen(
                [str(REPOSITORY / "run_train.sh"), *flags, "--job.dump_folder", str(folder)],
                stdout=output,
                stderr=subprocess.STDOUT,
                env={"OMP_NUM_THREADS": "1", **os.environ, "PYTHON": sys.executable},
            )

    def is_over(self) -> bool:
        return self._process.poll() is not None

    def read(self) -> str:
        return self._log.read_text(errors="replace")

    def wait_for(self, text: str) -> None:
        while not self.is_over() and not re.search(text, self.read()):
            time.sleep(0.02)

    def kill(self, chance: random.Random) -> str:
        """SIGKILL the launcher or a rank and return which it was; wait until nothing of the run is left."""
        ranks = sorted(find_children(self._process.pid))
        victims = [self._process.pid, *ranks]
        number = chance.randrange(len(victims))
        os.kill(victims[number], signal.SIGKILL)
        self._process.wait()
        while any(Path(f"/proc/{pid}").exists() for pid in ranks):
            time.sleep(0.02)
        return "launcher" if number == 0 else f"rank {number - 1}"

    def finish(self) -> None:
        if self._process.wait() != 0:
            sys.exit(f"the run failed:\n{self.read()[-4000:]}")

    def describe(self, victim: str) -> Life:
        log = self.read()
        begin = re.search(r"Training starts at step (\d+)", log)
        resumed = int(begin[1]) - 1 if begin else -1
        steps = [int(step) for step in re.findall(r"step:\s*(\d+)", log)]
        return Life(victim, resumed, steps[-1] if steps else resumed, tuple(re.findall(r"Checkpoint skipped: (.*)\.$", log, re.M)))


def run_undisturbed(folder: Path, flags: list[str]) -> tuple[float, float]:
    """Return the seconds until training starts, and the seconds of 2 steps and a save."""
    began = time.monotonic()
    run = Run(folder / "undisturbed", flags, folder / "undisturbed.log")
    run.wait_for("Training starts at step")
    started = time.monotonic()
    run.finish()
    steps = run.describe("").reached
    return started - began, (time.monotonic() - started) / steps * INTERVAL


Moment = Callable[[Run], None]
"""Waits for the moment at which a start is killed."""


def draw_moments(kills: int, chance: random.Random, startup: float, period: float) -> list[Moment]:
    def while_it_trains(run: Run) -> None:
        run.wait_for("Training starts at step")
        time.sleep(chance.uniform(0, 2 * period))

    def while_it_starts(run: Run) -> None:
        time.sleep(chance.uniform(0, startup))

    def while_it_saves(run: Run) -> None:
        run.wait_for("Saving the checkpoint")
        time.sleep(chance.uniform(0, period / 2))

    kinds = (while_it_trains, while_it_saves, while_it_trains, while_it_starts)
    return [kinds[number % len(kinds)] for number in range(kills)]


def run_disturbed(folder: Path, flags: list[str], moments: list[Moment], chance: random.Random) -> list[Life]:
    """Kill and restart until all kills are done, then let the run come to its end."""
    lives = []
    for wait in moments:
        run = Run(folder / "disturbed", flags, folder / f"disturbed-{len(lives)}.log")
        wait(run)
        if run.is_over():
            sys.exit(f"the run ended after {len(lives)} of {len(moments)} kills; give it more --steps:\n{run.read()[-2000:]}")
        lives.append(run.describe(run.kill(chance)))
        print(f"kill {len(lives)}: {lives[-1]}", flush=True)
    run = Run(folder / "disturbed", flags, folder / "disturbed-last.log")
    run.finish()
    return [*lives, run.describe("")]


def find_losses(lives: list[Life], is_async: bool) -> list[str]:
    """Return a line for each start that lost more steps than those since the last save."""
    allowed = 2 * INTERVAL if is_async else INTERVAL  # an asynchronous save is waited for at the next one
    faults, reached = [], 0
    for number, life in enumerate(lives):
        if life.resumed >= 0 and reached - life.resumed > allowed:
            faults.append(f"start {number} went on from step {life.resumed}, though step {reached} had been reached")
        reached = max(reached, life.reached)
    return faults


def find_differences(folder: Path, steps: int) -> list[str]:
    """Compare every scalar of every step, the last one written where a step was done more than once, and all repetitions."""
    undisturbed, disturbed = (read_all_scalars(folder / name / "tb", TAGS) for name in ("undisturbed", "disturbed"))
    faults = []
    for tag in TAGS:
        for step in range(1, steps + 1):
            values = {*undisturbed[tag].get(step, [None]), *disturbed[tag].get(step, [None])}
            if len(values) != 1 or None in values:
                faults.append(f"{tag} of step {step}: {sorted(map(str, values))}")
    return faults


def format_table(lives: list[Life], command: str, outcome: str) -> str:
    lines = ["| start | went on from step | reached step | killed | found unfinished |", "|---|---|---|---|---|"]
    for number, life in enumerate(lives, 1):
        place = ("-", "-") if life.resumed < 0 else (life.resumed, life.reached)
        skipped = ", ".join(line.split()[0] for line in life.skipped)
        lines.append(f"| {number} | {place[0]} | {place[1]} | {life.victim or 'came to its end'} | {skipped} |")
    return f"```\n{command}\n```\n\n{outcome}\n\n" + "\n".join(lines) + "\n"


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--at-steps", type=int, nargs="+", help="kill when these steps are logged, instead of at random")
    parser.add_argument("--steps", type=int, default=80, help="optimizer steps of the run")
    parser.add_argument("--seed", type=int, default=0, help="of moments and victims")
    parser.add_argument("--markdown", type=Path, help="add the command, the outcome and a table of starts to this file")
    parser.add_argument("flags", nargs="*", help="of ./run_train.sh, after --")
    args = parser.parse_args(argv)
    flags = [*BASE_FLAGS, "--training.steps", str(args.steps), *args.flags]
    folder = Path(tempfile.mkdtemp(prefix="crash_campaign_"))  # kept if something is wrong
    startup, period = run_undisturbed(folder, flags)
    print(f"undisturbed: training starts after {startup:.1f} s, {INTERVAL} steps and a save take {period:.1f} s", flush=True)
    chance = random.Random(args.seed)
    if args.at_steps:
        moments = [partial(Run.wait_for, text=rf"step:\s*{step}\b") for step in args.at_steps]
    else:
        moments = draw_moments(args.kills, chance, startup, period)
    lives = run_disturbed(folder, flags, moments, chance)
    is_async = "async_mode" in " ".join(args.flags)
    faults = find_losses(lives, is_async) + find_differences(folder, args.steps)
    if not faults:
        shutil.rmtree(folder)
    outcome = (
        f"{len(moments)} kills, {args.steps} steps: " + (
            "; ".join(faults) + f". Logs in {folder}."
            if faults
            else "all scalars of all steps equal the undisturbed run's, and no start lost more than the steps since the last save."
        )
    )
    processes = f"NGPU={os.environ['NGPU']} " if "NGPU" in os.environ else ""
    command = processes + shlex.join(["python", "scripts/crash_campaign.py", *argv])
    table = format_table(lives, command, outcome)
    print(table)
    if args.markdown:
        with args.markdown.open("a") as file:
            file.write(f"\n{table}")
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
