"""The exact reduction: one sum whatever the mode, the mesh and the order of its ranks. Oracle: that sum on one process."""

from __future__ import annotations

from functools import cache

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from tests.tiny_llama import apply_tp, build_tiny_llama, train
from torchtitan_simplefsdp import MixedPrecisionPolicy, data_parallel

from .collective_counter import count_collectives
from .meshes import build_meshes, get_dp_rank_and_degree

# name: mode, ranks in the order of the mesh; every mesh has all ranks of the world
MESHES = {
    4: {
        "replicate": ("replicate", [0, 1, 2, 3]),
        "replicate, shuffled": ("replicate", [2, 0, 3, 1]),
        "fully_shard": ("fully_shard", [0, 1, 2, 3]),
        "hybrid 2x2": ("hybrid_shard", [[0, 1], [2, 3]]),
        "hybrid 2x2, transposed": ("hybrid_shard", [[0, 2], [1, 3]]),
        "hybrid 2x2, shuffled": ("hybrid_shard", [[1, 2], [0, 3]]),
        "hybrid 4x1": ("hybrid_shard", [[0], [1], [2], [3]]),
        "hybrid 1x4": ("hybrid_shard", [[0, 1, 2, 3]]),
    },
    6: {
        "replicate": ("replicate", [0, 1, 2, 3, 4, 5]),
        "fully_shard": ("fully_shard", [0, 1, 2, 3, 4, 5]),
        "hybrid 2x3": ("hybrid_shard", [[0, 1, 2], [3, 4, 5]]),
        "hybrid 3x2": ("hybrid_shard", [[0, 1], [2, 3], [4, 5]]),
        "hybrid 3x2, shuffled": ("hybrid_shard", [[3, 5], [0, 1], [2, 4]]),
    },
}
TRAINED = ("replicate", "fully_shard", "hybrid 2x2, shuffled", "hybrid 3x2")
SHAPES = {"even": (24, 3), "uneven": (25, 3), "fewer rows than ranks": (2, 5), "one row": (1, 7), "scalar": (), "empty": (0, 3)}
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float64": torch.float64}


@cache  # each mesh has process groups, see meshes.py
def build_mesh(world_size: int, name: str) -> DeviceMesh:
    mode, ranks = MESHES[world_size][name]
    dims = {"hybrid_shard": ("dp_replicate", "fsdp"), "replicate": ("dp_replicate",)}.get(mode, ("fsdp",))
    return DeviceMesh("cpu", ranks, mesh_dim_names=dims)


def draw_gradients(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """Return one gradient per rank, `[world size, *shape]`, of magnitudes so different that every order has other bits."""
    generator = torch.Generator().manual_seed(3)
    values = torch.randn(dist.get_world_size(), *shape, generator=generator, dtype=torch.float64)
    exponents = torch.randint(-12, 12, values.shape, generator=generator)
    return (values * 2.0**exponents).to(dtype)


def sum_in_pairs(gradients: torch.Tensor) -> torch.Tensor:
    """The definition, rank by rank: neighbours are added until one is left, in float32 at least."""
    terms = list(gradients if gradients.dtype == torch.float64 else gradients.float())
    while len(terms) > 1:
        pairs = [a + b for a, b in zip(terms[::2], terms[1::2])]
        terms = pairs + terms[len(pairs) * 2 :]
    return terms[0].to(gradients.dtype)


class Holder(nn.Module):
    def __init__(self, shape: tuple[int, ...]) -> None:
        super().__init__()
        self.parameter = nn.Parameter(torch.ones(shape, dtype=torch.float64))


def find_wrong_sums() -> list[tuple[str, ...]]:
    wrong, orders_that_differ = [], 0
    for name, (mode, _) in MESHES[dist.get_world_size()].items():
        for (shape_name, shape), (dtype_name, dtype) in [(s, d) for s in SHAPES.items() for d in DTYPES.items()]:
            gradients = draw_gradients(shape, dtype)
            model = data_parallel(
                Holder(shape),
                build_mesh(dist.get_world_size(), name),
                mode=mode,
                mp_policy=MixedPrecisionPolicy(dtype, dtype),
                reduction="exact",
            )
            model.parameter.backward(gradients[dist.get_rank()])
            expected = sum_in_pairs(gradients)
            (parameter,) = model.parameters()
            if not torch.equal(parameter.grad.full_tensor().to(dtype), expected):
                wrong.append((name, shape_name, dtype_name))
            orders_that_differ += not torch.equal(sum_in_pairs(gradients.flip(0).roll(1, 0)), expected)
    assert orders_that_differ  # another order would be noticed
    return wrong


@pytest.mark.parametrize("world_size", MESHES)
def test_every_mode_mesh_and_shape_gives_the_sum_of_one_process(ranks, world_size):
    assert ranks.run(find_wrong_sums, world_size) == [[]] * world_size


def find_differences(results: dict[str, dict[str, list[torch.Tensor]]]) -> list[str]:
    first, *others = results
    equal = {(name, kind): map(torch.equal, results[name][kind], results[first][kind]) for name in others for kind in results[name]}
    return [f"{name}: {kind}" for (name, kind), each in equal.items() if not all(each)]


def train_everywhere(policy: MixedPrecisionPolicy) -> list[str]:
    """Train the tiny Llama with an uneven vocabulary in every mode; return what differs from the first."""
    results = {}
    for name, (mode, _) in MESHES[dist.get_world_size()].items():
        if name not in TRAINED:
            continue
        model = build_tiny_llama(vocab_size=250)
        data_parallel(model, build_mesh(dist.get_world_size(), name), mode=mode, mp_policy=policy, reduction="exact")
        results[name] = train(model, dist.get_rank(), dist.get_world_size(), samples=12, steps=4)
    return find_differences(results)


@pytest.mark.parametrize("policy", [(None, None), (torch.bfloat16, None)], ids=["fp32", "bf16"])
@pytest.mark.parametrize("world_size", MESHES)
def test_all_modes_train_bitwise_alike(ranks, world_size, policy):
    assert ranks.run(train_everywhere, world_size, MixedPrecisionPolicy(*policy)) == [[]] * world_size


def train_with_tp() -> list[str]:
    results = {}
    for mode in ("replicate", "fully_shard", "hybrid_shard"):
        dp_mesh, tp_mesh = build_meshes(mode, tp=2)
        model = build_tiny_llama()
        apply_tp(model, tp_mesh)
        policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32)
        data_parallel(model, dp_mesh, mode=mode, mp_policy=policy, reduction="exact")
        results[mode] = train(model, *get_dp_rank_and_degree(tp=2), steps=3)
    return find_differences(results)


def test_all_modes_over_tp_train_bitwise_alike(ranks):
    assert ranks.run(train_with_tp, 8) == [[]] * 8


def count_exact(mode: str) -> tuple[dict, dict]:
    model = nn.Linear(8, 8, bias=False)
    data_parallel(model, build_meshes(mode)[0], mode=mode, reduction="exact")
    with count_collectives() as forward:
        out = model(torch.ones(1, 8))
    with count_collectives() as backward:
        out.sum().backward()
    return dict(forward), dict(backward)


@pytest.mark.parametrize(
    "mode, expected",
    [
        ("replicate", ({}, {"all_to_all": 1, "all_gather": 1})),
        ("fully_shard", ({"all_gather": 1}, {"all_to_all": 1})),
        ("hybrid_shard", ({"all_gather": 1}, {"all_to_all": 1, "all_gather": 1})),
    ],
)
def test_the_exact_reduction_moves_each_piece_once(ranks, mode, expected):
    assert ranks.run(count_exact, 4, mode) == [expected] * 4


def build_unordered_mesh() -> str:
    with pytest.raises(ValueError) as error:
        data_parallel(nn.Linear(4, 4), DeviceMesh("cpu", [1, 0], mesh_dim_names=("fsdp",)), mode="fully_shard")
    return str(error.value)


def test_a_shard_dim_whose_ranks_do_not_ascend_is_refused(ranks):
    for message in ranks.run(build_unordered_mesh, 2):
        assert message.startswith("data_parallel: mode 'fully_shard' got a mesh whose ranks do not ascend along its shard dim: [1, 0].")
