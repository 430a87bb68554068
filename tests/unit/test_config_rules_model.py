"""Rules about model, tokenizer and data; the messages are written by hand."""

import os
import sys

import pytest
from config_workspace import get_faults, parse, workspace
from torchtitan.protocols import train_spec as torchtitan_train_spec

from torchtitan_simplefsdp.titan.config.rules_model import EXPERIMENTS

KNOWN_MODELS = (
    "'simple_fsdp.llama3', 'llama3_simple_fsdp', 'deepseek_v3', 'gpt_oss', 'llama3', 'llama3_ft', 'llama4', 'qwen3'"
)
KNOWN_DATASETS = "'c4', 'c4_test', 'c4_validation', 'pydoc', 'text'"
TOKENIZER_ADVICE = "Expected a folder with tokenizer.json; train_configs/llama3_debug.toml shows one that works."

# Flags, world size, the one fault ({cwd} is the current folder).
CASES = {
    "unknown_model": (
        "--model.name simple_fsdp_llama3",
        1,
        f"model.name='simple_fsdp_llama3' is unknown (did you mean 'simple_fsdp.llama3'?). Known: {KNOWN_MODELS}.",
    ),
    "model_of_upstreams_simple_fsdp": (
        "--model.name simple_fsdp.deepseek_v3",
        1,
        "model.name='simple_fsdp.deepseek_v3' is not served: torchtitan_simplefsdp covers dense Llama 3 models, no mixture of "
        "experts. Served: 'simple_fsdp.llama3', 'llama3_simple_fsdp'.",
    ),
    "model_of_another_experiment": (
        "--model.name autoparallel.llama3 --experimental.custom_import json",
        1,
        "model.name='autoparallel.llama3' is a model of torchtitan.experiments, which torchtitan_simplefsdp does not run. "
        "Use torchtitan's own trainer.",
    ),
    "model_with_a_trainer_of_its_own": (
        "--model.name flux",
        1,
        "model.name='flux' makes images and has a trainer of its own. Use torchtitan's own entry point for it.",
    ),
    "unknown_flavor": (
        "--model.flavor 8b",
        1,
        "model.flavor='8b' is unknown for model 'simple_fsdp.llama3'. Known: 'debugmodel', 'debugmodel_flex_attn', "
        "'debugmodel_varlen_attn', '8B', '8B_flex', '8B_varlen', '70B', '405B'.",
    ),
    "tokenizer_not_found": (
        "--model.hf_assets_path assets/tok",
        1,
        f"model.hf_assets_path='assets/tok' not found (looked in {{cwd}}/assets/tok). {TOKENIZER_ADVICE}",
    ),
    "folder_without_tokenizer": (
        "--model.tokenizer_path text",
        1,
        f"model.tokenizer_path='text' has no tokenizer.json, vocab.json or vocab.txt (looked in {{cwd}}/text). {TOKENIZER_ADVICE}",
    ),
    "unknown_dataset": (
        "--training.dataset pydocs",
        1,
        f"training.dataset='pydocs' is unknown (did you mean 'pydoc'?). Known: {KNOWN_DATASETS}.",
    ),
    "unknown_validation_dataset": (
        "--validation.enable --validation.dataset c5",
        1,
        f"validation.dataset='c5' is unknown. Known: {KNOWN_DATASETS}.",
    ),
    "c4_test_not_here": (
        "--training.dataset c4_test",
        1,
        "training.dataset='c4_test': 'tests/assets/c4_test' not found (looked in {cwd}/tests/assets/c4_test). Set "
        "training.dataset_path to torchtitan's tests/assets/c4_test, or take the embedded dataset 'pydoc'.",
    ),
}


@pytest.mark.parametrize("flags, world_size, fault", CASES.values(), ids=CASES.keys())
def test_a_broken_rule_is_the_one_fault(workspace, flags, world_size, fault):
    assert get_faults(workspace, flags=flags, world_size=world_size) == [fault.format(cwd=os.getcwd())]


@pytest.mark.parametrize(
    "flags, world_size, start",
    [
        ("--training.dataset text", 1, "training.dataset='text' needs a dataset_path: a file, a folder or a glob pattern"),
        ("--training.dataset text --training.dataset_path no/*.txt", 1, "training.dataset='text': 'no/*.txt' not found (looked in "),
        (
            "--validation.enable --validation.steps 2 --validation.dataset text --validation.dataset_path text",
            2,
            "validation.dataset_path='text' has 1 documents for 2 data-parallel ranks",
        ),
        ("--training.dataset_path text", 1, "training.dataset='pydoc' reads no files, got dataset_path='text'"),
    ],
)
def test_what_our_datasets_refuse_is_a_fault_of_the_section(workspace, flags, world_size, start):
    (fault,) = get_faults(workspace, flags=flags, world_size=world_size)
    assert fault.startswith(start) and fault.endswith(".") and "\n" not in fault


@pytest.mark.parametrize(
    "flags, world_size",
    [
        ("--training.dataset text --training.dataset_path text/*.txt --training.local_batch_size 1", 1),
        ("--training.dataset PyDoc --validation.dataset nowhere --validation.seq_len 0", 1),
        ("--training.dataset c4 --training.dataset_path allenai/c4", 1),
        ("--training.dataset c4_test --training.dataset_path text", 1),
        ("--model.name llama3 --parallelism.expert_parallel_degree 2", 2),
        ("--model.name my_model --model.flavor mine --experimental.custom_import json --training.dataset mine", 1),
        ("--model.flavor mine --experimental.custom_import json", 1),
    ],
)
def test_what_is_possible_is_not_refused(workspace, flags, world_size):
    assert parse(workspace, flags=flags, world_size=world_size)


def test_a_model_without_a_tokenizer_needs_none_and_no_text(workspace, monkeypatch):
    spec = torchtitan_train_spec.get_train_spec("llama3")
    spec.build_tokenizer_fn = None
    monkeypatch.setitem(torchtitan_train_spec._extra_train_specs, "images", spec)
    parse(workspace, flags="--model.name images --model.hf_assets_path nowhere --training.dataset cc12m")


def test_a_model_with_a_missing_dependency_is_a_fault(workspace, monkeypatch):
    monkeypatch.setitem(sys.modules, "torchtitan.models.qwen3", None)
    (fault,) = get_faults(workspace, flags="--model.name qwen3")
    assert fault.startswith("model.name='qwen3' cannot be loaded: import of torchtitan.models.qwen3 halted")


def test_every_experiment_of_torchtitan_is_one_we_know():
    """Oracle: torchtitan's own table, which the package itself may not import."""
    from torchtitan.experiments import _supported_experiments

    assert {name.partition(".")[0] for name in _supported_experiments} == {*EXPERIMENTS, "simple_fsdp"}
