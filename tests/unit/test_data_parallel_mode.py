"""The mode of each combination of degrees, written by hand."""

import pytest

from torchtitan_simplefsdp.titan.config.data_parallel_mode import get_data_parallel_mode


@pytest.mark.parametrize(
    "dp_replicate, dp_shard, cp, mode",
    [
        (1, 1, 1, None),
        (4, 1, 1, "replicate"),
        (1, 4, 1, "fully_shard"),
        (1, 1, 2, "fully_shard"),
        (2, 2, 1, "hybrid_shard"),
        (2, 1, 2, "hybrid_shard"),
    ],
)
def test_degrees_give_the_mode_and_cp_counts_as_sharding(dp_replicate, dp_shard, cp, mode):
    assert get_data_parallel_mode(dp_replicate, dp_shard, cp) == mode
