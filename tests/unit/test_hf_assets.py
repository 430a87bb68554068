"""config.json and tokenizer of an exported folder. Oracles: the published Llama 3.1 configs, torchtitan's logits and tokens."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torchtitan.components.tokenizer import HuggingFaceTokenizer
from torchtitan.models.llama3 import llama3_args, Llama3StateDictAdapter, Transformer, TransformerModelArgs
from transformers import AutoModelForCausalLM, AutoTokenizer

import torchtitan_simplefsdp
from torchtitan_simplefsdp.titan.convert import write_safetensors
from torchtitan_simplefsdp.titan.hf_assets import build_hf_config, write_hf_assets

TOKENIZER = str(Path(torchtitan_simplefsdp.__file__).parent / "assets" / "tokenizer")

# config.json of meta-llama/Llama-3.1-8B, -70B and -405B: what differs between them
PUBLISHED = {
    "8B": {"hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32, "num_attention_heads": 32},
    "70B": {"hidden_size": 8192, "intermediate_size": 28672, "num_hidden_layers": 80, "num_attention_heads": 64},
    "405B": {"hidden_size": 16384, "intermediate_size": 53248, "num_hidden_layers": 126, "num_attention_heads": 128},
}
PUBLISHED_FOR_ALL = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "num_key_value_heads": 8,
    "head_dim": 128,
    "vocab_size": 128256,
    "max_position_embeddings": 131072,
    "rms_norm_eps": 1e-05,
    "rope_theta": 500000.0,
    "rope_scaling": {
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
        "rope_type": "llama3",
    },
    "hidden_act": "silu",
    "attention_bias": False,
    "mlp_bias": False,
    "tie_word_embeddings": False,
}


@pytest.mark.parametrize("flavor", PUBLISHED)
def test_the_config_of_a_flavor_is_the_published_one(flavor):
    assert build_hf_config(llama3_args[flavor]) == PUBLISHED_FOR_ALL | PUBLISHED[flavor]


def test_a_run_on_short_sequences_keeps_the_models_context():
    assert build_hf_config(TransformerModelArgs(max_seq_len=64))["max_position_embeddings"] == 131072
    assert build_hf_config(TransformerModelArgs(max_seq_len=2**20))["max_position_embeddings"] == 2**20


@pytest.fixture(scope="module")
def exported(tmp_path_factory):
    """A small model with grouped heads and an uneven feed-forward size, as an exported folder."""
    folder = tmp_path_factory.mktemp("exported")
    model_args = TransformerModelArgs(
        dim=64, n_layers=2, n_heads=8, n_kv_heads=2, vocab_size=2048, multiple_of=8, ffn_dim_multiplier=1.3,
        rope_theta=500000, max_seq_len=128,
    )  # fmt: skip
    torch.manual_seed(0)
    with torch.no_grad():
        model = Transformer(model_args)
        model.init_weights()
    state = model.state_dict()
    write_safetensors(folder, state, state.__getitem__, Llama3StateDictAdapter(model_args, None).to_hf)
    write_hf_assets(folder, model_args, TOKENIZER, torch.float32)
    return folder, model


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_transformers_gives_torchtitans_logits(exported, attention):
    folder, model = exported
    tokens = torch.randint(2048, (2, 128), generator=torch.Generator().manual_seed(1))
    loaded, info = AutoModelForCausalLM.from_pretrained(
        folder, dtype="auto", attn_implementation=attention, output_loading_info=True
    )
    assert not any(info.values())  # no weight missing or left over
    with torch.no_grad():
        ours, theirs = model(tokens), loaded(tokens).logits
    assert theirs.dtype == torch.float32
    # not bitwise: the export reorders the dims of each head, so the sums in q.k run in another order; fp32 has 7 digits
    assert (ours - theirs).abs().max() < 1e-5 * ours.abs().max()


def test_transformers_gives_the_tokens_that_training_sees(exported):
    folder, _ = exported
    tokenizer, ours = AutoTokenizer.from_pretrained(folder), HuggingFaceTokenizer(TOKENIZER)
    for text in ("", "The list is a\n  def f(x): 12345 \u00e9"):
        expected = ours.encode(text, add_bos=True, add_eos=False)
        assert tokenizer(text).input_ids == expected
        # and torchtitan reads the exported tokenizer as it reads the original
        assert HuggingFaceTokenizer(str(folder)).encode(text, add_bos=True, add_eos=False) == expected
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id) == (ours.bos_id, ours.eos_id)
