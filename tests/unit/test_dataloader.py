"""The training data loader: global batches do not depend on the layout. Oracle: windows dealt on plain lists."""

import itertools
import multiprocessing
import subprocess

import pytest
import torch
from torchtitan.config import JobConfig

from torchtitan_simplefsdp.titan import dataloader
from torchtitan_simplefsdp.titan.dataloader import build_dataloader
from torchtitan_simplefsdp.titan.datasets import register_datasets

from test_datasets import get_expected_windows, get_windows, make_documents, SEQ_LEN, TOKENIZER, write_jsonl

register_datasets()
GLOBAL_BATCH, STEPS = 8, 9


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    return write_jsonl(tmp_path_factory.mktemp("data") / "a.jsonl", make_documents(41))


def build(path, dp_rank, dp_degree, local_batch, global_batch=GLOBAL_BATCH, num_workers=0, prefetch_factor=None):
    config = JobConfig()
    config.training.dataset, config.training.dataset_path = "text", path
    config.training.seq_len, config.training.local_batch_size = SEQ_LEN, local_batch
    config.training.global_batch_size = global_batch
    config.training.dataloader.num_workers = num_workers
    config.training.dataloader.prefetch_factor = prefetch_factor
    return build_dataloader(dp_degree, dp_rank, TOKENIZER, config)


def get_steps(loader, sequences, steps=STEPS):
    """Return the windows of each step, in the order in which the rank takes its `sequences` per step."""
    windows, batches = [], iter(loader)
    while len(windows) < steps * sequences:
        windows += get_windows([next(batches)])
    return [windows[i : i + sequences] for i in range(0, steps * sequences, sequences)]


@pytest.mark.parametrize("dp_degree, local_batch", [(1, 8), (1, 2), (2, 4), (2, 1), (4, 2), (8, 1)])
def test_a_step_has_the_same_sequences_at_any_degree_and_accumulation(path, dp_degree, local_batch):
    mine = GLOBAL_BATCH // dp_degree
    ranks = [get_steps(build(path, rank, dp_degree, local_batch), mine) for rank in range(dp_degree)]
    steps = [list(itertools.chain.from_iterable(parts)) for parts in zip(*ranks)]
    streams = [get_expected_windows(make_documents(41), s, GLOBAL_BATCH, loops=30)[:STEPS] for s in range(GLOBAL_BATCH)]
    assert steps == [list(step) for step in zip(*streams)]


@pytest.mark.parametrize("unset", [-1, -2])
def test_without_a_global_batch_size_a_step_is_one_local_batch_per_rank(path, unset):
    (step,) = get_steps(build(path, 1, 2, local_batch=4, global_batch=unset), 4, steps=1)
    assert step == get_steps(build(path, 0, 1, local_batch=8), 8, steps=1)[0][4:]


@pytest.mark.parametrize("num_workers", [0, 3])  # 3 processes for 4 sequences per rank: a stream is read by all of them
@pytest.mark.parametrize("batches", [4, 6], ids=lambda batches: f"after {batches} batches")
def test_a_resumed_loader_continues_after_the_last_complete_step(path, batches, num_workers):
    expected = get_windows(itertools.islice(build(path, 1, 2, local_batch=1), 20))
    loader = build(path, 1, 2, local_batch=1, num_workers=num_workers)
    iterator = iter(loader)
    assert get_windows(itertools.islice(iterator, batches)) == expected[:batches]
    state = loader.state_dict()
    iterator.close()  # ends the workers, which are some batches ahead
    resumed = build(path, 1, 2, local_batch=1, num_workers=num_workers)
    resumed.load_state_dict(state)
    assert get_windows(itertools.islice(resumed, 16)) == expected[4:20]


def test_batches_are_those_that_torch_would_collate(path):
    loader = build(path, 1, 2, local_batch=2)
    inputs, labels = next(iter(loader))
    for batch in (inputs["input"], labels):
        assert batch.dtype == torch.int64 and batch.shape == (2, SEQ_LEN) and batch.is_contiguous()
    assert inputs.keys() == {"input"}
    assert inputs["input"].untyped_storage().data_ptr() != labels.untyped_storage().data_ptr()


@pytest.mark.parametrize("prefetch_factor, samples", [(None, 8), (3, 12)])
def test_prefetch_factor_counts_batches_of_a_worker(path, prefetch_factor, samples, monkeypatch):
    seen = {}
    monkeypatch.setattr(dataloader, "DataLoader", lambda dataset, **settings: seen.update(settings) or dataset)
    loader = build(path, 0, 2, local_batch=4, num_workers=2, prefetch_factor=prefetch_factor)
    next(iter(loader))
    assert (seen["num_workers"], seen["prefetch_factor"]) == (2, samples)


def test_a_worker_outlives_a_sigterm_that_is_not_its_ranks(path):
    expected = get_windows(itertools.islice(build(path, 1, 2, local_batch=1), 20))
    iterator = iter(build(path, 1, 2, local_batch=1, num_workers=1))
    batches = [next(iterator)]
    (worker,) = multiprocessing.active_children()
    subprocess.run(["kill", str(worker.pid)], check=True)
    batches += itertools.islice(iterator, 19)  # more than were sent ahead
    assert get_windows(batches) == expected
    worker.terminate()
    worker.join(timeout=10)
    assert worker.exitcode == 0


def test_fewer_documents_than_sequences_are_refused(path):
    with pytest.raises(ValueError, match="has 41 documents for 42 sequences per step"):
        build(path, 0, 1, local_batch=42, global_batch=42)
