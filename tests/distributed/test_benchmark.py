"""What the benchmark counts and measures of a step, against what each kind of data parallelism must need in theory."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from torchtitan_simplefsdp.benchmark.contenders import Row
from torchtitan_simplefsdp.benchmark.llama import count_parameters
from torchtitan_simplefsdp.benchmark.measure import measure_alone, time_contenders
from torchtitan_simplefsdp.benchmark.options import Options

CPU = torch.device("cpu")
OPTIONS = Options(dim=64, layers=2, vocab=64, seq_len=16, batch=2, rounds=2, warmup=2)
BYTES = 4 * count_parameters(OPTIONS)
EMBEDDING, LAST_NORM_AND_OUTPUT = 4 * 64 * 64, 4 * (64 + 64 * 64)
TENSORS, NORMS = 2 * 9 + 3, 2 * 2 + 1
BUCKETS = 2 + 2  # embedding, two blocks, last norm and output
AGAIN = 2  # blocks; no backward needs the embedding, and the last bucket is kept


def test_two_ranks_send_the_bytes_of_theory_and_an_error_stops_nobody_else(ranks):
    half, fsdp2_again = BYTES / 2, (BYTES - LAST_NORM_AND_OUTPUT) / 2
    again = fsdp2_again - EMBEDDING / 2
    expected = {
        Row("none", ""): ({}, 0),
        Row("no such mode", "x"): None,
        Row("ddp", "replicate"): ({"all_reduce": 1}, 2 * half),
        Row("fsdp2+keep", "fully_shard"): ({"all_gather": 4, "reduce_scatter": 4}, 2 * half),
        Row("fsdp2", "fully_shard"): ({"all_gather": 7, "reduce_scatter": 4}, 2 * half + fsdp2_again),
        Row("torchtitan", "fully_shard"): ({"all_gather": TENSORS, "reduce_scatter": TENSORS}, 2 * half),
        Row("ours", "replicate"): ({"all_reduce": BUCKETS}, 2 * half),
        Row("ours", "fully_shard"): ({"all_gather": BUCKETS + AGAIN, "reduce_scatter": BUCKETS}, 2 * half + again),
        Row("ours+keep", "fully_shard"): ({"all_gather": BUCKETS, "reduce_scatter": BUCKETS}, 2 * half),
        Row("ours+exact+keep", "fully_shard"): ({"all_gather": BUCKETS, "all_to_all": BUCKETS}, 2 * half),
        Row("ours+graph+aot_eager", "fully_shard"): (
            {"all_gather": BUCKETS + AGAIN, "reduce_scatter": BUCKETS},
            2 * half + again,
        ),
    }
    results = dict(zip(expected, ranks.run(time_contenders, 2, CPU, OPTIONS, list(expected))[0]))
    assert results.pop(Row("no such mode", "x")) == {"error": "KeyError: 'no such mode'"}
    for row, result in results.items():
        assert (row, result["collectives"], result["sent_bytes"]) == (row, *expected[row])
        assert len(result["seconds"]) == 2
    losses = [result["loss"] for result in results.values()]
    assert max(losses) - min(losses) < 1e-5 * losses[0]  # bitwise but for the row that is compiled


def test_hybrid_shard_shards_over_half_the_ranks_and_reduces_over_the_replicas(ranks):
    options = replace(OPTIONS, ranks=4, modes=("hybrid_shard",))
    rows = [Row("fsdp2+keep", "hybrid_shard"), Row("ours+keep", "hybrid_shard")]
    fsdp2, ours = ranks.run(time_contenders, 4, CPU, options, rows)[0]
    assert fsdp2["collectives"] == {"all_gather": 4, "reduce_scatter": 4, "all_reduce": 4}
    assert ours["collectives"] == {"all_gather": BUCKETS, "reduce_scatter": BUCKETS, "all_reduce": BUCKETS}
    assert ours["sent_bytes"] == fsdp2["sent_bytes"] == BYTES / 2 + BYTES / 2 + 2 * BYTES / 2 / 2


def test_with_tensor_parallelism_both_modes_differ_in_data_parallel_collectives_only(ranks):
    options = replace(OPTIONS, ranks=4, tp=2)
    rows = [Row("none", ""), Row("ours+keep", "fully_shard"), Row("ours", "replicate"), Row("fsdp2", "fully_shard")]
    none, fully_shard, replicate, fsdp2 = ranks.run(time_contenders, 4, CPU, options, rows)[0]
    assert none["collectives"]["all_gather"] > 0 and none["sent_bytes"] > 0
    assert fully_shard["collectives"]["reduce_scatter"] == none["collectives"]["reduce_scatter"] + BUCKETS
    # without data parallelism nothing asks for the sum over TP ranks of the norms' gradients
    assert replicate["collectives"] == none["collectives"] | {"all_reduce": BUCKETS + NORMS}
    assert fully_shard["sent_bytes"] == replicate["sent_bytes"] > none["sent_bytes"]
    losses = {result["loss"] for result in (none, fully_shard, replicate, fsdp2)}
    assert len(losses) == 1


@pytest.mark.parametrize("row", [Row("none", ""), Row("ours", "fully_shard")])
def test_memory_is_at_least_that_of_parameters_gradients_and_two_moments(ranks, row):
    options = Options(dim=512, layers=2, vocab=512, seq_len=8, batch=1)
    (result, _) = ranks.run(measure_alone, 2, CPU, options, row)
    states = 4 * 4 * count_parameters(options) / (2 if row.mode else 1)
    assert states < result["memory_bytes"] < 2.2 * states
