"""APoT: the levels by hand, the projection, the gradient of alpha, the normalised weights."""

from __future__ import annotations

import pytest
import torch
from test_quantisers import codebook, normal
from torch import Tensor

from pwfn.lab.quantisers.apot import ApotQuantiser, fitted_alpha, levels, nearest, normalised, quantise, terms

ALL_BITS = range(2, 9)
SIGNS = pytest.mark.parametrize("signed", [True, False])

# Two bits: one term from {0, 1/2, 1/4, 1/8}, over 1/2. Three: {0, 8, 4, 1} + {0, 2} in sixteenths, over
# 10. Four: {0, 32, 8, 2} + {0, 16, 4, 1} in sixty-fourths, over 48. A sign takes one bit.
UNSIGNED = {
    2: [0, 1 / 4, 1 / 2, 1],
    3: [0, 0.1, 0.2, 0.3, 0.4, 0.6, 0.8, 1],
    4: [n / 48 for n in (0, 1, 2, 3, 4, 6, 8, 9, 12, 16, 18, 24, 32, 33, 36, 48)],
}
SIGNED = {2: [0, 1], 3: UNSIGNED[2], 4: UNSIGNED[3]}


@pytest.mark.parametrize("bits", [2, 3, 4])
def test_levels_by_hand(bits: int) -> None:
    for signed, expected in ((True, SIGNED[bits]), (False, UNSIGNED[bits])):
        own = levels(bits, signed=signed)
        assert own.tolist() == pytest.approx(expected, abs=1e-15)
        book = codebook(ApotQuantiser(own, torch.tensor(2.0), signed)).tolist()
        mirrored = [-2 * value for value in expected[:0:-1]] if signed else []
        assert book == pytest.approx(mirrored + [2 * value for value in expected])


@SIGNS
@pytest.mark.parametrize("bits", ALL_BITS)
def test_levels_are_sums_of_one_power_of_two_per_term(bits: int, signed: bool) -> None:
    own = terms(bits - signed)
    used = [power for term in own for power in term]
    assert sorted(used, reverse=True) == [2.0**-i for i in range(1, len(used) + 1)]  # each power once, no gap
    assert len(own) == (bits - signed + 1) // 2
    found = levels(bits, signed=signed)
    assert len(found.unique()) == 2 ** (bits - signed)
    for level in (found * sum(max(term) for term in own) * 2 ** len(used)).tolist():
        assert level == pytest.approx(round(level), abs=1e-9)
        assert round(level).bit_count() <= len(own)


@pytest.mark.parametrize("bits", ALL_BITS)
def test_nearest_is_the_nearest_and_midway_the_smaller(bits: int) -> None:
    own, u = levels(bits, signed=True), normal(1025, dtype=torch.float64)
    best = (u[:, None] - torch.cat((-own, own))).abs().amin(1)
    assert torch.equal((u - nearest(u, own)).abs(), best)
    assert torch.equal(nearest(-u, own), -nearest(u, own))
    midway = (own[1:] + own[:-1]) / 2
    assert torch.equal(nearest(midway, own), own[:-1])


@SIGNS
@pytest.mark.parametrize("bits", ALL_BITS)
def test_value_and_gradients_are_the_formulas_element_by_element(bits: int, signed: bool) -> None:
    own = levels(bits, signed=signed)
    x = (2 * normal(127, seed=bits, dtype=torch.float64)).requires_grad_()
    alpha = torch.full((127,), 1.7, dtype=torch.float64, requires_grad=True)  # one per element
    out = quantise(x, alpha, own, signed)
    by_x, by_alpha = torch.autograd.grad(out.sum(), (x, alpha))
    choices = own.tolist() + ((-own).tolist() if signed else [])
    for value, *found in zip(x.tolist(), out.tolist(), by_x.tolist(), by_alpha.tolist(), strict=True):
        u = value / 1.7
        level = min(choices, key=lambda level: abs(level - u))
        inside = (-1 if signed else 0) <= u <= 1
        expected = level * 1.7, float(inside), level - u if inside else level
        assert found == pytest.approx(expected, abs=1e-12)


@SIGNS
@pytest.mark.parametrize("bits", ALL_BITS)
def test_quantising_again_changes_nothing(bits: int, signed: bool) -> None:
    x, quantiser = (
        normal(1025, seed=bits),
        ApotQuantiser(levels(bits, signed=signed), torch.tensor(1.3), signed),
    )
    once = quantiser(x)
    assert torch.isin(once, codebook(quantiser)).all()  # to the last bit
    assert torch.equal(quantiser(once), once)


def test_normalised_weights_have_mean_zero_and_variance_one() -> None:
    weight = normal(1025, dtype=torch.float64)
    u, sigma = normalised(3 * weight + 5)
    assert u.mean().item() == pytest.approx(0, abs=1e-12)
    assert u.var(correction=0).item() == pytest.approx(1)
    assert sigma.item() == pytest.approx(3 * weight.std(correction=0).item())
    assert torch.equal(normalised(torch.full((3,), 2.0))[0], torch.zeros(3))


def test_scale_and_shift_of_the_weights_pass_to_the_scale_alone() -> None:
    weight = normal(127, dtype=torch.float64)
    quantiser = ApotQuantiser.for_weights(weight, 4)
    torch.testing.assert_close(quantiser(0.01 * weight + 7), 0.01 * quantiser(weight))


def test_no_gradient_goes_through_mean_and_sigma() -> None:
    weight = (0.5 * normal(127) + 1).requires_grad_()
    quantiser = ApotQuantiser(levels(4, signed=True), torch.tensor(1.0), True, normalise=True)
    (found,) = torch.autograd.grad(quantiser(weight).sum(), weight)
    torch.testing.assert_close(found, (normalised(weight.detach())[0].abs() <= 1).float())


@SIGNS
@pytest.mark.parametrize("bits", [2, 3, 4, 8])
def test_fitted_alpha_has_the_least_error_of_those_tried(bits: int, signed: bool) -> None:
    x, own = normal(1025, dtype=torch.float64), levels(bits, signed=signed)

    def error(alpha: Tensor) -> float:
        return float((quantise(x, alpha, own, signed) - x).square().sum())

    top = x.abs().max() if signed else x.max()
    found = error(fitted_alpha(x, own, signed))
    assert found == min(error(top * i / 100) for i in range(1, 101))


def test_weights_start_from_alpha_fitted_to_normalised_ones_in_their_own_type() -> None:
    weight = 0.02 * normal(1025, dtype=torch.float64) + 0.003
    quantiser, own = ApotQuantiser.for_weights(weight, 4), levels(4, signed=True)
    assert torch.equal(quantiser.alpha.detach(), fitted_alpha(normalised(weight)[0], own, signed=True))
    assert torch.equal(quantiser.levels, own)
    assert quantiser.alpha.dtype == torch.float64
    assert list(quantiser.state_dict()) == ["alpha"]


def test_an_alpha_that_fell_below_zero_gives_numbers_and_can_come_back() -> None:
    weight = normal(127)
    quantiser = ApotQuantiser(levels(4, signed=True), torch.tensor(-1.0), True, normalise=True)
    out = quantiser(weight)
    assert torch.isin(out, codebook(quantiser, weight)).all()
    (found,) = torch.autograd.grad((out - weight).square().sum(), quantiser.alpha)
    assert found.item() < 0
