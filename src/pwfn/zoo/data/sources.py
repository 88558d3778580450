"""Data by name: ``npz:PATH``, ``imagefolder:DIR``, ``cifar10:DIR``, ``digits`` and the like."""

from __future__ import annotations

import difflib
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

from pwfn.errors import DataError
from pwfn.zoo.data.arrays import read_digits, read_npz
from pwfn.zoo.data.cifar import CIFAR10, CIFAR100, read_cifar
from pwfn.zoo.data.described import Data, DataOptions
from pwfn.zoo.data.folder import open_folder
from pwfn.zoo.data.user import open_python


@dataclass(frozen=True)
class SourceKind:
    """A kind of source: how it is written, what it is, and what opens it."""

    usage: str
    summary: str
    open: Callable[[str, str, DataOptions], Data]  # the name as given, what follows its colon, options


def _npz(name: str, path: str, options: DataOptions) -> Data:
    return replace(read_npz(path).opened("npz", options), name=name)


def _cifar10(name: str, directory: str, options: DataOptions) -> Data:
    return replace(read_cifar(directory, CIFAR10).opened("cifar10", options, CIFAR10.classes), name=name)


def _cifar100(name: str, directory: str, options: DataOptions) -> Data:
    return replace(read_cifar(directory, CIFAR100).opened("cifar100", options, CIFAR100.classes), name=name)


def _digits(name: str, _: str, options: DataOptions) -> Data:
    return read_digits().opened(name, options)


SOURCES: dict[str, SourceKind] = {
    "npz": SourceKind("npz:PATH", "x_train, y_train, x_test, y_test, uint8 N×H×W×C", _npz),
    "imagefolder": SourceKind(
        "imagefolder:DIR", "train/<class>/*.JPEG and val/<class>/*.JPEG, as ImageNet", open_folder
    ),
    "cifar10": SourceKind("cifar10:DIR", "the official Python batches of CIFAR-10", _cifar10),
    "cifar100": SourceKind("cifar100:DIR", "the official Python batches of CIFAR-100", _cifar100),
    "digits": SourceKind("digits", "scikit-learn's bundled 8×8 digits", _digits),
    "python": SourceKind(
        "python:FILE:FUNCTION", "a function of yours that returns (train, test) loaders", open_python
    ),
}


def open_source(spec: str, options: DataOptions | None = None) -> Data:
    """Open data by name; every mistake in it is one sentence in a :class:`~pwfn.DataError`.

    >>> data = open_source("digits", DataOptions(batch_size=64))
    >>> data.classes, data.image_shape, len(data.train)
    (10, (1, 8, 8), 22)
    >>> images, targets = next(data.train.epoch(3, start=20))  # goes on at batch 20 of epoch 3
    """
    kind, colon, rest = spec.partition(":")
    if kind not in SOURCES:
        raise DataError(_unknown(spec, kind))
    source = SOURCES[kind]
    if (source.usage == kind) != (not colon) or (colon and not rest):
        raise DataError(f"data source {spec!r}: allowed is {source.usage}")
    try:
        return source.open(spec, rest, options or DataOptions())
    except OSError as error:  # even to ask whether a file is there may be forbidden
        raise DataError(f"data source {spec!r} cannot be read: {error.strerror or error}") from error


def _unknown(spec: str, kind: str) -> str:
    path = Path(spec).expanduser()
    if path.suffix == ".npz" and kind == spec:
        hint = f"did you mean {'npz:' + spec!r}?"
    elif path.is_dir():
        hint = f"did you mean {'imagefolder:' + spec!r}?"
    elif near := difflib.get_close_matches(kind.lower(), SOURCES, n=1):
        hint = f"did you mean {SOURCES[near[0]].usage}?"
    else:
        hint = f"allowed are {', '.join(source.usage for source in SOURCES.values())}"
    return f"data source {spec!r} is of no known kind: {hint}"
