"""Where in the network the bits are: per input channel of every layer, and by layer."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from pwfn.evaluate.entropy import Pool, per_attention_part, per_input_channel
from pwfn.layout import Kind
from pwfn.report.figures import style
from pwfn.report.figures.style import DASHED, INK, SERIES, Figure
from pwfn.report.formats import short
from pwfn.report.reading import RunData

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure as Sheet

_PARTS = {"q": "Queries", "k": "Keys", "v": "Values"}
_NAMED = 16  # layers whose names fit below an axis
_MEASURES = {"entropy_bits": "entropy, bits per weight", "unique": "unique values"}

Layers = list[list[Pool]]
"""For every layer, one pool per input channel."""


def channels(run: RunData) -> Figure | None:
    """Entropy and unique values per input channel, by layer; of q, k and v where there is attention."""
    layout, values = run.compressed.layout, run.compressed.values()
    weights = [entry for entry in layout.entries if entry.kind is Kind.WEIGHT]
    parts: dict[str, Layers] = {part: [] for part in _PARTS}
    for entry in weights:  # a layer may have one projection for all three, or one for each
        for part, pools in per_attention_part(layout, values, entry.name).items():
            parts[part].append(pools)
    if all(parts.values()):
        names = [str(number) for number in range(1, max(map(len, parts.values())) + 1)]
        return _boxes("attention", "Queries, keys and values by layer", names, parts)
    found = {e.name: pools for e in weights if (pools := per_input_channel(layout, values, e.name))}
    if not found:
        return None
    title = "Entropy and unique values per input channel, by layer"
    return _boxes("channels", title, list(found), {"": list(found.values())})


def _boxes(key: str, title: str, names: Sequence[str], parts: dict[str, Layers]) -> Figure:
    """A row of panels per measure, a column per part, a box per layer."""
    columns = {
        (measure, part): [[getattr(pool, measure) for pool in pools] for pools in layers]
        for measure in _MEASURES
        for part, layers in parts.items()
    }
    means = {key: [float(np.mean(column)) for column in own] for key, own in columns.items()}

    def draw(sheet: Sheet) -> None:
        panels = sheet.subplots(2, len(parts), squeeze=False, sharex=True, sharey="row")
        for row, measure in enumerate(_MEASURES):
            panels[row][0].set_ylabel(_MEASURES[measure].replace(", ", ",\n"))
            top = 0.1
            for panel, part in zip(panels[row], parts, strict=True):
                top = max(top, _box(panel, columns[measure, part], means[measure, part]))
                if part and row == 0:
                    panel.set_title(f"{_PARTS[part]} ({part})")
            panels[row][0].set_ylim(0, 1.08 * top)
        for panel in panels[-1]:
            panel.set_xlim(0.3, len(names) + 0.7)
            if len(names) <= _NAMED and not names[0].isdigit():
                labels = [short(name.removesuffix(".weight"), 18) for name in names]
                place = {"rotation": 40, "ha": "right", "rotation_mode": "anchor"}
                panel.set_xticks(range(1, len(names) + 1), labels, **place)
            else:
                style.whole_numbers(panel.xaxis, 6)
                panel.set_xlabel("layer, in the order of the network")

    told = [
        f"mean {_MEASURES[measure]}, {part or 'all'}: {min(own):.2f} to {max(own):.2f}"
        + ("" if part else f", lowest in {names[own.index(min(own))]}")
        for (measure, part), own in means.items()
    ]
    return Figure(
        key=key,
        title=title,
        how_to_read="One box per layer over its input channels: the middle half, the median, and whiskers "
        "from 5% to 95%. The line joins the means. A channel with few values is cheap to store.",
        alt=f"{len(names)} layers, means over input channels; {'; '.join(told)}.",
        draw=draw,
        height=4.0,
        table=(
            (
                "layer",
                *(", ".join(filter(None, ("entropy, bits", part))) for part in parts),
                *(", ".join(filter(None, ("unique", part))) for part in parts),
            ),
            tuple(
                (name, *(f"{own[i]:.2f}" if i < len(own) else "–" for own in means.values()))
                for i, name in enumerate(names)
            ),
        ),
    )


def _box(panel: Axes, columns: Sequence[Sequence[float]], means: Sequence[float]) -> float:
    """A few paths for all boxes, however many there are; returns the highest end of a whisker."""
    at = list(range(1, len(columns) + 1))
    shares = (0.05, 0.25, 0.5, 0.75, 0.95)
    low, quarter, middle, three, high = zip(*(np.quantile(c, shares).tolist() for c in columns), strict=True)
    width = max(2.0, min(12.0, 60 / len(columns)))  # points
    style.strokes(panel, at, low, high, color=SERIES[0], linewidth=0.8)
    look = {"linewidth": width, "solid_capstyle": "butt", "alpha": 0.55}
    style.strokes(panel, at, quarter, three, color=SERIES[0], **look)
    panel.plot(at, middle, "_", color=INK, markersize=width + 1, markeredgewidth=1.2)
    panel.plot(at, means, color=INK, linewidth=1.0)
    return max(high)


def by_bits(run: RunData) -> Figure:
    """Layers side by side: width is the share of the weights, height the bits per weight."""
    layout, whole = run.compressed.layout, run.summary.whole
    pools = [run.summary.layers[entry.name] for entry in layout.entries]
    widths = [100 * pool.weights / whole.weights for pool in pools]
    lefts = [sum(widths[:i]) for i in range(len(widths))]
    bits = [pool.entropy_bits for pool in pools]

    def draw(sheet: Sheet) -> None:
        panel = sheet.subplots()
        # Two strengths in turn tell neighbours apart.
        order = list(dict.fromkeys(entry.layer for entry in layout.entries))
        for turn, strength in ((0, 0.5), (1, 0.28)):
            own = [i for i, entry in enumerate(layout.entries) if order.index(entry.layer) % 2 == turn]
            bars = [[column[i] for i in own] for column in (lefts, bits, widths)]
            panel.bar(*bars, align="edge", color=SERIES[0], alpha=strength)
        panel.axhline(whole.entropy_bits, color=INK, linewidth=1.0, linestyle=DASHED)
        top = 1.08 * max([*bits, whole.entropy_bits, 0.1])
        panel.set(xlim=(0, 100), ylim=(0, top), ylabel="entropy, bits per weight")
        panel.set_xlabel("share of the weights, %, in the order of the network")
        panel.grid(axis="x", visible=False)
        for entry, left, width, height in zip(layout.entries, lefts, widths, bits, strict=True):
            # At this size a letter takes about 1.1 hundredths of the width, and a line of them 2.4.
            label = short(entry.name.removesuffix(".weight"), 24)
            lies = 1.1 * len(label) < width
            if lies or (width > 2.4 and height > 0.55 * top):
                turn = 0 if lies else 90
                panel.text(left + width / 2, 0.02 * top, label, ha="center", rotation=turn, fontsize=7.5)

    cost = [pool.weights * pool.entropy_bits for pool in pools]
    most = cost.index(max(cost))
    return Figure(
        key="layers-by-bits",
        title="Layers by bits",
        how_to_read="Each bar is a layer: its width is its share of the weights, its height the entropy per "
        "weight, its area the bits it takes. The dashed line is the entropy of all weights in one pool.",
        alt=f"{len(pools)} parameters with {whole.weights:,} weights; {layout.entries[most].name} takes the "
        f"most bits, {cost[most] / (sum(cost) or 1):.0%} of those of all layers; entropy goes from "
        f"{min(bits):.2f} to {max(bits):.2f} bits per weight, and is {whole.entropy_bits:.2f} in one pool.",
        draw=draw,
        height=2.7,
    )
