"""The widths of the Gaussian weights: their distribution by round, and against the means."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from statistics import median_high
from typing import TYPE_CHECKING

from pwfn.evaluate.trace import BINS_PER_OCTAVE, Histogram, Sample
from pwfn.report.figures import style
from pwfn.report.figures.style import DASHED, INK, SERIES, Figure
from pwfn.report.formats import short
from pwfn.report.reading import History, RunData, quantile

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure as Sheet

_LOWEST = -16  # log2 of a sigma; smaller ones are drawn there
_LAYERS = 5


def constant(history: History) -> str | None:
    """A sentence if all free weights have one sigma, of which a histogram shows a single spike."""
    found = [histogram for _, histogram in history.sigmas]
    if not found or any(len(histogram.counts) > 1 for histogram in found):
        return None
    start, end = _median(history.sigmas[0]), _median(history.sigmas[-1])
    goes = f"{start} throughout" if start == end else f"{start} at the start and {end} before the last fixing"
    return f"All free weights have one common sigma, about {goes}."


def by_round(runs: Sequence[RunData], names: Sequence[str]) -> Figure | None:
    """The distribution of sigma over the free weights, at the start and before every fixing.

    A constant sigma is not drawn: it is said in a sentence.
    """
    shown = [
        (name if len(runs) > 1 else "", run.history.sigmas)
        for run, name in zip(runs, names, strict=True)
        if len(run.history.sigmas) > 1 and not constant(run.history)
    ]
    if not shown:
        return None
    smallest = min(quantile(histogram, 0.01) for _, sigmas in shown for _, histogram in sigmas)
    lowest = max(math.floor(math.log2(smallest)), _LOWEST) - 0.5
    columns = min(len(shown), 3)
    rows = math.ceil(len(shown) / columns)

    def draw(sheet: Sheet) -> None:
        axes = sheet.subplots(rows, columns, squeeze=False, sharex=True).flatten()
        for place, (title, sigmas) in zip(axes, shown, strict=False):
            last = sigmas[-1][0]
            for number, histogram in sigmas:
                x, y = _outline(histogram, lowest)
                if number == 0:
                    place.plot(x, y, color=INK, linewidth=1.1, linestyle=DASHED, label="at the start")
                else:
                    label = "before each fixing, later ones stronger" if number == last else None
                    alpha = 0.25 + 0.75 * number / last
                    place.plot(x, y, color=SERIES[0], alpha=alpha, linewidth=1.3, label=label)
            place.set_title(short(title, 72 // columns))
            place.set_ylim(bottom=0)
            style.powers_of_two(place.xaxis, 4 if columns > 1 else 2)
        axes[0].set_xlim(left=lowest - 0.2)
        for number, place in enumerate(axes):
            place.set_visible(number < len(shown))
            if number % columns == 0:
                place.set_ylabel("free weights, % per bin")
            if number + columns >= len(shown):
                place.set_xlabel("sigma")
                place.xaxis.set_tick_params(labelbottom=True)
        sheet.legend(*axes[0].get_legend_handles_labels(), loc="outside lower center", ncols=3)

    told = "; ".join(
        f"{title}: " * bool(title) + "the median sigma of the free weights is "
        f"{_median(sigmas[0])} at the start and {_median(sigmas[-1])} in the end"
        for title, sigmas in shown
    )
    return Figure(
        key="sigmas",
        title="Sigma of the free weights",
        how_to_read="Each line is the distribution of sigma over the weights that are still free, in bins of "
        "an eighth of an octave. Lines that move left show sigmas that collapse. Values below the axis are "
        "gathered at its left end.",
        alt=told + ".",
        draw=draw,
        height=0.7 + (2.3 if columns == 1 else 1.9) * rows,
        table=(
            ("run", "round", "free weights", "sigma, 5%", "median", "95%"),
            tuple(
                (
                    title or "this run",
                    str(number) if number else "start",
                    f"{histogram.total:,}",
                    *(f"{quantile(histogram, share):.2g}" for share in (0.05, 0.5, 0.95)),
                )
                for title, sigmas in shown
                for number, histogram in sigmas
            ),
        ),
    )


def _median(seen: tuple[int, Histogram]) -> str:
    return f"{quantile(seen[1], 0.5):.2g}"


def _outline(histogram: Histogram, least: float) -> tuple[list[float], list[float]]:
    """Percent at the middle of every bin, zero at both ends; what is below ``least`` is gathered there."""
    shares: Counter[int] = Counter()
    for number, count in enumerate(histogram.counts):
        place = max(histogram.first + number, math.ceil(least * BINS_PER_OCTAVE))
        shares[place] += count
    places = range(min(shares) - 1, max(shares) + 2)
    return (
        [(place + 0.5) / BINS_PER_OCTAVE for place in places],
        [100 * shares[place] / histogram.total for place in places],
    )


def mu_and_sigma(run: RunData) -> Figure | None:
    """Mu against sigma of a few layers, at the start (above) and after the last fixing (below)."""
    pairs = run.history.samples
    sigmas = {value for pair in pairs for sample in pair for value in sample.sigma}
    if len(sigmas) < 2:  # of one sigma there is nothing to see
        return None
    smallest = min((value for value in sigmas if value > 0), default=1.0)
    lowest = max(math.floor(math.log2(smallest)) - 1, _LOWEST)
    count = min(_LAYERS, len(pairs))
    chosen = [pairs[round(i * (len(pairs) - 1) / max(count - 1, 1))] for i in range(count)]

    def draw(sheet: Sheet) -> None:
        from matplotlib.ticker import MaxNLocator

        axes = sheet.subplots(2, count, squeeze=False, sharey=True, sharex="col")
        for number, pair in enumerate(chosen):
            for row, (sample, color) in enumerate(zip(pair, SERIES, strict=False)):
                _cloud(axes[row][number], sample, color, lowest)
            axes[0][number].set_title(short(pair[0].name.removesuffix(".weight"), 15))
            axes[1][number].set_xlabel("mu")
            axes[1][number].xaxis.set_major_locator(MaxNLocator(3, symmetric=True))
        style.powers_of_two(axes[0][0].yaxis, 4 if lowest < -10 else 2)
        axes[0][0].set_ylabel("sigma at the start")
        axes[1][0].set_ylabel("sigma at the end")

    some = f"{count} of {len(pairs)} layers" if count < len(pairs) else f"all {count} layers"
    return Figure(
        key="mu-sigma",
        title="Mu against sigma, at the start and after the last fixing",
        how_to_read=f"Each dot is a weight, the same ones above and below, in {some}. Larger spots are many "
        "weights at one value. A sigma of zero is at the lower edge.",
        alt=f"For {some} the weights are spread over all values at the start and lie on a few in the end; "
        + "; ".join(
            f"{start.name}: median sigma {median_high(start.sigma):.2g} at the start, "
            f"{median_high(end.sigma):.2g} at the end"
            for start, end in chosen
        )
        + ".",
        draw=draw,
        height=3.6,
    )


def _cloud(axes: Axes, sample: Sample, color: str, lowest: int) -> None:
    """A dot per weight; equal ones are one spot whose area grows with their number."""
    places = Counter(
        (mu, math.log2(max(s, 2.0**lowest))) for mu, s in zip(sample.mu, sample.sigma, strict=True)
    )
    by_size: dict[float, list[tuple[float, float]]] = {}
    for place, count in places.items():
        by_size.setdefault(2.4 * 2 ** (math.floor(math.log2(count)) / 2), []).append(place)
    for size, own in sorted(by_size.items()):
        style.dots(axes, [mu for mu, _ in own], [sigma for _, sigma in own], color, size)
