"""Measure this machine's cost model, for the passes that bucket and for predictions, and write it as TOML.

    python scripts/measure_cost_model.py [--ranks 2] [--output cost_model.toml] [--rounds 7] [--mib 16]

Starts that many ranks, with NCCL one per GPU where there are GPUs, else with gloo; about half a minute on 2 cores. On
several nodes start it on each with torchrun instead: `torchrun --nnodes 2 --nproc-per-node 8 ...
scripts/measure_cost_model.py`; it then measures the network too. Run it on a quiet machine.
"""

import argparse
import os
import subprocess
import sys
from pathlib import Path

import torch
import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # this checkout's package

from torchtitan_simplefsdp.graph.cost_model import format_cost_model
from torchtitan_simplefsdp.graph.measure import measure_cost_model


def measure(args: argparse.Namespace) -> None:
    """Run on every rank; rank 0 writes the file."""
    device = torch.device("cpu")
    if torch.cuda.is_available():
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)
    else:
        torch.set_num_threads(1)
    dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
    model = measure_cost_model(device, int(os.environ["LOCAL_WORLD_SIZE"]), args.rounds, args.mib * 2**20)
    if dist.get_rank() == 0:
        args.output.write_text(format_cost_model(model))
        print(f"{args.output}: {model.name}")
    dist.destroy_process_group()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=2, help="ranks to start, at least 2; default: 2")
    parser.add_argument("--output", type=Path, default=Path("cost_model.toml"), help="default: cost_model.toml")
    parser.add_argument("--rounds", type=int, default=7, help="repetitions of each measurement, default: 7")
    parser.add_argument("--mib", type=int, default=16, help="largest tensor of a collective in MiB, default: 16")
    args = parser.parse_args()
    if "RANK" in os.environ:
        measure(args)
        return 0
    if args.ranks < 2:
        parser.error(f"--ranks {args.ranks}: collectives need at least 2 ranks.")
    torchrun = [sys.executable, "-m", "torch.distributed.run", f"--nproc-per-node={args.ranks}", "--standalone"]
    return subprocess.run([*torchrun, __file__, *sys.argv[1:]]).returncode


if __name__ == "__main__":
    sys.exit(main())
