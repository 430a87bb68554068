"""The comparisons of docs/numerics.md: run them with scripts/loss_compare.py and write their tables and pictures there.

    python scripts/numerics.py [NAME ...] [--steps N]

Without names all of them, in the order below; runs that are finished are kept, so it can be interrupted. On 2 cores all of
them take more than an hour. --steps N is for a try: it prints tables and leaves the document alone.
"""

import argparse
import shlex
import shutil
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

REPOSITORY = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(REPOSITORY))  # this checkout's package

from torchtitan_simplefsdp.document import replace_section  # noqa: E402

DOCUMENT = REPOSITORY / "docs" / "numerics.md"
PICTURES = REPOSITORY / "docs" / "numerics"
OUTPUT = Path("outputs/numerics")

# 4 short sequences: with more, 100 steps of one run take over ten minutes on 2 cores, most of it bfloat16 on CPU
EVERY_RUN = "--training.seq_len 32 --training.global_batch_size"
BF16 = "--training.mixed_precision_param bfloat16"
FSDP2 = "--experimental.custom_import tests.fsdp2_peer --model.name fsdp2.llama3"
NATIVE = "--simple_fsdp.reduction native"


def get_layout(
    dp: int, replicate: int = 1, tp: int = 1, cp: int = 1, pp: int = 1, local_batch: int | None = None, more: str = ""
) -> str:
    """Return what loss_compare.py takes for a run.

    Args:
        dp: data-parallel ranks, `replicate` of which have a copy of the parameters each.
        local_batch: sequences per rank and microbatch; None: such that a step of 4 sequences has one microbatch.
        more: further flags.
    """
    degrees = {"data_parallel_replicate": replicate, "data_parallel_shard": dp // replicate, "tensor_parallel": tp}
    degrees |= {"context_parallel": cp, "pipeline_parallel": pp}
    flags = [f"--parallelism.{name}_degree {degree}" for name, degree in degrees.items() if degree > 1]
    flags += [f"--training.local_batch_size {local_batch or 4 // dp}", *([more] if more else [])]
    return f"NGPU={dp * tp * cp * pp} {' '.join(flags)}"


class Case(NamedTuple):
    """A comparison: its steps, runs by name (the first is the baseline), flags of all runs, what is asserted, and the
    sequences of a step."""

    steps: int
    runs: dict[str, str]
    flags: str = ""
    asserted: str = "--assert-equal"
    sequences: int = 4


DDP_TP = {
    "fsdp2_tp2": get_layout(2, tp=2),
    "ddp2_tp2": get_layout(2, replicate=2, tp=2),
    "FSDP2_fsdp2_tp2": get_layout(2, tp=2, more=FSDP2),
}
MODES = {
    "fully_shard_4": get_layout(4),
    "replicate_4": get_layout(4, replicate=4),
    "hybrid_shard_2x2": get_layout(4, replicate=2),
}
SCHEDULES = ("1F1B", "GPipe", "Interleaved1F1B", "LoopedBFS", "InterleavedZeroBubble", "ZBVZeroBubble", "DualPipeV")
DUAL_PIPE = " --parallelism.no_pipeline_parallel_expert_parallel_overlap"

CASES = {
    "ddp_tp_bf16": Case(100, DDP_TP, BF16),
    "ddp_tp_fp32": Case(100, DDP_TP),
    "modes_fp32": Case(100, MODES),
    "modes_bf16": Case(100, MODES, BF16),
    "hsdp_tp": Case(
        100, {"fully_shard_4_tp2": get_layout(4, tp=2), "hybrid_2x2_tp2": get_layout(4, replicate=2, tp=2)}
    ),
    "native": Case(
        100,
        {
            "FSDP2_4": get_layout(4, more=FSDP2),
            "fully_shard_4": get_layout(4, more=NATIVE),
            "replicate_4": get_layout(4, replicate=4, more=NATIVE),
            "hybrid_shard_2x2": get_layout(4, replicate=2, more=NATIVE),
            "FSDP2_hybrid_2x2": get_layout(4, replicate=2, more=FSDP2),
        },
        asserted="",
    ),
    "pipeline": Case(
        10,
        {"dp4": get_layout(4, local_batch=2)}
        | {
            f"pp2_dp2_{name}": get_layout(
                2,
                pp=2,
                local_batch=4,
                more=f"--parallelism.pipeline_parallel_schedule {name}{DUAL_PIPE if name == 'DualPipeV' else ''}",
            )
            for name in SCHEDULES
        },
        asserted="--tolerance 1e-6",
        sequences=8,
    ),
    "accumulation": Case(
        50,
        {
            "one_batch": get_layout(2, local_batch=4),
            "replicate_4_microbatches": get_layout(2, replicate=2, local_batch=1),
            "fully_shard_4_microbatches": get_layout(2, local_batch=1),
        },
        asserted="--tolerance 1e-6",
        sequences=8,
    ),
    "layouts": Case(
        50,
        {
            "one_process": get_layout(1),
            "fully_shard_4": get_layout(4),
            "tp2": get_layout(1, tp=2),
            "cp2": get_layout(1, cp=2),
        },
        asserted="--tolerance 1e-6",
    ),
}


def build_command(name: str, case: Case, steps: int | None) -> list[str]:
    command = ["python", "scripts/loss_compare.py", "--steps", str(steps or case.steps), "--markdown"]
    command += ["--output-folder", str(OUTPUT / name), *case.asserted.split()]
    for run, layout in case.runs.items():
        command += ["--run", f"{run}={layout}"]
    return [*command, "--", *EVERY_RUN.split(), str(case.sequences), *case.flags.split()]


def format_command(command: list[str]) -> str:
    """Return the command as one can paste it, a run per line."""
    return shlex.join(command).replace(" --run ", " \\\n    --run ").replace(" -- ", " \\\n    -- ")


def write_section(name: str, command: list[str], table: str) -> None:
    """Replace a comparison's section of the document, and copy its picture next to it."""
    PICTURES.mkdir(exist_ok=True)
    shutil.copyfile(REPOSITORY / OUTPUT / name / "plot.png", PICTURES / f"{name}.png")
    start, end = f"<!-- comparison: python scripts/numerics.py {name} -->\n", "<!-- end of comparison -->"
    section = f"```\n{format_command(command)}\n```\n\n{table.strip()}\n\n![{name}](numerics/{name}.png)\n"
    DOCUMENT.write_text(replace_section(DOCUMENT.read_text(), start, end, section))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"of {', '.join(CASES)}; default: all")
    parser.add_argument("--steps", type=int, help="optimizer steps, for a try that leaves the document alone")
    args = parser.parse_args()
    if unknown := set(args.names) - set(CASES):
        parser.error(f"unknown: {', '.join(sorted(unknown))}. Comparisons: {', '.join(CASES)}.")
    for name in args.names or CASES:
        print(f"== {name}", file=sys.stderr, flush=True)
        command = build_command(name, CASES[name], args.steps)
        result = subprocess.run([sys.executable, *command[1:]], cwd=REPOSITORY, stdout=subprocess.PIPE, text=True)
        print(result.stdout)
        if result.returncode not in (0, 1):
            return result.returncode
        if not args.steps:
            write_section(name, command, result.stdout)
        if result.returncode:
            print(f"{name}: not as asserted ({CASES[name].asserted})", file=sys.stderr)
            return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
