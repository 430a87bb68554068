"""The data-parallel mode that a run's degrees give: replicate, fully_shard or hybrid_shard.

Why it exists: the config check and the parallelize function must derive the same mode from
the same degrees. Pure arithmetic: no mesh, no torchtitan.

Not here: building meshes or applying the mode (parallelize.py).
"""


def get_data_parallel_mode(dp_replicate: int, dp_shard: int, cp: int) -> str | None:
    """Return the mode that these degrees give.

    torchtitan folds context parallelism into the parameter-sharding mesh dim
    (`fsdp = dp_shard * cp`), so `cp > 1` alone already means sharded parameters.

    Args:
        dp_replicate: ranks on `dp_replicate`, at least 1.
        dp_shard: ranks on `dp_shard`, at least 1 (a configured -1 is resolved by the caller).
        cp: ranks on `cp`, at least 1.

    Returns:
        'replicate', 'fully_shard' or 'hybrid_shard'; None when no data-parallel dim is used.

    Source: the branch in torchtitan/experiments/simple_fsdp/llama3/parallelize.py.
    """
    replicated = dp_replicate > 1
    sharded = dp_shard * cp > 1
    if replicated and sharded:
        return "hybrid_shard"
    if sharded:
        return "fully_shard"
    return "replicate" if replicated else None
