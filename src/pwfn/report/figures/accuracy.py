"""What accuracy the bytes buy, and how far confidence can be trusted."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from pwfn.evaluate.calibration import Bin, calibration_error
from pwfn.evaluate.targets import pareto
from pwfn.report.figures import style
from pwfn.report.figures.style import DASHED, INK, MARKERS, SERIES, Figure
from pwfn.report.formats import clean, short, size, thousands
from pwfn.report.reading import RunData, measure

if TYPE_CHECKING:
    from matplotlib.figure import Figure as Sheet


def against_size(runs: Sequence[RunData], names: Sequence[str]) -> Figure | None:
    """Accuracy against bytes: the networks before in fp32, the files, the states on the way, and rivals.

    Of one run also the sizes of other formats, whose accuracy nobody measured.
    """
    scored = [run for run in runs if run.after is not None]
    if not scored:
        return None
    what = measure(scored)
    files = [
        (name, run.after, run.file.file_bytes)
        for run, name in zip(runs, names, strict=True)
        if run.after is not None
    ]
    best = pareto([(after, file_bytes) for _, after, file_bytes in files])
    front = [file for file, is_best in zip(files, best, strict=True) if is_best]
    originals = sorted({(run.file.fp32_bytes, run.before) for run in scored if run.before is not None})
    states = [
        (state.file_bytes, 100 * state.accuracy)
        for run in runs
        for state in run.states
        if math.isfinite(state.accuracy) and state.file_bytes
    ]
    only = scored[0] if len(scored) == 1 else None
    rivals = only.rivals if only is not None and what == "accuracy" else ()
    formats = {key: n for key, n in only.file.rivals().items() if key != "fp32"} if only is not None else {}

    def draw(sheet: Sheet) -> None:
        panel = sheet.subplots()
        for key, n in formats.items():
            panel.axvline(n, color=INK, linewidth=0.9, linestyle=":", alpha=0.6)
            place = ("data", "axes fraction")
            panel.annotate(key, (n, 1), (3, -2), place, "offset points", va="top", fontsize=8.5)
        for number, rival in enumerate(rivals):
            mark = MARKERS[1 + number % (len(MARKERS) - 1)]
            look: dict[str, Any] = {"color": SERIES[1 + number % (len(SERIES) - 1)], "markersize": 6}
            look |= {"markerfacecolor": "none", "label": clean(rival.label)[:26]}
            panel.plot([rival.file_bytes], [100 * rival.accuracy], mark, **look)
        if states:
            label = "other states"
            panel.plot(*zip(*states, strict=True), "o", color=INK, alpha=0.35, markeredgewidth=0, label=label)
        for number, (fp32_bytes, before) in enumerate(originals):
            label = "before, fp32" if number == 0 else "_"  # one entry in the legend
            panel.plot([fp32_bytes], [100 * before], "s", color=INK, markersize=6, label=label)
        x, y = zip(*sorted((file_bytes, 100 * after) for _, after, file_bytes in front), strict=True)
        panel.plot(x, y, color=INK, linewidth=0.9, linestyle=DASHED, drawstyle="steps-post")
        for number, ((name, after, file_bytes), is_best) in enumerate(zip(files, best, strict=True), 1):
            color = SERIES[(number - 1) % len(SERIES)]
            label = f"{number}  {short(name)}" if len(files) > 1 else "this file"
            look = {"color": color, "markersize": 8, "markerfacecolor": color if is_best else "none"}
            panel.plot([file_bytes], [100 * after], "o", label=label, **look)
            if len(files) > 1:
                at = (file_bytes, 100 * after)
                panel.annotate(str(number), at, xytext=(6, 5), textcoords="offset points", fontsize=8.5)
        panel.set(xscale="log", xlabel="bytes")
        panel.margins(x=0.12, y=0.12)
        style.logarithmic(panel.xaxis, thousands)
        style.accuracy_axis(panel, what)
        sheet.legend(loc="outside lower left", ncols=2)

    told = [f"{name}, {after:.2%} at {size(file_bytes)}" for name, after, file_bytes in front]
    told += [f"before compression {accuracy:.2%} at {size(n)} in fp32" for n, accuracy in originals]
    told += [f"{rival.label} {rival.accuracy:.2%} at {size(rival.file_bytes)}" for rival in rivals]
    told += [f"{key} would take {size(n)}" for key, n in formats.items()]
    several = f"Of {len(files)} runs, those that no other beats in both {what} and size: "
    return Figure(
        key="accuracy",
        title=f"{what.capitalize()} against size",
        how_to_read="Up and to the left is better."
        + (" The dashed line joins the runs that no other beats in both." if len(scored) > 1 else "")
        + (" Small dots are the network after each round, or at each step that was tried." if states else "")
        + (" Hollow marks are other methods of the same table." if rivals else "")
        + (" Dotted lines are sizes of other formats, whose accuracy was not measured." if formats else ""),
        alt=f"{several if len(files) > 1 else ''}{'; '.join(told)}.",
        draw=draw,
        height=2.9 + 0.2 * math.ceil((len(scored) + len(rivals) + bool(states) + bool(originals)) / 2),
        width=style.NARROW,
        table=(
            ("", what, "bytes"),
            tuple((rival.label, f"{rival.accuracy:.2%}", f"{rival.file_bytes:,}") for rival in rivals),
        )
        if rivals
        else None,
    )


def reliability(diagrams: Mapping[str, Sequence[Mapping[str, Any]]], key: str) -> Figure | None:
    """Accuracy against confidence, one panel per set of predictions, all on the same scale.

    A diagram is a list of bins, each with the fields of :class:`pwfn.evaluate.calibration.Bin`.
    """
    found = {str(name): tuple(Bin(**each) for each in bins) for name, bins in diagrams.items()}
    if not found:
        return None
    ends = [end for bins in found.values() for b in bins for end in (b.confidence, b.accuracy)]
    low = min(math.floor(10 * min(ends, default=0.0)) / 10, 0.9)
    rows = math.ceil(len(found) / 3)

    def draw(sheet: Sheet) -> None:
        panels = sheet.subplots(rows, 3, squeeze=False, sharex=True, sharey=True)
        for panel, (name, bins) in zip(panels.flatten(), found.items(), strict=False):
            x, y = [b.confidence for b in bins], [b.accuracy for b in bins]
            panel.plot([low, 1], [low, 1], color=INK, linewidth=0.8, linestyle=DASHED)
            style.strokes(panel, x, x, y, color=SERIES[1], linewidth=1.2)
            panel.plot(x, y, "o", color=SERIES[0], clip_on=False)
            panel.set_title(short(name, 28))
            edges = (low - 0.02 * (1 - low), 1 + 0.02 * (1 - low))
            panel.set(xlim=edges, ylim=edges, aspect="equal")
        for number, panel in enumerate(panels.flatten()):
            panel.set_visible(number < len(found))
            if number + 3 >= len(found):
                panel.set_xlabel("confidence")
                panel.xaxis.set_tick_params(labelbottom=True)
        for row in panels:
            row[0].set_ylabel("accuracy")

    told = "; ".join(f"{name} {calibration_error(bins):.4f}" for name, bins in found.items())
    return Figure(
        key=key,
        title="Reliability",
        how_to_read="Each dot is a bin of examples of similar confidence. On the dashed line the network is "
        "right as often as it says, below it less often.",
        alt=f"Accuracy against confidence in bins of equal mass; calibration error: {told}.",
        draw=draw,
        height=0.5 + 2.3 * rows,
    )
