"""parallelize_llama: tensor and context parallelism, activation checkpointing, SimpleFSDP and compile, in this order.

Not here: pipeline parallelism, which splits the model before (torchtitan's `pipeline_llm` calls this per stage).
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
from torch import nn
from torchtitan.config import JobConfig, TORCH_DTYPE_MAP
from torchtitan.distributed import ParallelDims
from torchtitan.distributed.activation_checkpoint import apply_ac as torchtitan_apply_ac
from torchtitan.distributed.context_parallel import apply_cp_to_attention_module
from torchtitan.distributed.tensor_parallel import maybe_enable_async_tp
from torchtitan.models.llama3.infra.parallelize import _op_sac_save_list as torchtitan_op_sac_save_list
from torchtitan.models.llama3.infra.parallelize import apply_tp as torchtitan_apply_tp
from torchtitan.tools.logging import logger

from torchtitan_simplefsdp.core.data_parallel import apply_mixed_precision, data_parallel
from torchtitan_simplefsdp.core.precision import MixedPrecisionPolicy
from torchtitan_simplefsdp.graph.auto_bucket import Choice, choose_bucket_plan
from torchtitan_simplefsdp.graph.compile import compile_blocks, compile_model
from torchtitan_simplefsdp.graph.cost_model import CostModel, load_cost_model
from torchtitan_simplefsdp.graph.machines import H100, TWO_CORES

from .context_parallel import AllGatherAttention
from .config.data_parallel_mode import get_data_parallel_mode
from .config.job_config import is_model_compiled
from .model import get_init_seed

OP_SAC_SAVE_LIST = torchtitan_op_sac_save_list | {
    # attention on CPU; recomputing it would be slow, and on torch 2.13 breaks compile (its ops count as random there)
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default,
}

MESH_DIMS = {"replicate": ["dp_replicate"], "fully_shard": ["fsdp"], "hybrid_shard": ["dp_replicate", "fsdp"]}


def parallelize_llama(model: nn.Module, parallel_dims: ParallelDims, job_config: JobConfig) -> nn.Module:
    """Apply everything but pipeline parallelism to a Llama model (or pipeline stage) on meta, in place.

    Returns:
        The model itself.

    The degrees fit each other and the model: config/rules_degrees.py has checked that.
    """
    model.init_seed = get_init_seed(parallel_dims)
    if parallel_dims.tp_enabled:
        apply_tp(model, parallel_dims, job_config)
    if parallel_dims.cp_enabled:
        apply_cp(model, parallel_dims, job_config)
    if job_config.activation_checkpoint.mode != "none":
        apply_ac(model, job_config)
    apply_dp(model, parallel_dims, job_config)
    if is_model_compiled(job_config):
        apply_compile(model, job_config)
    return model


def apply_tp(model: nn.Module, parallel_dims: ParallelDims, job_config: JobConfig) -> None:
    """Apply torchtitan's tensor and sequence parallelism in place."""
    tp_mesh = parallel_dims.get_mesh("tp")
    rowwise = job_config.quantize.linear.float8.recipe_name in ("rowwise", "rowwise_with_gw_hp")
    torchtitan_apply_tp(
        model,
        tp_mesh,
        loss_parallel=not job_config.parallelism.disable_loss_parallel,
        # only the tensorwise recipe has float8 versions of the TP layers
        enable_float8_tensorwise_tp="float8" in job_config.model.converters and not rowwise,
        cp_enabled=parallel_dims.cp_enabled,
    )
    maybe_enable_async_tp(job_config, tp_mesh)


def apply_cp(model: nn.Module, parallel_dims: ParallelDims, job_config: JobConfig) -> None:
    """Apply context parallelism to the attention of every block in place: torchtitan's, or ours on CPU."""
    cp_mesh = parallel_dims.get_mesh("cp")
    attentions = [block.attention for block in model.layers.values()]
    if cp_mesh.device_type != "cpu":
        apply_cp_to_attention_module([a.inner_attention for a in attentions], cp_mesh, model.model_args.attn_type)
        return
    for attention in attentions:
        load_balancer = job_config.parallelism.context_parallel_load_balancer
        attention.inner_attention = AllGatherAttention(cp_mesh, load_balanced=load_balancer == "headtail")
    logger.info("Applied context parallelism for CPU (all_gather of keys and values) to the model")


def apply_ac(model: nn.Module, job_config: JobConfig) -> None:
    """Apply torchtitan's activation checkpointing to every block in place."""
    torchtitan_apply_ac(
        model,
        job_config.activation_checkpoint,
        model_compile_enabled=is_model_compiled(job_config),
        op_sac_save_list=OP_SAC_SAVE_LIST,
        base_folder=job_config.job.dump_folder,
    )


def apply_dp(model: nn.Module, parallel_dims: ParallelDims, job_config: JobConfig) -> None:
    """Apply SimpleFSDP in the mode that the degrees give, or its mixed precision alone where they are all 1."""
    training = job_config.training
    mp_policy = MixedPrecisionPolicy(
        param_dtype=TORCH_DTYPE_MAP[training.mixed_precision_param],
        reduce_dtype=TORCH_DTYPE_MAP[training.mixed_precision_reduce],
    )
    mode = get_data_parallel_mode(parallel_dims.dp_replicate, parallel_dims.dp_shard, parallel_dims.cp)
    precision = f"parameters stored in {training.dtype}, computed in {training.mixed_precision_param}"
    if mode is None:
        apply_mixed_precision(model, mp_policy)
        applied = "one data-parallel rank, nothing to gather or reduce"
    else:
        mesh = parallel_dims.get_mesh(MESH_DIMS[mode])
        reduction = get_reduction(job_config.simple_fsdp.reduction, mesh.device_type)
        reshard = get_reshard_after_forward(job_config.parallelism.fsdp_reshard_after_forward, parallel_dims.pp_enabled)
        choose = partial(choose_bucket_plan, model, mesh, mode, mp_policy, reshard_after_forward=reshard)
        bucket_plan = get_bucket_plan(job_config, mesh.device_type, choose)
        data_parallel(
            model,
            mesh,
            mode=mode,
            mp_policy=mp_policy,
            reduction=reduction,
            bucket_plan=bucket_plan,
            reshard_after_forward=reshard,
        )
        dims = ", ".join(f"{name}={size}" for name, size in zip(MESH_DIMS[mode], mesh.shape))
        applied = f"mode {mode} on mesh ({dims}), bucket_plan {bucket_plan or 'parameter'!r}"
        precision += f", gradients summed in {training.mixed_precision_reduce} with the {reduction} reduction"
        if mode != "fully_shard":
            precision += f" (over replicas {job_config.simple_fsdp.replica_reduction})"
    logger.info(f"SimpleFSDP: {applied}; initial weights drawn from seed {model.init_seed}; {precision}")


def get_bucket_plan(job_config: JobConfig, device_type: str, choose: Callable[..., Choice]) -> str | float | None:
    """Return the plan of `data_parallel` that `compile.graph_passes` or `simple_fsdp.bucket_plan` stands for.

    `choose`: `choose_bucket_plan` for the model that is parallelized, which lacks the cost model and the tokens.
    """
    passes, configured = job_config.compile.graph_passes, job_config.simple_fsdp.bucket_plan
    if passes is not None and not is_model_compiled(job_config):
        logger.warning(
            f"SimpleFSDP: compile.graph_passes={passes!r} is not active: it needs compile.enable (with 'model' among "
            "compile.components)"
        )
    elif passes == "transformer_block_bucketing":
        return "block"
    elif passes == "auto_bucketing":
        cost = get_cost_model(job_config.simple_fsdp.cost_model, device_type)
        choice = choose(cost=cost, tokens=get_tokens_per_forward(job_config))
        logger.info(
            f"SimpleFSDP: auto_bucketing chose bucket_plan {choice.bucket_plan!r}: step predicted in "
            f"{choice.chosen.timeline.step_seconds:.3g} s, with 'block' {choice.block.timeline.step_seconds:.3g} s; "
            f"cost model: {cost.name}"
        )
        return choice.bucket_plan
    if configured in ("block", "parameter"):
        return "block" if configured == "block" else None
    return float(configured)


def get_tokens_per_forward(job_config: JobConfig) -> int:
    """Return the tokens of one forward on this rank: of a microbatch under pipeline parallelism."""
    training, parallelism = job_config.training, job_config.parallelism
    pipelined = parallelism.pipeline_parallel_degree > 1
    sequences = parallelism.pipeline_parallel_microbatch_size if pipelined else training.local_batch_size
    return sequences * training.seq_len // parallelism.context_parallel_degree


def get_cost_model(configured: str, device_type: str) -> CostModel:
    """Return the cost model that `simple_fsdp.cost_model` names; where it names none, one that is always the same."""
    if configured:
        return load_cost_model(Path(configured))
    return TWO_CORES if device_type == "cpu" else H100


def get_reshard_after_forward(configured: str, pp_enabled: bool) -> bool | None:
    """Return what `parallelism.fsdp_reshard_after_forward` stands for, as torchtitan defines it for FSDP2.

    Under pipeline parallelism 'default' keeps the parameters, which several microbatches in flight would gather each.
    """
    if configured == "default":
        return False if pp_enabled else None
    return configured == "always"


def get_reduction(configured: str, device_type: str) -> str:
    """Return the reduction that `simple_fsdp.reduction` stands for; docs/numerics.md has what each costs."""
    if configured != "auto":
        return configured
    return "exact" if device_type == "cpu" else "native"


def apply_compile(model: nn.Module, job_config: JobConfig) -> None:
    """Compile the whole model, collectives included (arXiv:2411.00284, section 3.2), or its blocks' computation, in place."""
    backend = job_config.compile.backend
    if job_config.simple_fsdp.compile_unit == "block":
        compile_blocks(model, backend)
        logger.info(f"Compiling the computation of each block with backend {backend!r}; collectives stay eager")
    else:
        compile_model(model, backend)
        logger.info(f"Compiling the model as one graph with backend {backend!r}")
