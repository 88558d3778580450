"""Folders of images without labels, and labelled folders that are only tested on."""

from __future__ import annotations

import json
import shutil
import warnings
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import save_file
from torch import Tensor

from pwfn.config import Config
from pwfn.errors import ConfigError, DataError
from pwfn.lab.uncertainty.file import evaluated
from pwfn.report.page import page
from pwfn.report.reading import read_run
from pwfn.run.folder import run
from pwfn.run.options import RunOptions, TrustOptions
from pwfn.zoo import folder as folders
from pwfn.zoo.data import Data, DataOptions, open_source
from pwfn.zoo.models import create

OPTIONS = DataOptions((0.5,) * 3, (0.25,) * 3, image_size=8, batch_size=4, workers=0)


def picture(path: Path, number: int) -> None:
    """A picture of one grey, which identifies it; sizes and formats differ."""
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.new("RGB", (10 + number % 7, 9 + number % 5), (number,) * 3).save(path)


def folder(path: Path, count: int) -> Path:
    for number in range(count):
        below = path / "b" / "a" if number % 3 == 0 else path
        picture(below / f"{number:03}.{'png' if number % 2 else 'bmp'}", number)
    return path


def greys(data: Data, part: str) -> list[int]:
    """The pictures of one epoch, by their grey."""
    batches: list[Tensor] = list(getattr(data, part).epoch(0))
    assert all(isinstance(batch, Tensor) for batch in batches)  # images alone
    values = torch.cat(batches)[:, 0, 0, 0] * 0.25 + 0.5
    return [round(255 * value) for value in values.tolist()]


@pytest.mark.parametrize(("count", "measured"), [(2, 1), (9, 1), (30, 6)])
def test_a_fifth_is_measured_on_and_the_rest_compressed_with(
    tmp_path: Path, count: int, measured: int
) -> None:
    data = open_source(f"images:{folder(tmp_path, count)}", OPTIONS)
    train, test = greys(data, "train"), greys(data, "test")
    assert len(test) == data.test_size == measured
    assert sorted(train + test) == list(range(count))  # none twice, none left out
    assert not data.labelled
    assert data.classes is None


def test_at_most_a_thousand_are_measured_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(folders, "_MOST_MEASURED", 3)
    assert open_source(f"images:{folder(tmp_path, 30)}", OPTIONS).test_size == 3
    asked = replace(OPTIONS, holdout=7, limit=5)
    data = open_source(f"images:{tmp_path}", asked)
    assert (data.train_size, data.test_size) == (5, 7)


def test_the_split_depends_on_the_names_only(tmp_path: Path) -> None:
    first = folder(tmp_path / "first", 20)
    second = tmp_path / "second"
    for path in sorted(first.rglob("*.*"), reverse=True):  # created in another order
        target = second / path.relative_to(first)
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(path, target)
    one, other = (
        open_source(f"images:{place}", replace(OPTIONS, seed=n)) for n, place in enumerate((first, second))
    )
    assert greys(one, "test") == greys(other, "test")
    assert one.fingerprint == other.fingerprint


def test_images_are_prepared_as_the_test_images_of_an_image_folder(tmp_path: Path) -> None:
    noise = np.random.default_rng(0).integers(0, 256, (12, 20, 25, 3), dtype=np.uint8)
    for number, pixels in enumerate(noise):
        for part in ("train", "val"):
            path = tmp_path / "labelled" / part / "only" / f"{number:02}.png"
            path.parent.mkdir(parents=True, exist_ok=True)
            Image.fromarray(pixels).save(path)
    labelled = open_source(f"imagefolder:{tmp_path}/labelled", OPTIONS)
    wanted = torch.cat([batch for batch, _ in labelled.test.epoch(0)])
    bare = open_source(f"images:{tmp_path}/labelled/val", replace(OPTIONS, batch_size=12))
    found = torch.cat([*bare.train.epoch(0), *bare.test.epoch(0)])
    assert {image.numpy().tobytes() for image in found} == {image.numpy().tobytes() for image in wanted}


@pytest.mark.parametrize("workers", [0, 2])
def test_a_folder_too_large_for_memory_gives_the_same_batches(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, workers: int
) -> None:
    spec, options = f"images:{folder(tmp_path, 23)}", replace(OPTIONS, workers=workers)
    kept = open_source(spec, options)
    monkeypatch.setattr(folders, "_KEPT_BYTES", 0)
    streamed = open_source(spec, options)
    for part in ("train", "test"):
        one, other = (list(getattr(data, part).epoch(1, start=1)) for data in (kept, streamed))
        assert all(map(torch.equal, one, other))
        assert len(one) == len(other)


def test_a_few_that_cannot_be_read_are_left_out(tmp_path: Path) -> None:
    folder(tmp_path, 30)
    (tmp_path / "broken.jpg").write_bytes(b"not a picture")
    with pytest.warns(UserWarning, match=r"1 of 31 images cannot be read, the first: .*broken\.jpg"):
        data = open_source(f"images:{tmp_path}", OPTIONS)
    assert sorted(greys(data, "train") + greys(data, "test")) == list(range(30))


@pytest.mark.parametrize(("good", "bad"), [(15, 1), (30, 4), (0, 3)])
def test_many_that_cannot_be_read_are_refused(tmp_path: Path, good: int, bad: int) -> None:
    folder(tmp_path, good)
    whole = tmp_path / "whole.png"
    Image.fromarray(np.random.default_rng(0).integers(0, 256, (64, 64, 3), dtype=np.uint8)).save(whole)
    half = whole.read_bytes()[:5000]  # a download that was cut off
    whole.unlink()
    for number in range(bad):
        (tmp_path / f"cut{number}.png").write_bytes(half)
    with (
        warnings.catch_warnings(),
        pytest.raises(DataError, match=rf"{bad} of {good + bad} images cannot be read, the first: .*cut\d"),
    ):
        open_source(f"images:{tmp_path}", OPTIONS)


@pytest.mark.parametrize("ending", ["png", "pgm", "tif"])
def test_sixteen_bits_are_read_by_their_upper_eight(tmp_path: Path, ending: str) -> None:
    """As from microscopes and scanners; PIL alone would cut all greys above 255 off."""
    for number in range(8):
        Image.fromarray(np.full((9, 10), 256 * number + 7, dtype=np.uint16)).save(
            tmp_path / f"{number}.{ending}"
        )
    data = open_source(f"images:{tmp_path}", OPTIONS)
    assert sorted(greys(data, "train") + greys(data, "test")) == list(range(8))


def test_floating_point_images_are_refused(tmp_path: Path) -> None:
    """Nothing says which of their numbers is white."""
    for number in range(2):
        Image.fromarray(np.ones((9, 10), dtype=np.float32)).save(tmp_path / f"{number}.tif")
    with pytest.raises(DataError, match="floating-point numbers: convert it"):
        open_source(f"images:{tmp_path}", OPTIONS)


def test_mistakes_get_one_sentence(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "empty" / "notes.txt").write_text("no picture")
    folder(tmp_path / "one", 1)
    for name, words in {
        "missing": "no such folder",
        "empty": "holds no images",
        "one": "at least two",
        "one/b/a/000.bmp": "is a file, not a folder",
    }.items():
        with pytest.raises(DataError, match=words) as caught:
            open_source(f"images:{tmp_path / name}", OPTIONS)
        assert str(caught.value).startswith(str(tmp_path / name))
    with pytest.raises(DataError, match="model for images of 3 channels"):
        open_source(f"images:{tmp_path}/one", DataOptions((0.5,), (0.5,)))


def test_only_the_measured_images_are_read_for_testing(tmp_path: Path) -> None:
    spec, options = f"images:{folder(tmp_path, 20)}", replace(OPTIONS, testing=True)
    tested = open_source(spec, options)
    assert greys(tested, "test") == greys(open_source(spec, OPTIONS), "test")
    assert tested.train_size == 0


@pytest.mark.parametrize("below", ["", "val"])
def test_a_labelled_folder_without_training_images_can_be_tested_on(tmp_path: Path, below: str) -> None:
    for number, name in enumerate(("ant", "bee", "cat")):
        picture(tmp_path / below / name / "x.png", number)
    with pytest.raises(DataError, match="has no folder 'train'"):
        open_source(f"imagefolder:{tmp_path}", OPTIONS)
    data = open_source(f"imagefolder:{tmp_path}", replace(OPTIONS, testing=True))
    ((_, labels),) = data.test.epoch(0)
    assert labels.tolist() == [0, 1, 2]
    data.check_labels(3)
    # The number of a class is its place among the folders: with one missing, others would be wrong.
    with pytest.raises(DataError, match=r"3 class folders and the model has 4 classes"):
        data.check_labels(4)


SHORT = {
    "schedule.fractions": [0.5, 1.0],
    "schedule.epochs_per_round": 1.0,
    "finish.polish_epochs": 0.0,
    "finish.reestimate_epochs": 0.0,
    "target.max_drop": 99.0,  # points of agreement; so that states are kept
}


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Pictures without labels, labelled ones, weights, and a run on the former."""
    place = tmp_path_factory.mktemp("place")
    random = np.random.default_rng(0)
    for name in [f"bare/{n:02}.png" for n in range(20)] + [f"labelled/{n}/x.png" for n in range(10)]:
        (place / name).parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(random.integers(0, 256, (32, 32, 3), dtype=np.uint8)).save(place / name)
    save_file(create("cifar_resnet20").state_dict(), place / "weights.safetensors")
    run(options(place), Config().override(SHORT))
    return place


def options(place: Path, out: str = "run", **others: Any) -> RunOptions:
    spec, weights = f"images:{place}/bare", str(place / "weights.safetensors")
    return RunOptions(
        *("cifar_resnet20", spec, place / out, weights), device="cpu", batch_size=8, workers=0, **others
    )


def scored(place: Path, data: str, **asked: Any) -> tuple[dict[str, Any], str]:
    how = RunOptions("", f"{data.format(place)}", place / "run", "", device="cpu", workers=0)
    facts, lines = evaluated([place / "run" / "model.pwfn"], how, TrustOptions(**asked))
    return facts, "\n".join(lines)


def test_a_run_without_labels_is_measured_by_agreement(place: Path) -> None:
    record = json.loads((place / "run" / "record.json").read_text())
    assert record["before"] == {"loss": 0.0, "metric": 1.0, "examples": 4, "of": "agreement"}
    assert record["after"]["of"] == "agreement"
    # The same figures from the file, the original weights and the same images.
    facts, text = scored(place, "images:{}/bare", original=str(place / "weights.safetensors"))
    assert facts["after"] == record["after"]
    assert f"agreement {record['after']['metric']:.2%}" in text
    assert "accuracy" not in text


def test_its_report_says_agreement(place: Path) -> None:
    found = read_run(place / "run")
    assert (found.measure, found.before) == ("agreement", None)
    assert f"agreement {found.after:.2%} with the original network" in page([found])
    assert "Accuracy" not in page([found])
    assert "of accuracy" not in page([found])


def test_without_labels_evaluation_needs_the_original_weights(place: Path) -> None:
    with pytest.raises(DataError, match="--weights"):
        scored(place, "images:{}/bare")
    with pytest.raises(DataError, match="--samples"):
        scored(place, "images:{}/bare", samples=2)


def test_labelled_images_give_accuracy(place: Path) -> None:
    facts, _ = scored(place, "imagefolder:{}/labelled")
    assert facts["after"]["examples"] == 10
    assert "of" not in facts["after"]
    result = run(options(place, "other", eval_data=f"imagefolder:{place}/labelled"), Config().override(SHORT))
    assert result.after is not None
    assert result.after.examples == 10
    assert not result.after.agreement
    record = json.loads((place / "other" / "record.json").read_text())
    assert record["asked"]["eval_data"] == f"imagefolder:{place}/labelled"


def test_a_network_without_classes_is_measured_by_its_squared_error(place: Path) -> None:
    """One output has one class: all networks would agree, and a target would be met by zeros."""
    code = place / "regression.py"
    code.write_text(
        "from torch import nn\n"
        "def made():\n"
        "    pooled = nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Linear(16, 1)\n"
        "    return nn.Sequential(nn.Conv2d(3, 4, 3, 2), nn.ReLU(), *pooled)\n"
    )
    name, spec = f"python:{code}:made", f"images:{place}/bare"
    options = RunOptions(*(name, spec, place / "regression", "random"), device="cpu", batch_size=8, workers=0)
    result = run(options, Config.preset("quick"))
    assert result.after is not None
    assert result.after.metric is None
    assert not result.after.agreement
    how = replace(options, out=Path(), weights="")
    facts, lines = evaluated([place / "regression" / "model.pwfn"], how, TrustOptions(original="random"))
    assert facts["after"]["loss"] == pytest.approx(result.after.loss)
    assert "agreement" not in "\n".join(lines)
    with pytest.raises(ConfigError, match=r"target\.max_drop is 2, but no accuracy is measured"):
        run(
            replace(options, out=place / "target"),
            Config.preset("quick").override({"target.max_drop": 2.0}),
        )
