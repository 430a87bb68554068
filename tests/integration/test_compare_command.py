"""scripts/loss_compare.py from the command line to the exit code; compare_stub.py stands in for ./run_train.sh."""

from __future__ import annotations

import importlib.util
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from torchtitan_simplefsdp.compare import fingerprint

from . import compare_stub

REPOSITORY = Path(__file__).parents[2]
SCRIPT = REPOSITORY / "scripts" / "loss_compare.py"
TWO_RUNS = ["--run", "a=", "--run", "b=--debug.seed 42"]
STEPS = ["--steps", "4", "--checkpoint-interval", "2"]


def load_script():
    spec = importlib.util.spec_from_file_location("loss_compare", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


class Workplace:
    """A folder to compare in, and a launcher that starts the stand-in."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.output = folder, folder / "out put"
        self.launcher = folder / "run_train.sh"
        self.launcher.write_text(f'#!/bin/sh\nexec "{sys.executable}" "{compare_stub.__file__}" "$@"\n')
        self.launcher.chmod(0o755)

    def compare(self, *argv: str) -> int:
        return load_script().main(["--output-folder", str(self.output), *STEPS, *argv], self.launcher)

    def start(self, *argv: str) -> subprocess.Popen:
        code = "import sys, pathlib; sys.path.insert(0, sys.argv[1]); import loss_compare\n"
        code += "sys.exit(loss_compare.main(sys.argv[3:], pathlib.Path(sys.argv[2])))"
        command = [sys.executable, "-c", code, str(SCRIPT.parent), str(self.launcher)]
        command += ["--output-folder", str(self.output), *STEPS, *argv]
        return subprocess.Popen(command, cwd=self.folder, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)

    def get_starts(self) -> str:
        log = self.output / "starts.log"
        return " ".join(log.read_text().split()) if log.exists() else ""

    def wait_until_it_hangs(self) -> int:
        """Return the process id of the stand-in."""
        deadline = time.monotonic() + 60
        while not (self.output / "hung").is_file() or not (self.output / "hung").read_text():
            assert time.monotonic() < deadline
            time.sleep(0.05)
        return int((self.output / "hung").read_text())


@pytest.fixture
def workplace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Workplace:
    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)}
    monkeypatch.chdir(tmp_path)
    for name in ("NGPU", "OMP_NUM_THREADS", "CUDA_VISIBLE_DEVICES", "TRAIN_FILE"):
        monkeypatch.delenv(name, raising=False)
    yield Workplace(tmp_path)
    for number, handler in handlers.items():
        signal.signal(number, handler)


def is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return not Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].startswith(" Z")


@pytest.mark.parametrize(
    "offset, argv, code",
    [
        ("0", ["--assert-equal"], 0),
        ("1e-6", [], 0),
        ("1e-6", ["--assert-equal"], 1),
        ("1e-6", ["--tolerance", "1e-5"], 0),
        ("1e-6", ["--tolerance", "1e-8"], 1),
        ("0", ["--tolerance", "0"], 0),
        ("nan", ["--tolerance", "1e9"], 1),
    ],
)
def test_the_exit_code_is_what_was_asserted(workplace, capsys, offset, argv, code):
    assert workplace.compare("--no-plot", "--run", "a=", "--run", f"b=OFFSET={offset}", *argv) == code
    output = capsys.readouterr().out
    assert ("All runs are equal in every bit." in output) == (offset == "0")
    assert not (workplace.output / "plot.png").exists()


def test_a_step_that_no_run_has_is_not_equal(workplace):
    assert workplace.compare(*TWO_RUNS, "--assert-equal", "--no-plot", "--", "--training.steps", "3") == 1


def test_the_result_names_commands_and_no_path_of_this_machine(workplace, capsys):
    assert workplace.compare(*TWO_RUNS, "--markdown", "--", "--training.seq_len", "64") == 0
    assert capsys.readouterr().out.startswith("| run | metric |")
    assert (workplace.output / "plot.png").read_bytes().startswith(b"\x89PNG")
    text = (workplace.output / "result.json").read_text()
    assert str(workplace.folder) not in text and str(REPOSITORY) not in text
    command = json.loads(text)["runs"]["b"]["command"]
    environ, launcher, *flags = command.split()
    assert (environ, launcher) == ("CONFIG_FILE=train_configs/llama3_debug.toml", "./run_train.sh")
    assert flags[:2] == ["--job.dump_folder", "outputs/loss_compare/b"]
    assert command.endswith("--training.seq_len 64 --debug.seed 42")


def test_an_exported_result_is_the_baseline_of_another_comparison(workplace, capsys):
    golden = str(workplace.folder / "golden.json")
    assert workplace.compare(*TWO_RUNS, "--export-result", golden, "--no-plot") == 0
    assert workplace.compare("--import-result", golden, "--run", "c=", "--assert-equal", "--no-plot") == 0
    assert workplace.compare("--import-result", golden, "--run", "d=OFFSET=1e-6", "--assert-equal", "--no-plot") == 1
    assert workplace.get_starts() == "a b c d"
    assert "golden  loss       7.6         (baseline)" in capsys.readouterr().out
    assert workplace.compare("--import-result", golden, "--run", "e=", "--steps", "5", "--no-plot") == 2
    assert "golden.json has 4 steps, this comparison 5. Pass --steps 4." in capsys.readouterr().err
    assert workplace.compare(*TWO_RUNS, "--export-result", "/dev/null/golden.json", "--no-plot") == 2
    assert workplace.get_starts() == "a b c d"  # nothing was started for results that could not be used


def test_values_that_are_not_finite_are_no_equality(workplace, capsys):
    assert workplace.compare("--run", "a=OFFSET=nan", "--run", "b=OFFSET=nan", "--assert-equal", "--no-plot") == 1
    assert "The baseline has values that are not finite" in capsys.readouterr().out


def test_finished_runs_are_kept_without_their_checkpoints(workplace, capsys):
    for _ in range(2):
        assert workplace.compare(*TWO_RUNS, "--assert-equal") == 0
    assert workplace.get_starts() == "a b"
    assert "[2/2] b: kept, nothing has changed since it finished" in capsys.readouterr().err
    assert not list(workplace.output.rglob("step-*"))


def test_a_moved_result_is_still_kept(workplace):
    workplace.compare(*TWO_RUNS, "--no-plot")
    workplace.output = workplace.output.rename(workplace.folder / "moved")
    workplace.compare(*TWO_RUNS, "--no-plot")
    assert workplace.get_starts() == "a b"


def test_only_the_runs_whose_command_has_changed_run_again(workplace, capsys):
    workplace.compare(*TWO_RUNS, "--no-plot")
    (workplace.output / "b" / "old").touch()
    workplace.compare("--run", "a=", "--run", "b=--debug.seed 43", "--no-plot")
    assert workplace.get_starts() == "a b b"
    assert "[2/2] b: from scratch, because this changed: command" in capsys.readouterr().err
    assert not (workplace.output / "b" / "old").exists()


@pytest.mark.parametrize("what", ["config file", "torch", "torchtitan_simplefsdp"])
def test_whatever_the_numbers_depend_on_makes_runs_run_again(workplace, monkeypatch, capsys, what):
    config = workplace.folder / "my config.toml"
    config.write_text("")
    argv = [*TWO_RUNS, "--no-plot", "--config", config.name]
    workplace.compare(*argv)
    if what == "config file":
        config.write_text("# changed")
    elif what == "torch":
        monkeypatch.setattr(fingerprint, "version", lambda package: "0")
    else:
        package = workplace.folder / "package"
        package.mkdir()
        (package / "new.py").touch()
        monkeypatch.setattr(fingerprint, "PACKAGE", package)
    workplace.compare(*argv)
    assert workplace.get_starts() == "a b a b"
    assert f"because this changed: {what}" in capsys.readouterr().err


def test_a_failed_run_ends_the_comparison_and_what_is_done_is_kept(workplace, capsys):
    runs = ["--run", "a=", "--run", "b=FAIL_AT=3", "--run", "c="]
    assert workplace.compare(*runs) == 2
    error = capsys.readouterr().err
    assert "[2/3] b failed with exit code 3:\n" in error and "    the last words\n" in error
    assert f"The whole log: {workplace.output / 'b' / 'run.log'}" in error
    assert workplace.get_starts() == "a b"
    assert workplace.compare(*runs) == 2
    assert workplace.get_starts() == "a b b"
    assert "[2/3] b: resumes after step 2" in capsys.readouterr().err


def test_a_run_without_scalars_is_a_failure(workplace, capsys):
    assert workplace.compare(*TWO_RUNS, "--", "--training.steps", "0") == 2
    assert "[1/2] a recorded no loss for step 1. Its log:" in capsys.readouterr().err


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_an_interrupted_comparison_leaves_no_process_and_resumes_inside_the_run(workplace, number):
    argv = ["--run", "a=", "--run", "b=HANG_AT=4", "--assert-equal", "--no-plot"]
    process = workplace.start(*argv)
    pid = workplace.wait_until_it_hangs()
    process.send_signal(number)
    _, error = process.communicate(timeout=30)
    assert process.returncode == 130 and "The same command goes on from here." in error
    assert not is_alive(pid)
    process = workplace.start(*argv)
    _, error = process.communicate(timeout=60)
    assert process.returncode == 0, error
    assert "[1/2] a: kept" in error and "[2/2] b: resumes after step 2" in error
    assert workplace.get_starts() == "a b b"


def test_without_checkpoints_an_interrupted_run_starts_again(workplace):
    argv = ["--run", "a=HANG_AT=4", "--run", "b=", "--assert-equal", "--no-plot", "--checkpoint-interval", "0"]
    process = workplace.start(*argv)
    workplace.wait_until_it_hangs()
    process.send_signal(signal.SIGINT)
    process.communicate(timeout=30)
    _, error = workplace.start(*argv).communicate(timeout=60)
    assert "[1/2] a: starts" in error and (workplace.output / "a" / "run.log").read_text().startswith("step: 1\n")


def test_a_killed_comparison_takes_its_run_with_it(workplace):
    process = workplace.start("--run", "a=HANG_AT=1", "--run", "b=", "--no-plot")
    pid = workplace.wait_until_it_hangs()
    process.kill()
    process.communicate(timeout=30)
    deadline = time.monotonic() + 10
    while is_alive(pid) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not is_alive(pid)
    assert workplace.compare("--run", "a=HANG_AT=1", "--run", "b=", "--no-plot") == 0


def test_a_checkpoint_is_not_used_if_scalars_before_it_were_lost(workplace, capsys):
    workplace.compare("--run", "a=FAIL_AT=4", "--run", "b=")
    for file in (workplace.output / "a" / "tb").iterdir():
        file.unlink()
    workplace.compare("--run", "a=FAIL_AT=4", "--run", "b=")
    assert "[1/2] a: resumes" not in capsys.readouterr().err


def test_two_comparisons_do_not_share_a_folder(workplace, capsys):
    process = workplace.start("--run", "a=HANG_AT=1", "--run", "b=")
    workplace.wait_until_it_hangs()
    assert workplace.compare("--run", "a=HANG_AT=1", "--run", "b=") == 2
    assert "is in use by another comparison" in capsys.readouterr().err
    process.terminate()
    process.communicate(timeout=30)


def test_a_folder_that_is_no_run_is_not_overwritten(workplace, capsys):
    (workplace.output / "b").mkdir(parents=True)
    (workplace.output / "b" / "thesis.txt").write_text("mine")
    assert workplace.compare(*TWO_RUNS) == 2
    assert "is there, but not as a run of a comparison" in capsys.readouterr().err
    assert workplace.get_starts() == "" and (workplace.output / "b" / "thesis.txt").read_text() == "mine"


def test_runs_load_the_seed_checkpoint_which_is_made_once(workplace):
    for interval in ("2", "2", "0"):
        argv = [*TWO_RUNS, "--seed-checkpoint", "--no-plot", "--assert-equal", "--checkpoint-interval", interval]
        assert workplace.compare(*argv) == 0
    assert workplace.get_starts() == "seed_checkpoint a b a b"


def test_a_dry_run_prints_commands_that_a_shell_runs_and_starts_nothing(workplace, capsys):
    assert workplace.compare("--run", "a=OFFSET=1", "--run", "b=--x 'two  words'", "--dry-run") == 0
    first, second = capsys.readouterr().out.splitlines()
    assert not workplace.output.exists()
    assert first.startswith("CONFIG_FILE=train_configs/llama3_debug.toml OFFSET=1 ./run_train.sh --job.dump_folder ")
    workplace.output.mkdir()
    subprocess.run(first, shell=True, check=True, env={**os.environ, "SIMPLEFSDP_PROGRESS": os.devnull})
    assert workplace.get_starts() == "a"
    assert second.endswith("--x 'two  words'")


@pytest.mark.parametrize(
    "argv, message",
    [
        ([], "no runs. Give at least two"),
        (["--run", "a="], "one run has nothing to be compared with"),
        ([*TWO_RUNS, "--run", "a="], "two runs are called 'a'"),
        ([*TWO_RUNS, "--config", "none.toml"], "run 'a': config file 'none.toml' not found"),
        (["--run", "a=", "--run", "b=--config"], "run 'b': --config has no value"),
        ([*TWO_RUNS, "--import-result", "none.json"], "--import-result none.json: No such file"),
        ([*TWO_RUNS, "--steps", "0"], "--steps must be 1 or more"),
        ([*TWO_RUNS, "--tolerance", "nan"], "--tolerance a number from 0"),
        ([*TWO_RUNS, "--output-folder", "run_train.sh/x"], "Not a directory"),
    ],
)
def test_wrong_usage_is_one_line_before_anything_starts(workplace, capsys, argv, message):
    assert workplace.compare(*argv) == 2
    error = capsys.readouterr().err
    assert error.startswith("loss_compare.py: ") and message in error and error.count("\n") == 1
    assert workplace.get_starts() == ""


@pytest.mark.parametrize("argv", [["--assert-equal", "--tolerance", "1"], ["--stps", "1"], ["--steps", "x"], ["extra"]])
def test_options_that_do_not_exist_or_exclude_each_other_are_wrong_usage(workplace, argv):
    with pytest.raises(SystemExit) as exit:
        workplace.compare(*TWO_RUNS, *argv)
    assert exit.value.code == 2 and workplace.get_starts() == ""


def test_without_matplotlib_the_message_comes_first(workplace, monkeypatch, capsys):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert workplace.compare(*TWO_RUNS) == 2
    assert "Run pip install matplotlib, or pass --no-plot." in capsys.readouterr().err
    assert workplace.get_starts() == ""
    assert workplace.compare(*TWO_RUNS, "--no-plot") == 0
