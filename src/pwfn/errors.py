"""What pwfn raises: one base class, and a few named cases a caller may want to tell apart.

Every message is one sentence that names the thing, the cause and the way out.
"""

from __future__ import annotations

from typing import Any


class PwfnError(Exception):
    """Base class of every error that pwfn raises on purpose.

    >>> issubclass(ConfigError, PwfnError)
    True
    """

    exit_status = 2
    """What the command ends with."""

    progress: Any = None
    """What a run had reached when this was raised in its midst: a :class:`pwfn.Progress`."""


class ConfigError(PwfnError):
    """A setting is unknown, of the wrong type or out of range."""


class LayoutError(PwfnError):
    """The model's parameters cannot be laid out as one vector."""


class DataError(PwfnError):
    """A loader is empty, ran out, or gave a batch that the model or the loss cannot take."""


class TooLargeError(DataError):
    """A batch does not fit in memory."""


class PeerError(PwfnError):
    """Another process of the run has ended, cannot be reached, or has come to other clusters."""


class WeightError(PwfnError):
    """A weight, sigma or mask is not what the operation needs (NaN, wrong length, still free)."""


class DivergedError(PwfnError):
    """The loss or a gradient is no longer a finite number."""


class FileError(PwfnError):
    """A file cannot be written, or is not a sound .pwfn file."""


def cause(error: Exception) -> str:
    """Class and first line of another's error, for a message of ours that speaks of it.

    >>> cause(ValueError("no such thing"))
    'ValueError: no such thing'
    """
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__
