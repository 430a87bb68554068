"""Check the simulator on this machine, predicted against measured steps, and write docs/scaling.md.

    python scripts/check_simulator.py [--ranks 2 4] [--rounds 10] [--print]

Per number of ranks: measures the cost model, then steps of the debug model without communication, in replicate and in
fully_shard, in alternating order; each is traced and predicted from that cost model. A few minutes on 2 quiet cores.
--print leaves the document alone.
"""

import argparse
import logging
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # this checkout's package

from torchtitan.models.llama3 import llama3_args
from torchtitan.tools.logging import logger

from torchtitan_simplefsdp.core.data_parallel import apply_mixed_precision, data_parallel
from torchtitan_simplefsdp.core.precision import MixedPrecisionPolicy
from torchtitan_simplefsdp.graph.measure import measure_cost_model
from torchtitan_simplefsdp.graph.schedules import predict, SCHEDULES
from torchtitan_simplefsdp.graph.segments import build_step
from torchtitan_simplefsdp.graph.trace import Collective, trace_step
from torchtitan_simplefsdp.titan.model import SimpleFSDPTransformer
from torchtitan_simplefsdp.titan.traced_llama import build_labels, Loss

DOCUMENT = Path(__file__).resolve().parents[1] / "docs" / "scaling.md"
START, END = "<!-- check: python scripts/check_simulator.py -->\n", "<!-- end of check -->"
BASELINE = "no communication"
HEADER = (
    "| ranks | run | step measured | predicted | difference | communication measured | predicted | difference |\n"
    "|---|---|---|---|---|---|---|---|"
)
SEQUENCES, SEQ_LEN = 2, 256


def build_run(mode: str, bucket_plan: str | None = "block") -> tuple[Callable[[], None], nn.Module, Loss]:
    """Return a step of forward and backward in a mode, and the modules that it runs."""
    torch.manual_seed(0)
    model = SimpleFSDPTransformer(llama3_args["debugmodel"])
    with torch.no_grad():
        model.init_weights()
    if mode == BASELINE:
        apply_mixed_precision(model, MixedPrecisionPolicy())
    else:
        dim = "fsdp" if mode == "fully_shard" else "dp_replicate"
        mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=(dim,))
        data_parallel(model, mesh, mode=mode, bucket_plan=bucket_plan, reshard_after_forward=False)
    loss = Loss()
    tokens = torch.randint(2048, (SEQUENCES, SEQ_LEN))

    def step() -> None:
        model.zero_grad()
        loss(model(tokens), tokens).backward()

    return step, model, loss


def check(rounds: int) -> None:
    """Run on every rank; rank 0 prints the rows of the table."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    cost = measure_cost_model(torch.device("cpu"), dist.get_world_size(), rounds=7, most_bytes=2**24)
    runs = {mode: build_run(mode) for mode in (BASELINE, "replicate", "fully_shard")}
    seconds: dict[str, list[float]] = {mode: [] for mode in runs}
    for round_number in range(rounds + 1):
        for mode in list(runs) if round_number % 2 else list(runs)[::-1]:
            dist.barrier()
            started = time.perf_counter()
            runs[mode][0]()
            if round_number:  # the first one warms up
                seconds[mode].append(time.perf_counter() - started)
    measured = {mode: statistics.median(times) for mode, times in seconds.items()}
    predicted = {}
    for mode in runs:
        step, model, loss = build_run(mode, bucket_plan=None)  # the schedule fills the buckets
        # groups by mesh dim are not needed: every collective of these runs is data parallelism's
        events = trace_step(step, build_labels(model, loss))
        groups = {event.group for event in events if isinstance(event, Collective)}
        schedule = SCHEDULES["block buckets, prefetch"]
        predicted[mode] = predict(build_step(events, cost, groups, {}), cost, schedule, reshard=False)
    if dist.get_rank() == 0:
        for mode, prediction in predicted.items():
            step, exposed = prediction.timeline.step_seconds, prediction.timeline.exposed_seconds
            cells = [*_compare(measured[mode], step)]
            cells += _compare(measured[mode] - measured[BASELINE], exposed) if mode != BASELINE else ["", "", ""]
            print(f"| {dist.get_world_size()} | {mode} | {' | '.join(cells)} |", flush=True)
    dist.destroy_process_group()


def _compare(measured: float, predicted: float) -> list[str]:
    return [f"{measured * 1e3:.0f} ms", f"{predicted * 1e3:.0f} ms", f"{predicted / measured - 1:+.0%}"]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4], help="numbers of ranks, default: 2 4")
    parser.add_argument("--rounds", type=int, default=10, help="measured rounds, default: 10")
    parser.add_argument("--print", action="store_true", help="only print the table")
    args = parser.parse_args()
    logger.setLevel(logging.WARNING)
    if "RANK" in os.environ:
        check(args.rounds)
        return 0
    # of other processes: it slows steps down more than the short calls that the cost model is measured with
    load = f"Load average before the run: {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores."
    if min(args.ranks) < 2:
        parser.error(f"--ranks {min(args.ranks)}: collectives need at least 2 ranks.")
    rows = [load, "", HEADER]
    for ranks in args.ranks:
        torchrun = [sys.executable, "-m", "torch.distributed.run", f"--nproc-per-node={ranks}", "--standalone"]
        command = [*torchrun, __file__, "--rounds", str(args.rounds)]
        result = subprocess.run(command, stdout=subprocess.PIPE, text=True)
        if result.returncode:
            return result.returncode
        rows += [line for line in result.stdout.splitlines() if line.startswith("|")]
    print("\n".join(rows))
    if not args.print:
        before, _, rest = DOCUMENT.read_text().partition(START)
        DOCUMENT.write_text(before + START + "\n".join(rows) + "\n" + END + rest.partition(END)[2])
    return 0


if __name__ == "__main__":
    sys.exit(main())
