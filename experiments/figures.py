"""Draw the figures of docs/tables: accuracy against bits, and the distribution of sigma.

    python experiments/figures.py

They are drawn from experiments/results. `results.py run` keeps the traces of sigma (sigmas.jsonl) of the
plans in SIGMAS, and `results.py docs --check` finds a figure of other results.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Mapping
from dataclasses import astuple, dataclass
from pathlib import Path
from typing import Any

import targets
from archive import Archive
from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from pwfn.lab.compare.runner import write
from pwfn.lab.compare.table import Line, markdown

FRONTIER, SIGMAS = "frontier", ("alpha_resnet20", "collapse_resnet20")
PANELS = {
    "cifar_resnet20": "ResNet-20",
    "cifar_resnet56": "ResNet-56",
    "cifar_resnet18": "ResNet-18",
    "cifar_vgg16": "VGG-16",
    "cifar_vit_tiny": "ViT, 4 M weights",
}
"""The networks of CIFAR-10, and their titles."""

PUBLISHED = {
    "cifar_vgg16": {
        "LilNetX": ((129_000, 92.6), (76_000, 90.0)),
        "Oktay": ((101_000, 90.0),),
        "MIRACLE": ((417_000, 93.4), (168_000, 90.0)),
        "DeepCABAC": ((960_000, 91.0),),
    }
}
"""Bytes and accuracy that others published, from networks of their own (VGG-16 from 93.4 %)."""

UNFINISHED = "collapse_resnet20"
"""Its runs stop before they have trained what they fixed: their accuracies mean nothing."""

DEPTH = 2.5  # points below the start, where a panel ends
QUANTISERS = "LSQ, LSQ+, APoT, Q-ViT"
TARGETS, ELSEWHERE, QUICK = "PWFN, targets", "PWFN and small, other tables", "quick"
SMALL, OTHERS = "small", "published by others"
KINDS = {SMALL: "v", QUICK: "P", TARGETS: "*", ELSEWHERE: "o", "WFN": "^", "k-means": "D", QUANTISERS: "s"}
"""The marker of each kind, in the order of the legend."""

BINS = 8  # of sigma per octave
STYLE: Any = {"font.size": 8.5, "axes.grid": True, "grid.alpha": 0.2, "legend.frameon": False}
STYLE |= {"axes.spines.right": False, "axes.spines.top": False}
COLOURS = ("#0072b2", "#c65300", "#00855f", "#a8518a", "#8a6a00", "#3a8fc4", "#777777")  # after Okabe and Ito


@dataclass(frozen=True)
class Point:
    """A line of a table: means over its seeds, and the standard deviation of its accuracy."""

    model: str
    table: str
    kind: str
    size: float  # bytes of the file
    top1: float  # percent, as are the next two
    spread: float
    start: float


def points(archive: Archive) -> list[Point]:
    """Every line of every table of test images, except networks before compression and unfinished ones."""
    rows = {target.name for target in targets.read(archive.experiments / "targets.toml")}
    found = []
    for folder in sorted(path for path in (archive.experiments / "results").iterdir() if path.is_dir()):
        for label, facts in archive.rows(folder.name).items():
            if facts[0]["holdout"] or folder.name == UNFINISHED:
                break
            line = Line.of(label, facts[0]["method"], facts)
            size, top1, start = (line.figures[name] for name in ("file_bytes", "top1", "top1_start"))
            if line.method == "baseline" or size is None or top1 is None or start is None:
                continue
            known = {
                "pwfn": ELSEWHERE,
                "conditioned": QUICK,
                "rate": SMALL,
                "wfn": "WFN",
                "kmeans": "k-means",
            }
            kind = known.get(line.method, QUANTISERS)
            if kind == SMALL and not folder.name.startswith(SMALL):  # ablations, in fewer epochs
                kind = ELSEWHERE
            if line.method == "pwfn" and folder.name in rows:
                kind = QUICK if folder.name.endswith("_quick") else TARGETS
            figures = (size.mean, 100 * top1.mean, 100 * (top1.spread or 0.0), 100 * start.mean)
            found.append(Point(facts[0]["model"], folder.name, kind, *figures))
    return found


def frontier(archive: Archive) -> Figure:
    """Accuracy against bytes, one panel per network of :data:`PANELS`."""
    found = points(archive)
    sheet = Figure((7.2, 5.2), layout="constrained")
    columns = min(3, len(PANELS))
    panels = sheet.subplots(math.ceil(len(PANELS) / columns), columns, squeeze=False).flatten()
    for panel, (model, title) in zip(panels, PANELS.items(), strict=False):
        _panel(panel, [point for point in found if point.model == model], PUBLISHED.get(model, {}))
        panel.set_title(title, loc="left")
    for panel in panels[::columns]:
        panel.set_ylabel("top-1, % of the test images")
    handles: dict[str, Any] = {}
    for panel in panels:
        handles |= {label: handle for handle, label in zip(*panel.get_legend_handles_labels(), strict=True)}
    order = [kind for kind in (*KINDS, OTHERS) if kind in handles]
    for panel in panels[len(PANELS) :]:
        panel.set_axis_off()
    sheet.legend([handles[kind] for kind in order], order, loc="outside lower center", ncols=4)
    return sheet


def _panel(panel: Axes, own: list[Point], published: Mapping[str, tuple[tuple[int, float], ...]]) -> None:
    start = max(point.start for point in own)
    for one in {round(point.start, 2) for point in own}:
        panel.axhline(one, color="black", linewidth=0.8, linestyle="--")
    for colour, (kind, marker) in zip(COLOURS, KINDS.items(), strict=True):
        of_kind = [(point.size / 1000, point.top1, point.spread) for point in own if point.kind == kind]
        if of_kind:
            x, y, spread = zip(*sorted(of_kind), strict=True)
            form = f"{marker}-" if kind == SMALL else marker
            size = 8 if marker == "*" else 5
            panel.errorbar(
                x, y, spread, fmt=form, ms=size, mew=0, lw=1, elinewidth=0.8, color=colour, label=kind
            )
    for name, places in published.items():
        for size_bytes, top1 in places:
            panel.plot(size_bytes / 1000, top1, "x", color="#555555", ms=5, linestyle="", label=OTHERS)
            at = (size_bytes / 1000, top1)
            panel.annotate(name, at, (2, 3), textcoords="offset points", fontsize=6.5, rotation=40)
    panel.set_xscale("log")
    low, high = panel.get_xlim()
    doubled = (25, 50, 100, 200, 400, 800, 1600, 3200)
    between = (150, 300, 1200, 2000, 2400)
    shown = doubled if high > 4 * low else (*doubled, *between)
    ticks = sorted(tick for tick in shown if low <= tick <= high)
    panel.set_xticks(ticks, [f"{tick:,}" for tick in ticks])
    panel.minorticks_off()
    others = [top1 - 0.5 for marks in published.values() for _, top1 in marks]
    panel.set_ylim(min([start - DEPTH, *others]), start + 0.4)
    panel.set_xlabel("kB")


def frontier_lines(archive: Archive) -> list[str]:
    """The picture and its caption, for a page in docs/tables."""
    shown = [point for point in points(archive) if point.model in PANELS]
    lost = sum(point.top1 < point.start - DEPTH for point in shown)
    return [
        "![Accuracy against the size of the file for five networks](../frontier.png)",
        "",
        "Left is smaller, up is better. Dashed lines are networks before compression. A point is the mean "
        f"over the seeds of one line of a table; {len(shown)} lines, of which {lost} are more than {DEPTH:g} "
        "points below the start and not shown. Sizes are those of the run, most of them in version 1 of the "
        "format. Training differs from point to point: the tables say how. Crosses are figures that others "
        "published, from networks of their own.",
    ]


def sigma_traces(archive: Archive, name: str) -> list[dict[str, Any]]:
    """The label, settings and traces of sigma of each run of a table, in its order."""
    text = (archive.folder(name) / "sigmas.jsonl").read_text(encoding="utf-8")
    return [json.loads(line) for line in text.splitlines()]


def keep_sigmas(archive: Archive, name: str, tables: Path) -> None:
    """Keep the traces of sigma of a table's runs: at the start and before every fixing."""
    lines = []
    for run in archive.plan(name).runs():
        folder = tables / name / run.place
        settings = run.config.to_dict()
        kept = {
            "posterior": {key: settings["posterior"][key] for key in ("alpha", "cap")},
            "training": {key: settings["training"][key] for key in ("learning_rate", "sigma_learning_rate")},
        }
        seen = [json.loads(text) for text in (folder / "trace.jsonl").read_text("utf-8").splitlines()]
        names = ("moment", "round", "fraction", "sigma")
        before = [own for own in seen if own["moment"] != "after" and "sigma" in own]
        traces = [{key: own[key] for key in names} for own in before]
        lines.append(json.dumps({"label": run.label, "settings": kept, "traces": traces}))
    write(archive.folder(name) / "sigmas.jsonl", "\n".join(lines) + "\n")


def median(sigma: tuple[int, list[int]]) -> float:
    """The middle, in log2, of the bin that holds the median. A bin is an eighth of an octave.

    >>> round(median((-64, [3])), 4)  # 2^-8 to 2^-7.875
    0.0041
    """
    first, counts = sigma
    so_far, position = 0, 0
    while so_far + counts[position] < sum(counts) / 2:
        so_far, position = so_far + counts[position], position + 1
    return float(2 ** ((first + position + 0.5) / BINS))


def sigma_lines(archive: Archive, name: str) -> list[str]:
    """The picture and the table of medians, for a page in docs/tables: one column per run."""
    runs = sigma_traces(archive, name)
    medians = [{trace["round"]: f"{median(trace['sigma']):.2g}" for trace in run["traces"]} for run in runs]
    rounds = sorted({number for own in medians for number in own})
    when = [f"fixing {number}" if number else "start" for number in rounds]
    rows = [[said, *(own.get(n, "–") for own in medians)] for said, n in zip(when, rounds, strict=True)]
    heads = ["median sigma of the free weights", *(run["label"] for run in runs)]
    return [f"![Sigma of the free weights, {name}](../{name}.png)", "", *markdown(heads, rows)]


def sigma_figure(archive: Archive, name: str) -> Figure:
    """The distribution of sigma over the free weights at the start and before every fixing."""
    runs, lowest = sigma_traces(archive, name), -16.5
    rows = math.ceil(len(runs) / 3)
    sheet = Figure((7.2, 0.7 + 1.9 * rows), layout="constrained")
    for panel, run in zip(sheet.subplots(rows, 3, squeeze=False).flatten(), runs, strict=False):
        before = [trace for trace in run["traces"] if trace["moment"] == "before"]
        for trace in run["traces"]:
            x, y = _outline(trace["sigma"], lowest)
            if trace["moment"] == "start":
                panel.plot(x, y, "k--", linewidth=1.1, label="at the start")
                continue
            strength = (before.index(trace) + 1) / len(before)
            label = "before each fixing, later ones darker" if strength == 1 else None
            panel.plot(x, y, color=COLOURS[0], alpha=0.2 + 0.8 * strength, linewidth=1.2, label=label)
        cap = run["settings"]["posterior"]["cap"]
        panel.axvline(math.log2(cap), color=COLOURS[1], linewidth=0.9, label=f"cap S = {cap:g}")
        panel.set_title(_panel_title(run["settings"]), loc="left")
        panel.set_xlim(lowest - 0.2, 0)
        panel.set_xticks([-16, -12, -8, -4], ["2⁻¹⁶", "2⁻¹²", "2⁻⁸", "2⁻⁴"])
        panel.set_ylim(bottom=0)
        panel.set_xlabel("sigma")
        panel.set_ylabel("free weights, % per bin")
    sheet.legend(*sheet.axes[0].get_legend_handles_labels(), loc="outside lower center", ncols=3)
    return sheet


def _panel_title(settings: Mapping[str, Any]) -> str:
    alpha, rate = settings["posterior"]["alpha"], settings["training"]["sigma_learning_rate"]
    return f"alpha {f'2^{math.log2(alpha):g}' if alpha else 0}, rate {rate:g}"


def _outline(sigma: tuple[int, list[int]], least: float) -> tuple[list[float], list[float]]:
    """Percent of the weights in each bin, zero at both ends; what is below ``least`` is collected there."""
    first, counts = sigma
    shares: dict[int, float] = {}
    for place, count in enumerate(counts, first):
        held = max(place, math.ceil(least * BINS))
        shares[held] = shares.get(held, 0.0) + 100 * count / sum(counts)
    places = range(min(shares) - 1, max(shares) + 2)
    return [(place + 0.5) / BINS for place in places], [shares.get(place, 0.0) for place in places]


def fingerprints(archive: Archive) -> dict[str, str]:
    """For every picture a digest of what it shows; the picture carries it as its description."""
    content: dict[str, Any] = {name: sigma_traces(archive, name) for name in SIGMAS}
    content[FRONTIER] = [astuple(point) for point in points(archive)]
    return {name: hashlib.sha256(json.dumps(own).encode()).hexdigest() for name, own in content.items()}


def main() -> None:
    """Draw all of them."""
    archive = Archive()
    for name, digest in fingerprints(archive).items():
        with rc_context(STYLE):
            sheet = frontier(archive) if name == FRONTIER else sigma_figure(archive, name)
            path = archive.root / "docs" / f"{name}.png"
            sheet.savefig(path, dpi=160, metadata={"Description": digest})
        print(path)


if __name__ == "__main__":
    main()
