"""Data loader whose global batches do not depend on the layout: sequence i of a step is the same on any mesh.

torchtitan gives each data-parallel rank a share of the documents, so another number of ranks trains on other batches, and
two layouts cannot be compared. Here each of the `global_batch_size` sequences of a step has a share, which it reads from
step to step, and a rank (or a microbatch of accumulation) takes its part of the sequences. So a rank reads only the documents
of its own sequences; it keeps the open end of a document for each of them, and there must be as many documents as sequences.

Not here: streamed datasets (c4), which torchtitan's own loader deals to ranks; validation.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from dataclasses import asdict
from typing import Any

import torch
from datasets.distributed import split_dataset_by_node
from torch.distributed.checkpoint.stateful import Stateful
from torch.utils.data import IterableDataset
from torchtitan.components.dataloader import ParallelAwareDataloader
from torchtitan.components.tokenizer import BaseTokenizer
from torchtitan.config import JobConfig
from torchtitan.hf_datasets.text_datasets import HuggingFaceTextDataset, build_text_dataloader

from .datasets import MAP_STYLE_DATASETS

Sample = tuple[dict[str, torch.Tensor], torch.Tensor]


def build_dataloader(
    dp_world_size: int, dp_rank: int, tokenizer: BaseTokenizer, job_config: JobConfig
) -> ParallelAwareDataloader:
    """Build the training data loader of one data-parallel rank; the TrainSpec's `build_dataloader_fn`."""
    training = job_config.training
    if training.dataset.lower() not in MAP_STYLE_DATASETS:
        return build_text_dataloader(dp_world_size, dp_rank, tokenizer, job_config)
    sequences = get_global_batch_size(job_config, dp_world_size)
    mine = sequences // dp_world_size
    corpus = HuggingFaceTextDataset(
        training.dataset, training.dataset_path, tokenizer, training.seq_len, infinite=True
    )
    if len(corpus._data) < sequences:  # the config check has said so for the datasets that it can count
        raise ValueError(
            f"training.dataset={training.dataset!r} has {len(corpus._data)} documents for {sequences} sequences per step, and "
            "each needs one. Add documents, or use a smaller global batch."
        )
    streams = [_take_share(corpus, sequence, sequences) for sequence in range(dp_rank * mine, (dp_rank + 1) * mine)]
    kwargs = {**asdict(training.dataloader), "batch_size": training.local_batch_size}
    return ParallelAwareDataloader(RoundRobin(streams), dp_rank=dp_rank, dp_world_size=dp_world_size, **kwargs)


def _take_share(corpus: HuggingFaceTextDataset, sequence: int, sequences: int) -> HuggingFaceTextDataset:
    """Return a stream of one contiguous share of the documents; building one per share would index them each time."""
    stream = copy.copy(corpus)
    stream._data = split_dataset_by_node(corpus._data, rank=sequence, world_size=sequences)
    stream._token_buffer = []
    return stream


def get_global_batch_size(job_config: JobConfig, dp_world_size: int) -> int:
    """Return sequences per optimizer step; a negative `training.global_batch_size` means one local batch per rank."""
    configured = job_config.training.global_batch_size
    return job_config.training.local_batch_size * dp_world_size if configured < 0 else configured


class RoundRobin(IterableDataset, Stateful):
    """Takes one sample from each endless stream in turn; its state is that of the streams and whose turn it is."""

    def __init__(self, streams: list[HuggingFaceTextDataset]) -> None:
        self._streams = streams
        self._turn = 0

    def __iter__(self) -> Iterator[Sample]:
        iterators = [iter(stream) for stream in self._streams]
        while True:
            iterator = iterators[self._turn]
            self._turn = (self._turn + 1) % len(iterators)
            yield next(iterator)

    def state_dict(self) -> dict[str, Any]:
        """Return the position: a copy, as a worker sends it from a thread while streams extend their token lists."""
        return copy.deepcopy({"turn": self._turn, "streams": [stream.state_dict() for stream in self._streams]})

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continue from a position; that of another number of streams per rank is refused."""
        streams = state_dict.get("streams", [])
        if len(streams) != len(self._streams):
            raise ValueError(
                f"data loader: the checkpoint has {len(streams) or 'no'} sequences per rank and step, this run "
                f"{len(self._streams)}. Keep training.global_batch_size and the data-parallel degree, or start the data over "
                "with --checkpoint.exclude_from_loading dataloader."
            )
        self._turn = state_dict["turn"]
        for stream, state in zip(self._streams, streams):
            stream.load_state_dict(state)
