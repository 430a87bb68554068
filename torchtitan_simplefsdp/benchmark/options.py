"""Options: what one benchmark measures, and the two sets of sizes it comes with.

`step` is small enough for a CPU thread and has as much compute as communication; in `parameters` nearly all memory is
parameters, gradients and optimizer states, one thin batch passing through many wide layers.

Not here: flags (scripts/benchmark.py), what is compared (contenders.py).
"""

from __future__ import annotations

from dataclasses import dataclass

MODES = ("fully_shard", "replicate", "hybrid_shard")

PRESETS: dict[str, dict[str, int]] = {
    "step": {"dim": 256, "layers": 6, "vocab": 2048, "seq_len": 128, "batch": 4},
    "parameters": {"dim": 512, "layers": 16, "vocab": 2048, "seq_len": 64, "batch": 1},
}


@dataclass(frozen=True)
class Options:
    """Sizes of the model, of the batch and of the measurement.

    Args:
        dim: width of the model; heads have 64 of it each (half of it, if that is less), the feed-forward 3 times it.
        layers: transformer blocks.
        vocab: tokens of the vocabulary.
        seq_len: tokens of a sequence.
        batch: sequences per data-parallel rank and step.
        ranks: processes, on one machine.
        tp: ranks of each tensor-parallel group; 1: none.
        modes: of `MODES`.
        rounds: measured steps of each contender.
        warmup: steps before them, at least one.
        dtype: 'fp32', or 'bf16': parameters and reductions in float32, compute in bfloat16.
        threads: CPU threads per rank.
    """

    dim: int
    layers: int
    vocab: int
    seq_len: int
    batch: int
    ranks: int = 2
    tp: int = 1
    modes: tuple[str, ...] = ("fully_shard", "replicate")
    rounds: int = 10
    warmup: int = 2
    dtype: str = "fp32"
    threads: int = 1

    @property
    def head_dim(self) -> int:
        return min(64, self.dim // 2)

    @property
    def dp(self) -> int:
        """Data-parallel ranks."""
        return self.ranks // self.tp

    @property
    def tokens(self) -> int:
        """Tokens of a step, on all ranks together."""
        return self.batch * self.seq_len * self.dp


def validate_options(options: Options) -> None:
    """Raise ValueError with all faults of `options`, before any process is started."""
    sizes = ("dim", "layers", "vocab", "seq_len", "batch", "ranks", "tp", "rounds", "warmup", "threads")
    faults = [f"{name}={getattr(options, name)} must be at least 1" for name in sizes if getattr(options, name) < 1]
    if not faults:
        if options.dim < 4 or options.head_dim % 2 or options.dim % options.head_dim:
            faults.append(f"dim={options.dim} must be a multiple of 64, or below 128 of 4")
        elif (options.dim // options.head_dim) % options.tp:
            heads = options.dim // options.head_dim
            faults.append(f"tp={options.tp} does not divide the {heads} heads of dim={options.dim}")
        if options.ranks % options.tp:
            faults.append(f"tp={options.tp} does not divide ranks={options.ranks}")
        if options.seq_len % options.tp:
            faults.append(f"tp={options.tp} does not divide seq_len={options.seq_len}")
        if "hybrid_shard" in options.modes and (options.dp < 4 or options.dp % 2):
            faults.append(f"hybrid_shard needs 4, 6, ... data-parallel ranks, got {options.dp}")
    if faults:
        raise ValueError(f"benchmark: {'; '.join(faults)}.")
