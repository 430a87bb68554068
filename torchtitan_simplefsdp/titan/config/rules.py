"""The rules a configuration with known keys and right types must still keep, run together.

Rules read the configuration, the world size and the file system, nothing else, so every rank finds
the same faults. Those with a subject have files of their own (rules_*.py); the plain number rules
are here. Not here: more warmup than steps, which torchtitan corrects itself.
"""

import math
import operator
import re
from collections.abc import Callable, Iterator
from typing import Any

from torchtitan.config import JobConfig
from torchtitan.protocols.train_spec import TrainSpec

from torchtitan_simplefsdp.titan.config.fault import Rule
from torchtitan_simplefsdp.titan.config.rules_checkpoint import CHECKPOINT_RULES
from torchtitan_simplefsdp.titan.config.rules_degrees import DEGREE_RULES, get_degrees, HEAD_RULES
from torchtitan_simplefsdp.titan.config.rules_features import FEATURE_RULES
from torchtitan_simplefsdp.titan.config.rules_model import DATA_RULES, find_train_spec, MODEL_RULES
from torchtitan_simplefsdp.titan.config.rules_output import OUTPUT_RULES
from torchtitan_simplefsdp.titan.config.rules_packages import PACKAGE_RULES
from torchtitan_simplefsdp.titan.config.rules_pipeline import PIPELINE_RULES
from torchtitan_simplefsdp.titan.device import CpuDevice

_AT_LEAST_ONE = {
    "training": ("steps", "seq_len", "local_batch_size", "gc_freq"),
    "metrics": ("log_freq",),
    "checkpoint": ("interval",),
    "validation": ("seq_len", "local_batch_size", "freq"),
    "comm": ("init_timeout_seconds", "train_timeout_seconds"),
}


def get_config_faults(
    config: JobConfig, world_size: int, suspects: set[str], *, model_only: bool = False
) -> list[str]:
    """Return what is wrong with a configuration whose keys and types are right.

    Args:
        config: torchtitan's JobConfig with our sections merged in.
        world_size: ranks over all nodes.
        suspects: keys whose value had to be dropped; rules that read one are skipped.
        model_only: look only at what a command reads that uses the model and trains nothing.
    """
    train_spec, _ = find_train_spec(config)
    faults: list[str] = []
    for rule in _MODEL_ONLY_RULES if model_only else _RULES:
        if not rule.is_blocked_by(suspects):
            faults.extend(rule.get_faults(config, world_size, train_spec))
    return faults


def _build_minimum_rule(section: str, name: str) -> Rule:
    def get_faults(config: JobConfig, world_size: int, train_spec: TrainSpec | None) -> Iterator[str]:
        value = getattr(getattr(config, section), name)
        if value < 1 and (section != "validation" or config.validation.enable):
            yield f"{section}.{name}={value} must be at least 1."

    return Rule((f"{section}.{name}", "validation.enable"), get_faults)


def _get_profiling_faults(config: JobConfig, world_size: int, train_spec: TrainSpec | None) -> Iterator[str]:
    profiling = config.profiling
    needed = profiling.profiler_warmup + profiling.profiler_active
    if profiling.enable_profiling and profiling.profile_freq < needed:
        yield (
            f"profiling.profile_freq={profiling.profile_freq} is shorter than one cycle: profiler_warmup="
            f"{profiling.profiler_warmup} + profiler_active={profiling.profiler_active}. Set it to at least {needed}."
        )


def _get_size_faults(config: JobConfig, world_size: int, train_spec: TrainSpec | None) -> Iterator[str]:
    """torchtitan holds the tokens of a whole step, inputs and labels, in host memory before it starts on them."""
    memory = CpuDevice.get_device_properties().total_memory
    degrees = get_degrees(config, world_size)
    local, total = config.training.local_batch_size, config.training.global_batch_size
    if degrees is not None:
        local = max(local, total // degrees.dp)
    steps = {"training": (local, config.training.seq_len)}
    if config.validation.enable:
        steps["validation"] = (config.validation.local_batch_size, config.validation.seq_len)
    for section, (sequences, seq_len) in steps.items():
        needed = 2 * 8 * sequences * seq_len  # int64
        if needed > memory:
            yield (
                f"{section}.seq_len={seq_len}: a step's {sequences} sequences per rank take {needed / 2**30:,.0f} GiB for the "
                f"token numbers alone, this machine has {memory / 2**30:,.0f} GiB. Lower seq_len or the batch size."
            )


def _is_in(low: float, high: float) -> Callable[[float], bool]:
    return lambda value: low <= value < high  # also refuses nan


# key: what it must be, and that as a test
_RANGES = {
    "optimizer.lr": ("a number above 0", lambda value: 0 < value < math.inf),
    "optimizer.beta1": ("at least 0 and below 1", _is_in(0, 1)),
    "optimizer.beta2": ("at least 0 and below 1", _is_in(0, 1)),
    "optimizer.eps": ("a number of at least 0", _is_in(0, math.inf)),
    "optimizer.weight_decay": ("a number of at least 0", _is_in(0, math.inf)),
    "lr_scheduler.warmup_steps": ("at least 0", _is_in(0, math.inf)),
    "lr_scheduler.decay_ratio": ("from 0 to 1, or unset", lambda value: value is None or 0 <= value <= 1),
    "training.max_norm": ("above 0 (inf: no clipping)", lambda value: value > 0),
    "debug.seed": ("from 0 to 2**64 - 1, or unset", lambda value: value is None or 0 <= value < 2**64),
    "comm.trace_buf_size": ("at least 0", _is_in(0, math.inf)),
    "training.dataloader.num_workers": ("at least 0", _is_in(0, math.inf)),
    "training.dataloader.prefetch_factor": ("at least 1, or unset", lambda value: value is None or value >= 1),
    "validation.dataloader.num_workers": ("at least 0", _is_in(0, math.inf)),
    "validation.dataloader.prefetch_factor": ("at least 1, or unset", lambda value: value is None or value >= 1),
    "activation_checkpoint.memory_budget": ("from 0 to 1", lambda value: 0 <= value <= 1),
    "activation_checkpoint.determinism_check": ("'default' or 'none'", lambda value: value in ("default", "none")),
    "activation_checkpoint.selective_ac_option": (
        "'op', or n to recompute every nth layer, such as '2'",
        lambda value: value == "op" or re.fullmatch("[1-9][0-9]*", value) is not None,
    ),
    "optimizer.name": ("'Adam' or 'AdamW', which torchtitan has", lambda value: value in ("Adam", "AdamW")),
}


def _build_range_rule(key: str, allowed: str, is_allowed: Callable[[Any], bool]) -> Rule:
    def get_faults(config: JobConfig, world_size: int, train_spec: TrainSpec | None) -> Iterator[str]:
        value = operator.attrgetter(key)(config)
        if not is_allowed(value) and (not key.startswith("validation.") or config.validation.enable):
            yield f"{key}={value!r} must be {allowed}."

    return Rule((key, "validation.enable"), get_faults)


_NUMBER_RULES = (
    *(_build_minimum_rule(section, name) for section, names in _AT_LEAST_ONE.items() for name in names),
    *(_build_range_rule(key, *allowed) for key, allowed in _RANGES.items()),
    Rule(("profiling",), _get_profiling_faults),
    Rule(("training", "validation", "parallelism"), _get_size_faults),
)
_MODEL_ONLY_RULES = (*MODEL_RULES, *HEAD_RULES, _build_minimum_rule("training", "seq_len"))
_RULES = (
    *MODEL_RULES,
    *DATA_RULES,
    *PACKAGE_RULES,
    *DEGREE_RULES,
    *HEAD_RULES,
    *PIPELINE_RULES,
    *FEATURE_RULES,
    *CHECKPOINT_RULES,
    *OUTPUT_RULES,
    *_NUMBER_RULES,
)
