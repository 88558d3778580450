"""The widths of the Gaussian weights: how they start, where training takes them, and where they end."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol

import torch

from pwfn.bayes.gaussian import initial_sigma
from pwfn.config import MethodName, SigmaInit
from pwfn.evaluate.trace import BINS_PER_OCTAVE, Histogram, Moment, Sample, Trace
from pwfn.report.figures.canvas import (
    INK,
    SERIES,
    Drawing,
    dots,
    power,
    powers_of_two,
    short,
    strengths,
)
from pwfn.report.reading import RunData

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure as Sheet


class Watched(Protocol):
    """A run, or what was kept of one."""

    @property
    def settings(self) -> Mapping[str, Any]:
        """Section by section."""

    @property
    def observed(self) -> Sequence[Trace]:
        """What was seen on the way."""


_LOWEST = -16  # log2 of a sigma; what is less stands there
_LAYERS = 5


def collapse(runs: Sequence[Watched], names: Sequence[str]) -> Drawing | None:
    """Sigmas of the free weights at the start and before every fixing, a panel for each run."""
    seen = [(run, name, _trained(run)) for run, name in zip(runs, names, strict=True)]
    shown = [(run, name, looks) for run, name, looks in seen if looks]
    if not shown:
        return None
    histograms = [look.sigma for run, *_ in shown for look in run.observed if look.sigma is not None]
    hundredth = min(math.log2(_quantile(histogram, 0.01)) for histogram in histograms)
    lowest = max(math.floor(hundredth), _LOWEST) - 0.5
    columns = min(len(shown), 3)
    rows = math.ceil(len(shown) / columns)

    def draw(sheet: Sheet) -> None:
        panels = sheet.subplots(rows, columns, squeeze=False, sharex=True).flatten()
        for panel, (run, name, looks) in zip(panels, shown, strict=False):
            start = next((s for s in run.observed if s.moment is Moment.START and s.sigma), None)
            if start is not None and start.sigma is not None:
                x, y = _outline(start.sigma, lowest)
                panel.plot(x, y, color=INK, linewidth=1.1, linestyle=(0, (3, 2)), label="at the start")
            for look, strength in zip(looks, strengths(len(looks)), strict=True):
                if look.sigma is not None:
                    label = "before each fixing, later ones stronger" if strength == 1 else None
                    x, y = _outline(look.sigma, lowest)
                    panel.plot(x, y, color=SERIES[0], alpha=strength, linewidth=1.3, label=label)
            cap = run.settings.get("posterior", {}).get("cap") if _learns(run) else None
            if isinstance(cap, float) and cap > 0:
                panel.axvline(math.log2(cap), color=SERIES[1], linewidth=0.9, label=f"cap S = {cap:g}")
            own = len(shown) > 1 and name
            panel.set_title(f"{_alpha(run)}   {short(name, 18)}" if own else _alpha(run))
            panel.set_ylim(bottom=0)
            powers_of_two(panel.xaxis, 4 if columns > 1 else 2)
        panels[0].set_xlim(left=lowest - 0.2)
        for panel in panels[len(shown) :]:
            panel.set_visible(False)
        for number, panel in enumerate(panels[: len(shown)]):
            if number % columns == 0:
                panel.set_ylabel("free weights, % a bin")
            if number + columns >= len(shown):
                panel.set_xlabel("sigma")
                panel.xaxis.set_tick_params(labelbottom=True)
        sheet.legend(*panels[0].get_legend_handles_labels(), loc="outside lower center", ncols=3)

    told = "; ".join(
        f"{f'{name}, ' if len(shown) > 1 and name else ''}{_alpha(run)}: the median sigma of the free "
        f"weights goes from {_median_at_start(run)} to {median(looks[-1])} before the last fixing"
        for run, name, looks in shown
    )
    return Drawing(
        key="sigmas",
        title="Sigmas of the free weights" + (" under several alpha" if len(shown) > 1 else ""),
        how_to_read="Each line is the distribution of sigma over the weights still free, an eighth of an "
        "octave a bin: where alpha is too small the lines move left and collapse, where it rules alone "
        "they pile up at the cap and tell weights apart no more; what is smaller than the axis shows is "
        "gathered at its left end; a sigma that does not learn stays where it starts.",
        alt=told + ".",
        draw=draw,
        height=0.7 + (2.3 if columns == 1 else 1.9) * rows,
        table=(
            ("run", "alpha", "round", "free weights", "sigma, 5 %", "median", "95 %"),
            tuple(
                (name, _alpha(run), "start" if look.round == 0 else str(look.round), *_figures(look.sigma))
                for run, name, _ in shown
                for look in run.observed
                if look.sigma is not None and look.moment is not Moment.AFTER
            ),
        ),
    )


def _trained(run: Watched) -> list[Trace]:
    return [seen for seen in run.observed if seen.moment is Moment.BEFORE and seen.sigma is not None]


def _learns(run: Watched) -> bool:
    """Runs of before there was a choice have no such setting: their sigma did."""
    return run.settings.get("posterior", {}).get("learn_sigma", True) is True


def _alpha(run: Watched) -> str:
    """A power of two as one."""
    if not _learns(run):
        return "sigma does not learn"
    alpha = run.settings.get("posterior", {}).get("alpha")
    if not isinstance(alpha, int | float):
        return "alpha unknown"
    mantissa, exponent = math.frexp(alpha)
    return f"alpha = {power(2, exponent - 1) if mantissa == 0.5 else f'{alpha:g}'}"


def _outline(histogram: Histogram, least: float) -> tuple[list[float], list[float]]:
    """Shares in percent at the middles of the bins, zero at either end; what is too low is gathered."""
    shares: dict[int, float] = {}
    lowest = math.ceil(least * BINS_PER_OCTAVE)
    for i, count in enumerate(histogram.counts):
        place = max(histogram.first + i, lowest)
        shares[place] = shares.get(place, 0.0) + 100 * count / histogram.total
    first, last = min(shares), max(shares)
    places = range(first - 1, last + 2)
    return [(p + 0.5) / BINS_PER_OCTAVE for p in places], [shares.get(p, 0.0) for p in places]


def _quantile(histogram: Histogram, share: float) -> float:
    """The middle, in log2, of the bin in which so many lie at or below it."""
    so_far = 0
    for i, count in enumerate(histogram.counts):
        so_far += count
        if so_far >= share * histogram.total:
            return float(2 ** ((histogram.first + i + 0.5) / BINS_PER_OCTAVE))
    return math.nan


def _figures(histogram: Histogram) -> tuple[str, ...]:
    quantiles = (f"{_quantile(histogram, share):.2g}" for share in (0.05, 0.5, 0.95))
    return (f"{histogram.total:,}", *quantiles)


def median(look: Trace) -> str:
    """Of sigma over the free weights, to two digits."""
    return "–" if look.sigma is None else f"{_quantile(look.sigma, 0.5):.2g}"


def _median_at_start(run: Watched) -> str:
    return next((median(seen) for seen in run.observed if seen.moment is Moment.START), "–")


def means_and_sigmas(run: RunData) -> Drawing | None:
    """Mu against sigma of a few layers, at the start (above) and after the last fixing (below)."""
    start = next((seen for seen in run.observed if seen.moment is Moment.START and seen.sample), None)
    end = next((seen for seen in reversed(run.observed) if seen.moment is Moment.AFTER and seen.sample), None)
    if start is None or end is None:
        return None
    ends = {sample.name: sample for sample in end.sample}
    pairs = [(sample, ends[sample.name]) for sample in start.sample if sample.name in ends]
    count = min(_LAYERS, len(pairs))
    chosen = [pairs[round(i * (len(pairs) - 1) / max(count - 1, 1))] for i in range(count)]

    def draw(sheet: Sheet) -> None:
        panels = sheet.subplots(2, count, squeeze=False, sharey=True, sharex="col")
        for number, pair in enumerate(chosen):
            for row, (sample, color) in enumerate(zip(pair, SERIES, strict=False)):
                _cloud(panels[row][number], sample, color)
            panels[0][number].set_title(short(pair[0].name.removesuffix(".weight"), 15))
            panels[1][number].set_xlabel("mu")
            panels[1][number].xaxis.set_major_locator(_few())
        powers_of_two(panels[0][0].yaxis, 4)
        panels[0][0].set_ylabel("sigma at the start")
        panels[1][0].set_ylabel("sigma at the end")

    some = f"{count} of {len(pairs)} layers" if count < len(pairs) else f"all {count} layers"
    return Drawing(
        key="mu-sigma",
        title="Mu against sigma, at the start and after the last fixing",
        how_to_read=f"Each dot is a weight, the same ones above and below, of {some}: above, the arcs of the "
        "starting sigma between powers of two; below, larger spots where many lie on one centre; at the "
        "lower edge sigma is zero.",
        alt=f"For {some} the weights are spread over all values at the start and lie on a few centres in "
        "the end; "
        + "; ".join(
            f"{one.name}: median sigma {_middle(one):.2g} at the start, {_middle(other):.2g} at the end"
            for one, other in chosen
        )
        + ".",
        draw=draw,
        height=3.6,
        table=(
            ("layer", "weights shown", "median sigma, start", "median sigma, end", "values of mu, end"),
            tuple(
                (
                    one.name,
                    str(len(one.mu)),
                    f"{_middle(one):.2g}",
                    f"{_middle(other):.2g}",
                    str(len({*other.mu})),
                )
                for one, other in pairs
            ),
        ),
    )


def _cloud(panel: Axes, sample: Sample, color: str) -> None:
    """A dot for each weight; where many are alike, one spot for those, as large as they are many."""
    places = Counter(zip(sample.mu, map(_log2, sample.sigma), strict=True))
    by_size: dict[float, list[tuple[float, float]]] = {}
    for place, count in places.items():
        size = 2.4 * 2 ** (math.floor(math.log2(count)) / 2)  # twice the weights, twice the area
        by_size.setdefault(size, []).append(place)
    for size, own in sorted(by_size.items()):
        dots(panel, [mu for mu, _ in own], [sigma for _, sigma in own], color, size, alpha=0.6)


def _middle(sample: Sample) -> float:
    return sorted(sample.sigma)[len(sample.sigma) // 2]


def _log2(sigma: float) -> float:
    return max(math.log2(sigma), float(_LOWEST)) if sigma > 0 else float(_LOWEST)


def _few() -> Any:
    from matplotlib.ticker import MaxNLocator

    return MaxNLocator(3, symmetric=True)


def starting_sigma(run: RunData) -> Drawing | None:
    """The initial sigma as a function of mu: :func:`pwfn.initial_sigma` over evenly spread weights."""
    if run.settings.get("method") != MethodName.PWFN:
        return None
    if run.settings.get("posterior", {}).get("init") != SigmaInit.POWERS:  # a constant, say
        return None
    # As many in every octave from 2^-7: the quartile that scales sigma is then of evenly spread mantissas.
    octaves = [2.0**e * (1 + i / 64) for e in range(-7, 0) for i in range(64)]
    mu = torch.tensor([*(-x for x in reversed(octaves)), *octaves], dtype=torch.float64)
    sigma = initial_sigma(mu)

    def draw(sheet: Sheet) -> None:
        panel = sheet.subplots()
        panel.plot(mu.tolist(), (1000 * sigma).tolist(), color=SERIES[0], linewidth=1.3)
        marks = [sign * 2.0**e for sign in (-1, 1) for e in (0, -1, -2, -3)]
        panel.set_xticks(
            marks, [f"{'−' if m < 0 else ''}{power(2, round(math.log2(abs(m))))}" for m in marks]
        )
        panel.set_xlim(-1, 1)
        panel.set_ylim(0, 1150 * float(sigma.max()))
        panel.set_xlabel("mu")
        panel.set_ylabel("starting sigma, thousandths")

    return Drawing(
        key="starting-sigma",
        title="The starting sigma as a function of mu",
        how_to_read="A weight that lies on a power of two, where a tick is, starts with no width and stays "
        "there easily; one midway starts with the widest.",
        alt="Starting sigma against mu: next to nothing at every power of two, and a hump between each "
        "two, all of one height; for weights spread evenly over seven octaves that is "
        f"{float(sigma.max()):.2g}.",
        draw=draw,
        height=2.2,
    )
