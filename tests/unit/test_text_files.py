"""The user's text files. Oracle: the text that the test wrote into them."""

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from torchtitan_simplefsdp.titan.text_files import find_text_files, MAX_TXT_BYTES, read_text_files


def get_texts(path):
    return list(read_text_files(str(path)))


def test_a_small_txt_file_is_one_document(tmp_path):
    (tmp_path / "a.txt").write_bytes("\ufeffOne.\r\n\r\nTwö.\n".encode())
    assert get_texts(tmp_path / "a.txt") == ["One.\n\nTwö.\n"]


@pytest.mark.parametrize(
    "text, end",
    [
        ("A line of a paragraph.\nAnother one.\n\n" * 2000, "\n\n"),
        ("A line without any paragraph.\n" * 2000, "\n"),
        ("word " * 20000, " "),
        ("é" * 20000 + "x" + "漢" * 20000 + "😀" * 20000, ""),
        ("\n" + "x" * 3 * MAX_TXT_BYTES, ""),
    ],
    ids=["paragraphs", "lines", "words", "characters of several bytes", "one early line end"],
)
def test_a_large_txt_file_is_cut_into_pieces_without_gap_or_overlap(text, end, tmp_path):
    (tmp_path / "a.txt").write_text(text, encoding="utf-8", newline="")
    pieces = get_texts(tmp_path / "a.txt")
    assert "".join(pieces) == text
    assert all(MAX_TXT_BYTES // 2 - 1 <= len(piece.encode()) <= MAX_TXT_BYTES for piece in pieces[:-1])
    assert all(piece.endswith(end) for piece in pieces[:-1])


def test_blank_pieces_of_a_txt_file_and_blank_lines_of_a_jsonl_file_are_left_out(tmp_path):
    (tmp_path / "a.txt").write_text(" \n" * MAX_TXT_BYTES + "end")
    (tmp_path / "b.txt").write_text("")
    (tmp_path / "c.jsonl").write_text('\n{"text": "one"}\n\n  \n{"text": "two"}')
    assert [text.strip() for text in get_texts(tmp_path)] == ["end", "one", "two"]


@pytest.mark.parametrize("kind", [pa.string(), pa.large_string()])
def test_parquet_rows_of_several_row_groups_are_documents(kind, tmp_path):
    documents = [f"document {i}" for i in range(25)]
    table = pa.table({"id": range(25), "text": pa.array(documents, kind)})
    pq.write_table(table, tmp_path / "a.parquet", row_group_size=10)
    assert get_texts(tmp_path / "a.parquet") == documents


def test_a_folder_gives_its_supported_files_in_the_order_of_their_paths(tmp_path):
    (tmp_path / "b" / "c").mkdir(parents=True)
    (tmp_path / ".git").mkdir()
    (tmp_path / "b" / "c" / "z.json").write_text('{"text": "b/c/z 0"}\n{"text": "b/c/z 1"}\n')
    for name in ("b/a.txt", "a.txt", "z.TXT", ".hidden.txt", ".git/x.txt", "README.md"):
        (tmp_path / name).write_text(name)
    assert get_texts(tmp_path) == ["a.txt", "b/a.txt", "b/c/z 0", "b/c/z 1", "z.TXT"]


def test_a_glob_and_a_relative_path_and_a_name_with_brackets_are_found(tmp_path, monkeypatch):
    for name in ("a.txt", "b.txt", "x[1].txt"):
        (tmp_path / name).write_text(name)
    monkeypatch.chdir(tmp_path)
    assert get_texts("[ab].txt") == ["a.txt", "b.txt"]
    assert get_texts("**/*.txt") == ["a.txt", "b.txt", "x[1].txt"]
    assert get_texts("x[1].txt") == ["x[1].txt"]


@pytest.mark.parametrize(
    "name, content, message",
    [
        ("a.csv", b"x", r"a.csv has the unsupported suffix '.csv'. Supported: .txt, .jsonl, .json, .parquet"),
        ("a.txt.gz", b"x", "unsupported suffix '.gz'"),
        ("a.txt", b"ok \xe9t\xe9", "a.txt is not UTF-8: byte 0xe9 at offset 3 .*iconv"),
        ("a.txt", b"\xef\xbb\xbfok \xff", "byte 0xff at offset 6"),
        ("a.txt", b"\x80" * 3 * MAX_TXT_BYTES, "byte 0x80 at offset 0"),
        ("a.txt", b"a \n" * MAX_TXT_BYTES + b"\xff", f"byte 0xff at offset {3 * MAX_TXT_BYTES} "),
        ("a.jsonl", b'{"text": "a"}\n{"text": b}\n', r"a.jsonl, line 2: not JSON \(Expecting value at column 10\)"),
        ("a.json", b'[{"text": "a"}]', "a.json, line 1: not an object but list. Each line must be one JSON object"),
        ("a.jsonl", b'{"body": "a", "id": 1}', "line 1: no field 'text', found: body, id. "),
        ("a.jsonl", b'{"text": null}', "line 1: field 'text' is NoneType"),
        ("a.jsonl", b'\n{"text": "\xff"}', "a.jsonl is not UTF-8: byte 0xff at offset 11"),
        ("a.jsonl", b'{"text": "\\ud800"}', r"line 1: half a surrogate pair '\\ud800' in 'text'"),
        ("a.parquet", b"PAR1", "a.parquet is not a parquet file"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",  # some contents are long
)
def test_a_faulty_file_is_named_with_the_place_of_the_fault(name, content, message, tmp_path):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(ValueError, match=message) as caught:
        get_texts(tmp_path / name)
    assert str(caught.value).startswith("dataset 'text'")
    assert "\n" not in str(caught.value)


def test_a_parquet_file_without_usable_text_is_named(tmp_path):
    path = str(tmp_path / "a.parquet")
    pq.write_table(pa.table({"body": ["a"], "id": [1]}), path)
    with pytest.raises(ValueError, match="a.parquet has no column 'text', found: body, id"):
        get_texts(path)
    pq.write_table(pa.table({"text": [1]}), path)
    with pytest.raises(ValueError, match="column 'text' is int64, expected string"):
        get_texts(path)
    pq.write_table(pa.table({"text": ["a", None]}), path)
    with pytest.raises(ValueError, match="a.parquet, row 1 of row group 0: 'text' is null"):
        get_texts(path)


def test_a_path_that_leads_nowhere_is_shown_with_the_place_looked_in(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    looked_in = rf"'no/such.txt' not found \(looked in {tmp_path}/no/such.txt\)"
    with pytest.raises(FileNotFoundError, match=looked_in):
        find_text_files("no/such.txt")
    with pytest.raises(FileNotFoundError, match=r"'\*.txt' not found"):
        find_text_files("*.txt")
    nothing = rf"no supported file in folder '\.' \({tmp_path}\), found: no files"
    with pytest.raises(ValueError, match=nothing):
        find_text_files(".")
    (tmp_path / "a.csv").write_text("x")
    (tmp_path / "LICENSE").write_text("x")
    with pytest.raises(ValueError, match="found: .csv, no suffix. Supported: .txt"):
        find_text_files(".")
