"""Filters that are dropped from an ONNX graph: how many, and that the graph computes the same."""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
from onnx import ModelProto, numpy_helper
from torch import Tensor, nn

from pwfn import Compressed, Layout
from pwfn.export import from_file, to_onnx
from pwfn.export.onnx import _exported, optimised
from pwfn.export.prune import Pruned, prune
from pwfn.layout import untouched
from pwfn.zoo.models import digits_resnet


class Lambda(nn.Module):
    """Named layers, and a forward that is given."""

    def __init__(self, forward: Callable[[Any, Tensor], Tensor], **layers: nn.Module) -> None:
        super().__init__()
        for name, layer in layers.items():
            self.add_module(name, layer)
        self._forward = forward

    def forward(self, x: Tensor) -> Tensor:
        return self._forward(self, x)


def conv(inputs: int, outputs: int, *, size: int = 3, padding: int = 1, **options: Any) -> list[nn.Module]:
    options = {"bias": False, **options}
    return [nn.Conv2d(inputs, outputs, size, padding=padding, **options), nn.BatchNorm2d(outputs)]


def vgg() -> nn.Module:
    return nn.Sequential(
        *(*conv(4, 16), nn.ReLU(), nn.MaxPool2d(2), *conv(16, 24), nn.ReLU(), *conv(24, 24), nn.ReLU6()),
        *(nn.Conv2d(24, 24, 3), nn.LeakyReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten()),
        *(nn.Linear(24, 32), nn.GELU(), nn.Dropout(), nn.Linear(32, 10)),
    )


def flat() -> nn.Module:
    return nn.Sequential(
        *(nn.Conv2d(4, 12, 3, padding=1), nn.PReLU(12), nn.AvgPool2d(3, 2, padding=1), nn.Flatten()),
        *(nn.Linear(12 * 16, 24, bias=False), nn.BatchNorm1d(24), nn.SiLU(), nn.Linear(24, 16)),
    )


def residual() -> nn.Module:
    return Lambda(
        lambda m, x: m.head((m.block(y := m.stem(x)) + m.shortcut(y)).relu().mean((2, 3))),
        stem=nn.Sequential(*conv(4, 16), nn.ReLU()),
        block=nn.Sequential(*conv(16, 24, stride=2), nn.Hardswish(), *conv(24, 24)),
        shortcut=nn.Sequential(*conv(16, 24, size=1, padding=0, stride=2)),
        head=nn.Linear(24, 16),
    )


def depthwise() -> nn.Module:
    return nn.Sequential(
        *(*conv(4, 72, size=1, padding=0), nn.ReLU6(), *conv(72, 72, groups=72), nn.ReLU6()),
        *(*conv(72, 16, size=1, padding=0), *conv(16, 24), nn.ReLU(), *conv(24, 24, groups=24, padding=0)),
        *(nn.Tanh(), *conv(24, 16), nn.Flatten(), nn.Linear(16 * 36, 4)),
    )


def grouped() -> nn.Module:
    return nn.Sequential(*conv(4, 16), nn.ReLU(), *conv(16, 32, groups=2), nn.ReLU(), *conv(32, 8))


def joined() -> nn.Module:
    """A concatenation, a layer that is used twice, and a gate."""
    return Lambda(
        lambda m, x: m.last(torch.cat([m.twice(m.twice(m.a(x))), m.a(x) * m.gate(m.a(x))], 1)),
        a=nn.Sequential(*conv(4, 12), nn.ReLU()),
        twice=nn.Conv2d(12, 12, 3, padding=1),
        gate=nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Conv2d(12, 24, 1), nn.ReLU(), nn.Conv2d(24, 12, 1)),
        last=nn.Conv2d(24, 4, 3),
    )


def linear() -> nn.Module:
    return nn.Sequential(
        *(nn.Linear(16, 24), nn.ReLU(), nn.Linear(24, 32, bias=False), nn.Sigmoid()),
        *(nn.Linear(32, 24, bias=False), nn.ReLU(), nn.Linear(24, 16)),
    )


NETWORKS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "vgg": (vgg, (4, 8, 8)),
    "flat": (flat, (4, 7, 7)),
    "residual": (residual, (4, 8, 8)),
    "depthwise": (depthwise, (4, 8, 8)),
    "grouped": (grouped, (4, 6, 6)),
    "joined": (joined, (4, 6, 6)),
    "linear": (linear, (16,)),
    "tokens": (linear, (5, 16)),
}


def exported(model: nn.Module, shape: tuple[int, ...]) -> ModelProto:
    names = {name for name, _ in model.named_parameters()}
    return optimised(_exported(model.eval(), torch.zeros(2, *shape)), names)


@functools.cache
def network(name: str) -> bytes:
    """Exported once, with BatchNorm as it comes: its constants are shared between layers."""
    make, shape = NETWORKS[name]
    torch.manual_seed(0)
    return exported(make(), shape).SerializeToString()


def refill(proto: ModelProto, change: Callable[[str, np.ndarray], np.ndarray]) -> ModelProto:
    """Other numbers in the floating-point constants."""
    for item in proto.graph.initializer:
        if item.data_type == item.FLOAT and len(item.dims) > 0:
            array = change(item.name, numpy_helper.to_array(item).copy())
            item.CopyFrom(numpy_helper.from_array(array.astype(np.float32), item.name))
    return proto


def run(proto: ModelProto, batch: np.ndarray) -> np.ndarray:
    onnx.checker.check_model(proto, full_check=True)
    session = onnxruntime.InferenceSession(proto.SerializeToString(), providers=["CPUExecutionProvider"])
    return np.asarray(session.run(None, {"input": batch})[0])


def compare(proto: ModelProto, shape: tuple[int, ...], *, whole: bool = False, seed: int = 0) -> Pruned:
    """Prune, and run both; for whole numbers the outputs must be the same bits."""
    batch = np.random.default_rng(seed).normal(size=(3, *shape)).astype(np.float32)
    batch = (4 * batch).round() if whole else batch
    wanted = run(proto, batch)
    pruned = prune(proto)
    found = run(proto, batch)
    assert found.shape == wanted.shape
    limit = 0.0 if whole else 3e-6 * max(1.0, float(abs(wanted).max()))
    assert float(abs(found - wanted).max()) <= limit
    return pruned


@pytest.mark.parametrize("name", NETWORKS)
def test_random_zeros(name: str) -> None:
    """Zero filters, zero input channels, some biases zero: 50 times, and the function is kept."""
    dropped = []
    for seed in range(50):
        numbers = np.random.default_rng(seed)
        fraction = numbers.uniform(0, 1)

        def change(_: str, old: np.ndarray, numbers: Any = numbers, fraction: float = fraction) -> np.ndarray:
            if old.ndim > 1 and old.size > old.shape[0]:
                new = numbers.normal(size=old.shape) / np.sqrt(old[0].size)
                new[numbers.random(len(new)) < fraction] = 0
                new[:, numbers.random(new.shape[1]) < fraction / 2] = 0
                return new
            if old.min() > 0:
                return old * numbers.uniform(0.5, 1.5, old.shape)  # a variance may be among them
            return numbers.normal(size=old.shape) * (numbers.random(old.shape) < 0.7)

        proto = refill(ModelProto.FromString(network(name)), change)
        dropped.append(compare(proto, NETWORKS[name][1], seed=seed).dropped)
    assert (sum(map(bool, dropped)) > 25) == (name != "grouped")


# What is dropped, counted by hand


def two(middle: nn.Module, padding: int, *, bias: float = 0.0, zeros: int = 5) -> nn.Module:
    """Sixteen filters, the first of them zero with this bias, and a layer of small whole numbers after."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(4, 16, 3), middle, nn.Conv2d(16, 16, 3, padding=padding))
    with torch.no_grad():
        for layer in (model[0], model[2]):
            layer.weight.copy_(torch.randint(1, 4, layer.weight.shape))
            layer.bias.copy_(torch.randint(-2, 3, (16,)))
        model[0].weight[:zeros] = 0
        model[0].bias[:zeros] = bias
    return model


@pytest.mark.parametrize(
    ("middle", "padding", "bias", "dropped"),
    [
        (nn.ReLU(), 1, 0.0, 5),
        (nn.ReLU(), 1, -2.0, 5),
        (nn.ReLU(), 1, 2.0, 4),  # one stands for all
        (nn.ReLU(), 0, 2.0, 5),  # the bias takes it
        (nn.LeakyReLU(0.5), 1, -2.0, 4),
        (nn.MaxPool2d(2, padding=1), 0, 2.0, 5),
        (nn.AvgPool2d(2, padding=1), 0, 2.0, 0),  # not the same at the border
        (nn.AvgPool2d(2, padding=1), 0, 0.0, 5),
        (nn.AvgPool2d(2), 0, 2.0, 5),
        (nn.Softmax(1), 0, 0.0, 0),
        (nn.Softmax(1), 1, 0.0, 0),
    ],
)
def test_zero_filters(middle: nn.Module, padding: int, bias: float, dropped: int) -> None:
    whole = not isinstance(middle, nn.Softmax)
    proto = exported(two(middle, padding, bias=bias), (4, 8, 8))
    assert compare(proto, (4, 8, 8), whole=whole)[:2] == (32, dropped)


def test_one_constant_before_padding_stays() -> None:
    """Its border is zero and its inside is not: neither a bias nor another channel can stand for it."""
    assert compare(exported(two(nn.ReLU(), 1, bias=2.0, zeros=1), (4, 8, 8)), (4, 8, 8)).dropped == 0


def test_a_layer_keeps_one_filter() -> None:
    proto = exported(two(nn.ReLU(), 1, zeros=16), (4, 8, 8))
    assert compare(proto, (4, 8, 8), whole=True).dropped == 15


def test_filters_that_nothing_reads() -> None:
    model = two(nn.ReLU(), 1, zeros=0)
    with torch.no_grad():
        model[2].weight[:, 3:9] = 0
    assert compare(exported(model, (4, 8, 8)), (4, 8, 8), whole=True).dropped == 6


def test_zeros_make_more_zeros() -> None:
    """A filter that reads only zeros is zero; one that only dropped filters read is not read."""
    torch.manual_seed(0)
    model = nn.Sequential(
        *(layer for _ in range(4) for layer in (nn.Conv2d(16, 16, 3, bias=False), nn.ReLU()))
    )
    with torch.no_grad():
        model[2].weight[:8] = 0
        model[4].weight[:4, 8:] = 0  # these four read the zeros alone
        model[2].weight[8:, :2] = 0  # the first two before are read by the zeros alone
    assert compare(exported(model, (16, 10, 10)), (16, 10, 10)).dropped == 2 + 8 + 4


def test_of_a_residual_block_only_the_inside_shrinks() -> None:
    torch.manual_seed(0)
    model = residual()
    with torch.no_grad():
        for layer in (model.stem[0], model.block[0], model.block[3], model.shortcut[0]):
            layer.weight[:7] = 0
    # The stem is read by two layers, and nothing is added to it; the sum is left alone.
    assert compare(exported(model, (4, 8, 8)), (4, 8, 8)).dropped == 7 + 7


def test_what_is_left_alone() -> None:
    cases = {
        "a grouped convolution": grouped(),
        "a view that is not flat": Lambda(
            lambda m, x: m.b(m.a(x).reshape(-1, 16 * 18)), a=nn.Conv2d(4, 16, 3), b=nn.Linear(288, 16)
        ),
        "a shift that differs from place to place": Lambda(
            lambda m, x: m.b((m.a(x) + torch.arange(6.0)).relu()),
            a=nn.Conv2d(4, 16, 3),
            b=nn.Conv2d(16, 16, 3),
        ),
        "the output": nn.Conv2d(4, 16, 3),
        "a layer used twice": Lambda(
            lambda m, x: m.b(m.b(m.a(x))), a=nn.Conv2d(4, 16, 3), b=nn.Conv2d(16, 16, 3, padding=1)
        ),
        "tokens": Lambda(
            lambda m, x: m.b(m.a(x).flatten(2).transpose(1, 2)), a=nn.Conv2d(4, 16, 3), b=nn.Linear(16, 20)
        ),
    }
    for name, model in cases.items():
        with torch.no_grad():
            for layer in model.modules():
                if isinstance(layer, nn.Conv2d):
                    layer.weight[::2] = 0
        proto = exported(model, (4, 8, 8))
        assert compare(proto, (4, 8, 8)).dropped == 0, name


def test_filters_of_layers_with_the_same_weights_are_counted() -> None:
    """They stay, and count for each layer; two of the last layer but one go."""
    model = nn.Sequential(*(layer for _ in range(4) for layer in (nn.Linear(16, 16), nn.ReLU())))
    model[2].weight = model[0].weight
    with torch.no_grad():
        model[0].weight[:4], model[4].weight[:2], model[4].bias[:2] = 0, 0, 0
    assert compare(exported(model, (16,)), (16,))[:2] == (64, 2)


# As part of an export


def zeroed(model: nn.Module, fraction: float) -> Compressed:
    """Rounded to 32 steps, with filters zero at random and the shifts of BatchNorm not."""
    layout = Layout.of(model)
    with torch.no_grad():
        for layer in model.modules():
            if isinstance(layer, nn.Conv2d):
                layer.weight[torch.rand(len(layer.weight)) < fraction] = 0
            elif isinstance(layer, nn.BatchNorm2d):
                layer.bias.normal_(0, 0.3)
    values = (32 * layout.gather(model).detach()).round() / 32
    return Compressed.of(layout, values, None, untouched(model, layout))


def test_sums_stay_out_of_the_palette(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(*conv(4, 32), nn.ReLU(), *conv(32, 64), nn.ReLU(), *conv(64, 16))
    compressed = zeroed(model, 0.6)
    path = tmp_path / "net.onnx"
    done = to_onnx(compressed, model, torch.zeros(2, 4, 8, 8), path)
    constants = {item.name: numpy_helper.to_array(item) for item in onnx.load(path).graph.initializer}
    left = [len(constants[f"{name}.weight.indices"]) for name in (0, 3, 6)]
    assert (done.filters, done.dropped) == (112, 112 - sum(left))
    for name, before in ((3, left[0]), (6, left[1])):
        indices, sums = (constants[f"{name}.weight.{part}"] for part in ("indices", "sums"))
        assert indices.dtype == np.uint8
        assert indices.shape[1] + sums.shape[1] == before
        codebook = compressed.dense_state_dict()[f"{name}.weight"].unique().tolist()
        assert set(constants[f"{name}.weight.palette"].tolist()) <= set(codebook)


def test_the_command_says_how_many(tmp_path: Path) -> None:
    torch.manual_seed(0)
    path = tmp_path / "net.pwfn"
    zeroed(digits_resnet(), 0.5).save(path, record={"model": "digits_resnet"})
    facts = from_file(path, "onnx")
    assert 0 < facts["dropped"] < facts["filters"]
    assert facts["sentence"].endswith(f"; {facts['dropped']} of {facts['filters']} filters were dropped")
