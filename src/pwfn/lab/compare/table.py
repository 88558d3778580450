"""The table of a plan: one line per network and row, averaged over seeds, as Markdown and JSON."""

from __future__ import annotations

import math
import statistics
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from pwfn.lab.compare import paper
from pwfn.lab.compare.paper import PaperLine
from pwfn.lab.compare.plan import Plan, Run

FIGURES = (
    *("top1_start", "top1", "top1_ensemble", "entropy_bits", "unique", "inner_entropy_bits", "inner_unique"),
    *("file_bytes", "fp32_bytes", "codebooks", "epochs", "hours"),
)
"""What is averaged over seeds."""

_SIGNS = {"yes": "✓", "no": "✗", "output": "out", "none": "–", True: "✓", False: "✗", None: "–"}
_PARTS = ("layer", "channel", "attention")
_NOTHING = "–"


@dataclass(frozen=True)
class Figure:
    """A figure over seeds: the mean and, for several, the standard deviation (n - 1).

    >>> Figure.of([1.0, 2.0, 4.0])
    Figure(mean=2.3333333333333335, spread=1.5275252316519468)
    >>> Figure.of([3.0])
    Figure(mean=3.0, spread=None)
    """

    mean: float
    spread: float | None

    @classmethod
    def of(cls, values: Sequence[float]) -> Figure | None:
        """Of the values of all seeds; None where there are none."""
        if not values:
            return None
        return cls(statistics.fmean(values), statistics.stdev(values) if len(values) > 1 else None)

    def shown(self, form: str, scale: float = 1.0) -> str:
        """``mean ± spread`` in a format.

        >>> Figure(0.905, 0.007).shown(".2f", 100)
        '90.50 ± 0.70'
        """
        spread = f" ± {scale * self.spread:{form}}" if self.spread else ""
        return f"{scale * self.mean:{form}}{spread}"


@dataclass(frozen=True)
class Line:
    """A row of the table for one network."""

    label: str
    method: str
    seeds: tuple[int, ...]  # of the figures
    figures: Mapping[str, Figure | None]
    separate: Mapping[str, str]  # whether layers, channels, heads have codebooks of their own
    paper: PaperLine | None

    @classmethod
    def of(
        cls, label: str, method: str, results: Sequence[Mapping[str, Any]], paper: PaperLine | None = None
    ) -> Line:
        """From the results of its seeds."""
        facts = [{**own, "hours": own["seconds"] / 3600} for own in results]
        return cls(
            label=label,
            method=method,
            seeds=tuple(own["seed"] for own in facts),
            figures={
                name: Figure.of([own[name] for own in facts if own[name] is not None]) for name in FIGURES
            },
            separate=facts[0]["separate"] if facts else {},
            paper=paper,
        )


@dataclass(frozen=True)
class Part:
    """The lines of one network."""

    model: str
    paper: str | None  # the paper's network whose figures are shown too
    lines: tuple[Line, ...]


@dataclass(frozen=True)
class Table:
    """All networks, what is missing and why, and where the rest was measured."""

    data: str
    holdout: int  # training images that were held out and scored
    samples: int
    parts: tuple[Part, ...]
    missing: Mapping[str, str]  # runs without figures, and why
    measured_on: tuple[str, ...]
    commits: tuple[str, ...]

    @property
    def status(self) -> int:
        """Of the command: 1 where a run is missing."""
        return int(bool(self.missing))

    def to_dict(self) -> dict[str, Any]:
        """For JSON."""
        return {**asdict(self), "source_of_paper": paper.tables()["source"]}


def make_table(plan: Plan, results: Mapping[str, Mapping[str, Any]], notes: Mapping[str, str]) -> Table:
    """The table of a plan, from results and from reasons why there are none, both by the run's name."""
    runs = plan.runs()
    found = [results[run.name] for run in runs if run.name in results]
    parts = []
    for network in plan.networks:
        rows: dict[str, list[Run]] = {}
        for run in runs:
            if run.network is network:
                rows.setdefault(run.label, []).append(run)
        lines = [
            Line.of(
                label,
                own[0].row.method,
                [results[run.name] for run in own if run.name in results],
                own[0].paper_line,
            )
            for label, own in rows.items()
        ]
        parts.append(Part(network.name, network.paper, tuple(lines)))
    return Table(
        data=plan.data,
        holdout=plan.holdout,
        samples=plan.samples,
        parts=tuple(parts),
        missing={str(run): notes[run.name] for run in runs if run.name in notes},
        measured_on=machines(found),
        commits=commits(found),
    )


def machines(results: Iterable[Mapping[str, Any]]) -> tuple[str, ...]:
    """Every machine that results were measured on, once."""
    return tuple(sorted({f"{facts['device']}, torch {facts['versions']['torch']}" for facts in results}))


def commits(results: Iterable[Mapping[str, Any]]) -> tuple[str, ...]:
    """Every commit that results were made at, once, abbreviated."""
    return tuple(sorted({facts["commit"][:7] for facts in results if facts["commit"]}))


def lines(table: Table) -> list[str]:
    """The table as Markdown, for each network, and notes on it."""
    text: list[str] = []
    for part in table.parts:
        held = f", {table.holdout:,} training images held out" if table.holdout else ""
        text += [f"### {part.model}, {table.data}{held}", ""]
        text += [*markdown(HEADS, [cells(line) for line in part.lines], (0, 1)), ""]
        printed = [paper_cells(line.label, line.paper) for line in part.lines if line.paper is not None]
        if printed:
            text += [f"In the paper ({paper.tables()['data']}, {part.paper}; not measured here):", ""]
            text += [*markdown(PAPER_HEADS, printed, (0, 1, 2)), ""]
    text.append(legend(table.holdout, table.samples))
    if any(line.paper for part in table.parts for line in part.lines):
        text += ["", f"Source of the paper's figures: {paper.tables()['source']}."]
    if table.measured_on:
        made = f" Commits: {', '.join(table.commits)}." if table.commits else ""
        text += ["", f"Measured on: {'; '.join(table.measured_on)}.{made}"]
    if table.missing:
        text += ["", "Missing:", ""]
        text += [f"- {_plain(run)}: {_plain(why)}" for run, why in table.missing.items()]
    return text


def legend(holdout: int, samples: int, *, more: bool = True) -> str:
    """What the columns mean; without ``more``, only those of accuracy, size and bits."""
    on = "held-out images" if holdout else "test images"
    draws = f" In brackets: the mean prediction of {samples} draws." if samples else ""
    others = (
        " Inner bits: without the first and last layer and without biases. Own codebooks: for every layer, "
        "input channel (out: output channel) and attention head."
    )
    return (
        f"Top-1 in percent of the {on}, and bytes, of the `.pwfn` file, loaded again.{draws} Bits: entropy "
        "per weight of all weights and biases of convolution and linear layers in one pool."
        f"{others if more else ''} ± is the standard deviation over seeds (n - 1)."
    )


HEADS = (
    *("method", "own codebooks: layer, in-ch., attn.", "top-1 (ensemble)", "bits", "inner bits", "unique"),
    *("bytes", "smaller than fp32", "epochs", "seeds"),
)
PAPER_HEADS = (
    *("row above", "in the paper", "own codebooks", "top-1 (ensemble)", "bits", "unique", "epochs"),
)


def cells(line: Line) -> list[str]:
    """One row of a table with :data:`HEADS`."""

    def shown(name: str, form: str, scale: float = 1.0) -> str:
        figure = line.figures[name]
        return figure.shown(form, scale) if figure else _NOTHING

    drawn = f" ({shown('top1_ensemble', '.2f', 100)})" if line.figures["top1_ensemble"] else ""
    file, whole = line.figures["file_bytes"], line.figures["fp32_bytes"]
    times = f"{math.floor(10 * whole.mean / file.mean) / 10:.1f}×" if file and whole else _NOTHING
    return [
        line.label,
        " ".join(_SIGNS[line.separate.get(part)] for part in _PARTS),
        shown("top1", ".2f", 100) + drawn,
        shown("entropy_bits", ".2f"),
        shown("inner_entropy_bits", ".2f"),
        shown("unique", ",.0f"),
        shown("file_bytes", ",.0f"),
        times,
        shown("epochs", ".4g"),
        str(len(line.seeds)),
    ]


def paper_cells(label: str, own: PaperLine) -> list[str]:
    """One row of a table with :data:`PAPER_HEADS`."""

    def pair(name: str) -> str:
        whole, inner = getattr(own, name), getattr(own, f"inner_{name}")
        return (_NOTHING if whole is None else f"{whole:,}") + ("" if inner is None else f", inner {inner:,}")

    return [
        label,
        own.method + (f", {own.bits} bit" if own.bits else ""),
        " ".join(_SIGNS[getattr(own, part)] for part in _PARTS),
        f"{own.top1:.1f}" + (f" ({own.ensemble:.1f})" if own.ensemble else ""),
        pair("entropy_bits"),
        pair("unique"),
        _NOTHING if own.epochs is None else str(own.epochs),
    ]


def markdown(heads: Sequence[str], rows: Sequence[Sequence[str]], texts: Collection[int] = (0,)) -> list[str]:
    """A Markdown table that reads well as plain text; the columns ``texts`` are text, the others numbers.

    >>> markdown(["a", "bits"], [["x", "2"]])
    ['| a | bits |', '| - | ---: |', '| x |    2 |']
    """
    plain = [list(heads), *([_plain(cell) for cell in row] for row in rows)]
    widths = [max(map(len, column)) for column in zip(*plain, strict=True)]
    padded = [
        [
            cell.ljust(width) if i in texts else cell.rjust(width)
            for i, (cell, width) in enumerate(zip(row, widths, strict=True))
        ]
        for row in plain
    ]
    rule = ["-" * width if i in texts else "-" * (width - 1) + ":" for i, width in enumerate(widths)]
    return [f"| {' | '.join(row)} |" for row in (padded[0], rule, *padded[1:])]


def _plain(text: str) -> str:
    """Without characters that would break a line of a table: a label may hold anything."""
    return "".join(c if c.isprintable() else "\N{REPLACEMENT CHARACTER}" for c in text).replace("|", "\\|")
