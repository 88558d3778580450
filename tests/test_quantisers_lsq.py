"""LSQ and LSQ+: values and gradients by their formulas, and where they start."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from test_quantisers import codebook, normal
from torch import Tensor
from torch.nn import functional as F

from pwfn.lab.quantisers import LsqQuantiser, PartsQuantiser, lsqplus
from pwfn.lab.quantisers.lsq import Codes, gradient_scale, initial_step, quantise
from pwfn.lab.quantisers.lsqplus import initial_step_and_offset

ALL_BITS = range(2, 9)


def gradient(tensor: Tensor) -> Tensor:
    assert tensor.grad is not None
    return tensor.grad


@pytest.mark.parametrize("offset", [None, -0.375])
@pytest.mark.parametrize("signed", [True, False])
@pytest.mark.parametrize("bits", ALL_BITS)
def test_value_and_gradients_are_the_formulas_element_by_element(
    bits: int, signed: bool, offset: float | None
) -> None:
    """Esser et al., eqs. 1, 2, 3 and 5, in plain Python; Bhalgat et al. for the offset."""
    (low, high), s, beta = Codes.of(bits, signed=signed), 0.25, offset or 0.0
    borders = torch.tensor([low, high, low - 1, high + 1, 0.0, 0.5, -0.5], dtype=torch.float64) * s + beta
    x = torch.cat((normal(127, seed=bits, dtype=torch.float64) * high * s, borders)).requires_grad_()
    step, shift = (torch.full_like(x, p).requires_grad_() for p in (s, beta))  # one per element
    out = quantise(x, step, Codes(low, high), offset=None if offset is None else shift)
    out.sum().backward()
    found = [out.tolist(), gradient(x).tolist(), gradient(step).tolist()]
    found += [] if offset is None else [gradient(shift).tolist()]
    for element, *values in zip(x.tolist(), *found, strict=True):
        u = (element - beta) / s
        code = round(min(max(u, low), high))  # both round half to even
        inside = low < u < high
        expected = [code * s + beta, float(inside), code - u if inside else code, float(not inside)]
        assert values == pytest.approx(expected[: len(values)], abs=1e-12)


def test_starting_steps_by_hand() -> None:
    # LSQ: 2 mean|w| / sqrt(Q_P) with mean|w| = 1.5; Q_P = 7 for 4 signed bits, 3 for 2 unsigned ones.
    assert initial_step(torch.tensor([1.0, -2.0]), Codes(-8, 7)).item() == pytest.approx(3 / math.sqrt(7))
    assert initial_step(torch.tensor([1.0, 2.0]), Codes(0, 3)).item() == pytest.approx(3 / math.sqrt(3))
    assert 0 < initial_step(torch.zeros(5), Codes(-8, 7)).item() < 1e-6
    # LSQ+: mu = -1, sigma = 2: |mu - 3 sigma| = 7 and |mu + 3 sigma| = 5, over 2^3.
    assert lsqplus.initial_step(torch.tensor([-3.0, 1.0]), bits=4).item() == 7 / 8
    by_channel = lsqplus.initial_step(torch.tensor([[-3.0, 1.0], [1.0, 3.0]]), bits=4, axis=0)
    assert by_channel.tolist() == [7 / 8, 5 / 8]


@pytest.mark.parametrize("bits", ALL_BITS)
def test_activations_on_a_grid_are_met_exactly(bits: int) -> None:
    x = torch.arange(2**bits).repeat(3) * 0.25 - 1.5
    step, offset = initial_step_and_offset(x, bits)
    assert (step.item(), offset.item()) == pytest.approx((0.25, -1.5), abs=1e-6)
    alike = torch.full((4, 3), 0.7)
    step, offset = initial_step_and_offset(alike, bits)
    torch.testing.assert_close(quantise(alike, step, Codes(0, 2**bits - 1), offset=offset), alike)


@pytest.mark.parametrize("shape", ["normal", "relu", "gelu", "long tailed"])
@pytest.mark.parametrize("bits", [2, 3, 4, 8])
def test_initial_error_is_no_worse_than_a_search_over_ranges(bits: int, shape: str) -> None:
    x, codes = normal(1025, seed=bits, dtype=torch.float64), Codes.of(bits, signed=False)
    x = {"normal": x, "relu": x.relu(), "gelu": F.gelu(x), "long tailed": x**3}[shape]

    def error(step: Tensor, offset: Tensor) -> float:
        return float((quantise(x, step, codes, offset=offset) - x).square().sum())

    found = error(*initial_step_and_offset(x, bits))
    low, width = x.min(), x.max() - x.min()
    assert found <= error(width / codes.high, low)
    searched = min(
        error(width * (25 - a - b) / 25 / codes.high, low + width * a / 25)
        for a, b in itertools.product(range(25), range(25))
        if a + b < 25
    )
    assert found <= 1.02 * searched


@pytest.mark.parametrize("bits", ALL_BITS)
def test_quantising_again_changes_nothing(bits: int) -> None:
    x = F.gelu(normal(9, 35, seed=bits))
    weights = LsqQuantiser.for_weights(x, bits)
    step, offset = initial_step_and_offset(x, bits)
    activations = LsqQuantiser(step, Codes.of(bits, signed=False), batched=True, offset=offset)
    for quantiser in (weights, activations):
        once = quantiser(x)
        assert torch.isin(once, codebook(quantiser)).all()  # to the last bit
        assert torch.equal(quantiser(once), once)


def test_the_step_gradient_keeps_its_digits() -> None:
    """Every round(u) - u is -1/256; the sums of round(u) and of u, taken apart, would lose it."""
    code = torch.arange(20.0, 100.0).repeat(1000)
    step = torch.tensor(1.0, requires_grad=True)
    quantise(code + 1 / 256, step, Codes.of(8, signed=True)).backward(code)
    assert gradient(step).item() == -code.sum().item() / 256


@pytest.mark.parametrize(
    ("batched", "axis", "count"), [(False, None, 60), (False, 0, 15), (True, None, 15), (True, 1, 5)]
)
def test_the_gradient_scale_counts_the_elements_that_share_a_step(
    batched: bool, axis: int | None, count: int
) -> None:
    """1 / sqrt(count Q_P); the batch is not counted."""
    codes, x = Codes(-8, 7), normal(4, 3, 5)
    steps = torch.tensor(0.2) if axis is None else torch.full((x.shape[axis],), 0.2)
    quantiser = LsqQuantiser(steps, codes, axis, batched=batched)
    quantiser(x).sum().backward()
    plain = steps.clone().requires_grad_()
    quantise(x, plain, codes, axis).sum().backward()
    assert gradient_scale(count, codes) == 1 / math.sqrt(count * 7)
    torch.testing.assert_close(gradient(quantiser.step), gradient(plain) / math.sqrt(count * 7))


@pytest.mark.parametrize("value", [0.0, -1.0])
def test_a_step_that_fell_to_zero_or_below_gives_numbers_and_can_come_back(value: float) -> None:
    quantiser, weight = LsqQuantiser(torch.tensor(value), Codes.of(4, signed=True)), normal(127)
    out = quantiser(weight)
    assert torch.isin(out, codebook(quantiser)).all()
    (out - weight).square().sum().backward()
    assert gradient(quantiser.step).item() < 0  # descent makes the step larger


@pytest.mark.parametrize("axis", [0, 1])
def test_a_quantiser_of_parts_is_one_quantiser_for_each(axis: int) -> None:
    weight = normal(6, 9).requires_grad_()
    quantiser = PartsQuantiser(weight, 3, axis, 3)
    out = quantiser(weight)
    pieces = [piece.detach().requires_grad_() for piece in weight.chunk(3, axis)]
    alone = [LsqQuantiser.for_weights(piece, 3) for piece in pieces]
    wanted = torch.cat([one(piece) for one, piece in zip(alone, pieces, strict=True)], axis)
    assert torch.equal(out, wanted)
    out.square().sum().backward()
    wanted.square().sum().backward()
    torch.testing.assert_close(gradient(weight), torch.cat([gradient(piece) for piece in pieces], axis))
    torch.testing.assert_close(
        gradient(quantiser.lsq.step), torch.stack([gradient(one.step) for one in alone])
    )
