"""The whole page: its parts in order, in one file that needs nothing beside it."""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib import resources

from pwfn.report import details, saving, top, trust
from pwfn.report.facts import RunFacts, facts_of
from pwfn.report.figures import STYLE, Figure, figures
from pwfn.report.markup import Markup, element, joined
from pwfn.report.reading import RunData, names
from pwfn.report.tables import Cell, Column, table
from pwfn.version import __version__

PARETO = "pareto"
"""Key of the figure that stands beside the table of several runs."""


@dataclass(frozen=True)
class Section:
    """A part of the page, with a line in its contents."""

    key: str
    title: str
    body: Markup


def page(runs: Sequence[RunData], drawn: Sequence[Figure] | None = None) -> str:
    """The page of one run, or of several side by side; the same runs give the same bytes.

    ``drawn`` are the figures, where they were made before.
    """
    facts = [facts_of(run, name) for run, name in zip(runs, names(runs), strict=True)]
    found = list(figures(runs) if drawn is None else drawn)
    sections = [part for part in _sections(facts, found) if part.body]
    title = facts[0].model if len(facts) == 1 else f"{len(facts)} runs"
    contents = element("ul", [element("li", element("a", s.title, href=f"#{s.key}")) for s in sections])
    intro = joined(
        top.heading(facts),
        top.tiles(facts[0]) if len(facts) == 1 else "",
        element("nav", contents, aria_label="Contents"),
    )
    body = element(
        "div",
        element("header", intro),
        element("main", [_section(each) for each in sections]),
        element("footer", f"Made by pwfn {__version__} from the runs’ own files. Nothing here is fetched."),
        class_="page",
    )
    return _document(title, body)


def _sections(runs: Sequence[RunFacts], drawn: Sequence[Figure]) -> list[Section]:
    several = len(runs) > 1
    beside = [figure for figure in drawn if several and figure.key == PARETO]
    others = [figure for figure in drawn if figure not in beside]
    compared = Markup("")
    if several:
        compared = element(
            "div", top.side_by_side(runs), [_figure(each) for each in beside], class_="compared"
        )
    plots = element("div", [_figure(each) for each in others], class_="figures") if others else Markup("")
    return [
        Section("runs", "Side by side", compared),
        Section("making", "How it was made", _of_each(runs, details.making)),
        Section("figures", "Figures", plots),
        Section("layers", "Layers", _of_each(runs, details.layers, folded=True)),
        Section("bytes", "Where the bytes are", _of_each(runs, details.file_bytes, folded=True)),
        Section("states", "After each round", _of_each(runs, details.states, folded=True)),
        Section("saving", "What it saves", _of_each(runs, saving.section, folded=True)),
        Section("trust", "Uncertainty", _of_each(runs, trust.section)),
    ]


def _of_each(runs: Sequence[RunFacts], part: Callable[[RunFacts], Markup], *, folded: bool = False) -> Markup:
    """The part of every run that has it; where there are several, under its name, or folded into it."""
    made = [(run, body) for run in runs if (body := part(run))]
    if len(runs) == 1:
        return joined([body for _, body in made])
    if folded:
        return joined([element("details", element("summary", run.name), body) for run, body in made])
    return joined([joined(element("h3", run.name), body) for run, body in made])


def _section(part: Section) -> Markup:
    head = element("h2", part.title, id=f"{part.key}-title")
    return element("section", head, part.body, id=part.key, aria_labelledby=f"{part.key}-title")


def _figure(figure: Figure) -> Markup:
    """What a figure shows, the figure, which has its own text alternative, and its numbers to unfold."""
    numbers = Markup("")
    if figure.table is not None:
        header, rows = figure.table
        columns = [Column(head, is_number=n > 0) for n, head in enumerate(header)]
        cells = [[Cell(value) for value in row] for row in rows]
        shown = table(f"Numbers of: {figure.title}", columns, cells)
        numbers = element("details", element("summary", "The numbers"), shown)
    return element(
        "figure",
        element("figcaption", element("h3", figure.title), element("p", figure.how_to_read, class_="how")),
        element("div", Markup(figure.svg), class_="plot"),
        numbers,
        id=f"figure-{figure.key}",
    )


def _document(title: str, body: Markup) -> str:
    style, script = STYLE + _asset("style.css"), _asset("script.js")
    # The browser itself holds the page to it: no request, and no script but ours.
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    policy = (
        f"default-src 'none'; script-src 'sha256-{digest}'; style-src 'unsafe-inline'; img-src data:; "
        "base-uri 'none'; form-action 'none'"
    )
    head = joined(
        element("meta", charset="utf-8"),
        element("meta", http_equiv="Content-Security-Policy", content=policy),
        element("meta", name_="viewport", content="width=device-width, initial-scale=1"),
        element("meta", name_="color-scheme", content="light dark"),
        element("title", f"{title} – pwfn report"),
        element("style", Markup(style)),
    )
    whole = element("html", element("head", head), element("body", body, _script(script)), lang="en")
    return f"<!DOCTYPE html>\n{whole}\n"


def _script(text: str) -> Markup:
    return element("script", Markup(text))


def _asset(name: str) -> str:
    return resources.files("pwfn.report").joinpath(name).read_text(encoding="utf-8")
