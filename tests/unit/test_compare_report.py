"""The result as table, JSON and picture."""

import json
import math

import pytest

from torchtitan_simplefsdp.compare.plot import plot_comparison
from torchtitan_simplefsdp.compare.report import (
    compare_results,
    format_markdown,
    format_table,
    read_golden,
    Result,
    write_json,
)
from torchtitan_simplefsdp.compare.runs import CompareError

ODD = {1: 0.1, 2: 1 / 3, 3: 5e-324, 4: -0.0, 5: math.inf, 6: math.nan, 7: math.nextafter(7.0, 8)}


def build_result(name: str, loss: dict[int, float], grad_norm: dict[int, float] | None = None) -> Result:
    scalars = {"loss": loss, "grad_norm": grad_norm or {1: 1.0}}
    return Result(name, f"./run_train.sh --{name}", {"torch": "2.13.0"}, scalars)


def test_a_golden_file_gives_back_every_bit(tmp_path):
    baseline = build_result("a", ODD)
    write_json(compare_results(baseline, [build_result("b", {1: 5.0})], 7), tmp_path / "new" / "golden.json")
    golden = read_golden(tmp_path / "new" / "golden.json")
    assert {step: value.hex() for step, value in golden.scalars["loss"].items()} == {s: v.hex() for s, v in ODD.items()}
    assert (golden.name, golden.command, golden.versions) == ("golden", baseline.command, baseline.versions)
    assert all(d.first_step is None for d in compare_results(golden, [baseline], 1).differences["a"].values())


def test_the_json_holds_commands_versions_scalars_and_differences(tmp_path):
    write_json(compare_results(build_result("a", {1: 2.0}), [build_result("b", {1: 3.0})], 1), tmp_path / "r.json")
    content = json.loads((tmp_path / "r.json").read_text())
    assert content["baseline"] == "a" and list(content["runs"]) == ["a", "b"] and content["steps"] == 1
    assert content["runs"]["b"] == {
        "command": "./run_train.sh --b",
        "versions": {"torch": "2.13.0"},
        "scalars": {"loss": {"1": 3.0}, "grad_norm": {"1": 1.0}},
    }
    assert content["differences"]["b"]["loss"]["largest_relative"] == 0.5


@pytest.mark.parametrize(
    "content", ["", "[]", "{}", '{"baseline": "a", "runs": {}}', '{"baseline": "a", "runs": {"a": 1}}']
)
def test_a_file_that_is_no_golden_file_is_named(tmp_path, content):
    (tmp_path / "x.json").write_text(content)
    with pytest.raises(CompareError, match="x.json was not written by --export-result"):
        read_golden(tmp_path / "x.json")
    with pytest.raises(CompareError, match="y.json: No such file"):
        read_golden(tmp_path / "y.json")


def test_the_tables_say_where_and_how_much():
    baseline = build_result("a", {1: 2.0, 2: 4.0}, {1: 1.0, 2: 1.0})
    comparison = compare_results(baseline, [build_result("b", {1: 2.0, 2: 3.0})], 2)
    rows = [line.split("  ") for line in format_table(comparison).splitlines()]
    cells = [[cell.strip() for cell in row if cell] for row in rows]
    assert cells[1] == ["a", "loss", "4", "(baseline)"]
    assert cells[3] == ["b", "loss", "3", "2", "1 at step 2", "0.25 at step 2", "0"]
    assert cells[4] == ["b", "grad_norm", "1", "2", "inf at step 2", "inf at step 2", "1"]
    assert format_markdown(comparison).splitlines()[4] == "| b | loss | 3 | 2 | 1 at step 2 | 0.25 at step 2 | 0 |"


@pytest.mark.parametrize("other", [{1: 2.0, 2: 4.0}, {1: 2.0, 2: 4.5}, {1: math.nan, 2: math.nan}, ODD, {}])
def test_a_picture_is_drawn_whatever_the_values(tmp_path, other):
    comparison = compare_results(build_result("a", {1: 2.0, 2: 4.0}), [build_result("b", other)], 2)
    plot_comparison(comparison, tmp_path / "plot.png")
    picture = (tmp_path / "plot.png").read_bytes()
    assert picture.startswith(b"\x89PNG") and len(picture) > 10_000
