"""How far weights moved to their centres, relative to where they were (paper, "relative distance")."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from pwfn.evaluate.trace import Moment
from pwfn.fixing.record import Move
from pwfn.report.figures.canvas import INK, SERIES, Drawing, decades, dots, power, thousands, whole_numbers
from pwfn.report.reading import RunData

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure as Sheet

_SMALLEST = 1e-4  # a distance; what is less stands there


def distances(run: RunData) -> Drawing | None:
    """Largest and mean of ``|mu - c| / |mu|`` by centre, by count and by round, with WFN's threshold."""
    moved = [
        (seen.round, move)
        for seen in run.observed
        if seen.moment is Moment.AFTER
        for move in seen.moves
        if move.count > move.from_zero  # where all weights were zero the ratio is not defined
    ]
    if not moved:
        return None
    threshold = run.settings.get("wfn", {}).get("delta")

    def draw(sheet: Sheet) -> None:
        panels = sheet.subplots(2, 3, sharey="row", sharex="col")
        rounds = sorted({number for number, _ in moved})
        for row, kind in zip(panels, ("largest", "mean"), strict=True):
            y = [max(getattr(move, kind), _SMALLEST) for _, move in moved]
            dots(row[0], [_place(move.centre) for _, move in moved], y, SERIES[1], alpha=0.6)
            dots(row[1], [float(move.count) for _, move in moved], y, SERIES[1], alpha=0.6)
            dots(row[2], [float(number) for number, _ in moved], y, SERIES[1], alpha=0.6)
            typical = [_of_round([move for n, move in moved if n == number], kind) for number in rounds]
            whole = [max(value, _SMALLEST) for value in typical]
            row[2].plot(rounds, whole, color=INK, linewidth=1.1, label="the whole round")
            for panel in row:
                panel.set_yscale("log")
                panel.margins(y=0.08)
                if threshold is not None:
                    label = f"WFN's threshold, {threshold:g}"
                    panel.axhline(threshold, color=SERIES[0], linewidth=1.3, label=label)
            decades(row[0].yaxis, "{:g}".format)
            row[0].set_ylabel(f"{kind} relative distance")
        _centres(panels[1][0], [move.centre for _, move in moved])
        panels[1][1].set_xscale("log")
        decades(panels[1][1].xaxis, thousands)
        panels[1][1].set_xlabel("weights moved there")
        panels[1][2].set_xlabel("round")
        panels[1][2].set_xlim(rounds[0] - 0.5, rounds[-1] + 0.5)
        whole_numbers(panels[1][2].xaxis, 5)
        sheet.legend(*panels[1][2].get_legend_handles_labels(), loc="outside lower center", ncols=2)
        for panel, title in zip(panels[0], ("By centre", "By number of weights", "By round"), strict=True):
            panel.set_title(title)

    within = _share_within(moved, threshold)
    count = sum(move.count - move.from_zero for _, move in moved)
    mean = sum(move.mean * (move.count - move.from_zero) for _, move in moved) / count
    far_round, farthest = max(moved, key=lambda pair: pair[1].largest)
    told = f"; in {within:.0%} of them the mean is within WFN's threshold" if within is not None else ""
    return Drawing(
        key="distances",
        title="How far weights moved to their centres",
        how_to_read="Each dot is a centre in a round: the largest (above) or mean (below) share of its own "
        "size by which a weight moved there, 1 for every weight that went to zero; WFN would keep "
        "the mean below its threshold.",
        alt=f"Over {len(moved):,} centres in {len({n for n, _ in moved})} rounds the mean relative "
        f"distance of a weight is {mean:.3g}{told}; the largest is {farthest.largest:.3g}, to the centre "
        f"{farthest.centre:g} in round {far_round}.",
        draw=draw,
        height=4.5,
        table=(
            ("round", "centres", "weights moved", "mean relative distance", "largest"),
            tuple(
                (
                    str(number),
                    str(len(own)),
                    f"{sum(move.count for move in own):,}",
                    f"{_of_round(own, 'mean'):.3g}",
                    f"{_of_round(own, 'largest'):.3g}",
                )
                for number in sorted({n for n, _ in moved})
                for own in [[move for n, move in moved if n == number]]
            ),
        ),
    )


def _of_round(moves: list[Move], kind: str) -> float:
    """The largest of all, or the mean over all weights."""
    if kind == "largest":
        return max(move.largest for move in moves)
    weights = [move.count - move.from_zero for move in moves]
    return sum(w * move.mean for w, move in zip(weights, moves, strict=True)) / sum(weights)


def _share_within(moved: list[tuple[int, Move]], threshold: float | None) -> float | None:
    if threshold is None:
        return None
    return sum(move.mean <= threshold for _, move in moved) / len(moved)


_ZERO = 10  # octaves below 1 at which the two signs meet


def _place(centre: float) -> float:
    """Octaves from 2^-10 outward, so that every power of two has its place on both sides of zero.

    >>> _place(0.0), _place(0.5), _place(-0.5)
    (0.0, 9.0, -9.0)
    """
    if centre == 0:
        return 0.0
    return math.copysign(max(math.log2(abs(centre)) + _ZERO, 0.5), centre)


def _centres(panel: Axes, centres: list[float]) -> None:
    largest = max(abs(centre) for centre in centres) or 0.5
    top = math.ceil(math.log2(largest)) if largest > 0 else 0
    marks = [top, top - 4]
    places = [(_place(sign * 2.0**e), e, sign) for e in marks for sign in (-1, 1)]
    found = sorted(
        [(place, f"{'−' if sign < 0 else ''}{power(2, e)}") for place, e, sign in places] + [(0.0, "0")]
    )
    panel.set_xticks([place for place, _ in found], [label for _, label in found])
    panel.set_xlabel("value of the centre")
