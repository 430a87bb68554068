"""Private torch names, all in one place, each with its reason.

Tried on torch 2.13.0, 2.14.1 and 2.15.0. Nothing outside this file imports a private torch name.

Not here: what is done with them.
"""

from __future__ import annotations

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Placement
from torch.distributed.tensor.placement_types import _StridedShard
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

__all__ = [
    "TorchDispatchMode",  # sees every op of an init function, the only way to catch random ones
    "all_gather",
    "all_reduce",
    "all_to_all",
    "concatenate_meshes",
    "get_arguments",
    "get_flat_group",
    "get_group_name",
    "get_group_size",
    "is_in_place",
    "multiply_in_place",
    "reduce_scatter",
    "strided_shard",
    "tree_leaves",  # the tensors among an op's arguments, which may be lists of lists
]

# The functional collectives as ops. The Python wrappers around them return AsyncCollectiveTensor in eager mode
# and were renamed in 2.13; the ops take only constants beside the tensor and are the same in eager and compiled.
_ops = torch.ops._c10d_functional


def all_gather(local: torch.Tensor, group_size: int, group_name: str) -> torch.Tensor:
    """Concatenate `local` [n, ...] of every rank of the group along dim 0: [group_size * n, ...]."""
    return _ops.wait_tensor(_ops.all_gather_into_tensor(local, group_size, group_name))


def reduce_scatter(full: torch.Tensor, group_size: int, group_name: str) -> torch.Tensor:
    """Sum `full` [group_size * n, ...] over the group and keep this rank's [n, ...] along dim 0."""
    return _ops.wait_tensor(_ops.reduce_scatter_tensor(full, "sum", group_size, group_name))


def all_reduce(tensor: torch.Tensor, group_name: str) -> torch.Tensor:
    """Sum `tensor` over the group into a new tensor."""
    return _ops.wait_tensor(_ops.all_reduce(tensor, "sum", group_name))


def all_to_all(pieces: torch.Tensor, group_size: int, group_name: str) -> torch.Tensor:
    """Send `pieces[i]` of `[group_size, ...]` to rank i of the group; return what the ranks sent here, by rank."""
    ones = [1] * group_size
    return _ops.wait_tensor(_ops.all_to_all_single(pieces, ones, ones, group_name))


def get_group_name(mesh: DeviceMesh, mesh_dim: int) -> str:
    """Name of the process group of one mesh dim; the functional collectives address groups by name."""
    return mesh.get_group(mesh_dim).group_name


def get_flat_group(mesh: DeviceMesh) -> tuple[str, list[int]]:
    """Name and global ranks (ascending) of the group of all ranks of a mesh, which the first call for a mesh creates."""
    group = mesh._flatten().get_group()
    return group.group_name, torch.distributed.get_process_group_ranks(group)


def concatenate_meshes(outer: DeviceMesh, inner: DeviceMesh) -> DeviceMesh:
    """Mesh whose dims are those of `outer`, then those of `inner` (no public call; FSDP2 uses this one too)."""
    return DeviceMesh._concatenate([outer, inner])


def strided_shard(dim: int, split_factor: int) -> Placement:
    """Placement of a dim that an inner mesh dim cut first into `split_factor` parts (FSDP over TP)."""
    return _StridedShard(dim, split_factor=split_factor)


def is_in_place(op: torch._ops.OpOverload) -> bool:
    """Return whether an op, as a dispatch mode sees it, writes to an argument."""
    return op._schema.is_mutable


def get_arguments(op: torch._ops.OpOverload, args: tuple, kwargs: dict) -> dict[str, object]:
    """Return the arguments of a call of an op, as a dispatch mode sees it, by the names in the op's schema."""
    return {argument.name: value for argument, value in zip(op._schema.arguments, args)} | kwargs


def get_group_size(group: str | torch.ScriptObject) -> int:
    """Return the number of ranks of a process group, given as the functional collectives or as the c10d ops get it."""
    if isinstance(group, str):
        return torch.distributed.distributed_c10d._resolve_process_group(group).size()
    return torch.distributed.ProcessGroup.unbox(group).size()


def multiply_in_place(tensors: list[torch.Tensor], factor: torch.Tensor) -> None:
    """Multiply all tensors by a scalar tensor in place, in few kernels."""
    if tensors:
        torch._foreach_mul_(tensors, factor)
