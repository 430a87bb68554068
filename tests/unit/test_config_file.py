"""Faults of the TOML file; the messages are written by hand."""

import pytest
from config_workspace import BASE_FLAGS, get_faults, parse, workspace

from torchtitan_simplefsdp.titan.config.check import ConfigError, parse_job_config

CASES = {
    "unknown_keys_of_a_file_are_one_fault_in_file_order": (
        "[paralelism]\nx = 1\n[training]\nstpes = 3\n[training.dataloader]\nnum_worker = 1\n[quantize.linear.float9]\nx = 1",
        "4 unknown keys: [paralelism] (did you mean [parallelism]?), training.stpes (did you mean training.steps?), "
        "training.dataloader.num_worker (did you mean training.dataloader.num_workers?), "
        "[quantize.linear.float9] (did you mean [quantize.linear.float8]?).",
    ),
    "a_name_like_nothing_gets_no_suggestion": ("[zzz]\nx = 1", "1 unknown key: [zzz]."),
    "a_key_outside_its_section_is_found": ("steps = 1", "1 unknown key: steps (did you mean training.steps?)."),
    "a_key_in_the_wrong_section_is_found": (
        "[training]\nwarmup_steps = 1",
        "1 unknown key: training.warmup_steps (did you mean lr_scheduler.warmup_steps?).",
    ),
    "a_string_is_no_integer": ('[training]\nsteps = "10"', "training.steps='10' must be an integer."),
    "a_float_is_no_integer": ("[training]\nsteps = 1.5", "training.steps=1.5 must be an integer."),
    "a_bool_is_no_integer": ("[training]\nsteps = true", "training.steps=True must be an integer."),
    "a_bool_is_no_number": ("[optimizer]\nlr = true", "optimizer.lr=True must be a number."),
    "an_integer_is_no_bool": ("[compile]\nenable = 1", "compile.enable=1 must be true or false."),
    "a_string_is_no_list": ('[model]\nconverters = "a"', "model.converters='a' must be a list, each item a string."),
    "list_items_are_checked": ("[model]\nconverters = [1]", "model.converters=[1] must be a list, each item a string."),
    "an_optional_value_is_checked": ('[debug]\nseed = "x"', "debug.seed='x' must be an integer or None."),
    "a_choice_is_checked": (
        '[simple_fsdp]\nmode = "fully_sharded"',
        "simple_fsdp.mode='fully_sharded' must be one of 'auto', 'replicate', 'fully_shard', 'hybrid_shard' "
        "(did you mean 'fully_shard'?).",
    ),
    "an_optional_choice_is_checked": (
        '[compile]\ngraph_passes = "x"',
        "compile.graph_passes='x' must be one of 'auto_bucketing', 'transformer_block_bucketing' or None.",
    ),
    "a_value_is_no_section": ("training = 3", "training=3 must be a section: write [training] and its keys below it."),
    "a_section_is_no_value": ("[training.steps]\nx = 1", "training.steps={'x': 1} must be an integer."),
}


@pytest.mark.parametrize("toml, fault", CASES.values(), ids=CASES.keys())
def test_a_faulty_file_is_explained_with_its_path(workspace, toml, fault):
    assert get_faults(workspace, toml) == [f"run.toml: {fault}"]


def test_a_long_value_is_cut_so_that_its_fault_stays_on_one_line(workspace):
    (fault,) = get_faults(workspace, f"[training]\nsteps = '''{'x' * 500}\n'''")
    assert len(fault) < 130 and fault.endswith("... must be an integer.")


@pytest.mark.parametrize(
    "content, fault",
    [
        (b"[training]\nsteps =\n", "not valid TOML: Invalid value (at line 2, column 8)."),
        (b"[training]\n[training]\n", "not valid TOML: Cannot declare ('training',) twice (at line 2, column 10)."),
        (b"\xff\xfe", "not valid TOML: 'utf-8' codec can't decode byte 0xff in position 0: invalid start byte."),
        (None, "not found. Set --config (or CONFIG_FILE) to an existing TOML file."),
    ],
)
def test_an_unreadable_file_is_the_only_fault_beside_those_of_the_flags(workspace, content, fault):
    if content is not None:
        (workspace / "bad.toml").write_bytes(content)
    with pytest.raises(ConfigError) as caught:
        parse_job_config(["--job.config_file=bad.toml", "--training.stpes", "3"], 1)
    assert caught.value.faults == [
        f"job.config_file='bad.toml': {fault}",
        "command line: 1 unknown flag: --training.stpes (did you mean --training.steps?).",
    ]


def test_a_byte_order_mark_is_no_part_of_the_file(workspace):
    (workspace / "bom.toml").write_bytes(b'\xef\xbb\xbf[job]\r\ndescription = "marked"\r\n')
    config = parse_job_config(["--job.config_file", "bom.toml", *BASE_FLAGS], 1)
    assert config.job.description == "marked"


@pytest.mark.parametrize("path, fault", [("tok", "is a directory"), ("", "not found")])
def test_a_folder_or_nothing_instead_of_a_file_is_a_fault(workspace, path, fault):
    with pytest.raises(ConfigError, match=f"^job.config_file='{path}': {fault}"):
        parse_job_config([f"--job.config-file={path}"], 1)


def test_values_of_every_kind_of_type_are_accepted(workspace):
    config = parse(
        workspace,
        '[optimizer]\nlr = 1\n[training]\nmax_norm = 2\n[training.dataloader]\nprefetch_factor = 2\n[debug]\nseed = 3\n'
        '[parallelism]\nmodule_fqns_per_model_part = [["norm"], ["output"]]\n'
        '[quantize.grouped_mm.mx]\nfqns = "experts"\n[compile]\ncomponents = []\ngraph_passes = "auto_bucketing"',
    )
    assert config.optimizer.lr == 1 and config.training.max_norm == 2 and config.debug.seed == 3
    assert config.training.dataloader.prefetch_factor == 2
    assert config.parallelism.module_fqns_per_model_part == [["norm"], ["output"]]
    assert config.quantize.grouped_mm.mx.fqns == "experts"
    assert config.compile.components == [] and config.compile.graph_passes == "auto_bucketing"
