"""Datasets `pydoc` and `text` in torchtitan's loaders. Oracle: `get_expected_windows`, on plain lists."""

import functools
import itertools
import json
import pickle
import sys
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from torchtitan.components.tokenizer import HuggingFaceTokenizer
from torchtitan.config import JobConfig
from torchtitan.hf_datasets.text_datasets import (
    build_text_dataloader,
    build_text_validation_dataloader,
    DATASETS,
)

import torchtitan_simplefsdp
from torchtitan_simplefsdp.titan.corpus import get_pydoc_documents
from torchtitan_simplefsdp.titan.datasets import load_text, register_datasets, validate_dataset

register_datasets()
TOKENIZER = HuggingFaceTokenizer(str(Path(torchtitan_simplefsdp.__file__).parent / "assets/tokenizer"))
SEQ_LEN = 64
BATCH = 2


def write_jsonl(path, documents):
    path.write_text("".join(json.dumps({"id": i, "text": text}) + "\n" for i, text in enumerate(documents)))
    return str(path)


def make_documents(count):
    """Documents of 1 to 60 words, all different, some longer than a window and most shorter."""
    return [f"document {i}: " + " ".join(str(i * j) for j in range(i * 7 % 60 + 1)) for i in range(count)]


@functools.cache
def get_tokens(text):
    return [TOKENIZER.bos_id, *TOKENIZER.tokenizer.encode(text).ids, TOKENIZER.eos_id]


def get_expected_windows(documents, dp_rank, dp_world_size, loops=1):
    """Windows of one rank: a contiguous share, the first ranks one document more, no gap between loops."""
    quotient, rest = divmod(len(documents), dp_world_size)
    begin = dp_rank * quotient + min(dp_rank, rest)
    share = documents[begin : begin + quotient + (dp_rank < rest)]
    stream = [token for text in share * loops for token in get_tokens(text)]
    size = SEQ_LEN + 1
    return [stream[i : i + size] for i in range(0, len(stream) - size + 1, size)]


def build_loader(dataset, path, dp_rank=0, dp_world_size=1, infinite=True, num_workers=0, batch=BATCH):
    config = JobConfig()
    config.training.dataset, config.training.dataset_path = dataset, path
    config.training.seq_len, config.training.local_batch_size = SEQ_LEN, batch
    config.training.dataloader.num_workers = num_workers
    return build_text_dataloader(dp_world_size, dp_rank, TOKENIZER, config, infinite)


def get_windows(batches):
    """Undo the batching and the shift by one between input and label."""
    windows = []
    for inputs, labels in batches:
        assert inputs["input"][:, 1:].equal(labels[:, :-1])
        windows += [[*row, label[-1]] for row, label in zip(inputs["input"].tolist(), labels.tolist())]
    return windows


def test_registering_twice_changes_nothing():
    before = dict(DATASETS)
    register_datasets()
    assert DATASETS == before
    assert {"pydoc", "text", "c4"} <= set(DATASETS)


@pytest.mark.parametrize("dataset", ["pydoc", "text"])
@pytest.mark.parametrize("dp_world_size", [1, 2, 4])
def test_ranks_together_see_the_corpus_once(dataset, dp_world_size, tmp_path):
    documents = get_pydoc_documents() if dataset == "pydoc" else make_documents(41)
    path = write_jsonl(tmp_path / "a.jsonl", documents) if dataset == "text" else None
    for rank in range(dp_world_size):
        loader = build_loader(dataset, path, rank, dp_world_size, infinite=False, batch=1)
        assert get_windows(loader) == get_expected_windows(documents, rank, dp_world_size)


@pytest.mark.parametrize("dp_world_size", [1, 2, 4])
@pytest.mark.parametrize("steps", [0, 1, 7, 60], ids=lambda steps: f"after {steps} steps")
def test_a_resumed_run_continues_with_the_same_batches(steps, dp_world_size, tmp_path):
    documents = make_documents(41)
    path = write_jsonl(tmp_path / "a.jsonl", documents)
    rank = dp_world_size - 1
    expected = get_expected_windows(documents, rank, dp_world_size, loops=50)
    loop = len(get_expected_windows(documents, rank, dp_world_size)) / BATCH
    assert 7 < loop < 60 or dp_world_size == 4  # 60 steps are past the first loop, 7 are not

    loader = build_loader("text", path, rank, dp_world_size)
    consumed = get_windows(itertools.islice(loader, steps))
    resumed = build_loader("text", path, rank, dp_world_size)
    resumed.load_state_dict(loader.state_dict())
    continued = get_windows(itertools.islice(resumed, 10))
    assert consumed + continued == expected[: (steps + 10) * BATCH]


def test_a_data_loader_worker_resumes_exactly_and_torchtitan_repeats_the_data_in_each_worker(tmp_path):
    # The second half is torchtitan 0.2.2's behaviour for map-style datasets, named in [Note: map-style datasets].
    documents = make_documents(41)
    path = write_jsonl(tmp_path / "a.jsonl", documents)
    expected = get_expected_windows(documents, 0, 1, loops=3)
    batches = [expected[i : i + BATCH] for i in range(0, len(expected), BATCH)]
    alternating = [window for batch in batches for window in batch * 2]

    loader = build_loader("text", path, num_workers=2)
    iterator = iter(loader)
    consumed = get_windows(itertools.islice(iterator, 5))
    state = loader.state_dict()
    del iterator
    resumed = build_loader("text", path, num_workers=2)
    resumed.load_state_dict(state)
    continued = get_windows(itertools.islice(resumed, 5))
    assert consumed + continued == alternating[: 10 * BATCH]


def test_documents_are_read_by_a_worker_that_unpickled_the_dataset(tmp_path):
    documents = make_documents(3)
    dataset = load_text(write_jsonl(tmp_path / "a.jsonl", documents))
    assert [row["text"] for row in pickle.loads(pickle.dumps(dataset))] == documents


def test_validation_sees_each_window_once(tmp_path):
    documents = make_documents(12)
    config = JobConfig()
    config.validation.dataset = "text"
    config.validation.dataset_path = write_jsonl(tmp_path / "a.jsonl", documents)
    config.validation.seq_len, config.validation.local_batch_size = SEQ_LEN, 1
    loader = build_text_validation_dataloader(2, 1, TOKENIZER, config, infinite=False)
    assert get_windows(loader) == get_expected_windows(documents, 1, 2)


def test_a_dataset_that_changed_on_disk_is_indexed_again(tmp_path):
    path = write_jsonl(tmp_path / "a.jsonl", make_documents(3))
    assert len(load_text(path)) == 3
    write_jsonl(tmp_path / "a.jsonl", make_documents(5))
    assert len(load_text(path)) == 5


class WriteRecorder:
    """Notes what this process creates on disk while `on`. Python cannot remove an audit hook."""

    def __init__(self):
        self.on, self.events = False, []
        sys.addaudithook(self)

    def __call__(self, event, args):
        if self.on and (event == "os.mkdir" or event == "open" and set(str(args[1])) & set("wax+")):
            self.events.append((event, args))


def test_nothing_is_written_to_disk(tmp_path):
    write_jsonl(tmp_path / "a.jsonl", make_documents(5))
    (tmp_path / "b.txt").write_text("some text")
    pq.write_table(pa.table({"text": ["a", "b"]}), tmp_path / "c.parquet")
    recorder = WriteRecorder()
    recorder.on = True
    try:
        for dataset, path in (("text", str(tmp_path)), ("pydoc", None)):
            get_windows(itertools.islice(build_loader(dataset, path), 3))
        written = list(recorder.events)
        (tmp_path / "noticed").write_text("")
    finally:
        recorder.on = False
    assert written == []
    assert len(recorder.events) == 1


def test_pydoc_refuses_a_dataset_path():
    with pytest.raises(ValueError, match="'pydoc' reads no files, got dataset_path='my.txt'.*dataset='text'"):
        build_loader("pydoc", "my.txt")


def test_text_needs_a_path_and_documents(tmp_path):
    with pytest.raises(ValueError, match="dataset 'text' needs a dataset_path"):
        build_loader("text", None)
    (tmp_path / "a.txt").write_text(" \n")
    with pytest.raises(ValueError, match=r"no documents in '.*a.txt' \(1 empty files\)"):
        build_loader("text", str(tmp_path / "a.txt"))


def test_fewer_documents_than_ranks_are_refused_before_a_rank_can_loop_over_nothing(tmp_path):
    path = write_jsonl(tmp_path / "a.jsonl", make_documents(3))
    validate_dataset("Text", path, 3)
    message = "validation.dataset_path='.*' has 3 documents for 4 data-parallel ranks.*at most 3 of these ranks"
    with pytest.raises(ValueError, match=message):
        validate_dataset("text", path, 4, "validation")
    validate_dataset("pydoc", None, 128)
    with pytest.raises(ValueError, match="training.dataset='pydoc' has .* documents for 1024 sequences per step"):
        validate_dataset("pydoc", None, 1024)
    with pytest.raises(ValueError, match="needs a dataset_path"):
        validate_dataset("text", None, 1)
    validate_dataset("c4", None, 1024)
