"""Out-of-distribution data by name: prepared like the network's own, and the same every time."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from pwfn import DataError
from pwfn.lab.uncertainty.ood import SHIFTS, open_ood
from pwfn.zoo import data
from pwfn.zoo.data import Data, DataOptions

MEAN, STD = (0.4, 0.5, 0.6), (0.2, 0.25, 0.3)


def opened(
    folder: Path, pixels: int | None = None, count: int = 11, **changes: Any
) -> tuple[Data, DataOptions]:
    """A file of colour images, 6×6: random ones, or all pixels of one value."""
    generator = np.random.default_rng(0)
    x = {name: generator.integers(0, 256, (count, 6, 6, 3), np.uint8) for name in ("x_train", "x_test")}
    if pixels is not None:
        x = {name: np.full_like(images, pixels) for name, images in x.items()}
    np.savez(folder / "own.npz", **x, **{name: np.arange(count) % 4 for name in ("y_train", "y_test")})
    options = DataOptions(mean=MEAN, std=STD, test_batch_size=4, **changes)
    return data.open_source(f"npz:{folder / 'own.npz'}", options), options


def images_of(loader: Any, start: int = 0) -> Tensor:
    return torch.cat(
        [batch if isinstance(batch, Tensor) else batch[0] for batch in loader.epoch(0, start=start)]
    )


def plain(images: Tensor) -> Tensor:
    """Back to [0, 1]."""
    return images * torch.tensor(STD).view(1, 3, 1, 1) + torch.tensor(MEAN).view(1, 3, 1, 1)


def test_a_file_is_prepared_like_the_networks_own_and_needs_test_images_only(tmp_path: Path) -> None:
    """The network's own images as out-of-distribution data: the same inputs, bit by bit."""
    own, options = opened(tmp_path)
    with np.load(tmp_path / "own.npz") as stored:
        np.savez(tmp_path / "bare.npz", x_test=stored["x_test"])
    for name in ("own.npz", "bare.npz"):
        other = open_ood(f"npz:{tmp_path / name}", own, options)
        assert other.note == ""
        assert torch.equal(images_of(other.loader), images_of(own.test))


@pytest.mark.parametrize("axes", [3, 4])
def test_grey_images_of_another_size_are_converted(tmp_path: Path, axes: int) -> None:
    own, options = opened(tmp_path)
    grey = np.full((5, 3, 3), 51, np.uint8)
    grey[1] = 255
    np.savez(tmp_path / "grey.npz", x_test=grey if axes == 3 else grey[..., None])
    other = open_ood(f"npz:{tmp_path / 'grey.npz'}", own, options)
    assert "from 1 to 3 channels and from 3×3 to 6×6" in other.note
    found = plain(images_of(other.loader))
    assert found.shape == (5, 3, 6, 6)
    assert torch.allclose(found[0], torch.tensor(0.2), atol=1e-6)
    assert torch.allclose(found[1], torch.tensor(1.0), atol=1e-6)


def test_colour_becomes_grey_by_its_mean(tmp_path: Path) -> None:
    pixels = np.broadcast_to(np.array([30, 60, 120], np.uint8), (2, 8, 8, 3))
    np.savez(tmp_path / "colour.npz", x_test=pixels)
    own = data.open_source("digits")
    found = images_of(open_ood(f"npz:{tmp_path / 'colour.npz'}", own, DataOptions()).loader)
    assert found.shape == (2, 1, 8, 8)
    assert torch.allclose(found, torch.tensor(70 / 255))


def test_every_other_source_gives_its_test_images() -> None:
    own = data.open_source("digits")
    assert torch.equal(images_of(open_ood("digits", own, DataOptions()).loader), images_of(own.test))


def test_noise_is_uniform_and_independent_of_the_images(tmp_path: Path) -> None:
    own, options = opened(tmp_path)
    found = plain(images_of(open_ood("noise", own, options).loader))
    assert found.shape == (11, 3, 6, 6)
    assert float(found.min()) >= -1e-6
    assert float(found.max()) <= 1 + 1e-6
    # 1,188 numbers: mean and deviation of the uniform distribution, within four standard errors.
    assert abs(float(found.mean()) - 0.5) < 4 * 0.2887 / math.sqrt(1188)
    assert float(found.std()) == pytest.approx(0.2887, abs=0.02)
    pairs = torch.stack((found.flatten(), plain(images_of(own.test)).flatten()))
    assert abs(float(torch.corrcoef(pairs)[0, 1])) < 0.12


@pytest.mark.parametrize("spec", ["noise", "shift:gaussian:0.3"])
def test_random_numbers_depend_on_seed_and_example_only(tmp_path: Path, spec: str) -> None:
    """Not on the batches, the epoch or torch's own random state."""
    torch.manual_seed(1)
    own, options = opened(tmp_path, seed=3)
    found = images_of(open_ood(spec, own, options).loader)
    whole = DataOptions(mean=MEAN, std=STD, test_batch_size=100, seed=3)
    torch.manual_seed(2)
    loader = open_ood(spec, data.open_source(own.name, whole), whole).loader
    assert torch.equal(images_of(loader), found)
    assert torch.equal(torch.cat(list(loader.epoch(5))), found)
    assert torch.equal(images_of(open_ood(spec, own, options).loader, start=1), found[4:])
    assert not torch.equal(images_of(open_ood(spec, own, DataOptions(mean=MEAN, std=STD)).loader), found)


def test_gaussian_noise_has_its_deviation_where_white_is_1(tmp_path: Path) -> None:
    own, options = opened(tmp_path, pixels=128, count=70)

    def shifted(std: float) -> Tensor:
        return plain(images_of(open_ood(f"shift:gaussian:{std}", own, options).loader))

    assert float(shifted(0.1).std()) == pytest.approx(0.1, rel=0.03)
    assert float(shifted(0.1).mean()) == pytest.approx(128 / 255, abs=0.005)
    assert (float(shifted(10).min()), float(shifted(10).max())) == pytest.approx((0, 1), abs=1e-6)
    assert torch.allclose(shifted(0), torch.tensor(128 / 255), atol=1e-6)


@pytest.mark.parametrize(("degrees", "turns"), [(90, 1), (180, 2), (-90, 3), (360, 0)])
def test_a_quarter_turn_only_moves_pixels(tmp_path: Path, degrees: int, turns: int) -> None:
    own, options = opened(tmp_path)
    found = images_of(open_ood(f"shift:rotate:{degrees}", own, options).loader)
    assert torch.allclose(found, images_of(own.test).rot90(turns, (2, 3)), atol=1e-5)


@pytest.mark.parametrize(("height", "width"), [(41, 41), (31, 51)])
@pytest.mark.parametrize("degrees", [30.0, -75.0, 90.0])
def test_a_rotated_ramp_is_a_ramp_in_the_rotated_direction(height: int, width: int, degrees: float) -> None:
    """A pixel of the result has the value of the plane at the place it came from."""
    rows = torch.arange(height, dtype=torch.float64)[:, None] - (height - 1) / 2  # downwards
    columns = torch.arange(width, dtype=torch.float64)[None] - (width - 1) / 2
    ramp = (0.5 + 0.003 * columns - 0.007 * rows).view(1, 1, height, width)
    cos, sin = math.cos(math.radians(degrees)), math.sin(math.radians(degrees))
    from_column, from_row = columns * cos - rows * sin, columns * sin + rows * cos
    expected = 0.5 + 0.003 * from_column - 0.007 * from_row
    found = SHIFTS["rotate"].change(ramp, degrees, torch.empty(0))[0, 0]
    inside = (from_column.abs() < width / 2 - 1) & (from_row.abs() < height / 2 - 1)
    assert int(inside.sum()) > 500
    assert torch.allclose(found[inside], expected[inside], atol=1e-12)
    away = (from_column.abs() > width / 2 + 1) | (from_row.abs() > height / 2 + 1)
    assert not found[away].any()


def test_contrast_draws_an_image_to_its_own_mean(tmp_path: Path) -> None:
    own, options = opened(tmp_path)
    before = plain(images_of(own.test))
    found = plain(images_of(open_ood("shift:contrast:0.25", own, options).loader))
    assert torch.allclose(found.mean((1, 2, 3)), before.mean((1, 2, 3)), atol=1e-5)
    assert torch.allclose(found.std((1, 2, 3)), before.std((1, 2, 3)) / 4, atol=1e-5)


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("shift:melt:3", "allowed are noise, shift:gaussian:STD, shift:rotate:DEGREES"),
        ("shift:rotate:much", "DEGREES from -360 to 360"),
        ("shift:contrast:2", "FACTOR from 0 to 1"),
        ("shift:gaussian:nan", "STD from 0 to 10"),
        ("shift", "shift:gaussian:STD"),
        ("noize", "allowed are noise, .*npz:PATH"),
        ("npz:nowhere.npz", "no such file"),
        ("npz:", "allowed is npz:PATH"),
    ],
)
def test_an_unknown_name_is_an_error_that_says_what_is_allowed(
    tmp_path: Path, spec: str, message: str
) -> None:
    own, options = opened(tmp_path)
    with pytest.raises(DataError, match=message):
        open_ood(spec, own, options)


@pytest.mark.parametrize(
    ("arrays", "message"),
    [
        ({"x": np.zeros((2, 6, 6), np.uint8)}, "has no x_test"),
        ({"x_test": np.zeros((2, 6, 6), np.float32)}, "float32: allowed is N×H×W or N×H×W×C uint8"),
        ({"x_test": np.zeros((0, 6, 6), np.uint8)}, "allowed is N×H×W"),
        ({"x_test": np.zeros((2, 6, 6, 2), np.uint8)}, "2 channels and the network's own 3"),
        (None, "cannot be read as an npz file"),
    ],
)
def test_a_file_without_images_is_an_error(
    tmp_path: Path, arrays: dict[str, Any] | None, message: str
) -> None:
    own, options = opened(tmp_path)
    if arrays is None:
        (tmp_path / "other.npz").write_bytes(b"PK\3\4nothing")
    else:
        np.savez(tmp_path / "other.npz", **arrays)
    with pytest.raises(DataError, match=message):
        open_ood(f"npz:{tmp_path / 'other.npz'}", own, options)


def test_images_of_a_users_own_loaders_cannot_be_changed(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text("def loaders():\n    return [1], [1]\n")
    own = data.open_source(f"python:{tmp_path / 'mine.py'}:loaders")
    with pytest.raises(DataError, match="normalised is not known"):
        open_ood("noise", own, DataOptions())
