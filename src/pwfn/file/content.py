"""What a .pwfn file holds: codebooks, one index per weight, sigma, and the tensors left untouched."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from pwfn.errors import FileError
from pwfn.file.coder import bytes_of
from pwfn.layout import Entry, Layout

NOTHING_TO_DRAW = "no posterior worth drawing from"
"""What is said of a network whose predictive sigma was fitted to zero."""

_CODE_OF_ONE = 200  # of sigma: from 2^-24.875 to 2^6.875


@dataclass(frozen=True)
class Division:
    """Which codebooks an entry uses: it is cut along ``axis`` into as many equal parts."""

    codebooks: tuple[int, ...] = (0,)
    axis: int = 0


@dataclass(frozen=True, eq=False, repr=False)
class Content:
    """The numbers of a :class:`pwfn.Compressed`, which has what is done with them."""

    layout: Layout
    codebooks: tuple[Tensor, ...]  # each strictly ascending
    divisions: tuple[Division, ...]  # one per entry of the layout
    indices: Tensor  # one per weight, into the codebook of its part
    untouched: dict[str, Tensor]  # every other parameter and buffer, by state-dict name
    weight_sigma: Tensor | None = None
    centre_sigma: tuple[Tensor, ...] | None = None
    record: Mapping[str, Any] = field(default_factory=dict)  # facts of the run, as JSON
    sigma_codes: tuple[int, ...] | None = None  # one per entry of the layout, see sigma_of

    @property
    def posterior(self) -> str:
        """What draws use: ``tensor``, ``weight``, ``centre``, or ``none`` if there is no posterior."""
        known = {"tensor": self.sigma_codes, "weight": self.weight_sigma, "centre": self.centre_sigma}
        return next((name for name, sigma in known.items() if sigma is not None), "none")

    @property
    def drawable(self) -> bool:
        """Whether there is a posterior worth drawing from: one that was not fitted to zero."""
        return self.posterior != "none" and (self.sigma_codes is None or any(self.sigma_codes))

    @property
    def posterior_sentence(self) -> str:
        """Which sigmas draws use, for readers."""
        if self.sigma_codes is None:
            known = {
                "none": "none; pwfn.fit_posterior fits one",
                "weight": "sigma of training, one per weight",
            }
            return known.get(self.posterior, "sigma of training, one per value")
        drawn = sum(map(bool, self.sigma_codes))
        return f"fitted, {drawn} of {len(self.sigma_codes)} tensors are drawn" if drawn else NOTHING_TO_DRAW

    @property
    def tensor_sigma(self) -> Tensor | None:
        """The predictive sigma of each tensor; None if none was fitted, zeros if the fit found none."""
        return None if self.sigma_codes is None else sigma_of(self.sigma_codes).to(self.layout.dtype)

    @property
    def sigma(self) -> Tensor | None:
        """One sigma per weight: that of its tensor, its own, or that of its centre; None: no posterior."""
        if (found := self.tensor_sigma) is not None:
            return found.repeat_interleave(torch.tensor([entry.size for entry in self.layout.entries]))
        if self.weight_sigma is not None:
            return self.weight_sigma
        return self.looked_up(self.centre_sigma) if self.centre_sigma is not None else None

    def values(self) -> Tensor:
        """One value per weight, as a vector."""
        return self.looked_up(self.codebooks)

    def centre_sigmas(self) -> tuple[Tensor, ...] | None:
        """One sigma per value of each codebook: the root mean square over its weights."""
        if self.weight_sigma is None:
            return self.centre_sigma
        sizes = [book.numel() for book in self.codebooks]
        squares, counts = torch.zeros(2, sum(sizes), dtype=torch.float64)
        for place, entry in enumerate(self.layout.entries):
            centre = self._entry(place, self._numbers)
            squares.index_add_(0, centre, self.weight_sigma[entry.span].double().square())
            counts += torch.bincount(centre, minlength=len(counts))
        return (squares / counts.clamp_min(1)).sqrt().to(self.layout.dtype).split(sizes)

    def centres(self) -> Tensor:
        """The number of each weight's centre, counted through all codebooks."""
        return self.looked_up(self._numbers)

    @property
    def _numbers(self) -> tuple[Tensor, ...]:
        sizes = [book.numel() for book in self.codebooks]
        return torch.arange(sum(sizes)).split(sizes)

    def content_sha256(self) -> str:
        """SHA-256 of the network: every tensor, and sigma where there is one; ``docs/format.md`` defines it.

        It does not depend on the record, nor on how the numbers are coded: a network that is loaded and saved
        again keeps it.
        """
        digest = hashlib.sha256()

        def add(line: list[object], tensor: Tensor | None = None) -> None:
            text = json.dumps(line, sort_keys=True, separators=(",", ":"))
            digest.update(f"{text}\n".encode() + (b"" if tensor is None else bytes_of(tensor)))

        sigma = self.sigma
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
            if sigma is not None:
                add(["sigma", name], sigma[entry.span])
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
        codes = self.sigma_codes
        if codes is not None and (len(codes) != len(layout.entries) or not set(codes) <= set(range(256))):
            raise FileError(f"sigma has codes {codes}: one from 0 to 255 per tensor is needed")
        for sigma in (self.weight_sigma, *(self.centre_sigma or ())):
            if sigma is not None:
                if sigma.dtype != layout.dtype:
                    raise FileError(f"sigma is of type {sigma.dtype}, the codebooks of {layout.dtype}")
                check_sigma(sigma)

    def _entry(self, place: int, tables: Sequence[Tensor]) -> Tensor:
        """For every weight of one entry that of its codebook's table."""
        entry, division = self.layout.entries[place], self.divisions[place]
        cut = parts(entry, self.indices[entry.span], division.axis, len(division.codebooks))
        pairs = zip(division.codebooks, cut, strict=True)
        found = [tables[book][index.to(torch.int64)] for book, index in pairs]
        return torch.cat(found, division.axis).reshape(-1)

    def looked_up(self, tables: Sequence[Tensor]) -> Tensor:
        """For every weight the entry of its codebook's table."""
        return torch.cat([self._entry(place, tables) for place in range(len(self.layout.entries))])


def parts(entry: Entry, vector: Tensor, axis: int, count: int) -> tuple[Tensor, ...]:
    """An entry's slice of a vector, in the entry's shape and cut into equal parts: views."""
    return vector.view(entry.shape or (1,)).tensor_split(count, axis)


def sigma_of(codes: Sequence[int]) -> Tensor:
    """The sigmas of one-byte codes: 0 for code 0, else ``2^((code - 200) / 8)``, in float64.

    >>> sigma_of((0, 192, 200)).tolist()
    [0.0, 0.5, 1.0]
    """
    found = [2.0 ** ((code - _CODE_OF_ONE) / 8) if code else 0.0 for code in codes]
    return torch.tensor(found, dtype=torch.float64)


def codes_of(sigma: Tensor) -> tuple[int, ...]:
    """The nearest code of each sigma; the relative error is at most 4.5 %.

    >>> codes_of(torch.tensor([0.0, 0.5, 1.02]))
    (0, 192, 200)
    """
    steps = (sigma.double().log2() * 8).round() + _CODE_OF_ONE
    return tuple(int(code) for code in steps.clamp(0, 255))  # the logarithm of 0 is -inf


def name_of(dtype: torch.dtype) -> str:
    """As files call it: ``float32``."""
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
