"""Placements: from mode and mesh to where each piece of a parameter lives, alone and over tensor parallelism.

Not here: moving any data; these are pure functions of shapes and meshes.
"""

from __future__ import annotations

import difflib

from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard

from . import compat

# mode -> how many mesh dims it needs
MODES = {"replicate": 1, "fully_shard": 1, "hybrid_shard": 2}


def validate_mode(mode: str, device_mesh: DeviceMesh) -> None:
    """Raise unless `mode` exists and the mesh has the number of dims and the order of ranks that it needs."""
    if not isinstance(device_mesh, DeviceMesh):
        raise TypeError(
            f"data_parallel: device_mesh must be a DeviceMesh, got {type(device_mesh).__name__}. "
            "Build one with torch.distributed.device_mesh.init_device_mesh."
        )
    if mode not in MODES:
        close = difflib.get_close_matches(str(mode), MODES, n=1)
        suggestion = f" (did you mean {close[0]!r}?)" if close else ""
        valid = ", ".join(repr(m) for m in MODES)
        raise ValueError(f"data_parallel: unknown mode {mode!r}{suggestion}. Valid modes: {valid}.")
    needed = MODES[mode]
    if device_mesh.ndim != needed:
        names = device_mesh.mesh_dim_names or [f"dim{i}" for i in range(device_mesh.ndim)]
        dims = ", ".join(f"{name}={size}" for name, size in zip(names, device_mesh.shape))
        if needed == 2:
            remedy = "Pass a mesh of (dp_replicate, fsdp), or use mode='replicate' or mode='fully_shard'."
        elif device_mesh.ndim == 2:
            remedy = f'Pass mesh["{names[-1] if mode == "fully_shard" else names[0]}"], or use mode=\'hybrid_shard\'.'
        else:
            remedy = "Pass one dim of it."
        raise ValueError(
            f"data_parallel: mode {mode!r} needs a {needed}D mesh, got {device_mesh.ndim}D mesh ({dims}). {remedy}"
        )
    _validate_order(mode, device_mesh)


def _validate_order(mode: str, device_mesh: DeviceMesh) -> None:
    ranks = device_mesh.mesh
    if mode != "replicate" and not bool((ranks.diff() > 0).all()):
        raise ValueError(
            f"data_parallel: mode {mode!r} got a mesh whose ranks do not ascend along its shard dim: {ranks.tolist()}. Torch's "
            "process groups sort their ranks, so DTensor would describe other rows than a rank holds. Sort each row."
        )


def get_data_parallel_placements(mode: str, shard_dim: int) -> tuple[Placement, ...]:
    """Return the placements on the data-parallel mesh dims of a parameter sharded along `shard_dim`."""
    if mode == "replicate":
        return (Replicate(),)
    if mode == "fully_shard":
        return (Shard(shard_dim),)
    return (Replicate(), Shard(shard_dim))


def get_spanned_placements(
    parameter: DTensor, dp_mesh: DeviceMesh, dp_placements: tuple[Placement, ...]
) -> tuple[DeviceMesh, tuple[Placement, ...]]:
    """Return mesh and placements of a tensor-parallel parameter that is data parallel as well.

    The mesh spans the data-parallel dims, then those of the parameter. Where both cut the same dim, TP cut it first,
    which is what `_StridedShard` records; so a checkpoint describes itself.
    Example: weight global [250, 64], Shard(0) on tp=2, with fully_shard on fsdp=2:
    (_StridedShard(0, split_factor=2), Shard(0)) on (fsdp, tp), local [63, 64] and [62, 64].

    Source: FSDP2's `_init_sharding_spec_tp` gives the same placements.
    """
    spanned = []
    for placement in dp_placements:
        if isinstance(placement, Shard):
            split_factor = 1
            for tp_dim, tp_placement in enumerate(parameter.placements):
                if isinstance(tp_placement, Shard) and tp_placement.dim == placement.dim:
                    split_factor *= parameter.device_mesh.size(tp_dim)
            if split_factor > 1:
                placement = compat.strided_shard(placement.dim, split_factor)
        spanned.append(placement)
    return compat.concatenate_meshes(dp_mesh, parameter.device_mesh), (*spanned, *parameter.placements)


def is_cut_as_dtensor_describes(rows: int, tp_degree: int, shard_degree: int) -> bool:
    """Return whether TP and FSDP cutting the same dim give the shards that DTensor's placements stand for.

    DTensor takes every TP piece to have the same padded shard size. With 50257 rows on tp=2, fsdp=8 the pieces have 25129
    and 25128 rows and shards of 3142 and 3141, and a checkpoint would hold rows at wrong places.
    """
    lengths = [get_local_rows(rows, tp_degree, tp_rank)[1] for tp_rank in range(tp_degree)]
    return len({-(-length // shard_degree) for length in lengths}) == 1


def get_local_rows(rows: int, shard_degree: int, shard_rank: int) -> tuple[int, int]:
    """Return (start, length) of one shard of `rows` rows: `ceil(rows / degree)` each, as `torch.chunk` cuts."""
    padded = -(-rows // shard_degree)
    start = min(shard_rank * padded, rows)
    return start, min(padded, rows - start)
