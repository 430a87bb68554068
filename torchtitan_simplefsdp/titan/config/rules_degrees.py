"""Rules about the parallelism degrees: world size, data-parallel mode, heads, sequence, batch.

torchtitan asserts most of this too, but after the process group exists and one fault at a time.
Not here: how pipeline parallelism cuts model and batch (rules_pipeline.py).
"""

import math
from collections.abc import Iterator
from typing import NamedTuple

from torchtitan.config import JobConfig
from torchtitan.protocols.train_spec import TrainSpec

from torchtitan_simplefsdp.titan.config.fault import Rule
from torchtitan_simplefsdp.titan.config.data_parallel_mode import get_data_parallel_mode
from torchtitan_simplefsdp.titan.config.job_config import SERVED_MODELS

_DEGREES = (
    "data_parallel_replicate_degree",
    "data_parallel_shard_degree",
    "context_parallel_degree",
    "tensor_parallel_degree",
    "pipeline_parallel_degree",
)
_DEGREE_KEYS = tuple(f"parallelism.{name}" for name in _DEGREES)


class Degrees(NamedTuple):
    """The degrees of a run, all at least 1, with the product `world_size`."""

    dp_replicate: int
    dp_shard: int  # without cp: torchtitan's fsdp dim has dp_shard * cp ranks
    cp: int
    tp: int
    pp: int

    @property
    def dp(self) -> int:
        """Ranks with other sequences: the replicate degree times the shard degree."""
        return self.dp_replicate * self.dp_shard


def get_degrees(config: JobConfig, world_size: int) -> Degrees | None:
    """Return the degrees with -1 resolved; None when they do not fit the world size."""
    degrees = Degrees(*(getattr(config.parallelism, name) for name in _DEGREES))
    if degrees.dp_shard == -1:
        fixed = -math.prod(degrees)
        degrees = degrees._replace(dp_shard=world_size // fixed if fixed > 0 else 0)
    return degrees if min(degrees) >= 1 and math.prod(degrees) == world_size else None


def _get_product_faults(config: JobConfig, world_size: int, train_spec: TrainSpec | None) -> Iterator[str]:
    values = {name: getattr(config.parallelism, name) for name in _DEGREES}
    too_small = False
    for name, value in values.items():
        leftover = name == "data_parallel_shard_degree"
        if value < 1 and not (leftover and value == -1):
            too_small = True
            allowed = "at least 1, or -1 for all leftover ranks" if leftover else "at least 1 (1 disables it)"
            yield f"parallelism.{name}={value} must be {allowed}."
    if too_small or get_degrees(config, world_size):
        return
    shard = values.pop("data_parallel_shard_degree")
    others = math.prod(values.values())
    used = [f"{name}={value}" for name, value in values.items() if value > 1]
    if shard == -1:
        product = " * ".join(used) + (f" = {others}" if len(used) > 1 else "")
        yield (
            f"parallelism: {product} does not divide the world size {world_size}, so "
            f"data_parallel_shard_degree=-1 cannot take the leftover ranks. Start a multiple of {others} "
            f"ranks (NGPU={others}), or change the degrees."
        )
        return
    fits = f"data_parallel_shard_degree={world_size // others}" if world_size % others == 0 else None
    yield (
        f"parallelism: {' * '.join([*used, f'data_parallel_shard_degree={shard}'])} needs {others * shard} "
        f"ranks, but the world size is {world_size}. Start {others * shard} ranks (NGPU={others * shard}), or "
        f"set {fits or f'degrees with the product {world_size}'}."
    )


def _get_mode_faults(config: JobConfig, world_size: int, train_spec: TrainSpec | None) -> Iterator[str]:
    degrees = get_degrees(config, world_size)
    mode = config.simple_fsdp.mode
    if degrees is None or mode == "auto":
        return
    given = get_data_parallel_mode(*degrees[:3])
    # A single shard is the trivial case of fully_shard, so that its configs also run on one rank.
    if mode == given or (mode == "fully_shard" and given is None):
        return
    sharded = "data_parallel_shard_degree * context_parallel_degree"
    needs = {
        "replicate": f"data_parallel_replicate_degree > 1 and {sharded} = 1",
        "fully_shard": "data_parallel_replicate_degree = 1",
        "hybrid_shard": f"data_parallel_replicate_degree > 1 and {sharded} > 1",
    }[mode]
    ranks = degrees.dp
    splits = [(replicate, ranks // replicate) for replicate in get_divisors(ranks)]
    splits = [split for split in splits if get_data_parallel_mode(*split, degrees.cp) == mode]
    advice = f"no degrees on {ranks} data-parallel ranks give it. Use mode='auto' or more ranks"
    if splits:
        replicate, shard = splits[0]
        advice = (
            f"parallelism.data_parallel_replicate_degree={replicate} with data_parallel_shard_degree={shard} "
            "gives it here"
        )
    yield (
        f"simple_fsdp.mode={mode!r} needs {needs}, but data_parallel_replicate_degree={degrees.dp_replicate}, "
        f"data_parallel_shard_degree={degrees.dp_shard}, context_parallel_degree={degrees.cp} give "
        f"{given and repr(given) or 'no data parallelism'}; {advice}."
    )


def _get_head_faults(config: JobConfig, world_size: int, train_spec: TrainSpec | None) -> Iterator[str]:
    model_args = train_spec and train_spec.model_args.get(config.model.flavor)
    n_heads = getattr(model_args, "n_heads", None)
    tp = config.parallelism.tensor_parallel_degree
    if not n_heads or tp < 1:
        return
    n_kv_heads = getattr(model_args, "n_kv_heads", None) or n_heads
    common = math.gcd(n_heads, n_kv_heads)
    if common % tp:
        faulty = f"n_heads={n_heads}" if n_heads % tp else f"n_kv_heads={n_kv_heads}"
        other = f"n_kv_heads={n_kv_heads}" if n_heads % tp else f"n_heads={n_heads}"
        possible = ", ".join(str(degree) for degree in get_divisors(math.gcd(common, world_size)))
        yield (
            f"parallelism.tensor_parallel_degree={tp} does not divide {faulty} "
            f"(flavor {config.model.flavor!r}, {other}). Degrees possible on {world_size} ranks: {possible}."
        )


def _get_seq_len_faults(config: JobConfig, world_size: int, train_spec: TrainSpec | None) -> Iterator[str]:
    tp, cp = config.parallelism.tensor_parallel_degree, config.parallelism.context_parallel_degree
    if min(tp, cp) < 1 or tp == cp == 1 or any(_get_head_faults(config, world_size, train_spec)):
        return  # with another tp the divisor is another one
    divisor = tp * 2 * cp  # torchtitan's ParallelDims.seq_len_divisor
    sections = [("training", config.training)]
    if config.validation.enable:
        sections.append(("validation", config.validation))
    for section, values in sections:
        if values.seq_len % divisor:
            yield (
                f"{section}.seq_len={values.seq_len} is not divisible by {divisor} (tensor_parallel_degree={tp} * 2 * "
                f"context_parallel_degree={cp}). Nearest: {_list_nearest(values.seq_len, divisor)}."
            )


def _get_batch_faults(config: JobConfig, world_size: int, train_spec: TrainSpec | None) -> Iterator[str]:
    degrees = get_degrees(config, world_size)
    local, total = config.training.local_batch_size, config.training.global_batch_size
    if degrees is None or local < 1 or total < 0:  # negative: torchtitan takes one step per batch
        return
    dp = degrees.dp
    if total == 0 or total % (local * dp):
        yield (
            f"training.global_batch_size={total} is not a multiple of {local * dp} (local_batch_size={local} * "
            f"{dp} data-parallel ranks). Nearest: {_list_nearest(total, local * dp)}; -1 takes {local * dp}."
        )


def _get_expert_faults(config: JobConfig, world_size: int, train_spec: TrainSpec | None) -> Iterator[str]:
    degree = config.parallelism.expert_parallel_degree
    if config.model.name in SERVED_MODELS and degree != 1:
        yield (
            f"parallelism.expert_parallel_degree={degree} needs a mixture-of-experts model; {config.model.name!r} "
            "is dense. Set it to 1."
        )


def _list_nearest(number: int, divisor: int) -> str:
    below = number // divisor * divisor
    return f"{below} or {below + divisor}" if below else str(divisor)


def get_divisors(number: int) -> list[int]:
    return [divisor for divisor in range(1, number + 1) if number % divisor == 0]


HEAD_RULES = (Rule(("parallelism.tensor_parallel_degree", "model.name", "model.flavor"), _get_head_faults),)
DEGREE_RULES = (
    Rule(_DEGREE_KEYS, _get_product_faults),
    Rule((*_DEGREE_KEYS, "simple_fsdp.mode"), _get_mode_faults),
    Rule((*_DEGREE_KEYS, "training.seq_len", "validation.seq_len", "validation.enable"), _get_seq_len_faults),
    Rule((*_DEGREE_KEYS, "training.local_batch_size", "training.global_batch_size"), _get_batch_faults),
    Rule(("parallelism.expert_parallel_degree", "model.name"), _get_expert_faults),
)
