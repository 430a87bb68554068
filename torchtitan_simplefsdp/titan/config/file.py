"""The TOML config file: read it, and keep only what the schema knows.

Faults are collected with their source (the file's path as the user gave it); what is faulty is
left out, so that the checks after this one still run on the rest.

Not here: what the values mean together (rules.py).
"""

import dataclasses
from typing import Any

from torchtitan_simplefsdp.launch_args import read_toml, TOMLDecodeError
from torchtitan_simplefsdp.titan.config.fault import (
    Checked,
    count_noun,
    describe_error,
    find_close,
    get_suggestion,
    shorten,
)
from torchtitan_simplefsdp.titan.config.schema import describe_type, get_choices, is_value_of, Schema


def read_config_file(path: str) -> tuple[dict[str, Any], list[str]]:
    """Return the file's values and no fault, or no values and one fault."""
    try:
        return read_toml(path), []
    except FileNotFoundError:
        fault = "not found. Set --config (or CONFIG_FILE) to an existing TOML file"
    except IsADirectoryError:
        fault = "is a directory. Set --config (or CONFIG_FILE) to a TOML file in it"
    except (TOMLDecodeError, UnicodeDecodeError) as error:
        fault = f"not valid TOML: {describe_error(error)}"
    except OSError as error:
        fault = f"cannot be read: {describe_error(error)}"
    return {}, [f"job.config_file={path!r}: {fault}."]


def check_file_values(values: dict[str, Any], schema: Schema, path: str) -> Checked:
    """Sort a TOML file's values into those the schema knows and faults.

    Args:
        values: as read from the file; not changed.
        schema: what exists.
        path: the file's name, for the messages.
    """
    checked = Checked({}, [], set())
    unknown: list[str] = []
    checked.values.update(_keep_valid(values, schema.config_cls, "", schema, checked, unknown))
    if unknown:
        keys = count_noun(len(unknown), "unknown key")
        checked.faults.insert(0, f"{keys}: {', '.join(unknown)}.")
    faults = [f"{path}: {fault}" for fault in checked.faults]
    return checked._replace(faults=faults)


def _keep_valid(
    table: dict[str, Any], section: type, prefix: str, schema: Schema, checked: Checked, unknown: list[str]
) -> dict[str, Any]:
    """Return `table` without its faulty entries; append these to `checked` and `unknown`."""
    fields = {field.name: field for field in dataclasses.fields(section)}
    kept = {}
    for name, value in table.items():
        dotted = prefix + name
        if name not in fields:
            form, known = ("[{}]", schema.sections) if isinstance(value, dict) else ("{}", schema.keys)
            close = find_close(dotted, known)
            unknown.append(form.format(dotted) + get_suggestion(close, form))
            checked.suspects.update([close] if close else [])
        elif dotted in schema.sections and isinstance(value, dict):
            kept[name] = _keep_valid(value, fields[name].type, f"{dotted}.", schema, checked, unknown)
        elif dotted in schema.sections:
            checked.faults.append(
                f"{dotted}={shorten(value)} must be a section: write [{dotted}] and its keys below it."
            )
            checked.suspects.add(dotted)
        elif not is_value_of(fields[name].type, value):
            checked.faults.append(describe_wrong_value(dotted, fields[name].type, value))
            checked.suspects.add(dotted)
        else:
            kept[name] = value
    return kept


def describe_wrong_value(name: str, annotation: Any, value: Any) -> str:
    """Return the fault of a value that does not have its key's type."""
    choices = get_choices(annotation)
    close = find_close(value, choices) if isinstance(value, str) else None
    suggestion = get_suggestion(close, "'{}'")
    return f"{name}={shorten(value)} must be {describe_type(annotation)}{suggestion}."
