"""The validator evaluates the same batches each time. Oracle: the first validation's batches."""

from itertools import islice
from pathlib import Path

import pytest
import torch
from torchtitan.components import validate
from torchtitan.components.tokenizer import HuggingFaceTokenizer
from torchtitan.config import JobConfig

import torchtitan_simplefsdp
from torchtitan_simplefsdp.titan.datasets import register_datasets
from torchtitan_simplefsdp.titan.validation import Validator

register_datasets()
TOKENIZER = HuggingFaceTokenizer(str(Path(torchtitan_simplefsdp.__file__).parent / "assets/tokenizer"))


def record_batches(kind, path, steps, num_workers, monkeypatch):
    """Return the batches of two validations; the model's part of torchtitan's loop is left out."""
    validations = []

    def validate_without_model(self, model_parts, step):
        batches = iter(self.validation_dataloader)
        validations.append([inputs["input"] for inputs, _ in (batches if steps == -1 else islice(batches, steps))])

    monkeypatch.setattr(validate.Validator, "validate", validate_without_model)
    config = JobConfig()
    config.validation.dataset, config.validation.dataset_path = "text", path
    config.validation.seq_len, config.validation.local_batch_size = 64, 2
    config.validation.steps = steps
    config.validation.dataloader.num_workers = num_workers
    unused = dict.fromkeys(("parallel_dims", "loss_fn", "validation_context", "maybe_enable_amp", "metrics_processor"))
    validator = kind(job_config=config, dp_world_size=1, dp_rank=0, tokenizer=TOKENIZER, **unused)
    for step in (1, 10):
        validator.validate([], step)
    return validations


@pytest.fixture
def path(tmp_path):
    (tmp_path / "a.txt").write_text("".join(f"line {i} of a text\n" for i in range(300)))
    return str(tmp_path / "a.txt")


@pytest.mark.parametrize("num_workers", [0, 1])
@pytest.mark.parametrize("steps", [3, -1])
def test_each_validation_evaluates_the_same_batches(steps, num_workers, path, monkeypatch):
    first, second = record_batches(Validator, path, steps, num_workers, monkeypatch)
    assert len(first) == len(second) > 2
    assert all(torch.equal(a, b) for a, b in zip(first, second))


def test_torchtitans_own_validator_still_needs_the_rewinding(path, monkeypatch):
    first, second = record_batches(validate.Validator, path, -1, 0, monkeypatch)
    assert len(first) > 2 and second == []
