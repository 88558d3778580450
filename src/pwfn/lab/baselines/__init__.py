"""The systems PWFN is compared with, one file each. Importing this package registers them by name.

A method of your own works by name too: ``python:FILE:CLASS``, see :func:`find`.
"""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

from pwfn.bayes.method import METHODS, Method, register
from pwfn.errors import ConfigError, cause
from pwfn.lab.baselines.apot import Apot
from pwfn.lab.baselines.baseline import Baseline
from pwfn.lab.baselines.kmeans import KMeans
from pwfn.lab.baselines.lsq import Lsq
from pwfn.lab.baselines.lsqplus import LsqPlus
from pwfn.lab.baselines.qvit import QVit
from pwfn.lab.baselines.wfn import Wfn

__all__ = ["Apot", "Baseline", "KMeans", "Lsq", "LsqPlus", "QVit", "Wfn", "find"]


def find(name: str) -> str:
    """Make the method of this name known, and return the name.

    ``python:FILE:CLASS`` loads a subclass of :class:`pwfn.bayes.method.Method` from a file.

    >>> find("lsq+")
    'lsq+'
    """
    if name.startswith("python:") and name not in METHODS:
        file, _, class_name = name.removeprefix("python:").rpartition(":")
        found = getattr(_imported(Path(file).expanduser()), class_name, None)
        if not (isinstance(found, type) and issubclass(found, Method)):
            raise ConfigError(
                f"{name}: {file} has no class {class_name} that is a subclass of pwfn.bayes.method.Method"
            )
        register(name)(found)
    return name


def _imported(path: Path) -> object:
    spec = importlib.util.spec_from_file_location(f"pwfn_method_{path.stem}", path)
    if not path.is_file() or spec is None or spec.loader is None:
        raise ConfigError(f"{path}: there is no such Python file: allowed is python:FILE:CLASS")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # where dataclasses look for what annotations name
    try:
        spec.loader.exec_module(module)
    except Exception as error:  # the user's code may raise anything
        del sys.modules[spec.name]
        raise ConfigError(f"{path}: cannot be imported: {cause(error)}") from error
    return module
