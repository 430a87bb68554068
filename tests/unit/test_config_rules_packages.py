"""Rules about names that a module has to provide; the messages are written by hand."""

import sys

import pytest
import torch
from config_workspace import get_faults, parse, workspace
from torchtitan.protocols import model_converter

from torchtitan_simplefsdp.titan.config import rules_packages

CONVERTERS = "'quantize.linear.float8', 'quantize.grouped_mm.float8', 'quantize.linear.mx', 'quantize.grouped_mm.mx'"
IMPORT_HELP = (
    "Expected a module's dotted name; it is looked for in the working directory, on PYTHONPATH and among the installed packages."
)

# Flags, the one fault; with torchao and a GPU.
CASES = {
    "missing_module": (
        "--experimental.custom_import no_such_module",
        f"experimental.custom_import='no_such_module' cannot be imported: No module named 'no_such_module'. {IMPORT_HELP}",
    ),
    "missing_package": (
        "--experimental.custom_import no_such_package.module",
        f"experimental.custom_import='no_such_package.module' cannot be imported: No module named 'no_such_package'. {IMPORT_HELP}",
    ),
    "missing_module_of_a_package": (
        "--experimental.custom_import json.no_such_module",
        f"experimental.custom_import='json.no_such_module' cannot be imported: No module named 'json.no_such_module'. {IMPORT_HELP}",
    ),
    "package_that_fails": (
        "--experimental.custom_import broken_package.module",
        f"experimental.custom_import='broken_package.module' cannot be imported: division by zero. {IMPORT_HELP}",
    ),
    "unknown_converter": (
        "--model.converters quantize.linear.float9",
        "model.converters: 'quantize.linear.float9' is unknown (did you mean 'quantize.linear.float8'?). Known: " + CONVERTERS + ".",
    ),
    "unknown_backend": (
        "--compile.enable --compile.backend inducto",
        f"compile.backend='inducto' is unknown to torch {torch.__version__} (did you mean 'inductor'?). Known: "
        f"{', '.join(map(repr, torch.compiler.list_backends()))}, 'aot_eager'.",
    ),
    "unknown_component": (
        "--compile.enable --compile.components model,los",
        "compile.components=['model', 'los'] must be of 'model', 'loss', at least one (did you mean 'loss'?).",
    ),
}


@pytest.fixture(autouse=True)
def torchao_and_gpu(workspace, monkeypatch):
    (workspace / "broken_package.py").write_text("1 / 0")
    (workspace / "torchao.py").touch()
    monkeypatch.syspath_prepend(workspace)
    monkeypatch.setattr(rules_packages, "is_cpu_only", lambda: False)


@pytest.mark.parametrize("flags, fault", CASES.values(), ids=CASES.keys())
def test_a_name_that_nothing_provides_is_the_one_fault(workspace, flags, fault):
    assert get_faults(workspace, flags=flags) == [fault]


def test_compiling_nothing_is_a_fault(workspace):
    (fault,) = get_faults(workspace, "[compile]\nenable = true\ncomponents = []")
    assert fault == "compile.components=[] must be of 'model', 'loss', at least one."


@pytest.mark.parametrize("name", ["quantize.linear.float8", "quantize.grouped_mm.mx"])
def test_quantization_without_its_package_is_a_fault(workspace, monkeypatch, name):
    monkeypatch.setattr(rules_packages, "find_import_problem", lambda module: f"No module named {module!r}")
    assert get_faults(workspace, flags=f"--model.converters {name}") == [
        f"model.converters: {name!r} needs the package torchao: No module named 'torchao'. Install it (pip install torchao), or "
        "remove the converter."
    ]


@pytest.mark.parametrize("flags", ["", " --quantize.linear.float8.emulate --compile.enable"])
def test_quantization_without_a_gpu_is_a_fault_unless_it_is_emulated(workspace, monkeypatch, flags):
    monkeypatch.setattr(rules_packages, "is_cpu_only", lambda: True)
    assert get_faults(workspace, flags=f"--model.converters quantize.linear.float8{flags}") == [
        "model.converters: 'quantize.linear.float8' needs a GPU, and there is none. Remove it; 'quantize.linear.float8' can be "
        "emulated with --quantize.linear.float8.emulate and without compile."
    ]
    parse(workspace, flags="--model.converters quantize.linear.float8 --quantize.linear.float8.emulate")


@pytest.mark.parametrize(
    "flags",
    [
        "--model.converters quantize.linear.float8,quantize.linear.float8",
        "--experimental.custom_import json.tool --model.converters mine --compile.enable --compile.backend mine",
        "--compile.backend mine --compile.components mine",  # not read without compile.enable
        "--compile.enable --compile.backend aot_eager --compile.components loss",
    ],
)
def test_what_is_possible_is_not_refused(workspace, flags):
    assert parse(workspace, flags=flags)


def test_a_converter_that_was_registered_is_accepted(workspace, monkeypatch):
    monkeypatch.setitem(model_converter._registry_model_converter_cls, "mine", type("Mine", (), {}))
    assert parse(workspace, flags="--model.converters mine")


def test_the_check_does_not_import_the_module(workspace):
    (workspace / "not_yet.py").write_text("raise AssertionError")
    parse(workspace, flags="--experimental.custom_import not_yet")
    assert "not_yet" not in sys.modules
