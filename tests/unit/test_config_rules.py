"""Number rules; the messages are written by hand."""

import pytest
from config_workspace import get_faults, parse, workspace

# Flags, world size, the one fault.
CASES = {
    "profile_cycle": (
        "--profiling.enable_profiling --profiling.profile_freq 3",
        1,
        "profiling.profile_freq=3 is shorter than one cycle: profiler_warmup=3 + profiler_active=1. Set it to at least 4.",
    ),
    "one_checkpoint": (
        "--checkpoint.keep_latest_k 1",
        1,
        "checkpoint.keep_latest_k=1 is not possible: the latest checkpoint may still be in the making. Use 0 to keep all, or at "
        "least 2.",
    ),
    "seed_checkpoint_on_two_ranks": (
        "--checkpoint.enable --checkpoint.create_seed_checkpoint",
        2,
        "checkpoint.create_seed_checkpoint needs one rank, got world size 2. Start it with NGPU=1.",
    ),
    "seed_checkpoint_without_checkpoints": (
        "--checkpoint.create_seed_checkpoint",
        1,
        "checkpoint.create_seed_checkpoint needs checkpoint.enable. Add --checkpoint.enable.",
    ),
}
CASES |= {
    key: (f"--validation.enable --validation.dataset pydoc --{key} 0", 1, f"{key}=0 must be at least 1.")
    for key in (
        "training.steps training.seq_len training.local_batch_size training.gc_freq metrics.log_freq checkpoint.interval "
        "validation.seq_len validation.local_batch_size validation.freq"
    ).split()
}


@pytest.mark.parametrize("flags, world_size, fault", CASES.values(), ids=CASES.keys())
def test_a_broken_rule_is_the_one_fault(workspace, flags, world_size, fault):
    assert get_faults(workspace, flags=flags, world_size=world_size) == [fault]


@pytest.mark.parametrize(
    "flags, world_size",
    [
        ("--profiling.profile_freq 1", 1),
        ("--checkpoint.enable --checkpoint.create_seed_checkpoint --checkpoint.keep_latest_k 0", 1),
    ],
)
def test_what_is_possible_is_not_refused(workspace, flags, world_size):
    assert parse(workspace, flags=flags, world_size=world_size)
