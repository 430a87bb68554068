"""Rules about names that a module has to provide: custom_import, model converters, the compile backend.

What `experimental.custom_import` registers is known only after its import, in the trainer; with it, unknown names of
converters and backends are left to torchtitan and torch.

Not here: model, flavor and dataset names (rules_model.py).
"""

import importlib.util
from collections.abc import Iterator

import torch
from torchtitan.components import quantization  # registers its converters
from torchtitan.config import JobConfig
from torchtitan.protocols import model_converter
from torchtitan.protocols.train_spec import TrainSpec

from torchtitan_simplefsdp.titan.config.fault import describe_error, find_close, get_suggestion, list_choices, Rule
from torchtitan_simplefsdp.titan.config.job_config import is_model_compiled
from torchtitan_simplefsdp.titan.device import is_cpu_only

_COMPONENTS = ("model", "loss")


def find_import_problem(module: str) -> str | None:
    """Return why `import module` would not find the module, None if it would; imports its parent packages alone."""
    try:
        found = importlib.util.find_spec(module)
    except Exception as error:  # a parent package may raise anything
        return describe_error(error)
    return None if found else f"No module named {module!r}"


def _get_custom_import_faults(config: JobConfig, world_size: int, train_spec: TrainSpec | None) -> Iterator[str]:
    module = config.experimental.custom_import
    problem = find_import_problem(module) if module else None
    if problem:
        yield (
            f"experimental.custom_import={module!r} cannot be imported: {problem}. Expected a module's dotted name; it is "
            "looked for in the working directory, on PYTHONPATH and among the installed packages."
        )


def _get_converter_faults(config: JobConfig, world_size: int, train_spec: TrainSpec | None) -> Iterator[str]:
    known = model_converter._registry_model_converter_cls
    for name in config.model.converters:
        if name not in known:
            if not config.experimental.custom_import:
                suggestion = get_suggestion(find_close(name, known), "'{}'")
                yield f"model.converters: {name!r} is unknown{suggestion}. Known: {list_choices(known)}."
        elif issubclass(known[name], quantization.QuantizationConverter):
            yield from _get_quantization_faults(config, name)


def _get_quantization_faults(config: JobConfig, name: str) -> Iterator[str]:
    if problem := find_import_problem("torchao"):
        yield (
            f"model.converters: {name!r} needs the package torchao: {problem}. Install it (pip install torchao), or "
            "remove the converter."
        )
    emulated = name == "quantize.linear.float8" and config.quantize.linear.float8.emulate and not is_model_compiled(config)
    if is_cpu_only() and not emulated:
        yield (
            f"model.converters: {name!r} needs a GPU, and there is none. Remove it; 'quantize.linear.float8' can be emulated "
            "with --quantize.linear.float8.emulate and without compile."
        )


def _get_compile_faults(config: JobConfig, world_size: int, train_spec: TrainSpec | None) -> Iterator[str]:
    if not config.compile.enable:
        return
    components = config.compile.components
    if not components or set(components) - set(_COMPONENTS):
        unknown = next((name for name in components if name not in _COMPONENTS), "")
        suggestion = get_suggestion(find_close(unknown, _COMPONENTS), "'{}'")
        yield f"compile.components={components} must be of {list_choices(_COMPONENTS)}, at least one{suggestion}."
    backend = config.compile.backend
    known = torch.compiler.list_backends(exclude_tags=None)
    if backend not in known and not config.experimental.custom_import:
        suggestion = get_suggestion(find_close(backend, known), "'{}'")
        shown = list_choices(torch.compiler.list_backends())  # without those for debugging
        yield f"compile.backend={backend!r} is unknown to torch {torch.__version__}{suggestion}. Known: {shown}, 'aot_eager'."


PACKAGE_RULES = (
    Rule(("experimental.custom_import",), _get_custom_import_faults),
    Rule(("model.converters", "experimental.custom_import", "quantize", "compile"), _get_converter_faults),
    Rule(("compile", "experimental.custom_import"), _get_compile_faults),
)
