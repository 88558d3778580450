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
from cases import image_folder, npz_file

from pwfn import Config, GaussianNetwork
from pwfn.run.folder import run
from pwfn.run.options import RunOptions
from pwfn.zoo import models

RUN = ("compress", "--weights", "random", "--device", "cpu", "--workers", "0", "--batch-size", "8")
SETTINGS = (
    *("--set", "schedule.fractions=[1.0]", "--set", "training.steps_per_epoch=1"),
    *("--set", "finish.polish_epochs=0", "--set", "schedule.warmup_epochs=1"),
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
    ("data", "words"),
    [
        ("npz:/", "/: there is no such file"),
        ("imagefolder:{empty}", "{empty}: has no folder 'train': "),
        ("cifar10:missing", "missing: "),
        ("python:missing.py:loaders", "missing.py: cannot be read: No such file"),
        ("npz:{text}", "{text}: cannot be read as an npz file: "),
    ],
)
def test_a_wrong_path_of_data(sentence: Any, data: str, words: str, tmp_path: Path) -> None:
    places = {"empty": tmp_path / "empty", "text": tmp_path / "text.npz"}
    places["empty"].mkdir()
    places["text"].write_text("no arrays here")
    said = sentence(
        *RUN, "--model", "cifar_resnet20", "--data", data.format(**places), "--out", str(tmp_path / "run")
    )
    assert said.startswith(words.format(**places))


def test_a_wrong_path_of_weights_settings_or_file(sentence: Any, tmp_path: Path) -> None:
    run = ("compress", "--model", "digits_resnet", "--data", "digits", "--out", str(tmp_path / "run"))
    assert sentence(*run, "--weights", "missing.pt").startswith(
        "missing.pt: the weights cannot be read: No such"
    )
    assert sentence(*run, "--weights", str(tmp_path)).startswith(
        f"{tmp_path}: the weights cannot be read: Is a d"
    )
    assert sentence(*run, "--config", "missing.toml").startswith("missing.toml: cannot read the settings")
    assert (
        sentence("evaluate", "missing.pwfn", "--data", "digits") == "missing.pwfn: No such file or directory"
    )
    model = ("--model", "python:missing.py:make")
    assert sentence(*run, "--weights", "random", *model).startswith("missing.py: cannot be read: No such")


def test_the_weights_of_another_network(sentence: Any, tmp_path: Path) -> None:
    path = tmp_path / "w.pt"
    torch.save({"weight": torch.ones(2)}, path)
    run = ("compress", "--model", "digits_resnet", "--data", "digits", "--out", str(tmp_path / "run"))
    said = sentence(*run, "--weights", str(path))
    assert said.startswith(f"{path} does not fit the SmallResNet: missing in the file: conv1.weight")


# Images and labels


@pytest.mark.parametrize("split", ["train", "val"])
def test_an_image_that_cannot_be_read(sentence: Any, split: str, tmp_path: Path) -> None:
    data = image_folder(tmp_path / "images")
    bad = tmp_path / "images" / split / "a" / "2.jpg"
    bad.write_bytes(bad.read_bytes()[:400])
    where = ("--model", model_file(tmp_path), "--data", data, "--out", str(tmp_path / "run"))
    said = sentence(*RUN, *SETTINGS, *where)
    assert said.startswith(f"{bad}: cannot be read as an image: ")


def test_a_label_out_of_range_says_how_many_classes_to_ask_for(sentence: Any, tmp_path: Path) -> None:
    data = npz_file(tmp_path / "data.npz", labels=12)
    run = (*RUN, "--model", "cifar_resnet20", "--data", data, "--out", str(tmp_path / "run"))
    assert sentence(*run) == (
        f"{data}: y_train[10] is 10: the model has 10 classes, allowed is 0 to 9: for another number of "
        "outputs say --classes"
    )
    assert "y_train[11] is 11: the model has 11 classes, allowed is 0 to 10" in sentence(
        *run, "--classes", "11"
    )


def test_a_label_out_of_range_in_the_data_of_a_file(sentence: Any, tmp_path: Path) -> None:
    """There the number of classes is the file's, and there is nothing to ask for."""
    net = GaussianNetwork(models.create("cifar_resnet20"))
    net.fix(1.0)
    net.finish().save(tmp_path / "model.pwfn", record={"model": "cifar_resnet20"})
    data = npz_file(tmp_path / "data.npz", labels=12)
    assert sentence("evaluate", str(tmp_path / "model.pwfn"), "--data", data) == (
        f"{data}: y_train[10] is 10: the model has 10 classes, allowed is 0 to 9"
    )


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
        *(
            "--data",
            npz_file(tmp_path / "data.npz", side=8),
            "--device",
            "cpu",
            "--out",
            str(tmp_path / "run"),
            *SETTINGS,
            # Nothing but scoring is in evaluation mode then.
            *("--set", "posterior.init=powers", "--set", "training.distill=false"),
        ),
    )
    where, option = "round 1 of 1, step 1", "--batch-size"
    if not training:
        where, option = "val_loader, batch 1", "--test-batch-size"
    assert sentence(*command) == (
        f"{where}: out of memory with inputs (16, 3, 8, 8) float32: a batch of 4 fits"
    )
    assert call(*command, option, "4")[0] == 0


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
    for device in ("cuda", "cuda:1"):
        assert sentence(*run[command], "--data", "digits", "--device", device) == (
            f"device {device!r} cannot be used (there is no CUDA device, or torch was built without CUDA): "
            'allowed is one that this torch can reach, such as "cpu" or "cuda:0"'
        )
    assert sentence(*run[command], "--data", "digits", "--device", "gpu").startswith(
        "device 'gpu' cannot be used"
    )
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
    run(RunOptions("digits_resnet", "digits", folder, weights="random", device="cpu"), config)
    return folder / "model.pwfn"


def content(folder: Path) -> dict[Path, bytes]:
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (
            ("--seed", "1"),
            "whose settings.seed is 0, not 1: start in another folder, or with the settings of that",
        ),
        (("--set", "clustering.b=8"), "settings.clustering.b is 'off', not 8"),
        (("--limit", "100"), "data.content is "),
        (("--batch-size", "64"), "data.batch_size is 128, not 64"),
        (("--max-drop", "1"), "settings.target.max_drop is 'off', not 1.0"),
    ],
)
def test_to_go_on_with_other_settings_is_refused_and_leaves_the_run_alone(
    sentence: Any, change: tuple[str, str], words: str, saved: Path
) -> None:
    before = content(saved.parent)
    run = (
        *(
            "compress",
            "--model",
            "digits_resnet",
            "--data",
            "digits",
            "--weights",
            "random",
            "--device",
            "cpu",
        ),
        *("--set", "schedule.fractions=[1.0]", "--set", "finish.polish_epochs=0"),
    )
    said = sentence(*run, "--out", str(saved.parent), "--resume", *change)
    assert "is of another run, whose " in said
    assert words in said
    assert content(saved.parent) == before
    assert "holds a run already: go on with it by --resume" in sentence(*run, "--out", str(saved.parent))
    assert content(saved.parent) == before


def test_a_run_into_a_file(sentence: Any, tmp_path: Path) -> None:
    path = tmp_path / "run"
    path.write_text("mine")
    run = (*RUN, "--model", "digits_resnet", "--data", "digits", "--out")
    assert sentence(*run, str(path)) == f"{path}: cannot be made a folder: File exists"
    assert (
        sentence(*run, str(path / "below")) == f"{path / 'below'}: cannot be made a folder: Not a directory"
    )
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
