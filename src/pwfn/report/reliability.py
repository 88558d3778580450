"""Reliability diagrams: accuracy against confidence, small and side by side."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from pwfn.report.markup import Markup, element, escaped, joined

_SIZE, _EDGE, _FOOT = 200.0, 42.0, 40.0  # of the square, and of what is left and below for labels
_HOW = (
    "Each dot is a bin of examples of like confidence: on the dashed line the network is right as often as "
    "it says, below it less often."
)

Bins = Sequence[Mapping[str, Any]]
"""Of each its ``examples``, and their mean ``confidence`` and ``accuracy``."""


def diagrams(found: Mapping[str, Bins]) -> Markup:
    """One square for each rival, all on the same scale; empty where there is none."""
    if not found:
        return Markup("")
    ends = [b[key] for bins in found.values() for b in bins for key in ("confidence", "accuracy")]
    low = min(math.floor(10 * min(ends, default=0.0)) / 10, 0.9)
    squares = [_diagram(str(name), bins, low) for name, bins in found.items()]
    head = joined(element("h3", "Reliability"), element("p", _HOW, class_="how"))
    return joined(head, element("div", squares, class_="squares"))


def _diagram(name: str, bins: Bins, low: float) -> Markup:
    error = calibration_error(bins)
    alt = f"Reliability of {name}, in {len(bins)} bins{_ends(bins)}; calibration error {error:.4f}."
    picture = element("div", _svg(bins, low, alt), class_="plot")
    caption = element("figcaption", name, element("span", f", calibration error {error:.4f}", class_="quiet"))
    return element("figure", picture, caption)


def calibration_error(bins: Bins) -> float:
    """``sum_b n_b / n |accuracy_b - confidence_b|``.

    >>> calibration_error([{"examples": 3, "confidence": 0.5, "accuracy": 0.75}])
    0.25
    """
    total = max(sum(b["examples"] for b in bins), 1)
    return math.fsum(b["examples"] / total * abs(b["accuracy"] - b["confidence"]) for b in bins)


def _ends(bins: Bins) -> str:
    """
    >>> _ends([{"confidence": 0.5, "accuracy": 0.25}, {"confidence": 0.9, "accuracy": 1.0}])
    ': from 25.0% right at confidence 0.500 to 100.0% right at confidence 0.900'
    """
    told = [f"{b['accuracy']:.1%} right at confidence {b['confidence']:.3f}" for b in bins]
    return f": from {told[0]} to {told[-1]}" if told else ""


def _svg(bins: Bins, low: float, alt: str) -> Markup:
    def x(value: float) -> float:
        return _EDGE + _SIZE * (value - low) / (1 - low)

    def y(value: float) -> float:
        return 6 + _SIZE * (1 - value) / (1 - low)

    middle = (low + 1) / 2
    marks = (low, round(middle, 3), 1.0)
    words = "".join(
        f'<text x="{x(v):.1f}" y="{_SIZE + 23:.1f}" text-anchor="middle">{v:g}</text>'
        f'<text x="{_EDGE - 6:.1f}" y="{y(v) + 4.5:.1f}" text-anchor="end">{v:g}</text>'
        for v in marks
    )
    grid = "".join(f"M{x(v):.1f} {y(low):.1f}V{y(1):.1f}M{x(low):.1f} {y(v):.1f}H{x(1):.1f}" for v in marks)
    diagonal = f"M{x(low):.1f} {y(low):.1f}L{x(1):.1f} {y(1):.1f}"
    stems = "".join(
        f"M{x(b['confidence']):.1f} {y(b['confidence']):.1f}V{y(b['accuracy']):.1f}" for b in bins
    )
    places = [(x(b["confidence"]), y(b["accuracy"])) for b in bins]
    dots = "".join(f'<circle cx="{at:.1f}" cy="{up:.1f}" r="3.5"/>' for at, up in places)
    labels = (
        f'<text x="{x(middle):.1f}" y="{_SIZE + 41:.1f}" text-anchor="middle">confidence</text>'
        f'<text transform="translate(11 {y(middle):.1f}) rotate(-90)" text-anchor="middle">accuracy</text>'
    )
    width, height = _EDGE + _SIZE + 12, _SIZE + 6 + _FOOT
    inner = (
        f'{words}{labels}<path d="{grid}" stroke="currentColor" stroke-width="0.7" opacity="0.15"/>'
        f'<path d="{diagonal}" stroke="currentColor" stroke-width="0.8" stroke-dasharray="3 3"/>'
        f'<path d="{stems}" fill="none" stroke="var(--figure-2)" stroke-width="1.5" opacity="0.7"/>'
        f'<g fill="var(--figure-1)">{dots}</g>'
    )
    return Markup(
        f'<svg viewBox="0 0 {width:g} {height:g}" role="img" aria-label="{escaped(alt)}" font-size="13" '
        f'fill="currentColor">{inner}</svg>'
    )
