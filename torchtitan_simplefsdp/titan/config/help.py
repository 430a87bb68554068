"""The --help pages: a short overview, one section, or everything.

`--help` alone lists the sections, because all flags together are 25 screens. The flags and their
docs are printed by tyro from the dataclasses, so they cannot go out of date.

Not here: the docs of the keys, which stand below the fields in the dataclasses.
"""

import contextlib
import dataclasses

import tyro

from torchtitan_simplefsdp.launch_args import ENVIRONMENT
from torchtitan_simplefsdp.titan.config import job_config
from torchtitan_simplefsdp.titan.config.fault import ConfigError, count_noun, find_close, get_suggestion
from torchtitan_simplefsdp.titan.config.flags import build_registry
from torchtitan_simplefsdp.titan.config.schema import Schema

_PROGRAM = "./run_train.sh"
_OVERVIEW = """\
SimpleFSDP for torchtitan. Flags win over the TOML file, the file over defaults.
  NGPU=4 ./run_train.sh --config run.toml --training.steps 20
--config FILE is short for --job.config_file FILE.
--help SECTION shows the keys of one section, --help all those of every section.
"""
_SECTIONS = {
    "job": "config file, output folder, description",
    "profiling": "profiler traces and memory snapshots",
    "metrics": "log frequency, TensorBoard, Weights & Biases",
    "model": "which model and flavor, tokenizer folder",
    "optimizer": "optimizer and its hyperparameters",
    "lr_scheduler": "warmup and decay of the learning rate",
    "training": "dataset, batch size, seq_len, steps, dtypes",
    "parallelism": "degrees and options of DP, TP, CP, PP",
    "checkpoint": "saving, loading and seed checkpoints",
    "activation_checkpoint": "recomputation of activations",
    "compile": "torch.compile; graph_passes (see above)",
    "quantize": "float8 and MX training",
    "comm": "timeouts, flight recorder, dry runs",
    "memory_estimation": "torchtitan's memory estimation script",
    "fault_tolerance": "torchft",
    "experimental": "custom_import: a module that registers models",
    "validation": "validation dataset, frequency, steps",
    "debug": "seed and determinism",
    "simple_fsdp": "mode, reduction, buckets (see above)",
}


def find_help_topic(argv: list[str]) -> str | None:
    """Return what --help is asked about: a section, 'all', '' for the overview, None when not asked."""
    for i, token in enumerate(argv):
        if token in ("-h", "--help"):
            following = argv[i + 1] if i + 1 < len(argv) else ""
            return "" if following.startswith("-") else following.replace("-", "_")
        if token.startswith("--help="):
            return token.partition("=")[2].replace("-", "_")
    return None


def print_help(topic: str, schema: Schema) -> None:
    """Print a help page.

    Args:
        topic: a section's name, 'all' for every section, '' for the overview.
        schema: what exists.

    Raises:
        ConfigError: no such section.
    """
    sections = [name for name in schema.sections if "." not in name]
    if topic == "":
        print(_OVERVIEW)
        _print_flags(job_config.JobConfig)
        print(_get_tables(schema, sections))
    elif topic == "all" or topic in sections:
        shown = sections if topic == "all" else [topic]
        classes = {name: _get_documented(name, schema) for name in shown}
        fields = [(name, cls, dataclasses.field(default_factory=cls)) for name, cls in classes.items()]
        _print_flags(dataclasses.make_dataclass("Flags", fields))
    else:
        suggestion = get_suggestion(find_close(topic, sections))
        raise ConfigError([f"--help {topic}: unknown section{suggestion}. Sections: {', '.join(sections)}, all."])


def _get_tables(schema: Schema, sections: list[str]) -> str:
    width = max(map(len, sections))
    lines = ["sections:"]
    for section in sections:
        count = sum(key.startswith(f"{section}.") for key in schema.keys)
        text = _SECTIONS.get(section, "from job.custom_config_module")
        lines.append(f"  {section:<{width}}  {count_noun(count, 'key'):>7}  {text}")
    lines.append("environment variables of run_train.sh:")
    lines += [f"  {name:<{width}}  {text}" for name, text in ENVIRONMENT.items()]
    return "\n".join(lines)


def _print_flags(cls: type) -> None:
    with contextlib.suppress(SystemExit):  # how tyro ends after its help
        tyro.cli(
            cls,
            prog=_PROGRAM,
            args=["--help"],
            registry=build_registry(),
            use_underscores=True,  # as in TOML, so that a name can be copied either way
        )


def _get_documented(section: str, schema: Schema) -> type:
    """Return a section with the extensions that were merged in among its bases.

    The merge keeps their fields but not their classes, and tyro reads docs from a class's source.
    """
    cls = schema.sections[section]
    fields = [field for extension in schema.extensions for field in dataclasses.fields(extension)]
    bases = [field.type for field in fields if field.name == section and not issubclass(cls, field.type)]
    return dataclasses.make_dataclass(cls.__name__, [], bases=(cls, *bases)) if bases else cls
