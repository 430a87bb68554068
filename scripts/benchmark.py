"""Speed, memory and collectives of SimpleFSDP beside no communication, DDP, FSDP2 and torchtitan's own SimpleFSDP.

    python scripts/benchmark.py [--ranks 4 --modes fully_shard hybrid_shard] [--tp 2] [--preset parameters]

All contenders train one Llama in the same processes, in turns. The table is printed, JSON and a picture go to a folder.
What cannot run has its error in the table. --write-docs NAME puts the result into that section of
docs/performance.md. Needs matplotlib (pip install '.[plots]'). Run it on a quiet machine.
"""

import argparse
import shlex
import shutil
import sys
from dataclasses import fields
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(REPOSITORY))  # this checkout's package

from torchtitan_simplefsdp.benchmark.contenders import CONTENDERS, DTYPES  # noqa: E402
from torchtitan_simplefsdp.benchmark.machine import describe_machine, get_load  # noqa: E402
from torchtitan_simplefsdp.benchmark.options import MODES, Options, PRESETS  # noqa: E402
from torchtitan_simplefsdp.benchmark.plot import plot_measurements  # noqa: E402
from torchtitan_simplefsdp.benchmark.report import describe, format_table, write_json  # noqa: E402
from torchtitan_simplefsdp.benchmark.run import run_benchmark  # noqa: E402
from torchtitan_simplefsdp.document import replace_section  # noqa: E402

DOCUMENT = REPOSITORY / "docs" / "performance.md"
END = "<!-- end of benchmark -->"


def get_start(name: str) -> str:
    """Return the line of the document that opens a section."""
    return f"<!-- benchmark: python scripts/benchmark.py --write-docs {name} -->\n"


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--preset", choices=PRESETS, default="step", help="sizes where no flag gives them; default: step")
    add("--dim", type=int, help="width of the model; default: the preset's")
    add("--layers", type=int, help="transformer blocks; default: the preset's")
    add("--vocab", type=int, help="tokens of the vocabulary; default: the preset's")
    add("--seq-len", type=int, help="tokens of a sequence; default: the preset's")
    add("--batch", type=int, help="sequences per data-parallel rank; default: the preset's")
    add("--ranks", type=int, default=2, help="processes, one per GPU where there are any; default: 2")
    add("--tp", type=int, default=1, help="ranks of a tensor-parallel group; default: 1")
    add("--modes", nargs="+", choices=MODES, default=MODES[:2], help=f"default: {' '.join(MODES[:2])}")
    add("--contenders", nargs="+", metavar="NAME", default=[*CONTENDERS], help=f"default: all: {', '.join(CONTENDERS)}")
    add("--rounds", type=int, default=10, help="measured steps of each contender; default: 10")
    add("--warmup", type=int, default=3, help="steps before them; default: 3")
    add("--dtype", choices=DTYPES, default="fp32", help="of compute; default: fp32")
    add("--threads", type=int, default=1, help="CPU threads per rank; default: 1")
    add("--no-alone", action="store_true", help="no memory and compile time, which take processes of their own per row")
    add("--output", type=Path, default=Path("outputs/benchmark"), help="folder for its files; default: %(default)s")
    add("--write-docs", metavar="NAME", help="write the result into this section of docs/performance.md")
    return parser


def build_options(args: argparse.Namespace) -> Options:
    """Return the options of the flags; sizes that no flag gives are the preset's."""
    flags = {field.name: getattr(args, field.name) for field in fields(Options)}
    flags = {name: value for name, value in flags.items() if value is not None}
    return Options(**{**PRESETS[args.preset], **flags, "modes": tuple(args.modes)})


def write_docs(name: str, command: str, text: str, picture: Path) -> None:
    """Replace a section of the document, and copy its picture next to it."""
    section = f"```\n{command}\n```\n\n{text}\n![{name}](performance/{name}.png)\n"
    document = replace_section(DOCUMENT.read_text(), get_start(name), END, section)
    target = DOCUMENT.with_suffix("") / f"{name}.png"
    target.parent.mkdir(exist_ok=True)
    shutil.copyfile(picture, target)
    DOCUMENT.write_text(document)


def print_progress(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def main() -> None:
    parser = build_parser()
    args = parser.parse_args()
    options = build_options(args)
    if args.write_docs and (start := get_start(args.write_docs)) not in DOCUMENT.read_text():
        parser.error(f"--write-docs {args.write_docs}: docs/performance.md has no line {start.strip()!r}.")
    before = get_load()
    try:
        measurements = run_benchmark(options, args.contenders, not args.no_alone, print_progress)
    except ValueError as error:
        parser.error(str(error))
    about = (options, describe_machine(), (before, get_load()))
    text = f"{describe(*about)}\n{format_table(measurements, options)}"
    print(text)
    args.output.mkdir(parents=True, exist_ok=True)
    write_json(args.output / "result.json", measurements, *about)
    plot_measurements(measurements, args.output / "plot.png")
    if args.write_docs:
        command = shlex.join(["python", "scripts/benchmark.py", *sys.argv[1:]])
        write_docs(args.write_docs, command, text, args.output / "plot.png")


if __name__ == "__main__":
    main()
