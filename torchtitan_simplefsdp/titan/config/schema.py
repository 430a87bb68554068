"""The shape of the configuration: which sections and keys exist, and which values they take.

Why it exists: the file check, the flag check and the help page must agree on what a key is, and
all of it follows from one dataclass: torchtitan's JobConfig with ours (and the user's
`job.custom_config_module`) merged in. Only the annotations torchtitan 0.2.2 uses are judged;
any other annotation in a custom module accepts every value.

Not here: reading any value.
"""

import dataclasses
import importlib
import types
from typing import Any, get_args, get_origin, Literal, NamedTuple, Union

from torchtitan.config import ConfigManager, JobConfig

from torchtitan_simplefsdp.titan.config import job_config
from torchtitan_simplefsdp.titan.config.fault import describe_error, list_choices

# Modules whose keys ours contains: naming one is right, importing it is not needed (and
# upstream's lives in torchtitan.experiments, which this package never imports).
_BUILT_IN_MODULES = ("torchtitan.experiments.simple_fsdp.job_config", job_config.__name__)


class Key(NamedTuple):
    """A configuration key: the dataclass that declares it, and its field there."""

    section: type
    field: dataclasses.Field


class Schema(NamedTuple):
    config_cls: type[JobConfig]
    extensions: tuple[type, ...]  # what was merged in; the help page needs their docs
    sections: dict[str, type]  # by dotted name, nested ones too
    keys: dict[str, Key]  # by dotted name


def build_schema(custom_module: str | None) -> tuple[Schema, list[str]]:
    """Merge torchtitan's, our and the user's JobConfig.

    Args:
        custom_module: importable module with a `JobConfig` dataclass, merged in last; None or
            '' for none.

    Returns:
        The schema, and a fault if the module could not be merged (the schema is then without).
    """
    extensions = [job_config.JobConfig]
    config_cls = ConfigManager._merge_configs(JobConfig, job_config.JobConfig)
    faults = []
    if custom_module and custom_module not in _BUILT_IN_MODULES:
        try:
            # Importing a user's module may raise anything.
            extension = importlib.import_module(custom_module).JobConfig
            config_cls = ConfigManager._merge_configs(config_cls, extension)
            extensions.append(extension)
        except Exception as error:
            faults.append(
                f"job.custom_config_module={custom_module!r} cannot be used: {describe_error(error)}. "
                "Expected an importable module with a dataclass named JobConfig."
            )
    sections, keys = {}, {}
    _collect(config_cls, "", sections, keys)
    return Schema(config_cls, tuple(extensions), sections, keys), faults


def _collect(cls: type, prefix: str, sections: dict[str, type], keys: dict[str, Key]) -> None:
    for field in dataclasses.fields(cls):
        name = prefix + field.name
        if dataclasses.is_dataclass(field.type):
            sections[name] = field.type
            _collect(field.type, f"{name}.", sections, keys)
        else:
            keys[name] = Key(cls, field)


def is_value_of(annotation: Any, value: Any) -> bool:
    """Answer whether a TOML value has the type `annotation` (an integer is also a number)."""
    origin = get_origin(annotation)
    if origin is Literal:
        return value in get_args(annotation)
    if origin in (Union, types.UnionType):
        return any(is_value_of(arg, value) for arg in get_args(annotation))
    if origin is list:
        (item,) = get_args(annotation)
        return isinstance(value, list) and all(is_value_of(item, v) for v in value)
    if annotation in (int, float):
        numbers = (int,) if annotation is int else (int, float)
        return isinstance(value, numbers) and not isinstance(value, bool)
    if annotation in (str, bool, types.NoneType):
        return isinstance(value, annotation)
    return True


def describe_type(annotation: Any) -> str:
    """Return what a value of this annotation is, in words: 'an integer', "one of 'a', 'b'"."""
    origin = get_origin(annotation)
    if origin is Literal:
        return f"one of {list_choices(get_args(annotation))}"
    if origin in (Union, types.UnionType):
        return " or ".join(describe_type(arg) for arg in get_args(annotation))
    if origin is list:
        return f"a list, each item {describe_type(get_args(annotation)[0])}"
    words = {
        int: "an integer",
        float: "a number",
        str: "a string",
        bool: "true or false",
        types.NoneType: "None",
    }
    return words.get(annotation, str(annotation))


def get_choices(annotation: Any) -> list[str]:
    """Return the strings a Literal (also inside a union) allows; empty for other types."""
    if get_origin(annotation) is Literal:
        return [choice for choice in get_args(annotation) if isinstance(choice, str)]
    return [choice for arg in get_args(annotation) for choice in get_choices(arg)]
