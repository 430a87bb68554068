"""Combinations that do not work are refused, with the message written by hand."""

import dataclasses

import pytest
import torch
from config_workspace import get_faults, parse, workspace

from torchtitan_simplefsdp.graph.cost_model import format_cost_model
from torchtitan_simplefsdp.graph.machines import TWO_CORES
from torchtitan_simplefsdp.titan.config import rules_features

VALIDATION = "--validation.enable --validation.dataset pydoc"

# Flags, world size, the one fault; all of them on a machine without a GPU and one rank or two.
CASES = {
    "cpu_offload": (
        "--training.enable_cpu_offload",
        1,
        "training.enable_cpu_offload is not supported by SimpleFSDP yet. Remove it, or shard over more ranks "
        "(data_parallel_shard_degree) to save memory.",
    ),
    "local_tensor": (
        "--comm.mode local_tensor",
        1,
        "comm.mode='local_tensor' (COMM_MODE=local_tensor) does not work with SimpleFSDP yet: torch's simulated ranks can "
        "neither share out a map-style dataset nor initialize this model. Use COMM_MODE=fake_backend for a dry run.",
    ),
    "early_step_with_accumulation": (
        "--optimizer.early_step_in_backward --training.local_batch_size 4 --training.global_batch_size 16",
        2,
        "optimizer.early_step_in_backward steps after each microbatch, before the gradient of the step is complete, and this run "
        "has several (pipeline_parallel_degree, or global_batch_size above local_batch_size * data-parallel ranks). Remove it.",
    ),
    "early_step_in_a_pipeline": (
        "--optimizer.early_step_in_backward --parallelism.pipeline_parallel_degree 2",
        2,
        "optimizer.early_step_in_backward steps after each microbatch, before the gradient of the step is complete, and this run "
        "has several (pipeline_parallel_degree, or global_batch_size above local_batch_size * data-parallel ranks). Remove it.",
    ),
    "two_workers_of_validation": (
        f"{VALIDATION} --validation.dataloader.num_workers 2",
        1,
        "validation.dataloader.num_workers=2: each worker would read all of dataset 'pydoc', so every batch would come that "
        "many times. Use 0 or 1.",
    ),
    "validation_under_pipeline_parallelism": (
        f"{VALIDATION} --validation.steps 2 --parallelism.pipeline_parallel_degree 2",
        2,
        "validation.enable with parallelism.pipeline_parallel_degree=2 is not supported yet: torchtitan 0.2.2 shows a wrong "
        "validation loss there. Remove validation.enable, or set the degree to 1.",
    ),
    "validation_under_context_parallelism": (
        f"{VALIDATION} --validation.steps 2 --parallelism.context_parallel_degree 2",
        2,
        "validation.enable with parallelism.context_parallel_degree=2 is not supported yet: torchtitan 0.2.2 shows a wrong "
        "validation loss there. Remove validation.enable, or set the degree to 1.",
    ),
    "validation_of_all_data_on_two_ranks": (
        VALIDATION,
        2,
        "validation.steps=-1 (all data) needs one data-parallel rank: ranks hold different numbers of batches, and those with "
        "more would wait for ever. Set validation.steps to a number; there are 2 such ranks.",
    ),
    **{
        f"bucket_plan_{plan}": (
            f"--simple_fsdp.bucket_plan {plan}",
            1,
            f"simple_fsdp.bucket_plan={plan!r} must be 'block' (one collective per transformer block), 'parameter', or a "
            "size in MiB above 0, as '25'.",
        )
        for plan in ("layer", "0", "inf", "nan")
    },
    "memory_budget_without_compile": (
        "--activation_checkpoint.mode memory_budget",
        1,
        "activation_checkpoint.mode='memory_budget' is the compiler's work: add --compile.enable (with 'model' among "
        "compile.components), or use another mode.",
    ),
    "fault_tolerance": (
        "--fault_tolerance.enable",
        1,
        "fault_tolerance.enable does nothing here: torchtitan 0.2.2 has fault tolerance in a trainer of its own "
        "(torchtitan.experiments.ft). Remove it, or use that trainer.",
    ),
    "memory_estimation": (
        "--memory_estimation.enable",
        1,
        "memory_estimation.enable does nothing here: torchtitan's trainer does not read it, only its script scripts/estimate, "
        "which estimates FSDP2. Remove it; each step line shows the memory in use.",
    ),
    "memory_snapshot": (
        "--profiling.enable_memory_snapshot",
        1,
        "profiling.enable_memory_snapshot needs a GPU, and there is none. Remove it.",
    ),
    "dual_pipe_with_expert_overlap": (
        "--parallelism.pipeline_parallel_degree 2 --parallelism.pipeline_parallel_schedule DualPipeV",
        2,
        "parallelism.pipeline_parallel_schedule='DualPipeV' overlaps expert parallelism on GPU streams, and there is no GPU. "
        "Add --parallelism.no_pipeline_parallel_expert_parallel_overlap.",
    ),
    "flex_attention_under_context_parallelism": (
        "--model.flavor debugmodel_flex_attn --parallelism.context_parallel_degree 2",
        2,
        "parallelism.context_parallel_degree=2 with attention 'flex' (flavor 'debugmodel_flex_attn') needs a GPU. On CPU "
        "use a flavor with sdpa attention.",
    ),
    "compile_with_full_checkpointing": (
        "--compile.enable --activation_checkpoint.mode full --parallelism.tensor_parallel_degree 2",
        2,
        f"compile.enable with activation_checkpoint.mode='full' and tensor parallelism alone fails on CPU with torch "
        f"{torch.__version__} (its partitioner counts attention as random). Use mode='selective' with "
        "selective_ac_option='op', data parallelism beside it, or torch 2.14.",
    ),
    "compiled_blocks_with_tensor_parallelism": (
        "--compile.enable --simple_fsdp.compile_unit block --parallelism.tensor_parallel_degree 2",
        4,
        "simple_fsdp.compile_unit='block' does not work with tensor_parallel_degree=2: the gradients of compiled blocks reach "
        "the DTensors between them as plain tensors (torch 2.13). Use compile_unit='model'.",
    ),
    "graph_passes_and_a_bucket_plan": (
        "--compile.graph_passes auto_bucketing --simple_fsdp.bucket_plan 25",
        2,
        "compile.graph_passes='auto_bucketing' decides which parameters share a collective, and so does "
        "simple_fsdp.bucket_plan='25'. Remove one of them.",
    ),
    "cost_model_that_nothing_reads": (
        "--simple_fsdp.cost_model my.toml",
        2,
        "simple_fsdp.cost_model='my.toml' is for compile.graph_passes='auto_bucketing' alone. Set that, or remove it.",
    ),
    "cost_model_that_is_missing": (
        "--compile.graph_passes auto_bucketing --simple_fsdp.cost_model no/my.toml",
        2,
        "simple_fsdp.cost_model='no/my.toml' cannot be used: cost model: no/my.toml not found. "
        "scripts/measure_cost_model.py writes one.",
    ),
}


@pytest.fixture(autouse=True)
def no_gpu(monkeypatch):
    monkeypatch.setattr(rules_features, "is_cpu_only", lambda: True)


@pytest.mark.parametrize("flags, world_size, fault", CASES.values(), ids=CASES.keys())
def test_what_does_not_work_without_a_gpu_is_the_one_fault(workspace, flags, world_size, fault):
    if "2.14" in fault and not torch.__version__.startswith("2.13"):
        pytest.skip("works since torch 2.14")
    assert get_faults(workspace, flags=flags, world_size=world_size) == [fault]


@pytest.mark.parametrize("flags", [flags for flags, _, fault in CASES.values() if "GPU" in fault or "CPU with" in fault])
def test_on_a_gpu_these_are_accepted(workspace, monkeypatch, flags):
    monkeypatch.setattr(rules_features, "is_cpu_only", lambda: False)
    assert parse(workspace, flags=flags, world_size=2 if "_parallel_degree" in flags else 1)


def test_a_cost_model_needs_a_rate_for_the_dtype_of_compute(workspace, tmp_path):
    file = tmp_path / "half.toml"
    file.write_text(format_cost_model(dataclasses.replace(TWO_CORES, flops_per_second={"float32": 1e9})))
    flags = f"--compile.enable --compile.graph_passes auto_bucketing --simple_fsdp.cost_model {file}"
    assert get_faults(workspace, flags=f"{flags} --training.mixed_precision_param bfloat16", world_size=2) == [
        f"simple_fsdp.cost_model='{file}' has no flops_per_second.bfloat16, which training.mixed_precision_param asks for. "
        "Add it; scripts/measure_cost_model.py measures it."
    ]
    assert parse(workspace, flags=f"{flags} --training.mixed_precision_param float32", world_size=2)


@pytest.mark.parametrize("flags, world_size", [(VALIDATION, 1), (f"{VALIDATION} --validation.steps 2", 2)])
def test_validation_that_cannot_hang_is_accepted(workspace, flags, world_size):
    assert parse(workspace, flags=flags, world_size=world_size)


@pytest.mark.parametrize("plan", ["block", "parameter", "25", "0.5"])
def test_bucket_plans_are_names_and_sizes(workspace, plan):
    assert parse(workspace, flags=f"--simple_fsdp.bucket_plan {plan}").simple_fsdp.bucket_plan == plan


def test_an_early_step_of_one_microbatch_is_accepted(workspace):
    assert parse(workspace, flags="--optimizer.early_step_in_backward --training.global_batch_size 16", world_size=2)


@pytest.mark.parametrize("dataset", ["pydoc", "c4"])
def test_workers_that_share_the_data_are_accepted(workspace, dataset):
    assert parse(workspace, flags=f"--training.dataloader.num_workers 2 --training.dataset {dataset}")


def test_workers_of_torchtitans_own_models_would_repeat_the_data(workspace):
    (fault,) = get_faults(workspace, flags="--model.name llama3 --training.dataloader.num_workers 2")
    assert fault.startswith("training.dataloader.num_workers=2: each worker would read all of dataset 'pydoc'")
