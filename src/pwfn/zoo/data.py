"""Data sets by name: ``npz:PATH``, ``imagefolder:DIR``, ``images:DIR``, ``digits`` and others."""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Callable, Iterable, Sized
from pathlib import Path
from typing import Any, NamedTuple

from pwfn.errors import DataError, PwfnError, cause
from pwfn.zoo.arrays import TensorLoader as TensorLoader
from pwfn.zoo.arrays import digits as digits
from pwfn.zoo.arrays import read_digits, read_npz
from pwfn.zoo.cifar import CIFAR10, CIFAR100, read_cifar
from pwfn.zoo.dataset import Data as Data
from pwfn.zoo.dataset import DataOptions as DataOptions
from pwfn.zoo.dataset import fingerprint as fingerprint
from pwfn.zoo.epochs import Epochs as Epochs
from pwfn.zoo.epochs import Repeated as Repeated
from pwfn.zoo.epochs import batched
from pwfn.zoo.folder import open_folder, open_images
from pwfn.zoo.function import user_function


class Source(NamedTuple):
    """A kind of data source: how its name is written, and the function that opens it."""

    usage: str
    open: Callable[[str, str, DataOptions], Data]  # the whole name, what follows its colon, options


def open_source(spec: str, options: DataOptions | None = None) -> Data:
    """Open a data set by name; a mistake raises :class:`~pwfn.DataError`.

    >>> data = open_source("digits", DataOptions(batch_size=64))
    >>> data.classes, data.image_shape, len(data.train)
    (10, (1, 8, 8), 22)
    >>> images, targets = next(data.train.epoch(3, start=20))  # batch 20 of epoch 3
    """
    kind, colon, rest = spec.partition(":")
    if kind not in SOURCES:
        raise DataError(_unknown(spec, kind))
    source = SOURCES[kind]
    if (source.usage == kind) != (not colon) or (colon and not rest):
        raise DataError(f"data source {spec!r}: allowed is {source.usage}")
    try:
        return source.open(spec, rest, options or DataOptions())
    except OSError as error:  # even a check whether a file exists may be forbidden
        raise DataError(f"data source {spec!r} cannot be read: {error.strerror or error}") from error


def _unknown(spec: str, kind: str) -> str:
    if Path(spec).suffix == ".npz" and kind == spec:
        hint = f"did you mean {'npz:' + spec!r}?"
    elif Path(spec).expanduser().is_dir():
        hint = f"did you mean {'imagefolder:' + spec!r}, or {'images:' + spec!r} without labels?"
    elif near := difflib.get_close_matches(kind.lower(), SOURCES, n=1):
        hint = f"did you mean {SOURCES[near[0]].usage}?"
    else:
        hint = f"allowed are {', '.join(source.usage for source in SOURCES.values())}"
    return f"data source {spec!r} is of no known kind: {hint}"


def open_python(spec: str, _: str, options: DataOptions) -> Data:
    """The ``(train, test)`` loaders that a user's function returns.

    A function with a parameter receives the :class:`DataOptions` and divides its data among the processes
    itself; otherwise each process takes its share of the batches. The fingerprint is that of the file and
    of the loaders' lengths.
    """
    path, function = user_function(spec, DataError)
    name = spec.rpartition(":")[2]
    takes_options = _takes_an_argument(function)
    if options.holdout and not takes_options:
        raise DataError(
            f"{path}: {name} takes no argument, and so cannot hold out {options.holdout:,} training images: "
            "give it one for the options, or leave --holdout out"
        )
    try:
        made = function(options) if takes_options else function()
    except PwfnError:
        raise
    except Exception as error:  # the user's code may raise anything
        raise DataError(f"{path}: {name} failed: {cause(error)}") from error
    if not isinstance(made, (tuple, list)) or len(made) != 2:
        raise DataError(
            f"{path}: {name} returned a {type(made).__name__}: allowed is a pair of loaders, (train, test)"
        )
    made = [batched(each) for each in made]
    rank, world = (0, 1) if takes_options else (options.rank, options.world)
    loaders: list[Any] = []
    for loader in made:
        if not isinstance(loader, Iterable):
            what = type(loader).__name__
            raise DataError(
                f"{path}: {name} returned a {what} for a loader: allowed is an iterable of batches, such as "
                "a torch.utils.data.DataLoader"
            )
        numbered = isinstance(loader, Sized) and callable(getattr(loader, "epoch", None))
        loaders.append(loader if numbered else Repeated(loader, rank, world, exact=bool(loaders)))
    lengths = tuple(map(_length, made))
    if lengths[0] is None:
        raise DataError(f"{path}: the training loader has no length: give it __len__, its number of batches")
    divided = [n for n, loader in zip(lengths, loaders, strict=True) if isinstance(loader, Repeated)]
    if world > 1 and any(n is not None and n < world for n in divided):
        raise DataError(
            f"{path}: the loaders have {lengths[0]} and {lengths[1]} batches for {world} processes: use "
            "smaller batches or fewer processes"
        )
    content = fingerprint("python", (path.read_bytes(), name, lengths))
    train, test = loaders
    return Data(spec, train, test, classes=None, image_shape=None, fingerprint=content)


def _takes_an_argument(function: Callable[..., Any]) -> bool:
    try:
        inspect.signature(function).bind(None)
    except (TypeError, ValueError):  # no parameter, or a callable without a signature
        return False
    return True


def _length(loader: Any) -> int | None:
    try:
        return len(loader)
    except Exception:  # no __len__, or a data set that cannot tell
        return None


SOURCES: dict[str, Source] = {
    "npz": Source("npz:PATH", lambda spec, path, options: read_npz(path).opened(spec, options)),
    "imagefolder": Source("imagefolder:DIR", open_folder),
    "images": Source("images:DIR", open_images),
    "cifar10": Source("cifar10:DIR", lambda spec, path, o: read_cifar(path, CIFAR10).opened(spec, o, 10)),
    "cifar100": Source("cifar100:DIR", lambda spec, path, o: read_cifar(path, CIFAR100).opened(spec, o, 100)),
    "digits": Source("digits", lambda spec, _, options: read_digits().opened(spec, options)),
    "python": Source("python:FILE:FUNCTION", open_python),
}
