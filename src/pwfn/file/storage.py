"""Files that are written completely or not at all."""

from __future__ import annotations

import os
import stat
import tempfile
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from safetensors import SafetensorError

from pwfn.errors import FileError


def make_folder(path: str | Path) -> None:
    """Make a folder and its parents where they do not exist."""
    try:
        Path(path).mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise FileError(f"{path}: cannot be made a folder: {error.strerror}") from error


@contextmanager
def replacing(path: str | Path) -> Iterator[Path]:
    """Yield a temporary path beside the target, and rename it to the target on success.

    The old file stays until the new one is complete and on disk. If the system fails (no space, no
    permission, no such folder) it stays for good, and the error says so. A target that is a link, or has
    a mode of its own, keeps it.

    >>> with tempfile.TemporaryDirectory() as folder:
    ...     with replacing(Path(folder) / "a.txt") as temporary:
    ...         _ = temporary.write_text("whole")
    ...     (Path(folder) / "a.txt").read_text()
    'whole'
    """
    path = Path(path)
    temporary: Path | None = None
    try:
        target = Path(os.path.realpath(path))
        mode = _mode_of(target, path)
        handle, name = tempfile.mkstemp(prefix=f".{path.name[:32]}.", suffix=".part", dir=target.parent)
        os.close(handle)
        temporary = Path(name)
        yield temporary
        with temporary.open("rb+") as file:
            os.fsync(file.fileno())
        temporary.chmod(mode)
        temporary.replace(target)
    except (OSError, SafetensorError) as error:  # safetensors has its own error for a full disk
        kept = "; the old file is unchanged" if os.path.lexists(path) else ""
        why = getattr(error, "strerror", None) or error
        raise FileError(f"{path}: cannot be written: {why}{kept}") from error
    finally:
        if temporary is not None:
            temporary.unlink(missing_ok=True)


class _EnoughError(Exception):
    """Ends the trial below without a file."""


def check_writable(path: str | Path) -> None:
    """Begin to write the file, and stop: what would fail after the work fails before it.

    >>> check_writable("/")
    Traceback (most recent call last):
    pwfn.errors.FileError: /: is a folder: name a file in it
    """
    with suppress(_EnoughError), replacing(path):
        raise _EnoughError


def clear_leftovers(folder: str | Path, names: Iterable[str]) -> None:
    """Remove what :func:`replacing` left for these names when its process was killed, and nothing else.

    A name is relative to the folder; its last part may be a pattern.

    >>> with tempfile.TemporaryDirectory() as folder:
    ...     for name in (".a.txt.x1y2z3_4.part", ".b.txt.x1y2z3_4.part", ".a.txt.part"):
    ...         _ = (Path(folder) / name).write_text("ha")
    ...     clear_leftovers(folder, ["a.txt"])
    ...     sorted(os.listdir(folder))
    ['.a.txt.part', '.b.txt.x1y2z3_4.part']
    """
    for name in names:
        path = Path(folder) / name
        for leftover in path.parent.glob(f".{path.name}.{'[a-z0-9_]' * 8}.part"):  # as mkstemp names them
            leftover.unlink(missing_ok=True)


def _mode_of(target: Path, path: Path) -> int:
    """The mode of the new file: that of the old one, or the default."""
    try:
        mode = target.stat().st_mode
    except FileNotFoundError:
        # The mask of the process can be read only by setting it.
        mask = os.umask(0o077)
        os.umask(mask)
        return 0o666 & ~mask
    if stat.S_ISDIR(mode):
        raise FileError(f"{path}: is a folder: name a file in it")
    if not stat.S_ISREG(mode):
        raise FileError(f"{path}: is not a regular file and would be replaced by one: name another")
    # A rename does not need the permission to write the old file, so check it; root has every permission.
    if not mode & 0o222 or not os.access(target, os.W_OK):
        raise FileError(f"{path}: is read-only: make it writable, or name another file")
    return stat.S_IMODE(mode)
