"""A network to the bytes of a .pwfn file. The specification is ``docs/format.md``."""

from __future__ import annotations

import os
import struct
import sys
import zlib
from pathlib import Path
from typing import BinaryIO, TypeAlias

from pwfn.errors import FileError
from pwfn.file import coder, sigma_coder
from pwfn.file.content import Content, Division, within
from pwfn.file.header import PARENT, SECTIONS, Codebooks, Header, Posterior, Section, Stored, TensorInfo
from pwfn.file.storage import replacing
from pwfn.layout import Entry
from pwfn.version import __version__

PathOrFile: TypeAlias = str | os.PathLike[str] | BinaryIO

MAGIC = b"\x89PWFN\r\n\x1a"
VERSION = 1
PREFIX = struct.Struct("<8sHHIII")  # magic, version, flags, header bytes, decompressed header bytes, CRC-32
HEADER_LIMIT = 2**24
HEADER_RATIO = 64  # parsed JSON grows further, so a header may be compressed less than a block
PLAIN_SECTIONS = ("indices", "padding")  # the others are blocks
FREE_WEIGHTS = 2**20
WEIGHTS_PER_BYTE = 64
WRITER = f"pwfn {__version__}"


def dumps(content: Content, posterior: Posterior | str | None = None) -> bytes:
    """The bytes of a file; for ``posterior`` see :meth:`pwfn.Compressed.dumps`."""
    check_machine()
    kind = _posterior(content, posterior)
    content.check()
    arrays = [content.indices[entry.span].numpy() for entry in content.layout.entries]
    shared, own = coder.choose_tables([coder.counts_of(array) for array in arrays])
    coded: list[bytes] = []
    for array, table in zip(arrays, own, strict=True):
        used = table or shared
        assert used is not None  # there is a shared table if any tensor has none of its own
        coded.append(coder.encode(array, used))
    contents = {
        "codebooks": b"".join(map(coder.bytes_of, content.codebooks)),
        "tables": b"".join(table.to_bytes() for table in (shared, *own) if table is not None),
        "indices": b"".join(coded),
        "posterior": _posterior_bytes(content, kind),
        "untouched": _untouched_bytes(content),
        "padding": b"",
    }
    stored = {
        name: raw if name in PLAIN_SECTIONS or not raw else coder.squeeze(raw)
        for name, raw in contents.items()
    }
    # A reader refuses more weights than a file of its size may claim. A network that is smaller still (almost
    # all zeros) is padded with zero bytes.
    short = (content.layout.size - FREE_WEIGHTS) // WEIGHTS_PER_BYTE - sum(map(len, stored.values()))
    stored["padding"] = contents["padding"] = bytes(max(short + 1, 0))
    header = Header(
        writer=WRITER,
        tensors=tuple(
            _info(entry, division, stream, table is not None)
            for entry, division, stream, table in zip(
                content.layout.entries, content.divisions, coded, own, strict=True
            )
        ),
        left_out=content.layout.left_out,
        codebooks=Codebooks(content.layout.dtype, tuple(book.numel() for book in content.codebooks)),
        posterior=kind,
        untouched=tuple(
            Stored(name, tuple(tensor.shape), tensor.dtype) for name, tensor in content.untouched.items()
        ),
        record=dict(content.record),
        sections=tuple(
            Section(name, len(stored[name]), len(contents[name]), zlib.crc32(stored[name]))
            for name in SECTIONS
        ),
    )
    raw = header.to_json()
    packed = coder.squeeze(raw, HEADER_RATIO)
    if max(len(raw), len(packed)) > HEADER_LIMIT:
        raise FileError(f"the header would have {len(raw):,} bytes, 2^24 are allowed: shorten the record")
    Header.from_json(raw)  # what cannot be read is not written
    prefix = PREFIX.pack(MAGIC, VERSION, 0, len(packed), len(raw), zlib.crc32(packed))
    return b"".join((prefix, packed, *stored.values()))


def save(content: Content, target: PathOrFile, *, posterior: Posterior | str | None = None) -> int:
    """Write a file and return its size in bytes; see :func:`dumps`.

    ``target`` is a path or a binary file object. A path is written completely or not at all: the new file is
    written beside it and renamed, so an error leaves the old one.
    """
    if not isinstance(target, (str, os.PathLike)):
        data = dumps(content, posterior)
        target.write(data)
        return len(data)
    with within(os.fspath(target)):
        data = dumps(content, posterior)
    with replacing(Path(target)) as temporary:
        temporary.write_bytes(data)
    return len(data)


def check_machine() -> None:
    """Raise an error on big-endian machines: numbers are stored as they lie in memory."""
    if sys.byteorder != "little":
        raise FileError("files are read and written on little-endian machines only")


def _info(entry: Entry, division: Division, stream: bytes, own_table: bool) -> TensorInfo:
    return TensorInfo(
        name=entry.name,
        shape=entry.shape,
        dtype=entry.dtype,
        layer=entry.layer if entry.layer != entry.name.rpartition(".")[0] else PARENT,
        type=entry.layer_type,
        kind=entry.kind,
        aliases=entry.aliases,
        input_axis=entry.input_axis,
        groups=entry.groups,
        attention=entry.attention,
        channels_last=entry.channels_last,
        codebooks=division.codebooks,
        axis=division.axis,
        own_table=own_table,
        bytes=len(stream),
        crc32=zlib.crc32(stream),
    )


def _posterior(content: Content, wanted: Posterior | str | None) -> Posterior:
    known = content.weight_sigma is not None or content.centre_sigma is not None
    if wanted is None:
        return Posterior.CENTRE if known else Posterior.NONE
    if wanted not in list(Posterior):
        raise FileError(f"posterior is {wanted!r}: allowed is one of {', '.join(Posterior)}")
    if wanted != Posterior.NONE and not known:
        raise FileError("there is no posterior to save: pass posterior='none'")
    if wanted == Posterior.WEIGHT and content.weight_sigma is None:
        raise FileError("sigma is known per centre only: pass posterior='centre'")
    return Posterior(wanted)


def _posterior_bytes(content: Content, kind: Posterior) -> bytes:
    if kind is Posterior.WEIGHT and content.weight_sigma is not None:
        return sigma_coder.encode(content, content.weight_sigma)
    sigmas = content.centre_sigmas() if kind is Posterior.CENTRE else None
    return b"".join(map(coder.bytes_of, sigmas or ()))


def _untouched_bytes(content: Content) -> bytes:
    """By width of the numbers, ascending; for each width all tensors in order, bytes shuffled."""
    tensors = content.untouched.values()
    return b"".join(
        coder.shuffled(b"".join(coder.bytes_of(t) for t in tensors if t.dtype.itemsize == width), width)
        for width in sorted({tensor.dtype.itemsize for tensor in tensors})
    )
