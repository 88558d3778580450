"""From a drawing to an SVG that fits into any page, or to a PNG.

Matplotlib draws in the colours below. In the SVG each becomes a CSS variable with that colour to fall back
on, and ink becomes ``currentColor``: so a page sets its own, for light and for dark.
"""

from __future__ import annotations

import io
import re
import warnings
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pwfn.errors import PwfnError
from pwfn.file.storage import replacing

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure as Sheet

INK = "#1f2328"
SERIES = ("#0072b2", "#c65300", "#00855f", "#a8518a", "#8a6a00", "#3a8fc4")
"""After Okabe and Ito: told apart without seeing red or green, and at least 3:1 on white."""

_ON_DARK = ("#5ab4f0", "#f0934e", "#35c79b", "#dd98c4", "#d9b13b", "#9bd3f7")

STYLE = (
    ":root{" + "".join(f"--figure-{n}:{c};" for n, c in enumerate(SERIES, 1)) + "}\n"
    "@media screen and (prefers-color-scheme:dark){:root{"
    + "".join(f"--figure-{n}:{c};" for n, c in enumerate(_ON_DARK, 1))
    + "}}\n"
)
"""CSS for a page that shows the figures: their colours, in light and in dark."""

WIDTH = 7.2  # inches: nine-point letters are still read where a page of 500 pixels shows it whole

Table = tuple[tuple[str, ...], tuple[tuple[str, ...], ...]]
"""A header, and rows."""


@dataclass(frozen=True)
class Drawing:
    """A figure that is yet to be drawn."""

    key: str  # letters, digits and dashes; the SVG's ids begin with it
    title: str
    how_to_read: str  # one sentence
    alt: str  # what it shows, for those who do not see it
    draw: Callable[[Sheet], None]
    height: float  # inches
    table: Table | None = None


_SETTINGS: Any = {  # matplotlib's type for these names every one there is
    "axes.axisbelow": True,
    "axes.edgecolor": INK,
    "axes.grid": True,
    "axes.labelcolor": INK,
    "axes.labelsize": 9,
    "axes.linewidth": 0.7,
    "axes.spines.right": False,
    "axes.spines.top": False,
    "axes.titlesize": 9,
    "axes.titleweight": "bold",
    "axes.titlelocation": "left",
    "axes.titlecolor": INK,
    "figure.constrained_layout.use": True,
    "figure.constrained_layout.h_pad": 0.06,
    "figure.constrained_layout.w_pad": 0.06,
    "font.family": "DejaVu Sans",  # comes with matplotlib, and is wider than what pages have: labels fit
    "font.size": 9,
    "grid.alpha": 0.15,
    "grid.color": INK,
    "grid.linewidth": 0.6,
    "legend.fontsize": 8.5,
    "legend.frameon": False,
    "lines.linewidth": 1.6,
    "lines.markersize": 4,
    "svg.fonttype": "none",
    "text.color": INK,
    "text.parse_math": False,  # a run's name may hold a dollar
    "xtick.color": INK,
    "xtick.labelsize": 8.5,
    "xtick.major.width": 0.7,
    "ytick.color": INK,
    "ytick.labelsize": 8.5,
    "ytick.major.width": 0.7,
}


def svg(drawing: Drawing) -> str:
    """As one ``<svg>`` element: letters as text, ids of its own, no script, no style sheet, no reference."""
    buffer = io.StringIO()
    nothing = dict.fromkeys(("Date", "Creator", "Format", "Type"))
    _drawn(drawing, buffer, format="svg", metadata=nothing, transparent=True, salt=drawing.key)
    return _for_a_page(buffer.getvalue(), drawing)


def png(drawing: Drawing, path: Path, dots_per_inch: int = 160, note: str = "") -> None:
    """As a picture on white; the note is kept in the file, as its description."""
    how: dict[str, Any] = {"dpi": dots_per_inch, "facecolor": "white", "metadata": {"Description": note}}
    with replacing(path) as temporary:
        _drawn(drawing, temporary, format="png", salt=drawing.key, **how)


def _drawn(drawing: Drawing, target: Any, *, salt: str, **how: Any) -> None:
    try:
        import matplotlib as mpl
        from matplotlib.figure import Figure as Sheet
    except ImportError as error:
        raise PwfnError("the figures need matplotlib: pip install 'pwfn[report]'") from error
    settings = {**_SETTINGS, "svg.hashsalt": salt}
    with warnings.catch_warnings(), mpl.rc_context(mpl.rcParamsDefault), mpl.rc_context(settings):
        # A name may hold any letter; the page has fonts for those that this one lacks.
        warnings.filterwarnings("ignore", "Glyph .* missing from font", UserWarning)
        sheet = Sheet(figsize=(WIDTH, drawing.height))
        drawing.draw(sheet)
        sheet.savefig(target, **how)


# What all drawings share


def dots(
    axes: Axes, x: Sequence[float], y: Sequence[float], color: str, size: float = 2.6, **how: Any
) -> None:
    """A cloud of points, which the SVG holds in a few bytes each."""
    axes.plot(x, y, "o", color=color, markersize=size, markeredgewidth=0, **how)


def boxes(
    axes: Axes, at: Sequence[float], columns: Sequence[Sequence[float]], color: str, width: float
) -> None:
    """A box plot: the middle half as a bar, the median in it, whiskers from the 5th to the 95th percentile.

    Three paths for all of them, however many there are; ``width`` is in points.
    """
    low, quarter, middle, three, high = (
        [quantile(c, q) for c in columns] for q in (0.05, 0.25, 0.5, 0.75, 0.95)
    )
    axes.plot(*_segments(at, low, high), color=color, linewidth=0.8)
    axes.plot(*_segments(at, quarter, three), color=color, linewidth=width, solid_capstyle="butt", alpha=0.55)
    axes.plot(at, middle, "_", color=INK, markersize=width + 1, markeredgewidth=1.2)


def _segments(
    at: Sequence[float], low: Sequence[float], high: Sequence[float]
) -> tuple[list[float], list[float]]:
    """Vertical strokes as one line with gaps."""
    nan = float("nan")
    x = [place for each in at for place in (each, each, nan)]
    return x, [place for a, b in zip(low, high, strict=True) for place in (a, b, nan)]


def quantile(values: Sequence[float], share: float) -> float:
    """Between the two nearest of the sorted values, in proportion.

    >>> quantile([4.0, 1.0, 3.0], 0.25)
    2.0
    """
    ordered = sorted(values)
    position = share * (len(ordered) - 1)
    below = int(position)
    above = min(below + 1, len(ordered) - 1)
    return ordered[below] + (position - below) * (ordered[above] - ordered[below])


_RAISED = str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹")


def power(base: int, exponent: int) -> str:
    """
    >>> power(2, -11), power(2, 0)
    ('2⁻¹¹', '1')
    """
    if exponent in (0, 1):
        return str(base**exponent)
    return f"{base}{str(exponent).translate(_RAISED)}"


def powers_of_two(axis: Any, step: int | None = None) -> None:
    """Labels for an axis that holds logarithms to the base of two."""
    from matplotlib.ticker import FuncFormatter, MaxNLocator, MultipleLocator

    axis.set_major_locator(MultipleLocator(step) if step else MaxNLocator(5, integer=True))
    axis.set_major_formatter(FuncFormatter(lambda value, _: power(2, round(value))))


def whole_numbers(axis: Any, most: int = 10) -> None:
    """Labels at whole numbers only."""
    from matplotlib.ticker import MaxNLocator

    axis.set_major_locator(MaxNLocator(most, integer=True))


def decades(axis: Any, label: Callable[[float], str]) -> None:
    """Labels for a logarithmic axis, at the powers of ten alone."""
    from matplotlib.ticker import FuncFormatter, LogLocator, NullLocator

    axis.set_major_locator(LogLocator(numticks=6))
    axis.set_minor_locator(NullLocator())
    axis.set_major_formatter(FuncFormatter(lambda value, _: label(value)))


def accuracies(axes: Axes) -> None:
    """Limits for an axis of percents: two points apart or more, so that a single image is no cliff."""
    low, high = axes.get_ylim()
    middle, half = (low + high) / 2, max(high - low, 2.0) / 2
    high = min(middle + half, 100 + 0.05 * half)
    axes.set_ylim(high - 2 * half, high)


def strengths(count: int) -> list[float]:
    """Opacities for a sequence, the last the strongest: one colour, so that light and dark both can show it.

    >>> strengths(3)
    [0.25, 0.625, 1.0]
    """
    return [1.0] if count == 1 else [0.25 + 0.75 * i / (count - 1) for i in range(count)]


def clean(text: str) -> str:
    """Names come from files: without what no font can show, and no page may hold.

    >>> clean("a" + chr(27) + "b")
    'a�b'
    """
    return "".join(c if c.isprintable() else "\N{REPLACEMENT CHARACTER}" for c in text)


def short(text: str, most: int = 32) -> str:
    """The end of a name, which tells more than its beginning.

    >>> short("layer1.0.conv1.weight", 12)
    '…nv1.weight'
    """
    text = clean(text)
    return text if len(text) <= most else "…" + text[2 - most :]


def thousands(number: float) -> str:
    """
    >>> thousands(950), thousands(11_164_362), thousands(2000)
    ('950', '11.2 M', '2 k')
    """
    for unit, size in (("G", 1e9), ("M", 1e6), ("k", 1e3)):
        if number >= size:
            return f"{number / size:.3g} {unit}"
    return f"{number:.3g}"


# The SVG


def _for_a_page(text: str, drawing: Drawing) -> str:
    text = text[text.index("<svg") :]
    # A style sheet within would hold for the whole page; the rest is of no use there.
    text = re.sub(r"<!--.*?-->|<metadata>.*?</metadata>|<style.*?</style>", "", text, flags=re.DOTALL)
    text = _merged_dots(text)
    text = re.sub(r'\s(?:x|y|d|transform|width|height)="[^"]*"', _rounded, text)
    prefix = f"{drawing.key}-"
    text = re.sub(r'\bid="', f'id="{prefix}', text)
    text = text.replace("url(#", f"url(#{prefix}").replace('xlink:href="#', f'href="#{prefix}')
    text = _coloured(text)
    text = re.sub(r"font: ([0-9.]+px)[^;\"]*", r"font-size: \1", text)
    text = re.sub(r"font: (?:bold|700) ([0-9.]+px)[^;\"]*", r"font-weight: bold; font-size: \1", text)
    box = re.search(r'viewBox="([^"]*)"', text)
    if box is None:
        raise PwfnError("this version of matplotlib writes another SVG: install matplotlib<4")
    opening = (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="{box.group(1)}" role="img" '
        f'aria-label="{escape(clean(drawing.alt))}" style="stroke-linejoin: round; fill: currentColor; '
        'font-family: var(--figure-font, system-ui, sans-serif)">'
    )
    text = opening + text[text.index(">") + 1 :]
    return re.sub(r">\s+<", "><", re.sub(r"\n\s*", " ", text)).strip() + "\n"


def _merged_dots(text: str) -> str:
    """Equal round marks in a row become one path of round-capped strokes without length."""
    radii = dict(re.findall(r'<path id="(m[0-9a-f]+)" d="M 0 ([0-9.]+)\s*\nC ', text))

    def merged(found: re.Match[str]) -> str:
        uses = re.findall(r'x="([0-9.-]+)" y="([0-9.-]+)" style="fill: (#[0-9a-f]{6})([^"]*)"', found.group())
        radius = radii.get(found.group(1))
        if radius is None or len({(color, rest) for _, _, color, rest in uses}) != 1:
            return found.group()
        color, rest = uses[0][2:]
        opacity = re.search(r"fill-opacity: ([0-9.]+)", rest)
        strength = f"; stroke-opacity: {opacity.group(1)}" if opacity else ""
        places = sorted({f"M{float(x):.1f} {float(y):.1f}h0" for x, y, _, _ in uses})
        return (
            f'<path d="{"".join(places)}" style="fill: none; stroke: {color}{strength}; '
            f'stroke-width: {2 * float(radius):.2f}; stroke-linecap: round"/>'
        )

    return re.sub(r'<use xlink:href="#(m[0-9a-f]+)"[^>]*/>(?:\s*<use xlink:href="#\1"[^>]*/>)+', merged, text)


def _rounded(found: re.Match[str]) -> str:
    """Hundredths of a point: finer than anyone sees."""
    short = re.sub(r"-?\d+\.\d{3,}", lambda number: f"{float(number.group()):.2f}", found.group())
    return re.sub(r"\s*\n(?:L )?", " ", short) if short.startswith(' d="') else short


def _coloured(text: str) -> str:
    text = text.replace(INK, "currentColor")
    for number, color in enumerate(SERIES, 1):
        text = text.replace(color, f"var(--figure-{number}, {color})")
    return text


def percents(values: Iterable[float]) -> list[float]:
    """
    >>> percents([0.5, 1])
    [50.0, 100.0]
    """
    return [100.0 * value for value in values]
