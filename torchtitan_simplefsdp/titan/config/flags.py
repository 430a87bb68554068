"""The command line: split it by flag, and keep only what the schema knows.

tyro does the parsing, with torchtitan's own rules, one key at a time: on a whole command line it
stops at the first fault and prints a box instead of raising. Both spellings work as in torchtitan
(`--training.seq_len`, `--training.seq-len`, with a space or `=`), and so do `--compile.enable` and
`--compile.no-enable`. Of a repeated flag the last one counts.

Not here: what the values mean together (rules.py), the launcher's own options (launch_args.py).
"""

import contextlib
import dataclasses
import io
from typing import Annotated, Any, NamedTuple

import tyro
from torchtitan.config import ConfigManager

from torchtitan_simplefsdp.titan.config.fault import Checked, count_noun, find_close, get_suggestion
from torchtitan_simplefsdp.titan.config.file import describe_wrong_value
from torchtitan_simplefsdp.titan.config.schema import describe_type, is_value_of, Key, Schema


class Flag(NamedTuple):
    """One `--flag` and what follows it up to the next one."""

    name: str  # dotted, with underscores, without dashes: 'training.seq_len'; '' before the first flag
    tokens: list[str]  # as typed, the flag itself first

    def get_value(self) -> str | None:
        """Return the value as typed; None when there is none."""
        if "=" in self.tokens[0]:
            return self.tokens[0].partition("=")[2]
        return self.tokens[1] if len(self.tokens) > 1 else None


def split_flags(argv: list[str]) -> list[Flag]:
    """Split a command line into flags. A value never starts with two dashes, tyro has that rule too."""
    flags: list[Flag] = []
    for token in argv:
        if token.startswith("--") and len(token) > 2:
            name = token[2:].partition("=")[0].replace("-", "_")
            flags.append(Flag(name, [token]))
        else:
            if not flags:
                flags.append(Flag("", [""]))
            flags[-1].tokens.append(token)
    return flags


def get_flag_value(flags: list[Flag], name: str) -> str | None:
    """Return the last value given to a flag, None when it is not given or has no value."""
    values = [flag.get_value() for flag in flags if flag.name == name]
    return values[-1] if values else None


def build_registry() -> tyro.constructors.ConstructorRegistry:
    """Return tyro's rules with torchtitan's on top ('A,B,C' is a list of strings)."""
    registry = tyro.constructors.ConstructorRegistry()
    ConfigManager.register_tyro_rules(registry)
    return registry


def check_flags(flags: list[Flag], schema: Schema) -> Checked:
    """Sort a command line into values, nested as in TOML, and faults."""
    checked = Checked({}, [], set())
    unknown: list[str] = []
    flags_by_key: dict[str, list[Flag]] = {}
    for flag in flags:
        name = _find_key(flag.name, schema)
        if name:
            flags_by_key.setdefault(name, []).append(flag)
        elif flag.name:
            close = find_close(flag.name, schema.keys)
            unknown.append(flag.tokens[0].partition("=")[0] + get_suggestion(close, "--{}"))
            checked.suspects.update([close] if close else [])
        else:
            checked.faults.extend(_describe_junk(token) for token in flag.tokens[1:])
    if unknown:
        checked.faults.insert(0, f"{count_noun(len(unknown), 'unknown flag')}: {', '.join(unknown)}.")

    registry = build_registry()
    for name, key_flags in flags_by_key.items():
        value, junk, fault = _parse_key(name, schema.keys[name], key_flags, registry)
        checked.faults.extend(_describe_junk(token, name, schema.keys[name]) for token in junk)
        if fault:
            checked.faults.append(fault)
            checked.suspects.add(name)
        else:
            set_value(checked.values, name, value)
    return checked._replace(faults=[f"command line: {fault}" for fault in checked.faults])


def set_value(values: dict[str, Any], name: str, value: Any) -> None:
    """Set a dotted name in a nested dict, in place."""
    *sections, leaf = name.split(".")
    for section in sections:
        values = values.setdefault(section, {})
    values[leaf] = value


def _find_key(name: str, schema: Schema) -> str | None:
    """Return the key a flag sets; a switch has a second flag with `no_` before its last part."""
    if name in schema.keys:
        return name
    section, _, leaf = name.rpartition(".")
    switch = f"{section}.{leaf.removeprefix('no_')}"
    return switch if switch in schema.keys and schema.keys[switch].field.type is bool else None


def _parse_key(
    name: str, key: Key, flags: list[Flag], registry: tyro.constructors.ConstructorRegistry
) -> tuple[Any, list[str], str | None]:
    """Let tyro parse the flags of one key: value, tokens it had no use for, fault."""
    field = key.field
    tokens = [token for flag in flags for token in flag.tokens]
    # A dataclass of this key alone, without its section's __post_init__: that one judges the final
    # values, when file and command line are put together. Given a help text, tyro does not search
    # the source for one, which would be most of the time.
    annotation = Annotated[field.type, tyro.conf.arg(name=name, help="")]
    default = dataclasses.field(default=field.default, default_factory=field.default_factory)
    cls = dataclasses.make_dataclass("Flag", [("value", annotation, default)])
    try:
        with contextlib.redirect_stderr(io.StringIO()):  # the box; console_outputs leaves one kind of it
            parsed, junk = tyro.cli(
                cls, args=tokens, registry=registry, return_unknown_args=True, console_outputs=False
            )
    except SystemExit:
        typed = [flag.get_value() for flag in flags]
        # Text that would do but was refused starts with a dash: tyro took it for a flag.
        if None in typed or is_value_of(field.type, typed[-1]):
            return None, [], f"--{name} needs a value: {describe_type(field.type)}."
        return None, [], f"--{describe_wrong_value(name, field.type, typed[-1])}"
    return parsed.value, junk, None


def _describe_junk(token: str, name: str | None = None, key: Key | None = None) -> str:
    after = f" after --{name}" if name else ""
    hint = "Flags read --section.key value"
    if key and key.field.type is bool:
        section, _, leaf = name.rpartition(".")
        hint = f"A switch takes no value: --{name} turns it on, --{section}.no_{leaf} off"
    elif key and key.field.type == list[str]:
        hint = f"Separate list items by commas: --{name} a,b"
    return f"unexpected argument {token!r}{after}. {hint}."
