"""Unshard: the autograd Function whose forward gathers parameters and whose backward reduces their gradients.

This is SimpleFSDP's one idea (arXiv:2411.00284, section 3.1): the collectives of data parallelism are the forward and
the backward of reading a parameter, so eager mode and one full compiled graph run the same program. The parameters of a
bucket travel in one collective (section 4).

[Note: shapes of one parameter]
- stored (sharded): DTensor, global `[n, ...]`, on the mesh (data-parallel dims, then TP dims).
- local shard: `[ceil(n / W), ...]` on the first ranks, fewer or zero rows on the last ones (W: shard degree, n: rows
  of the TP-local tensor). Collectives want equal parts, so it is padded to `ceil(n / W)` rows for the wire.
- unsharded: the TP-local tensor `[n, ...]`, plain without TP, a DTensor on the TP mesh with it.
The rows above stand for the dim that is sharded; a dim other than 0 is moved to the front around the collective.

[Note: shapes of a bucket on the wire]
- gathered: each rank sends its padded shards, flat and one after the other, `[c]`; all of them are `[W, c]`.
- reduced: the gradients in the same order, `[W, c]`; a rank keeps `[c]`. So an element meets the same ranks in the same
  part of the collective as in a bucket of one parameter.
- without a shard group nothing is gathered, and a rank keeps all of `[W, c]`, W being the ranks whose gradients are summed:
  so `replicate` adds each element like `fully_shard`. Where the order makes no difference (two ranks, an exact sum) that
  is spared, and W is 1.

Not here: which parameters share a bucket (bucket_plan.py), when its collectives are issued (bucket.py), how a gradient
is summed (reduction.py).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch.autograd.function import FunctionCtx, once_differentiable
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement

from . import compat
from .reduction import Group, Reduction, finish_reduction, start_reduction


class Wire(NamedTuple):
    """Constants of the collectives of a bucket; all that enters a graph beside the local shards.

    Args:
        cuts: how each parameter is cut.
        param_dtype: dtype of the unsharded parameters.
        reduction: how their gradients are reduced; its shard group is also the one that gathers.
    """

    cuts: tuple[Cut, ...]
    param_dtype: torch.dtype
    reduction: Reduction

    @property
    def shard(self) -> Group | None:
        """Ranks over which the parameters are sharded; None: they are not."""
        return self.reduction.shard

    @property
    def pieces(self) -> int:
        """W of [Note: shapes of a bucket on the wire]."""
        if self.shard:
            return self.shard.degree
        reduction = self.reduction
        if reduction.exact or len(reduction.replicate) != 1 or reduction.replicate[0].degree == 2:
            return 1
        return reduction.replicate[0].degree

    @property
    def padded_shapes(self) -> list[tuple[int, ...]]:
        """Shapes of the padded shards, `[ceil(n / W), ...]`; a parameter without dims has one row."""
        return [(-(-cut.shape[0] // self.pieces), *cut.shape[1:]) if cut.shape else (1,) for cut in self.cuts]

    def select(self, indices: Sequence[int]) -> Wire:
        """Return the constants of a part of the bucket."""
        return self if len(indices) == len(self.cuts) else self._replace(cuts=tuple(self.cuts[i] for i in indices))


class Cut(NamedTuple):
    """How one parameter is cut into the shards of data parallelism.

    Args:
        shape: the TP-local tensor's, moved so that the sharded dim is the first; `[n, ...]`.
        dim: where that dim belongs.
        local_rows: rows that this rank stores.
    """

    shape: tuple[int, ...]
    dim: int
    local_rows: int

    @classmethod
    def of_whole(cls, tensor: torch.Tensor) -> Cut:
        """Return the cut of a tensor that each rank stores as a whole."""
        return cls(tuple(tensor.shape), 0, tensor.size(0) if tensor.ndim else 0)


@dataclass(frozen=True)
class TensorParallelSpec:
    """How the unsharded local tensor is a DTensor again on the tensor-parallel mesh.

    Shape and stride are the global ones: without them DTensor would infer a wrong shape for uneven TP shards.
    """

    mesh: DeviceMesh
    placements: tuple[Placement, ...]
    shape: torch.Size
    stride: tuple[int, ...]

    def __deepcopy__(self, memo: dict) -> TensorParallelSpec:
        return self  # meshes are not copied

    def wrap(self, unsharded: torch.Tensor) -> DTensor:
        """Return the DTensor.

        The backward of from_local brings the gradient to these placements (a norm weight under sequence parallelism
        has a Partial one), so the data-parallel reduction below it always sees the TP-local gradient, as in FSDP2.
        """
        return DTensor.from_local(
            unsharded, self.mesh, self.placements, run_check=False, shape=self.shape, stride=self.stride
        )


def unshard(shards: Sequence[torch.Tensor], wire: Wire) -> tuple[torch.Tensor, ...]:
    """Return the parameters that modules compute with; their gradients flow back reduced and sharded.

    Args:
        shards: local shards, as `wire.cuts` describes them.
    """
    return _Unshard.apply(wire, *shards)


class _Unshard(torch.autograd.Function):
    @staticmethod
    def forward(ctx: FunctionCtx, wire: Wire, *shards: torch.Tensor) -> tuple[torch.Tensor, ...]:
        ctx.wire, ctx.stored_dtypes = wire, [shard.dtype for shard in shards]
        return finish_gather(start_gather(shards, wire), shards, wire)

    @staticmethod
    @once_differentiable  # the collectives have no gradient of their own; a double backward must not pass silently
    def backward(ctx: FunctionCtx, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        wire: Wire = ctx.wire
        reduced = finish_reduce(start_reduce(gradients, wire), wire)
        return None, *(gradient.to(dtype) for gradient, dtype in zip(reduced, ctx.stored_dtypes))


def start_gather(shards: Sequence[torch.Tensor], wire: Wire) -> torch.Tensor | None:
    """Issue the all_gather; nothing may read what it returns but `finish_gather`. None: nothing to gather."""
    if wire.shard is None:
        return None
    flat = [
        _pad_rows(shard.to(wire.param_dtype).movedim(cut.dim, 0), padded[0]).reshape(-1)
        for shard, cut, padded in zip(shards, wire.cuts, wire.padded_shapes)
    ]
    return compat.all_gather(flat[0] if len(flat) == 1 else torch.cat(flat), wire.shard.degree, wire.shard.name)


def finish_gather(
    started: torch.Tensor | None, shards: Sequence[torch.Tensor], wire: Wire
) -> tuple[torch.Tensor, ...]:
    """Wait for the all_gather and return the unsharded parameters, each with a storage of its own."""
    if wire.shard is None:
        # a Function must not return its very input
        return tuple(shard.view_as(shard) if shard.dtype == wire.param_dtype else shard.to(wire.param_dtype) for shard in shards)
    return _unpack(compat.wait(started), wire)


def start_reduce(gradients: Sequence[torch.Tensor], wire: Wire) -> torch.Tensor:
    """Issue the first collective of the reduction; nothing may read what it returns but `finish_reduce`."""
    pieces = [
        _pad_rows(gradient.movedim(cut.dim, 0) if cut.shape else gradient.view(1), wire.pieces * padded[0])
        .reshape(wire.pieces, -1)
        for gradient, cut, padded in zip(gradients, wire.cuts, wire.padded_shapes)
    ]
    packed = (pieces[0] if len(pieces) == 1 else torch.cat(pieces, dim=1)).view(-1)
    return start_reduction(packed, wire.reduction, may_overwrite=len(pieces) > 1) if wire.reduction.has_ranks else packed


def finish_reduce(started: torch.Tensor, wire: Wire) -> tuple[torch.Tensor, ...]:
    """Wait for the reduction and return the gradients of the local shards, in the dtype of the reduction."""
    size = sum(map(math.prod, wire.padded_shapes)) * (1 if wire.shard else wire.pieces)
    reduced = finish_reduction(started, torch.Size((size,)), wire.reduction) if wire.reduction.has_ranks else started
    if wire.shard is None:
        return _unpack(reduced, wire)
    padded = wire.padded_shapes
    return tuple(
        piece.view(shape).narrow(0, 0, cut.local_rows).movedim(0, cut.dim).contiguous()
        for piece, shape, cut in zip(reduced.split([math.prod(shape) for shape in padded]), padded, wire.cuts)
    )


def _unpack(flat: torch.Tensor, wire: Wire) -> tuple[torch.Tensor, ...]:
    """Return the whole parameters (or gradients) that lie in `[W, c]`."""
    padded = wire.padded_shapes
    sizes = [math.prod(shape) for shape in padded]
    if wire.pieces == 1 or len(sizes) == 1:
        parts = flat.split([size * wire.pieces for size in sizes])
    else:
        parts = torch.split_with_sizes_copy(flat.view(wire.pieces, sum(sizes)), sizes, dim=1)
    return tuple(
        part.view(wire.pieces * shape[0], *shape[1:]).narrow(0, 0, cut.shape[0]).movedim(0, cut.dim).contiguous()
        if cut.shape
        else part.view(-1)[0]
        for part, shape, cut in zip(parts, padded, wire.cuts)
    )


def _pad_rows(rows_first: torch.Tensor, rows: int) -> torch.Tensor:
    """Append zero rows along dim 0 up to `rows`; returns its input where nothing is missing."""
    missing = rows - rows_first.size(0)
    if missing == 0:
        return rows_first
    return F.pad(rows_first, [0, 0] * (rows_first.ndim - 1) + [0, missing])
