"""Checkpoint formats: a DCP folder, a Hugging Face folder of .safetensors files, one .pt file; which one a path is.

Not here: what is in a checkpoint (checkpoint_fit.py), reading (weights.py) and writing one (convert.py).
"""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Literal, NamedTuple

from torch.distributed.checkpoint import CheckpointException

from .checkpoint_folder import DCP_FILE, find_latest, get_fault, get_path, HF_FILE

Format = Literal["dcp", "hf", "pt"]
PT_SUFFIXES = (".pt", ".pth")

DESCRIPTIONS = {
    "dcp": "one step's DCP folder (with .metadata)",
    "hf": "a Hugging Face folder (with model.safetensors or model.safetensors.index.json)",
    "pt": "a .pt file",
}


class CheckpointError(ValueError):
    """A checkpoint that is not there, does not fit the model or cannot be written; one line."""


def describe_failure(error: BaseException) -> str:
    """Return kind and first sentence of an error; of DCP's, which gathers those of all ranks, the first rank's."""
    rank = ""
    if isinstance(error, CheckpointException):
        number, (error, _) = min(error.failures.items())
        rank = f"rank {number}: "
    sentence = f"{type(error).__name__}: {error}".strip().splitlines()[0].partition(". ")[0]
    return rank + sentence.rstrip(".")


class Checkpoint(NamedTuple):
    """A whole checkpoint of one model."""

    format: Format
    path: Path


def find_checkpoint(path: str | Path) -> Checkpoint:
    """Recognize a checkpoint, or in a folder of `step-N` checkpoints the latest one that is whole.

    Raises: CheckpointError, if nothing whole is there.
    """
    path = Path(path)
    if (found := recognize(path)) is not None:
        if found == "dcp" and (fault := get_fault(str(path))):
            raise CheckpointError(f"checkpoint '{path}' {fault}. Take another one.")
        return Checkpoint(found, path)
    expected = f"Expected {', '.join(DESCRIPTIONS.values())}, or a folder of step-N checkpoints."
    if not path.exists():
        raise CheckpointError(f"checkpoint '{path}' not found (looked in {path.absolute()}). {expected}")
    latest, skipped = find_latest(str(path))
    if latest is None:
        faults = f": {'; '.join(skipped)}" if skipped else ""
        raise CheckpointError(f"'{path}' holds no checkpoint{faults}. {expected}")
    for line in skipped:
        logging.getLogger(__name__).warning(f"Checkpoint skipped: {line}.")
    return find_checkpoint(get_path(str(path), latest))


def recognize(path: Path) -> Format | None:
    """Return the format of a finished checkpoint, or None; each has a file that is written last."""
    if path.is_file():
        return "pt" if path.suffix in PT_SUFFIXES else None
    if (path / DCP_FILE).is_file():
        return "dcp"
    if any((path / name).is_file() for name in ("model.safetensors", HF_FILE)):
        return "hf"
    return None
