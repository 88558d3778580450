"""Energy of an inference, estimated from published figures for single operations."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum

from pwfn.lab.costs.traffic import Storage, Traffic

MOST_TERMS = 4
"""A weight that needs more powers of two stays a multiplication: candidates have order 4 at most."""


class Arithmetic(StrEnum):
    """How a product with a weight is computed."""

    FP32 = "fp32"
    INT8 = "int8"
    FLOAT_SHIFTS = "float_shifts"  # activations stay fp32: a shift is an addition to the exponent
    FIXED_SHIFTS = "fixed_shifts"  # activations are 32-bit integers


PAIRS = (
    (Arithmetic.FP32, Storage.FP32),
    (Arithmetic.INT8, Storage.INT8),
    (Arithmetic.FLOAT_SHIFTS, Storage.INDICES),
    (Arithmetic.FLOAT_SHIFTS, Storage.CODED),
    (Arithmetic.FIXED_SHIFTS, Storage.INDICES),
    (Arithmetic.FIXED_SHIFTS, Storage.CODED),
)
"""The combinations for which the energy is estimated."""

ASSUMPTIONS = (
    "one example at a time; every weight and every uncompressed tensor is read from DRAM once, however "
    "often it is used",
    "not counted: activations and caches, biases' additions, normalisation, softmax, other element-wise "
    "functions, control, leakage, and decoding of indices",
    "products with the zeros of padding count, as in other counts of multiply-accumulates",
    "a weight that is 0 costs nothing; one that is a sum of n powers of two, n at most 4, costs n shifts "
    "and n additions, the last to the accumulator; any other costs a multiplication",
    "float shifts: activations and sums are fp32, as where accuracy is measured; a shift is an 8-bit "
    "addition to the exponent",
    "fixed shifts and int8: activations are 32-bit and 8-bit integers, sums 32-bit; the effect on accuracy "
    "is not known here",
    "products without a compressed weight (attention scores, layers left out) are fp32 everywhere",
    "energy of one operation: 45 nm, 0.9 V (Horowitz 2014), for DRAM the lower end of its range, which "
    "favours small weights least; for a shift, which it does not list, ShiftAddNet (You et al. 2020)",
)


@dataclass(frozen=True)
class EnergyFigures:
    """Energy of one operation, in picojoules, at 45 nm and 0.9 V.

    M. Horowitz, "Computing's energy problem (and what we can do about it)", ISSCC 2014. Shifts, which it does
    not list, are from H. You et al., "ShiftAddNet", NeurIPS 2020, also at 45 nm. DRAM takes 1.3 to 2.6 nJ for
    64 bits; the lower end is used here.

    >>> EnergyFigures().product(Arithmetic.FP32, order=1), EnergyFigures().product(Arithmetic.INT8, order=1)
    (4.6, 0.3)
    """

    int8_add: float = 0.03
    int32_add: float = 0.1
    fp32_add: float = 0.9
    int8_multiply: float = 0.2
    int32_multiply: float = 3.1
    fp32_multiply: float = 3.7
    int32_shift: float = 0.13
    dram_byte: float = 1300 / 8

    def product(self, arithmetic: Arithmetic, order: int) -> float:
        """One product with a weight of that order, added to a sum, in picojoules."""
        if arithmetic is Arithmetic.INT8:
            cost = self.int8_multiply + self.int32_add
        elif arithmetic is Arithmetic.FLOAT_SHIFTS and order <= MOST_TERMS:
            cost = order * (self.int8_add + self.fp32_add)
        elif arithmetic is Arithmetic.FIXED_SHIFTS and order <= MOST_TERMS:
            cost = order * (self.int32_shift + self.int32_add)
        elif arithmetic is Arithmetic.FIXED_SHIFTS:
            cost = self.int32_multiply + self.int32_add
        else:
            cost = self.fp32_multiply + self.fp32_add
        return round(cost, 9)  # 3.7 + 0.9 is 4.6000000000000005 in float64


@dataclass(frozen=True)
class Energy:
    """An estimate of the energy of one inference."""

    arithmetic: Arithmetic
    storage: Storage
    compute_microjoules: float
    traffic_microjoules: float

    @property
    def energy_microjoules(self) -> float:
        """Compute and traffic together."""
        return self.compute_microjoules + self.traffic_microjoules


def energies(
    macs_by_order: Mapping[int, int], uncompressed_macs: int, traffic: Traffic, figures: EnergyFigures
) -> tuple[Energy, ...]:
    """The estimate for each of PAIRS: products times energy of one, and bytes times energy of one.

    >>> traffic = Traffic(fp32_bytes=8, int8_bytes=6, index_bytes=1, coded_bytes=1)
    >>> fp32, *_, coded = energies({0: 1, 1: 1}, 0, traffic, EnergyFigures())
    >>> [round(e.compute_microjoules * 1e6, 6) for e in (fp32, coded)]
    [9.2, 0.23]
    """
    found = []
    for arithmetic, storage in PAIRS:
        products = sum(n * figures.product(arithmetic, order) for order, n in macs_by_order.items())
        products += uncompressed_macs * figures.product(Arithmetic.FP32, 1)
        read = traffic.of(storage) * figures.dram_byte
        found.append(Energy(arithmetic, storage, 1e-6 * products, 1e-6 * read))
    return tuple(found)
