"""Corpora of numbers for tests of the data loader: token i of document d is d * 10_000 + i, so no two are equal."""

import itertools
import random

from torchtitan.config import JobConfig
from torchtitan.hf_datasets import DatasetConfig
from torchtitan.hf_datasets.text_datasets import DATASETS

from torchtitan_simplefsdp.titan.dataloader import build_dataloader


class NumberTokenizer:
    """Encodes "d n" as n + 2 numbers, of which the first and last stand for bos and eos."""

    def encode(self, text, add_bos, add_eos):
        assert add_bos and add_eos
        document, length = map(int, text.split())
        return [document * 10_000 + i for i in range(length + 2)]


def make_lengths(count, longest=60, seed=0):
    """Lengths of documents: half of them are below 4 tokens, the others up to `longest`."""
    draw = random.Random(seed)
    return [draw.randrange(draw.choice((4, longest))) for _ in range(count)]


def set_corpus(monkeypatch, lengths, kind=list):
    """Make the documents those of dataset `c4_test`; a list is read much faster than a file."""
    documents = kind({"text": f"{i} {length}"} for i, length in enumerate(lengths))
    monkeypatch.setitem(DATASETS, "c4_test", DatasetConfig("", lambda path: documents, lambda sample: sample["text"]))


def get_sequences(lengths, streams, seq_len, count):
    """Return the first `count` sequences of a run, dealt on plain lists: number k is window k // S of stream k % S."""
    quotient, rest = divmod(len(lengths), streams)
    documents, windows = iter(range(len(lengths))), []
    for stream in range(streams):
        share = list(itertools.islice(documents, quotient + (stream < rest)))
        tokens = [d * 10_000 + i for d in share for i in range(lengths[d] + 2)]
        need = (count // streams + 1) * (seq_len + 1)
        tokens = tokens * (need // len(tokens) + 1)
        windows.append([tokens[i : i + seq_len + 1] for i in range(0, need, seq_len + 1)])
    return [windows[number % streams][number // streams] for number in range(count)]


def build(rank, degree, local_batch, global_batch, seq_len, **dataloader):
    config = JobConfig()
    config.training.dataset = "c4_test"
    config.training.seq_len, config.training.local_batch_size = seq_len, local_batch
    config.training.global_batch_size = global_batch
    for name, value in dataloader.items():
        setattr(config.training.dataloader, name, value)
    return build_dataloader(degree, rank, NumberTokenizer(), config)
