"""The paper's table of our runs: a line for each row and network, the paper's own figures beside it."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from pwfn.lab.compare import paper
from pwfn.lab.compare.measuring import Mark
from pwfn.lab.compare.paper import PaperLine
from pwfn.lab.compare.plan import Network, Plan, Run

FIGURES = (
    *("top1_start", "top1", "top1_ensemble", "entropy_bits", "unique", "inner_entropy_bits", "inner_unique"),
    *("file_bytes", "fp32_bytes", "codebooks", "epochs", "hours"),
)
"""What is averaged over seeds."""

_SIGNS = {Mark.YES: "✓", Mark.NO: "✗", Mark.OUTPUT: "out", Mark.NONE: "–"}
_NOTHING = "–"


@dataclass(frozen=True)
class Figure:
    """A figure over seeds: its mean and, where there are several, its standard deviation (n - 1).

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


@dataclass(frozen=True)
class Line:
    """A row of the table for one network."""

    label: str
    method: str
    seeds: tuple[int, ...]  # those that the figures are of
    figures: Mapping[str, Figure | None]
    separate: Mapping[str, Mark]  # whether layers, channels, heads have codebooks of their own
    paper: PaperLine | None


@dataclass(frozen=True)
class Part:
    """The lines of one network."""

    model: str
    paper: str | None  # the paper's network whose figures stand beside
    lines: tuple[Line, ...]


@dataclass(frozen=True)
class Table:
    """All networks, what is missing and why, and where the rest was measured."""

    data: str
    holdout: int  # training images that were held out, and scored in the test images' place
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
        return {**asdict(self), "source_of_paper": paper.source()}


def make_table(plan: Plan, results: Mapping[str, Mapping[str, Any]], notes: Mapping[str, str]) -> Table:
    """The table of a plan's runs: the results of those that have any, by the run's name, and why not."""
    runs = plan.runs()
    found = [results[run.name] for run in runs if run.name in results]
    return Table(
        data=plan.data,
        holdout=plan.holdout,
        samples=plan.samples,
        parts=tuple(_part(network, runs, results) for network in plan.models),
        missing={str(run): notes[run.name] for run in runs if run.name in notes},
        measured_on=_once(f"{facts['device']}, torch {facts['versions']['torch']}" for facts in found),
        commits=_once(facts["commit"][:7] for facts in found if facts["commit"]),
    )


def _once(texts: Iterable[str]) -> tuple[str, ...]:
    return tuple(sorted(set(texts)))


def _part(network: Network, runs: Sequence[Run], results: Mapping[str, Mapping[str, Any]]) -> Part:
    by_label: dict[str, list[Run]] = {}
    for run in runs:
        if run.network is network:
            by_label.setdefault(run.label, []).append(run)
    return Part(network.name, network.paper, tuple(_line(group, results) for group in by_label.values()))


def _line(runs: Sequence[Run], results: Mapping[str, Mapping[str, Any]]) -> Line:
    done = [run for run in runs if run.name in results]
    facts = [{**results[run.name], "hours": results[run.name]["seconds"] / 3600} for run in done]
    values = {name: [own[name] for own in facts if own[name] is not None] for name in FIGURES}
    return Line(
        label=runs[0].label,
        method=runs[0].row.method,
        seeds=tuple(run.seed for run in done),
        figures={name: Figure.of(own) for name, own in values.items()},
        separate={part: Mark(mark) for part, mark in facts[0]["separate"].items()} if facts else {},
        paper=runs[0].paper_line,
    )


def lines(table: Table) -> list[str]:
    """The table as Markdown, one for each network, and what there is to know about it."""
    rows: list[str] = []
    for part in table.parts:
        held = f", {table.holdout:,} training images held out" if table.holdout else ""
        rows += [f"### {part.model}, {table.data}{held}", "", *_markdown(part), ""]
    on = "of the held-out images" if table.holdout else "of the test images"
    draws = f" In brackets: the mean prediction of {table.samples} draws from the posterior."
    rows.append(
        f"Top-1 in percent {on}, and bytes on disk, of the `.pwfn` file, loaded again. Bits: entropy a "
        "weight of all weights and biases of convolutions and linear layers in one pool, quantised or not; "
        f"inner: without the first and the last layer and without biases.{draws if table.samples else ''} "
        "Own codebooks: of every layer, input channel (out: output channel) and attention head. ± is the "
        "standard deviation over seeds (n - 1)."
    )
    if any(part.paper for part in table.parts):
        rows += [
            "",
            f"*In italics: the paper's figures, on {paper.data()}, not measured here.* {paper.source()}.",
        ]
    if table.measured_on:
        commits = f" Commits: {', '.join(table.commits)}." if table.commits else ""
        rows += ["", f"Measured on: {'; '.join(table.measured_on)}.{commits}"]
    if table.missing:
        rows += [
            "",
            "Missing:",
            "",
            *(f"- {_plain(run)}: {_plain(why)}" for run, why in table.missing.items()),
        ]
    return rows


@dataclass(frozen=True)
class _Column:
    head: str
    cell: Callable[[Line], str]
    is_text: bool = False


def _columns(part: Part) -> list[_Column]:
    ours = [
        _Column("method", lambda line: line.label, is_text=True),
        _Column("own codebooks: layer / in-ch / attn", _separate, is_text=True),
        _Column("codebooks", lambda line: _figure(line, "codebooks", ",.0f")),
        _Column("top-1 (ensemble)", _top1),
        _Column("bits", lambda line: _figure(line, "entropy_bits", ".2f")),
        _Column("unique", lambda line: _figure(line, "unique", ",.0f")),
        _Column("inner bits", lambda line: _figure(line, "inner_entropy_bits", ".2f")),
        _Column("inner unique", lambda line: _figure(line, "inner_unique", ",.0f")),
        _Column("bytes on disk", lambda line: _figure(line, "file_bytes", ",.0f")),
        _Column("smaller than fp32", _smaller),
        _Column("extra epochs", lambda line: _figure(line, "epochs", "g")),
        _Column("hours", lambda line: _figure(line, "hours", ".3f")),
        _Column("seeds", lambda line: str(len(line.seeds))),
    ]
    if part.paper is None:
        return ours
    theirs = [
        _Column(f"paper, {paper.data()} {part.paper}", _paper_name, is_text=True),
        _Column("paper: top-1 (ensemble)", lambda line: _paper_top1(line.paper)),
        _Column("paper: bits", lambda line: _paper_pair(line.paper, "entropy_bits")),
        _Column("paper: unique", lambda line: _paper_pair(line.paper, "unique")),
        _Column("paper: extra epochs", lambda line: _paper_number(line.paper, "epochs")),
    ]
    return ours + [_Column(f"*{own.head}*", _italic(own.cell), own.is_text) for own in theirs]


def _markdown(part: Part) -> list[str]:
    columns = _columns(part)
    cells = [[own.head for own in columns]]
    cells += [[_plain(own.cell(line)) for own in columns] for line in part.lines]
    widths = [max(len(row[i]) for row in cells) for i in range(len(columns))]
    rule = [
        "-" * width if own.is_text else "-" * (width - 1) + ":"
        for own, width in zip(columns, widths, strict=True)
    ]

    def padded(row: Sequence[str]) -> str:
        kept = zip(row, columns, widths, strict=True)
        return " | ".join(
            text.ljust(width) if own.is_text else text.rjust(width) for text, own, width in kept
        )

    return [f"| {text} |" for text in (padded(cells[0]), " | ".join(rule), *map(padded, cells[1:]))]


def _plain(text: str) -> str:
    """As it may stand in a line of a table: a label or a complaint may hold anything."""
    return "".join(c if c.isprintable() else "\N{REPLACEMENT CHARACTER}" for c in text).replace("|", "\\|")


def _separate(line: Line) -> str:
    return " ".join(_SIGNS[line.separate.get(part, Mark.NONE)] for part in ("layer", "channel", "attention"))


def _figure(line: Line, name: str, form: str) -> str:
    return _shown(line.figures[name], form)


def _shown(figure: Figure | None, form: str, scale: float = 1.0) -> str:
    if figure is None:
        return _NOTHING
    spread = f" ± {scale * figure.spread:{form}}" if figure.spread else ""
    return f"{scale * figure.mean:{form}}{spread}"


def _top1(line: Line) -> str:
    drawn = line.figures["top1_ensemble"]
    brackets = f" ({_shown(drawn, '.2f', 100)})" if drawn else ""
    return _shown(line.figures["top1"], ".2f", 100) + brackets


def _smaller(line: Line) -> str:
    file, whole = line.figures["file_bytes"], line.figures["fp32_bytes"]
    if file is None or whole is None:
        return _NOTHING
    return f"{math.floor(10 * whole.mean / file.mean) / 10:.1f} times"  # never more than it is


def _italic(cell: Callable[[Line], str]) -> Callable[[Line], str]:
    def italic(line: Line) -> str:
        text = cell(line)
        return text if text == _NOTHING else f"*{text}*"

    return italic


def _paper_name(line: Line) -> str:
    found = line.paper
    if found is None:
        return _NOTHING
    bits = f", {found.bits} bit" if found.bits else ""
    signs = {True: "✓", False: "✗", None: "–"}
    return f"{found.method}{bits}: " + " ".join(
        signs[m] for m in (found.layer, found.channel, found.attention)
    )


def _paper_top1(found: PaperLine | None) -> str:
    if found is None:
        return _NOTHING
    return f"{found.top1:.1f}" + (f" ({found.ensemble:.1f})" if found.ensemble is not None else "")


def _paper_pair(found: PaperLine | None, name: str) -> str:
    """Of the whole network and, where the paper has it, without first, last and biases."""
    inner = _paper_number(found, f"inner_{name}")
    return _paper_number(found, name) + (f", inner {inner}" if inner != _NOTHING else "")


def _paper_number(found: PaperLine | None, name: str) -> str:
    value = getattr(found, name) if found is not None else None
    return _NOTHING if value is None else f"{value:,}"
