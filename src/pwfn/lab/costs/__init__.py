"""The cost of one inference: multiplications that become shifts, bytes of weights read, and energy.

sheet = cost_sheet(compressed, model, images[:1], file="model.pwfn")
sheet.whole.shift_macs, sheet.whole.traffic.coded_bytes, sheet.whole.energy

Products and bytes are counted exactly. The energy is an estimate; the sheet states its assumptions.
"""

from pwfn.lab.costs.products import count_products
from pwfn.lab.costs.sheet import (
    MOST_TERMS,
    Arithmetic,
    Cost,
    CostSheet,
    EnergyFigures,
    Storage,
    Traffic,
    cost_sheet,
)

__all__ = [
    "MOST_TERMS",
    "Arithmetic",
    "Cost",
    "CostSheet",
    "EnergyFigures",
    "Storage",
    "Traffic",
    "cost_sheet",
    "count_products",
]
