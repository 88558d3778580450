"""The cost sheet: products counted in one forward pass, bytes read, and an estimate of the energy."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import astuple, dataclass
from enum import StrEnum
from operator import add
from pathlib import Path

import torch
from torch import Tensor, nn

from pwfn.errors import FileError
from pwfn.file.compressed import Compressed
from pwfn.file.content import Division
from pwfn.file.format import Reader
from pwfn.lab.costs.products import Example, count_products
from pwfn.layout import Entry, Kind

MOST_TERMS = 4
"""A weight that needs more powers of two stays a multiplication: candidates have order 4 at most."""


class Storage(StrEnum):
    """How the weights are stored in memory."""

    FP32 = "fp32"
    INT8 = "int8"
    INDICES = "indices"
    CODED = "coded"


@dataclass(frozen=True)
class Traffic:
    """Bytes of the same weights in each storage, in the order of :class:`Storage`."""

    fp32_bytes: int = 0  # 4 per weight
    int8_bytes: int = 0  # 1 per weight, and a scale of 4 bytes per tensor
    index_bytes: int = 0  # ceil(log2 K) bits per weight, for K values in its codebook
    coded_bytes: int = 0  # entropy-coded

    def of(self, storage: Storage) -> int:
        """The bytes in one storage."""
        return dict(zip(Storage, astuple(self), strict=True))[storage]

    def __add__(self, other: Traffic) -> Traffic:
        return Traffic(*map(add, astuple(self), astuple(other)))


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


@dataclass(frozen=True, repr=False)
class Cost:
    """Of one layer or of the whole network: products of one inference, bytes of weights, and energy."""

    name: str  # of the layer; empty for the model itself and for the whole network
    layer_type: str
    weights: int
    macs_by_order: Mapping[int, int]  # multiply-accumulates by the order of their weight
    uncompressed_macs: int  # without a compressed weight; counted for the whole network only
    traffic: Traffic
    energy: tuple[Energy, ...]  # one for each of PAIRS

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
    assumptions: tuple[str, ...] = ASSUMPTIONS

    def __repr__(self) -> str:
        return f"CostSheet(layers={len(self.layers)}, weights={self.whole.weights}, macs={self.whole.macs})"


def cost_sheet(
    compressed: Compressed,
    model: nn.Module,
    example: Example,
    *,
    file: str | Path | None = None,
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
    products = count_products(compressed, model, example)
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
    )


def traffic_of(compressed: Compressed, file: str | Path | None = None) -> tuple[list[Traffic], Traffic]:
    """Of each entry of the layout, and of what all entries share: codebooks and frequency tables.

    Coded bytes are those of the file, or of one written now.
    """
    entries, books = compressed.layout.entries, compressed.codebooks
    coded, shared = _coded(compressed, file)
    of_entries = [
        Traffic(4 * entry.size, entry.size + 4, _index_bytes(entry, division, books), size)
        for entry, division, size in zip(entries, compressed.divisions, coded, strict=True)
    ]
    return of_entries, Traffic(index_bytes=sum(book.nbytes for book in books), coded_bytes=shared)


def untouched_bytes(compressed: Compressed) -> int:
    """Of the uncompressed floating-point tensors, in fp32 or narrower; tied ones once."""
    aliases = {alias for left_out in compressed.layout.left_out for alias in left_out.aliases}
    return sum(
        tensor.numel() * min(tensor.element_size(), 4)
        for name, tensor in compressed.untouched.items()
        if name not in aliases and tensor.is_floating_point()
    )


def _index_bytes(entry: Entry, division: Division, books: tuple[Tensor, ...]) -> int:
    """``ceil(log2 K)`` bits per weight, K the size of the codebook of its part; in whole bytes."""
    part = entry.size // len(division.codebooks)
    bits = sum(part * (books[book].numel() - 1).bit_length() for book in division.codebooks)
    return -(-bits // 8)


def _coded(compressed: Compressed, file: str | Path | None) -> tuple[list[int], int]:
    """Bytes of the indices of each entry; and of codebooks and frequency tables."""
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
    return reader.index_bytes(), sizes.codebooks + sizes.tables
