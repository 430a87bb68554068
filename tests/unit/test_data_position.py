"""The data position travels: a run resumed on any layout takes the next sequences. Oracle: windows of plain lists."""

import functools
import itertools
import random
from types import SimpleNamespace

import pytest
import torch
import torch.distributed.checkpoint as dcp

from test_datasets import get_windows
from torchtitan_simplefsdp.titan import dataloader
from torchtitan_simplefsdp.titan.checkpoint_formats import CheckpointError

from numbered_corpus import build, get_sequences, make_lengths, set_corpus

SEQ_LEN = 7
LENGTHS = make_lengths(23)


@pytest.fixture(autouse=True)
def corpus(monkeypatch):
    set_corpus(monkeypatch, LENGTHS)


def build_ranks(layout, **settings):
    """Build the loaders of all data-parallel ranks of a layout (degree, local batch, global batch)."""
    degree, local_batch, global_batch = layout
    return [build(rank, degree, local_batch, global_batch, SEQ_LEN, **settings) for rank in range(degree)]


def take(ranks, layout, steps):
    """Return the sequences of some steps in the order of their numbers."""
    degree, local_batch, global_batch = layout
    microbatches = (local_batch * degree if global_batch < 0 else global_batch) // degree // local_batch
    parts = []
    for rank in ranks:
        windows = get_windows(itertools.islice(rank, steps * microbatches))
        size = microbatches * local_batch
        parts.append([windows[step * size : (step + 1) * size] for step in range(steps)])
    return [window for step in zip(*parts) for rank in step for window in rank]


def merge_states(ranks, draw=random.Random(0)):
    """Return what a checkpoint of these ranks holds: of a key of several ranks DCP writes one, here any."""
    state = {}
    for rank in draw.sample(ranks, len(ranks)):
        state |= rank.state_dict()
    return state


def save(ranks, folder):
    dcp.save({"dataloader": merge_states(ranks)}, checkpoint_id=folder, no_dist=True)


def load(ranks, folder):
    """Load as the checkpoint manager does."""
    names = dcp.FileSystemReader(folder).read_metadata().state_dict_metadata
    for rank in ranks:
        rank.prepare_to_load({name.removeprefix("dataloader.") for name in names})
        dcp.load({"dataloader": rank}, checkpoint_id=folder, no_dist=True)


def hand_over(state, ranks):
    """Load without the files between."""
    for rank in ranks:
        rank.prepare_to_load(set(state))
        rank.load_state_dict(state)


LAYOUTS = {
    "dp4 to dp2, same global batch": [(4, 1, 8), (2, 2, 8)],
    "dp4 to dp2, default global batch": [(4, 2, -1), (2, 2, -1)],
    "dp2 to dp4, default global batch": [(2, 2, -1), (4, 2, -1)],
    "4 to 5 to 4 sequences": [(4, 1, 4), (5, 1, 5), (2, 2, 4)],
    "6 to 4 to 9 to 3 sequences": [(2, 3, 6), (4, 1, 4), (3, 3, 9), (1, 1, 3)],
    "8 to 2 to 8 sequences": [(8, 1, 8), (1, 1, 2), (4, 1, 8)],
}


@pytest.mark.parametrize("layouts", LAYOUTS.values(), ids=LAYOUTS)
def test_resumed_runs_take_the_sequences_of_the_undisturbed_run(layouts, tmp_path):
    taken = []
    for part, layout in enumerate(layouts):
        ranks = build_ranks(layout)
        if part:
            load(ranks, tmp_path / str(part - 1))
        taken += take(ranks, layout, steps=3)
        save(ranks, tmp_path / str(part))
    streams = len(build_ranks(layouts[0])) * layouts[0][1] if layouts[0][2] < 0 else layouts[0][2]
    assert taken == get_sequences(LENGTHS, streams, SEQ_LEN, len(taken))


@pytest.mark.parametrize("seed", range(12))
def test_resumed_runs_take_the_sequences_of_the_undisturbed_run_in_random_layouts(seed):
    draw = random.Random(seed)
    taken, streams, state = [], None, None
    for _ in range(4):
        degree, local_batch, accumulation = draw.randint(1, 3), draw.randint(1, 3), draw.randint(1, 2)
        layout = (degree, local_batch, degree * local_batch * accumulation)
        streams = streams or layout[2]
        ranks = build_ranks(layout)
        if state:
            hand_over(state, ranks)
        taken += take(ranks, layout, steps=draw.randint(0, 4))
        state = merge_states(ranks, draw)
    assert taken == get_sequences(LENGTHS, streams, SEQ_LEN, len(taken))


def test_no_token_is_taken_twice_before_the_corpus_ends(tmp_path, monkeypatch):
    set_corpus(monkeypatch, [40] * 8)
    before, after = (4, 2, -1), (2, 2, -1)
    ranks = build_ranks(before)
    taken = take(ranks, before, steps=2)
    save(ranks, tmp_path)
    ranks = build_ranks(after)
    load(ranks, tmp_path)
    taken += take(ranks, after, steps=2)
    tokens = [token for window in taken for token in window]
    assert len(set(tokens)) == len(tokens) == 24 * (SEQ_LEN + 1)  # all tokens of the corpus differ


@pytest.mark.parametrize("workers", [2, 3, 5])
@pytest.mark.parametrize("sequences", [4, 6, 8], ids=lambda sequences: f"{sequences} on 4 streams")
def test_workers_together_read_what_one_process_reads(sequences, workers, monkeypatch):
    state = merge_states(build_ranks((1, 4, 4)))
    alone = build_ranks((2, 1, sequences))
    hand_over(state, alone)
    for rank, loader in enumerate(alone):
        windows = get_windows(itertools.islice(loader, 20))
        with monkeypatch.context() as patch:
            patch.setattr(dataloader, "DataLoader", functools.partial(run_in_turns, patch))
            shared = build(rank, 2, 1, sequences, SEQ_LEN, num_workers=workers)
            hand_over(state, [shared])
            assert get_windows(itertools.islice(shared, 20)) == windows


def run_in_turns(monkeypatch, dataset, num_workers, **settings):
    """torch's DataLoader without processes: the workers' samples, one of each in turn."""
    iterators = [iter(dataset) for _ in range(num_workers)]
    for worker in itertools.cycle(range(num_workers)):
        info = SimpleNamespace(id=worker, num_workers=num_workers)
        monkeypatch.setattr(dataloader, "get_worker_info", lambda: info)
        yield next(iterators[worker])


@pytest.mark.parametrize("workers", [2, 4])
def test_workers_whose_number_divides_the_sequences_of_a_rank_have_streams_of_their_own(workers, monkeypatch):
    loader = build(1, 2, 1, 8, SEQ_LEN, num_workers=workers)
    samples = []
    with monkeypatch.context() as patch:
        run = functools.partial(run_in_turns, patch)
        patch.setattr(dataloader, "DataLoader", lambda *args, **kwargs: record(samples, run(*args, **kwargs)))
        list(itertools.islice(loader, 40))
    owners = {(stream, i % workers) for i, (stream, _, _) in enumerate(samples)}
    assert sorted(stream for stream, _ in owners) == [4, 5, 6, 7]  # each once


def record(samples, iterator):
    for sample in iterator:
        samples.append(sample)
        yield sample


def test_a_position_is_integers_and_a_small_tensor_for_each_stream_of_the_rank(tmp_path):
    loader = build(1, 2, 2, 4, SEQ_LEN)
    next(iter(loader))
    state = loader.state_dict()
    assert list(state) == ["sequences_taken", "documents", "streams", "stream_2", "stream_3"]
    assert (state["sequences_taken"], state["documents"], state["streams"]) == (4, 23, 4)
    assert state["stream_2"].shape == (3,) and state["stream_2"].dtype == torch.int64 and state["stream_2"][0] == 1


def test_a_rank_writes_the_streams_that_it_reads_and_ranks_together_write_all():
    state = merge_states(build_ranks((2, 3, 6)))
    counts = {(4, 1, 4): [3] * 4, (3, 2, 6): [2] * 3, (3, 1, 3): [2] * 3, (5, 1, 5): [6] * 5}
    for layout, written in counts.items():
        ranks = build_ranks(layout)
        hand_over(state, ranks)
        keys = [{key for key in rank.state_dict() if key.startswith("stream_")} for rank in ranks]
        assert [len(of_rank) for of_rank in keys] == written
        assert set().union(*keys) == {f"stream_{stream}" for stream in range(6)}


def test_another_corpus_is_refused(monkeypatch):
    state = merge_states(build_ranks((1, 4, 4)))
    set_corpus(monkeypatch, LENGTHS[:20])
    message = "position is in a corpus of 23 documents, this run's has 20.*--checkpoint.exclude_from_loading dataloader"
    with pytest.raises(CheckpointError, match=message):
        hand_over(state, build_ranks((1, 4, 4)))


def test_a_checkpoint_without_a_position_of_numbered_documents_is_refused():
    loader = build(0, 1, 4, 4, SEQ_LEN)
    with pytest.raises(CheckpointError, match="holds no data position.*--checkpoint.exclude_from_loading dataloader"):
        loader.prepare_to_load(set())
    with pytest.raises(CheckpointError, match="torchtitan's own loader, dealt to 3 data-parallel.*exclude_from_loading"):
        loader.prepare_to_load({"dp_rank_0", "dp_rank_1", "dp_rank_2", "world_size"})
