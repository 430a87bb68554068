"""Checkpoint fit: which tensors that a run wants are missing in a checkpoint or have another shape there.

DCP finds out in the middle of loading, key by key, on every rank, and for a missing key with a traceback per rank.
What a checkpoint holds is in its metadata, which is small; compared before anything is loaded it gives one message.

Not here: loading, and whether a checkpoint is finished.
"""

from __future__ import annotations

import os
import re
from collections.abc import Collection, Mapping

import torch
from torch.distributed.checkpoint import FileSystemReader, HuggingFaceStorageReader, StorageReader
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from .checkpoint_folder import DCP_FILE
from .checkpoint_formats import CheckpointError, describe_failure

SHOWN = 3  # names per line; a wrong flavor differs in hundreds


def get_misfits(
    wanted: Mapping[str, torch.Tensor], saved: Mapping[str, torch.Size | None], all_names: Collection[str] = ()
) -> list[str]:
    """Compare names and global shapes with what is in a checkpoint.

    Args:
        wanted: by the checkpoint's keys: plain FQNs for the model, flattened ones ("optimizer.state....") for the rest.
            Meta tensors and DTensors are fine; dtypes and placements do not matter, loading converts them.
        saved: by the same keys, see `read_shapes`.
        all_names: what all pipeline stages want together; more layers than these in the checkpoint are a misfit as well.

    Returns:
        A line for the missing keys, one for the shapes that differ, one for the layers too many; none if all fits.
    """
    missing = [name for name in wanted if name not in saved]
    reshaped = [name for name, tensor in wanted.items() if name in saved and saved[name] != tensor.shape]
    misfits = []
    if missing:
        misfits.append(f"{len(missing)} of {len(wanted)} keys are missing in the checkpoint: {_list_first(missing)}")
    if reshaped:
        shapes = [f"{name} is {_describe(saved[name])} there and {list(wanted[name].shape)} here" for name in reshaped]
        misfits.append(f"{len(reshaped)} of {len(wanted)} keys have another shape: {_list_first(shapes)}")
    kinds = {_get_kind(name) for name in all_names}
    surplus = [name for name in saved if name not in all_names and _get_kind(name) in kinds]
    if surplus:
        misfits.append(f"{len(surplus)} keys of the checkpoint are layers too many here: {_list_first(surplus)}")
    return misfits


def read_shapes(path: str | os.PathLike) -> dict[str, torch.Size | None]:
    """Return the global shape of everything in a checkpoint by its key; None for what is not a tensor. Reads no tensor.

    Args:
        path: one step's DCP folder; a folder with Hugging Face's .safetensors files and their names; a .pt file.

    Raises:
        CheckpointError: it cannot be read.
    """
    try:
        if os.path.isfile(path):
            saved = torch.load(path, mmap=True, weights_only=True)
            return {name: value.shape if isinstance(value, torch.Tensor) else None for name, value in saved.items()}
        saved = _get_reader(path).read_metadata().state_dict_metadata
    except Exception as error:  # what was cut off, or is something else, raises almost anything
        raise CheckpointError(f"'{path}' cannot be read ({describe_failure(error)}). Take another one.") from error
    return {name: entry.size if isinstance(entry, TensorStorageMetadata) else None for name, entry in saved.items()}


def _get_reader(path: str | os.PathLike) -> StorageReader:
    is_dcp = os.path.isfile(os.path.join(path, DCP_FILE))
    return FileSystemReader(path) if is_dcp else HuggingFaceStorageReader(os.fspath(path))


def _get_kind(name: str) -> str:
    """Return a key without its numbers: the same parameter of all layers."""
    return re.sub(r"\d+", "N", name)


def _list_first(entries: list[str]) -> str:
    more = len(entries) - SHOWN
    return ", ".join(entries[:SHOWN]) + (f" and {more} more" if more > 0 else "")


def _describe(shape: torch.Size | None) -> str:
    return "no tensor" if shape is None else str(list(shape))
