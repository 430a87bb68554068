"""Time of one gradient reduction, native and exact, in the three modes: one table per number of ranks.

    python scripts/benchmark_reduction.py [--ranks 2 4] [--mib 24] [--rounds 20]

Reduces one float32 gradient on gloo ranks (NCCL where there are GPUs); kinds alternate, medians with quartiles in
milliseconds. Run it on a quiet machine.
"""

import argparse
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # this checkout's package

from torchtitan_simplefsdp.core.reduction import build_reduction, reduce_gradient


def build_reductions(device: str) -> dict[tuple[str, str], object]:
    """Return a reduction per mode and kind, on meshes of all ranks."""
    world = dist.get_world_size()
    flat = init_device_mesh(device, (world,), mesh_dim_names=("dp",))
    modes = {"fully_shard": (flat, 0, ()), "replicate": (flat, None, (0,))}
    if world >= 4:
        mesh = init_device_mesh(device, (2, world // 2), mesh_dim_names=("dp_replicate", "fsdp"))
        modes[f"hybrid_shard 2x{world // 2}"] = (mesh, 1, (0,))
    return {
        (mode, kind): build_reduction(*where, dtype=torch.float32, exact=kind == "exact")
        for mode, where in modes.items()
        for kind in ("native", "exact")
    }


def measure(mib: int, rounds: int) -> None:
    """Run on every rank; rank 0 prints the rows of the table."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    if device == "cuda":
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    else:
        torch.set_num_threads(1)
    dist.init_process_group("nccl" if device == "cuda" else "gloo")
    reductions = build_reductions(device)
    gradient = torch.randn(dist.get_world_size() * 1024, mib * 2**18 // 1024 // dist.get_world_size(), device=device)
    seconds: dict[tuple[str, str], list[float]] = {name: [] for name in reductions}
    for round_number in range(rounds + 2):
        for name in list(reductions) if round_number % 2 else list(reductions)[::-1]:
            dist.barrier()
            started = time.perf_counter()
            reduce_gradient(gradient, reductions[name])
            if device == "cuda":
                torch.cuda.synchronize()
            if round_number >= 2:  # the first ones warm up
                seconds[name].append(time.perf_counter() - started)
    if dist.get_rank() == 0:
        for mode in dict.fromkeys(mode for mode, _ in reductions):
            cells, medians = [], []
            for kind in ("native", "exact"):
                low, median, high = (1e3 * q for q in statistics.quantiles(seconds[mode, kind], n=4))
                cells.append(f"{median:.1f} ({low:.1f} to {high:.1f})")
                medians.append(median)
            print(f"| {dist.get_world_size()} | {mode} | {' | '.join(cells)} | {medians[1] / medians[0]:.2f} |", flush=True)
    dist.destroy_process_group()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4], help="numbers of ranks, default: 2 4")
    parser.add_argument("--mib", type=int, default=24, help="size of the gradient in MiB, default: 24")
    parser.add_argument("--rounds", type=int, default=20, help="measured rounds, default: 20")
    args = parser.parse_args()
    if "RANK" in os.environ:
        measure(args.mib, args.rounds)
        return
    print("| ranks | mode | native, ms | exact, ms | exact / native |\n| --- | --- | --- | --- | --- |", flush=True)
    for ranks in args.ranks:
        torchrun = [sys.executable, "-m", "torch.distributed.run", f"--nproc-per-node={ranks}", "--standalone"]
        subprocess.run([*torchrun, __file__, "--mib", str(args.mib), "--rounds", str(args.rounds)], check=True)


if __name__ == "__main__":
    main()
