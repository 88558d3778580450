"""The states of a network on the way, which of them meets a target, and which step to try next."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from pwfn.config import TargetConfig
from pwfn.errors import ConfigError
from pwfn.evaluate.score import Scores, finite
from pwfn.fixing.step import dyadic, next_dyadic

MAX_TRIES = 12
"""Steps that a search tries at most: enough to find the best one where accuracy and size are monotone."""

_STRIDE = 4  # places of the ladder from the first step to the second; then it doubles
_REACH = 96  # places either way from the first step: a factor of 2^12


@dataclass(frozen=True)
class State:
    """The network if the run ended after a round: every free weight goes to its nearest candidate.

    Early states have many values and lose little accuracy; late ones have few. BatchNorm statistics are
    re-estimated for each. Without training, a state is the network at one step: small steps are accurate.
    """

    round: int  # from 1; where steps are tried, the number of the try
    fraction: float  # of the weights that the method has fixed; the others are rounded
    scores: Scores | None
    entropy_bits: float
    unique: int
    content: bytes  # as a .pwfn file
    step: float | None = None  # all weights are multiples of it, where steps are tried
    finished_bytes: int | None = None  # of the file made of it, where that is known and smaller

    @property
    def file_bytes(self) -> int:
        """Bytes of the file if the run ended here."""
        return len(self.content) if self.finished_bytes is None else self.finished_bytes

    def excess_bytes(self, target: TargetConfig) -> int:
        """Bytes above the target's; 0 where it is met or sets none."""
        return 0 if target.bytes is None else max(self.file_bytes - target.bytes, 0)

    @property
    def name(self) -> str:
        """Which state it is, as text."""
        if self.step is None:
            return f"the state after round {self.round}"
        return f"the network at step {self.step:.4g}"

    def to_dict(self) -> dict[str, Any]:
        """Its figures, without its content."""
        return {
            "round": self.round,
            "fraction": self.fraction,
            "metric": finite(self.scores.metric) if self.scores else None,
            "validation_loss": finite(self.scores.loss) if self.scores else None,
            "entropy_bits": self.entropy_bits,
            "unique": self.unique,
            "file_bytes": self.file_bytes,
            **({} if self.step is None else {"step": self.step}),
        }


@dataclass(frozen=True)
class Choice:
    """Which state was kept, and why."""

    round: int
    met: bool  # whether the target was met by the state, before the finish
    why: str  # as text


def check_target(target: TargetConfig, has_metric: bool) -> None:
    """Raise an error for a limit on the loss of accuracy if no accuracy is measured."""
    if target.max_drop is not None and not has_metric:
        raise ConfigError(
            f"target.max_drop is {target.max_drop:g}, but no accuracy is measured: pass a val_loader and "
            "a metric"
        )


def meets(
    target: TargetConfig, before: Scores | None, scores: Scores | None, entropy_bits: float, file_bytes: int
) -> bool:
    """Whether accuracy, bits and bytes are within the limits that are set; equal is within.

    >>> was, now = Scores(0.3, 0.92, 100), Scores(0.3, 0.90, 100)
    >>> [meets(TargetConfig(max_drop=points), was, now, 3.0, 5000) for points in (1.5, 2.0)]
    [False, True]
    """
    if target.bits is not None and entropy_bits > target.bits:
        return False
    if target.bytes is not None and file_bytes > target.bytes:
        return False
    # In float64, 0.92 - 0.90 is a little more than 2 points.
    return target.max_drop is None or _drop(before, scores) <= target.max_drop + 1e-9


def choose(states: Sequence[State], before: Scores | None, target: TargetConfig) -> Choice:
    """The state to keep.

    Of those that meet the target: the smallest file (of files within 1 % of it the most accurate);
    without ``max_drop`` the network at the smallest step, which needs no scores; where there are no steps
    the most accurate or, where nothing was scored, the largest. If none does, the closest: of those within
    ``max_drop`` the one with the fewest bits or, for a limit on the bytes, with the fewest bytes; else the
    most accurate.
    """
    if not states:
        raise ConfigError(
            f"the rounds were run without a target, so that no state was kept for the target "
            f"({_wanted(target)}): start a new run with it"
        )
    fitting = [s for s in states if _meets(s, before, target)]
    if fitting:
        if target.max_drop is not None:
            smallest = min(state.file_bytes for state in fitting)
            chosen = min((s for s in fitting if s.file_bytes <= 1.01 * smallest), key=_loss)
            rank = "the smallest"
        else:
            chosen = min(fitting, key=lambda s: (s.step or 0.0, *_loss(s)))
            measured = chosen.scores is not None and chosen.scores.metric is not None
            rank = "the most accurate" if measured else "the best by loss" if chosen.scores else "the largest"
            rank = rank if chosen.step is None else "the smallest step"
        of = f"{rank} of {len(fitting)} that meet" if len(fitting) > 1 else "the only one that meets"
        why = f"{_figures(chosen, before)}: {of} the target ({_wanted(target)})"
        return Choice(chosen.round, True, why)
    # Without a limit on the loss of accuracy, every state is accurate enough.
    accurate = [s for s in states if _meets(s, before, TargetConfig(max_drop=target.max_drop))]
    if not accurate:
        chosen, nearest = min(states, key=_loss), "the best accuracy"
    elif target.bytes is not None:
        chosen, nearest = min(accurate, key=lambda s: (s.file_bytes, s.round)), "the fewest bytes"
    else:
        chosen, nearest = min(accurate, key=lambda s: (s.entropy_bits, s.round)), "the fewest bits"
    why = f"no state meets the target ({_wanted(target)}); this one has {nearest}"
    if accurate and target.max_drop is not None:
        why += " of those that are accurate enough"
    return Choice(chosen.round, False, f"{_figures(chosen, before)}: {why}")


def next_step(states: Sequence[State], before: Scores | None, target: TargetConfig) -> float | None:
    """The step to try after those of these states; None when the search is over.

    A larger step gives a smaller and, in general, less accurate network. With ``max_drop`` the search is
    for the largest step within it, which gives the smallest file; otherwise for the smallest step that is
    within the limits on size, which gives the most accurate network. It goes from the first step in strides
    that double until the answer lies between two tries, then halves the gap down to neighbouring steps.
    It tries no step twice, and at most :data:`MAX_TRIES` steps within a factor of 2^12 of the first.

    >>> from math import log2
    >>> def at(step):  # a network whose bits fall by one where the step doubles
    ...     return State(1, 1.0, None, 3 - log2(step), 9, b"", step)
    >>> states = [at(1.0)]
    >>> while (step := next_step(states, None, TargetConfig(bits=2.5))) is not None:
    ...     states.append(at(step))
    >>> [state.step for state in states]
    [1.0, 1.5, 1.25, 1.375]
    """
    tries = [(state.step, state) for state in states if state.step is not None]
    if not tries:
        return None
    first = tries[0][0]
    ladder = {next_dyadic(first, place): place for place in range(-_REACH, _REACH + 1)}
    limit = target if target.max_drop is None else TargetConfig(max_drop=target.max_drop)
    places = ((ladder.get(dyadic(step)), state) for step, state in tries)
    met = {place: _meets(state, before, limit) for place, state in places if place is not None}
    if len(tries) >= MAX_TRIES or not target.wanted:
        return None
    # A state may be too fine (its step can grow) or too coarse. Noise may mix the two: the search stays
    # beside the best step that it knows, and no try lies between the two places that it keeps.
    fine = [place for place, within in met.items() if within == (target.max_drop is not None)]
    coarse = [place for place in met if place not in fine]
    if target.max_drop is not None:
        low = max(fine, default=None)
        high = min((place for place in coarse if low is None or place > low), default=None)
    else:
        high = min(coarse, default=None)
        low = max((place for place in fine if high is None or place < high), default=None)
    if high is None:
        place = min(2 * max(met) + _STRIDE, _REACH)
    elif low is None:
        place = max(2 * min(met) - _STRIDE, -_REACH)
    else:
        place = (low + high) // 2
    return None if place in met else next_dyadic(first, place)


def pareto(points: Sequence[tuple[float, int]]) -> list[bool]:
    """For each (accuracy, bytes), whether no other is at least as good in both and better in one.

    >>> pareto([(0.9, 100), (0.9, 90), (0.8, 50), (0.7, 60)])
    [False, True, True, False]
    """

    def beats(one: tuple[float, int], other: tuple[float, int]) -> bool:
        return one != other and one[0] >= other[0] and one[1] <= other[1]

    return [not any(beats(other, point) for other in points) for point in points]


def _meets(state: State, before: Scores | None, target: TargetConfig) -> bool:
    return meets(target, before, state.scores, state.entropy_bits, state.file_bytes)


def _metric(scores: Scores | None) -> float:
    return scores.metric if scores is not None and scores.metric is not None else 0.0


def _drop(before: Scores | None, scores: Scores | None) -> float:
    """Points of accuracy lost, or of agreement, which the original network has with itself."""
    start = 1.0 if scores is not None and scores.agreement else _metric(before)
    return 100 * (start - _metric(scores))


def _loss(state: State) -> tuple[float, ...]:
    """The smaller, the better: by the metric, else by the loss; what was not scored, by its size."""
    if state.scores is None:  # the largest is nearest to the original
        return (-state.file_bytes, state.round)
    lost = state.scores.loss if state.scores.metric is None else -state.scores.metric
    return (lost if math.isfinite(lost) else math.inf, state.file_bytes, state.round)


def _wanted(target: TargetConfig) -> str:
    limits = []
    if target.max_drop is not None:
        limits.append(f"at most {target.max_drop:g} points lost")
    if target.bits is not None:
        limits.append(f"at most {target.bits:g} bits")
    if target.bytes is not None:
        limits.append(f"at most {target.bytes:,} bytes")
    return ", ".join(limits)


def _figures(state: State, before: Scores | None) -> str:
    accuracy = ""
    if state.scores is not None and state.scores.metric is not None:
        accuracy = f"{'agreement ' if state.scores.agreement else ''}{state.scores.metric:.2%}, "
        if before is not None and before.metric is not None and not state.scores.agreement:
            accuracy = f"{state.scores.metric:.2%} ({-_drop(before, state.scores):+.2f} points), "
    return f"{state.name} ({accuracy}{state.entropy_bits:.3f} bits, {state.file_bytes:,} bytes)"
