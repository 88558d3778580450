"""What a .pwfn file holds: codebooks, one index per weight, sigma, and the tensors left untouched."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from pwfn.errors import FileError
from pwfn.file.coder import bytes_of
from pwfn.layout import Entry, Layout


@dataclass(frozen=True)
class Division:
    """Which codebooks an entry uses: it is cut along ``axis`` into as many equal parts."""

    codebooks: tuple[int, ...] = (0,)
    axis: int = 0


@dataclass(frozen=True, eq=False, repr=False)
class Content:
    """A network whose compressed weights are values of a few codebooks, all on the CPU.

    Sigma is known per weight (``weight_sigma``), per value of a codebook (``centre_sigma``), or not at all.
    """

    layout: Layout
    codebooks: tuple[Tensor, ...]  # each strictly ascending
    divisions: tuple[Division, ...]  # one per entry of the layout
    indices: Tensor  # one per weight, into the codebook of its part
    untouched: dict[str, Tensor]  # every other parameter and buffer, by state-dict name
    weight_sigma: Tensor | None = None
    centre_sigma: tuple[Tensor, ...] | None = None
    record: Mapping[str, Any] = field(default_factory=dict)  # facts of the run, as JSON

    @property
    def sigma(self) -> Tensor | None:
        """One sigma per weight: exact, or that of its centre; None if there is no posterior."""
        if self.weight_sigma is not None:
            return self.weight_sigma
        return self._looked_up(self.centre_sigma) if self.centre_sigma is not None else None

    def values(self) -> Tensor:
        """One value per weight, as a vector."""
        return self._looked_up(self.codebooks)

    def centre_sigmas(self) -> tuple[Tensor, ...] | None:
        """One sigma per value of each codebook: the root mean square over its weights."""
        if self.weight_sigma is None:
            return self.centre_sigma
        squares = [torch.zeros(book.numel(), dtype=torch.float64) for book in self.codebooks]
        counts = [torch.zeros_like(total) for total in squares]
        for book, index, sigma in self.pieces(self.weight_sigma):
            flat = index.reshape(-1).to(torch.int64)
            squares[book].index_add_(0, flat, sigma.reshape(-1).double().square())
            counts[book] += torch.bincount(flat, minlength=counts[book].numel())
        dtype = self.layout.dtype
        return tuple((s / n.clamp_min(1)).sqrt().to(dtype) for s, n in zip(squares, counts, strict=True))

    def pieces(self, vector: Tensor) -> Iterator[tuple[int, Tensor, Tensor]]:
        """For every part of every entry: its codebook, its indices, and its part of a vector."""
        for entry, division in zip(self.layout.entries, self.divisions, strict=True):
            books = division.codebooks
            cut, share = (
                parts(entry, v[entry.span], division.axis, len(books)) for v in (self.indices, vector)
            )
            yield from zip(books, cut, share, strict=True)

    def content_sha256(self) -> str:
        """SHA-256 of the network: every tensor, and sigma where there is one; ``docs/format.md`` defines it.

        It does not depend on the record, nor on how the numbers are coded: a network that is loaded and saved
        again keeps it.
        """
        digest = hashlib.sha256()

        def add(line: list[object], tensor: Tensor | None = None) -> None:
            text = json.dumps(line, sort_keys=True, separators=(",", ":"))
            digest.update(f"{text}\n".encode() + (b"" if tensor is None else bytes_of(tensor)))

        add(["pwfn content", 1, name_of(self.layout.dtype)])
        places = {entry.name: place for place, entry in enumerate(self.layout.entries)}
        for name in sorted(places.keys() | self.untouched.keys()):
            if (place := places.get(name)) is None:
                tensor = self.untouched[name]
                add(["untouched", name, list(tensor.shape), name_of(tensor.dtype)], tensor)
                continue
            entry = self.layout.entries[place]
            facts = [list(entry.shape), name_of(entry.dtype), sorted(entry.aliases)]
            add(["compressed", name, *facts], self._entry(place, self.codebooks))  # one at a time: memory
            if self.weight_sigma is not None:
                add(["sigma", name], self.weight_sigma[entry.span])
            elif self.centre_sigma is not None:
                add(["sigma", name], self._entry(place, self.centre_sigma))
        if "activations" in self.record:  # the one fact of the record that changes what the network computes
            add(["activations", self.record["activations"]])
        return digest.hexdigest()

    def check(self) -> None:
        """Raise an error for anything that a file must not hold; the header checks the rest."""
        layout, books = self.layout, self.codebooks
        if {book.dtype for book in books} != {layout.dtype}:
            raise FileError(f"the codebooks are not of type {layout.dtype}, as the vector of the layout is")
        values = torch.cat(books)
        falls = values.diff() <= 0
        ends = torch.tensor([book.numel() for book in books]).cumsum(0)[:-1] - 1
        falls[ends] = False  # from one codebook to the next
        if not bool(torch.isfinite(values).all()) or bool(falls.any()):
            raise FileError("a codebook is not finite and strictly ascending")
        if self.indices.shape != (layout.size,):
            raise FileError(f"there are {self.indices.numel():,} indices for {layout.size:,} weights")
        for entry, division in zip(layout.entries, self.divisions, strict=True):
            cut = parts(entry, self.indices[entry.span], division.axis, len(division.codebooks))
            for part, book in zip(cut, division.codebooks, strict=True):
                if int(part.min()) < 0 or int(part.max()) >= books[book].numel():
                    raise FileError(f"tensor {entry.name!r}: an index is beyond its codebook")
        for sigma in (self.weight_sigma, *(self.centre_sigma or ())):
            if sigma is not None:
                if sigma.dtype != layout.dtype:
                    raise FileError(f"sigma is of type {sigma.dtype}, the codebooks of {layout.dtype}")
                check_sigma(sigma)

    def _entry(self, place: int, tables: tuple[Tensor, ...]) -> Tensor:
        """For every weight of one entry that of its codebook's table."""
        entry, division = self.layout.entries[place], self.divisions[place]
        found = torch.empty(entry.size, dtype=tables[0].dtype)
        cut = (
            parts(entry, vector, division.axis, len(division.codebooks))
            for vector in (self.indices[entry.span], found)
        )
        for book, index, part in zip(division.codebooks, *cut, strict=True):
            part.copy_(tables[book][index.to(torch.int64)])
        return found

    def _looked_up(self, tables: tuple[Tensor, ...]) -> Tensor:
        """For every weight the entry of its codebook's table."""
        if len(tables) == 1:
            return tables[0][self.indices.to(torch.int64)]
        out = torch.empty(self.layout.size, dtype=tables[0].dtype)
        for book, index, place in self.pieces(out):
            place.copy_(tables[book][index.to(torch.int64)])
        return out


def parts(entry: Entry, vector: Tensor, axis: int, count: int) -> tuple[Tensor, ...]:
    """An entry's slice of a vector, in the entry's shape and cut into equal parts: views."""
    return vector.view(entry.shape or (1,)).tensor_split(count, axis)


def name_of(dtype: torch.dtype) -> str:
    """As files call it.

    >>> name_of(torch.float32)
    'float32'
    """
    return str(dtype).removeprefix("torch.")


def check_sigma(sigma: Tensor) -> None:
    """Raise an error unless every sigma is finite and not negative."""
    if not bool((torch.isfinite(sigma) & (sigma >= 0)).all()):
        raise FileError("a sigma is negative or not finite")


@contextmanager
def within(what: str) -> Iterator[None]:
    """Name the part of the file that is at fault in front of an error."""
    try:
        yield
    except FileError as error:
        raise FileError(f"{what}: {error}" if what else str(error)) from error.__cause__
