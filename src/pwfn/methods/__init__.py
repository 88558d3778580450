"""PWFN and the systems it is compared with, one file each, behind one protocol."""

from pwfn.config import Config
from pwfn.methods.protocol import Between, Method, Stretch
from pwfn.methods.pwfn import Pwfn
from pwfn.sections import MethodName

__all__ = ["Between", "Method", "Stretch", "of"]

_METHODS: dict[MethodName, type[Method]] = {
    MethodName.PWFN: Pwfn,
}


def of(config: Config) -> type[Method]:
    """The class of the method that the settings name.

    >>> of(Config()).__name__
    'Pwfn'
    """
    return _METHODS[config.method]
