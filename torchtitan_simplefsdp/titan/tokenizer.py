"""Training a byte-level BPE tokenizer, in the form torchtitan loads from `model.hf_assets_path`.

The package ships one of 2048 tokens in `assets/tokenizer`, trained on dataset `pydoc`, so that a
first run downloads nothing; torchtitan's llama3 debug model has that vocabulary. The `tokenizers`
library trains it, deterministically: the same documents give the same bytes.

Not here: adding bos and eos to a text. torchtitan does that, as its caller asks. A special token
that is spelled out in a text becomes that token, as with Llama 3's own tokenizer.
"""

import hashlib
import json
import os
from collections.abc import Iterable, Iterator

from tokenizers import decoders, models, pre_tokenizers, Regex, Tokenizer, trainers

BOS_TOKEN = "<|begin_of_text|>"
EOS_TOKEN = "<|end_of_text|>"
_MIN_VOCAB_SIZE = 256 + 2  # every byte, bos, eos

# Llama 3's pattern: words, numbers of up to three digits, punctuation, blanks.
_WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


def train_tokenizer(
    documents: Iterable[str], vocab_size: int, output: str, dataset: str
) -> dict[str, str | int]:
    """Train a tokenizer and write `tokenizer.json` and `tokenizer_config.json` into a folder.

    Args:
        documents: the texts; iterated once.
        vocab_size: tokens, including the 256 bytes, bos and eos.
        output: the folder; created if missing, the two files in it are overwritten.
        dataset: the dataset's name, for the record of what the tokenizer was trained on.

    Returns:
        That record, which `tokenizer_config.json` holds as "trained_on": dataset, documents,
        bytes (of UTF-8) and sha256 (of all texts in order).

    Raises:
        ValueError: `vocab_size` is below 258 or more than the text yields; nothing is written.
    """
    if vocab_size < _MIN_VOCAB_SIZE:
        raise ValueError(
            f"train_tokenizer: vocab_size={vocab_size} is below {_MIN_VOCAB_SIZE}, "
            "which 256 bytes, bos and eos need. Choose a larger one."
        )
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(_WORDS), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[BOS_TOKEN, EOS_TOKEN],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    trained_on = {"dataset": dataset, "documents": 0, "bytes": 0, "sha256": ""}
    tokenizer.train_from_iterator(_record(documents, trained_on), trainer)
    if (found := tokenizer.get_vocab_size()) < vocab_size:
        raise ValueError(
            f"train_tokenizer: the text yields {found} tokens, fewer than vocab_size={vocab_size}. "
            f"Choose at most {found}, or add text."
        )

    os.makedirs(output, exist_ok=True)
    tokenizer.save(os.path.join(output, "tokenizer.json"), pretty=False)
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": BOS_TOKEN,
        "eos_token": EOS_TOKEN,
        # For callers that do not say: a prompt begins with bos and is not ended.
        "add_bos_token": True,
        "add_eos_token": False,
        "trained_on": trained_on,
    }
    with open(os.path.join(output, "tokenizer_config.json"), "w", encoding="utf-8") as f:
        f.write(json.dumps(config, indent=2) + "\n")
    return trained_on


def _record(documents: Iterable[str], trained_on: dict[str, str | int]) -> Iterator[str]:
    """Pass the documents on, and note in `trained_on` what they were."""
    digest = hashlib.sha256()
    for document in documents:
        raw = document.encode()
        digest.update(raw)
        trained_on["documents"] += 1
        trained_on["bytes"] += len(raw)
        yield document
    trained_on["sha256"] = digest.hexdigest()
