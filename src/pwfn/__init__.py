"""Neural networks whose millions of weights take only a handful of values.

pwfn implements Probabilistic Weight Fixing: a pre-trained network's weights become Gaussians, are trained,
and are fixed round by round onto one codebook of sums of powers of two for the whole network.
"""

from pwfn.bayes.gaussian import GaussianNetwork
from pwfn.bayes.optimizer import FlatSGD
from pwfn.bayes.predictive import fit_posterior
from pwfn.bayes.sigma import initial_sigma
from pwfn.compress import compress
from pwfn.config import PAPER_FRACTIONS, Config
from pwfn.errors import (
    ConfigError,
    DataError,
    DivergedError,
    FileError,
    LayoutError,
    PeerError,
    PwfnError,
    TooLargeError,
    WeightError,
)
from pwfn.evaluate.ensemble import ensemble
from pwfn.evaluate.score import evaluate
from pwfn.file.compressed import Compressed
from pwfn.file.format import load, loads
from pwfn.fixing.candidates import candidates
from pwfn.fixing.fix_round import fix_round
from pwfn.layout import Layout
from pwfn.result import Result
from pwfn.version import __version__

__all__ = [
    "PAPER_FRACTIONS",
    "Compressed",
    "Config",
    "ConfigError",
    "DataError",
    "DivergedError",
    "FileError",
    "FlatSGD",
    "GaussianNetwork",
    "Layout",
    "LayoutError",
    "PeerError",
    "PwfnError",
    "Result",
    "TooLargeError",
    "WeightError",
    "__version__",
    "candidates",
    "compress",
    "ensemble",
    "evaluate",
    "fit_posterior",
    "fix_round",
    "initial_sigma",
    "load",
    "loads",
]
