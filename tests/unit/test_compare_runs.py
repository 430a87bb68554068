"""From --run texts to command lines; the oracles are written by hand."""

import shlex
from pathlib import Path

import pytest

from torchtitan_simplefsdp.compare.runs import build_runs, CompareError, Settings


def build(*texts: str, **changes) -> list:
    settings = dict(
        steps=10, seed=1, config="c.toml", output_folder=Path("out"), checkpoint_interval=5, seed_checkpoint=False
    )
    return build_runs(list(texts), Settings(**{**settings, "flags": [], "environ": {}, **changes}))


def test_a_run_gets_its_own_folder_and_the_flags_that_make_runs_comparable():
    (run,) = build("a=")
    assert run.environ == {"CONFIG_FILE": "c.toml"}
    assert run.get_command() == (
        "CONFIG_FILE=c.toml ./run_train.sh --job.dump_folder out/a --training.steps 10 --debug.seed 1 "
        "--debug.deterministic --metrics.enable_tensorboard --metrics.log_freq 1 --checkpoint.enable "
        "--checkpoint.interval 5 --checkpoint.keep_latest_k 2 --checkpoint.no_last_save_model_only "
        "--checkpoint.folder checkpoint"
    )


def test_the_users_flags_come_last_those_of_the_run_after_those_of_all_runs():
    (run,) = build("a=--training.steps 3", flags=["--training.steps", "2"])
    assert run.flags[-4:] == ["--training.steps", "2", "--training.steps", "3"]


def test_assignments_before_the_flags_are_variables_and_win_over_the_shell():
    environ = {"NGPU": "8", "OMP_NUM_THREADS": "1", "HOME": "/home/me"}
    (run,) = build("a=NGPU=4 CONFIG_FILE='my file' X= --model.x=a=b", environ=environ)
    assert run.environ == {"CONFIG_FILE": "my file", "OMP_NUM_THREADS": "1", "NGPU": "4", "X": ""}
    assert run.flags[-1] == "--model.x=a=b"


def test_a_command_can_be_pasted_whatever_is_in_it():
    (run,) = build("""a=D='two  words' --job.description "it's $HOME *" """, output_folder=Path("my runs"))
    words = shlex.split(run.get_command("./my path/run_train.sh"))
    assert words == ["CONFIG_FILE=c.toml", "D=two  words", "./my path/run_train.sh", *run.flags]
    assert run.flags[1] == "my runs/a" and run.flags[-1] == "it's $HOME *"


def test_without_checkpoints_none_is_read_either():
    (run,) = build("a=", checkpoint_interval=0)
    assert "--checkpoint.no_enable" in run.flags and "--checkpoint.enable" not in run.flags


@pytest.mark.parametrize("interval, flag", [(5, "--checkpoint.interval"), (0, "--checkpoint.load_only")])
def test_a_seed_checkpoint_is_made_first_by_one_process_and_loaded_by_the_others(interval, flag):
    flags = ["--parallelism.tensor_parallel_degree", "2"]
    shell = {"NGPU": "4"}
    seed, run = build("a=", seed_checkpoint=True, checkpoint_interval=interval, flags=flags, environ=shell)
    assert seed.environ["NGPU"] == "1" and "--checkpoint.create_seed_checkpoint" in seed.flags
    assert seed.flags.index("2") < seed.flags.index("--parallelism.pipeline_parallel_degree")  # the last one counts
    assert seed.flags[-3:-1] == ["1", "--parallelism.pipeline_parallel_degree"]
    assert flag in run.flags and "--checkpoint.enable" in run.flags
    assert run.flags[run.flags.index("--checkpoint.initial_load_path") + 1] == "out/seed_checkpoint/checkpoint/step-0"


@pytest.mark.parametrize("text", ["a", "", "=--x", "../a=", ".=", "a/b=", "-a=", "a b=", "golden=", "seed_checkpoint="])
def test_a_name_that_cannot_be_a_folder_is_refused_with_the_form_expected(text):
    with pytest.raises(CompareError, match="expected NAME="):
        build(text)


@pytest.mark.parametrize(
    "texts, changes, message",
    [
        (["a=", "b=", "a=--x"], {}, "two runs are called 'a'"),
        (["a=--x 'y"], {}, "--run a: cannot read \"--x 'y\" as a shell would: No closing quotation"),
        (["a=NGPU 4"], {}, "--run a: 'NGPU' is neither VARIABLE=value nor a flag"),
        (["a="], {"flags": ["x"]}, "flags after --: 'x' is neither"),
        (["a=--job.dump-folder=x"], {}, "--run a: --job.dump_folder is set by the comparison"),
        (["a="], {"flags": ["--job.dump_folder", "x"]}, "Use --output-folder"),
    ],
)
def test_what_cannot_be_run_is_refused_with_its_place(texts, changes, message):
    with pytest.raises(CompareError) as error:
        build(*texts, **changes)
    assert message in str(error.value)
