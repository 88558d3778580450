"""A user's mistakes, by the command: each is one sentence that says what is wrong, and nothing is lost."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from cases import digits_run, image_folder, npz_file

from pwfn import Config, GaussianNetwork
from pwfn.run.folder import run
from pwfn.zoo import models

RUN = ("compress", "--weights", "random", "--device", "cpu", "--workers", "0", "--batch-size", "8")
SETTINGS = (
    *("--set", "schedule.fractions=[1.0]", "--set", "training.steps_per_epoch=1"),
    *("--set", "finish.polish_epochs=0", "--set", "schedule.epochs_per_round=[1.0]"),
)


@pytest.fixture
def sentence(call: Any) -> Any:
    """What a command that fails says, less the name of the program before it."""

    def said(*arguments: str) -> str:
        status, out, err = call(*arguments)
        assert status == 2
        assert err.startswith("pwfn: ")
        assert err.count("\n") == 1, err
        assert "Traceback" not in out + err
        return str(err.removeprefix("pwfn: ").rstrip("\n"))

    return said


def model_file(folder: Path) -> str:
    """A network for images of any size, quickly made."""
    path = folder / "nets.py"
    path.write_text(
        "from torch import nn\n"
        "def make(classes=10):\n"
        "    return nn.Sequential(nn.AdaptiveAvgPool2d(4), nn.Flatten(), nn.Linear(48, classes))\n"
    )
    return f"python:{path}:make"


# Paths


@pytest.mark.parametrize(
    ("data", "named"),
    [
        ("npz:/", "/: "),
        ("imagefolder:{empty}", "{empty}: "),
        ("cifar10:missing", "missing: "),
        ("python:missing.py:loaders", "missing.py: "),
        ("npz:{text}", "{text}: "),
    ],
)
def test_a_wrong_path_of_data(sentence: Any, data: str, named: str, tmp_path: Path) -> None:
    places = {"empty": tmp_path / "empty", "text": tmp_path / "text.npz"}
    places["empty"].mkdir()
    places["text"].write_text("no arrays here")
    where = ("--model", "cifar_resnet20", "--data", data.format(**places), "--out", str(tmp_path / "run"))
    assert sentence(*RUN, *where).startswith(named.format(**places))


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("--weights", "missing.pt"),
        ("--weights", "{folder}"),
        ("--weights", "{other}"),  # of another network
        ("--config", "missing.toml"),
        ("--model", "python:missing.py:make"),
    ],
)
def test_a_wrong_path_of_weights_settings_or_model(
    sentence: Any, option: str, value: str, tmp_path: Path
) -> None:
    torch.save({"weight": torch.ones(2)}, tmp_path / "w.pt")
    value = value.format(folder=tmp_path, other=tmp_path / "w.pt")
    run = (*RUN, "--model", "digits_resnet", "--data", "digits", "--out", str(tmp_path / "run"))
    assert sentence(*run, option, value).startswith(value.removeprefix("python:").removesuffix(":make"))


# Images and labels


@pytest.mark.parametrize("split", ["train", "val"])
def test_an_image_that_cannot_be_read(sentence: Any, split: str, tmp_path: Path) -> None:
    data = image_folder(tmp_path / "images")
    bad = tmp_path / "images" / split / "a" / "2.jpg"
    bad.write_bytes(bad.read_bytes()[:400])
    where = ("--model", model_file(tmp_path), "--data", data, "--out", str(tmp_path / "run"))
    said = sentence(*RUN, *SETTINGS, *where)
    assert said.startswith(f"{bad}: ")


def test_a_label_out_of_range_says_how_many_classes_to_ask_for(sentence: Any, tmp_path: Path) -> None:
    data = npz_file(tmp_path / "data.npz", labels=12)
    run = (*RUN, "--model", "cifar_resnet20", "--data", data, "--out", str(tmp_path / "run"))
    said = sentence(*run)
    assert said.startswith(f"{data}: y_train[10] is 10: ")
    assert said.endswith("--classes")
    assert "y_train[11] is 11: " in sentence(*run, "--classes", "11")


def test_a_label_out_of_range_in_the_data_of_a_file(sentence: Any, tmp_path: Path) -> None:
    """There the number of classes is the file's, and there is nothing to ask for."""
    net = GaussianNetwork(models.create("cifar_resnet20"))
    net.fix(1.0)
    net.finish().save(tmp_path / "model.pwfn", record={"model": "cifar_resnet20"})
    data = npz_file(tmp_path / "data.npz", labels=12)
    said = sentence("evaluate", str(tmp_path / "model.pwfn"), "--data", data)
    assert said.startswith(f"{data}: y_train[10] is 10: ")
    assert "--classes" not in said


def test_more_class_folders_than_the_model_has_classes(sentence: Any, tmp_path: Path) -> None:
    data = image_folder(tmp_path / "images")
    where = ("--model", model_file(tmp_path), "--data", data, "--out", str(tmp_path / "run"))
    said = sentence(*RUN, *where, "--classes", "1")
    assert said.startswith(f"{data}: there are 2 class folders and the model has 1 classes: 'b' is")


@pytest.mark.parametrize(
    ("side", "channels", "words"),
    [
        (28, 3, "images are 28×28×3, the model takes 32×32"),
        (32, 1, "images are 32×32×1 and have 1 channels, mean and std have 3 numbers"),
    ],
)
def test_images_of_a_wrong_size(sentence: Any, side: int, channels: int, words: str, tmp_path: Path) -> None:
    data = npz_file(tmp_path / "data.npz", side, channels=channels)
    said = sentence(*RUN, "--model", "cifar_resnet20", "--data", data, "--out", str(tmp_path / "run"))
    assert words in said


@pytest.mark.parametrize("training", [True, False])
def test_a_batch_too_large_says_what_fits_and_that_does(
    call: Any, sentence: Any, training: bool, tmp_path: Path
) -> None:
    (tmp_path / "nets.py").write_text(
        "import torch\n"
        "class Hungry(torch.nn.Sequential):\n"
        "    def forward(self, x):\n"
        f"        if self.training == {training} and len(x) > 5:\n"
        "            raise torch.OutOfMemoryError('out of memory')\n"
        "        return super().forward(x)\n"
        "def make():\n"
        "    return Hungry(torch.nn.Flatten(), torch.nn.Linear(192, 3))\n"
    )
    command = (
        *("compress", "--model", f"python:{tmp_path / 'nets.py'}:make", "--weights", "random"),
        *("--data", npz_file(tmp_path / "data.npz", side=8), "--device", "cpu", *SETTINGS),
        *("--out", str(tmp_path / "run")),
        *("--set", "posterior.init=powers"),  # nothing but scoring is in evaluation mode then
    )
    where, option = "round 1 of 1, step 1", "--batch-size"
    if not training:
        where, option = "val_loader, batch 1", "--test-batch-size"
    said = sentence(*command)
    assert said.startswith(f"{where}: ")
    assert said.endswith("a batch of 4 fits")
    # The fit of sigma takes the batches of training in evaluation mode.
    assert call(*command, "--batch-size", "4", option, "4")[0] == 0


# Names


@pytest.mark.parametrize(
    ("model", "data", "words"),
    [
        ("cifar_resnet21", "digits", "did you mean 'cifar_re"),
        ("resnet-18", "digits", "did you mean 'resnet18'"),
        ("digits_resnet", "digit", "did you mean digits?"),
        ("digits_resnet", "cifar-10:x", "did you mean cifar10:DIR?"),
        ("digits_resnet", "nothing", "allowed are npz:PATH, imagefolder:DIR, "),
    ],
)
def test_an_unknown_name_gets_a_suggestion(
    sentence: Any, model: str, data: str, words: str, tmp_path: Path
) -> None:
    assert words in sentence(*RUN, "--model", model, "--data", data, "--out", str(tmp_path / "run"))


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
@pytest.mark.parametrize("command", ["compress", "evaluate", "train"])
def test_cuda_where_there_is_none(sentence: Any, command: str, tmp_path: Path, saved: Path) -> None:
    run = {
        "compress": (*RUN, "--model", "digits_resnet", "--out", str(tmp_path / "run")),
        "evaluate": ("evaluate", str(saved)),
        "train": ("train", "--model", "cifar_resnet20", "--out", str(tmp_path / "w.safetensors")),
    }
    for device in ("cuda", "cuda:1", "gpu"):
        said = sentence(*run[command], "--data", "digits", "--device", device)
        assert said.startswith(f"device {device!r} cannot be used")
        assert ("no CUDA device" in said) == device.startswith("cuda")
    assert not list(tmp_path.glob("*.safetensors"))


@pytest.mark.parametrize(
    ("arguments", "meant"),
    [
        (("compres",), "compress"),
        (("evalute", "x.pwfn"), "evaluate"),
        (("inspct", "x.pwfn"), "inspect"),
        (("compress", "--modle", "x"), "--model"),
        (("compress", "--wieghts", "x"), "--weights"),
        (("evaluate", "x.pwfn", "--dat", "digits"), "--data"),
        (("--versoin",), "--version"),
    ],
)
def test_a_mistyped_command_or_option_gets_a_suggestion(
    call: Any, arguments: tuple[str, ...], meant: str
) -> None:
    status, out, err = call(*arguments)
    assert (status, out) == (2, "")
    assert "Traceback" not in err
    said = " ".join(err.replace("│", " ").split())
    assert "Did you mean" in said or "Possible options" in said or "did you mean" in said
    assert meant in said


# Folders of runs


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The file of a finished run."""
    folder = tmp_path_factory.mktemp("saved")
    config = Config().override({"schedule.fractions": [1.0], "finish.polish_epochs": 0.0})
    run(digits_run(folder), config)
    return folder / "model.pwfn"


def content(folder: Path) -> dict[Path, bytes]:
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.mark.parametrize(
    ("change", "difference"),
    [
        (("--seed", "1"), "settings.seed is 0, not 1"),
        (("--set", "fixing.grid_exponent=8"), "settings.fixing.grid_exponent is 'off', not 8"),
        (("--limit", "100"), "data.content is "),
        (("--batch-size", "32"), "data.batch_size is 64, not 32"),
        (("--max-drop", "1"), "settings.target.max_drop is 'off', not 1.0"),
    ],
)
def test_to_resume_with_other_settings_is_refused_and_leaves_the_run_alone(
    sentence: Any, change: tuple[str, str], difference: str, saved: Path
) -> None:
    before = content(saved.parent)
    run = (
        *("compress", "--model", "digits_resnet", "--data", "digits", "--weights", "random"),
        *("--batch-size", "64", "--device", "cpu"),
        *("--set", "schedule.fractions=[1.0]", "--set", "finish.polish_epochs=0"),
    )
    said = sentence(*run, "--out", str(saved.parent), "--resume", *change)
    assert difference in said
    assert content(saved.parent) == before
    assert "--resume" in sentence(*run, "--out", str(saved.parent))
    assert content(saved.parent) == before


def test_a_run_into_a_file(sentence: Any, tmp_path: Path) -> None:
    path = tmp_path / "run"
    path.write_text("mine")
    run = (*RUN, "--model", "digits_resnet", "--data", "digits", "--out")
    for folder in (path, path / "below"):
        assert sentence(*run, str(folder)).startswith(f"{folder}: ")
    assert path.read_text() == "mine"


@contextmanager
def as_nobody() -> Iterator[None]:
    """Root may read everything: within the block this process is a user who may not."""
    if os.geteuid() != 0:
        yield
        return
    os.seteuid(65534)
    try:
        yield
    finally:
        os.seteuid(0)


@pytest.fixture
def closed() -> Iterator[Path]:
    """A folder with data in it that may not be read, in one that may, as pytest's own may not."""
    with tempfile.TemporaryDirectory() as place:
        Path(place).chmod(0o777)
        folder = Path(place) / "closed"
        image_folder(folder / "images")
        npz_file(folder / "data.npz")
        (folder / "nets.py").write_text("def make(): ...\ndef data(): ...\n")
        (folder / "w.pt").write_bytes(b"")
        (folder / "settings.toml").write_text("seed = 1\n")
        folder.chmod(0o000)
        yield folder
        folder.chmod(0o700)


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("--data", "npz:{}/data.npz"),
        ("--data", "imagefolder:{}/images"),
        ("--data", "cifar10:{}/cifar"),
        ("--data", "python:{}/nets.py:data"),
        ("--model", "python:{}/nets.py:make"),
        ("--weights", "{}/w.pt"),
        ("--config", "{}/settings.toml"),
        ("--out", "{}/run"),
        ("--out", "{}"),
    ],
)
def test_what_may_not_be_read(sentence: Any, option: str, value: str, closed: Path) -> None:
    usual = {"--model": "digits_resnet", "--data": "digits", "--weights": "random", "--device": "cpu"}
    usual |= {"--out": str(closed.with_name("run")), option: value.format(closed)}
    with as_nobody():
        said = sentence("compress", *(word for pair in usual.items() for word in pair))
    assert str(closed) in said
    assert "Permission denied" in said
