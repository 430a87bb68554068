"""Reshard: what autograd saves of an unsharded parameter is a recipe to gather it again, so that it is freed after forward.

Autograd saves the tensors that a backward needs, among them views of the parameters (the transposed weight of a Linear).
While a scope of a bucket that reshards runs, `saved_tensors_hooks` replace a view of an unsharded storage by a recipe, and
unpacking the first recipe of a bucket gathers the bucket again, for all of them. The reduction of the bucket's gradients
frees it. Under activation checkpointing nothing is saved and the forward runs again, which gathers by itself.

Not here: gathering (bucket.py) and prefetching in backward (schedule.py). Source: FSDP2's `reshard_after_forward`, with
the same collectives in the same order; it frees and refills the storage instead.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement

from . import compat
from .bucket import Gather
from .schedule import Schedule


_WITH_STORAGE = (torch.Tensor, compat.FakeTensor)  # other subclasses may have none of their own


@dataclass
class _Recipe:
    """A view of the unsharded parameter `index` of a gather; `dtensor`: what makes it a DTensor again."""

    gather: Gather
    index: int
    size: torch.Size
    stride: tuple[int, ...]
    offset: int
    dtensor: tuple[DeviceMesh, tuple[Placement, ...], torch.Size, tuple[int, ...]] | None

    @torch.no_grad()
    def build(self) -> torch.Tensor:
        tensors = self.gather.bucket.schedule.gather_again(self.gather)
        view = tensors[self.index].as_strided(self.size, self.stride, self.offset)
        if self.dtensor is None:
            return view
        mesh, placements, shape, stride = self.dtensor
        return DTensor.from_local(view, mesh, placements, run_check=False, shape=shape, stride=stride)


@contextmanager
def save_recipes(schedule: Schedule) -> Iterator[None]:
    """Let autograd save recipes of unsharded parameters inside; other tensors are saved as they would be without."""
    is_recomputed = compat.get_backward_id() is not None  # its own backward follows at once
    if schedule.saves_recipes or is_recomputed or compat.is_in_checkpoint():
        yield
        return
    outer = compat.get_saved_tensors_hooks()

    def pack(tensor: torch.Tensor) -> Any:
        recipe = _build_recipe(tensor, schedule)
        if recipe is not None:
            return recipe
        # detached, as an output of the node that saves it would keep itself alive; autograd restores its graph
        return _Packed(outer[0](tensor), outer[1]) if outer else tensor.detach()

    schedule.saves_recipes = True
    try:
        with torch.autograd.graph.saved_tensors_hooks(pack, _unpack):
            yield
    finally:
        schedule.saves_recipes = False


@dataclass
class _Packed:
    """What the hooks around these made of a tensor (`save_on_cpu` for one)."""

    value: Any
    unpack: Callable[[Any], torch.Tensor]


def _unpack(saved: Any) -> torch.Tensor:
    if isinstance(saved, _Recipe):
        return saved.build()
    return saved.unpack(saved.value) if isinstance(saved, _Packed) else saved


def _build_recipe(tensor: torch.Tensor, schedule: Schedule) -> _Recipe | None:
    local = compat.get_local(tensor)
    found = schedule.find(local) if type(local) in _WITH_STORAGE else None
    if found is None or tensor.dtype != found[0].bucket.wire.param_dtype:
        return None
    gather, index = found
    gather.is_saved = True
    dtensor = None
    if isinstance(tensor, DTensor):
        dtensor = tensor.device_mesh, tensor.placements, tensor.shape, tensor.stride()
    return _Recipe(gather, index, local.size(), local.stride(), local.storage_offset(), dtensor)
