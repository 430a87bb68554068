"""Gradient norm and clipping that do not depend on how dim 0 of gradients is sharded: the same bits in every mode.

A norm of shards depends on their sizes (3e-5 relative at 2M elements in fp32 on CPU) and, through clipping, makes the same
training drift apart between layouts. More precision makes that rare, not impossible, so here no step depends on an order:

[Note: a sum without an order]
1. Squares of a row (dim 0, which data parallelism cuts between rows) are added in fp64 by halves, with elementwise
   additions, so the number of rows that a rank has does not matter. Ranks with copies share the rows.
2. Each sum of a row is split into parts that are multiples of decreasing units, the same units on all ranks. Parts of one
   unit are added exactly, as whole numbers are, whatever the order: within a rank and in the all_reduce.
With e the exponent of the largest sum, the first unit is 2^(e-20), so a part has 21 bits and 2^32 of them fit the 53 bits of
fp64; each next unit is 2^20 times smaller. What is left after 4 units is below 2^-80 of the largest sum, per row.
Sums must be fp64 numbers: fp32 and 16-bit gradients of any size, fp64 ones from 2^-500 to 2^450.
Source: the pre-rounding of J. Demmel and H. D. Nguyen, "Fast Reproducible Floating-Point Summation" (ARITH 2013).

Not here: other norms than the 2-norm.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from . import compat


@torch.no_grad()
def clip_grad_norm_(
    parameters: Iterable[torch.Tensor], max_norm: float, groups: Sequence[dist.ProcessGroup] = ()
) -> torch.Tensor:
    """Scale the gradients in place so that their total 2-norm is at most `max_norm`; return the norm before scaling.

    Args:
        parameters: sharded or plain; those without gradient are skipped. A plain gradient counts once, as replicated.
        max_norm: largest total norm allowed. A norm that is inf or nan is returned as it is and makes gradients zero or
            nan, as with `torch.nn.utils.clip_grad_norm_`.
        groups: process groups whose ranks hold other parameters (pipeline stages).

    Returns:
        fp32 scalar on the gradients' device, the same on every rank.
    """
    parameters = list(parameters)
    device = parameters[0].device if parameters else None
    gradients = [p.grad for p in parameters if p.grad is not None]
    total_norm = get_total_norm(gradients, groups, device).float()
    # As torch.nn.utils.clip_grads_with_norm_ does, but on local tensors: it takes neither two meshes nor two kinds at once.
    coefficient = (max_norm / (total_norm + 1e-6)).clamp(max=1.0)
    compat.multiply_in_place([g.to_local() if isinstance(g, DTensor) else g for g in gradients], coefficient)
    return total_norm


@torch.no_grad()
def get_total_norm(
    gradients: Sequence[torch.Tensor], groups: Sequence[dist.ProcessGroup] = (), device: torch.device | None = None
) -> torch.Tensor:
    """Return the total 2-norm of gradients as an fp64 scalar; two small all_reduces per mesh dim and group.

    The same bits for any sharding of dim 0, see [Note: a sum without an order]; other dims may be cut by tensor parallelism.

    Args:
        gradients: sharded or plain; may be empty, for a pipeline stage that has none.
        groups: process groups whose ranks hold other gradients.
        device: where to sum; None: the device of the first gradient, CPU without any.

    Raises:
        ValueError: a gradient with a Partial placement.
    """
    if device is None:
        device = gradients[0].device if gradients else torch.device("cpu")
    rows: dict[DeviceMesh | None, list[torch.Tensor]] = {None: []}  # None: plain gradients
    for gradient in gradients:
        if isinstance(gradient, DTensor):
            rows.setdefault(gradient.device_mesh, []).append(_get_sums_of_rows(_get_share(gradient)))
        else:
            rows[None].append(_get_sums_of_rows(gradient))
    no_rows = torch.zeros(1, dtype=torch.float64, device=device)
    by_mesh = {mesh: torch.cat([no_rows, *parts]) for mesh, parts in rows.items()}

    largest = torch.cat(list(by_mesh.values())).max()
    for mesh in by_mesh:
        _all_reduce_over_mesh(largest, mesh, dist.ReduceOp.MAX)
    for group in groups:
        dist.all_reduce(largest, dist.ReduceOp.MAX, group=group)

    total = torch.zeros(_UNITS, dtype=torch.float64, device=device)
    for mesh, sums in by_mesh.items():
        parts = _split_and_sum(sums, largest)
        _all_reduce_over_mesh(parts, mesh, dist.ReduceOp.SUM)
        total += parts
    for group in groups:
        dist.all_reduce(total, group=group)
    # an inf leaves inf - inf in the smaller units
    return torch.where(total[0].isfinite(), total.flip(0).sum(), total[0]).sqrt()


_UNITS = 4
_HEADROOM_BITS = 32
_BLOCK_ELEMENTS = 2**22  # what is converted to fp64 at once: 32 MiB


def _get_share(gradient: DTensor) -> torch.Tensor:
    """Return the local rows that this rank adds up: copy r of R takes every R-th row."""
    copy, copies = 0, 1
    for mesh_dim, placement in enumerate(gradient.placements):
        if placement.is_partial():
            raise ValueError(
                "get_total_norm: got a gradient with a Partial placement, whose norm is not that of its parts. "
                "Redistribute it to the placements of its parameter first."
            )
        if placement.is_replicate():
            size = gradient.device_mesh.size(mesh_dim)
            copy, copies = copy * size + gradient.device_mesh.get_local_rank(mesh_dim), copies * size
    local = gradient.to_local()
    return (local if local.ndim else local.view(1))[copy::copies]


def _get_sums_of_rows(gradient: torch.Tensor) -> torch.Tensor:
    """Return the sums of squares `[rows]` in fp64 of a gradient `[rows, ...]`."""
    if gradient.numel() == 0:
        return torch.zeros(0, dtype=torch.float64, device=gradient.device)
    rows = gradient.reshape(gradient.size(0) if gradient.ndim else 1, -1)
    blocks = rows.split(max(1, _BLOCK_ELEMENTS // rows.size(1)))
    return torch.cat([_add_by_halves(block.to(torch.float64, copy=True).square_()) for block in blocks])


def _add_by_halves(values: torch.Tensor) -> torch.Tensor:
    """Return the sums `[rows]` of `[rows, columns]`, which is overwritten."""
    while (columns := values.size(1)) > 1:
        half = (columns + 1) // 2
        values[:, : columns - half] += values[:, half:]
        values = values[:, :half]
    return values.squeeze(1)


def _split_and_sum(sums: torch.Tensor, largest: torch.Tensor) -> torch.Tensor:
    """Return the sum of `sums` [n], each at most `largest`, as parts `[_UNITS]` that are multiples of decreasing units."""
    exponent = torch.frexp(largest.nan_to_num(0.0, 2.0**900).clamp(max=2.0**900)).exponent
    parts = []
    for _ in range(_UNITS):
        # Adding and subtracting a number of this size rounds to multiples of its last bit.
        rounder = torch.ldexp(torch.full_like(largest, 1.5), exponent + _HEADROOM_BITS)
        part = (sums + rounder) - rounder
        parts.append(part.sum())
        sums = sums - part
        exponent = exponent - (52 - _HEADROOM_BITS)
    return torch.stack(parts)


def _all_reduce_over_mesh(tensor: torch.Tensor, mesh: DeviceMesh | None, op: dist.ReduceOp) -> None:
    for mesh_dim in range(mesh.ndim if mesh is not None else 0):
        if mesh.size(mesh_dim) > 1:
            dist.all_reduce(tensor, op, group=mesh.get_group(mesh_dim))
