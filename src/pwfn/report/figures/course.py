"""How a run went, round by round: accuracy, entropy, and where the weights were put."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from pwfn.evaluate.trace import Moment
from pwfn.fixing.unique import unique_counts
from pwfn.report.figures.canvas import (
    INK,
    SERIES,
    Drawing,
    accuracies,
    decades,
    percents,
    short,
    strengths,
    thousands,
    whole_numbers,
)
from pwfn.report.reading import RunData

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure as Sheet

_MARKS = "osD^vPX*"


def course(runs: Sequence[RunData], names: Sequence[str]) -> Drawing | None:
    """Accuracy and entropy by round, of all runs; what comes after the last round stands at its right."""
    if not any(run.rounds for run in runs):
        return None
    has_metric = any(done["metric"] is not None for run in runs for done in run.rounds)

    def draw(sheet: Sheet) -> None:
        panels = sheet.subplots(1, 2 if has_metric else 1, squeeze=False)[0]
        for number, (run, name) in enumerate(zip(runs, names, strict=True)):
            style: dict[str, Any] = {
                "color": SERIES[number % len(SERIES)],
                "marker": _MARKS[number % len(_MARKS)],
                "label": short(name),
            }
            if has_metric:
                before = _metric(run.record.get("before"))
                if before is not None and (number == 0 or before != _metric(runs[0].record.get("before"))):
                    panels[0].axhline(100 * before, color=INK, linewidth=0.9, linestyle=(0, (4, 3)))
                _line(panels[0], run, [_percent(done["metric"]) for done in run.rounds], style)
                _end(panels[0], run, _percent(_metric(run.record.get("after"))), style)
            _line(panels[-1], run, [done["entropy_bits"] for done in run.rounds], style)
            _end(panels[-1], run, run.record.get("entropy_bits"), style)
        for panel in panels:
            panel.set_xlabel("round; the hollow mark is the finished file")
            whole_numbers(panel.xaxis)
        if has_metric:
            panels[0].set_title("Accuracy")
            panels[0].set_ylabel("images right, %")
            accuracies(panels[0])
        panels[-1].set_title("Entropy of the weights in place")
        panels[-1].set_ylabel("bits a weight")
        panels[-1].set_ylim(bottom=0)
        if len(runs) > 1:
            handles, labels = panels[-1].get_legend_handles_labels()
            sheet.legend(handles, labels, loc="outside lower center", ncols=min(len(runs), 3))

    rows = tuple(
        (
            *((name,) if len(runs) > 1 else ()),
            str(done["round"]),
            f"{done['fraction']:.1%}",
            "–" if done["metric"] is None else f"{done['metric']:.2%}",
            f"{done['entropy_bits']:.3f}",
            f"{done['unique']}",
        )
        for run, name in zip(runs, names, strict=True)
        for done in run.rounds
    )
    header = ("round", "in place", "accuracy", "entropy, bits", "unique values")
    return Drawing(
        key="course",
        title="Accuracy and entropy by round",
        how_to_read="Each mark is the network after a round, its weights without noise; the dashed line is "
        "the network before compression, and entropy counts only the weights that are in place by then.",
        alt="; ".join(_course_alt(run, name, len(runs) > 1) for run, name in zip(runs, names, strict=True))
        + ".",
        draw=draw,
        height=2.9 + 0.22 * (len(runs) + 2) // 3 * (len(runs) > 1),
        table=(("run", *header) if len(runs) > 1 else header, rows),
    )


def _line(panel: Axes, run: RunData, values: Sequence[float | None], style: Mapping[str, Any]) -> None:
    known = [
        (done["round"], value) for done, value in zip(run.rounds, values, strict=True) if value is not None
    ]
    panel.plot([x for x, _ in known], [y for _, y in known], **style)


def _end(panel: Axes, run: RunData, value: float | None, style: Mapping[str, Any]) -> None:
    if value is not None and run.rounds:
        hollow = {**style, "label": None, "markerfacecolor": "none", "markersize": 6, "linestyle": "none"}
        panel.plot([run.rounds[-1]["round"] + 0.6], [value], **hollow)


def _course_alt(run: RunData, name: str, several: bool) -> str:
    before, after = _metric(run.record.get("before")), _metric(run.record.get("after"))
    accuracy = ""
    if before is not None and after is not None:
        accuracy = f"accuracy {before:.2%} before and {after:.2%} in the finished file, "
    elif after is not None:
        accuracy = f"accuracy {after:.2%} in the finished file, "
    entropy = run.record.get("entropy_bits")
    bits = f", entropy {entropy:.2f} bits a weight at the end" if entropy is not None else ""
    return f"{f'{name}: ' if several else ''}{accuracy}{len(run.rounds)} rounds{bits}"


def schedule(run: RunData) -> Drawing | None:
    """The paper's figure of the assignment: fractions, weights per centre, powers of two, by round."""
    if not run.rounds:
        return None
    books = _weights_per_centre(run)
    rounds = [done["round"] for done in run.rounds]
    fractions = percents(done["fraction"] for done in run.rounds)
    zeros = percents(done["zero_share"] for done in run.rounds)
    powers = percents(done["power_of_two_share"] for done in run.rounds)
    fixes = any(seen.moves for seen in run.observed) or run.settings.get("method") in ("pwfn", "wfn")

    def draw(sheet: Sheet) -> None:
        left, middle, right = sheet.subplots(1, 3)
        left.bar(rounds, fractions, color=SERIES[0], width=0.75)
        left.set_title("In place" if fixes else "Trained")
        left.set_ylabel("weights, %" if fixes else "of the training, %")
        for (_, counts), strength in zip(books, strengths(len(books)), strict=True):
            middle.plot(
                range(1, len(counts) + 1),
                counts,
                color=SERIES[1],
                alpha=strength,
                linewidth=1.3,
                marker="o" if len(counts) < 30 else None,
                markersize=2.5,
            )
        middle.set_yscale("log")
        middle.set_xscale("log")
        middle.set_title("Weights per centre")
        middle.set_xlabel("rank of the centre")
        middle.set_ylabel("weights")
        for axis in (middle.xaxis, middle.yaxis):
            decades(axis, thousands)
        rest = [power - zero for power, zero in zip(powers, zeros, strict=True)]
        right.bar(rounds, zeros, color=SERIES[2], alpha=0.45, width=0.75, label="zero")
        right.bar(rounds, rest, bottom=zeros, color=SERIES[2], width=0.75, label="± power of two")
        right.set_title("Powers of two")
        right.set_ylabel("of the weights in place, %")
        right.set_ylim(0, 100)
        for panel in (left, right):
            panel.set_xlabel("round")
            whole_numbers(panel.xaxis, 5)
        sheet.legend(*right.get_legend_handles_labels(), loc="outside lower right", ncols=2)

    last = books[-1][1]
    half = _needed_for_half(last)
    return Drawing(
        key="schedule",
        title="Where the weights were put, round by round",
        how_to_read="Left, how many weights are in place after each round; in the middle, how many weights "
        "the most popular centre has, the second, and so on (later rounds are stronger); right, how many "
        "of them are zero or a power of two.",
        alt=f"In {len(rounds)} rounds up to {fractions[-1]:.0f} % of the weights are put in place; in the "
        f"end {half} of {len(last):,} values hold half of the weights or more, and {powers[-1]:.1f} % of "
        f"the weights are zero or a power of two.",
        draw=draw,
        height=2.7,
        table=(
            ("round", "in place", "zero", "zero or power of two", "unique values"),
            tuple(
                (
                    str(done["round"]),
                    f"{done['fraction']:.1%}",
                    f"{done['zero_share']:.1%}",
                    f"{done['power_of_two_share']:.1%}",
                    str(done["unique"]),
                )
                for done in run.rounds
            ),
        ),
    )


def _weights_per_centre(run: RunData) -> list[tuple[int, list[int]]]:
    """Round and counts, the largest first; of the file alone where the run was not observed."""
    found = [
        (seen.round, sorted((count for _, count in seen.codebook), reverse=True))
        for seen in run.observed
        if seen.moment is Moment.AFTER and seen.codebook
    ]
    if not found:
        counts = unique_counts(run.compressed.values())[1]
        found = [(run.rounds[-1]["round"], sorted(counts.tolist(), reverse=True)[:1024])]
    return found


def _needed_for_half(counts: Sequence[int]) -> int:
    """How many of the most popular hold half of all.

    >>> _needed_for_half([5, 3, 1, 1])
    1
    """
    total, so_far = sum(counts), 0
    for number, count in enumerate(counts, 1):
        so_far += count
        if 2 * so_far >= total:
            return number
    return len(counts)


def _metric(scores: Mapping[str, Any] | None) -> float | None:
    return scores["metric"] if scores else None


def _percent(share: float | None) -> float | None:
    return None if share is None else 100 * share
