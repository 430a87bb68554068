"""Flags; torchtitan's ConfigManager is the oracle of what each one means."""

import types
from typing import get_args, get_origin, Literal

import pytest
from config_workspace import get_faults, parse, workspace
from torchtitan.config import ConfigManager

from torchtitan_simplefsdp.titan.config.check import ConfigError, parse_job_config
from torchtitan_simplefsdp.titan.config.flags import check_flags, split_flags
from torchtitan_simplefsdp.titan.config.schema import build_schema

OUR_MODULE = "torchtitan_simplefsdp.titan.config.job_config"

CASES = {
    "unknown_flags_are_one_fault": (
        "--training.stpes 3 --compile.no-enabel --zzz=1",
        "3 unknown flags: --training.stpes (did you mean --training.steps?), --compile.no-enabel "
        "(did you mean --compile.enable?), --zzz.",
    ),
    "a_section_is_no_flag": ("--compile", "1 unknown flag: --compile (did you mean --compile.enable?)."),
    "a_value_flag_cannot_be_negated": ("--training.no_steps 3", "1 unknown flag: --training.no_steps (did you mean --training.steps?)."),
    "a_word_is_no_integer": ("--training.steps abc", "--training.steps='abc' must be an integer."),
    "a_word_is_no_number": ("--optimizer.lr=fast", "--optimizer.lr='fast' must be a number."),
    "an_optional_value_is_checked": ("--debug.seed none", "--debug.seed='none' must be an integer or None."),
    "a_choice_is_checked": (
        "--activation_checkpoint.mode ful",
        "--activation_checkpoint.mode='ful' must be one of 'selective', 'full', 'memory_budget', 'none' (did you mean 'full'?).",
    ),
    "a_missing_value_is_named": ("--training.steps", "--training.steps needs a value: an integer."),
    "a_flag_is_no_value": ("--training.steps --compile.enable", "--training.steps needs a value: an integer."),
    "a_dashed_word_is_no_value": ("--job.description -x", "--job.description needs a value: a string."),
    "a_second_value_is_junk": ("--training.steps 3 4", "unexpected argument '4' after --training.steps. Flags read --section.key value."),
    "a_switch_takes_no_value": (
        "--compile.enable=true",
        "unexpected argument 'true' after --compile.enable. A switch takes no value: --compile.enable turns it on, "
        "--compile.no_enable off.",
    ),
    "list_items_take_commas": (
        "--compile.components model loss",
        "unexpected argument 'loss' after --compile.components. Separate list items by commas: --compile.components a,b.",
    ),
}


@pytest.mark.parametrize("flags, fault", CASES.values(), ids=CASES.keys())
def test_a_faulty_command_line_is_explained(workspace, capsys, flags, fault):
    assert get_faults(workspace, flags=flags) == [f"command line: {fault}"]
    assert capsys.readouterr() == ("", "")  # no box from tyro


def test_arguments_before_the_first_flag_are_faults(workspace):
    with pytest.raises(ConfigError, match="^2 configuration faults:\ncommand line: unexpected argument 'train'. Flags read"):
        parse_job_config(["train", "-x", "--model.name=llama3", "--model.hf_assets_path=tok", "--training.dataset=pydoc"], 1)


def _get_example(name, annotation):
    special = {
        "job.config_file": "run.toml",
        "job.custom_config_module": OUR_MODULE,
        "experimental.custom_args_module": OUR_MODULE,
        "model.hf_assets_path": "tok",
        "model.tokenizer_path": "tok",
    }
    if name in special:
        return [special[name]]
    if get_origin(annotation) is Literal:
        return [get_args(annotation)[-1]]
    if get_origin(annotation) is list:
        return ["a,b"]
    if isinstance(annotation, types.UnionType) or get_args(annotation):
        return _get_example(name, get_args(annotation)[0])
    return [{int: "7", float: "0.25", str: "word"}[annotation]]


@pytest.mark.parametrize("hyphens", [False, True])
def test_every_flag_means_what_it_means_to_torchtitan(workspace, hyphens):
    """Oracle: torchtitan's ConfigManager on the same command line, which sets every key there is to a new value."""
    schema, _ = build_schema(None)
    argv = []
    for name, key in schema.keys.items():
        flag = "--" + (name.replace("_", "-") if hyphens else name)
        if key.field.type is bool:
            section, _, leaf = flag.rpartition(".")
            inverse = f"{section}.{'no-' if hyphens else 'no_'}{leaf}"
            argv.append(inverse if key.field.default else flag)
        else:
            (value,) = _get_example(name, key.field.type)
            argv.extend([f"{flag}={value}"] if hyphens else [flag, value])
    (workspace / "run.toml").write_text("[training]\nsteps = 1\n")
    checked = check_flags(split_flags(argv), schema)
    assert checked.faults == []
    assert checked.values == ConfigManager().parse_args(argv).to_dict()


@pytest.mark.parametrize(
    "flags, expected",
    [
        ("--parallelism.data_parallel_shard_degree -1", -1),
        ("--parallelism.data-parallel-shard-degree=1", 1),
        ("--parallelism.data_parallel_shard_degree 3 --parallelism.data_parallel_shard_degree 1", 1),
    ],
)
def test_negative_numbers_dashes_and_repeated_flags_work(workspace, flags, expected):
    assert parse(workspace, flags=flags).parallelism.data_parallel_shard_degree == expected


def test_none_is_a_value_of_an_optional_flag(workspace):
    assert parse(workspace, flags="--parallelism.context_parallel_load_balancer None").parallelism.context_parallel_load_balancer is None
