"""Streams: numbered documents in equal shares, each read as windows of tokens from a position of three integers.

A stream is `bos document eos bos document eos ...` over one contiguous share, again and again, cut into windows of
seq_len + 1 tokens: those of torchtitan's `HuggingFaceTextDataset`. In a checkpoint that class has the tokens left over,
a list of any length; here three integers say the same, so a position is small, and DCP keeps it as a tensor:

[Note: position of a stream]
A window is cut as soon as there are tokens for it. So fewer than a window are left when a document is added, and the
next window takes all of those: after any window, the tokens left over are the end of the document added last. Its
number and how many of its tokens are left say where the stream is; encoding that one document again gives the tokens.

Not here: which streams a rank reads (dataloader.py); shuffling. A position is taken to be of the same documents and
tokenizer; only the number of documents is compared (by the loader).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
from torchtitan.components.tokenizer import BaseTokenizer
from torchtitan.hf_datasets.text_datasets import DATASETS
from torchtitan.tools.logging import logger


class Position(NamedTuple):
    """Where a stream is. See [Note: position of a stream].

    windows: taken since the stream began, over all loops.
    documents: taken in this loop.
    tokens: left over of the last of these documents.
    """

    windows: int = 0
    documents: int = 0
    tokens: int = 0


class Corpus:
    """The documents of a map-style dataset as tokens; workers get a copy, which holds no text."""

    def __init__(self, dataset: str, dataset_path: str | None, tokenizer: BaseTokenizer, seq_len: int) -> None:
        self._name = dataset.lower()
        config = DATASETS[self._name]
        path = dataset_path or config.path
        logger.info(f"Preparing {self._name} dataset from {path}")
        self._documents = config.loader(path)
        self._get_text = config.sample_processor
        self._tokenizer = tokenizer
        self._window = seq_len + 1

    def __len__(self) -> int:
        return len(self._documents)

    def read(self, stream: int, streams: int, position: Position) -> Iterator[tuple[np.ndarray, Position]]:
        """Yield the windows of one stream after `position`, for ever, each with the position behind it.

        Args:
            stream: which of the `streams` equal shares of the documents; there must be as many documents.
        """
        share = get_share(len(self), stream, streams)
        windows, documents, left = position
        tokens = self._encode(share[documents - 1])[-left:] if left else []
        begin = 0  # of what is left of `tokens`: a long document is not copied for each of its windows
        while True:
            while len(tokens) - begin < self._window:
                if documents == len(share):
                    logger.warning(f"Dataset {self._name}: share {stream} of {streams} is being re-looped")
                    documents = 0
                tokens = tokens[begin:] + self._encode(share[documents])
                begin = 0
                documents += 1
            begin += self._window
            windows += 1
            window = np.array(tokens[begin - self._window : begin], dtype=np.int64)
            yield window, Position(windows, documents, len(tokens) - begin)

    def _encode(self, document: int) -> list[int]:
        return self._tokenizer.encode(self._get_text(self._documents[document]), add_bos=True, add_eos=True)


def get_share(documents: int, stream: int, streams: int) -> range:
    """Return the numbers of a stream's documents: contiguous, the first streams one more where it does not divide."""
    quotient, rest = divmod(documents, streams)
    begin = stream * quotient + min(stream, rest)
    return range(begin, begin + quotient + (stream < rest))
