"""Rules about where a run writes; the messages are written by hand."""

import os

import pytest
from config_workspace import get_faults, parse, workspace

BELOW = {
    "checkpoint.folder": "--checkpoint.enable",
    "metrics.save_tb_folder": "--metrics.enable_tensorboard",
    "profiling.save_traces_folder": "--profiling.enable_profiling",
    "comm.save_traces_folder": "--comm.trace_buf_size 1",
}


def test_a_dump_folder_below_a_file_is_refused(workspace):
    (fault,) = get_faults(workspace, flags="--job.dump_folder run.toml/runs/1")
    assert fault == (
        f"job.dump_folder='run.toml/runs/1' cannot be written to: {workspace}/run.toml is not a folder. Set it to a folder "
        "that can."
    )


def test_a_dump_folder_without_permission_is_refused(workspace, monkeypatch):
    (workspace / "locked").mkdir()
    monkeypatch.setattr(os, "access", lambda path, mode: path != f"{workspace}/locked")  # root may write anywhere
    (fault,) = get_faults(workspace, flags="--job.dump_folder locked/runs")
    assert fault == (
        f"job.dump_folder='locked/runs' cannot be written to: no permission to write in {workspace}/locked. Set it to a folder "
        "that can."
    )


@pytest.mark.parametrize("key, flag", BELOW.items(), ids=BELOW.keys())
def test_a_folder_below_it_is_refused_if_its_feature_is_on(workspace, key, flag):
    (workspace / "outputs").mkdir()
    (workspace / "outputs" / "taken").touch()
    (fault,) = get_faults(workspace, flags=f"{flag} --{key} taken")
    assert fault == (
        f"{key}='taken' in job.dump_folder='./outputs' cannot be written to: {workspace}/outputs/taken is not a folder. Set one "
        "of them anew."
    )
    parse(workspace, flags=f"--{key} taken --comm.trace_buf_size 0")


def test_nothing_is_created_by_the_check(workspace):
    parse(workspace, flags="--checkpoint.enable --metrics.enable_tensorboard --job.dump_folder new/runs")
    assert not (workspace / "new").exists()
