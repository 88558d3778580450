"""CIFAR-10 and CIFAR-100 as their authors distribute them: pickled batches, read without running code.

A pickle can call any function that it names. The unpickler here knows the few names that an array needs,
maps them to functions chosen here, and refuses every other name.
"""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from pwfn.errors import DataError, cause
from pwfn.zoo.arrays import Arrays


class Version(NamedTuple):
    """The files of CIFAR-10 or CIFAR-100."""

    folder: str  # in the archive
    train: tuple[str, ...]
    test: str
    labels: str
    classes: int


CIFAR10 = Version(
    "cifar-10-batches-py", tuple(f"data_batch_{n}" for n in range(1, 6)), "test_batch", "labels", 10
)
CIFAR100 = Version("cifar-100-python", ("train",), "test", "fine_labels", 100)


def read_cifar(directory: str | Path, version: Version) -> Arrays:
    """The official Python batches in a folder, or in the archive's folder inside it."""
    root = Path(directory).expanduser()
    if not root.is_dir():
        raise DataError(f"{root}: there is no such folder")
    if (root / version.folder).is_dir():
        root = root / version.folder
    parts = [_read_batch(root / name, version) for name in version.train]
    x_train, y_train = (np.concatenate(arrays) for arrays in zip(*parts, strict=True))
    return Arrays(str(root), x_train, y_train, *_read_batch(root / version.test, version))


def _read_batch(path: Path, version: Version) -> tuple[np.ndarray, np.ndarray]:
    if not path.is_file():
        raise DataError(f"{path}: there is no such file: the official Python version has one")
    try:
        with path.open("rb") as file:
            content = _ArrayUnpickler(file, encoding="bytes").load()
        content = {key.decode() if isinstance(key, bytes) else key: value for key, value in content.items()}
        images, labels = np.asarray(content["data"]), np.asarray(content[version.labels])
    except DataError as error:
        raise DataError(f"{path}: {error}") from error
    except Exception as error:  # a damaged pickle can raise anything
        raise DataError(f"{path}: cannot be read as a CIFAR batch: {cause(error)}") from error
    if images.dtype != np.uint8 or images.ndim != 2 or images.shape[1] != 3072:
        raise DataError(f"{path}: data is {images.shape} {images.dtype}: allowed is N×3072 uint8")
    if labels.ndim != 1 or labels.dtype.kind not in "iu" or len(labels) != len(images):
        raise DataError(
            f"{path}: {version.labels} is {labels.shape} {labels.dtype}: allowed is one whole number for "
            f"each of {len(images):,} images"
        )
    outside = np.flatnonzero((labels < 0) | (labels >= version.classes))
    if len(outside):
        raise DataError(
            f"{path}: {version.labels}[{outside[0]}] is {labels[outside[0]]}: allowed is 0 to "
            f"{version.classes - 1}"
        )
    return images.reshape(-1, 3, 32, 32), labels.astype(np.int64)


def _dtype(code: Any, align: Any = False, copy: Any = False) -> np.dtype[Any]:
    """Old pickles have 0 and 1 for the flags; NumPy warns about numbers."""
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
    """Reads arrays and plain values; refuses any other name before looking it up."""

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) not in _ALLOWED:
            raise DataError(f"asks to run {module}.{name}, which no CIFAR batch needs: the file is not safe")
        return _ALLOWED[module, name]
