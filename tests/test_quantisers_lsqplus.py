"""LSQ+: the offset's gradient, and starting values that no search beats by much."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from pwfn.errors import WeightError
from pwfn.lab.quantisers.lsq import Codes, signed_codes, unsigned_codes
from pwfn.lab.quantisers.lsq import quantise as quantise_without_offset
from pwfn.lab.quantisers.lsqplus import LsqPlusQuantiser, initial_step, initial_step_and_offset, quantise

ALL_BITS = range(2, 9)


def gradient(tensor: Tensor) -> Tensor:
    assert tensor.grad is not None
    return tensor.grad


def normal(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=dtype)


def squared_error(x: Tensor, step: Tensor, offset: Tensor, codes: Codes) -> float:
    return float((quantise(x, step, offset, codes) - x).square().sum())


def test_initial_weight_step_by_hand() -> None:
    # mu = -1, sigma = 2: |mu - 3 sigma| = 7 and |mu + 3 sigma| = 5, over 2^3
    assert initial_step(torch.tensor([-3.0, 1.0]), bits=4).item() == 7 / 8
    by_channel = initial_step(torch.tensor([[-3.0, 1.0], [1.0, 3.0]]), bits=4, axis=0)
    assert by_channel.tolist() == [7 / 8, 5 / 8]


@pytest.mark.parametrize("bits", ALL_BITS)
def test_activations_on_a_grid_are_met_exactly(bits: int) -> None:
    codes = unsigned_codes(bits)
    x = torch.arange(2**bits).repeat(3) * 0.25 - 1.5
    step, offset = initial_step_and_offset(x, codes)
    assert (step.item(), offset.item()) == pytest.approx((0.25, -1.5), abs=1e-6)
    assert squared_error(x, step, offset, codes) < 1e-9


@pytest.mark.parametrize("shape", ["normal", "relu", "gelu", "long tailed"])
@pytest.mark.parametrize("bits", [2, 3, 4, 8])
def test_initial_error_is_no_worse_than_a_search_over_ranges(bits: int, shape: str) -> None:
    x = normal(1025, seed=bits, dtype=torch.float64)
    x = {"normal": x, "relu": x.relu(), "gelu": F.gelu(x), "long tailed": x**3}[shape]
    codes = unsigned_codes(bits)
    found = squared_error(x, *initial_step_and_offset(x, codes), codes)
    step = (x.max() - x.min()) / codes.high
    assert found <= squared_error(x, step, x.min(), codes)
    low, high = x.min().item(), x.max().item()
    shares = [i / 25 for i in range(25)]
    ranges = [
        (low + a * (high - low), high - b * (high - low))
        for a, b in itertools.product(shares, shares)
        if a + b < 1
    ]
    searched = min(
        squared_error(x, torch.tensor((b - a) / codes.high).double(), torch.tensor(a).double(), codes)
        for a, b in ranges
    )
    assert found <= 1.02 * searched


def test_activations_that_are_all_alike_stay_as_they_are() -> None:
    x = torch.full((4, 3), 0.7)
    assert torch.allclose(LsqPlusQuantiser.for_activations(x, bits=4)(x), x, atol=1e-5)


@pytest.mark.parametrize("bits", ALL_BITS)
def test_gradients_are_the_formulas_element_by_element(bits: int) -> None:
    codes, s, beta = unsigned_codes(bits), 0.25, -0.375
    x = (normal(127, seed=bits, dtype=torch.float64) * codes.high * s).requires_grad_()
    step = torch.full((127,), s, dtype=torch.float64, requires_grad=True)
    offset = torch.full((127,), beta, dtype=torch.float64, requires_grad=True)
    quantise(x, step, offset, codes).sum().backward()  # one step and offset per element
    u = (x.detach() - beta) / s
    below, above = u <= codes.low, u >= codes.high
    inside = ~(below | above)
    assert inside.any()
    assert below.any()
    assert torch.equal(gradient(x), inside.double())
    assert torch.equal(gradient(offset), (~inside).double())
    by_formula = torch.where(inside, u.round() - u, below * float(codes.low) + above * float(codes.high))
    assert torch.allclose(gradient(step), by_formula, atol=1e-12, rtol=0)


@pytest.mark.parametrize("bits", ALL_BITS)
def test_gradients_are_the_slopes_of_the_surrogate(bits: int) -> None:
    codes, h = unsigned_codes(bits), 1e-6
    x = (normal(1025, seed=bits, dtype=torch.float64) * codes.high * 0.3).requires_grad_()
    s = torch.tensor(0.3, dtype=torch.float64, requires_grad=True)
    beta = torch.tensor(-0.4, dtype=torch.float64, requires_grad=True)
    u = ((x - beta) / s).detach().clamp(*codes)
    r = u.round() - u

    def surrogate(x: Tensor, s: Tensor, beta: Tensor) -> Tensor:
        return s * (((x - beta) / s).clamp(*codes) + r) + beta

    weight = normal(1025, seed=99, dtype=torch.float64)
    (quantise(x, s, beta, codes) * weight).sum().backward()
    assert s.grad is not None
    assert beta.grad is not None
    with torch.no_grad():
        by_s = ((surrogate(x, s + h, beta) - surrogate(x, s - h, beta)) / (2 * h) * weight).sum()
        by_beta = ((surrogate(x, s, beta + h) - surrogate(x, s, beta - h)) / (2 * h) * weight).sum()
    assert s.grad.item() == pytest.approx(by_s.item(), rel=1e-6)
    assert beta.grad.item() == pytest.approx(by_beta.item(), rel=1e-6)


@pytest.mark.parametrize("bits", ALL_BITS)
def test_without_offset_it_is_lsq(bits: int) -> None:
    x, step = normal(127), torch.tensor(0.1)
    for codes in (signed_codes(bits), unsigned_codes(bits)):
        expected = quantise_without_offset(x, step, codes)
        assert torch.equal(quantise(x, step, torch.tensor(0.0), codes), expected)


@pytest.mark.parametrize("axis", [None, 1, 2])
@pytest.mark.parametrize("bits", ALL_BITS)
def test_every_value_is_in_the_codebook_and_quantising_again_changes_nothing(
    bits: int, axis: int | None
) -> None:
    x = F.gelu(normal(9, 5, 7, seed=bits))
    quantiser = LsqPlusQuantiser.for_activations(x, bits, axis)
    once = quantiser(x)
    assert torch.equal(quantiser(once), once)
    book = quantiser.codebook().reshape(-1, 2**bits)
    for part, values in zip([once] if axis is None else once.unbind(axis), book, strict=True):
        assert torch.isin(part, values).all()  # to the last bit
        assert len(part.unique()) <= 2**bits


@pytest.mark.parametrize("bits", [2, 4, 8])
def test_per_channel_is_per_tensor_on_each_channel(bits: int) -> None:
    x = F.gelu(normal(9, 5, 7)) * torch.arange(1.0, 6.0).view(1, 5, 1)
    slope = normal(9, 5, 7, seed=2)
    together = LsqPlusQuantiser.for_activations(x, bits, axis=1)
    out = together(x)
    out.backward(slope)
    for channel, part in enumerate(x.unbind(1)):
        alone = LsqPlusQuantiser.for_activations(part, bits)
        assert torch.equal(alone.step, together.step[channel])
        assert torch.equal(alone.offset, together.offset[channel])
        quantised = alone(part)
        assert torch.equal(quantised, out.select(1, channel))
        quantised.backward(slope.select(1, channel))
        for one, all_of_them in ((alone.step, together.step), (alone.offset, together.offset)):
            assert torch.allclose(gradient(one), gradient(all_of_them)[channel], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("bits", ALL_BITS)
def test_weights_have_a_symmetric_quantiser_for_each_output_channel(bits: int) -> None:
    weight = normal(6, 3, 3, 3, seed=bits) * torch.arange(1.0, 7.0).view(6, 1, 1, 1)
    quantiser = LsqPlusQuantiser.for_weights(weight, bits, axis=0)
    assert quantiser.codebook().shape == (6, 2**bits)
    out = quantiser(weight)
    for channel in range(6):
        alone = LsqPlusQuantiser.for_weights(weight[channel], bits)
        assert torch.equal(alone(weight[channel]), out[channel])


def test_what_cannot_be_quantised_is_refused() -> None:
    with pytest.raises(WeightError, match="batch"):
        LsqPlusQuantiser.for_activations(torch.zeros(3, 3), bits=4, axis=0)
    with pytest.raises(WeightError, match="empty"):
        LsqPlusQuantiser.for_activations(torch.zeros(0, 3), bits=4)
