"""scripts/loss_compare.py with real runs: `replicate` against `fully_shard`, which test_layouts.py finds equal, too."""

from __future__ import annotations

import json
import subprocess
import sys

from .training_runs import REPOSITORY

REPLICATE = "replicate=NGPU=2 --parallelism.data_parallel_replicate_degree 2 --parallelism.data_parallel_shard_degree 1"
FULLY_SHARD = "fully_shard=NGPU=2 --parallelism.data_parallel_shard_degree 2"


def compare(cwd, *argv: str) -> subprocess.CompletedProcess:
    command = [sys.executable, str(REPOSITORY / "scripts" / "loss_compare.py"), "--steps", "3", "--assert-equal", *argv]
    command += ["--", "--training.seq_len", "64", "--training.local_batch_size", "1"]
    return subprocess.run(command, cwd=cwd, capture_output=True, text=True, timeout=600)


def test_equal_layouts_are_found_equal_and_another_seed_is_not(tmp_path):
    result = compare(tmp_path, "--run", REPLICATE, "--run", FULLY_SHARD)
    assert result.returncode == 0, result.stdout + result.stderr
    content = json.loads((tmp_path / "outputs" / "loss_compare" / "result.json").read_text())
    losses = content["runs"]["fully_shard"]["scalars"]["loss"]
    assert list(losses) == ["1", "2", "3"] and 8 < losses["1"] < 8.5 and losses["3"] < losses["1"]
    assert content["differences"]["fully_shard"]["loss"]["steps"] == 3

    result = compare(tmp_path, "--run", REPLICATE, "--run", f"{FULLY_SHARD} --debug.seed 43")
    assert result.returncode == 1, result.stdout + result.stderr
    assert "[1/2] replicate: kept" in result.stderr
    content = json.loads((tmp_path / "outputs" / "loss_compare" / "result.json").read_text())
    assert content["differences"]["fully_shard"]["loss"]["first_step"] == 1
