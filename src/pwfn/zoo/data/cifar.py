"""CIFAR-10 and CIFAR-100 as their authors give them: pickled batches, read without running code.

A pickle may name any function and have it called. The reader here knows the three names that an
array needs, answers to them with functions of its own choice, and refuses every other name; plain
dictionaries, lists, numbers and strings need none.
"""

from __future__ import annotations

import pickle
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from pwfn.errors import DataError, cause
from pwfn.zoo.data.arrays import Arrays


@dataclass(frozen=True)
class Layout:
    """Where a version of CIFAR keeps what."""

    folder: str  # within the archive
    train: tuple[str, ...]
    test: str
    labels: str
    classes: int


CIFAR10 = Layout(
    "cifar-10-batches-py", tuple(f"data_batch_{n}" for n in range(1, 6)), "test_batch", "labels", 10
)
CIFAR100 = Layout("cifar-100-python", ("train",), "test", "fine_labels", 100)


def read_cifar(directory: str | Path, layout: Layout) -> Arrays:
    """The official Python batches in a folder, or in the archive's own folder within it."""
    root = Path(directory).expanduser()
    if not root.is_dir():
        raise DataError(f"{root}: there is no such folder")
    if (root / layout.folder).is_dir():
        root = root / layout.folder
    parts = [_read_batch(root / name, layout) for name in layout.train]
    x_test, y_test = _read_batch(root / layout.test, layout)
    x_train = np.concatenate([images for images, _ in parts])
    y_train = np.concatenate([labels for _, labels in parts])
    names = ("training images", "training labels", "test images", "test labels")
    return Arrays(str(root), x_train, y_train, x_test, y_test, names)


def _read_batch(path: Path, layout: Layout) -> tuple[np.ndarray, np.ndarray]:
    if not path.is_file():
        raise DataError(f"{path}: there is no such file: the official Python version has one")
    try:
        with path.open("rb") as file:
            content = _ArrayUnpickler(file).load()
        content = {key.decode() if isinstance(key, bytes) else key: value for key, value in content.items()}
        images, labels = np.asarray(content["data"]), np.asarray(content[layout.labels])
    except DataError as error:
        raise DataError(f"{path}: {error}") from error
    except Exception as error:  # a damaged pickle can raise anything
        raise DataError(f"{path}: cannot be read as a CIFAR batch: {cause(error)}") from error
    if images.dtype != np.uint8 or images.ndim != 2 or images.shape[1] != 3072:
        raise DataError(f"{path}: data is {images.shape} {images.dtype}: allowed is N×3072 uint8")
    if labels.ndim != 1 or labels.dtype.kind not in "iu" or len(labels) != len(images):
        raise DataError(
            f"{path}: {layout.labels} is {labels.shape} {labels.dtype}: allowed is a whole number for each "
            f"of {len(images):,} images"
        )
    outside = np.flatnonzero((labels < 0) | (labels >= layout.classes))
    if len(outside):
        raise DataError(
            f"{path}: {layout.labels}[{outside[0]}] is {labels[outside[0]]}: allowed is 0 to "
            f"{layout.classes - 1}"
        )
    return images.reshape(-1, 3, 32, 32), labels.astype(np.int64)


def _dtype(code: Any, align: Any = False, copy: Any = False) -> np.dtype[Any]:
    """Old pickles give 0 and 1 for the flags, of which NumPy warns."""
    return np.dtype(code, bool(align), bool(copy))


def _latin1(text: str, encoding: str) -> bytes:
    """How Python 3 writes bytes in the old protocols."""
    if encoding != "latin1":
        raise DataError(f"encodes text as {encoding!r}, which no CIFAR batch does")
    return text.encode("latin1")


_ALLOWED: dict[tuple[str, str], Any] = {
    ("numpy", "ndarray"): np.ndarray,
    ("numpy", "dtype"): _dtype,
    ("_codecs", "encode"): _latin1,
}
for _core in ("numpy.core", "numpy._core"):
    _ALLOWED[f"{_core}.multiarray", "_reconstruct"] = np.empty(0).__reduce__()[0]
    _ALLOWED[f"{_core}.numeric", "_frombuffer"] = np.empty(1).__reduce_ex__(5)[0]


class _ArrayUnpickler(pickle.Unpickler):
    """Arrays and plain values only: any other name in the pickle is refused before it is looked up."""

    def __init__(self, file: BinaryIO) -> None:
        super().__init__(file, encoding="bytes")

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) not in _ALLOWED:
            raise DataError(f"asks to run {module}.{name}, which no CIFAR batch needs: the file is not safe")
        return _ALLOWED[module, name]
