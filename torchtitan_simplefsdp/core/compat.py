"""Private torch names, all in one place, each with its reason.

Tried on torch 2.13.0, 2.14.1 and 2.15.0. Nothing outside this file imports a private torch name.

Not here: what is done with them.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch._ops import OpOverload
from torch._subclasses import FakeTensor, FakeTensorMode
from torch.distributed.constants import default_pg_timeout
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement
from torch.distributed.tensor.placement_types import _StridedShard
from torch.utils._python_dispatch import _get_current_dispatch_mode, _pop_mode_temporarily, TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import _CachedTorchDispatchMode, _CachingTorchDispatchMode

__all__ = [
    "FakeTensor",
    "FakeTensorMode",  # tensors with shapes and devices but no memory, to trace a step of any size
    "OpOverload",  # type of an op as a dispatch mode sees it
    "TorchDispatchMode",  # sees every op of an init function, the only way to catch random ones
    "all_gather",
    "all_reduce",
    "all_to_all",
    "build_aot_eager",
    "build_fake_store",
    "build_inductor",
    "call_at_end_of_backward",
    "concatenate_meshes",
    "cut_joint_graph",
    "get_arguments",
    "get_backward_id",
    "get_backward_sequence_number",
    "get_flat_group",
    "get_group_name",
    "get_group_of_collective",
    "get_gloo_threads",
    "get_local",
    "get_partitioner_class",
    "get_saved_tensors_hooks",
    "get_sequence_number",
    "get_storage_id",
    "hide_from_checkpoint",
    "is_in_checkpoint",
    "is_in_place",
    "is_inferring_shapes",
    "multiply_in_place",
    "reduce_scatter",
    "strided_shard",
    "tree_leaves",  # the tensors among an op's arguments, which may be lists of lists
    "use_one_gloo_thread",
    "wait",
]

# The functional collectives as ops. The Python wrappers around them return AsyncCollectiveTensor in eager mode
# and were renamed in 2.13; the ops take only constants beside the tensor and are the same in eager and compiled.
_ops = torch.ops._c10d_functional


def all_gather(local: torch.Tensor, group_size: int, group_name: str) -> torch.Tensor:
    """Start to concatenate `local` [n, ...] of every rank of the group along dim 0: [group_size * n, ...]; see `wait`."""
    return _ops.all_gather_into_tensor(local, group_size, group_name)


def reduce_scatter(full: torch.Tensor, group_size: int, group_name: str) -> torch.Tensor:
    """Start to sum `full` [group_size * n, ...] over the group, of which this rank keeps [n, ...] along dim 0; see `wait`."""
    return _ops.reduce_scatter_tensor(full, "sum", group_size, group_name)


def all_reduce(tensor: torch.Tensor, group_name: str, may_overwrite: bool = False) -> torch.Tensor:
    """Start to sum `tensor` over the group, into a new tensor unless it may be overwritten; see `wait`."""
    if may_overwrite and not torch.compiler.is_compiling():  # a compiler finds out by itself
        return _ops.all_reduce_(tensor, "sum", group_name)
    return _ops.all_reduce(tensor, "sum", group_name)


def all_to_all(pieces: torch.Tensor, group_size: int, group_name: str) -> torch.Tensor:
    """Start to send `pieces[i]` of `[group_size, ...]` to rank i; what the ranks sent here, by rank; see `wait`."""
    ones = [1] * group_size
    return _ops.all_to_all_single(pieces, ones, ones, group_name)


def wait(started: torch.Tensor) -> torch.Tensor:
    """Return the result of a collective that was started; on GPU the stream waits, not the host."""
    return _ops.wait_tensor(started)


def get_local(tensor: torch.Tensor) -> torch.Tensor:
    """Return the local tensor of a DTensor, outside of autograd; other tensors as they are."""
    return tensor._local_tensor if isinstance(tensor, DTensor) else tensor


def get_storage_id(tensor: torch.Tensor) -> int:
    """Return what is the same for all views of one storage while it lives; fake tensors have it as well."""
    return tensor.untyped_storage()._cdata


def get_backward_id() -> int | None:
    """Return which backward this thread runs now, None: none; a forward inside one is activation checkpointing's."""
    backward_id = torch._C._current_graph_task_id()
    return None if backward_id == -1 else backward_id


def call_at_end_of_backward(function: Callable[[], None]) -> None:
    """Call `function` when the backward that runs now ends (FSDP2 ends its own by this too)."""
    torch.autograd.Variable._execution_engine.queue_callback(function)


def get_saved_tensors_hooks() -> tuple[Callable, Callable] | None:
    """Return the innermost hooks that autograd packs and unpacks saved tensors with; only those are called."""
    return torch._C._autograd._top_saved_tensors_default_hooks(False)


def is_in_checkpoint() -> bool:
    """Return whether `torch.utils.checkpoint` decides now what becomes of the tensors that autograd saves."""
    hooks = get_saved_tensors_hooks()
    return hooks is not None and hooks[0].__module__ == "torch.utils.checkpoint"


@contextmanager
def hide_from_checkpoint() -> Iterator[None]:
    """Hide ops inside from a policy of selective activation checkpointing.

    Such a policy expects a recomputed forward to call the same ops. Which gathers are issued in a forward depends on what
    is gathered already, and none of them is an activation.
    """
    policies = (_CachingTorchDispatchMode, _CachedTorchDispatchMode)
    with _pop_mode_temporarily() if isinstance(_get_current_dispatch_mode(), policies) else nullcontext():
        yield


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


def is_in_place(op: OpOverload) -> bool:
    """Return whether an op, as a dispatch mode sees it, writes to an argument."""
    return op._schema.is_mutable


def get_arguments(op: OpOverload, args: tuple, kwargs: dict) -> dict[str, object]:
    """Return the arguments of a call of an op, as a dispatch mode sees it, by the names in the op's schema.

    Those that the call leaves to their defaults are missing.
    """
    return {argument.name: value for argument, value in zip(op._schema.arguments, args)} | kwargs


def multiply_in_place(tensors: list[torch.Tensor], factor: torch.Tensor) -> None:
    """Multiply all tensors by a scalar tensor in place, in few kernels."""
    if tensors:
        torch._foreach_mul_(tensors, factor)


def build_aot_eager(partitioner: Callable) -> Callable:
    """Return torch.compile's backend "aot_eager" with another partitioner of the joint graph."""
    from torch._dynamo.backends.common import aot_autograd  # here, as the compiler takes long to import
    from torch._dynamo.backends.debugging import boxed_nop

    return aot_autograd(
        fw_compiler=boxed_nop, bw_compiler=boxed_nop, partition_fn=partitioner, keep_inference_input_mutations=True
    )


def build_inductor(partitioner: Any) -> Callable:
    """Return torch.compile's backend "inductor" with another partitioner of the joint graph."""
    from torch._inductor.compile_fx import compile_fx

    return lambda graph, inputs: compile_fx(graph, inputs, config_patches={"custom_partitioner_fn": partitioner})


def get_partitioner_class() -> type:
    """Return the base class of what inductor takes as a partitioner."""
    from torch._inductor.custom_graph_pass import CustomPartitionerFn

    return CustomPartitionerFn


def cut_joint_graph(graph: torch.fx.GraphModule, inputs: Any, **keywords: Any) -> tuple:
    """Return forward and backward graph as AOTAutograd's min-cut partitioner, which heeds tags of nodes, cuts them."""
    from torch._functorch.partitioners import min_cut_rematerialization_partition

    return min_cut_rematerialization_partition(graph, inputs, **{"compiler": "inductor", **keywords})


def use_one_gloo_thread() -> None:
    """Give each gloo process group that is built from now on one worker thread instead of two.

    Two of them that end collectives of one group at the same time assign one std::string without a lock
    (`pgStatus_->lastCompletedWorkName` in ProcessGroupGloo::runLoop), and the names of the functional collectives are long
    enough to lie on the heap, which is then corrupt. SimpleFSDP has several collectives of a group in flight.
    """
    if not torch.distributed.is_gloo_available():
        return
    gloo = torch.distributed.ProcessGroupGloo
    build = gloo.__init__
    if getattr(build, "has_one_thread", False):
        return

    def build_with_one_thread(group: Any, store: Any, rank: int, size: int, *args: Any, **keywords: Any) -> None:
        given = args[0] if args else keywords.get("options", keywords.get("timeout", default_pg_timeout))
        if isinstance(given, gloo._Options):
            options = given
        else:  # a timeout; the rest as torch does it
            interfaces = filter(None, os.environ.get("GLOO_SOCKET_IFNAME", "").split(","))
            devices = [gloo.create_device(interface=interface) for interface in interfaces]
            options = gloo._Options()
            options._devices, options._timeout = devices or [gloo.create_default_device()], given
        options._threads = 1
        build(group, store, rank, size, options)

    build_with_one_thread.has_one_thread = True
    gloo.__init__ = build_with_one_thread


def get_gloo_threads(device_mesh: DeviceMesh) -> int:
    """Return the most worker threads that a gloo process group of this mesh has; 0: it has none."""
    cpu, threads = torch.device("cpu"), [0]
    for dim in range(device_mesh.ndim):
        group = device_mesh.get_group(dim)
        backend = group._get_backend(cpu) if cpu in group._device_types else None
        threads.append(getattr(getattr(backend, "options", None), "_threads", 0))
    return max(threads)


def build_fake_store() -> torch.distributed.Store:
    """Return the store of a process group of backend "fake", whose collectives move nothing."""
    from torch.testing._internal.distributed.fake_pg import FakeStore  # here, as torch.testing takes long to import

    return FakeStore()


def get_group_of_collective(op: OpOverload, args: tuple, kwargs: dict) -> torch.distributed.ProcessGroup:
    """Return the process group of a collective as a dispatch mode sees it.

    Functional collectives name their group; those of c10d (FSDP2, DDP, torch.distributed's own calls) hold it boxed.
    """
    arguments = get_arguments(op, args, kwargs)
    if "group_name" in arguments:
        return torch.distributed.distributed_c10d._resolve_process_group(arguments["group_name"])
    boxed = arguments["process_group"]
    return boxed if isinstance(boxed, torch.distributed.ProcessGroup) else torch.distributed.ProcessGroup.unbox(boxed)


def get_sequence_number() -> int:
    """Return the number that the next autograd node of this thread gets."""
    return torch._C._autograd._get_sequence_nr()


def get_backward_sequence_number() -> int | None:
    """Return the number of the autograd node whose backward runs now; None: no backward runs."""
    node = torch._C._current_autograd_node()
    return None if node is None else node._sequence_nr()


def is_inferring_shapes() -> bool:
    """Return whether an op that a dispatch mode sees only infers a shape: inside of a FakeTensor's op, and of DTensor's
    sharding propagation, which runs each new op once on fake tensors of the global shape."""
    return torch._C._meta_in_tls_dispatch_include()
