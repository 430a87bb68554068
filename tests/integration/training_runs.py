"""Real ./run_train.sh runs for the integration tests, and what they wrote."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import NamedTuple

from torchtitan_simplefsdp.compare.scalars import find_event_files, METRICS, read_events

REPOSITORY = Path(__file__).resolve().parents[2]
LOSS, GRAD_NORM = METRICS["loss"], METRICS["grad_norm"]

# the same 8 sequences of 128 tokens in a step, on every layout
BASE_FLAGS = ["--training.steps", "5", "--training.seq_len", "128", "--training.global_batch_size", "8"]


def run_train(ngpu: int, *flags: str, cwd: Path, **environ: str) -> subprocess.CompletedProcess:
    """Start ./run_train.sh as a user would and wait for its end."""
    environment = {name: value for name, value in os.environ.items() if name not in ("CONFIG_FILE", "LOG_RANK")}
    environment |= {"NGPU": str(ngpu), "PYTHON": sys.executable, **environ}
    return subprocess.run(
        [str(REPOSITORY / "run_train.sh"), *flags], cwd=cwd, env=environment, text=True, capture_output=True, timeout=600
    )


class Result(NamedTuple):
    scalars: dict[str, list[float]]
    log: str


class Runs:
    """Trains each layout once per session and remembers what it wrote."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._results: dict[tuple, Result] = {}

    def get_scalars(self, ngpu: int, *flags: str) -> dict[str, list[float]]:
        """Return loss and gradient norm of every step, in the precision that TensorBoard keeps (float32)."""
        return self.get_result(ngpu, *flags).scalars

    def get_printed_losses(self, ngpu: int, *flags: str) -> list[str]:
        """Return the losses in the step lines that the user sees, which rank 0 prints."""
        lines = (line for line in self.get_result(ngpu, *flags).log.splitlines() if "step:" in line)
        return [line.split("loss:")[1].split()[0] for line in lines]

    def get_result(self, ngpu: int, *flags: str, seed: str | None = "42") -> Result:
        """Return scalars and output of a run; `seed=None` sets none."""
        key = (ngpu, *flags, seed)
        if key not in self._results:
            folder = Path(tempfile.mkdtemp(dir=self._folder))  # a new one also after a run that failed
            seed_flags = [] if seed is None else ["--debug.seed", seed]
            result = run_train(ngpu, *BASE_FLAGS, *seed_flags, *flags, cwd=folder)
            assert result.returncode == 0, f"{' '.join(flags)}\n{result.stdout}\n{result.stderr}"
            self._results[key] = Result(read_scalars(folder / "outputs" / "tb"), result.stdout)
        return self._results[key]


def read_scalars(folder: Path) -> dict[str, list[float]]:
    (event_file,) = find_event_files(folder)  # one writer
    return {tag: [e.value for e in events] for tag, events in read_events(event_file, METRICS.values()).items()}
