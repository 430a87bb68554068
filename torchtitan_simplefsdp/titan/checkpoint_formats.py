"""Checkpoint formats: a DCP folder, a Hugging Face folder of .safetensors files, one .pt file; which one a path is.

Not here: what is in a checkpoint (checkpoint_fit.py), reading (weights.py) and writing one (convert.py).
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Literal, NamedTuple

Format = Literal["dcp", "hf", "pt"]
PT_SUFFIXES = (".pt", ".pth")

DESCRIPTIONS = {
    "dcp": "one step's DCP folder (with .metadata)",
    "hf": "a Hugging Face folder (with model.safetensors or model.safetensors.index.json)",
    "pt": "a .pt file",
}


class CheckpointError(ValueError):
    """A checkpoint that is not there, does not fit the model or cannot be written; one line."""


class Checkpoint(NamedTuple):
    """A finished checkpoint of one model."""

    format: Format
    path: Path


def find_checkpoint(path: str | Path) -> Checkpoint:
    """Recognize a checkpoint, or in a folder of `step-N` checkpoints the latest one that is finished.

    Raises: CheckpointError, if nothing finished is there.
    """
    path = Path(path)
    if (found := recognize(path)) is not None:
        return Checkpoint(found, path)
    expected = f"Expected {', '.join(DESCRIPTIONS.values())}, or a folder of step-N checkpoints."
    if not path.exists():
        raise CheckpointError(f"checkpoint '{path}' not found (looked in {path.absolute()}). {expected}")
    steps = {}
    if path.is_dir():
        matches = ((re.fullmatch(r"step-(\d+)", entry.name), entry) for entry in path.iterdir())
        steps = {int(match[1]): entry for match, entry in matches if match}
    for step in sorted(steps, reverse=True):
        if (found := recognize(steps[step])) is not None:
            return Checkpoint(found, steps[step])
    unfinished = f": none of its {len(steps)} step-N folders is finished" if steps else ""
    raise CheckpointError(f"'{path}' holds no checkpoint{unfinished}. {expected}")


def recognize(path: Path) -> Format | None:
    """Return the format of a finished checkpoint, or None; each has a file that is written last."""
    if path.is_file():
        return "pt" if path.suffix in PT_SUFFIXES else None
    if (path / ".metadata").is_file():
        return "dcp"
    if any((path / name).is_file() for name in ("model.safetensors", "model.safetensors.index.json")):
        return "hf"
    return None
