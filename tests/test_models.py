"""Networks by name: their sizes, shortcuts and attention, their weights from files, and unknown names."""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
from collections import OrderedDict
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from pwfn import FileError, GaussianNetwork, Layout, PwfnError
from pwfn.file.compressed import Compressed
from pwfn.zoo.models import (
    DataConfig,
    SmallResNet,
    SmallVGG,
    VisionTransformer,
    create,
    data_config,
    input_shape,
    load_weights,
    noted_classes,
    ready_torchvision,
)
from pwfn.zoo.networks import ResidualBlock

WEIGHTS = Path(__file__).parents[1] / "weights"


# Our own networks


def weights(blocks: int, channels: int, image_channels: int, classes: int = 10) -> int:
    """Convolution and linear weights of a three-stage residual network, counted by hand."""
    total = 9 * image_channels * channels
    narrow = channels
    for wide in (channels, 2 * channels, 4 * channels):
        total += 9 * narrow * wide + (2 * blocks - 1) * 9 * wide * wide
        narrow = wide
    return total + 4 * channels * classes + classes


@pytest.mark.parametrize(
    ("name", "size"),
    [
        ("cifar_resnet20", weights(3, 16, 3)),
        ("cifar_resnet56", weights(9, 16, 3)),
        ("digits_resnet", weights(1, 16, 1)),
        ("cifar_resnet18", 11_164_362),
        ("cifar_vgg16", 14_715_594),
        ("cifar_vit_tiny", 9 * (12 * 192 * 192 + 9 * 192) + 49 * 192 + 193 * 10),
    ],
)
def test_an_own_network_has_its_weights_takes_its_input_and_is_wrapped_bit_equal(
    name: str, size: int
) -> None:
    model = create(name).eval()
    assert Layout.of(model).size == size
    seven = create(name, classes=7).eval()
    shape = input_shape(name, seven)
    assert shape is not None
    x = torch.randn(2, *shape)
    with torch.no_grad():
        assert seven(x).shape == (2, 7)
        assert torch.equal(GaussianNetwork(seven).eval()(x), seven(x))
    assert not all(
        torch.equal(p, q) for p, q in zip(model.parameters(), create(name).parameters(), strict=True)
    )


def test_the_sizes_are_those_that_were_published() -> None:
    assert (weights(3, 16, 3), weights(9, 16, 3)) == (268_346, 848_954)
    stages = sum(9 * a * b + 3 * 9 * b * b for a, b in ((64, 64), (64, 128), (128, 256), (256, 512)))
    projections = 64 * 128 + 128 * 256 + 256 * 512
    assert 9 * 3 * 64 + stages + projections + 512 * 10 + 10 == 11_164_362
    batchnorm = sum(p.numel() for p in create("cifar_resnet18").parameters()) - 11_164_362
    assert batchnorm == 9_600
    widths = [3, 64, 64, 128, 128, 256, 256, 256, 512, 512, 512, 512, 512, 512]
    assert sum(9 * a * b for a, b in pairwise(widths)) + 512 * 10 + 10 == 14_715_594


def test_a_vgg_halves_the_image_after_every_stage() -> None:
    model = SmallVGG(stages=((2, 3), (5,)), classes=4, image_channels=1).eval()
    x = torch.randn(2, 1, 8, 8)
    y = x
    convolutions = [m for m in model.modules() if isinstance(m, nn.Conv2d)]
    for convolution, pooled in zip(convolutions, (False, True, True), strict=True):
        y = torch.relu(convolution(y) * (1 + 1e-5) ** -0.5)  # BatchNorm before any training
        y = nn.functional.max_pool2d(y, 2) if pooled else y
    assert y.shape == (2, 5, 2, 2)
    torch.testing.assert_close(model(x), model.linear(y.mean((2, 3))))


@pytest.mark.parametrize("project", [False, True])
@pytest.mark.parametrize(("channels_in", "channels", "stride"), [(2, 2, 1), (2, 4, 2), (3, 6, 2), (2, 5, 1)])
def test_the_shortcut_of_a_block(channels_in: int, channels: int, stride: int, project: bool) -> None:
    """Padded: every second pixel, and zeros around the channels; projected: 1×1 where shapes differ."""
    block = ResidualBlock(channels_in, channels, stride, project).eval()
    x = torch.randn(2, channels_in, 6, 6)
    if project and (stride > 1 or channels != channels_in):
        shortcut = nn.functional.conv2d(x, block.shortcut[0].weight, stride=stride) / (1 + 1e-5) ** 0.5
    else:
        before = (channels - channels_in) // 2
        shortcut = torch.zeros(2, channels, 6 // stride, 6 // stride)
        shortcut[:, before : before + channels_in] = x[:, :, ::stride, ::stride]
    branch = block.bn2(block.conv2(torch.relu(block.bn1(block.conv1(x)))))
    torch.testing.assert_close(block(x), torch.relu(branch + shortcut))


def test_attention_is_softmax_of_scaled_products_and_is_seen() -> None:
    torch.manual_seed(0)
    attention = VisionTransformer(width=12, heads=3, depth=1).blocks[0].attn
    x = torch.randn(2, 5, 12)
    q, k, v = (part.unflatten(2, (3, 4)).transpose(1, 2) for part in attention.qkv(x).chunk(3, 2))
    by_hand = (q @ k.mT / 2).softmax(-1) @ v
    torch.testing.assert_close(attention(x), attention.proj(by_hand.transpose(1, 2).flatten(2)))
    layout = Layout.of(create("cifar_vit_tiny"))
    seen = [e for e in layout.entries if e.attention]
    assert [e.name for e in seen] == [
        f"blocks.{i}.attn.qkv.{w}" for i in range(9) for w in ("weight", "bias")
    ]
    assert {(e.attention.parts, e.attention.heads) for e in seen if e.attention} == {(("q", "k", "v"), 3)}
    assert {item.name for item in layout.left_out if "norm" not in item.name} == {"position"}


def test_the_transformer_knows_where_a_patch_lies() -> None:
    model = VisionTransformer(image_size=8, patch=4, width=12, depth=1).eval()
    image = torch.zeros(1, 3, 8, 8)
    image[..., :4, :4] = 1
    assert not torch.allclose(model(image), model(image.flip(3)), atol=1e-6)
    nn.init.zeros_(model.position)
    torch.testing.assert_close(model(image), model(image.flip(3)))


# timm's networks


@pytest.mark.parametrize("how", [{"classes": 7}, {"num_classes": 7}])
def test_options_go_to_timm(how: dict[str, int]) -> None:
    model = create("resnet18", in_chans=1, **how)
    assert model.fc.weight.shape == (7, 512)
    assert model.conv1.weight.shape == (64, 1, 7, 7)
    assert input_shape("resnet18", create("resnet18")) == (3, 224, 224)
    assert input_shape("mine", nn.Linear(3, 3)) is None


@pytest.mark.parametrize(
    ("name", "options", "words"),
    [
        ("resnet18.nobody", {}, r"timm cannot make model 'resnet18\.nobody': "),
        ("resnet18", {"number_of_classes": 3}, "timm cannot make model 'resnet18': .*number_of_classes"),
        ("resnet19", {}, "'resnet19' is not known .*did you mean .*'resnet18'.*[?]$"),
        ("cifar_resnet21", {}, "did you mean .*'cifar_resnet20'.*[?]$"),
        ("cifar-vit-tiny", {}, "did you mean .*'cifar_vit_tiny'.*[?]$"),
        ("vit_tiny_patch16_225.augreg", {}, "did you mean .*'vit_tiny_patch16_224'.*[?]$"),
        ("cifar_resnet20", {"classes": 0}, "'cifar_resnet20' with 0 classes"),
        ("cifar_resnet20", {"width": 3}, "'cifar_resnet20' cannot be made: .*width"),
        ("cifar_resnet20", {"pretrained": True}, "'cifar_resnet20' has no pre-trained .*--weights FILE$"),
        (
            "python:nets.py:make",
            {"pretrained": True},
            "'python:nets.py:make' has no .*FILE, or --weights random",
        ),
    ],
)
def test_a_network_that_cannot_be_made(name: str, options: dict[str, Any], words: str) -> None:
    with pytest.raises(PwfnError, match=words) as caught:
        create(name, **options)
    assert "\n" not in str(caught.value)


def test_a_failed_download_is_one_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    ready_torchvision()
    import timm

    def offline(name: str, **options: Any) -> nn.Module:
        assert options == {"pretrained": True}
        raise ConnectionError("no route to host\nand many more lines")

    monkeypatch.setattr(timm, "create_model", offline)
    with pytest.raises(PwfnError, match=r"'resnet18' cannot be downloaded \(ConnectionError\): .*--weights$"):
        create("resnet18", pretrained=True)


def test_without_timm(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "timm", None)
    with pytest.raises(PwfnError, match=r"^model 'resnet18' needs timm: pip install 'pwfn\[timm\]'$"):
        create("resnet18")
    with pytest.raises(PwfnError, match=r"'cifar_resnet21' needs timm: .*did you mean 'cifar_resnet20'"):
        create("cifar_resnet21")
    create("digits_resnet")  # our own need nothing


def test_timm_and_torchvision_are_imported_only_on_demand() -> None:
    ready_torchvision()
    assert hasattr(torch.ops.torchvision, "nms")
    ready_torchvision()  # a second declaration would be an error
    code = (
        "import sys, pwfn, pwfn.zoo.data, pwfn.zoo.models; pwfn.zoo.models.create('digits_resnet'); "
        "print(sorted({'timm', 'torchvision', 'transformers', 'sklearn'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


# Models from a file


@pytest.fixture
def code(tmp_path: Path) -> Path:
    """A file that defines its networks with an import, a class and a constant of its own."""
    path = tmp_path / "my:nets.py"  # a colon in the name: the last one divides
    path.write_text(
        "from dataclasses import dataclass\nfrom torch import nn\n"
        "@dataclass\nclass Sizes:\n    inputs: int = 5\n"
        "WIDTH = Sizes().inputs\n"
        "def net(outputs=2, classes=None):\n    return nn.Linear(WIDTH, classes or outputs)\n"
        "def number():\n    return 3\n"
        "def fails():\n    raise KeyError('missing')\n"
    )
    return path


def test_a_function_of_a_file_makes_the_network(code: Path) -> None:
    assert create(f"python:{code}:net").weight.shape == (2, 5)
    assert create(f"python:{code}:net", outputs=7).weight.shape == (7, 5)
    assert create(f"python:{code}:net", classes=3).weight.shape == (3, 5)


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("python:net", "python:net: allowed is python:FILE:FUNCTION"),
        ("python:{code}:", "allowed is python:FILE:FUNCTION"),
        ("python:/nowhere.py:net", "/nowhere.py: cannot be read: No such file"),
        ("python:{code}:nets", "{code}: has no function 'nets': did you mean 'net'"),
        ("python:{code}:WIDTH", "{code}: has no function 'WIDTH'"),
        ("python:{code}:number", "model 'python:{code}:number' is a int: allowed is a torch.nn.Module"),
        ("python:{code}:fails", "cannot be made: KeyError: 'missing'"),
        ("python:{code.parent}/bad.py:net", "bad.py: cannot be imported: SyntaxError: "),
    ],
)
def test_a_file_that_makes_no_network(code: Path, name: str, words: str) -> None:
    (code.parent / "bad.py").write_text("def net(:\n")
    with pytest.raises(PwfnError, match=words.format(code=code)):
        create(name.format(code=code))


# Weights from a file


@pytest.mark.parametrize(("depth", "top1"), [(20, "91.73"), (56, "93.39")])
def test_the_weights_in_the_repository(depth: int, top1: str) -> None:
    name, path = f"cifar_resnet{depth}", WEIGHTS / f"resnet{depth}_cifar10.safetensors"
    model = create(name)
    notes = load_weights(model, path)
    assert notes["top1_cifar10_test"] == top1
    assert noted_classes(path) is None
    assert data_config(name, model, notes) == DataConfig((0.485, 0.456, 0.406), (0.229, 0.224, 0.225), 32)
    assert all(tensor.isfinite().all() for tensor in model.state_dict().values())
    assert model.bn1.running_mean.abs().sum() > 0


def small(classes: int = 3) -> SmallResNet:
    return SmallResNet(blocks=1, channels=2, classes=classes)


def same(first: nn.Module, second: nn.Module) -> bool:
    one, two = first.state_dict(), second.state_dict()
    return one.keys() == two.keys() and all(torch.equal(one[name], two[name]) for name in one)


@pytest.mark.parametrize(
    ("wrap", "prefix", "legacy"),
    [
        (None, "", False),
        ("state_dict", "module.", True),
        ("model", "module._orig_mod.", False),
        ("both", "", True),
    ],
)
def test_torch_files_load_wrapped_and_prefixed(
    tmp_path: Path, wrap: str | None, prefix: str, legacy: bool
) -> None:
    source, target = small(), small()
    state: Any = OrderedDict((prefix + name, value) for name, value in source.state_dict().items())
    if wrap == "both":
        state = {"model": {"state_dict": state}, "epoch": 3}
    elif wrap:
        state = {wrap: state, "epoch": 3}
    torch.save(state, tmp_path / "w.pt", _use_new_zipfile_serialization=not legacy)
    assert load_weights(target, tmp_path / "w.pt") == {}
    assert same(source, target)


def test_safetensors_are_known_by_content(tmp_path: Path) -> None:
    """Whatever the name's ending; and older files lack BatchNorm's count of batches."""
    source, target = small(), small()
    state = {f"module.{name}": value for name, value in source.state_dict().items() if "tracked" not in name}
    save_file(state, tmp_path / "weights.pth", {"top1": "12.5", "classes": "3"})
    assert load_weights(target, tmp_path / "weights.pth") == {"top1": "12.5", "classes": "3"}
    assert same(source, target)
    assert noted_classes(tmp_path / "weights.pth") == 3


def test_mismatches_are_named_and_nothing_is_loaded(tmp_path: Path) -> None:
    state = small(classes=5).state_dict()
    del state["conv1.weight"]
    state |= {f"head{i}": torch.zeros(1) for i in range(5)}
    save_file(state, tmp_path / "w.safetensors")
    target = small()
    before = {name: value.clone() for name, value in target.state_dict().items()}
    with pytest.raises(PwfnError) as caught:
        load_weights(target, tmp_path / "w.safetensors")
    for words in (
        "linear.weight (5×8, the model's is 3×8)",
        "missing in the file: conv1.weight",
        "unknown to the model: head0, head1, head2 and 2 more",
    ):
        assert words in str(caught.value)
    assert all(torch.equal(before[name], value) for name, value in target.state_dict().items())


class Trap:
    """A pickle that would leave a folder behind, if it were run."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (str(self.path),)


def test_no_code_of_a_file_runs(tmp_path: Path) -> None:
    torch.save({"state_dict": Trap(tmp_path / "ran")}, tmp_path / "new.pt")
    torch.save(Trap(tmp_path / "ran"), tmp_path / "old.pt", _use_new_zipfile_serialization=False)
    (tmp_path / "bare.pt").write_bytes(pickle.dumps(Trap(tmp_path / "ran")))
    for name in ("new.pt", "old.pt", "bare.pt"):
        with pytest.raises(FileError, match=r"nothing else is loaded, since it could run code"):
            load_weights(small(), tmp_path / name)
    assert not (tmp_path / "ran").exists()


def test_a_compressed_file_as_weights_is_told_from_a_broken_one(tmp_path: Path) -> None:
    path = tmp_path / "net.pwfn"
    Compressed.of(layout := Layout.of(model := small()), layout.gather(model), None, {}).save(path)
    with pytest.raises(FileError, match="is a compressed network, not plain weights: export them with"):
        load_weights(small(), path)


def test_broken_files_are_one_sentence(tmp_path: Path) -> None:
    state = small().state_dict()
    save_file(state, tmp_path / "w.safetensors")
    torch.save(state, tmp_path / "w.pt")
    whole = {path.name: path.read_bytes() for path in (tmp_path / "w.safetensors", tmp_path / "w.pt")}
    broken = {
        f"{name}.{cut}": data[: int(len(data) * cut)] for name, data in whole.items() for cut in (0.1, 0.9)
    }
    broken |= {"empty": b"", "text": b"not weights at all", "header": b"\xff" * 8 + b"{"}
    for name, data in broken.items():
        (tmp_path / name).write_bytes(data)
        with pytest.raises(FileError, match=rf"{name}: is n") as caught:
            load_weights(small(), tmp_path / name)
        assert "\n" not in str(caught.value)
    for name, reason in (("absent", "No such file"), (".", "Is a directory")):
        with pytest.raises(FileError, match=f"cannot be read: {reason}"):
            load_weights(small(), tmp_path / name)


@pytest.mark.parametrize(
    ("saved", "what"),
    [
        ([1, 2], "a list"),
        ({"epoch": 3, "weights": {}}, "a dict with epoch, weights"),
        (torch.ones(2), "a T"),
    ],
)
def test_torch_file_without_weights_by_name(tmp_path: Path, saved: object, what: str) -> None:
    torch.save(saved, tmp_path / "w.pt")
    with pytest.raises(FileError, match=rf"w\.pt: holds {what}.*, not weights by name"):
        load_weights(small(), tmp_path / "w.pt")


def test_data_config_of_own_timm_and_other_networks() -> None:
    own = data_config("cifar_resnet18", small())
    assert (own.image_size, len(own.mean)) == (32, 3)
    assert data_config("digits_resnet", small()).mean == (0.0,)
    timm_config = data_config("resnet18", create("resnet18"))
    assert timm_config == DataConfig((0.485, 0.456, 0.406), (0.229, 0.224, 0.225), 224, "bicubic", 0.95)
    other = data_config("python:nets.py:make", small())
    assert other == DataConfig((0.485, 0.456, 0.406), (0.229, 0.224, 0.225), None, crop_pct=0.875)
    gray = small()
    gray.pretrained_cfg = {"mean": (0.5,), "std": (0.25,), "input_size": (1, 28, 28)}  # type: ignore[assignment]  # as docs/running.md says
    found = data_config("python:nets.py:make", gray)
    assert (found.mean, found.std, found.image_size) == ((0.5,), (0.25,), 28)


@pytest.mark.parametrize(
    "wrong", [{"mean": 0.5}, {"mean": ("a",)}, {"input_size": 28}, {"input_size": ()}, "gray"]
)
def test_a_preparation_written_by_hand_is_one_sentence(wrong: Any) -> None:
    model = small()
    model.pretrained_cfg = wrong
    with pytest.raises(PwfnError, match=r"^python:nets.py:make: model.pretrained_cfg cannot be used: "):
        data_config("python:nets.py:make", model)


def test_a_preparation_without_timm_names_the_package(monkeypatch: pytest.MonkeyPatch) -> None:
    model = small()
    model.pretrained_cfg = {"mean": (0.5,)}  # type: ignore[assignment]  # as docs/running.md says
    monkeypatch.setitem(sys.modules, "timm.data", None)
    with pytest.raises(PwfnError, match=r"model.pretrained_cfg needs timm: pip install 'pwfn\[timm\]'"):
        data_config("python:nets.py:make", model)


def test_data_config_of_the_file_comes_first() -> None:
    notes = DataConfig((0.1, 0.2, 0.3), (1.0, 2.0, 0.5), 1).metadata()
    config = data_config("cifar_resnet20", small(), notes)
    assert config == DataConfig((0.1, 0.2, 0.3), (1.0, 2.0, 0.5), 32)


@pytest.mark.parametrize(
    "notes",
    [
        {"normalize_mean": "0.5"},
        {"normalize_mean": "0.5,x", "normalize_std": "1,1"},
        {"normalize_mean": "0.5,0.5", "normalize_std": "1"},
        {"normalize_mean": "0.5", "normalize_std": "0"},
        {"normalize_mean": "nan", "normalize_std": "1"},
    ],
)
def test_data_config_of_broken_metadata(notes: dict[str, str]) -> None:
    with pytest.raises(PwfnError, match=r"^the weights' metadata has normalize_"):
        data_config("cifar_resnet20", small(), notes)
