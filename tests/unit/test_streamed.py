"""The loader of streamed datasets: what it continues, and what it refuses. Oracle: the undisturbed loader."""

import itertools

import pytest
from datasets import Dataset
from torchtitan.config import JobConfig
from torchtitan.hf_datasets import DatasetConfig
from torchtitan.hf_datasets.text_datasets import DATASETS

from test_datasets import get_windows
from torchtitan_simplefsdp.titan.checkpoint_formats import CheckpointError
from torchtitan_simplefsdp.titan.dataloader import build_dataloader

from numbered_corpus import make_lengths, NumberTokenizer


@pytest.fixture(autouse=True)
def streamed(monkeypatch):
    """Make c4 a stream of 40 documents in four shards."""
    documents = Dataset.from_list([{"text": f"{i} {length}"} for i, length in enumerate(make_lengths(40))])
    config = DatasetConfig("", lambda path: documents.to_iterable_dataset(num_shards=4), lambda sample: sample["text"])
    monkeypatch.setitem(DATASETS, "c4", config)


def build(rank=1, degree=2, num_workers=0):
    config = JobConfig()
    config.training.dataset = "c4"
    config.training.seq_len, config.training.local_batch_size = 7, 2
    config.training.dataloader.num_workers = num_workers
    return build_dataloader(degree, rank, NumberTokenizer(), config)


def get_names(*loaders):
    return set().union(*(loader.state_dict() for loader in loaders))


def test_the_same_ranks_continue():
    loader = build()
    iterator = iter(loader)
    consumed = get_windows(itertools.islice(iterator, 3))
    resumed = build()
    resumed.prepare_to_load(get_names(build(0), loader))
    resumed.load_state_dict(loader.state_dict())
    continued = get_windows(itertools.islice(resumed, 3))
    assert consumed + continued == get_windows(itertools.islice(build(), 6))


def test_another_degree_is_refused_with_both_degrees_and_the_way_out():
    message = "'c4' .* dealt to 2 data-parallel ranks; this run has 4. Resume with 2. .*exclude_from_loading dataloader"
    with pytest.raises(CheckpointError, match=message):
        build(rank=3, degree=4).prepare_to_load(get_names(build(0), build(1)))


def test_another_number_of_workers_is_refused():
    with pytest.raises(CheckpointError, match="num_workers=0; this run has 1. Resume with 0. .*exclude_from_loading"):
        build(num_workers=1).load_state_dict(build().state_dict())
    with pytest.raises(CheckpointError, match="num_workers=1; this run has 0. Resume with 1. .*exclude_from_loading"):
        build().load_state_dict(build(num_workers=1).state_dict())


def test_a_checkpoint_without_a_position_of_this_loader_is_refused():
    with pytest.raises(CheckpointError, match="holds no data position"):
        build().prepare_to_load(set())
    with pytest.raises(CheckpointError, match="position is in numbered documents, and dataset 'c4'.*exclude_from_loading"):
        build().prepare_to_load({"sequences_taken", "documents", "streams", "stream_0", "stream_1"})
