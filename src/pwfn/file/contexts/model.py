"""What the context coder starts from: the shape of a tensor, the tree of its symbols, and constants."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from pwfn.errors import FileError
from pwfn.file.coder import Integers, numbers_to_bytes
from pwfn.file.huffman import CODE_BITS, code_lengths

MOST_SYMBOLS = 256
"""Codebooks with more values are coded by frequency tables."""

CONTEXTS = 25 * 16 + 256 + 63 * 64
"""Of the neighbours and the position in the kernel, of the scale, of tilt and scale."""

INPUTS = 3
"""Predictions per decision."""

_EMPTY = 2**17  # of 2^22: the probability that a kernel is empty, before the first
_E = 4278222805  # 2^32 exp(-1/256)


class Shape(NamedTuple):
    """A tensor as the contexts see it: rows of channels of kernels; ``width`` is that of a kernel."""

    rows: int
    channels: int
    kernel: int
    width: int

    @classmethod
    def of(cls, shape: Sequence[int]) -> Shape:
        """The first axis has rows, the second channels, the others are the kernel.

        >>> Shape.of((8, 4, 3, 3)), Shape.of((5,))
        (Shape(rows=8, channels=4, kernel=9, width=3), Shape(rows=5, channels=1, kernel=1, width=1))
        """
        rows, channels, *kernel = *shape, *(1,) * (2 - len(shape))
        return cls(rows, channels, int(np.prod(kernel, dtype=np.int64)), kernel[-1] if kernel else 1)

    @property
    def size(self) -> int:
        """Number of weights."""
        return self.rows * self.channels * self.kernel


@dataclass(frozen=True)
class Tree:
    """The Huffman tree of some weights: each symbol, ascending, with the length of its code."""

    weights: int
    symbols: tuple[int, ...]
    lengths: tuple[int, ...]

    @classmethod
    def of(cls, counts: Integers) -> Tree:
        """From the number of times that each symbol 0, 1, 2, … occurs.

        >>> Tree.of(np.array([5, 0, 1, 2]))
        Tree(weights=8, symbols=(0, 2, 3), lengths=(1, 2, 2))
        """
        present = np.flatnonzero(counts)
        lengths = code_lengths(counts[present].tolist())
        return cls(int(counts.sum()), tuple(present.tolist()), tuple(lengths))

    def to_bytes(self) -> bytes:
        """Weights, number of symbols, then for each the gap to the one before and its length; all LEB128."""
        gaps = np.diff(self.symbols, prepend=-1) - 1
        pairs = np.stack((gaps, self.lengths), 1).reshape(-1).tolist()
        return numbers_to_bytes((self.weights, len(self.symbols), *pairs))

    @classmethod
    def read(cls, numbers: NDArray[np.int64], start: int, alphabet: int, total: int) -> tuple[Tree, int]:
        """The tree that begins at ``start`` of a list of numbers, and where it ends."""
        weights, size = numbers[start : start + 2].tolist() if start + 2 <= len(numbers) else (0, 0)
        if weights != total:
            raise FileError(f"a tree is that of {weights:,} weights, its tensors have {total:,}")
        if not 0 < size <= min(alphabet, MOST_SYMBOLS):
            raise FileError(f"a tree has {size:,} symbols, its codebook {alphabet:,} values")
        stop = start + 2 + 2 * size
        if stop > len(numbers):
            raise FileError(f"a tree of {size:,} symbols is cut off")
        gaps, lengths = numbers[start + 2 : stop : 2], numbers[start + 3 : stop : 2]
        # A gap is cut to the alphabet: far beyond it is as wrong, and the sum cannot wrap around.
        symbols = np.cumsum(gaps.clip(0, alphabet) + 1) - 1
        if int(symbols[-1]) >= alphabet:
            raise FileError(f"a tree has a symbol beyond the {alphabet:,} values of its codebook")
        shares = [2 ** (CODE_BITS - n) for n in lengths.tolist() if n <= CODE_BITS]
        if len(shares) < size or sum(shares) != 2**CODE_BITS:
            raise FileError("the lengths of a tree are not those of a complete code")
        return cls(total, tuple(symbols.tolist()), tuple(lengths.tolist())), stop

    @cached_property
    def codes(self) -> dict[int, str]:
        """The canonical code: in the order of length, then symbol, each code is the next binary number.

        >>> Tree(8, (0, 2, 3), (1, 2, 2)).codes
        {0: '0', 2: '10', 3: '11'}
        """
        found, code, before = {}, 0, 0
        for length, symbol in sorted(zip(self.lengths, self.symbols, strict=True)):
            code <<= length - before
            found[symbol] = f"{code:0{length}b}" if length else ""
            code, before = code + 1, length
        return found

    @cached_property
    def nodes(self) -> tuple[NDArray[np.int32], NDArray[np.uint32]]:
        """Per node its two children (a node, or ``~symbol``) and the probability of the second, of 2^22."""
        prefixes = sorted({code[:end] for code in self.codes.values() for end in range(len(code))})
        prefixes.sort(key=len)
        place = {prefix: node for node, prefix in enumerate(prefixes)}
        leaves = {code: ~symbol for symbol, code in self.codes.items()}
        children = np.zeros((len(prefixes), 2), np.int32)
        shares = np.zeros((len(prefixes), 2), np.int64)
        for prefix, node in place.items():
            for bit in (0, 1):
                child = f"{prefix}{bit}"
                children[node, bit] = leaves[child] if child in leaves else place[child]
        for code in self.codes.values():
            for end in range(len(code)):
                shares[place[code[:end]], int(code[end])] += 2 ** (CODE_BITS - len(code))
        second = shares[:, 1] * 2**22 // shares.sum(1).clip(1)
        return children, second.clip(1, 2**22 - 1).astype(np.uint32)

    @cached_property
    def states(self) -> NDArray[np.uint32]:
        """Per node a probability of 22 bits and a count of 10; the last node says that a kernel is empty."""
        return np.append(self.nodes[1], np.uint32(_EMPTY)) << np.uint32(10)

    @cached_property
    def paths(self) -> NDArray[np.uint64]:
        """Per symbol its code as a number, the first decision in the lowest bit."""
        found = np.zeros(MOST_SYMBOLS, np.uint64)
        for symbol, code in self.codes.items():
            found[symbol] = int(code[::-1] or "0", 2)
        return found


class Tables(NamedTuple):
    """Constants of the model."""

    squash: NDArray[np.uint16]  # 2^16 / (1 + exp(-x / 256)) for x from -2047 to 2047
    stretch: NDArray[np.int16]  # its inverse, for probabilities of 12 bits
    share: NDArray[np.int32]  # 2^16 / (n + 1.5)


@cache
def tables() -> Tables:
    """The constants, by integer arithmetic alone."""
    upper, e = [], 2**32
    for _ in range(2048):
        upper.append(2**48 // (2**32 + e))
        e = e * _E >> 32
    squash = np.array([65536 - p for p in upper[:0:-1]] + upper)
    below = np.searchsorted(squash, 16 * np.arange(4096) + 8, side="right")
    return Tables(
        squash.astype(np.uint16),
        (below - 2047).clip(-2047, 2047).astype(np.int16),
        (2**17 // (2 * np.arange(256) + 3)).astype(np.int32),
    )


def levels(zero: int) -> NDArray[np.int32]:
    """Per symbol its distance from the symbol of 0, within ±127.

    >>> levels(2)[:4].tolist()
    [-2, -1, 0, 1]
    """
    return (np.arange(MOST_SYMBOLS) - zero).clip(-127, 127).astype(np.int32)
