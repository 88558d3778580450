"""The initial sigma: the paper's formula, one weight at a time, and what a network tolerates."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from pwfn import WeightError, initial_sigma
from pwfn.bayes.sigma import tolerated_sigma

FLOOR = 2.0**-30
CAP = 0.05


def oracle(weights: list[float]) -> list[float]:
    """METHOD section 2, one weight at a time, in float64 with numpy's quantile."""
    closeness = []
    for weight in weights:
        size = abs(weight)
        if size == 0:
            closeness.append(0.0)
            continue
        low = 2.0 ** (math.frexp(size)[1] - 1)
        high = 2 * low
        assert low <= size < high
        closeness.append((size - low) / low * (high - size) / high)
    quartile = float(np.quantile(closeness, 0.75))
    if quartile == 0:  # the ruling for sparse tensors: over what is not at a power of two
        quartile = float(np.quantile([d for d in closeness if d > 0] or [0.0], 0.75))
    if quartile == 0:
        return [FLOOR] * len(weights)
    return [min(max(0.0025 * d / quartile, FLOOR), CAP) for d in closeness]


def assert_is_oracle(weight: Tensor) -> None:
    sigma = initial_sigma(weight)
    assert sigma.shape == weight.shape
    expected = torch.tensor(oracle(weight.flatten().tolist()), dtype=torch.float64).view(weight.shape)
    # The formula has five roundings; the quantile's own are in float64 either way.
    rounding = torch.finfo(sigma.dtype).eps
    torch.testing.assert_close(sigma.double(), expected, rtol=8 * rounding, atol=0)


def test_initial_sigma_by_hand() -> None:
    # d = 0, 1/4 · 3/8, 1/2 · 1/4, 3/4 · 1/8; the third quartile lies a quarter of the way from
    # the third to the fourth: 3/32 + 1/4 · 1/32 = 13/128.
    sigma = initial_sigma(torch.tensor([1.0, -1.25, 1.5, 1.75], dtype=torch.float64))
    expected = [FLOOR, 0.0025 * 12 / 13, 0.0025 * 16 / 13, 0.0025 * 12 / 13]
    assert sigma.tolist() == pytest.approx(expected, rel=1e-15)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("size", [1, 2, 3, 4, 5, 127, 1025])
def test_initial_sigma_is_the_formula(size: int, dtype: torch.dtype) -> None:
    weight = torch.randn(size, dtype=dtype, generator=torch.Generator().manual_seed(size))
    assert_is_oracle(weight)
    assert_is_oracle(weight * 1e-20)


@settings(deadline=None)
@given(st.lists(st.floats(allow_nan=False, allow_infinity=False, width=32), min_size=1, max_size=40))
def test_initial_sigma_is_the_formula_for_any_numbers(numbers: list[float]) -> None:
    assert_is_oracle(torch.tensor(numbers, dtype=torch.float64))
    assert_is_oracle(torch.tensor(numbers, dtype=torch.float32))


@settings(deadline=None)
@given(
    st.lists(st.just(0.0) | st.floats(1e-100, 1e100) | st.floats(-1e100, -1e-100), min_size=1, max_size=30),
    st.integers(-500, 500),
)
def test_initial_sigma_does_not_change_with_a_power_of_two_or_the_sign(
    numbers: list[float], power: int
) -> None:
    weight = torch.tensor(numbers, dtype=torch.float64)
    sigma = initial_sigma(weight)
    assert torch.equal(initial_sigma(weight * 2.0**power), sigma)
    assert torch.equal(initial_sigma(-weight), sigma)
    assert torch.equal(initial_sigma(weight.flip(0)), sigma.flip(0))
    assert bool((sigma >= FLOOR).all())
    assert bool((sigma <= CAP).all())


@pytest.mark.parametrize(
    ("weight", "expected"),
    [
        (torch.zeros(7), [FLOOR] * 7),
        (torch.tensor([0.3]), [0.0025]),  # one element is its own quartile
        (torch.tensor(0.3), 0.0025),
        (torch.tensor([0.25]), [FLOOR]),
        (torch.full((5,), -0.7), [0.0025] * 5),
        (torch.full((5,), 0.5), [FLOOR] * 5),
        (torch.tensor([1.0, -2.0, 0.5, 2.0**-126, 2.0**127]), [FLOOR] * 5),
        (torch.empty(0), []),
        # Sparse: the quartile over all would be zero, over the rest it is that of 0.75 and 0.75.
        (torch.tensor([0.0] * 9 + [0.75, -0.75]), [FLOOR] * 9 + [0.0025] * 2),
        # Denormals: 3 · 2^-149 lies midway between two powers of two as 0.75 does.
        (torch.tensor([3 * 2.0**-149, 0.75, 2.0**-149]), [0.0025, 0.0025, FLOOR]),
        # Nearly all next to a power of two: the one that is not meets the upper clamp.
        (torch.tensor([1 + 2.0**-20] * 9 + [1.5]), [0.0025] * 9 + [CAP]),
    ],
    ids=lambda value: "",
)
def test_initial_sigma_where_it_could_divide_by_zero(weight: Tensor, expected: Any) -> None:
    assert torch.equal(initial_sigma(weight), torch.tensor(expected))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_initial_sigma_of_narrow_weights_is_float32(dtype: torch.dtype) -> None:
    """float16 has no 2^-30, bfloat16 no 0.05: in their own type sigma would leave its bounds."""
    weight = torch.randn(1000, generator=torch.Generator().manual_seed(0)).to(dtype)
    weight[:3] = torch.tensor([0.5, 0.0, 1.5])
    sigma = initial_sigma(weight)
    assert sigma.dtype == torch.float32
    assert torch.equal(sigma, initial_sigma(weight.float()))
    assert sigma.min() == FLOOR


def test_initial_sigma_of_a_parameter_has_its_shape_and_no_graph() -> None:
    weight = nn.Parameter(torch.randn(6, 4)).t()
    sigma = initial_sigma(weight)
    assert sigma.shape == (4, 6)
    assert not sigma.requires_grad
    assert torch.equal(sigma, initial_sigma(weight.detach().clone()))
    assert not initial_sigma(nn.Parameter(torch.zeros(2))).requires_grad


@pytest.mark.parametrize("weight", [torch.tensor([1.0, math.nan]), torch.tensor([math.inf]), torch.arange(3)])
def test_initial_sigma_of_what_is_no_weight(weight: Tensor) -> None:
    with pytest.raises(WeightError, match="finite floating-point"):
        initial_sigma(weight)


@pytest.mark.parametrize("scale", [1e-3, 1.0, 50.0])
@pytest.mark.parametrize("share", [0.004, 0.1, 0.5, 7.9])
def test_the_tolerated_sigma_is_where_the_loss_has_risen_by_the_tolerance(scale: float, share: float) -> None:
    wanted = scale * share
    found = tolerated_sigma(scale, wanted**2, lambda sigma: 3.0 + sigma**2)
    assert found == pytest.approx(wanted, rel=0.01)
    assert 3.0 + found**2 <= 3.0 + wanted**2


def test_a_loss_that_is_not_a_number_under_noise_is_not_tolerated() -> None:
    found = tolerated_sigma(1.0, 10.0, lambda sigma: math.nan if sigma > 0.25 else sigma)
    assert found == pytest.approx(0.25, rel=0.01)


@pytest.mark.parametrize(
    ("rms", "loss", "words"),
    [
        (0.0, lambda sigma: sigma, "every weight is zero"),
        (1.0, lambda sigma: math.nan, "nan without any noise"),
        (1.0, lambda sigma: 1e9 * sigma, "even noise of 1/256"),
        (1.0, lambda sigma: 0.0, "not even noise of eight times"),
    ],
)
def test_where_no_sigma_is_tolerated(rms: float, loss: Any, words: str) -> None:
    with pytest.raises(WeightError, match=words):
        tolerated_sigma(rms, 0.1, loss)
