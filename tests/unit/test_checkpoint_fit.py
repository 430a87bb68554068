"""What does not fit between a model and a checkpoint, in words; oracle: hand-written lines."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from safetensors.torch import save_file
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import distribute_tensor, Shard
from torch.testing._internal.distributed.fake_pg import FakeStore

from torchtitan_simplefsdp.titan.checkpoint_fit import get_misfits, read_shapes

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")  # saving needs no ranks
SAVED = {"a": torch.zeros(4, 2), "b": torch.zeros(3), "scalar": torch.zeros(())}


@pytest.fixture(params=["dcp", "safetensors", "pt"])
def folder(request, tmp_path):
    if request.param == "dcp":
        dcp.save({**SAVED, "step": 3}, checkpoint_id=tmp_path, no_dist=True)
    elif request.param == "safetensors":
        save_file(SAVED, tmp_path / "model.safetensors")
    else:
        torch.save({**SAVED, "step": 3}, tmp_path / "model.pt")
        return tmp_path / "model.pt"
    return tmp_path


def on_meta(**shapes):
    return {name: torch.empty(shape, device="meta", dtype=torch.bfloat16) for name, shape in shapes.items()}


def test_a_part_of_the_checkpoint_in_another_dtype_fits(folder):
    assert get_misfits(on_meta(a=(4, 2), scalar=()), read_shapes(folder)) == []


def test_missing_keys_are_counted_and_the_first_ones_named(folder):
    wanted = on_meta(a=(4, 2), c=(1,), d=(1,), e=(1,), f=(1,), g=(1,))
    assert get_misfits(wanted, read_shapes(folder)) == ["5 of 6 keys are missing in the checkpoint: c, d, e and 2 more"]


def test_other_shapes_are_named_with_both_beside_the_missing_keys(folder):
    assert get_misfits(on_meta(c=(1,), a=(2, 4), b=(3, 1)), read_shapes(folder)) == [
        "1 of 3 keys are missing in the checkpoint: c",
        "2 of 3 keys have another shape: a is [4, 2] there and [2, 4] here, b is [3] there and [3, 1] here",
    ]


def test_what_is_not_a_tensor_in_the_checkpoint_is_said_to_be_none(tmp_path):
    dcp.save({"step": 3}, checkpoint_id=tmp_path, no_dist=True)
    (line,) = get_misfits(on_meta(step=()), read_shapes(tmp_path))
    assert line == "1 of 1 keys have another shape: step is no tensor there and [] here"


def test_more_layers_than_the_whole_model_has_do_not_fit(tmp_path):
    saved = {"layers.0.w": torch.zeros(2), "layers.1.w": torch.zeros(2), "optimizer.state.layers.1.w": torch.zeros(2)}
    dcp.save(saved, checkpoint_id=tmp_path, no_dist=True)
    wanted = on_meta(**{"layers.0.w": (2,)})
    assert get_misfits(wanted, read_shapes(tmp_path)) == []  # one pipeline stage
    assert get_misfits(wanted, read_shapes(tmp_path), wanted) == [
        "1 keys of the checkpoint are layers too many here: layers.1.w"
    ]


def test_a_sharded_tensor_is_compared_by_its_global_shape(folder):
    dist.init_process_group("fake", rank=0, world_size=2, store=FakeStore())
    try:
        sharded = distribute_tensor(torch.zeros(4, 2), init_device_mesh("cpu", (2,)), [Shard(0)])
        assert sharded.to_local().shape == (2, 2)
        assert get_misfits({"a": sharded}, read_shapes(folder)) == []
    finally:
        dist.destroy_process_group()
