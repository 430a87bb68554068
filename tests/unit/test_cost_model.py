"""The cost model against times computed by hand, its TOML, and what is refused."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from torchtitan_simplefsdp.graph.cost_model import (
    CollectiveCost,
    CostModel,
    format_cost_model,
    get_wire_bytes,
    KINDS,
    load_cost_model,
)
from torchtitan_simplefsdp.graph.machines import FUSED_TRAFFIC, get_compiled_seconds, H100
from torchtitan_simplefsdp.graph.measure import fit_line
from torchtitan_simplefsdp.graph.trace import Compute

COST = CollectiveCost(
    latency_seconds=0.5,
    intra_node_step_seconds=0.01,
    inter_node_step_seconds=0.1,
    intra_node_bytes_per_second=100.0,
    inter_node_bytes_per_second=20.0,
)
MODEL = CostModel(
    name='a "machine"\nof 4',
    ranks_per_node=4,
    op_seconds=1.0,
    memory_bytes_per_second=10.0,
    flops_per_second={"float32": 1000.0},
    collectives={kind: COST for kind in KINDS},
)


@pytest.mark.parametrize(
    "kind, ranks, nodes, seconds",
    [
        ("all_gather", 4, 1, 0.5 + 3 * 0.01 + 800 * 3 / 4 / 100),
        ("reduce_scatter", 4, 1, 0.5 + 3 * 0.01 + 800 * 3 / 4 / 100),
        ("all_to_all", 4, 1, 0.5 + 3 * 0.01 + 800 * 3 / 4 / 100),
        ("all_reduce", 4, 1, 0.5 + 2 * 3 * 0.01 + 2 * 800 * 3 / 4 / 100),
        ("all_gather", 8, 2, 0.5 + 6 * 0.01 + 0.1 + 800 * 7 / 8 / 80),  # the ports of 4 ranks: 80 bytes/s
        ("all_gather", 2, 2, 0.5 + 0.1 + 800 / 2 / 20),  # a rank per node has its own port alone
        ("all_reduce", 8, 1, 0.5 + 2 * 7 * 0.01 + 2 * 800 * 7 / 8 / 100),
        ("all_gather", 1, 1, 0.0),
    ],
)
def test_a_collective_takes_latency_steps_and_bytes_by_hand(kind, ranks, nodes, seconds):
    assert MODEL.seconds(kind, 800, ranks, nodes) == pytest.approx(seconds, rel=1e-12)  # rounding of the sum's order


def test_many_ports_are_no_faster_than_the_links_within_a_node():
    wide = dataclasses.replace(MODEL, ranks_per_node=8)
    assert wide.seconds("all_gather", 800, 16, 2) == pytest.approx(
        0.5 + 14 * 0.01 + 0.1 + 800 * 15 / 16 / 100, rel=1e-12
    )


def test_nodes_are_counted_by_consecutive_global_ranks():
    assert [MODEL.count_nodes(ranks) for ranks in [(0, 1, 2, 3), (3, 4), (0, 4, 8), (1,)]] == [1, 2, 3, 1]


@pytest.mark.parametrize("flops, nbytes, seconds", [(0, 50, 1 + 5), (9000, 50, 1 + 9), (9000, 200, 1 + 20), (0, 0, 1)])
def test_an_op_takes_its_arithmetic_or_its_traffic(flops, nbytes, seconds):
    assert MODEL.compute_seconds(flops, nbytes, torch.float32) == seconds


def test_wire_bytes_of_an_all_reduce_are_those_of_a_scatter_and_a_gather():
    assert get_wire_bytes("all_reduce", 80, 8) == 2 * 70 == 2 * get_wire_bytes("all_gather", 80, 8)


def test_compiled_elementwise_ops_cost_a_share_of_their_traffic_and_products_all():
    product = Compute("aten::mm", 10**12, 10**6, torch.bfloat16, "forward", "")
    assert get_compiled_seconds(H100, product) == H100.compute_seconds(10**12, 10**6, torch.bfloat16)
    add = Compute("aten::add", 0, 10**9, torch.bfloat16, "forward", "")
    assert get_compiled_seconds(H100, add) == FUSED_TRAFFIC * 10**9 / H100.memory_bytes_per_second


@pytest.mark.parametrize("model", [MODEL, H100], ids=["hand", "H100"])
def test_a_model_survives_toml(tmp_path, model):
    (tmp_path / "model.toml").write_text(format_cost_model(model))
    assert load_cost_model(tmp_path / "model.toml") == model


def test_a_missing_file_names_the_command_that_writes_one(tmp_path):
    with pytest.raises(FileNotFoundError, match="none.toml not found. scripts/measure_cost_model.py writes one"):
        load_cost_model(tmp_path / "none.toml")


@pytest.mark.parametrize(
    "change, message",
    [
        (("op_seconds = 1.0\n", ""), "op_seconds is missing"),
        (("op_seconds", "op_second"), "op_seconds is missing; unknown key op_second"),
        (("ranks_per_node = 4", "ranks_per_node = 0"), "ranks_per_node=0 must be a whole number, at least 1"),
        (("float32 = 1000.0", "float32 = 0"), "flops_per_second.float32=0 must be a number above 0"),
        (("float32 = 1000.0", 'float32 = "fast"'), "flops_per_second.float32='fast' must be a number above 0"),
        (("float32 = 1000.0", ""), "flops_per_second is empty"),
        (
            ("latency_seconds = 0.5", "latency_seconds = -1"),
            "collectives.all_gather.latency_seconds=-1 must be a number not below 0",
        ),
        (
            ("[collectives.all_gather]", "[collectives.allgather]"),
            "collectives.all_gather is missing; collectives.allgather is not one of",
        ),
        (
            ("intra_node_step_seconds", "steps"),
            "collectives.all_gather.intra_node_step_seconds is missing; unknown key collectives.all_gather.steps",
        ),
        (("[flops_per_second]", "[flops_per_second"), "is not TOML"),
    ],
)
def test_a_wrong_file_is_refused_with_what_is_wrong(tmp_path, change, message):
    (tmp_path / "model.toml").write_text(format_cost_model(MODEL).replace(*change, 1))
    with pytest.raises(ValueError) as caught:
        load_cost_model(tmp_path / "model.toml")
    assert message in str(caught.value)


def test_unknown_kinds_and_dtypes_are_refused():
    with pytest.raises(ValueError, match="no cost for collective 'barrier'. Known: all_gather, "):
        MODEL.seconds("barrier", 8, 2)
    with pytest.raises(ValueError, match="no FLOP rate for bfloat16; it has float32. Add flops_per_second.bfloat16"):
        MODEL.compute_seconds(1, 1, torch.bfloat16)


def test_a_line_is_found_again():
    sizes = [2.0**n for n in range(14, 28, 2)]
    latency, bandwidth = fit_line(sizes, [3e-4 + size / 2e9 for size in sizes])
    assert latency == pytest.approx(3e-4, rel=1e-9) and bandwidth == pytest.approx(2e9, rel=1e-9)  # of a fit in fp64


def test_a_line_that_would_start_below_zero_starts_at_zero():
    # by hand: slope through 0 with relative errors is sum(x/t) / sum((x/t)^2), x/t = 1/0.5 and 1/1
    assert fit_line([1.0, 4.0], [0.5, 4.0]) == (0.0, pytest.approx((4 + 1) / (2 + 1)))


@pytest.mark.parametrize(
    "sizes, seconds, message", [([4.0, 4.0], [1.0, 1.0], "needs two sizes"), ([1.0, 2.0], [2.0, 1.0], "do not grow")]
)
def test_times_without_a_line_are_refused(sizes, seconds, message):
    with pytest.raises(ValueError, match=message):
        fit_line(sizes, seconds)
