"""Generation: text from a checkpoint on one rank or with tensor parallelism, each token by a forward of the whole sequence.

Without a cache of keys and values a token costs a whole forward, and is what a plain forward gives. Sequences of one batch
are padded behind their ends, where causal attention does not look, so every prompt gets the positions it has alone.

Not here: the command line (scripts/generate.py), starting ranks (launch.py), finding and reading weights (weights.py).
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import replace
from typing import Literal, NamedTuple

import torch
from torch import nn
from torchtitan.components.tokenizer import HuggingFaceTokenizer
from torchtitan.config import JobConfig
from torchtitan.distributed import ParallelDims
from torchtitan.models.llama3 import TransformerModelArgs
from torchtitan.tools import utils

from .checkpoint_formats import Checkpoint
from .parallelize import apply_tp
from .rebind import apply_rebinds
from .weights import build_adapter, build_meta_model, get_model_args, load_weights, validate_fit

Finish = Literal["eos", "max_new_tokens", "max_seq_len"]


class Sampling(NamedTuple):
    """How the next token is chosen."""

    max_new_tokens: int
    temperature: float  # 0: the most likely token
    top_k: int | None  # choose among so many of the most likely tokens; None: among all
    seed: int  # every prompt draws from it by itself, so its text does not depend on the other prompts


class Completion(NamedTuple):
    """What follows one prompt."""

    prompt: str
    text: str
    tokens: list[int]  # the new ones, without eos
    finish: Finish


class GenerationError(ValueError):
    """A prompt or tokenizer that the model cannot take; one line."""


def generate(job_config: JobConfig, checkpoint: Checkpoint, prompts: list[str], sampling: Sampling) -> list[Completion]:
    """Complete prompts with a checkpoint's model; with tensor parallelism every rank calls it and returns the same.

    Raises: CheckpointError, GenerationError; the same on every rank, before any process group exists.
    """
    # one document per sequence: plain causal attention is what flex and varlen attention compute
    model_args = replace(get_model_args(job_config), attn_type="sdpa", attn_mask_type="causal")
    tokenizer = HuggingFaceTokenizer(job_config.model.hf_assets_path)
    encoded = encode_prompts(prompts, tokenizer, model_args)
    model = build_model(job_config, model_args, checkpoint)
    tp = job_config.parallelism.tensor_parallel_degree
    generated = generate_tokens(
        lambda sequences: get_next_logits(model, sequences, multiple_of=tp),
        encoded,
        sampling,
        eos_id=tokenizer.eos_id,
        max_seq_len=model_args.max_seq_len,
    )
    return [
        Completion(prompt, tokenizer.decode(tokens), tokens, finish)
        for prompt, (tokens, finish) in zip(prompts, generated)
    ]


def encode_prompts(
    prompts: list[str], tokenizer: HuggingFaceTokenizer, model_args: TransformerModelArgs
) -> list[list[int]]:
    """Return the tokens of each prompt, bos first, as in training.

    Raises: GenerationError, unless tokenizer and prompts fit the model.
    """
    if tokenizer.get_vocab_size() > model_args.vocab_size:
        raise GenerationError(
            f"the tokenizer has {tokenizer.get_vocab_size()} tokens and the model {model_args.vocab_size}. Pass the "
            "--model.hf_assets_path that the model was trained with."
        )
    encoded = [tokenizer.encode(prompt, add_bos=True, add_eos=False) for prompt in prompts]
    for prompt, tokens in zip(prompts, encoded):
        if not 0 < len(tokens) < model_args.max_seq_len:
            raise GenerationError(
                f"prompt {prompt[:20]!r} has {len(tokens)} tokens. The model takes 1 to {model_args.max_seq_len - 1}, one "
                "less than its sequence length; change the prompt or --training.seq_len."
            )
    return encoded


def build_model(job_config: JobConfig, model_args: TransformerModelArgs, checkpoint: Checkpoint) -> nn.Module:
    """Build the model on this rank's device, with a checkpoint's weights; with tensor parallelism its part of it.

    Raises: CheckpointError, on every rank, before any process group exists.
    """
    tp = job_config.parallelism.tensor_parallel_degree
    # sequences are padded to a multiple of tp, and the position table has to cover the padding
    model_args = replace(model_args, max_seq_len=-(-model_args.max_seq_len // tp) * tp)
    model = build_meta_model(job_config, model_args)
    adapter = build_adapter(job_config, model_args)
    validate_fit(model.state_dict(), checkpoint, adapter, job_config.model.flavor)
    apply_rebinds(job_config)  # on CPU: torchtitan's name of the device
    device = torch.device(utils.device_type, int(os.environ.get("LOCAL_RANK", 0)))
    utils.device_module.set_device(device)
    if tp > 1:
        torch.distributed.init_process_group()
        job_config.parallelism.disable_loss_parallel = True  # every rank gets the logits of the whole vocabulary
        apply_tp(model, ParallelDims(1, 1, 1, tp, 1, 1, 1, world_size=tp), job_config)
    model.to_empty(device=device)
    with device:
        model.freqs_cis = model._precompute_freqs_cis()  # the one buffer, which no checkpoint has
    load_weights(model.state_dict(), checkpoint, adapter)
    return model.eval()


@torch.no_grad()
def get_next_logits(model: nn.Module, sequences: list[list[int]], multiple_of: int) -> torch.Tensor:
    """Return the logits of the token after each sequence: [sequences, vocabulary], float32, on the CPU.

    Args:
        multiple_of: what the model needs the length of its input to be a multiple of.
    """
    length = -(-max(map(len, sequences)) // multiple_of) * multiple_of
    tokens = torch.zeros(len(sequences), length, dtype=torch.int64)
    for row, sequence in enumerate(sequences):
        tokens[row, : len(sequence)] = torch.tensor(sequence)
    logits = model(tokens.to(model.freqs_cis.device))
    last = torch.tensor([len(sequence) - 1 for sequence in sequences], device=logits.device)
    return logits[torch.arange(len(sequences), device=logits.device), last].float().cpu()


def generate_tokens(
    get_logits: Callable[[list[list[int]]], torch.Tensor],
    prompts: list[list[int]],
    sampling: Sampling,
    *,
    eos_id: int | None,
    max_seq_len: int,
) -> list[tuple[list[int], Finish]]:
    """Append tokens to each prompt until eos, `max_new_tokens` or a length of `max_seq_len`.

    Args:
        get_logits: from sequences of any lengths to the logits of their next tokens, one row each.
        prompts: tokens of each, at least one and fewer than `max_seq_len`.

    Returns:
        The new tokens of each prompt without eos, and why they end.
    """
    generators = [torch.Generator().manual_seed(sampling.seed) for _ in prompts]
    new_tokens: list[list[int]] = [[] for _ in prompts]
    finishes: list[Finish | None] = [None if sampling.max_new_tokens else "max_new_tokens" for _ in prompts]
    while active := [i for i, finish in enumerate(finishes) if finish is None]:
        logits = get_logits([prompts[i] + new_tokens[i] for i in active])
        for i, row in zip(active, logits):
            token = choose_token(row, sampling, generators[i])
            if token == eos_id:
                finishes[i] = "eos"
                continue
            new_tokens[i].append(token)
            if len(new_tokens[i]) == sampling.max_new_tokens:
                finishes[i] = "max_new_tokens"
            elif len(prompts[i]) + len(new_tokens[i]) == max_seq_len:
                finishes[i] = "max_seq_len"
    return list(zip(new_tokens, finishes))


def choose_token(logits: torch.Tensor, sampling: Sampling, generator: torch.Generator) -> int:
    """Choose a token by its logits [vocabulary]; of equally likely ones greedy choice takes the first."""
    if sampling.temperature == 0:
        return int(logits.argmax())
    if sampling.top_k is not None:
        kth = logits.topk(min(sampling.top_k, len(logits))).values[-1]
        logits = logits.masked_fill(logits < kth, -torch.inf)
    probabilities = torch.softmax(logits / sampling.temperature, dim=-1)
    return int(torch.multinomial(probabilities, 1, generator=generator))
