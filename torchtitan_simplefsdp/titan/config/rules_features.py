"""Rules about combinations of torchtitan's features that do not work here, each with its reason.

Without them these runs would fail late, or train on something else than was asked for.

Not here: degrees that do not fit (rules_degrees.py), missing files and packages (rules_model.py, rules_packages.py).
"""

import math
from collections.abc import Iterator
from pathlib import Path

import torch
from torchtitan.config import JobConfig
from torchtitan.protocols.train_spec import TrainSpec

from torchtitan_simplefsdp.graph.cost_model import load_cost_model
from torchtitan_simplefsdp.titan.config.fault import Rule
from torchtitan_simplefsdp.titan.config.job_config import is_model_compiled, SERVED_MODELS
from torchtitan_simplefsdp.titan.config.rules_degrees import get_degrees
from torchtitan_simplefsdp.titan.dataloader import get_global_batch_size
from torchtitan_simplefsdp.titan.datasets import MAP_STYLE_DATASETS
from torchtitan_simplefsdp.titan.device import is_cpu_only


def _get_offload_faults(config: JobConfig, world_size: int, train_spec: TrainSpec | None) -> Iterator[str]:
    if config.training.enable_cpu_offload and config.model.name in SERVED_MODELS:
        yield (
            "training.enable_cpu_offload is not supported by SimpleFSDP yet. Remove it, or shard over more ranks "
            "(data_parallel_shard_degree) to save memory."
        )


def _get_local_tensor_faults(config: JobConfig, world_size: int, train_spec: TrainSpec | None) -> Iterator[str]:
    if config.comm.mode == "local_tensor" and config.model.name in SERVED_MODELS:
        yield (
            "comm.mode='local_tensor' (COMM_MODE=local_tensor) does not work with SimpleFSDP yet: torch's simulated ranks can "
            "neither share out a map-style dataset nor initialize this model. Use COMM_MODE=fake_backend for a dry run."
        )


def _get_early_step_faults(config: JobConfig, world_size: int, train_spec: TrainSpec | None) -> Iterator[str]:
    degrees = get_degrees(config, world_size)
    if not config.optimizer.early_step_in_backward or degrees is None:
        return
    ranks, local = degrees.dp, config.training.local_batch_size
    if degrees.pp > 1 or get_global_batch_size(config, ranks) > local * ranks:
        yield (
            "optimizer.early_step_in_backward steps after each microbatch, before the gradient of the step is complete, and this "
            "run has several (pipeline_parallel_degree, or global_batch_size above local_batch_size * data-parallel ranks). Remove it."
        )


def _get_worker_faults(config: JobConfig, world_size: int, train_spec: TrainSpec | None) -> Iterator[str]:
    sections = []
    if config.model.name not in SERVED_MODELS:  # theirs is torchtitan's loader; our own deals sequences to workers
        sections.append("training")
    if config.validation.enable:  # torchtitan's loader for any model
        sections.append("validation")
    for section in sections:
        values = getattr(config, section)
        if values.dataloader.num_workers > 1 and values.dataset.lower() in MAP_STYLE_DATASETS:
            yield (
                f"{section}.dataloader.num_workers={values.dataloader.num_workers}: each worker would read all of "
                f"dataset {values.dataset!r}, so every batch would come that many times. Use 0 or 1."
            )


def _get_validation_faults(config: JobConfig, world_size: int, train_spec: TrainSpec | None) -> Iterator[str]:
    if not config.validation.enable:
        return
    for name in ("pipeline_parallel_degree", "context_parallel_degree"):
        degree = getattr(config.parallelism, name)
        if degree > 1:
            yield (
                f"validation.enable with parallelism.{name}={degree} is not supported yet: torchtitan 0.2.2 shows a wrong "
                "validation loss there. Remove validation.enable, or set the degree to 1."
            )
    degrees = get_degrees(config, world_size)
    if config.validation.steps == -1 and degrees and degrees.dp > 1:
        yield (
            "validation.steps=-1 (all data) needs one data-parallel rank: ranks hold different numbers of batches, and those "
            f"with more would wait for ever. Set validation.steps to a number; there are "
            f"{degrees.dp} such ranks."
        )


def _get_bucket_plan_faults(config: JobConfig, world_size: int, train_spec: TrainSpec | None) -> Iterator[str]:
    plan = config.simple_fsdp.bucket_plan
    if plan not in ("block", "parameter") and not _is_size(plan):
        yield (
            f"simple_fsdp.bucket_plan={plan!r} must be 'block' (one collective per transformer block), 'parameter', or a "
            "size in MiB above 0, as '25'."
        )


def _is_size(text: str) -> bool:
    try:
        return 0 < float(text) < math.inf
    except ValueError:
        return False


def _get_graph_passes_faults(config: JobConfig, world_size: int, train_spec: TrainSpec | None) -> Iterator[str]:
    passes, plan, file = config.compile.graph_passes, config.simple_fsdp.bucket_plan, config.simple_fsdp.cost_model
    if passes is not None and plan != "block":
        yield (
            f"compile.graph_passes={passes!r} decides which parameters share a collective, and so does "
            f"simple_fsdp.bucket_plan={plan!r}. Remove one of them."
        )
    if not file:
        return
    if passes != "auto_bucketing":
        yield f"simple_fsdp.cost_model={file!r} is for compile.graph_passes='auto_bucketing' alone. Set that, or remove it."
        return
    try:
        cost = load_cost_model(Path(file))
    except (OSError, ValueError) as error:
        yield f"simple_fsdp.cost_model={file!r} cannot be used: {error}"
        return
    dtype = config.training.mixed_precision_param
    if dtype not in cost.flops_per_second:
        yield (
            f"simple_fsdp.cost_model={file!r} has no flops_per_second.{dtype}, which training.mixed_precision_param asks for. "
            "Add it; scripts/measure_cost_model.py measures it."
        )


def _get_memory_budget_faults(config: JobConfig, world_size: int, train_spec: TrainSpec | None) -> Iterator[str]:
    if config.activation_checkpoint.mode == "memory_budget" and not is_model_compiled(config):
        yield (
            "activation_checkpoint.mode='memory_budget' is the compiler's work: add --compile.enable (with 'model' among "
            "compile.components), or use another mode."
        )


def _get_other_trainer_faults(config: JobConfig, world_size: int, train_spec: TrainSpec | None) -> Iterator[str]:
    if config.fault_tolerance.enable:
        yield (
            "fault_tolerance.enable does nothing here: torchtitan 0.2.2 has fault tolerance in a trainer of its own "
            "(torchtitan.experiments.ft). Remove it, or use that trainer."
        )
    if config.memory_estimation.enable:
        yield (
            "memory_estimation.enable does nothing here: torchtitan's trainer does not read it, only its script "
            "scripts/estimate, which estimates FSDP2. Remove it; each step line shows the memory in use."
        )


def _get_cpu_faults(config: JobConfig, world_size: int, train_spec: TrainSpec | None) -> Iterator[str]:
    if not is_cpu_only():
        return
    if config.profiling.enable_memory_snapshot:
        yield "profiling.enable_memory_snapshot needs a GPU, and there is none. Remove it."
    parallelism = config.parallelism
    dual_pipe = parallelism.pipeline_parallel_degree > 1 and parallelism.pipeline_parallel_schedule == "DualPipeV"
    if dual_pipe and parallelism.pipeline_parallel_expert_parallel_overlap:
        yield (
            "parallelism.pipeline_parallel_schedule='DualPipeV' overlaps expert parallelism on GPU streams, and there is no GPU. "
            "Add --parallelism.no_pipeline_parallel_expert_parallel_overlap."
        )
    if config.parallelism.context_parallel_degree > 1 and config.model.name in SERVED_MODELS:
        model_args = train_spec and train_spec.model_args.get(config.model.flavor)
        attn_type = getattr(model_args, "attn_type", "sdpa")
        if attn_type != "sdpa":
            yield (
                f"parallelism.context_parallel_degree={config.parallelism.context_parallel_degree} with attention "
                f"{attn_type!r} (flavor {config.model.flavor!r}) needs a GPU. On CPU use a flavor with sdpa attention."
            )
    release = tuple(int(part) for part in torch.__version__.split("+")[0].split(".")[:2])
    full = config.activation_checkpoint.mode == "full"
    if is_model_compiled(config) and full and parallelism.tensor_parallel_degree > 1 and release < (2, 14):
        degrees = get_degrees(config, world_size)
        if degrees and degrees.dp == 1:
            yield (
                f"compile.enable with activation_checkpoint.mode='full' and tensor parallelism alone fails on CPU with torch "
                f"{torch.__version__} (its partitioner counts attention as random). Use mode='selective' with "
                "selective_ac_option='op', data parallelism beside it, or torch 2.14."
            )


def _get_compile_unit_faults(config: JobConfig, world_size: int, train_spec: TrainSpec | None) -> Iterator[str]:
    unit, degree = config.simple_fsdp.compile_unit, config.parallelism.tensor_parallel_degree
    if is_model_compiled(config) and unit == "block" and degree > 1:
        yield (
            f"simple_fsdp.compile_unit='block' does not work with tensor_parallel_degree={degree}: the gradients of compiled "
            "blocks reach the DTensors between them as plain tensors (torch 2.13). Use compile_unit='model'."
        )


FEATURE_RULES = (
    Rule(("training.enable_cpu_offload", "model.name"), _get_offload_faults),
    Rule(("comm.mode", "model.name"), _get_local_tensor_faults),
    Rule(("optimizer", "parallelism", "training"), _get_early_step_faults),
    Rule(
        (
            "model.name",
            "training.dataset",
            "training.dataloader",
            "validation.dataset",
            "validation.dataloader",
            "validation.enable",
        ),
        _get_worker_faults,
    ),
    Rule(("validation", "parallelism"), _get_validation_faults),
    Rule(("compile", "simple_fsdp.compile_unit", "parallelism"), _get_compile_unit_faults),
    Rule(("simple_fsdp.bucket_plan",), _get_bucket_plan_faults),
    Rule(
        ("compile", "simple_fsdp.bucket_plan", "simple_fsdp.cost_model", "training.mixed_precision_param"),
        _get_graph_passes_faults,
    ),
    Rule(("activation_checkpoint.mode", "compile"), _get_memory_budget_faults),
    Rule(("fault_tolerance.enable", "memory_estimation.enable"), _get_other_trainer_faults),
    Rule(("profiling", "parallelism", "model", "compile", "activation_checkpoint"), _get_cpu_faults),
)
