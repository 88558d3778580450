"""All LSQ quantisers at once, against each on its own."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn
from waiting import NoWaiting

from pwfn import Config, compress
from pwfn.lab.baselines.quantised import Quantised
from pwfn.lab.quantisers import ApotQuantiser, LsqQuantiser, PartsQuantiser
from pwfn.lab.quantisers.lsq import LsqTogether, Part, parts_of
from pwfn.zoo.models import VisionTransformer

CPU = torch.device("cpu")
SHAPES: list[tuple[tuple[int, ...], int, int | None]] = [
    ((16, 3, 3, 3), 8, None),
    ((127,), 4, None),
    ((5, 7), 4, 0),
    ((1, 1), 2, 0),
    ((64, 33), 3, 0),
    ((10, 1025), 8, None),
]
"""Shape, bits and axis of each quantiser's weights."""


def made(dtype: torch.dtype = torch.float32) -> tuple[Tensor, list[LsqQuantiser], LsqTogether]:
    generator = torch.Generator().manual_seed(0)
    pieces = [torch.randn(shape, generator=generator, dtype=dtype) for shape, _, _ in SHAPES]
    pieces[1][:10] = 0.0
    quantisers = [
        LsqQuantiser.for_weights(piece, bits, axis)
        for piece, (_, bits, axis) in zip(pieces, SHAPES, strict=True)
    ]
    parts = [Part(q, piece.numel()) for q, piece in zip(quantisers, pieces, strict=True)]
    vector = torch.cat([piece.reshape(-1) for piece in pieces])
    return vector.requires_grad_(), quantisers, LsqTogether(parts, CPU)


def one_by_one(vector: Tensor, quantisers: list[LsqQuantiser]) -> Tensor:
    pieces = vector.split([torch.Size(shape).numel() for shape, _, _ in SHAPES])
    outs = [q(p.view(shape)) for q, p, (shape, _, _) in zip(quantisers, pieces, SHAPES, strict=True)]
    return torch.cat([out.reshape(-1) for out in outs])


@pytest.mark.parametrize("first_step", [None, -1.0])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_values_and_gradients_are_those_of_each_on_its_own(
    dtype: torch.dtype, first_step: float | None
) -> None:
    vector, quantisers, together = made(dtype)
    if first_step is not None:  # as training may leave it
        quantisers[0].step.data.fill_(first_step)
    factor = torch.randn(vector.shape, generator=torch.Generator().manual_seed(1), dtype=dtype)
    leaves = [vector, *(quantiser.step for quantiser in quantisers)]
    plain, out = one_by_one(vector, quantisers), together(vector)
    assert torch.equal(out, plain)
    assert not torch.signbit(out[out == 0]).any()
    by_weight, *by_step = torch.autograd.grad((plain * factor).sum(), leaves)
    weight_too, *step_too = torch.autograd.grad((out * factor).sum(), leaves)
    assert torch.equal(weight_too, by_weight)
    tolerance = 1e-5 if dtype == torch.float32 else 1e-12
    for one, other in zip(by_step, step_too, strict=True):  # summed in another order
        torch.testing.assert_close(other, one, rtol=tolerance, atol=tolerance * float(one.abs().max()))


def test_only_what_is_asked_for_gets_a_gradient_and_nothing_waits() -> None:
    vector, quantisers, together = made()
    quantisers[0].step.requires_grad_(False)
    with NoWaiting():
        together(vector).sum().backward()
    assert vector.grad is not None
    assert [quantiser.step.grad is None for quantiser in quantisers] == [True] + [False] * 5
    for quantiser in quantisers:
        quantiser.step.requires_grad_(False)
        quantiser.step.grad = None
    together(vector).sum().backward()
    assert all(quantiser.step.grad is None for quantiser in quantisers)


def test_a_copy_has_steps_of_its_own() -> None:
    vector, quantisers, together = made()
    before = together(vector)
    others, copied = copy.deepcopy((quantisers, together))
    for quantiser in others:
        quantiser.step.data.mul_(3)
    assert torch.equal(together(vector), before)
    assert torch.equal(copied(vector), one_by_one(vector, others))


def test_only_lsq_with_contiguous_channels_can_be_computed_at_once() -> None:
    weight = torch.randn(4, 6)
    heads = PartsQuantiser(weight, 3, 0, 2)
    found = parts_of([LsqQuantiser.for_weights(weight, 3), heads], [24, 24])
    assert found is not None
    assert found[1] == (heads.lsq, 24)
    assert parts_of([LsqQuantiser.for_weights(weight, 3, axis=1)], [24]) is None
    assert parts_of([ApotQuantiser.for_weights(weight, 3)], [24]) is None


class Transposed(nn.Module):
    """A transposed convolution, whose output channels are not contiguous."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(1, 4, 3, padding=1)
        self.up = nn.ConvTranspose2d(4, 6, 2)
        self.last = nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.up(self.first(x)).mean((2, 3)))


def transformer() -> nn.Module:
    return VisionTransformer(image_size=8, patch=4, width=12, depth=1, heads=3, classes=3, image_channels=1)


@pytest.mark.parametrize(
    ("network", "name", "codebooks"),
    [
        (transformer, "lsq", "layer"),
        (transformer, "lsq+", "method"),
        (transformer, "q-vit", "head"),
        (transformer, "apot", "layer"),
        (Transposed, "lsq", "layer"),
        (Transposed, "lsq", "channel"),
    ],
)
def test_a_run_is_the_same_either_way(
    network: type, name: str, codebooks: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Up to rounding of the steps' gradients."""
    torch.manual_seed(0)
    model = network()
    data = [(torch.randn(16, 1, 8, 8), torch.arange(16) % 3) for _ in range(4)]
    found = []
    changes = {"options.codebooks": codebooks, "schedule.epochs_per_round": [1.0]}
    config = Config.preset("recommended", name).override(changes)
    for _ in range(2):
        found.append(compress(model, data, config=config).compressed.values())
        monkeypatch.setattr(Quantised, "_together", lambda net: None)
    torch.testing.assert_close(found[1], found[0], rtol=1e-3, atol=1e-4)
