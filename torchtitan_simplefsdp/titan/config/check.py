"""From the command line and the TOML file to a checked JobConfig, or to all faults at once.

Why it exists: torchtitan's ConfigManager stops at the first fault, with a traceback or a tyro box,
and leaves most faults to the trainer, where a process group already exists. Precedence is the
same: flag, then file, then default. Nothing here prints (except --help), touches a device or
communicates, so every rank reaches the same result.

Not here: the single checks; they are in the modules that this one calls in order.
"""

import dataclasses
from typing import Any

from torchtitan.config import JobConfig

from torchtitan_simplefsdp.titan.config.rules import get_config_faults
from torchtitan_simplefsdp.titan.config.rules_checkpoint import settle_seed_checkpoint
from torchtitan_simplefsdp.titan.config.rules_model import resolve_hf_assets_path
from torchtitan_simplefsdp.titan.config.fault import ConfigError, describe_error, shorten
from torchtitan_simplefsdp.titan.config.file import check_file_values, read_config_file
from torchtitan_simplefsdp.titan.config.flags import check_flags, Flag, get_flag_value, split_flags
from torchtitan_simplefsdp.titan.config.help import find_help_topic, print_help
from torchtitan_simplefsdp.titan.config.schema import build_schema


def parse_job_config(argv: list[str], world_size: int, *, model_only: bool = False) -> JobConfig:
    """Parse and check a run's configuration.

    The caller has registered our models and datasets with torchtitan before.

    Args:
        argv: the command line without the program, in torchtitan's flags.
        world_size: ranks over all nodes.
        model_only: check only what a command reads that uses the model and trains nothing.

    Returns:
        torchtitan's JobConfig with the sections of `job_config` and of `job.custom_config_module`.

    Raises:
        ConfigError: with every fault found.
        SystemExit: code 0, after --help has printed.
    """
    flags = split_flags(argv)
    path = get_flag_value(flags, "job.config_file")
    file_values, read_faults = read_config_file(path) if path is not None else ({}, [])
    schema, module_faults = build_schema(_find_custom_module(flags, file_values))

    topic = find_help_topic(argv)
    if topic is not None:
        print_help(topic, schema)
        raise SystemExit(0)
    if module_faults:  # without the module nobody knows which keys exist
        raise ConfigError([*read_faults, *module_faults])

    in_file = check_file_values(file_values, schema, path or "")
    in_flags = check_flags(flags, schema)
    values = _overlay(in_file.values, in_flags.values)
    build_faults: list[str] = []
    config = _build(schema.config_cls, values, "", build_faults)
    faults = [*read_faults, *in_file.faults, *in_flags.faults, *build_faults]

    suspects = in_file.suspects | in_flags.suspects
    # A file that was asked for and is not there would be judged as if all defaults were meant.
    if not read_faults and "job.config_file" not in suspects:
        resolve_hf_assets_path(config)
        if config.checkpoint.create_seed_checkpoint and world_size == 1:
            settle_seed_checkpoint(config)
        faults += get_config_faults(config, world_size, suspects, model_only=model_only)
    if faults:
        raise ConfigError(faults)
    return config


def _find_custom_module(flags: list[Flag], file_values: dict[str, Any]) -> str | None:
    for section, name in (("job", "custom_config_module"), ("experimental", "custom_args_module")):
        in_file = file_values.get(section)
        value = in_file.get(name) if isinstance(in_file, dict) else None
        module = get_flag_value(flags, f"{section}.{name}") or value
        if module and isinstance(module, str):
            return module
    return None


def _overlay(below: dict[str, Any], above: dict[str, Any]) -> dict[str, Any]:
    """Return `below` with the entries of `above` put over it, section by section."""
    merged = dict(below)
    for name, value in above.items():
        both = isinstance(value, dict) and isinstance(below.get(name), dict)
        merged[name] = _overlay(below[name], value) if both else value
    return merged


def _build(section: type, values: dict[str, Any], prefix: str, faults: list[str]) -> Any:
    """Construct a section and those below it; what its `__post_init__` refuses is a fault and left out."""
    types = {field.name: field.type for field in dataclasses.fields(section)}
    values = {
        name: _build(types[name], value, f"{prefix}{name}.", faults) if dataclasses.is_dataclass(types[name]) else value
        for name, value in values.items()
    }
    error = _get_refusal(section, values)
    if error is None:
        return section(**values)
    # Name the keys that are refused on their own; without one, it is the combination of all.
    culprits = [name for name, value in values.items() if _get_refusal(section, {name: value})] or values
    keys = ", ".join(f"{prefix}{name}={shorten(values[name])}" for name in culprits)
    faults.append(f"{keys} is refused: {describe_error(error)}.")
    return section()


def _get_refusal(section: type, values: dict[str, Any]) -> Exception | None:
    try:
        section(**values)
    except Exception as error:  # a custom module's __post_init__ may raise anything
        return error
    return None
