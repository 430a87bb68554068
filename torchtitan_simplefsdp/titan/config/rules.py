"""The rules a configuration with known keys and right types must still keep, run together.

Rules read the configuration, the world size and the file system, nothing else, so every rank finds
the same faults. Those about degrees and about model and data have files of their own; the plain
number rules are here. Not here: `lr_scheduler.warmup_steps`, which torchtitan corrects itself.
"""

from collections.abc import Iterator

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


_NUMBER_RULES = (
    *(_build_minimum_rule(section, name) for section, names in _AT_LEAST_ONE.items() for name in names),
    Rule(("profiling",), _get_profiling_faults),
    Rule(("checkpoint",), _get_checkpoint_faults),
)
