"""Which view suits."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from typing import TextIO

from pwfn.run.console.lines import Lines
from pwfn.run.console.live import Live
from pwfn.run.console.view import Silent, View


def view_for(
    *, as_json: bool = False, say: Callable[[str], None] = print, stream: TextIO | None = None
) -> View:
    """The view that suits where output goes: live on a terminal, lines in a pipe or log, none for JSON.

    >>> type(view_for(as_json=True)).__name__
    'Silent'
    """
    if as_json:
        return Silent()
    stream = sys.stdout if stream is None else stream
    if not stream.isatty() or os.environ.get("TERM") == "dumb":
        return Lines(say)
    try:
        from rich.console import Console
    except ImportError:  # typer can be installed without it
        return Lines(say)
    return Live(Console(file=stream))
