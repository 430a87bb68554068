"""Traced Llama steps against the published sizes of the models, the least bytes, and FLOPs by formula."""

from __future__ import annotations

from unittest import mock

import pytest

from torchtitan_simplefsdp.graph.machines import H100
from torchtitan_simplefsdp.graph.schedules import predict, SCHEDULES
from torchtitan_simplefsdp.graph.segments import build_step
from torchtitan_simplefsdp.graph.trace import Compute
from torchtitan_simplefsdp.graph.traffic import get_minimum_bytes
from torchtitan_simplefsdp.titan import traced_llama
from torchtitan_simplefsdp.titan.traced_llama import LAYER, Layout, trace_llama


@pytest.fixture(autouse=True)
def no_rebinds():
    """Globals of torchtitan stay as they are for other tests; all that a trace needs of them is the device."""
    with (
        mock.patch.object(traced_llama, "apply_rebinds", lambda config: None),
        mock.patch("torchtitan.distributed.parallel_dims.device_type", "cpu"),
    ):
        yield


@pytest.mark.parametrize(
    "layout, parameters, tp_local",
    [
        # 8.03, 70.6 and 405.9 billion. With TP 8 each rank has an eighth and whole norms, which are
        # (2 * layers + 1) * dim parameters.
        (Layout("8B", shard=8), 8_030_261_248, 8_030_261_248),
        (Layout("8B", replicate=8), 8_030_261_248, 8_030_261_248),
        (Layout("8B", replicate=2, shard=4, checkpoint="none"), 8_030_261_248, 8_030_261_248),
        (Layout("70B", shard=32, tp=8, checkpoint="full"), 70_553_706_496, (70_553_706_496 + 7 * 161 * 8192) // 8),
        (
            Layout("405B", replicate=16, shard=32, tp=8, checkpoint="full"),
            405_853_388_800,
            (405_853_388_800 + 7 * 253 * 16384) // 8,
        ),
    ],
)
def test_sizes_are_the_models_and_bytes_the_least(layout, parameters, tp_local):
    traced = trace_llama(layout)
    assert (traced.parameters, traced.tp_local_parameters) == (parameters, tp_local)
    step = build_step(traced.events, H100, ("dp_replicate", "fsdp"), {LAYER: traced.layers})
    for reshard in {False, layout.shard > 1}:
        least = get_minimum_bytes(tp_local, 2, 4, layout.shard, layout.replicate, reshard)
        for schedule in SCHEDULES.values():
            assert predict(step, H100, schedule, reshard).wire_bytes == pytest.approx(
                least, rel=1e-12
            )  # sums of floats


def test_rows_that_do_not_divide_are_padded():
    traced = trace_llama(Layout("8B", shard=4096))
    gathered = sum(
        e.bytes * (traced.layers if e.where == LAYER else 1)
        for e in traced.events
        if e[0] == "all_gather" and e.phase == "forward"
    )
    # 1024 rows of wk and wv, 14336 of w1 and w3, 128256 of both embeddings go up to 4096, 16384 and 131072
    missing = 32 * (2 * 3072 + 2 * 2048) * 4096 + 2 * 2816 * 4096
    assert gathered == 2 * (traced.parameters + missing)


def test_tensor_parallelism_divides_the_flops():
    flops = []
    for tp in (1, 8):
        traced = trace_llama(Layout("8B", shard=2, tp=tp))
        flops.append(sum(e.flops for e in traced.events if isinstance(e, Compute)))
    assert flops[0] == 8 * flops[1]


def test_flops_of_the_8b_model_are_those_of_the_formula():
    traced = trace_llama(Layout("8B", shard=8, checkpoint="none"))
    flops = sum(e.flops * (traced.layers if e.where == LAYER else 1) for e in traced.events if isinstance(e, Compute))
    products = 6 * 8192 * (8_030_261_248 - 128_256 * 4096 - 65 * 4096)  # no embedding, no norms
    attention = 32 * 8192**2 * 4096 * 2 * 7 // 2 * 2 // 2  # layers, square, width; 2 products forward, 5 backward; mask
    assert flops == products + attention
