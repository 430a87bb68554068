"""Rules about what a run reads: model, flavor, tokenizer, datasets.

A custom model without a tokenizer reads no text, so its tokenizer and dataset are not looked at.

Not here: reading a tokenizer or more of a dataset than its documents' places.
"""

import os
from collections.abc import Iterator
from pathlib import Path

import torchtitan_simplefsdp
from torchtitan.config import JobConfig
from torchtitan.hf_datasets.text_datasets import DATASETS
from torchtitan.models import _supported_models
from torchtitan.protocols.train_spec import get_train_spec, TrainSpec

from torchtitan_simplefsdp.titan.config.fault import describe_error, find_close, get_suggestion, list_choices, Rule
from torchtitan_simplefsdp.titan.config.rules_degrees import get_degrees
from torchtitan_simplefsdp.titan.dataloader import get_global_batch_size
from torchtitan_simplefsdp.titan.datasets import validate_dataset
from torchtitan_simplefsdp.titan.config.job_config import SERVED_MODELS

# First parts of the names in torchtitan.experiments._supported_experiments. Copied, because
# looking a name up in torchtitan imports the experiment, which this package never does.
EXPERIMENTS = ("autoparallel", "compiler_toolkit", "transformers_modeling_backend", "vlm")

_PACKAGE_FOLDER = Path(torchtitan_simplefsdp.__file__).parent
_TOKENIZER_FILES = ("tokenizer.json", "vocab.json", "vocab.txt")


def find_train_spec(config: JobConfig) -> tuple[TrainSpec | None, list[str]]:
    """Look up the configured model.

    The caller has registered our models before: torchtitan would take a name in SERVED_MODELS
    that is not registered for its own experiment's, and import that.

    Returns:
        The TrainSpec and no fault; None and the reason as a fault; or None and no fault when
        `experimental.custom_import` may register the name later.
    """
    name = config.model.name
    family = name.partition(".")[0]
    known = [*SERVED_MODELS, *sorted(_supported_models - {"flux"})]
    if family in EXPERIMENTS:
        return None, [
            f"model.name={name!r} is a model of torchtitan.experiments, which torchtitan_simplefsdp does not run. Use "
            "torchtitan's own trainer."
        ]
    if family == "simple_fsdp" and name not in SERVED_MODELS:
        return None, [
            f"model.name={name!r} is not served: torchtitan_simplefsdp covers dense Llama 3 models, no mixture of "
            f"experts. Served: {list_choices(SERVED_MODELS)}."
        ]
    if name == "flux":
        return None, ["model.name='flux' makes images and has a trainer of its own. Use torchtitan's own entry point for it."]
    try:
        return get_train_spec(name), []
    except ValueError:
        if config.experimental.custom_import:
            return None, []
        suggestion = get_suggestion(find_close(name, known), "'{}'")
        return None, [f"model.name={name!r} is unknown{suggestion}. Known: {list_choices(known)}."]
    except ImportError as error:  # torchtitan's models have dependencies of their own
        return None, [f"model.name={name!r} cannot be loaded: {describe_error(error)}."]


def resolve_hf_assets_path(config: JobConfig) -> None:
    """Settle `model.hf_assets_path` in place: the tokenizer shipped in this package is found from any folder.

    A path below `torchtitan_simplefsdp/` that does not exist here but does in the installed package
    becomes the absolute path there. `model.tokenizer_path`, torchtitan's deprecated name of the
    same key, wins over it as in torchtitan.
    """
    model = config.model
    model.hf_assets_path = model.tokenizer_path or model.hf_assets_path
    path = Path(model.hf_assets_path)
    if path.parts[:1] == (_PACKAGE_FOLDER.name,) and not path.exists():
        installed = _PACKAGE_FOLDER.joinpath(*path.parts[1:])
        if installed.exists():
            model.hf_assets_path = str(installed)


def _get_name_faults(config: JobConfig, world_size: int, train_spec: TrainSpec | None) -> Iterator[str]:
    yield from find_train_spec(config)[1]


def _get_flavor_faults(config: JobConfig, world_size: int, train_spec: TrainSpec | None) -> Iterator[str]:
    flavor = config.model.flavor
    if train_spec is None or flavor in train_spec.model_args or config.experimental.custom_import:
        return
    suggestion = get_suggestion(find_close(flavor, train_spec.model_args), "'{}'")
    yield (
        f"model.flavor={flavor!r} is unknown for model {config.model.name!r}{suggestion}. "
        f"Known: {list_choices(train_spec.model_args)}."
    )


def _reads_text(config: JobConfig, train_spec: TrainSpec | None) -> bool:
    if train_spec is None:
        return not config.experimental.custom_import
    return train_spec.build_tokenizer_fn is not None


def _get_tokenizer_faults(config: JobConfig, world_size: int, train_spec: TrainSpec | None) -> Iterator[str]:
    path = config.model.hf_assets_path
    if not _reads_text(config, train_spec) or any(os.path.isfile(os.path.join(path, f)) for f in _TOKENIZER_FILES):
        return
    key = "model.tokenizer_path" if config.model.tokenizer_path else "model.hf_assets_path"
    problem = "has no tokenizer.json, vocab.json or vocab.txt" if os.path.isdir(path) else "not found"
    yield (
        f"{key}={path!r} {problem} (looked in {os.path.abspath(path)}). Expected a folder with tokenizer.json; "
        "train_configs/llama3_debug.toml shows one that works."
    )


def _get_training_data_faults(config: JobConfig, world_size: int, train_spec: TrainSpec | None) -> Iterator[str]:
    if _reads_text(config, train_spec):
        yield from _get_dataset_faults(config, world_size, "training")


def _get_validation_data_faults(config: JobConfig, world_size: int, train_spec: TrainSpec | None) -> Iterator[str]:
    if _reads_text(config, train_spec) and config.validation.enable:
        yield from _get_dataset_faults(config, world_size, "validation")


def _get_dataset_faults(config: JobConfig, world_size: int, section: str) -> Iterator[str]:
    values = getattr(config, section)
    name = values.dataset.lower()  # torchtitan's own rule
    if name not in DATASETS:
        if not config.experimental.custom_import:
            suggestion = get_suggestion(find_close(name, DATASETS), "'{}'")
            yield f"{section}.dataset={values.dataset!r} is unknown{suggestion}. Known: {list_choices(DATASETS)}."
    elif name == "c4_test":
        path = values.dataset_path or DATASETS[name].path
        if not os.path.exists(path):
            yield (
                f"{section}.dataset={values.dataset!r}: {path!r} not found (looked in {os.path.abspath(path)}). Set "
                f"{section}.dataset_path to torchtitan's tests/assets/c4_test, or take the embedded dataset 'pydoc'."
            )
    else:
        degrees = get_degrees(config, world_size)
        shares = degrees.dp if degrees else 1
        if section == "training" and config.model.name in SERVED_MODELS:
            shares = get_global_batch_size(config, shares)
        try:
            validate_dataset(values.dataset, values.dataset_path, shares, section)
        except (ValueError, OSError) as error:
            # Its messages open with the key, or with "dataset 'name'" for either section's dataset.
            fault = describe_error(error)
            yield f"{fault}." if fault.startswith(f"{section}.") else f"{section}.{fault.replace(' ', '=', 1)}."


MODEL_RULES = (
    Rule(("model.name",), _get_name_faults),
    Rule(("model.name", "model.flavor"), _get_flavor_faults),
    Rule(("model.name", "model.hf_assets_path", "model.tokenizer_path"), _get_tokenizer_faults),
)
DATA_RULES = (
    Rule(("model.name", "training", "parallelism"), _get_training_data_faults),
    Rule(
        ("model.name", "validation.enable", "validation.dataset", "validation.dataset_path", "parallelism"),
        _get_validation_data_faults,
    ),
)
