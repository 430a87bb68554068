"""Placements and error messages on meshes of any size; the oracle is written by hand, or torch.chunk."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate, Shard, distribute_module, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.distributed.tensor.placement_types import _StridedShard
from torch.testing._internal.distributed.fake_pg import FakeStore

from torchtitan_simplefsdp import MixedPrecisionPolicy, apply_mixed_precision, data_parallel
from torchtitan_simplefsdp.core.placements import get_local_rows, is_cut_as_dtensor_describes


@pytest.fixture
def world():
    """A fake process group: rank 0 of 512."""
    dist.init_process_group("fake", rank=0, world_size=512, store=FakeStore())
    yield
    dist.destroy_process_group()


def build_mesh(**dims: int):
    total = 512
    for size in dims.values():
        total //= size
    mesh = init_device_mesh("cpu", (total, *dims.values()), mesh_dim_names=("rest", *dims))
    return mesh[tuple(dims)]


class TwoLinears(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.colwise = nn.Linear(64, 250, bias=False)
        self.rowwise = nn.Linear(250, 64, bias=False)
        self.norm = nn.RMSNorm(64)


# mode, data-parallel dims, expected placements of (colwise, rowwise, norm) under TP 2, local rows of colwise on rank 0
@pytest.mark.parametrize(
    "mode, dims, expected, colwise_shape",
    [
        (
            "replicate",
            {"dp_replicate": 4},
            [(Replicate(), Shard(0)), (Replicate(), Shard(1)), (Replicate(), Replicate())],
            (125, 64),
        ),
        (
            "fully_shard",
            {"fsdp": 4},
            [(_StridedShard(0, split_factor=2), Shard(0)), (Shard(0), Shard(1)), (Shard(0), Replicate())],
            (32, 64),
        ),
        (
            "hybrid_shard",
            {"dp_replicate": 2, "fsdp": 8},
            [
                (Replicate(), _StridedShard(0, split_factor=2), Shard(0)),
                (Replicate(), Shard(0), Shard(1)),
                (Replicate(), Shard(0), Replicate()),
            ],
            (16, 64),
        ),
    ],
)
def test_placements_over_tensor_parallelism_describe_both_cuts(world, mode, dims, expected, colwise_shape):
    mesh = build_mesh(**dims, tp=2)
    model = TwoLinears()
    parallelize_module(model, mesh["tp"], {"colwise": ColwiseParallel(), "rowwise": RowwiseParallel()})
    distribute_module(model.norm, mesh["tp"])
    data_parallel(model, mesh[tuple(dims)], mode=mode)
    parameters = dict(model.named_parameters())
    assert [p.placements for p in parameters.values()] == expected
    assert {p.device_mesh.mesh_dim_names for p in parameters.values()} == {(*dims, "tp")}
    assert parameters["colwise.weight"].to_local().shape == colwise_shape
    assert parameters["colwise.weight"].shape == (250, 64)


@pytest.mark.parametrize("rows", range(0, 18))
@pytest.mark.parametrize("degree", [1, 2, 3, 4, 8])
def test_local_rows_are_those_of_torch_chunk(rows, degree):
    chunks = list(torch.arange(rows).chunk(degree)) if rows else []
    chunks += [torch.empty(0)] * (degree - len(chunks))
    for rank, chunk in enumerate(chunks):
        start, length = get_local_rows(rows, degree, rank)
        assert torch.arange(rows)[start : start + length].tolist() == chunk.tolist()


def linear() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 4))


@pytest.mark.parametrize(
    "mode, dims, message",
    [
        (
            "fully_sharded",
            {"fsdp": 4},
            "data_parallel: unknown mode 'fully_sharded' (did you mean 'fully_shard'?). "
            "Valid modes: 'replicate', 'fully_shard', 'hybrid_shard'.",
        ),
        ("zero", {"fsdp": 4}, "data_parallel: unknown mode 'zero'. Valid modes: 'replicate', 'fully_shard', 'hybrid_shard'."),
        (
            "fully_shard",
            {"dp_replicate": 2, "fsdp": 4},
            "data_parallel: mode 'fully_shard' needs a 1D mesh, got 2D mesh (dp_replicate=2, fsdp=4). "
            "Pass mesh[\"fsdp\"], or use mode='hybrid_shard'.",
        ),
        (
            "replicate",
            {"dp_replicate": 2, "fsdp": 4},
            "data_parallel: mode 'replicate' needs a 1D mesh, got 2D mesh (dp_replicate=2, fsdp=4). "
            "Pass mesh[\"dp_replicate\"], or use mode='hybrid_shard'.",
        ),
        (
            "hybrid_shard",
            {"fsdp": 4},
            "data_parallel: mode 'hybrid_shard' needs a 2D mesh, got 1D mesh (fsdp=4). "
            "Pass a mesh of (dp_replicate, fsdp), or use mode='replicate' or mode='fully_shard'.",
        ),
    ],
)
def test_a_wrong_mode_or_mesh_says_what_is_right(world, mode, dims, message):
    model = linear()
    with pytest.raises(ValueError) as caught:
        data_parallel(model, build_mesh(**dims), mode=mode)
    assert str(caught.value) == message
    assert type(model[0]) is nn.Linear  # nothing was changed


def wrap_twice(mesh) -> nn.Module:
    return data_parallel(linear(), mesh, mode="fully_shard")


def wrap_a_part_first(mesh) -> nn.Module:
    return nn.Sequential(data_parallel(nn.Linear(4, 4), mesh, mode="fully_shard"))


def wrap_fsdp2(mesh) -> nn.Module:
    return nn.Sequential(fully_shard(nn.Linear(4, 4), mesh=mesh))


def shard_on_same_dim(mesh) -> nn.Module:
    return nn.Sequential(parallelize_module(nn.Linear(4, 4), mesh, ColwiseParallel()))


@pytest.mark.parametrize(
    "build, message",
    [
        (wrap_twice, "data_parallel: the model has SimpleFSDP already. Apply it once per module."),
        (wrap_a_part_first, "data_parallel: module '0' has SimpleFSDP already. Apply it once per module."),
        (
            wrap_fsdp2,
            "data_parallel: module '0' is wrapped by FSDPModule already. Pass the bare model: "
            "SimpleFSDP replaces fully_shard and DistributedDataParallel.",
        ),
        (
            shard_on_same_dim,
            "data_parallel: parameter '0.weight' is a DTensor on mesh dim 'fsdp' already, which is also a data-parallel "
            "dim. Pass a mesh of the other dims.",
        ),
    ],
)
def test_a_model_that_is_parallel_already_is_refused(world, build, message):
    mesh = build_mesh(fsdp=4)
    with pytest.raises(ValueError) as caught:
        data_parallel(build(mesh), mesh, mode="fully_shard")
    assert str(caught.value) == message


def test_shard_dim_out_of_range_names_the_parameter_and_leaves_the_model_as_it_was(world):
    model = linear()
    with pytest.raises(ValueError) as caught:
        data_parallel(model, build_mesh(fsdp=4), mode="fully_shard", shard_dim=1)
    assert str(caught.value) == (
        "data_parallel: shard_dim=1 is out of range for parameter '0.bias' of shape [4]. "
        "Use shard_dim=0, or apply data_parallel to submodules with a dim of their own."
    )
    assert type(model[0].weight) is nn.Parameter and type(model[0]) is nn.Linear


def test_arguments_of_another_type_are_refused(world):
    with pytest.raises(TypeError, match="device_mesh must be a DeviceMesh, got int"):
        data_parallel(linear(), 4)
    with pytest.raises(TypeError, match="mp_policy must be a torchtitan_simplefsdp.MixedPrecisionPolicy or None"):
        data_parallel(linear(), build_mesh(fsdp=4), mp_policy=torch.bfloat16)
    with pytest.raises(TypeError, match="param_dtype must be a torch.dtype or None, got 'bfloat16'"):
        MixedPrecisionPolicy(param_dtype="bfloat16")
    with pytest.raises(ValueError, match="reduce_dtype must be a floating-point dtype, got torch.int32"):
        MixedPrecisionPolicy(reduce_dtype=torch.int32)


def test_a_parameter_on_another_device_is_refused(world):
    mesh = init_device_mesh("cpu", (512,), mesh_dim_names=("fsdp",))
    mesh._device_type = "cuda"
    with pytest.raises(ValueError, match="parameter '0.weight' is on cpu, the mesh on 'cuda'"):
        data_parallel(linear(), mesh, mode="fully_shard")


def get_described_rows(rows: int, tp: int, fsdp: int) -> list[list[int]]:
    """Return the rows of each (fsdp, tp) rank as DTensor's own placements stand for them."""
    full = torch.arange(rows)
    described = []
    for rank in range(tp * fsdp):
        dist.init_process_group("fake", rank=rank, world_size=tp * fsdp, store=FakeStore())
        mesh = init_device_mesh("cpu", (fsdp, tp), mesh_dim_names=("fsdp", "tp"))
        placements = [_StridedShard(0, split_factor=tp), Shard(0)]
        described.append(distribute_tensor(full, mesh, placements, src_data_rank=None).to_local().tolist())
        dist.destroy_process_group()
    return described


@pytest.mark.parametrize("tp, fsdp", [(2, 2), (2, 3), (2, 4), (4, 2), (3, 3)])
def test_a_cut_is_accepted_only_where_dtensor_describes_the_same_shards(tp, fsdp):
    accepted = 0
    for rows in range(1, 28):
        ours = []
        for rank in range(tp * fsdp):
            tp_start, tp_rows = get_local_rows(rows, tp, rank % tp)
            start, length = get_local_rows(tp_rows, fsdp, rank // tp)
            ours.append(list(range(tp_start + start, tp_start + start + length)))
        if is_cut_as_dtensor_describes(rows, tp, fsdp):
            accepted += 1
            assert get_described_rows(rows, tp, fsdp) == ours, rows
    assert accepted >= 27 // (tp * fsdp)  # every multiple


def test_a_dim_that_tensor_parallelism_cut_too_unevenly_is_refused(world):
    mesh = build_mesh(fsdp=4, tp=2)
    model = nn.Sequential(nn.Linear(4, 9, bias=False))
    parallelize_module(model, mesh["tp"], {"0": ColwiseParallel()})
    with pytest.raises(NotImplementedError) as caught:
        data_parallel(model, mesh["fsdp"], mode="fully_shard")
    assert str(caught.value) == (
        "data_parallel: dim 0 of parameter '0.weight', of size 9, is cut by tensor parallelism into 2 pieces too uneven to be "
        "cut again into 4 shards. Pad it to a multiple of 8, or change the degrees."
    )


def test_a_replaced_parameter_is_an_error_when_it_is_read(world):
    model = data_parallel(linear(), build_mesh(fsdp=4), mode="fully_shard")
    model[0].weight = nn.Parameter(torch.ones(4, 4))
    with pytest.raises(TypeError, match="parameter 'weight' of SimpleFSDPLinear was replaced by a plain tensor"):
        model(torch.ones(1, 4))


def test_a_second_backward_through_a_read_is_an_error(world):
    model = data_parallel(linear(), build_mesh(fsdp=4), mode="fully_shard")
    x = torch.ones(1, 4, requires_grad=True)
    (gradient,) = torch.autograd.grad(model(x).square().sum(), model[0]._parameters["weight"], create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        gradient.to_local().sum().backward()


def test_reduce_dtype_has_no_effect_where_nothing_is_reduced():
    model = linear()
    apply_mixed_precision(model, MixedPrecisionPolicy(reduce_dtype=torch.bfloat16))
    model(torch.full((1, 4), 1.001)).sum().backward()
    assert torch.equal(model[0]._parameters["weight"].grad, torch.full((4, 4), 1.001))


def test_mixed_precision_without_data_parallelism_casts_on_read_and_keeps_storage():
    model = linear()
    stored = model[0].weight
    apply_mixed_precision(model, MixedPrecisionPolicy(param_dtype=torch.bfloat16))
    assert model[0].weight.dtype == torch.bfloat16
    assert torch.equal(model[0].weight, stored.to(torch.bfloat16))
    model(torch.ones(1, 4, dtype=torch.bfloat16)).sum().backward()
    assert stored.grad.dtype == torch.float32
    assert dict(model.named_parameters())["0.weight"] is stored
