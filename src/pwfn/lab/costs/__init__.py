"""What an inference of one example costs: multiplications that become shifts, weights read, energy.

sheet = cost_sheet(compressed, model, images[:1], file="model.pwfn")
print("\\n".join(sheet.lines()))

The products are counted, exactly. The energy is an estimate, and says under which assumptions.
"""

from pwfn.lab.costs.energy import ASSUMPTIONS, MOST_TERMS, PAIRS, Arithmetic, Energy, EnergyFigures
from pwfn.lab.costs.products import Example, Products, count_products
from pwfn.lab.costs.sheet import Cost, CostSheet, cost_sheet
from pwfn.lab.costs.traffic import Storage, Traffic

__all__ = [
    "ASSUMPTIONS",
    "MOST_TERMS",
    "PAIRS",
    "Arithmetic",
    "Cost",
    "CostSheet",
    "Energy",
    "EnergyFigures",
    "Example",
    "Products",
    "Storage",
    "Traffic",
    "cost_sheet",
    "count_products",
]
