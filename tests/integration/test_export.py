"""From a run's checkpoint to text, to Hugging Face and back. Oracles: a plain forward loop, the checkpoint's own bits."""

from __future__ import annotations

import json
import os
import runpy
import subprocess
import sys
from dataclasses import replace

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torchtitan.components.tokenizer import HuggingFaceTokenizer
from torchtitan.models.llama3 import llama3_args, Llama3StateDictAdapter, Transformer
from transformers import AutoModelForCausalLM

from torchtitan_simplefsdp.titan.checkpoint_formats import find_checkpoint
from torchtitan_simplefsdp.titan.weights import load_weights

from .training_runs import LOSS, read_scalars, REPOSITORY, run_train

TOKENIZER = str(REPOSITORY / "torchtitan_simplefsdp" / "assets" / "tokenizer")
MODEL_ARGS = replace(llama3_args["debugmodel"], max_seq_len=64)
TRAINING = ["--training.seq_len", "64", "--training.local_batch_size", "2", "--debug.seed", "42", "--checkpoint.enable"]
TEN_STEPS = [*TRAINING, "--training.steps", "10", "--parallelism.tensor_parallel_degree", "2"]
PROMPTS = ["The", "A list is a sequence of"]
pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")  # reading needs no ranks


def run_generate(*argv, cwd):
    command = [sys.executable, str(REPOSITORY / "scripts" / "generate.py"), *map(str, argv)]
    environ = {key: value for key, value in os.environ.items() if key not in ("CONFIG_FILE", "WORLD_SIZE")}
    environ["PYTHONPATH"] = os.pathsep.join([str(REPOSITORY), *filter(None, [environ.get("PYTHONPATH")])])
    return subprocess.run(command, cwd=cwd, env=environ, text=True, capture_output=True, timeout=600)


def train(folder, *flags):
    result = run_train(2, *flags, "--job.dump_folder", str(folder), cwd=folder.parent)
    assert result.returncode == 0, result.stdout + result.stderr
    return folder


@pytest.fixture(scope="module")
def workplace(tmp_path_factory):
    return tmp_path_factory.mktemp("export")


@pytest.fixture(scope="module")
def trained(workplace):
    """The checkpoint of 10 steps with tensor parallelism."""
    return train(workplace / "trained", *TEN_STEPS) / "checkpoint" / "step-10"


@pytest.fixture(scope="module")
def weights(trained):
    """Its weights, read without any code of this package."""
    with torch.device("meta"):
        names = Transformer(MODEL_ARGS).state_dict()
    state = {name: torch.full(tensor.shape, torch.nan) for name, tensor in names.items()}
    dcp.load(state, checkpoint_id=trained, no_dist=True)
    return state


@pytest.fixture(scope="module")
def model(weights):
    model = Transformer(MODEL_ARGS)
    model.load_state_dict(weights)
    return model


@torch.no_grad()
def continue_plainly(model, prompt, count):
    """Append the most likely token `count` times, each by a forward of the whole text."""
    tokens = HuggingFaceTokenizer(TOKENIZER).encode(prompt, add_bos=True, add_eos=False)
    start = len(tokens)
    for _ in range(count):
        tokens.append(int(model(torch.tensor([tokens]))[0, -1].argmax()))
    return tokens[start:]


@pytest.mark.parametrize("ranks", [[], ["--tp", "4"]], ids=["1 rank", "tp 4"])
def test_greedy_text_is_that_of_a_plain_forward(trained, model, workplace, ranks):
    flags = [f"--prompt={prompt}" for prompt in PROMPTS]
    flags += ["--max-new-tokens", 16, "--json", "--training.seq_len", 64]
    result = run_generate("--checkpoint", trained, *ranks, *flags, cwd=workplace)
    assert result.returncode == 0, result.stderr
    completions = json.loads(result.stdout)
    assert [c["prompt"] for c in completions] == PROMPTS
    assert [c["tokens"] for c in completions] == [continue_plainly(model, prompt, 16) for prompt in PROMPTS]
    assert all(c["text"] == HuggingFaceTokenizer(TOKENIZER).decode(c["tokens"]) for c in completions)
    assert result.stderr == ""


def test_a_mistake_on_several_ranks_is_one_line(trained, workplace):
    flags = ["--tp", 2, "--prompt", "a", "--model.flavor", "8B"]
    result = run_generate("--checkpoint", trained, *flags, cwd=workplace)
    assert (result.returncode, result.stdout) == (2, "")
    (line,) = result.stderr.splitlines()
    assert "does not fit model.flavor='8B'" in line and "tok_embeddings.weight is [2048, 256] there" in line


def test_a_run_exports_its_weights_to_transformers(weights, model, workplace):
    run = train(workplace / "hf", *TEN_STEPS, "--checkpoint.last_save_in_hf", "--checkpoint.last_save_model_only")
    exported = find_checkpoint(run / "checkpoint")
    assert exported.format == "hf"
    state = {name: torch.full_like(tensor, torch.nan) for name, tensor in weights.items()}
    load_weights(state, exported, Llama3StateDictAdapter(MODEL_ARGS, None))
    assert all(torch.equal(state[name], weights[name]) for name in weights)

    assert not (exported.path / "sharded").exists()  # the weights once
    tokens = torch.randint(2048, (2, 64), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        ours = model(tokens)
        theirs = AutoModelForCausalLM.from_pretrained(exported.path, dtype="auto")(tokens).logits
    # not bitwise: the export reorders the dims of each head, so the sums in q.k run in another order; fp32 has 7 digits
    assert (ours - theirs).abs().max() < 1e-5 * ours.abs().max()


def test_a_run_starts_alike_from_a_converted_checkpoint_of_either_format(trained, workplace):
    convert = runpy.run_path(str(REPOSITORY / "scripts" / "convert_checkpoint.py"))["main"]
    as_hf, as_dcp = str(workplace / "as_hf"), str(workplace / "as_dcp")
    assert convert(["--input", str(trained), "--output", as_hf, "--to", "hf"]) == 0
    assert convert(["--input", as_hf, "--output", as_dcp, "--to", "dcp"]) == 0
    load = [*TRAINING, "--training.steps", "1", "--checkpoint.load_only", "--checkpoint.initial_load_model_only"]
    from_dcp = train(workplace / "from_dcp", *load, "--checkpoint.initial_load_path", as_dcp)
    in_hf = ["--checkpoint.initial_load_in_hf", "--checkpoint.initial_load_path", as_hf]
    from_hf = train(workplace / "from_hf", *load, *in_hf)
    losses = [read_scalars(run / "tb")[LOSS] for run in (from_dcp, from_hf)]
    first_loss = read_scalars(workplace / "trained" / "tb")[LOSS][0]
    assert losses[0] == losses[1] and losses[0][0] < first_loss - 0.3  # the weights were loaded
