"""The help pages against the keys that exist."""

import re

import pytest
from config_workspace import workspace

from torchtitan_simplefsdp.titan.config.check import ConfigError, parse_job_config
from torchtitan_simplefsdp.titan.config.schema import build_schema


@pytest.fixture(autouse=True)
def narrow_terminal(monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")


def get_help(capsys, argv):
    with pytest.raises(SystemExit) as exit_info:
        parse_job_config(argv, 1)
    assert exit_info.value.code == 0
    printed = capsys.readouterr()
    assert printed.err == ""
    return printed.out


@pytest.mark.parametrize("argv", [["--help"], ["-h"], ["--job.config_file", "missing.toml", "--help", "--training.steps", "x"]])
def test_the_overview_fits_on_a_page_and_names_sections_own_keys_and_environment(capsys, argv):
    page = get_help(capsys, argv)
    assert len(page.splitlines()) <= 66  # one printed page
    assert max(map(len, page.splitlines())) <= 80
    for text in (
        "usage: ./run_train.sh",
        "--simple_fsdp.mode {auto,replicate,fully_shard,hybrid_shard}",
        "'auto' takes it from the degrees",
        "--compile.graph_passes",
        "how collectives are bucketed",
        "training               17 keys  dataset",
        "--simple_fsdp.bucket_plan",
        "simple_fsdp             6 keys  mode, reduction, buckets",
    ):
        assert text in page
    for name in "NGPU CONFIG_FILE LOG_RANK TRAIN_FILE COMM_MODE NNODES NODE_RANK RDZV_ENDPOINT".split():
        assert f"\n  {name} " in page


@pytest.mark.parametrize(
    "topic, doc",
    [
        ("training", "How many train steps to run"),
        ("lr-scheduler", "Learning rate decay type to use"),
        ("simple_fsdp", "takes it from the degrees"),
        ("compile", "how collectives are bucketed"),  # ours, although the merged class is torchtitan's
    ],
)
def test_a_section_shows_all_its_flags_with_docs_and_no_others(capsys, topic, doc):
    page = get_help(capsys, ["--help", topic])
    section = topic.replace("-", "_")
    names = [name for name in build_schema(None)[0].keys if name.startswith(f"{section}.")]
    assert names and all(f"--{name}" in page for name in names)
    assert doc in page
    assert set(re.findall(r"^[^\w\n]*(?:-h, )?--(\w+)", page, re.M)) == {"help", section}


def test_help_all_shows_every_flag(capsys):
    page = get_help(capsys, ["--help=all"])
    assert [name for name in build_schema(None)[0].keys if f"--{name}" not in page] == []


def test_a_custom_sections_docs_are_shown(workspace, monkeypatch, capsys):
    (workspace / "help_extension.py").write_text(
        "from dataclasses import dataclass, field\n@dataclass\nclass Model:\n    depth: int = 1\n    '''Unit: layers.'''\n"
        "@dataclass\nclass Extra:\n    x: int = 1\n"
        "@dataclass\nclass JobConfig:\n    model: Model = field(default_factory=Model)\n    extra: Extra = field(default_factory=Extra)\n"
    )
    monkeypatch.syspath_prepend(str(workspace))
    page = get_help(capsys, ["--help", "model", "--job.custom_config_module", "help_extension"])
    assert "--model.depth" in page and "Unit: layers." in page and "Which model to train" in page
    assert "from job.custom_config_module" in get_help(capsys, ["--job.custom_config_module=help_extension", "--help"])


def test_an_unknown_section_is_a_fault_with_the_known_ones():
    with pytest.raises(ConfigError, match=r"^--help trainng: unknown section \(did you mean training\?\). Sections: job, profiling, "):
        parse_job_config(["--help", "trainng"], 1)
