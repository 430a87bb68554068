"""Data loader whose global batches do not depend on the layout: sequence i of a step is the same on any mesh.

torchtitan gives each data-parallel rank a share of the documents, so another number of ranks trains on other batches:
two layouts cannot be compared, nor can a run continue in another one. Here a run's sequences have numbers:

[Note: numbered sequences]
The documents are dealt to S streams, S being the global batch size of the run's first start. Sequence number k of the
run is window k // S of stream k % S. A step of N sequences takes the next N numbers: rank r of W takes the r-th N / W
of them, in microbatches of the local batch size. While N is S, a rank reads the streams of its own sequences and no
others. A resumed run may have another N (the default is the local batch size times the data-parallel degree). S stays,
and a stream may then belong to several ranks: each reads past the windows of the others, which costs tokenizing them.
Data loader workers share a rank's sequences in the same way: each has streams of its own if N is S and their number
divides the sequences per rank.

The position in a checkpoint is how many sequences are taken, and a position in each stream (streams.py). A rank saves
the streams that it reads. Where several read one, they are at different points, DCP keeps any, and any will do: all are
before the windows that are still to be taken. It is the position after the last complete step: a step of which only
some microbatches were handed out is taken again, as the model has not learned from it.

Not here: datasets that cannot seek (streamed.py); validation. With another `seq_len` a resumed run goes on where the
streams' saved positions are: exact if N is S, else some windows are taken twice. The data has no end, so
`persistent_workers` changes nothing.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader, get_worker_info, IterableDataset
from torchtitan.components.dataloader import BaseDataLoader
from torchtitan.components.tokenizer import BaseTokenizer
from torchtitan.config import JobConfig
from torchtitan.config.job_config import Training

from torchtitan_simplefsdp.stop import outlive_sigterm

from .checkpoint_formats import CheckpointError
from .datasets import MAP_STYLE_DATASETS
from .device import is_cpu_only
from .streamed import build_streamed_loader, count_ranks, NO_POSITION, START_OVER
from .streams import Corpus, Position

Batch = tuple[dict[str, torch.Tensor], torch.Tensor]
Sample = tuple[int, Position, np.ndarray]  # stream, the position behind the window, the window


def build_dataloader(
    dp_world_size: int, dp_rank: int, tokenizer: BaseTokenizer, job_config: JobConfig
) -> BaseDataLoader:
    """Build the training data loader of one data-parallel rank; the TrainSpec's `build_dataloader_fn`."""
    training = job_config.training
    if training.dataset.lower() not in MAP_STYLE_DATASETS:
        return build_streamed_loader(dp_world_size, dp_rank, tokenizer, job_config)
    sequences = get_global_batch_size(job_config, dp_world_size)
    corpus = Corpus(training.dataset, training.dataset_path, tokenizer, training.seq_len)
    if len(corpus) < sequences:  # the config check has said so for the datasets that it can count
        raise ValueError(
            f"training.dataset={training.dataset!r} has {len(corpus)} documents for {sequences} sequences per step, "
            "and each needs one. Add documents, or use a smaller global batch."
        )
    return SequenceLoader(corpus, sequences, dp_rank, dp_world_size, training)


def get_global_batch_size(job_config: JobConfig, dp_world_size: int) -> int:
    """Return sequences per optimizer step; a negative `training.global_batch_size` means one local batch per rank."""
    configured = job_config.training.global_batch_size
    return job_config.training.local_batch_size * dp_world_size if configured < 0 else configured


class SequenceLoader(BaseDataLoader):
    """One rank's batches, for ever, and the position of the run in its data. See [Note: numbered sequences].

    Args:
        sequences: of a step, on all ranks; also the number of streams, unless a checkpoint says otherwise.
        training: local_batch_size and the `dataloader` section.
    """

    def __init__(self, corpus: Corpus, sequences: int, dp_rank: int, dp_world_size: int, training: Training) -> None:
        mine = sequences // dp_world_size
        self._corpus = corpus
        self._sequences = sequences
        self._rows = range(dp_rank * mine, (dp_rank + 1) * mine)
        self._local_batch = training.local_batch_size
        self._pin_memory = training.dataloader.pin_memory and not is_cpu_only()
        self._workers: dict[str, Any] = {"num_workers": training.dataloader.num_workers}
        if training.dataloader.num_workers > 0:
            batches = training.dataloader.prefetch_factor or 2  # None: torch's default
            self._workers["prefetch_factor"] = batches * self._local_batch  # samples are what a worker sends
            self._workers["worker_init_fn"] = outlive_sigterm
        self._taken = 0
        self._streams = sequences
        self._positions = {stream: Position() for stream in self._get_own_streams()}

    def __iter__(self) -> Iterator[Batch]:
        sequences = RankSequences(
            self._corpus, self._sequences, self._rows, self._taken, self._streams, dict(self._positions)
        )
        samples = iter(DataLoader(sequences, batch_size=None, collate_fn=_keep, **self._workers))
        microbatches = len(self._rows) // self._local_batch
        while True:
            behind: dict[int, Position] = {}
            for microbatch in range(microbatches):
                batch = list(itertools.islice(samples, self._local_batch))
                behind.update((stream, position) for stream, position, _ in batch)
                if microbatch == microbatches - 1:
                    self._taken += self._sequences
                    self._positions.update(behind)
                yield self._collate([window for _, _, window in batch])

    def state_dict(self) -> dict[str, Any]:
        """Return the position after the last complete step: integers, and a tensor [3] for each stream of this rank."""
        return {
            "sequences_taken": self._taken,
            "documents": len(self._corpus),
            "streams": self._streams,
            **{f"stream_{stream}": torch.tensor(position) for stream, position in self._positions.items()},
        }

    def prepare_to_load(self, saved: set[str]) -> None:
        """Make `state_dict` name what a checkpoint has, for DCP to fill; to be called before DCP loads it.

        Args:
            saved: the keys that the checkpoint holds for the data loader.

        Raises:
            CheckpointError: there is no position, or it is one of torchtitan's own loader.
        """
        if not saved:
            raise CheckpointError(NO_POSITION)
        if "sequences_taken" not in saved:
            raise CheckpointError(
                f"data loader: the checkpoint's data position is that of torchtitan's own loader, dealt to "
                f"{count_ranks(saved)} data-parallel ranks, and cannot be continued here. {START_OVER}"
            )
        # All streams: which of them are this rank's depends on a value, the number of sequences taken.
        self._streams = sum(name.startswith("stream_") for name in saved)
        self._positions = {stream: Position() for stream in range(self._streams)}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continue from a position, at any data-parallel degree and batch size."""
        if state_dict["documents"] != len(self._corpus):
            raise CheckpointError(
                f"data loader: the checkpoint's data position is in a corpus of {state_dict['documents']} documents, "
                f"this run's has {len(self._corpus)}. Train on the same training.dataset and dataset_path. {START_OVER}"
            )
        self._taken = state_dict["sequences_taken"]
        self._streams = state_dict["streams"]
        self._positions = {
            stream: Position(*state_dict[f"stream_{stream}"].tolist()) for stream in self._get_own_streams()
        }

    def _get_own_streams(self) -> list[int]:
        """Return the streams that this rank's sequences come from, in this and all later steps."""
        period = self._streams // math.gcd(self._streams, self._sequences)  # steps after which they come again
        numbers = (self._taken + step * self._sequences + row for step in range(period) for row in self._rows)
        return sorted({number % self._streams for number in numbers})

    def _collate(self, windows: list[np.ndarray]) -> Batch:
        batch = torch.from_numpy(np.stack(windows))
        inputs, labels = batch[:, :-1].contiguous(), batch[:, 1:].contiguous()
        if self._pin_memory:
            inputs, labels = inputs.pin_memory(), labels.pin_memory()
        return {"input": inputs}, labels


class RankSequences(IterableDataset):
    """The sequences of one rank from a position on; worker w of n gives those at w, w + n, w + 2n, ... of them.

    They leave a worker as NumPy arrays: a tensor sent between processes holds a file descriptor while it waits.
    """

    def __init__(
        self, corpus: Corpus, sequences: int, rows: range, taken: int, streams: int, positions: dict[int, Position]
    ) -> None:
        self._corpus = corpus
        self._sequences = sequences
        self._rows = rows
        self._taken = taken
        self._streams = streams
        self._positions = positions

    def __iter__(self) -> Iterator[Sample]:
        worker = get_worker_info()
        first, workers = (worker.id, worker.num_workers) if worker else (0, 1)
        readers: dict[int, Iterator[tuple[np.ndarray, Position]]] = {}
        for i in itertools.count(first, workers):
            step, row = divmod(i, len(self._rows))
            index, stream = divmod(self._taken + step * self._sequences + self._rows[row], self._streams)
            if stream not in readers:
                readers[stream] = self._corpus.read(stream, self._streams, self._positions[stream])
            # Windows before it are other ranks' or workers'.
            window, position = next(read for read in readers[stream] if read[1].windows > index)
            yield stream, position, window


def _keep(sample: Sample) -> Sample:
    return sample
