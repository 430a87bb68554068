"""20 AdamW steps of a tiny Llama: SimpleFSDP against FSDP2, bit for bit."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.fsdp import MixedPrecisionPolicy as FSDP2MixedPrecisionPolicy

from tests.tiny_llama import apply_tp, build_tiny_llama, train
from torchtitan_simplefsdp import MixedPrecisionPolicy, data_parallel

from .fsdp2 import sum_gradients
from .meshes import build_meshes, get_dp_rank_and_degree

POLICIES = {"fp32": (None, None), "bf16/fp32": (torch.bfloat16, torch.float32)}


def train_simple_fsdp(
    mode: str, tp: int, policy: str, compiled: bool = False, reduction: str = "native"
) -> dict[str, list]:
    dp_mesh, tp_mesh = build_meshes(mode, tp)
    model = build_tiny_llama()
    if tp_mesh is not None:
        apply_tp(model, tp_mesh)
    data_parallel(model, dp_mesh, mode=mode, mp_policy=MixedPrecisionPolicy(*POLICIES[policy]), reduction=reduction)
    forward = torch.compile(model, backend="aot_eager", fullgraph=True) if compiled else model
    return train(model, *get_dp_rank_and_degree(tp), forward=forward)


def train_fsdp2(mode: str, tp: int, policy: str) -> dict[str, list]:
    dp_mesh, tp_mesh = build_meshes(mode, tp)
    model = build_tiny_llama()
    if tp_mesh is not None:
        apply_tp(model, tp_mesh)
    mp_policy = FSDP2MixedPrecisionPolicy(*POLICIES[policy])
    for part in (model.tok_embeddings, *model.layers, [model.norm, model.output], model):
        fully_shard(part, mesh=dp_mesh, mp_policy=mp_policy)
    sum_gradients(model)
    return train(model, *get_dp_rank_and_degree(tp))


def compare(pairs: list, tp: int, policy: str) -> list[dict[str, bool]]:
    """Train each (train function, mode, ...) once on this rank; return per pair whether every bit agrees."""
    results = {run: run[0](run[1], tp, policy, *run[2:]) for run in dict.fromkeys(sum(pairs, ()))}
    for result in results.values():
        assert result["losses"][-1] < result["losses"][0]
    return [
        {kind: all(map(torch.equal, results[a][kind], results[b][kind])) for kind in results[a]} for a, b in pairs
    ]


ALL_EQUAL = {"losses": True, "gradients": True, "parameters": True}
FULLY_SHARD, REPLICATE, HYBRID = ((train_simple_fsdp, m) for m in ("fully_shard", "replicate", "hybrid_shard"))


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("world_size, tp", [(2, 1), (4, 1), (8, 1), (4, 2), (8, 2)])
def test_fully_shard_and_replicate_train_bitwise_like_fsdp2(ranks, world_size, tp, policy):
    pairs = [(FULLY_SHARD, (train_fsdp2, "fully_shard")), (REPLICATE, FULLY_SHARD)]
    assert ranks.run(compare, world_size, pairs, tp, policy) == [[ALL_EQUAL] * 2] * world_size


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("world_size, tp", [(4, 1), (8, 2)])
def test_hybrid_shard_trains_bitwise_like_fsdp2(ranks, world_size, tp, policy):
    pairs = [(HYBRID, (train_fsdp2, "hybrid_shard"))]
    assert ranks.run(compare, world_size, pairs, tp, policy) == [[ALL_EQUAL]] * world_size


@pytest.mark.parametrize(
    "mode, reduction",
    [("replicate", "native"), ("fully_shard", "native"), ("hybrid_shard", "native"), ("hybrid_shard", "exact")],
)
def test_one_compiled_graph_trains_bitwise_like_eager(ranks, mode, reduction):
    pairs = [((train_simple_fsdp, mode, True, reduction), (train_simple_fsdp, mode, False, reduction))]
    assert ranks.run(compare, 4, pairs, 1, "bf16/fp32") == [[ALL_EQUAL]] * 4


class WithBuffers(nn.Module):
    """A norm, statistics in a buffer that training changes, and a buffer that takes part in the computation."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm = nn.Linear(8, 16), nn.LayerNorm(16)
        self.register_buffer("mean", torch.zeros(16))
        self.register_buffer("scale", torch.linspace(0.5, 1.5, 16))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.norm(self.first(x))
        self.mean += h.detach().mean(0)
        return (h - self.mean) * self.scale


def compare_buffers() -> dict[str, bool]:
    results, mesh = [], build_meshes("fully_shard")[0]
    for apply in (data_parallel, fully_shard):
        torch.manual_seed(0)
        model = WithBuffers()
        policies = {data_parallel: MixedPrecisionPolicy, fully_shard: FSDP2MixedPrecisionPolicy}
        kwargs = {"mode": "fully_shard", "device_mesh": mesh} if apply is data_parallel else {"mesh": mesh}
        apply(model, mp_policy=policies[apply](*POLICIES["bf16/fp32"]), **kwargs)
        sum_gradients(model)  # does nothing to ours
        x = torch.randn(2, 4, 8, generator=torch.Generator().manual_seed(1))[get_dp_rank_and_degree()[0]]
        out = model(x.bfloat16())  # FSDP2 casts inputs, data_parallel does not
        out.square().sum().backward()
        gradients = [p.grad.full_tensor() for p in model.parameters()]
        results.append({"out": [out], "gradients": gradients, "buffers": list(model.buffers())})
    ours, fsdp2 = results
    return {kind: all(a.dtype == b.dtype and torch.equal(a, b) for a, b in zip(ours[kind], fsdp2[kind])) for kind in ours}


def test_norms_and_buffers_are_treated_as_fsdp2_treats_them(ranks):
    assert ranks.run(compare_buffers, 2) == [{"out": True, "gradients": True, "buffers": True}] * 2
