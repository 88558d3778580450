"""What is shown of a run, and to whom."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import ExitStack
from types import TracebackType
from typing import Self

from pwfn.progress import Round, StepEvent


class View:
    """Someone who watches a run; what a view does not override, it does not show."""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Leave the screen or the file in order, however the run ended."""

    def say(self, line: str) -> None:
        """Show a line of text."""

    def begin(self, title: str, rounds: int, earlier: Sequence[Round] = ()) -> None:
        """The run begins, or goes on after rounds that were done before."""

    def pulse(self, now: StepEvent) -> None:
        """Training has come as far as this."""

    def round(self, done: Round) -> None:
        """A round is over, its weights fixed and the network scored."""

    def end(self, line: str) -> None:
        """The run is over; the line says what came of it."""


class Silent(View):
    """Shows nothing."""


class Several(View):
    """Hands everything to each of several views."""

    def __init__(self, views: Iterable[View]) -> None:
        self._views = tuple(views)
        self._stack = ExitStack()

    def __enter__(self) -> Self:
        with ExitStack() as stack:  # if one cannot be entered, those before are left again
            for view in self._views:
                stack.enter_context(view)
            self._stack = stack.pop_all()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stack.__exit__(kind, error, trace)

    def say(self, line: str) -> None:
        """Each says the line."""
        for view in self._views:
            view.say(line)

    def begin(self, title: str, rounds: int, earlier: Sequence[Round] = ()) -> None:
        """Each is told."""
        for view in self._views:
            view.begin(title, rounds, earlier)

    def pulse(self, now: StepEvent) -> None:
        """Each is told."""
        for view in self._views:
            view.pulse(now)

    def round(self, done: Round) -> None:
        """Each is told."""
        for view in self._views:
            view.round(done)

    def end(self, line: str) -> None:
        """Each is told."""
        for view in self._views:
            view.end(line)
