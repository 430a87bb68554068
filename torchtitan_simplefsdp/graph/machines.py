"""Machines: cost models of published hardware, and of two CPU cores.

Not here: this machine, which scripts/measure_cost_model.py measures.
"""

from __future__ import annotations

from .cost_model import KINDS, CollectiveCost, CostModel
from .trace import Compute

# NVLink 4: 900 GB/s per GPU is the sum of both directions (NVIDIA H100 data sheet), so a rank sends 450. 400 Gb/s of
# network per GPU are 50 GB/s. LL128, the protocol that NCCL prefers for rings of many ranks, carries 120 bytes of
# data in 128; of NVLink 85% of the rest is taken as attainable. Latencies are those of NCCL's own model of that
# protocol's ring (src/graph/tuning.cc): 10 us, and per step 1.9 us over NVLink, 4 us over the network.
_PAYLOAD = 120 / 128
_RING = CollectiveCost(
    latency_seconds=10e-6,
    intra_node_step_seconds=1.9e-6,
    inter_node_step_seconds=4e-6,
    intra_node_bytes_per_second=450e9 * _PAYLOAD * 0.85,
    inter_node_bytes_per_second=50e9 * _PAYLOAD,
)

# The machines of torchtitan's benchmarks/llama3_h100_202412_torchtitan.md: 500 W H100 with HBM2e, 2.4 TB/s, 8 per
# node. Matrix products attain 45% of the 989 TFLOP/s that the data sheet promises for dense bf16 at 700 W,
# elementwise ops 90% of the memory's bandwidth. The 45% are CALIBRATED to one row: Llama 3.1 8B, 8 GPUs, eager, 5,762
# tokens/s per GPU.
H100 = CostModel(
    name="H100, 8 per node, 500 W, HBM2e, 400 Gb/s per GPU",
    ranks_per_node=8,
    op_seconds=2e-6,  # a kernel that does nothing
    memory_bytes_per_second=0.9 * 2.4e12,
    # of float32 the data sheet promises 67 TFLOP/s; the same share of it is assumed, not calibrated
    flops_per_second={"bfloat16": 0.453 * 989e12, "float32": 0.453 * 67e12},
    collectives={kind: _RING for kind in KINDS},
)


def _build_loopback(latency_seconds: float, bytes_per_second: float) -> CollectiveCost:
    return CollectiveCost(latency_seconds, 0.0, 0.0, bytes_per_second, bytes_per_second)


# Measured by `scripts/measure_cost_model.py --rounds 15` on two cores of an AMD EPYC with torch 2.13, one thread per rank,
# and rounded. There is no network: ranks of other nodes are not known.
TWO_CORES = CostModel(
    name="two cores of a server CPU, gloo over loopback",
    ranks_per_node=2**20,
    op_seconds=1e-6,
    memory_bytes_per_second=120e9,
    flops_per_second={"float32": 110e9, "bfloat16": 130e9},
    collectives={
        "all_gather": _build_loopback(220e-6, 1.3e9),
        "reduce_scatter": _build_loopback(290e-6, 0.8e9),
        "all_reduce": _build_loopback(240e-6, 1.2e9),
        "all_to_all": _build_loopback(170e-6, 2.0e9),
    },
)

# The share of the memory traffic of elementwise ops that is left when a compiler fuses them. CALIBRATED to one row: the
# same, compiled, 6,667 tokens/s per GPU.
FUSED_TRAFFIC = 0.48


def get_compiled_seconds(cost: CostModel, op: Compute) -> float:
    """Return the time that an op adds to compiled code: matrix products as in eager, all else fused."""
    if op.flops:
        return cost.compute_seconds(op.flops, op.bytes, op.dtype)
    return FUSED_TRAFFIC * op.bytes / cost.memory_bytes_per_second
