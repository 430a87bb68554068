"""The gradient norm on one process: exact to fp32, and the same bits however rows are grouped. Oracle: math.fsum."""

import math

import pytest
import torch

from torchtitan_simplefsdp.core import grad_norm
from torchtitan_simplefsdp.core.grad_norm import _split_and_sum, get_total_norm


def draw(*shape, dtype=torch.float32):
    """Return values of magnitudes from 1e-9 to 1e9, so that sums in another order have other bits."""
    generator = torch.Generator().manual_seed(0)
    exponents = torch.randint(-30, 30, shape, generator=generator)
    return (torch.randn(shape, generator=generator) * 2.0**exponents).to(dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("shape", [(64, 33), (7,), (), (3, 5, 2), (1, 1000), (1000, 1)], ids=str)
def test_the_norm_is_the_exact_one(shape, dtype):
    gradient = draw(*shape, dtype=dtype)
    before = gradient.clone()
    exact = math.sqrt(math.fsum(value * value for value in gradient.double().flatten().tolist()))
    assert get_total_norm([gradient]).item() == pytest.approx(exact, rel=1e-12)
    assert torch.equal(gradient, before)


@pytest.mark.parametrize("spread", [1, 3, 30], ids=lambda spread: f"2^{spread}")
def test_sums_of_rows_have_one_total_whatever_their_order_and_grouping(spread):
    generator = torch.Generator().manual_seed(0)
    sums = torch.rand(5000, generator=generator, dtype=torch.float64) * 2.0 ** torch.randint(
        -spread, spread, (5000,), generator=generator
    )
    largest = sums.max()
    expected = _split_and_sum(sums, largest)
    plain = {sums.sum().item()}
    for groups in (2, 3, 8, 700):
        shuffled = sums[torch.randperm(5000, generator=generator)]
        parts = [_split_and_sum(group, largest) for group in shuffled.chunk(groups)]
        assert torch.equal(sum(parts), expected)
        plain.add(sum(group.sum().item() for group in shuffled.chunk(groups)))
    assert len(plain) > 1  # fp64 alone does depend on the order
    assert expected.flip(0).sum().item() == pytest.approx(math.fsum(sums.tolist()), rel=1e-15)


@pytest.mark.parametrize("values, expected", [([], 0.0), ([0.0, 0.0], 0.0), ([3.0, 4.0], 5.0), ([1e-44], 1e-44), ([3e38], 3e38)])
def test_the_extremes(values, expected):
    norm = get_total_norm([torch.tensor(values)])
    assert norm.item() == pytest.approx(torch.tensor(expected).item(), rel=1e-7)
    assert get_total_norm([]).item() == 0.0


@pytest.mark.parametrize("value", [float("inf"), float("nan"), float("-inf")], ids=str)
def test_inf_and_nan_come_out(value):
    norm = get_total_norm([torch.tensor([1.0, value, 2.0]), torch.ones(3, 3)]).item()
    assert math.isnan(norm) if math.isnan(value) else norm == math.inf


def test_blocks_of_rows_change_nothing(monkeypatch):
    gradient = draw(50, 37)
    whole = get_total_norm([gradient])
    monkeypatch.setattr(grad_norm, "_BLOCK_ELEMENTS", 100)
    assert torch.equal(get_total_norm([gradient]), whole)
