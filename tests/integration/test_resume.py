"""Runs that were killed, stopped or damaged, and go on; the oracle is the same run left alone, or what was done to its files."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
import time

import pytest

from torchtitan_simplefsdp.compare.scalars import read_all_scalars
from torchtitan_simplefsdp.titan.checkpoint_folder import find_latest, get_path

from .training_runs import GRAD_NORM, LOSS, REPOSITORY, run_train

TAGS = (LOSS, GRAD_NORM, "lr", "n_tokens_seen")

LAYOUTS = {  # processes and flags; every other one saves asynchronously
    "replicate 2, async": (2, "--parallelism.data_parallel_replicate_degree 2 --checkpoint.async_mode async"),
    "fully_shard 2": (2, ""),
    "hybrid_shard 2x2, async": (4, "--parallelism.data_parallel_replicate_degree 2 --checkpoint.async_mode async"),
    "fully_shard 2, tp 2": (4, "--parallelism.tensor_parallel_degree 2"),
}


@pytest.mark.parametrize("ngpu, flags", LAYOUTS.values(), ids=LAYOUTS.keys())
def test_a_killed_run_goes_on_as_if_nothing_had_happened(tmp_path, ngpu, flags):
    command = ["scripts/crash_campaign.py", "--at-steps", "5", "--steps", "10", "--", *flags.split()]
    result = subprocess.run(
        [sys.executable, *command],
        cwd=REPOSITORY,
        env={**os.environ, "NGPU": str(ngpu), "TMPDIR": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert result.returncode == 0, result.stdout + result.stderr
    assert "1 kills, 10 steps: all scalars of all steps equal the undisturbed run's" in result.stdout
    assert re.search(r"^\| 2 \| [468] \| 10 \| came to its end", result.stdout, re.M)  # it was killed in its middle


@pytest.fixture(scope="module")
def four_ranks(tmp_path_factory):
    """8 steps of fully_shard on 4 ranks, saved at step 4: the dump folder."""
    folder = tmp_path_factory.mktemp("four_ranks")
    result = run_train(4, *RESHARD_FLAGS, "--training.local_batch_size", "2", "--checkpoint.interval", "4", cwd=folder)
    assert result.returncode == 0, result.stdout + result.stderr
    return folder / "outputs"


RESHARD_FLAGS = "--training.seq_len 64 --training.global_batch_size 8 --training.steps 8 --debug.seed 42".split()
RESHARD_FLAGS += ["--checkpoint.enable"]


@pytest.mark.parametrize(
    "ngpu, flags",
    [
        (2, "--training.local_batch_size 4"),
        (4, "--training.local_batch_size 8 --parallelism.tensor_parallel_degree 4"),
        (4, "--training.local_batch_size 4 --parallelism.tensor_parallel_degree 2"),
    ],
    ids=["dp 2", "tp 4", "dp 2, tp 2"],
)
def test_a_run_on_four_ranks_goes_on_in_another_layout(four_ranks, tmp_path, ngpu, flags):
    shutil.copytree(four_ranks / "checkpoint" / "step-4", tmp_path / "outputs" / "checkpoint" / "step-4")
    result = run_train(ngpu, *RESHARD_FLAGS, *flags.split(), cwd=tmp_path)
    assert result.returncode == 0, result.stdout + result.stderr
    resumed, whole = (read_all_scalars(folder / "tb", TAGS) for folder in (tmp_path / "outputs", four_ranks))
    for tag in TAGS:
        assert list(resumed[tag]) == [5, 6, 7, 8]
        for step, values in resumed[tag].items():
            # matmuls over other numbers of sequences and heads round otherwise; another batch would differ by 1e-3
            rounded = tag in (LOSS, GRAD_NORM)
            assert values == (pytest.approx(whole[tag][step], rel=1e-5) if rounded else whole[tag][step]), tag


FLAGS = "--training.seq_len 64 --training.global_batch_size 8 --training.local_batch_size 4 --lr_scheduler.total_steps 100"
FLAGS = [*FLAGS.split(), "--checkpoint.enable", "--checkpoint.interval", "2"]


@pytest.fixture(scope="module")
def stopped(tmp_path_factory):
    """A run that SIGTERM stopped after step 3 or later: its folder, its last step, what it printed, its exit code."""
    folder = tmp_path_factory.mktemp("stopped")
    with (folder / "log").open("wb") as log:
        process = subprocess.Popen(
            [str(REPOSITORY / "run_train.sh"), *FLAGS, "--training.steps", "100"],
            cwd=folder,
            env={**os.environ, "NGPU": "2", "PYTHON": sys.executable},
            stdout=log,
            stderr=subprocess.STDOUT,
        )
    try:
        while process.poll() is None and "step:  3" not in (folder / "log").read_text():
            time.sleep(0.05)
        process.send_signal(signal.SIGTERM)
        code = process.wait(timeout=120)
    finally:
        process.kill()
    step, _ = find_latest(str(folder / "outputs" / "checkpoint"))
    return folder, step, (folder / "log").read_text(), code


def test_sigterm_saves_the_step_it_is_at_and_says_so_once(stopped):
    folder, step, log, code = stopped
    assert code == 128 + signal.SIGTERM
    assert step >= 3 and f"step:  {step}" in log and f"step:  {step + 1}" not in log
    where = folder / "outputs" / "checkpoint"
    line = f"run_train.sh: stopped by SIGTERM after step {step}, which is saved in {where}. The same command goes on from there."
    assert log.count(line) == 1
    assert "Traceback" not in log


def test_what_cannot_be_loaded_or_saved_is_one_line(stopped):
    folder, step, _, _ = stopped
    checkpoints = str(folder / "outputs" / "checkpoint")
    newest = get_path(checkpoints, step)
    with open(os.path.join(newest, "__1_0.distcp"), "r+b") as file:
        file.truncate(1000)

    # asked for by number it is refused; else it is skipped and the one before continues
    chosen = run_train(2, *FLAGS, "--training.steps", "100", "--checkpoint.load_step", str(step), cwd=folder)
    assert chosen.returncode == 1
    (line,) = (line for line in chosen.stderr.splitlines() if line)
    assert line.startswith(f"checkpoint.load_step={step}: ./outputs/checkpoint/step-{step} has a file that was cut off")

    weights_last = [*FLAGS, "--checkpoint.last_save_model_only"]
    resumed = run_train(2, *weights_last, "--training.steps", str(step + 1), cwd=folder)
    assert resumed.returncode == 0, resumed.stdout + resumed.stderr
    assert f"Checkpoint skipped: step-{step} has a file that was cut off: __1_0.distcp has 1000 of" in resumed.stdout
    before = (step - 1) // 2 * 2
    assert f"Loading the checkpoint from ./outputs/checkpoint/step-{before}." in resumed.stdout
    assert f"Training starts at step {before + 1}" in resumed.stdout

    finished = run_train(2, *weights_last, "--training.steps", str(step + 2), cwd=folder)
    assert finished.returncode == 1
    (line,) = (line for line in finished.stderr.splitlines() if line)
    assert f"step-{step + 1} holds no train_state, optimizer, dataloader, lr_scheduler: it is not a checkpoint to go on from" in line


def test_a_disk_that_is_full_ends_the_run_with_one_line_and_keeps_what_there_was(tmp_path):
    command = [str(REPOSITORY / "run_train.sh"), *FLAGS, "--training.steps", "4"]
    whole = subprocess.run(
        ["bash", "-c", 'ulimit -f 4096; exec "$@"', "-", *command],  # files of 4 MiB at most; a checkpoint's have more
        cwd=tmp_path,
        env={**os.environ, "NGPU": "2", "PYTHON": sys.executable},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert whole.returncode == 1
    (line,) = (line for line in whole.stderr.splitlines() if line)
    assert line.startswith("saving ./outputs/checkpoint/step-2 failed (rank ")  # torch hides the OSError behind its own
    assert "GiB are free there; there is no whole checkpoint." in line
    assert os.listdir(tmp_path / "outputs" / "checkpoint") == []
