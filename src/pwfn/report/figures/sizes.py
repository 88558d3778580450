"""Bytes: where they are in a file, and what accuracy they buy."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from pwfn.evaluate.inspect import FileFacts, inspect
from pwfn.evaluate.targets import pareto
from pwfn.report.figures.canvas import INK, SERIES, Drawing, accuracies, short, thousands
from pwfn.report.reading import RunData

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure as Sheet

_PARTS = {
    "index": "indices of the weights",
    "table": "frequency tables",
    "codebook": "codebook",
    "posterior": "sigmas",
    "untouched": "tensors left as they are",
    "header": "header: layout and record",
    "padding": "padding",
}


def file_bytes(run: RunData) -> Drawing:
    """A bar for each part of the file."""
    facts = inspect(run.file, zstd=False)
    parts = {label: size for part, label in _PARTS.items() if (size := getattr(facts, f"{part}_bytes"))}

    def draw(sheet: Sheet) -> None:
        panel = sheet.subplots()
        sizes, places = list(parts.values()), range(len(parts))
        panel.barh(places, sizes, color=SERIES[0], height=0.65)
        panel.set_yticks(places, list(parts))
        panel.invert_yaxis()
        panel.grid(axis="y", visible=False)
        panel.spines["left"].set_visible(False)
        panel.tick_params(axis="y", length=0)
        for place, size in zip(places, sizes, strict=True):
            panel.annotate(
                f"{size:,} ({size / facts.file_bytes:.1%})",
                (size, place),
                xytext=(4, 0),
                textcoords="offset points",
                va="center",
                fontsize=8.5,
            )
        panel.set_xlim(0, 1.3 * max(sizes))
        panel.set_xlabel("bytes")
        _bytes_axis(panel)

    largest = max(parts, key=lambda label: parts[label])
    return Drawing(
        key="bytes",
        title="Where the bytes of the file are",
        how_to_read="The bars add up to the size of the file: indices are the compressed weights "
        "themselves, the rest is what it takes to read them and what was never compressed.",
        alt=f"Of {facts.file_bytes:,} bytes the {largest} take {parts[largest]:,} "
        f"({parts[largest] / facts.file_bytes:.0%}); the same network in fp32 has {facts.fp32_bytes:,} "
        "bytes.",
        draw=draw,
        height=0.8 + 0.27 * len(parts),
        table=(
            ("part", "bytes", "share"),
            (
                *((label, f"{size:,}", f"{size / facts.file_bytes:.1%}") for label, size in parts.items()),
                ("file", f"{facts.file_bytes:,}", "100.0%"),
            ),
        ),
    )


def _bytes_axis(panel: Axes) -> None:
    from matplotlib.ticker import FuncFormatter, MaxNLocator

    panel.xaxis.set_major_locator(MaxNLocator(5))
    panel.xaxis.set_major_formatter(FuncFormatter(lambda value, _: thousands(value)))


def files(runs: Sequence[RunData], names: Sequence[str]) -> Drawing | None:
    """The files of several runs, part by part on one another."""
    if len(runs) < 2:
        return None
    found = [inspect(run.file, zstd=False) for run in runs]
    groups = {
        "indices and tables": [facts.index_bytes + facts.table_bytes for facts in found],
        "codebooks": [facts.codebook_bytes for facts in found],
        "sigmas": [facts.posterior_bytes for facts in found],
        "tensors left as they are": [facts.untouched_bytes for facts in found],
        "header and padding": [facts.header_bytes + facts.padding_bytes for facts in found],
    }

    def draw(sheet: Sheet) -> None:
        panel = sheet.subplots()
        done, places = [0] * len(found), range(len(found))
        for number, (label, sizes) in enumerate(groups.items()):
            panel.barh(places, sizes, left=done, color=SERIES[number], height=0.6, label=label)
            done = [before + size for before, size in zip(done, sizes, strict=True)]
        for place, facts in zip(places, found, strict=True):
            panel.annotate(
                f"{facts.file_bytes:,}",
                (facts.file_bytes, place),
                xytext=(4, 0),
                textcoords="offset points",
                va="center",
                fontsize=8.5,
            )
        panel.set_yticks(places, [short(name, 24) for name in names])
        panel.invert_yaxis()
        panel.grid(axis="y", visible=False)
        panel.set_xlim(0, 1.15 * max(done))
        panel.set_xlabel("bytes")
        _bytes_axis(panel)
        sheet.legend(loc="outside lower center", ncols=3)

    return Drawing(
        key="files",
        title="Where the bytes of the files are",
        how_to_read="Each bar is a file on disk, cut into its parts; the shorter the first piece, the "
        "better the weights themselves are compressed.",
        alt="; ".join(f"{name}: {_told(facts)}" for name, facts in zip(names, found, strict=True)) + ".",
        draw=draw,
        height=1.2 + 0.34 * len(found),
        table=(
            ("run", *groups, "file"),
            tuple(
                (name, *(f"{sizes[i]:,}" for sizes in groups.values()), f"{found[i].file_bytes:,}")
                for i, name in enumerate(names)
            ),
        ),
    )


def _told(facts: FileFacts) -> str:
    return f"{facts.file_bytes:,} bytes, {facts.index_bytes + facts.table_bytes:,} of them for the weights"


def trade(runs: Sequence[RunData], names: Sequence[str]) -> Drawing | None:
    """Accuracy against bytes on disk: the runs, their states where they were kept, and the best of all."""
    points = [
        (name, run.record["after"]["metric"], run.record["file_bytes"])
        for run, name in zip(runs, names, strict=True)
        if run.record.get("after") and run.record["after"]["metric"] is not None
    ]
    states = [
        (state["metric"], state["file_bytes"])
        for run in runs
        for state in run.record.get("states") or ()
        if state["metric"] is not None
    ]
    if len(points) + len(states) < 2 or not points:
        return None
    best = pareto([(accuracy, size) for _, accuracy, size in points])
    rank = {name: number for number, (name, *_) in enumerate(points, 1)}

    def draw(sheet: Sheet) -> None:
        panel = sheet.subplots()
        if states:
            panel.plot(
                [size for _, size in states],
                [100 * accuracy for accuracy, _ in states],
                "o",
                color=INK,
                alpha=0.35,
                markersize=4,
                markeredgewidth=0,
                label="states after each round",
            )
        front = sorted((size, accuracy) for (_, accuracy, size), on in zip(points, best, strict=True) if on)
        panel.plot(
            [size for size, _ in front],
            [100 * accuracy for _, accuracy in front],
            color=INK,
            linewidth=0.9,
            linestyle=(0, (4, 3)),
            drawstyle="steps-post",
        )
        for (name, accuracy, size), is_best in zip(points, best, strict=True):
            color = SERIES[(rank[name] - 1) % len(SERIES)]
            fill = color if is_best else "none"
            label = f"{rank[name]}  {short(name)}"
            panel.plot(
                [size], [100 * accuracy], "o", color=color, markersize=7, markerfacecolor=fill, label=label
            )
            panel.annotate(
                str(rank[name]),
                (size, 100 * accuracy),
                xytext=(6, 5),
                textcoords="offset points",
                fontsize=8.5,
            )
        panel.set_xscale("log")
        panel.margins(x=0.12, y=0.12)
        _log_bytes(panel)
        accuracies(panel)
        panel.set_xlabel("bytes on disk")
        panel.set_ylabel("images right, %")
        sheet.legend(loc="outside right upper")

    leaders = [name for (name, *_), on in zip(points, best, strict=True) if on]
    return Drawing(
        key="pareto",
        title="Accuracy against bytes on disk",
        how_to_read="Up and to the left is better: filled marks, joined by the dashed line, are runs that "
        "no other beats in both"
        + ("; small dots are the networks as they would have been after each round." if states else "."),
        alt=(
            f"Of {len(points)} runs those that no other beats in both accuracy and size: "
            if len(points) > 1
            else "One run: "
        )
        + "; ".join(
            f"{name}, {accuracy:.2%} at {size:,} bytes" for name, accuracy, size in points if name in leaders
        )
        + (f"; beside them {len(states)} states after rounds." if states else "."),
        draw=draw,
        height=3.2,
        table=(
            ("run", "accuracy", "bytes on disk", "beaten by no other"),
            tuple(
                (name, f"{accuracy:.2%}", f"{size:,}", "yes" if on else "no")
                for (name, accuracy, size), on in zip(points, best, strict=True)
            ),
        ),
    )


def _log_bytes(panel: Axes) -> None:
    from matplotlib.ticker import FuncFormatter, LogLocator, NullLocator

    low, high = panel.get_xlim()
    panel.xaxis.set_major_locator(LogLocator(subs=(1, 1.5, 2, 3, 5, 7) if high < 8 * low else (1, 3)))
    panel.xaxis.set_minor_locator(NullLocator())
    panel.xaxis.set_major_formatter(FuncFormatter(lambda value, _: thousands(value)))
