"""Simulated schedules and minimum bytes against timelines drawn by hand."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from torchtitan_simplefsdp.graph.cost_model import CollectiveCost, CostModel, KINDS
from torchtitan_simplefsdp.graph.schedules import predict, predict_auto, Schedule, SCHEDULES
from torchtitan_simplefsdp.graph.segments import build_step
from torchtitan_simplefsdp.graph.simulate import COMMUNICATION, COMPUTE, simulate, Task
from torchtitan_simplefsdp.graph.trace import Collective, Compute
from torchtitan_simplefsdp.graph.traffic import get_minimum_bytes

# A collective of 16 bytes on 2 ranks sends 8 bytes: 1 second. An op takes a second per byte.
COST = CostModel(
    "by hand", 8, 0.0, 1.0, {"float32": 1.0}, {kind: CollectiveCost(0.0, 0.0, 0.0, 8.0, 8.0) for kind in KINDS}
)


def gather(where, phase="forward"):
    return Collective("all_gather", "fsdp", (0, 1), 16, torch.float32, phase, where)


def scatter(where):
    return Collective("reduce_scatter", "fsdp", (0, 1), 16, torch.float32, "backward", where)


def op(seconds, phase, where):
    return Compute("aten::mul", 0, seconds, torch.float32, phase, where)


# One traced layer that occurs twice: gather 1 s, compute 2 s; in backward compute 3 s, reduce 1 s.
LAYER = [gather("layer"), op(2, "forward", "layer"), op(3, "backward", "layer"), scatter("layer")]


def build_two_layers(events=LAYER):
    return build_step(events, COST, {"fsdp", "dp_replicate"}, {"layer": 2})


def test_tasks_start_when_their_stream_is_free_and_what_they_wait_for_has_ended():
    timeline = simulate(
        [
            Task(COMMUNICATION, 2, allocates=5),
            Task(COMPUTE, 1),
            Task(COMPUTE, 3, after=(0,), frees=5),
            Task(COMMUNICATION, 9, allocates=7),
        ]
    )
    assert timeline.starts == [0, 0, 2, 2] and timeline.ends == [2, 1, 5, 11]
    assert (timeline.step_seconds, timeline.compute_seconds, timeline.exposed_seconds, timeline.peak_bytes) == (
        11,
        4,
        7,
        12,
    )


@pytest.mark.parametrize(
    "task, message",
    [(Task("disk", 1), "unknown stream 'disk'"), (Task(COMPUTE, 1, after=(0,)), "not all of them before it")],
)
def test_a_task_that_cannot_run_is_refused(task, message):
    with pytest.raises(ValueError, match=message):
        simulate([task])


@pytest.mark.parametrize(
    "schedule, reshard, seconds, peak",
    [
        # forward 1+2+1+2, backward 3+1+3+1; both gathered (32 bytes) and one gradient
        ("front end alone", False, 14, 48),
        # each backward has a second more; one gathered, one gradient
        ("front end alone", True, 16, 32),
        ("block buckets", True, 16, 32),
        # gathers 0-1, 1-2; compute 1-3, 3-5; gathers 5-6, 6-7; compute 6-9, 9-12; reductions 9-10, 12-13
        # at 6 two are gathered and one gradient is there, at 9 one gathered and two gradients
        ("block buckets, prefetch", True, 13, 48),
        # gathers 0-1, 1-2; compute 1-3, 3-5, 5-8, 8-11; reductions 8-9, 11-12; at 5 two gathered and one gradient
        ("block buckets, prefetch", False, 12, 48),
    ],
)
def test_a_step_of_two_layers_by_hand(schedule, reshard, seconds, peak):
    prediction = predict(build_two_layers(), COST, SCHEDULES[schedule], reshard)
    assert prediction.timeline.step_seconds == seconds
    assert prediction.timeline.compute_seconds == 10
    assert prediction.timeline.peak_bytes == peak
    assert prediction.collectives == (6 if reshard else 4)
    assert prediction.wire_bytes == 8 * prediction.collectives


def test_parameters_of_a_layer_share_a_collective_in_block_buckets_only():
    events = [gather("layer"), gather("layer"), op(2, "forward", "layer")]
    events += [op(3, "backward", "layer"), scatter("layer"), scatter("layer")]
    step = build_two_layers(events)
    assert predict(step, COST, SCHEDULES["front end alone"], True).collectives == 12
    assert predict(step, COST, SCHEDULES["block buckets"], True).collectives == 6
    assert predict(step, COST, Schedule(64, 1, True), True).collectives == 3  # all 4 parameters of 16 bytes
    assert predict(step, COST, Schedule(63, 1, True), True).collectives == 6  # 3 and 1


def test_hybrid_reduces_over_shards_and_then_over_replicas():
    events = [*LAYER, Collective("all_reduce", "dp_replicate", (0, 2), 8, torch.float32, "backward", "layer")]
    step = build_two_layers(events)
    assert [len(unit.collectives) for unit in step.backward] == [2, 2]
    prediction = predict(step, COST, SCHEDULES["front end alone"], False)
    assert prediction.timeline.step_seconds == 14 + 2 * 1  # 8 bytes on 2 ranks: 2 * 8 / 2 sent
    assert prediction.wire_bytes == 4 * 8 + 2 * 8


def test_replicate_has_reductions_only():
    events = [
        event for event in LAYER if event.phase == "forward" and isinstance(event, Compute) or event.phase == "backward"
    ]
    events[-1] = events[-1]._replace(kind="all_reduce", group="dp_replicate")
    prediction = predict(build_two_layers(events), COST, SCHEDULES["block buckets, prefetch"], False)
    assert (
        prediction.timeline.step_seconds == 4 + 3 + 3 + 2
    )  # the first reduction, 2 s, is hidden; a gradient of 16 bytes each
    assert prediction.timeline.peak_bytes == 32


def test_collectives_of_tensor_parallelism_are_part_of_compute_time():
    events = [*LAYER[:2], LAYER[0]._replace(group="tp"), *LAYER[2:]]
    prediction = predict(build_two_layers(events), COST, SCHEDULES["front end alone"], False)
    assert (prediction.tensor_parallel_seconds, prediction.timeline.compute_seconds) == (2, 12)
    assert prediction.collectives == 4


def test_gathers_of_a_recomputed_forward_are_left_to_the_schedule():
    events = [*LAYER[:2], gather("layer", "backward"), *LAYER[2:]]
    assert build_two_layers(events) == build_two_layers()


def test_automatic_buckets_are_the_fastest_that_fit():
    step = build_two_layers()
    # all at once: gather 0-2, compute 2-12, reduce 12-14; by block 12, as above
    assert predict(step, COST, Schedule(2**20, 1, True), False).timeline.step_seconds == 14
    best = predict_auto(step, COST, False, most_bytes=48)
    assert (best.bucket, best.timeline.step_seconds) == ("block", 12)
    with pytest.raises(ValueError, match="no bucket plan holds at most 10 bytes; the least is 48. Allow that."):
        predict_auto(step, COST, False, most_bytes=10)


def test_automatic_buckets_join_layers_where_latency_is_what_costs():
    slow = CollectiveCost(10.0, 0.0, 0.0, 8.0, 8.0)
    cost = dataclasses.replace(COST, collectives={kind: slow for kind in KINDS})
    best = predict_auto(build_two_layers(), cost, False, most_bytes=64)
    # gather 12, compute 10, reduce 12; by block the second gather ends at 22 and the reductions wait for each other
    assert (best.bucket, best.timeline.step_seconds, best.collectives) == (2**20, 34, 2)


def test_reductions_that_do_not_pair_up_are_refused():
    events = [
        *LAYER,
        scatter("layer"),
        Collective("all_reduce", "dp_replicate", (0, 2), 8, torch.float32, "backward", "layer"),
    ]
    with pytest.raises(ValueError, match="3 reductions of 2 kinds in the backward of 'layer'"):
        build_two_layers(events)


@pytest.mark.parametrize(
    "arguments, expected",
    [
        ({"shards": 8, "reshard": True}, 3 * 1000 * 2 * 7 / 8),
        ({"shards": 8}, 2 * 1000 * 2 * 7 / 8),
        ({"replicas": 8}, 2 * 1000 * 2 * 7 / 8),
        ({"shards": 4, "replicas": 2, "reshard": True}, 3 * 2000 * 3 / 4 + 2 * 500 / 2),
        ({}, 0),
    ],
)
def test_minimum_bytes_in_one_dtype_by_hand(arguments, expected):
    assert get_minimum_bytes(1000, 2, 2, **arguments) == expected


def test_minimum_bytes_count_gathers_and_reductions_in_their_dtypes():
    assert get_minimum_bytes(1000, 2, 4, shards=2, reshard=True) == 2 * 1000 + 2000
