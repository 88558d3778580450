"""LSQ: the step's gradient by its formula and by differences, the values, the channels."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from pwfn.errors import ConfigError, WeightError
from pwfn.lab.quantisers.lsq import (
    SMALLEST_STEP,
    Codes,
    LsqQuantiser,
    gradient_scale,
    initial_step,
    quantise,
    signed_codes,
    unsigned_codes,
)
from pwfn.lab.quantisers.slopes import with_slopes

ALL_BITS = range(2, 9)


def normal(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=dtype)


def gradient(tensor: Tensor) -> Tensor:
    assert tensor.grad is not None
    return tensor.grad


def codes_of(bits: int, signed: bool) -> Codes:
    return signed_codes(bits) if signed else unsigned_codes(bits)


@pytest.mark.parametrize("bits", ALL_BITS)
def test_codes_are_two_to_the_bits_whole_numbers(bits: int) -> None:
    assert signed_codes(bits) == (-(2 ** (bits - 1)), 2 ** (bits - 1) - 1)
    assert unsigned_codes(bits) == (0, 2**bits - 1)
    for codes in (signed_codes(bits), unsigned_codes(bits)):
        assert codes.high - codes.low + 1 == 2**bits


@pytest.mark.parametrize("bits", [1, 9, 0, -2, True, 2.5, "4"])
def test_other_bits_are_refused(bits: int) -> None:
    with pytest.raises(ConfigError, match="2 to 8"):
        signed_codes(bits)


def test_initial_step_by_hand() -> None:
    # bits 4: Q_P = 7; mean |w| = 1.5
    assert initial_step(torch.tensor([1.0, -2.0]), signed_codes(4)).item() == pytest.approx(3 / math.sqrt(7))
    # bits 2, unsigned: Q_P = 3
    assert initial_step(torch.tensor([1.0, 2.0]), unsigned_codes(2)).item() == pytest.approx(3 / math.sqrt(3))
    assert initial_step(torch.zeros(5), signed_codes(4)).item() == pytest.approx(SMALLEST_STEP)


def step_gradient(u: float, codes: Codes) -> float:
    """Esser et al., eq. 3, one element, in plain Python."""
    if u <= codes.low:
        return float(codes.low)
    if u >= codes.high:
        return float(codes.high)
    return round(u) - u  # both round half to even


@pytest.mark.parametrize("signed", [True, False])
@pytest.mark.parametrize("bits", ALL_BITS)
def test_step_gradient_is_the_formula_element_by_element(bits: int, signed: bool) -> None:
    codes, s = codes_of(bits, signed), 0.25
    borders = (
        torch.tensor([codes.low, codes.high, codes.low - 1, codes.high + 1, 0.0, 0.5, -0.5]).double() * s
    )
    x = torch.cat((normal(127, seed=bits, dtype=torch.float64) * codes.high * s, borders))
    for element in x:
        step = torch.tensor(s, dtype=torch.float64, requires_grad=True)
        quantise(element, step, codes).backward()
        assert step.grad is not None
        assert step.grad.item() == pytest.approx(step_gradient(element.item() / s, codes), abs=1e-12)


@pytest.mark.parametrize("signed", [True, False])
@pytest.mark.parametrize("bits", ALL_BITS)
def test_gradients_are_the_slopes_of_the_surrogate(bits: int, signed: bool) -> None:
    """With the rounding error r held, s (clip(x / s) + r) is piecewise linear: differences are exact."""
    codes, h = codes_of(bits, signed), 1e-6
    s = torch.tensor(0.3, dtype=torch.float64, requires_grad=True)
    x = (normal(1025, seed=bits, dtype=torch.float64) * codes.high * 0.3).requires_grad_()
    u = (x / s).detach().clamp(*codes)
    r = u.round() - u

    def surrogate(x: Tensor, s: Tensor) -> Tensor:
        return s * ((x / s).clamp(*codes) + r)

    out = quantise(x, s, codes)
    assert torch.allclose(out, surrogate(x, s), atol=1e-12, rtol=0)
    weight = normal(1025, seed=99, dtype=torch.float64)
    (out * weight).sum().backward()
    assert s.grad is not None
    assert x.grad is not None
    with torch.no_grad():
        by_s = ((surrogate(x, s + h) - surrogate(x, s - h)) / (2 * h) * weight).sum()
        by_x = (surrogate(x + h, s) - surrogate(x - h, s)) / (2 * h) * weight
    assert s.grad.item() == pytest.approx(by_s.item(), rel=1e-6)
    assert torch.allclose(x.grad, by_x, atol=1e-7, rtol=0)


@pytest.mark.parametrize("signed", [True, False])
@pytest.mark.parametrize("bits", ALL_BITS)
def test_data_gradient_is_one_inside_and_zero_outside(bits: int, signed: bool) -> None:
    codes, step = codes_of(bits, signed), torch.tensor(0.125)
    x = (normal(1025) * codes.high * 0.125).requires_grad_()
    quantise(x, step, codes).sum().backward()
    assert x.grad is not None
    u = x.detach() / step
    assert torch.equal(x.grad, ((u > codes.low) & (u < codes.high)).float())
    assert 0 < x.grad.sum() < 1025


@pytest.mark.parametrize("axis", [None, 0, 1, -1])
@pytest.mark.parametrize("bits", ALL_BITS)
def test_every_value_is_in_the_codebook_and_quantising_again_changes_nothing(
    bits: int, axis: int | None
) -> None:
    weight = normal(7, 5, 33, seed=bits)
    quantiser = LsqQuantiser.for_weights(weight, bits, axis)
    once = quantiser(weight)
    assert torch.equal(quantiser(once), once)
    book = quantiser.codebook()
    assert book.shape[-1] == 2**bits
    parts = [once] if axis is None else once.unbind(axis)
    for part, values in zip(parts, book.reshape(-1, 2**bits), strict=True):
        assert torch.equal(values, values.unique())
        assert torch.isin(part, values).all()  # to the last bit
        assert len(part.unique()) <= 2**bits


@pytest.mark.parametrize("axis", [0, 1, 2])
@pytest.mark.parametrize("bits", [2, 4, 8])
def test_per_channel_is_per_tensor_on_each_channel(bits: int, axis: int) -> None:
    weight = normal(3, 4, 5) * normal(3, 4, 5, seed=1).exp()
    slope = normal(3, 4, 5, seed=2)
    together = LsqQuantiser.for_weights(weight, bits, axis)
    weight.requires_grad_()
    out = together(weight)
    out.backward(slope)
    for channel in range(weight.shape[axis]):
        part = weight.detach().select(axis, channel).clone()
        step = initial_step(part, signed_codes(bits))
        assert torch.allclose(step, together.step[channel], rtol=1e-6)  # sums in another order
        alone = LsqQuantiser(together.step[channel], signed_codes(bits))
        part.requires_grad_()
        quantised = alone(part)
        assert torch.equal(quantised, out.select(axis, channel))
        quantised.backward(slope.select(axis, channel))
        assert torch.equal(gradient(part), gradient(weight).select(axis, channel))
        assert torch.allclose(gradient(alone.step), gradient(together.step)[channel], rtol=1e-5, atol=1e-6)


def test_the_step_gradient_keeps_its_digits() -> None:
    """Every round(u) - u is -1/256; the sums of round(u) and of u, taken apart, would lose it."""
    code = torch.arange(20.0, 100.0).repeat(1000)
    step = torch.tensor(1.0, requires_grad=True)
    quantise(code + 1 / 256, step, signed_codes(8)).backward(code)
    assert gradient(step).item() == -code.sum().item() / 256


def test_the_module_scales_the_step_gradient_by_weights_and_codes() -> None:
    weight = normal(6, 10)
    quantiser = LsqQuantiser.for_weights(weight, bits=4)
    quantiser(weight).sum().backward()
    step = quantiser.step.detach().clone().requires_grad_()
    quantise(weight, step, signed_codes(4)).sum().backward()
    assert quantiser.step.grad is not None
    assert step.grad is not None
    assert gradient_scale(60, signed_codes(4)) == 1 / math.sqrt(60 * 7)
    assert quantiser.step.grad.item() == pytest.approx(step.grad.item() / math.sqrt(60 * 7), rel=1e-5)


def test_the_batch_size_does_not_change_an_activation_step_gradient() -> None:
    batch = normal(4, 3, 5).relu()
    gradients = []
    for x in (batch, torch.cat((batch, batch))):
        quantiser = LsqQuantiser.for_activations(x, bits=3)
        (quantiser(x).square().sum() / len(x)).backward()
        assert quantiser.step.grad is not None
        gradients.append(quantiser.step.grad.item())
    assert gradients[0] == pytest.approx(gradients[1], rel=1e-5)


def test_negative_activations_become_zero_unless_signed() -> None:
    x = torch.tensor([[-2.0, 1.0]])
    assert LsqQuantiser.for_activations(x, bits=8)(x)[0, 0].item() == 0
    assert LsqQuantiser.for_activations(x, bits=8, signed=True)(x)[0, 0].item() < 0


@pytest.mark.parametrize("value", [0.0, -1.0])
def test_a_step_that_fell_to_zero_or_below_gives_numbers_and_can_come_back(value: float) -> None:
    quantiser = LsqQuantiser(torch.tensor(value), signed_codes(4))
    weight = normal(127)
    out = quantiser(weight)
    assert torch.isin(out, quantiser.codebook()).all()
    (out - weight).square().sum().backward()
    assert quantiser.step.grad is not None
    assert quantiser.step.grad.item() < 0  # descent makes the step larger


def test_zero_is_never_negative() -> None:
    out = quantise(torch.tensor([-0.1, -0.0]), torch.tensor(1.0), signed_codes(4))
    assert not torch.signbit(out).any()


def test_what_cannot_be_quantised_is_refused() -> None:
    with pytest.raises(WeightError, match="empty"):
        LsqQuantiser.for_weights(torch.zeros(0, 3), bits=4)
    with pytest.raises(WeightError, match="axis is 2"):
        LsqQuantiser.for_weights(torch.zeros(3, 3), bits=4, axis=2)
    for axis in (0, -2):
        with pytest.raises(WeightError, match="batch"):
            LsqQuantiser.for_activations(torch.zeros(3, 3), bits=4, axis=axis)


def test_slopes_go_to_those_that_share_them_and_to_no_others() -> None:
    value = normal(3, 4)
    by_x, by_row, by_all = (normal(3, 4, seed=seed) for seed in (1, 2, 3))
    x, row, constant = (
        torch.zeros(3, 4),
        torch.zeros(3, 1),
        torch.tensor(math.nan),
    )  # values are not looked at
    x.requires_grad_()
    row.requires_grad_()
    out = with_slopes(value, (x, by_x), (row, by_row), (constant, by_all))
    assert torch.equal(out, value)
    out.backward(torch.full((3, 4), 2.0))
    assert torch.equal(gradient(x), 2 * by_x)
    assert torch.allclose(gradient(row), 2 * by_row.sum(1, keepdim=True))
    assert constant.grad is None
    with torch.no_grad():
        assert not with_slopes(value, (x, by_x)).requires_grad
