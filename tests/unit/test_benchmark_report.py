"""The benchmark's ratios, table, order and picture, against numbers worked out by hand."""

from __future__ import annotations

import json
import platform

import pytest

from torchtitan_simplefsdp.benchmark.contenders import build_rows, CONTENDERS, Row
from torchtitan_simplefsdp.benchmark.llama import count_parameters
from torchtitan_simplefsdp.benchmark.machine import get_processor
from torchtitan_simplefsdp.benchmark.measure import describe_error, get_order
from torchtitan_simplefsdp.benchmark.options import Options, PRESETS, validate_options
from torchtitan_simplefsdp.benchmark.plot import plot_measurements
from torchtitan_simplefsdp.benchmark.report import (
    describe,
    format_table,
    get_baseline,
    get_ceiling,
    get_quartiles,
    get_ratio,
    Measurement,
    write_json,
)
from torchtitan_simplefsdp.benchmark.run import check_losses

OPTIONS = Options(dim=64, layers=2, vocab=64, seq_len=16, batch=2)
NONE, COMPILED, DDP = Row("none", ""), Row("none+compile", ""), Row("ddp", "replicate")
FSDP2, OURS, BROKEN = Row("fsdp2", "fully_shard"), Row("ours", "fully_shard"), Row("torchtitan", "fully_shard")
MEASUREMENTS = {
    NONE: Measurement([0.1, 0.1, 0.3], 4.0, {}, 0.0),
    FSDP2: Measurement([0.2, 0.2, 0.6], 4.0, {"all_gather": 7, "reduce_scatter": 4}, 3 * 2**20, 2**30),
    OURS: Measurement([0.1, 0.4, 0.4], 4.0, {"all_gather": 3}, 2.0**19, 2**29, 0.1),
    BROKEN: Measurement(error="TypeError: a | b"),
}
MACHINE = {"processor": "Abacus 9", "cores": 2, "gpus": [], "torch": "2.13.0", "python": "3.11.1"}


def test_a_ratio_is_the_median_of_the_rounds_ratios_and_not_the_ratio_of_medians():
    assert get_ratio(OURS, FSDP2, MEASUREMENTS) == pytest.approx(1.5)  # of 2, 0.5 and 1.5; medians would give 0.5
    assert get_ratio(OURS, NONE, MEASUREMENTS) == pytest.approx(0.75)  # of 1, 0.25 and 0.75
    assert get_ratio(OURS, None, MEASUREMENTS) is None
    assert get_ratio(OURS, BROKEN, MEASUREMENTS) is None


def test_a_row_is_compared_with_fsdp2_in_its_mode_and_with_the_ceiling_of_its_kind():
    hybrid = Row("fsdp2", "hybrid_shard")
    rows = dict.fromkeys([NONE, COMPILED, FSDP2, hybrid, DDP, OURS], Measurement([1.0]))
    assert get_baseline(Row("ours", "hybrid_shard"), rows) == hybrid
    assert get_baseline(DDP, rows) == get_baseline(NONE, rows) == get_baseline(OURS, rows) == FSDP2
    assert get_baseline(DDP, {DDP: Measurement([1.0])}) is None
    assert get_ceiling(OURS, rows) == get_ceiling(FSDP2, rows) == NONE
    assert get_ceiling(Row("fsdp2+compile", "fully_shard"), rows) == COMPILED
    assert get_ceiling(Row("ours+graph", "fully_shard"), {NONE: Measurement([1.0])}) is None


def test_the_table_has_all_numbers_or_the_error():
    _, _, none, fsdp2, ours, broken = format_table(MEASUREMENTS, OPTIONS).splitlines()
    assert none == "| none | any | 320 | 640 | 100.0 (100.0 to 200.0) | 2.00 | 100% |  | none | 0.00 |  |"
    assert fsdp2 == (
        "| fsdp2 | fully_shard | 160 | 320 | 200.0 (200.0 to 400.0) | 1.00 | 50% | 1024 | 7 AG + 4 RS | 3.00 |  |"
    )
    assert ours == "| ours | fully_shard | 80 | 160 | 400.0 (250.0 to 400.0) | 1.50 | 75% | 512 | 3 AG | 0.50 |  |"
    assert broken == "| torchtitan | fully_shard | not available: TypeError: a \\| b |  |  |  |  |  |  |  |  |"


def test_compile_time_is_shown_of_what_is_compiled():
    table = format_table({COMPILED: Measurement([0.1], 4.0, {}, 0.0, 2**20, 12.34)}, OPTIONS)
    assert table.splitlines()[-1].endswith("| 1 | none | 0.00 | 12.3 |")


def test_tensor_parallel_ranks_share_their_tokens():
    options = Options(**PRESETS["step"], ranks=4, tp=2)
    assert options.tokens == 2 * 4 * 128
    assert format_table({NONE: Measurement([1.0])}, options).splitlines()[-1].startswith("| none | any | 256 | 1024 |")


def test_quartiles_of_few_rounds():
    assert get_quartiles([3.0]) == (3.0, 3.0, 3.0)
    assert get_quartiles([1.0, 2.0, 3.0, 4.0, 5.0]) == (2.0, 3.0, 4.0)


def test_the_order_of_rounds_alternates():
    assert [get_order(3, number) for number in range(3)] == [[0, 1, 2], [2, 1, 0], [0, 1, 2]]


def test_rows_are_those_without_communication_and_then_mode_by_mode():
    rows = build_rows(["ddp", "fsdp2", "none", "ours"], ("fully_shard", "replicate"))
    assert rows == [NONE, FSDP2, OURS, DDP, Row("ours", "replicate")]
    with pytest.raises(ValueError, match="unknown contenders: fsdp3, x. Contenders: none, "):
        build_rows(["fsdp3", "none", "x"], ("fully_shard",))


def test_a_row_with_another_loss_has_an_error_and_rounding_is_none():
    measured = {NONE: 4.0, FSDP2: 4.00002, OURS: 4.0001}
    measurements = {row: Measurement([1.0], loss) for row, loss in measured.items()}
    checked = check_losses({**measurements, BROKEN: Measurement(error="e")}, "fp32")
    assert {row: measurement.error for row, measurement in checked.items()} == {
        NONE: None,
        FSDP2: None,
        OURS: "its loss is 4.0001, that of the first row 4",
        BROKEN: "e",
    }


def test_all_faults_of_the_options_are_named_at_once():
    for preset in PRESETS.values():
        validate_options(Options(**preset))
    with pytest.raises(ValueError) as error:
        validate_options(Options(**PRESETS["step"] | {"dim": 130}, ranks=3, tp=2, modes=("hybrid_shard",)))
    assert str(error.value) == (
        "benchmark: dim=130 must be a multiple of 64, or below 128 of 4; tp=2 does not divide ranks=3; "
        "hybrid_shard needs 4, 6, ... data-parallel ranks, got 1."
    )
    with pytest.raises(ValueError, match="^benchmark: layers=0 must be at least 1; warmup=0 must be at least 1.$"):
        validate_options(Options(**PRESETS["step"] | {"layers": 0}, warmup=0))


def test_the_description_names_machine_sizes_and_load():
    # 2 x 64 x 64 of vocabulary, (4 + 9) x 64 x 64 + 2 x 64 per block, 64 of the last norm
    assert count_parameters(OPTIONS) == 114_688 + 320
    text = describe(OPTIONS, MACHINE, (0.25, 1.75))
    assert text.startswith("2 ranks, 1 CPU thread(s) each, on Abacus 9 with 2 cores; torch 2.13.0, Python 3.11.1. Ll")
    assert text.endswith("Load average 0.2 before, 1.8 after.\n")
    gpus = describe(Options(**PRESETS["step"], ranks=4, tp=2), MACHINE | {"gpus": ["G", "G"]}, (0, 0))
    assert gpus.startswith("4 ranks (2 data-parallel, 2 tensor-parallel), G, on ")


def test_the_processor_is_that_of_cpuinfo():
    assert get_processor("processor\t: 0\nmodel name\t: Abacus 9\n\nmodel name\t: Abacus 10\n") == "Abacus 9"
    assert get_processor("processor\t: 0\n") == platform.machine()


def test_an_error_is_one_line():
    assert describe_error(TypeError("\nfirst \nsecond")) == "TypeError: first"
    assert describe_error(KeyError()) == "KeyError"


def test_json_keeps_every_round_and_the_picture_leaves_out_what_has_no_numbers(tmp_path):
    write_json(tmp_path / "result.json", MEASUREMENTS, OPTIONS, MACHINE, (0.25, 1.75))
    content = json.loads((tmp_path / "result.json").read_text())
    assert [row["seconds"] for row in content["rows"]] == [list(m.seconds) for m in MEASUREMENTS.values()]
    assert content["machine"] == MACHINE | {"load_before_and_after": [0.25, 1.75]}
    assert content["parameters"] == 115_008 and content["options"]["batch"] == 2
    plot_measurements(MEASUREMENTS, tmp_path / "plot.png")
    assert (tmp_path / "plot.png").read_bytes().startswith(b"\x89PNG")


def test_every_contender_has_a_color_in_the_picture(tmp_path):
    plot_measurements({Row(name, ""): Measurement([0.1]) for name in CONTENDERS}, tmp_path / "plot.png")
    assert (tmp_path / "plot.png").exists()
