"""docs/numerics.md holds the comparisons of scripts/numerics.py as these are today."""

from __future__ import annotations

import importlib.util
import shlex
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parents[2]
spec = importlib.util.spec_from_file_location("numerics", REPOSITORY / "scripts" / "numerics.py")
numerics = importlib.util.module_from_spec(spec)
spec.loader.exec_module(numerics)


def get_section(name: str) -> str:
    start = f"<!-- comparison: python scripts/numerics.py {name} -->"
    return numerics.DOCUMENT.read_text().partition(start)[2].partition("<!-- end of comparison -->")[0]


@pytest.mark.parametrize("name", numerics.CASES)
def test_a_comparison_is_in_the_document_with_its_command_its_runs_and_its_picture(name):
    case, section = numerics.CASES[name], get_section(name)
    assert numerics.format_command(numerics.build_command(name, case, None)) in section
    rows = [line for line in section.splitlines() if line.startswith("|")][2:]
    assert [row.split("|")[1].strip() for row in rows] == [run for run in case.runs for _ in ("loss", "grad_norm")]
    assert f"](numerics/{name}.png)" in section
    assert (numerics.PICTURES / f"{name}.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize("name", [name for name, case in numerics.CASES.items() if case.asserted == "--assert-equal"])
def test_a_comparison_that_asserts_equality_shows_none_but_zeros(name):
    section = get_section(name)
    assert "All runs are equal in every bit." in section
    rows = [line for line in section.splitlines() if line.startswith("|")][4:]
    assert rows and all(row.replace(" ", "").endswith("|none|0|0|0|") for row in rows)


def test_no_picture_is_left_over():
    assert sorted(path.stem for path in numerics.PICTURES.iterdir()) == sorted(numerics.CASES)


def test_every_layout_has_the_ranks_and_the_batch_of_its_comparison():
    for case in numerics.CASES.values():
        for layout in case.runs.values():
            ngpu, *flags = shlex.split(layout)
            values = dict(zip(flags[::2], flags[1::2]))
            degrees = {flag: int(value) for flag, value in values.items() if flag.endswith("_degree")}
            product = 1
            for degree in degrees.values():
                product *= degree
            assert ngpu == f"NGPU={product}"
            dp = product
            for name in ("tensor", "context", "pipeline"):
                dp //= degrees.get(f"--parallelism.{name}_parallel_degree", 1)
            assert case.sequences % (dp * int(values["--training.local_batch_size"])) == 0
