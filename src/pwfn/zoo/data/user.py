"""Loaders that a function of the user's makes: ``python:FILE:FUNCTION``."""

from __future__ import annotations

import difflib
import importlib.util
import inspect
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

from pwfn.errors import DataError, PwfnError, cause
from pwfn.zoo.data.described import Data, DataOptions, fingerprint
from pwfn.zoo.data.epochs import Epochs, Repeated, as_epochs


def open_python(name: str, place: str, options: DataOptions) -> Data:
    """Call the function and take its ``(train, test)`` loaders.

    A function with a parameter is given the :class:`DataOptions`, and divides its data over the
    processes itself; where it has none, each process takes its share of the batches. The
    fingerprint is that of the file and of the loaders' lengths.
    """
    file, colon, function_name = place.rpartition(":")
    if not colon or not file or not function_name:
        raise DataError(f"{name}: allowed is python:FILE:FUNCTION")
    path = Path(file).expanduser()
    function = _function(path, function_name)
    takes_options = _takes_an_argument(function)
    try:
        made = function(options) if takes_options else function()
    except PwfnError:
        raise
    except Exception as error:  # the user's code may raise anything
        raise DataError(f"{path}: {function_name} failed: {cause(error)}") from error
    if not isinstance(made, (tuple, list)) or len(made) != 2:
        raise DataError(
            f"{path}: {function_name} returned a {type(made).__name__}: allowed is a pair of loaders, "
            "(train, test)"
        )
    rank, world = (0, 1) if takes_options else (options.rank, options.world)
    try:
        train, test = (as_epochs(loader, rank, world, exact=n == 1) for n, loader in enumerate(made))
    except DataError as error:
        raise DataError(f"{path}: {function_name} returned other than two loaders: {error}") from error
    lengths = tuple(map(_length, made))
    if lengths[0] is None:
        raise DataError(f"{path}: the training loader has no length: give it __len__, its number of batches")
    if world > 1 and isinstance(test, Repeated) and any(n is not None and n < world for n in lengths):
        raise DataError(
            f"{path}: loaders of {lengths[0]} and {lengths[1]} batches do not go round {world} processes: "
            "make smaller batches"
        )
    print_of_file = fingerprint("python", (path.read_bytes(), function_name, lengths))
    return Data(name, train, test, classes=None, image_shape=None, fingerprint=print_of_file)


def _function(path: Path, name: str) -> Callable[..., Any]:
    if not path.is_file():
        raise DataError(f"{path}: there is no such file")
    module = _imported(path)
    function = getattr(module, name, None)
    if not callable(function):
        known = [key for key, value in vars(module).items() if inspect.isfunction(value)]
        near = difflib.get_close_matches(name, known, n=1)
        hint = f": did you mean {near[0]!r}?" if near else ""
        raise DataError(f"{path}: has no function {name!r}{hint}")
    found: Callable[..., Any] = function
    return found


def _imported(path: Path) -> ModuleType:
    # In sys.modules, so that worker processes can be sent the file's classes.
    module_name = f"pwfn_user_data_{path.stem}"
    spec = importlib.util.spec_from_file_location(module_name, path)
    if spec is None or spec.loader is None:
        raise DataError(f"{path}: is not a Python file: its name must end in .py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[module_name] = module
    try:
        spec.loader.exec_module(module)
    except Exception as error:  # the user's code may raise anything
        del sys.modules[module_name]
        raise DataError(f"{path}: cannot be imported: {cause(error)}") from error
    return module


def _takes_an_argument(function: Callable[..., Any]) -> bool:
    kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    try:
        return any(parameter.kind in kinds for parameter in inspect.signature(function).parameters.values())
    except (TypeError, ValueError):  # a callable without a signature
        return False


def _length(loader: Epochs | Any) -> int | None:
    try:
        return len(loader)
    except Exception:  # none, or a data set that cannot say
        return None
