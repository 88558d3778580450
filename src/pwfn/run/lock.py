"""One run per folder: a lock that the system releases when its process ends, however it ends."""

from __future__ import annotations

import os
import platform
from contextlib import suppress
from pathlib import Path
from typing import Self

from pwfn.errors import FileError
from pwfn.evaluate.verdict import LOGGER
from pwfn.file.storage import make_folder

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None  # type: ignore[assignment]

_HELD: set[int] = set()


def _forget() -> None:
    """A child has copies of the handles: it must not keep a lock that its parent was killed with."""
    for handle in _HELD:
        os.close(handle)
    _HELD.clear()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget)


class Lock:
    """The lock of a run's folder, held from :meth:`take` until the ``with`` block ends.

    It is ``flock`` on a file, which the system undoes when the process ends: a killed run blocks nobody.
    Where the system or the file system has no such locks, a warning is logged and nothing is locked.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder, Lock(Path(folder)) as lock:
    ...     lock.take()
    """

    def __init__(self, folder: Path) -> None:
        self._folder, self._path = folder, folder / "checkpoints" / "lock"
        self._handle: int | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self._handle is not None:
            self._path.unlink(missing_ok=True)
            _HELD.discard(self._handle)
            os.close(self._handle)
            self._handle = None

    def take(self) -> None:
        """Lock the folder; an error if another process has it."""
        make_folder(self._path.parent)
        while self._handle is None:
            try:
                handle = os.open(self._path, os.O_RDWR | os.O_CREAT, 0o666)
            except OSError as error:
                raise FileError(f"{self._path}: cannot be written: {error.strerror or error}") from error
            try:
                self._lock(handle)
                # The holder removes the file before it lets go: this may be the file that it removed.
                with suppress(FileNotFoundError):
                    if os.path.samestat(os.fstat(handle), os.stat(self._path)):
                        self._handle = handle
                        _HELD.add(handle)
            finally:
                if self._handle is None:
                    os.close(handle)
        os.ftruncate(self._handle, 0)
        os.write(self._handle, f"process {os.getpid()} on {platform.node()}".encode())

    def _lock(self, handle: int) -> None:
        try:
            if fcntl is None:
                raise OSError("the system has no flock")
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            holder = os.read(handle, 200).decode(errors="replace") or "another process"
            raise FileError(
                f"{self._folder}: a run is at work in it ({holder}): wait for its end, stop it, or use "
                "another folder"
            ) from None
        except OSError as error:
            reason = error.strerror or error
            LOGGER.warning(f"{self._folder}: cannot be locked ({reason}): start no second run in it")
