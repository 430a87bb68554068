"""Which steps of a checkpoint folder can be resumed from; the oracle is what was done to the files."""

from __future__ import annotations

import os

import pytest
import torch
import torch.distributed.checkpoint as dcp

from torchtitan_simplefsdp.titan.checkpoint_folder import find_latest, find_saved_steps, get_fault, get_path

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")  # saving needs no ranks


@pytest.fixture
def folder(tmp_path):
    """Steps 2, 4 and 10, and things of other names."""
    for step in (2, 4, 10):
        dcp.save({"weight": torch.arange(1000.0), "step": step}, checkpoint_id=tmp_path / f"step-{step}", no_dist=True)
    (tmp_path / "step-99-old").mkdir()
    (tmp_path / "notes.txt").touch()
    return str(tmp_path)


def get_data_file(folder: str, step: int) -> str:
    (name,) = (name for name in os.listdir(get_path(folder, step)) if name.endswith(".distcp"))
    return os.path.join(get_path(folder, step), name)


def cut_off(file: str, size: int) -> None:
    with open(file, "r+b") as opened:
        opened.truncate(size)


def test_the_newest_step_is_the_highest_number(folder):
    assert find_latest(folder) == (10, [])
    assert find_saved_steps(folder) == [2, 4, 10]
    assert find_latest(os.path.join(folder, "missing")) == (None, [])


def test_steps_that_are_not_whole_are_skipped_and_named(folder):
    os.remove(os.path.join(get_path(folder, 10), ".metadata"))
    data = get_data_file(folder, 4)
    size = os.path.getsize(data)
    cut_off(data, 100)
    latest, skipped = find_latest(folder)
    assert latest == 2
    assert skipped[0] == "step-10 was not finished (no .metadata)"
    assert skipped[1].startswith("step-4 has a file that was cut off: __0_0.distcp has 100 of ")
    assert int(skipped[1].split()[-2]) <= size
    assert find_saved_steps(folder) == [2, 4]


@pytest.mark.parametrize("removed", [1, 5, 50, 1000])
def test_any_missing_end_of_a_file_is_noticed(folder, removed):
    data = get_data_file(folder, 10)
    cut_off(data, os.path.getsize(data) - removed)
    assert "cut off" in get_fault(get_path(folder, 10))


def test_a_missing_file_and_broken_metadata_are_named(folder):
    os.remove(get_data_file(folder, 10))
    assert get_fault(get_path(folder, 10)) == "lacks the file __0_0.distcp"
    cut_off(os.path.join(get_path(folder, 4), ".metadata"), 20)
    assert "has a .metadata that cannot be read" in get_fault(get_path(folder, 4))
    assert find_latest(folder)[0] == 2


def test_weights_in_hugging_face_format_are_whole(folder):
    (path := os.path.join(folder, "step-12")) and os.mkdir(path)
    open(os.path.join(path, "model.safetensors.index.json"), "w").close()
    assert find_latest(folder) == (12, [])
    assert 12 not in find_saved_steps(folder)
