"""A checkpoint of any layout loads under any other, bit for bit: one process is the oracle (checkpoint_matrix.py)."""

from __future__ import annotations

from pathlib import Path

import pytest

from .checkpoint_layouts import get_seed, LAYOUTS
from .checkpoint_matrix import find_differences, get_oracles, PRELOAD, run_matrix, save
from .collective_counter import FloatCollectives
from .ranks import RankPool


@pytest.fixture(scope="module")
def pool():
    pool = RankPool(PRELOAD)
    yield pool
    pool.close()


@pytest.fixture(scope="module")
def matrix(pool, tmp_path_factory):
    return run_matrix(pool, tmp_path_factory.mktemp("checkpoints"))


@pytest.mark.parametrize("name", LAYOUTS)
def test_the_state_that_a_layout_saves_is_that_of_one_process(matrix, name):
    assert matrix.differences[name, None] == []


@pytest.mark.parametrize("loaded", LAYOUTS)
def test_a_layout_loads_the_checkpoints_of_all_layouts_bitwise(matrix, loaded):
    assert {saved: matrix.differences[saved, loaded] for saved in LAYOUTS} == {saved: [] for saved in LAYOUTS}


@pytest.mark.parametrize("name", LAYOUTS)
def test_saving_and_loading_gather_no_parameter_or_state(matrix, name):
    assert matrix.collectives[name] == []


def get_plain_shapes() -> dict[str, tuple]:
    import torch
    from torchtitan.models.llama3 import Transformer

    from .checkpoint_state import MODEL_ARGS

    with torch.device("meta"):
        return {fqn: tensor.shape for fqn, tensor in Transformer(MODEL_ARGS).state_dict().items()}


@pytest.mark.parametrize("name", LAYOUTS)
def test_a_checkpoint_has_the_names_and_shapes_of_the_plain_model(pool, matrix, name):
    (model,) = pool.run(get_plain_shapes, 1)
    saved = matrix.saved_keys[name]
    parts = ("optimizer.", "lr_scheduler.", "train_state.", "dataloader")
    assert {key: shape for key, shape in saved.items() if not key.startswith(parts)} == model
    states = {f"optimizer.state.{fqn}.{state}" for fqn in model for state in ("step", "exp_avg", "exp_avg_sq")}
    assert {key for key in saved if key.startswith("optimizer.state.")} == states
    assert {key.removesuffix(".lr") for key in saved if key.endswith(".lr")} == {
        f"optimizer.param_groups.{fqn}" for fqn in model
    }
    assert saved == matrix.saved_keys["core, one process"]


def load_damaged(name: str, folder: Path, excluded: tuple[str, ...], flipped: str | None) -> dict[str, str]:
    """Load a layout's own checkpoint without some of its parts, then flip a bit of one parameter on rank 1."""
    import torch

    from .checkpoint_state import build_model_parts, TrainingState

    model_parts = build_model_parts(LAYOUTS[name], seed=0)
    state = TrainingState(LAYOUTS[name], model_parts, folder / str(get_seed(name)), excluded)
    assert state.manager.load()
    if flipped and torch.distributed.get_rank() == 1:
        stored = dict(model_parts[0].named_parameters())[flipped]  # model.output.weight would gather, on this rank only
        stored.detach().to_local().view(torch.int32)[0, 0] ^= 1
    return state.get_snapshot()


@pytest.mark.parametrize(
    "excluded, flipped, prefix",
    [
        (("optimizer",), None, "optimizer."),
        (("lr_scheduler",), None, "lr_scheduler."),
        (("train_state",), None, "train_state."),
        ((), "output.weight", "model.output.weight"),
    ],
    ids=["no optimizer", "no scheduler", "no train state", "one bit"],
)
def test_a_state_that_was_not_loaded_is_found(pool, tmp_path, excluded, flipped, prefix):
    name = "fully_shard 2"
    oracle = pool.run(get_oracles, 1, tmp_path)[0][name]
    pool.run(save, 2, name, tmp_path)
    differences = find_differences(pool.run(load_damaged, 2, name, tmp_path, excluded, flipped), oracle)
    assert differences and all(difference.startswith(prefix) for difference in differences)


def communicate() -> list[str]:
    """Gather a parameter as a forward does and as DTensor does, and send it with torch's own collective."""
    import torch

    from .checkpoint_state import build_model_parts

    (model,) = build_model_parts(LAYOUTS["fully_shard 2"], seed=0)
    with FloatCollectives() as collectives:
        sent = model.output.weight.detach()
        dict(model.named_parameters())["output.weight"].full_tensor()
        torch.distributed.broadcast(sent, src=0)
    return [op for op in collectives.seen if "wait" not in op and "wrap" not in op]


def test_collectives_on_a_parameter_are_seen(pool):
    gather = "_c10d_functional::all_gather_into_tensor"
    assert pool.run(communicate, 2) == [[gather, gather, "c10d::broadcast_"]] * 2
