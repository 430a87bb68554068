"""A folder with a tokenizer and a config file, our names registered: what the config tests start from."""

import pytest
from torchtitan.hf_datasets.text_datasets import DATASETS
from torchtitan.models.llama3 import get_train_spec
from torchtitan.protocols import train_spec as torchtitan_train_spec

from torchtitan_simplefsdp.titan.config.check import ConfigError, parse_job_config
from torchtitan_simplefsdp.titan.datasets import register_datasets
from torchtitan_simplefsdp.titan.config.job_config import SERVED_MODELS

# A valid run; a test's own flags follow and win.
BASE_FLAGS = "--model.name simple_fsdp.llama3 --model.hf_assets_path tok --training.dataset pydoc".split()


@pytest.fixture
def workspace(tmp_path, monkeypatch):
    """Change to a new folder with tok/tokenizer.json; register stand-ins for our models, and our datasets."""
    (tmp_path / "tok").mkdir()
    (tmp_path / "tok" / "tokenizer.json").write_text("{}")
    (tmp_path / "text").mkdir()
    (tmp_path / "text" / "one.txt").write_text("One document.")
    monkeypatch.chdir(tmp_path)
    for name in SERVED_MODELS:
        monkeypatch.setitem(torchtitan_train_spec._extra_train_specs, name, get_train_spec())
    known = dict(DATASETS)
    register_datasets()
    yield tmp_path
    DATASETS.clear()
    DATASETS.update(known)


def parse(workspace, toml="", flags="", world_size=1):
    (workspace / "run.toml").write_text(toml)
    return parse_job_config(["--job.config_file", "run.toml", *BASE_FLAGS, *flags.split()], world_size)


def get_faults(workspace, toml="", flags="", world_size=1):
    with pytest.raises(ConfigError) as caught:
        parse(workspace, toml, flags, world_size)
    return caught.value.faults
