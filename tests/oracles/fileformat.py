"""A reader of .pwfn files written from docs/format.md alone, as plainly as it can be.

It trusts the file: nothing is checked but that what was read is used up. Nothing here is shared with `pwfn`.
"""

import hashlib
import json
import math
import struct
import zlib
from dataclasses import dataclass

import constriction
import numpy as np
import zstandard

from oracles import contexts, untouched

WIDTHS = untouched.WIDTHS


@dataclass
class Content:
    header: dict
    codebooks: list[np.ndarray]
    indices: list[np.ndarray]  # one array per tensor, in its shape
    values: list[np.ndarray]  # the same as numbers of the codebook
    sigma: np.ndarray | None  # one per weight
    untouched: dict[str, bytes]  # little-endian numbers


def read(data: bytes) -> Content:
    magic, version, flags, header_bytes, content_bytes, crc32 = struct.unpack("<8sHHIII", data[:24])
    assert (magic, flags) == (bytes.fromhex("895057464E0D0A1A"), 0)
    assert version in (1, 2)
    packed = data[24 : 24 + header_bytes]
    assert zlib.crc32(packed) == crc32
    header = json.loads(block(packed, content_bytes).decode("utf-8"))

    sections = {}
    at = 24 + header_bytes
    for name, size, content, crc32 in header["sections"]:
        stored = data[at : at + size]
        assert zlib.crc32(stored) == crc32
        plain = ("indices", "padding") if version == 1 else ("indices", "untouched", "padding")
        sections[name] = stored if name in plain else block(stored, content)
        at += size
    assert at == len(data)
    assert sections["padding"] == bytes(len(sections["padding"]))

    number = {"float32": "<f4", "float64": "<f8"}[header["codebooks"]["dtype"]]
    sizes = header["codebooks"]["sizes"]
    codebooks = cut(np.frombuffer(sections["codebooks"], number), sizes)
    indices = read_indices(header["tensors"], codebooks, sections["tables"], sections["indices"])
    owners = [codebook_of_each_weight(tensor) for tensor in header["tensors"]]
    values = [look_up(codebooks, owner, index) for owner, index in zip(owners, indices, strict=True)]

    sigma = None
    if header["posterior"] == "centre":
        sigmas = cut(np.frombuffer(sections["posterior"], number), sizes)
        found = [look_up(sigmas, owner, index) for owner, index in zip(owners, indices, strict=True)]
        sigma = np.concatenate([part.reshape(-1) for part in found])
    if header["posterior"] == "tensor":
        steps = [2.0 ** ((code - 200) / 8) if code else 0.0 for code in sections["posterior"]]
        sigma = np.repeat(np.array(steps, number), [index.size for index in indices])
    if header["posterior"] == "weight":
        first = np.array([sum(sizes[:book]) for book in range(len(sizes))])
        centres = np.concatenate(
            [(first[owner] + index).reshape(-1) for owner, index in zip(owners, indices, strict=True)]
        )
        sigma = read_sigma(sections["posterior"], centres, number)
    listed, rest = header["untouched"], sections["untouched"]
    kept = read_untouched(listed, rest) if version == 1 else untouched.decode(rest, listed)
    return Content(header, codebooks, indices, values, sigma, kept)


def content_sha256(content: Content) -> str:
    header = content.header
    pieces = [line("pwfn content", 1, header["codebooks"]["dtype"])]
    sigma, parts = content.sigma, {}
    for tensor, values in zip(header["tensors"], content.values, strict=True):
        name, aliases = tensor["name"], sorted(tensor.get("aliases", []))
        parts[name] = line("compressed", name, tensor["shape"], tensor["dtype"], aliases) + values.tobytes()
        if sigma is not None:
            parts[name] += line("sigma", name) + sigma[: values.size].tobytes()
            sigma = sigma[values.size :]
    for name, shape, dtype in header["untouched"]:
        parts[name] = line("untouched", name, shape, dtype) + content.untouched[name]
    pieces += [parts[name] for name in sorted(parts)]
    return hashlib.sha256(b"".join(pieces)).hexdigest()


def line(*facts: object) -> bytes:
    return json.dumps(facts, separators=(",", ":")).encode() + b"\n"


def block(stored: bytes, content_bytes: int) -> bytes:
    if not stored:
        return b""
    content = stored[1:] if stored[0] == 0 else zstandard.ZstdDecompressor().decompress(stored[1:])
    assert stored[0] in (0, 1)
    assert len(content) == content_bytes
    return content


def cut(numbers: np.ndarray, sizes: list[int]) -> list[np.ndarray]:
    assert len(numbers) == sum(sizes)
    return [numbers[sum(sizes[:i]) : sum(sizes[: i + 1])] for i in range(len(sizes))]


def leb128(data: bytes) -> list[int]:
    numbers, number, shift = [], 0, 0
    for byte in data:
        number += (byte % 128) << shift
        shift += 7
        if byte < 128:
            numbers.append(number)
            number = shift = 0
    assert shift == 0
    return numbers


def read_indices(
    tensors: list[dict], codebooks: list[np.ndarray], tables: bytes, streams: bytes
) -> list[np.ndarray]:
    numbers = leb128(tables)

    def next_table() -> tuple[list[int], list[int]]:
        """Symbols, and their counts, or the lengths of their codes."""
        symbols, facts, last = [], [], -1
        for _ in range(numbers.pop(0)):
            last += numbers.pop(0) + 1
            symbols.append(last)
            facts.append(numbers.pop(0))
        return symbols, facts

    def uses_shared(tensor: dict) -> bool:
        return not tensor.get("own_table", False) and not tensor.get("contexts", False)

    shared = next_table() if any(map(uses_shared, tensors)) else None
    found = []
    for n, tensor in enumerate(tensors):
        if tensor.get("continues", False):
            continue
        stream, streams = streams[: tensor["bytes"]], streams[tensor["bytes"] :]
        assert zlib.crc32(stream) == tensor["crc32"]
        total = numbers.pop(0) if tensor.get("contexts", False) else 0
        symbols, facts = shared if uses_shared(tensor) else next_table()
        if tensor.get("contexts", False):
            together = [tensor]
            while n + len(together) < len(tensors) and tensors[n + len(together)].get("continues", False):
                together.append(tensors[n + len(together)])
            assert total == sum(math.prod(t["shape"]) for t in together)
            book = codebooks[tensor.get("codebooks", [0])[0]]
            zero = min(range(len(book)), key=lambda index: abs(book[index]))
            parts = contexts.decode(stream, [t["shape"] for t in together], symbols, facts, zero)
            found += [np.array(p).reshape(t["shape"]) for p, t in zip(parts, together, strict=True)]
            continue
        weights = math.prod(tensor["shape"])
        if len(symbols) == 1:
            assert stream == b""
            places = np.zeros(weights, int)
        else:
            coder = ans(stream)
            places = coder.decode(categorical(facts), weights)
            assert coder.is_empty()
        found.append(np.array(symbols)[places].reshape(tensor["shape"]))
    assert not numbers
    assert not streams
    return found


def ans(stream: bytes) -> constriction.stream.stack.AnsCoder:
    return constriction.stream.stack.AnsCoder(np.frombuffer(stream, "<u4").astype(np.uint32))


def categorical(counts: list[int]) -> constriction.stream.model.Categorical:
    probabilities = np.array(counts, np.float64) / sum(counts)
    return constriction.stream.model.Categorical(probabilities, perfect=False)


def codebook_of_each_weight(tensor: dict) -> np.ndarray:
    """For every weight of a tensor the number of its codebook, in the tensor's shape."""
    shape = tensor["shape"] or [1]
    books, axis = tensor.get("codebooks", [0]), tensor.get("axis", 0)
    owner = np.empty(shape, int)
    length = shape[axis] // len(books)
    for part, book in enumerate(books):
        here = [slice(None)] * len(shape)
        here[axis] = slice(part * length, (part + 1) * length)
        owner[tuple(here)] = book
    return owner.reshape(tensor["shape"])


def look_up(tables: list[np.ndarray], owner: np.ndarray, index: np.ndarray) -> np.ndarray:
    first = np.array([sum(len(table) for table in tables[:book]) for book in range(len(tables))])
    return np.concatenate(tables)[first[owner] + index]


def read_sigma(content: bytes, centres: np.ndarray, number: str) -> np.ndarray:
    kind, rest = content[0], content[1:]
    width = np.dtype(number).itemsize
    if kind == 0:
        return np.frombuffer(unshuffled(rest, width), number)
    assert kind == 1
    groups, table_bytes = struct.unpack("<II", rest[:8])
    table, rest = leb128(rest[8 : 8 + table_bytes]), rest[8 + table_bytes :]
    sigmas, stream = np.frombuffer(rest[: groups * width], number), rest[groups * width :]
    at: dict[int, list[tuple[int, float]]] = {}  # centre to its groups: weights and sigma of each
    centre = 0
    for group in range(groups):
        centre += table[2 * group]
        at.setdefault(centre, []).append((table[2 * group + 1], sigmas[group]))
    coder = ans(stream)
    found = np.empty(len(centres), number)
    for centre in sorted(at):
        here = np.flatnonzero(centres == centre)
        counts = [weights for weights, _ in at[centre]]
        assert sum(counts) == len(here)
        which = [0] * len(here) if len(counts) == 1 else coder.decode(categorical(counts), len(here))
        found[here] = [at[centre][group][1] for group in which]
    assert coder.is_empty()
    return found


def unshuffled(content: bytes, width: int) -> bytes:
    numbers = len(content) // width
    return bytes(content[byte * numbers + i] for i in range(numbers) for byte in range(width))


def read_untouched(listed: list, content: bytes) -> dict[str, bytes]:
    found = {}
    for width in sorted({WIDTHS[dtype] for _, _, dtype in listed}):
        group = [(name, math.prod(shape) * width) for name, shape, dtype in listed if WIDTHS[dtype] == width]
        whole = sum(size for _, size in group)
        plain, content = unshuffled(content[:whole], width), content[whole:]
        for name, size in group:
            found[name], plain = plain[:size], plain[size:]
    assert not content
    return found
