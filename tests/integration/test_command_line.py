"""The commands of the README, upstream's command lines, and what a mistake in one looks like."""

from __future__ import annotations

import pytest

from .training_runs import LOSS, REPOSITORY, read_scalars, run_train

CONFIG = str(REPOSITORY / "train_configs" / "llama3_debug.toml")


def test_the_default_command_learns_the_embedded_text(tmp_path):
    result = run_train(2, "--profiling.enable_profiling", cwd=tmp_path)
    assert result.returncode == 0, result.stderr
    losses = read_scalars(tmp_path / "outputs" / "tb")[LOSS]
    assert len(losses) == 20 and losses[0] > 8 and losses[-1] < 7.2
    lines = result.stdout.splitlines()
    steps = [line for line in lines if "step:" in line]
    assert len(steps) == 20 and all("eta:" in line and "mfu" not in line for line in steps)
    assert any("Time from the command to the end of step 1:" in line for line in lines)
    (closing,) = (line for line in lines if "Finished step 20" in line)
    assert str(tmp_path / "outputs" / "tb") in closing and str(tmp_path / "outputs" / "profile_traces") in closing
    assert {f"rank{rank}_trace.json" for rank in (0, 1)} == {
        file.name for file in (tmp_path / "outputs" / "profile_traces" / "iteration_10").iterdir()
    }
    for noise in ("Warning", "WARNING", "lspci", "A100"):
        assert noise not in result.stdout
    assert [path.name for path in tmp_path.iterdir()] == ["outputs"]


def test_an_upstream_command_line_works_unchanged_from_a_folder_with_spaces(tmp_path):
    folder = tmp_path / "my runs"
    folder.mkdir()
    config = folder / "debug config.toml"
    config.write_text((REPOSITORY / "train_configs" / "llama3_debug.toml").read_text())
    result = run_train(
        2,
        "--model.name",
        "simple_fsdp.llama3",
        "--job.custom_config_module=torchtitan.experiments.simple_fsdp.job_config",
        "--compile.enable",
        "--compile.backend",
        "aot_eager",
        "--compile.graph_passes",
        "auto_bucketing",
        "--job.description",
        "two words",
        "--training.steps=2",
        "--training.seq_len=64",
        cwd=folder,
        CONFIG_FILE="./debug config.toml",
    )
    assert result.returncode == 0, result.stderr
    assert "Starting job: two words" in result.stdout
    assert "auto_bucketing chose bucket_plan" in result.stdout and "cost model: two cores" in result.stdout
    assert "Compiling the model as one graph with backend 'aot_eager'" in result.stdout
    assert "step:  2" in result.stdout


def test_all_faults_come_at_once_without_a_traceback(tmp_path):
    result = run_train(
        4,
        "--training.stpes",
        "3",
        "--parallelism.tensor_parallel_degree",
        "3",
        "--model.hf_assets_path",
        "nowhere",
        cwd=tmp_path,
    )
    assert result.returncode == 2
    assert result.stdout == ""
    lines = result.stderr.splitlines()
    assert lines[0] == "4 configuration faults:" and len(lines) == 5
    for part in ("--training.stpes (did you mean --training.steps?)", "n_heads=16", "world size 4", "'nowhere' not found"):
        assert part in result.stderr
    assert not (tmp_path / "outputs").exists()


@pytest.mark.parametrize("mode, ngpu", [("fake_backend", 32), ("fake_backend", 1)])
def test_a_dry_run_of_many_ranks_needs_one_process(tmp_path, mode, ngpu):
    result = run_train(ngpu, "--training.local_batch_size", "1", cwd=tmp_path, COMM_MODE=mode)
    assert result.returncode == 0, result.stderr
    assert "step:  1" in result.stdout


def test_validation_runs_on_the_embedded_text(tmp_path):
    flags = ["--validation.enable", "--validation.dataset", "pydoc", "--validation.steps", "2", "--validation.freq", "2"]
    flags += ["--validation.seq_len", "64", "--validation.local_batch_size", "2"]
    result = run_train(2, *flags, "--training.steps", "2", "--training.seq_len", "64", cwd=tmp_path)
    assert result.returncode == 0, result.stderr
    losses = [float(line.split("loss:")[1].split()[0]) for line in result.stdout.splitlines() if "validate step" in line]
    assert len(losses) == 2 and losses[1] < losses[0]
