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
CASES |= {
    f"{key}={value}": (f"--{key} {value}", 1, f"{key}={value} must be {allowed}.")
    for key, value, allowed in (
        ("optimizer.lr", "nan", "a number above 0"),
        ("optimizer.lr", "-1.0", "a number above 0"),
        ("optimizer.lr", "0.0", "a number above 0"),
        ("optimizer.beta1", "1.0", "at least 0 and below 1"),
        ("optimizer.beta2", "-0.5", "at least 0 and below 1"),
        ("optimizer.eps", "-1.0", "a number of at least 0"),
        ("optimizer.weight_decay", "nan", "a number of at least 0"),
        ("lr_scheduler.warmup_steps", "-5", "at least 0"),
        ("lr_scheduler.decay_ratio", "7.0", "from 0 to 1, or unset"),
        ("training.max_norm", "0.0", "above 0 (inf: no clipping)"),
        ("training.max_norm", "nan", "above 0 (inf: no clipping)"),
        ("debug.seed", "-1", "from 0 to 2**63 - 1, or unset"),
        ("debug.seed", "99999999999999999999", "from 0 to 2**63 - 1, or unset"),
    )
}
CASES["optimizer.name"] = (
    "--optimizer.name SGD",
    1,
    "optimizer.name='SGD' must be 'Adam' or 'AdamW', which torchtitan has.",
)


@pytest.mark.parametrize("flags, world_size, fault", CASES.values(), ids=CASES.keys())
def test_a_broken_rule_is_the_one_fault(workspace, flags, world_size, fault):
    assert get_faults(workspace, flags=flags, world_size=world_size) == [fault]


@pytest.mark.parametrize(
    "flags, world_size",
    [
        ("--profiling.profile_freq 1", 1),
        ("--training.max_norm inf --optimizer.weight_decay 0 --lr_scheduler.warmup_steps 0 --debug.seed 0", 1),
        ("--checkpoint.enable --checkpoint.create_seed_checkpoint --checkpoint.keep_latest_k 0", 1),
    ],
)
def test_what_is_possible_is_not_refused(workspace, flags, world_size):
    assert parse(workspace, flags=flags, world_size=world_size)
