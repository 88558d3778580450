"""Files written whole or not at all."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from pwfn.errors import FileError


@contextmanager
def replacing(path: str | Path) -> Iterator[Path]:
    """Gives a temporary path beside the target, and renames it to the target if all went well.

    What was at the target stays until the new file is complete and on disk; on an error of the
    system (no space, no permission, no such folder) it stays for good, and the error says so.

    >>> with tempfile.TemporaryDirectory() as folder:
    ...     with replacing(Path(folder) / "a.txt") as temporary:
    ...         _ = temporary.write_text("whole")
    ...     (Path(folder) / "a.txt").read_text()
    'whole'
    """
    path = Path(path)
    if path.is_dir():
        raise FileError(f"{path}: is a folder: name a file in it")
    temporary: Path | None = None
    try:
        handle, name = tempfile.mkstemp(prefix=f".{path.name}.", suffix=".part", dir=path.parent)
        os.close(handle)
        temporary = Path(name)
        yield temporary
        with temporary.open("rb+") as file:
            os.fsync(file.fileno())
        temporary.chmod(_usual_mode())
        temporary.replace(path)
    except OSError as error:
        kept = "; what was there before is as it was" if path.exists() else ""
        raise FileError(f"{path}: cannot be written: {error.strerror or error}{kept}") from error
    finally:
        if temporary is not None:
            temporary.unlink(missing_ok=True)


def _usual_mode() -> int:
    """The mode a new file would have; the process's mask can only be read by setting it."""
    mask = os.umask(0)
    os.umask(mask)
    return 0o666 & ~mask
