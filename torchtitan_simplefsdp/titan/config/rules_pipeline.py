"""Rules about pipeline parallelism: the schedule, the microbatches, and how the model is cut into stages.

torchtitan keeps of a stage what is named and exists: a misspelled or forgotten layer is left out, and it trains a
smaller model without a word.

Not here: `pipeline_parallel_layers_per_stage`, which torchtitan checks, on every rank alike, when it cuts the model.
"""

import os
from collections import Counter
from collections.abc import Iterator

from torch.distributed.pipelining.schedules import (
    get_schedule_class,
    PipelineScheduleSingle,
    ScheduleDualPipeV,
    ScheduleZBVZeroBubble,
)
from torchtitan.config import JobConfig
from torchtitan.distributed.pipeline_parallel import generate_llm_fqn_per_model_part
from torchtitan.protocols.train_spec import TrainSpec

from torchtitan_simplefsdp.titan.config.fault import describe_error, find_close, get_suggestion, list_choices, Rule
from torchtitan_simplefsdp.titan.config.job_config import SERVED_MODELS
from torchtitan_simplefsdp.titan.config.rules_degrees import get_divisors


def _get_pipeline_faults(config: JobConfig, world_size: int, train_spec: TrainSpec | None) -> Iterator[str]:
    parallelism, local = config.parallelism, config.training.local_batch_size
    pp, microbatch = parallelism.pipeline_parallel_degree, parallelism.pipeline_parallel_microbatch_size
    if pp <= 1:
        return
    if microbatch < 1:
        yield f"parallelism.pipeline_parallel_microbatch_size={microbatch} must be at least 1."
    elif local % microbatch:
        yield (
            f"training.local_batch_size={local} is not divisible by parallelism.pipeline_parallel_microbatch_size="
            f"{microbatch}. Microbatch sizes possible: {', '.join(map(str, get_divisors(local)))}."
        )
    csv = parallelism.pipeline_parallel_schedule_csv
    if csv and not os.path.isfile(csv):
        where = os.path.abspath(csv)
        yield f"parallelism.pipeline_parallel_schedule_csv={csv!r} not found (looked in {where}). Expected a file."
    try:
        schedule = get_schedule_class(parallelism.pipeline_parallel_schedule)
    except ValueError as error:
        yield f"parallelism.pipeline_parallel_schedule: {describe_error(error)}."
        return
    yield from _get_stage_faults(config, schedule)
    model_args = train_spec and train_spec.model_args.get(config.model.flavor)
    if not hasattr(model_args, "n_layers"):
        return
    if parallelism.module_fqns_per_model_part is not None:
        if config.model.name in SERVED_MODELS:
            yield from _get_module_faults(parallelism.module_fqns_per_model_part, model_args.n_layers)
    elif not parallelism.pipeline_parallel_layers_per_stage:
        stages = pp * (1 if issubclass(schedule, PipelineScheduleSingle) else 2)
        try:
            generate_llm_fqn_per_model_part(
                stages,
                model_args.n_layers,
                parallelism.pipeline_parallel_first_stage_less_layers,
                parallelism.pipeline_parallel_last_stage_less_layers,
            )
        except ValueError as error:
            yield (
                f"parallelism.pipeline_parallel_degree={pp} cuts the {model_args.n_layers} layers of flavor "
                f"{config.model.flavor!r} into {stages} stages: {describe_error(error)}."
            )


def _get_stage_faults(config: JobConfig, schedule: type) -> Iterator[str]:
    parts, pp = config.parallelism.module_fqns_per_model_part, config.parallelism.pipeline_parallel_degree
    if parts is None:
        return
    name = config.parallelism.pipeline_parallel_schedule
    if issubclass(schedule, PipelineScheduleSingle):
        allowed, is_allowed = str(pp), len(parts) == pp
    elif schedule in (ScheduleZBVZeroBubble, ScheduleDualPipeV):
        allowed, is_allowed = str(2 * pp), len(parts) == 2 * pp
    else:
        allowed, is_allowed = f"a multiple of {pp}", len(parts) > 0 and len(parts) % pp == 0
    if not is_allowed:
        yield (
            f"parallelism.module_fqns_per_model_part has {len(parts)} parts; schedule {name!r} on "
            f"pipeline_parallel_degree={pp} needs {allowed}."
        )


def _get_module_faults(parts: list[list[str]], n_layers: int) -> Iterator[str]:
    """Compare the parts with what a Llama model consists of, in the order of its forward."""
    (modules,) = generate_llm_fqn_per_model_part(1, n_layers)
    counts = Counter(name for part in parts for name in part)
    key = "parallelism.module_fqns_per_model_part"
    unknown = [name for name in counts if name not in modules]
    if unknown:
        suggestion = get_suggestion(find_close(unknown[0], modules), "'{}'")
        known = f"'tok_embeddings', 'layers.0' to 'layers.{n_layers - 1}', 'norm', 'output'"
        yield f"{key}: unknown {list_choices(unknown)}{suggestion}. This model has {known}."
    missing = [name for name in modules if name not in counts]
    if missing:
        yield f"{key}: no part has {list_choices(missing)}, so the model would be trained without. Add each to a part."
    repeated = [name for name in modules if counts[name] > 1]
    if repeated:
        yield f"{key}: {list_choices(repeated)} named more than once. Each module belongs to one part."
    if not (unknown or missing or repeated):
        order = [name for part in parts for name in sorted(part, key=modules.index)]
        if order != modules:
            first = next(name for name, expected in zip(order, modules) if name != expected)
            yield f"{key}: {first!r} comes too early. Parts follow the order of the forward: {', '.join(modules)}."


PIPELINE_RULES = (
    Rule(("parallelism", "training.local_batch_size", "model.name", "model.flavor"), _get_pipeline_faults),
)
