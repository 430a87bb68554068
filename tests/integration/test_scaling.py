"""docs/scaling.md holds the figures of scripts/predict.py as they are today."""

from __future__ import annotations

import importlib.util
import os
from pathlib import Path
from unittest import mock

import pytest

from torchtitan_simplefsdp.graph.machines import H100
from torchtitan_simplefsdp.titan import traced_llama

REPOSITORY = Path(__file__).parents[2]
spec = importlib.util.spec_from_file_location("predict", REPOSITORY / "scripts" / "predict.py")
predict = importlib.util.module_from_spec(spec)
with mock.patch.dict(os.environ):  # the script hides GPUs from its own process
    spec.loader.exec_module(predict)


def get_rows(start: str, end: str) -> list[str]:
    section = predict.DOCUMENT.read_text().partition(start)[2].partition(end)[0]
    return [line for line in section.splitlines() if line.startswith("|")]


@pytest.fixture
def cpu(monkeypatch):
    monkeypatch.setattr(traced_llama, "apply_rebinds", lambda config: None)  # globals stay as other tests want them
    monkeypatch.setattr("torchtitan.distributed.parallel_dims.device_type", "cpu")


def test_published_figures_are_compared_with_todays_predictions(cpu):
    traces = {layout: traced_llama.trace_llama(layout) for layout, *_ in predict.PUBLISHED}
    assert set(predict.build_published(H100, traces)) <= set(get_rows(predict.START, predict.END))


def test_a_row_of_each_model_is_todays_prediction(cpu):
    cases = list({case.layout.flavor: case for case in predict.build_cases()}.values())
    traces = {case.layout: traced_llama.trace_llama(case.layout) for case in cases}
    table, _ = predict.build_table(H100, cases, traces)
    assert len(cases) == 3 and set(table) <= set(get_rows(predict.START, predict.END))


def test_the_document_has_all_cases_and_the_picture():
    rows = get_rows(predict.START, predict.END)
    assert len(rows) == 2 + len(predict.build_cases()) + 2 + len(predict.PUBLISHED)
    assert predict.PICTURE.read_bytes().startswith(b"\x89PNG")
