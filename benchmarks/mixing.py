"""The ideal length of indices under a mixture of many contexts: how much smaller a slower coder could be.

An index is a path in a Huffman tree, as in the coder of the library. Each of fourteen contexts predicts each
decision; mixtures of the predictions in the logistic domain are averaged. Counts and mixtures are in float,
and learn from some decisions at a time: a prediction uses only what is before those. Nothing is written: the
length is ``-sum log2 p``, and the bytes of the tree.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from pwfn.file.coder import Integers, counts_of
from pwfn.file.contexts.model import Shape, Tree

Floats = NDArray[np.float64]
Numbers = NDArray[np.int32]

PLACES = 2**13
"""Places for the counts of a context: its number modulo this."""

MIXTURES = 64  # the most numbers of what selects a mixture
LIMIT = 400.0  # larger counts are scaled down to this
START = 0.6  # the count that the share of a decision in all contexts stands for


def ideal_bits(tensors: list[Integers], shapes: list[tuple[int, ...]], zero: int) -> float:
    """Bits of all indices, tensor by tensor; ``zero`` is the index of 0."""
    model = _Mixture(counts_of(np.concatenate([tensor.reshape(-1) for tensor in tensors])))
    weights = sum(tensor.size for tensor in tensors)
    block = int(np.clip(weights // 2**14, 16, 256))
    bits: float = model.tree_bits
    for place, (tensor, shape) in enumerate(zip(tensors, shapes, strict=True)):
        if tensor.size:
            levels = tensor.astype(np.float64) - zero
            bits += model.bits(tensor, *_contexts(levels, Shape.of(shape), place), block)
    return bits


class _Mixture:
    """What has been learned so far."""

    def __init__(self, counts: NDArray[np.int64]) -> None:
        tree = Tree.of(counts)
        codes = tree.codes
        self.tree_bits = 8 * len(tree.to_bytes())
        prefixes = {code[:end] for code in codes.values() for end in range(len(code))}
        place = {prefix: node for node, prefix in enumerate(sorted(prefixes))}
        self._nodes = {s: [place[code[:end]] for end in range(len(code))] for s, code in codes.items()}
        self._bits = {s: [int(bit) for bit in code] for s, code in codes.items()}
        self._size = max(len(place), 1)
        self._shares = np.full((self._size, 2), 0.4)
        self._counts: NDArray[np.float32] | None = None
        self._weights: list[Floats] = []

    def _decisions(self, symbols: Integers) -> tuple[NDArray[np.int64], ...]:
        """For each decision of a path: the index it belongs to, its node and its answer."""
        flat = symbols.reshape(-1).tolist()
        owner = np.repeat(np.arange(len(flat)), [len(self._nodes[s]) for s in flat])
        node = np.array([node for s in flat for node in self._nodes[s]], np.int64)
        return owner, node, np.array([bit for s in flat for bit in self._bits[s]], np.int64)

    def bits(self, symbols: Integers, contexts: Numbers, selectors: Numbers, block: int) -> float:
        """Bits of a tensor, from which the mixture then has learned."""
        size, inputs = self._size, len(contexts) + 1  # the last input is constant
        if self._counts is None:
            self._counts = np.zeros((len(contexts) * PLACES * size, 2), np.float32)
            start = np.append(np.full(inputs - 1, 1.3 / (inputs - 1)), 0.0)
            self._weights = [np.tile(start, (MIXTURES * size, 1)) for _ in selectors]
        counts, rate, bits = self._counts, 0.04 / block**0.5, 0.0
        first = np.arange(len(contexts))[:, None] * PLACES
        owners, nodes, answers = self._decisions(symbols)
        for at in range(0, len(owners), block):
            owner, node, answer = (part[at : at + block] for part in (owners, nodes, answers))
            key = (first + contexts[:, owner] % PLACES) * size + node
            share = self._shares[node]
            share = START * share[:, 1] / share.sum(1)
            seen = counts[key]
            p = (seen[..., 1] + share) / (seen.sum(2) + START)
            x = np.vstack((np.log(p / (1 - p)), np.full(len(node), 0.3)))
            picks = [selector[owner] * size + node for selector in selectors]
            sums = [np.einsum("in,ni->n", x, w[pick]) for w, pick in zip(self._weights, picks, strict=True)]
            p = _logistic(np.mean(sums, 0))
            bits -= float(np.log2(np.where(answer, p, 1 - p)).sum())
            for weights, pick, total in zip(self._weights, picks, sums, strict=True):
                np.add.at(weights, pick, (rate * (answer - _logistic(total)) * x).T)
            np.add.at(counts, (key, answer), 1)
            np.add.at(self._shares, (node, answer), 1)
            full = np.unique(key[counts[key].sum(2) > LIMIT])
            counts[full] *= LIMIT / counts[full].sum(1, keepdims=True)
        return bits


def _contexts(levels: Floats, shape: Shape, tensor: int) -> tuple[Numbers, Numbers]:
    """Per weight its contexts, and what selects its mixtures, as numbers: all from weights before it."""
    x = levels.reshape(shape.rows, shape.channels, shape.kernel)
    size, k = np.abs(x), np.broadcast_to(np.arange(shape.kernel), x.shape)
    kernel = size.mean(2, keepdims=True)
    rows = size.mean((1, 2))
    usual = ((np.cumsum(rows) - rows + 1) / np.arange(1, len(rows) + 1))[:, None, None]
    flat = size.reshape(len(rows), -1)
    start = 8 * shape.kernel
    so_far = (np.cumsum(flat, 1) - flat).reshape(x.shape) + start * usual
    filter_ = so_far / (np.arange(flat.shape[1]).reshape(x.shape[1:]) + start)
    channel = np.broadcast_to(_means(kernel, filter_[0, :, :1]), x.shape)
    place, signed = _means(size, filter_[0]), _means(x, 0 * x[0])
    tilt = np.broadcast_to(_means(x.mean(2, keepdims=True), 0 * x[0, :, :1]), x.shape)
    inside, inside_signed = np.cumsum(size, 2) - size, np.cumsum(x, 2) - x
    last, up = _shifted(x, 1), _shifted(x, 0)
    before = np.where(k > 0, _shifted(x, 2), last)
    above = last * (shape.kernel > 1)
    above[:, :, shape.width :] = x[:, :, : shape.kernel - shape.width]
    near = (np.abs(before) + np.abs(above) + (np.abs(last) + np.abs(up)) / 2) / 3
    scale = np.clip(5 * _log(filter_) + 5 * _log(channel) - 2 * _log(usual), 0, 511)
    k = np.minimum(k, 15)
    contexts = [
        (_near(before, 2) * 5 + _near(above, 2)) * 16 + k,
        scale // 2,
        (np.clip(np.rint(tilt * 16), -31, 31) + 31) * 64 + scale // 8,
        _log(filter_, 3) * 40 + _log(channel, 3),
        _log(place, 3) * 80 + _log(inside / np.maximum(k, 1), 2) * 2 + (k > 0),
        (_near(last, 2) * 5 + _near(before, 2)) * 40 + _log(filter_),
        (_near(up, 2) * 3 + _near(_shifted(up, 0), 1)) * 40 + _log(place, 3),
        (_signed(signed) * 25 + _signed(inside_signed)) * 16 + k,
        tensor * 16 + k,
        _log(near, 3) * 64 + scale // 8,
        _signed(signed) * 40 + _log((place + filter_ * channel / usual) / 2, 3),
        _log((near + place + filter_ + channel) / 4, 8, 80),
        (_log(_shifted(kernel, 1), 2) * 40 + _log(_shifted(kernel, 0), 2)) * 16 + k,
        np.minimum(inside, 7) * 128 + k * 8 + scale // 64,
    ]
    selectors = [scale // 16, k * 3 + np.minimum(np.abs(before) + np.abs(above), 2), _log(place, 2)]
    return _stacked(contexts, x), _stacked(selectors, x)


def _stacked(numbers: list[Any], like: Floats) -> Numbers:
    return np.stack([np.broadcast_to(n, like.shape).astype(np.int32).reshape(-1) for n in numbers])


def _means(x: Floats, start: Floats) -> Floats:
    """Running means of the rows before each row, of about the last 80."""
    out = np.empty_like(x)
    mean = start
    for n, row in enumerate(x):
        out[n] = mean
        mean = mean + (row - mean) / min(n + 2.5, 80)
    return out


def _shifted(x: Floats, axis: int) -> Floats:
    """The number before each along an axis; 0 before the first."""
    out = np.roll(x, 1, axis)
    np.moveaxis(out, axis, 0)[0] = 0
    return out


def _log(x: Floats, steps: float = 4, most: int = 40) -> Floats:
    """So many steps per octave, from 2^-6 on."""
    return np.clip(np.rint(steps * (np.log2(x + 2.0**-6) + 6)), 0, most - 1)


def _signed(x: Floats) -> Floats:
    """25 steps with a sign, finer about 0."""
    return np.clip(np.rint(2 * np.sign(x) * np.log2(1 + 16 * np.abs(x))), -12, 12) + 12


def _near(x: Floats, most: int) -> Floats:
    return np.clip(x, -most, most) + most


def _logistic(x: Floats) -> Floats:
    return 1 / (1 + np.exp(-np.clip(x, -12, 12)))
