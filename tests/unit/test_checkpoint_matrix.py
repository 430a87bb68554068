"""docs/checkpoints.md holds the table of scripts/checkpoint_matrix.py, of the layouts as these are today."""

from __future__ import annotations

import importlib.util
from itertools import product
from pathlib import Path

from tests.distributed.checkpoint_layouts import get_seed, LAYOUTS

REPOSITORY = Path(__file__).parents[2]
spec = importlib.util.spec_from_file_location("checkpoint_matrix", REPOSITORY / "scripts" / "checkpoint_matrix.py")
checkpoint_matrix = importlib.util.module_from_spec(spec)
spec.loader.exec_module(checkpoint_matrix)

ALL_EQUAL: dict[tuple[str, str], list[str]] = {pair: [] for pair in product(LAYOUTS, LAYOUTS)}


def test_the_document_has_the_table_of_all_layouts_and_all_are_equal():
    document = checkpoint_matrix.DOCUMENT.read_text()
    table = document.partition(checkpoint_matrix.START)[2].partition(checkpoint_matrix.END)[0]
    assert table == checkpoint_matrix.format_table(ALL_EQUAL)


def test_the_table_shows_how_many_values_are_not_equal():
    saved, loaded = list(LAYOUTS)[1], list(LAYOUTS)[2]
    table = checkpoint_matrix.format_table({**ALL_EQUAL, (saved, loaded): ["model.a", "model.b", "model.c"]})
    header, _, *rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in table.splitlines()]
    assert header[3:] == [str(number + 1) for number in range(len(LAYOUTS))]
    assert rows[1][:3] == ["2", saved, str(LAYOUTS[saved].world_size)]
    assert [row.count("=") for row in rows] == [len(LAYOUTS) - (i == 1) for i in range(len(LAYOUTS))]
    assert rows[1][3 + 2] == "3"


def test_every_layout_saves_another_state_than_any_that_loads_has():
    seeds = [get_seed(name) for name in LAYOUTS]
    assert len(set(seeds)) == len(seeds) and 0 not in seeds


def test_layouts_have_at_most_8_ranks():
    assert max(layout.world_size for layout in LAYOUTS.values()) == 8
