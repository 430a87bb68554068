"""The rules a configuration with known keys and right types must still keep, run together.

Rules read the configuration, the world size and the file system, nothing else, so every rank finds
the same faults. Those about degrees and about model and data have files of their own; the plain
number rules are here. Not here: more warmup than steps, which torchtitan corrects itself.
"""

import math
from collections.abc import Callable, Iterator
from typing import Any

from torchtitan.config import JobConfig
from torchtitan.protocols.train_spec import TrainSpec

from torchtitan_simplefsdp.titan.config.fault import Rule
from torchtitan_simplefsdp.titan.config.rules_degrees import DEGREE_RULES
from torchtitan_simplefsdp.titan.config.rules_features import FEATURE_RULES
from torchtitan_simplefsdp.titan.config.rules_model import find_train_spec, MODEL_RULES

_AT_LEAST_ONE = {
    "training": ("steps", "seq_len", "local_batch_size", "gc_freq"),
    "metrics": ("log_freq",),
    "checkpoint": ("interval",),
    "validation": ("seq_len", "local_batch_size", "freq"),
}


def get_config_faults(config: JobConfig, world_size: int, suspects: set[str]) -> list[str]:
    """Return what is wrong with a configuration whose keys and types are right.

    Args:
        config: torchtitan's JobConfig with our sections merged in.
        world_size: ranks over all nodes.
        suspects: keys whose value had to be dropped; rules that read one are skipped.
    """
    train_spec, _ = find_train_spec(config)
    faults: list[str] = []
    for rule in (*MODEL_RULES, *DEGREE_RULES, *FEATURE_RULES, *_NUMBER_RULES):
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


def _get_checkpoint_faults(config: JobConfig, world_size: int, train_spec: TrainSpec | None) -> Iterator[str]:
    checkpoint = config.checkpoint
    if checkpoint.keep_latest_k == 1:
        yield (
            "checkpoint.keep_latest_k=1 is not possible: the latest checkpoint may still be in the making. "
            "Use 0 to keep all, or at least 2."
        )
    if checkpoint.create_seed_checkpoint and world_size != 1:
        yield (
            f"checkpoint.create_seed_checkpoint needs one rank, got world size {world_size}. Start it with NGPU=1."
        )
    if checkpoint.create_seed_checkpoint and not checkpoint.enable:
        yield "checkpoint.create_seed_checkpoint needs checkpoint.enable. Add --checkpoint.enable."


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
    "debug.seed": ("from 0 to 2**63 - 1, or unset", lambda value: value is None or 0 <= value < 2**63),
    "optimizer.name": ("'Adam' or 'AdamW', which torchtitan has", lambda value: value in ("Adam", "AdamW")),
}


def _build_range_rule(key: str, allowed: str, is_allowed: Callable[[Any], bool]) -> Rule:
    def get_faults(config: JobConfig, world_size: int, train_spec: TrainSpec | None) -> Iterator[str]:
        section, _, name = key.partition(".")
        value = getattr(getattr(config, section), name)
        if not is_allowed(value):
            yield f"{key}={value!r} must be {allowed}."

    return Rule((key,), get_faults)


_NUMBER_RULES = (
    *(_build_minimum_rule(section, name) for section, names in _AT_LEAST_ONE.items() for name in names),
    *(_build_range_rule(key, *allowed) for key, allowed in _RANGES.items()),
    Rule(("profiling",), _get_profiling_faults),
    Rule(("checkpoint",), _get_checkpoint_faults),
)
