"""Data by name: nothing is lost or doubled on the way to a batch, and any batch can be had again."""

from __future__ import annotations

import hashlib
import os
import pickle
import random
import shutil
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from pwfn import DataError
from pwfn.zoo import data, models
from pwfn.zoo.data import DataOptions, Epochs, Repeated, TensorLoader, open_source

HALF = {"mean": (0.5, 0.5, 0.5), "std": (0.25, 0.25, 0.25)}


def targets_of(batches: Any) -> list[int]:
    return [int(target) for _, targets in batches for target in targets]


def images_of(loader: Epochs) -> Counter[bytes]:
    return Counter(image.numpy().tobytes() for batch, _ in loader.epoch(0) for image in batch)


def same(left: Any, right: Any) -> bool:
    """Whether two lists of batches are equal to the bit."""
    return len(left) == len(right) and all(
        torch.equal(x, u) and torch.equal(y, v) for (x, y), (u, v) in zip(left, right, strict=True)
    )


# Sources, made small


def arrays() -> dict[str, Any]:
    draw = np.random.default_rng(0)
    return {
        "x_train": draw.integers(0, 256, (6, 4, 5, 3), dtype=np.uint8),
        "y_train": draw.integers(0, 10, 6),
        "x_test": draw.integers(0, 256, (3, 4, 5, 3), dtype=np.uint8),
        "y_test": draw.integers(0, 10, 3).astype(np.uint8),
    }


def make_npz(folder: Path, **changes: Any) -> str:
    folder.mkdir(parents=True, exist_ok=True)
    content = {**arrays(), **changes}
    np.savez(folder / "images.npz", **{name: value for name, value in content.items() if value is not None})
    return f"npz:{folder / 'images.npz'}"


def make_folder(folder: Path, train: int = 5, val: int = 2) -> str:
    """Three classes of images of various sizes, JPEG and PNG, colour, grey and palette."""
    draw = np.random.default_rng(0)
    for split, count in (("train", train), ("val", val)):
        for number, name in enumerate(("ape", "bee", "cat")):
            (folder / split / name).mkdir(parents=True)
            for index in range(count):
                pixels = draw.integers(0, 256, (24 + index, 30 + number, 3), dtype=np.uint8)
                mode = ("RGB", "L", "P")[index % 3]
                ending = "JPEG" if mode != "P" else "png"
                Image.fromarray(pixels).convert(mode).save(folder / split / name / f"{index}.{ending}")
    return f"imagefolder:{folder}"


def cifar_batch(n: int, seed: int, labels: str = "labels", classes: int = 10) -> dict[bytes, Any]:
    draw = np.random.default_rng(seed)
    images = draw.integers(0, 256, (n, 3072), dtype=np.uint8)
    return {b"data": images, labels.encode(): draw.integers(0, classes, n).tolist()}


def make_cifar10(folder: Path, **changes: Any) -> str:
    inner = folder / "cifar-10-batches-py"
    inner.mkdir(parents=True)
    for index, name in enumerate([*(f"data_batch_{n}" for n in range(1, 6)), "test_batch"]):
        content = changes.get(name, cifar_batch(3, index))
        raw = content if isinstance(content, bytes) else pickle.dumps(content, protocol=index)
        (inner / name).write_bytes(raw)
    return f"cifar10:{folder}"


def make_cifar100(folder: Path) -> str:
    folder.mkdir(parents=True, exist_ok=True)
    for index, name in enumerate(("train", "test")):
        (folder / name).write_bytes(pickle.dumps(cifar_batch(9, index, "fine_labels", 100)))
    return f"cifar100:{folder}"


LOADERS = """
import torch
from pwfn.zoo.data import TensorLoader
def loaders():
    images, targets = torch.arange(12.0).view(12, 1, 1, 1), torch.arange(12)
    return TensorLoader(images, targets, 4, shuffle=True), list(zip(images.split(3), targets.split(3)))
def plain():
    return loaders()[1], loaders()[1]
def with_options(options):
    return [(options.batch_size, options.rank)], [0]
class Counting(list):
    epoch = 3  # its own counter, not a method
def counting():
    return Counting([1, 2]), [0]
def one(): return [1]
def number(): return 3, 4
def endless(): return (x for x in [1]), [1]
def broken(): raise ValueError("no data today\\nsecond line")
value = 3
"""


def make_python(folder: Path, function: str = "loaders") -> str:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "mine.py").write_text(LOADERS)
    return f"python:{folder / 'mine.py'}:{function}"


MAKERS: dict[str, Callable[[Path], str]] = {
    "npz": make_npz,
    "imagefolder": make_folder,
    "cifar10": make_cifar10,
    "cifar100": make_cifar100,
    "digits": lambda _: "digits",
    "python": make_python,
}


def options_for(kind: str, **changes: Any) -> DataOptions:
    fitting: dict[str, Any] = {} if kind in ("digits", "python") else dict(HALF)
    if kind == "imagefolder":
        fitting |= {"image_size": 16, "workers": 0}
    size = 500 if kind == "digits" else 4
    return DataOptions(**{"batch_size": size, "test_batch_size": 2, **fitting, **changes})


@pytest.fixture(scope="module")
def places(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    return {kind: make(tmp_path_factory.mktemp(kind) / "here") for kind, make in MAKERS.items()}


# Every source


@pytest.mark.parametrize("kind", MAKERS)
def test_an_epoch_is_a_pure_function_of_its_number_and_position(kind: str, places: dict[str, str]) -> None:
    opened = open_source(places[kind], options_for(kind, seed=3))
    for loader in (opened.train, opened.test):
        assert isinstance(loader, Epochs)
        states = torch.get_rng_state(), random.getstate(), np.random.get_state()[1].tolist()
        whole = list(loader.epoch(1))
        assert len(whole) == len(loader) >= 2
        assert torch.equal(torch.get_rng_state(), states[0])
        assert (random.getstate(), np.random.get_state()[1].tolist()) == states[1:]
        torch.rand(3)
        list(loader.epoch(0))
        for start in (0, 1, len(loader) - 1, len(loader), len(loader) + 1):
            assert same(list(loader.epoch(1, start)), whole[start:])
    again = open_source(places[kind], options_for(kind, seed=3))
    abandoned = iter(again.train)  # each iter is the next epoch, even if nothing was taken from the last
    assert same(list(again.train), list(opened.train.epoch(1)))
    assert same(list(abandoned), list(opened.train.epoch(0)))
    assert not same(list(opened.train.epoch(0)), list(opened.train.epoch(1)))
    if kind != "python":  # whose loaders have their own seed
        other = open_source(places[kind], options_for(kind, seed=4))
        assert not same(list(other.train.epoch(2)), list(opened.train.epoch(2)))
        assert same(list(other.test.epoch(2)), list(opened.test.epoch(0)))


@pytest.mark.parametrize("kind", ["npz", "imagefolder", "digits"])
@pytest.mark.parametrize("world", [2, 3])
def test_processes_share_the_data_between_them(kind: str, world: int, places: dict[str, str]) -> None:
    alone = open_source(places[kind], options_for(kind))
    options = [options_for(kind, rank=rank, world=world, batch_size=2) for rank in range(world)]
    parts = [open_source(places[kind], each) for each in options]
    facts = {(part.fingerprint, part.train_size, part.classes) for part in parts}
    assert facts == {(alone.fingerprint, alone.train_size, alone.classes)}
    assert len({(len(part.train), len(part.test)) for part in parts}) == 1
    assert sum((images_of(part.test) for part in parts), Counter()) == images_of(alone.test)
    trained = Counter(target for part in parts for target in targets_of(part.train.epoch(1)))
    every = Counter(targets_of(alone.train.epoch(1)))
    assert trained <= every
    assert every.total() - trained.total() < world


@pytest.mark.parametrize("kind", MAKERS)
def test_the_fingerprint_is_of_the_content_not_of_the_place(
    kind: str, places: dict[str, str], tmp_path: Path
) -> None:
    mine = open_source(places[kind], options_for(kind))
    other = MAKERS[kind](tmp_path / "some" / "where")
    assert open_source(other, options_for(kind, seed=9)).fingerprint == mine.fingerprint
    assert mine.name == places[kind]
    if kind != "python":
        changes = ({"holdout": 3}, {"limit": 3}, {})
        assert len({open_source(other, options_for(kind, **change)).fingerprint for change in changes}) == 3


def test_a_function_without_an_argument_cannot_hold_images_out(tmp_path: Path) -> None:
    """Its test data would count as held-out training images."""
    spec = make_python(tmp_path, "plain")
    with pytest.raises(DataError, match="takes no argument, and so cannot hold out 5 training images"):
        open_source(spec, options_for("python", holdout=5))
    assert (
        len(open_source(make_python(tmp_path, "with_options"), options_for("python", holdout=5)).train) == 1
    )


def test_the_fingerprint_changes_with_any_change_of_the_content(tmp_path: Path) -> None:
    sources = [make_npz(tmp_path / "npz")]
    for name, value in arrays().items():
        changed = value.copy()
        changed.flat[-1] = (changed.flat[-1] + 1) % 10
        sources.append(make_npz(tmp_path / name, **{name: changed}))
    changes: list[Callable[[Path], Any]] = [
        lambda file: None,
        lambda file: file.rename(file.with_name("00.JPEG")),
        lambda file: file.write_bytes(file.read_bytes() + b"\0"),
        lambda file: file.unlink(),
    ]
    for number, change in enumerate(changes):
        sources.append(make_folder(tmp_path / str(number)))
        change(tmp_path / str(number) / "train" / "bee" / "0.JPEG")
    sources += [make_python(tmp_path / "python"), make_python(tmp_path / "python", "plain")]
    sources.append(make_python(tmp_path / "changed"))
    with (tmp_path / "changed" / "mine.py").open("a") as file:
        file.write("# changed\n")
    assert len({open_source(source).fingerprint for source in sources}) == len(sources)


@pytest.mark.parametrize("kind", ["npz", "imagefolder"])
def test_a_holdout_is_taken_from_the_training_images_and_is_the_same_for_every_seed(
    kind: str, places: dict[str, str]
) -> None:
    def opened(**changes: Any) -> data.Data:
        return open_source(places[kind], options_for(kind, augment=False, **changes))

    whole, held = opened(), opened(holdout=3)
    assert whole.train_size is not None
    assert (held.train_size, held.test_size) == (whole.train_size - 3, 3)
    assert same(list(held.test), list(opened(holdout=3, seed=1).test))
    assert images_of(held.train) + images_of(held.test) == images_of(whole.train)
    few = opened(holdout=3, limit=2)
    assert few.train_size == 2
    assert images_of(few.train) < images_of(held.train)
    assert images_of(few.test) == images_of(held.test)
    with pytest.raises(DataError, match="holdout is"):
        opened(holdout=whole.train_size)
    with pytest.raises(DataError, match="2 training images for 3 processes"):
        opened(limit=2, world=3)


@pytest.mark.parametrize(
    ("spec", "words"),
    [
        ("imagefoldr:/x", r"'imagefoldr:/x'.*did you mean imagefolder:DIR\?"),
        ("CIFAR10:/x", r"did you mean cifar10:DIR\?"),
        ("some/cifar.npz", r"did you mean 'npz:some/cifar.npz'\?"),
        ("/", r"did you mean 'imagefolder:/', or 'images:/' without labels\?"),
        ("qqq", "npz:PATH, imagefolder:DIR, images:DIR, cifar10:DIR, cifar100:DIR, digits, python:FILE"),
        ("npz", "allowed is npz:PATH"),
        ("npz:", "allowed is npz:PATH"),
        ("digits:8", "allowed is digits"),
        ("npz:/nowhere.npz", "^/nowhere.npz: there is no such file"),
        ("imagefolder:/nowhere", "^/nowhere: there is no such folder"),
        ("cifar10:/nowhere", "^/nowhere: there is no such folder"),
        ("cifar100:/", "^/train: there is no such file"),
        ("python:/nowhere.py:f", "^/nowhere.py: cannot be read: No such file"),
        ("python:nowhere.py", "allowed is python:FILE:FUNCTION"),
    ],
)
def test_a_name_that_leads_nowhere_gets_one_sentence(spec: str, words: str) -> None:
    with pytest.raises(DataError, match=words) as caught:
        open_source(spec)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "change",
    [
        *({"batch_size": 0}, {"batch_size": 2.5}, {"test_batch_size": 0}, {"rank": 2, "world": 2}),
        {"mean": (0.5,)},
        *({"std": (0.0,), "mean": (0.5,)}, {"interpolation": "cubic"}, {"crop_pct": 0.0}, {"limit": 0}),
        *({"holdout": -1}, {"workers": -1}, {"image_size": 0}),
    ],
    ids=str,
)
def test_options_are_checked(change: dict[str, Any]) -> None:
    with pytest.raises(DataError, match=f"{next(iter(change))} (is|has) "):
        DataOptions(**change)


# Arrays


def test_the_digits_are_all_there() -> None:
    np.random.seed(123)  # the split does not depend on it
    train, test = data.digits()
    assert (train.shuffle, train.augment, test.shuffle, test.augment) == (True, False, False, False)
    assert (train.images.shape, test.images.shape) == ((1347, 1, 8, 8), (450, 1, 8, 8))
    images, targets = torch.cat((train.images, test.images)), torch.cat((train.targets, test.targets))
    # How many of each digit the UCI test set has.
    assert targets.bincount().tolist() == [178, 182, 177, 183, 181, 182, 181, 179, 174, 180]
    assert sorted((images * 16).unique().tolist()) == list(range(17))
    # The bytes that the package ships, and that they are those of scikit-learn.
    stored = np.load(Path(data.__file__).with_name("digits.npz"))
    assert {name: hashlib.sha256(array.tobytes()).hexdigest() for name, array in stored.items()} == {
        "images": "8f26b2bd9d135c256808f68f14fdabddde6d9c7f869ae419704b051f0f14b3b3",
        "labels": "8ba4f891220f5e4c9c819638d1602d74b83618f167043c6da52a2a247841ddf0",
    }
    order = np.random.default_rng(0).permutation(1797)
    assert np.array_equal(images[:, 0].numpy() * 16, stored["images"][order])
    assert np.array_equal(targets.numpy(), stored["labels"][order])
    theirs = pytest.importorskip("sklearn.datasets").load_digits()
    assert stored["images"].astype(theirs.images.dtype).tobytes() == theirs.images.tobytes()
    assert stored["labels"].astype(theirs.target.dtype).tobytes() == theirs.target.tobytes()


def test_an_npz_file_becomes_normalised_channels_first_images(tmp_path: Path) -> None:
    spec = make_npz(tmp_path)
    opened = open_source(spec, DataOptions(mean=(0.1, 0.2, 0.3), std=(0.5, 0.6, 0.7), batch_size=4))
    content = arrays()
    assert (len(opened.train), len(opened.test)) == (2, 1)
    assert (opened.image_shape, opened.train_size, opened.test_size) == ((3, 4, 5), 6, 3)
    assert opened.classes == max(content["y_train"].max(), content["y_test"].max()) + 1
    images, labels = next(iter(opened.test))  # in order, and not augmented
    assert labels.tolist() == content["y_test"].tolist()
    assert labels.dtype == torch.int64
    expected = (content["x_test"].astype(np.float64) / 255 - [0.1, 0.2, 0.3]) / [0.5, 0.6, 0.7]
    torch.testing.assert_close(images, torch.from_numpy(expected.transpose(0, 3, 1, 2)).float())
    assert sorted(targets_of(opened.train)) == sorted(content["y_train"].tolist())


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"y_test": None}, "has no y_test"),
        ({"x_train": np.zeros((6, 4, 5, 3))}, r"x_train is \(6, 4, 5, 3\) float64: allowed is N×H×W×C uint8"),
        ({"x_train": np.zeros((6, 3, 9, 9), np.uint8)}, r"\(6, 3, 9, 9\) uint8: allowed is N×H×W×C"),
        ({"x_test": np.zeros((3, 4, 5), np.uint8)}, r"x_test is \(3, 4, 5\) uint8"),
        ({"y_train": np.zeros(5, np.int64)}, "y_train has 5 labels for 6 images"),
        ({"y_train": np.zeros((6, 1), np.int64)}, r"y_train is \(6, 1\) int64: allowed is N whole numbers"),
        ({"y_test": np.array(["a", "b", "c"])}, r"y_test is \(3,\) <U1"),
        ({"y_test": np.array([0, None, 1])}, "cannot be read as an npz file"),  # a pickled object
        ({"y_test": np.array([0, 1, -1])}, r"y_test\[2\] is -1"),
        ({"x_test": np.zeros((3, 4, 5, 1), np.uint8)}, "training images are 4×5×3 and test images 4×5×1"),
        ({"x_test": np.zeros((0, 4, 5, 3), np.uint8), "y_test": np.zeros(0, int)}, "y_test is empty"),
    ],
)
def test_an_npz_file_of_another_form_is_refused(changes: dict[str, Any], words: str, tmp_path: Path) -> None:
    spec = make_npz(tmp_path, **changes)
    with pytest.raises(DataError, match=words) as caught:
        open_source(spec)
    assert str(caught.value).startswith(spec.removeprefix("npz:"))


@pytest.mark.parametrize("damage", ["truncated", "damaged", "empty", "text"])
def test_a_file_that_is_no_npz_is_named(damage: str, tmp_path: Path) -> None:
    path = tmp_path / "file.npz"
    np.savez_compressed(path, **arrays())
    whole = path.read_bytes()
    third = len(whole) // 3
    damaged = whole[:third] + bytes(64) + whole[third + 64 :]
    content = {"truncated": whole[:third], "damaged": damaged, "empty": b"", "text": b"x_train,y_train"}
    path.write_bytes(content[damage])
    with pytest.raises(DataError, match=f"^{path}: cannot be read as an npz file") as caught:
        open_source(f"npz:{path}")
    assert "\n" not in str(caught.value)


def test_images_and_labels_that_the_model_does_not_take_are_named(
    places: dict[str, str], tmp_path: Path
) -> None:
    with pytest.raises(DataError, match="images are 8×8×1 and have 1 channels, mean and std have 3 numbers"):
        open_source("digits", DataOptions(**HALF))
    with pytest.raises(DataError, match="images are 32×32×3, the model takes 224×224"):
        open_source(places["cifar10"], DataOptions(image_size=224))
    with pytest.raises(DataError, match="read in 3 channels, mean and std have 1 numbers"):
        open_source(places["imagefolder"], DataOptions(mean=(0.5,), std=(1.0,)))
    spec = make_npz(tmp_path, y_train=np.array([0, 1, 2, 3, 7, 9]), y_test=np.array([0, 11, 1]))
    opened = open_source(spec)
    assert opened.classes == 12
    opened.check_labels(12)
    for classes, words in ((10, r"y_test\[1\] is 11"), (4, r"y_train\[4\] is 7")):
        with pytest.raises(DataError, match=f"{words}: the model has {classes} classes"):
            opened.check_labels(classes)
    with pytest.raises(DataError, match="3 class folders and the model has 2 classes: 'cat' is the first"):
        open_source(places["imagefolder"]).check_labels(2)
    open_source(places["imagefolder"]).check_labels(1000)
    open_source(places["python"]).check_labels(1)  # not known


# CIFAR


def test_cifar_batches_become_images(places: dict[str, str]) -> None:
    opened = open_source(places["cifar10"])
    assert (opened.classes, opened.image_shape) == (10, (3, 32, 32))
    assert (opened.train_size, opened.test_size) == (15, 3)
    batch = cifar_batch(3, 5)
    ((images, labels),) = list(opened.test)
    assert labels.tolist() == batch[b"labels"]
    expected = batch[b"data"].reshape(3, 3, 32, 32).astype(np.float32) / 255  # red, green, blue planes
    assert torch.equal(images, torch.from_numpy(expected))
    train = [label for n in range(5) for label in cifar_batch(3, n)[b"labels"]]
    assert sorted(targets_of(opened.train)) == sorted(train)
    hundred = open_source(places["cifar100"])
    assert (hundred.classes, hundred.train_size) == (100, 9)
    assert targets_of(hundred.test) == cifar_batch(9, 1, "fine_labels", 100)[b"fine_labels"]


def test_a_pickle_as_python_2_wrote_it_is_read(tmp_path: Path) -> None:
    """The official files are of 2009: byte strings for text, and the flags of a dtype as 0 and 1."""
    pixels = bytes(range(256)) * 12
    array = (
        b"cnumpy.core.multiarray\n_reconstruct\n(cnumpy\nndarray\n(K\x00tU\x01btR"
        b"(K\x01(K\x01M\x00\x0ctcnumpy\ndtype\n(U\x02u1K\x00K\x01tR(K\x03U\x01|NNNJ\xff\xff\xff\xffJ\xff\xff"
        b"\xff\xffK\x00tb\x89T" + len(pixels).to_bytes(4, "little") + pixels + b"tb"
    )
    old = b"\x80\x02}(U\x04data" + array + b"U\x06labels](K\x07eu."
    spec = make_cifar10(tmp_path, test_batch=old)
    ((images, labels),) = list(open_source(spec).test)
    assert labels.tolist() == [7]
    assert bytes((images * 255).round().byte().reshape(-1).tolist()) == pixels


class Malicious:
    def __init__(self, function: Any, *arguments: Any) -> None:
        self.call = function, arguments

    def __reduce__(self) -> Any:
        return self.call


@pytest.mark.parametrize(
    ("function", "arguments", "name"),
    [
        (os.mkdir, ("owned",), "posix.mkdir"),
        (eval, ("__import__('os').mkdir('owned')",), "builtins.eval"),
        (getattr, (np.ndarray, "tofile"), "builtins.getattr"),
        (np.load, ("x.npy",), "numpy.load"),
        (np.fromfile, ("x",), "fromfile"),
    ],
)
def test_a_pickle_that_would_run_code_is_refused(
    function: Any, arguments: Any, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    batch = {**cifar_batch(3, 0), b"batch_label": Malicious(function, *arguments)}
    for protocol in (0, 2, 4):
        spec = make_cifar10(tmp_path / str(protocol), data_batch_2=pickle.dumps(batch, protocol))
        with pytest.raises(DataError, match=f"data_batch_2: asks to run .*{name.split('.')[-1]}"):
            open_source(spec)
    assert not (tmp_path / "owned").exists()


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"\x80\x04\x8c\x05numpy\x8c\x0endarray.tofile\x93.", r"numpy\.ndarray\.tofile"),
        (b"c_codecs\nencode\n(Vx\nVrot13\ntR.", "'rot13'"),
    ],
)
def test_a_pickle_cannot_reach_through_an_allowed_name(content: bytes, words: str, tmp_path: Path) -> None:
    with pytest.raises(DataError, match=f"data_batch_1: .*{words}"):
        open_source(make_cifar10(tmp_path, data_batch_1=content))


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"", "cannot be read as a CIFAR batch: EOFError"),
        (pickle.dumps(cifar_batch(3, 0))[:500], "cannot be read as a CIFAR batch"),
        (pickle.dumps([1, 2]), "cannot be read as a CIFAR batch"),
        (pickle.dumps({b"data": np.zeros((3, 3072), np.uint8)}), "cannot be read as a CIFAR batch: KeyError"),
        ({**cifar_batch(3, 0), b"data": np.zeros((3, 3071), np.uint8)}, r"data is \(3, 3071\) uint8"),
        ({**cifar_batch(3, 0), b"labels": [1, 2]}, "one whole number for each of 3 images"),
        ({**cifar_batch(3, 0), b"labels": [1, 10, 2]}, r"labels\[1\] is 10: allowed is 0 to 9"),
    ],
)
def test_a_damaged_cifar_batch_is_named(content: Any, words: str, tmp_path: Path) -> None:
    spec = make_cifar10(tmp_path, data_batch_3=content)
    with pytest.raises(DataError, match=f"/data_batch_3: .*{words}"):
        open_source(spec)


# Folders of images


def test_a_folder_of_images_is_read_as_torchvision_would(places: dict[str, str]) -> None:
    opened = open_source(places["imagefolder"], options_for("imagefolder", interpolation="bicubic"))
    assert (opened.classes, opened.class_names, opened.image_shape) == (3, ("ape", "bee", "cat"), (3, 16, 16))
    assert (opened.train_size, opened.test_size) == (15, 6)
    models.ready_torchvision()
    from torchvision import transforms as T

    chain = T.Compose(
        [
            T.Resize(18, T.InterpolationMode.BICUBIC),  # floor(16 / 0.875)
            T.CenterCrop(16),
            T.ToTensor(),
            T.Normalize(HALF["mean"], HALF["std"]),
        ]
    )
    root = Path(places["imagefolder"].removeprefix("imagefolder:"))
    files = sorted((root / "val").rglob("*.*"))
    expected = torch.stack([chain(Image.open(file).convert("RGB")) for file in files])
    batches = list(opened.test)
    torch.testing.assert_close(torch.cat([images for images, _ in batches]), expected)
    assert targets_of(batches) == [0, 0, 1, 1, 2, 2]
    assert sorted(targets_of(opened.train)) == [0] * 5 + [1] * 5 + [2] * 5


def test_the_number_of_workers_makes_no_difference(places: dict[str, str]) -> None:
    alone, many = (
        open_source(places["imagefolder"], options_for("imagefolder", workers=workers)) for workers in (0, 2)
    )
    state = torch.get_rng_state()
    assert same(list(many.train.epoch(1)), list(alone.train.epoch(1)))
    assert same(list(many.train.epoch(2, 1)), list(alone.train.epoch(2))[1:])
    assert same(list(many.test), list(alone.test))
    assert torch.equal(torch.get_rng_state(), state)


def test_training_images_of_a_folder_are_cropped_and_flipped(tmp_path: Path) -> None:
    """Of a ramp, left to right, a crop spans less than the whole, and half of them fall."""
    ramp = np.broadcast_to(np.arange(0, 240, 5, dtype=np.uint8)[None, :, None], (48, 48, 3))
    for split in ("train", "val"):
        (tmp_path / split / "ramp").mkdir(parents=True)
        for n in range(40):
            Image.fromarray(ramp.copy()).save(tmp_path / split / "ramp" / f"{n}.png")
    spec = f"imagefolder:{tmp_path}"
    ((images, _),) = list(open_source(spec, DataOptions(image_size=16, workers=0)).train.epoch(0))
    slopes = images[:, 0, 8, -1] - images[:, 0, 8, 0]
    assert 8 < int((slopes < 0).sum()) < 32
    assert len(set(slopes.abs().tolist())) > 10
    assert float(slopes.abs().min()) < 0.5 < float(slopes.abs().max())
    plain = open_source(spec, DataOptions(image_size=16, workers=0, augment=False))
    ((images, _),) = list(plain.train.epoch(0))
    assert all(torch.equal(image, images[0]) for image in images)


@pytest.mark.parametrize("workers", [0, 1])
@pytest.mark.parametrize("damage", ["truncated", "text", "empty", "gone"])
def test_an_image_that_cannot_be_read_is_named(workers: int, damage: str, tmp_path: Path) -> None:
    spec = make_folder(tmp_path)
    bad = tmp_path / "train" / "bee" / "1.JPEG"
    opened = open_source(spec, options_for("imagefolder", workers=workers))
    whole = bad.read_bytes()
    if damage == "gone":
        bad.unlink()
    else:
        bad.write_bytes({"truncated": whole[: len(whole) // 2], "text": b"hello", "empty": b""}[damage])
    with pytest.raises(DataError, match=f"^{bad}: cannot be read as an image: ") as caught:
        list(opened.train.epoch(0))
    assert "\n" not in str(caught.value)


def test_a_folder_of_another_form_is_refused(tmp_path: Path) -> None:
    def refused(change: Callable[[Path], Any], words: str, **options: Any) -> None:
        spec = make_folder(tmp_path / "f")
        change(tmp_path / "f")
        with pytest.raises(DataError, match=words) as caught:
            open_source(spec, DataOptions(**options))
        assert "\n" not in str(caught.value)
        shutil.rmtree(tmp_path / "f")

    refused(lambda f: shutil.rmtree(f / "train"), "f: has no folder 'train'")
    refused(lambda f: shutil.rmtree(f / "val"), "f: has no folder 'val'")
    refused(lambda f: (shutil.rmtree(f / "train"), (f / "train").mkdir()), "train: has no class folders")
    refused(lambda f: (f / "train" / "dog").mkdir(), "train/dog: this class folder has no images")
    refused(lambda f: (f / "val" / "bee").rename(f / "val" / "dog"), "val/dog: this class has no folder in")
    spec = make_folder(tmp_path / "f")
    shutil.rmtree(tmp_path / "f" / "val" / "ape")  # some classes alone can be tested
    (tmp_path / "f" / "train" / "bee" / "notes.txt").write_text("not an image")
    (tmp_path / "f" / "train" / ".cache").mkdir()
    opened = open_source(spec, options_for("imagefolder"))
    assert (targets_of(opened.test), opened.train_size) == ([1, 1, 2, 2], 15)
    shutil.rmtree(tmp_path / "f" / "val")  # a holdout needs none
    assert open_source(spec, options_for("imagefolder", holdout=4)).test_size == 4


# The user's own


def test_the_users_function_makes_the_loaders(tmp_path: Path) -> None:
    spec = make_python(tmp_path)
    opened = open_source(spec)
    assert isinstance(opened.train, TensorLoader)
    assert isinstance(opened.test, Repeated)
    assert (opened.classes, opened.image_shape, len(opened.train), len(opened.test)) == (None, None, 3, 4)
    given = open_source(make_python(tmp_path, "with_options"), DataOptions(batch_size=7, rank=1, world=2))
    assert list(given.train) == [(7, 1)]
    parts = [open_source(make_python(tmp_path, "plain"), DataOptions(rank=r, world=3)) for r in range(3)]
    assert [len(part.train) for part in parts] == [1, 1, 1]
    assert isinstance(open_source(make_python(tmp_path, "counting")).train, Repeated)
    assert sorted(t for part in parts for t in targets_of(part.test)) == list(range(12))


def test_tensors_of_the_users_function_are_cut_into_batches(tmp_path: Path) -> None:
    text = "import torch\ndef pair():\n    return torch.arange(70.0).view(70, 1), torch.ones(3, 1)\n"
    text += "def labelled():\n    return [(torch.ones(n, 2).numpy(), torch.arange(n)) for n in (70, 3)]\n"
    (tmp_path / "mine.py").write_text(text)
    labelled = open_source(f"python:{tmp_path / 'mine.py'}:labelled")
    assert [(len(x), len(y)) for x, y in labelled.train] == [(64, 64), (6, 6)]
    opened = open_source(f"python:{tmp_path / 'mine.py'}:pair")
    assert [tuple(batch.shape) for batch in opened.train] == [(64, 1), (6, 1)]
    assert torch.cat(list(opened.train)).flatten().tolist() == list(range(70))
    assert len(opened.test) == 1


@pytest.mark.parametrize(
    ("function", "words"),
    [
        ("loader", r"has no function 'loader': did you mean 'loaders'\?"),
        ("xyz", "has no function 'xyz'$"),
        ("value", "has no function 'value'"),
        ("one", r"one returned a list: .*\(train, test\)"),
        ("number", "number returned a int for a loader"),
        ("endless", "no length: give it __len__"),
        ("broken", "broken failed: ValueError: no data today$"),
    ],
)
def test_a_function_of_the_users_that_does_not_serve_is_named(
    function: str, words: str, tmp_path: Path
) -> None:
    with pytest.raises(DataError, match=f"mine.py: .*{words}"):
        open_source(make_python(tmp_path, function))


def test_a_file_of_the_users_that_does_not_serve_is_named(tmp_path: Path) -> None:
    (tmp_path / "bad.py").write_text("def f(:\n")
    with pytest.raises(DataError, match=r"bad.py: cannot be imported: SyntaxError"):
        open_source(f"python:{tmp_path / 'bad.py'}:f")
    with pytest.raises(DataError, match="4 and 4 batches for 5 processes"):
        open_source(make_python(tmp_path, "plain"), DataOptions(world=5))
