"""Document: replace what a script writes into a Markdown file, between the two markers that name the script.

Not here: what is written.
"""


def replace_section(text: str, start: str, end: str, section: str) -> str:
    """Return `text` with `section` between the first `start` and the `end` that follows it.

    Raises: ValueError if the markers are not there.
    """
    before, found, rest = text.partition(start)
    _, closed, after = rest.partition(end)
    if not found or not closed:
        markers = f"{start.strip()!r} and {end.strip()!r}"
        raise ValueError(f"the document has no section between {markers}. Add both lines to it.")
    return before + start + section + end + after
