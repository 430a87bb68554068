"""Measure: the cost model of the machine that the ranks of a process group run on.

All ranks do everything at the same time, because ranks on one machine share its memory. Each number is a median;
latency and bandwidth of a collective are a line through its times over sizes, fitted with relative errors, so that
small sizes count as much as large ones.

Not here: the command and the file (scripts/measure_cost_model.py).
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist

from torchtitan_simplefsdp.core import compat

from .cost_model import KINDS, CollectiveCost, CostModel, get_wire_bytes


def measure_cost_model(device: torch.device, ranks_per_node: int, rounds: int, most_bytes: int) -> CostModel:
    """Measure on all ranks of the default group; each must call this and gets numbers of its own: take those of rank 0.

    Args:
        device: this rank's.
        ranks_per_node: ranks that share a node.
        rounds: repetitions of each measurement.
        most_bytes: largest tensor of a collective.
    """
    ranks, nodes = dist.get_world_size(), dist.get_world_size() // ranks_per_node
    sizes = [size for size in (2**exponent for exponent in range(14, 40, 2)) if size <= most_bytes]
    node_group, _ = dist.new_subgroups(ranks_per_node)
    costs = {}
    for kind in KINDS:
        latency, bandwidth = _measure_collective(kind, node_group, device, sizes, rounds)
        all_latency, all_bandwidth = latency, bandwidth
        if nodes > 1:
            all_latency, all_bandwidth = _measure_collective(kind, dist.group.WORLD, device, sizes, rounds)
        costs[kind] = CollectiveCost(
            latency_seconds=latency,
            intra_node_step_seconds=0.0,
            inter_node_step_seconds=max(0.0, (all_latency - latency) / (nodes - 1)) if nodes > 1 else 0.0,
            intra_node_bytes_per_second=bandwidth,
            inter_node_bytes_per_second=all_bandwidth / ranks_per_node if nodes > 1 else bandwidth,
        )
    network = "" if nodes > 1 else "; one node: its network was not measured and has the numbers of the node"
    return CostModel(
        name=f"measured on {ranks} {dist.get_backend()} ranks, {ranks_per_node} per node{network}",
        ranks_per_node=ranks_per_node,
        op_seconds=_measure_op(device, rounds),
        memory_bytes_per_second=_measure_memory(device, rounds),
        flops_per_second={name: _measure_flops(device, rounds, name) for name in ("float32", "bfloat16")},
        collectives=costs,
    )


def fit_line(wire_bytes: Sequence[float], seconds: Sequence[float]) -> tuple[float, float]:
    """Return latency (seconds, not below 0) and bandwidth (bytes/s) of the line with the least squared relative errors.

    Raises:
        ValueError: fewer than two sizes, or times that do not grow with size.
    """
    if len(set(wire_bytes)) < 2:
        raise ValueError(f"fit_line: a line needs two sizes, got {sorted(set(wire_bytes))}. Allow larger tensors.")
    x, t = (torch.tensor(values, dtype=torch.float64) for values in (wire_bytes, seconds))
    rows = torch.stack([1 / t, x / t], dim=1)  # latency / t + slope * x / t = 1
    latency, slope = torch.linalg.lstsq(rows, torch.ones(len(t), 1, dtype=torch.float64)).solution.flatten().tolist()
    if latency < 0:  # then the best line that starts at 0
        latency, slope = 0.0, ((x / t).sum() / (x / t).square().sum()).item()
    if slope <= 0:
        raise ValueError(
            f"fit_line: times {list(seconds)} do not grow with bytes {list(wire_bytes)}. Measure on a quiet machine."
        )
    return latency, 1 / slope


def _measure_collective(
    kind: str, group: dist.ProcessGroup, device: torch.device, sizes: list[int], rounds: int
) -> tuple[float, float]:
    ranks, name = group.size(), group.group_name
    wire_bytes, seconds = [], []
    for size in sizes:
        elements = -(-size // 4 // ranks) * ranks
        tensor = torch.zeros(elements, device=device)
        calls: dict[str, Callable] = {
            "all_gather": lambda: compat.all_gather(tensor[: elements // ranks], ranks, name),
            "reduce_scatter": lambda: compat.reduce_scatter(tensor, ranks, name),
            "all_reduce": lambda: compat.all_reduce(tensor, name),
            "all_to_all": lambda: compat.all_to_all(tensor.view(ranks, -1), ranks, name),
        }
        wire_bytes.append(get_wire_bytes(kind, tensor.nbytes, ranks))
        seconds.append(_time(lambda: compat.wait(calls[kind]()), device, rounds))
    return fit_line(wire_bytes, seconds)


def _measure_op(device: torch.device, rounds: int) -> float:
    tensor, repetitions = torch.zeros(8, device=device), 200

    def run() -> None:
        for _ in range(repetitions):
            tensor + tensor

    return _time(run, device, rounds) / repetitions


def _measure_memory(device: torch.device, rounds: int) -> float:
    # a GPU: more than its caches hold; a CPU: an activation, whose memory comes anew from the system, as in a step
    tensor = torch.zeros(2**28 if device.type == "cuda" else 2**20, device=device)
    return 3 * tensor.nbytes / _time(lambda: tensor + tensor, device, rounds)


def _measure_flops(device: torch.device, rounds: int, dtype: str) -> float:
    on_cpu = {"float32": 512, "bfloat16": 128}  # without instructions for it bfloat16 is hundreds of times slower
    size = 8192 if device.type == "cuda" else on_cpu[dtype]
    matrix = torch.ones(size, size, device=device, dtype=getattr(torch, dtype))
    return 2 * size**3 / _time(lambda: matrix @ matrix, device, rounds)


def _time(call: Callable, device: torch.device, rounds: int) -> float:
    """Return the median time of a call; the first two warm up."""
    seconds = []
    for _ in range(rounds + 2):
        dist.barrier()
        started = time.perf_counter()
        call()
        if device.type != "cpu":
            torch.accelerator.synchronize()
        seconds.append(time.perf_counter() - started)
    return statistics.median(seconds[2:])
