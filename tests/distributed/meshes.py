"""The meshes of the distributed tests: data-parallel dims first, then TP, as torchtitan orders them."""

from __future__ import annotations

from functools import cache

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh


@cache  # each mesh has process groups, whose idle threads would slow down all later tests
def build_meshes(mode: str, tp: int = 1) -> tuple[DeviceMesh, DeviceMesh | None]:
    """Return the data-parallel mesh of `mode` over all ranks (hybrid_shard: 2 replicas) and the TP mesh, if any."""
    dp = dist.get_world_size() // tp
    dp_dims = {"hybrid_shard": {"dp_replicate": 2, "fsdp": dp // 2}, "replicate": {"dp_replicate": dp}}
    dims = {**dp_dims.get(mode, {"fsdp": dp}), "tp": tp}
    mesh = init_device_mesh("cpu", tuple(dims.values()), mesh_dim_names=tuple(dims))
    return mesh[tuple(name for name in dims if name != "tp")], mesh["tp"] if tp > 1 else None


def get_dp_rank_and_degree(tp: int = 1) -> tuple[int, int]:
    return dist.get_rank() // tp, dist.get_world_size() // tp
