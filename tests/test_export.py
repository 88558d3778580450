"""Exports: ONNX with palettes compared with torch, and dense files that say whether they are exact."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
from cases import Tied
from onnx import TensorProto, numpy_helper
from safetensors.torch import load_file
from torch import Tensor, nn

from pwfn import (
    Compressed,
    Config,
    FileError,
    GaussianNetwork,
    Layout,
    LayoutError,
    PwfnError,
    __version__,
    load,
)
from pwfn.export import from_file, reference, to_onnx, to_pt2, to_safetensors, to_torch
from pwfn.export import onnx as module_under_test
from pwfn.layout import untouched
from pwfn.zoo.models import create, digits_resnet

SMALL = 256  # weights; smaller tensors stay dense


def randomised(model: nn.Module) -> nn.Module:
    """With BatchNorm as after some training: folded away wrongly, it would show."""
    for module in model.modules():
        if isinstance(module, nn.modules.batchnorm._BatchNorm):
            module.running_mean.normal_(0, 0.1)
            module.running_var.uniform_(0.5, 1.5)
            nn.init.uniform_(module.weight, 0.5, 1.5)
            nn.init.normal_(module.bias, 0, 0.1)
    return model


def fixed(model: nn.Module, include: tuple[str, ...] = ()) -> Compressed:
    """All weights fixed in one round."""
    net = GaussianNetwork(model, Config().override({"layout.include": list(include)}))
    net.fix(1.0)
    return net.finish()


def rounded(model: nn.Module) -> Compressed:
    """Weights rounded to two significant bits: quicker than fixing where there are millions."""
    layout = Layout.of(model)
    mantissa, exponent = torch.frexp(layout.gather(model).detach())
    values = torch.ldexp((mantissa * 4).round() / 4, exponent)
    values[values.abs() < 2.0**-12] = 0
    return Compressed.of(layout, values, None, untouched(model, layout))


def with_values(count: int, weights: int = 40_000) -> tuple[Compressed, nn.Module]:
    """A linear layer, 200 inputs to as many outputs, whose weights take just that many values."""
    torch.manual_seed(0)
    model = nn.Linear(weights // 200, 200, bias=False)
    values = (torch.arange(weights) % count).float()[torch.randperm(weights)] / count - 0.5
    return Compressed.of(Layout.of(model), values, None, {}), model


def runtime(path: Path, batch: Tensor) -> Tensor:
    session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
    (found,) = session.run(None, {session.get_inputs()[0].name: batch.numpy()})
    return torch.from_numpy(found)


def agree(path: Path, module: nn.Module, batch: Tensor) -> None:
    """onnxruntime's output is torch's, to 1e-5 of the largest output or of 1."""
    with torch.no_grad():
        wanted = module.eval()(batch)
    found = runtime(path, batch)
    assert found.shape == wanted.shape
    assert float((found - wanted).abs().max()) <= 1e-5 * max(1.0, float(wanted.abs().max()))


def check_graph(path: Path, compressed: Compressed) -> dict[str, np.ndarray]:
    """Every compressed tensor of some size is a palette and indices, and nowhere else in the file."""
    proto = onnx.load(path)
    onnx.checker.check_model(proto, full_check=True)
    constants = {item.name: numpy_helper.to_array(item) for item in proto.graph.initializer}
    made_by = {output: node for node in proto.graph.node for output in node.output}
    state = compressed.dense_state_dict()
    for entry in compressed.layout.entries:
        if entry.size < SMALL:
            continue
        assert not constants.keys() & {entry.name, *entry.aliases}
        (name,) = (n for n in (entry.name, *entry.aliases) if f"{n}.indices" in constants)
        palette, indices = constants[f"{name}.palette"], constants[f"{name}.indices"]
        assert indices.dtype == (np.uint8 if len(palette) <= 256 else np.uint16)
        assert palette.dtype == np.float32
        assert len(palette) == state[name].unique().numel()
        assert np.array_equal(palette[indices], state[name].numpy())
        gather = made_by[name]
        assert gather.op_type == "Gather"
        assert gather.input[0] == f"{name}.palette"
        cast = made_by[gather.input[1]]
        assert (cast.op_type, list(cast.input)) == ("Cast", [f"{name}.indices"])
    # Whatever else is large is a tensor that was never compressed.
    large = {
        item.name
        for item in proto.graph.initializer
        if item.data_type == TensorProto.FLOAT and np.prod(item.dims) >= SMALL
    }
    assert {name for name in large if not name.endswith(".palette")} <= compressed.untouched.keys()
    for node in proto.graph.node:
        for attribute in node.attribute:
            assert np.prod(attribute.t.dims) < SMALL or attribute.t.data_type != TensorProto.FLOAT
    return constants


# ONNX: networks of timm


@pytest.mark.parametrize(
    ("name", "options", "weights"),
    [("resnet18", {}, 11_679_912), ("deit_tiny_patch16_224", {"img_size": 64}, 12 * 444_096 + 340_648)],
)
def test_networks(name: str, options: dict[str, Any], weights: int, tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = randomised(create(name, **options))
    compressed = rounded(model)
    path = tmp_path / "net.onnx"
    done = to_onnx(compressed, model, torch.zeros(1, 3, 64, 64), path)
    check_graph(path, compressed)
    assert done.palettes == sum(entry.size >= SMALL for entry in compressed.layout.entries)
    assert done.file_bytes == path.stat().st_size
    assert done.largest_error <= 1e-5 * max(1.0, done.largest_output)
    module = compressed.apply_to(model)
    for size in (1, 3):
        agree(path, module, torch.randn(size, 3, 64, 64))
    assert compressed.layout.size == weights
    assert done.file_bytes <= 0.30 * 4 * weights


# ONNX: kinds of layers


class Grouped(nn.Module):
    """Convolutions with groups, transposed and over one axis, and linear layers on three axes."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(8, 32, 3, groups=4)
        self.depth = nn.Conv2d(32, 32, 3, groups=32)
        self.up = nn.ConvTranspose2d(32, 16, 2, stride=2, groups=2)
        self.line = nn.Conv1d(16, 16, 3, padding=1)
        self.linear = nn.Linear(16, 40)
        self.bilinear = nn.Bilinear(40, 40, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.up(torch.relu(self.depth(torch.relu(self.first(x))))).flatten(2)
        x = self.linear(self.line(x).transpose(1, 2))
        return self.bilinear(x, x.flip(1))


class Attending(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(32, 4, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.attention(x, x, x, need_weights=False)[0]


@pytest.mark.parametrize(
    ("make", "shape"),
    [
        (lambda: randomised(digits_resnet()), (1, 8, 8)),
        (Grouped, (8, 9, 9)),
        (Attending, (5, 32)),
        (lambda: nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 20)), (64,)),
    ],
    ids=["residual", "grouped", "attention", "linear"],
)
def test_layers(make: Any, shape: tuple[int, ...], tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = make()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    compressed = fixed(model)
    path = tmp_path / "net.onnx"
    done = to_onnx(compressed, model, torch.zeros(2, *shape), path)
    check_graph(path, compressed)
    assert done.palettes == sum(entry.size >= SMALL for entry in compressed.layout.entries) > 0
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor, before[name]), name  # the model given is not changed
    module = compressed.apply_to(model)
    for size in (1, 2, 7):
        agree(path, module, torch.randn(size, *shape))


def test_tied_weights_are_there_once_and_tokens_may_be_the_input(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = randomised(Tied(50, 24))
    compressed = fixed(model, include=("embedding.*",))
    path = tmp_path / "net.onnx"
    done = to_onnx(compressed, model, torch.randint(0, 50, (2, 6)), path)
    constants = check_graph(path, compressed)
    assert done.palettes == sum(name.endswith(".indices") for name in constants) == 2
    module = compressed.apply_to(model)
    for size in (1, 3):
        agree(path, module, torch.randint(0, 50, (size, 6)))


@pytest.mark.parametrize(("values", "dtype"), [(256, np.uint8), (257, np.uint16)])
def test_width_of_the_indices(values: int, dtype: type, tmp_path: Path) -> None:
    compressed, model = with_values(values)
    path = tmp_path / "net.onnx"
    to_onnx(compressed, model, torch.zeros(2, 200), path)
    constants = check_graph(path, compressed)
    assert constants["weight.indices"].dtype == dtype
    assert len(constants["weight.palette"]) == values
    assert path.stat().st_size < 40_000 * np.dtype(dtype).itemsize + 4 * values + 1000


def test_a_palette_that_would_not_be_smaller_is_not_made(tmp_path: Path) -> None:
    compressed, model = with_values(20_000)  # 4 × 20,000 + 2 × 40,000 bytes against 4 × 40,000
    path = tmp_path / "net.onnx"
    assert to_onnx(compressed, model, torch.zeros(2, 200), path).palettes == 0
    (item,) = onnx.load(path).graph.initializer
    assert np.array_equal(numpy_helper.to_array(item), compressed.dense_state_dict()["weight"].numpy())
    compressed, model = with_values(19_999)
    assert to_onnx(compressed, model, torch.zeros(2, 200), path).palettes == 1


def test_several_codebooks(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(40, 30), nn.ReLU(), nn.Linear(30, 20))
    layout = Layout.of(model)
    values = (layout.gather(model).detach() * 20).round() / 20
    compressed = Compressed.of(layout, values, None, {}, divide=lambda entry: (0, entry.shape[0] // 10))
    path = tmp_path / "net.onnx"
    to_onnx(compressed, model, torch.zeros(2, 40), path)
    check_graph(path, compressed)
    agree(path, compressed.apply_to(model), torch.randn(3, 40))


# ONNX: what goes wrong


class Odd(nn.Module):
    """One linear layer, and a forward that is given."""

    def __init__(self, forward: Any) -> None:
        super().__init__()
        self.linear = nn.Linear(20, 20)
        self._forward = forward

    def forward(self, x: Tensor) -> Any:
        return self._forward(self.linear(x))


def eigenvalues(x: Tensor) -> Tensor:
    return torch.linalg.eigvals(x[:, None] * torch.eye(20)).real


def branching(x: Tensor) -> Tensor:
    return x if x.sum() > 0 else -x


@pytest.mark.parametrize(
    ("forward", "words"),
    [
        (lambda x: (x, x), "^Odd returns a tuple"),
        (lambda x: {"boxes": x}, "^Odd returns a dict"),
        (lambda x: x[:, :0], "^Odd returns an empty tensor"),
        (lambda x: -x if len(x) == 1 else x, "^torch can export Odd for batches of 2 only"),
        (lambda x: x.view(2, 4, 5), r"^Odd cannot run on an input of shape 3×20 and type float32: .*'\[2, 4"),
        (eigenvalues, "^torch cannot export Odd to ONNX: No ONNX function found for .*linalg_eig"),
        (branching, "^torch cannot export Odd to ONNX: .*data-dependent"),
    ],
)
def test_a_model_that_cannot_be_exported(
    forward: Any, words: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    model = Odd(forward)
    with pytest.raises(PwfnError, match=words) as caught:
        to_onnx(fixed(model), model, torch.zeros(2, 20), tmp_path / "net.onnx")
    assert "\n" not in str(caught.value)
    assert "\x1b" not in str(caught.value)
    assert list(tmp_path.iterdir()) == []
    assert capfd.readouterr() == ("", "")


@pytest.mark.parametrize(
    ("example", "words"),
    [
        (torch.zeros(2, 19), "shape 3×19 and type float32"),
        (torch.zeros(2, 20, dtype=torch.int64), "shape 3×20 and type int64"),
        (torch.zeros(0, 20), "no input"),
        (torch.zeros(0, 20, dtype=torch.int64), "no input"),
        (torch.tensor(1.0), "no input"),
    ],
)
def test_an_example_that_does_not_fit(example: Tensor, words: str, tmp_path: Path) -> None:
    model = Odd(lambda x: x)
    with pytest.raises(PwfnError, match=words):
        to_onnx(fixed(model), model, example, tmp_path / "net.onnx")


@pytest.mark.parametrize("write", [to_onnx, to_pt2])
@pytest.mark.parametrize(
    ("model", "example", "words"),
    [
        (nn.Linear, torch.zeros(2, 20), "the model is a type: allowed is a torch.nn.Module"),
        (nn.Linear(20, 20), (torch.zeros(2, 20),), "the example is a tuple: give one batch as a tensor"),
        (nn.Linear(20, 20), np.zeros((2, 20)), "the example is a ndarray: give one batch as a tensor"),
    ],
)
def test_no_model_and_no_tensor(write: Any, model: Any, example: Any, words: str, tmp_path: Path) -> None:
    with pytest.raises(PwfnError, match=f"^{words}"):
        write(fixed(nn.Linear(20, 20)), model, example, tmp_path / "net")


def test_a_model_that_cannot_be_copied_or_has_no_memory(tmp_path: Path) -> None:
    model = nn.Linear(40, 40)
    compressed = fixed(model)
    model.last = model(torch.zeros(1, 40))
    with pytest.raises(PwfnError, match=r"^Linear cannot be copied: Only Tensors created explicitly"):
        to_onnx(compressed, model, torch.zeros(2, 40), tmp_path / "net.onnx")
    to_onnx(compressed, nn.Linear(40, 40, device="meta"), torch.zeros(2, 40), tmp_path / "net.onnx")
    agree(tmp_path / "net.onnx", compressed.apply_to(nn.Linear(40, 40)), torch.randn(3, 40))


@pytest.mark.parametrize("write", [to_onnx, to_pt2])
@pytest.mark.parametrize("forward", [lambda x: x.mul_(2), lambda x: x.log()], ids=["in place", "positive"])
def test_networks_that_change_their_input_or_take_few(forward: Any, write: Any, tmp_path: Path) -> None:
    """The first sees each test batch as it was, the second has no answer to negative numbers."""
    model = nn.Sequential(Odd(forward), nn.Linear(20, 20))
    model[0].linear = nn.Identity()
    example = torch.rand(2, 20) + 0.5
    before = example.clone()
    done = write(fixed(model), model, example, tmp_path / "net")
    assert 0 <= done.largest_error <= 1e-5
    assert torch.equal(example, before)
    if forward(-before).isnan().any():
        with pytest.raises(
            PwfnError, match=r"^Sequential gives outputs that are not finite, for random inputs"
        ):
            write(fixed(model), model, -before, tmp_path / "net")


def test_models_in_other_types_are_exported_in_fp32(tmp_path: Path) -> None:
    for dtype in (torch.bfloat16, torch.float64):
        torch.manual_seed(0)
        model = nn.Linear(40, 40).to(dtype)
        compressed = fixed(model)
        path = tmp_path / "net.onnx"
        to_onnx(compressed, model, torch.zeros(2, 40, dtype=dtype), path)
        assert model.weight.dtype is dtype
        agree(path, compressed.apply_to(nn.Linear(40, 40)), torch.randn(3, 40))


def test_another_architecture(tmp_path: Path) -> None:
    with pytest.raises(LayoutError, match=r"linear\.weight is absent in the model, 20×20 here"):
        to_onnx(fixed(Odd(lambda x: x)), nn.Linear(20, 20), torch.zeros(2, 20), tmp_path / "net.onnx")


@pytest.mark.parametrize("error", [1.001e-5, float("nan")])
def test_a_difference_from_torch_leaves_the_old_file(
    error: float, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    model = Odd(lambda x: x)
    compressed = fixed(model)
    path = tmp_path / "net.onnx"
    path.write_bytes(b"old")
    monkeypatch.setattr(module_under_test, "_differences", lambda *_: [(0.0, 9.0), (error, 0.5)])
    with pytest.raises(PwfnError, match="not written"):
        to_onnx(compressed, model, torch.zeros(2, 20), path)
    assert path.read_bytes() == b"old"
    assert list(tmp_path.iterdir()) == [path]
    monkeypatch.setattr(module_under_test, "_differences", lambda *_: [(1e-5, 0.5), (2e-5, 2.0)])
    done = to_onnx(compressed, model, torch.zeros(2, 20), path)
    assert (done.largest_error, done.largest_output) == (2e-5, 2.0)
    assert path.read_bytes() != b"old"


def test_the_check_sees_another_shape(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """3×1×20 less 3×20 would be 3×3×20: shapes must agree before numbers are compared."""
    original = reference._output
    monkeypatch.setattr(reference, "_output", lambda *args: original(*args)[:, None])
    model = Odd(lambda x: x)
    with pytest.raises(PwfnError, match=r"^for a batch of 3 .* \(3, 20\) .* \(3, 1, 20\)"):
        to_onnx(fixed(model), model, torch.zeros(2, 20), tmp_path / "net.onnx")
    assert list(tmp_path.iterdir()) == []


def test_the_check_sees_a_wrong_weight(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """One palette value off by a thousandth: the real check must find it."""
    original = module_under_test._add_palettes

    def spoiled(proto: Any, *rest: Any) -> int:
        count = original(proto, *rest)
        item = next(item for item in proto.graph.initializer if item.name.endswith(".palette"))
        palette = numpy_helper.to_array(item).copy()
        palette[0] *= 1.001
        item.CopyFrom(numpy_helper.from_array(palette, item.name))
        return count

    torch.manual_seed(0)
    model = Odd(lambda x: x)
    monkeypatch.setattr(module_under_test, "_add_palettes", spoiled)
    with pytest.raises(PwfnError, match="not written"):
        to_onnx(fixed(model), model, torch.zeros(2, 20), tmp_path / "net.onnx")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("package", ["onnx", "onnxruntime", "onnxscript"])
def test_without_the_packages(package: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setitem(sys.modules, package, None)
    model = Odd(lambda x: x)
    with pytest.raises(PwfnError, match=rf"needs {package}: pip install 'pwfn\[onnx\]'$"):
        to_onnx(fixed(model), model, torch.zeros(2, 20), tmp_path / "net.onnx")


# Dense


def mixed(values: list[float], scale: float = 1.0) -> Compressed:
    """Compressed weights, a norm with this scale, tied tensors of both kinds, and a counter."""
    model = Tied()
    layout = Layout.of(model, exclude=["head.weight"])
    nn.init.constant_(model.norm.weight, scale)
    nn.init.constant_(model.embedding.weight, 0.5)
    weights = torch.tensor([values[i % len(values)] for i in range(layout.size)])
    return Compressed.of(layout, weights, None, untouched(model, layout))


TYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
ALL_NAMES = set(Tied().state_dict())


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("target", ["safetensors", "torch"])
def test_values_come_back(dtype: str, target: str, tmp_path: Path) -> None:
    compressed = mixed([0.5, -0.375, 2.0**-9, 0.0])
    path = tmp_path / "net"
    write = to_safetensors if target == "safetensors" else to_torch
    exactness = write(compressed, path, dtype)
    assert (exactness.dtype, exactness.weights_exact, exactness.untouched_exact) == (dtype, True, True)
    state = load_file(path) if target == "safetensors" else torch.load(path, weights_only=True)
    wanted = compressed.dense_state_dict()
    tied = {"second.weight", "second.bias", "head.weight"}
    assert set(state) == (ALL_NAMES - tied if target == "safetensors" else ALL_NAMES)
    for name, tensor in state.items():
        floating = wanted[name].is_floating_point()
        assert tensor.dtype == (TYPES[dtype] if floating else torch.int64), name
        assert torch.equal(tensor.to(wanted[name].dtype), wanted[name]), name


@pytest.mark.parametrize(
    ("value", "exact"),
    [
        # a sum of two powers of two spans 8 bits, as many as bf16 has, or 9
        (1 + 2.0**-7, {"fp32", "bf16", "fp16"}),
        (1 + 2.0**-8, {"fp32", "fp16"}),
        (-(2.0**-6) - 2.0**-13, {"fp32", "bf16", "fp16"}),
        (1 + 2.0**-10, {"fp32", "fp16"}),
        (1 + 2.0**-11, {"fp32"}),
        # out of fp16's range, not of bf16's
        (2.0**17, {"fp32", "bf16"}),
        (2.0**-25, {"fp32", "bf16"}),
        (2.0**-24, {"fp32", "bf16", "fp16"}),  # fp16's smallest
        (0.1, {"fp32"}),
    ],
)
@pytest.mark.parametrize("dtype", TYPES)
def test_exactness_is_told_of_each_kind(value: float, exact: set[str], dtype: str, tmp_path: Path) -> None:
    value = float(torch.tensor(value))
    weights = to_safetensors(mixed([0.5, value]), tmp_path / "a", dtype)
    assert (weights.weights_exact, weights.untouched_exact) == (dtype in exact, True)
    others = to_torch(mixed([0.5]), tmp_path / "b", dtype)
    assert (others.weights_exact, others.untouched_exact) == (True, True)
    others = to_torch(mixed([0.5], scale=value), tmp_path / "b", dtype)
    assert (others.weights_exact, others.untouched_exact) == (True, dtype in exact)
    told = "exact" if dtype in exact else "rounded"
    assert f"weights are {told}, the other tensors exact" in weights.sentence()


def test_nan_and_infinity_are_kept_as_they_are(tmp_path: Path) -> None:
    for scale in (float("nan"), float("inf"), -float("inf")):
        path = tmp_path / "net.pt"
        assert to_torch(mixed([0.5], scale=scale), path, "bf16").untouched_exact
        kept = torch.load(path, weights_only=True)["norm.weight"]
        assert torch.equal(kept.isnan(), torch.full((6,), scale != scale))
    assert not to_torch(mixed([0.5], scale=1e38), tmp_path / "net.pt", "fp16").untouched_exact


def test_a_type_that_safetensors_does_not_have(tmp_path: Path) -> None:
    compressed = mixed([0.5])
    compressed.untouched["phase"] = torch.tensor([1j], dtype=torch.complex128)
    with pytest.raises(
        FileError, match=r"^phase is complex128, which safetensors has no type for: write a torch"
    ):
        to_safetensors(compressed, tmp_path / "net")
    to_torch(compressed, tmp_path / "net")
    assert torch.equal(torch.load(tmp_path / "net")["phase"], compressed.untouched["phase"])


def test_unknown_type(tmp_path: Path) -> None:
    for write in (to_safetensors, to_torch):
        with pytest.raises(PwfnError, match="'int8': allowed is one of fp32, bf16, fp16"):
            write(mixed([0.5]), tmp_path / "net", "int8")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("write", [to_safetensors, to_torch])
def test_a_write_that_fails_leaves_the_old_file(
    write: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    path = tmp_path / "net"
    path.write_bytes(b"old")

    def full(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(FileError, match="net: cannot be written: No space left on device"):
        write(mixed([0.5]), path, "fp32")
    assert path.read_bytes() == b"old"
    assert list(tmp_path.iterdir()) == [path]


# From a file


@pytest.fixture
def digits(tmp_path: Path) -> Path:
    torch.manual_seed(0)
    path = tmp_path / "digits.v2.pwfn"
    fixed(randomised(digits_resnet())).save(path, record={"model": "digits_resnet", "method": "pwfn"})
    return path


def test_a_graph_names_what_it_was_made_of(digits: Path, tmp_path: Path) -> None:
    path = tmp_path / "net.onnx"
    from_file(digits, "onnx", path)
    session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
    facts, source = session.get_modelmeta(), load(digits)
    assert facts.producer_name == "pwfn"
    assert facts.custom_metadata_map == {
        "pwfn_version": __version__,
        "pwfn_content_sha256": source.content_sha256(),
        "pwfn_method": "pwfn",
    }


@pytest.mark.parametrize(
    ("to", "ending"),
    [("safetensors", ".safetensors"), ("torch", ".pt"), ("onnx", ".onnx"), ("pt2", ".pt2")],
)
def test_the_target_lies_beside_the_file_unless_named(digits: Path, to: str, ending: str) -> None:
    facts = from_file(digits, to)
    target = digits.with_name(f"digits.v2{ending}")
    assert facts["path"] == str(target)
    assert facts["file_bytes"] == target.stat().st_size
    assert facts["sentence"].startswith(f"{target}: {target.stat().st_size:,} bytes")
    other = digits.with_name("other")
    assert from_file(digits, to, other)["path"] == str(other)
    assert other.read_bytes() == target.read_bytes()  # whatever it is called


def test_the_source_is_never_the_target(digits: Path) -> None:
    """A .pwfn file under any other name is not overwritten by its own export."""
    renamed = digits.rename(digits.with_name("net.pt"))
    before = renamed.read_bytes()
    with pytest.raises(PwfnError, match="is the file itself: name another with --out"):
        from_file(renamed, "torch", renamed)
    assert from_file(renamed, "torch")["path"] == f"{renamed}.pt"
    assert renamed.read_bytes() == before


def test_a_target_that_cannot_be_looked_at(digits: Path) -> None:
    for name in ("a" * 300, "a" * 300 + "/net.pt"):
        with pytest.raises(PwfnError, match=": cannot be written: File name too long"):
            from_file(digits, "torch", digits.parent / name)


def test_a_folder_that_is_not_there_is_told_before_the_work(
    digits: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pwfn.export.command._graph", lambda *_: pytest.fail("the export began"))
    with pytest.raises(FileError, match="nowhere"):
        from_file(digits, "onnx", digits.parent / "nowhere" / "net.onnx")


def test_a_file_may_not_choose_code_to_run(digits: Path, tmp_path: Path) -> None:
    ran = tmp_path / "ran"
    code = tmp_path / "code.py"
    code.write_text(
        f"import pathlib\nfrom pwfn.zoo.models import digits_resnet\npathlib.Path({str(ran)!r}).touch()\n"
        "def net():\n    return digits_resnet()\n"
    )
    named = f"python:{code}:net"
    path = tmp_path / "evil.pwfn"
    fixed(digits_resnet()).save(path, record={"model": named})
    with pytest.raises(PwfnError, match=f"the file wants to run .*: if you trust it, say --model {named}"):
        from_file(path, "onnx", input_shape="1,8,8")
    assert not ran.exists()
    assert from_file(path, "onnx", model=named, input_shape="1,8,8")["palettes"] == 7
    assert ran.exists()


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"to": "tflite"}, "target 'tflite' is unknown: allowed is one of onnx, pt2, safetensors, torch"),
        ({"to": "onnx", "dtype": "bf16"}, "dtype 'bf16' is for safetensors and torch"),
        ({"to": "pt2", "dtype": "fp16"}, "dtype 'fp16' is for safetensors and torch: pt2 is always fp32"),
        ({"to": "torch", "model": "resnet18"}, "--model and --input-shape are for onnx and pt2"),
        ({"to": "torch", "input_shape": "1,8,8"}, "--model and --input-shape are for onnx and pt2"),
        ({"to": "onnx", "model": "resnet19"}, "model 'resnet19' is not known to pwfn, timm or torchvision"),
        ({"to": "onnx", "model": "cifar_resnet20"}, "the model does not match: conv1.weight is 16×3×3×3"),
        ({"to": "onnx", "input_shape": "1,eight,8"}, "input shape '1,eight,8' is not a list of whole"),
        ({"to": "onnx", "input_shape": "1,0,8"}, "input shape '1,0,8' is not a list of whole numbers"),
        ({"to": "onnx", "input_shape": ""}, "input shape '' is not a list of whole numbers"),
        ({"to": "onnx", "input_shape": "3,8,8"}, "SmallResNet cannot run on an input of shape 3×3×8×8"),
        ({"to": "pt2", "input_shape": "3,8,8"}, "SmallResNet cannot run on an input of shape 3×3×8×8"),
    ],
)
def test_mistakes(digits: Path, arguments: dict[str, str], words: str) -> None:
    with pytest.raises(PwfnError) as caught:
        from_file(digits, **arguments)
    assert str(caught.value).startswith(words)
    assert "\n" not in str(caught.value)
    assert list(digits.parent.iterdir()) == [digits]


def test_a_file_without_a_models_name(tmp_path: Path) -> None:
    path = tmp_path / "net.pwfn"
    fixed(digits_resnet()).save(path)
    with pytest.raises(
        PwfnError, match=r"^the file does not say which model it is of: name it with --model$"
    ):
        from_file(path, "onnx")
    assert from_file(path, "onnx", model="digits_resnet")["palettes"] == 7


def test_a_model_whose_input_is_not_known(tmp_path: Path) -> None:
    code = tmp_path / "code.py"
    code.write_text("from torch import nn\ndef net():\n    return nn.Linear(30, 30)\n")
    path = tmp_path / "net.pwfn"
    fixed(nn.Linear(30, 30)).save(path)
    with pytest.raises(PwfnError, match=r"the input of .* is not known: give its shape with --input-shape"):
        from_file(path, "onnx", model=f"python:{code}:net")
    assert from_file(path, "onnx", model=f"python:{code}:net", input_shape="30")["palettes"] == 1
