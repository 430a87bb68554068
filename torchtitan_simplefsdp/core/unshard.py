"""Unshard: the autograd Function whose forward gathers a parameter and whose backward reduces its gradient.

This is SimpleFSDP's one idea (arXiv:2411.00284, section 3.1): the collectives of data parallelism are the forward and
the backward of reading a parameter, so eager mode and one full compiled graph run the same program.

[Note: shapes of one parameter]
- stored (sharded): DTensor, global `[n, ...]`, on the mesh (data-parallel dims, then TP dims).
- local shard: `[ceil(n / W), ...]` on the first ranks, fewer or zero rows on the last ones (W: shard degree, n: rows
  of the TP-local tensor). Collectives want equal parts, so it is padded to `ceil(n / W)` rows for the wire.
- unsharded: the TP-local tensor `[n, ...]`, plain without TP, a DTensor on the TP mesh with it.
The rows above stand for the dim that is sharded; a dim other than 0 is moved to the front around the collective.

Not here: which parameters are read through this (parametrize.py), how a gradient is summed (reduction.py), how several
parameters share one collective (not built yet).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch.autograd.function import FunctionCtx, once_differentiable
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement

from . import compat
from .reduction import Group, Reduction, reduce_gradient


class Collectives(NamedTuple):
    """Constants of the collectives of one parameter; all that enters the graph beside the local shard.

    Args:
        shard_dim: dim of the TP-local tensor that is sharded.
        shard_dim_size: size of that dim before sharding (rows).
        param_dtype: dtype of the unsharded parameter.
        reduction: how the gradient is reduced; its shard group is also the one that gathers.
    """

    shard_dim: int
    shard_dim_size: int
    param_dtype: torch.dtype
    reduction: Reduction

    @property
    def shard(self) -> Group | None:
        """Ranks over which the parameter is sharded; None: it is not."""
        return self.reduction.shard

    @property
    def rows(self) -> int:
        """Rows of a padded shard, `ceil(n / W)`."""
        return -(-self.shard_dim_size // self.shard.degree)


@dataclass(frozen=True)
class TensorParallelSpec:
    """How the unsharded local tensor is a DTensor again on the tensor-parallel mesh.

    Shape and stride are the global ones: without them DTensor would infer a wrong shape for uneven TP shards.
    """

    mesh: DeviceMesh
    placements: tuple[Placement, ...]
    shape: torch.Size
    stride: tuple[int, ...]


def unshard(
    parameter: torch.Tensor, collectives: Collectives, tensor_parallel: TensorParallelSpec | None
) -> torch.Tensor:
    """Return the parameter that a module computes with; its gradient flows back reduced and sharded."""
    local = parameter.to_local() if isinstance(parameter, DTensor) else parameter
    unsharded = _Unshard.apply(local, collectives)
    if tensor_parallel is None:
        return unsharded
    # The backward of from_local brings the gradient to these placements (a norm weight under sequence parallelism
    # has a Partial one), so the data-parallel reduction below it always sees the TP-local gradient, as in FSDP2.
    return DTensor.from_local(
        unsharded,
        tensor_parallel.mesh,
        tensor_parallel.placements,
        run_check=False,
        shape=tensor_parallel.shape,
        stride=tensor_parallel.stride,
    )


class _Unshard(torch.autograd.Function):
    @staticmethod
    def forward(ctx: FunctionCtx, local: torch.Tensor, collectives: Collectives) -> torch.Tensor:
        c = ctx.collectives = collectives
        ctx.stored_dtype, ctx.local_rows = local.dtype, local.size(c.shard_dim) if c.shard else 0
        shard = local.to(c.param_dtype)
        if c.shard is None:
            return shard.view_as(shard)  # a Function must not return its very input
        rows_first = _pad_rows(shard.movedim(c.shard_dim, 0), c.rows)
        full = compat.all_gather(rows_first.contiguous(), c.shard.degree, c.shard.name)
        return full.narrow(0, 0, c.shard_dim_size).movedim(0, c.shard_dim).contiguous()

    @staticmethod
    @once_differentiable  # the collectives have no gradient of their own; a double backward must not pass silently
    def backward(ctx: FunctionCtx, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        c: Collectives = ctx.collectives
        if c.shard is None:
            return reduce_gradient(grad.contiguous(), c.reduction).to(ctx.stored_dtype), None
        rows_first = _pad_rows(grad.movedim(c.shard_dim, 0), c.rows * c.shard.degree)
        part = reduce_gradient(rows_first.contiguous(), c.reduction)
        return part.narrow(0, 0, ctx.local_rows).movedim(0, c.shard_dim).to(ctx.stored_dtype).contiguous(), None


def _pad_rows(rows_first: torch.Tensor, rows: int) -> torch.Tensor:
    """Append zero rows along dim 0 up to `rows`; returns its input where nothing is missing."""
    missing = rows - rows_first.size(0)
    if missing == 0:
        return rows_first
    return F.pad(rows_first, [0, 0] * (rows_first.ndim - 1) + [0, missing])
