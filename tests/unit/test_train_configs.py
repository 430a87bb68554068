"""The shipped TOML files. Oracles: the configuration's schema and the check that every run goes through."""

import re
from pathlib import Path

import pytest

import torchtitan_simplefsdp
from torchtitan_simplefsdp.titan.config import rules_features
from torchtitan_simplefsdp.titan.config.check import parse_job_config
from torchtitan_simplefsdp.titan.train_spec import register

FOLDER = Path(torchtitan_simplefsdp.__file__).parents[1] / "train_configs"
RANKS = {"llama3_debug": (1, 2, 8), "llama3_8b": (8, 64), "llama3_70b": (256,), "llama3_405b": (512,)}
CASES = [(name, ranks) for name, all_ranks in RANKS.items() for ranks in all_ranks]


def test_every_file_is_tested():
    assert sorted(RANKS) == sorted(path.stem for path in FOLDER.glob("*.toml"))


@pytest.mark.parametrize("name, ranks", CASES)
def test_the_configuration_check_accepts_the_file_on_its_number_of_ranks(name, ranks, monkeypatch):
    register()
    argv = ["--job.config_file", str(FOLDER / f"{name}.toml")]
    if name != "llama3_debug":  # the large models are for GPUs, and their tokenizers are not in the repository
        monkeypatch.setattr(rules_features, "is_cpu_only", lambda: False)
        argv += ["--model.hf_assets_path", "torchtitan_simplefsdp/assets/tokenizer"]
    config = parse_job_config(argv, ranks)
    assert config.model.name == "simple_fsdp.llama3"


@pytest.mark.parametrize("name", RANKS)
def test_every_key_has_a_comment(name):
    lines = (FOLDER / f"{name}.toml").read_text().splitlines()
    keys = [line for line in lines if line and line[0] not in "#["]
    assert keys
    for line in keys:
        assert re.fullmatch(r"\w+ = [^#]+  # \S.{10,}", line), line
