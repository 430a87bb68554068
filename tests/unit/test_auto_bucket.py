"""Auto bucketing: its estimated step against theory's bytes and FLOPs, its choice against trying every plan."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.testing._internal.distributed.fake_pg import FakeStore

from tests.tiny_llama import apply_tp, build_tiny_llama
from torchtitan_simplefsdp import MixedPrecisionPolicy
from torchtitan_simplefsdp.core.bucket_plan import build_bucket_plan
from torchtitan_simplefsdp.graph.auto_bucket import build_estimated_step, choose_bucket_plan, MEMORY_FACTOR
from torchtitan_simplefsdp.graph.cost_model import CollectiveCost, CostModel, KINDS
from torchtitan_simplefsdp.graph.schedules import predict, Schedule

BF16 = MixedPrecisionPolicy(torch.bfloat16, torch.float32)
TOKENS = 64
DIMS = {
    "replicate": {"dp_replicate": 8},
    "fully_shard": {"fsdp": 8},
    "hybrid_shard": {"dp_replicate": 2, "fsdp": 4},
}


def build_cost(latency: float, bytes_per_second: float) -> CostModel:
    collective = CollectiveCost(latency, 0.0, 0.0, bytes_per_second, bytes_per_second)
    return CostModel("by hand", 8, 0.0, 1e9, {"float32": 1e9, "bfloat16": 2e9}, {kind: collective for kind in KINDS})


@pytest.fixture
def world():
    dist.init_process_group("fake", rank=0, world_size=8, store=FakeStore())
    yield
    dist.destroy_process_group()


def build_mesh(mode: str, **tp: int):
    dims = {name: size // (2 if tp and name != "dp_replicate" else 1) for name, size in DIMS[mode].items()}
    mesh = init_device_mesh("cpu", (*dims.values(), *tp.values()), mesh_dim_names=(*dims, *tp))
    return mesh[tuple(dims)], mesh


class Blocks(nn.Module):
    """Parameters of whole multiples of 8 rows, so that nothing is padded."""

    def __init__(self, blocks: int = 4, dim: int = 64) -> None:
        super().__init__()
        self.embeddings = nn.Embedding(256, dim)
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(dim, dim), nn.Linear(dim, dim)) for _ in range(blocks))


@pytest.mark.parametrize("mode", DIMS)
def test_the_estimated_step_has_the_bytes_and_flops_of_theory(world, mode):
    model, (mesh, _) = Blocks(), build_mesh(mode)
    step = build_estimated_step(model, mesh, mode, BF16, build_cost(0.0, 1.0), TOKENS)
    parameters = sum(p.numel() for p in model.parameters())
    matrices = sum(p.numel() for p in model.layers.parameters() if p.ndim == 2)
    assert sum(unit.seconds for unit in step.forward) == pytest.approx(2 * TOKENS * matrices / 2e9)
    assert sum(unit.seconds for unit in step.backward) == pytest.approx(4 * TOKENS * matrices / 2e9)
    wire_bytes = sum(c.wire_bytes for unit in (*step.forward, *step.backward) for c in unit.collectives)
    # gathered in 2 bytes each, reduced in 4
    theory = {"replicate": 2 * 4 * 7 / 8, "fully_shard": (2 + 4) * 7 / 8, "hybrid_shard": (2 + 4) * 3 / 4 + 2 * (4 / 4) / 2}
    assert wire_bytes == pytest.approx(parameters * theory[mode])


def test_tensor_parallel_parameters_count_as_their_parts(world):
    mesh, whole_mesh = build_mesh("fully_shard", tp=2)
    parts = build_tiny_llama()
    apply_tp(parts, whole_mesh["tp"])
    steps = [build_estimated_step(m, mesh, "fully_shard", BF16, build_cost(0.0, 1.0), TOKENS) for m in (build_tiny_llama(), parts)]
    matrices = [sum(u.seconds for u in step.forward) for step in steps]
    assert matrices[1] == pytest.approx(matrices[0] / 2)


@pytest.mark.parametrize("mode", DIMS)
@pytest.mark.parametrize("latency, bytes_per_second", [(0.0, 1e12), (1e-2, 1e12), (1e-3, 1e8), (0.0, 1e6)])
@pytest.mark.parametrize("reshard", [True, False])
def test_no_plan_is_predicted_to_be_faster_within_the_memory(world, mode, latency, bytes_per_second, reshard):
    # 4 MiB per block
    model, (mesh, _), cost = Blocks(dim=1024), build_mesh(mode), build_cost(latency, bytes_per_second)
    choice = choose_bucket_plan(model, mesh, mode, BF16, cost, TOKENS, reshard)
    step = build_estimated_step(model, mesh, mode, BF16, cost, TOKENS)
    reshards = reshard and mode != "replicate"
    tried = [predict(step, cost, Schedule(b, 1, True), reshards) for b in ("block", *(2**e for e in range(20, 35)))]
    within = [p for p in tried if p.timeline.peak_bytes <= MEMORY_FACTOR * tried[0].timeline.peak_bytes]
    assert choice.chosen.timeline.step_seconds == min(p.timeline.step_seconds for p in within)
    assert choice.block == tried[0]
    # the plan is what was simulated: as many buckets
    plan = build_bucket_plan(model, choice.bucket_plan, BF16.param_dtype)
    per_bucket = {"replicate": 1, "fully_shard": 2, "hybrid_shard": 3}[mode] + (1 if reshards else 0)
    assert choice.chosen.collectives == pytest.approx(len(plan) * per_bucket, abs=per_bucket)  # backward fills from the end


def test_latency_asks_for_larger_buckets_and_nothing_else_does(world):
    model, (mesh, _) = Blocks(blocks=16), build_mesh("replicate")
    choose = lambda cost: choose_bucket_plan(model, mesh, "replicate", BF16, cost, TOKENS)  # noqa: E731
    free, late = choose(build_cost(0.0, 1e15)), choose(build_cost(1.0, 1e15))
    assert free.bucket_plan == "block" and late.chosen.collectives < free.chosen.collectives
    assert late.bucket_plan == 2**20 / 4 * 2 / 2**20  # MiB of bfloat16 that are 1 MiB of gradients in float32


def test_a_dtype_without_a_rate_is_an_error(world):
    mesh, _ = build_mesh("fully_shard")
    policy = MixedPrecisionPolicy(torch.float16, torch.float32)
    with pytest.raises(ValueError, match="no FLOP rate for float16; it has float32, bfloat16"):
        choose_bucket_plan(Blocks(), mesh, "fully_shard", policy, build_cost(0.0, 1.0), TOKENS)
