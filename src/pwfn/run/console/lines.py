"""A run as plain lines."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from pwfn.progress import Round, StepEvent
from pwfn.run.console.timing import Clock, TimeLeft, duration
from pwfn.run.console.view import View

HEADER = "round    done     loss  accuracy  entropy  unique  powers of two  median sigma"
_LINE_EVERY = 60.0  # seconds between lines within a stretch of training


def round_line(done: Round) -> str:
    """The figures of a round in one line, under the heads of a run's table."""
    return (
        f"{done.number:>5}  {done.fix.fraction:>6.1%}  {loss_text(done):>7}  {score_text(done):>8}  "
        f"{done.fixed.entropy_bits:>7.3f}  {done.fixed.unique:>6}  "
        f"{done.fixed.power_of_two_share:>13.1%}  {sigma_text(done):>12}"
    )


def sigma_text(done: Round) -> str:
    """The median sigma of the weights that were free, for methods that have any."""
    return f"{done.sigma_quartiles[1]:.5f}" if done.sigma_quartiles else "-"


def loss_text(done: Round) -> str:
    """The mean loss of a round, if it had any training."""
    return f"{done.loss:.4f}" if done.loss is not None else "-"


def score_text(done: Round) -> str:
    """The accuracy after a round, if it was measured."""
    return f"{done.scores.metric:.2%}" if done.scores and done.scores.metric is not None else "-"


class Lines(View):
    """Plain lines for pipes and logs: one a round and, within long stretches, one a minute."""

    def __init__(self, say: Callable[[str], None] = print, clock: Clock = time.monotonic) -> None:
        self._say, self._clock = say, clock
        self._left = TimeLeft(0, clock)
        self._said = clock()

    def say(self, line: str) -> None:
        """Print the line."""
        self._say(line)
        self._said = self._clock()

    def begin(self, title: str, rounds: int, earlier: Sequence[Round] = ()) -> None:
        """Print the title, the heads, and the rounds done before."""
        self._left = TimeLeft(rounds - len(earlier), self._clock)
        for line in (title, HEADER, *map(round_line, earlier)):
            self.say(line)

    def pulse(self, now: StepEvent) -> None:
        """Print a line if there was none for a minute."""
        self._left.pulse(now.done)
        if self._clock() - self._said >= _LINE_EVERY:
            left = self._left.seconds()
            rest = "" if left is None else f", {duration(left)} left"
            self.say(f"{now.stage}: step {now.step:,} of {now.steps:,}, loss {now.loss:.4f}{rest}")

    def round(self, done: Round) -> None:
        """Print the round's line, and the time left where there is some."""
        self._left.round(done.seconds)
        left = self._left.seconds()
        self.say(round_line(done) + (f"  {duration(left)} left" if left and left >= 0.5 else ""))

    def end(self, line: str) -> None:
        """Print the line."""
        self.say(line)
