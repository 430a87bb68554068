"""Embedded real text: the prose of Python's own documentation, present in every installation.

A first run should need neither the internet nor a data folder. `pydoc_data.topics`, the text that
`help()` prints, is about 460 KB of English prose with code. It is the text of the installed Python:
3.10 to 3.13 and their patch releases differ slightly, and so does the number of documents (132 in
3.10.13, 169 in 3.11.7, 188 in 3.13.0). Losses of two Python versions are not comparable.

A document is one section of a topic, and each section is taken once. Whole topics serve badly: 22 of
79 are contained in another one (`with` is in `compound` and in `specialnames`), one of them is 14
percent of the text, and split over 4 ranks one rank gets three times another's text.

Not here: the tokenizer trained on it (tokenizer.py), the registration with torchtitan (datasets.py).
"""

import random
import re

# Below a title stands a line of equal punctuation marks; which one depends on the section's depth.
_UNDERLINE = r"([*=\-~^\"])\1{2,}$"
_SECTION = re.compile(rf"^(?=\S.*\n{_UNDERLINE})", re.MULTILINE)
_UNDERLINE_LINE = re.compile(rf"^{_UNDERLINE}\n?", re.MULTILINE)


def get_pydoc_documents() -> list[str]:
    """Return the sections of `pydoc_data.topics`, each once, in the same order in every process.

    Sections of one topic treat one subject, and torchtitan gives each rank neighbouring documents.
    The order is therefore shuffled, with a fixed seed, so that ranks see the same mixture.

    Raises:
        FileNotFoundError: this Python was installed without `pydoc_data`.
    """
    try:
        from pydoc_data.topics import topics
    except ImportError as error:
        raise FileNotFoundError(
            "dataset 'pydoc': this Python has no module pydoc_data.topics, the embedded text. "
            "Install Python's full standard library (Debian: libpython3-stdlib), "
            "or use training.dataset='text' with files of your own."
        ) from error

    documents = {}
    for name in sorted(topics):
        for section in _get_sections(topics[name]):
            # Without underlines, because the same section has another one inside a larger topic.
            title, _, body = _UNDERLINE_LINE.sub("", section).strip().partition("\n")
            if body.strip():
                documents.setdefault((title, body.strip()), section.strip() + "\n")
    ordered = list(documents.values())
    random.Random(0).shuffle(ordered)
    return ordered


def _get_sections(topic: str) -> list[str]:
    starts = [match.start() for match in _SECTION.finditer(topic)]
    return [topic[start:end] for start, end in zip([0, *starts], [*starts, len(topic)])]
