"""The section on what a run saves at each inference: products, bytes read, energy."""

from __future__ import annotations

import torch

from pwfn.errors import PwfnError
from pwfn.lab.costs import MOST_TERMS, CostSheet, Storage, cost_sheet
from pwfn.report.facts import RunFacts
from pwfn.report.markup import Markup, element, joined
from pwfn.report.tables import Cell, Column, bar, count, decimal, percent, table
from pwfn.run.resolve import network_of
from pwfn.zoo import models

_STORED = {
    Storage.FP32: "fp32",
    Storage.INT8: "int8",
    Storage.INDICES: "indices of fixed width",
    Storage.CODED: "indices, entropy-coded",
}


def section(run: RunFacts) -> Markup:
    """The cost sheet of a network that can be made by the name in its file; else why there is none."""
    try:
        sheet = _sheet(run)
    except PwfnError as error:
        return element(
            "p", f"Not counted, as the network cannot be made here by its name: {error}.", class_="note"
        )
    return joined(
        element(
            "p", "One inference of one example; products are counted, energy is an estimate.", class_="note"
        ),
        element("div", _products(sheet), _traffic(sheet), class_="pair"),
        _energy(sheet),
        element(
            "details",
            element("summary", "What the estimate assumes"),
            element("ul", [element("li", text) for text in sheet.assumptions]),
        ),
    )


def _sheet(run: RunFacts) -> CostSheet:
    compressed = run.run.compressed
    name = models.recorded(compressed.record)
    network = network_of(compressed, name)
    shape = models.input_shape(name, network)
    if shape is None:
        raise PwfnError(f"the shape of an input of {name!r} is not known")
    return cost_sheet(compressed, network, torch.zeros(1, *shape), file=run.run.folder / "model.pwfn")


def _products(sheet: CostSheet) -> Markup:
    whole = sheet.whole
    every = max(whole.macs + whole.uncompressed_macs, 1)
    kinds = [(_kind(order), whole.macs_by_order.get(order, 0)) for order in range(MOST_TERMS + 1)]
    kinds.append(("stays a multiplication", whole.multiplied_macs))
    kinds.append(("has no compressed weight", whole.uncompressed_macs))
    columns = [
        Column("A product", is_number=False),
        Column("Number"),
        Column("Share"),
        Column("", is_number=False),
    ]
    rows = [[Cell(text), count(n), percent(n / every), bar(n / every)] for text, n in kinds if n]
    return table(f"What becomes of {every:,} multiplications", columns, rows, class_="bars")


def _kind(order: int) -> str:
    """
    >>> [_kind(order) for order in (0, 1, 2, 3)]
    ['is left out: times 0', 'is a shift', '2 shifts, 1 addition', '3 shifts, 2 additions']
    """
    if order < 2:
        return "is a shift" if order else "is left out: times 0"
    return f"{order} shifts, {order - 1} addition{'s' if order > 2 else ''}"


def _traffic(sheet: CostSheet) -> Markup:
    traffic = sheet.whole.traffic
    columns = [Column("Weights as", is_number=False), Column("Bytes read"), Column("Less than fp32")]
    columns.append(Column("", is_number=False))
    most = max(traffic.fp32_bytes, 1)
    rows = [
        [
            Cell(words),
            count(traffic.of(storage)),
            Cell(f"{most / max(traffic.of(storage), 1):.1f}×", most / max(traffic.of(storage), 1)),
            bar(traffic.of(storage) / most),
        ]
        for storage, words in _STORED.items()
    ]
    return table("Bytes of weights, each read once", columns, rows, class_="bars")


def _energy(sheet: CostSheet) -> Markup:
    columns = [Column("Arithmetic", is_number=False), Column("Weights as", is_number=False)]
    columns += [Column(head) for head in ("Compute, µJ", "Weights, µJ", "Both, µJ", "Of fp32")]
    fp32 = sheet.whole.energy[0].energy_microjoules or 1.0
    rows = [
        [
            Cell(each.arithmetic.replace("_", " ")),
            Cell(_STORED[each.storage]),
            decimal(each.compute_microjoules, 3),
            decimal(each.traffic_microjoules, 3),
            decimal(each.energy_microjoules, 3),
            percent(each.energy_microjoules / fp32),
        ]
        for each in sheet.whole.energy
    ]
    return table("Energy: an estimate from published figures for 45 nm", columns, rows)
