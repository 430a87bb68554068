"""Compare losses: train several configurations with the same seed and say where loss and gradient norm differ.

    python scripts/loss_compare.py --steps 100 --assert-equal \\
        --run replicate="NGPU=2 --parallelism.data_parallel_replicate_degree 2" \\
        --run fully_shard="NGPU=2 --parallelism.data_parallel_shard_degree 2" \\
        -- --training.seq_len 128

Each --run is what one types before and after ./run_train.sh; flags after -- are for all runs. The first run, or the one
of --import-result, is the baseline. The same command again continues an interrupted comparison and keeps finished runs.
Exit code: 0 equal, within tolerance, or nothing asserted; 1 different; 2 wrong usage or a failed run; 130 interrupted.
"""

import argparse
import importlib.util
import math
import os
import signal
import sys
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(REPOSITORY))  # this checkout's package, even where another copy is installed

from torchtitan_simplefsdp.compare.execute import execute, lock, RunFolder, STOP_SIGNALS
from torchtitan_simplefsdp.compare.fingerprint import build_fingerprint, get_versions
from torchtitan_simplefsdp.compare.report import (
    compare_results,
    Comparison,
    format_markdown,
    format_table,
    read_golden,
    Result,
    write_json,
)
from torchtitan_simplefsdp.compare.runs import build_runs, CompareError, Run, SEED_CHECKPOINT, Settings
from torchtitan_simplefsdp.compare.scalars import count_complete_steps, read_scalars

LAUNCHER = REPOSITORY / "run_train.sh"
DEFAULT_FOLDER = Path("outputs/loss_compare")
EXIT_EQUAL, EXIT_DIFFERENT, EXIT_FAILED, EXIT_INTERRUPTED = 0, 1, 2, 130


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    add = parser.add_argument
    add("--run", action="append", default=[], metavar='NAME="[VAR=VALUE ...] [--flag ...]"', help="a run; give several")
    add("--steps", type=int, default=100, help="optimizer steps of every run, default: 100")
    add("--seed", type=int, default=42, help="debug.seed of every run, default: 42")
    add("--config", default="train_configs/llama3_debug.toml", help="TOML file, default: %(default)s")
    add("--output-folder", type=Path, default=DEFAULT_FOLDER, help="for everything written, default: %(default)s")
    asserting = parser.add_mutually_exclusive_group()
    asserting.add_argument("--assert-equal", action="store_true", help="exit with 1 if any bit of any step differs")
    asserting.add_argument("--tolerance", type=float, help="exit with 1 if a relative difference is larger than this")
    add("--export-result", type=Path, metavar="FILE", help="also write the result, the golden file of --import-result")
    add("--import-result", type=Path, metavar="FILE", help="golden file whose baseline is the baseline here")
    add("--seed-checkpoint", action="store_true", help="load the initial weights of all runs from one checkpoint")
    add("--checkpoint-interval", type=int, default=25, help="in steps; 0: never resume inside a run; default: 25")
    add("--markdown", action="store_true", help="print the table as Markdown")
    add("--no-plot", action="store_true", help="write no plot.png; without it matplotlib is not needed")
    add("--dry-run", action="store_true", help="print the commands and start nothing")
    return parser


def validate(args: argparse.Namespace) -> None:
    if not args.run:
        raise CompareError('no runs. Give at least two, for example --run a="NGPU=2" --run b="NGPU=4".')
    if len(args.run) == 1 and not args.import_result:
        raise CompareError("one run has nothing to be compared with. Give a second --run, or --import-result FILE.")
    if args.steps < 1 or args.checkpoint_interval < 0 or not 0 <= (args.tolerance or 0) < math.inf:
        raise CompareError("--steps must be 1 or more, --checkpoint-interval 0 or more, --tolerance a number from 0.")
    if not args.no_plot and importlib.util.find_spec("matplotlib") is None:
        raise CompareError("plots need matplotlib, which is missing. Run pip install matplotlib, or pass --no-plot.")


def build_all_runs(args: argparse.Namespace, flags: list[str], output_folder: Path) -> list[Run]:
    settings = Settings(
        steps=args.steps,
        seed=args.seed,
        config=args.config,
        output_folder=output_folder,
        checkpoint_interval=args.checkpoint_interval,
        seed_checkpoint=args.seed_checkpoint,
        flags=flags,
        environ=os.environ,
    )
    return build_runs(args.run, settings)


def get_result(run: Run, folder: RunFolder, command: str, launcher: Path, label: str, lock_fd: int) -> Result:
    """Return what a run recorded, after training it unless that is done already."""
    if folder.is_finished():
        say(f"{label}: kept, nothing has changed since it finished")
    else:
        if changes := folder.get_changes():
            say(f"{label}: from scratch, because this changed: {', '.join(changes)}")
        step = folder.prepare()
        say(f"{label}: {f'resumes after step {step}' if step else 'starts'}; log: {folder.log}")
        execute(run, folder, launcher, label, lock_fd)
    scalars = read_scalars(folder.path)
    if run.name != SEED_CHECKPOINT and not count_complete_steps(scalars):
        raise CompareError(f"{label} recorded no loss for step 1. Its log: {folder.log}")
    folder.finish(keep_checkpoints=run.name == SEED_CHECKPOINT)
    return Result(run.name, command, get_versions(), scalars)


def compare(args: argparse.Namespace, flags: list[str], launcher: Path) -> Comparison | None:
    """Run what is to be run and compare it; with --dry-run print the commands and return None."""
    validate(args)
    golden = [read_golden(args.import_result)] if args.import_result else []
    if golden and (steps := max(golden[0].scalars["loss"], default=0)) != args.steps:
        raise CompareError(f"--import-result {args.import_result} has {steps} steps, this comparison {args.steps}. Pass --steps {steps}.")
    runs = build_all_runs(args, flags, args.output_folder)
    # The commands that are kept do not say where this user keeps the results.
    commands = {run.name: run.get_command() for run in build_all_runs(args, flags, DEFAULT_FOLDER)}
    folders = [RunFolder(args.output_folder / run.name, build_fingerprint(run, commands[run.name])) for run in runs]
    if args.dry_run:
        for run in runs:
            print(run.get_command(os.path.join(".", os.path.relpath(launcher))))
        return None
    if args.export_result:
        args.export_result.parent.mkdir(parents=True, exist_ok=True)  # that it cannot be written shows now, not at the end
        args.export_result.touch()
    results = []
    with lock(args.output_folder) as lock_fd:
        for number, (run, folder) in enumerate(zip(runs, folders), 1):
            label = f"[{number}/{len(runs)}] {run.name}"
            results.append(get_result(run, folder, commands[run.name], launcher, label, lock_fd))
    baseline, *others = golden + [result for result in results if result.name != SEED_CHECKPOINT]
    return compare_results(baseline, others, args.steps)


def report(comparison: Comparison, args: argparse.Namespace) -> int:
    """Print and write the result and return the exit code."""
    files = [args.output_folder / "result.json", *([args.export_result] if args.export_result else [])]
    for file in files:
        write_json(comparison, file)
    if not args.no_plot:
        from torchtitan_simplefsdp.compare.plot import plot_comparison

        files.append(args.output_folder / "plot.png")
        plot_comparison(comparison, files[-1])
    print(f"{format_markdown(comparison) if args.markdown else format_table(comparison)}\n")
    say(f"Written: {', '.join(map(str, files))}")
    differences = [difference for metrics in comparison.differences.values() for difference in metrics.values()]
    largest = max(difference.largest_relative for difference in differences)
    equal = all(difference.first_step is None for difference in differences)
    finite = all(math.isfinite(value) for metric in comparison.baseline.scalars.values() for value in metric.values())
    verdict = "All runs are equal in every bit." if equal else f"The largest relative difference is {largest:.3g}."
    verdict += "" if finite else " The baseline has values that are not finite: no equality."
    print(verdict if args.tolerance is None else f"{verdict} The tolerance is {args.tolerance:g}.")
    asserted = args.assert_equal or args.tolerance is not None
    passed = finite and (equal if args.tolerance is None else largest <= args.tolerance)
    return EXIT_DIFFERENT if asserted and not passed else EXIT_EQUAL


def main(argv: list[str], launcher: Path = LAUNCHER) -> int:
    end = argv.index("--") if "--" in argv else len(argv)
    args = build_parser().parse_args(argv[:end])
    for number in STOP_SIGNALS:
        signal.signal(number, signal.default_int_handler)  # all end as Ctrl-C does
    try:
        comparison = compare(args, argv[end + 1 :], launcher)
        return report(comparison, args) if comparison else EXIT_EQUAL
    except (CompareError, OSError) as error:
        say(f"loss_compare.py: {error}")
        return EXIT_FAILED
    except KeyboardInterrupt:
        say("Interrupted; no process is left. The same command goes on from here.")
        return EXIT_INTERRUPTED


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
