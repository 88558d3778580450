"""The figures of one run or of several, from what they left in their folders."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from pwfn.file.storage import make_folder
from pwfn.report.figures import accuracy, layers, sigma, style, training
from pwfn.report.figures.style import Figure
from pwfn.report.formats import short
from pwfn.report.reading import RunData, names

__all__ = ["Figure", "figures", "save_png"]


def figures(runs: Sequence[RunData]) -> list[Figure]:
    """All that the data of these runs allow: first those of all runs together, then those of each."""
    labels = names(runs)
    found: list[Figure | None] = [
        accuracy.against_size(runs, labels),
        training.by_round(runs, labels),
        sigma.by_round(runs, labels),
    ]
    for number, (run, label) in enumerate(zip(runs, labels, strict=True), 1):
        own = (
            training.schedule(run),
            training.distances(run),
            sigma.mu_and_sigma(run),
            layers.channels(run),
            layers.by_bits(run),
        )
        found += [
            replace(figure, key=f"{figure.key}-{number}", title=f"{figure.title}: {short(label, 60)}")
            if figure is not None and len(runs) > 1
            else figure
            for figure in own
        ]
    return [figure for figure in found if figure is not None]


def save_png(runs: Sequence[RunData], folder: str | Path) -> list[Path]:
    """The same figures as pictures on white, ``KEY.png`` each; returns their paths."""
    make_folder(folder)
    written = []
    for figure in figures(runs):
        written.append(Path(folder) / f"{figure.key}.png")
        style.png(figure, written[-1])
    return written
