"""Neural networks whose millions of weights take only a handful of values.

pwfn implements Probabilistic Weight Fixing: a pre-trained network's weights become Gaussians,
are trained, and are fixed round by round onto one whole-network codebook of sums of powers of two.
"""

from pwfn.clustering import FixRecord, FixResult, FixStep, Move, fix_round
from pwfn.compressed import Compressed
from pwfn.config import Config
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
from pwfn.fileformat import load
from pwfn.flat import FlatAdamW, FlatSGD
from pwfn.layout import Layout
from pwfn.pipeline import Result, compress
from pwfn.posterior import GaussianNetwork, initial_sigma
from pwfn.pow2 import candidates
from pwfn.progress import Progress, Pulse, Round
from pwfn.sections import PAPER_FRACTIONS
from pwfn.targets import Choice, State
from pwfn.team import Team
from pwfn.version import __version__

__all__ = [
    "PAPER_FRACTIONS",
    "Choice",
    "Compressed",
    "Config",
    "ConfigError",
    "DataError",
    "DivergedError",
    "FileError",
    "FixRecord",
    "FixResult",
    "FixStep",
    "FlatAdamW",
    "FlatSGD",
    "GaussianNetwork",
    "Layout",
    "LayoutError",
    "Move",
    "PeerError",
    "Progress",
    "Pulse",
    "PwfnError",
    "Result",
    "Round",
    "State",
    "Team",
    "TooLargeError",
    "WeightError",
    "__version__",
    "candidates",
    "compress",
    "fix_round",
    "initial_sigma",
    "load",
]
