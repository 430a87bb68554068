"""The layout's one direction of imports, and what importing the package costs."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[2] / "torchtitan_simplefsdp"
FILES = sorted(PACKAGE.rglob("*.py"))

# A folder or file of the package (longest match counts) and what it may import of these names.
WATCHED = ("torchtitan", "torchtitan_simplefsdp")
PEER = "torchtitan.experiments.simple_fsdp"  # what the benchmark measures us against, and nothing of ours is built on
PEER_IMPORTED_BY = PACKAGE / "benchmark" / "peers.py"
ALLOWED = {
    "__init__.py": ("torchtitan_simplefsdp.core",),
    "core": ("torchtitan_simplefsdp.core",),
    "titan": ("torchtitan", "torchtitan_simplefsdp"),
    "progress.py": (),
    "launch_args.py": (),
    "graph": ("torchtitan_simplefsdp.graph", "torchtitan_simplefsdp.core"),
    "benchmark": ("torchtitan_simplefsdp.benchmark", "torchtitan_simplefsdp.core", "torchtitan_simplefsdp.graph"),
    "document.py": (),
    "compare": ("torchtitan_simplefsdp.compare", "torchtitan_simplefsdp.launch_args", "torchtitan_simplefsdp.progress"),
    "rank.py": (),
    "stop.py": (),
    "launch.py": ("torchtitan_simplefsdp.launch_args", "torchtitan_simplefsdp.progress", "torchtitan_simplefsdp.stop"),
    "train.py": ("torchtitan", "torchtitan_simplefsdp"),
}


def get_imports(file: Path) -> list[str]:
    """Return the dotted names that a file imports, relative ones resolved, `from a import b` as `a.b`."""
    package = [PACKAGE.name, *file.relative_to(PACKAGE).parent.parts]
    names = []
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.Import):
            names += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else []
            module = ".".join([*base, *([node.module] if node.module else [])])
            names += [f"{module}.{alias.name}" for alias in node.names]
    return names


def is_below(name: str, parent: str) -> bool:
    return f"{name}.".startswith(f"{parent}.")


@pytest.mark.parametrize("file", FILES, ids=lambda file: str(file.relative_to(PACKAGE)))
def test_imports_go_one_way(file):
    allowed = ALLOWED[file.relative_to(PACKAGE).parts[0]]
    for name in get_imports(file):
        if file == PEER_IMPORTED_BY and is_below(name, PEER):
            continue
        if any(is_below(name, watched) for watched in WATCHED):
            assert any(is_below(name, parent) for parent in allowed), name
        assert not is_below(name, "torchtitan.experiments")


@pytest.mark.parametrize("file", FILES, ids=lambda file: str(file.relative_to(PACKAGE)))
def test_private_torch_names_are_imported_in_compat_only(file):
    if file.name == "compat.py":
        return
    for name in get_imports(file):
        if is_below(name, "torch"):
            assert not any(part.startswith("_") and part != "__future__" for part in name.split(".")), name


@pytest.mark.parametrize("file", FILES, ids=lambda file: str(file.relative_to(PACKAGE)))
def test_private_torch_attributes_are_read_in_compat_only(file):
    if file.name == "compat.py":
        return
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.Attribute):
            name = ast.unparse(node)
            assert not re.match(r"(?!torch\.ops\.)(torch|dist|mesh|device_mesh|cp_mesh|pp_mesh|tp_mesh)\.(\w+\.)*_[a-z]", name), name


@pytest.mark.parametrize("file", FILES, ids=lambda file: str(file.relative_to(PACKAGE)))
def test_every_module_says_what_is_not_in_it(file):
    docstring = ast.get_docstring(ast.parse(file.read_text()))
    assert file.name == "__init__.py" or "Not here: " in docstring


def test_importing_the_package_costs_less_than_importing_torch():
    code = "import sys, torchtitan_simplefsdp; print([m for m in ('torch', 'torchtitan') if m in sys.modules])"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "[]"


def test_the_core_does_not_load_torchtitan_or_what_it_needs():
    code = (
        "import sys; from torchtitan_simplefsdp import *; data_parallel, disable_gather\n"
        "print([m for m in sys.modules if m.split('.')[0] in ('torchtitan', 'datasets', 'triton', 'tensorboard')])"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "[]"


def test_unknown_names_of_the_package_are_attribute_errors():
    import torchtitan_simplefsdp

    with pytest.raises(AttributeError, match="has no attribute 'fully_shard'"):
        torchtitan_simplefsdp.fully_shard
    assert torchtitan_simplefsdp.__all__ == sorted(torchtitan_simplefsdp._MODULES)
