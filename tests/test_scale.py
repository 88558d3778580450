"""Filters scaled before BatchNorm: the network stays the same function, with the factors of theory."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from cases import batchnorm_classifier, numbers
from torch import Tensor, nn

from pwfn.bayes.batches import Batch
from pwfn.errors import DataError
from pwfn.fixing.conditioning import scale
from pwfn.fixing.conditioning.columns import inverse_factor
from pwfn.fixing.conditioning.scale import conditional_square, even_layers, gain_bits, scale_filters
from pwfn.layout import Layout
from pwfn.zoo.models import create


@pytest.fixture(autouse=True)
def any_gain(monkeypatch: pytest.MonkeyPatch) -> None:
    """Networks with random weights have similar filters: scale them all the same."""
    monkeypatch.setattr(scale, "SMALLEST_GAIN", 0.0)


def drawn(seed: int = 0) -> Callable[[Any], Tensor]:
    """The log-likelihood of labels drawn from the network's own distribution."""
    generator = torch.Generator().manual_seed(seed)

    def score(output: Any) -> Tensor:
        logits = output[0] if isinstance(output, tuple) else output
        labels = torch.multinomial(logits.detach().softmax(1), 1, generator=generator)
        return logits.log_softmax(1).gather(1, labels).sum()

    return score


def batches_of(*inputs: Tensor) -> list[Batch]:
    return [Batch((x,), {}, None) for x in inputs]


def lively(model: Any) -> Any:
    """In evaluation mode, with statistics and scales unlike those of a new BatchNorm layer."""
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for module in model.modules():
            if isinstance(getattr(module, "running_mean", None), Tensor):
                module.running_mean.normal_(generator=generator)
                module.running_var.uniform_(0.1, 3, generator=generator)
                if module.affine:
                    module.weight.uniform_(0.2, 2, generator=generator)
    return model.eval()


def scaled(model: nn.Module, inputs: Tensor) -> tuple[nn.Module, int]:
    """A copy with scaled filters, and their number."""
    own = copy.deepcopy(model)
    return own, scale_filters(own, Layout.of(own), batches_of(inputs), drawn())


def relative(output: Tensor, before: Tensor) -> float:
    return float(((output - before).abs().max() / before.abs().max()).detach())


def changed(model: nn.Module, before: nn.Module) -> set[str]:
    state = before.state_dict()
    return {name for name, tensor in model.state_dict().items() if not torch.equal(tensor, state[name])}


# The same function

LAYERS: dict[str, Callable[[], tuple[nn.Module, Any, tuple[int, ...]]]] = {
    "conv": lambda: (nn.Conv2d(3, 6, 3, bias=False), nn.BatchNorm2d(6), (3, 7, 7)),
    "conv, bias": lambda: (nn.Conv2d(3, 6, 3, 2, padding=1), nn.BatchNorm2d(6, eps=0.1), (3, 7, 7)),
    "depthwise": lambda: (nn.Conv2d(4, 8, 3, groups=4), nn.BatchNorm2d(8), (4, 5, 5)),
    "grouped": lambda: (nn.Conv2d(4, 6, 3, groups=2, bias=False), nn.BatchNorm2d(6), (4, 5, 5)),
    "transposed": lambda: (nn.ConvTranspose2d(4, 6, 3, 2, groups=2), nn.BatchNorm2d(6), (4, 3, 3)),
    "not affine": lambda: (nn.Conv2d(3, 6, 1), nn.BatchNorm2d(6, affine=False), (3, 4, 4)),
    "1d": lambda: (nn.Conv1d(3, 5, 3), nn.BatchNorm1d(5), (3, 9)),
    "3d": lambda: (nn.Conv3d(2, 5, 3), nn.BatchNorm3d(5), (2, 5, 4, 4)),
    "linear": lambda: (nn.Linear(6, 5, bias=False), nn.BatchNorm1d(5), (6,)),
    "linear, bias": lambda: (nn.Linear(6, 5), nn.BatchNorm1d(5), (6,)),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("kind", [*LAYERS, "channels last"])
def test_a_scaled_layer_is_the_same_function(kind: str, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    layer, norm, shape = LAYERS["conv, bias" if kind == "channels last" else kind]()
    inputs = numbers(16, *shape).to(dtype)
    outputs = layer(inputs.float())[0].numel()
    model = lively(nn.Sequential(layer, norm, nn.ReLU(), nn.Flatten(), nn.Linear(outputs, 4))).to(dtype)
    if kind == "channels last":
        model = model.to(memory_format=torch.channels_last)
    own, count = scaled(model, inputs)
    assert count == norm.num_features
    fresh = numbers(8, *shape, seed=5).to(dtype)
    assert relative(own(fresh), model(fresh)) < (1e-5 if dtype == torch.float32 else 1e-12)
    expected = {"0.weight", "0.bias", "1.running_mean", "1.running_var"}
    assert changed(own, model) == expected & set(model.state_dict())


@pytest.mark.parametrize(("name", "shape"), [("digits_resnet", (1, 8, 8)), ("cifar_resnet20", (3, 32, 32))])
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.float64, 1e-12)])
def test_a_scaled_residual_network_is_the_same_function(
    name: str, shape: tuple[int, ...], dtype: torch.dtype, tolerance: float
) -> None:
    torch.manual_seed(0)
    model = lively(create(name)).to(dtype)
    inputs = numbers(4, *shape).to(dtype)
    own, count = scaled(model, inputs)
    assert count == sum(m.out_channels for m in model.modules() if isinstance(m, nn.Conv2d))
    assert relative(own(inputs), model(inputs)) < tolerance


# What is not scaled


class Convolutions(nn.Module):
    """Two convolutions with BatchNorm; the first one in a way that does not allow to scale it."""

    def __init__(self, way: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.way = way
        self.first = nn.Conv2d(4, 4, 3, padding=1)
        self.norm = nn.BatchNorm2d(4)
        self.other = nn.BatchNorm2d(4)
        self.second = nn.Conv2d(4, 6, 3)
        self.second_norm = nn.BatchNorm2d(6)
        self.linear = nn.Linear(6, 3)
        if way == "tied":
            self.also = nn.Conv2d(4, 4, 3, padding=1)
            self.also.weight = self.first.weight
        if way == "computed":
            nn.utils.parametrizations.weight_norm(self.first)

    def forward(self, x: Tensor) -> Any:
        z = self.first(x)
        out = self.norm(z)
        if self.way == "added":
            out = out + z
        if self.way == "viewed":
            out = out * z.flatten(2).mean(2)[..., None, None]
        if self.way == "normalised twice":
            out = out + self.other(z)
        if self.way == "called twice":
            out = out + self.other(self.first(out))
        if self.way == "tied":
            out = out + self.other(self.also(out))
        if self.way == "normalises others":
            out = out + self.norm(x)
        if self.way == "not alone":
            out = self.norm(self.first(x) * 1.0)
        if self.way == "sliced":
            out = self.norm(
                torch.cat([x[:, :2], nn.functional.conv2d(x, self.first.weight[:2], padding=1)], 1)
            )
        logits = self.linear(self.second_norm(self.second(out.relu())).relu().mean((2, 3)))
        return (logits, {"features": z}) if self.way == "returned" else logits


WAYS = (
    "added",
    "viewed",
    "normalised twice",
    "called twice",
    "tied",
    "normalises others",
    "not alone",
    "returned",
)


@pytest.mark.parametrize("way", [*WAYS, "sliced", "computed"])
def test_filters_with_other_uses_are_left_alone_and_the_rest_is_scaled(way: str) -> None:
    model = lively(Convolutions(way))
    own, count = scaled(model, numbers(8, 4, 6, 6))
    assert count == 6
    statistics = {"second_norm.running_mean", "second_norm.running_var"}
    assert changed(own, model) == {"second.weight", "second.bias", *statistics}


@pytest.mark.parametrize("excluded", ["first.weight", "first.bias"])
def test_layers_that_are_not_compressed_are_left_alone(excluded: str) -> None:
    model = lively(Convolutions("plain"))
    inputs = batches_of(numbers(8, 4, 6, 6))
    own = copy.deepcopy(model)
    assert scale_filters(own, Layout.of(own), inputs, drawn()) == 10
    own = copy.deepcopy(model)
    assert scale_filters(own, Layout.of(own, exclude=[excluded]), inputs, drawn()) == 6
    assert not any(name.startswith(("first", "norm")) for name in changed(own, model))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_everything_is_undone_if_the_outputs_would_differ(dtype: torch.dtype) -> None:
    class Sums(nn.Sequential):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x) + self[0].weight.square().sum(1)[:3]  # no operation of a layer

    torch.manual_seed(0)
    model = lively(Sums(nn.Linear(6, 5), nn.BatchNorm1d(5), nn.ReLU(), nn.Linear(5, 3))).to(dtype)
    own, count = scaled(model, numbers(16, 6).to(dtype))
    assert count == 0
    assert changed(own, model) == set()


def test_networks_without_batchnorm_or_gradients_or_inputs_are_left_alone() -> None:
    plain = nn.Sequential(nn.Linear(4, 5), nn.ReLU(), nn.Linear(5, 3))
    assert scaled(plain, numbers(8, 4))[1] == 0
    model = batchnorm_classifier().eval()
    layout, inputs = Layout.of(model), batches_of(numbers(8, 4))
    assert scale_filters(model, layout, inputs, lambda output: output.detach().sum()) == 0
    assert scale_filters(model, layout, inputs, lambda output: 0 * output.sum()) == 0
    assert scale_filters(model, layout, [], drawn()) == 0
    assert scale_filters(model, layout, batches_of(torch.full((8, 4), math.nan)), lambda o: o.sum()) == 0
    assert changed(model, batchnorm_classifier()) == set()


def test_similar_filters_are_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    model = nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6)).eval()
    steep = torch.tensor([1.0, 2, 1, 2, 1, 2])
    inputs = batches_of(numbers(64, 4))
    assert scale_filters(model, Layout.of(model), inputs, lambda output: (output * steep).sum()) == 0
    assert scale_filters(model, Layout.of(model), inputs, lambda output: (output * steep**6).sum()) == 6


# The factors


class Branches(nn.Module):
    """A linear layer of 3 inputs and a grouped convolution of 4, each with BatchNorm; the sum of all."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.linear, self.linear_norm = nn.Linear(3, 2), nn.BatchNorm1d(2)
        self.conv, self.conv_norm = nn.Conv1d(4, 4, 1, groups=2), nn.BatchNorm1d(4)

    def forward(self, x: Tensor, image: Tensor) -> Tensor:
        return self.linear_norm(self.linear(x)).sum() + self.conv_norm(self.conv(image)).sum()


def test_the_factors_are_those_computed_by_hand() -> None:
    model = lively(Branches()).double()
    # Inputs without correlation: conditioning changes nothing, and damping adds 1 % to all squares.
    x = 3 * torch.tensor([[1.0, 1, 1], [1, -1, -1], [-1, 1, -1], [-1, -1, 1]]).double()
    image = torch.cat([torch.eye(2), -torch.eye(2)]).double()[:, :, None].repeat(1, 2, 5)
    image[:, 2:] *= 2
    inputs = [Batch((x, image), {}, None)]
    slopes = {
        name: (norm.weight / (norm.running_var + norm.eps).sqrt()).detach()
        for name, norm in (("linear", model.linear_norm), ("conv", model.conv_norm))
    }
    h = {
        "linear": slopes["linear"].square() * 9 * 1.01,
        "conv": 5 * slopes["conv"].square() * torch.tensor([0.5, 0.5, 2, 2]) * 1.01,  # 5 positions
    }
    middle = (3 * h["linear"].log().sum() + 2 * h["conv"].log().sum()) / (3 * 2 + 2 * 4)
    before = copy.deepcopy(model)
    assert scale_filters(model, Layout.of(model), inputs, lambda output: output, 0.3) == 6
    for name in ("linear", "conv"):
        factor = torch.exp(0.3 * (h[name].log() - middle))
        layer, old = getattr(model, name), getattr(before, name)
        norm, old_norm = getattr(model, f"{name}_norm"), getattr(before, f"{name}_norm")
        shape = (-1, *[1] * (layer.weight.dim() - 1))
        torch.testing.assert_close(layer.weight, old.weight * factor.view(shape), rtol=1e-6, atol=0)
        torch.testing.assert_close(layer.bias, old.bias * factor, rtol=1e-6, atol=0)
        torch.testing.assert_close(norm.running_mean, old_norm.running_mean * factor, rtol=1e-6, atol=0)
        variance = (old_norm.running_var + old_norm.eps) * factor**2 - old_norm.eps
        torch.testing.assert_close(norm.running_var, variance, rtol=1e-6, atol=0)


class WithHead(Branches):
    """The same, beside layers that keep their scale: 2 rows of 3 weights and 2 groups of 1 row of 2."""

    def __init__(self) -> None:
        super().__init__()
        self.head, self.tail = nn.Linear(3, 2), nn.Conv1d(4, 2, 1, groups=2, bias=False)

    def forward(self, x: Tensor, image: Tensor) -> Tensor:
        free = self.head(x).mul_(16).sum() + self.tail(image).relu_().sum()  # both are changed in place
        return super().forward(x, image) + free


@pytest.mark.parametrize("power", [0.0, 0.3])
def test_where_layers_keep_their_scale_the_others_cost_as_much_as_they_do(power: float) -> None:
    model = lively(WithHead()).double()
    with torch.no_grad():
        model.tail.weight.fill_(1.0)
    x = 3 * torch.tensor([[1.0, 1, 1], [1, -1, -1], [-1, 1, -1], [-1, -1, 1]]).double()
    image = torch.eye(2).double()[[0, 1, 0, 1], :, None].repeat(1, 2, 5)  # relu_ lets all of it through
    image[:, 2:] *= 2
    before = copy.deepcopy(model)
    # By itself, without the layers that keep their scale: the same factors but for a common one.
    alone = lively(Branches()).double()
    inputs = [Batch((x, image), {}, None)]
    scale_filters(alone, Layout.of(alone), inputs, lambda output: output, power)
    assert scale_filters(model, Layout.of(model), inputs, lambda output: output, power) == 6
    common = float((model.linear.weight / alone.linear.weight).detach()[0, 0])
    for name in ("linear", "conv"):
        own, other = getattr(model, name).weight, getattr(alone, name).weight
        torch.testing.assert_close(own, common * other, rtol=1e-6, atol=0)
    for name in ("head", "tail"):
        assert torch.equal(getattr(model, name).weight, getattr(before, name).weight)
    # The slope of the sum at an output is that of its BatchNorm layer: scaled, it has become smaller.
    slopes = {
        name: (norm.weight / (norm.running_var + norm.eps).sqrt()).detach().square()
        for name, norm in (("linear", model.linear_norm), ("conv", model.conv_norm))
    }
    squares = conditional_square(
        image[:, :2, 0].T @ image[:, :2, 0] / 4 * torch.tensor([1.0, 4])[:, None, None]
    )
    costs = (
        3 * slopes["linear"].sum() * 9 * 1.01 + 2 * 5 * (slopes["conv"] * squares.repeat_interleave(2)).sum()
    )
    kept = 3 * 2 * 16**2 * 9 * 1.01 + 2 * 5 * squares.sum()
    assert common != pytest.approx(1, rel=0.1)
    assert float(costs / (3 * 2 + 2 * 4)) == pytest.approx(float(kept / (3 * 2 + 2 * 2)), rel=1e-6)


def linear_score(output: Tensor) -> Tensor:
    return (output * torch.linspace(1, 2, output.shape[1], dtype=output.dtype)).sum()


def test_the_examples_count_and_not_how_they_are_batched() -> None:
    model = batchnorm_classifier().double().eval()
    inputs = numbers(24, 4).double()
    once, parts = copy.deepcopy(model), copy.deepcopy(model)
    scale_filters(once, Layout.of(model), batches_of(inputs), linear_score)
    scale_filters(parts, Layout.of(model), batches_of(inputs[:3], inputs[3:8], inputs[8:]), linear_score)
    assert changed(once, model)
    for one, other in zip(once.state_dict().values(), parts.state_dict().values(), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-6, atol=0)


def test_with_power_one_half_the_scale_that_a_filter_had_does_not_matter() -> None:
    model = batchnorm_classifier().double().eval()
    other = copy.deepcopy(model)
    factor = torch.linspace(0.5, 3, 8).double()
    with torch.no_grad():
        for layer, norm in ((other[0], other[1]), (other[4], other[5])):
            layer.weight *= factor[:, None]
            layer.bias *= factor
            norm.running_mean *= factor
            norm.running_var.copy_((norm.running_var + norm.eps) * factor**2 - norm.eps)
    ends = []
    for start in (model, other):
        assert (
            scale_filters(start, Layout.of(start), batches_of(numbers(32, 4).double()), linear_score, 0.5)
            == 16
        )
        ends.append(start[0].weight / start[0].weight.norm())  # a factor common to all layers is free
    torch.testing.assert_close(*ends, rtol=1e-5, atol=0)


def test_dead_and_extreme_filters_stay_within_bounds() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 5, bias=False), nn.BatchNorm1d(5, eps=1e-3)).double().eval()
    model[1].weight.data = torch.tensor([0.0, 1e-12, 1.0, 1e12, 0.5]).double()
    model[1].running_var.copy_(torch.tensor([1.0, 1.0, 1.0, 1.0, 1e-8]))
    before, inputs = copy.deepcopy(model), numbers(32, 6).double()
    assert scale_filters(model, Layout.of(model), batches_of(inputs), torch.sum, 0.5) == 5
    factor = (model[0].weight / before[0].weight).mean(1)
    assert factor[[0, 1, 3]].tolist() == [1 / 16, 1 / 16, 16]  # the first has no curvature
    assert bool((model[1].running_var >= 0).all())
    torch.testing.assert_close(model(inputs), before(inputs), rtol=1e-6, atol=0)


@pytest.mark.parametrize("name", ["cifar_resnet20", "digits_resnet"])
@pytest.mark.parametrize("power", [0.5, 1.0])
def test_even_layers_have_one_size_and_compute_the_same(name: str, power: float) -> None:
    torch.manual_seed(0)
    model = lively(create(name, classes=10))
    convolutions = [module for module in model.modules() if isinstance(module, nn.Conv2d)]
    with torch.no_grad():
        for number, layer in enumerate(convolutions):
            layer.weight.mul_(4.0 ** (number % 3))
    x = torch.randn(4, *(3, 32, 32) if name.startswith("cifar") else (1, 8, 8))
    sizes = [float(layer.weight.detach().square().mean().sqrt()) for layer in convolutions]
    before, own = model(x), copy.deepcopy(model)
    filters = even_layers(own, Layout.of(own), batches_of(x)[0], power)
    assert filters == sum(len(layer.weight) for layer in convolutions)
    assert relative(own(x), before) < 1e-4
    now = [m.weight for m in own.modules() if isinstance(m, nn.Conv2d)]
    ratios = [math.log(float(w.detach().square().mean().sqrt())) for w in now]
    logs = [math.log(size) for size in sizes]
    assert max(ratios) - min(ratios) == pytest.approx((1 - power) * (max(logs) - min(logs)), abs=1e-4)


def test_conditional_squares_are_those_of_the_sweep_over_columns() -> None:
    x = numbers(3, 50, 7).double() + numbers(3, 50, 1, seed=2).double()
    moments = x.mT @ x / 50
    factor = inverse_factor(moments)
    expected = 1 / factor.diagonal(dim1=-2, dim2=-1).square()
    torch.testing.assert_close(conditional_square(moments), expected.mean(-1))


def test_the_gain_is_that_of_means_and_has_no_unit() -> None:
    h = [numbers(5).exp(), numbers(3, seed=2).exp()]
    each = torch.cat([h[0].repeat_interleave(4), h[1].repeat_interleave(9)]).double()
    expected = 0.5 * float(each.mean().log2() - each.log2().mean())
    assert gain_bits(h, [4, 9]) == pytest.approx(expected)
    assert gain_bits([7 * part for part in h], [4, 9]) == pytest.approx(expected)
    assert gain_bits([torch.full((4,), 3.0)], [2]) == pytest.approx(0, abs=1e-12)
    assert gain_bits([torch.zeros(4)], [2]) == -math.inf


# The model is left as it was


def test_the_same_seed_gives_the_same_bits() -> None:
    model = batchnorm_classifier().eval()
    first, second = (scaled(model, numbers(32, 4))[0] for _ in range(2))
    assert changed(first, second) == set()
    assert changed(first, model)


def test_flags_gradients_modes_and_hooks_stay_as_they_were() -> None:
    model = batchnorm_classifier().train()
    model[1].eval()
    model[1].weight.requires_grad_(False)
    model[4].weight.grad = torch.ones_like(model[4].weight)
    calls: list[int] = []
    model[4].register_forward_pre_hook(lambda module, args: calls.append(1))
    flags, modes = [p.requires_grad for p in model.parameters()], [m.training for m in model.modules()]
    hooks = [len(m._forward_pre_hooks) for m in model.modules()]
    kept = list(model.parameters())
    assert scale_filters(model, Layout.of(model), batches_of(numbers(32, 4)), drawn()) == 16
    assert [p.requires_grad for p in model.parameters()] == flags
    assert [m.training for m in model.modules()] == modes
    assert [len(m._forward_pre_hooks) for m in model.modules()] == hooks
    assert all(own is old for own, old in zip(model.parameters(), kept, strict=True))
    assert {name for name, p in model.named_parameters() if p.grad is not None} == {"4.weight"}
    assert bool((model[4].weight.grad == 1).all())
    copy.deepcopy(model)  # no tensor with a graph is left on it


def test_the_flags_are_restored_after_an_error() -> None:
    model = batchnorm_classifier()
    with pytest.raises(DataError):
        scale_filters(model, Layout.of(model), batches_of(numbers(32, 5)), drawn())
    assert all(p.requires_grad for p in model.parameters())
