"""One run, or several side by side, as one self-contained HTML page.

write([Path("run")], Path("report.html"))
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from pwfn.errors import FileError
from pwfn.file.storage import replacing

__all__ = ["write"]


def write(
    folders: Sequence[Path], out: Path, *, model: str | None = None, input_shape: str | None = None
) -> str:
    """Read the runs, write the page, and say so in a sentence; for the options see :func:`page.page`."""
    # Deferred: importing this package imports neither torch's networks nor what draws.
    from pwfn.report.page import page
    from pwfn.report.reading import read_run

    if not folders:
        raise FileError("no run to report on: name the folder of one, as pwfn compress left it")
    text = page([read_run(folder) for folder in folders], model, input_shape).encode()
    with replacing(out) as temporary:
        temporary.write_bytes(text)
    runs = "1 run" if len(folders) == 1 else f"{len(folders)} runs"
    return f"{out}: {len(text):,} bytes, {runs}; open it in any browser"
