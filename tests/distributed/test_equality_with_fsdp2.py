"""20 AdamW steps of a tiny Llama: SimpleFSDP against FSDP2, bit for bit."""

from __future__ import annotations

import pytest
import torch
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.fsdp import MixedPrecisionPolicy as FSDP2MixedPrecisionPolicy

from tests.tiny_llama import apply_tp, build_tiny_llama, train
from torchtitan_simplefsdp import MixedPrecisionPolicy, data_parallel

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
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)  # gloo has no premul-sum
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
