"""APoT: the levels by hand, the projection, the gradient of alpha, the normalised weights."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from pwfn.errors import ConfigError, WeightError
from pwfn.lab.quantisers.apot import (
    SMALLEST_ALPHA,
    AlphaGradient,
    ApotQuantiser,
    activation_magnitudes,
    fitted_alpha,
    magnitudes,
    nearest,
    normalised,
    quantise,
    terms,
    weight_magnitudes,
)

ALL_BITS = range(2, 9)


def normal(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=dtype)


def gradient(tensor: Tensor) -> Tensor:
    assert tensor.grad is not None
    return tensor.grad


def levels_of(bits: int, signed: bool) -> Tensor:
    return weight_magnitudes(bits) if signed else activation_magnitudes(bits)


# By hand. Two bits: one term from {0, 1/2, 1/4, 1/8}, over 1/2. Three: {0, 8, 4, 1} + {0, 2} in
# sixteenths, over 10. Four: {0, 32, 8, 2} + {0, 16, 4, 1} in sixty-fourths, over 48.
UNSIGNED = {
    2: [0, 1 / 4, 1 / 2, 1],
    3: [0, 0.1, 0.2, 0.3, 0.4, 0.6, 0.8, 1],
    4: [n / 48 for n in (0, 1, 2, 3, 4, 6, 8, 9, 12, 16, 18, 24, 32, 33, 36, 48)],
}
# A weight's sign is one of its bits.
SIGNED = {
    2: [-1, 0, 1],
    3: [-1, -1 / 2, -1 / 4, 0, 1 / 4, 1 / 2, 1],
    4: [-1, -0.8, -0.6, -0.4, -0.3, -0.2, -0.1, 0, 0.1, 0.2, 0.3, 0.4, 0.6, 0.8, 1],
}


@pytest.mark.parametrize("bits", [2, 3, 4])
def test_levels_by_hand(bits: int) -> None:
    assert activation_magnitudes(bits).tolist() == pytest.approx(UNSIGNED[bits], abs=1e-15)
    weight = normal(127)
    signed = ApotQuantiser.for_weights(weight, bits, alpha=1.0, restore_scale=False).codebook()
    assert signed.tolist() == pytest.approx(SIGNED[bits], abs=1e-7)
    unsigned = ApotQuantiser.for_activations(weight, bits, alpha=1.0).codebook()
    assert unsigned.tolist() == pytest.approx(UNSIGNED[bits], abs=1e-7)
    both = ApotQuantiser.for_activations(weight, bits, signed=True, alpha=1.0).codebook()
    assert both.tolist() == pytest.approx(SIGNED[bits], abs=1e-7)


@pytest.mark.parametrize("bits", range(1, 9))
def test_levels_are_sums_of_one_power_of_two_per_term(bits: int) -> None:
    used = [power for term in terms(bits) for power in term]
    assert sorted(used, reverse=True) == [2.0**-i for i in range(1, len(used) + 1)]  # each power once, no gap
    assert len(terms(bits)) == (bits + 1) // 2
    largest = sum(max(term) for term in terms(bits))
    levels = magnitudes(bits)
    assert len(levels.unique()) == 2**bits
    for level in (levels * largest * 2 ** len(used)).tolist():
        assert level == pytest.approx(round(level), abs=1e-9)
        assert round(level).bit_count() <= (bits + 1) // 2


@pytest.mark.parametrize("bits", ALL_BITS)
def test_outputs_are_a_scale_times_sums_of_few_powers_of_two(bits: int) -> None:
    weight = normal(1025, seed=bits, dtype=torch.float64)
    alpha = torch.tensor(2.3, dtype=torch.float64)
    out = quantise(weight, alpha, weight_magnitudes(bits), signed=True)
    n, powers = len(terms(bits - 1)), sum(len(term) for term in terms(bits - 1))
    unit = alpha / sum(max(term) for term in terms(bits - 1))
    for value in (out / unit * 2**powers).abs().unique().tolist():
        assert value == pytest.approx(round(value), abs=1e-6)
        assert round(value).bit_count() <= n


@pytest.mark.parametrize("bits", [1, 9, True, 2.5])
def test_other_bits_are_refused(bits: int) -> None:
    for make in (ApotQuantiser.for_weights, ApotQuantiser.for_activations):
        with pytest.raises(ConfigError, match="2 to 8"):
            make(normal(127), bits)


@pytest.mark.parametrize("bits", ALL_BITS)
def test_nearest_is_the_nearest(bits: int) -> None:
    levels, u = weight_magnitudes(bits), normal(1025, dtype=torch.float64)
    everything = torch.cat((-levels, levels))
    expected = (u[:, None] - everything).abs().min(dim=1).values
    assert torch.equal((u - nearest(u, levels)).abs(), expected)
    assert torch.equal(nearest(-u, levels), -nearest(u, levels))


def test_half_way_goes_to_the_smaller_on_both_sides() -> None:
    assert nearest(torch.tensor([-0.75, 0.75]), weight_magnitudes(3)).tolist() == [-0.5, 0.5]


@pytest.mark.parametrize("alpha_gradient", AlphaGradient)
@pytest.mark.parametrize("signed", [True, False])
@pytest.mark.parametrize("bits", ALL_BITS)
def test_gradients_are_the_formulas_element_by_element(
    bits: int, signed: bool, alpha_gradient: AlphaGradient
) -> None:
    levels = levels_of(bits, signed)
    x = (2 * normal(127, seed=bits, dtype=torch.float64)).requires_grad_()
    alpha = torch.full((127,), 1.7, dtype=torch.float64, requires_grad=True)  # one per element
    out = quantise(x, alpha, levels, signed, alpha_gradient=alpha_gradient)
    out.sum().backward()
    assert x.grad is not None
    assert alpha.grad is not None
    for value, by_x, by_alpha in zip(x.tolist(), x.grad.tolist(), alpha.grad.tolist(), strict=True):
        u = value / 1.7
        if u > 1:
            expected = (0, 1)
        elif u < (-1 if signed else 0):
            expected = (0, -1 if signed else 0)
        else:
            candidates = [level for level in levels.tolist() + (-levels).tolist() if signed or level >= 0]
            level = min(candidates, key=lambda level: abs(level - u))
            expected = (1, level - u if alpha_gradient is AlphaGradient.ALL else 0)
        assert (by_x, by_alpha) == pytest.approx(expected, abs=1e-12)


@pytest.mark.parametrize("signed", [True, False])
@pytest.mark.parametrize("bits", ALL_BITS)
def test_gradients_are_the_slopes_of_the_surrogate(bits: int, signed: bool) -> None:
    levels, h, low = levels_of(bits, signed), 1e-6, -1.0 if signed else 0.0
    x = (2 * normal(1025, seed=bits, dtype=torch.float64)).requires_grad_()
    alpha = torch.tensor(1.7, dtype=torch.float64, requires_grad=True)
    u = (x / alpha).detach().clamp(low, 1)
    r = nearest(u, levels) - u

    def surrogate(x: Tensor, alpha: Tensor) -> Tensor:
        return alpha * ((x / alpha).clamp(low, 1) + r)

    weight = normal(1025, seed=99, dtype=torch.float64)
    (quantise(x, alpha, levels, signed) * weight).sum().backward()
    assert alpha.grad is not None
    assert x.grad is not None
    with torch.no_grad():
        by_alpha = ((surrogate(x, alpha + h) - surrogate(x, alpha - h)) / (2 * h) * weight).sum()
        by_x = (surrogate(x + h, alpha) - surrogate(x - h, alpha)) / (2 * h) * weight
    assert alpha.grad.item() == pytest.approx(by_alpha.item(), rel=1e-6)
    assert torch.allclose(x.grad, by_x, atol=1e-7, rtol=0)


def test_clipped_weights_can_keep_their_gradient() -> None:
    x, levels = (3 * normal(1025)).requires_grad_(), weight_magnitudes(3)
    alphas = [torch.tensor(2.0, requires_grad=True) for _ in range(2)]
    plain = quantise(x, alphas[0], levels, signed=True)
    kept = quantise(x, alphas[1], levels, signed=True, pass_clipped=True)
    assert torch.equal(kept, plain)
    plain.sum().backward()
    assert torch.equal(gradient(x), (x.detach().abs() <= 2).float())
    x.grad = None
    kept.sum().backward()
    assert torch.equal(gradient(x), torch.ones_like(x))
    assert torch.equal(gradient(alphas[0]), gradient(alphas[1]))


@pytest.mark.parametrize("alpha_gradient", AlphaGradient)
@pytest.mark.parametrize("bits", ALL_BITS)
def test_every_value_is_in_the_codebook(bits: int, alpha_gradient: AlphaGradient) -> None:
    weight = 0.02 * normal(7, 5, 33, seed=bits) + 0.003
    for quantiser, x in (
        (ApotQuantiser.for_weights(weight, bits, alpha_gradient=alpha_gradient), weight),
        (ApotQuantiser.for_weights(weight, bits, restore_scale=False, pass_clipped=True), weight),
        (ApotQuantiser.for_activations(weight, bits, alpha_gradient=alpha_gradient), weight),
    ):
        book = quantiser.codebook(x)
        assert torch.equal(book, book.unique())
        assert len(book) == (2**bits - 1 if quantiser.signed else 2**bits)
        out = quantiser(x)
        assert torch.isin(out, book).all()  # to the last bit
        assert not torch.signbit(out[out == 0]).any()


@pytest.mark.parametrize("signed", [True, False])
@pytest.mark.parametrize("bits", ALL_BITS)
def test_quantising_again_changes_nothing(bits: int, signed: bool) -> None:
    x, alpha, levels = normal(1025, seed=bits), torch.tensor(1.3), levels_of(bits, signed)
    once = quantise(x, alpha, levels, signed)
    assert torch.equal(quantise(once, alpha, levels, signed), once)


@pytest.mark.parametrize("bits", [2, 4, 8])
def test_an_alpha_per_channel_is_an_alpha_for_each_channel(bits: int) -> None:
    x, levels = normal(5, 127), weight_magnitudes(bits)
    alpha = torch.arange(1.0, 6.0).view(5, 1)
    out = quantise(x, alpha, levels, signed=True)
    for row, its_alpha, expected in zip(x, alpha, out, strict=True):
        assert torch.equal(quantise(row, its_alpha, levels, signed=True), expected)


def test_normalised_weights_have_mean_zero_and_variance_one() -> None:
    u, sigma = normalised(3 * normal(1025, dtype=torch.float64) + 5)
    assert u.mean().item() == pytest.approx(0, abs=1e-12)
    assert u.var(correction=0).item() == pytest.approx(1)
    assert sigma.item() == pytest.approx((3 * normal(1025, dtype=torch.float64)).std(correction=0).item())
    assert torch.equal(normalised(torch.full((3,), 2.0))[0], torch.zeros(3))
    assert torch.equal(normalised(torch.tensor([2.0]))[0], torch.zeros(1))


def test_no_gradient_goes_through_mean_and_sigma() -> None:
    weight = (0.5 * normal(127) + 1).requires_grad_()
    quantiser = ApotQuantiser.for_weights(weight, 4, alpha=1.0)
    quantiser(weight).sum().backward()
    u, _ = normalised(weight.detach())
    assert torch.allclose(gradient(weight), (u.abs() <= 1).float())


def test_scale_and_shift_of_the_weights_pass_to_the_scale_alone() -> None:
    weight = normal(127, dtype=torch.float64)
    quantiser = ApotQuantiser.for_weights(weight, 4)
    assert torch.allclose(quantiser(0.01 * weight + 7), 0.01 * quantiser(weight))


def test_in_front_of_a_batch_norm_the_scale_makes_no_difference() -> None:
    x, weight = normal(33, 10, dtype=torch.float64), 0.05 * normal(4, 10, seed=1, dtype=torch.float64)
    target = normal(33, 4, seed=2, dtype=torch.float64)
    found = []
    for restore_scale in (True, False):
        quantiser = ApotQuantiser.for_weights(weight, 3, alpha=1.5, restore_scale=restore_scale)
        w = weight.clone().requires_grad_()
        out = F.batch_norm(F.linear(x, quantiser(w)), None, None, training=True, eps=1e-14)
        ((out - target) ** 3).sum().backward()
        assert w.grad is not None
        assert quantiser.alpha.grad is not None
        found.append((out.detach(), w.grad, quantiser.alpha.grad))
    for one, other in zip(*found, strict=True):
        assert torch.allclose(one, other, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("bits", [2, 3, 4, 8])
def test_fitted_alpha_has_the_least_error_of_those_tried(bits: int) -> None:
    x, levels = normal(1025, dtype=torch.float64), weight_magnitudes(bits)

    def error(alpha: Tensor) -> float:
        return float((quantise(x, alpha, levels, signed=True) - x).square().sum())

    found = error(fitted_alpha(x, levels, signed=True))
    assert all(found <= error(x.abs().max() * i / 100) for i in range(1, 101))


def test_fitted_alpha_shrinks_with_fewer_levels() -> None:
    x = normal(1025)
    found = [fitted_alpha(x, weight_magnitudes(bits), signed=True).item() for bits in (2, 3, 4)]
    assert all(one < other for one, other in pairwise(found))


def test_an_alpha_that_fell_below_zero_gives_numbers_and_can_come_back() -> None:
    weight = normal(127)
    quantiser = ApotQuantiser.for_weights(weight, 4, alpha=-1.0)
    out = quantiser(weight)
    assert torch.isin(out, quantiser.codebook(weight)).all()
    (out - weight).square().sum().backward()
    assert quantiser.alpha.grad is not None
    assert quantiser.alpha.grad.item() < 0
    assert SMALLEST_ALPHA > 0


@pytest.mark.parametrize("bits", ALL_BITS)
def test_the_start_is_fitted_to_the_normalised_weights(bits: int) -> None:
    weight = 0.02 * normal(1025, seed=bits) + 0.003
    levels = weight_magnitudes(bits)
    expected = fitted_alpha(normalised(weight)[0], levels, signed=True)
    assert torch.equal(ApotQuantiser.for_weights(weight, bits).alpha.detach(), expected)
    for signed in (True, False):
        found = ApotQuantiser.for_activations(weight, bits, signed=signed).alpha.detach()
        assert torch.equal(found, fitted_alpha(weight, levels_of(bits, signed), signed))


def test_quantisers_have_the_number_type_of_what_they_were_made_for() -> None:
    quantiser = ApotQuantiser.for_weights(normal(127, dtype=torch.float64), 4)
    assert (quantiser.alpha.dtype, quantiser.levels.dtype) == (torch.float64, torch.float64)
    assert torch.equal(quantiser.levels, weight_magnitudes(4))
    assert list(quantiser.state_dict()) == ["alpha"]


def test_what_cannot_be_quantised_is_refused() -> None:
    weight = normal(5, 4)
    quantiser = ApotQuantiser.for_weights(weight, 4)
    with pytest.raises(WeightError, match="empty"):
        quantiser(torch.zeros(0))
    with pytest.raises(WeightError, match="give the weights"):
        quantiser.codebook()
    for make in (ApotQuantiser.for_weights, ApotQuantiser.for_activations):
        with pytest.raises(ConfigError, match="APoT has one codebook per layer"):
            make(weight, 4, axis=0)
