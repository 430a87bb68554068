"""Trace: the collectives and ops of a step in order, with bytes, groups, FLOPs and phase.

A `TorchDispatchMode` sees every op of eager forward, backward and optimizer, in a real run and on FakeTensors under a
fake process group, so rank 0 of thousands is traced in one process without memory for the model. Collectives of
anyone are seen: the functional ones that core/ and DTensor issue and those of c10d (torch.distributed's own calls), and
those of compiled code, which runs as compiled.

[Note: phase and place]
An op is in `backward` while an autograd node runs (recomputation of activation checkpointing too), in `forward` while
one of the given modules runs, else in `other` (optimizer, gradient norm). `where` is the label of that module, and in
backward of the module whose forward made the running autograd node: nodes are numbered in the order in which they are
made.

Not here: how long anything takes (cost_model.py), what a step is made of (segments.py).
"""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter
from collections.abc import Callable, Iterable
from contextlib import ExitStack
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from torchtitan_simplefsdp.core import compat

from .cost_model import get_wire_bytes
from .flops import count_bytes, count_flops

# Part of an op's name -> kind; the first that fits counts. Barriers and waits move no data.
_KINDS = {
    "all_gather": "all_gather",
    "allgather": "all_gather",
    "reduce_scatter": "reduce_scatter",
    "all_reduce": "all_reduce",
    "allreduce": "all_reduce",
    "all_to_all": "all_to_all",
    "alltoall": "all_to_all",
    "broadcast": "broadcast",
    "send": "send",
    "recv": "recv",
    "reduce": "reduce",
    "gather": "gather",
    "scatter": "scatter",
}
_NAMESPACES = ("_c10d_functional", "c10d", "_dtensor")


class Collective(NamedTuple):
    """One collective as this rank issued it.

    Args:
        kind: 'all_gather', 'reduce_scatter', 'all_reduce', 'all_to_all', or another name of torch.distributed.
        group: name of the mesh dim; of the process group where no given mesh has it.
        ranks: global ranks of the group.
        bytes: bytes of the whole tensor: what all_gather returns, what reduce_scatter takes.
        dtype: dtype on the wire.
        phase: 'forward', 'backward' or 'other'. See [Note: phase and place].
        where: label of the module.
    """

    kind: str
    group: str
    ranks: tuple[int, ...]
    bytes: int
    dtype: torch.dtype
    phase: str
    where: str

    @property
    def wire_bytes(self) -> float:
        """Bytes that this rank sends."""
        return get_wire_bytes(self.kind, self.bytes, len(self.ranks))


class Compute(NamedTuple):
    """One op that is not a collective; `dtype` is that of its first tensor."""

    op: str
    flops: int
    bytes: int
    dtype: torch.dtype
    phase: str
    where: str


def trace_step(
    step: Callable[[], Any], modules: Iterable[tuple[str, nn.Module]] = (), meshes: Iterable[DeviceMesh] = ()
) -> list[Collective | Compute]:
    """Run `step` once and return what it did, in order. Every rank of a real group must call this alike.

    Run a step with DTensors once before: DTensor infers the shape of each new op by running it on fake tensors of the
    global shape, which looks like an op of the step then. A copy of the model can run it, as the first step of a model
    with SimpleFSDP prefetches nothing: later ones gather, and end reductions, where the bucket before is computed.

    Args:
        step: forward, backward and what else is to be seen.
        modules: pairs of label and module; their forward is phase 'forward', the innermost counts. Labels may repeat.
        meshes: meshes whose dim names stand for their process groups.
    """
    mode = _Trace(_get_group_names(meshes))
    with ExitStack() as stack:
        for label, module in modules:
            stack.callback(module.register_forward_pre_hook(mode.build_enter(label)).remove)
            stack.callback(module.register_forward_hook(mode.leave, always_call=True).remove)
        stack.enter_context(mode)
        step()
    return mode.events


def trace_collectives(
    step: Callable[[], Any], modules: Iterable[tuple[str, nn.Module]] = (), meshes: Iterable[DeviceMesh] = ()
) -> list[Collective]:
    """Run `step` once and return its collectives in order; arguments as for `trace_step`."""
    return [event for event in trace_step(step, modules, meshes) if isinstance(event, Collective)]


def count_collectives(collectives: Iterable[Collective]) -> Counter[tuple[str, str, str]]:
    """Count by (phase, kind, group)."""
    return Counter((c.phase, c.kind, c.group) for c in collectives)


def _get_group_names(meshes: Iterable[DeviceMesh]) -> dict[str, str]:
    return {
        compat.get_group_name(mesh, dim): name
        for mesh in meshes
        for dim, name in enumerate(mesh.mesh_dim_names or ())
        if mesh.size(dim) > 1
    }


class _Trace(compat.TorchDispatchMode):
    def __init__(self, group_names: dict[str, str]) -> None:
        super().__init__()
        self.events: list[Collective | Compute] = []
        self._group_names = group_names
        self._ranks: dict[str, tuple[int, ...]] = {}
        self._running: list[str] = []  # labels of the modules whose forward runs, innermost last
        self._numbers, self._labels = [0], [""]  # from this number on, autograd nodes are made by this module

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        return True  # otherwise compiled code would not run as compiled below this mode

    def build_enter(self, label: str) -> Callable:
        def enter(module: nn.Module, args: tuple) -> None:
            self._running.append(label)
            self._note_label()

        return enter

    def leave(self, module: nn.Module, args: tuple, output: Any) -> None:
        self._running.pop()
        self._note_label()

    def _note_label(self) -> None:
        # a recomputed forward makes nodes that no backward of ours visits; its label is that of the node that runs
        if compat.get_backward_sequence_number() is None:
            self._numbers.append(compat.get_sequence_number())
            self._labels.append(self._running[-1] if self._running else "")

    def _get_place(self) -> tuple[str, str]:
        number = compat.get_backward_sequence_number()
        if number is not None:
            return "backward", self._labels[bisect_right(self._numbers, number) - 1]
        return ("forward", self._running[-1]) if self._running else ("other", "")

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented  # DTensor then runs the op as ops on local tensors, which come here
        kwargs = kwargs or {}
        if compat.is_inferring_shapes():
            return func(*args, **kwargs)
        out = func(*args, **kwargs)
        tensors = [leaf for leaf in compat.tree_leaves((args, kwargs, out)) if isinstance(leaf, torch.Tensor)]
        if not tensors:
            return out
        if func.namespace in _NAMESPACES:
            name = func.name().partition("::")[2]
            kind = next((kind for part, kind in _KINDS.items() if part in name), None)
            if kind:
                self.events.append(self._get_collective(kind, func, args, kwargs, tensors[0].dtype))
        elif nbytes := count_bytes(func, args, kwargs, out):
            flops = count_flops(func, args, kwargs, out)
            self.events.append(Compute(func.name(), flops, nbytes, tensors[0].dtype, *self._get_place()))
        return out

    def _get_collective(self, kind: str, func, args: tuple, kwargs: dict, dtype: torch.dtype) -> Collective:
        group = compat.get_group_of_collective(func, args, kwargs)
        name = group.group_name
        if name not in self._ranks:
            self._ranks[name] = tuple(torch.distributed.get_process_group_ranks(group))
        ranks = self._ranks[name]
        # of an op that has its output among its arguments, the larger of both is the whole tensor
        nbytes = max(
            sum(leaf.nbytes for leaf in compat.tree_leaves(argument) if isinstance(leaf, torch.Tensor))
            for argument in (*args, *kwargs.values())
        )
        if kind == "all_gather" and func.namespace == "_c10d_functional" and not compat.is_in_place(func):
            nbytes *= len(ranks)
        return Collective(kind, self._group_names.get(name, name), ranks, nbytes, dtype, *self._get_place())
