"""Torch programs without the filters that a network does not need: they compute the same."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import Any

import pytest
import torch
from test_prune import NETWORKS, Lambda, conv, two
from torch import Tensor, nn
from torch.nn import functional as F

from pwfn import Compressed, Layout, PwfnError, __version__, load
from pwfn.export import ProgramExport, from_file, pt2, to_onnx, to_pt2
from pwfn.layout import untouched
from pwfn.zoo.models import create, digits_resnet

ROOT = Path(__file__).parent.parent
VGG = ROOT / "experiments" / "models" / "cifar_vgg16_small_125_000_bytes_seed0.pwfn"


def as_it_is(model: nn.Module) -> Compressed:
    layout = Layout.of(model)
    return Compressed.of(layout, layout.gather(model).detach(), None, untouched(model, layout))


def with_zeros(model: nn.Module, fraction: float = 0.5, seed: int = 0) -> nn.Module:
    """Filters and input channels are zero at random, BatchNorm is as after some training."""
    torch.manual_seed(seed)
    with torch.no_grad():
        for layer in model.modules():
            if isinstance(layer, nn.modules.batchnorm._BatchNorm):
                layer.running_mean.normal_(0, 0.1)
                layer.running_var.uniform_(0.5, 1.5)
                layer.weight.uniform_(0.5, 1.5)
                layer.bias.normal_(0, 0.3)
            elif isinstance(layer, nn.Conv2d | nn.Linear):
                layer.weight[torch.rand(len(layer.weight)) < fraction] = 0
                layer.weight[:, torch.rand(layer.weight.shape[1]) < fraction / 4] = 0
    return model.eval()


def exported(model: nn.Module, shape: tuple[int, ...], path: Path, whole: bool = False) -> ProgramExport:
    """Export, load again, and compare for batches that the exporter did not see."""
    compressed = as_it_is(model)
    done = to_pt2(compressed, model, torch.zeros(2, *shape), path)
    assert done.file_bytes == path.stat().st_size
    assert done.largest_error <= 1e-5 * max(1.0, done.largest_output)
    assert bool(done.kept_because) == whole
    program = torch.export.load(path).module()
    for size in (1, 2, 5, 16):
        batch = torch.randn(size, *shape)
        with torch.no_grad():
            wanted, found = model.eval()(batch), program(batch)
        assert found.shape == wanted.shape
        assert float((found - wanted).abs().max()) <= 1e-5 * max(1.0, float(wanted.abs().max()))
    return done


def shapes(path: Path) -> dict[str, tuple[int, ...]]:
    return {name: tuple(tensor.shape) for name, tensor in torch.export.load(path).state_dict.items()}


def outputs(path: Path) -> dict[str, int]:
    """The number of filters of each layer."""
    return {name: shape[0] for name, shape in shapes(path).items() if len(shape) > 1}


@pytest.mark.parametrize("seed", [0, 1])
@pytest.mark.parametrize("name", NETWORKS)
def test_random_zeros(name: str, seed: int, tmp_path: Path) -> None:
    """As many filters go as from the ONNX file."""
    make, shape = NETWORKS[name]
    model = with_zeros(make(), seed=seed)
    done = exported(model, shape, tmp_path / "net.pt2")
    onnx = to_onnx(as_it_is(model), model, torch.zeros(2, *shape), tmp_path / "net.onnx")
    assert (done.filters, done.dropped) == (onnx.filters, onnx.dropped)
    assert (done.dropped > 0) == (name != "grouped")


@pytest.mark.parametrize(
    ("padding", "bias", "dropped"),
    [(1, 0.0, 5), (1, 2.0, 4), (0, 2.0, 5)],
    ids=["zeros", "one stands for all", "into the bias"],
)
def test_counted_by_hand(padding: int, bias: float, dropped: int, tmp_path: Path) -> None:
    done = exported(two(nn.ReLU(), padding, bias=bias), (4, 8, 8), tmp_path / "net.pt2")
    assert (done.filters, done.dropped) == (32, dropped)
    found = shapes(tmp_path / "net.pt2")
    assert found["0.weight"] == (16 - dropped, 4, 3, 3)
    assert found["2.weight"] == (16, 16 - dropped, 3, 3)


def test_a_layer_gains_a_bias(tmp_path: Path) -> None:
    """What the zero filters added was sixteen sums of weights."""
    model = nn.Sequential(
        *(nn.Conv2d(4, 16, 3), nn.ReLU(), nn.Conv2d(16, 8, 3, bias=False), nn.Flatten()),
        *(nn.Linear(8 * 16, 24), nn.ReLU(), nn.Linear(24, 6, bias=False)),
    )
    with torch.no_grad():
        model[0].weight[:5], model[0].bias[:5] = 0, 1.5
        model[4].weight[:7], model[4].bias[:7] = 0, 0.5
        gained = 1.5 * model[2].weight[:, :5].sum((1, 2, 3)), 0.5 * model[6].weight[:, :7].sum(1)
    assert exported(model, (4, 8, 8), tmp_path / "net.pt2").dropped == 12
    state = torch.export.load(tmp_path / "net.pt2").state_dict
    for name, bias in zip(("2", "6"), gained, strict=True):
        torch.testing.assert_close(state[f"{name}.weight_bias"].detach(), bias.detach())


def option_a() -> nn.Module:
    """A residual block whose shortcut pads channels with zeros."""
    return Lambda(
        lambda m, x: m.head(
            (m.block(y := m.stem(x)) + F.pad(y[:, :, ::2, ::2], (0, 0, 0, 0, 4, 4))).relu().mean((2, 3))
        ),
        stem=nn.Sequential(*conv(4, 16), nn.ReLU()),
        block=nn.Sequential(*conv(16, 24, stride=2), nn.ReLU(), *conv(24, 24)),
        head=nn.Linear(24, 16),
    )


def test_a_shortcut_without_weights(tmp_path: Path) -> None:
    """Only what lies inside the block goes."""
    model = with_zeros(option_a(), fraction=0.0)
    with torch.no_grad():
        for layer in (model.stem[0], model.block[0], model.block[3]):
            layer.weight[:7] = 0
        model.block[1].bias[:7] = 0
        model.block[1].running_mean[:7] = 0
    assert exported(model, (4, 8, 8), tmp_path / "net.pt2").dropped == 7
    left = outputs(tmp_path / "net.pt2")
    assert (left["stem.0.weight"], left["block.0.weight"], left["block.3.weight"]) == (16, 17, 24)


def zero_conv(layer: nn.Conv2d, count: int) -> nn.Conv2d:
    with torch.no_grad():
        layer.weight[:count] = 0
        if layer.bias is not None:
            layer.bias[:count] = 0
    return layer


@pytest.mark.parametrize(
    "flat",
    [
        lambda x: x.view(x.size(0), -1),
        lambda x: x.view(-1, 16 * 36),
        lambda x: x.reshape(x.shape[0], 16 * 36),
        lambda x: x.flatten(1),
    ],
    ids=["a free count", "a free batch", "both named", "flatten"],
)
def test_a_count_of_features_that_is_written_out(flat: Any, tmp_path: Path) -> None:
    """Batch by features: the features are as many as there are, whatever the forward says."""
    model = Lambda(lambda m, x: m.b(flat(m.a(x))), a=zero_conv(nn.Conv2d(4, 16, 3), 6), b=nn.Linear(576, 5))
    assert exported(model, (4, 8, 8), tmp_path / "net.pt2").dropped == 6
    assert shapes(tmp_path / "net.pt2")["b.weight"] == (5, 360)


@pytest.mark.parametrize(
    ("forward", "dropped"),
    [
        (lambda m, x: m.b(m.a(x).view(-1, 4, 4, 6, 6).flatten(1, 2)), 0),
        (lambda m, x: m.b(m.a(x).view(-1, 16, 6, 6)), 0),
        (lambda m, x: m.b(m.a(x) * torch.arange(16.0).view(1, 16, 1, 1)), 0),  # no parameter
        (lambda m, x: m.b(torch.where(m.a(x) > 0, m.a(x), 0.0)), 0),
        (lambda m, x: m.b(m.a(x)[:, :16].mul_(m.a(x).shape[1]).relu_()), 6),
    ],
    ids=["groups", "the same shape", "factors", "an operator that is not named", "harmless"],
)
def test_a_forward_that_counts_channels(forward: Any, dropped: int, tmp_path: Path) -> None:
    """Of such a layer nothing goes; of the layer before it does."""
    model = Lambda(
        lambda m, x: forward(m, m.first(x).relu()),
        first=zero_conv(nn.Conv2d(4, 12, 1), 4),
        a=zero_conv(nn.Conv2d(12, 16, 3), 6),
        b=nn.Conv2d(16, 5, 3),
    )
    assert exported(model, (4, 8, 8), tmp_path / "net.pt2").dropped == dropped + 4


@pytest.mark.parametrize(
    "forward",
    [
        lambda m, x: m.b(m.slope(m.a(x))),
        lambda m, x: m.b(m.a(x) * m.slope.weight.view(1, 12, 1, 1)),
        lambda m, x: m.b(m.a(x) * m.slope.weight.reshape(-1, 1, 1)),
        lambda m, x: m.b(m.a(x) + m.slope.weight[None, :, None, None]),
    ],
    ids=["PReLU", "a count", "no count", "axes"],
)
def test_a_vector_with_a_number_per_channel(forward: Any, tmp_path: Path) -> None:
    """It is cut with the filters, whatever shape it takes on the way."""
    model = Lambda(
        forward, a=zero_conv(nn.Conv2d(4, 12, 3), 5), slope=nn.PReLU(12), b=nn.Conv2d(12, 5, 3, bias=False)
    )
    nn.init.normal_(model.slope.weight)
    assert exported(model, (4, 8, 8), tmp_path / "net.pt2").dropped == 5
    assert shapes(tmp_path / "net.pt2")["slope.weight"] == (7,)


def test_a_vector_that_is_read_in_two_shapes(tmp_path: Path) -> None:
    """Its layer is left alone, another one is not."""
    model = Lambda(
        lambda m, x: m.c(
            m.b(m.a(x) * m.g.weight[:, None, None] + m.g.weight.view(1, 12, 1, 1)) * m.t.view(1, 1)
        ),
        a=zero_conv(nn.Conv2d(4, 12, 3), 5),
        g=nn.PReLU(12),
        b=zero_conv(nn.Conv2d(12, 8, 3), 2),
        c=nn.Conv2d(8, 5, 1),
    )
    model.t = nn.Parameter(torch.tensor(2.0))
    assert exported(model, (4, 8, 8), tmp_path / "net.pt2").dropped == 2


def test_a_shift_that_is_no_parameter_takes_no_constant(tmp_path: Path) -> None:
    """What zero filters add to it one of them adds for all; of other layers all go."""
    model = Lambda(
        lambda m, x: m.last(m.c(m.b(m.a(x).sigmoid()) + torch.arange(10.0)).relu()),
        a=nn.Linear(6, 12),
        b=nn.Linear(12, 10, bias=False),
        c=nn.Linear(10, 8),
        last=nn.Linear(8, 4),
    )
    with torch.no_grad():
        model.a.weight[:5], model.c.weight[:3] = 0, 0
    assert exported(model, (7, 6), tmp_path / "net.pt2").dropped == 3 + 4


def test_a_forward_that_fails_without_the_filters(tmp_path: Path) -> None:
    """ONNX has no such operator, as it does nothing; in torch it counts channels. The program is whole."""
    model = Lambda(
        lambda m, x: m.b(m.a(x).expand(x.shape[0], 16, 6, 6)),
        a=zero_conv(nn.Conv2d(4, 16, 3), 6),
        b=nn.Conv2d(16, 5, 3),
    )
    done = exported(model, (4, 8, 8), tmp_path / "net.pt2", whole=True)
    assert (done.filters, done.dropped) == (21, 0)
    assert "10 -> 16" in done.kept_because
    assert outputs(tmp_path / "net.pt2") == {"a.weight": 16, "b.weight": 5}


def test_a_layer_under_two_names_and_a_layer_used_twice(tmp_path: Path) -> None:
    """They are left alone; another layer is not."""
    model = Lambda(
        lambda m, x: m.last(m.c(m.b(m.a(m.a(m.first(x)))).relu())),
        first=zero_conv(nn.Conv2d(4, 12, 3), 5),
        a=zero_conv(nn.Conv2d(12, 12, 3, padding=1), 5),
        b=zero_conv(nn.Conv2d(12, 16, 3), 6),
        c=nn.Conv2d(16, 12, 3),
    )
    model.last = model.a
    assert exported(model, (4, 12, 12), tmp_path / "net.pt2").dropped == 6
    found = shapes(tmp_path / "net.pt2")
    assert (found["first.weight"][0], found["a.weight"][0], found["b.weight"][0]) == (12, 12, 10)


def test_a_batch_norm_of_two_layers(tmp_path: Path) -> None:
    """One would lose other channels than the other, so these layers are left alone; a third is not."""
    model = Lambda(
        lambda m, x: m.d(m.c(m.norm(m.b(m.norm(m.a(x)).relu())).relu()).relu()),
        a=zero_conv(nn.Conv2d(4, 16, 3), 6),
        norm=nn.BatchNorm2d(16),
        b=zero_conv(nn.Conv2d(16, 16, 3), 3),
        c=zero_conv(nn.Conv2d(16, 8, 3), 2),
        d=nn.Conv2d(8, 5, 1),
    )
    assert exported(with_zeros(model, 0.0), (4, 10, 10), tmp_path / "net.pt2").dropped == 2
    assert outputs(tmp_path / "net.pt2") == {"a.weight": 16, "b.weight": 16, "c.weight": 6, "d.weight": 5}


def test_nothing_to_drop(tmp_path: Path) -> None:
    torch.manual_seed(0)
    done = exported(digits_resnet(), (1, 8, 8), tmp_path / "net.pt2")
    assert (done.dropped, done.kept_because) == (0, "")


def test_a_program_that_differs_is_not_written_smaller(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One weight off by a thousandth: the check finds it, and the whole network is written."""
    original = pt2._changes

    def spoiled(program: Any) -> Any:
        pruned, changes = original(program)
        changes.parameters["2.weight"] *= 1.001
        return pruned, changes

    monkeypatch.setattr(pt2, "_changes", spoiled)
    done = exported(two(nn.ReLU(), 0, bias=2.0), (4, 8, 8), tmp_path / "net.pt2", whole=True)
    assert (done.filters, done.dropped) == (32, 0)
    assert shapes(tmp_path / "net.pt2")["0.weight"][0] == 16


def test_a_network_without_an_onnx_graph(tmp_path: Path) -> None:
    """What torch can trace and ONNX cannot say is exported whole."""
    model = Lambda(
        lambda m, x: m.b(torch.special.bessel_j0(m.a(x))),
        a=zero_conv(nn.Conv2d(4, 16, 3), 6),
        b=nn.Conv2d(16, 5, 3),
    )
    done = exported(model, (4, 8, 8), tmp_path / "net.pt2", whole=True)
    assert (done.filters, done.dropped) == (None, 0)


def test_the_vgg_of_the_gallery(tmp_path: Path) -> None:
    """More than half of its filters go; it runs in a process that has neither pwfn nor the model."""
    path, model = tmp_path / "net.pt2", create("cifar_vgg16")
    facts = from_file(VGG, "pt2", path)
    assert (facts["filters"], facts["dropped"], facts["kept_because"]) == (4234, 2326, "")
    assert facts["sentence"].endswith("; 2,326 of 4,234 filters were dropped")
    assert facts["file_bytes"] < 0.2 * 4 * 14_700_000
    batch = torch.randn(7, 3, 32, 32)
    torch.save(batch, tmp_path / "batch.pt")
    code = (
        "import sys, torch; program = torch.export.load('net.pt2').module(); "
        "torch.save(program(torch.load('batch.pt')).detach(), 'found.pt'); assert 'pwfn' not in sys.modules"
    )
    plain = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    subprocess.run([sys.executable, "-c", code], check=True, cwd=tmp_path, env=plain)
    with torch.no_grad():
        wanted = load(VGG).apply_to(model).eval()(batch)
    torch.testing.assert_close(torch.load(tmp_path / "found.pt"), wanted, rtol=1e-5, atol=1e-5)


def test_the_command_says_why_nothing_was_dropped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(_: Any) -> Any:
        raise RuntimeError("there is no graph\nand a long trace")

    monkeypatch.setattr(pt2, "_changes", fails)
    as_it_is(digits_resnet()).save(tmp_path / "net.pwfn", record={"model": "digits_resnet"})
    facts = from_file(tmp_path / "net.pwfn", "pt2")
    assert facts["path"] == str(tmp_path / "net.pt2")
    assert (facts["filters"], facts["dropped"]) == (None, 0)
    assert facts["sentence"].endswith("; filters could not be dropped (there is no graph)")


def test_the_file_says_what_it_was_made_of_and_nothing_else(tmp_path: Path) -> None:
    model = two(nn.ReLU(), 1)
    path = tmp_path / "net.pt2"
    exported(model, (4, 8, 8), path)
    notes = {"provenance.json": ""}
    torch.export.load(path, extra_files=notes)
    assert json.loads(notes["provenance.json"]) == {
        "pwfn_version": __version__,
        "pwfn_content_sha256": as_it_is(model).content_sha256(),
        "pwfn_method": "",
    }
    with zipfile.ZipFile(path) as file:
        assert not any(str(ROOT).encode() in file.read(name) for name in file.namelist())
    first = path.read_bytes()
    exported(model, (4, 8, 8), path)
    assert path.read_bytes() == first


class Logits:
    def __init__(self, logits: Tensor) -> None:
        self.logits = logits


def test_an_output_with_logits(tmp_path: Path) -> None:
    inner = two(nn.ReLU(), 1)
    model = Lambda(lambda m, x: Logits(m.inner(x)), inner=inner)
    assert to_pt2(as_it_is(model), model, torch.zeros(1, 4, 8, 8), tmp_path / "net.pt2").dropped == 5
    batch = torch.randn(3, 4, 8, 8)
    torch.testing.assert_close(torch.export.load(tmp_path / "net.pt2").module()(batch), inner(batch))


@pytest.mark.parametrize(
    ("forward", "words"),
    [
        (lambda m, x: m.a(x) if x.sum() > 0 else m.b(x), "torch cannot export Lambda as a program: "),
        (lambda m, x: m.a(x).view(2, -1), "Lambda cannot run on an input of shape 3×6"),
        (lambda m, x: (m.a(x), m.b(x)), "Lambda returns a tuple: wrap it"),
    ],
)
def test_networks_that_cannot_be_exported(forward: Any, words: str, tmp_path: Path) -> None:
    model = Lambda(forward, a=nn.Linear(6, 5), b=nn.Linear(6, 5))
    path = tmp_path / "net.pt2"
    path.write_bytes(b"old")
    with pytest.raises(PwfnError) as caught:
        to_pt2(as_it_is(model), model, torch.zeros(2, 6), path)
    assert str(caught.value).startswith(words)
    assert "\n" not in str(caught.value)
    assert path.read_bytes() == b"old"
    assert list(tmp_path.iterdir()) == [path]


def test_quantised_activations_are_refused(tmp_path: Path) -> None:
    model = two(nn.ReLU(), 1)
    compressed = as_it_is(model)
    compressed.record["activations"] = {}
    with pytest.raises(PwfnError, match="activations, which are not written to pt2: export it to safetens"):
        to_pt2(compressed, model, torch.zeros(2, 4, 8, 8), tmp_path / "net.pt2")
    assert list(tmp_path.iterdir()) == []


def test_a_whole_program_that_differs_leaves_the_old_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "net.pt2"
    path.write_bytes(b"old")
    monkeypatch.setattr(pt2, "_differences", lambda *_: [(0.0, 9.0), (1e-3, 0.5)])
    with pytest.raises(PwfnError, match="not written, because the output of the program differs"):
        to_pt2(as_it_is(two(nn.ReLU(), 1)), two(nn.ReLU(), 1), torch.zeros(2, 4, 8, 8), path)
    assert path.read_bytes() == b"old"
    assert list(tmp_path.iterdir()) == [path]
