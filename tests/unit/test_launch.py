"""The launcher: what command line and environment become, as tables."""

import os
from pathlib import Path

import pytest
import torch
from torch.distributed import run as torchrun

from torchtitan_simplefsdp import launch, launch_args

REPOSITORY = Path(launch.__file__).parents[1]
DEBUG_CONFIG = str(REPOSITORY / "train_configs" / "llama3_debug.toml")


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The working directory, with a space in its path and two configs in it."""
    folder = tmp_path / "work dir"
    folder.mkdir()
    (folder / "a b.toml").write_text('[job]\ndump_folder = "from file"\n')
    (folder / "other.toml").write_text("")
    monkeypatch.chdir(folder)
    return folder


@pytest.mark.parametrize(
    "argv, environ, expected",
    [
        ([], {}, [DEBUG_CONFIG]),
        ([], {"CONFIG_FILE": ""}, [DEBUG_CONFIG]),
        ([], {"CONFIG_FILE": "a b.toml"}, ["a b.toml"]),
        (["--job.config_file", "other.toml"], {"CONFIG_FILE": "a b.toml"}, ["other.toml"]),
        (["--job.config-file=other.toml"], {"CONFIG_FILE": "a b.toml"}, ["other.toml"]),
        (["--config", "a b.toml", "--job.config_file", "other.toml"], {}, ["a b.toml"]),
        (["--config=other.toml", "--config=a b.toml"], {}, ["a b.toml"]),
        (["--config", "train_configs/llama3_debug.toml"], {}, [DEBUG_CONFIG]),
        (
            ["--training.steps=3", "--config", "a b.toml", "--job.description", "two  words $HOME *", "--model.x=a=b"],
            {},
            ["a b.toml", "--training.steps=3", "--job.description", "two  words $HOME *", "--model.x=a=b"],
        ),
    ],
)
def test_the_config_file_comes_first_and_overrides_stay_as_typed(folder, argv, environ, expected):
    assert launch_args.build_module_args(argv, environ) == ["--job.config_file", *expected]


def test_a_missing_config_file_is_named_with_the_place_looked_in(folder):
    with pytest.raises(launch_args.LaunchError) as error:
        launch_args.build_module_args(["--config", "no such.toml"], {})
    assert f"config file 'no such.toml' not found (looked in {folder / 'no such.toml'})" in str(error.value)
    assert "train_configs/llama3_debug.toml" in str(error.value)


@pytest.mark.parametrize("argv", [["--config"], ["--config="], ["--job.config_file"]])
def test_a_config_option_without_a_value_is_an_error(argv):
    with pytest.raises(launch_args.LaunchError, match="has no value"):
        launch_args.build_module_args(argv, {})


@pytest.mark.parametrize(
    "argv, expected",
    [
        (["--config", "a b.toml"], "from file"),
        (["--config", "other.toml"], "outputs"),
        (["--config", "a b.toml", "--job.dump_folder", "from line"], "from line"),
        (["--config", "a b.toml", "--job.dump-folder=from line"], "from line"),
    ],
)
def test_the_dump_folder_is_that_of_the_run(folder, argv, expected):
    assert launch_args.get_dump_folder(launch_args.build_module_args(argv, {})) == Path(expected)


def test_a_byte_order_mark_before_the_file_does_not_hide_its_dump_folder(folder):
    (folder / "a b.toml").write_bytes(b"\xef\xbb\xbf" + (folder / "a b.toml").read_bytes())
    assert launch_args.get_dump_folder(["--job.config_file", "a b.toml"]) == Path("from file")


@pytest.mark.parametrize("text", ["[job", "job = 1", "[job]\ndump_folder = 1"])
def test_a_faulty_file_is_left_to_the_configuration_check(folder, text):
    (folder / "other.toml").write_text(text)
    assert launch_args.get_dump_folder(["--job.config_file", "other.toml"]) == Path("outputs")


def test_torchrun_takes_every_argument_of_the_ranks_as_it_is():
    module_args = ["--job.config_file", "a b.toml", "--", "-m", "--nnodes=9", "", "--help"]
    args = torchrun.parse_args(launch_args.build_torchrun_args("some.module", module_args, {}, 4, Path("log dir")))
    assert (args.module, args.training_script) == (True, "torchtitan_simplefsdp.rank")
    assert args.training_script_args == [str(os.getpid()), "some.module", *module_args]
    assert (args.nproc_per_node, args.log_dir, args.tee, args.role) == ("4", "log dir", "3", "rank")


@pytest.mark.parametrize(
    "environ, expected",
    [
        ({}, {"nnodes": "1", "rdzv_backend": "c10d", "rdzv_endpoint": "localhost:0", "local_ranks_filter": "0"}),
        ({"NNODES": "1", "NODE_RANK": "7", "LOG_RANK": "0,3"}, {"nnodes": "1", "local_ranks_filter": "0,3"}),
        ({"RDZV_ID": "mine"}, {"rdzv_id": "mine"}),
        (
            {"NNODES": "2", "NODE_RANK": "1", "RDZV_ENDPOINT": "host-0:29500"},
            {"nnodes": "2", "node_rank": 1, "rdzv_backend": "static", "rdzv_endpoint": "host-0:29500"},
        ),
    ],
)
def test_the_environment_decides_where_ranks_run_and_who_is_heard(environ, expected):
    args = torchrun.parse_args(launch_args.build_torchrun_args("module", [], environ, 4, Path("logs")))
    assert {name: getattr(args, name) for name in expected} == expected


@pytest.mark.parametrize(
    "environ, complaint",
    [
        ({"NGPU": "abc"}, "NGPU='abc' is not a whole number"),
        ({"NGPU": "0"}, "NGPU='0' is not a whole number"),
        ({"NGPU": "-2"}, "NGPU='-2' is not a whole number"),
        ({"NNODES": "1.5"}, "NNODES='1.5' is not a whole number"),
        ({"LOG_RANK": "one"}, "LOG_RANK='one' does not name local ranks of NGPU=2"),
        ({"LOG_RANK": "0,2"}, "LOG_RANK='0,2' does not name local ranks of NGPU=2"),
        ({"NNODES": "2", "NODE_RANK": "0"}, "NNODES=2 with RDZV_ENDPOINT=''"),
        ({"NNODES": "2", "NODE_RANK": "0", "RDZV_ENDPOINT": "host"}, "NNODES=2 with RDZV_ENDPOINT='host'"),
        ({"NNODES": "2", "RDZV_ENDPOINT": "host:1"}, "NNODES=2 with NODE_RANK=''"),
        ({"NNODES": "2", "NODE_RANK": "2", "RDZV_ENDPOINT": "host:1"}, "NNODES=2 with NODE_RANK='2'"),
        ({"COMM_MODE": "fake"}, "unknown COMM_MODE='fake'"),
    ],
)
def test_a_bad_variable_is_named_before_anything_starts(folder, environ, complaint):
    with pytest.raises(launch_args.LaunchError) as error:
        launch.launch(["--config", "a b.toml"], {"NGPU": "2", **environ})
    assert str(error.value).startswith(f"run_train.sh: {complaint}")
    assert "\n" not in str(error.value)
    assert sorted(path.name for path in folder.iterdir()) == ["a b.toml", "other.toml"]


@pytest.mark.parametrize(
    "environ, processes, gpus, cpus, expected",
    [
        ({}, 2, 0, 8, {"OMP_NUM_THREADS": "4"}),
        ({}, 8, 0, 2, {"OMP_NUM_THREADS": "1"}),
        ({"OMP_NUM_THREADS": "3"}, 2, 0, 8, {}),
        ({}, 8, 8, 96, {"OMP_NUM_THREADS": "1", "PYTORCH_ALLOC_CONF": "expandable_segments:True"}),
        ({"PYTORCH_ALLOC_CONF": "mine"}, 8, 8, 96, {"OMP_NUM_THREADS": "1"}),
        ({"PYTORCH_CUDA_ALLOC_CONF": "mine"}, 8, 8, 96, {"OMP_NUM_THREADS": "1"}),
    ],
)
def test_ranks_get_defaults_only_for_variables_that_are_unset(environ, processes, gpus, cpus, expected):
    added = launch_args.build_environment(environ, processes, gpus, cpus)
    assert added == expected


@pytest.mark.parametrize(
    "argv, environ, expected",
    [
        (["-h"], {}, ["-h"]),
        (["--help", "training"], {}, ["--help", "training"]),
        (
            ["--x=1"],
            {"COMM_MODE": "fake_backend", "NGPU": "32"},
            ["--x=1", "--comm.mode=fake_backend", "--training.steps=1"],
        ),
    ],
)
def test_help_and_comm_mode_run_the_module_without_torchrun(folder, monkeypatch, argv, environ, expected):
    monkeypatch.setattr(launch, "run_module", lambda module, args: (module, args))
    for name in ("NGPU", "LOCAL_RANK"):
        monkeypatch.setenv(name, "restored after the test")
    module, module_args = launch.launch(["--config", "other.toml", *argv], {"TRAIN_FILE": "some.module", **environ})
    assert (module, module_args) == ("some.module", ["--job.config_file", "other.toml", *expected])
    if environ:
        assert (os.environ["NGPU"], os.environ["LOCAL_RANK"]) == ("32", "0")


def test_a_configuration_error_without_torchrun_goes_to_stderr(monkeypatch, capsys):
    monkeypatch.delenv("TORCHELASTIC_ERROR_FILE", raising=False)
    with pytest.raises(SystemExit) as exit_:
        launch.exit_with_explanation("first fault\nsecond fault", 2)
    assert exit_.value.code == 2
    assert capsys.readouterr().err == "first fault\nsecond fault\n"


@pytest.mark.parametrize(
    "argv, environ, processes",
    [
        (["--checkpoint.enable", "--checkpoint.create_seed_checkpoint"], {}, 1),
        (["--checkpoint.create-seed-checkpoint", "--checkpoint.enable"], {}, 1),
        (["--checkpoint.create_seed_checkpoint"], {"NGPU": "3"}, 3),  # asked for, and refused with a reason by the ranks
        (["--checkpoint.no_create_seed_checkpoint"], {}, 2),
        (["--checkpoint.enable"], {}, 2),
    ],
)
def test_a_seed_checkpoint_is_made_by_one_process(folder, monkeypatch, argv, environ, processes):
    monkeypatch.setattr(launch, "run_torchrun", lambda args, log_dir, made: torchrun.parse_args(args).nproc_per_node)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert launch.launch(["--config", "other.toml", *argv], environ) == str(processes)
