"""A decoder of the section `untouched` written from docs/format.md alone, as plainly as it can be.

It trusts the bytes: nothing is checked but that they are used up. Nothing here is shared with `pwfn`.
"""

import math

import zstandard

WIDTHS = {
    "float16": 2, "bfloat16": 2, "float32": 4, "float64": 8, "uint8": 1, "int8": 1, "int16": 2, "int32": 4,
    "int64": 8, "bool": 1, "complex64": 8, "complex128": 16,
}  # fmt: skip
FIELDS = {  # bits of exponent and mantissa
    "float16": (5, 10), "bfloat16": (8, 7), "float32": (8, 23), "float64": (11, 52), "complex64": (8, 23),
    "complex128": (11, 52),
}  # fmt: skip


class Reader:
    def __init__(self, data: bytes) -> None:
        self.bits = "".join(f"{byte:08b}" for byte in data)
        self.at = 0

    def take(self, count: int) -> str:
        self.at += count
        assert self.at <= len(self.bits)
        return self.bits[self.at - count : self.at]

    def fixed(self, count: int) -> int:
        return int("0" + self.take(count), 2)

    def gamma(self) -> int:
        digits = 1
        while self.take(1) == "0":
            digits += 1
        return int("1" + self.take(digits - 1), 2) - 1

    def align(self) -> None:
        assert set(self.take(-self.at % 8)) <= {"0"}

    def bytes(self, count: int) -> bytes:
        return bytes(self.fixed(8) for _ in range(count))

    def symbols(self, count: int) -> list[int]:
        lengths, symbol = {}, -1
        for _ in range(self.gamma() + 1):
            symbol += self.gamma() + 1
            lengths[symbol] = self.fixed(4)
        codes, code, before = {}, -1, 0
        for symbol in sorted(lengths, key=lambda symbol: (lengths[symbol], symbol)):
            code = (code + 1) << (lengths[symbol] - before)
            before = lengths[symbol]
            codes[f"{code:0{before}b}" if before else ""] = symbol
        found = []
        for _ in range(count):
            digits = ""
            while digits not in codes:
                digits += self.take(1)
            found.append(codes[digits])
        return found


def decode(data: bytes, listed: list[tuple[str, list[int], str]]) -> dict[str, bytes]:
    """The little-endian numbers of each tensor, given name, shape and type as in the header."""
    groups: dict[tuple[str, str], list[tuple[str, int]]] = {}
    found = {name: b"" for name, _, _ in listed}
    for name, shape, dtype in listed:
        if size := math.prod(shape):
            groups.setdefault((name.split(".")[-1], dtype), []).append((name, size))
    reader = Reader(data)
    for (_, dtype), tensors in groups.items():
        numbers = group(reader, dtype, [size for _, size in tensors])
        for name, size in tensors:
            found[name], numbers = numbers[: size * WIDTHS[dtype]], numbers[size * WIDTHS[dtype] :]
    assert set(reader.bits[reader.at :]) <= {"0"}
    return found


def group(reader: Reader, dtype: str, sizes: list[int]) -> bytes:
    kind, width = reader.gamma(), WIDTHS[dtype]
    if kind == 0:
        size = reader.gamma()
        reader.align()
        block = reader.bytes(size)
        content = block[1:] if block[0] == 0 else zstandard.ZstdDecompressor().decompress(block[1:])
        count = sum(sizes)
        return bytes(content[byte * count + i] for i in range(count) for byte in range(width))
    if kind == 1:
        parts = 2 if dtype.startswith("complex") else 1
        numbers = coded(reader, *FIELDS[dtype], [size * parts for size in sizes])
        reader.align()
        return b"".join(number.to_bytes(width // parts, "little") for number in numbers)
    reader.align()
    return (bytes(width + 2 - kind) + reader.bytes(kind - 2)) * sum(sizes)


def coded(reader: Reader, exponent_bits: int, mantissa_bits: int, sizes: list[int]) -> list[int]:
    h, s = divmod(reader.gamma(), 2)
    m = reader.gamma()
    f = reader.gamma() - m
    e = reader.gamma()
    bases = reader.symbols(len(sizes))
    base_of_each = [b for b, size in zip(bases, sizes, strict=True) for _ in range(size)]
    heads = reader.symbols(sum(sizes))
    signs = [head % 2 for head in heads] if s else [reader.fixed(1) for _ in heads]
    steps = [head >> (h + s) for head in heads]
    mantissas = [f"{(head >> s) % 2**h:0{h}b}" if h else "" for head in heads]
    for i in range(h, m):
        for number, t in enumerate(steps):
            mantissas[number] += reader.take(1) if t - f > i else "0"
    found = []
    for sign, t, b, mantissa in zip(signs, steps, base_of_each, mantissas, strict=True):
        exponent = e + t - b
        assert 0 <= exponent < 2**exponent_bits
        fields = f"{sign}{exponent:0{exponent_bits}b}" + mantissa.ljust(mantissa_bits, "0")
        found.append(int(fields, 2))
    return found
