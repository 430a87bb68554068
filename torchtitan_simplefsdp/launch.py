"""The launcher behind run_train.sh: one command line and one environment become one torchrun launch.

Python rather than shell, so that arguments stay a list from the command line to the ranks and a path with spaces
arrives as it was typed. torchrun runs inside this process: that saves importing torch twice, and a configuration fault,
which every rank finds, is printed once and bare instead of under torchrun's report.

Not here: how a SIGTERM reaches the ranks (stop.py), the variables that decide how many processes run where
(launch_args.py), the choice of the Python environment (scripts/setup_env.sh), and the check of the configuration
(titan/config/check.py, in the ranks; --help is there, too).
"""

import logging
import os
import runpy
import shutil
import signal
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import NoReturn

from .launch_args import (
    LaunchError,
    build_environment,
    build_module_args,
    build_rendezvous_args,
    build_torchrun_args,
    get_count,
    get_dump_folder,
    is_seed_checkpoint,
)
from .progress import show_progress
from .stop import forward_sigterm

DEFAULT_MODULE = "torchtitan_simplefsdp.train"
COMM_MODES = ("fake_backend", "local_tensor")
EXIT_CONFIG_ERROR = 2
ELASTIC_LOGS = ("agent.server.api", "multiprocessing.api")  # what torchrun says while it stops the ranks


class ExplainedExit(Exception):
    """How an end that explains itself is called in torchrun's error file."""


def exit_with_explanation(message: str, code: int) -> NoReturn:
    """End this rank with an exit code above 0, leaving `message` to be printed once; all ranks must do so.

    Under torchrun the message goes to the rank's error file, where the launcher (or torchrun's own report) finds it;
    a process of its own prints it to stderr.
    """
    if os.environ.get("TORCHELASTIC_ERROR_FILE"):
        from torch.distributed.elastic.multiprocessing.errors import get_error_handler

        try:  # the handler records the exception that is being handled
            raise ExplainedExit(message) from None
        except ExplainedExit as explained:
            get_error_handler().record_exception(explained)
    else:
        print(message, file=sys.stderr)
    sys.exit(code)


def has_a_reader(record: logging.LogRecord) -> bool:
    """Answer whether a log record of torchrun's is about something else than a closed pipe, `./run_train.sh | head`."""
    return not (record.exc_info and isinstance(record.exc_info[1], BrokenPipeError))


def run_torchrun(torchrun_args: list[str], log_dir: Path, made: list[Path], command: str = "run_train.sh") -> int:
    """Run the ranks to their end and return the exit code; an end that explains itself is reported once and bare.

    `made`: the folders that exist for this run's logs alone, removed if it does not start.
    `command`: what the user started, for messages.
    """
    from torch.distributed import run as torchrun
    from torch.distributed.elastic.multiprocessing import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

    # What torchrun says while it stops the ranks is held back until it is known whether their fault explains itself.
    held_back: list[logging.LogRecord] = []

    def hold_back(record: logging.LogRecord) -> bool:
        held_back.append(record)
        return False

    elastic_logs = [logging.getLogger(f"torch.distributed.elastic.{name}") for name in ELASTIC_LOGS]
    for log in elastic_logs:
        log.addFilter(hold_back)
    # When nobody reads the output any more, the run goes on, and all of it is in the logs.
    tail_log = logging.getLogger("torch.distributed.elastic.multiprocessing.tail_log")
    tail_log.addFilter(has_a_reader)
    try:
        with show_progress(log_dir), forward_sigterm():
            torchrun.run(torchrun.parse_args(torchrun_args))
        return 0
    except SignalException as signal_error:
        held_back.clear()
        return report_stop(signal_error.sigval, log_dir, command)
    except ChildFailedError as error:
        for failure in error.failures.values():
            message = failure.message.get("message", "") if isinstance(failure.message, dict) else ""
            if message.startswith("ExplainedExit: "):
                print(message.removeprefix("ExplainedExit: "), file=sys.stderr)
                held_back.clear()
                if failure.exitcode == EXIT_CONFIG_ERROR:
                    remove_logs(Path(failure.error_file).parents[2], made)
                return failure.exitcode
        exitcode = error.get_first_failure()[1].exitcode
        if exitcode == -signal.SIGTERM:  # ranks that had nothing to save yet
            held_back.clear()
            return report_stop(signal.SIGTERM, log_dir, command)
        print(f"{error}\nOutput of all ranks: {log_dir}", file=sys.stderr)
        return exitcode if exitcode > 0 else 128 - exitcode
    finally:
        tail_log.removeFilter(has_a_reader)
        for log in elastic_logs:
            log.removeFilter(hold_back)
        for record in held_back:
            logging.getLogger(record.name).handle(record)


def report_stop(number: int, log_dir: Path, command: str) -> int:
    """Say that a signal ended the run and return the exit code that shells give such an end."""
    name = signal.Signals(number).name
    print(f"{command}: stopped by {name}, all ranks have ended. Output of all ranks: {log_dir}", file=sys.stderr)
    return 128 + number


def launch_script(script: Path, argv: list[str], processes: int) -> int:
    """Run a script on several ranks of this machine and return the exit code. Rank 0 has the terminal to itself."""
    import torch

    log_dir = Path(tempfile.mkdtemp(prefix=f"{script.stem}_"))
    redirects = ",".join(f"{rank}:3" for rank in range(1, processes))
    torchrun_args = [
        *build_rendezvous_args({}),
        f"--nproc-per-node={processes}",
        f"--redirects={redirects}",
        f"--log-dir={log_dir}",
        str(script),
        *argv,
    ]
    gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    os.environ.update(build_environment(os.environ, processes, gpus, len(os.sched_getaffinity(0))))
    exitcode = run_torchrun(torchrun_args, log_dir, [log_dir], script.name)
    if exitcode == 0:
        shutil.rmtree(log_dir)
    return exitcode


def make_folders(folder: Path) -> list[Path]:
    """Make `folder` and return those of it and its parents that were missing, the innermost first."""
    missing = [path for path in (folder, *folder.parents) if not path.exists()]
    folder.mkdir(parents=True, exist_ok=True)
    return missing


def remove_logs(run_folder: Path, made: list[Path]) -> None:
    """Remove the logs of a run that never started, and what is empty of the folders made for them."""
    shutil.rmtree(run_folder, ignore_errors=True)
    for folder in made:
        try:
            folder.rmdir()
        except OSError:  # another run writes there as well
            return


def run_module(module: str, module_args: list[str]) -> int:
    """Run the train module in this process, as `python -m` would."""
    sys.argv = [module, *module_args]
    runpy.run_module(module, run_name="__main__", alter_sys=True)
    return 0


def launch(argv: list[str], environ: Mapping[str, str]) -> int:
    """Run what `argv` and `environ` ask for and return the exit code.

    Raises: LaunchError, before any rank is started.
    """
    module = environ.get("TRAIN_FILE") or DEFAULT_MODULE
    module_args = build_module_args(argv, environ)
    if any(arg in ("-h", "--help") or arg.startswith("--help=") for arg in argv):
        signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # `./run_train.sh --help all | head` ends without a traceback
        return run_module(module, module_args)
    log_dir = get_dump_folder(module_args) / "logs"

    import torch  # not at the top: the faults above need no torch, which takes seconds to import

    gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    processes = get_count(environ, "NGPU", 1 if is_seed_checkpoint(argv) else gpus or 2)
    if comm_mode := environ.get("COMM_MODE"):
        if comm_mode not in COMM_MODES:
            raise LaunchError(f"run_train.sh: unknown COMM_MODE={comm_mode!r}. Valid: {', '.join(COMM_MODES)}.")
        os.environ.update(NGPU=str(processes), LOCAL_RANK="0")
        return run_module(module, [*module_args, f"--comm.mode={comm_mode}", "--training.steps=1"])
    if gpus and processes > gpus:
        raise LaunchError(
            f"run_train.sh: NGPU={processes}, but this machine shows {gpus} CUDA devices. "
            "Lower NGPU, or set CUDA_VISIBLE_DEVICES= to train on the CPU."
        )
    torchrun_args = build_torchrun_args(module, module_args, environ, processes, log_dir)
    try:
        made = make_folders(log_dir)
    except OSError as error:
        raise LaunchError(
            f"run_train.sh: cannot write the logs to {log_dir.absolute()}: {error.strerror}. "
            "Pass --job.dump_folder FOLDER with a folder that is writable."
        ) from error
    os.environ.update(build_environment(environ, processes, gpus, len(os.sched_getaffinity(0))))
    sys.stdout.reconfigure(line_buffering=True)  # `./run_train.sh | tee FILE` shows a line when it is written
    return run_torchrun(torchrun_args, log_dir, made)


def main() -> int:
    try:
        return launch(sys.argv[1:], os.environ)
    except LaunchError as error:
        print(error, file=sys.stderr)
        return EXIT_CONFIG_ERROR
    except KeyboardInterrupt:  # no ranks: they have not been started yet, or the run is a dry one in this process
        print("run_train.sh: stopped by SIGINT.", file=sys.stderr)
        return 128 + signal.SIGINT
    finally:
        drop_unread_output()


def drop_unread_output() -> None:
    """Forget what stdout still holds if nobody reads it any more; Python would fail to write it at exit, and say so."""
    try:
        sys.stdout.flush()
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


if __name__ == "__main__":
    sys.exit(main())
