"""Functions in a user's Python file: ``python:FILE:FUNCTION``."""

from __future__ import annotations

import difflib
import inspect
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

from pwfn.errors import PwfnError, cause


def user_function(
    spec: str, error: type[PwfnError], kind: str = "function"
) -> tuple[Path, Callable[..., Any]]:
    """Run the file that ``python:FILE:FUNCTION`` names, and return its path and the function.

    The last colon separates the two. A mistake raises ``error``. ``kind`` may be "class" instead.

    >>> user_function("python:nowhere.py:make", PwfnError)
    Traceback (most recent call last):
    pwfn.errors.PwfnError: nowhere.py: cannot be read: No such file or directory
    """
    file, _, name = spec.removeprefix("python:").rpartition(":")
    if not file or not name:
        raise error(f"{spec}: allowed is python:FILE:{kind.upper()}")
    path = Path(file).expanduser()
    try:
        source = path.read_bytes()
    except OSError as problem:
        raise error(f"{path}: cannot be read: {problem.strerror or problem}") from problem
    module = ModuleType(f"pwfn_user_{path.stem}_{name}")
    module.__file__ = str(path)
    sys.modules[module.__name__] = module  # where pickle looks for the classes of what a worker process sends
    try:
        exec(compile(source, path, "exec", dont_inherit=True), vars(module))
    except Exception as problem:  # the user's code may raise anything
        del sys.modules[module.__name__]
        raise error(f"{path}: cannot be imported: {cause(problem)}") from problem
    function = getattr(module, name, None)
    if callable(function):
        return path, function
    is_kind = inspect.isclass if kind == "class" else inspect.isfunction
    known = [key for key, value in vars(module).items() if is_kind(value)]
    near = difflib.get_close_matches(name, known, n=1)
    raise error(f"{path}: has no {kind} {name!r}" + (f": did you mean {near[0]!r}?" if near else ""))
