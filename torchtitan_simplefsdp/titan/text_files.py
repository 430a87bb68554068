"""The user's own text files: which documents they hold, where each one starts, how to read one.

The files are indexed once and a document is read when it is needed, so a corpus of many GB costs
24 bytes of memory per document, and nothing is written to disk. Indexing .txt and .jsonl reads and
checks every document (5 s per GB of .jsonl): a fault surfaces before the first step, on every rank,
with its place. Indexing .parquet reads only the footer (2 s per million rows): the format for what
is too large for that.

What a document is:

.txt      The whole file, or pieces of at most `MAX_TXT_BYTES` when it is larger. A piece ends behind
          a blank line if its second half has one, else behind a line, else a space, else a
          character. Pieces cover the file without gap or overlap; those of blanks only are left out.
.jsonl    The string field "text" of the object on each line; blank lines are left out. A .json file
          is read the same way.
.parquet  The string column "text" of each row. One row group of that column is held in memory.

Not here: compressed files (.gz), which have no random access.
"""

import glob
import json
import os
from collections.abc import Callable, Iterator
from functools import lru_cache
from pathlib import Path
from typing import NamedTuple

import pyarrow as pa
import pyarrow.parquet as pq

# Small enough that a file of 1 MB feeds 64 ranks, large enough for a window of 4096 tokens.
MAX_TXT_BYTES = 16 * 1024


class _Format(NamedTuple):
    # A location is two integers that only the format itself understands.
    index: Callable[[str], Iterator[tuple[int, int]]]
    read: Callable[[str, int, int], str]


def find_text_files(path: str) -> list[str]:
    """Return the supported files that `path` names, as absolute paths, sorted.

    Args:
        path: a file, a folder (searched recursively; hidden and unsupported files are passed over)
            or a glob pattern ("**" recurses). Relative ones start at the current directory.

    Raises:
        FileNotFoundError: nothing there.
        ValueError: a folder without supported files, or a file of an unsupported kind.
    """
    where = os.path.abspath(os.path.expanduser(path))
    supported = ", ".join(_FORMATS)
    if os.path.isdir(where):
        found = [file for file in Path(where).rglob("*") if file.is_file()]
        shown = [str(file) for file in found if not _is_hidden(file.relative_to(where))]
        files = [file for file in shown if _get_suffix(file) in _FORMATS]
        if not files:
            suffixes = ", ".join(sorted({_get_suffix(file) or "no suffix" for file in shown}))
            raise ValueError(
                f"dataset 'text': no supported file in folder '{path}' ({where}), found: "
                f"{suffixes or 'no files'}. Supported: {supported}."
            )
    else:
        # The name itself comes first: it may hold brackets.
        matches = [where] if os.path.exists(where) else glob.glob(where, recursive=True)
        files = [file for file in matches if os.path.isfile(file)]
        if not files:
            raise FileNotFoundError(
                f"dataset 'text': '{path}' not found (looked in {where}). "
                "Expected a file, a folder or a glob pattern that matches files."
            )
    for file in files:
        if _get_suffix(file) not in _FORMATS:
            raise ValueError(
                f"dataset 'text': {file} has the unsupported suffix '{_get_suffix(file)}'. "
                f"Supported: {supported}."
            )
    return sorted(files)


def index_text_file(file: str) -> Iterator[tuple[int, int]]:
    """Yield the location of each document in `file`, in the order of the file.

    Raises:
        ValueError: a document that is no text, with its place in the file.
    """
    return _FORMATS[_get_suffix(file)].index(file)


def read_document(file: str, first: int, second: int) -> str:
    """Return the document at the location (first, second) that `index_text_file(file)` yielded."""
    return _FORMATS[_get_suffix(file)].read(file, first, second)


def read_text_files(path: str) -> Iterator[str]:
    """Yield every document of the files that `path` names, for a single pass.

    Raises: as `find_text_files` and `index_text_file` do.
    """
    for file in find_text_files(path):
        for location in index_text_file(file):
            yield read_document(file, *location)


def _get_suffix(file: str) -> str:
    return os.path.splitext(file)[1].lower()


def _is_hidden(file: Path) -> bool:
    return any(part.startswith(".") for part in file.parts)


def _read_bytes(file: str, start: int, size: int) -> bytes:
    # Opened each time: forked data loader workers would share the position of an open file.
    with open(file, "rb") as f:
        f.seek(start)
        return f.read(size)


def _decode(raw: bytes, file: str, start: int) -> str:
    try:
        return raw.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        # The error counts behind a byte order mark, if there is one.
        at = start + len(raw) - len(error.object) + error.start
        raise ValueError(
            f"dataset 'text': {file} is not UTF-8: byte {error.object[error.start]:#04x} at offset "
            f"{at} ({error.reason}). Convert the file, for example with iconv -t UTF-8."
        ) from None


# .txt: a location is (start, size) in bytes.


def _index_txt(file: str) -> Iterator[tuple[int, int]]:
    start, rest = 0, b""
    with open(file, "rb") as f:
        while block := rest + f.read(MAX_TXT_BYTES - len(rest)):
            size = _get_piece_size(block) if len(block) == MAX_TXT_BYTES else len(block)
            if _decode(block[:size], file, start).strip():
                yield start, size
            start, rest = start + size, block[size:]


def _get_piece_size(block: bytes) -> int:
    for separator in (b"\n\n", b"\n", b" "):
        if (at := block.rfind(separator, len(block) // 2)) >= 0:
            return at + len(separator)
    # In front of the last character, as its bytes may go on behind the block. A block of
    # continuation bytes alone is not UTF-8, which decoding it reports.
    starts = (at for at in range(len(block) - 1, 0, -1) if block[at] & 0xC0 != 0x80)
    return next(starts, len(block))


def _read_txt(file: str, start: int, size: int) -> str:
    return _decode(_read_bytes(file, start, size), file, start).replace("\r\n", "\n")


# .jsonl: a location is (start, size) in bytes.


def _index_jsonl(file: str) -> Iterator[tuple[int, int]]:
    start = 0
    with open(file, "rb") as f:
        for number, line in enumerate(f, 1):
            if line.strip():
                _parse_jsonl(line, file, start, f"line {number}")
                yield start, len(line)
            start += len(line)


def _read_jsonl(file: str, start: int, size: int) -> str:
    return _parse_jsonl(_read_bytes(file, start, size), file, start, f"byte {start}")


def _parse_jsonl(line: bytes, file: str, start: int, place: str) -> str:
    where = f"dataset 'text': {file}, {place}"
    expected = "Each line must be one JSON object with a string field 'text'."
    try:
        record = json.loads(_decode(line, file, start))
    except json.JSONDecodeError as error:
        reason = f"{error.msg} at column {error.colno}"
        raise ValueError(f"{where}: not JSON ({reason}). {expected}") from None
    if not isinstance(record, dict):
        raise ValueError(f"{where}: not an object but {type(record).__name__}. {expected}")
    if "text" not in record:
        fields = ", ".join(record) or "no fields"
        raise ValueError(f"{where}: no field 'text', found: {fields}. {expected}")
    text = record["text"]
    if not isinstance(text, str):
        raise ValueError(f"{where}: field 'text' is {type(text).__name__}. {expected}")
    try:
        text.encode()
    except UnicodeEncodeError as error:  # the escape "\ud800" alone: JSON, but no tokenizer takes it
        half = ascii(text[error.start])
        raise ValueError(f"{where}: half a surrogate pair {half} in 'text'. Remove it.") from None
    return text


# .parquet: a location is (row group, row in the row group).


def _index_parquet(file: str) -> Iterator[tuple[int, int]]:
    try:
        parquet = pq.ParquetFile(file)
    except pa.ArrowInvalid as error:
        raise ValueError(f"dataset 'text': {file} is not a parquet file ({error}).") from None
    with parquet:
        schema = parquet.schema_arrow
        if "text" not in schema.names:
            raise ValueError(
                f"dataset 'text': {file} has no column 'text', found: {', '.join(schema.names)}. "
                "Rename the column that holds the text."
            )
        if (kind := schema.field("text").type) not in (pa.string(), pa.large_string()):
            raise ValueError(f"dataset 'text': {file}: column 'text' is {kind}, expected string.")
        for group in range(parquet.num_row_groups):
            for row in range(parquet.metadata.row_group(group).num_rows):
                yield group, row


def _read_parquet(file: str, group: int, row: int) -> str:
    text = _read_row_group(file, group)[row].as_py()
    if text is None:
        raise ValueError(
            f"dataset 'text': {file}, row {row} of row group {group}: 'text' is null. "
            "Remove such rows."
        )
    return text


@lru_cache(maxsize=1)  # rows are read in order
def _read_row_group(file: str, group: int) -> pa.ChunkedArray:
    with pq.ParquetFile(file) as parquet:
        return parquet.read_row_group(group, columns=["text"]).column("text")


_FORMATS = {
    ".txt": _Format(_index_txt, _read_txt),
    ".jsonl": _Format(_index_jsonl, _read_jsonl),
    ".json": _Format(_index_jsonl, _read_jsonl),
    ".parquet": _Format(_index_parquet, _read_parquet),
}
