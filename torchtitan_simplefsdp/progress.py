"""The progress bar of a run: a rank writes how far it is, the launcher draws it below the ranks' lines.

A rank cannot draw it: its output reaches the terminal through a file that torchrun reads line by line, with a prefix
before each line, and a carriage return counts as the end of one. So the launcher, which owns the terminal, draws.
Without a terminal there is no file, no bar and no cost. Imports neither torch nor torchtitan.

Not here: the step lines and the ETA (titan/metrics.py).
"""

import os
import sys
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from pathlib import Path
from typing import TextIO

from tqdm import tqdm

PROGRESS_VARIABLE = "SIMPLEFSDP_PROGRESS"
"""Environment variable of the ranks: path of the file in which local rank 0 says how far it is."""

POLL_SECONDS = 0.2


def report_progress(step: int, total_steps: int) -> None:
    """Tell the launcher that `step` of `total_steps` optimizer steps are done; every rank calls it after every step."""
    path = os.environ.get(PROGRESS_VARIABLE)
    if path and os.environ.get("LOCAL_RANK") == "0":
        Path(path).write_text(f"{step} {total_steps}\n")


class _LinesAboveBar:
    """Text stream that prints whole lines above the bar; several threads of torchrun write to it."""

    def __init__(self, terminal: TextIO) -> None:
        self._terminal, self._pending, self._lock = terminal, "", threading.Lock()

    def write(self, text: str) -> int:
        with self._lock:
            *lines, self._pending = (self._pending + text).split("\n")
            for line in lines:
                tqdm.write(line, file=self._terminal)
        return len(text)

    def flush(self) -> None:  # an unfinished line waits for its end: the bar would be drawn into it
        self._terminal.flush()

    def isatty(self) -> bool:
        return True

    def close(self) -> None:
        if self._pending:
            self.write("\n")


def _draw(progress_file: Path, terminal: TextIO, stopped: threading.Event) -> None:
    bar = None
    while not stopped.wait(POLL_SECONDS):
        numbers = progress_file.read_text().split()
        if len(numbers) != 2:  # nothing yet, or read while it was written
            continue
        step, total_steps = map(int, numbers)
        # The bar starts at the first step seen, so that neither start-up nor a resumed run's past enters its rate.
        bar = bar or tqdm(initial=step, total=total_steps, unit="step", file=terminal, dynamic_ncols=True, leave=False)
        bar.update(step - bar.n)
    if bar:
        bar.close()


@contextmanager
def show_progress(folder: Path) -> Iterator[None]:
    """Draw the bar while the context runs, if stderr is a terminal. `folder` holds the progress file meanwhile."""
    if not sys.stderr.isatty():
        yield
        return
    terminal, stopped = sys.stderr, threading.Event()
    stdout, stderr = _LinesAboveBar(terminal), _LinesAboveBar(terminal)
    with tempfile.NamedTemporaryFile(dir=folder, prefix="progress_") as file:
        os.environ[PROGRESS_VARIABLE] = file.name
        thread = threading.Thread(target=_draw, args=(Path(file.name), terminal, stopped))
        thread.start()
        try:
            # stdout goes above the bar as well, unless it leads elsewhere.
            with redirect_stderr(stderr), redirect_stdout(stdout if sys.stdout.isatty() else sys.stdout):
                yield
        finally:
            stopped.set()
            thread.join()
            del os.environ[PROGRESS_VARIABLE]
            stdout.close()
            stderr.close()
