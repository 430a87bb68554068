"""torchtitan's own loader for streamed datasets (c4), which says what it cannot continue before anything is loaded.

A streamed dataset cannot seek: torchtitan deals it to ranks and data loader workers, each with a position of its own.
With another number of either that position means nothing, and torchtitan stops at a missing key or a bare assertion.

Not here: numbered documents, whose position travels (dataloader.py).
"""

from __future__ import annotations

import pickle
from dataclasses import asdict
from typing import Any

from torchtitan.components.dataloader import ParallelAwareDataloader
from torchtitan.components.tokenizer import BaseTokenizer
from torchtitan.config import JobConfig
from torchtitan.hf_datasets.text_datasets import HuggingFaceTextDataset

from torchtitan_simplefsdp.stop import outlive_sigterm

from .checkpoint_formats import CheckpointError

START_OVER = "To start the data over, add --checkpoint.exclude_from_loading dataloader."
NO_POSITION = f"data loader: the checkpoint holds no data position (a model alone?). {START_OVER}"


def build_streamed_loader(
    dp_world_size: int, dp_rank: int, tokenizer: BaseTokenizer, job_config: JobConfig
) -> StreamedLoader:
    """Build torchtitan's training loader of one data-parallel rank, as its `build_text_dataloader` does."""
    training = job_config.training
    dataset = HuggingFaceTextDataset(
        training.dataset, training.dataset_path, tokenizer, training.seq_len, dp_rank, dp_world_size, infinite=True
    )
    kwargs = {**asdict(training.dataloader), "batch_size": training.local_batch_size, "worker_init_fn": outlive_sigterm}
    return StreamedLoader(dataset, dp_rank=dp_rank, dp_world_size=dp_world_size, **kwargs)


def count_ranks(saved: set[str]) -> int:
    """Return to how many data-parallel ranks torchtitan's loader dealt the data, from its keys in a checkpoint."""
    return sum(name.startswith("dp_rank_") for name in saved)


class StreamedLoader(ParallelAwareDataloader):
    """torchtitan's loader; a position of another number of ranks or workers is refused with the way out."""

    def prepare_to_load(self, saved: set[str]) -> None:
        """Raise if a checkpoint with these keys for the data loader cannot be continued; see SequenceLoader's."""
        if not saved:
            raise CheckpointError(NO_POSITION)
        name = self.dataset.dataset_name
        ranks = count_ranks(saved)
        if ranks == 0:
            raise CheckpointError(
                f"data loader: the checkpoint's data position is in numbered documents, and dataset {name!r} is read "
                f"by torchtitan's own loader. {START_OVER}"
            )
        if ranks != self.dp_world_size:
            raise CheckpointError(
                f"data loader: dataset {name!r} cannot seek, and its position was dealt to {ranks} data-parallel "
                f"ranks; this run has {self.dp_world_size}. Resume with {ranks}. {START_OVER}"
            )

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continue from a position; that of another number of data loader workers is refused."""
        position = pickle.loads(state_dict[self._rank_id])
        # torchdata's state has snapshots of the workers, if there are any.
        workers = position["_snapshot"]["_main_snapshot"]["_num_workers"] if "_snapshot" in position else 0
        if workers != self.num_workers:
            raise CheckpointError(
                f"data loader: dataset {self.dataset.dataset_name!r} cannot seek, and its position was saved with "
                f"training.dataloader.num_workers={workers}; this run has {self.num_workers}. Resume with {workers}. "
                f"{START_OVER}"
            )
        super().load_state_dict(state_dict)
