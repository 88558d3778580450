"""Indices to bytes with contexts: each index is predicted from its neighbours in the tensor.

An index is a path in a binary tree, the Huffman tree of the stream's indices. Each decision on the path has
three predictions, which are mixed: by the levels of the two weights before it in its kernel, and twice by the
size of the weights in its filter and its input channel so far. Predictions and mixture adapt as the stream is
read. A kernel of zeros is one decision. ``docs/format.md`` has every formula; ``native.c`` is the fast form,
:mod:`pwfn.file.contexts.reference` the plain one.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from pwfn.errors import FileError
from pwfn.file import native
from pwfn.file.contexts import reference
from pwfn.file.contexts.model import CONTEXTS, INPUTS, Shape, Tree, levels, tables


def encode(symbols: NDArray[np.uint8], shapes: Sequence[Shape], tree: Tree, zero: int) -> bytes:
    """The stream of the tensors of these shapes, one after the other; empty for a tree of one symbol.

    ``zero`` is the symbol whose value is nearest to 0.

    >>> numbers = np.array([1, 1, 2, 1, 0, 1], np.uint8)
    >>> tree = Tree.of(np.bincount(numbers))
    >>> stream = encode(numbers, [Shape(2, 3, 1, 1)], tree, 1)
    >>> decode(stream, [Shape(2, 3, 1, 1)], tree, 1)[0].tolist()
    [1, 1, 2, 1, 0, 1]
    """
    if len(tree.symbols) < 2:
        return b""
    if (lib := native.library()) is None:
        return reference.encode(symbols, shapes, tree, zero)
    symbols, grid = symbols.copy(), np.array(shapes, np.int64)
    room = np.empty(64 + len(symbols) // 2, np.uint8)
    while True:
        model = _model(shapes, tree, zero)
        where = (native.address(a) for a in (symbols, room))
        size = lib.pwfn_context_encode(
            ctypes.byref(model), native.address(grid), len(shapes), *where, len(room)
        )
        if size <= len(room):
            return room[:size].tobytes()
        room = np.empty(size, np.uint8)


def decode(
    stream: bytes, shapes: Sequence[Shape], tree: Tree, zero: int
) -> tuple[NDArray[np.uint8], list[int]]:
    """The symbols of a stream, which ends with them, and the bytes that the tensors up to each one take."""
    count = sum(shape.size for shape in shapes)
    if len(tree.symbols) == 1:
        if stream:
            raise FileError("the stream has bytes where the tree leaves nothing to code")
        return np.full(count, tree.symbols[0], np.uint8), [0] * len(shapes)
    if (lib := native.library()) is None:
        symbols, ends = reference.decode(stream, shapes, tree, zero)
    else:
        symbols, data = np.empty(count, np.uint8), np.frombuffer(stream, np.uint8)
        grid, found = np.array(shapes, np.int64), np.empty(len(shapes), np.int64)
        model = _model(shapes, tree, zero)
        where = (native.address(a) for a in (symbols, data))
        lib.pwfn_context_decode(
            ctypes.byref(model), native.address(grid), len(shapes), *where, len(data), native.address(found)
        )
        ends = found.tolist()
    if ends[-1] != len(stream):
        raise FileError("the stream does not end after its last symbol")
    return symbols, ends


def _model(shapes: Sequence[Shape], tree: Tree, zero: int) -> native.Model:
    """A model that has seen nothing."""
    widest = max(shape.channels for shape in shapes)
    arrays: list[NDArray[np.generic]] = [
        tree.nodes[0],
        *tables(),
        levels(zero),
        tree.paths,
        np.tile(tree.states, (CONTEXTS, 1)),
        np.full((len(tree.states), INPUTS), 2**16 // INPUTS, np.int64),
        *(np.empty((widest, 2), np.int32) for _ in range(2)),
        np.empty(widest, np.int8),
        np.empty(max(shape.channels * shape.kernel for shape in shapes), np.int8),
    ]
    model = native.Model(*map(native.address, arrays), len(tree.states), zero)
    model.arrays = arrays
    return model
