"""Hugging Face assets: what a folder of exported weights needs beside them, config.json and the tokenizer.

torchtitan writes .safetensors files and nothing else. With these files the folder is a model that `transformers` loads:
`AutoModelForCausalLM.from_pretrained(folder)`.

Not here: the weights (torchtitan's checkpoint manager, convert.py) and their names (torchtitan's Llama3StateDictAdapter).
"""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

import torch
from tokenizers import processors, Tokenizer
from torchtitan.components.tokenizer import HuggingFaceTokenizer
from torchtitan.models.llama3 import TransformerModelArgs
from torchtitan.models.llama3.model.model import FeedForward

COPIED_FILES = (
    "tokenizer_config.json",
    "special_tokens_map.json",
    "vocab.json",
    "vocab.txt",
    "merges.txt",
    "generation_config.json",
)
"""Copied from `model.hf_assets_path` where it has them."""


def build_hf_config(model_args: TransformerModelArgs) -> dict[str, Any]:
    """Return the architecture as `transformers` describes it, without dtype and token numbers.

    `max_position_embeddings` is that of all of torchtitan's flavors (as published for Llama 3.1), not the run's
    `training.seq_len`, unless that is more: a model that was trained further on short sequences keeps its context.
    """
    rope = model_args.rope_scaling_args
    with torch.device("meta"):  # torchtitan's own rounding gives the size
        feed_forward = FeedForward(
            model_args.dim, 4 * model_args.dim, model_args.multiple_of, model_args.ffn_dim_multiplier
        )
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": model_args.dim,
        "intermediate_size": feed_forward.w1.out_features,
        "num_hidden_layers": model_args.n_layers,
        "num_attention_heads": model_args.n_heads,
        "num_key_value_heads": model_args.n_kv_heads or model_args.n_heads,
        "head_dim": model_args.dim // model_args.n_heads,
        "vocab_size": model_args.vocab_size,
        "max_position_embeddings": max(model_args.max_seq_len, TransformerModelArgs.max_seq_len),
        "rms_norm_eps": model_args.norm_eps,
        "rope_theta": float(model_args.rope_theta),
        "rope_scaling": {
            "rope_type": "llama3",  # torchtitan applies it in every flavor
            "factor": rope.scaling_factor,
            "low_freq_factor": rope.low_freq_factor,
            "high_freq_factor": rope.high_freq_factor,
            "original_max_position_embeddings": rope.original_max_position_embeddings,
        },
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": False,
    }


def write_hf_assets(
    folder: str | os.PathLike, model_args: TransformerModelArgs, hf_assets_path: str, dtype: torch.dtype
) -> None:
    """Write config.json and the tokenizer's files into a folder, which exists; files of these names are replaced.

    Args:
        folder: with the exported weights.
        model_args: of the run, after `update_from_config`.
        hf_assets_path: `model.hf_assets_path` of the run.
        dtype: of the exported weights.

    In a distributed run one rank calls it.
    """
    folder, assets = Path(folder), Path(hf_assets_path)
    tokenizer = HuggingFaceTokenizer(hf_assets_path)
    config = build_hf_config(model_args)
    config |= {"bos_token_id": tokenizer.bos_id, "eos_token_id": tokenizer.eos_id}
    config["torch_dtype"] = str(dtype).removeprefix("torch.")
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    for name in COPIED_FILES:
        if (assets / name).is_file():
            shutil.copyfile(assets / name, folder / name)
    if (assets / "tokenizer.json").is_file():
        _begin_with_bos(assets / "tokenizer.json", tokenizer).save(str(folder / "tokenizer.json"), pretty=False)


def _begin_with_bos(path: Path, tokenizer: HuggingFaceTokenizer) -> Tokenizer:
    """Return a tokenizer that begins a text with bos.

    torchtitan does that itself in training, for transformers it has to be in tokenizer.json.
    """
    fast = Tokenizer.from_file(str(path))
    if tokenizer.bos_id is None or tokenizer.hf_adds_bos:
        return fast
    bos = processors.TemplateProcessing(
        single=f"{tokenizer.bos_token} $A",
        pair=f"{tokenizer.bos_token} $A {tokenizer.bos_token} $B",
        special_tokens=[(tokenizer.bos_token, tokenizer.bos_id)],
    )
    fast.post_processor = processors.Sequence([fast.post_processor, bos]) if fast.post_processor else bos
    return fast
