"""The errors of pwfn: one base class, and subclasses for cases that a caller may want to tell apart.

Every message is one sentence that says what is wrong, where, why, and what to do.
"""

from __future__ import annotations

from typing import Any


class PwfnError(Exception):
    """Base class of every error that pwfn raises on purpose.

    >>> issubclass(ConfigError, PwfnError)
    True
    """

    exit_status = 2
    """The exit status of the command."""

    progress: Any = None
    """Where a run was when the error was raised: a :class:`pwfn.progress.Progress`."""


class ConfigError(PwfnError):
    """A setting is unknown, of the wrong type or out of range."""


class LayoutError(PwfnError):
    """The model's parameters cannot be arranged as one vector."""


class DataError(PwfnError):
    """A loader is empty, failed, or gave a batch that the model or the loss cannot process."""


class TooLargeError(DataError):
    """A batch does not fit in memory."""


class PeerError(PwfnError):
    """Another process of the run has ended, cannot be reached, or has different weights."""


class WeightError(PwfnError):
    """A weight, sigma or mask is not valid for the operation (NaN, wrong length, not fixed yet)."""


class DivergedError(PwfnError):
    """The loss or a gradient is no longer finite."""


class FileError(PwfnError):
    """A file cannot be read or written, or is not a valid .pwfn file."""


def cause(error: Exception) -> str:
    """Class and first line of an error, to quote it in another message.

    >>> cause(ValueError("no such thing"))
    'ValueError: no such thing'
    """
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__
