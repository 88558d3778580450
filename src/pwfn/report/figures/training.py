"""How a run went, round by round: accuracy, entropy, where the weights were fixed, how far they moved."""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import fmean
from typing import TYPE_CHECKING, Any

from pwfn.fixing.record import Move
from pwfn.fixing.unique import unique_counts
from pwfn.report.figures import style
from pwfn.report.figures.style import DASHED, INK, MARKERS, SERIES, Figure
from pwfn.report.formats import short, shown, thousands
from pwfn.report.reading import RunData, measure

if TYPE_CHECKING:
    from matplotlib.figure import Figure as Sheet


def by_round(runs: Sequence[RunData], names: Sequence[str]) -> Figure | None:
    """Accuracy and entropy after every round, all runs in one figure."""
    if not any(run.rounds for run in runs):
        return None
    several = len(runs) > 1
    what = measure(runs)
    has_accuracy = any(math.isfinite(done.accuracy) for run in runs for done in run.rounds)

    def draw(sheet: Sheet) -> None:
        panels = sheet.subplots(1, 2 if has_accuracy else 1, squeeze=False)[0]
        for number, (run, name) in enumerate(zip(runs, names, strict=True)):
            look: dict[str, Any] = {"color": SERIES[number % len(SERIES)], "clip_on": False, "zorder": 3}
            look["marker"] = MARKERS[number % len(MARKERS)]
            rounds = [done.number for done in run.rounds]
            series = [([done.entropy_bits for done in run.rounds], run.file.entropy_bits)]
            if has_accuracy:
                after = math.nan if run.after is None else 100 * run.after
                series.insert(0, ([100 * done.accuracy for done in run.rounds], after))
                if run.before is not None:
                    panels[0].axhline(100 * run.before, color=INK, linewidth=0.9, linestyle=DASHED)
            for panel, (values, end) in zip(panels, series, strict=True):
                panel.plot(rounds, values, label=short(name), **look)
                hollow = {**look, "markerfacecolor": "none", "markersize": 6, "linestyle": "none"}
                panel.plot([max(rounds, default=0) + 0.6], [end], **hollow)
        for panel in panels:
            panel.set_xlabel("round; the hollow mark is the finished file")
            style.whole_numbers(panel.xaxis)
        panels[-1].set_title("Entropy of the fixed weights")
        panels[-1].set_ylabel("bits per weight")
        panels[-1].set_ylim(bottom=0)
        if has_accuracy:
            panels[0].set_title(what.capitalize())
            style.accuracy_axis(panels[0], what)
        if several:
            handles = panels[-1].get_legend_handles_labels()
            sheet.legend(*handles, loc="outside lower center", ncols=min(len(runs), 3))

    header = ("round", "fixed", what, "entropy, bits per weight", "unique values")
    rows = tuple(
        (
            *((name,) if several else ()),
            str(done.number),
            shown(done.fraction, ".1%"),
            shown(done.accuracy, ".2%"),
            shown(done.entropy_bits, ".3f"),
            shown(done.unique),
        )
        for run, name in zip(runs, names, strict=True)
        for done in run.rounds
    )
    told = [
        f"{f'{name}: ' if several else ''}{len(run.rounds)} rounds, {run.measure} {shown(run.before, '.2%')} "
        f"before and {shown(run.after, '.2%')} in the finished file, entropy "
        f"{run.file.entropy_bits:.2f} bits per weight at the end"
        for run, name in zip(runs, names, strict=True)
    ]
    return Figure(
        key="rounds",
        title=f"{what.capitalize()} and entropy by round",
        how_to_read="Each mark is the network after a round, its weights without noise. The dashed line is "
        "the network before compression. Entropy counts only the weights that are fixed by then.",
        alt="; ".join(told) + ".",
        draw=draw,
        height=2.9 + (0.22 * math.ceil(len(runs) / 3) if several else 0),
        table=(("run", *header) if several else header, rows),
    )


def schedule(run: RunData) -> Figure | None:
    """The paper's figure of the assignment: weights fixed, weights per value, powers of two, by round."""
    if not run.rounds:
        return None
    books = run.history.codebooks
    if not books:  # the trace is missing: the file has the last one
        counts = sorted(unique_counts(run.compressed.values())[1].tolist(), reverse=True)
        books = ((run.rounds[-1].number, tuple(counts[:1024])),)
    rounds = [done.number for done in run.rounds]
    fixed, zeros, powers = (
        [100 * getattr(done, key) for done in run.rounds]
        for key in ("fraction", "zero_share", "power_of_two_share")
    )

    def draw(sheet: Sheet) -> None:
        left, middle, right = sheet.subplots(1, 3)
        left.bar(rounds, fixed, color=SERIES[0], width=0.75)
        left.set_title("Fixed")
        left.set_ylabel("weights, %")
        for number, (_, counts) in enumerate(books, 1):
            ranks, marker = range(1, len(counts) + 1), "o" if len(counts) < 30 else None
            alpha = 0.25 + 0.75 * number / len(books)
            look: dict[str, Any] = {"linewidth": 1.3, "marker": marker, "markersize": 2.5}
            middle.plot(ranks, counts, color=SERIES[1], alpha=alpha, **look)
        middle.set(xscale="log", yscale="log", xlabel="rank of the value", ylabel="weights")
        middle.set_title("Weights per value")
        style.logarithmic(middle.xaxis, thousands)
        style.logarithmic(middle.yaxis, thousands)
        rest = [power - zero for power, zero in zip(powers, zeros, strict=True)]
        right.bar(rounds, zeros, color=SERIES[2], alpha=0.45, width=0.75, label="zero")
        right.bar(rounds, rest, bottom=zeros, color=SERIES[2], width=0.75, label="± power of two")
        right.set(ylabel="of the fixed weights, %", ylim=(0, 100))
        right.set_title("Powers of two")
        for panel in (left, right):
            panel.set_xlabel("round")
            style.whole_numbers(panel.xaxis, 5)
        sheet.legend(*right.get_legend_handles_labels(), loc="outside lower right", ncols=2)

    return Figure(
        key="schedule",
        title="Where the weights were fixed, round by round",
        how_to_read="Left: weights fixed after each round. Middle: weights at the most frequent value, the "
        "second, and so on; later rounds are stronger. Right: fixed weights that are zero or a power of two.",
        alt=f"In {len(rounds)} rounds up to {fixed[-1]:.0f}% of the weights are fixed; in the end "
        f"they have {len(books[-1][1]):,} values, the most frequent with {books[-1][1][0]:,} weights, and "
        f"{powers[-1]:.1f}% of the weights are zero or a power of two.",
        draw=draw,
        height=2.7,
        table=(
            ("round", "zero", "zero or power of two"),
            tuple(
                (str(n), f"{zero:.1f}%", f"{power:.1f}%")
                for n, zero, power in zip(rounds, zeros, powers, strict=True)
            ),
        ),
    )


_SMALLEST = 1e-4  # distances below it are drawn there


def distances(run: RunData) -> Figure | None:
    """How far weights moved to their values, ``|mu - c| / |mu|`` (paper, "relative distance")."""
    moves = run.history.moves
    if not moves:
        return None
    rounds = sorted({number for number, _ in moves})
    by_round = [[move for n, move in moves if n == number] for number in rounds]
    means = [_mean_distance(own) for own in by_round]
    largest = [max(move.largest for move in own) for own in by_round]

    def draw(sheet: Sheet) -> None:
        left, middle, right = sheet.subplots(1, 3, sharey=True)
        y = [max(move.mean, _SMALLEST) for _, move in moves]
        style.dots(left, [move.centre for _, move in moves], y, SERIES[1])
        style.dots(middle, [float(move.count) for _, move in moves], y, SERIES[1])
        for values, dash, label in ((means, "-", "mean"), (largest, DASHED, "largest")):
            shown = [max(value, _SMALLEST) for value in values]
            right.plot(rounds, shown, color=INK, linestyle=dash, marker="o", markersize=3, label=label)
        left.set(yscale="log", ylabel="relative distance", xlabel="value")
        left.margins(y=0.08)
        style.logarithmic(left.yaxis, "{:g}".format)
        left.set_xscale("symlog", base=2, linthresh=2**-10)
        top = 2.0 ** math.ceil(math.log2(max(abs(move.centre) for _, move in moves) or 0.5))
        ticks = [-top, -top / 16, 0.0, top / 16, top]
        left.set_xticks(ticks, [f"{tick:.2g}" for tick in ticks])
        left.minorticks_off()
        middle.set(xscale="log", xlabel="weights moved there")
        style.logarithmic(middle.xaxis, thousands)
        right.set_xlabel("round")
        style.whole_numbers(right.xaxis, 5)
        for panel, title in zip((left, middle, right), ("By value", "By count", "By round"), strict=True):
            panel.set_title(title)
        sheet.legend(*right.get_legend_handles_labels(), loc="outside lower right", ncols=2)

    far_round, farthest = max(moves, key=lambda pair: pair[1].largest)
    return Figure(
        key="distances",
        title="How far weights moved to their values",
        how_to_read="The change of a weight relative to its size, 1 for every weight that was set to zero. "
        "Each dot is the mean over the weights that moved to one value in one round.",
        alt=f"Over {len(moves):,} values in {len(rounds)} rounds the mean relative distance of a weight is "
        f"{_mean_distance([move for _, move in moves]):.3g}; the largest is {farthest.largest:.3g}, to the "
        f"value {farthest.centre:g} in round {far_round}.",
        draw=draw,
        height=2.8,
        table=(
            ("round", "values", "weights moved", "mean relative distance", "largest"),
            tuple(
                (str(n), str(len(own)), f"{sum(move.count for move in own):,}", f"{mean:.3g}", f"{most:.3g}")
                for n, own, mean, most in zip(rounds, by_round, means, largest, strict=True)
            ),
        ),
    )


def _mean_distance(moves: Sequence[Move]) -> float:
    """Over all weights that were not zero."""
    return fmean([move.mean for move in moves], [move.count - move.from_zero for move in moves])
