"""One fault of a file each: the valid file it begins with, how it is changed, and what the error names."""

from __future__ import annotations

import math
import struct
from collections.abc import Callable
from typing import Any

from malformed import SECTIONS, Parts, leb128
from oracles import fileformat as oracle

Fault = Callable[[Parts], Any]


def header(**fields: Any) -> Fault:
    return lambda parts: parts.header.update(fields)


def tensor(position: int, **fields: Any) -> Fault:
    return lambda parts: parts.header["tensors"][position].update(fields)


def content(name: str, change: Callable[[bytes], bytes]) -> Fault:
    return lambda parts: parts.contents.update({name: change(parts.contents[name])})


def posterior(change: Callable[[bytes], bytes]) -> Fault:
    return content("posterior", change)


def stream(change: Callable[[bytes], bytes], position: int = 0) -> Fault:
    return lambda parts: parts.streams.__setitem__(position, change(parts.streams[position]))


def late(change: Callable[[dict[str, Any]], Any]) -> Fault:
    """Changes the header after sizes and checksums were made to fit."""
    return lambda parts: parts.late.append(change)


def row(section: str, column: int, change: Callable[[int], int]) -> Fault:
    def act(header: dict[str, Any]) -> None:
        found = header["sections"][SECTIONS.index(section)]
        found[column] = change(found[column])

    return late(act)


def floats(*numbers: float) -> Callable[[bytes], bytes]:
    """Replaces the first numbers."""
    return lambda raw: struct.pack(f"<{len(numbers)}f", *numbers) + raw[4 * len(numbers) :]


def table(numbers: Callable[[list[int]], list[int]]) -> Fault:
    """Changes the numbers of the section of tables; the first table comes first."""
    return content("tables", lambda raw: leb128(*numbers(oracle.leb128(raw))))


def group_sigma(raw: bytes, value: float) -> bytes:
    """A posterior in groups with another first sigma."""
    table_bytes = struct.unpack("<I", raw[5:9])[0]
    return raw[: 9 + table_bytes] + struct.pack("<f", value) + raw[13 + table_bytes :]


def overlapping(header: dict[str, Any]) -> None:
    """The first section reaches into the second, which is that much shorter."""
    header["sections"][0][1] += 8
    header["sections"][1][1] -= 8


def shifted(header: dict[str, Any]) -> None:
    """The last word of the first stream is claimed for the second."""
    header["tensors"][0]["bytes"] -= 4
    header["tensors"][1]["bytes"] += 4


def swapped_codebooks(parts: Parts) -> None:
    parts.header["tensors"][0]["codebooks"], parts.header["tensors"][1]["codebooks"] = [1], [0]


def no_untouched(parts: Parts) -> None:
    """No bytes, but as many claimed as the tensors have."""
    parts.contents["untouched"] = b""
    claimed = sum(math.prod(shape) * oracle.WIDTHS[dtype] for _, shape, dtype in parts.header["untouched"])
    row("untouched", 2, lambda n: claimed)(parts)


def untouched_bomb(parts: Parts) -> None:
    parts.contents["untouched"] = bytes(2**26)
    parts.header["untouched"] = [["x", [2**26], "int8"]]


def huge(parts: Parts) -> None:
    for item in parts.header["tensors"]:
        item["shape"] = [2**23, 2**24]


FLAT = "one_flat_layer@1"
CODEBOOKS, TABLES, POSTERIOR, UNTOUCHED = (
    f"section '{name}'" for name in ("codebooks", "tables", "posterior", "untouched")
)

# fmt: off
FAULTS: dict[str, tuple[str, Fault, str]] = {
    "name twice": (FLAT, tensor(1, name="0.weight"), "'0.weight'"),
    "alias twice": (FLAT, tensor(0, aliases=["1.weight"]), "'1.weight'"),
    "untouched twice": ("centre", tensor(0, name="norm.weight"), "'norm.weight'"),
    "channels last of two axes": (FLAT, tensor(0, channels_last=True), "channels_last"),
    "empty tensor": (FLAT, tensor(0, shape=[0, 20]), "'0.weight'"),
    "shape of more weights": (FLAT, tensor(0, shape=[30, 21]), TABLES),
    "2^40 weights": (FLAT, tensor(0, shape=[2**20, 2**20]), "1,099,511,630,376 weights"),
    "2^47 weights twice": (FLAT, huge, r"2\^48"),
    "2^20 weights": (FLAT, tensor(0, shape=[2**10, 2**10]), TABLES),
    "sections missing": ("centre", late(lambda h: h["sections"].pop()), "sections"),
    "sections in another order": ("centre", late(lambda h: h["sections"].reverse()), "sections"),
    "section twice": ("centre", late(lambda h: h["sections"].append(h["sections"][0])), "sections"),
    "section unknown": ("centre", late(lambda h: h["sections"][0].__setitem__(0, "books")), "sections"),
    "section longer": ("centre", row("codebooks", 1, lambda n: n + 1), "truncated"),
    "section shorter": ("centre", row("codebooks", 1, lambda n: n - 1), "too long"),
    "section beyond the end": ("centre", row("untouched", 1, lambda n: 2**40), "truncated"),
    "sections overlapping": ("centre", late(overlapping), "section '.*checksum"),
    **{f"checksum of {s}": ("weight", row(s, 3, lambda n: n ^ 1), f"'{s}': .*checksum") for s in SECTIONS},
    **{f"size of {s}": ("weight", row(s, 2, lambda n: n + 1), f"section '{s}'") for s in SECTIONS},
    "stream checksum": ("weight", late(lambda h: h["tensors"][2].update(crc32=5)), "'conv.bias': .*checksum"),
    "content of 2^40 bytes": ("centre", row("tables", 2, lambda n: 2**40), TABLES),
    "streams too long": ("centre", late(lambda h: h["tensors"][0].update(bytes=2**30)), "section 'indices'"),
    "streams shifted": (FLAT, late(shifted), "tensor '0.weight': .*checksum"),
    "stream not of words": (FLAT, stream(lambda s: s + b"\x01"), "tensor '0.weight'"),
    "stream ends in zero": (FLAT, stream(lambda s: s + bytes(4)), "tensor '0.weight'"),
    "stream too long": (FLAT, stream(lambda s: s + b"\x05\x00\x00\x00"), "tensor '0.weight'"),
    "stream of one value": (FLAT, stream(lambda s: b"\x05\x00\x00\x00", 1), "tensor '1.weight'"),
    "codebook descending": ("centre", content("codebooks", floats(5.0, 4.0)), "codebook.*ascending"),
    "codebook value twice": ("centre", content("codebooks", floats(-9.0, -9.0)), "codebook.*ascending"),
    "codebook two zeros": ("centre", content("codebooks", floats(-0.0, 0.0)), "codebook.*ascending"),
    "codebook NaN": ("centre", content("codebooks", floats(math.nan)), "codebook.*finite"),
    "codebook infinite": ("centre", content("codebooks", floats(-math.inf)), "codebook.*finite"),
    "codebook too short": ("centre", content("codebooks", lambda raw: raw[:-4]), CODEBOOKS),
    "codebook half a number": ("centre", content("codebooks", lambda raw: raw[:-1]), CODEBOOKS),
    "no codebook": ("centre", content("codebooks", lambda raw: b""), CODEBOOKS),
    "codebooks swapped": ("layers@1", swapped_codebooks, "'conv.weight'"),
    "codebook sizes moved": ("layers@1", lambda p: p.header["codebooks"]["sizes"].reverse(), "codebook"),
    "table too many symbols": (FLAT, table(lambda n: [10**6, *n[1:]]), TABLES),
    "table no symbols": (FLAT, table(lambda n: [0, *n[1:]]), TABLES),
    "table symbol beyond": (FLAT, table(lambda n: [n[0], n[1] + 1000, *n[2:]]), TABLES),
    "table huge gap": (FLAT, table(lambda n: [n[0], 2**48, *n[2:]]), TABLES),
    "table total": (FLAT, table(lambda n: [*n[:2], n[2] + 1, *n[3:]]), TABLES),
    "table count 0": (FLAT, table(lambda n: [*n[:2], 0, n[3], n[4] + n[2], *n[5:]]), TABLES),
    "table left over": (FLAT, table(lambda n: [*n, 1]), TABLES),
    "tables cut": (FLAT, table(lambda n: n[:-1]), TABLES),
    "number cut": (FLAT, content("tables", lambda raw: raw + b"\x80"), TABLES),
    "number endless": (FLAT, content("tables", lambda r: b"\x80" * 9 + b"\x01" + r), TABLES),
    "no tables": (FLAT, content("tables", lambda raw: b""), TABLES),
    "own table claimed": ("centre", tensor(0, own_table=True), TABLES),
    "posterior claimed": ("none", header(posterior="centre"), POSTERIOR),
    "exact posterior claimed": ("none", header(posterior="weight"), POSTERIOR),
    "fitted posterior claimed": ("none", header(posterior="tensor"), POSTERIOR),
    "fitted posterior denied": ("tensor", header(posterior="none"), POSTERIOR),
    "fitted posterior too short": ("tensor", posterior(lambda raw: raw[:-1]), POSTERIOR),
    "posterior denied": ("centre", header(posterior="none"), POSTERIOR),
    "posterior too short": ("centre", posterior(lambda raw: raw[:-4]), POSTERIOR),
    "sigma negative": ("centre", posterior(floats(-0.5)), "a sigma"),
    "sigma NaN": ("centre", posterior(floats(math.nan)), "a sigma"),
    "exact sigma negative": ("own_sigmas", posterior(lambda raw: raw[:-1] + b"\xbf"), "a sigma"),
    "exact sigma infinite": ("weight", posterior(lambda raw: group_sigma(raw, math.inf)), "a sigma"),
    "posterior kind": ("weight", posterior(lambda raw: b"\x02" + raw[1:]), "section 'posterior': .*02"),
    "posterior cut": ("weight", posterior(lambda raw: raw[:5]), POSTERIOR),
    "plain posterior cut": ("own_sigmas", posterior(lambda raw: raw[:-1]), POSTERIOR),
    "groups none": ("weight", posterior(lambda raw: raw[:1] + bytes(4) + raw[5:]), POSTERIOR),
    "groups too many": ("weight", posterior(lambda r: r[:1] + b"\xff" * 4 + r[5:]), "4,294,967,295 groups"),
    "group table long": ("weight", posterior(lambda r: r[:5] + b"\xff" * 4 + r[9:]), "4,294,967,295 bytes"),
    "group table short": ("weight", posterior(lambda r: r[:5] + struct.pack("<I", 7) + r[9:]), POSTERIOR),
    "group counts": ("weight", posterior(lambda raw: raw[:10] + bytes([raw[10] ^ 2]) + raw[11:]), POSTERIOR),
    "group moved": ("weight", posterior(lambda raw: raw[:9] + bytes([raw[9] + 1]) + raw[10:]), POSTERIOR),
    "group stream longer": ("weight", posterior(lambda raw: raw + b"\x05\x00\x00\x00"), POSTERIOR),
    "group stream in zero": ("weight", posterior(lambda raw: raw + bytes(4)), POSTERIOR),
    "group stream not words": ("weight", posterior(lambda raw: raw + b"\x05"), POSTERIOR),
    "untouched too short": ("centre@1", content("untouched", lambda raw: raw[:-1]), UNTOUCHED),
    "untouched none": ("centre@1", late(lambda h: h.update(untouched=[])), UNTOUCHED),
    "untouched larger": ("centre@1", late(lambda h: h["untouched"][0].__setitem__(1, [2**20])), UNTOUCHED),
    "untouched huge": ("centre", header(untouched=[["x", [0, 2**40, 2**40], "int8"]]), r"2\^48"),
    "untouched not there": ("centre@1", no_untouched, UNTOUCHED),
    "boolean of two": ("centre@1", content("untouched", lambda raw: b"\x02" * 18 + raw[18:]), "a boolean"),
    "padding not zero": ("centre", content("padding", lambda raw: bytes(7) + b"\x01"), "section 'padding'"),
    "padding missing": ("padded@1", content("padding", lambda raw: b""), "weights are more"),
    "contexts with a table": ("contexts", tensor(0, own_table=True), "'0.weight': contexts need"),
    "contexts of a large codebook": ("many_values", tensor(0, contexts=True), TABLES),
    "contexts of several codebooks": ("channels", tensor(1, contexts=True), TABLES),
    "first tensor continues": ("contexts", tensor(0, continues=True), "'0.weight': it continues"),
    "continues with bytes": ("contexts", stream(lambda s: b"\x01\x00", 1), "'1.weight': it continues"),
    "continues without contexts": ("contexts", tensor(1, contexts=False), TABLES),
    "context stream longer": ("contexts", stream(lambda s: s + b"\x01\x00"), "'0.weight': the stream"),
    "context stream shorter": ("contexts", stream(lambda s: s[:-2]), "'0.weight': the stream"),
    "context stream half a word": ("contexts", stream(lambda s: s + b"\x00"), "'0.weight': the stream"),
    "context stream of no bytes": ("contexts", stream(lambda s: b""), "'0.weight': the stream"),
    "tree of more weights": ("contexts", tensor(0, shape=[30, 21]), TABLES),
    "tree no symbols": ("contexts", table(lambda n: [n[0], 0, *n[2:]]), TABLES),
    "tree too many symbols": ("contexts", table(lambda n: [n[0], 10**6, *n[2:]]), TABLES),
    "tree symbol beyond": ("contexts", table(lambda n: [*n[:2], n[2] + 1000, *n[3:]]), TABLES),
    "tree incomplete": ("contexts", table(lambda n: [*n[:3], n[3] + 1, *n[4:]]), TABLES),
    "tree of length 2^48": ("contexts", table(lambda n: [*n[:3], 2**48, *n[4:]]), TABLES),
    "tree left over": ("contexts", table(lambda n: [*n, 1]), TABLES),
    "tree cut": ("contexts", table(lambda n: n[:-1]), TABLES),
    "coded untouched too short": ("centre", content("untouched", lambda raw: raw[:-1]), UNTOUCHED),
    "coded untouched longer": ("centre", content("untouched", lambda raw: raw + b"\x01"), UNTOUCHED),
    "coded untouched none": ("centre", content("untouched", lambda raw: b""), UNTOUCHED),
    "coded untouched of 2^40": ("centre", header(untouched=[["x", [2**40], "int8"]]), UNTOUCHED),
    "tables bomb": ("centre", content("tables", lambda raw: bytes(2**24)), "section 'tables': .*claims"),
    "untouched bomb": ("centre@1", untouched_bomb, "section 'untouched': .*claims"),
}
# fmt: on
