"""Neural networks whose millions of weights take only a handful of values.

pwfn implements Probabilistic Weight Fixing: a pre-trained network's weights become Gaussians,
are trained, and are fixed round by round onto one whole-network codebook of sums of powers of two.
"""

from pwfn.bayes.distributed import Distributed
from pwfn.bayes.gaussian import GaussianNetwork, initial_sigma
from pwfn.bayes.optimizer import FlatAdamW, FlatSGD
from pwfn.compress import Result, compress
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
from pwfn.evaluate.targets import Choice, State
from pwfn.file.compressed import Compressed
from pwfn.file.format import load, loads
from pwfn.fixing.candidates import candidates
from pwfn.fixing.fix_round import FixRecord, FixResult, FixStep, Move, fix_round
from pwfn.layout import Layout
from pwfn.progress import Progress, Round, StepEvent
from pwfn.version import __version__

__all__ = [
    "PAPER_FRACTIONS",
    "Choice",
    "Compressed",
    "Config",
    "ConfigError",
    "DataError",
    "Distributed",
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
    "PwfnError",
    "Result",
    "Round",
    "State",
    "StepEvent",
    "TooLargeError",
    "WeightError",
    "__version__",
    "candidates",
    "compress",
    "fix_round",
    "initial_sigma",
    "load",
    "loads",
]
