"""Traces of a tiny Llama under a fake group against lists by hand: kinds, bytes, groups, phases, places, FLOPs."""

from __future__ import annotations

from functools import partial

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.distributed.device_mesh import init_device_mesh
from torch.testing._internal.distributed.fake_pg import FakeStore

from tests.tiny_llama import apply_tp, build_tiny_llama, DIM, get_batch, HEADS, SEQ_LEN
from torchtitan_simplefsdp import data_parallel, MixedPrecisionPolicy
from torchtitan_simplefsdp.core.compat import FakeTensorMode, tree_leaves, wait
from torchtitan_simplefsdp.graph.trace import Collective, Compute, count_collectives, trace_collectives, trace_step

MATRIX, FFN, NORM, EMBEDDING = 32 * 32, 64 * 32, 32, 256 * 32  # parameters
LAYER = [NORM, MATRIX, MATRIX, MATRIX, MATRIX, NORM, FFN, FFN, FFN]  # in the order of use
MODEL = [EMBEDDING, *LAYER, *LAYER, NORM, EMBEDDING]


@pytest.fixture(autouse=True)
def world():
    """A fake process group: rank 0 of 8."""
    dist.init_process_group("fake", rank=0, world_size=8, store=FakeStore())
    yield
    dist.destroy_process_group()


def build_step(mode, mesh, tp_mesh=None, bucket_plan=None, reshard=False, **policy):
    model = build_tiny_llama()
    if tp_mesh:
        apply_tp(model, tp_mesh)
    policy = MixedPrecisionPolicy(**policy)
    data_parallel(model, mesh, mode, policy, bucket_plan=bucket_plan, reshard_after_forward=reshard)
    tokens, labels = get_batch(0, 2, model.vocab_size)

    def step():
        F.cross_entropy(model(tokens).flatten(0, 1).float(), labels.flatten()).backward()

    return model, step


def test_fully_shard_gathers_in_forward_and_scatters_in_backward_with_all_bytes():
    mesh = init_device_mesh("cpu", (8,), mesh_dim_names=("fsdp",))
    model, step = build_step("fully_shard", mesh, param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    labels = [("model", model), *((f"layer{n}", layer) for n, layer in enumerate(model.layers))]
    collectives = trace_collectives(step, labels, [mesh])
    forward, backward = collectives[: len(MODEL)], collectives[len(MODEL) :]
    place = ["model", *["layer0"] * 9, *["layer1"] * 9, "model", "model"]
    assert forward == [
        Collective("all_gather", "fsdp", tuple(range(8)), 2 * size, torch.bfloat16, "forward", where)
        for size, where in zip(MODEL, place)
    ]
    # gradients come in the reverse order of layers; within one, in the order in which products are done
    assert [(c.where, c.phase) for c in backward] == [(where, "backward") for where in reversed(place)]
    assert {(c.kind, c.group, c.dtype) for c in backward} == {("reduce_scatter", "fsdp", torch.float32)}
    assert sorted(c.bytes for c in backward) == sorted(4 * size for size in MODEL)
    assert sum(c.wire_bytes for c in collectives) == sum(MODEL) * (2 + 4) * 7 / 8


@pytest.mark.parametrize("reshard", [False, True])
def test_buckets_are_one_collective_each_with_the_bytes_of_their_parameters(reshard):
    mesh = init_device_mesh("cpu", (8,), mesh_dim_names=("fsdp",))
    model, step = build_step("fully_shard", mesh, bucket_plan="block", reshard=reshard, param_dtype=torch.bfloat16)
    labels = [("model", model), *((f"layer{n}", layer) for n, layer in enumerate(model.layers))]
    collectives = trace_collectives(step, labels, [mesh])
    buckets = [EMBEDDING, sum(LAYER), sum(LAYER), NORM + EMBEDDING]
    moved = {
        kind: [c.bytes for c in collectives if (c.phase, c.kind) == kind]
        for kind in (("forward", "all_gather"), ("backward", "all_gather"), ("backward", "reduce_scatter"))
    }
    assert moved == {
        ("forward", "all_gather"): [2 * size for size in buckets],
        # no backward needs the embedding's weight
        ("backward", "all_gather"): [2 * size for size in buckets[:0:-1]] if reshard else [],
        ("backward", "reduce_scatter"): [2 * size for size in reversed(buckets)],
    }
    assert len(collectives) == sum(map(len, moved.values()))
    assert [c.where for c in collectives[:4]] == ["model", "layer0", "layer1", "model"]


def test_hybrid_scatters_and_then_reduces_the_shard():
    mesh = init_device_mesh("cpu", (2, 4), mesh_dim_names=("dp_replicate", "fsdp"))
    model, step = build_step("hybrid_shard", mesh)
    collectives = trace_collectives(step, [("model", model)], [mesh])
    assert count_collectives(collectives) == {
        ("forward", "all_gather", "fsdp"): len(MODEL),
        ("backward", "reduce_scatter", "fsdp"): len(MODEL),
        ("backward", "all_reduce", "dp_replicate"): len(MODEL),
    }
    backward = [c for c in collectives if c.phase == "backward"]
    for scatter, reduce in zip(backward[::2], backward[1::2]):
        assert (scatter.ranks, reduce.ranks) == ((0, 1, 2, 3), (0, 4)) and scatter.bytes == 4 * reduce.bytes


def test_tensor_parallel_collectives_have_their_own_group():
    mesh = init_device_mesh("cpu", (4, 2), mesh_dim_names=("fsdp", "tp"))
    model, step = build_step("fully_shard", mesh["fsdp"], mesh["tp"])
    collectives = trace_collectives(step, [("model", model)], [mesh])
    gathered = [c.bytes for c in collectives if c.group == "fsdp" and c.phase == "forward"]
    # half of every matrix and of both embeddings, whole norms
    assert gathered == [4 * size if size == NORM else 2 * size for size in MODEL]
    tensor_parallel = [c for c in collectives if c.group == "tp"]
    assert {c.ranks for c in tensor_parallel} == {(0, 1)}
    assert {c.phase for c in tensor_parallel} == {"forward", "backward"}


@pytest.mark.parametrize("bucket_plan, reshard", [(None, False), ("block", True)])
def test_a_fake_tensor_step_has_the_events_of_a_real_one(bucket_plan, reshard):
    mesh = init_device_mesh("cpu", (4, 2), mesh_dim_names=("fsdp", "tp"))
    build = partial(build_step, "fully_shard", mesh["fsdp"], mesh["tp"], bucket_plan, reshard)
    build()[1]()  # DTensor infers the shapes of its ops once
    model, step = build()
    real = trace_step(step, [("model", model)], [mesh])
    model, step = build()
    with FakeTensorMode(allow_non_fake_inputs=True):
        model.to_empty(device="cpu")
        fake = trace_step(step, [("model", model)], [mesh])
    assert fake == real


@pytest.mark.parametrize("tp", [1, 2])
def test_flops_are_those_of_the_local_matrix_products_and_of_half_the_attention_square(tp):
    mesh = init_device_mesh("cpu", (8 // tp, tp), mesh_dim_names=("fsdp", "tp"))
    model, step = build_step("fully_shard", mesh["fsdp"], mesh["tp"] if tp > 1 else None)
    events = [event for event in trace_step(step, [("model", model)], [mesh]) if isinstance(event, Compute)]
    tokens = 2 * SEQ_LEN
    products = 2 * tokens * (2 * (4 * MATRIX + 3 * FFN) + EMBEDDING) // tp  # the first embedding is looked up
    attention = 2 * 2 * 2 * HEADS * SEQ_LEN**2 * (DIM // HEADS) * 2 // 2 // tp  # layers, products, 2, sequences, mask
    flops = {
        phase: sum(event.flops for event in events if event.phase == phase)
        for phase in ("forward", "backward", "other")
    }
    assert flops == {"forward": products + attention, "backward": 2 * products + attention * 5 // 2, "other": 0}


def test_what_is_outside_of_the_modules_is_other():
    tensor = torch.ones(8, dtype=torch.float64)
    (collective,) = trace_collectives(lambda: dist.all_reduce(tensor))
    name = dist.group.WORLD.group_name
    assert collective == Collective("all_reduce", name, tuple(range(8)), 64, torch.float64, "other", "")


def functional():
    return torch.ops._c10d_functional


def get_world_name() -> str:
    return dist.group.WORLD.group_name


@pytest.mark.filterwarnings("ignore:.*is deprecated:FutureWarning")  # two names that torch 2.13 still has
@pytest.mark.parametrize(
    "kind, call",
    [
        ("all_gather", lambda: dist.all_gather_into_tensor(torch.empty(80), torch.empty(10))),
        ("reduce_scatter", lambda: dist.reduce_scatter_tensor(torch.empty(10), torch.empty(80))),
        ("all_to_all", lambda: dist.all_to_all_single(torch.empty(80), torch.empty(80))),
        ("all_gather", lambda: dist.all_gather([torch.empty(10) for _ in range(8)], torch.empty(10))),
        ("broadcast", lambda: dist.broadcast(torch.empty(80), 0)),
        ("all_to_all", lambda: torch.ops._dtensor.shard_dim_alltoall(torch.empty(8, 10), 1, 0, get_world_name())),
        ("all_gather", lambda: functional().all_gather_into_tensor(torch.empty(10), 8, get_world_name())),
        ("all_gather", lambda: functional().all_gather_into_tensor_coalesced([torch.empty(5)] * 2, 8, get_world_name())),
        ("reduce_scatter", lambda: functional().reduce_scatter_tensor(torch.empty(80), "sum", 8, get_world_name())),
        ("all_reduce", lambda: functional().all_reduce_coalesced([torch.empty(40)] * 2, "sum", get_world_name())),
    ],
)
def test_collectives_of_torch_itself_count_the_whole_tensor(kind, call):
    def call_and_wait():
        for started in tree_leaves(call()):
            if isinstance(started, torch.Tensor):
                wait(started)

    (collective,) = trace_collectives(call_and_wait)
    assert (collective.kind, collective.bytes) == (kind, 320)


def test_barriers_and_views_are_no_events():
    tensor = torch.ones(8)
    assert trace_step(lambda: (dist.barrier(), tensor.view(2, 4), torch.empty_like(tensor))) == []


def test_hooks_are_gone_after_a_step_that_failed():
    model = build_tiny_llama()

    def fail():
        model(get_batch(0, 2, 256)[0])
        raise RuntimeError("stop")

    with pytest.raises(RuntimeError, match="stop"):
        trace_step(fail, [("model", model)])
    assert not model._forward_hooks and not model._forward_pre_hooks
