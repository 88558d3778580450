"""The network if the run ended after each round, and which of these states meets a target."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from pwfn.config import TargetConfig
from pwfn.errors import ConfigError
from pwfn.evaluate.score import Scores, finite


@dataclass(frozen=True)
class State:
    """The network if the run ended after a round: every free weight goes to its nearest candidate.

    Early states have many values and lose little accuracy; late ones have few. BatchNorm statistics are
    re-estimated for each.
    """

    round: int  # from 1
    fraction: float  # of the weights that the method has fixed; the others are rounded
    scores: Scores | None
    entropy_bits: float
    unique: int
    content: bytes  # as a .pwfn file

    def to_dict(self) -> dict[str, Any]:
        """Its figures, without its content."""
        return {
            "round": self.round,
            "fraction": self.fraction,
            "metric": finite(self.scores.metric) if self.scores else None,
            "validation_loss": finite(self.scores.loss) if self.scores else None,
            "entropy_bits": self.entropy_bits,
            "unique": self.unique,
            "file_bytes": len(self.content),
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


def meets(target: TargetConfig, before: Scores | None, scores: Scores | None, entropy_bits: float) -> bool:
    """Whether accuracy and bits are within the limits that are set; equal is within.

    >>> was, now = Scores(0.3, 0.92, 100), Scores(0.3, 0.90, 100)
    >>> [meets(TargetConfig(max_drop=points), was, now, 3.0) for points in (1.5, 2.0)]
    [False, True]
    """
    if target.bits is not None and entropy_bits > target.bits:
        return False
    # In float64, 0.92 - 0.90 is a little more than 2 points.
    return target.max_drop is None or _drop(before, scores) <= target.max_drop + 1e-9


def choose(states: Sequence[State], before: Scores | None, target: TargetConfig) -> Choice:
    """The state to keep.

    Of those that meet the target: the smallest file (of files within 1 % of it the most accurate); with
    a limit on the bits only, the most accurate. If none does, the closest: of those within ``max_drop``
    the one with the fewest bits; else the most accurate or, without ``max_drop``, the one with the
    fewest bits.
    """
    if not states:
        raise ConfigError(
            f"the rounds were run without a target, so that no state was kept for the target "
            f"({_wanted(target)}): start a new run with it"
        )
    fitting = [s for s in states if meets(target, before, s.scores, s.entropy_bits)]
    by_size, by_accuracy = target.max_drop is not None, target.max_drop is None
    if fitting:
        smallest = min(len(state.content) for state in fitting)
        near = [state for state in fitting if len(state.content) <= 1.01 * smallest]
        chosen = min(near if by_size else fitting, key=_loss)
        rank = "the smallest" if by_size else "the most accurate"
        of = f"{rank} of {len(fitting)} that meet the target ({_wanted(target)})"
        if len(fitting) == 1:
            of = f"the only one that meets the target ({_wanted(target)})"
        return Choice(chosen.round, True, f"{_figures(chosen, before)}: {of}")
    accurate = [s for s in states if meets(TargetConfig(max_drop=target.max_drop), before, s.scores, 0.0)]
    if by_accuracy or accurate:
        chosen, nearest = min(accurate or states, key=lambda s: (s.entropy_bits, s.round)), "the fewest bits"
    else:
        chosen, nearest = min(states, key=_loss), "the best accuracy"
    why = f"no state meets the target ({_wanted(target)}); this one has {nearest}"
    if by_size and accurate:
        why += " of those that are accurate enough"
    return Choice(chosen.round, False, f"{_figures(chosen, before)}: {why}")


def pareto(points: Sequence[tuple[float, int]]) -> list[bool]:
    """For each (accuracy, bytes), whether no other is at least as good in both and better in one.

    >>> pareto([(0.9, 100), (0.9, 90), (0.8, 50), (0.7, 60)])
    [False, True, True, False]
    """

    def beats(one: tuple[float, int], other: tuple[float, int]) -> bool:
        return one != other and one[0] >= other[0] and one[1] <= other[1]

    return [not any(beats(other, point) for other in points) for point in points]


def _metric(scores: Scores | None) -> float:
    return scores.metric if scores is not None and scores.metric is not None else 0.0


def _drop(before: Scores | None, scores: Scores | None) -> float:
    """Points of accuracy lost."""
    return 100 * (_metric(before) - _metric(scores))


def _loss(state: State) -> tuple[float, ...]:
    return (-_metric(state.scores), len(state.content), state.round)


def _wanted(target: TargetConfig) -> str:
    limits = []
    if target.max_drop is not None:
        limits.append(f"at most {target.max_drop:g} points lost")
    if target.bits is not None:
        limits.append(f"at most {target.bits:g} bits")
    return ", ".join(limits)


def _figures(state: State, before: Scores | None) -> str:
    accuracy = ""
    if state.scores is not None and state.scores.metric is not None:
        accuracy = f"{state.scores.metric:.2%}, "
        if before is not None and before.metric is not None:
            accuracy = f"{state.scores.metric:.2%} ({-_drop(before, state.scores):+.2f} points), "
    return (
        f"the state after round {state.round} ({accuracy}{state.entropy_bits:.3f} bits, "
        f"{len(state.content):,} bytes)"
    )
