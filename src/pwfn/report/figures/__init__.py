"""The paper's figures, and ours, from what runs have left in their folders."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from pwfn.file.storage import make_folder
from pwfn.report.figures import canvas, course, distances, layers, sigmas, sizes
from pwfn.report.figures.canvas import STYLE, Drawing, Table
from pwfn.report.reading import RunData, names

__all__ = ["STYLE", "Figure", "figures", "save_png"]


@dataclass(frozen=True)
class Figure:
    """A figure ready for a page.

    The SVG is one element with ``role="img"`` and the text alternative as its label. Its letters and lines
    are in ``currentColor``, its colours CSS variables (:data:`STYLE` sets them for light and for dark), and
    its ids begin with the key.
    """

    key: str
    title: str
    how_to_read: str
    alt: str
    svg: str
    table: Table | None  # the figures behind it: a header, and rows


def figures(runs: Sequence[RunData]) -> list[Figure]:
    """All that these runs' data allow: first those of all runs together, then those of each."""
    return [_figure(drawing) for drawing in drawings(runs)]


def _figure(drawing: Drawing) -> Figure:
    clean, table = canvas.clean, drawing.table
    if table is not None:
        header, rows = table
        table = tuple(map(clean, header)), tuple(tuple(map(clean, row)) for row in rows)
    svg = canvas.svg(drawing)
    return Figure(drawing.key, clean(drawing.title), drawing.how_to_read, clean(drawing.alt), svg, table)


def save_png(runs: Sequence[RunData], folder: str | Path) -> list[Path]:
    """The same figures as pictures on white, ``KEY.png`` each; returns their paths."""
    make_folder(folder)
    written = []
    for drawing in drawings(runs):
        path = Path(folder) / f"{drawing.key}.png"
        canvas.png(drawing, path)
        written.append(path)
    return written


def drawings(runs: Sequence[RunData]) -> list[Drawing]:
    """What there is to draw, in the order of a page."""
    labels = names(runs)
    shared = (
        sizes.trade(runs, labels),
        course.course(runs, labels),
        sizes.files(runs, labels),
        sigmas.collapse(runs, labels),
    )
    found = [drawing for drawing in shared if drawing is not None]
    for number, (run, label) in enumerate(zip(runs, labels, strict=True), 1):
        for drawing in _of_one(run):
            if len(runs) > 1:
                drawing = replace(
                    drawing,
                    key=f"{drawing.key}-{number}",
                    title=f"{drawing.title}: {canvas.short(label, 60)}",
                )
            found.append(drawing)
    return found


def _of_one(run: RunData) -> Iterator[Drawing]:
    of_run = (
        course.schedule(run),
        distances.distances(run),
        sigmas.means_and_sigmas(run),
        sigmas.starting_sigma(run),
        layers.attention(run),
        layers.channels(run),
        layers.layer_map(run),
        sizes.file_bytes(run),
    )
    yield from (drawing for drawing in of_run if drawing is not None)
