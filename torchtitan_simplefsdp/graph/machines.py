"""Machines: cost models of published hardware.

Not here: this machine, which scripts/measure_cost_model.py measures.
"""

from __future__ import annotations

from .cost_model import KINDS, CollectiveCost, CostModel

# NVLink 4: 900 GB/s per GPU is the sum of both directions (H100 data sheet), 450 GB/s is what a rank can send. 400 Gb/s of
# InfiniBand or RoCE per GPU are 50 GB/s. LL128, the protocol that NCCL takes for rings of many ranks, carries 120 bytes of
# data in 128; that is the fraction of both taken here. Latencies are those of NCCL's own model for rings of that
# protocol (src/graph/tuning.cc): 10 us, and per step 1.9 us over NVLink, 4 us over the network.
_PAYLOAD = 120 / 128
_RING = CollectiveCost(
    latency_seconds=10e-6,
    intra_node_step_seconds=1.9e-6,
    inter_node_step_seconds=4e-6,
    intra_node_bytes_per_second=450e9 * _PAYLOAD * 0.85,
    inter_node_bytes_per_second=50e9 * _PAYLOAD,
)
