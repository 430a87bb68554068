"""Choosing tokens and ending sequences. Oracles: hand-made logits, and a plain forward of one sequence alone."""

from __future__ import annotations

import runpy
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torchtitan.models.llama3 import Transformer, TransformerModelArgs

from torchtitan_simplefsdp.titan.generate import (
    choose_token,
    encode_prompts,
    generate_tokens,
    GenerationError,
    get_next_logits,
    Sampling,
)

GREEDY = Sampling(max_new_tokens=4, temperature=0.0, top_k=None, seed=0)
EOS = 9
MODEL_ARGS = TransformerModelArgs(dim=32, n_layers=2, n_heads=4, vocab_size=50, max_seq_len=24)


def count_up(sequences):
    """Logits of a model whose next token is the last one plus 1."""
    return torch.nn.functional.one_hot(torch.tensor([s[-1] + 1 for s in sequences]), 20).float()


@pytest.mark.parametrize(
    "prompt, expected",
    [
        ([1], ([2, 3, 4, 5], "max_new_tokens")),
        ([7], ([8], "eos")),
        ([8], ([], "eos")),
        ([0, 0, 0, 0, 3], ([4], "max_seq_len")),
    ],
)
def test_a_sequence_ends_at_eos_at_the_asked_number_or_at_the_models_length(prompt, expected):
    assert generate_tokens(count_up, [prompt], GREEDY, eos_id=EOS, max_seq_len=6) == [expected]
    # and so it does beside others
    batch = generate_tokens(count_up, [[7], prompt, [1]], GREEDY, eos_id=EOS, max_seq_len=6)
    assert batch[1] == expected


def test_a_prompt_draws_the_same_text_alone_and_beside_others():
    def get_logits(sequences):
        return torch.stack([torch.arange(20.0) * 0.1 + len(s) for s in sequences])

    sampling = Sampling(max_new_tokens=8, temperature=1.0, top_k=None, seed=5)
    alone = generate_tokens(get_logits, [[1, 2]], sampling, eos_id=None, max_seq_len=99)
    assert generate_tokens(get_logits, [[3], [1, 2], [4]], sampling, eos_id=None, max_seq_len=99)[1] == alone[0]
    other_seed = generate_tokens(get_logits, [[1, 2]], sampling._replace(seed=6), eos_id=None, max_seq_len=99)
    assert other_seed != alone


def test_greedy_choice_takes_the_first_of_equals():
    assert choose_token(torch.tensor([0.0, 2.0, 2.0]), GREEDY, torch.Generator()) == 1


def test_top_k_and_temperature_shape_what_is_drawn():
    logits = torch.tensor([1.0, 3.0, 2.0, 0.0])
    generator = torch.Generator().manual_seed(0)

    def count(**change):
        sampling = Sampling(1, 1.0, None, 0)._replace(**change)
        drawn = torch.tensor([choose_token(logits, sampling, generator) for _ in range(2000)])
        return torch.bincount(drawn, minlength=4) / 2000

    assert count(top_k=1)[1] == 1
    assert count(top_k=2)[[0, 3]].sum() == 0
    # 2000 draws: the standard deviation of a share is at most 0.011, five of them are 0.056
    assert (count() - logits.softmax(0)).abs().max() < 0.056
    assert (count(temperature=2.0) - (logits / 2).softmax(0)).abs().max() < 0.056


@pytest.mark.parametrize("multiple_of", [1, 4])
def test_padding_behind_the_end_leaves_the_logits_of_a_sequence_alone(multiple_of):
    torch.manual_seed(0)
    with torch.no_grad():
        model = Transformer(MODEL_ARGS)
        model.init_weights()
        sequences = [[1, 2, 3], [4, 5, 6, 7, 8, 9, 10], [11]]
        alone = torch.stack([model(torch.tensor([sequence]))[0, -1] for sequence in sequences])
    batched = get_next_logits(model, sequences, multiple_of)
    # not bitwise: a matrix multiplication of another height may sum in another order; fp32 has 7 digits
    torch.testing.assert_close(batched, alone, rtol=1e-5, atol=1e-5)


class Tokenizer(SimpleNamespace):
    def encode(self, text, add_bos, add_eos):
        return [0] * add_bos + [1] * len(text)

    def get_vocab_size(self):
        return self.vocab_size


def test_a_prompt_must_leave_room_for_one_token():
    tokenizer = Tokenizer(vocab_size=50)
    assert len(encode_prompts(["a" * 22], tokenizer, MODEL_ARGS)[0]) == 23
    with pytest.raises(GenerationError, match="prompt 'aaaaaaaaaaaaaaaaaaaa' has 24 tokens. The model takes 1 to 23,"):
        encode_prompts(["b", "a" * 23], tokenizer, MODEL_ARGS)


def test_a_tokenizer_with_more_tokens_than_the_model_is_refused():
    with pytest.raises(GenerationError, match="the tokenizer has 51 tokens and the model 50"):
        encode_prompts(["a"], Tokenizer(vocab_size=51), MODEL_ARGS)
    assert encode_prompts(["a"], Tokenizer(vocab_size=51), replace(MODEL_ARGS, vocab_size=64)) == [[0, 1]]


@pytest.mark.parametrize(
    "argv, complaint",
    [
        (["--temperature", "-1"], "--temperature=-1.0 must be at least 0"),
        (["--temperature", "nan"], "--temperature=nan must be at least 0"),
        (["--top-k", "0"], "--top-k=0 must be at least 1"),
        (["--max-new-tokens", "0"], "--max-new-tokens=0 must be at least 1"),
        (["--tp", "0"], "--tp=0 must be at least 1"),
        (["--seed", "-1"], "--seed=-1 must be from 0 to 2**63 - 1"),
    ],
)
def test_the_command_refuses_impossible_numbers(argv, complaint, capsys):
    script = runpy.run_path(str(Path(__file__).parents[2] / "scripts" / "generate.py"))
    with pytest.raises(SystemExit):
        script["parse_args"](["--checkpoint", "x", "--prompt", "y", *argv])
    assert complaint in capsys.readouterr().err
