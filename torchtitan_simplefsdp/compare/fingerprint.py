"""Fingerprint: what a run's numbers depend on; a finished run is used again only while all of it is the same.

Not here: hardware and the data that a run reads, which are taken to stay as they are.
"""

import hashlib
import platform
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from torchtitan_simplefsdp.launch_args import LaunchError, build_module_args

from .runs import CompareError, Run

PACKAGE = Path(__file__).resolve().parents[1]


def get_versions() -> dict[str, str]:
    """Return the versions of Python, torch and torchtitan, and a hash of this package's sources."""
    return {
        "python": platform.python_version(),  # the embedded text is Python's own documentation
        "torch": _get_version("torch"),
        "torchtitan": _get_version("torchtitan"),
        "torchtitan_simplefsdp": _hash_sources(),
    }


def build_fingerprint(run: Run, command: str) -> dict[str, str]:
    """Return what must not change between two starts of a run, by the name a user knows it by.

    Args:
        command: the run's command with an output folder that does not depend on where the results are kept.

    Raises: CompareError if the run's config file does not exist.
    """
    try:
        config_file = build_module_args(run.flags, run.environ)[1]
    except LaunchError as error:
        raise CompareError(f"run {run.name!r}: {str(error).removeprefix('run_train.sh: ')}") from error
    return {"command": command, "config file": _hash(Path(config_file).read_bytes()), **get_versions()}


def _get_version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:  # then ./run_train.sh uses or makes an environment of its own
        return "not installed"


def _hash_sources() -> str:
    # This folder does not count: what it changes is how runs are compared, not what they compute.
    files = [file for file in sorted(PACKAGE.rglob("*.py")) if not file.is_relative_to(PACKAGE / "compare")]
    files += sorted((PACKAGE / "assets").rglob("*.json"))
    return _hash(b"".join(f"{file.relative_to(PACKAGE)}\0".encode() + file.read_bytes() for file in files))


def _hash(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()[:16]
