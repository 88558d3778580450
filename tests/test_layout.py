"""Which parameters are compressed, where they lie, and that cutting the vector gives the model back."""

from __future__ import annotations

import copy
import math
import pickle
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from cases import Tied, tiny_gpt2
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from pwfn import Config, GaussianNetwork, Layout, LayoutError, compress
from pwfn.layout import Attention, Kind, untouched
from pwfn.zoo.models import digits_resnet, timm_model


def scramble(model: nn.Module) -> nn.Module:
    """Random parameters and statistics everywhere: timm and torch start some of them at zero.

    A zero BatchNorm weight would cut a whole branch off the output, and whatever the wrapped
    model did there would look equal.
    """
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for tensor in (*model.parameters(), *model.buffers()):
            if tensor.is_floating_point():
                noise = torch.randn(tensor.shape, generator=generator).to(tensor)
                tensor.add_(noise, alpha=0.05)
        for module in model.modules():
            if isinstance(module, nn.modules.batchnorm._NormBase):
                for tensor in (module.weight, module.running_var):
                    tensor.copy_(0.5 + torch.rand(tensor.shape, generator=generator))
    return model


def first_tensor(output: Any) -> Tensor:
    """The logits of a Hugging Face output, the first part of a tuple, or the tensor itself."""
    output = getattr(output, "logits", output)
    return output[0] if isinstance(output, tuple) else output


def assert_whole(model: nn.Module, layout: Layout) -> None:
    """Every parameter of the model is in the layout exactly once, and the slices tile the vector."""
    items = (*layout.entries, *layout.left_out)
    listed = [name for item in items for name in (item.name, *item.aliases)]
    parameters = dict(model.named_parameters(remove_duplicate=False))
    assert sorted(listed) == sorted(parameters)
    for item in items:
        same = {id(parameters[name]) for name in (item.name, *item.aliases)}
        assert same == {id(parameters[item.name])}
        assert item.shape == tuple(parameters[item.name].shape)
        assert item.dtype == parameters[item.name].dtype
    assert len({id(parameters[item.name]) for item in items}) == len(items)  # tied weights once
    end = 0
    for entry in layout.entries:
        assert entry.offset == end
        assert entry.size == math.prod(entry.shape) > 0
        assert entry.span == slice(end, end + entry.size)
        end += entry.size
    assert layout.size == end
    left = sum(math.prod(item.shape) for item in layout.left_out)
    assert end + left == sum(p.numel() for p in model.parameters())
    assert all(item.reason for item in layout.left_out)
    words = set(re.split(r"[\s,]+", layout.table()))
    assert set(parameters) <= words


def assert_same_output(model: nn.Module, *args: Any, **kwargs: Any) -> GaussianNetwork:
    """With noise off the wrapped model gives the model's own output, bit for bit.

    With gradients recorded and without: torch has other kernels where none are (a fused encoder
    layer) and where a weight does not require them (a batched matrix product).
    """
    model.eval()
    net = GaussianNetwork(model)
    for mode in (torch.enable_grad, torch.no_grad, torch.inference_mode):
        with mode():
            expected, actual = first_tensor(model(*args, **kwargs)), first_tensor(net(*args, **kwargs))
        assert torch.isfinite(expected).all()
        assert expected.dtype == actual.dtype
        assert expected.stride() == actual.stride()
        assert expected.requires_grad == actual.requires_grad
        assert torch.equal(expected, actual), mode.__name__
    return net


def assert_every_weight_counts(net: GaussianNetwork, *args: Any, **kwargs: Any) -> None:
    """The output depends on the vector in every one of its slices."""
    net.zero_grad()
    first_tensor(net(*args, **kwargs)).float().square().sum().backward()
    for entry in net.layout.entries:
        assert net.free_mu.grad[entry.span].abs().max() > 0, entry.name


# --- the networks of the paper -------------------------------------------------------------------


@dataclass(frozen=True)
class PaperNetwork:
    name: str
    pixels: int
    parameters: int  # as published
    first: str
    last: str


PAPER_NETWORKS = [
    PaperNetwork("resnet18", 64, 11_689_512, "conv1", "fc"),
    PaperNetwork("resnet50", 64, 25_557_032, "conv1", "fc"),
    PaperNetwork("densenet161", 64, 28_681_000, "features.conv0", "classifier"),
    PaperNetwork("deit_tiny_patch16_224", 224, 5_717_416, "patch_embed.proj", "head"),
]


@pytest.mark.parametrize("network", PAPER_NETWORKS, ids=lambda network: network.name)
def test_network_of_the_paper(network: PaperNetwork) -> None:
    torch.manual_seed(0)
    model = scramble(timm_model(network.name))
    image = torch.randn(1, 3, network.pixels, network.pixels)
    net = assert_same_output(model, image)
    layout = net.layout
    assert_whole(model, layout)
    assert_every_weight_counts(net, image)

    layers = {name: m for name, m in model.named_modules() if isinstance(m, (nn.Conv2d, nn.Linear))}
    expected = {f"{name}.{leaf}" for name, m in layers.items() for leaf, _ in m.named_parameters()}
    assert {entry.name for entry in layout.entries} == expected
    assert layout.size == sum(p.numel() for m in layers.values() for p in m.parameters())
    left = sum(math.prod(item.shape) for item in layout.left_out)
    assert layout.size + left == network.parameters
    assert layout.entries[0].layer == network.first
    assert layout.entries[-1].name == f"{network.last}.bias"
    others = {item.name for item in layout.left_out if "normalisation" not in item.reason}
    assert others == ({"cls_token", "pos_embed"} if "deit" in network.name else set())
    vector = torch.cat([model.get_parameter(entry.name).detach().flatten() for entry in layout.entries])
    assert torch.equal(net.mu, vector)


def test_resnet18_has_the_weights_of_its_definition() -> None:
    """Counted from the architecture: 7×7 stem, four stages of 3×3 pairs, 1×1 shortcuts, the head."""
    stem = 7 * 7 * 3 * 64
    stages = 4 * 9 * 64 * 64
    for wide in (128, 256, 512):
        narrow = wide // 2
        stages += 9 * narrow * wide + 3 * 9 * wide * wide + narrow * wide
    head = 512 * 1000 + 1000
    assert Layout.of(timm_model("resnet18")).size == stem + stages + head == 11_679_912


# --- every kind of layer -------------------------------------------------------------------------


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.recurrent = nn.LSTM(4, 6)
        self.head = nn.Linear(6, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.recurrent(x)[0])


def conv(kind: Callable[..., nn.Module], *args: Any, **options: Any) -> Callable[[], nn.Module]:
    return lambda: kind(*args, **options)


CONVOLUTIONS: list[tuple[Callable[[], nn.Module], tuple[int, ...]]] = [
    (conv(nn.Conv1d, 4, 6, 3), (2, 4, 9)),
    (conv(nn.Conv1d, 4, 6, 3, groups=2, dilation=2), (2, 4, 9)),
    (conv(nn.Conv2d, 4, 6, 3, padding=1, stride=2), (2, 4, 9, 9)),
    (conv(nn.Conv2d, 4, 6, 1, bias=False), (2, 4, 9, 9)),
    (conv(nn.Conv2d, 1, 6, 3), (2, 1, 9, 9)),
    (conv(nn.Conv2d, 4, 8, 3, groups=4, padding=1, padding_mode="circular"), (2, 4, 9, 9)),
    (conv(nn.Conv3d, 4, 6, (1, 2, 3), groups=2), (2, 4, 5, 5, 5)),
    (conv(nn.ConvTranspose1d, 4, 6, 3, stride=2), (2, 4, 9)),
    (conv(nn.ConvTranspose1d, 4, 6, 3, groups=2), (2, 4, 9)),
    (conv(nn.ConvTranspose2d, 4, 6, 3, groups=2, stride=2, output_padding=1), (2, 4, 5, 5)),
    (conv(nn.ConvTranspose2d, 4, 6, 1), (2, 4, 5, 5)),
    (conv(nn.ConvTranspose3d, 4, 6, 2), (2, 4, 4, 4, 4)),
    (conv(nn.ConvTranspose3d, 4, 6, 2, groups=2), (2, 4, 4, 4, 4)),
]
CONVOLUTION_IDS = [str(make()).replace(" ", "") for make, _ in CONVOLUTIONS]


@pytest.mark.parametrize(("make", "shape"), CONVOLUTIONS, ids=CONVOLUTION_IDS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_convolution(make: Callable[[], nn.Module], shape: tuple[int, ...], dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    model = make().to(dtype)
    net = assert_same_output(model, torch.randn(shape, dtype=dtype))
    assert net.mu.dtype == (torch.float64 if dtype is torch.float64 else torch.float32)
    assert_whole(model, net.layout)
    assert net.layout.left_out == ()
    assert_every_weight_counts(net, torch.randn(shape, dtype=dtype))
    weight = net.layout.entry("weight")
    assert weight.input_axis == (0 if "Transpose" in type(model).__name__ else 1)
    groups = model.groups if weight.input_axis == 1 else 1  # a grouped filter sees the inputs of its group
    assert weight.shape[weight.input_axis] == model.in_channels // groups


@pytest.mark.parametrize(("make", "shape"), CONVOLUTIONS, ids=CONVOLUTION_IDS)
def test_convolution_with_channels_last(make: Callable[[], nn.Module], shape: tuple[int, ...]) -> None:
    """Also where an axis has length 1 and both memory forms look contiguous: the kernel differs."""
    form = {3: torch.contiguous_format, 4: torch.channels_last, 5: torch.channels_last_3d}[len(shape)]
    torch.manual_seed(0)
    model = make().to(memory_format=form)
    image = torch.randn(shape)
    assert_same_output(model, image)
    net = assert_same_output(model, image.to(memory_format=form))
    assert net.layout.views(net.mu)["weight"].stride() == model.weight.stride()


@pytest.mark.parametrize("norm_first", [False, True])
def test_transformer_encoder_layer(norm_first: bool) -> None:
    torch.manual_seed(0)
    model = scramble(nn.TransformerEncoderLayer(12, 3, 20, batch_first=True, norm_first=norm_first))
    net = assert_same_output(model, torch.randn(2, 5, 12))
    assert_whole(model, net.layout)
    assert_every_weight_counts(net, torch.randn(2, 5, 12))
    assert [entry.name for entry in net.layout.entries] == [
        "self_attn.in_proj_weight",
        "self_attn.in_proj_bias",
        "self_attn.out_proj.weight",
        "self_attn.out_proj.bias",
        "linear1.weight",
        "linear1.bias",
        "linear2.weight",
        "linear2.bias",
    ]


def test_attention_with_its_own_key_and_value_sizes() -> None:
    torch.manual_seed(0)
    model = scramble(nn.MultiheadAttention(12, 3, kdim=8, vdim=10, batch_first=True, add_bias_kv=True))
    inputs = torch.randn(2, 5, 12), torch.randn(2, 7, 8), torch.randn(2, 7, 10)
    net = assert_same_output(model, *inputs)
    assert_whole(model, net.layout)
    assert_every_weight_counts(net, *inputs)
    # Rows appended to keys and values are no biases of a projection.
    assert {item.name for item in net.layout.left_out} == {"bias_k", "bias_v"}
    axes = {entry.name: (entry.input_axis, entry.attention) for entry in net.layout.entries}
    assert axes == {
        "q_proj_weight": (1, Attention(("q",), 3, 0)),
        "k_proj_weight": (1, Attention(("k",), 3, 0)),
        "v_proj_weight": (1, Attention(("v",), 3, 0)),
        "in_proj_bias": (None, Attention(("q", "k", "v"), 3, 0)),
        "out_proj.weight": (1, None),
        "out_proj.bias": (None, None),
    }


def test_tied_parameters_are_one_weight() -> None:
    model, tokens = scramble(Tied()), torch.arange(11)
    net = assert_same_output(model, tokens)
    assert_whole(model, net.layout)
    tied = net.layout.entry("embedding.weight")
    assert tied is net.layout.entry("head.weight")
    assert (tied.name, tied.aliases, tied.layer_type) == ("head.weight", ("embedding.weight",), "Linear")
    assert net.layout.entry("first.weight").aliases == ("second.weight",)
    assert net.layout.size == 11 * 6 + 6 * 6 + 6
    views = net.layout.views(net.mu)
    assert views["head.weight"] is views["embedding.weight"]
    net(tokens).square().sum().backward()
    model(tokens).square().sum().backward()  # the gradient comes from both places
    torch.testing.assert_close(net.free_mu.grad[tied.span], model.head.weight.grad.flatten())
    # Excluding one name of a tied weight excludes the weight.
    assert covered(Tied(), exclude=["embedding.*"]) == ["first.weight", "first.bias"]


def test_a_layer_with_two_names_keeps_no_weights_of_a_pass() -> None:
    net, tokens = GaussianNetwork(Tied()), torch.arange(11)
    names = {"free_mu", "free_sigma", "model.norm.weight", "model.norm.bias"}
    net.train()(tokens).sum().backward()
    assert {name for name, _ in net.named_parameters()} == names
    assert torch.equal(copy.deepcopy(net).eval()(tokens), net.eval()(tokens))


def test_gpt2() -> None:
    torch.manual_seed(0)
    model = scramble(tiny_gpt2())
    tokens = torch.randint(0, 37, (2, 9))
    net = assert_same_output(model, input_ids=tokens)
    assert_whole(model, net.layout)
    assert_every_weight_counts(net, input_ids=tokens)
    # Per block: c_attn 12×36+36, c_proj 12×12+12, c_fc 12×48+48, c_proj 48×12+12; the tied head once.
    block = (12 * 36 + 36) + (12 * 12 + 12) + (12 * 48 + 48) + (48 * 12 + 12)
    assert net.layout.size == 37 * 12 + 2 * block
    assert net.layout.entry("lm_head.weight").aliases == ("transformer.wte.weight",)
    assert {item.name for item in net.layout.left_out if "normal" not in item.reason} == {
        "transformer.wpe.weight"
    }
    attention = Attention(("q", "k", "v"), heads=3, axis=1)  # Conv1D stores (in, out)
    fused = net.layout.entry("transformer.h.1.attn.c_attn.weight")
    assert (fused.shape, fused.input_axis, fused.attention) == ((12, 36), 0, attention)
    bias = net.layout.entry("transformer.h.1.attn.c_attn.bias")
    assert (bias.input_axis, bias.attention) == (None, Attention(("q", "k", "v"), heads=3, axis=0))
    other = net.layout.entry("transformer.h.1.attn.c_proj.weight")
    assert (other.input_axis, other.attention) == (0, None)


def test_fused_projection_of_timm() -> None:
    layout = Layout.of(timm_model("deit_tiny_patch16_224"))
    fused = layout.entry("blocks.3.attn.qkv.weight")
    assert (fused.shape, fused.input_axis) == ((576, 192), 1)
    assert fused.attention == layout.entry("blocks.3.attn.qkv.bias").attention
    assert fused.attention == Attention(("q", "k", "v"), heads=3, axis=0)
    assert layout.entry("blocks.3.attn.proj.weight").attention is None
    assert layout.entry("blocks.3.mlp.fc1.weight").attention is None
    assert layout.entry("patch_embed.proj.weight").input_axis == 1
    kinds = {entry.kind for entry in layout.entries if entry.name.endswith(".bias")}
    assert kinds == {Kind.BIAS}
    kinds = {entry.kind for entry in layout.entries if entry.name.endswith(".weight")}
    assert kinds == {Kind.WEIGHT}


def test_other_layers_are_left_out_unless_included() -> None:
    x = torch.randn(3, 2, 4)
    model = Recurrent()
    model.head.empty = nn.Parameter(torch.empty(0))
    net = assert_same_output(model, x)
    assert_whole(model, net.layout)
    assert net.layout.size == 6 * 2 + 2
    assert {item.name: item.reason for item in net.layout.left_out}["head.empty"] == "empty"
    config = Config().override({"layout.include": ["type:LSTM"]})
    with_lstm = GaussianNetwork(model, config).eval()
    assert with_lstm.layout == Layout.of(model, include=["type:LSTM"])
    assert with_lstm.layout.size == sum(p.numel() for p in model.parameters())
    assert torch.equal(with_lstm(x), model(x))
    assert_every_weight_counts(with_lstm, x)


@pytest.mark.parametrize("preset", ["recommended", "paper", "quick"])
@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU, nn.RNN])
def test_recurrent_layers_are_compressed_by_a_whole_run(kind: type[nn.RNNBase], preset: str) -> None:
    """A recurrent layer keeps a list of its weights, which must be those of each pass."""
    torch.manual_seed(0)
    model = Recurrent()
    model.recurrent = kind(4, 6, 2, bidirectional=True)
    model.head = nn.Linear(12, 2)
    data = [(torch.randn(8, 5, 4), torch.randn(8, 5, 2)) for _ in range(3)]
    changes = {"layout.include": ["type:RNNBase"], "posterior.init": "rms"}
    config = Config.preset(preset).override(changes)
    result = compress(model, data, data, config, nn.functional.mse_loss)
    names = {entry.name for entry in result.compressed.layout.entries}
    assert names == set(dict(model.named_parameters()))
    assert result.after.loss == result.fixed.loss  # of the network while it is compressed, and of the file


def test_reparametrised_weight_is_left_out_and_says_so() -> None:
    model = nn.utils.parametrizations.weight_norm(nn.Linear(4, 3))
    net = assert_same_output(model, torch.randn(2, 4))
    assert_whole(model, net.layout)
    assert [entry.name for entry in net.layout.entries] == ["bias"]
    assert {item.reason for item in net.layout.left_out} == {
        "re-parametrised: remove the parametrisation to compress it"
    }


@pytest.mark.parametrize(
    "norm",
    [
        nn.BatchNorm2d(4),
        nn.InstanceNorm2d(4, affine=True),
        nn.GroupNorm(2, 4),
        nn.LayerNorm(4),
        nn.RMSNorm(4),
    ],
    ids=lambda norm: type(norm).__name__,
)
def test_normalisation_stays_in_full_precision(norm: nn.Module) -> None:
    layout = Layout.of(nn.Sequential(nn.Conv2d(1, 4, 1), norm))
    assert layout.size == 4 + 4
    reason = f"{type(norm).__name__}: normalisation stays in full precision"
    assert {item.reason for item in layout.left_out} == {reason}


def test_mixed_number_types_keep_every_weight_exact() -> None:
    model = nn.Sequential(
        nn.Linear(3, 3, dtype=torch.float64), nn.Linear(3, 3).half(), nn.Linear(3, 3).bfloat16()
    )
    layout = Layout.of(model)
    assert layout.dtype == torch.float64
    views = layout.views(layout.gather(model))
    for name, parameter in model.named_parameters():
        assert views[name].dtype == parameter.dtype
        assert torch.equal(views[name], parameter)


# --- what the table says -------------------------------------------------------------------------


def test_the_table_says_where_each_parameter_is_or_why_not() -> None:
    head, *rows, total = Layout.of(Tied(), exclude=["first.bias"]).table().splitlines()
    assert head.split()[:3] == ["parameter", "shape", "weights"]
    found = {row.split()[0]: row for row in rows}
    assert set(found) == {"head.weight", "first.weight", "first.bias", "norm.weight", "norm.bias"}
    assert "11×6" in found["head.weight"]
    assert found["head.weight"].endswith("also embedding.weight")
    assert "left out: excluded by 'first.bias', also second.bias" in found["first.bias"]
    assert total == "102 weights in 2 parameters are compressed; 18 in 3 are left out"


# --- include and exclude -------------------------------------------------------------------------


def covered(model: nn.Module, **selectors: Any) -> list[str]:
    layout = Layout.of(model, **selectors)
    assert_whole(model, layout)
    return [entry.name for entry in layout.entries]


def small() -> nn.Module:
    return nn.Sequential(nn.Embedding(5, 3), nn.Linear(3, 3), nn.LayerNorm(3), Special(3, 2))


PLAIN = ["1.weight", "1.bias", "3.weight", "3.bias"]


@pytest.mark.parametrize("selector", ["0.weight", "0.*", "type:Embedding", nn.Embedding])
def test_include(selector: str | type) -> None:
    assert covered(small(), include=[selector]) == ["0.weight", *PLAIN]


class Special(nn.Linear):
    pass


@pytest.mark.parametrize(
    ("selector", "left"),
    [
        ("3.weight", ["1.weight", "1.bias", "3.bias"]),
        ("*.bias", ["1.weight", "3.weight"]),
        ("[13].weight", ["1.bias", "3.bias"]),
        ("1.*", ["3.weight", "3.bias"]),
        ("2.*", PLAIN),  # matches what was left out anyway
        ("type:Special", PLAIN[:2]),
        (Special, PLAIN[:2]),
    ],
)
def test_exclude(selector: str | type, left: list[str]) -> None:
    assert covered(small(), exclude=[selector]) == left


@pytest.mark.parametrize("selector", ["type:Linear", "type:torch.nn.modules.linear.Linear", nn.Linear])
def test_a_type_includes_its_subclasses(selector: str | type) -> None:
    assert covered(small(), exclude=[selector], include=["0.*"]) == ["0.weight"]


def test_exclude_wins_over_include() -> None:
    both = {"include": ["type:Embedding", "2.*"], "exclude": ["0.weight", "2.bias"]}
    layout = Layout.of(small(), **both)
    assert [entry.name for entry in layout.entries] == [
        "1.weight",
        "1.bias",
        "2.weight",
        "3.weight",
        "3.bias",
    ]
    assert layout.left_out[0].reason == "excluded by '0.weight'"


def test_included_norm_is_used_in_the_forward_pass() -> None:
    model = scramble(nn.Sequential(nn.Linear(3, 3), nn.LayerNorm(3)))
    net = GaussianNetwork(model, Config().override({"layout.include": ["type:LayerNorm"]})).eval()
    x = torch.randn(2, 3)
    assert torch.equal(net(x), model(x))
    assert_every_weight_counts(net, x)
    assert list(net.model.parameters()) == []


@pytest.mark.parametrize(
    ("selector", "hint"),
    [
        ("1.wieght", "the nearest is '1.weight'"),
        ("type:Embeding", "the nearest is 'type:Embedding'"),
        ("type:torch.nn.Linear", "the nearest is 'type:Linear'"),
        (nn.Conv2d, "table"),
        ("ZZZ", "table"),
        ("Linear", "the nearest is 'type:Linear'"),
    ],
)
@pytest.mark.parametrize("side", ["include", "exclude"])
def test_selector_that_matches_nothing(selector: str | type, hint: str, side: str) -> None:
    text = message(small(), **{side: ["0.weight" if side == "exclude" else "1.*", selector]})
    assert "matches no parameter of the model" in text
    assert (selector if isinstance(selector, str) else selector.__name__) in text
    assert hint in text


# --- what cannot be laid out ---------------------------------------------------------------------


def message(model: Any, **selectors: Any) -> str:
    """The one sentence of the error."""
    with pytest.raises(LayoutError) as caught:
        Layout.of(model, **selectors)
    text = str(caught.value)
    assert "\n" not in text
    return text


# torch's own deprecation of TorchScript.
@pytest.mark.filterwarnings("ignore:`torch.jit.*is deprecated:DeprecationWarning")
def test_models_that_cannot_be_laid_out() -> None:
    assert "has no convolution or linear layer" in message(nn.Sequential(nn.BatchNorm2d(3)))
    assert "has no convolution" in message(nn.ReLU())
    assert Layout.of(nn.BatchNorm2d(3), include=["*"]).size == 6
    assert "exclude less" in message(nn.Linear(2, 2), exclude=["*"])
    assert "complex64" in message(nn.Linear(2, 2, dtype=torch.complex64))
    assert "TorchScript" in message(torch.jit.script(nn.Linear(2, 2)))
    assert "compiled" in message(torch.compile(nn.Linear(2, 2), backend="eager"))
    assert "pass model.module" in message(nn.DataParallel(nn.Linear(2, 2)))
    for thing in ("resnet18", nn.Linear, None):
        assert "allowed is a torch.nn.Module" in message(thing)
    with pytest.raises(LayoutError, match=r"'fc\.weight'"):
        Layout.of(nn.Linear(2, 2)).entry("fc.weight")


def test_frozen_parameter() -> None:
    model = small()
    model[2].weight.requires_grad_(False)  # not compressed: no problem
    assert covered(model) == PLAIN
    assert not GaussianNetwork(model).model[2].weight.requires_grad
    model[3].bias.requires_grad_(False)
    text = message(model)
    assert "3.bias is frozen" in text
    assert "exclude=['3.bias']" in text
    assert covered(model, exclude=["3.bias"]) == PLAIN[:3]


@pytest.mark.parametrize(("dtype", "name"), [(torch.int8, "int8"), (torch.bool, "bool")])
def test_integer_parameter(dtype: torch.dtype, name: str) -> None:
    model = small()
    model[1].weight = nn.Parameter(torch.ones(3, 3, dtype=dtype), requires_grad=False)
    text = message(model)
    assert text.startswith(f"1.weight is {name}: only real floating-point weights can be compressed")
    assert "exclude=['1.weight']" in text
    assert covered(model, exclude=["1.weight"]) == PLAIN[1:]


def test_lazy_module() -> None:
    model = nn.Sequential(nn.Linear(3, 3), nn.LazyLinear(2))
    assert "1.weight has no shape yet" in message(model)
    model(torch.ones(1, 3))
    assert Layout.of(model).size == 12 + 8


def test_module_compiled_in_place_is_taken_as_the_eager_one() -> None:
    model = nn.Linear(3, 2)
    model.compile(backend="eager")
    x = torch.randn(2, 3)
    assert torch.equal(GaussianNetwork(model).eval()(x), nn.functional.linear(x, model.weight, model.bias))


# --- gather, views, locate -----------------------------------------------------------------------


def test_views_are_of_the_vector_and_gather_is_a_copy() -> None:
    model = digits_resnet()
    layout = Layout.of(model)
    vector = layout.gather(model)
    for name, view in layout.views(vector).items():
        parameter = model.get_parameter(name)
        assert torch.equal(view, parameter)
        assert vector.data_ptr() <= view.data_ptr() < vector.data_ptr() + 4 * vector.numel()
    before = copy.deepcopy(model.state_dict())
    vector.fill_(7)
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())
    assert not vector.requires_grad


@settings(max_examples=50, deadline=None)
@given(st.lists(st.tuples(st.integers(1, 4), st.integers(1, 4), st.booleans()), min_size=1, max_size=5))
def test_views_undo_gather(shapes: list[tuple[int, int, bool]]) -> None:
    model = nn.ModuleList(nn.Linear(a, b, bias=bias) for a, b, bias in shapes)
    layout = Layout.of(model)
    assert layout.size == sum(a * b + b * bias for a, b, bias in shapes)
    views = layout.views(layout.gather(model))
    assert views.keys() == dict(model.named_parameters()).keys()
    assert all(torch.equal(views[name], parameter) for name, parameter in model.named_parameters())
    vector = torch.arange(float(layout.size))
    model.load_state_dict(layout.views(vector))
    assert torch.equal(layout.gather(model), vector)


def test_gradient_through_views_lands_in_each_slice() -> None:
    model = nn.Sequential(nn.Conv2d(2, 3, 3), nn.Linear(3, 2)).to(memory_format=torch.channels_last)
    layout = Layout.of(model)
    vector = layout.gather(model).requires_grad_()
    coefficients = torch.randn(layout.size)
    views = layout.views(vector)
    pieces = dict(zip(views, coefficients.split([entry.size for entry in layout.entries]), strict=True))
    sum((views[name] * pieces[name].view(views[name].shape)).sum() for name in views).backward()
    assert torch.equal(vector.grad, coefficients)


def test_locate() -> None:
    layout = Layout.of(nn.Sequential(nn.Conv2d(2, 3, 3), nn.Linear(4, 2)))
    assert layout.locate(0) == "0.weight[0, 0, 0, 0]"
    assert layout.locate((1 * 2 + 1) * 9 + 2 * 3 + 1) == "0.weight[1, 1, 2, 1]"
    assert layout.locate(54) == "0.bias[0]"
    assert layout.locate(57 + 4 + 3) == "1.weight[1, 3]"
    assert layout.locate(layout.size - 1) == "1.bias[1]"
    with pytest.raises(IndexError):
        layout.locate(layout.size)


def test_untouched_is_the_rest_of_the_state_dict() -> None:
    model = nn.Sequential(nn.Conv2d(1, 2, 1), nn.BatchNorm2d(2))
    rest = untouched(model, Layout.of(model))
    assert set(rest) == set(model.state_dict()) - {"0.weight", "0.bias"}
    assert all(torch.equal(value, model.state_dict()[name]) for name, value in rest.items())
    rest["1.weight"].fill_(9)
    assert torch.equal(model[1].weight, torch.ones(2))


class Projections(nn.Module):
    """Linear layers named as projections of attention are, and the attributes that count heads."""

    def __init__(self, rows: dict[str, int], **heads: int) -> None:
        super().__init__()
        for name, count in rows.items():
            setattr(self, name, nn.Linear(12, count))
        for name, count in heads.items():
            setattr(self, name, count)


def test_heads_of_projections() -> None:
    rows = {"q_proj": 16, "k_proj": 4, "v_proj": 4, "other": 16}
    layout = Layout.of(Projections(rows, num_heads=8, num_key_value_heads=2))  # grouped-query attention
    assert layout.entry("q_proj.weight").attention == Attention(("q",), 8, 0)
    assert layout.entry("k_proj.weight").attention == Attention(("k",), 2, 0)
    assert layout.entry("v_proj.bias").attention == Attention(("v",), 2, 0)
    assert layout.entry("other.weight").attention is None
    assert Layout.of(Projections({"q_proj": 6}, num_heads=4)).entries[0].attention is None  # 6 rows, 4 heads
    # The fused keys and values of cross-attention have the name that three projections have.
    pair = Layout.of(Projections({"c_attn": 24}, num_heads=2))
    assert [entry.attention for entry in pair.entries] == [None, None]
    fused = Layout.of(Projections({"c_attn": 36}, num_heads=2))
    assert fused.entries[0].attention == Attention(("q", "k", "v"), 2, 0)


class Elsewhere(nn.Module):
    """Uses a weight that its modules have, but not by way of them."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 3)
        if how == "function":
            self.weight_of = lambda: self.first.weight
        elif how == "function without gradients":
            self.weight_of = lambda: self.first.weight.detach()
        else:
            kept: Any = {"list": [self.first.weight], "dictionary": {0: self.first.weight}}[how]
            self.kept = kept

    def forward(self, x: Tensor) -> Tensor:
        weight = self.kept[0] if hasattr(self, "kept") else self.weight_of()
        return self.second(self.first(x)) + weight.norm()


@pytest.mark.parametrize("preset", ["recommended", "paper", "quick"])
@pytest.mark.parametrize("how", ["list", "dictionary", "function", "function without gradients"])
def test_a_weight_that_a_model_also_has_elsewhere_is_refused_by_name(how: str, preset: str) -> None:
    """It would not be that of the pass, and the network another function."""
    data = [(torch.randn(8, 4), torch.randint(0, 3, (8,))) for _ in range(3)]
    with pytest.raises(LayoutError, match=r"first\.weight"):
        compress(Elsewhere(how), data, config=Config.preset(preset))
    net = GaussianNetwork(model := Elsewhere(how)).eval()  # and in a loop of one's own
    with pytest.raises(LayoutError, match=r"first\.weight"), torch.inference_mode():
        net(torch.randn(2, 4))
    assert model is not None  # the original must exist, or its memory may be used again


def test_a_weight_that_is_only_kept_elsewhere_does_no_harm() -> None:
    model = Elsewhere("list")
    copied = pickle.loads(pickle.dumps(copy.deepcopy(GaussianNetwork(model))))
    assert torch.equal(copied.mu, GaussianNetwork(model).mu)
    excluded = GaussianNetwork(model, Config().override({"layout.exclude": ["first.weight"]})).eval()
    x = torch.randn(2, 4)
    assert torch.equal(excluded(x), model.eval()(x))
