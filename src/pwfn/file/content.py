"""What a .pwfn file may hold, checked on the way in and out, and tensors as its bytes."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from pwfn.errors import FileError
from pwfn.file import coder as codec
from pwfn.file.compressed import Compressed, Division
from pwfn.file.header import Stored


def check(compressed: Compressed) -> None:
    """What a reader would refuse is not written; :class:`Header` checks the rest."""
    check_machine()
    layout, books = compressed.layout, compressed.codebooks
    if {book.dtype for book in books} != {layout.dtype}:
        raise FileError(f"the codebooks are not of type {layout.dtype}, as the layout's vector is")
    check_ascending(books)
    if compressed.indices.shape != (layout.size,):
        raise FileError(f"there are {compressed.indices.numel():,} indices for {layout.size:,} weights")
    sizes = np.array([book.numel() for book in books])
    for entry, division in zip(layout.entries, compressed.divisions, strict=True):
        with within(f"tensor {entry.name!r}"):
            check_range(symbols(compressed.indices[entry.span]), entry.shape, division, sizes)
    for sigma in (compressed.weight_sigma, *(compressed.centre_sigma or ())):
        if sigma is not None:
            if sigma.dtype != layout.dtype:
                raise FileError(f"sigma is of type {sigma.dtype}, not {layout.dtype} as the codebooks are")
            check_sigma(sigma)


def check_machine() -> None:
    """Bytes are used as they lie in memory."""
    if sys.byteorder != "little":
        raise FileError("files are read and written on little-endian machines only")


def check_ascending(books: Sequence[Tensor]) -> None:
    """Each codebook is finite and ascending."""
    whole = torch.cat(list(books))
    falls = whole.diff() <= 0
    ends = torch.tensor([book.numel() for book in books]).cumsum(0)[:-1] - 1
    falls[ends] = False  # from one codebook to the next
    if not bool(torch.isfinite(whole).all()) or bool(falls.any()):
        raise FileError("a codebook is not finite and ascending without repetition")


def check_range(
    indices: codec.Integers, shape: tuple[int, ...], division: Division, books: NDArray[np.int64]
) -> None:
    """Every index is one into the codebook of its part."""
    shape = shape or (1,)
    limits = books[list(division.codebooks)]
    largest = int(indices.max())
    if int(indices.min()) >= 0 and largest < limits.min():
        return
    along = [1] * len(shape)
    along[division.axis] = shape[division.axis]
    limit = limits.repeat(shape[division.axis] // len(limits)).reshape(along)
    if int(indices.min()) < 0 or bool((indices.reshape(shape) >= limit).any()):
        raise FileError(f"an index is beyond its codebook of {limits.min():,} to {limits.max():,} values")


def check_sigma(sigma: Tensor) -> None:
    """Every sigma is finite and not negative."""
    if not bool((torch.isfinite(sigma) & (sigma >= 0)).all()):
        raise FileError("a sigma is negative or not finite")


def untouched_bytes(tensors: Mapping[str, Tensor]) -> bytes:
    """By width of the numbers, ascending; of each width all tensors in order, bytes shuffled."""
    widths = sorted({tensor.dtype.itemsize for tensor in tensors.values()})
    return b"".join(
        codec.shuffled(b"".join(bytes_of(t) for t in tensors.values() if t.dtype.itemsize == width), width)
        for width in widths
    )


def untouched_tensors(raw: bytes, wanted: Sequence[Stored]) -> dict[str, Tensor]:
    """What ``untouched_bytes`` was given."""
    found: dict[str, Tensor] = {}
    start = 0
    for width in sorted({item.dtype.itemsize for item in wanted}):
        group = [item for item in wanted if item.dtype.itemsize == width]
        stop = start + sum(item.size for item in group)
        plain, place = codec.unshuffled(raw[start:stop], width), 0
        for item in group:
            found[item.name] = tensor_of(plain[place : place + item.size], item.dtype, item.shape)
            place += item.size
        start = stop
    return {item.name: found[item.name] for item in wanted}


def symbols(indices: Tensor) -> codec.Integers:
    """Indices as the coder takes them, without a copy."""
    array: codec.Integers = indices.numpy()
    return array


def bytes_of(tensor: Tensor) -> bytes:
    """A dense tensor's numbers in row-major order."""
    if tensor.layout != torch.strided:
        raise FileError(f"a tensor is stored as {tensor.layout}: make it dense first")
    plain = tensor.resolve_conj().resolve_neg().contiguous()
    return plain.reshape(-1).view(torch.uint8).numpy().tobytes()


def tensor_of(raw: bytes, dtype: torch.dtype, shape: tuple[int, ...]) -> Tensor:
    """A new tensor from its bytes."""
    if len(raw) % dtype.itemsize:
        raise FileError(f"{len(raw)} bytes are not whole numbers of type {dtype}")
    # A copy: frombuffer would share memory that cannot be written.
    flat = torch.frombuffer(bytearray(raw), dtype=dtype) if raw else torch.empty(0, dtype=dtype)
    if dtype is torch.bool and bool((flat.view(torch.uint8) > 1).any()):
        raise FileError("a boolean is neither 0 nor 1")
    return flat.view(shape)


@contextmanager
def within(what: str) -> Iterator[None]:
    """Puts the part of the file that is at fault before an error."""
    try:
        yield
    except FileError as error:
        raise FileError(f"{what}: {error}") from None
