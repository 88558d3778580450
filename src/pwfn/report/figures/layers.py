"""Where in the network the bits are: by layer, by input channel, and for queries, keys and values."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from pwfn.evaluate.entropy import Pool, per_attention_part, per_input_channel, summarise
from pwfn.layout import Kind
from pwfn.report.figures.canvas import INK, SERIES, Drawing, boxes, percents, quantile, short
from pwfn.report.reading import RunData

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure as Sheet

_PARTS = ("q", "k", "v")
_PART_NAMES = {"q": "Queries", "k": "Keys", "v": "Values"}
_NAMED = 16  # layers whose names fit below an axis


def attention(run: RunData) -> Drawing | None:
    """Entropy and unique values per input channel of q, k and v, by layer (paper, figure of DeiT)."""
    layout, values = run.compressed.layout, run.compressed.values()
    # A layer may have one projection for all three, or one for each.
    found: dict[str, list[list[Pool]]] = {part: [] for part in _PARTS}
    for entry in layout.entries:
        if entry.kind is Kind.WEIGHT and entry.attention is not None:
            for part, pools in per_attention_part(layout, values, entry.name).items():
                found[part].append(pools)
    if not all(found.values()):
        return None
    depth = max(map(len, found.values()))

    def draw(sheet: Sheet) -> None:
        panels = sheet.subplots(2, 3, sharex=True, sharey="row")
        for column, part in enumerate(_PARTS):
            layers = found[part]
            at = list(range(1, len(layers) + 1))
            _boxes(panels[0][column], at, [[p.entropy_bits for p in pools] for pools in layers], 5)
            _boxes(panels[1][column], at, [[float(p.unique) for p in pools] for pools in layers], 5)
            panels[0][column].set_title(f"{_PART_NAMES[part]} ({part})")
            panels[1][column].set_xlabel("layer")
            panels[1][column].set_xticks(range(1, depth + 1, max(1, round(depth / 6))))
            panels[1][column].set_xlim(0.3, depth + 0.7)
        panels[0][0].set_ylabel("entropy, bits a weight")
        panels[1][0].set_ylabel("unique values")

    means = {
        part: [_mean([p.entropy_bits for p in pools]) for pools in layers] for part, layers in found.items()
    }
    return Drawing(
        key="attention",
        title="Queries, keys and values by layer",
        how_to_read="For every layer a box over its input channels (the middle half, the median, whiskers "
        "from 5 % to 95 %), and as a line the mean of each layer: the lower, the fewer bits and values "
        "that part needs.",
        alt=f"Over {depth} layers the mean entropy per input channel is "
        + ", ".join(f"{min(m):.2f} to {max(m):.2f} bits for {part}" for part, m in means.items())
        + "; the mean number of unique values is "
        + ", ".join(
            f"{_mean([p.unique for pools in layers for p in pools]):.1f} for {part}"
            for part, layers in found.items()
        )
        + ".",
        draw=draw,
        height=4.0,
        table=(
            (
                "layer",
                *(f"entropy of {part}, bits" for part in _PARTS),
                *(f"unique, {part}" for part in _PARTS),
            ),
            tuple(
                (
                    str(number + 1),
                    *(_of_layer(found[part], number, lambda p: p.entropy_bits, 2) for part in _PARTS),
                    *(_of_layer(found[part], number, lambda p: p.unique, 1) for part in _PARTS),
                )
                for number in range(depth)
            ),
        ),
    )


def _of_layer(layers: list[list[Pool]], number: int, what: Callable[[Pool], float], places: int) -> str:
    return f"{_mean([what(p) for p in layers[number]]):.{places}f}" if number < len(layers) else "–"


def channels(run: RunData) -> Drawing | None:
    """Entropy and unique values per input channel, by layer: for networks without attention."""
    layout, values = run.compressed.layout, run.compressed.values()
    if any(entry.attention for entry in layout.entries):
        return None
    found = {
        entry.name: pools
        for entry in layout.entries
        if entry.kind is Kind.WEIGHT and (pools := per_input_channel(layout, values, entry.name))
    }
    if not found:
        return None

    def draw(sheet: Sheet) -> None:
        upper, lower = sheet.subplots(2, 1, sharex=True)
        at, width = list(range(1, len(found) + 1)), max(2.0, min(12.0, 240 / len(found)))
        _boxes(upper, at, [[p.entropy_bits for p in pools] for pools in found.values()], width)
        _boxes(lower, at, [[float(p.unique) for p in pools] for pools in found.values()], width)
        upper.set_ylabel("entropy,\nbits a weight")
        lower.set_ylabel("unique values")
        lower.set_xlim(0.3, len(found) + 0.7)
        if len(found) <= _NAMED:
            labels = [short(name.removesuffix(".weight"), 18) for name in found]
            lower.set_xticks(at, labels, rotation=40, ha="right", rotation_mode="anchor")
        else:
            lower.set_xlabel("layer, in the order of the network")

    bits = {name: _mean([p.entropy_bits for p in pools]) for name, pools in found.items()}
    unique = {name: _mean([p.unique for p in pools]) for name, pools in found.items()}
    low, high = min(bits, key=lambda name: bits[name]), max(bits, key=lambda name: bits[name])
    return Drawing(
        key="channels",
        title="Entropy and unique values per input channel, by layer",
        how_to_read="For every layer a box over its input channels (the middle half, the median, whiskers "
        "from 5 % to 95 %), and as a line the mean of each layer: a channel with few values can be stored "
        "and multiplied cheaply.",
        alt=f"Of {len(found)} layers the mean entropy per input channel is lowest in {low} "
        f"({bits[low]:.2f} bits) and highest in {high} ({bits[high]:.2f} bits); the mean number of unique "
        f"values is between {min(unique.values()):.1f} and {max(unique.values()):.1f}.",
        draw=draw,
        height=4.0,
        table=(
            ("layer", "input channels", "mean entropy, bits", "mean unique values"),
            tuple(
                (name, str(len(found[name])), f"{bits[name]:.2f}", f"{unique[name]:.1f}") for name in found
            ),
        ),
    )


def _boxes(panel: Axes, at: Sequence[float], columns: Sequence[Sequence[float]], width: float) -> None:
    boxes(panel, at, columns, SERIES[0], width)
    panel.plot(at, [_mean(column) for column in columns], color=INK, linewidth=1.0)
    panel.set_ylim(0, 1.08 * max([*(quantile(column, 0.95) for column in columns), 0.1]))


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)


def layer_map(run: RunData) -> Drawing | None:
    """Layers side by side: the width of each is its share of the weights, its height the bits of a weight."""
    layout = run.compressed.layout
    summary = summarise(layout, run.compressed.values())
    layers = [(entry.name, summary.layers[entry.name]) for entry in layout.entries]
    total = summary.whole.weights
    widths = percents(pool.weights / total for _, pool in layers)
    lefts = [sum(widths[:i]) for i in range(len(widths))]
    bits = [pool.entropy_bits for _, pool in layers]

    def draw(sheet: Sheet) -> None:
        panel = sheet.subplots()
        # Two strengths in turn, so that neighbours are told apart without a line between them.
        order = list(dict.fromkeys(entry.layer for entry in layout.entries))
        for turn, strength in ((0, 0.5), (1, 0.28)):
            own = [i for i, entry in enumerate(layout.entries) if order.index(entry.layer) % 2 == turn]
            bars = [[column[i] for i in own] for column in (lefts, bits, widths)]
            panel.bar(*bars, align="edge", color=SERIES[0], alpha=strength)
        panel.axhline(summary.whole.entropy_bits, color=INK, linewidth=1.0, linestyle=(0, (4, 3)))
        panel.set_ylim(0, 1.08 * max([*bits, summary.whole.entropy_bits, 0.1]))
        panel.set_xlim(0, 100)
        panel.grid(axis="x", visible=False)
        for (name, _), left, width, height in zip(layers, lefts, widths, bits, strict=True):
            # At this size a letter takes about 1.1 hundredths of the width, and a line of them 2.4.
            label = short(name.removesuffix(".weight"), 24)
            lies = 1.1 * len(label) < width
            if lies or (width > 2.4 and height > 0.55 * panel.get_ylim()[1]):
                panel.annotate(
                    label,
                    (left + width / 2, 0),
                    xytext=(0, 4),
                    textcoords="offset points",
                    ha="center",
                    va="bottom",
                    rotation=0 if lies else 90,
                    fontsize=7.5,
                )
        panel.set_xlabel("share of the weights, %, in the order of the network")
        panel.set_ylabel("entropy, bits a weight")

    cost = {name: pool.weights * pool.entropy_bits for name, pool in layers}
    first = max(cost, key=lambda name: cost[name])
    whole = sum(cost.values()) or 1.0
    return Drawing(
        key="map",
        title="Layers by bits",
        how_to_read="Each bar is a layer: its width is its share of the weights, its height the entropy of "
        "a weight, and so its area the bits that it takes; the dashed line is all weights in one pool.",
        alt=f"{len(layers)} parameters with {total:,} weights; {first} takes the most bits, "
        f"{cost[first] / whole:.0%} of those of all layers; entropy goes from {min(bits):.2f} to "
        f"{max(bits):.2f} bits a weight, and is {summary.whole.entropy_bits:.2f} in one pool.",
        draw=draw,
        height=2.7,
        table=(
            ("layer", "weights", "entropy, bits", "unique values", "share of the bits"),
            tuple(
                (
                    name,
                    f"{pool.weights:,}",
                    f"{pool.entropy_bits:.2f}",
                    str(pool.unique),
                    f"{cost[name] / whole:.1%}",
                )
                for name, pool in layers
            ),
        ),
    )
