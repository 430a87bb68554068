"""Rules about degrees; the messages are written by hand."""

import pytest
from config_workspace import get_faults, parse, workspace

P = "--parallelism."
REPLICATE, SHARD, TP = f"{P}data_parallel_replicate_degree", f"{P}data_parallel_shard_degree", f"{P}tensor_parallel_degree"
CP, PP = f"{P}context_parallel_degree", f"{P}pipeline_parallel_degree"

# Flags, world size, the one fault.
CASES = {
    "degree_of_zero": (f"{TP} 0", 1, "parallelism.tensor_parallel_degree=0 must be at least 1 (1 disables it)."),
    "negative_shard_degree": (
        f"{SHARD} -2",
        1,
        "parallelism.data_parallel_shard_degree=-2 must be at least 1, or -1 for all leftover ranks.",
    ),
    "degrees_below_the_world_size": (
        f"{SHARD} 2",
        4,
        "parallelism: data_parallel_shard_degree=2 needs 2 ranks, but the world size is 4. Start 2 ranks (NGPU=2), or set "
        "data_parallel_shard_degree=4.",
    ),
    "degrees_above_the_world_size": (
        f"{REPLICATE} 3 {SHARD} 2 {TP} 2",
        8,
        "parallelism: data_parallel_replicate_degree=3 * tensor_parallel_degree=2 * data_parallel_shard_degree=2 needs 12 ranks, "
        "but the world size is 8. Start 12 ranks (NGPU=12), or set degrees with the product 8.",
    ),
    "no_leftover_ranks": (
        f"{REPLICATE} 2 {TP} 2",
        6,
        "parallelism: data_parallel_replicate_degree=2 * tensor_parallel_degree=2 = 4 does not divide the world size 6, so "
        "data_parallel_shard_degree=-1 cannot take the leftover ranks. Start a multiple of 4 ranks (NGPU=4), or change the degrees.",
    ),
    "heads_over_tp": (
        f"{TP} 3",
        6,
        "parallelism.tensor_parallel_degree=3 does not divide n_heads=16 (flavor 'debugmodel', n_kv_heads=16). Degrees possible on "
        "6 ranks: 1, 2.",
    ),
    "kv_heads_over_tp": (
        f"{TP} 16 --model.flavor 8B",
        16,
        "parallelism.tensor_parallel_degree=16 does not divide n_kv_heads=8 (flavor '8B', n_heads=32). Degrees possible on 16 "
        "ranks: 1, 2, 4, 8.",
    ),
    "seq_len_over_cp": (
        f"{CP} 2 {TP} 2 --training.seq_len 20",
        4,
        "training.seq_len=20 is not divisible by 8 (tensor_parallel_degree=2 * 2 * context_parallel_degree=2). Nearest: 16 or 24.",
    ),
    "validation_seq_len_over_tp": (
        f"{TP} 2 --validation.enable --validation.dataset pydoc --validation.seq_len 3",
        2,
        "validation.seq_len=3 is not divisible by 4 (tensor_parallel_degree=2 * 2 * context_parallel_degree=1). Nearest: 4.",
    ),
    "global_batch_size": (
        "--training.local_batch_size 4 --training.global_batch_size 12",
        2,
        "training.global_batch_size=12 is not a multiple of 8 (local_batch_size=4 * 2 data-parallel ranks). Nearest: 8 or 16; "
        "-1 takes 8.",
    ),
    "global_batch_size_of_zero": (
        "--training.global_batch_size 0",
        1,
        "training.global_batch_size=0 is not a multiple of 8 (local_batch_size=8 * 1 data-parallel ranks). Nearest: 8; -1 takes 8.",
    ),
    "expert_parallel": (
        f"{P}expert_parallel_degree 2",
        2,
        "parallelism.expert_parallel_degree=2 needs a mixture-of-experts model; 'simple_fsdp.llama3' is dense. Set it to 1.",
    ),
    "replicate_on_sharded_degrees": (
        "--simple_fsdp.mode replicate",
        4,
        "simple_fsdp.mode='replicate' needs data_parallel_replicate_degree > 1 and data_parallel_shard_degree * "
        "context_parallel_degree = 1, but data_parallel_replicate_degree=1, data_parallel_shard_degree=4, context_parallel_degree=1 "
        "give 'fully_shard'; parallelism.data_parallel_replicate_degree=4 with data_parallel_shard_degree=1 gives it here.",
    ),
    "fully_shard_on_replicated_degrees": (
        f"--simple_fsdp.mode fully_shard {REPLICATE} 2",
        2,
        "simple_fsdp.mode='fully_shard' needs data_parallel_replicate_degree = 1, but data_parallel_replicate_degree=2, "
        "data_parallel_shard_degree=1, context_parallel_degree=1 give 'replicate'; parallelism.data_parallel_replicate_degree=1 "
        "with data_parallel_shard_degree=2 gives it here.",
    ),
    "hybrid_shard_on_too_few_ranks": (
        "--simple_fsdp.mode hybrid_shard",
        1,
        "simple_fsdp.mode='hybrid_shard' needs data_parallel_replicate_degree > 1 and data_parallel_shard_degree * "
        "context_parallel_degree > 1, but data_parallel_replicate_degree=1, data_parallel_shard_degree=1, context_parallel_degree=1 "
        "give no data parallelism; no degrees on 1 data-parallel ranks give it. Use mode='auto' or more ranks.",
    ),
    "replicate_with_context_parallel": (
        f"--simple_fsdp.mode replicate {REPLICATE} 2 {CP} 2",
        4,
        "simple_fsdp.mode='replicate' needs data_parallel_replicate_degree > 1 and data_parallel_shard_degree * "
        "context_parallel_degree = 1, but data_parallel_replicate_degree=2, data_parallel_shard_degree=1, context_parallel_degree=2 "
        "give 'hybrid_shard'; no degrees on 2 data-parallel ranks give it. Use mode='auto' or more ranks.",
    ),
}


@pytest.mark.parametrize("flags, world_size, fault", CASES.values(), ids=CASES.keys())
def test_a_broken_rule_is_the_one_fault(workspace, flags, world_size, fault):
    assert get_faults(workspace, flags=flags, world_size=world_size) == [fault]


@pytest.mark.parametrize(
    "flags, world_size",
    [
        (f"{REPLICATE} 2 {CP} 2 {TP} 2 {PP} 2 --training.seq_len 16", 16),
        (f"--simple_fsdp.mode hybrid_shard {REPLICATE} 2", 4),
        (f"--simple_fsdp.mode hybrid_shard {REPLICATE} 2 {CP} 2", 4),
        (f"--simple_fsdp.mode replicate {REPLICATE} 4", 4),
        ("--simple_fsdp.mode fully_shard", 4),
        ("--simple_fsdp.mode fully_shard", 1),
        ("--training.seq_len 17", 4),
        (f"{TP} 8 --model.flavor 8B", 8),
        ("--training.global_batch_size 32", 2),
    ],
)
def test_what_is_possible_is_not_refused(workspace, flags, world_size):
    assert parse(workspace, flags=flags, world_size=world_size)
