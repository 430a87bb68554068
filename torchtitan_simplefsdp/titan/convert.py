"""Conversion of a model's weights between checkpoint formats: DCP, Hugging Face's safetensors, one .pt file.

One process on the CPU. A DCP target holds about two weights in memory at a time and a Hugging Face one the weights of one file
(FILE_BYTES); a .pt file is written in one go and needs all of them. The target appears under its name when it is complete.

Not here: the command line (scripts/convert_checkpoint.py), and the state of training, which only DCP holds.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch.distributed.checkpoint import CheckpointException, DefaultSavePlanner, FileSystemWriter
from torch.distributed.checkpoint.metadata import MetadataIndex
from torchtitan.config import JobConfig

from .checkpoint_folder import HF_FILE
from .checkpoint_formats import Checkpoint, CheckpointError, describe_failure, Format, PT_SUFFIXES
from .hf_assets import write_hf_assets
from .weights import build_adapter, build_meta_model, get_model_args, validate_fit, WeightReader

FILE_BYTES = 5 * 10**9  # of one .safetensors file, as usual on the Hugging Face hub

Read = Callable[[str], torch.Tensor]


def convert(job_config: JobConfig, source: Checkpoint, target: Path, to: Format, dtype: torch.dtype | None) -> None:
    """Write the weights of a checkpoint to `target` in another format, for "hf" with what `transformers` needs beside them.

    Args:
        target: a path that does not exist; a file for "pt", else a folder.
        dtype: of the weights written; None: that of the source.

    Raises: CheckpointError, with nothing written.
    """
    if (target.suffix in PT_SUFFIXES) != (to == "pt"):
        raise CheckpointError(f"'{target}' is no name for format {to!r}: a name ends in .pt if and only if it is that.")
    if target.exists():
        raise CheckpointError(f"'{target}' exists. Remove it, or choose another name.")
    model_args = get_model_args(job_config)
    adapter = build_adapter(job_config, model_args)
    wanted = build_meta_model(job_config, model_args).state_dict()
    validate_fit(wanted, source, adapter, job_config.model.flavor)
    reader = WeightReader(wanted, source, adapter)
    wanted = {name: tensor.to(dtype or reader.get_dtype(name)) for name, tensor in wanted.items()}

    def read(name: str) -> torch.Tensor:
        return reader.read(name).to(wanted[name].dtype)

    partial = target.with_name(f".{target.name}.partial")
    try:
        remove(partial)  # of an earlier conversion that was killed
        target.parent.mkdir(parents=True, exist_ok=True)
        if to == "pt":
            torch.save({name: read(name) for name in wanted}, partial)
        elif to == "dcp":
            write_dcp(partial, wanted, read)
        else:
            partial.mkdir()
            write_safetensors(partial, wanted, read, adapter.to_hf)
            saved_dtype = next(iter(wanted.values())).dtype
            write_hf_assets(partial, model_args, job_config.model.hf_assets_path, saved_dtype)
        if target.exists():
            raise CheckpointError(f"'{target}' has been made by another process. Nothing is written.")
        os.rename(partial, target)
    except (OSError, RuntimeError, CheckpointException, SafetensorError) as error:  # what a full disk looks like
        raise CheckpointError(
            f"converting '{source.path}' to '{target}' failed ({describe_failure(error)}). Nothing of it is left. Is the source "
            "whole, is there room, and may you write there?"
        ) from error
    finally:
        remove(partial)


def remove(path: Path) -> None:
    """Remove a file or folder, if it is there."""
    if path.is_dir():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def write_dcp(folder: Path, wanted: Mapping[str, torch.Tensor], read: Read) -> None:
    """Write a DCP folder, reading each weight when its turn comes. `wanted`: on meta, in the dtypes to write."""
    # a file for each weight: the writer keeps what goes into one file until that is complete
    writer = FileSystemWriter(folder, single_file_per_rank=False)
    dcp.save(dict(wanted), storage_writer=writer, planner=_ReadingPlanner(read), no_dist=True)


class _ReadingPlanner(DefaultSavePlanner):
    """Plans with meta tensors and reads the data when it is about to be written."""

    def __init__(self, read: Read) -> None:
        super().__init__()
        self._read = read

    def lookup_object(self, index: MetadataIndex) -> torch.Tensor:
        return self._read(index.fqn)


def write_safetensors(
    folder: Path,
    wanted: Mapping[str, torch.Tensor],
    read: Read,
    to_hf: Callable[[dict[str, Any]], dict[str, Any]],
) -> None:
    """Write .safetensors files of at most FILE_BYTES (or one weight) each, with an index if there are several."""
    files: list[list[str]] = [[]]
    size = 0
    for name, tensor in wanted.items():
        if files[-1] and size + tensor.nbytes > FILE_BYTES:
            files.append([])
            size = 0
        files[-1].append(name)
        size += tensor.nbytes
    weight_map = {}
    for number, names in enumerate(files, start=1):
        file = "model.safetensors" if len(files) == 1 else f"model-{number:05}-of-{len(files):05}.safetensors"
        state = to_hf({name: read(name) for name in names})
        state = {name: tensor.contiguous() for name, tensor in state.items()}
        save_file(state, folder / file, metadata={"format": "pt"})
        (folder / file).chmod(folder.stat().st_mode & 0o666)  # save_file keeps others from reading it
        weight_map |= dict.fromkeys(state, file)
    if len(files) > 1:
        total_size = sum(tensor.nbytes for tensor in wanted.values())
        index = {"metadata": {"total_size": total_size}, "weight_map": weight_map}
        (folder / HF_FILE).write_text(json.dumps(index, indent=2) + "\n")
