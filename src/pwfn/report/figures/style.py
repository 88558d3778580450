"""How every figure looks, and how it becomes an inline SVG or a PNG.

Matplotlib draws in the colours below. In the SVG the ink becomes ``currentColor`` and every other colour a
CSS variable ``--figure-N``, so that the page can set them for light and for dark.
"""

from __future__ import annotations

import io
import re
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pwfn.errors import PwfnError
from pwfn.file.storage import replacing
from pwfn.report.formats import clean, power_of_two

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure as Sheet

INK = "#1f2328"
SERIES = ("#0072b2", "#c65300", "#00855f", "#a8518a", "#8a6a00", "#3a8fc4")
"""After Okabe and Ito: distinguishable without seeing red or green, contrast of at least 3:1 on white."""

DASHED: Any = (0, (4, 3))
MARKERS = "osD^vPX*"
_WIDTH = 7.2  # inches
NARROW = 4.5
"""Width of a figure that fits on a phone."""

Numbers = tuple[tuple[str, ...], tuple[tuple[str, ...], ...]]
"""A header, and rows."""


@dataclass(frozen=True)
class Figure:
    """A figure that is not drawn yet."""

    key: str  # letters, digits and dashes; unique within a page
    title: str
    how_to_read: str
    alt: str  # what it shows, in words
    draw: Callable[[Sheet], None]
    height: float  # inches
    table: Numbers | None = None  # the numbers behind it
    width: float = _WIDTH


_SETTINGS: Any = {
    "axes.axisbelow": True,
    "axes.edgecolor": INK,
    "axes.grid": True,
    "axes.labelcolor": INK,
    "axes.labelsize": 9,
    "axes.linewidth": 0.7,
    "axes.spines.right": False,
    "axes.spines.top": False,
    "axes.titlecolor": INK,
    "axes.titlelocation": "left",
    "axes.titlesize": 9,
    "axes.titleweight": "bold",
    "figure.constrained_layout.use": True,
    "figure.constrained_layout.h_pad": 0.06,
    "figure.constrained_layout.w_pad": 0.06,
    "font.family": "DejaVu Sans",  # comes with matplotlib and is wider than the fonts of pages: labels fit
    "font.size": 9,
    "grid.alpha": 0.15,
    "grid.color": INK,
    "grid.linewidth": 0.6,
    "legend.fontsize": 8.5,
    "legend.frameon": False,
    "lines.linewidth": 1.6,
    "lines.markersize": 4,
    "path.simplify": False,
    "svg.fonttype": "none",
    "text.color": INK,
    "text.parse_math": False,  # a run's name may hold a dollar sign
    "xtick.color": INK,
    "xtick.labelsize": 8.5,
    "ytick.color": INK,
    "ytick.labelsize": 8.5,
}


def svg(figure: Figure) -> str:
    """One ``<svg>`` element with text as text and without script, style sheet or outside reference."""
    buffer = io.StringIO()
    no_metadata = dict.fromkeys(("Date", "Creator", "Format", "Type"))
    _save(figure, buffer, format="svg", metadata=no_metadata, transparent=True)
    text = buffer.getvalue()
    box = re.search(r'<svg [^>]*viewBox="([^"]*)"[^>]*>', text)
    if box is None:
        raise PwfnError("this version of matplotlib writes an unknown SVG: install matplotlib<4")
    body = text[box.end() :]
    body = re.sub(r"<style.*?</style>", "", body, flags=re.DOTALL)  # it would apply to the whole page
    # The ids that are referenced are hashes of the key; those of groups repeat in every figure.
    body = re.sub(r'<g id="[^"]*"', "<g", body).replace("xlink:href", "href")
    body = re.sub(r"font-family: [^;\"]*;? ?", "", body)
    body = re.sub(r'\s(?:d|x|y|transform)="[^"]*"', _rounded, body)
    body = re.sub(r">\s+<", "><", body)
    for number, color in enumerate(SERIES, 1):
        body = body.replace(color, f"var(--figure-{number}, {color})")
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="{box.group(1)}" role="img" '
        f'aria-label="{escape(clean(figure.alt))}" fill="currentColor" '
        f'style="--share: {figure.width / _WIDTH:.3f}">'  # of the width that the page gives a figure
        + body.replace(INK, "currentColor").strip()
    )


def png(figure: Figure, path: Path) -> None:
    """A picture on white."""
    with replacing(path) as temporary:
        _save(figure, temporary, format="png", dpi=160, facecolor="white")


def _save(figure: Figure, target: Any, **how: Any) -> None:
    try:
        import matplotlib as mpl
        from matplotlib.figure import Figure as Sheet
    except ImportError as error:
        raise PwfnError("the report needs matplotlib: pip install 'pwfn[report]'") from error
    settings = {**_SETTINGS, "svg.hashsalt": figure.key}
    with warnings.catch_warnings(), mpl.rc_context(mpl.rcParamsDefault), mpl.rc_context(settings):
        # A name may hold any character; the page has fonts for those that this one lacks.
        warnings.filterwarnings("ignore", "Glyph .* missing from font", UserWarning)
        sheet = Sheet(figsize=(figure.width, figure.height))
        figure.draw(sheet)
        sheet.savefig(target, **how)


def _rounded(found: re.Match[str]) -> str:
    """Hundredths of a point, on one line."""
    short = re.sub(r"-?\d+\.\d{3,}", lambda number: f"{float(number.group()):.2f}", found.group())
    return " " + " ".join(short.split())


def strokes(axes: Axes, x: Sequence[float], low: Sequence[float], high: Sequence[float], **how: Any) -> None:
    """Vertical strokes, as one path however many there are."""
    xs = [place for each in x for place in (each, each, float("nan"))]
    ys = [place for a, b in zip(low, high, strict=True) for place in (a, b, float("nan"))]
    axes.plot(xs, ys, **how)


def dots(axes: Axes, x: Sequence[float], y: Sequence[float], color: str, size: float = 2.6) -> None:
    """A cloud of points as round-capped strokes: one path, where markers would be an element per point."""
    # A PNG shows no stroke without length: these are shorter than a hundredth of a point.
    ends = [value + 1e-6 * abs(value) + 1e-12 for value in y]
    look = {"linewidth": size, "solid_capstyle": "round", "alpha": 0.6, "snap": False}
    strokes(axes, x, y, ends, color=color, **look)


def accuracy_axis(axes: Axes, measure: str) -> None:
    """Label the y axis in percent and span at least two points, so that one image is no cliff."""
    low, high = axes.get_ylim()
    middle, half = (low + high) / 2, max(high - low, 2.0) / 2
    high = min(middle + half, 100 + 0.1 * half)
    axes.set_ylim(high - 2 * half, high)
    axes.set_ylabel(f"{measure}, %")


def whole_numbers(axis: Any, most: int = 10) -> None:
    """Ticks at whole numbers only."""
    from matplotlib.ticker import MaxNLocator

    axis.set_major_locator(MaxNLocator(most, integer=True))


def powers_of_two(axis: Any, step: int) -> None:
    """Ticks for an axis of logarithms to base 2."""
    from matplotlib.ticker import FuncFormatter, MultipleLocator

    axis.set_major_locator(MultipleLocator(step))
    axis.set_major_formatter(FuncFormatter(lambda value, _: power_of_two(round(value))))


def logarithmic(axis: Any, label: Callable[[float], str]) -> None:
    """Ticks for a logarithmic axis: more per decade where it spans fewer decades."""
    from matplotlib.ticker import FuncFormatter, LogLocator, NullLocator

    low, high = sorted(axis.get_view_interval())
    subs = (1, 1.5, 2, 3, 5, 7) if high < 8 * low else (1, 3) if high < 500 * low else (1,)
    axis.set_major_locator(LogLocator(subs=subs, numticks=6))
    axis.set_minor_locator(NullLocator())
    axis.set_major_formatter(FuncFormatter(lambda value, _: label(value)))
