"""Runs: what is trained, as a name, environment variables and flags of ./run_train.sh.

Every run gets the same seed, determinism and a folder of its own. These flags come first, since of a repeated flag the
last one counts: what the user asks for wins.

Not here: starting runs (execute.py), what makes a finished one reusable (fingerprint.py).
"""

import re
import shlex
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

INHERITED = ("NGPU", "OMP_NUM_THREADS", "CUDA_VISIBLE_DEVICES", "TRAIN_FILE", "ATEN_CPU_CAPABILITY")
"""Variables of the shell that change what is computed; they become part of the command."""

NOT_INHERITED = ("COMM_MODE", "NNODES", "NODE_RANK", "RDZV_ENDPOINT")
"""Variables of the shell that would make another kind of run of it; a --run can name them."""

SEED_CHECKPOINT, GOLDEN = "seed_checkpoint", "golden"
"""Names of the run that makes the seed checkpoint and of the imported run."""

_PARALLELISMS = (
    "data_parallel_replicate", "data_parallel_shard", "context_parallel", "tensor_parallel", "pipeline_parallel"
)


class CompareError(Exception):
    """A comparison that cannot start or go on; the message is all the user needs."""


@dataclass(frozen=True)
class Settings:
    """What all runs of a comparison share.

    Args:
        steps: optimizer steps of every run.
        seed: debug.seed of every run.
        config: TOML file, as the user named it.
        output_folder: where each run gets a folder with its name.
        checkpoint_interval: optimizer steps between two checkpoints; 0 writes none.
        seed_checkpoint: whether runs load their initial weights from a checkpoint instead of initializing them.
        flags: flags that every run gets before its own.
        environ: the user's shell; INHERITED says what is taken from it.
    """

    steps: int
    seed: int
    config: str
    output_folder: Path
    checkpoint_interval: int
    seed_checkpoint: bool
    flags: list[str]
    environ: Mapping[str, str]


@dataclass(frozen=True)
class Run:
    """One training: `flags` is the whole command line of ./run_train.sh, `environ` what it gets beside the shell's."""

    name: str
    environ: dict[str, str]
    flags: list[str]

    def get_command(self, launcher: str = "./run_train.sh") -> str:
        """Return the command as one can paste it into a shell."""
        assignments = [f"{name}={shlex.quote(value)}" for name, value in self.environ.items()]
        return " ".join([*assignments, shlex.quote(launcher), *map(shlex.quote, self.flags)])


def build_runs(texts: list[str], settings: Settings) -> list[Run]:
    """Build one run per text NAME="[VARIABLE=value ...] [--flag ...]"; with a seed checkpoint, before them its run.

    Raises: CompareError for a text that names no run, a name twice, or flags that the comparison sets itself.
    """
    _validate_flags("flags after --", settings.flags)
    runs = [_build_run(text, settings) for text in texts]
    names = [run.name for run in runs]
    for name in names:
        if names.count(name) > 1:
            raise CompareError(f"--run: two runs are called {name!r}. Give each its own name.")
    return [_build_seed_run(settings), *runs] if settings.seed_checkpoint else runs


def _build_run(text: str, settings: Settings) -> Run:
    name, equals, typed = text.partition("=")
    if not equals or not re.fullmatch(r"[A-Za-z0-9_][A-Za-z0-9._-]*", name) or name in (SEED_CHECKPOINT, GOLDEN):
        raise CompareError(
            f'--run {text!r}: expected NAME="[VARIABLE=value ...] [--flag value ...]". NAME becomes a folder: letters, '
            f"digits, '_', '-' and '.', not starting with '-' or '.', and neither {SEED_CHECKPOINT!r} nor {GOLDEN!r}."
        )
    try:
        words = shlex.split(typed)
    except ValueError as error:
        raise CompareError(f"--run {name}: cannot read {typed!r} as a shell would: {error}.") from error
    environ = {}
    while words and re.match(r"[A-Za-z_]\w*=", words[0]):
        variable, _, value = words.pop(0).partition("=")
        environ[variable] = value
    _validate_flags(f"--run {name}", words)
    return _add_settings(name, environ, [*_get_checkpoint_flags(settings), *settings.flags, *words], settings)


def _validate_flags(where: str, flags: list[str]) -> None:
    if flags and not flags[0].startswith("--"):
        raise CompareError(f"{where}: {flags[0]!r} is neither VARIABLE=value nor a flag such as --debug.seed.")
    for flag in flags:
        if flag.partition("=")[0].replace("-", "_") == "__job.dump_folder":
            raise CompareError(f"{where}: --job.dump_folder is set by the comparison. Use --output-folder.")


def _add_settings(name: str, environ: dict[str, str], flags: list[str], settings: Settings) -> Run:
    inherited = {variable: settings.environ[variable] for variable in INHERITED if settings.environ.get(variable)}
    ours = ["--job.dump_folder", str(settings.output_folder / name)]
    ours += ["--training.steps", str(settings.steps), "--debug.seed", str(settings.seed), "--debug.deterministic"]
    ours += ["--metrics.enable_tensorboard", "--metrics.log_freq", "1"]
    # The config file goes into the environment, because --config would win over a --job.config_file of the user.
    return Run(name, {"CONFIG_FILE": settings.config, **inherited, **environ}, [*ours, *flags])


def _get_checkpoint_flags(settings: Settings) -> list[str]:
    if settings.checkpoint_interval:
        # A full last checkpoint, too: a run that is killed after writing it resumes from it.
        flags = ["--checkpoint.enable", "--checkpoint.interval", str(settings.checkpoint_interval)]
        flags += ["--checkpoint.keep_latest_k", "2", "--checkpoint.no_last_save_model_only"]
    elif settings.seed_checkpoint:
        flags = ["--checkpoint.enable", "--checkpoint.load_only"]
    else:
        return ["--checkpoint.no_enable"]
    if settings.seed_checkpoint:
        path = settings.output_folder / SEED_CHECKPOINT / "checkpoint" / "step-0"
        flags += ["--checkpoint.initial_load_path", str(path)]
    return [*flags, "--checkpoint.folder", "checkpoint"]


def _build_seed_run(settings: Settings) -> Run:
    # torchtitan makes one in a single process without any parallelism, whatever the flags of all runs say
    flags = [*settings.flags, "--checkpoint.enable", "--checkpoint.create_seed_checkpoint"]
    flags += ["--checkpoint.folder", "checkpoint"]
    for parallelism in _PARALLELISMS:
        flags += [f"--parallelism.{parallelism}_degree", "1"]
    return _add_settings(SEED_CHECKPOINT, {"NGPU": "1"}, flags, settings)
