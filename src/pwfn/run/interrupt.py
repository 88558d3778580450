"""When a run writes a checkpoint, and how a signal ends it."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable
from pathlib import Path
from types import FrameType

from pwfn.bayes.distributed import Distributed
from pwfn.errors import PwfnError
from pwfn.progress import Progress
from pwfn.run.checkpoint import Store


class StoppedError(PwfnError):
    """The run was asked to stop, by Ctrl-C or by the system, and has left a checkpoint."""

    def __init__(self, folder: Path, number: int) -> None:
        super().__init__(f"stopped by {signal.Signals(number).name}; go on with --out {folder} --resume")
        self.exit_status = 128 + number  # as a shell would have it


class Keeper:
    """Decides after each step whether to write a checkpoint, and stops the run when a signal came.

    One is written every so many minutes, at the end of every stretch of training (what follows may
    take long), and when a signal came. All processes of a run decide alike, after the same step. A
    second Ctrl-C stops at once.
    """

    def __init__(self, folder: Path, store: Store, minutes: float, distributed: Distributed) -> None:
        self._folder, self._store, self._team = folder, store, distributed
        self._seconds = 60 * minutes
        self._written = time.monotonic()
        self._signal = 0

    def __enter__(self) -> Keeper:
        try:
            self._before = {s: signal.signal(s, self._note) for s in (signal.SIGINT, signal.SIGTERM)}
        except ValueError:  # not in the main thread, which alone may handle signals
            self._before = {}
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def __call__(self, progress: Callable[[], Progress], ends: bool) -> None:
        """After a step: write a checkpoint if it is time, and stop if a signal came."""
        due = self._team.leads and (ends or time.monotonic() - self._written >= self._seconds)
        stop, write = self._team.largest([self._signal, int(due)])
        if not stop and not write:
            return
        now = progress()
        self._team.first(lambda: self._store.save(now) and None)
        self._written = time.monotonic()
        if stop:
            raise StoppedError(self._folder, stop)

    def between(self) -> None:
        """Before a batch of test data: stop if a signal came; the checkpoint of the last step stands."""
        if self._signal:
            raise StoppedError(self._folder, self._signal)

    def _note(self, number: int, frame: FrameType | None) -> None:
        if self._signal and number == signal.SIGINT:
            raise StoppedError(self._folder, number)
        self._signal = number
