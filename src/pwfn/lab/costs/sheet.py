"""The cost sheet: products counted in one forward pass, bytes read, and an estimate of the energy."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

import torch
from torch import nn

from pwfn.errors import FileError
from pwfn.file.compressed import Compressed
from pwfn.file.format import Reader
from pwfn.lab.costs.products import Example, count_products
from pwfn.layout import Kind

MOST_TERMS = 4
"""A weight that needs more powers of two stays a multiplication: candidates have order 4 at most."""


class Storage(StrEnum):
    """How the weights are stored in memory."""

    FP32 = "fp32"
    INT8 = "int8"
    INDICES = "indices"
    CODED = "coded"


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


DRAM_PICOJOULES = 1300 / 8
"""To read one byte. 64 bits take 1.3 to 2.6 nJ (Horowitz 2014); the lower end is used here."""


def picojoules(arithmetic: Arithmetic, order: int) -> float:
    """Energy of one product with a weight of that order, added to a sum, at 45 nm and 0.9 V.

    M. Horowitz, "Computing's energy problem (and what we can do about it)", ISSCC 2014. Shifts, which it does
    not list, are from H. You et al., "ShiftAddNet", NeurIPS 2020, also at 45 nm.

    >>> picojoules(Arithmetic.FP32, order=1), picojoules(Arithmetic.INT8, order=1)
    (4.6, 0.3)
    """
    int8_add, int32_add, fp32_add = 0.03, 0.1, 0.9
    int8_multiply, int32_multiply, fp32_multiply = 0.2, 3.1, 3.7
    int32_shift = 0.13
    if arithmetic is Arithmetic.INT8:
        cost = int8_multiply + int32_add
    elif arithmetic is Arithmetic.FLOAT_SHIFTS and order <= MOST_TERMS:
        cost = order * (int8_add + fp32_add)
    elif arithmetic is Arithmetic.FIXED_SHIFTS and order <= MOST_TERMS:
        cost = order * (int32_shift + int32_add)
    elif arithmetic is Arithmetic.FIXED_SHIFTS:
        cost = int32_multiply + int32_add
    else:
        cost = fp32_multiply + fp32_add
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


@dataclass(frozen=True)
class CostSheet:
    """What one inference of one example costs; the energy is an estimate."""

    macs_by_order: Mapping[int, int]  # multiply-accumulates by the order of their weight
    uncompressed_macs: int  # those without a compressed weight
    bytes_read: Mapping[Storage, int]  # of weights and their codebooks, and of the uncompressed tensors
    energy: tuple[Energy, ...]  # one for each of PAIRS
    not_multiplied: tuple[str, ...]  # compressed weights in no convolution and no matrix product
    assumptions: tuple[str, ...] = ASSUMPTIONS

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


def cost_sheet(
    compressed: Compressed, model: nn.Module, example: Example, *, file: str | Path | None = None
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
    >>> sheet.macs, sheet.skipped_macs, sheet.shift_macs, sheet.shift_add_macs, sheet.multiplied_macs
    (6, 2, 2, 1, 1)
    """
    products = count_products(compressed, model, example)
    total: Counter[int] = Counter()
    for macs in products.by_order:
        total.update(macs)
    by_order = dict(sorted(total.items()))
    read = bytes_read(compressed, file)
    energy = []
    for arithmetic, storage in PAIRS:
        compute = sum(n * picojoules(arithmetic, order) for order, n in by_order.items())
        compute += products.uncompressed * picojoules(Arithmetic.FP32, 1)
        energy.append(Energy(arithmetic, storage, 1e-6 * compute, 1e-6 * (read[storage] * DRAM_PICOJOULES)))
    return CostSheet(
        by_order,
        products.uncompressed,
        read,
        tuple(energy),
        not_multiplied=tuple(
            entry.name
            for entry, macs in zip(compressed.layout.entries, products.by_order, strict=True)
            if entry.kind is Kind.WEIGHT and not macs
        ),
    )


def bytes_read(compressed: Compressed, file: str | Path | None = None) -> dict[Storage, int]:
    """Bytes of all weights in each storage, with the uncompressed tensors, which are the same in all.

    fp32: 4 per weight. int8: 1 per weight, and a scale of 4 per tensor. Indices: ``ceil(log2 K)`` bits per
    weight for K values in its codebook, each tensor in whole bytes, and the codebooks. Coded: as in the
    file, or in one written now.
    """
    entries, books = compressed.layout.entries, compressed.codebooks
    untouched, weights = untouched_bytes(compressed), compressed.layout.size
    indices = sum(book.nbytes for book in books)
    for entry, division in zip(entries, compressed.divisions, strict=True):
        part = entry.size // len(division.codebooks)
        bits = sum(part * (books[book].numel() - 1).bit_length() for book in division.codebooks)
        indices += -(-bits // 8)
    return {
        Storage.FP32: untouched + 4 * weights,
        Storage.INT8: untouched + weights + 4 * len(entries),
        Storage.INDICES: untouched + indices,
        Storage.CODED: untouched + _coded_bytes(compressed, file),
    }


def untouched_bytes(compressed: Compressed) -> int:
    """Of the uncompressed floating-point tensors, in fp32 or narrower; tied ones once."""
    aliases = {alias for left_out in compressed.layout.left_out for alias in left_out.aliases}
    return sum(
        tensor.numel() * min(tensor.element_size(), 4)
        for name, tensor in compressed.untouched.items()
        if name not in aliases and tensor.is_floating_point()
    )


def _coded_bytes(compressed: Compressed, file: str | Path | None) -> int:
    """Bytes of indices, codebooks and frequency tables in a file."""
    reader = Reader(compressed.dumps(posterior="none") if file is None else file)
    books, own_books = reader.codebooks(), compressed.codebooks
    theirs, ours = (
        [(entry.name, entry.shape) for entry in layout.entries]
        for layout in (reader.header.layout, compressed.layout)
    )
    if theirs != ours or len(books) != len(own_books) or not all(map(torch.equal, books, own_books)):
        raise FileError(
            f"{file}: its layers or codebooks are not those of this network: pass the file it was saved to"
        )
    sizes = reader.sizes
    return sizes.indices + sizes.codebooks + sizes.tables
