"""The exact sigma of every weight as bytes.

Weights that were fixed in one step share centre and sigma, so the sigma of a weight is one of the few that
occur at its centre: which one is entropy-coded, centre by centre. Where almost every weight has its own
sigma, the numbers themselves are stored.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator

import constriction
import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from pwfn.errors import FileError
from pwfn.file import coder
from pwfn.file.content import Content

_PLAIN, _GROUPED = b"\x00", b"\x01"
_MOST_GROUPS = 2**16


def encode(content: Content, sigmas: Tensor) -> bytes:
    """Kind of coding, then the coded sigmas; the inverse is :func:`decode`."""
    sigma, centres = sigmas.numpy(), content.centres().numpy()
    values, rank = np.unique(sigma, return_inverse=True)
    groups, group, counts = np.unique(centres * len(values) + rank, return_inverse=True, return_counts=True)
    plain = _PLAIN + coder.shuffled(sigma.tobytes(), sigma.itemsize)
    if len(groups) > _MOST_GROUPS:
        return plain
    at_centre = groups // len(values)
    gaps = np.diff(at_centre, prepend=0)
    table = coder.numbers_to_bytes(np.stack((gaps, counts), 1).reshape(-1).tolist())
    ans = constriction.stream.stack.AnsCoder()
    order = np.argsort(centres, kind="stable")
    for start, stop, model, first in reversed(list(_runs(at_centre, counts))):
        if model is not None:
            ans.encode_reverse((group[order[start:stop]] - first).astype(np.int32), model)
    words = ans.get_compressed().astype("<u4").tobytes()
    head = struct.pack("<II", len(groups), len(table))
    grouped = b"".join((_GROUPED, head, table, values[groups % len(values)].tobytes(), words))
    return grouped if len(grouped) < len(plain) else plain


def decode(content: Content, raw: bytes) -> Tensor:
    """One sigma per weight, given the indices they belong to."""
    wide = content.layout.dtype == torch.float64
    dtype: np.dtype[np.floating] = np.dtype(np.float64) if wide else np.dtype(np.float32)
    size = content.layout.size
    if raw[:1] == _PLAIN:
        if len(raw) != 1 + size * dtype.itemsize:
            raise FileError(f"its {len(raw) - 1:,} bytes are not one sigma for each of {size:,} weights")
        sigma = np.frombuffer(coder.unshuffled(raw[1:], dtype.itemsize), dtype).copy()
    elif raw[:1] == _GROUPED and len(raw) >= 9:
        sigma = _grouped(content, raw[1:], dtype)
    else:
        raise FileError(f"its coding is of unknown kind {raw[:1].hex() or 'none'}: allowed are 00 and 01")
    return torch.from_numpy(sigma)


def _grouped(content: Content, raw: bytes, dtype: np.dtype[np.floating]) -> NDArray[np.floating]:
    number, table_bytes = struct.unpack("<II", raw[:8])
    stop = 8 + table_bytes + number * dtype.itemsize
    if not 0 < number <= _MOST_GROUPS or stop > len(raw):
        raise FileError(f"{number:,} groups and a table of {table_bytes:,} bytes do not fit its {len(raw):,}")
    numbers = coder.numbers_from_bytes(raw[8 : 8 + table_bytes])
    if len(numbers) != 2 * number:
        raise FileError(
            f"its table has {len(numbers):,} numbers instead of two for each of {number:,} groups"
        )
    # Steps are cut to the number of centres: far beyond the last is as wrong, and the sum cannot wrap around.
    most = sum(book.numel() for book in content.codebooks)
    at_centre, counts = np.cumsum(numbers[::2].clip(0, most)), numbers[1::2]
    values = np.frombuffer(raw[8 + table_bytes : stop], dtype)
    centres = content.centres().numpy()
    here = np.bincount(at_centre.clip(0, most), counts, most + 1)
    if counts.min() < 1 or not np.array_equal(here, np.bincount(centres, minlength=most + 1)):
        raise FileError("its counts do not agree with the indices")
    ans = coder.coder_of(raw[stop:])
    sigma = np.empty(len(centres), dtype)
    order = np.argsort(centres, kind="stable")
    for start, end, model, first in _runs(at_centre, counts):
        local = ans.decode(model, end - start) if model is not None else 0
        sigma[order[start:end]] = values[first + local]
    if not ans.is_empty():
        raise FileError("its stream does not end after its last symbol")
    return sigma


def _runs(
    at_centre: NDArray[np.int64], counts: NDArray[np.int64]
) -> Iterator[tuple[int, int, constriction.stream.model.Categorical | None, int]]:
    """For each centre: start and stop of its weights in the order of centres, model, first group."""
    edges = np.flatnonzero(np.diff(at_centre, prepend=-1, append=-1))
    start = 0
    for first, last in zip(edges[:-1].tolist(), edges[1:].tolist(), strict=True):
        here = counts[first:last]
        stop = start + int(here.sum())
        model = coder.Table(np.arange(last - first, dtype=np.int32), here).model if last - first > 1 else None
        yield start, stop, model, first
        start = stop
