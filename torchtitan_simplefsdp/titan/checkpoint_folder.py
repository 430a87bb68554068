"""Checkpoint folder: which of its steps can be resumed from, and what is wrong with the others.

A save writes every rank's file first and `.metadata` last, so a step without it was interrupted. A file that lost its end
afterwards (a full disk, a copy that was cut off) shows in its size, since `.metadata` says where each tensor lies.

Not here: whether a checkpoint fits the run (checkpoint_fit.py); loading (checkpoint.py).
"""

from __future__ import annotations

import os
import re
from collections import defaultdict

from torch.distributed.checkpoint import FileSystemReader

DCP_FILE = ".metadata"
HF_FILE = "model.safetensors.index.json"


def find_steps(folder: str) -> list[int]:
    """Return the steps that have a folder of their own, ascending; the folder need not exist."""
    names = os.listdir(folder) if os.path.isdir(folder) else []
    return sorted(int(match[1]) for match in (re.fullmatch(r"step-(\d+)", name) for name in names) if match)


def find_saved_steps(folder: str) -> list[int]:
    """Return the steps whose save came to its end, ascending. Looks for a file only."""
    return [step for step in find_steps(folder) if os.path.isfile(os.path.join(get_path(folder, step), DCP_FILE))]


def get_path(folder: str, step: int) -> str:
    return os.path.join(folder, f"step-{step}")


def find_latest(folder: str) -> tuple[int | None, list[str]]:
    """Find the newest step that is whole.

    Returns:
        It (None if there is none), and a line for each newer one that is not: which, and why.
    """
    skipped = []
    for step in reversed(find_steps(folder)):
        fault = get_fault(get_path(folder, step))
        if fault is None:
            return step, skipped
        skipped.append(f"step-{step} {fault}")
    return None, skipped


def get_fault(path: str) -> str | None:
    """Say what keeps a step's folder from being loaded, by the sizes of its files; None: nothing does.

    Weights in Hugging Face's format are whole, though no run can go on from them.
    """
    if not os.path.isdir(path):
        return "is no folder" if os.path.exists(path) else "does not exist"
    if not os.path.isfile(os.path.join(path, DCP_FILE)):
        return None if os.path.isfile(os.path.join(path, HF_FILE)) else f"was not finished (no {DCP_FILE})"
    try:
        entries = FileSystemReader(path).read_metadata().storage_data.values()
    except Exception as error:  # unpickling what was cut off raises almost anything
        return f"has a {DCP_FILE} that cannot be read ({type(error).__name__}: {error})"
    sizes: dict[str, int] = defaultdict(int)
    for entry in entries:
        sizes[entry.relative_path] = max(sizes[entry.relative_path], entry.offset + entry.length)
    for name, size in sorted(sizes.items()):
        file = os.path.join(path, name)
        if not os.path.isfile(file):
            return f"lacks the file {name}"
        if os.path.getsize(file) < size:
            return f"has a file that was cut off: {name} has {os.path.getsize(file)} of {size} bytes"
    return None
