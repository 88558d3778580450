"""HTML from values: everything is escaped, unless it was made here."""

from __future__ import annotations

import html
from collections.abc import Iterable


class Markup(str):
    """Text that is HTML already; any other string is escaped where it goes into an element."""

    __slots__ = ()


Child = str | Iterable["Child"]
"""Markup stays, other text is escaped, and what is iterable goes in piece by piece."""

_EMPTY = frozenset(("meta", "hr", "wbr"))  # elements that have no end


def escaped(text: str) -> Markup:
    """Text as HTML; what cannot be shown (controls, half a surrogate pair) is U+FFFD.

    >>> escaped('<b> & "c"')
    '&lt;b&gt; &amp; &quot;c&quot;'
    """
    shown = (c if c.isprintable() or c == "\n" else "\N{REPLACEMENT CHARACTER}" for c in text)
    return Markup(html.escape("".join(shown)))


def joined(*children: Child) -> Markup:
    """The children one after the other.

    >>> joined("a < b", [Markup("<hr>"), "c"])
    'a &lt; b<hr>c'
    """
    pieces: list[str] = []
    for child in children:
        if isinstance(child, Markup):
            pieces.append(child)
        elif isinstance(child, str):
            pieces.append(escaped(child))
        else:
            pieces.extend(joined(each) for each in child)
    return Markup("".join(pieces))


def element(name: str, *children: Child, **attributes: str | int | float | bool | None) -> Markup:
    """An element; ``class_`` is ``class`` and ``data_value`` is ``data-value``.

    An attribute that is None or False is left out, and one that is True has no value.

    >>> element("td", "1 < 2", class_="number", data_value=1.5, hidden=False)
    '<td class="number" data-value="1.5">1 &lt; 2</td>'
    """
    given = [
        f" {key.rstrip('_').replace('_', '-')}" + ("" if value is True else f'="{escaped(str(value))}"')
        for key, value in attributes.items()
        if value is not None and value is not False
    ]
    start = f"<{name}{''.join(given)}>"
    return Markup(start) if name in _EMPTY else Markup(f"{start}{joined(*children)}</{name}>")
