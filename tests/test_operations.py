"""Every layer is ``y = W x``: the recorded rows times the recorded matrix give the operation's own output."""

import math

import pytest
import torch
from cases import Tied, numbers
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from pwfn.fixing.conditioning.operations import Normalisation, Product, Watch, Weights
from pwfn.layout import Layout

ALL = 10**9  # a limit on rows that takes all


class Outputs(TorchDispatchMode):
    """Outside a Watch: keeps the output of the operation that the Watch has just announced."""

    def __init__(self):
        super().__init__()
        self.announced, self.pairs = None, []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        output = func(*args, **(kwargs or {}))
        if self.announced is not None:
            self.pairs.append((self.announced, output))
            self.announced = None
        return output


def record(model, inputs, layout=None, grad=False):
    """Every operation that uses compressed weights, with its output, and the weights."""
    weights = Weights(model, layout or Layout.of(model))
    outputs = Outputs()

    def before(found):
        outputs.announced = found

    fast = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        with torch.set_grad_enabled(grad), outputs, Watch(weights, before):
            model(*inputs)
    finally:
        torch.backends.mha.set_fastpath_enabled(fast)
    return weights, outputs.pairs


def matrix_of(weights, product):
    """Groups × rows × columns in float64; the last column is the bias, where it is compressed."""
    matrix = weights.memory(product.weight.entry)[product.positions()].double()
    if product.bias is None:
        return matrix
    at = product.bias.positions(torch.device("cpu"))
    return torch.cat([matrix, weights.memory(product.bias.entry)[at].double().view(*matrix.shape[:2], 1)], -1)


def as_rows(output, groups):
    """An operation's output as groups × examples × rows."""
    if output.dim() == 2:
        return output[None].double()
    output = output.unflatten(1, (groups, -1)).flatten(3)  # examples × groups × channels × positions
    return output.permute(1, 0, 3, 2).flatten(1, 2).double()


def assert_products(weights, pairs, extra=None):
    """Rows times matrix are the outputs; ``extra``: a bias that is not compressed, to be added."""
    for product, output in pairs:
        matrix = matrix_of(weights, product)
        made = product.rows(ALL, 0).double() @ matrix.transpose(1, 2)
        if extra is not None:
            made = made + extra.double().view(made.shape[0], 1, -1)
        precision = torch.finfo(output.dtype).eps
        torch.testing.assert_close(
            made, as_rows(output, len(matrix)), rtol=64 * precision, atol=64 * precision
        )


class HFConv1D(nn.Module):
    """As in transformers: a weight of inputs × outputs."""

    def __init__(self, outputs, inputs):
        super().__init__()
        self.nf = outputs
        self.weight = nn.Parameter(torch.randn(inputs, outputs))
        self.bias = nn.Parameter(torch.randn(outputs))

    def forward(self, x):
        flat = torch.addmm(self.bias, x.view(-1, x.size(-1)), self.weight)
        return flat.view(*x.shape[:-1], self.nf)


class Transposed(nn.Module):
    """A linear layer whose inputs are not contiguous."""

    def __init__(self, bias):
        super().__init__()
        self.layer = nn.Linear(5, 4, bias=bias)

    def forward(self, x):
        return self.layer(x.transpose(1, 2))


LAYERS = {
    "linear": (lambda: nn.Linear(5, 4), (7, 5)),
    "linear, no bias": (lambda: nn.Linear(5, 4, bias=False), (7, 5)),
    "linear, tokens": (lambda: nn.Linear(5, 4), (3, 2, 5)),
    "linear, tokens, no bias": (lambda: nn.Linear(5, 4, bias=False), (3, 2, 5)),
    "linear, 4-D": (lambda: nn.Linear(5, 4), (3, 2, 2, 5)),
    "linear, 4-D, no bias": (lambda: nn.Linear(5, 4, bias=False), (3, 2, 2, 5)),
    "linear, transposed input": (lambda: Transposed(True), (3, 5, 2)),
    "linear, transposed input, no bias": (lambda: Transposed(False), (3, 5, 2)),
    "linear, one input": (lambda: nn.Linear(5, 4), (5,)),
    "linear, one output": (lambda: nn.Linear(5, 1), (7, 5)),
    "linear, one column": (lambda: nn.Linear(1, 3), (7, 1)),
    "conv1d": (lambda: nn.Conv1d(3, 4, 3, stride=2, padding=1, dilation=2), (2, 3, 11)),
    "conv1d, no batch": (lambda: nn.Conv1d(3, 4, 3), (3, 11)),
    "conv1d, circular": (lambda: nn.Conv1d(3, 4, 3, padding=2, padding_mode="circular"), (2, 3, 7)),
    "conv2d": (lambda: nn.Conv2d(3, 4, 3), (2, 3, 6, 5)),
    "conv2d, unlike axes": (
        lambda: nn.Conv2d(3, 4, (3, 2), stride=(2, 1), padding=(0, 2), dilation=(1, 2)),
        (2, 3, 8, 7),
    ),
    "conv2d, point": (lambda: nn.Conv2d(3, 4, 1, bias=False), (2, 3, 4, 4)),
    "conv2d, same": (lambda: nn.Conv2d(3, 4, 3, padding="same"), (2, 3, 5, 6)),
    "conv2d, same, even": (lambda: nn.Conv2d(3, 4, (2, 4), padding="same", dilation=(1, 3)), (2, 3, 9, 12)),
    "conv2d, valid": (lambda: nn.Conv2d(3, 4, 2, padding="valid"), (2, 3, 5, 5)),
    "conv2d, reflect": (lambda: nn.Conv2d(3, 4, 3, padding=(1, 2), padding_mode="reflect"), (2, 3, 5, 6)),
    "conv2d, groups": (lambda: nn.Conv2d(6, 4, 3, groups=2), (2, 6, 5, 5)),
    "conv2d, depthwise": (lambda: nn.Conv2d(4, 4, 3, groups=4, padding=1, stride=2), (2, 4, 6, 6)),
    "conv2d, depthwise twice": (lambda: nn.Conv2d(3, 6, 3, groups=3), (2, 3, 5, 5)),
    "conv2d, channels last": (
        lambda: nn.Conv2d(3, 4, (3, 2), padding=1).to(memory_format=torch.channels_last),
        (2, 3, 6, 5),
    ),
    "conv2d, groups, channels last": (
        lambda: nn.Conv2d(6, 4, (2, 3), groups=2).to(memory_format=torch.channels_last),
        (2, 6, 5, 5),
    ),
    "conv3d": (lambda: nn.Conv3d(2, 3, (1, 2, 3), stride=(1, 2, 1), padding=1), (2, 2, 3, 4, 5)),
    "conv transposed 1d": (lambda: nn.ConvTranspose1d(3, 4, 3, stride=2, padding=1), (2, 3, 5)),
    "conv transposed 2d": (
        lambda: nn.ConvTranspose2d(3, 4, (3, 2), stride=(2, 3), padding=1, output_padding=(1, 2)),
        (2, 3, 4, 3),
    ),
    "conv transposed 2d, dilated, groups": (
        lambda: nn.ConvTranspose2d(4, 6, (3, 2), stride=2, dilation=(2, 1), groups=2, bias=False),
        (2, 4, 3, 4),
    ),
    "conv transposed 2d, cropped": (lambda: nn.ConvTranspose2d(2, 3, 2, padding=1, stride=2), (2, 2, 4, 4)),
    "conv transposed 2d, more padding than reach": (
        lambda: nn.ConvTranspose2d(2, 3, 1, padding=1, stride=2),
        (2, 2, 4, 4),
    ),
    "conv transposed 3d": (
        lambda: nn.ConvTranspose3d(2, 4, 2, stride=(1, 2, 1), output_padding=(0, 1, 0), groups=2),
        (2, 2, 2, 3, 2),
    ),
    "addmm": (lambda: HFConv1D(4, 5), (3, 2, 5)),
}


def made(build):
    torch.manual_seed(0)
    return build().eval()


@pytest.mark.filterwarnings("ignore:Using padding='same' with even kernel")
@pytest.mark.parametrize("grad", [False, True], ids=["no grad", "grad"])
@pytest.mark.parametrize("name", LAYERS)
def test_rows_times_matrix_are_the_output(name, grad):
    build, shape = LAYERS[name]
    model = made(build)
    layout = Layout.of(model, include=["type:HFConv1D"] if name == "addmm" else ())
    weights, pairs = record(model, [numbers(*shape)], layout, grad)
    assert len(pairs) == 1
    assert_products(weights, pairs)
    # Every weight is in the matrix once, and a value written there is the layer's weight from then on.
    product, before = pairs[0]
    positions = product.positions()
    memory = weights.memory(product.weight.entry)
    assert positions.flatten().sort().values.equal(torch.arange(len(memory)))
    memory[positions] = numbers(*positions.shape, seed=5)
    weights, pairs = record(model, [numbers(*shape)], layout, grad)
    assert not torch.allclose(pairs[0][1], before)
    assert_products(weights, pairs)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64], ids=str)
@pytest.mark.parametrize("name", ["linear", "linear, tokens", "conv2d, groups, channels last"])
def test_narrow_and_wide_types(name, dtype):
    build, shape = LAYERS[name]
    model = made(build).to(dtype)
    weights, pairs = record(model, [numbers(*shape).to(dtype)])
    assert len(pairs) == 1
    assert_products(weights, pairs)


@pytest.mark.parametrize("name", ["linear", "conv2d, groups", "conv transposed 2d"])
def test_a_bias_that_is_not_compressed_is_no_column(name):
    build, shape = LAYERS[name]
    model = made(build)
    weights, pairs = record(model, [numbers(*shape)], Layout.of(model, exclude=["bias"]))
    assert [product.bias for product, _ in pairs] == [None]
    assert_products(weights, pairs, extra=model.bias.detach())


ATTENTION = {
    "self": ({"batch_first": True}, [(2, 3, 4)] * 3, True),
    "self, tokens first": ({}, [(2, 3, 4)] * 3, True),
    "no bias": ({"bias": False}, [(2, 3, 4)] * 3, True),
    "cross": ({"batch_first": True}, [(2, 3, 4), (2, 5, 4), (2, 5, 4)], False),
    "three inputs": ({"batch_first": True}, [(2, 3, 4), (2, 5, 4), (2, 5, 4)], None),
    "widths of their own": (
        {"kdim": 6, "vdim": 2, "batch_first": True},
        [(2, 3, 4), (2, 5, 6), (2, 5, 2)],
        None,
    ),
}


@pytest.mark.parametrize("name", ATTENTION)
def test_attention(name):
    """All projections are found, each weight once; the packed one is cut where the inputs differ."""
    settings, shapes, shared = ATTENTION[name]
    model = made(lambda: nn.MultiheadAttention(4, 2, **settings))
    inputs = [numbers(*shape, seed=seed) for seed, shape in enumerate(shapes)]
    if shared is not None:
        inputs = [inputs[0], *([inputs[0] if shared else inputs[1]] * 2)]
    weights, pairs = record(model, inputs)
    assert_products(weights, pairs)
    found = [torch.zeros(len(weights.memory(n)), dtype=torch.int) for n in range(len(weights.parameters))]
    for product, _ in pairs:
        found[product.weight.entry][product.positions().flatten()] += 1
    matrices = [count for count, p in zip(found, weights.parameters, strict=True) if p.dim() > 1]
    assert matrices
    assert all(bool((count == 1).all()) for count in matrices)


def test_a_head_tied_to_an_embedding():
    model = Tied().eval()
    weights, pairs = record(model, [torch.arange(8).view(2, 4)])
    products = [(found, output) for found, output in pairs if isinstance(found, Product)]
    assert_products(weights, products)
    used = [weights.parameters[found.weight.entry] for found, _ in products]
    expected = [model.first.weight, model.first.weight, model.embedding.weight]  # one layer is called twice
    assert [id(weight) for weight in used] == [id(weight) for weight in expected]


def test_weights_that_are_views_of_one_tensor():
    model = made(lambda: nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 4), nn.Conv1d(1, 2, 3)))
    flat = numbers(3 + sum(p.numel() for p in model.parameters()))
    start = 3
    for layer in model:
        for name, parameter in list(layer.named_parameters()):
            view = flat[start : start + parameter.numel()].view(parameter.shape)
            setattr(layer, name, nn.Parameter(view))
            start += parameter.numel()
    weights, pairs = record(model, [numbers(2, 1, 3)])
    assert [
        weights.parameters[product.weight.entry] is layer.weight
        for (product, _), layer in zip(pairs, (model[0], model[2], model[3]), strict=True)
    ] == [True] * 3
    assert_products(weights, pairs)
    product = pairs[1][0]
    weights.memory(product.weight.entry)[product.positions()] = 7.0
    first, last = 3 + 12 + 4, 3 + 12 + 4 + 16
    assert flat.eq(7).nonzero().flatten().tolist() == list(range(first, last))


def test_some_rows_are_rows_at_the_same_positions_for_the_same_seed():
    """Two networks are compared row by row."""
    model = made(lambda: nn.Conv2d(2, 3, 3, padding=1))
    inputs = numbers(4, 2, 6, 6)
    (product, _) = record(model, [inputs])[1][0]
    (scaled, _) = record(model, [2 * inputs])[1][0]
    some, other = product.rows(20, 3), scaled.rows(20, 3)
    assert some.shape == (1, 20, 2 * 9 + 1)
    assert other[..., :-1].equal(2 * some[..., :-1])
    whole = product.rows(ALL, 3)[0]
    assert all((whole == row).all(-1).any() for row in some[0])
    assert not product.rows(20, 4).equal(some)


def test_operations_that_use_no_compressed_weight_are_none_of_ours():
    model = made(lambda: nn.Sequential(nn.Conv2d(2, 3, 1), nn.Flatten(), nn.Linear(12, 2), nn.Linear(2, 2)))
    _, pairs = record(model, [numbers(3, 2, 2, 2)], Layout.of(model, exclude=["0.*", "3.*"]))
    assert [math.prod(product.weight.shape) for product, _ in pairs] == [24]


@pytest.mark.parametrize(
    ("layer", "shape"),
    [(nn.BatchNorm1d(3), (5, 3)), (nn.BatchNorm2d(3), (5, 3, 2, 2)), (nn.BatchNorm3d(3), (5, 3, 2, 1, 2))],
)
def test_batchnorm_is_known_by_its_statistics(layer, shape):
    model = nn.Sequential(nn.Identity(), layer, nn.Flatten(), nn.Linear(math.prod(shape[1:]), 2)).eval()
    inputs = numbers(*shape)
    _, pairs = record(model, [inputs])
    assert [type(found) for found, _ in pairs] == [Normalisation, Product]
    assert pairs[0][0].layer == "1"
    assert pairs[0][0].inputs.equal(inputs)


def test_batchnorm_without_statistics_is_left_alone():
    model = nn.Sequential(nn.BatchNorm1d(3, track_running_stats=False), nn.Linear(3, 2)).eval()
    _, pairs = record(model, [numbers(5, 3)])
    assert [type(found) for found, _ in pairs] == [Product]
