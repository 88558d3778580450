"""PWFN and the systems it is compared with, one file each, behind one protocol."""

from pwfn.bayes.method import Between, Look, Method, Stretch
from pwfn.bayes.pwfn import Pwfn
from pwfn.config import Config, MethodName
from pwfn.lab.baselines.apot import Apot
from pwfn.lab.baselines.baseline import Baseline
from pwfn.lab.baselines.kmeans import KMeans
from pwfn.lab.baselines.lsq import Lsq
from pwfn.lab.baselines.lsqplus import LsqPlus
from pwfn.lab.baselines.qvit import QVit
from pwfn.lab.baselines.wfn import Wfn

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
