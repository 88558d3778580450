"""A network to the bytes of a .pwfn file. The specification is ``docs/format.md``."""

from __future__ import annotations

import os
import struct
import sys
import zlib
from typing import BinaryIO, TypeAlias

from pwfn.errors import FileError
from pwfn.file import coder, index_streams, sigma_coder, untouched_coder
from pwfn.file.content import Content
from pwfn.file.header import SECTIONS, Codebooks, Header, Posterior, Section, Stored, TensorInfo
from pwfn.version import __version__

PathOrFile: TypeAlias = str | os.PathLike[str] | BinaryIO

MAGIC = b"\x89PWFN\r\n\x1a"
VERSION = 2
"""The version that is written; version 1 is larger, and faster to read and write."""

WEIGHTS_PER_BYTE = {1: 64, 2: 1024}
"""By version: a file may hold so many weights for each of its bytes, beyond the first 2^20."""

PREFIX = struct.Struct("<8sHHIII")  # magic, version, flags, header bytes, decompressed header bytes, CRC-32
HEADER_LIMIT = 2**24
HEADER_RATIO = 64  # parsed JSON grows further, so a header may be compressed less than a block
PLAIN_SECTIONS = {1: ("indices", "padding"), 2: ("indices", "untouched", "padding")}
"""By version: these are stored as they are, the others are blocks."""

FREE_WEIGHTS = 2**20
WRITER = f"pwfn {__version__}"


def dumps(content: Content, posterior: Posterior | str | None = None, version: int = VERSION) -> bytes:
    """The bytes of a file; for ``posterior`` and ``version`` see :meth:`pwfn.Compressed.dumps`."""
    check_machine()
    if version not in WEIGHTS_PER_BYTE:
        raise FileError(f"version is {version!r}: allowed is one of {', '.join(map(str, WEIGHTS_PER_BYTE))}")
    kind = _posterior(content, posterior)
    content.check()
    tables, coded = index_streams.encode(content, with_contexts=version > 1)
    contents = {
        "codebooks": b"".join(map(coder.bytes_of, content.codebooks)),
        "tables": tables,
        "indices": b"".join(tensor.stream for tensor in coded),
        "posterior": _posterior_bytes(content, kind),
        "untouched": untouched_coder.encode(content.untouched) if version > 1 else _untouched_bytes(content),
        "padding": b"",
    }
    stored = {
        name: raw if name in PLAIN_SECTIONS[version] or not raw else coder.squeeze(raw)
        for name, raw in contents.items()
    }
    if kind is Posterior.TENSOR:  # as large for one fit as for another: targets in bytes count on it
        stored["posterior"] = b"\x00" + contents["posterior"]
    # A reader refuses more weights than a file of its size may claim. A network that is smaller still (almost
    # all zeros) is padded with zero bytes.
    short = (content.layout.size - FREE_WEIGHTS) // WEIGHTS_PER_BYTE[version] - sum(map(len, stored.values()))
    stored["padding"] = contents["padding"] = bytes(max(short + 1, 0))
    sizes = {name: len(raw) for name, raw in contents.items()}
    sizes["untouched"] = sum(tensor.nbytes for tensor in content.untouched.values())
    header = Header(
        writer=WRITER,
        tensors=tuple(
            TensorInfo.of(
                entry,
                codebooks=division.codebooks,
                axis=division.axis,
                own_table=tensor.own_table,
                contexts=tensor.contexts,
                continues=tensor.continues,
                bytes=len(tensor.stream),
                crc32=zlib.crc32(tensor.stream),
            )
            for entry, division, tensor in zip(content.layout.entries, content.divisions, coded, strict=True)
        ),
        left_out=content.layout.left_out,
        codebooks=Codebooks(content.layout.dtype, tuple(book.numel() for book in content.codebooks)),
        posterior=kind,
        untouched=tuple(
            Stored(name, tuple(tensor.shape), tensor.dtype) for name, tensor in content.untouched.items()
        ),
        record=dict(content.record),
        sections=tuple(
            Section(name, len(stored[name]), sizes[name], zlib.crc32(stored[name])) for name in SECTIONS
        ),
    )
    raw = header.to_json()
    packed = coder.squeeze(raw, HEADER_RATIO)
    if max(len(raw), len(packed)) > HEADER_LIMIT:
        raise FileError(f"the header would have {len(raw):,} bytes, 2^24 are allowed: shorten the record")
    Header.from_json(raw, version)  # what cannot be read is not written
    prefix = PREFIX.pack(MAGIC, version, 0, len(packed), len(raw), zlib.crc32(packed))
    return b"".join((prefix, packed, *stored.values()))


def check_machine() -> None:
    """Raise an error on big-endian machines: numbers are stored as they lie in memory."""
    if sys.byteorder != "little":
        raise FileError("files are read and written on little-endian machines only")


def _posterior(content: Content, wanted: Posterior | str | None) -> Posterior:
    known = content.weight_sigma is not None or content.centre_sigma is not None
    if wanted is None:
        usual = Posterior.CENTRE if known else Posterior.NONE
        return usual if content.sigma_codes is None else Posterior.TENSOR
    if wanted not in list(Posterior):
        raise FileError(f"posterior is {wanted!r}: allowed is one of {', '.join(Posterior)}")
    if wanted == Posterior.TENSOR and content.sigma_codes is None:
        raise FileError("no sigma was fitted for each tensor: fit one with pwfn.fit_posterior")
    if wanted in (Posterior.CENTRE, Posterior.WEIGHT) and not known:
        raise FileError("there is no sigma of training to save: pass posterior='tensor' or 'none'")
    if wanted == Posterior.WEIGHT and content.weight_sigma is None:
        raise FileError("sigma is known per centre only: pass posterior='centre'")
    return Posterior(wanted)


def _posterior_bytes(content: Content, kind: Posterior) -> bytes:
    if kind is Posterior.WEIGHT and content.weight_sigma is not None:
        return sigma_coder.encode(content, content.weight_sigma)
    if kind is Posterior.TENSOR:
        return bytes(content.sigma_codes or ())
    sigmas = content.centre_sigmas() if kind is Posterior.CENTRE else None
    return b"".join(map(coder.bytes_of, sigmas or ()))


def _untouched_bytes(content: Content) -> bytes:
    """Version 1: by width of the numbers, ascending; for each width all tensors in order, bytes shuffled."""
    tensors = content.untouched.values()
    return b"".join(
        coder.shuffled(b"".join(coder.bytes_of(t) for t in tensors if t.dtype.itemsize == width), width)
        for width in sorted({tensor.dtype.itemsize for tensor in tensors})
    )
