"""Time from the command to the end of step 1: ./run_train.sh against torchrun on torchtitan's own trainer.

    python scripts/benchmark_startup.py [--processes 2] [--repeats 5]

Both train the debug model on the embedded text from the same config file. The baseline is torchtitan's `Trainer` with its
own FSDP2 llama3 under plain torchrun; it gets our table of rebinds, without which it does not run where there is no GPU.
Runs alternate; medians and the spread are printed. Run it on a quiet machine.
"""

import argparse
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[1]

BASELINE = """
import sys
import torchtitan.train
from torch.distributed.fsdp import FSDPModule
from torchtitan.config import JobConfig
from torchtitan.models import llama3
from torchtitan.protocols.train_spec import register_train_spec
from dataclasses import replace
from torchtitan_simplefsdp.titan.datasets import register_datasets
from torchtitan_simplefsdp.titan.device import is_cpu_only
from torchtitan_simplefsdp.titan.rebind import apply_rebinds

def parallelize(model, parallel_dims, job_config):
    model = llama3.parallelize_llama(model, parallel_dims, job_config)
    for module in model.modules():
        if isinstance(module, FSDPModule) and is_cpu_only():
            module.set_force_sum_reduction_for_comms(True)
    return model

register_datasets()
register_train_spec("bare.llama3", replace(llama3.get_train_spec(), parallelize_fn=parallelize))
apply_rebinds(JobConfig())
torchtitan.train.main(torchtitan.train.Trainer)
"""

OVERRIDES = ["--training.steps", "1", "--metrics.no_enable_tensorboard"]


def time_to_step_1(command: list[str], folder: Path) -> float:
    """Start `command` and return the seconds until its step line is printed; then let it end."""
    environment = {**os.environ, "PYTHONUNBUFFERED": "1", "PYTHON": sys.executable}
    environment.setdefault("OMP_NUM_THREADS", "1")
    environment["PYTHONPATH"] = f"{REPOSITORY}:{environment.get('PYTHONPATH', '')}"
    started, seconds = time.perf_counter(), None
    with subprocess.Popen(
        [*command, "--job.dump_folder", str(folder), *OVERRIDES],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env=environment,
    ) as process:
        lines = []
        for line in process.stdout:
            lines.append(line)
            if "step:" in line and seconds is None:
                seconds = time.perf_counter() - started
    if process.returncode or seconds is None:
        sys.exit("".join(lines))
    return seconds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--processes", type=int, default=2, help="default: 2")
    parser.add_argument("--repeats", type=int, default=5, help="runs of each, default: 5")
    parser.add_argument("--output", type=Path, default=Path("outputs/benchmark_startup"), help="folder for the runs")
    args = parser.parse_args()
    args.output.mkdir(parents=True, exist_ok=True)
    script = args.output / "bare_torchtitan.py"
    script.write_text(BASELINE)
    os.environ["NGPU"] = str(args.processes)
    torchrun = [sys.executable, "-m", "torch.distributed.run", f"--nproc-per-node={args.processes}", "--tee=3"]
    torchrun += ["--rdzv-backend=c10d", "--rdzv-endpoint=localhost:0", "--local-addr=localhost", "--role=rank"]
    torchrun += ["--local-ranks-filter=0", f"--log-dir={args.output / 'logs'}", str(script)]
    config = REPOSITORY / "train_configs" / "llama3_debug.toml"
    assets = REPOSITORY / "torchtitan_simplefsdp" / "assets" / "tokenizer"
    # the bare trainer knows neither our section nor where our tokenizer is
    bare_config = args.output / "bare.toml"
    bare_config.write_text(config.read_text().replace('[simple_fsdp]\nmode = "auto"', "[experimental]\n#"))
    commands = {
        "bare torchtitan": [
            *torchrun,
            f"--job.config_file={bare_config}",
            "--model.name=bare.llama3",
            f"--model.hf_assets_path={assets}",
        ],
        "./run_train.sh": [str(REPOSITORY / "run_train.sh"), "--config", str(config)],
    }
    seconds: dict[str, list[float]] = {name: [] for name in commands}
    for repeat in range(args.repeats + 1):
        for name in list(commands) if repeat % 2 else list(commands)[::-1]:
            elapsed = time_to_step_1(commands[name], args.output)
            if repeat:  # the first of each fills the file cache
                seconds[name].append(elapsed)
            print(f"{name}: {elapsed:.1f} s{'' if repeat else ' (not counted)'}", flush=True)
    medians = {name: statistics.median(values) for name, values in seconds.items()}
    for name, values in seconds.items():
        print(f"{name}: median {medians[name]:.1f} s, from {min(values):.1f} to {max(values):.1f} s")
    print(f"ratio of medians: {medians['./run_train.sh'] / medians['bare torchtitan']:.2f}")


if __name__ == "__main__":
    main()
