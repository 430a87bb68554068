"""Conversions between checkpoint formats. Oracle: the bits of the weights that the first checkpoint was saved from."""

from __future__ import annotations

import json
import runpy
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torchtitan.models.llama3 import llama3_args, Transformer, TransformerModelArgs

from torchtitan_simplefsdp.titan import convert as convert_module
from torchtitan_simplefsdp.titan.checkpoint_formats import CheckpointError, find_checkpoint
from torchtitan_simplefsdp.titan.config.check import parse_job_config
from torchtitan_simplefsdp.titan.convert import convert
from torchtitan_simplefsdp.titan.train_spec import register
from torchtitan_simplefsdp.titan.weights import build_adapter, get_model_args, load_weights

REPOSITORY = Path(__file__).parents[2]
FLAGS = ["--job.config_file", str(REPOSITORY / "train_configs" / "llama3_debug.toml")]
MODEL_ARGS = TransformerModelArgs(
    dim=64, n_layers=2, n_heads=8, n_kv_heads=2, vocab_size=2048, multiple_of=8, rope_theta=500000
)
pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")  # saving needs no ranks


@pytest.fixture
def config(monkeypatch):
    """The configuration of a small model with grouped heads."""
    register()
    monkeypatch.setitem(llama3_args, "tiny", MODEL_ARGS)
    monkeypatch.setitem(llama3_args, "tiny_deep", TransformerModelArgs(**vars(MODEL_ARGS) | {"n_layers": 3}))
    return parse_job_config([*FLAGS, "--model.flavor", "tiny"], 1, model_only=True)


@pytest.fixture
def saved(tmp_path, config):
    """A DCP checkpoint of a run, with more in it than weights, and the weights."""
    torch.manual_seed(0)
    with torch.no_grad():
        model = Transformer(MODEL_ARGS)
        model.init_weights()
    weights = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    state = {**weights, "optimizer": {"state": {"norm.weight": {"exp_avg": torch.ones(64)}}}, "train_state": {"step": 3}}
    dcp.save(state, checkpoint_id=tmp_path / "checkpoint" / "step-3", no_dist=True)
    return find_checkpoint(tmp_path / "checkpoint"), weights


def read(config, path):
    """Load a checkpoint into tensors that hold something else."""
    model_args = get_model_args(config)
    with torch.device("meta"):
        meta = Transformer(model_args).state_dict()
    state = {name: torch.full(tensor.shape, torch.nan) for name, tensor in meta.items()}
    load_weights(state, find_checkpoint(path), build_adapter(config, model_args))
    return state


def assert_equal(state, expected):
    assert state.keys() == expected.keys()
    assert all(torch.equal(state[name], expected[name]) for name in expected)


# every ordered pair of formats is in it
CHAIN = ["dcp", "hf", "hf", "dcp", "pt", "pt", "hf", "pt", "dcp"]


def test_conversions_between_all_formats_keep_every_bit(saved, config, tmp_path):
    source, weights = saved
    for number, to in enumerate(CHAIN):
        target = tmp_path / (f"{number}.pt" if to == "pt" else str(number))
        convert(config, source, target, to, None)
        source = find_checkpoint(target)
        assert source.format == to
        assert_equal(read(config, target), weights)
    assert len({pair for pair in zip(["dcp", *CHAIN], CHAIN)}) == 9


@pytest.mark.parametrize("to, name", [("dcp", "out"), ("hf", "out"), ("pt", "out.pt")])
def test_a_dtype_is_what_every_weight_is_rounded_to(saved, config, tmp_path, to, name):
    source, weights = saved
    convert(config, source, tmp_path / name, to, torch.bfloat16)
    rounded = {name: tensor.bfloat16() for name, tensor in weights.items()}
    assert_equal(read(config, tmp_path / name), {name: tensor.float() for name, tensor in rounded.items()})
    if to == "pt":
        assert_equal(torch.load(tmp_path / name, weights_only=True), rounded)
    if to == "hf":
        assert json.loads((tmp_path / "out" / "config.json").read_text())["torch_dtype"] == "bfloat16"


def test_large_models_become_several_files_with_an_index(saved, config, tmp_path, monkeypatch):
    source, weights = saved
    embedding_bytes = weights["tok_embeddings.weight"].nbytes
    monkeypatch.setattr(convert_module, "FILE_BYTES", embedding_bytes)
    convert(config, source, tmp_path / "out", "hf", None)
    files = sorted((tmp_path / "out").glob("*.safetensors"))
    assert [file.name for file in files] == [f"model-0000{i}-of-00003.safetensors" for i in (1, 2, 3)]
    assert all(file.stat().st_size < embedding_bytes + 10_000 for file in files)  # the headers
    assert all(file.stat().st_mode & 0o777 == (tmp_path / "out" / "config.json").stat().st_mode & 0o777 for file in files)
    assert_equal(read(config, tmp_path / "out"), weights)


def test_a_conversion_that_fails_leaves_nothing(saved, config, tmp_path, monkeypatch):
    def fail(*args):
        raise OSError("No space left on device")

    monkeypatch.setattr(convert_module, "write_hf_assets", fail)  # after the weights are written
    before = sorted(tmp_path.iterdir())
    with pytest.raises(CheckpointError, match="to .*out' failed .OSError: No space left on device.. Nothing of it is left"):
        convert(config, saved[0], tmp_path / "out", "hf", None)
    assert sorted(tmp_path.iterdir()) == before


def test_what_a_killed_conversion_left_is_no_checkpoint_and_the_next_one_removes_it(saved, config, tmp_path):
    partial = tmp_path / ".out.partial"
    partial.mkdir()
    (partial / "model.safetensors").write_bytes(b"half")
    with pytest.raises(CheckpointError, match="not found"):
        find_checkpoint(tmp_path / "out")
    convert(config, saved[0], tmp_path / "out", "dcp", None)
    assert not partial.exists() and find_checkpoint(tmp_path / "out").format == "dcp"


def run_script(*argv):
    script = runpy.run_path(str(REPOSITORY / "scripts" / "convert_checkpoint.py"))
    return script["main"]([*map(str, argv), "--model.flavor", "tiny", "--config", FLAGS[1]])


def test_the_command_refuses_in_one_line(saved, config, tmp_path, capsys):
    checkpoint = tmp_path / "checkpoint"
    cases = {
        (tmp_path / "nowhere", "new", "dcp"): "nowhere' not found",
        (tmp_path, "new", "dcp"): "holds no checkpoint",
        (checkpoint, "checkpoint", "hf"): "exists. Remove it",
        (checkpoint, "new.pt", "hf"): "is no name for format 'hf'",
        (checkpoint, "new", "pt"): "is no name for format 'pt'",
    }
    for (source, target, to), complaint in cases.items():
        assert run_script("--input", source, "--output", tmp_path / target, "--to", to) == 2
        error = capsys.readouterr().err
        assert complaint in error and error.count("\n") == 1, error
    with pytest.raises(SystemExit):
        run_script("--input", checkpoint, "--output", tmp_path / "new")
    assert "add --to dcp or --to hf" in capsys.readouterr().err


@pytest.mark.parametrize(
    "flavor, complaints",
    [
        ("debugmodel", ["tok_embeddings.weight is [2048, 64] there and [2048, 256] here", "36 of 57 keys are missing"]),
        ("tiny_deep", ["9 of 30 keys are missing in the checkpoint: layers.2.attention.wq.weight"]),
    ],
)
def test_another_flavor_does_not_fit(saved, config, tmp_path, flavor, complaints):
    config.model.flavor = flavor
    with pytest.raises(CheckpointError) as error:
        convert(config, saved[0], tmp_path / "out.pt", "pt", None)
    assert all(complaint in str(error.value) for complaint in complaints), error.value
    assert not (tmp_path / "out.pt").exists()


@pytest.mark.parametrize("to, name, file", [("pt", "out.pt", "."), ("hf", "out", "model.safetensors")])
@pytest.mark.parametrize("damage", [lambda data: data[: len(data) // 2], lambda data: b"x" * 100], ids=["cut off", "other"])
def test_a_file_that_cannot_be_read_is_one_line(saved, config, tmp_path, to, name, file, damage):
    convert(config, saved[0], tmp_path / name, to, None)
    path = tmp_path / name / file
    path.write_bytes(damage(path.read_bytes()))
    with pytest.raises(CheckpointError, match="cannot be read") as error:
        convert(config, find_checkpoint(tmp_path / name), tmp_path / "next", "dcp", None)
    assert "\n" not in str(error.value) and not (tmp_path / "next").exists()


def test_an_unfinished_latest_checkpoint_is_passed_over(saved, tmp_path):
    (tmp_path / "checkpoint" / "step-5").mkdir()
    (tmp_path / "checkpoint" / "step-5" / "__0_0.distcp").write_bytes(b"half")
    assert find_checkpoint(tmp_path / "checkpoint").path.name == "step-3"
    (tmp_path / "checkpoint" / "step-3" / ".metadata").unlink()
    with pytest.raises(CheckpointError, match="holds no checkpoint: step-5 was not finished .*; step-3 was not finished"):
        find_checkpoint(tmp_path / "checkpoint")
