"""Networks by name: their sizes, the shortcut without weights, and what happens to unknown names."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch
from torch import nn

from pwfn import Layout, PwfnError
from pwfn.models import OWN, ResidualBlock, SmallResNet, create, ready_torchvision, timm_model


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
    assert set(OWN) == {"cifar_resnet20", "cifar_resnet56", "digits_resnet"}
    first, second = create("digits_resnet"), create("digits_resnet")
    assert not torch.equal(first.conv1.weight, second.conv1.weight)


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


def test_options_go_to_timm() -> None:
    model = create("resnet18", num_classes=7, in_chans=1)
    assert model.fc.weight.shape == (7, 512)
    assert model.conv1.weight.shape == (64, 1, 7, 7)
    assert model.default_cfg["architecture"] == "resnet18"


@pytest.mark.parametrize("make", [create, timm_model])
def test_unknown_name(make: object) -> None:
    with pytest.raises(PwfnError, match=r"^model 'resnet19' is not known to pwfn or timm"):
        make("resnet19")


def test_without_timm(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "timm", None)
    with pytest.raises(PwfnError, match=r"^model 'resnet18' needs timm: pip install 'pwfn\[timm\]'$"):
        create("resnet18")
    create("digits_resnet")  # our own need nothing


def test_torchvision_is_made_ready_once() -> None:
    ready_torchvision()
    assert hasattr(torch.ops.torchvision, "nms")
    ready_torchvision()  # a second declaration would be an error


def test_timm_is_imported_only_on_demand() -> None:
    """Importing the package in a fresh interpreter loads neither timm nor torchvision nor transformers."""
    code = (
        "import sys, pwfn, pwfn.models; pwfn.models.create('digits_resnet'); "
        "print(sorted({'timm', 'torchvision', 'transformers'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
