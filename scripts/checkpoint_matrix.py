"""Save a checkpoint under each layout, load it under all, and write what loads where into docs/checkpoints.md.

    python scripts/checkpoint_matrix.py

It is the matrix of tests/distributed/test_checkpoint_matrix.py; on 2 cores it takes about 3 minutes. If a state was not
equal in every bit, the table shows how many of its values were not, they are listed, and the exit status is 1.
"""

import sys
import tempfile
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(REPOSITORY))

from tests.distributed.checkpoint_layouts import LAYOUTS  # noqa: E402
from tests.distributed.checkpoint_matrix import Matrix, PRELOAD, run_matrix  # noqa: E402
from tests.distributed.ranks import RankPool  # noqa: E402
from torchtitan_simplefsdp.document import replace_section  # noqa: E402

DOCUMENT = REPOSITORY / "docs" / "checkpoints.md"
START = "<!-- table: python scripts/checkpoint_matrix.py -->\n"
END = "<!-- end of table -->"


def format_table(differences: dict[tuple[str, str | None], list[str]]) -> str:
    """Return a row per layout that saved and a column per layout that loaded: `=`, or how many values are not equal."""
    numbers = range(1, len(LAYOUTS) + 1)
    lines = [f"| | saved under | ranks | {' | '.join(map(str, numbers))} |", "|---" * (3 + len(LAYOUTS)) + "|"]
    for number, (saved, layout) in zip(numbers, LAYOUTS.items()):
        cells = [str(len(differences[saved, loaded]) or "=") for loaded in LAYOUTS]
        lines.append(f"| {number} | {saved} | {layout.world_size} | {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def run() -> Matrix:
    pool = RankPool(PRELOAD)
    try:
        with tempfile.TemporaryDirectory() as folder:
            return run_matrix(pool, Path(folder), lambda line: print(line, file=sys.stderr, flush=True))
    finally:
        pool.close()


def main() -> int:
    differences = run().differences
    table = format_table(differences)
    print(table)
    DOCUMENT.write_text(replace_section(DOCUMENT.read_text(), START, END, table))
    for (saved, loaded), names in differences.items():
        if names:
            print(f"{saved} -> {loaded or 'as it was saved'}: {', '.join(names)}", file=sys.stderr)
    return int(any(differences.values()))


if __name__ == "__main__":
    sys.exit(main())
