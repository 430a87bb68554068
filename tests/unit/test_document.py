"""Sections of a document between markers, against documents written by hand."""

from __future__ import annotations

import pytest

from torchtitan_simplefsdp.document import replace_section

START, END = "<!-- a -->\n", "<!-- end -->"


def test_only_the_section_changes():
    text = f"# title\n{START}old\n{END}\nrest\n<!-- b -->\nother\n{END}\n"
    assert replace_section(text, START, END, "new\n") == text.replace("old", "new")


@pytest.mark.parametrize("text", ["", START, END, f"{END}{START}"])
def test_a_document_without_both_markers_is_left_alone(text):
    with pytest.raises(ValueError, match="no section between '<!-- a -->' and '<!-- end -->'"):
        replace_section(text, START, END, "new\n")
