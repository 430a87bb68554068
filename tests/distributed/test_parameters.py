"""What data_parallel does with parameters of every kind; the oracle is the same model on one process."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import get_model_state_dict, set_model_state_dict
from torch.distributed.tensor import DTensor

from tests.tiny_llama import apply_tp, build_tiny_llama, get_full, train
from torchtitan_simplefsdp import MixedPrecisionPolicy, data_parallel, disable_gather

from .collective_counter import count_collectives
from .meshes import build_meshes, get_dp_rank_and_degree

MODES = ["replicate", "fully_shard", "hybrid_shard"]


class Odd(nn.Module):
    """Dims smaller than the group or not divisible by it, a bias, a scalar, an empty and a frozen parameter, a tie."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(7, 13)
        self.narrow = nn.Linear(13, 1)
        self.wide = nn.Linear(1, 13, bias=False)
        self.frozen = nn.Linear(13, 13)
        self.frozen.requires_grad_(False)
        self.tied = nn.Linear(7, 13)
        self.tied.weight = self.first.weight
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.empty = nn.Parameter(torch.empty(0, 3))
        self.register_buffer("offset", torch.arange(13.0))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.frozen(self.first(x)) * self.scale + self.tied(x) + self.offset
        return self.wide(self.narrow(h)) + self.empty.sum()


def build_odd() -> Odd:
    torch.manual_seed(0)
    return Odd()


def get_gradients_and_counts(mode: str, shard_dim: int) -> tuple:
    model, oracle = build_odd(), build_odd()
    data_parallel(model, build_meshes(mode)[0], mode=mode, shard_dim=shard_dim)
    rank, degree = get_dp_rank_and_degree()
    x = torch.randn(2 * degree, 7, generator=torch.Generator().manual_seed(1))
    with count_collectives() as forward:
        out = model(x[2 * rank : 2 * rank + 2])
    with count_collectives() as backward:
        out.square().sum().backward()
    assert torch.equal(out, oracle(x[2 * rank : 2 * rank + 2]))
    oracle(x).square().sum().backward()
    for (fqn, parameter), expected in zip(model.named_parameters(), oracle.parameters()):
        assert (parameter.grad is None) == (expected.grad is None), fqn
        if expected.grad is not None:
            # the sum over ranks has another order than the sum over the batch
            torch.testing.assert_close(parameter.grad.full_tensor(), expected.grad)
            assert parameter.grad.placements == parameter.placements
    assert model.tied._parameters["weight"] is model.first._parameters["weight"]
    assert torch.equal(model.offset, oracle.offset) and not isinstance(model.offset, DTensor)
    return dict(forward), dict(backward)


@pytest.mark.parametrize(
    "mode, expected_forward, expected_backward",
    [
        # one bucket, as the model has no blocks; sharded modes have another for the scalar, which is not sharded
        ("replicate", {}, {"all_reduce": 1}),
        ("fully_shard", {"all_gather": 1}, {"all_gather": 1, "reduce_scatter": 1, "all_reduce": 1}),
        # the scalar is all-reduced over both dims
        ("hybrid_shard", {"all_gather": 1}, {"all_gather": 1, "reduce_scatter": 1, "all_reduce": 3}),
    ],
)
def test_odd_parameters_compute_as_on_one_process(ranks, mode, expected_forward, expected_backward):
    counts = ranks.run(get_gradients_and_counts, 4, mode, 0)
    assert counts == [(expected_forward, expected_backward)] * 4


def check_shard_dim(shard_dim: int) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(7, 13, bias=False), nn.Linear(13, 5, bias=False))
    oracle = copy.deepcopy(model)
    data_parallel(model, build_meshes("fully_shard")[0], mode="fully_shard", shard_dim=shard_dim)
    rank, degree = get_dp_rank_and_degree()
    x = torch.randn(2 * degree, 7, generator=torch.Generator().manual_seed(1))
    model(x[2 * rank : 2 * rank + 2]).square().sum().backward()
    oracle(x).square().sum().backward()
    for parameter, expected in zip(model.parameters(), oracle.parameters()):
        assert parameter.placements[0].dim == shard_dim % 2
        assert torch.equal(parameter.full_tensor(), expected)
        torch.testing.assert_close(parameter.grad.full_tensor(), expected.grad)  # summation order


@pytest.mark.parametrize("shard_dim", [0, 1, -1])
def test_any_dim_can_be_sharded_unevenly(ranks, shard_dim):
    ranks.run(check_shard_dim, 4, shard_dim)


def train_uneven_vocab() -> tuple[tuple[int, ...], float]:
    dp_mesh, tp_mesh = build_meshes("fully_shard", tp=2)
    model = build_tiny_llama(vocab_size=250)
    apply_tp(model, tp_mesh)
    data_parallel(model, dp_mesh, mode="fully_shard")
    ours = train(model, *get_dp_rank_and_degree(tp=2))
    losses = torch.stack(ours["losses"])
    dist.all_reduce(losses, group=dp_mesh.get_group())
    oracle = train(build_tiny_llama(vocab_size=250), 0, 1)
    local_shape = tuple(model.output._parameters["weight"].to_local().shape)
    return local_shape, (losses - torch.stack(oracle["losses"])).abs().max().item()


def test_uneven_vocab_trains_under_fully_shard_and_tp_as_on_one_process(ranks):
    results = ranks.run(train_uneven_vocab, 4)
    # 250 rows: 125 per TP rank, of which FSDP stores 63 and 62
    assert [shape for shape, _ in results] == [(63, 32), (63, 32), (62, 32), (62, 32)]
    for _, difference in results:
        assert difference < 2e-5  # fp32 sums in another order under TP, over 20 steps of losses near 5


def check_reads() -> None:
    torch.manual_seed(0)
    linear = nn.Linear(6, 10)
    oracle = copy.deepcopy(linear)
    data_parallel(linear, build_meshes("fully_shard")[0], mode="fully_shard")
    assert torch.equal(linear.weight, oracle.weight) and torch.equal(linear.bias, oracle.bias)
    assert not isinstance(linear.weight, DTensor) and linear.weight.shape == (10, 6)
    with disable_gather():
        with disable_gather():
            assert isinstance(linear.weight, DTensor)
        assert linear.bias is linear._parameters["bias"]
    assert not isinstance(linear.bias, DTensor)


def test_weight_and_bias_of_one_module_are_read_as_themselves(ranks):
    ranks.run(check_reads, 2)


def check_two_models() -> None:
    torch.manual_seed(0)
    half, full = nn.Linear(4, 4), nn.Linear(4, 4)
    mesh = build_meshes("fully_shard")[0]
    data_parallel(half, mesh, mode="fully_shard", mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16))
    data_parallel(full, mesh, mode="replicate")
    assert type(half) is type(full)  # one class, the state is on the instances
    assert half.weight.dtype == torch.bfloat16 and full.weight.dtype == torch.float32
    assert half(torch.ones(1, 4, dtype=torch.bfloat16)).dtype == torch.bfloat16
    half(torch.ones(1, 4, dtype=torch.bfloat16)).sum().backward()
    assert half._parameters["weight"].grad.dtype == torch.float32


def test_two_models_with_other_modes_and_policies_live_in_one_process(ranks):
    ranks.run(check_two_models, 2)


def check_state_dict(mode: str) -> dict:
    model, plain = build_odd(), build_odd()
    data_parallel(model, build_meshes(mode)[0], mode=mode)
    with count_collectives() as counter:
        state = get_model_state_dict(model)
        set_model_state_dict(model, state)
        assert repr(model) == repr(plain).replace("Odd(", "SimpleFSDPOdd(").replace(" Linear(", " SimpleFSDPLinear(")
    assert list(model.state_dict()) == list(plain.state_dict())
    assert all(torch.equal(get_full(value), plain.state_dict()[fqn]) for fqn, value in state.items())
    with torch.no_grad():
        copied = copy.deepcopy(model)
    assert torch.equal(copied.narrow.weight, plain.narrow.weight)
    return dict(counter)


@pytest.mark.parametrize("mode", MODES)
def test_state_dict_and_repr_are_the_plain_ones_and_gather_no_parameter(ranks, mode):
    assert ranks.run(check_state_dict, 4, mode) == [{}] * 4
