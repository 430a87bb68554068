"""Checkpoint fit: which tensors that a run wants are missing in a checkpoint or have another shape there.

DCP finds out in the middle of loading, key by key, on every rank, and for a missing key with a traceback per rank. What a
checkpoint holds is in its metadata, which is small; compared before anything is loaded it gives one message.

Not here: loading, and whether a checkpoint is finished.
"""

from __future__ import annotations

import os
from collections.abc import Mapping

import torch
from torch.distributed.checkpoint import FileSystemReader, HuggingFaceStorageReader, StorageReader
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

SHOWN = 3  # names per line; a wrong flavor differs in hundreds


def get_misfits(wanted: Mapping[str, torch.Tensor], path: str | os.PathLike) -> list[str]:
    """Compare names and global shapes with what is in a checkpoint, whose tensor data is not read.

    Args:
        wanted: by the checkpoint's keys: plain FQNs for the model, flattened ones ("optimizer.state....") for the rest.
            Meta tensors and DTensors are fine; dtypes and placements do not matter, loading converts them.
        path: one step's DCP folder, or a folder with Hugging Face's .safetensors files and their names.

    Returns:
        One line for the missing keys and one for the shapes that differ; empty if everything fits.
    """
    saved = read_shapes(_get_reader(path))
    missing = [name for name in wanted if name not in saved]
    reshaped = [name for name, tensor in wanted.items() if name in saved and saved[name] != tensor.shape]
    misfits = []
    if missing:
        misfits.append(f"{len(missing)} of {len(wanted)} keys are missing in the checkpoint: {_list_first(missing)}")
    if reshaped:
        shapes = [f"{name} is {_describe(saved[name])} there and {list(wanted[name].shape)} here" for name in reshaped]
        misfits.append(f"{len(reshaped)} of {len(wanted)} have another shape: {_list_first(shapes)}")
    return misfits


def read_shapes(reader: StorageReader) -> dict[str, torch.Size | None]:
    """Return the global shape of everything in a checkpoint by its key; None for what is not a tensor."""
    saved = reader.read_metadata().state_dict_metadata
    return {name: entry.size if isinstance(entry, TensorStorageMetadata) else None for name, entry in saved.items()}


def _get_reader(path: str | os.PathLike) -> StorageReader:
    is_dcp = os.path.isfile(os.path.join(path, ".metadata"))
    return FileSystemReader(path) if is_dcp else HuggingFaceStorageReader(os.fspath(path))


def _list_first(entries: list[str]) -> str:
    more = len(entries) - SHOWN
    return ", ".join(entries[:SHOWN]) + (f" and {more} more" if more > 0 else "")


def _describe(shape: torch.Size | None) -> str:
    return "no tensor" if shape is None else str(list(shape))
