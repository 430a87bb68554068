"""The layouts of the checkpoint matrix: data only, a row each, and how its result is read.

Not here: what is built, saved, loaded and compared (checkpoint_state.py, checkpoint_matrix.py).
"""

from __future__ import annotations

from typing import Any, NamedTuple


class Layout(NamedTuple):
    """Degrees of data (copies x shards), tensor and pipeline parallelism.

    Args:
        core: data parallelism of torchtitan's core (FSDP2, or DDP) instead of this package's.
        config: further configuration keys.
    """

    replicate: int = 1
    shard: int = 1
    tp: int = 1
    pp: int = 1
    core: bool = False
    config: dict[str, Any] = {}

    @property
    def world_size(self) -> int:
        return self.replicate * self.shard * self.tp * self.pp


COMPILED = {"compile.enable": True, "compile.components": ["model"], "activation_checkpoint.mode": "full"}
INTERLEAVED = {  # two model parts per rank
    "parallelism.pipeline_parallel_schedule": "Interleaved1F1B",
    "parallelism.module_fqns_per_model_part": [["tok_embeddings"], ["layers.0"], ["norm"], ["output"]],
}

LAYOUTS = {
    "one process": Layout(),
    "replicate 2": Layout(replicate=2),
    "fully_shard 2": Layout(shard=2),
    "fully_shard 2, compiled, checkpointed activations": Layout(shard=2, config=COMPILED),
    "fully_shard 4": Layout(shard=4),
    "hybrid_shard 2x2": Layout(replicate=2, shard=2),
    "tp 2": Layout(tp=2),
    "tp 4": Layout(tp=4),
    "replicate 2 x tp 2": Layout(replicate=2, tp=2),
    "fully_shard 2 x tp 2": Layout(shard=2, tp=2),
    "hybrid_shard 2x2 x tp 2": Layout(replicate=2, shard=2, tp=2),
    "pp 2 x fully_shard 2": Layout(shard=2, pp=2),
    "pp 2 x tp 2, interleaved stages": Layout(tp=2, pp=2, config=INTERLEAVED),
    "core, one process": Layout(core=True),
    "core, FSDP2 4": Layout(shard=4, core=True),
    "core, FSDP2 2x2": Layout(replicate=2, shard=2, core=True),
    "core, FSDP2 2 x tp 2": Layout(shard=2, tp=2, core=True),
    "core, DDP 2": Layout(replicate=2, core=True),
}
NAMES = list(LAYOUTS)


def get_seed(name: str) -> int:
    """Return the seed of the state that a layout saves; 0 is that of a state before it is loaded."""
    return NAMES.index(name) + 1
