"""The progress line of a comparison; the oracle is what a terminal and a log file should get."""

import sys
from pathlib import Path

import pytest

from torchtitan_simplefsdp.compare import execute


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    now = [100.0]
    monkeypatch.setattr(execute.time, "monotonic", lambda: now[0])
    return now


def show(line: execute.ProgressLine, file: Path, step: int, clock: list[float], seconds: float) -> None:
    clock[0] += seconds
    file.write_text(f"{step} 10\n")
    line.show()


def test_a_terminal_gets_one_line_that_changes_with_the_step(tmp_path, monkeypatch, capsys, clock):
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    file = tmp_path / "progress"
    line = execute.ProgressLine("[1/2] a", file)
    line.show()
    for step in (4, 4, 6):
        show(line, file, step, clock, 2)
    line.close()
    clear = "\r\033[K"
    assert capsys.readouterr().err == f"{clear}[1/2] a: step 4/10{clear}[1/2] a: step 6/10, 0:00:08 left{clear}"


def test_a_log_gets_a_line_now_and_then(tmp_path, capsys, clock):
    file = tmp_path / "progress"
    line = execute.ProgressLine("[1/2] a", file)
    for step in range(1, 9):
        show(line, file, step, clock, 11)
    line.close()
    assert capsys.readouterr().err == "[1/2] a: step 3/10\n[1/2] a: step 6/10, 0:00:44 left\n"


def test_a_half_written_progress_file_is_read_again_later(tmp_path, monkeypatch, capsys, clock):
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    (tmp_path / "progress").write_text("")
    execute.ProgressLine("a", tmp_path / "progress").show()
    assert capsys.readouterr().err == ""
