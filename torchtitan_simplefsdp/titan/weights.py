"""Weights: the model of a configuration, and its weights from a checkpoint of any format and layout, by plain FQNs.

Reading needs no process group: every rank takes its own shards from the files.

Not here: the state of training (optimizer, position in the data), and writing (convert.py).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint import FileSystemReader, HuggingFaceStorageReader
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.tensor import distribute_tensor, DTensor
from torchtitan.config import JobConfig, TORCH_DTYPE_MAP
from torchtitan.models.llama3 import TransformerModelArgs
from torchtitan.protocols.state_dict_adapter import StateDictAdapter
from torchtitan.protocols.train_spec import get_train_spec
from torchtitan.tools.utils import set_default_dtype

from .checkpoint_fit import get_misfits, read_shapes
from .checkpoint_formats import Checkpoint, CheckpointError

NO_DIST_WARNING = "torch.distributed is disabled, unavailable or uninitialized"
"""What torch warns of when a checkpoint is read or written without a process group, as it is meant here."""


def get_model_args(job_config: JobConfig) -> TransformerModelArgs:
    """Return the architecture of the configured flavor, a copy.

    Raises: CheckpointError, for a model that is not Llama 3.
    """
    model = job_config.model
    model_args = get_train_spec(model.name).model_args[model.flavor]
    if not isinstance(model_args, TransformerModelArgs):
        raise CheckpointError(f"model.name={model.name!r} is no Llama 3 model; generating and converting know only these.")
    model_args = replace(model_args)
    model_args.update_from_config(job_config)
    return model_args


def build_meta_model(job_config: JobConfig, model_args: TransformerModelArgs) -> nn.Module:
    """Build the model on meta, in `training.dtype`."""
    dtype = TORCH_DTYPE_MAP[job_config.training.dtype]
    with torch.device("meta"), set_default_dtype(dtype):
        return get_train_spec(job_config.model.name).model_cls(model_args)


def build_adapter(job_config: JobConfig, model_args: TransformerModelArgs) -> StateDictAdapter:
    """Build what translates names and weights to and from Hugging Face's."""
    return get_train_spec(job_config.model.name).state_dict_adapter(model_args, job_config.model.hf_assets_path)


def validate_fit(
    wanted: Mapping[str, torch.Tensor], checkpoint: Checkpoint, adapter: StateDictAdapter, flavor: str
) -> None:
    """Raise CheckpointError, in one line, unless a checkpoint can be read and holds the weights of exactly this model.

    `wanted`: all weights of the model by plain FQN; meta tensors do.
    """
    if checkpoint.format == "hf":
        wanted = adapter.to_hf(dict(wanted))
    misfits = get_misfits(wanted, read_shapes(checkpoint.path), all_names=wanted)
    if misfits:
        raise CheckpointError(
            f"'{checkpoint.path}' does not fit model.flavor={flavor!r}: {'; '.join(misfits)}. "
            "Pass the --model.flavor (and --config) that it was trained with."
        )


def load_weights(state: dict[str, torch.Tensor], checkpoint: Checkpoint, adapter: StateDictAdapter) -> None:
    """Read a checkpoint that fits into tensors or DTensors in place, converting dtypes."""
    if checkpoint.format == "dcp":
        dcp.load(state, storage_reader=FileSystemReader(checkpoint.path), no_dist=True)
        return
    if checkpoint.format == "hf":
        hf_state = adapter.to_hf(state)
        dcp.load(hf_state, storage_reader=HuggingFaceStorageReader(str(checkpoint.path)), no_dist=True)
        loaded = adapter.from_hf(hf_state)
    else:
        loaded = torch.load(checkpoint.path, mmap=True, weights_only=True)
    with torch.no_grad():
        for name, tensor in state.items():
            source = loaded[name]
            if isinstance(tensor, DTensor) and not isinstance(source, DTensor):
                source = distribute_tensor(
                    source.to(tensor.device), tensor.device_mesh, tensor.placements, src_data_rank=None
                )
            tensor.copy_(source)


class WeightReader:
    """Reads weights of a checkpoint that fits one at a time, so that memory need not hold the model."""

    def __init__(
        self, wanted: Mapping[str, torch.Tensor], checkpoint: Checkpoint, adapter: StateDictAdapter
    ) -> None:
        self._adapter, self._is_hf = adapter, checkpoint.format == "hf"
        self._state, self._reader = None, None
        if checkpoint.format == "pt":
            self._state = torch.load(checkpoint.path, mmap=True, weights_only=True)
        else:
            self._reader = (_HFReader if self._is_hf else _DCPReader)(str(checkpoint.path))
        self._keys = {name: next(iter(adapter.to_hf({name: wanted[name]}))) if self._is_hf else name for name in wanted}

    def get_dtype(self, name: str) -> torch.dtype:
        """Return the dtype that the checkpoint has a weight in."""
        return self._state[name].dtype if self._state is not None else self._get_entry(name).properties.dtype

    def read(self, name: str) -> torch.Tensor:
        """Return a weight by its plain FQN, whole and in the checkpoint's dtype."""
        if self._state is not None:
            return self._state[name]
        entry = self._get_entry(name)
        state = {self._keys[name]: torch.empty(entry.size, dtype=entry.properties.dtype)}
        dcp.load(state, storage_reader=self._reader, no_dist=True)
        return (self._adapter.from_hf(state) if self._is_hf else state)[name]

    def _get_entry(self, name: str) -> dcp.TensorStorageMetadata:
        return self._reader.read_metadata().state_dict_metadata[self._keys[name]]


class _MetadataReadOnce:
    """Keeps the metadata, which DCP reads anew for every load."""

    _metadata: Metadata | None = None

    def read_metadata(self) -> Metadata:
        if self._metadata is None:
            self._metadata = super().read_metadata()
        return self._metadata


class _DCPReader(_MetadataReadOnce, FileSystemReader):
    pass


class _HFReader(_MetadataReadOnce, HuggingFaceStorageReader):
    pass
