"""A decoder of streams with contexts, written from docs/format.md alone, as plainly as it can be."""

import math
from collections import defaultdict

SHARE = [2**17 // (2 * n + 3) for n in range(256)]


def squash_table() -> dict[int, int]:
    table, e = {}, 2**32
    for x in range(2048):
        table[x] = 2**48 // (2**32 + e)
        table[-x] = 65536 - table[x]
        e = e * 4278222805 // 2**32
    return table


SQUASH = squash_table()
STRETCH = [min(sum(p <= 16 * q + 8 for p in SQUASH.values()) - 2047, 2047) for q in range(4096)]


class Mean:
    def __init__(self, value: int, count: int) -> None:
        self.value, self.count = value, count

    def add(self, number: int) -> None:
        self.value += math.floor((number - self.value) * SHARE[self.count] / 65536)
        self.count = min(self.count + 1, 255)

    def scale(self) -> int:
        x = self.value // 256
        if x < 4:
            return x
        octave = int(math.log2(x))
        return 4 * octave + x // 2 ** (octave - 2) % 4 - 4


def clip(number: int, most: int) -> int:
    return max(-most, min(most, number))


class Stream:
    """A range decoder and the model that it learns."""

    def __init__(self, data: bytes, symbols: list[int], lengths: list[int]) -> None:
        words = [int.from_bytes(data[i : i + 2], "little") for i in range(0, len(data), 2)]
        self.words, self.used = [*words, 0, 0], 3
        self.code = (self.words[0] << 32) + (self.words[1] << 16) + self.words[2]
        self.range = 2**48 - 1
        self.tree, number, before = {}, 0, 0  # codes as text, to symbols
        for length, symbol in sorted(zip(lengths, symbols, strict=True)):
            number <<= length - before
            self.tree[format(number, f"0{length}b")] = symbol
            number, before = number + 1, length
        # By context and node, which is the beginning of a code; "empty" asks for a kernel of zeros.
        self.probability: dict[tuple[int, str], int] = {}
        self.count: dict[tuple[int, str], int] = defaultdict(int)
        self.weights: dict[str, list[int]] = defaultdict(lambda: [21845, 21845, 21845])

    def start(self, node: str) -> int:
        if node == "empty":
            return 2**17
        below = [code for code in self.tree if code.startswith(node)]
        ones = [code for code in below if code.startswith(node + "1")]
        share = sum(2 ** (32 - len(code)) for code in ones) * 2**22
        return max(1, min(2**22 - 1, share // sum(2 ** (32 - len(code)) for code in below)))

    def decision(self, contexts: list[int], node: str) -> int:
        keys = [(context, node) for context in contexts]
        for key in keys:
            self.probability.setdefault(key, self.start(node))
        inputs = [STRETCH[self.probability[key] // 1024] for key in keys]
        weights = self.weights[node]
        mixed = clip(sum(w * x for w, x in zip(weights, inputs, strict=True)) // 65536, 2047)
        p = SQUASH[mixed]
        bound = self.range // 65536 * p
        bit = 1 if self.code < bound else 0
        if bit:
            self.range = bound
        else:
            self.code -= bound
            self.range -= bound
        if self.range < 2**32:
            self.range *= 65536
            self.code = self.code * 65536 + self.words[self.used]
            self.used += 1
        error = 65536 * bit - p
        for i, key in enumerate(keys):
            weights[i] += inputs[i] * error // 32768
            target = (2**22 - 1) * bit
            self.probability[key] += (target - self.probability[key]) * SHARE[self.count[key]] // 65536
            self.count[key] = min(self.count[key] + 1, 255)
        return bit

    def symbol(self, contexts: list[int]) -> int:
        code = ""
        while code not in self.tree:
            code += str(self.decision(contexts, code))
        return self.tree[code]


def decode(
    data: bytes, shapes: list[list[int]], symbols: list[int], lengths: list[int], zero: int
) -> list[list[int]]:
    """The indices of each tensor, in row-major order."""
    if len(symbols) == 1:
        assert data == b""
        return [[symbols[0]] * math.prod(shape) for shape in shapes]
    stream = Stream(data, symbols, lengths)
    tensors = [one_tensor(stream, shape, zero) for shape in shapes]
    assert 2 * (stream.used - 2) == len(data)
    return tensors


def one_tensor(stream: Stream, shape: list[int], zero: int) -> list[int]:
    rows, channels = [*shape, 1, 1][:2]
    kernel, width = math.prod(shape[2:]), shape[-1] if len(shape) > 2 else 1
    found: list[int] = []
    usual_size = Mean(65536, 0)
    channel_size, channel_sum, empty = {}, {}, {}
    for o in range(rows):
        row_size = Mean(usual_size.value, 8)
        for i in range(channels):
            if o == 0:
                channel_size[i], channel_sum[i], empty[i] = Mean(row_size.value, 2), Mean(0, 2), 0
            scale = 5 * row_size.scale() + 5 * channel_size[i].scale() - 2 * usual_size.scale()
            scale = max(0, min(511, scale))
            tilt = clip(channel_sum[i].value // 4096, 31) + 31
            others = [400 + scale // 2, 656 + 64 * tilt + scale // 8]
            start = (o * channels + i) * kernel

            def level(k: int, start: int = start) -> int:
                return clip(found[start + k] - zero, 127)

            if kernel > 1:
                empty[i] = 1 + stream.decision([3 * (empty[i - 1] if i else 0) + empty[i], *others], "empty")
            for k in range(kernel):
                if empty[i] == 2:
                    found.append(zero)
                    continue
                last = level(k - kernel) if i else 0
                before = level(k - 1) if k else last
                above = 0 if kernel == 1 else level(k - width) if k >= width else last
                near = 5 * (clip(before, 2) + 2) + clip(above, 2) + 2
                found.append(stream.symbol([16 * near + min(k, 15), *others]))
            levels = [level(k) for k in range(kernel)]
            size = 65536 * sum(abs(x) for x in levels) // kernel
            total = 65536 * abs(sum(levels)) // kernel
            row_size.add(size)
            channel_size[i].add(size)
            channel_sum[i].add(total if sum(levels) > 0 else -total)
        usual_size.add(row_size.value)
    return found
