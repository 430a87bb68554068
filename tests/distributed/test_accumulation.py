"""Gradient accumulation: one reduction over replicas per step; the oracles are one big batch and FSDP2."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy as FSDP2MixedPrecisionPolicy
from torch.distributed.fsdp import fully_shard
from torch.utils.checkpoint import checkpoint

from torchtitan_simplefsdp import MixedPrecisionPolicy, accumulate_gradients, data_parallel

from .collective_counter import count_collectives
from .fsdp2 import sum_gradients
from .meshes import build_meshes, get_dp_rank_and_degree

MODES = ["replicate", "fully_shard", "hybrid_shard"]
MICROBATCHES = 4


class Model(nn.Module):
    """A tie, a bias, an uneven dim, a frozen and an unused parameter, and a part that is checkpointed."""

    def __init__(self, tied: bool = True) -> None:
        super().__init__()
        self.first, self.second, self.third = nn.Linear(8, 9), nn.Linear(9, 8), nn.Linear(8, 9, bias=False)
        if tied:
            self.third.weight = self.first.weight
        self.frozen, self.unused = nn.Linear(9, 9), nn.Linear(3, 3)
        self.frozen.requires_grad_(False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = checkpoint(lambda x: self.second(self.first(x).tanh()), x, use_reentrant=False)
        return self.frozen(self.third(h))


def build(
    mode: str, reduction: str = "native", policy: MixedPrecisionPolicy | None = None, tied: bool = True
) -> Model:
    torch.manual_seed(0)
    return data_parallel(Model(tied), build_meshes(mode)[0], mode=mode, reduction=reduction, mp_policy=policy)


def get_microbatches(samples: int = 2) -> list[torch.Tensor]:
    """Return this rank's microbatches, the same data on every layout of the same number of ranks."""
    rank, degree = get_dp_rank_and_degree()
    x = torch.randn(MICROBATCHES, degree, samples, 8, generator=torch.Generator().manual_seed(1))
    return list(x[:, rank])


def get_gradients(model: nn.Module) -> list[torch.Tensor | None]:
    return [None if p.grad is None else p.grad.full_tensor().clone() for p in model.parameters()]


def compare_with_one_batch(mode: str, reduction: str) -> tuple[dict, dict]:
    accumulated, one_batch = build(mode, reduction), build(mode, reduction)
    with count_collectives() as inside, accumulate_gradients(accumulated):
        for x in get_microbatches():
            accumulated(x).square().sum().backward()
        before = dict(inside)
    one_batch(torch.cat(get_microbatches())).square().sum().backward()
    for actual, expected in zip(get_gradients(accumulated), get_gradients(one_batch), strict=True):
        assert (actual is None) == (expected is None)
        if expected is not None:
            torch.testing.assert_close(actual, expected)  # fp32 sums over microbatches in another order
    return before, {name: count - before.get(name, 0) for name, count in inside.items() if count > before.get(name, 0)}


# the model has no blocks, so one bucket: per microbatch it is gathered in forward and again in backward (for the frozen
# weight first, which the recomputed forward then finds), and reduced once, the tie's two uses added before
GATHERS, REDUCTIONS, BUCKETS = 2 * MICROBATCHES, MICROBATCHES, 1


@pytest.mark.parametrize(
    "mode, reduction, inside, at_end",
    [
        ("replicate", "native", {}, {"all_reduce": BUCKETS}),
        ("replicate", "exact", {}, {"all_to_all": BUCKETS, "all_gather": BUCKETS}),
        ("fully_shard", "native", {"all_gather": GATHERS, "reduce_scatter": REDUCTIONS}, {}),
        ("fully_shard", "exact", {"all_gather": GATHERS, "all_to_all": REDUCTIONS}, {}),
        ("hybrid_shard", "native", {"all_gather": GATHERS, "reduce_scatter": REDUCTIONS}, {"all_reduce": BUCKETS}),
        (
            "hybrid_shard",
            "exact",
            {"all_gather": GATHERS, "all_to_all": REDUCTIONS},
            {"all_to_all": BUCKETS, "all_gather": BUCKETS},
        ),
    ],
)
def test_four_microbatches_equal_one_batch_with_one_sum_over_replicas(ranks, mode, reduction, inside, at_end):
    assert ranks.run(compare_with_one_batch, 4, mode, reduction) == [(inside, at_end)] * 4


def compare_modes() -> bool:
    """Reduce in every microbatch: with the exact reduction all modes then give the same bits."""
    gradients = []
    for mode in MODES:
        model = build(mode, "exact", MixedPrecisionPolicy(torch.bfloat16, torch.float32))
        for x in get_microbatches():
            model(x.bfloat16()).square().sum().backward()
        gradients.append([g for g in get_gradients(model) if g is not None])
    return all(all(map(torch.equal, gradients[0], others)) for others in gradients[1:])


def test_reducing_every_microbatch_gives_the_same_bits_in_all_modes(ranks):
    assert ranks.run(compare_modes, 4) == [True] * 4


def compare_with_fsdp2(policy: tuple) -> bool:
    """hybrid_shard against FSDP2 that keeps its all_reduce for the last microbatch. Without the tie: FSDP2 adds the
    gradients of its two uses first, here each is reduced."""
    ours = build("hybrid_shard", tied=False, policy=MixedPrecisionPolicy(*policy))
    torch.manual_seed(0)
    peer = Model(tied=False)
    fully_shard(peer, mesh=build_meshes("hybrid_shard")[0], mp_policy=FSDP2MixedPrecisionPolicy(*policy))
    sum_gradients(peer)
    with accumulate_gradients(ours):
        for index, x in enumerate(get_microbatches()):
            ours(x.to(policy[0])).float().square().sum().backward()
            peer.set_requires_all_reduce(index == MICROBATCHES - 1)
            peer(x).float().square().sum().backward()
    pairs = [(a, b) for a, b in zip(get_gradients(ours), get_gradients(peer), strict=True) if a is not None]
    return bool(pairs) and all(torch.equal(a, b) for a, b in pairs)


@pytest.mark.parametrize("policy", [(torch.float32, torch.float32), (torch.bfloat16, torch.float32)], ids=str)
def test_hybrid_shard_accumulates_bitwise_like_fsdp2_without_its_all_reduce(ranks, policy):
    assert ranks.run(compare_with_fsdp2, 4, policy) == [True] * 4


def count_with_narrow_storage() -> dict:
    torch.manual_seed(0)
    model = nn.Linear(8, 8, bias=False, dtype=torch.bfloat16)
    policy = MixedPrecisionPolicy(reduce_dtype=torch.float32)
    data_parallel(model, build_meshes("replicate")[0], mode="replicate", mp_policy=policy)
    with count_collectives() as counter, accumulate_gradients(model):
        for x in get_microbatches():
            model(x.bfloat16()).sum().backward()
    return dict(counter)


def test_gradients_that_would_be_rounded_while_waiting_are_reduced_in_every_microbatch(ranks):
    assert ranks.run(count_with_narrow_storage, 2) == [{"all_reduce": MICROBATCHES}] * 2


def check_contexts() -> None:
    model, other = build("replicate", tied=False), build("replicate", tied=False)
    x = get_microbatches()[0]
    model(x).square().sum().backward()
    once = get_gradients(model)
    with accumulate_gradients(model):  # on top of complete gradients
        model(x).square().sum().backward()
        with count_collectives() as counter:  # another model is not affected
            other(x).square().sum().backward()
        assert counter["all_reduce"] == BUCKETS
    twice = get_gradients(model)
    assert all(a is None or torch.equal(2 * a, b) for a, b in zip(once, twice))
    with pytest.raises(RuntimeError, match="in the middle"), accumulate_gradients(model):
        model(x).square().sum().backward()
        raise RuntimeError("in the middle")
    assert all(a is None or torch.equal(a, b) for a, b in zip(twice, get_gradients(model)))
    thawed, thawed_before = build("replicate", tied=False), build("replicate", tied=False)
    thawed_before.frozen.requires_grad_(True)
    with accumulate_gradients(thawed):
        thawed.frozen.requires_grad_(True)
        thawed(x).square().sum().backward()
    thawed_before(x).square().sum().backward()
    pairs = zip(get_gradients(thawed), get_gradients(thawed_before), strict=True)
    assert all(a is None and b is None or torch.equal(a, b) for a, b in pairs)
    sharded = build("fully_shard")
    with pytest.raises(RuntimeError, match="in the middle"), accumulate_gradients(sharded):
        sharded(x).square().sum().backward()
        raise RuntimeError("in the middle")
    assert all(p.grad is None for p in sharded.parameters())
    with pytest.raises(ValueError, match="accumulates already"), accumulate_gradients(model), accumulate_gradients(model):
        pass
    with pytest.raises(ValueError, match="has no SimpleFSDP"), accumulate_gradients(nn.Linear(2, 2)):
        pass
    with count_collectives() as counter:
        model(x).square().sum().backward()
    assert counter["all_reduce"] == BUCKETS


def test_a_context_adds_to_gradients_and_leaves_nothing_behind(ranks):
    ranks.run(check_contexts, 2)


def compile_and_count() -> tuple[dict, bool]:
    eager, model = build("replicate"), build("replicate")
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    for forward, owner in ((eager, eager), (compiled, model)):
        with accumulate_gradients(owner):
            for x in get_microbatches():
                forward(x).square().sum().backward()
    gradients = [[g for g in get_gradients(m) if g is not None] for m in (eager, model)]
    return torch._dynamo.utils.counters["stats"]["unique_graphs"], all(map(torch.equal, *gradients))


def test_accumulation_under_compile_needs_one_graph_and_gives_the_same_bits(ranks):
    assert ranks.run(compile_and_count, 2) == [(1, True)] * 2
