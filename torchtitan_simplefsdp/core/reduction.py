"""Reduction: how a gradient is summed over the data-parallel ranks, with the native collectives or exactly.

The native collectives (reduce_scatter, all_reduce) add in an order that depends on backend, shape and mode, so beyond two
ranks `replicate`, `fully_shard` and `hybrid_shard` can drift apart in the last bits. The exact reduction only moves data
(all_to_all, all_gather) and adds by itself, every element in one order: see [Note: exact sum].

[Note: exact sum]
W ranks hold a gradient each. It is cut into W pieces and rank i gets piece i of everyone, so it holds `[W, piece]`, in
ascending order of global ranks. Rows are added pairwise, neighbours first, in at least float32, and rounded once to the
dtype of the reduction. So an element depends only on its W values and the ranks' order, not on mode, mesh, shape, padding
or on where the cuts are. What the modes differ in is which pieces a rank wants in the end: `fully_shard` keeps its own,
`replicate` gathers all of them, and in `hybrid_shard` the replicas of a shard, which hold its pieces, gather those.

Not here: when a gradient is reduced (unshard.py, accumulation.py).
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch.distributed.device_mesh import DeviceMesh

from . import compat

REDUCTIONS = ("native", "exact")


class Group(NamedTuple):
    """A process group by name, as the functional collectives address it, and its size."""

    name: str
    degree: int


class ExactSum(NamedTuple):
    """Groups and order of an exact sum.

    Args:
        ranks: all ranks whose gradients are summed (W).
        replicas: those of them that end with the same values (R); None: each has a shard of its own.
        order: which of the W pieces each rank of `ranks` gets; piece `s * R + r` is the r-th part of shard s. Empty: the
            i-th rank gets the i-th piece.
    """

    ranks: Group
    replicas: Group | None
    order: tuple[int, ...]


class Reduction(NamedTuple):
    """Constants of the sum of one gradient over data-parallel ranks.

    Args:
        dtype: dtype on the wire and of the result; None: the dtype of the incoming gradient.
        shard: ranks that keep a shard of the sum each; None: nothing is sharded.
        replicate: groups of ranks that keep the same, one per mesh dim.
        exact: how to sum exactly; None: the native collectives.
    """

    dtype: torch.dtype | None = None
    shard: Group | None = None
    replicate: tuple[Group, ...] = ()
    exact: ExactSum | None = None

    @property
    def has_ranks(self) -> bool:
        """Whether there is anything to sum over."""
        return self.shard is not None or bool(self.replicate)

    def without_replicas(self) -> Reduction:
        """Return the part of this sum that is over the ranks with other shards."""
        exact = ExactSum(self.shard, None, ()) if self.exact and self.shard else None
        return self._replace(replicate=(), exact=exact)

    def over_replicas(self) -> Reduction:
        """Return the rest of this sum after `without_replicas`."""
        if self.shard is None:
            return self
        (group,) = self.replicate
        return self._replace(shard=None, exact=ExactSum(group, group, ()) if self.exact else None)


def validate_reduction(reduction: str, device_mesh: DeviceMesh) -> None:
    """Raise unless `reduction` exists and works on this mesh."""
    if reduction not in REDUCTIONS:
        raise ValueError(f"data_parallel: unknown reduction {reduction!r}. Valid reductions: 'native', 'exact'.")
    if reduction == "exact" and device_mesh.ndim > 1 and not device_mesh.mesh_dim_names:
        raise ValueError(
            "data_parallel: reduction 'exact' needs names of the mesh dims, from which torch makes one group of all ranks. "
            "Pass mesh_dim_names when building the mesh."
        )


def build_reduction(
    device_mesh: DeviceMesh, shard_dim: int | None, replicate_dims: tuple[int, ...], dtype: torch.dtype | None, exact: bool
) -> Reduction:
    """Return the reduction over these dims of the mesh; dims of degree 1 are left out.

    An exact sum over several dims needs one process group of all their ranks: the first call creates it, so all ranks of the mesh
    must call this alike.
    """

    def get_groups(dims: tuple[int, ...]) -> tuple[Group, ...]:
        return tuple(
            Group(compat.get_group_name(device_mesh, dim), device_mesh.size(dim)) for dim in dims if device_mesh.size(dim) > 1
        )

    shard = get_groups(() if shard_dim is None else (shard_dim,))
    replicate = get_groups(replicate_dims)
    reduction = Reduction(dtype, shard[0] if shard else None, replicate)
    if not exact or not (shard or replicate):
        return reduction
    if not shard and device_mesh.size() == 2:
        return reduction  # two numbers have one sum, and one all_reduce is faster than two collectives
    return reduction._replace(exact=_build_exact_sum(device_mesh, reduction))


def _build_exact_sum(device_mesh: DeviceMesh, reduction: Reduction) -> ExactSum:
    groups = (*reduction.replicate, *([reduction.shard] if reduction.shard else []))
    if len(groups) == 1:
        return ExactSum(groups[0], None if reduction.shard else groups[0], ())
    name, ranks = compat.get_flat_group(device_mesh)
    flat = Group(name, len(ranks))
    if not reduction.shard:
        return ExactSum(flat, flat, ())
    # ranks of one dim's group ascend (validated for the shard dim, made so by torch for the other one)
    (replicas,) = reduction.replicate
    pieces = {
        rank: shard * replicas.degree + replica
        for shard, column in enumerate(device_mesh.mesh.T.tolist())
        for replica, rank in enumerate(sorted(column))
    }
    return ExactSum(flat, replicas, tuple(pieces[rank] for rank in ranks))


def reduce_gradient(gradient: torch.Tensor, reduction: Reduction) -> torch.Tensor:
    """Return the sum of `gradient` over the ranks, in `reduction.dtype`; without ranks to sum over, `gradient` itself.

    Args:
        gradient: contiguous; with a shard group `[shard degree * rows, ...]`, otherwise of any shape.

    Returns:
        With a shard group this rank's `[rows, ...]`, otherwise the same shape.
    """
    if not reduction.has_ranks:
        return gradient
    return finish_reduction(start_reduction(gradient, reduction), get_reduced_shape(gradient, reduction), reduction)


def get_reduced_shape(gradient: torch.Tensor, reduction: Reduction) -> torch.Size:
    """Return the shape of the sum of `gradient`."""
    if reduction.shard is None:
        return gradient.shape
    return torch.Size((gradient.size(0) // reduction.shard.degree, *gradient.shape[1:]))


def start_reduction(gradient: torch.Tensor, reduction: Reduction, may_overwrite: bool = False) -> torch.Tensor:
    """Issue the first collective of a reduction that has ranks; nothing may read what it returns but `finish_reduction`.

    `may_overwrite`: whether nobody else needs `gradient`.
    """
    gradient = gradient.to(reduction.dtype or gradient.dtype)
    if reduction.exact is not None:
        return compat.all_to_all(_cut(gradient, reduction.exact), reduction.exact.ranks.degree, reduction.exact.ranks.name)
    if reduction.shard is not None:
        return compat.reduce_scatter(gradient, reduction.shard.degree, reduction.shard.name)
    return compat.all_reduce(gradient, reduction.replicate[0].name, may_overwrite)


def finish_reduction(started: torch.Tensor, shape: torch.Size, reduction: Reduction) -> torch.Tensor:
    """Wait for what `start_reduction` returned and return the sum, of this shape, after the collectives that are left."""
    reduced = compat.wait(started)
    if reduction.exact is not None:
        mine = _sum_rows(reduced).to(reduced.dtype)
        if replicas := reduction.exact.replicas:
            mine = compat.wait(compat.all_gather(mine, replicas.degree, replicas.name))
        return mine.narrow(0, 0, shape.numel()).view(shape)
    for group in reduction.replicate if reduction.shard else reduction.replicate[1:]:
        reduced = compat.wait(compat.all_reduce(reduced, group.name, may_overwrite=True))
    return reduced


def _cut(gradient: torch.Tensor, exact: ExactSum) -> torch.Tensor:
    """Return the gradient as `[W, piece]`, the i-th piece being that for the i-th rank; see [Note: exact sum]."""
    ranks, replicas = exact.ranks.degree, exact.replicas.degree if exact.replicas else 1
    shards = ranks // replicas
    size = gradient.numel() // shards  # elements of a shard
    missing = -size % replicas
    parts = F.pad(gradient.reshape(shards, size), [0, missing]) if missing else gradient
    pieces = parts.reshape(ranks, (size + missing) // replicas)
    return pieces.index_select(0, torch.tensor(exact.order, device=pieces.device)) if exact.order else pieces


def _sum_rows(rows: torch.Tensor) -> torch.Tensor:
    """Sum `[W, n]` over W: neighbours first, in at least float32."""
    rows = rows.to(torch.promote_types(rows.dtype, torch.float32))
    while (count := rows.size(0)) > 1:
        sums = rows[0 : count - 1 : 2] + rows[1::2]
        rows = torch.cat([sums, rows[count - 1 :]]) if count % 2 else sums
    return rows[0]
