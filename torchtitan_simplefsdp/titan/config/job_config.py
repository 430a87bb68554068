"""The configuration keys this plugin adds to torchtitan's JobConfig.

Why it exists: `ConfigManager._merge_configs` merges these dataclasses into torchtitan's, so the
keys work in TOML and on the command line. Checks of their values are in the rules_*.py files.

Annotations stay real types (no `from __future__ import annotations`): the merge and the checks
read them.

Not here: torchtitan's own keys.
"""

from dataclasses import dataclass, field
from typing import Literal

SERVED_MODELS = ("simple_fsdp.llama3", "llama3_simple_fsdp")
"""The model names this plugin registers with torchtitan; the first is upstream's."""


@dataclass
class SimpleFSDP:
    mode: Literal["auto", "replicate", "fully_shard", "hybrid_shard"] = "auto"
    """
    Choices: 'auto' takes it from the degrees; 'replicate' (DDP),
    'fully_shard' (FSDP), 'hybrid_shard' (HSDP) test it.
    """

    reduction: Literal["auto", "native", "exact"] = "auto"
    """
    Choices: 'native' sums gradients as FSDP2 does, 'exact' to the
    same bits in all modes; 'auto' is exact on CPU only.
    """

    bucket_plan: str = "block"
    """
    Parameters that share a collective: those of a 'block', each
    'parameter' alone, or so many MiB, as '25'.
    """

    cost_model: str = ""
    """
    For 'auto_bucketing': TOML file; empty: known numbers.
    """

    compile_unit: Literal["model", "block"] = "model"
    """
    Choices: one graph, or one for all equal blocks.
    """

    replica_reduction: Literal["per_step", "per_microbatch"] = "per_step"
    """
    Choices: when gradients are summed over replicas.
    """


@dataclass
class Compile:
    graph_passes: Literal["auto_bucketing", "transformer_block_bucketing"] | None = None
    """
    Choices: how collectives are bucketed.
    """


@dataclass
class JobConfig:
    compile: Compile = field(default_factory=Compile)
    simple_fsdp: SimpleFSDP = field(default_factory=SimpleFSDP)


def is_model_compiled(config: JobConfig) -> bool:
    """Answer whether a run compiles its model; `config` is the merged one, with torchtitan's keys."""
    return config.compile.enable and "model" in config.compile.components
