"""How long a run still takes, and lengths of time as text."""

from __future__ import annotations

from collections.abc import Callable

Clock = Callable[[], float]  # seconds since some moment


class TimeLeft:
    """How long a run still takes, from its pace in this process.

    Training goes by the share of steps done since the first pulse, so that a run that goes on
    where another stopped is not credited with what that one did. What lies between the stretches,
    fixing and scoring, is timed apart and comes once for every round that is left.

    >>> now = iter([100.0, 110.0, 112.0, 112.0])
    >>> left = TimeLeft(2, lambda: next(now))
    >>> left.pulse(0.5)  # half was done by an earlier process
    >>> left.pulse(0.7)  # a fifth in 10 seconds
    >>> left.round()  # and 2 seconds more to score it
    >>> round(left.seconds(), 6)  # 15 seconds for 0.3 of the steps, and 2 for the last round
    17.0
    """

    def __init__(self, rounds_left: int, clock: Clock) -> None:
        self._clock, self._rounds_left = clock, rounds_left
        self._since: float | None = None  # when the latest event was
        self._done = 0.0
        self._training = self._share = 0.0  # seconds, and the share of steps that they were for
        self._between, self._times = 0.0, 0  # seconds between stretches, and how often

    def pulse(self, done: float) -> None:
        """So much of all training is done."""
        now = self._clock()
        if self._since is not None:
            self._training += now - self._since
            self._share += done - self._done
        self._since, self._done = now, done

    def round(self, seconds: float = 0.0) -> None:
        """A round is over; ``seconds`` is what it took in all, for one without any training."""
        now = self._clock()
        self._between += seconds if self._since is None else now - self._since
        self._times += 1
        self._rounds_left -= 1
        self._since = now

    def seconds(self) -> float | None:
        """What is left; None as long as there is nothing to go by."""
        if self._since is None or (self._share <= 0 and not self._times):
            return None
        pace = self._training / self._share if self._share > 0 else 0.0
        between = self._between / self._times if self._times else 0.0
        whole = pace * max(1 - self._done, 0.0) + between * max(self._rounds_left, 0)
        # No pulse comes while a round is scored, and the clock goes on.
        return max(whole - min(self._clock() - self._since, between), 0.0)


def duration(seconds: float) -> str:
    """A length of time in words, coarse enough not to flicker.

    >>> [duration(s) for s in (0.4, 59.7, 754, 3599, 11_100, 187_000)]
    ['0 s', '1 min', '13 min', '1 h 00 min', '3 h 05 min', '2 d 4 h']
    """
    if round(seconds) < 60:
        return f"{round(seconds)} s"
    minutes = round(seconds / 60)
    if minutes < 60:
        return f"{minutes} min"
    if minutes < 48 * 60:
        return f"{minutes // 60} h {minutes % 60:02} min"
    days, hours = divmod(round(seconds / 3600), 24)
    return f"{days} d {hours} h"


def stopwatch(seconds: float) -> str:
    """A length of time that is seen to go on.

    >>> stopwatch(7.9), stopwatch(3723)
    ('0:00:07', '1:02:03')
    """
    return f"{int(seconds) // 3600}:{int(seconds) // 60 % 60:02}:{int(seconds) % 60:02}"
