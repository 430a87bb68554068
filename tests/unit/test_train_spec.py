"""What the TrainSpec adds to torchtitan's that no run shows: the Hugging Face adapter is torchtitan's, without a warning."""

from __future__ import annotations

import json
import logging

import pytest
from torchtitan.models.llama3 import Llama3StateDictAdapter

from torchtitan_simplefsdp.titan.train_spec import build_train_spec

FLAVOR = build_train_spec().model_args["debugmodel"]
INDEX = json.dumps({"weight_map": {"model.norm.weight": "model-00002-of-00003.safetensors"}})


@pytest.mark.parametrize("index", [None, INDEX])
def test_the_adapter_is_torchtitans_without_its_warning(tmp_path, caplog, index):
    if index:
        (tmp_path / "model.safetensors.index.json").write_text(index)
    theirs = Llama3StateDictAdapter(FLAVOR, str(tmp_path))
    assert [record.levelno for record in caplog.records] == ([] if index else [logging.WARNING])
    caplog.clear()
    ours = build_train_spec().state_dict_adapter(FLAVOR, str(tmp_path))
    assert caplog.records == []
    assert vars(ours) == vars(theirs)


def test_the_adapter_takes_no_folder_at_all():
    assert vars(build_train_spec().state_dict_adapter(FLAVOR, None)) == vars(Llama3StateDictAdapter(FLAVOR, None))
