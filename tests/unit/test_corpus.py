"""The embedded corpus. Oracle: the topics of the running Python, whichever version that is."""

import sys

import pytest
from pydoc_data.topics import topics

from torchtitan_simplefsdp.titan.corpus import get_pydoc_documents


def test_pydoc_documents_are_non_empty_and_distinct_and_none_dominates():
    documents = get_pydoc_documents()
    sizes = [len(document.encode()) for document in documents]
    assert len(documents) > 100
    assert all(document.strip() for document in documents)
    assert len(set(documents)) == len(documents)
    assert max(sizes) < 0.15 * sum(sizes)  # 11 percent in 3.10, 7 in 3.11


def test_pydoc_holds_every_paragraph_of_every_topic():
    held = "\n\n".join(get_pydoc_documents())
    for topic in topics.values():
        for paragraph in topic.split("\n\n"):
            # Titles are left out: they differ in their underlines between a topic and its copy.
            lines = paragraph.strip().split("\n")
            is_title = len(lines) <= 2 and set(lines[-1]) <= set("*=-~^\"")
            assert is_title or paragraph.strip() in held


def test_pydoc_has_the_same_order_each_time_and_it_is_not_that_of_the_topics():
    documents = get_pydoc_documents()
    assert documents == get_pydoc_documents()
    firsts = [document.split("\n")[0] for document in documents]
    assert firsts != sorted(firsts)


def test_the_largest_of_4_contiguous_shares_has_less_than_3_times_the_text_of_the_smallest():
    documents = get_pydoc_documents()
    quarter = -(-len(documents) // 4)
    sizes = [sum(map(len, documents[i : i + quarter])) for i in range(0, len(documents), quarter)]
    assert max(sizes) < 3 * min(sizes)


def test_a_python_without_pydoc_data_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "pydoc_data.topics", None)
    message = "no module pydoc_data.topics.*libpython3-stdlib.*dataset='text'"
    with pytest.raises(FileNotFoundError, match=message):
        get_pydoc_documents()
