"""Networks by name: their sizes, shortcuts and attention, their weights from files, and unknown names."""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
from collections import OrderedDict
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from pwfn import FileError, GaussianNetwork, Layout, PwfnError
from pwfn.zoo.models import (
    INPUT_SHAPES,
    OWN,
    DataConfig,
    ProjectionBlock,
    ResidualBlock,
    SmallResNet,
    VisionTransformer,
    create,
    data_config,
    input_shape,
    load_weights,
    ready_torchvision,
    timm_model,
)

SHARED = Path(__file__).parents[2] / "shared/data/weights"


def weights(blocks: int, channels: int, image_channels: int, classes: int = 10) -> int:
    """Convolution and linear weights of a three-stage residual network, counted by hand."""
    total = 9 * image_channels * channels
    narrow = channels
    for wide in (channels, 2 * channels, 4 * channels):
        total += 9 * narrow * wide + (2 * blocks - 1) * 9 * wide * wide
        narrow = wide
    return total + 4 * channels * classes + classes


@pytest.mark.parametrize(
    ("name", "blocks", "image", "expected"),
    [
        ("cifar_resnet20", 3, (3, 32, 32), 268_346),
        ("cifar_resnet56", 9, (3, 32, 32), 848_954),
        ("digits_resnet", 1, (1, 8, 8), None),
    ],
)
def test_own_network(name: str, blocks: int, image: tuple[int, int, int], expected: int | None) -> None:
    model = create(name).eval()
    size = Layout.of(model).size
    assert size == weights(blocks, 16, image[0])
    assert expected is None or size == expected
    assert len([m for m in model.modules() if isinstance(m, nn.Conv2d)]) == 6 * blocks + 1
    with torch.no_grad():
        assert model(torch.randn(2, *image)).shape == (2, 10)


def test_every_own_network_is_listed_and_made_anew() -> None:
    assert {"cifar_resnet20", "cifar_resnet56", "digits_resnet"} <= set(OWN)
    first, second = create("digits_resnet"), create("digits_resnet")
    assert not torch.equal(first.conv1.weight, second.conv1.weight)


def test_resnet18_has_the_weights_of_the_method_s_table() -> None:
    """Weights and biases of convolutions, projections among them, and of the linear layer."""
    model = create("cifar_resnet18")
    assert Layout.of(model).size == 11_164_362
    assert sum(p.numel() for p in model.parameters()) == 11_164_362 + 9_600  # BatchNorm's
    stages = sum(9 * a * b + 3 * 9 * b * b for a, b in ((64, 64), (64, 128), (128, 256), (256, 512)))
    projections = 64 * 128 + 128 * 256 + 256 * 512
    assert 9 * 3 * 64 + stages + projections + 512 * 10 + 10 == 11_164_362


def test_vit_has_its_weights_and_attention_is_seen() -> None:
    layout = Layout.of(create("cifar_vit_tiny"))
    width, block = 192, 12 * 192 * 192 + (3 + 1 + 4 + 1) * 192
    assert layout.size == 9 * block + (48 + 1) * width + (width + 1) * 10 == 4_008_202
    seen = [entry for entry in layout.entries if entry.attention]
    assert [e.name for e in seen] == [
        f"blocks.{i}.attn.qkv.{w}" for i in range(9) for w in ("weight", "bias")
    ]
    assert {(e.attention.parts, e.attention.heads) for e in seen if e.attention} == {(("q", "k", "v"), 3)}
    assert {item.name for item in layout.left_out if "norm" not in item.name} == {"position"}


def test_vit_attention_is_softmax_of_scaled_products() -> None:
    torch.manual_seed(0)
    attention = VisionTransformer(width=12, heads=3, depth=1).blocks[0].attn
    x = torch.randn(2, 5, 12)
    q, k, v = (part.unflatten(2, (3, 4)).transpose(1, 2) for part in attention.qkv(x).chunk(3, 2))
    by_hand = (q @ k.mT / 2).softmax(-1) @ v
    torch.testing.assert_close(attention(x), attention.proj(by_hand.transpose(1, 2).flatten(2)))


def test_vit_knows_where_a_patch_lies() -> None:
    model = VisionTransformer(image_size=8, patch=4, width=12, depth=1).eval()
    image = torch.zeros(1, 3, 8, 8)
    image[..., :4, :4] = 1
    assert not torch.allclose(model(image), model(image.flip(3)), atol=1e-6)
    nn.init.zeros_(model.position)
    torch.testing.assert_close(model(image), model(image.flip(3)))


@pytest.mark.parametrize("name", OWN)
def test_every_own_network_takes_classes_and_is_wrapped_bit_equal(name: str) -> None:
    model = create(name, classes=7).eval()
    x = torch.randn(2, *INPUT_SHAPES[name])
    assert input_shape(name, model) == INPUT_SHAPES[name]
    with torch.no_grad():
        expected = model(x)
        net = GaussianNetwork(model).eval()
        assert expected.shape == (2, 7)
        assert torch.equal(net(x), expected)


def test_projection_block_projects_only_where_shapes_differ() -> None:
    x = torch.randn(2, 4, 6, 6)
    same, other = ProjectionBlock(4, 4, 1).eval(), ProjectionBlock(4, 6, 2).eval()
    for block in (same, other):
        nn.init.zeros_(block.conv2.weight)
    assert torch.equal(same(x), x.clamp_min(0))
    assert len(same.shortcut) == 0
    projected = nn.functional.conv2d(x, other.shortcut[0].weight, stride=2) / (1 + 1e-5) ** 0.5
    torch.testing.assert_close(other(x), projected.clamp_min(0))


def test_classes_and_channels() -> None:
    model = SmallResNet(blocks=2, channels=8, classes=4, image_channels=2)
    assert Layout.of(model).size == weights(2, 8, 2, classes=4)
    assert model(torch.randn(3, 2, 12, 12)).shape == (3, 4)


@pytest.mark.parametrize(("channels_in", "channels", "stride"), [(2, 2, 1), (2, 4, 2), (3, 6, 2), (2, 5, 1)])
def test_shortcut_takes_every_second_pixel_and_pads_channels(
    channels_in: int, channels: int, stride: int
) -> None:
    block = ResidualBlock(channels_in, channels, stride).eval()
    nn.init.zeros_(block.conv2.weight)  # only the shortcut is left
    x = torch.randn(2, channels_in, 6, 6)
    out = block(x)
    assert out.shape == (2, channels, 6 // stride, 6 // stride)
    before = (channels - channels_in) // 2
    kept = slice(before, before + channels_in)
    assert torch.equal(out[:, kept], x[:, :, ::stride, ::stride].clamp_min(0))
    added = [channel for channel in range(channels) if channel not in range(channels)[kept]]
    assert not out[:, added].any()


def test_block_adds_its_branch_to_the_shortcut() -> None:
    torch.manual_seed(0)
    block = ResidualBlock(3, 3, 1).eval()
    x = torch.randn(2, 3, 5, 5)
    branch = block.bn2(block.conv2(torch.relu(block.bn1(block.conv1(x)))))
    assert torch.equal(block(x), torch.relu(branch + x))


@pytest.mark.parametrize("how", [{"classes": 7}, {"num_classes": 7}])
def test_options_go_to_timm(how: dict[str, int]) -> None:
    model = create("resnet18", in_chans=1, **how)
    assert model.fc.weight.shape == (7, 512)
    assert model.conv1.weight.shape == (64, 1, 7, 7)
    assert model.default_cfg["architecture"] == "resnet18"


@pytest.mark.parametrize("make", [create, timm_model])
def test_unknown_name(make: object) -> None:
    with pytest.raises(PwfnError, match=r"^model 'resnet19' is not known to pwfn or timm"):
        make("resnet19")


def test_an_unknown_tag_or_option_of_timm() -> None:
    with pytest.raises(PwfnError, match=r"^timm cannot make model 'resnet18\.nobody': "):
        create("resnet18.nobody")
    with pytest.raises(PwfnError, match=r"^timm cannot make model 'resnet18': .*number_of_classes"):
        create("resnet18", number_of_classes=3)


@pytest.mark.parametrize("name", OWN)
def test_every_own_network_takes_its_input_shape(name: str) -> None:
    assert set(INPUT_SHAPES) == set(OWN)
    model = create(name).eval()
    shape = input_shape(name, model)
    assert shape == INPUT_SHAPES[name]
    with torch.no_grad():
        assert len(model(torch.zeros(2, *shape))) == 2


def test_the_input_shape_of_others() -> None:
    assert input_shape("resnet18", create("resnet18")) == (3, 224, 224)
    assert input_shape("mine", nn.Linear(3, 3)) is None


# Models from a file


@pytest.fixture
def code(tmp_path: Path) -> Path:
    """A file that defines its networks with an import and a constant of its own."""
    path = tmp_path / "my:nets.py"  # a colon in the name: the last one divides
    path.write_text(
        "from torch import nn\nWIDTH = 5\n"
        "def net(outputs=2):\n    return nn.Linear(WIDTH, outputs)\n"
        "def number():\n    return 3\n"
        "def fails():\n    raise KeyError('missing')\n"
    )
    return path


def test_a_function_of_a_file_makes_the_network(code: Path) -> None:
    assert create(f"python:{code}:net").weight.shape == (2, 5)
    assert create(f"python:{code}:net", outputs=7).weight.shape == (7, 5)


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("python:net", "model 'python:net' is not of the form python:FILE:FUNCTION"),
        ("python:{code}:", "model 'python:{code}:' is not of the form python:FILE:FUNCTION"),
        ("python:/nowhere.py:net", "model 'python:/nowhere.py:net': there is no file /nowhere.py"),
        ("python:{code}:other", "model 'python:{code}:other': {code} defines no function other"),
        ("python:{code}:WIDTH", "model 'python:{code}:WIDTH': {code} defines no function WIDTH"),
        (
            "python:{code}:number",
            "model 'python:{code}:number': number returned a int, not a torch.nn.Module",
        ),
        ("python:{code}:fails", "model 'python:{code}:fails': {code} failed: KeyError: 'missing'"),
    ],
)
def test_a_file_that_makes_no_network(code: Path, name: str, words: str) -> None:
    with pytest.raises(PwfnError) as caught:
        create(name.format(code=code))
    assert str(caught.value) == words.format(code=code)


def test_a_file_that_does_not_run(tmp_path: Path) -> None:
    path = tmp_path / "nets.py"
    path.write_text("def net(:\n")
    with pytest.raises(PwfnError, match=r"nets\.py failed: SyntaxError: "):
        create(f"python:{path}:net")


@pytest.mark.parametrize(
    ("name", "meant"),
    [
        ("resnet19", "'resnet18'"),
        ("cifar_resnet21", "'cifar_resnet20'"),
        ("cifar-vit-tiny", "'cifar_vit_tiny'"),
        ("vit_tiny_patch16_225.augreg", "'vit_tiny_patch16_224'"),
    ],
)
def test_a_typo_gets_a_suggestion(name: str, meant: str) -> None:
    with pytest.raises(PwfnError, match=f": did you mean .*{meant}.*[?]$"):
        create(name)


@pytest.mark.parametrize("name", ["cifar_resnet20", "python:nets.py:make"])
def test_pretrained_of_networks_without_a_download(name: str) -> None:
    with pytest.raises(PwfnError, match=rf"^pre-trained weights of model '{name}': .*--weights FILE$"):
        create(name, pretrained=True)


@pytest.mark.parametrize("options", [{"classes": 0}, {"width": 3}])
def test_options_that_make_no_network(options: dict[str, int]) -> None:
    with pytest.raises(PwfnError, match=r"^model 'cifar_resnet20' "):
        create("cifar_resnet20", **options)


def test_a_failed_download_is_one_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    ready_torchvision()
    import timm

    def offline(name: str, **options: Any) -> nn.Module:
        assert options == {"pretrained": True}
        raise ConnectionError("no route to host\nand many more lines")

    monkeypatch.setattr(timm, "create_model", offline)
    with pytest.raises(PwfnError) as caught:
        create("resnet18", pretrained=True)
    assert str(caught.value) == (
        "the pre-trained weights of model 'resnet18' cannot be downloaded (ConnectionError): check the "
        "network, or give a file with --weights"
    )


def test_python_function_gets_the_classes(tmp_path: Path) -> None:
    file = tmp_path / "nets.py"
    file.write_text("import torch\ndef make(classes=3):\n    return torch.nn.Linear(2, classes)\n")
    assert create(f"python:{file}:make").out_features == 3
    assert create(f"python:{file}:make", classes=5).out_features == 5


def test_without_timm(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "timm", None)
    with pytest.raises(PwfnError, match=r"^model 'resnet18' needs timm: pip install 'pwfn\[timm\]'$"):
        create("resnet18")
    with pytest.raises(PwfnError, match=r"'cifar_resnet21' needs timm: .*did you mean 'cifar_resnet20'"):
        create("cifar_resnet21")
    create("digits_resnet")  # our own need nothing


def test_torchvision_is_made_ready_once() -> None:
    ready_torchvision()
    assert hasattr(torch.ops.torchvision, "nms")
    ready_torchvision()  # a second declaration would be an error


def test_timm_is_imported_only_on_demand() -> None:
    """Importing the package in a fresh interpreter loads neither timm nor torchvision nor transformers."""
    code = (
        "import sys, pwfn, pwfn.zoo.models; pwfn.zoo.models.create('digits_resnet'); "
        "print(sorted({'timm', 'torchvision', 'transformers'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


@pytest.mark.skipif(not SHARED.is_dir(), reason="the shared weights are not there")
@pytest.mark.parametrize(("depth", "top1"), [(20, "91.73"), (56, "93.39")])
def test_shared_weights_load_strictly(depth: int, top1: str) -> None:
    name = f"cifar_resnet{depth}"
    model = create(name)
    notes = load_weights(model, SHARED / f"resnet{depth}_cifar10.safetensors")
    assert notes["top1_cifar10_test"] == top1
    assert data_config(name, model, notes) == DataConfig((0.485, 0.456, 0.406), (0.229, 0.224, 0.225), 32)
    assert all(tensor.isfinite().all() for tensor in model.state_dict().values())
    assert int(model.bn1.num_batches_tracked) > 0 or model.bn1.running_mean.abs().sum() > 0


def small(classes: int = 3) -> SmallResNet:
    return SmallResNet(blocks=1, channels=2, classes=classes)


def same(first: nn.Module, second: nn.Module) -> bool:
    one, two = first.state_dict(), second.state_dict()
    return one.keys() == two.keys() and all(torch.equal(one[name], two[name]) for name in one)


@pytest.mark.parametrize("legacy", [False, True])
@pytest.mark.parametrize("wrap", [None, "state_dict", "model", "both"])
@pytest.mark.parametrize("prefix", ["", "module.", "module._orig_mod."])
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
    source, target = small(), small()
    state = {f"module.{name}": value for name, value in source.state_dict().items()}
    save_file(state, tmp_path / "weights.pth", {"top1": "12.5"})
    assert load_weights(target, tmp_path / "weights.pth") == {"top1": "12.5"}
    assert same(source, target)


def test_older_files_without_batchnorm_s_count(tmp_path: Path) -> None:
    source, target = small(), small()
    state = {name: value for name, value in source.state_dict().items() if "tracked" not in name}
    torch.save(state, tmp_path / "w.pt")
    load_weights(target, tmp_path / "w.pt")
    assert same(source, target)


def test_mismatches_are_named_and_nothing_is_loaded(tmp_path: Path) -> None:
    state = small(classes=5).state_dict()
    del state["conv1.weight"]
    state |= {f"head{i}": torch.zeros(1) for i in range(5)}
    save_file(state, tmp_path / "w.safetensors")
    target = small()
    before = {name: value.clone() for name, value in target.state_dict().items()}
    with pytest.raises(PwfnError) as caught:
        load_weights(target, tmp_path / "w.safetensors")
    assert str(caught.value) == (
        f"{tmp_path / 'w.safetensors'} does not fit the SmallResNet: of another shape: linear.weight "
        "(5×8, the model's is 3×8), linear.bias (5, the model's is 3); missing in the file: conv1.weight; "
        "unknown to the model: head0, head1, head2 and 2 more"
    )
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
        ({"epoch": 3, "weights": {}}, "a mapping with epoch, weights"),
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
