"""Checkpoints: a run's progress on disk, when it is written, and how a signal ends the run.

A checkpoint file is ``PWFNCKP7``, the SHA-256 of what follows, and a torch archive of plain values and
tensors. It is read with ``weights_only``, so that nothing in it is ever executed.
"""

from __future__ import annotations

import hashlib
import io
import signal
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, fields, is_dataclass
from enum import Enum
from pathlib import Path
from types import FrameType, UnionType
from typing import Any, Self, get_args, get_origin, get_type_hints

import torch

from pwfn.bayes.distributed import Distributed
from pwfn.config import Config
from pwfn.errors import FileError, PwfnError
from pwfn.file.storage import make_folder, replacing
from pwfn.progress import Progress

_NAME, _VERSION = b"PWFNCKP", b"7"
_MAGIC = _NAME + _VERSION
_KEPT = 2


@dataclass(frozen=True)
class Store:
    """The checkpoints of one run: ``checkpoint-000001.pt`` and so on, in their own folder."""

    folder: Path
    identity: Mapping[str, Any]  # what a run must have in common with the one that it resumes

    def save(self, progress: Progress) -> Path:
        """Write the next checkpoint, and remove all but the newest two."""
        make_folder(self.folder)
        known = self.paths()
        number = int(known[-1].stem.rpartition("-")[2]) + 1 if known else 1
        path = self.folder / f"checkpoint-{number:06d}.pt"
        buffer = io.BytesIO()
        torch.save({"identity": dict(self.identity), "progress": to_plain(progress)}, buffer)
        content = buffer.getbuffer()  # not copied: it may be gigabytes
        with replacing(path) as temporary, temporary.open("wb") as file:
            file.writelines((_MAGIC, hashlib.sha256(content).digest(), content))
        for old in known[: 1 - _KEPT]:
            old.unlink(missing_ok=True)
        return path

    def newest(self) -> Progress | None:
        """The newest intact checkpoint, or None.

        A truncated or damaged file is skipped. A checkpoint of another run, or of another version of pwfn,
        is an error.
        """
        for path in reversed(self.paths()):
            found = _read(path)
            if found is None:
                continue
            usual = {"settings": Config().to_dict()}
            different = list(_differences(found["identity"], self.identity, usual))
            if different:
                raise FileError(
                    f"{path}: belongs to another run, whose {'; '.join(different[:5])}: use another folder, "
                    "or the settings of that run"
                )
            return from_plain(found["progress"])
        return None

    def paths(self) -> list[Path]:
        """The files, oldest first."""
        return sorted(self.folder.glob("checkpoint-[0-9]*.pt"))


def _read(path: Path) -> dict[str, Any] | None:
    try:
        raw = path.read_bytes()
    except OSError as error:
        raise FileError(f"{path}: cannot be read: {error.strerror}") from error
    head = len(_MAGIC) + hashlib.sha256().digest_size
    if raw.startswith(_NAME) and raw[len(_NAME) : len(_MAGIC)].isdigit() and not raw.startswith(_MAGIC):
        raise FileError(
            f"{path}: was written by another version of pwfn: finish the run with that version, or start "
            "again in another folder"
        )
    content = raw[head:]
    if not raw.startswith(_MAGIC) or hashlib.sha256(content).digest() != raw[len(_MAGIC) : head]:
        return None
    found: dict[str, Any] = torch.load(io.BytesIO(content), map_location="cpu", weights_only=True)
    return found


def _differences(theirs: Any, ours: Any, usual: Any, where: str = "") -> Iterator[str]:
    """What differs between two nested mappings, as text; what only ours has was as usual in theirs.

    A checkpoint of an earlier version does not name a setting that is new: the run had its default.
    """
    if isinstance(theirs, Mapping) and isinstance(ours, Mapping):
        for key in sorted(theirs.keys() | ours.keys()):
            default = usual.get(key) if isinstance(usual, Mapping) else None
            found = theirs.get(key, default), ours.get(key), default
            yield from _differences(*found, f"{where}.{key}" if where else str(key))
    elif theirs != ours:
        yield f"{where} is {theirs!r}, not {ours!r}"


def to_plain(value: Any) -> Any:
    """A dataclass as nested mappings and lists of plain values and tensors; mappings stay as they are.

    >>> to_plain(Progress(batches=3))["batches"]
    3
    """
    if is_dataclass(value):
        return {item.name: to_plain(getattr(value, item.name)) for item in fields(value)}
    if isinstance(value, tuple):  # named tuples too: a weights-only load does not know the class
        return [to_plain(item) for item in value]
    if isinstance(value, bytes):  # a weights-only load refuses bytes
        return torch.frombuffer(bytearray(value), dtype=torch.uint8)
    return value.value if isinstance(value, Enum) else value


def from_plain(plain: Any, kind: Any = Progress) -> Any:
    """The inverse of :func:`to_plain`: a value of this type.

    >>> from_plain(to_plain(Progress(batches=3))) == Progress(batches=3)
    True
    """
    if plain is None:
        return None
    if isinstance(kind, UnionType):  # X | None
        kind = next(option for option in get_args(kind) if option is not type(None))
    if get_origin(kind) is tuple:
        inner = get_args(kind)
        kinds = inner[:1] * len(plain) if inner[-1] is Ellipsis else inner
        return tuple(map(from_plain, plain, kinds))
    if is_dataclass(kind) and isinstance(kind, type):
        hints = get_type_hints(kind)
        return kind(**{name: from_plain(value, hints[name]) for name, value in plain.items()})
    if isinstance(kind, type) and issubclass(kind, tuple):
        hints = get_type_hints(kind)
        return kind(*map(from_plain, plain, hints.values()))
    if kind is bytes:
        return plain.numpy().tobytes()
    return kind(plain) if isinstance(kind, type) and issubclass(kind, Enum) else plain


class StoppedError(PwfnError):
    """The run was stopped by Ctrl-C or by the system, and has left a checkpoint."""

    def __init__(self, folder: Path, number: int) -> None:
        super().__init__(f"stopped by {signal.Signals(number).name}; resume with --out {folder} --resume")
        self.exit_status = 128 + number  # as in a shell


class Keeper:
    """Decides after each step whether to write a checkpoint, and stops the run after a signal.

    A checkpoint is written every so many minutes, at the end of every training phase (what follows may take
    long), and after a signal. All processes decide alike, after the same step. A second Ctrl-C stops at
    once.
    """

    def __init__(self, folder: Path, store: Store, minutes: float, distributed: Distributed) -> None:
        self._folder, self._store, self._distributed = folder, store, distributed
        self._seconds = 60 * minutes
        self._written = time.monotonic()
        self._signal = 0

    def __enter__(self) -> Self:
        try:
            self._before = {s: signal.signal(s, self._receive) for s in (signal.SIGINT, signal.SIGTERM)}
        except ValueError:  # only the main thread can handle signals
            self._before = {}
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def __call__(self, progress: Callable[[], Progress], ends: bool) -> None:
        """After a step: write a checkpoint if it is time, and stop if there was a signal."""
        due = self._distributed.leads and (ends or time.monotonic() - self._written >= self._seconds)
        stop, write = self._distributed.largest([self._signal, int(due)])
        if not stop and not write:
            return
        now = progress()
        self._distributed.first(lambda: self._store.save(now) and None)
        self._written = time.monotonic()
        if stop:
            raise StoppedError(self._folder, stop)

    def before_batch(self) -> None:
        """Before a batch of test data: stop if there was a signal; the last step's checkpoint is there."""
        if self._signal:
            raise StoppedError(self._folder, self._signal)

    def _receive(self, number: int, frame: FrameType | None) -> None:
        if self._signal and number == signal.SIGINT:
            raise StoppedError(self._folder, number)
        self._signal = number
