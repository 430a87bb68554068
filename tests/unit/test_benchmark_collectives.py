"""Which collective an op is, for the ops that torch's own code and ours call."""

from __future__ import annotations

import pytest

from torchtitan_simplefsdp.benchmark.collectives import get_kind


@pytest.mark.parametrize(
    "name, kind",
    [
        ("_allgather_base_", "all_gather"),
        ("allgather_into_tensor_coalesced_", "all_gather"),
        ("all_gather_into_tensor_out", "all_gather"),
        ("_reduce_scatter_base_", "reduce_scatter"),
        ("reduce_scatter_tensor_coalesced", "reduce_scatter"),
        ("allreduce_", "all_reduce"),
        ("all_reduce_coalesced_", "all_reduce"),
        ("alltoall_base_", "all_to_all"),
        ("all_to_all_single", "all_to_all"),
        ("shard_dim_alltoall", "all_to_all"),
    ],
)
def test_ops_of_all_namespaces_are_known(name, kind):
    assert get_kind(name) == kind


def test_an_op_whose_bytes_are_not_known_is_an_error():
    with pytest.raises(NotImplementedError, match="collective 'gather_', whose bytes are not known"):
        get_kind("gather_")
