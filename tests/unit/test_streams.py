"""Streams and their positions. Oracle: torchtitan's own dataset class on the same share, and the undisturbed stream."""

import itertools
import pickle
import random

import pytest
from datasets import Dataset
from torchtitan.hf_datasets.text_datasets import HuggingFaceTextDataset

from torchtitan_simplefsdp.titan.datasets import register_datasets
from torchtitan_simplefsdp.titan.streams import Corpus, get_share, Position

from numbered_corpus import make_lengths, NumberTokenizer, set_corpus

register_datasets()
WINDOWS = 40
SHORT, LONG, MIXED = [0, 1, 2, 0, 3, 1, 0, 2], [57, 20, 90, 3], make_lengths(17)
CASES = [(lengths, streams, seq_len) for lengths in (SHORT, LONG, MIXED) for streams in (1, 3) for seq_len in (4, 15)]


def build_corpus(monkeypatch, lengths, seq_len):
    set_corpus(monkeypatch, lengths)
    return Corpus("c4_test", None, NumberTokenizer(), seq_len)


def read(corpus, stream, streams, position=Position(), count=WINDOWS):
    return [(window.tolist(), at) for window, at in itertools.islice(corpus.read(stream, streams, position), count)]


@pytest.mark.parametrize("lengths, streams, seq_len", CASES)
def test_windows_and_positions_are_those_of_torchtitans_dataset(lengths, streams, seq_len, monkeypatch):
    corpus = build_corpus(monkeypatch, lengths, seq_len)
    set_corpus(monkeypatch, lengths, lambda documents: Dataset.from_list(list(documents)))
    for stream in range(streams):
        theirs = HuggingFaceTextDataset("c4_test", None, NumberTokenizer(), seq_len, stream, streams, infinite=True)
        share = get_share(len(lengths), stream, streams)
        windows = zip(itertools.islice(theirs, WINDOWS), read(corpus, stream, streams))
        for number, ((inputs, label), (window, position)) in enumerate(windows, start=1):
            assert window == [*inputs["input"].tolist(), label[-1].item()]
            assert position == (number, theirs._sample_idx, len(theirs._token_buffer))
            # What [Note: position of a stream] says of the tokens left over.
            document = share[theirs._sample_idx - 1]
            tokens = NumberTokenizer().encode(f"{document} {lengths[document]}", True, True)
            assert theirs._token_buffer == tokens[len(tokens) - position.tokens :]


@pytest.mark.parametrize("lengths, streams, seq_len", CASES)
def test_a_stream_continues_from_each_of_its_positions(lengths, streams, seq_len, monkeypatch):
    corpus = build_corpus(monkeypatch, lengths, seq_len)
    positions = []
    for stream in range(streams):
        undisturbed = read(corpus, stream, streams)
        positions += [position for _, position in undisturbed]
        for taken, (_, position) in enumerate(undisturbed, start=1):
            assert read(corpus, stream, streams, position, WINDOWS - taken) == undisturbed[taken:]
    documents = [position.documents for position in positions]
    assert streams == 1 or documents != sorted(documents)  # a loop ended
    assert lengths is SHORT or any(position.tokens > seq_len for position in positions)  # whole windows left over


def test_a_stream_continues_from_positions_in_random_corpora(monkeypatch):
    draw = random.Random(1)
    for case in range(25):
        lengths = make_lengths(draw.randint(1, 12), longest=draw.choice((5, 50, 200)), seed=case)
        streams, seq_len = draw.randint(1, len(lengths)), draw.randint(1, 20)
        corpus = build_corpus(monkeypatch, lengths, seq_len)
        stream = draw.randrange(streams)
        undisturbed = read(corpus, stream, streams)
        continued, position = [], Position()
        while len(continued) < WINDOWS:  # through several positions, each found in a stream that was itself restored
            continued += read(corpus, stream, streams, position, min(draw.randint(1, 9), WINDOWS - len(continued)))
            position = continued[-1][1]
        assert continued == undisturbed, (lengths, streams, seq_len)


@pytest.mark.parametrize("documents, streams", [(8, 8), (41, 8), (9, 4), (5, 1)])
def test_shares_are_contiguous_and_differ_by_one_document_at_most(documents, streams):
    shares = [get_share(documents, stream, streams) for stream in range(streams)]
    assert list(itertools.chain.from_iterable(shares)) == list(range(documents))
    assert {len(share) for share in shares} <= {documents // streams, documents // streams + 1}
    assert sorted(map(len, shares), reverse=True) == list(map(len, shares))


def test_a_worker_that_unpickled_the_corpus_reads_the_same(tmp_path):
    (tmp_path / "a.jsonl").write_text("".join(f'{{"text": "{i} {length}"}}\n' for i, length in enumerate(MIXED)))
    corpus = Corpus("text", str(tmp_path / "a.jsonl"), NumberTokenizer(), 7)
    assert read(pickle.loads(pickle.dumps(corpus)), 1, 2) == read(corpus, 1, 2)
