"""Draw docs/frontier.png: accuracy on the test images against bits, of all tables that have both.

    python experiments/frontier.py

A point is a line of a table in experiments/results: the mean of its seeds. Tables of held-out images are not
in it. What the page says below the figure is made by `python experiments/table.py`.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import targets

from pwfn.errors import FileError, PwfnError
from pwfn.report.figures import style

if TYPE_CHECKING:
    from matplotlib.artist import Artist
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure as Sheet

ROOT = Path(__file__).resolve().parent.parent
PICTURE = Path("docs") / "frontier.png"
PANELS = {"cifar_resnet18": "resnet18", "cifar_resnet20": "resnet20", "cifar_vit_tiny": "vit_tiny"}
"""The networks that several methods were tried on, and whose target each has."""

DEPTH = 2.5
"""Points below the start, where a panel ends; a network that is lost lies far below."""

QUANTISERS = "LSQ, LSQ+, APoT, Q-ViT"
PWFN_ROWS, PWFN_ELSE, PWFN_QUICK = "PWFN, rows of targets", "PWFN, in other tables", "PWFN, quick"
KINDS = {
    PWFN_ROWS: ("*", 9.0),
    PWFN_ELSE: ("o", 4.5),
    PWFN_QUICK: ("P", 6.0),
    "WFN": ("^", 5.5),
    "k-means": ("D", 4.5),
    QUANTISERS: ("s", 4.5),
}
"""Marker and size of each kind, in the order of the legend."""

HOW_TO_READ = (
    "To the left is smaller, up is better; the dashed line is the network before, the shaded corner what its "
    "target asks of accuracy and bits."
)
ALT = "Three clouds of points, accuracy against bits a weight; the rows of targets are at their left."


@dataclass(frozen=True)
class Point:
    """A line of a table: means over its seeds, and the standard deviation of its accuracy."""

    model: str
    table: str
    kind: str
    bits: float
    top1: float  # in percent, as are the next two
    spread: float
    start: float


def points(experiments: Path) -> list[Point]:
    """Every line of every table of test images, but for the networks as they came."""
    rows = {path.stem for path in (experiments / "rows").glob("*.toml")}
    found = []
    for path in sorted((experiments / "results").glob("*/table.json")):
        table = json.loads(path.read_text(encoding="utf-8"))
        if table["holdout"]:
            continue
        for part in table["parts"]:
            for line in part["lines"]:
                if line["method"] == "baseline" or not line["seeds"]:
                    continue
                figures = line["figures"]
                found.append(
                    Point(
                        model=part["model"],
                        table=path.parent.name,
                        kind=_kind(line["method"], path.parent.name, rows),
                        bits=figures["entropy_bits"]["mean"],
                        top1=100 * figures["top1"]["mean"],
                        spread=100 * (figures["top1"]["spread"] or 0.0),
                        start=100 * figures["top1_start"]["mean"],
                    )
                )
    return found


def _kind(method: str, folder: str, rows: Iterable[str]) -> str:
    if method != "pwfn":
        return {"wfn": "WFN", "kmeans": "k-means"}.get(method, QUANTISERS)
    if folder not in rows:
        return PWFN_ELSE
    return PWFN_QUICK if folder.endswith("_quick") else PWFN_ROWS


def drawing(experiments: Path) -> style.Figure:
    """The figure; a panel for each network of :data:`PANELS`."""
    found = points(experiments)
    asked = {target.name: target for target in targets.read(experiments / "targets.toml")}
    if lacking := _lacking(found):
        raise FileError(
            f"{experiments / 'results' / lacking[0]}: has no results: python experiments/results.py run "
            f"{lacking[0]} makes them"
        )

    def draw(sheet: Sheet) -> None:
        panels = sheet.subplots(1, len(PANELS))
        for panel, (model, name) in zip(panels, PANELS.items(), strict=True):
            own = [point for point in found if point.model == model]
            start = next(point.start for point in own if point.table == name)
            _panel(panel, own, asked[name], start)
            panel.set_title(asked[name].label.strip("`"))
        panels[0].set_ylabel("top-1, % of the test images")
        handles: dict[str, Artist] = {}
        for panel in panels:
            handles |= {
                str(label): handle for handle, label in zip(*panel.get_legend_handles_labels(), strict=True)
            }
        order = [kind for kind in KINDS if kind in handles]
        sheet.legend([handles[kind] for kind in order], order, loc="outside lower center", ncols=3)

    return style.Figure(
        key="frontier",
        title="Accuracy against bits",
        how_to_read=HOW_TO_READ,
        alt=ALT,
        draw=draw,
        height=3.6,
    )


def caption(experiments: Path) -> str:
    """The picture and what is to be said of it, as seen from a page of docs."""
    found = points(experiments)
    if _lacking(found):
        return "Not measured yet."
    shown = [point for point in found if point.model in PANELS]
    lost = sum(point.top1 < point.start - DEPTH for point in shown)
    below = (
        f"{HOW_TO_READ} A point is the mean of a line's seeds, the stroke through it their standard "
        f"deviation; {len(shown)} lines of the tables of test images, of which {lost} lie more than "
        f"{DEPTH:g} points below the start, where a panel ends. A few settings are in two tables. Training "
        "differs from point to point: the tables say how."
    )
    return f"![{ALT}]({PICTURE.name})\n\n{below}"


def fingerprint(experiments: Path) -> str:
    """Of all points: the picture carries it, so that one of other results is found out."""
    plain = [dataclasses.astuple(point) for point in points(experiments)]
    return hashlib.sha256(json.dumps(plain).encode()).hexdigest()


def _lacking(found: Sequence[Point]) -> list[str]:
    """The rows of :data:`PANELS` that have no results."""
    return [name for name in PANELS.values() if not any(point.table == name for point in found)]


def _panel(panel: Axes, own: Sequence[Point], target: targets.Target, start: float) -> None:
    least = 100 * target.least(start / 100)
    if target.bits is not None:
        panel.fill_between(
            [0.5, target.bits], least, start + 1, color=style.SERIES[2], alpha=0.12, linewidth=0
        )
    panel.axhline(start, color=style.INK, linewidth=0.8, linestyle="--")
    for number, (kind, (marker, size)) in enumerate(KINDS.items()):
        of_kind = [point for point in own if point.kind == kind]
        if of_kind:
            panel.errorbar(
                [point.bits for point in of_kind],
                [point.top1 for point in of_kind],
                [point.spread for point in of_kind],
                fmt=marker,
                markersize=size,
                markeredgewidth=0,
                elinewidth=0.8,
                color=style.SERIES[number],
                label=kind,
            )
    panel.set_xscale("log", base=2)
    panel.set_xlim(0.8, 20)
    panel.set_xticks([1, 2, 4, 8, 16], ["1", "2", "4", "8", "16"])
    panel.set_ylim(start - DEPTH, start + 0.4)
    panel.set_xlabel("bits a weight")


def main() -> int:
    """The command; its status."""
    try:
        experiments = ROOT / "experiments"
        style.png(drawing(experiments), ROOT / PICTURE, note=fingerprint(experiments))
    except PwfnError as error:
        print(f"frontier: {error}", file=sys.stderr)
        return error.exit_status
    print(ROOT / PICTURE)
    return 0


if __name__ == "__main__":
    sys.exit(main())
