"""All LSQ quantisers at once, against each on its own."""

from __future__ import annotations

import copy

import pytest
import torch
from conftest import look_with
from torch import Tensor, nn
from waiting import NoWaiting

from pwfn import Config, compress
from pwfn.lab import baselines as methods
from pwfn.lab.quantisers import LsqQuantiser
from pwfn.lab.quantisers.together import LsqTogether, Part
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


def made(dtype: torch.dtype) -> tuple[Tensor, list[LsqQuantiser], list[Part]]:
    generator = torch.Generator().manual_seed(0)
    pieces = [torch.randn(shape, generator=generator, dtype=dtype) for shape, _, _ in SHAPES]
    pieces[1][:10] = 0.0
    quantisers = [
        LsqQuantiser.for_weights(piece, bits, axis)
        for piece, (_, bits, axis) in zip(pieces, SHAPES, strict=True)
    ]
    parts = [Part(q, piece.numel()) for q, piece in zip(quantisers, pieces, strict=True)]
    return torch.cat([piece.reshape(-1) for piece in pieces]), quantisers, parts


def one_by_one(vector: Tensor, quantisers: list[LsqQuantiser]) -> Tensor:
    sizes = [int(torch.tensor(shape).prod()) for shape, _, _ in SHAPES]
    pieces = vector.split(sizes)
    return torch.cat(
        [
            quantiser(piece.view(shape)).reshape(-1)
            for quantiser, piece, (shape, _, _) in zip(quantisers, pieces, SHAPES, strict=True)
        ]
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_values_and_gradients_are_those_of_each_on_its_own(dtype: torch.dtype) -> None:
    vector, quantisers, parts = made(dtype)
    factor = torch.randn(vector.shape, generator=torch.Generator().manual_seed(1), dtype=dtype)
    found = []
    for way in (lambda v: one_by_one(v, quantisers), LsqTogether(parts, CPU)):
        weights = vector.clone().requires_grad_()
        for quantiser in quantisers:
            quantiser.step.grad = None
        out = way(weights)
        (out * factor).sum().backward()
        found.append((out.detach(), weights.grad, [quantiser.step.grad for quantiser in quantisers]))
    (plain, by_weight, by_step), (together, weight_too, step_too) = found
    assert torch.equal(together, plain)
    assert weight_too is not None
    assert torch.equal(weight_too, by_weight)
    assert not torch.signbit(together[together == 0]).any()
    tolerance = 1e-5 if dtype == torch.float32 else 1e-12
    for one, other in zip(by_step, step_too, strict=True):
        assert one is not None
        assert other is not None
        assert one.shape == other.shape
        torch.testing.assert_close(other, one, rtol=tolerance, atol=tolerance * float(one.abs().max()))


def test_a_step_that_was_driven_below_zero_counts_as_the_smallest() -> None:
    vector, quantisers, parts = made(torch.float32)
    with torch.no_grad():
        quantisers[0].step.fill_(-1.0)
    assert torch.equal(LsqTogether(parts, CPU)(vector), one_by_one(vector, quantisers))


def test_only_what_is_asked_for_gets_a_gradient() -> None:
    vector, quantisers, parts = made(torch.float32)
    for quantiser in quantisers:
        quantiser.step.requires_grad_(False)
    weights = vector.clone().requires_grad_()
    LsqTogether(parts, CPU)(weights).sum().backward()
    assert weights.grad is not None
    assert all(quantiser.step.grad is None for quantiser in quantisers)


def test_a_step_of_training_waits_for_nothing() -> None:
    vector, _, parts = made(torch.float32)
    both = LsqTogether(parts, CPU)
    weights = vector.clone().requires_grad_()
    with NoWaiting():
        both(weights).sum().backward()


class Transposed(nn.Module):
    """A transposed convolution, whose output channels do not lie one after the other."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(1, 4, 3, padding=1)
        self.up = nn.ConvTranspose2d(4, 6, 2)
        self.last = nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.up(self.first(x)).mean((2, 3)))


NETWORKS = {
    "transformer": lambda: VisionTransformer(
        image_size=8, patch=4, width=12, depth=1, heads=3, classes=3, image_channels=1
    ),
    "transposed": Transposed,
}


@pytest.mark.parametrize("network", NETWORKS)
@pytest.mark.parametrize(
    ("name", "codebooks"),
    [("lsq", "layer"), ("lsq", "channel"), ("lsq+", "method"), ("q-vit", "head"), ("apot", "layer")],
)
def test_a_run_is_the_same_either_way(network: str, name: str, codebooks: str) -> None:
    """To rounding of the steps' gradients; where channels lie apart, or are APoT's, there is one way only."""
    if name == "q-vit" and network == "transposed":
        pytest.skip("Q-ViT needs attention")
    torch.manual_seed(0)
    model = NETWORKS[network]()
    data = [(torch.randn(16, 1, 8, 8), torch.arange(16) % 3) for _ in range(4)]
    found = []
    for fused in (False, True):
        changes = {"quantiser.codebooks": codebooks, "schedule.epochs": 1.0, "training.fused": fused}
        config = Config.preset("recommended", name).override(changes)
        net = methods.of(config)(model, config)
        net.begin(look_with(lambda module: module(data[0][0])))
        views = net.views()
        result = compress(model, data, config=config).compressed
        found.append((views, result.values()))
    (plain, by_one), (together, at_once) = found
    assert all(torch.equal(plain[key], together[key]) for key in plain)
    torch.testing.assert_close(at_once, by_one, rtol=1e-3, atol=1e-4)


def test_a_copy_has_steps_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    config = Config.preset("recommended", "lsq")
    net = methods.of(config)(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2)), config)
    before = {key: view.detach().clone() for key, view in net.views().items()}
    other = copy.deepcopy(net)
    with torch.no_grad():
        for parameter in other.get_submodule("quantisers").parameters():
            parameter.mul_(3)
    assert all(torch.equal(net.views()[key], before[key]) for key in before)
    assert not torch.equal(other.views()["0.weight"], before["0.weight"])
