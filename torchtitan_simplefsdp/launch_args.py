"""What to launch: from the command line and the environment to torchrun's arguments and the ranks' variables.

Nothing here starts a process or imports torch, so that all of it can be tested as a table.

Not here: what the processes compute, which is the configuration's matter (titan/config).
"""

import os
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

try:
    from tomllib import loads as parse_toml, TOMLDecodeError
except ModuleNotFoundError:  # Python 3.10
    from tomli import loads as parse_toml, TOMLDecodeError

ENVIRONMENT = {
    "NGPU": "processes here (default: the CUDA devices, else 2)",
    "CONFIG_FILE": "TOML file if no flag names one",
    "LOG_RANK": "local ranks that are shown, e.g. 0,1 (default: 0)",
    "TRAIN_FILE": "module that every rank runs",
    "COMM_MODE": "fake_backend or local_tensor: dry run in one process",
    "NNODES": "machines of the run; more than 1 need the next two",
    "NODE_RANK": "number of this machine, from 0",
    "RDZV_ENDPOINT": "HOST:PORT of machine 0, the same on all",
    "RDZV_ID": "name of the run, the same on all",
    "PYTHON": "interpreter to run with (default: python3)",
}
"""The environment variables of run_train.sh, as --help shows them; an empty one counts as unset."""

RANK_MODULE = "torchtitan_simplefsdp.rank"
REPOSITORY = Path(__file__).resolve().parents[1]
DEFAULT_CONFIG = REPOSITORY / "train_configs" / "llama3_debug.toml"
DEFAULT_DUMP_FOLDER = "./outputs"  # torchtitan's own default


class LaunchError(ValueError):
    """The command line or the environment asks for something that cannot be launched."""


def pop_option(argv: list[str], *flags: str) -> tuple[str | None, list[str]]:
    """Split `argv` into the value of an option (None if it is not given, the last one if repeated) and all the rest."""
    value, rest, remaining = None, [], iter(argv)
    for arg in remaining:
        flag, has_value, inline_value = arg.partition("=")
        if flag not in flags:
            rest.append(arg)
            continue
        value = inline_value if has_value else next(remaining, "")
        if not value:
            raise LaunchError(f"run_train.sh: {flag} has no value. Give it as {flag} VALUE or {flag}=VALUE.")
    return value, rest


def get_count(environ: Mapping[str, str], name: str, default: int) -> int:
    text = environ.get(name) or str(default)
    if not text.isdecimal() or int(text) < 1:
        raise LaunchError(f"run_train.sh: {name}={text!r} is not a whole number of 1 or more. Example: {name}=2.")
    return int(text)


def build_module_args(argv: list[str], environ: Mapping[str, str]) -> list[str]:
    """Turn the command line into the train module's: --config FILE becomes --job.config_file FILE.

    Precedence: --config, --job.config_file, CONFIG_FILE, the debug config. A path that the working directory does not
    have is looked up in the repository, so `--config train_configs/llama3_8b.toml` works from anywhere.
    """
    config, rest = pop_option(argv, "--config")
    config_file, overrides = pop_option(rest, "--job.config_file", "--job.config-file")
    path = Path(config or config_file or environ.get("CONFIG_FILE") or DEFAULT_CONFIG)
    if not path.is_file() and (REPOSITORY / path).is_file():
        path = REPOSITORY / path
    if not path.is_file():
        known = ", ".join(sorted(f"train_configs/{p.name}" for p in DEFAULT_CONFIG.parent.glob("*.toml")))
        raise LaunchError(
            f"run_train.sh: config file '{path}' not found (looked in {path.absolute()}). "
            f"Pass --config FILE; the repository has {known}."
        )
    return ["--job.config_file", str(path), *overrides]


def read_toml(path: str) -> dict[str, Any]:
    """Read a TOML file, with or without the byte order mark that some editors put before UTF-8 text.

    Raises: OSError, UnicodeDecodeError, TOMLDecodeError.
    """
    with open(path, "rb") as file:
        return parse_toml(file.read().decode("utf-8-sig"))


def get_dump_folder(module_args: list[str]) -> Path:
    """Read where this run writes: job.dump_folder of the command line, else of the TOML file."""
    config_file, overrides = pop_option(module_args, "--job.config_file")
    dump_folder, _ = pop_option(overrides, "--job.dump_folder", "--job.dump-folder")
    if dump_folder is None:
        try:
            dump_folder = read_toml(config_file)["job"]["dump_folder"]
        except (OSError, ValueError, KeyError, TypeError):  # what is wrong with the file, the ranks find and explain
            pass
    return Path(dump_folder if isinstance(dump_folder, str) else DEFAULT_DUMP_FOLDER)


def is_seed_checkpoint(argv: list[str]) -> bool:
    """Answer whether the command line asks for a seed checkpoint, which one process makes."""
    return any(arg.replace("-", "_") == "__checkpoint.create_seed_checkpoint" for arg in argv)


def build_rendezvous_args(environ: Mapping[str, str]) -> list[str]:
    """Say how the processes of all machines find each other."""
    nodes = get_count(environ, "NNODES", 1)
    if nodes == 1:
        return [
            "--nnodes=1",
            "--rdzv-backend=c10d",
            "--rdzv-endpoint=localhost:0",  # any free port
            "--local-addr=localhost",  # without it torchrun resolves the host name, which needs a network
            f"--rdzv-id={environ.get('RDZV_ID') or time.strftime('%Y%m%d-%H%M%S')}",
        ]
    node_rank, endpoint = environ.get("NODE_RANK", ""), environ.get("RDZV_ENDPOINT", "")
    if not node_rank.isdecimal() or int(node_rank) >= nodes:
        raise LaunchError(
            f"run_train.sh: NNODES={nodes} with NODE_RANK={node_rank!r}. "
            f"NODE_RANK is the number of this machine, from 0 to {nodes - 1}, another one on each."
        )
    host, _, port = endpoint.rpartition(":")
    if not host or not port.isdecimal():
        raise LaunchError(
            f"run_train.sh: NNODES={nodes} with RDZV_ENDPOINT={endpoint!r}. "
            "RDZV_ENDPOINT is HOST:PORT of the machine with NODE_RANK=0, the same on every machine."
        )
    return [
        f"--nnodes={nodes}",
        "--rdzv-backend=static",  # unlike c10d it gives global rank 0, and the step lines, to NODE_RANK=0
        f"--rdzv-endpoint={endpoint}",
        f"--node-rank={node_rank}",
        f"--rdzv-id={environ.get('RDZV_ID') or 'simplefsdp'}",
    ]


def build_torchrun_args(
    module: str, module_args: list[str], environ: Mapping[str, str], processes: int, log_dir: Path
) -> list[str]:
    """Build torchrun's command line for the `processes` ranks of this machine, each running `module`."""
    log_rank = environ.get("LOG_RANK") or "0"
    if not all(rank.isdecimal() and int(rank) < processes for rank in log_rank.split(",")):
        raise LaunchError(
            f"run_train.sh: LOG_RANK={log_rank!r} does not name local ranks of NGPU={processes}. "
            f"Allowed: numbers from 0 to {processes - 1}, separated by commas."
        )
    return [
        *build_rendezvous_args(environ),
        f"--nproc-per-node={processes}",
        "--role=rank",  # output lines start with [rank0]:
        "--signals-to-handle=SIGINT,SIGHUP,SIGQUIT",  # launch.py handles SIGTERM
        "--tee=3",  # stdout and stderr of every rank go to log_dir, those of LOG_RANK to the terminal as well
        f"--local-ranks-filter={log_rank}",
        f"--log-dir={log_dir}",  # torchrun's default is a folder under /tmp that it never removes
        "--module",
        RANK_MODULE,
        str(os.getpid()),
        module,
        *module_args,
    ]


def build_environment(environ: Mapping[str, str], processes: int, gpus: int, cpus: int) -> dict[str, str]:
    """List the variables the ranks get on top of `environ`; what the user has set stays."""
    # Unset, torchrun makes it 1 and prints a warning box. On GPUs 1 is enough; on CPUs cores would lie idle, so the
    # processes share them out.
    defaults = {"OMP_NUM_THREADS": "1" if gpus else str(max(1, cpus // processes))}
    if gpus and "PYTORCH_CUDA_ALLOC_CONF" not in environ:  # the older name of the same variable
        defaults["PYTORCH_ALLOC_CONF"] = "expandable_segments:True"
    if get_count(environ, "NNODES", 1) > 1:
        # torchrun's default shows the local rank, which is the same on every machine.
        defaults["TORCHELASTIC_LOG_LINE_PREFIX_TEMPLATE"] = "[${role_name}${rank}]:"
    return {name: value for name, value in defaults.items() if not environ.get(name)}
