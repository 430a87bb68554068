"""Traffic: the fewest bytes that a rank has to send for data parallelism in a step, by mode.

Not here: what a step does send (trace.py counts it).
"""

from __future__ import annotations


def get_minimum_bytes(
    parameters: int, param_bytes: int, reduce_bytes: int, shards: int = 1, replicas: int = 1, reshard: bool = False
) -> float:
    """Return the bytes that each rank sends at least, in the bandwidth-optimal collectives.

    With P parameters, n shards and one dtype: 3 P (n - 1) / n bytes for `fully_shard` with reshard (two gathers, one
    reduction), 2 P (n - 1) / n without, 2 P (n - 1) / n for `replicate` on n ranks. In `hybrid_shard` a rank's shard is
    summed over the replicas as well.

    Args:
        parameters: those of one rank without data parallelism (its part of tensor parallelism).
        param_bytes: bytes of a parameter as gathered.
        reduce_bytes: bytes of a gradient as reduced.
        shards: ranks that share one copy of the parameters.
        replicas: copies.
        reshard: whether parameters are gathered again in backward.
    """
    gathers = (2 if reshard else 1) * parameters * param_bytes * (shards - 1) / shards
    scatter = parameters * reduce_bytes * (shards - 1) / shards
    replicate = 2 * parameters / shards * reduce_bytes * (replicas - 1) / replicas
    return gathers + scatter + replicate
