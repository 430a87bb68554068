"""The progress bar, drawn on a stream that says it is a terminal."""

import io
import os
import sys
import time

import pytest

from torchtitan_simplefsdp.progress import PROGRESS_VARIABLE, report_progress, show_progress


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.fixture(autouse=True)
def local_rank_0(monkeypatch):
    monkeypatch.setenv("LOCAL_RANK", "0")
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.delenv(PROGRESS_VARIABLE, raising=False)


def wait_until_shown(terminal: Terminal, text: str) -> None:
    deadline = time.monotonic() + 30
    while text not in terminal.getvalue():
        assert time.monotonic() < deadline, terminal.getvalue()
        time.sleep(0.05)


def test_the_bar_follows_the_reported_steps_and_lines_stay_whole(tmp_path, monkeypatch):
    terminal = Terminal()
    monkeypatch.setattr(sys, "stdout", terminal)
    monkeypatch.setattr(sys, "stderr", terminal)
    with show_progress(tmp_path):
        report_progress(3, 8)
        wait_until_shown(terminal, "3/8 [")
        print("a line in", end=" ")
        report_progress(5, 8)
        wait_until_shown(terminal, "5/8 [")
        print("two pieces")
    assert "\ra line in two pieces\n" in terminal.getvalue()  # after a carriage return: the bar was cleared first
    assert terminal.getvalue().endswith("\r")  # the bar is gone at the end
    assert list(tmp_path.iterdir()) == []
    assert (sys.stdout, sys.stderr) == (terminal, terminal)
    assert PROGRESS_VARIABLE not in os.environ


def test_text_without_a_newline_is_not_lost_at_the_end(tmp_path, monkeypatch):
    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    with show_progress(tmp_path):
        print("the last words", end="", file=sys.stderr)
    assert "the last words" in terminal.getvalue()


def test_without_a_terminal_there_is_no_bar_and_no_file(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "stderr", io.StringIO())
    with show_progress(tmp_path):
        report_progress(3, 8)
        assert list(tmp_path.iterdir()) == []
        assert PROGRESS_VARIABLE not in os.environ
    assert sys.stderr.getvalue() == ""


def test_only_local_rank_0_reports(tmp_path, monkeypatch):
    monkeypatch.setenv(PROGRESS_VARIABLE, str(tmp_path / "progress"))
    monkeypatch.setenv("LOCAL_RANK", "1")
    report_progress(3, 8)
    assert list(tmp_path.iterdir()) == []
