"""The cost sheet: products counted in one forward pass, bytes read, energy estimated."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from torch import nn

from pwfn.file.compressed import Compressed
from pwfn.lab.costs.energy import ASSUMPTIONS, MOST_TERMS, Energy, EnergyFigures, energies
from pwfn.lab.costs.products import Example, count_products
from pwfn.lab.costs.traffic import Storage, Traffic, traffic_of, untouched_bytes
from pwfn.layout import Kind

_NAMED = 8  # weights in a line of text
_STORED = {
    Storage.FP32: "fp32",
    Storage.INT8: "int8",
    Storage.INDICES: "indices of a fixed number of bits",
    Storage.CODED: "entropy-coded, as in a file",
}


@dataclass(frozen=True, repr=False)
class Cost:
    """Of one layer or of the whole network: products of one inference, bytes of weights, and energy."""

    name: str  # of the layer; empty for the model itself and for the whole network
    layer_type: str
    weights: int
    macs_by_order: Mapping[int, int]  # multiply-accumulates by the order of their weight
    uncompressed_macs: int  # without a compressed weight; counted for the whole network only
    traffic: Traffic
    energy: tuple[Energy, ...]  # one for each of energy.PAIRS

    def __repr__(self) -> str:
        return f"Cost({self.name or self.layer_type!r}, weights={self.weights}, macs={self.macs})"

    @property
    def macs(self) -> int:
        """Multiply-accumulates with a compressed weight."""
        return sum(self.macs_by_order.values())

    @property
    def skipped_macs(self) -> int:
        """Those whose weight is 0."""
        return self.macs_by_order.get(0, 0)

    @property
    def shift_macs(self) -> int:
        """Those whose weight is plus or minus a power of two."""
        return self.macs_by_order.get(1, 0)

    @property
    def shift_add_macs(self) -> int:
        """Those whose weight is a sum of two to MOST_TERMS powers of two."""
        return sum(n for order, n in self.macs_by_order.items() if 2 <= order <= MOST_TERMS)

    @property
    def multiplied_macs(self) -> int:
        """Those whose weight needs more powers of two: they stay multiplications."""
        return sum(n for order, n in self.macs_by_order.items() if order > MOST_TERMS)


@dataclass(frozen=True, repr=False)
class CostSheet:
    """What one inference of one example costs; the energy is an estimate.

    The traffic of ``whole`` is that of the layers, of codebooks and frequency tables where the storage has
    them, and of the uncompressed tensors, which are the same in every storage.
    """

    whole: Cost
    layers: tuple[Cost, ...]
    untouched_bytes: int  # of the uncompressed tensors, counted in ``whole``
    not_multiplied: tuple[str, ...]  # compressed weights in no convolution and no matrix product
    figures: EnergyFigures
    assumptions: tuple[str, ...] = ASSUMPTIONS

    def __repr__(self) -> str:
        return f"CostSheet(layers={len(self.layers)}, weights={self.whole.weights}, macs={self.whole.macs})"

    def lines(self) -> list[str]:
        """Text for a terminal, one string per line."""
        whole = self.whole
        every = whole.macs + whole.uncompressed_macs
        rows = [f"one inference of one example: {every:,} multiply-accumulates"]
        counts = [(_kind(order), whole.macs_by_order.get(order, 0)) for order in range(MOST_TERMS + 1)]
        counts.append((f"multiplied: a weight of order above {MOST_TERMS}", whole.multiplied_macs))
        counts.append(("in full precision: no compressed weight", whole.uncompressed_macs))
        rows += [f"  {text:<42}{n:>18,}{n / max(every, 1):>8.1%}" for text, n in counts if n]
        rows += [f"weights read once, with {self.untouched_bytes:,} bytes of uncompressed tensors each time"]
        for storage, text in _STORED.items():
            size = whole.traffic.of(storage)
            ratio = whole.traffic.fp32_bytes / max(size, 1)
            rows.append(f"  {text:<42}{size:>18,} bytes{ratio:>8.1f}×")
        rows.append(f"{'energy in microjoules: an ESTIMATE':<44}{'compute':>12}{'traffic':>12}{'sum':>12}")
        for e in whole.energy:
            figures = (e.compute_microjoules, e.traffic_microjoules, e.energy_microjoules)
            text = f"{e.arithmetic.replace('_', ' ')}, weights as {e.storage}"
            rows.append(f"  {text:<42}" + "".join(f"{figure:>12,.3f}" for figure in figures))
        if self.not_multiplied:
            more = len(self.not_multiplied) - _NAMED
            rows.append(
                "compressed, but in no convolution and no matrix product (looked up, added, or changed "
                f"before use): {', '.join(self.not_multiplied[:_NAMED])}"
                + (f" and {more:,} more" if more > 0 else "")
            )
        return [*rows, "assumptions:", *(f"  - {text}" for text in self.assumptions)]


def cost_sheet(
    compressed: Compressed,
    model: nn.Module,
    example: Example,
    *,
    file: str | Path | None = None,
    batch_axis: int = 0,
    figures: EnergyFigures | None = None,
) -> CostSheet:
    """What one inference costs, from one forward pass of a dense model of the same architecture.

    ``example`` is a batch of one: a tensor, a tuple of the model's inputs, or a mapping of them by name.
    Coded bytes are those of ``file``, the .pwfn file of this network, or of one written in memory. The values
    of the model's weights do not matter: orders are those of ``compressed``.

    >>> import torch
    >>> from pwfn.layout import Layout
    >>> model = nn.Linear(3, 2, bias=False)
    >>> weights = torch.tensor([0.5, 0.0, 0.75, -1.0, 0.0, 0.3])
    >>> sheet = cost_sheet(Compressed.of(Layout.of(model), weights, None, {}), model, torch.ones(1, 3))
    >>> whole = sheet.whole
    >>> whole.macs, whole.skipped_macs, whole.shift_macs, whole.shift_add_macs, whole.multiplied_macs
    (6, 2, 2, 1, 1)
    """
    products = count_products(compressed, model, example, batch_axis=batch_axis)
    entries = compressed.layout.entries
    traffic, shared = traffic_of(compressed, file)
    untouched = untouched_bytes(compressed)
    figures = figures or EnergyFigures()

    def cost(name: str, layer_type: str, own: list[int], uncompressed: int, besides: Traffic) -> Cost:
        total: Counter[int] = Counter()
        for i in own:
            total.update(products.by_order[i])
        macs = dict(sorted(total.items()))
        read = sum((traffic[i] for i in own), besides)
        energy = energies(macs, uncompressed, read, figures)
        return Cost(name, layer_type, sum(entries[i].size for i in own), macs, uncompressed, read, energy)

    by_layer: dict[str, list[int]] = {}
    for i, entry in enumerate(entries):
        by_layer.setdefault(entry.layer, []).append(i)
    everywhere = shared + Traffic(untouched, untouched, untouched, untouched)
    return CostSheet(
        whole=cost("", type(model).__name__, [*range(len(entries))], products.uncompressed, everywhere),
        layers=tuple(
            cost(layer, entries[own[0]].layer_type, own, 0, Traffic()) for layer, own in by_layer.items()
        ),
        untouched_bytes=untouched,
        not_multiplied=tuple(
            entry.name
            for entry, macs in zip(entries, products.by_order, strict=True)
            if entry.kind is Kind.WEIGHT and not macs
        ),
        figures=figures,
    )


def _kind(order: int) -> str:
    if order == 0:
        return "skipped: the weight is 0"
    if order == 1:
        return "a shift: a power of two"
    return f"{order} shifts, {order - 1} add{'s' if order > 2 else ''}: order {order}"
