"""PWFN and the systems it is compared with, one file each, behind one protocol."""

from pwfn.config import Config
from pwfn.methods.apot import Apot
from pwfn.methods.baseline import Baseline
from pwfn.methods.kmeans import KMeans
from pwfn.methods.lsq import Lsq
from pwfn.methods.lsqplus import LsqPlus
from pwfn.methods.protocol import Between, Look, Method, Stretch
from pwfn.methods.pwfn import Pwfn
from pwfn.methods.qvit import QVit
from pwfn.methods.wfn import Wfn
from pwfn.sections import MethodName

__all__ = ["Between", "Look", "Method", "Stretch", "of"]

_METHODS: dict[MethodName, type[Method]] = {
    MethodName.PWFN: Pwfn,
    MethodName.WFN: Wfn,
    MethodName.LSQ: Lsq,
    MethodName.LSQ_PLUS: LsqPlus,
    MethodName.APOT: Apot,
    MethodName.QVIT: QVit,
    MethodName.KMEANS: KMeans,
    MethodName.BASELINE: Baseline,
}


def of(config: Config) -> type[Method]:
    """The class of the method that the settings name.

    >>> of(Config()).__name__
    'Pwfn'
    """
    return _METHODS[config.method]
