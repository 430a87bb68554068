"""Buckets in eager mode: the same bits as one collective per parameter, as many collectives as theory says, in its order.

The oracle is the model with a collective per parameter and without resharding, which other tests compare with FSDP2 and
one process.
"""

from __future__ import annotations

import copy
import gc
from contextlib import contextmanager
from functools import partial
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

from tests.tiny_llama import LAYERS, apply_tp, build_tiny_llama, get_batch, train
from torchtitan_simplefsdp import MixedPrecisionPolicy, accumulate_gradients, data_parallel
from torchtitan_simplefsdp.core import bucket as bucket_module
from torchtitan_simplefsdp.core.parametrize import get_buckets

from .collective_counter import count_collectives
from .meshes import build_meshes, get_dp_rank_and_degree

PARAMETERS = 3 + 9 * LAYERS  # of the tiny Llama
BLOCKS = LAYERS + 2  # buckets of the plan 'block': the embedding, the blocks, final norm and output
PLANS = {
    "parameter": None,
    "block": "block",
    "MiB": 0.02,
    "listed": [["layers.1", "tok_embeddings"], ["output.weight", "layers.0.attention"]],
}


def build(mode: str, plan: str, reshard: bool | None, tp: int = 1, checkpointed: str = "", **options) -> nn.Module:
    dp_mesh, tp_mesh = build_meshes(mode, tp)
    model = build_tiny_llama()
    if tp_mesh is not None:
        apply_tp(model, tp_mesh)
    if checkpointed:
        for name, layer in model.layers.named_children():
            model.layers[int(name)] = Checkpointed(layer, checkpointed)
    return data_parallel(model, dp_mesh, mode=mode, bucket_plan=PLANS[plan], reshard_after_forward=reshard, **options)


class Checkpointed(nn.Module):
    """A block under activation checkpointing: 'full', or 'selective', which keeps the results of matrix products."""

    def __init__(self, inner: nn.Module, kind: str) -> None:
        super().__init__()
        self.inner = inner
        context = partial(create_selective_checkpoint_contexts, [torch.ops.aten.mm.default])
        self.options = {"context_fn": context} if kind == "selective" else {}

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return checkpoint(self.inner, x, use_reentrant=False, **self.options)


def find_plans_that_differ(mode: str, tp: int, policy: MixedPrecisionPolicy, reduction: str) -> list[str]:
    build_here = partial(build, mode, tp=tp, mp_policy=policy, reduction=reduction)
    train_here = partial(train, dp_rank=get_dp_rank_and_degree(tp)[0], dp_degree=get_dp_rank_and_degree(tp)[1], steps=4)
    oracle = train_here(build_here("parameter", False))
    variants = {f"{plan}, reshard {reshard}": (plan, reshard) for plan in PLANS for reshard in (True, False)}
    for plan, kind in (("block", "full"), ("block", "selective"), ("MiB", "full")):
        variants |= {f"{plan}, reshard {reshard}, {kind}": (plan, reshard, kind) for reshard in (True, False)}
    wrong = []
    for name, (plan, reshard, *checkpointed) in variants.items():
        trained = train_here(build_here(plan, reshard, checkpointed="".join(checkpointed)))
        wrong += [f"{name}: {kind}" for kind in oracle if not all(map(torch.equal, trained[kind], oracle[kind]))]
    return wrong


@pytest.mark.parametrize("reduction", ["native", "exact"])
@pytest.mark.parametrize(
    "world_size, mode, tp", [(4, "replicate", 1), (4, "fully_shard", 1), (4, "hybrid_shard", 1), (4, "fully_shard", 2)]
)
def test_every_plan_trains_bitwise_like_one_collective_per_parameter(ranks, world_size, mode, tp, reduction):
    policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32)
    assert ranks.run(find_plans_that_differ, world_size, mode, tp, policy, reduction) == [[]] * world_size


def count_a_step(mode: str, plan: str, reshard: bool | None, checkpointed: str, reduction: str) -> tuple[dict, dict]:
    """Return the collectives of the second step's forward and backward."""
    model = build(mode, plan, reshard, checkpointed=checkpointed, reduction=reduction)
    tokens, _ = get_batch(0, 2, model.vocab_size)
    for _ in range(2):
        with count_collectives() as forward:
            out = model(tokens)
        with count_collectives() as backward:
            out.sum().backward()
    return dict(forward), dict(backward)


# backward needs no weight of the embedding
AGAIN = BLOCKS - 1


@pytest.mark.parametrize(
    "mode, plan, reshard, checkpointed, reduction, forward, backward",
    [
        ("replicate", "block", True, "", "native", {}, {"all_reduce": BLOCKS}),
        ("replicate", "block", True, "", "exact", {}, {"all_to_all": BLOCKS, "all_gather": BLOCKS}),
        ("fully_shard", "parameter", False, "", "native", PARAMETERS, {"reduce_scatter": PARAMETERS}),
        ("fully_shard", "block", False, "", "native", BLOCKS, {"reduce_scatter": BLOCKS}),
        ("fully_shard", "block", True, "", "native", BLOCKS, {"all_gather": AGAIN, "reduce_scatter": BLOCKS}),
        # None keeps the bucket behind the last block
        ("fully_shard", "block", None, "", "exact", BLOCKS, {"all_gather": AGAIN - 1, "all_to_all": BLOCKS}),
        # the recomputed forward gathers, nothing else does
        ("fully_shard", "block", None, "full", "native", BLOCKS, {"all_gather": LAYERS, "reduce_scatter": BLOCKS}),
        ("fully_shard", "block", False, "full", "native", BLOCKS, {"reduce_scatter": BLOCKS}),
        ("fully_shard", "block", None, "selective", "native", BLOCKS, {"all_gather": LAYERS, "reduce_scatter": BLOCKS}),
        ("fully_shard", "block", False, "selective", "native", BLOCKS, {"reduce_scatter": BLOCKS}),
        (
            "hybrid_shard", "block", True, "", "native", BLOCKS,
            {"all_gather": AGAIN, "reduce_scatter": BLOCKS, "all_reduce": BLOCKS},
        ),
        ("hybrid_shard", "block", False, "", "exact", BLOCKS, {"all_to_all": BLOCKS, "all_gather": BLOCKS}),
    ],
)  # fmt: skip
def test_a_step_has_the_collectives_of_theory(ranks, mode, plan, reshard, checkpointed, reduction, forward, backward):
    forward = {"all_gather": forward} if isinstance(forward, int) else forward
    counts = ranks.run(count_a_step, 4, mode, plan, reshard, checkpointed, reduction)
    assert counts == [(forward, backward)] * 4


@contextmanager
def record_order():
    """Record when collectives are issued and waited for, and when blocks compute."""
    events: list[str] = []

    def recorded(name, function):
        def call(*args):
            events.append(name)
            return function(*args)

        return call

    names = ("start_gather", "finish_gather", "start_reduce", "finish_reduce")
    with mock.patch.multiple(bucket_module, **{n: recorded(n, getattr(bucket_module, n)) for n in names}):
        yield events


def record_a_step(checkpointed: str) -> tuple[str, str]:
    """Return the order in the second step; each block of the model computes (c) once forward and once backward."""
    model = build("fully_shard", "block", True, checkpointed=checkpointed)
    tokens, _ = get_batch(0, 2, model.vocab_size)
    model(tokens).sum().backward()
    short = {"start_gather": "g", "finish_gather": "w", "start_reduce": "r", "finish_reduce": "d"}
    with record_order() as events:
        for layer in model.layers:
            norm = layer.inner.ffn_norm if checkpointed else layer.ffn_norm
            norm.register_forward_hook(lambda *_: events.append("c"))
            norm.register_full_backward_hook(lambda *_: events.append("c"))
        out = model(tokens)
        forward, events[:] = "".join(short.get(event, event) for event in events), []
        out.sum().backward()
    return forward, "".join(short.get(event, event) for event in events)


# g: issue a gather, w: wait for it, c: a block computes, r: issue a reduction, d: wait for it
FORWARD = ["ggw", "gwc", "gwc", "w"]  # embedding, first block, second block, norm and output
BACKWARD = ["ggwr", "gwcrd", "wcrd", "rdd"]  # back again: the embedding is not gathered, as its weight is not needed
BACKWARD_CHECKPOINTED = ["ggwr", "gwccrd", "wccrd", "rdd"]  # a block computes its forward again first


def test_gathers_are_issued_one_bucket_ahead_and_reductions_waited_for_one_bucket_later(ranks):
    assert ranks.run(record_a_step, 2, "") == [("".join(FORWARD), "".join(BACKWARD))] * 2
    assert ranks.run(record_a_step, 2, "full") == [("".join(FORWARD), "".join(BACKWARD_CHECKPOINTED))] * 2


def watch_memory(reshard: bool | None, checkpointed: str) -> tuple[list[int], int, int]:
    """Return which buckets' unsharded parameters are alive after forward, and how many at most in forward and backward."""
    model = build("fully_shard", "block", reshard, checkpointed=checkpointed)
    tokens, _ = get_batch(0, 2, model.vocab_size)
    storages: dict[int, list[StorageWeakRef]] = {}
    most = 0

    def get_alive() -> list[int]:
        return [number for number, refs in storages.items() if not all(ref.expired() for ref in refs)]

    finish_gather = bucket_module.finish_gather

    def watched(started, shards, wire):
        nonlocal most
        tensors = finish_gather(started, shards, wire)
        number = cuts.setdefault(tuple(id(shard) for shard in shards), len(cuts))
        storages.setdefault(number, []).extend(StorageWeakRef(tensor.untyped_storage()) for tensor in tensors)
        most = max(most, len(get_alive()))
        return tensors

    cuts: dict[tuple, int] = {}
    with mock.patch.object(bucket_module, "finish_gather", watched):
        out = model(tokens)
        after_forward, most_in_forward, most = get_alive(), most, 0
        out.sum().backward()
    assert get_alive() == []
    return after_forward, most_in_forward, most


@pytest.mark.parametrize(
    "reshard, checkpointed, alive_after_forward, most_in_forward, most_in_backward",
    [
        # the bucket behind the last block is kept by None
        (True, "", [], 1, 1),
        (None, "", [3], 1, 1),
        (True, "full", [], 1, 1),
    ],
)
def test_unsharded_parameters_are_freed_after_forward_and_after_their_reduction(
    ranks, reshard, checkpointed, alive_after_forward, most_in_forward, most_in_backward
):
    expected = alive_after_forward, most_in_forward, most_in_backward
    assert ranks.run(watch_memory, 2, reshard, checkpointed) == [expected] * 2


class Mixed(nn.Module):
    """Blocks with a frozen one, a tie into another block, a parameter that is not used and one that has no dims."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(5, 5), nn.Tanh(), nn.Linear(5, 5)) for _ in range(4))
        self.blocks[1].requires_grad_(False)
        self.blocks[2][2].weight = self.blocks[0][0].weight
        self.blocks[3].unused = nn.Parameter(torch.ones(3))
        self.scale = nn.Parameter(torch.tensor(1.5))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = x + self.scale * block(x)
        return x


def compare_mixed_with_one_process(mode: str, plan: str) -> None:
    torch.manual_seed(0)
    model = Mixed()
    oracle = copy.deepcopy(model)
    data_parallel(model, build_meshes(mode)[0], mode=mode, bucket_plan=plan, reshard_after_forward=True)
    rank, degree = get_dp_rank_and_degree()
    x = torch.randn(2 * degree, 5, generator=torch.Generator().manual_seed(1))
    mine = x[2 * rank : 2 * rank + 2].requires_grad_()
    for _ in range(2):  # the second forward prefetches
        model.zero_grad()
        mine.grad = None
        out = model(mine)
        assert torch.equal(out, oracle(mine))
        out.square().sum().backward()
    same = mine.detach().requires_grad_()
    oracle(same).square().sum().backward()
    assert torch.equal(mine.grad, same.grad)
    oracle.zero_grad()
    oracle(x).square().sum().backward()
    for (fqn, parameter), expected in zip(model.named_parameters(), oracle.parameters()):
        assert (parameter.grad is None) == (expected.grad is None), fqn
        if expected.grad is not None:
            # the sum over ranks has another order than the sum over the batch
            torch.testing.assert_close(parameter.grad.full_tensor(), expected.grad)


@pytest.mark.parametrize("plan", ["block", 0.0001, None])
@pytest.mark.parametrize("mode", ["replicate", "fully_shard", "hybrid_shard"])
def test_frozen_tied_and_unused_parameters_of_buckets_compute_as_on_one_process(ranks, mode, plan):
    ranks.run(compare_mixed_with_one_process, 4, mode, plan)


def check_unusual_uses() -> None:
    model = build("fully_shard", "block", True)
    oracle = build("fully_shard", "parameter", False)
    tokens, _ = get_batch(0, 2, model.vocab_size)
    expected = oracle(tokens)
    expected.sum().backward()

    def check(out: torch.Tensor) -> None:
        out.sum().backward()
        assert torch.equal(out, expected)
        for parameter, other in zip(model.parameters(), oracle.parameters()):
            assert torch.equal(parameter.grad.to_local(), other.grad.to_local())
        model.zero_grad()

    check(model(tokens))
    # without autograd, between two steps and between a forward and its backward
    out = model(tokens)
    with torch.no_grad():
        assert torch.equal(model(tokens), expected)
    check(out)
    # a forward that raises leaves nothing open, and what it prefetched is dropped
    with mock.patch.object(F, "silu", side_effect=KeyError), pytest.raises(KeyError):
        model(tokens)
    check(model(tokens))
    # a copy made between a forward and its backward
    out = model(tokens)
    copied = copy.deepcopy(model)
    check(out)
    assert torch.equal(copied(tokens), expected)
    # one graph twice
    out = model(tokens)
    out.sum().backward(retain_graph=True)
    model.zero_grad()
    check(out)
    # a first read without autograd, then one with
    block = model.layers[0]
    block.attention_norm.register_forward_pre_hook(lambda module, _: _read_without_autograd(module))
    check(model(tokens))
    # two forwards before their backwards
    first, second = model(tokens), model(tokens)
    check(first)
    check(second)
    # a block by itself, and a weight by hand
    x = torch.ones(1, 4, model.tok_embeddings.embedding_dim)
    assert torch.equal(model.layers[1](x), oracle.layers[1](x))
    assert torch.equal(model.output.weight, oracle.output.weight)


def check_nothing_is_left() -> None:
    """After forwards without a backward, a backward that raised, and reads of both kinds: no memory, no old parameters."""
    model = build("fully_shard", "block", True, checkpointed="full")
    plain = build("fully_shard", "block", True)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, foreach=True)
    tokens, _ = get_batch(0, 2, model.vocab_size)
    activations: list[StorageWeakRef] = []
    plain.layers[0].ffn.w1.register_forward_hook(
        lambda module, args, out: activations.append(StorageWeakRef(out.untyped_storage()))
    )
    gc.disable()  # nothing may depend on when garbage is collected
    try:
        for _ in range(2):
            out = plain(tokens)
            del out
        assert all(activation.expired() for activation in activations)
    finally:
        gc.enable()
    model(tokens).sum().backward()
    # at that time the second block is recomputed and the first one's gather under way
    handle = model.layers[0].register_forward_hook(lambda module, args, out: out.register_hook(_raise) and None)
    out = model(tokens)
    handle.remove()
    with pytest.raises(KeyError):
        out.sum().backward()
    optimizer.step()
    assert torch.equal(model(tokens), model(tokens))
    for each in (model, plain):
        (schedule,) = {bucket.schedule for bucket in get_buckets(each)}
        assert not schedule._unsharded and all(bucket._issued is None for bucket in schedule.buckets)


def _raise(*_) -> None:
    raise KeyError


def test_no_memory_and_no_old_parameters_are_left_behind(ranks):
    ranks.run(check_nothing_is_left, 2)


class Segments(nn.Module):
    """Four blocks, two in each checkpointed segment."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(6, 6) for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for start in (0, 2):
            pair = nn.Sequential(self.blocks[start], nn.Tanh(), self.blocks[start + 1], nn.Tanh())
            x = checkpoint(pair, x, use_reentrant=False)
        return x


def count_gathers_of_segments(reshard: bool) -> list[int]:
    model = data_parallel(
        Segments(), build_meshes("fully_shard")[0], mode="fully_shard", reshard_after_forward=reshard
    )
    counts = []
    for _ in range(2):
        with count_collectives() as counter:
            model(torch.ones(2, 6)).sum().backward()
        counts.append(counter["all_gather"])
    return counts


def test_a_checkpointed_segment_of_several_blocks_gathers_each_again_once(ranks):
    assert ranks.run(count_gathers_of_segments, 2, True) == [[8, 8]] * 2
    assert ranks.run(count_gathers_of_segments, 2, False) == [[4, 4]] * 2


def check_scopes_by_themselves() -> None:
    """Final norm and output share a bucket; called by hand, each reads what is stored at that time."""
    model = build("fully_shard", "block", True)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0, foreach=True)
    x = torch.ones(1, 4, model.tok_embeddings.embedding_dim)
    before = model.norm(x)
    model(get_batch(0, 2, model.vocab_size)[0]).sum().backward()
    model.norm(x)
    optimizer.step()
    assert not torch.equal(model.norm(x), before)
    assert torch.equal(model.output(x), F.linear(x, model.output.weight))
    optimizer.zero_grad()  # torch copies no gradients that are DTensors
    with torch.no_grad():
        copied = copy.deepcopy(model.layers[1])
    assert {bucket.members[0].fqn for bucket in get_buckets(copied)} == {"layers.1.attention_norm.weight"}
    assert len(get_buckets(copied)[0].schedule.buckets) == 1  # the copy of a part holds no other part
    assert torch.equal(copied(x), model.layers[1](x))


def test_parts_of_a_model_are_used_and_copied_by_themselves(ranks):
    ranks.run(check_scopes_by_themselves, 2)


def _read_without_autograd(module: nn.Module) -> None:
    with torch.no_grad():
        assert not module.weight.requires_grad


def test_buckets_survive_unusual_uses(ranks):
    ranks.run(check_unusual_uses, 2)


def check_writes_between_forward_and_backward() -> None:
    for reshard in (True, False):
        model = build("fully_shard", "block", reshard)
        out = model(get_batch(0, 2, model.vocab_size)[0])
        with torch.no_grad():
            model.layers[0].ffn.w1._parameters["weight"].add_(1)
        if reshard:
            with pytest.raises(RuntimeError, match="'layers.0.attention_norm.weight' were written between a forward and"):
                out.sum().backward()
        else:
            out.sum().backward()


def test_parameters_written_before_they_are_gathered_again_are_an_error(ranks):
    ranks.run(check_writes_between_forward_and_backward, 2)


def count_two_forwards(reshard: bool) -> tuple[int, int]:
    """Two microbatches in flight, as in a pipeline; return the gathers inside and outside of `accumulate_gradients`."""
    model = build("fully_shard", "block", reshard)
    tokens, _ = get_batch(0, 2, model.vocab_size)
    with count_collectives() as inside, accumulate_gradients(model):
        outs = [model(tokens) for _ in range(2)]
    with count_collectives() as outside:
        outs += [model(tokens) for _ in range(2)]
    return inside["all_gather"], outside["all_gather"]


def test_microbatches_in_flight_share_a_gather_unless_resharding(ranks):
    assert ranks.run(count_two_forwards, 2, True) == [(2 * BLOCKS, 2 * BLOCKS)] * 2
    assert ranks.run(count_two_forwards, 2, False) == [(BLOCKS, 2 * BLOCKS)] * 2


def train_with_old_graphs_alive(plan: str, reshard: bool, options: dict) -> list[torch.Tensor]:
    """Train on two microbatches per step and keep every output, so every graph and what it holds, to the end."""
    model = build("fully_shard", plan, reshard)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, **options)
    kept = []
    for step in range(3):
        with accumulate_gradients(model):
            kept += [model(get_batch(microbatch, 2, model.vocab_size)[0]) for microbatch in range(2)]
            for out in kept[-2:]:
                out.logsumexp(-1).sum().backward()
        kept.append(model(get_batch(0, 2, model.vocab_size)[0]))  # one without backward
        optimizer.step()
        optimizer.zero_grad()
    return [out.detach() for out in kept]


def find_stale_outputs() -> list[tuple]:
    """Optimizers that write many parameters at once do not count the writes; what was gathered must not be taken again."""
    wrong = []
    for options in ({"fused": True}, {"foreach": True}, {"foreach": False}):
        oracle = train_with_old_graphs_alive("parameter", True, options)
        assert not torch.equal(oracle[0], oracle[3])
        for plan, reshard in (("block", False), ("block", True), ("parameter", False)):
            outs = train_with_old_graphs_alive(plan, reshard, options)
            wrong += [(options, plan, reshard, i) for i, pair in enumerate(zip(outs, oracle)) if not torch.equal(*pair)]
    return wrong


def test_no_optimizer_leaves_stale_parameters_to_the_next_step(ranks):
    assert ranks.run(find_stale_outputs, 2) == [[]] * 2


def check_parts_of_buckets_cannot_accumulate() -> None:
    model = build("replicate", "block", None)
    with pytest.raises(ValueError, match="'layers.0.attention_norm.weight' is not in this part of the model, but shares"):
        with accumulate_gradients(model.layers[0].ffn):
            pass
    with accumulate_gradients(model.layers[0]):
        pass


def test_accumulation_of_a_part_of_a_bucket_is_refused(ranks):
    ranks.run(check_parts_of_buckets_cannot_accumulate, 2)
