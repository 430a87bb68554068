"""Executing a run: keep it, resume it or start it from scratch; its log in a file, no process left behind.

A run's folder holds compare.json (its fingerprint, and whether it is finished), run.log and all that the run writes.

Not here: the command of a run (runs.py), what is read from a finished one (scalars.py).
"""

import ctypes
import fcntl
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path

from torchtitan_simplefsdp.progress import PROGRESS_VARIABLE

from .runs import CompareError, NOT_INHERITED, Run
from .scalars import count_complete_steps, read_scalars

STATE, LOG = "compare.json", "run.log"
POLL_SECONDS, LINE_SECONDS, STOP_SECONDS = 0.2, 30, 60
STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
PR_SET_PDEATHSIG = 1  # linux/prctl.h


class RunFolder:
    """The folder of one run, and how far the run in it has come."""

    def __init__(self, folder: Path, fingerprint: dict[str, str]) -> None:
        """Look at the folder, change nothing.

        Raises: CompareError if it holds files that are not a run's.
        """
        self.path, self._fingerprint = folder, fingerprint
        self.log, self._state = folder / LOG, folder / STATE
        if folder.exists() and not self._state.is_file() and (not folder.is_dir() or any(folder.iterdir())):
            raise CompareError(f"{folder} is there, but not as a run of a comparison. Pass another --output-folder.")

    def get_changes(self) -> list[str]:
        """Return the names of what is not as it was when the run was started; nothing if it never was."""
        stored = self._read().get("fingerprint", self._fingerprint)
        return [name for name, value in self._fingerprint.items() if stored.get(name) != value]

    def is_finished(self) -> bool:
        return bool(self._read().get("finished")) and not self.get_changes()

    def prepare(self) -> int:
        """Remove what the run must not find, and return the step from which it resumes; 0 is from scratch."""
        step = 0 if self.get_changes() else self._find_resumable_step()
        if step == 0:
            shutil.rmtree(self.path, ignore_errors=True)
            self.path.mkdir(parents=True)
        self._write(finished=False)
        return step

    def finish(self, keep_checkpoints: bool) -> None:
        """Note that the run is finished and remove its checkpoints, unless another run reads them."""
        self._write(finished=True)
        if not keep_checkpoints:
            shutil.rmtree(self.path / "checkpoint", ignore_errors=True)

    def _find_resumable_step(self) -> int:
        """Find the last complete checkpoint up to which all scalars are on disk, and remove all others."""
        step, recorded = 0, count_complete_steps(read_scalars(self.path))
        for checkpoint in (self.path / "checkpoint").glob("step-*"):
            number = int(re.sub(r"\D", "", checkpoint.name) or 0)
            if (checkpoint / ".metadata").is_file() and number <= recorded:  # torch writes .metadata last
                step = max(step, number)
            else:
                shutil.rmtree(checkpoint)
        return step

    def _read(self) -> dict:
        return json.loads(self._state.read_text()) if self._state.is_file() else {}

    def _write(self, finished: bool) -> None:
        new = self._state.with_suffix(".new")
        new.write_text(json.dumps({"fingerprint": self._fingerprint, "finished": finished}, indent=2))
        new.replace(self._state)  # at once: a kill never leaves half a file


@contextmanager
def lock(folder: Path) -> Iterator[int]:
    """Keep other comparisons out of `folder`; runs inherit the file descriptor, so one that is still ending counts.

    Raises: CompareError if another comparison or a run of it is using the folder.
    """
    folder.mkdir(parents=True, exist_ok=True)
    with open(folder / ".lock", "w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise CompareError(f"{folder} is in use by another comparison. Wait for its end, or pass --output-folder.")
        yield file.fileno()


def execute(run: Run, folder: RunFolder, launcher: Path, label: str, lock_fd: int) -> None:
    """Train to the end, with the output appended to the run's log and the progress shown on stderr.

    Args:
        label: how the progress lines call the run.
        lock_fd: of the lock; held until the run's launcher has ended, even if this process is killed.

    Raises: CompareError if the run fails; KeyboardInterrupt, after the run has been stopped.
    """
    progress_file = folder.path / "progress"
    progress_file.unlink(missing_ok=True)
    # runs use this interpreter, whose versions the fingerprint holds
    shell = {name: value for name, value in os.environ.items() if name not in NOT_INHERITED}
    environ = {**shell, "PYTHON": sys.executable, PROGRESS_VARIABLE: str(progress_file.absolute()), **run.environ}
    with open(folder.log, "a") as log:
        process = subprocess.Popen(
            [str(launcher), *run.flags],
            env=environ,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            pass_fds=(lock_fd,),
            start_new_session=True,  # Ctrl-C comes here alone, and this process stops the run in an orderly way
            preexec_fn=_end_with_parent,
        )
    progress = ProgressLine(label, progress_file)
    try:
        while not _has_ended(process, POLL_SECONDS):
            progress.show()
    finally:
        progress.close()
        _stop(process)
    if process.returncode:
        tail = "\n".join(f"    {line}" for line in folder.log.read_text(errors="replace").splitlines()[-15:])
        raise CompareError(f"{label} failed with exit code {process.returncode}:\n{tail}\nThe whole log: {folder.log}")


def _end_with_parent() -> None:
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM)  # even if this process is killed with SIGKILL


def _stop(process: subprocess.Popen) -> None:
    """End the run if it is still there: torchrun passes SIGTERM on to the ranks and waits for them."""
    if process.poll() is not None:
        return
    handlers = {number: signal.signal(number, signal.SIG_IGN) for number in STOP_SIGNALS}  # until it has ended
    os.killpg(process.pid, signal.SIGTERM)
    if not _has_ended(process, STOP_SECONDS):
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    for number, handler in handlers.items():
        signal.signal(number, handler)


def _has_ended(process: subprocess.Popen, seconds: float) -> bool:
    """Wait for the end of `process` for that long at most."""
    try:
        process.wait(seconds)
    except subprocess.TimeoutExpired:
        return False
    return True


class ProgressLine:
    """How far a run is, on stderr: one line that is rewritten on a terminal, elsewhere a new one now and then."""

    def __init__(self, label: str, file: Path) -> None:
        self._label, self._file, self._terminal = label, file, sys.stderr.isatty()
        self._first: tuple[int, float] | None = None  # the first step seen, and when
        self._step, self._shown = "", time.monotonic()  # the last one shown, and when

    def show(self) -> None:
        numbers = self._file.read_text().split() if self._file.exists() else []
        due = self._terminal or time.monotonic() > self._shown + LINE_SECONDS
        if len(numbers) != 2 or numbers[0] == self._step or not due:  # not 2: nothing yet, or read while it was written
            return
        self._step, step, total = numbers[0], *map(int, numbers)
        self._shown = time.monotonic()
        first_step, first_time = self._first = self._first or (step, self._shown)
        # the first step holds the start-up costs, so it does not enter the pace
        seconds = (self._shown - first_time) / max(1, step - first_step) * (total - step)
        left = f", {timedelta(seconds=round(seconds))} left" if step > first_step else ""
        self._print(f"step {step}/{total}{left}")

    def close(self) -> None:
        if self._terminal:
            print("\r\033[K", end="", file=sys.stderr, flush=True)

    def _print(self, text: str) -> None:
        start, end = ("\r\033[K", "") if self._terminal else ("", "\n")
        print(f"{start}{self._label}: {text}", end=end, file=sys.stderr, flush=True)
