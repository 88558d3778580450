"""The context coder in plain Python, step by step as ``docs/format.md`` has it: slow, and the truth."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from pwfn.file.contexts.model import CONTEXTS, INPUTS, Shape, Tree, levels, tables

_LIMIT = 255
_SQUASH, _STRETCH, _SHARE = (table.tolist() for table in tables())


def encode(symbols: NDArray[np.uint8], shapes: Sequence[Shape], tree: Tree, zero: int) -> bytes:
    """See :func:`pwfn.file.contexts.coder.encode`."""
    coder = Encoder()
    _code(coder, symbols.tolist(), shapes, tree, zero, [])
    return coder.end()


def decode(
    stream: bytes, shapes: Sequence[Shape], tree: Tree, zero: int
) -> tuple[NDArray[np.uint8], list[int]]:
    """The symbols, and the bytes that the tensors up to each one take."""
    coder = Decoder(stream)
    ends: list[int] = []
    found = _code(coder, None, shapes, tree, zero, ends)
    return np.array(found, np.uint8), ends


class Encoder:
    """A range coder: the decisions so far are one number, of which a range is left."""

    def __init__(self) -> None:
        self._words: list[int] = []
        self._low, self._range = 0, 2**48 - 1

    def decide(self, probability: int, bit: int) -> int:
        """Write a decision; ``probability`` of 2^16 is that of 1."""
        bound = (self._range >> 16) * probability
        if bit:
            self._range = bound
        else:
            self._low += bound
            self._range -= bound
        if self._range < 2**32:
            self._range <<= 16
            self._put()
            self._low = (self._low << 16) % 2**48
        return bit

    def _put(self) -> None:
        if self._low >> 48:
            place = len(self._words) - 1
            while self._words[place] == 65535:
                self._words[place] = 0
                place -= 1
            self._words[place] += 1
        self._words.append(self._low >> 32 & 65535)

    def end(self) -> bytes:
        """All words; the last one is within what is left of the range."""
        self._low += 2**32 - 1
        self._put()
        return np.array(self._words, "<u2").tobytes()


class Decoder:
    """The inverse; beyond its end a stream is all zeros."""

    def __init__(self, stream: bytes) -> None:
        self._stream = stream
        self._code, self._range, self.at = 0, 2**48 - 1, 0
        for _ in range(3):
            self._next()

    def _next(self) -> None:
        word = self._stream[self.at : self.at + 2]
        self._code = self._code << 16 | (int.from_bytes(word, "little") if len(word) == 2 else 0)
        self.at += 2

    def decide(self, probability: int, bit: int) -> int:
        """Read a decision; what is given for it is not used."""
        bound = (self._range >> 16) * probability
        bit = int(self._code < bound)
        if bit:
            self._range = bound
        else:
            self._code -= bound
            self._range -= bound
        if self._range < 2**32:
            self._range <<= 16
            self._next()
        return bit


class _Mean:
    """A running mean of about the last 255 numbers, with 16 binary places."""

    def __init__(self, mean: int, count: int) -> None:
        self.mean, self._count = mean, count

    def add(self, number: int) -> None:
        self.mean += (number - self.mean) * _SHARE[self._count] >> 16
        self._count = min(self._count + 1, _LIMIT)

    @property
    def scale(self) -> int:
        """Four steps per octave, from 2^-8 on."""
        x = self.mean >> 8
        if x < 4:
            return x
        e = x.bit_length() - 1
        return 4 * e + (x >> (e - 2) & 3) - 4


class _Mixture:
    """The predictions of each context and node, and how much each counts."""

    def __init__(self, coder: Encoder | Decoder, tree: Tree) -> None:
        self._coder, self._start = coder, tree.states.tolist()
        self._states: dict[int, list[int]] = {}
        self._weights = [[2**16 // INPUTS] * INPUTS for _ in self._start]

    def decide(self, contexts: Sequence[int], node: int, bit: int) -> int:
        """Predict a decision, code it, and learn from it."""
        states = [self._states.setdefault(context, list(self._start)) for context in contexts]
        weights = self._weights[node]
        inputs = [_STRETCH[state[node] >> 20] for state in states]
        total = sum(weight * number for weight, number in zip(weights, inputs, strict=True)) >> 16
        probability = _SQUASH[_clip(total, 2047) + 2047]
        bit = self._coder.decide(probability, bit)
        error = (bit << 16) - probability
        for place, (state, number) in enumerate(zip(states, inputs, strict=True)):
            weights[place] += number * error >> 15
            p, count = divmod(state[node], 1024)
            p += ((2**22 - 1 if bit else 0) - p) * _SHARE[count] >> 16
            state[node] = p * 1024 + min(count + 1, _LIMIT)
        return bit


def _code(
    coder: Encoder | Decoder,
    given: list[int] | None,
    shapes: Sequence[Shape],
    tree: Tree,
    zero: int,
    ends: list[int],
) -> list[int]:
    """Code what is given, or find it; returns all symbols."""
    mixture, children, level_of = _Mixture(coder, tree), tree.nodes[0].tolist(), levels(zero).tolist()
    empty_node, paths = len(children), tree.paths.tolist()
    found: list[int] = []
    fine, column = 25 * 16, 25 * 16 + 256
    assert column + 63 * 64 == CONTEXTS
    for rows, channels, kernel, width in shapes:
        tensor = _Mean(2**16, 0)
        for o in range(rows):
            filter_, usual = _Mean(tensor.mean, 8), tensor.scale
            if o == 0:
                channel: list[_Mean] = []
                tilt = [_Mean(0, 2) for _ in range(channels)]
                empty = [0] * channels
            row: list[int] = []
            for i in range(channels):
                if o == 0:
                    channel.append(_Mean(filter_.mean, 2))
                scale = 5 * filter_.scale + 5 * channel[i].scale - 2 * usual
                scale = min(max(scale, 0), 511)
                lean = _clip(tilt[i].mean >> 12, 31) + 31
                contexts = [0, fine + scale // 2, column + lean * 64 + scale // 8]
                skip = 0
                if kernel > 1:
                    contexts[0] = (empty[i - 1] if i else 0) * 3 + empty[i]
                    if given is not None:
                        skip = int(set(given[len(found) : len(found) + kernel]) == {zero})
                    skip = mixture.decide(contexts, empty_node, skip)
                    empty[i] = 1 + skip
                for k in range(kernel):
                    if skip:
                        found.append(zero)
                        row.append(0)
                        continue
                    at = i * kernel + k
                    last = row[at - kernel] if i else 0  # at the same place of the kernel before
                    before = row[at - 1] if k else last
                    above = 0 if kernel == 1 else row[at - width] if k >= width else last
                    near = (_clip(before, 2) + 2) * 5 + _clip(above, 2) + 2
                    contexts[0] = near * 16 + min(k, 15)
                    path, node = paths[given[len(found)]] if given is not None else 0, 0
                    while node >= 0:
                        bit = mixture.decide(contexts, node, path & 1)
                        node, path = children[node][bit], path >> 1
                    found.append(~node)
                    row.append(level_of[~node])
                here = row[i * kernel :]
                size = (sum(map(abs, here)) << 16) // kernel
                total = sum(here)
                lean_sum = (abs(total) << 16) // kernel
                filter_.add(size)
                channel[i].add(size)
                tilt[i].add(lean_sum if total >= 0 else -lean_sum)
            tensor.add(filter_.mean)
        ends.append(coder.at - 4 if isinstance(coder, Decoder) else 0)
    return found


def _clip(number: int, most: int) -> int:
    return min(max(number, -most), most)
