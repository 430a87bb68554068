"""The launcher with real torchrun ranks that import nothing heavy."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from torchtitan_simplefsdp import launch

REPOSITORY = Path(launch.__file__).parents[1]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The working directory, with a space in its path and two configs in it."""
    folder = tmp_path / "work dir"
    folder.mkdir()
    (folder / "a b.toml").write_text('[job]\ndump_folder = "from file"\n')
    (folder / "other.toml").write_text("")
    monkeypatch.chdir(folder)
    return folder


UNSET = ("CONFIG_FILE", "COMM_MODE", "NNODES", "PYTHONUNBUFFERED")

RANKS = """
import os, sys, time
from pathlib import Path

rank, task = os.environ["RANK"], sys.argv[3]
if task == "--argv":
    print(sys.argv[1:])
elif task == "--config-error":
    from torchtitan_simplefsdp.launch import exit_with_explanation
    exit_with_explanation("first fault\\nsecond fault", 2)
elif task == "--crash" and rank == "1":
    raise RuntimeError("boom")
elif task == "--lines":
    for number in range(10):
        print("line", number, flush=True)
        time.sleep(0.2)
elif task == "--abort-in-teardown":
    import atexit, ctypes, threading
    libc = ctypes.CDLL(None)
    getattr(libc, "__cxa_atexit")(libc.abort, None, None)  # as a destructor of a C++ library that aborts
    atexit.register(lambda: print("exit handler", end=""))
    threading.Thread(target=lambda: (time.sleep(1), print("thread", flush=True))).start()
elif task == "--sleep":
    Path(f"pid of {rank}").write_text(str(os.getpid()))
    time.sleep(300)
"""


@pytest.fixture
def start(folder: Path):
    """Start run_train.sh in `folder` on two ranks of the module above."""
    (folder / "ranks.py").write_text(RANKS)
    environ = {name: value for name, value in os.environ.items() if name not in UNSET}
    environ |= {"PYTHON": sys.executable, "TRAIN_FILE": "ranks", "NGPU": "2", "LOG_RANK": "0"}
    started = []

    def start(*argv: str) -> subprocess.Popen:
        command = [REPOSITORY / "run_train.sh", "--config", "other.toml", *argv]
        streams = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
        started.append(subprocess.Popen(command, env=environ, text=True, **streams))
        return started[-1]

    yield start
    for process in started:
        process.kill()
        process.communicate()


def test_arguments_reach_the_ranks_unsplit_and_logs_go_to_the_dump_folder(folder, start):
    run = start("--argv", "two  words", "*", "--job.dump_folder=my runs")
    stdout, stderr = run.communicate(timeout=60)
    expected = str(["--job.config_file", "other.toml", "--argv", "two  words", "*", "--job.dump_folder=my runs"])
    assert (run.returncode, stdout, stderr) == (0, f"[rank0]:{expected}\n", "")
    (rank_1,) = folder.glob("my runs/logs/*/attempt_0/1/stdout.log")
    assert rank_1.read_text() == f"{expected}\n"


def test_a_configuration_error_of_all_ranks_is_printed_once_and_leaves_nothing(folder, start):
    run = start("--config-error")
    stdout, stderr = run.communicate(timeout=60)
    assert (run.returncode, stdout, stderr) == (2, "", "first fault\nsecond fault\n")
    assert sorted(path.name for path in folder.iterdir() if path.is_dir()) in ([], ["__pycache__"])


def test_a_crash_of_a_rank_ends_the_run_with_its_exit_code(folder, start):
    run = start("--crash")
    _, stderr = run.communicate(timeout=60)
    assert run.returncode == 1
    assert "torchtitan_simplefsdp.rank FAILED" in stderr and "rank      : 1" in stderr
    assert "Traceback" not in stderr  # of the launcher; that of rank 1, which is not shown, is in its log
    (rank_1,) = folder.glob("outputs/logs/*/attempt_0/1/stderr.log")
    assert rank_1.read_text().endswith("RuntimeError: boom\n")


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_to_the_launcher_ends_every_rank_and_is_one_line(folder, start, number):
    run = start("--sleep")
    pids = [wait_for_pid(folder / f"pid of {rank}") for rank in (0, 1)]
    run.send_signal(number)
    stdout, stderr = run.communicate(timeout=60)
    line = f"run_train.sh: stopped by {number.name}, all ranks have ended. Output of all ranks: outputs/logs\n"
    assert (run.returncode, stdout, stderr) == (128 + number, "", line)
    for pid in pids:
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)


def test_no_rank_outlives_a_launcher_that_was_killed(folder, start):
    run = start("--sleep")
    pids = [wait_for_pid(folder / f"pid of {rank}") for rank in (0, 1)]
    run.kill()
    run.communicate(timeout=60)
    deadline = time.monotonic() + 10  # the ranks would sleep 300 seconds
    while any(map(is_running, pids)):
        assert time.monotonic() < deadline
        time.sleep(0.05)


def test_a_rank_whose_launcher_has_ended_does_not_start(folder):
    (folder / "ranks.py").write_text("print('started')")
    command = [sys.executable, "-m", "torchtitan_simplefsdp.rank", "1", "ranks"]
    environ = os.environ | {"PYTHONPATH": os.pathsep.join([str(REPOSITORY), str(folder)])}
    result = subprocess.run(command, env=environ, text=True, capture_output=True)
    assert (result.returncode, result.stdout, result.stderr) == (1, "", "rank: the launcher (process 1) has ended.\n")


def test_help_that_nobody_reads_to_its_end_ends_quietly(folder, start):
    (folder / "ranks.py").write_text("for _ in range(100_000):\n    print('help')\n")  # more than a pipe holds
    run = start("--help", "training")
    assert run.stdout.readline() == "help\n"
    run.stdout.close()
    assert (run.wait(timeout=60), run.stderr.read()) == (-signal.SIGPIPE, "")


def test_a_run_that_nobody_reads_any_more_goes_on_to_its_end(folder, start):
    run = start("--lines")
    assert run.stdout.readline() == "[rank0]:line 0\n"
    run.stdout.close()
    assert (run.wait(timeout=60), run.stderr.read()) == (0, "")
    (rank_0,) = folder.glob("outputs/logs/*/attempt_0/0/stdout.log")
    assert rank_0.read_text().endswith("line 9\n")


def is_running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"  # ended, and not collected yet
    except (FileNotFoundError, ProcessLookupError):
        return False


def wait_for_pid(path: Path) -> int:
    deadline = time.monotonic() + 60
    while not (path.exists() and path.read_text()):
        assert time.monotonic() < deadline, f"{path.name} was never written"
        time.sleep(0.05)
    return int(path.read_text())


def test_a_run_that_has_finished_does_not_fail_in_the_interpreters_teardown(folder, start):
    run = start("--abort-in-teardown")
    stdout, stderr = run.communicate(timeout=60)
    assert run.returncode == 0, stderr
    assert stdout.index("thread") < stdout.index("exit handler")
    alone = "import ctypes; libc = ctypes.CDLL(None); libc.__cxa_atexit(libc.abort, None, None)"
    assert subprocess.run([sys.executable, "-c", alone], capture_output=True).returncode == -signal.SIGABRT
