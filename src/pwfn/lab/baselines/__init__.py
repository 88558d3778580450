"""The systems PWFN is compared with, one file each. Importing this package registers them by name.

A method of your own works by name too: ``python:FILE:CLASS``, see :func:`find`.
"""

from __future__ import annotations

from pwfn.bayes.method import METHODS, Method, register
from pwfn.errors import ConfigError
from pwfn.lab.baselines.apot import Apot
from pwfn.lab.baselines.baseline import Baseline
from pwfn.lab.baselines.kmeans import KMeans
from pwfn.lab.baselines.lsq import Lsq
from pwfn.lab.baselines.lsqplus import LsqPlus
from pwfn.lab.baselines.qvit import QVit
from pwfn.lab.baselines.wfn import Wfn
from pwfn.zoo.function import user_function

__all__ = ["Apot", "Baseline", "KMeans", "Lsq", "LsqPlus", "QVit", "Wfn", "find"]


def find(name: str) -> str:
    """Make the method of this name known, and return the name.

    ``python:FILE:CLASS`` loads a subclass of :class:`pwfn.bayes.method.Method` from a file.

    >>> find("lsq+")
    'lsq+'
    """
    if name.startswith("python:") and name not in METHODS:
        _, found = user_function(name, ConfigError, "class")
        if not (isinstance(found, type) and issubclass(found, Method)):
            raise ConfigError(f"{name} is no subclass of pwfn.bayes.method.Method")
        register(name)(found)
    return name
