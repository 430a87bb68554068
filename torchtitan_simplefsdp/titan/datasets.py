"""Datasets `pydoc` (embedded text) and `text` (the user's files), registered with torchtitan.

streams.py cuts a share of them (`bos document eos bos document eos ...`) into windows of seq_len + 1 for training;
torchtitan's own dataset class does for validation.

[Note: map-style datasets]
Both are map-style: documents are numbered, and the position in a checkpoint is made of such numbers,
so it travels to any layout (dataloader.py). `text` is a table of locations, and a transform reads a
document when its row is taken, so nothing is copied, cached or held in memory. `load_dataset` was tried
and left aside (datasets 5.2.0):
- Map-style, it writes an Arrow copy of the corpus below the home directory, or holds one per rank.
- Streaming, a resume after the first loop starts the data over: its state names an epoch that
  torchtitan does not restore. A second data loader worker spins for ever when there is one file.
  It deals whole files to ranks, whatever their size, if their number allows, does not name the file
  of a broken JSON line, and leaves lock files below the home directory.

Not here: shuffling between loops; dealing to ranks and data loader workers (dataloader.py; torchtitan 0.2.2 repeats a
map-style dataset in each worker, so validation takes one at most).
"""

import os
from array import array
from functools import lru_cache

from datasets import Dataset
from torchtitan.hf_datasets import DatasetConfig
from torchtitan.hf_datasets.text_datasets import DATASETS

from torchtitan_simplefsdp.titan.corpus import get_pydoc_documents
from torchtitan_simplefsdp.titan.text_files import find_text_files, index_text_file, read_document

# Numbered documents, of which every worker of torchtitan's own loader would read all; it splits only streamed datasets.
MAP_STYLE_DATASETS = ("pydoc", "text", "c4_test")

# What a loader gets when no dataset_path is configured; torchtitan logs it as the data's source.
_PYDOC_SOURCE = "pydoc_data.topics"
_NO_PATH = ""


def register_datasets() -> None:
    """Add `pydoc` and `text` to torchtitan's table of datasets, for training and validation.

    Calling it again changes nothing.
    """
    DATASETS["pydoc"] = DatasetConfig(_PYDOC_SOURCE, load_pydoc, _get_text)
    DATASETS["text"] = DatasetConfig(_NO_PATH, load_text, _get_text)


def validate_dataset(dataset: str, dataset_path: str | None, shares: int, section: str = "training") -> None:
    """Raise if the configured dataset cannot be dealt into so many shares.

    A share without documents would loop over them for ever, while the other ranks wait for it.
    Datasets other than `pydoc` and `text` are not looked at.

    Args:
        dataset: `training.dataset` or `validation.dataset`, in any case, as torchtitan takes it.
        dataset_path: the `dataset_path` next to it; None if there is none.
        shares: sequences of a step for training, data-parallel ranks for validation.
        section: "training" or "validation", for the message.

    Raises:
        FileNotFoundError: nothing at the path, or this Python lacks the embedded text.
        ValueError: unusable files, no documents, or fewer documents than shares.
    """
    name = dataset.lower()
    if name == "pydoc":
        source = f"{section}.dataset='pydoc'"
        documents = load_pydoc(dataset_path or _PYDOC_SOURCE)
    elif name == "text":
        source = f"{section}.dataset_path='{dataset_path}'"
        documents = load_text(dataset_path or _NO_PATH)
    else:
        return
    if len(documents) < shares:
        what, remedy = {
            "training": ("sequences per step", f"use a global batch of at most {len(documents)} sequences"),
            "validation": ("data-parallel ranks", f"use at most {len(documents)} of these ranks"),
        }[section]
        raise ValueError(
            f"{source} has {len(documents)} documents for {shares} {what}, and each needs one. "
            f"Add documents, or {remedy}."
        )


def load_pydoc(path: str) -> Dataset:
    """Return the embedded text, one document per row. See `corpus`.

    Raises:
        FileNotFoundError: this Python lacks the text.
        ValueError: a path was configured; this dataset reads no files.
    """
    if path != _PYDOC_SOURCE:
        raise ValueError(
            f"dataset 'pydoc' reads no files, got dataset_path='{path}'. "
            "Use dataset='text' for files of your own, or remove dataset_path."
        )
    return Dataset.from_dict({"text": get_pydoc_documents()})


def load_text(path: str) -> Dataset:
    """Return the documents of the user's files, one per row, read when the row is taken.

    See `text_files` for what a document is, and [Note: map-style datasets].

    Args:
        path: a file, a folder or a glob pattern; see `find_text_files`.

    Raises:
        FileNotFoundError: nothing there.
        ValueError: no path, unusable files, or no documents.
    """
    if not path:
        raise ValueError(
            "dataset 'text' needs a dataset_path: a file, a folder or a glob pattern, "
            "for example training.dataset_path='my_texts/*.txt'."
        )
    files = find_text_files(path)
    stats = [os.stat(file) for file in files]
    versions = tuple((file, stat.st_size, stat.st_mtime_ns) for file, stat in zip(files, stats))
    documents = _index_files(versions)
    if len(documents) == 0:
        raise ValueError(
            f"dataset 'text': no documents in '{path}' ({len(files)} empty files). "
            "Point dataset_path at files with text."
        )
    return documents


# Checking the configuration, training and validation often name the same files. Two entries: one
# for training, one for validation. The size and time of a file make a changed one a new entry.
@lru_cache(maxsize=2)
def _index_files(versions: tuple[tuple[str, int, int], ...]) -> Dataset:
    files = [file for file, _, _ in versions]
    locations = {"file": array("q"), "first": array("q"), "second": array("q")}
    for number, file in enumerate(files):
        for first, second in index_text_file(file):
            locations["file"].append(number)
            locations["first"].append(first)
            locations["second"].append(second)
    return Dataset.from_dict(locations).with_transform(_ReadDocuments(files))


class _ReadDocuments:
    """Turn rows of locations into rows of text; a class so that workers can unpickle it."""

    def __init__(self, files: list[str]) -> None:
        self.files = files

    def __call__(self, rows: dict[str, list[int]]) -> dict[str, list[str]]:
        locations = zip(rows["file"], rows["first"], rows["second"])
        return {"text": [read_document(self.files[file], *place) for file, *place in locations]}


def _get_text(sample: dict[str, str]) -> str:
    return sample["text"]
