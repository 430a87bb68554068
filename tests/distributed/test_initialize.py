"""Mesh-invariant init and gradient norm: one process is the oracle of every layout."""

from __future__ import annotations

import hashlib

import pytest
import torch
from torch import nn

from tests.tiny_llama import apply_tp, build_tiny_llama, get_full
from torchtitan_simplefsdp import data_parallel
from torchtitan_simplefsdp.core.grad_norm import clip_grad_norm_, get_total_norm
from torchtitan_simplefsdp.core.initialize import mesh_invariant_init

from .meshes import build_meshes

LAYOUTS = [  # world size, mode, tp
    (1, "replicate", 1),
    (2, "replicate", 1),
    (2, "fully_shard", 1),
    (2, "fully_shard", 2),
    (4, "replicate", 1),
    (4, "fully_shard", 1),
    (4, "hybrid_shard", 1),
    (4, "replicate", 2),
    (4, "fully_shard", 2),
    (8, "fully_shard", 1),
    (8, "hybrid_shard", 1),
    (8, "hybrid_shard", 2),
]


def init_weights(model: nn.Module, seed: int) -> None:
    with torch.no_grad(), mesh_invariant_init(model, seed):
        for index, module in enumerate(model.modules()):
            if isinstance(module, nn.RMSNorm):
                module.reset_parameters()
            elif isinstance(module, nn.Linear):
                nn.init.trunc_normal_(module.weight, std=0.02 * (index + 1))
            elif isinstance(module, nn.Embedding):
                nn.init.normal_(module.weight)


def build(mode: str, tp: int, vocab_size: int) -> nn.Module:
    """Build on meta, shard, materialize and initialize, as a trainer does."""
    with torch.device("meta"):
        model = build_tiny_llama(vocab_size)
    dp_mesh, tp_mesh = build_meshes(mode, tp)
    if tp_mesh is not None:
        apply_tp(model, tp_mesh)
    data_parallel(model, dp_mesh, mode=mode)
    model.to_empty(device="cpu")
    init_weights(model, seed=7)
    return model


def get_hash(tensors: list[torch.Tensor]) -> str:
    digest = hashlib.sha256()
    for tensor in tensors:
        digest.update(get_full(tensor).contiguous().numpy().tobytes())
    return digest.hexdigest()


def hash_weights(mode: str, tp: int) -> list[str]:
    return [get_hash(list(build(mode, tp, vocab_size).parameters())) for vocab_size in (256, 250)]


@pytest.mark.parametrize("world_size, mode, tp", LAYOUTS)
def test_initial_weights_are_those_of_one_plain_process(ranks, world_size, mode, tp):
    oracle = []
    for vocab_size in (256, 250):
        model = build_tiny_llama(vocab_size)
        init_weights(model, seed=7)
        oracle.append(get_hash(list(model.parameters())))
    assert ranks.run(hash_weights, world_size, mode, tp) == [oracle] * world_size


def clip(mode: str, tp: int, max_norm: float) -> tuple[float, str]:
    """Give every parameter a gradient drawn like a weight, so that its whole value is known; clip."""
    model, gradients = build(mode, tp, 250), build(mode, tp, 250)
    for parameter, gradient in zip(model.parameters(), gradients.parameters()):
        parameter.grad = gradient.detach()
    norm = clip_grad_norm_(model.parameters(), max_norm)
    return norm.item(), get_hash([p.grad for p in model.parameters()])


@pytest.mark.parametrize("world_size, mode, tp", LAYOUTS)
def test_gradient_norm_and_clipped_gradients_do_not_depend_on_the_layout(ranks, world_size, mode, tp):
    model = build_tiny_llama(250)
    init_weights(model, seed=7)
    for parameter in model.parameters():
        parameter.grad = parameter.detach().clone()
    expected_norm = torch.cat([p.grad.flatten().double() for p in model.parameters()]).norm().float().item()
    clip_grad_norm_(model.parameters(), max_norm=1.0)
    expected = (expected_norm, get_hash([p.grad for p in model.parameters()]))
    assert ranks.run(clip, world_size, mode, tp, 1.0) == [expected] * world_size


def get_nonfinite_norms() -> list[float]:
    norms = []
    for value in (float("inf"), float("nan")):
        model = build("fully_shard", 1, 250)
        for parameter in model.parameters():
            parameter.grad = torch.zeros_like(parameter)
        if torch.distributed.get_rank() == 1:  # one rank alone has it
            next(model.parameters()).grad.to_local()[0] = value
        norms.append(get_total_norm([p.grad for p in model.parameters()]).item())
    return norms


def test_inf_and_nan_on_one_rank_are_seen_by_all(ranks):
    for norms in ranks.run(get_nonfinite_norms, 2):
        assert norms[0] == float("inf") and norms[1] != norms[1]
