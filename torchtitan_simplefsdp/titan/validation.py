"""A validator that evaluates the same batches every time; torchtitan's goes on where it stopped.

torchtitan 0.2.2 leaves the validation dataset where the previous validation ended, unless data
loader workers hold a copy of it. With a map-style dataset (`pydoc`, `text`, `c4_test`) the losses of
two validations are then those of different batches, and with `validation.steps = -1` the second
validation finds no batch and crashes. Every validation here starts at the first document.

Not here: validation under pipeline or context parallelism, which config/rules_features.py refuses.
"""

import copy
from typing import Any

import torch.nn as nn
from torchtitan.components import validate


class Validator(validate.Validator):
    """torchtitan's validator, rewound before each use; the class is a `build_validator_fn`."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        # A copy, here and below: the dataset appends to the list of tokens in its state.
        self._start = copy.deepcopy(self.validation_dataloader.dataset.state_dict())

    def validate(self, model_parts: list[nn.Module], step: int) -> None:
        self.validation_dataloader.dataset.load_state_dict(copy.deepcopy(self._start))
        super().validate(model_parts, step)
