"""Counts the collectives that core/ issues, at the one place that it issues them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from unittest import mock

from torchtitan_simplefsdp.core import compat


@contextmanager
def count_collectives() -> Iterator[Counter]:
    counter: Counter[str] = Counter()

    def counted(name, function):
        def call(*args):
            counter[name] += 1
            return function(*args)

        return call

    names = ("all_gather", "all_to_all", "reduce_scatter", "all_reduce")
    with mock.patch.multiple(compat, **{name: counted(name, getattr(compat, name)) for name in names}):
        yield counter
