"""Number rules; the messages are written by hand."""

from types import SimpleNamespace

import pytest
from config_workspace import get_faults, parse, workspace

from torchtitan_simplefsdp.titan.device import CpuDevice

VALIDATION = "--validation.enable --validation.dataset pydoc"

# Flags, world size, the one fault.
CASES = {
    "profile_cycle": (
        "--profiling.enable_profiling --profiling.profile_freq 3",
        1,
        "profiling.profile_freq=3 is shorter than one cycle: profiler_warmup=3 + profiler_active=1. Set it to at least 4.",
    ),
}
CASES |= {
    key: (f"{VALIDATION} --{key} 0", 1, f"{key}=0 must be at least 1.")
    for key in (
        "training.steps training.seq_len training.local_batch_size training.gc_freq metrics.log_freq checkpoint.interval "
        "validation.seq_len validation.local_batch_size validation.freq"
    ).split()
}
CASES |= {
    f"{key}={value}": (f"{VALIDATION} --{key} {value}", 1, f"{key}={value} must be {allowed}.")
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
        ("comm.init_timeout_seconds", "0", "at least 1"),
        ("comm.train_timeout_seconds", "-3", "at least 1"),
        ("comm.trace_buf_size", "-1", "at least 0"),
        ("training.dataloader.num_workers", "-1", "at least 0"),
        ("training.dataloader.prefetch_factor", "0", "at least 1, or unset"),
        ("validation.dataloader.num_workers", "-1", "at least 0"),
        ("validation.dataloader.prefetch_factor", "-1", "at least 1, or unset"),
        ("activation_checkpoint.memory_budget", "1.5", "from 0 to 1"),
        ("debug.seed", "-1", "from 0 to 2**64 - 1, or unset"),
        ("debug.seed", "99999999999999999999", "from 0 to 2**64 - 1, or unset"),
    )
}
CASES |= {
    f"{key}={value}": (f"--{key} {value}", 1, f"{key}={value!r} must be {allowed}.")
    for key, value, allowed in (
        *(
            ("activation_checkpoint.selective_ac_option", value, "'op', or n to recompute every nth layer, such as '2'")
            for value in ("ops", "0", "²", "1.5")
        ),
        ("activation_checkpoint.determinism_check", "strict", "'default' or 'none'"),
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
        ("--activation_checkpoint.selective_ac_option op --validation.dataloader.num_workers -1", 1),  # no validation
        ("--activation_checkpoint.selective_ac_option 12 --training.dataloader.prefetch_factor 1", 1),
    ],
)
def test_what_is_possible_is_not_refused(workspace, flags, world_size):
    assert parse(workspace, flags=flags, world_size=world_size)


@pytest.mark.parametrize(
    "flags, start",
    [
        ("--training.seq_len 16385", "training.seq_len=16385: a step's 4 sequences per rank take 0 GiB"),
        ("--training.global_batch_size 32 --training.seq_len 4097", "training.seq_len=4097: a step's 16 sequences per rank"),
        (
            f"{VALIDATION} --validation.steps 1 --validation.seq_len 16385",
            "validation.seq_len=16385: a step's 4 sequences per rank",
        ),
    ],
)
def test_a_batch_whose_tokens_do_not_fit_this_machine_is_refused(workspace, monkeypatch, flags, start):
    memory = 4 * 16384 * 16  # 4 sequences of 16384 tokens, each an input and a label of 8 bytes
    monkeypatch.setattr(CpuDevice, "get_device_properties", lambda: SimpleNamespace(total_memory=memory))
    batch = "--training.local_batch_size 4 --validation.local_batch_size 4"
    (fault,) = get_faults(workspace, flags=f"--training.seq_len 16384 {batch} {flags}", world_size=2)
    assert fault.startswith(start) and fault.endswith("Lower seq_len or the batch size.")
    parse(workspace, flags=f"--training.seq_len 16384 {batch}", world_size=2)
