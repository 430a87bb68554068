"""The whole check: torchtitan's own parser is the oracle of what is right, hand-written messages of what is wrong."""

import sys

import pytest
from config_workspace import BASE_FLAGS, get_faults, parse, workspace
from torchtitan.config import ConfigManager

import torchtitan_simplefsdp
from torchtitan_simplefsdp.titan.config.check import ConfigError, parse_job_config

EXTENSION = """
from dataclasses import dataclass, field

@dataclass
class Extra:
    low: int = 1
    '''Lower bound, in steps.'''
    high: int = 2

    def __post_init__(self):
        if self.low > self.high:
            raise ValueError("low is above\\nhigh")

@dataclass
class JobConfig:
    extra: Extra = field(default_factory=Extra)
"""


@pytest.fixture
def extension(workspace, monkeypatch):
    (workspace / "config_extension.py").write_text(EXTENSION)
    monkeypatch.syspath_prepend(str(workspace))
    yield "config_extension"
    sys.modules.pop("config_extension", None)


def test_all_faults_of_file_flags_and_meaning_are_reported_together(workspace):
    with pytest.raises(ConfigError) as caught:
        parse(
            workspace,
            '[training]\nstpes = 3\nseq_len = "10"\n[validation]\nsteps = 0\n[metrics]\nlog_freq = 0',
            "--training.gc_freq often --model.flavor debugmodle --parallelism.tensor_parallel_degree 3",
            world_size=4,
        )
    assert str(caught.value) == (
        "7 configuration faults:\n"
        "run.toml: 1 unknown key: training.stpes (did you mean training.steps?).\n"
        "run.toml: training.seq_len='10' must be an integer.\n"
        "command line: --training.gc_freq='often' must be an integer.\n"
        "validation.steps=0 is refused: validation steps must be positive or -1.\n"
        "model.flavor='debugmodle' is unknown for model 'simple_fsdp.llama3' (did you mean 'debugmodel'?). Known: 'debugmodel', "
        "'debugmodel_flex_attn', 'debugmodel_varlen_attn', '8B', '8B_flex', '8B_varlen', '70B', '405B'.\n"
        "parallelism: tensor_parallel_degree=3 does not divide the world size 4, so data_parallel_shard_degree=-1 cannot take "
        "the leftover ranks. Start a multiple of 3 ranks (NGPU=3), or change the degrees.\n"
        "metrics.log_freq=0 must be at least 1."
    )


def test_one_fault_stands_alone_without_a_count(workspace):
    with pytest.raises(ConfigError, match="^metrics.log_freq=0 must be at least 1.$"):
        parse(workspace, flags="--metrics.log_freq 0")


@pytest.mark.parametrize(
    "toml, flags",
    [
        ("[parallelism]\ntensor_parallel_degre = 4", "--parallelism.data_parallel_shard_degree 1"),
        ("[paralelism]\ntensor_parallel_degree = 4", "--parallelism.data_parallel_shard_degree 1"),
        ('[parallelism]\ntensor_parallel_degree = "4"', "--parallelism.data_parallel_shard_degree 1"),
        ("", "--parallelism.tensor_parallel_degree four --parallelism.data_parallel_shard_degree 1"),
    ],
)
def test_a_dropped_value_causes_no_follow_up_faults(workspace, toml, flags):
    # With the default of tensor_parallel_degree the product of the degrees would be 1, not 4.
    assert len(get_faults(workspace, toml, flags, world_size=4)) == 1


def test_a_flag_wins_over_the_file_and_the_file_over_the_default(workspace):
    config = parse(workspace, "[training]\nsteps = 5\nseq_len = 64\n[compile]\nenable = true", "--training.steps 7 --compile.no-enable")
    assert (config.training.steps, config.training.seq_len, config.training.local_batch_size) == (7, 64, 8)
    assert config.compile.enable is False


def test_a_valid_configuration_is_the_one_torchtitan_parses(workspace):
    """Oracle: torchtitan's ConfigManager with our dataclasses as its custom config module."""
    toml = '[training]\nsteps = 5\n[training.dataloader]\nnum_workers = 1\n[simple_fsdp]\nmode = "fully_shard"\n[compile]\nenable = true'
    flags = "--training.seq-len=64 --checkpoint.no_initial_load_model_only --job.custom_config_module torchtitan_simplefsdp.titan.config.job_config"
    config = parse(workspace, toml, flags, world_size=2)
    argv = ["--job.config_file", "run.toml", *BASE_FLAGS, *flags.split()]
    assert config.to_dict() == ConfigManager().parse_args(argv).to_dict()


def test_upstreams_command_line_is_accepted_without_importing_the_experiment(workspace, monkeypatch):
    monkeypatch.setitem(sys.modules, "torchtitan.experiments.simple_fsdp", None)  # an import would raise
    config = parse(
        workspace,
        flags="--job.custom_config_module=torchtitan.experiments.simple_fsdp.job_config --compile.enable --compile.backend aot_eager "
        "--compile.graph_passes transformer_block_bucketing --parallelism.data_parallel_replicate_degree 2 "
        "--parallelism.tensor_parallel_degree 2 --training.mixed_precision_param float32",
        world_size=8,
    )
    assert config.compile.graph_passes == "transformer_block_bucketing" and config.simple_fsdp.mode == "auto"


@pytest.mark.parametrize(
    "toml, flags",
    [
        ("", "--job.custom_config_module=config_extension"),
        ("[job]\ncustom_config_module = 'config_extension'", ""),
        ("[experimental]\ncustom_args_module = 'config_extension'", ""),
    ],
)
def test_a_custom_config_module_adds_keys(workspace, extension, toml, flags):
    config = parse(workspace, toml + "\n[extra]\nlow = 5", f"{flags} --extra.high 6")
    assert (config.extra.low, config.extra.high, config.simple_fsdp.mode) == (5, 6, "auto")


def test_values_refused_together_by_a_custom_section_are_a_fault_of_the_section(workspace, extension):
    flags = f"--job.custom_config_module={extension} --extra.high 3"
    assert get_faults(workspace, "[extra]\nlow = 2\nhigh = 2", f"{flags} --extra.low 4") == [
        "extra.low=4 is refused: low is above high."
    ]
    assert get_faults(workspace, "[extra]\nlow = 2", f"--job.custom_config_module={extension} --extra.high 1") == [
        "extra.low=2, extra.high=1 is refused: low is above high."
    ]


@pytest.mark.parametrize("module, reason", [("no.such", "No module named 'no'"), ("json", "module 'json' has no attribute 'JobConfig'")])
def test_a_custom_config_module_that_cannot_be_merged_is_the_only_fault(workspace, module, reason):
    assert get_faults(workspace, "[zzz]\nx = 1", f"--job.custom_config_module {module}") == [
        f"job.custom_config_module='{module}' cannot be used: {reason}. Expected an importable module with a dataclass named JobConfig."
    ]


def test_an_empty_load_balancer_is_a_fault_with_torchtitans_reason(workspace):
    assert get_faults(workspace, flags="--parallelism.context_parallel_load_balancer=") == [
        "parallelism.context_parallel_load_balancer='' is refused: context_parallel_load_balancer cannot be an empty string. "
        "Use None to disable load balancing."
    ]


def test_a_flag_can_correct_a_value_the_file_may_not_have(workspace):
    assert parse(workspace, "[validation]\nsteps = 0", "--validation.steps 5").validation.steps == 5


def test_the_shipped_tokenizer_is_found_from_any_folder(workspace, monkeypatch):
    package = workspace / "installed" / "torchtitan_simplefsdp"
    (package / "assets" / "tokenizer").mkdir(parents=True)
    (package / "assets" / "tokenizer" / "tokenizer.json").write_text("{}")
    monkeypatch.setattr("torchtitan_simplefsdp.titan.config.rules_model._PACKAGE_FOLDER", package)
    flags = "--model.hf_assets_path ./torchtitan_simplefsdp/assets/tokenizer"
    assert parse(workspace, flags=flags).model.hf_assets_path == str(package / "assets" / "tokenizer")


def test_the_package_folder_is_where_the_package_is_installed():
    from torchtitan_simplefsdp.titan.config.rules_model import _PACKAGE_FOLDER

    assert str(_PACKAGE_FOLDER) == torchtitan_simplefsdp.__path__[0]


def test_the_deprecated_tokenizer_path_is_torchtitans_other_name_of_hf_assets_path(workspace):
    assert parse(workspace, flags="--model.hf_assets_path nowhere --model.tokenizer_path tok").model.hf_assets_path == "tok"


def test_nothing_is_printed_and_faults_are_the_same_every_time(workspace, capsys):
    flags = "--training.steps 0 --model.hf_assets_path nowhere --zzz 3"
    assert get_faults(workspace, flags=flags) == get_faults(workspace, flags=flags)
    assert capsys.readouterr() == ("", "")


def test_a_run_without_a_config_file_has_the_defaults(workspace):
    assert parse_job_config(BASE_FLAGS, 1).training.steps == 10000
