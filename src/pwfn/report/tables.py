"""Tables for the page: numbers to the right, a header that stays, and columns that can be sorted."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from pwfn.report.markup import Child, Markup, element, joined


@dataclass(frozen=True)
class Cell:
    """What a cell shows, and the number it is sorted by; without one it is text."""

    shown: Child
    value: float | None = None


@dataclass(frozen=True)
class Column:
    """The head of a column; ``about`` says more where the head is too short for it."""

    head: str
    about: str | None = None
    is_number: bool = True


def count(number: int) -> Cell:
    """
    >>> count(74522).shown
    '74,522'
    """
    return Cell(f"{number:,}", number)


def decimal(number: float | None, places: int = 2) -> Cell:
    """
    >>> decimal(4.413).shown, decimal(None).shown
    ('4.41', '–')
    """
    return MISSING if number is None else Cell(f"{number:,.{places}f}", number)


def percent(share: float | None, places: int = 1) -> Cell:
    """
    >>> percent(0.5414).shown
    '54.1%'
    """
    return MISSING if share is None else Cell(f"{share:.{places}%}", share)


MISSING = Cell("–")


def dotted(name: str) -> Cell:
    """The name of a parameter, which may be broken after its dots.

    >>> dotted("layer1.0.weight").shown
    '<code>layer1.<wbr>0.<wbr>weight</code>'
    """
    first, *others = name.split(".")
    return Cell(element("code", first, [joined(".", element("wbr"), each) for each in others]))


def bar(share: float) -> Cell:
    """A bar of that share of the cell's width; beside a number, so that it is hidden from screen readers.

    >>> bar(0.25).shown
    '<span class="bar" aria-hidden="true"><i style="width:25.0%"></i></span>'
    """
    inner = Markup(f'<i style="width:{100 * share:.1f}%"></i>')
    return Cell(element("span", inner, class_="bar", aria_hidden="true"))


def table(
    caption: str,
    columns: Sequence[Column],
    rows: Sequence[Sequence[Cell]],
    *,
    sortable: bool = False,
    head_column: int = 0,
    class_: str | None = None,
    captioned: bool = True,
) -> Markup:
    """A table in a box of its own, which scrolls where the page is too narrow, or the table too long.

    The cells of ``head_column`` are the heads of their rows. A sortable table gets its buttons from the
    page's script: without it, or on paper, there are none. The caption stands above the box, as one within
    the table would scroll away with it; where the page has said it already it is not ``captioned``.
    """
    head = [
        element("th", column.head, scope="col", class_=_class(column), title=column.about)
        if column.head
        else element("td", class_=_class(column))  # an empty head is none
        for column in columns
    ]
    body = [
        element("tr", [_cell(cell, columns[n], n == head_column) for n, cell in enumerate(row)])
        for row in rows
    ]
    whole = element(
        "table",
        element("thead", element("tr", head)),
        element("tbody", body),
        class_=class_,
        aria_label=caption,
        data_sortable=sortable,
    )
    # What scrolls must be reachable by keyboard, and then have a name.
    long = " long" if len(rows) > _LONG else ""
    box = element("div", whole, class_=f"box{long}", tabindex=0, role="group", aria_label=caption)
    return element("div", element("p", caption, class_="caption") if captioned else "", box, class_="table")


_LONG = 24  # rows: about a screen


def _cell(cell: Cell, column: Column, is_head: bool) -> Markup:
    shown, value = joined(cell.shown), cell.value
    if is_head:
        return element("th", shown, scope="row", class_=_class(column), data_value=value)
    return element("td", shown, class_=_class(column), data_value=value)


def _class(column: Column) -> str | None:
    return "number" if column.is_number else None
