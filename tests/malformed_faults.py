"""One fault of a file each: the sound file it begins with, how it is spoilt, and what the error must say."""

from __future__ import annotations

import math
import struct
from collections.abc import Callable
from typing import Any

from malformed import SECTIONS, Parts, leb128
from oracles import fileformat as oracle


def set_header(**fields: Any) -> Callable[[Parts], None]:
    return lambda parts: parts.header.update(fields)


def set_tensor(position: int, **fields: Any) -> Callable[[Parts], None]:
    return lambda parts: parts.header["tensors"][position].update(fields)


def set_content(name: str, change: Callable[[bytes], bytes]) -> Callable[[Parts], None]:
    return lambda parts: parts.contents.update({name: change(parts.contents[name])})


def set_stream(change: Callable[[bytes], bytes], position: int = 0) -> Callable[[Parts], None]:
    return lambda parts: parts.streams.__setitem__(position, change(parts.streams[position]))


def late(change: Callable[[dict[str, Any]], Any]) -> Callable[[Parts], None]:
    return lambda parts: parts.late.append(change)


def set_row(section: str, column: int, change: Callable[[int], int]) -> Callable[[Parts], None]:
    def act(header: dict[str, Any]) -> None:
        row = header["sections"][SECTIONS.index(section)]
        row[column] = change(row[column])

    return late(act)


def floats(*numbers: float) -> Callable[[bytes], bytes]:
    """Puts numbers in the place of the first ones."""
    return lambda raw: struct.pack(f"<{len(numbers)}f", *numbers) + raw[4 * len(numbers) :]


def with_table(numbers: Callable[[list[int]], list[int]]) -> Callable[[Parts], None]:
    """Changes the numbers of the section of tables; the first table comes first."""
    return set_content("tables", lambda raw: leb128(*numbers(oracle.leb128(raw))))


def swap_names(parts: Parts) -> None:
    parts.header["tensors"][1]["name"] = parts.header["tensors"][0]["name"]


def group_sigma(raw: bytes, value: float) -> bytes:
    """A posterior in groups whose first sigma is another."""
    table_bytes = struct.unpack("<I", raw[5:9])[0]
    return raw[: 9 + table_bytes] + struct.pack("<f", value) + raw[13 + table_bytes :]


def huge_shapes(parts: Parts) -> None:
    for tensor in parts.header["tensors"]:
        tensor["shape"] = [2**23, 2**24]


def overlapping(header: dict[str, Any]) -> None:
    """The first section reaches into the second, which is as much shorter."""
    header["sections"][0][1] += 8
    header["sections"][1][1] -= 8


def shifted(header: dict[str, Any]) -> None:
    """The last word of the first stream is claimed for the second."""
    header["tensors"][0]["bytes"] -= 4
    header["tensors"][1]["bytes"] += 4


def swap_codebooks(parts: Parts) -> None:
    parts.header["tensors"][0]["codebooks"], parts.header["tensors"][1]["codebooks"] = [1], [0]


def no_untouched(parts: Parts) -> None:
    """No bytes, but as many claimed as the tensors have."""
    parts.contents["untouched"] = b""
    claimed = sum(math.prod(shape) * oracle.WIDTHS[dtype] for _, shape, dtype in parts.header["untouched"])
    set_row("untouched", 2, lambda n: claimed)(parts)


def untouched_bomb(parts: Parts) -> None:
    parts.contents["untouched"] = bytes(2**26)
    parts.header["untouched"] = [["x", [2**26], "int8"]]


SPOILT: dict[str, tuple[str, Callable[[Parts], None], str]] = {
    "name twice": ("one_flat_layer", swap_names, "'0.weight' twice"),
    "alias twice": ("one_flat_layer", set_tensor(0, aliases=["1.weight"]), "'1.weight' twice"),
    "untouched twice": ("centre", set_tensor(0, name="norm.weight"), "'norm.weight' twice"),
    "channels last of two axes": (
        "one_flat_layer",
        set_tensor(0, channels_last=True),
        "2 axes have no order",
    ),
    "empty tensor": ("one_flat_layer", set_tensor(0, shape=[0, 20]), "'0.weight' is empty"),
    "shape of more weights": ("one_flat_layer", set_tensor(0, shape=[30, 21]), "630|620|add up"),
    "2^40 weights": (
        "one_flat_layer",
        set_tensor(0, shape=[2**20, 2**20]),
        "1,099,511,630,376 weights in .* are more",
    ),
    "2^47 weights twice": ("one_flat_layer", huge_shapes, r"at most 2\^48"),
    "2^20 weights": ("one_flat_layer", set_tensor(0, shape=[2**10, 2**10]), "add up to"),
    "sections missing": (
        "centre",
        late(lambda h: h["sections"].pop()),
        "the sections are not codebooks, tables",
    ),
    "sections in another order": (
        "centre",
        late(lambda h: h["sections"].reverse()),
        "the sections are not codebooks",
    ),
    "section twice": (
        "centre",
        late(lambda h: h["sections"].append(h["sections"][0])),
        "the sections are not",
    ),
    "section unknown": (
        "centre",
        late(lambda h: h["sections"][0].__setitem__(0, "books")),
        "the sections are not",
    ),
    "section longer": ("centre", set_row("codebooks", 1, lambda n: n + 1), "it is truncated"),
    "section shorter": ("centre", set_row("codebooks", 1, lambda n: n - 1), "longer than it should be"),
    "section beyond the end": ("centre", set_row("untouched", 1, lambda n: 2**40), "it is truncated"),
    "sections overlapping": ("centre", late(overlapping), "section 'codebooks': it is damaged"),
    **{
        f"checksum of {name}": (
            "weight",
            set_row(name, 3, lambda n: n ^ 1),
            f"section '{name}': it is damaged",
        )
        for name in SECTIONS
    },
    "checksum of a stream": (
        "weight",
        late(lambda h: h["tensors"][2].update(crc32=5)),
        "tensor 'conv.bias': it is damaged",
    ),
    **{
        f"content of {name}": ("weight", set_row(name, 2, lambda n: n + 1), f"section '{name}': ")
        for name in SECTIONS
    },
    "content of 2^40 bytes": ("centre", set_row("tables", 2, lambda n: 2**40), "section 'tables': .*"),
    "streams longer than their section": (
        "centre",
        late(lambda h: h["tensors"][0].update(bytes=2**30)),
        "section 'indices': it has .* and its streams",
    ),
    "streams shifted": ("one_flat_layer", late(shifted), "tensor '0.weight': it is damaged"),
    "stream not of words": (
        "one_flat_layer",
        set_stream(lambda s: s + b"\x01"),
        "'0.weight': the stream has .* whole words",
    ),
    "stream ends in zero": (
        "one_flat_layer",
        set_stream(lambda s: s + bytes(4)),
        "'0.weight': the stream is not one of the coder's",
    ),
    "stream too long": (
        "one_flat_layer",
        set_stream(lambda s: s + b"\x05\x00\x00\x00"),
        "'0.weight': the stream does not end",
    ),
    "stream of a single value": (
        "one_flat_layer",
        set_stream(lambda s: b"\x05\x00\x00\x00", 1),
        "'1.weight': the stream has bytes where",
    ),
    "codebook descending": (
        "centre",
        set_content("codebooks", floats(5.0, 4.0)),
        "codebooks': a codebook is not finite and asc",
    ),
    "codebook value twice": (
        "centre",
        set_content("codebooks", floats(-9.0, -9.0)),
        "codebooks': a codebook is not finite and asc",
    ),
    "codebook two zeros": (
        "centre",
        set_content("codebooks", floats(-0.0, 0.0)),
        "codebooks': a codebook is not finite and asc",
    ),
    "codebook NaN": (
        "centre",
        set_content("codebooks", floats(math.nan)),
        "codebooks': a codebook is not finite and asc",
    ),
    "codebook infinite": (
        "centre",
        set_content("codebooks", floats(-math.inf)),
        "codebooks': a codebook is not finite and asc",
    ),
    "codebook too short": (
        "centre",
        set_content("codebooks", lambda raw: raw[:-4]),
        "codebooks': there are .* values, the header",
    ),
    "codebook half a number": (
        "centre",
        set_content("codebooks", lambda raw: raw[:-1]),
        "codebooks': .* not whole numbers",
    ),
    "no codebook bytes": (
        "centre",
        set_content("codebooks", lambda raw: b""),
        "codebooks': there are 0 values",
    ),
    "index beyond its codebook": ("layers", swap_codebooks, "'conv.weight': .*beyond|symbols, its codebook"),
    "codebook sizes moved": ("layers", lambda p: p.header["codebooks"]["sizes"].reverse(), "section|tensor"),
    "table too many symbols": (
        "one_flat_layer",
        with_table(lambda n: [10**6, *n[1:]]),
        "tables': .*1,000,000 symbols",
    ),
    "table no symbols": ("one_flat_layer", with_table(lambda n: [0, *n[1:]]), "tables': .*0 symbols"),
    "table symbol beyond": (
        "one_flat_layer",
        with_table(lambda n: [n[0], n[1] + 1000, *n[2:]]),
        "tables': .*symbol beyond",
    ),
    "table huge gap": (
        "one_flat_layer",
        with_table(lambda n: [n[0], 2**48, *n[2:]]),
        "tables': .*symbol beyond",
    ),
    "table total": (
        "one_flat_layer",
        with_table(lambda n: [*n[:2], n[2] + 1, *n[3:]]),
        "tables': .*must add up to",
    ),
    "table count of zero": (
        "one_flat_layer",
        with_table(lambda n: [*n[:2], 0, n[3], n[4] + n[2], *n[5:]]),
        "tables': .*must add up to",
    ),
    "table left over": ("one_flat_layer", with_table(lambda n: [*n, 1]), "tables': 1 numbers are left over"),
    "tables cut": ("one_flat_layer", with_table(lambda n: n[:-1]), "tables': .*cut off"),
    "tables cut within a number": (
        "one_flat_layer",
        set_content("tables", lambda raw: raw + b"\x80"),
        "tables': the last number is cut off",
    ),
    "tables endless number": (
        "one_flat_layer",
        set_content("tables", lambda raw: b"\x80" * 9 + b"\x01" + raw),
        "tables': a number has 10 bytes",
    ),
    "no tables": ("one_flat_layer", set_content("tables", lambda raw: b""), "tables': .*0 symbols"),
    "own table claimed": ("centre", set_tensor(0, own_table=True), "section 'tables': "),
    "posterior claimed": ("none", set_header(posterior="centre"), "posterior': there are 0 sigmas"),
    "exact posterior claimed": (
        "none",
        set_header(posterior="weight"),
        "posterior': its coding is of unknown kind none",
    ),
    "posterior denied": ("centre", set_header(posterior="none"), "posterior': it has bytes where"),
    "posterior too short": (
        "centre",
        set_content("posterior", lambda raw: raw[:-4]),
        "posterior': .*one for each codebook value",
    ),
    "sigma negative": (
        "centre",
        set_content("posterior", floats(-0.5)),
        "posterior': a sigma is negative or not finite",
    ),
    "sigma NaN": (
        "centre",
        set_content("posterior", floats(math.nan)),
        "posterior': a sigma is negative or not finite",
    ),
    "exact sigma negative": (
        "own_sigmas",
        set_content("posterior", lambda raw: raw[:-1] + b"\xbf"),
        "posterior': a sigma is negative",
    ),
    "exact sigma infinite": (
        "weight",
        set_content("posterior", lambda raw: group_sigma(raw, math.inf)),
        "posterior': a sigma is negative or",
    ),
    "posterior kind": (
        "weight",
        set_content("posterior", lambda raw: b"\x02" + raw[1:]),
        "posterior': its coding is of unknown kind 02",
    ),
    "posterior cut": (
        "weight",
        set_content("posterior", lambda raw: raw[:5]),
        "posterior': its coding is of unknown kind",
    ),
    "plain posterior too short": (
        "own_sigmas",
        set_content("posterior", lambda raw: raw[:-1]),
        "posterior': .*one sigma for each",
    ),
    "groups none": (
        "weight",
        set_content("posterior", lambda raw: raw[:1] + bytes(4) + raw[5:]),
        "posterior': 0 groups",
    ),
    "groups too many": (
        "weight",
        set_content("posterior", lambda raw: raw[:1] + b"\xff" * 4 + raw[5:]),
        "posterior': 4,294,967,295 groups",
    ),
    "group table too long": (
        "weight",
        set_content("posterior", lambda raw: raw[:5] + b"\xff" * 4 + raw[9:]),
        "posterior': .*4,294,967,295 bytes do not fit",
    ),
    "group table shorter": (
        "weight",
        set_content("posterior", lambda raw: raw[:5] + struct.pack("<I", 7) + raw[9:]),
        "posterior': its table has",
    ),
    "group counts": (
        "weight",
        set_content("posterior", lambda raw: raw[:10] + bytes([raw[10] ^ 2]) + raw[11:]),
        "posterior': its counts do not agree",
    ),
    "group at another centre": (
        "weight",
        set_content("posterior", lambda raw: raw[:9] + bytes([raw[9] + 1]) + raw[10:]),
        "posterior': its counts do not agree",
    ),
    "group stream longer": (
        "weight",
        set_content("posterior", lambda raw: raw + b"\x05\x00\x00\x00"),
        "posterior': its stream does not end",
    ),
    "group stream in zero": (
        "weight",
        set_content("posterior", lambda raw: raw + bytes(4)),
        "posterior': the stream is not one",
    ),
    "group stream not words": (
        "weight",
        set_content("posterior", lambda raw: raw + b"\x05"),
        "posterior': the stream has .* whole words",
    ),
    "untouched too short": (
        "centre",
        set_content("untouched", lambda raw: raw[:-1]),
        "section 'untouched': its tensors have",
    ),
    "untouched none": (
        "centre",
        late(lambda h: h.update(untouched=[])),
        "section 'untouched': its tensors have 0 bytes",
    ),
    "untouched larger": (
        "centre",
        late(lambda h: h["untouched"][0].__setitem__(1, [2**20])),
        "section 'untouched': its tensors have",
    ),
    "untouched overflowing": (
        "centre",
        late(lambda h: h["untouched"].append(["x", [0, 2**40, 2**40], "int8"])),
        r"2\^48 elements",
    ),
    "untouched not there": ("centre", no_untouched, "untouched': it has 0 bytes, the header says"),
    "boolean of two": (
        "centre",
        set_content("untouched", lambda raw: b"\x02" * 18 + raw[18:]),
        "untouched': a boolean is neither 0 nor 1",
    ),
    "padding not zero": (
        "centre",
        set_content("padding", lambda raw: bytes(7) + b"\x01"),
        "padding': a byte is not zero",
    ),
    "padding away": ("padded", set_content("padding", lambda raw: b""), "are more than a file may claim"),
    "tables bomb": (
        "centre",
        set_content("tables", lambda raw: bytes(2**24)),
        "tables': .*out of proportion",
    ),
    "untouched bomb": ("centre", untouched_bomb, "untouched': .*out of proportion"),
}
