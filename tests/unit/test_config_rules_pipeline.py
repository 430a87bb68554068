"""Rules about pipeline parallelism; the messages are written by hand."""

import os

import pytest
from config_workspace import get_faults, parse, workspace

P = "--parallelism."
PP = f"{P}pipeline_parallel_degree"

# Flags, world size, the one fault ({cwd} is the current folder).
CASES = {
    "microbatch_size": (
        f"{PP} 2 {P}pipeline_parallel_microbatch_size 3",
        2,
        "training.local_batch_size=8 is not divisible by parallelism.pipeline_parallel_microbatch_size=3. Microbatch sizes "
        "possible: 1, 2, 4, 8.",
    ),
    "microbatch_size_of_zero": (
        f"{PP} 2 {P}pipeline_parallel_microbatch_size 0",
        2,
        "parallelism.pipeline_parallel_microbatch_size=0 must be at least 1.",
    ),
    "pipeline_csv": (
        f"{PP} 2 {P}pipeline_parallel_schedule_csv s.csv",
        2,
        "parallelism.pipeline_parallel_schedule_csv='s.csv' not found (looked in {cwd}/s.csv). Expected a file.",
    ),
    "pipeline_schedule": (
        f"{PP} 2 {P}pipeline_parallel_schedule 1F2B",
        2,
        "parallelism.pipeline_parallel_schedule: Unknown schedule name '1F2B'. The valid options are ['1F1B', 'Interleaved1F1B', "
        "'GPipe', 'LoopedBFS', 'InterleavedZeroBubble', 'PipelineScheduleSingle', 'PipelineScheduleMulti', 'ZBVZeroBubble', "
        "'DualPipeV'].",
    ),
    "more_stages_than_layers": (
        f"{PP} 6 {P}pipeline_parallel_schedule Interleaved1F1B",
        6,
        "parallelism.pipeline_parallel_degree=6 cuts the 6 layers of flavor 'debugmodel' into 12 stages: Number of stages (12) "
        "cannot be greater than effective layers (8).",
    ),
}


@pytest.mark.parametrize("flags, world_size, fault", CASES.values(), ids=CASES.keys())
def test_a_broken_rule_is_the_one_fault(workspace, flags, world_size, fault):
    assert get_faults(workspace, flags=flags, world_size=world_size) == [fault.format(cwd=os.getcwd())]


@pytest.mark.parametrize(
    "flags, world_size",
    [
        (f"{PP} 2 {P}pipeline_parallel_schedule interleaved1f1b", 2),
        (f"{P}pipeline_parallel_schedule 1F2B {P}pipeline_parallel_microbatch_size 3", 2),
    ],
)
def test_what_is_possible_is_not_refused(workspace, flags, world_size):
    assert parse(workspace, flags=flags, world_size=world_size)


# Parts of the 6 layers of the debug model.
FIRST, LAST = ["tok_embeddings", "layers.0", "layers.1", "layers.2"], ["layers.3", "layers.4", "layers.5", "norm", "output"]
QUARTERS = [FIRST[:2], FIRST[2:], LAST[:2], LAST[2:]]
KEY = "parallelism.module_fqns_per_model_part"

# Schedule, parts, the faults.
PARTS = {
    "too_many_parts": ("1F1B", QUARTERS, [f"{KEY} has 4 parts; schedule '1F1B' on pipeline_parallel_degree=2 needs 2."]),
    "no_part": (
        "Interleaved1F1B",
        [],
        [
            f"{KEY} has 0 parts; schedule 'Interleaved1F1B' on pipeline_parallel_degree=2 needs a multiple of 2.",
            f"{KEY}: no part has {str([*FIRST, *LAST])[1:-1]}, so the model would be trained without. Add each to a part.",
        ],
    ),
    "parts_of_a_v_schedule": (
        "ZBVZeroBubble",
        [FIRST, LAST],
        [f"{KEY} has 2 parts; schedule 'ZBVZeroBubble' on pipeline_parallel_degree=2 needs 4."],
    ),
    "unknown_module": (
        "1F1B",
        [[*FIRST, "layer.2"], [*LAST, "layers.6"]],
        [
            f"{KEY}: unknown 'layer.2', 'layers.6' (did you mean 'layers.2'?). This model has 'tok_embeddings', 'layers.0' to "
            "'layers.5', 'norm', 'output'."
        ],
    ),
    "forgotten_layer": (
        "1F1B",
        [FIRST[:3], LAST],
        [f"{KEY}: no part has 'layers.2', so the model would be trained without. Add each to a part."],
    ),
    "layer_in_two_parts": (
        "1F1B",
        [[*FIRST, "layers.3"], LAST],
        [f"{KEY}: 'layers.3' named more than once. Each module belongs to one part."],
    ),
    "parts_out_of_order": (
        "1F1B",
        [[*FIRST, "layers.5"], [name for name in LAST if name != "layers.5"]],
        [
            f"{KEY}: 'layers.5' comes too early. Parts follow the order of the forward: tok_embeddings, layers.0, layers.1, "
            "layers.2, layers.3, layers.4, layers.5, norm, output."
        ],
    ),
}


@pytest.mark.parametrize("schedule, parts, faults", PARTS.values(), ids=PARTS.keys())
def test_parts_that_are_not_the_whole_model_are_refused(workspace, schedule, parts, faults):
    toml = f"[parallelism]\nmodule_fqns_per_model_part = {parts}"
    flags = f"{PP} 2 {P}pipeline_parallel_schedule {schedule}"
    assert get_faults(workspace, toml, flags, world_size=2) == faults


@pytest.mark.parametrize(
    "schedule, parts",
    [("1F1B", [FIRST[::-1], LAST]), ("Interleaved1F1B", QUARTERS), ("ZBVZeroBubble", QUARTERS)],
)
def test_parts_that_are_the_whole_model_are_accepted(workspace, schedule, parts):
    toml = f"[parallelism]\nmodule_fqns_per_model_part = {parts}"
    assert parse(workspace, toml, f"{PP} 2 {P}pipeline_parallel_schedule {schedule}", world_size=2)


def test_parts_are_not_looked_at_without_pipeline_parallelism(workspace):
    assert parse(workspace, '[parallelism]\nmodule_fqns_per_model_part = [["norm"]]')
