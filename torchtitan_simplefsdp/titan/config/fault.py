"""Configuration faults: the error that carries them all, and the wording they share.

A fault is one line of text that names the key it is about. Faults are collected, never raised
one at a time, so that a user sees everything wrong with a run at once.

Not here: any check.
"""

import difflib
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple


class ConfigError(ValueError):
    """All faults of one configuration; `str()` is one fault per line.

    Attributes:
        faults: one line each, in the order in which they were found.
    """

    def __init__(self, faults: list[str]) -> None:
        self.faults = list(faults)
        lines = "\n".join(self.faults)
        several = f"{len(self.faults)} configuration faults:\n"
        super().__init__(several + lines if len(self.faults) > 1 else lines)


class Checked(NamedTuple):
    """One source (the TOML file, the command line) after its keys and types were checked."""

    values: dict[str, Any]  # nested as in TOML, only what is known and well typed
    faults: list[str]
    suspects: set[str]  # keys or sections the user probably meant to set; see Rule


class Rule(NamedTuple):
    """One semantic rule: a generator of faults, and the keys whose values it reads.

    A rule is skipped when one of these keys is a suspect: the user tried to set it, the value
    was dropped as faulty, and the default in its place would only cause follow-up faults.
    """

    reads: tuple[str, ...]  # keys, or whole sections
    get_faults: Callable[..., Iterator[str]]  # (config, world_size, train_spec | None)

    def is_blocked_by(self, suspects: set[str]) -> bool:
        return any(
            f"{key}.".startswith(f"{suspect}.") or suspect.startswith(f"{key}.")
            for key in self.reads
            for suspect in suspects
        )


def find_close(name: str, known: Iterable[str]) -> str | None:
    """Return the known dotted name closest to `name`, or None.

    A key with the right last part in the wrong section (`training.warmup_steps`) is a likelier
    mistake than a misspelling, so those are looked at first and with a lower bar.
    """
    known = list(known)
    leaf = name.rpartition(".")[2]
    same_leaf = [other for other in known if other.rpartition(".")[2] == leaf]
    close = difflib.get_close_matches(name, same_leaf, n=1, cutoff=0.5)
    close = close or difflib.get_close_matches(name, known, n=1)
    return close[0] if close else None


def get_suggestion(close: str | None, form: str = "{}") -> str:
    """Return ' (did you mean X?)', X being `close` put into `form`; '' without a close name."""
    return f" (did you mean {form.format(close)}?)" if close else ""


def list_choices(choices: Iterable[Any]) -> str:
    return ", ".join(repr(choice) for choice in choices)


def count_noun(count: int, noun: str) -> str:
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"


def shorten(value: Any) -> str:
    """Return `repr(value)` cut to a length that keeps a fault on one line."""
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."


def describe_error(error: BaseException) -> str:
    """Return an exception's message on one line, without its final period."""
    return " ".join(str(error).split()).rstrip(".") or type(error).__name__
