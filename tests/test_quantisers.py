"""What all quantisers of weights have in common: one call, one protocol, nothing to wait for, their files."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from waiting import NoWaiting

from pwfn.file.compressed import Compressed
from pwfn.file.format import load, save
from pwfn.lab.quantisers import ApotQuantiser, LsqPlusQuantiser, LsqQuantiser, WeightQuantiser
from pwfn.layout import Entry, Layout, untouched

Make = Callable[[Tensor, int, int | None], nn.Module]
CASES: dict[str, tuple[Make, int | None]] = {
    "lsq": (LsqQuantiser.for_weights, None),
    "lsq per channel": (LsqQuantiser.for_weights, 0),
    "lsq+": (LsqPlusQuantiser.for_weights, None),
    "lsq+ per channel": (LsqPlusQuantiser.for_weights, 0),
    "apot": (ApotQuantiser.for_weights, None),
}
ACTIVATIONS: dict[str, Callable[[Tensor, int, int | None], nn.Module]] = {
    "lsq": LsqQuantiser.for_activations,
    "lsq+": LsqPlusQuantiser.for_activations,
    "apot": ApotQuantiser.for_activations,
}


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("bits", [2, 3, 4, 8])
@pytest.mark.parametrize("case", CASES)
def test_all_keep_the_protocol(case: str, bits: int) -> None:
    make, axis = CASES[case]
    weight = normal(6, 5, 3, 3)
    quantiser = make(weight, bits, axis)
    assert isinstance(quantiser, WeightQuantiser)
    book = quantiser.codebook(weight)
    assert book.shape[:-1] == (() if axis is None else (6,))
    pairs = [(weight, quantiser(weight))] if axis is None else zip(weight, quantiser(weight), strict=True)
    for (row, out), values in zip(pairs, book.reshape(1 if axis is None else 6, -1), strict=True):
        assert torch.isin(out, values).all()
        # Of all its values no weight has a nearer one (APoT's are those of the weights about their mean).
        about = row - weight.mean() if case == "apot" else row
        best = (about.reshape(-1, 1) - values).abs().amin(1)
        torch.testing.assert_close((about - out).abs().reshape(-1), best, rtol=0, atol=1e-6)


def test_the_watch_over_waiting_sees_it() -> None:
    x = normal(3)
    for action in (lambda: float(x.sum()), lambda: x[x > 0], lambda: bool((x > 0).all()), x.nonzero):
        with NoWaiting(), pytest.raises(AssertionError):
            action()


@pytest.mark.parametrize("case", CASES)
def test_no_step_with_weights_waits_for_the_device(case: str) -> None:
    make, axis = CASES[case]
    weight = normal(6, 5, 3, 3).requires_grad_()
    quantiser = make(weight, 4, axis)
    with NoWaiting():
        quantiser(weight).square().sum().backward()
    assert weight.grad is not None
    assert all(p.grad is not None and p.grad.shape == p.shape for p in quantiser.parameters())


@pytest.mark.parametrize("case", ACTIVATIONS)
def test_no_step_with_activations_waits_for_the_device(case: str) -> None:
    batch = normal(6, 5, 3, 3).requires_grad_()
    quantiser = ACTIVATIONS[case](batch.detach(), 4, None)
    with NoWaiting():
        quantiser(batch).square().sum().backward()
    assert batch.grad is not None
    assert all(p.grad is not None and p.grad.shape == p.shape for p in quantiser.parameters())


@pytest.mark.parametrize("bits", [2, 3, 4, 8])
@pytest.mark.parametrize("case", CASES)
def test_quantised_network_is_saved_and_reloaded_bit_equal(case: str, bits: int, tmp_path: Path) -> None:
    make, axis = CASES[case]
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 8, 3, bias=False), nn.BatchNorm2d(8), nn.Conv2d(8, 16, 3, bias=False))
    layout = Layout.of(model, include=["0.weight", "2.weight"])
    weights = layout.views(layout.gather(model))
    with torch.no_grad():
        quantised = {name: make(weight, bits, axis)(weight) for name, weight in weights.items()}
    values = torch.cat([quantised[entry.name].reshape(-1) for entry in layout.entries])

    def divide(entry: Entry) -> tuple[int, int]:
        return 0, 1 if axis is None else entry.shape[0]

    compressed = Compressed.of(layout, values, None, untouched(model, layout), divide=divide)
    assert len(compressed.codebooks) == (2 if axis is None else 24)
    assert max(len(book) for book in compressed.codebooks) <= 2**bits
    path = tmp_path / "model.pwfn"
    save(compressed, path, posterior="none")
    again = load(path).dense_state_dict()
    for name, tensor in quantised.items():
        assert torch.equal(again[name], tensor)
