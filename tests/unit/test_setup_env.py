"""scripts/setup_env.sh and missing_packages.py: which environment is chosen, and how .venv is made and repaired.

A stand-in for Python, a few lines of shell, plays the interpreter, venv and pip, so nothing is downloaded.
"""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parents[2]

# An environment is a folder with bin/python; it is complete when it holds a file `complete`.
# Every pip call adds a line to $CALLS. PIP=fails and PIP=killed make it end half-way.
PYTHON = """#!/usr/bin/env bash
environment="$(dirname "$(dirname "$0")")"
case "$*" in
    *missing_packages.py*) [ -e "$environment/complete" ] || echo "torch>=2.13" ;;
    "-m venv .venv") mkdir -p .venv/bin; cp "$0" .venv/bin/python ;;
    "-m pip install"*)
        echo "$PWD: $*" >>"$CALLS"
        sleep 0.2
        touch "$environment/half-made"
        case "${PIP:-}" in fails) exit 1 ;; killed) kill -KILL "$PPID"; exit 1 ;; esac
        touch "$environment/complete"
        ;;
esac
"""


class Checkout:
    """A copy of the scripts next to a bare interpreter, in a path with a space."""

    def __init__(self, folder: Path) -> None:
        self.repo, self.base, self.calls = folder / "check out", folder / "base", folder / "calls"
        self.venv = self.repo / ".venv"
        (self.repo / "scripts").mkdir(parents=True)
        shutil.copy(REPOSITORY / "scripts" / "setup_env.sh", self.repo / "scripts")
        (self.repo / "pyproject.toml").write_text("")
        (self.repo / "constraints.txt").write_text("torch==2.13.0\n")
        self.make_environment(self.base)
        start = self.repo / "start.sh"
        start.write_text(
            'set -euo pipefail; repo="$(dirname "$(readlink -f "$0")")"; source "$repo/scripts/setup_env.sh"\n'
            'choose_python dev; echo "$PYTHON"; echo "$PYTHONPATH" >&2\n'
        )

    def make_environment(self, folder: Path) -> None:
        (folder / "bin").mkdir(parents=True)
        (folder / "bin" / "python").write_text(PYTHON)
        (folder / "bin" / "python").chmod(0o755)

    def start(self, **environ: str) -> subprocess.Popen:
        environ = {**os.environ, "PYTHON": str(self.base / "bin" / "python"), "CALLS": str(self.calls)} | environ
        command = ["bash", self.repo / "start.sh"]
        return subprocess.Popen(
            command, env=environ, cwd=self.repo.parent, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )

    def choose(self, **environ: str) -> tuple[str, str]:
        """Start once; return the environment that was chosen, '' if none, and stderr."""
        process = self.start(**environ)
        stdout, stderr = process.communicate(timeout=60)
        assert bool(stdout) == (process.returncode == 0)
        return stdout.strip().removesuffix("/bin/python"), stderr

    def count_installs(self) -> int:
        return len(self.calls.read_text().splitlines()) if self.calls.exists() else 0


@pytest.fixture
def checkout(tmp_path: Path) -> Checkout:
    return Checkout(tmp_path)


def test_a_complete_current_environment_is_used_with_this_checkouts_code(checkout):
    (checkout.base / "complete").touch()
    chosen, stderr = checkout.choose(PYTHONPATH="mine")
    assert chosen == str(checkout.base)
    assert stderr == f"{checkout.repo}:mine:{checkout.repo.parent}\n"
    assert checkout.count_installs() == 0 and not checkout.venv.exists()


def test_the_first_start_installs_into_a_venv_and_the_second_does_not(checkout):
    chosen, stderr = checkout.choose()
    assert chosen == str(checkout.venv)
    assert "lacks torch>=2.13" in stderr and "this happens once" in stderr
    assert checkout.calls.read_text().startswith(f"{checkout.repo}: -m pip install")
    assert "--constraint constraints.txt --editable .[dev]" in checkout.calls.read_text()
    chosen, stderr = checkout.choose()
    assert chosen == str(checkout.venv)
    assert stderr.count("\n") == 1  # the PYTHONPATH of this test
    assert checkout.count_installs() == 1


def test_two_starts_at_once_install_once(checkout):
    processes = [checkout.start(), checkout.start()]
    outputs = [process.communicate(timeout=60) for process in processes]
    assert [stdout.strip() for stdout, _ in outputs] == [f"{checkout.venv}/bin/python"] * 2
    assert sum("another start is installing" in stderr for _, stderr in outputs) == 1
    assert checkout.count_installs() == 1


def test_a_changed_list_of_versions_updates_the_venv_in_place(checkout):
    checkout.choose()
    (checkout.repo / "constraints.txt").write_text("torch==2.14.0\n")
    checkout.choose()
    checkout.choose()
    assert checkout.count_installs() == 2
    assert (checkout.venv / "half-made").exists()


@pytest.mark.parametrize("how", ["killed", "fails"])
def test_a_half_made_venv_is_made_anew(checkout, how):
    chosen, stderr = checkout.choose(PIP=how)
    assert chosen == ""
    assert how == "killed" or f"installing into {checkout.venv} failed" in stderr
    (checkout.venv / "complete").touch()  # what is there may look complete
    (checkout.venv / "left over").touch()
    assert checkout.choose()[0] == str(checkout.venv)
    assert not (checkout.venv / "left over").exists()
    assert checkout.count_installs() == 2


def test_a_venv_made_by_hand_is_completed_but_never_removed(checkout):
    checkout.make_environment(checkout.venv)
    (checkout.venv / "mine").touch()
    for how in ("fails", "", ""):
        checkout.choose(PIP=how)
    assert (checkout.venv / "mine").exists()
    assert checkout.count_installs() == 2


def test_a_relative_python_is_made_absolute(checkout):
    (checkout.base / "complete").touch()
    assert checkout.choose(PYTHON="base/bin/python")[0] == str(checkout.base)


def test_a_python_that_does_not_exist_is_named(checkout):
    assert checkout.choose(PYTHON="nopython") == (
        "",
        "start.sh: PYTHON='nopython' is not a command. Set it to a Python interpreter, or unset it.\n",
    )


@pytest.mark.parametrize(
    "dependencies, expected",
    [
        ('"pytest>=8", "packaging"', ""),
        ('"pytest>=999", "no_such_package"', "pytest>=999, no_such_package"),
        ("\"no_such_package; sys_platform == 'win32'\"", ""),
    ],
)
def test_missing_packages_are_those_without_a_fitting_version(tmp_path, dependencies, expected):
    (tmp_path / "pyproject.toml").write_text(f"[project]\ndependencies = [{dependencies}]\n")
    command = [sys.executable, REPOSITORY / "scripts" / "missing_packages.py", tmp_path / "pyproject.toml"]
    assert subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip() == expected
