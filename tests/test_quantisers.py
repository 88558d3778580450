"""What LSQ, LSQ+ and APoT have in common: nearest values, gradients, channels, files."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from waiting import NoWaiting

from pwfn.file.compressed import Compressed
from pwfn.file.format import load
from pwfn.lab.quantisers import ApotQuantiser, Codes, LsqQuantiser, apot, lsq, lsqplus
from pwfn.lab.quantisers.gradients import with_gradients
from pwfn.layout import Entry, Layout, untouched

Make = Callable[[Tensor, int], ApotQuantiser | LsqQuantiser]


def lsqplus_weights(weight: Tensor, bits: int, axis: int | None = None) -> LsqQuantiser:
    return LsqQuantiser(lsqplus.initial_step(weight, bits, axis), Codes.of(bits, signed=True), axis)


def codebook(quantiser: ApotQuantiser | LsqQuantiser, weight: Tensor | None = None) -> Tensor:
    """The values that the output can take, ascending, one row per channel."""
    if isinstance(quantiser, ApotQuantiser):
        levels = quantiser.levels
        levels = torch.cat((-levels.flip(0)[:-1], levels)) if quantiser.signed else levels
        values = levels * quantiser.alpha.detach().clamp(min=apot.SMALLEST_ALPHA)
        return values if weight is None else values * apot.normalised(weight)[1]
    step = quantiser.step.detach().clamp(min=lsq.SMALLEST_STEP).unsqueeze(-1)
    values = torch.arange(quantiser.codes.low, quantiser.codes.high + 1) * step
    return values if quantiser.offset is None else values + quantiser.offset.detach().unsqueeze(-1)


CASES: dict[str, tuple[Make, bool]] = {
    "lsq": (LsqQuantiser.for_weights, False),
    "lsq per channel": (lambda w, bits: LsqQuantiser.for_weights(w, bits, axis=0), True),
    "lsq+": (lsqplus_weights, False),
    "lsq+ per channel": (lambda w, bits: lsqplus_weights(w, bits, axis=0), True),
    "apot": (ApotQuantiser.for_weights, False),
}
"""How a quantiser of weights is made, and whether each channel has its own codebook."""


def normal(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=dtype)


@pytest.mark.parametrize("bits", [2, 3, 4, 8])
@pytest.mark.parametrize("case", CASES)
def test_a_weight_goes_to_the_nearest_value_of_the_codebook(case: str, bits: int) -> None:
    make, per_channel = CASES[case]
    weight = 0.02 * normal(6, 5, 3, 3, seed=bits) + 0.003
    quantiser = make(weight, bits)
    book = codebook(quantiser, weight)
    assert book.shape == (*((6,) if per_channel else ()), 2**bits - (case == "apot"))
    assert bool((book.diff() > 0).all())
    out = quantiser(weight)
    assert not torch.signbit(out[out == 0]).any()
    about = weight - weight.mean() if case == "apot" else weight  # APoT quantises weights without their mean
    for row, quantised, values in zip(
        about if per_channel else [about],
        out if per_channel else [out],
        book if per_channel else [book],
        strict=True,
    ):
        assert torch.isin(quantised, values).all()  # to the last bit
        best = (row.reshape(-1, 1) - values).abs().amin(1)
        torch.testing.assert_close((row - quantised).abs().reshape(-1), best, rtol=0, atol=1e-8)


SURROGATES = {
    "lsq": (True, False),
    "lsq unsigned": (False, False),
    "lsq+": (False, True),
    "apot": (True, False),
    "apot unsigned": (False, False),
}
"""Whether it is signed, and whether it has an offset."""


@pytest.mark.parametrize("bits", range(2, 9))
@pytest.mark.parametrize("case", SURROGATES)
def test_gradients_are_the_slopes_of_the_surrogate(case: str, bits: int) -> None:
    """With the rounding error r held, ``s (clip((x - beta) / s) + r) + beta`` is piecewise linear."""
    signed, has_offset = SURROGATES[case]
    low, high = Codes.of(bits, signed=signed)
    scale = 0.3
    if case.startswith("apot"):
        low, high, scale = -1 if signed else 0, 1, 1.7
    x = (normal(1025, seed=bits, dtype=torch.float64) * high * scale * 1.3).requires_grad_()
    s = torch.tensor(scale, dtype=torch.float64, requires_grad=True)
    beta = torch.tensor(-0.4 if has_offset else 0.0, dtype=torch.float64, requires_grad=has_offset)
    if case.startswith("apot"):
        out = apot.quantise(x, s, apot.levels(bits, signed=signed), signed)
    else:
        out = lsq.quantise(x, s, Codes(low, high), offset=beta if has_offset else None)
    r = ((out - beta) / s - ((x - beta) / s).clamp(low, high)).detach()
    assert r.abs().max() <= 0.5 + 1e-9

    def surrogate(x: Tensor, s: Tensor, beta: Tensor) -> Tensor:
        return s * (((x - beta) / s).clamp(low, high) + r) + beta

    factor = normal(1025, seed=99, dtype=torch.float64)
    inputs = [x, s, beta]
    found = torch.autograd.grad((out * factor).sum(), inputs[: 2 + has_offset])
    h = 1e-6
    for i, gradient in enumerate(found):
        up, down = ([p.detach() + sign * h * (i == j) for j, p in enumerate(inputs)] for sign in (1, -1))
        slope = (surrogate(*up) - surrogate(*down)) / (2 * h) * factor
        torch.testing.assert_close(gradient, slope if i == 0 else slope.sum(), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("axis", [0, 1, -1])
@pytest.mark.parametrize("has_offset", [False, True])
def test_per_channel_is_per_tensor_on_each_channel(axis: int, has_offset: bool) -> None:
    codes, x = Codes.of(3, signed=True), (normal(3, 4, 5) * normal(3, 4, 5, seed=1).exp()).requires_grad_()
    count = x.shape[axis]
    step = (normal(count, seed=3).abs() + 0.1).requires_grad_()
    offset = normal(count, seed=4).requires_grad_() if has_offset else None
    factor = normal(3, 4, 5, seed=2)
    inputs = [x, step] if offset is None else [x, step, offset]
    out = lsq.quantise(x, step, codes, axis, 0.7, offset)
    by_x, *others = torch.autograd.grad((out * factor).sum(), inputs)
    for i in range(count):
        part = [p.detach()[i].requires_grad_() for p in inputs[1:]]
        piece = x.detach().select(axis, i).requires_grad_()
        alone = lsq.quantise(piece, part[0], codes, None, 0.7, part[1] if has_offset else None)
        assert torch.equal(alone, out.select(axis, i))
        its_x, *its_others = torch.autograd.grad((alone * factor.select(axis, i)).sum(), [piece, *part])
        assert torch.equal(its_x, by_x.select(axis, i))
        for one, channels in zip(its_others, others, strict=True):
            torch.testing.assert_close(one, channels[i])  # summed in another order


def test_gradients_go_to_those_that_share_them_and_to_no_others() -> None:
    value = normal(3, 4)
    by_x, by_row, by_all = (normal(3, 4, seed=seed) for seed in (1, 2, 3))
    x, row = torch.zeros(3, 4, requires_grad=True), torch.zeros(3, 1, requires_grad=True)
    constant = torch.tensor(math.nan)  # values are not used
    out = with_gradients(value, (x, by_x), (row, by_row), (constant, by_all))
    assert torch.equal(out, value)
    out.backward(torch.full((3, 4), 2.0))
    torch.testing.assert_close(x.grad, 2 * by_x, rtol=0, atol=0)
    torch.testing.assert_close(row.grad, 2 * by_row.sum(1, keepdim=True))
    assert constant.grad is None
    with torch.no_grad():
        assert not with_gradients(value, (x, by_x)).requires_grad


def test_the_watch_over_waiting_sees_it() -> None:
    x = normal(3)
    for action in (lambda: float(x.sum()), lambda: x[x > 0], lambda: bool((x > 0).all()), x.nonzero):
        with NoWaiting(), pytest.raises(AssertionError):
            action()


@pytest.mark.parametrize("case", CASES)
def test_no_step_waits_for_the_device(case: str) -> None:
    weight = normal(6, 5, 3, 3).requires_grad_()
    quantiser = CASES[case][0](weight, 4)
    with NoWaiting():
        quantiser(weight).square().sum().backward()
    assert weight.grad is not None
    assert all(p.grad is not None and p.grad.shape == p.shape for p in quantiser.parameters())


@pytest.mark.parametrize("bits", [2, 8])
@pytest.mark.parametrize("case", CASES)
def test_quantised_network_is_saved_and_reloaded_bit_equal(case: str, bits: int, tmp_path: Path) -> None:
    make, per_channel = CASES[case]
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 8, 3, bias=False), nn.BatchNorm2d(8), nn.Conv2d(8, 16, 3, bias=False))
    layout = Layout.of(model, include=["0.weight", "2.weight"])
    weights = layout.views(layout.gather(model))
    with torch.no_grad():
        quantised = {name: make(weight, bits)(weight) for name, weight in weights.items()}
    values = torch.cat([quantised[entry.name].reshape(-1) for entry in layout.entries])

    def divide(entry: Entry) -> tuple[int, int]:
        return 0, entry.shape[0] if per_channel else 1

    compressed = Compressed.of(layout, values, None, untouched(model, layout), divide=divide)
    assert len(compressed.codebooks) == (24 if per_channel else 2)
    assert max(len(book) for book in compressed.codebooks) <= 2**bits
    path = tmp_path / "model.pwfn"
    compressed.save(path, posterior="none")
    again = load(path).dense_state_dict()
    for name, tensor in quantised.items():
        assert torch.equal(again[name], tensor)
