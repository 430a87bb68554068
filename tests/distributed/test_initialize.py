"""Mesh-invariant init and gradient norm: one process is the oracle of every layout."""

from __future__ import annotations

import hashlib
import weakref
from itertools import accumulate

import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

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


def get_nonfinite_norms(as_stages: bool) -> list[float]:
    norms = []
    groups = [torch.distributed.group.WORLD] if as_stages else []
    for value in (float("inf"), float("nan")):
        model = build_tiny_llama(250) if as_stages else build("fully_shard", 1, 250)
        for parameter in model.parameters():
            parameter.grad = torch.ones_like(parameter)
        if torch.distributed.get_rank() == 1:  # one rank alone has it
            grad = next(model.parameters()).grad
            (grad.to_local() if isinstance(grad, DTensor) else grad)[0] = value
        norms.append(clip_grad_norm_(model.parameters(), 1.0, groups).item())
        assert all(get_full(p.grad).isnan().all() or value == float("inf") for p in model.parameters())
    return norms


@pytest.mark.parametrize("as_stages", [False, True], ids=["of a shard", "of a pipeline stage"])
def test_inf_and_nan_on_one_rank_are_seen_by_all(ranks, as_stages):
    for norms in ranks.run(get_nonfinite_norms, 2, as_stages):
        assert norms[0] == float("inf") and norms[1] != norms[1]


def draw_gradients() -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(5)
    return [torch.randn(p.shape, generator=generator) * 10.0**-i for i, p in enumerate(build_tiny_llama().parameters())]


def get_norm_of_stages() -> float:
    """Each rank has the gradients of one pipeline stage; the first stage has one parameter only."""
    gradients = draw_gradients()
    mine = gradients[:1] if torch.distributed.get_rank() == 0 else gradients[1:]
    return get_total_norm(mine, [torch.distributed.group.WORLD]).item()


def test_the_norm_over_pipeline_stages_has_the_bits_of_one_process(ranks):
    assert ranks.run(get_norm_of_stages, 2) == [get_total_norm(draw_gradients()).item()] * 2


def get_norm_of_layout(mode: str) -> float:
    model = build(mode, 1, 256)
    gradients = [g * 2.0 ** (i % 24 - 12) for i, g in enumerate(draw_gradients())]
    for parameter, full in zip(model.parameters(), gradients, strict=True):
        shard = distribute_tensor(full, parameter.device_mesh, parameter.placements, src_data_rank=None)
        parameter.grad = shard
    return get_total_norm([p.grad for p in model.parameters()]).item()


@pytest.mark.parametrize("world_size, mode", [(world, mode) for world, mode, tp in LAYOUTS if tp == 1 and world > 1])
def test_the_norm_has_all_64_bits_of_one_process(ranks, world_size, mode):
    gradients = [g * 2.0 ** (i % 24 - 12) for i, g in enumerate(draw_gradients())]
    assert ranks.run(get_norm_of_layout, world_size, mode) == [get_total_norm(gradients).item()] * world_size
    squares = torch.cat([g.flatten().double() for g in gradients]).square().tolist()
    # added one by one, as torch.sum's own order depends on the CPU's vector width
    in_fp64 = {list(accumulate(order))[-1] for order in (squares, squares[::-1], sorted(squares))}
    assert len(in_fp64) > 1  # in another order plain fp64 has other bits


def clip_mixed() -> tuple[float, list[float]]:
    """A plain gradient, one on the mesh of all ranks and one on a mesh of half of them, all ones."""
    whole, half = build_meshes("fully_shard")[0], build_meshes("fully_shard", tp=2)[0]
    model = nn.ModuleList(nn.Linear(8, 8, bias=False) for _ in range(3))
    data_parallel(model[1], whole, mode="fully_shard")
    data_parallel(model[2], half, mode="fully_shard")
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    norm = clip_grad_norm_(model.parameters(), 1.0).item()
    return norm, [get_full(p.grad).unique().item() for p in model.parameters()]


def test_gradients_of_several_meshes_and_plain_ones_are_clipped_together(ranks):
    norm = (3 * 64) ** 0.5
    for actual, values in ranks.run(clip_mixed, 4):
        assert actual == pytest.approx(norm, rel=1e-7)
        assert values == pytest.approx([1 / norm] * 3, rel=1e-6) and len(set(values)) == 1


class LiveBytes(TorchDispatchMode):
    """The largest number of bytes alive at once in storages that ops created inside."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.alive, self.largest = 0, 0
        self._known = {p.to_local().untyped_storage().data_ptr() for p in model.parameters()}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(out):
            if isinstance(tensor, torch.Tensor) and not isinstance(tensor, DTensor):
                storage = tensor.untyped_storage()
                if storage.data_ptr() not in self._known:
                    self._known.add(storage.data_ptr())
                    self.alive += storage.nbytes()
                    self.largest = max(self.largest, self.alive)
                    weakref.finalize(storage, self._free, storage.data_ptr(), storage.nbytes())
        return out

    def _free(self, address: int, size: int) -> None:
        self._known.discard(address)
        self.alive -= size


def measure_init(mode: str) -> tuple[int, int]:
    """Return bytes alive at the peak of an init, and of the largest parameter."""
    dp_mesh, _ = build_meshes(mode)
    with torch.device("meta"):
        model = nn.Sequential(*(nn.Linear(64, 128 * (i + 1), bias=False) for i in range(4)))
    data_parallel(model, dp_mesh, mode=mode)
    model.to_empty(device="cpu")
    with torch.no_grad(), LiveBytes(model) as live, mesh_invariant_init(model, 7):
        for module in model:
            nn.init.trunc_normal_(module.weight)
    return live.largest, 64 * 512 * 4


@pytest.mark.parametrize("mode", ["replicate", "fully_shard"])
def test_init_needs_no_more_extra_memory_than_one_parameter_and_its_shard(ranks, mode):
    for largest, parameter in ranks.run(measure_init, 2, mode):
        assert parameter <= largest <= 2 * parameter
