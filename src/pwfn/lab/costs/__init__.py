"""The cost of one inference: multiplications that become shifts, bytes of weights read, and energy.

sheet = cost_sheet(compressed, model, images[:1], file="model.pwfn")
sheet.shift_macs, sheet.bytes_read[Storage.CODED], sheet.energy

Products and bytes are counted exactly. The energy is an estimate; the sheet states its assumptions.
"""

from pwfn.lab.costs.products import count_products
from pwfn.lab.costs.sheet import MOST_TERMS, Arithmetic, CostSheet, Storage, cost_sheet

__all__ = ["MOST_TERMS", "Arithmetic", "CostSheet", "Storage", "cost_sheet", "count_products"]
