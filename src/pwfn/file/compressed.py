"""The result as a value: codebooks, one index per weight, sigma, and what was left untouched."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from pwfn.bayes import kernels as ops
from pwfn.errors import LayoutError, WeightError
from pwfn.fixing.unique import unique
from pwfn.layout import Entry, Layout

Divide = Callable[[Entry], tuple[int, int]]
"""Says along which axis, and into how many equal parts with a codebook each, an entry is cut."""


ATTACHED = "pwfn_activations"
"""The submodule that holds what is attached to a model."""

ATTACH: dict[str, Callable[[nn.Module, Any], object]] = {}
"""By a key of the record: the function that attaches what that key describes. The lab registers its own."""


@dataclass(frozen=True)
class Division:
    """Which codebooks an entry uses: it is cut along ``axis`` into as many equal parts."""

    codebooks: tuple[int, ...] = (0,)
    axis: int = 0


@dataclass(frozen=True, eq=False)
class Compressed:
    """A network whose compressed weights are values of a few codebooks, all on the CPU.

    Probabilistic weight fixing has one codebook for the whole network; other methods have one for
    each layer or channel. The posterior's sigma is known per weight (``weight_sigma``), per value of
    a codebook (``centre_sigma``), or not at all. ``untouched`` holds every other parameter and
    buffer by its state-dict name; ``record`` holds the facts of the run that can be kept as JSON.

    >>> layout = Layout.of(nn.Linear(2, 1, bias=False))
    >>> small = Compressed.of(layout, torch.tensor([0.5, -0.25]), torch.zeros(2), {})
    >>> small.codebook.tolist(), small.indices.tolist()
    ([-0.25, 0.5], [1, 0])
    """

    layout: Layout
    codebooks: tuple[Tensor, ...]  # each ascending and without repetition
    divisions: tuple[Division, ...]  # one per entry of the layout
    indices: Tensor  # one per weight, into the codebook of its part
    untouched: dict[str, Tensor]
    weight_sigma: Tensor | None = None
    centre_sigma: tuple[Tensor, ...] | None = None
    record: Mapping[str, Any] = field(default_factory=dict)

    @classmethod
    def of(
        cls,
        layout: Layout,
        values: Tensor,
        sigma: Tensor | None,
        untouched: Mapping[str, Tensor],
        *,
        divide: Divide | None = None,
        record: Mapping[str, Any] | None = None,
    ) -> Compressed:
        """From one value per weight: the distinct values, ascending, are the codebook.

        With ``divide``, every part of every entry has a codebook of its own.
        """
        for name, vector in (("values", values), ("sigmas", sigma)):
            if vector is not None and vector.shape != (layout.size,):
                raise WeightError(
                    f"{vector.numel():,} {name} for a layout of {layout.size:,} weights: they must agree"
                )
        # + 0.0 turns -0.0 into 0.0, which would be a second zero in the codebook.
        values = values.detach().cpu() + 0.0
        books, divisions, indices = (
            _whole(layout, values) if divide is None else _divided(layout, values, divide)
        )
        largest = max(book.numel() for book in books)
        return cls(
            layout,
            books,
            divisions,
            indices.to(index_dtype(largest)),
            {name: tensor.detach().cpu().clone() for name, tensor in untouched.items()},
            weight_sigma=sigma.detach().cpu().clone() if sigma is not None else None,
            record=dict(record or {}),
        )

    @property
    def codebook(self) -> Tensor:
        """The one codebook of the whole network."""
        if len(self.codebooks) != 1:
            raise WeightError(
                f"this network has {len(self.codebooks)} codebooks: see codebooks and divisions"
            )
        return self.codebooks[0]

    @property
    def sigma(self) -> Tensor | None:
        """One sigma per weight, as far as it is known: exact, or its centre's."""
        if self.weight_sigma is not None:
            return self.weight_sigma
        return self._looked_up(self.centre_sigma) if self.centre_sigma is not None else None

    def values(self) -> Tensor:
        """One value per weight, as a vector."""
        return self._looked_up(self.codebooks)

    def dense_state_dict(self) -> dict[str, Tensor]:
        """A state dict of the whole model, every compressed weight at its centre."""
        return self._state_dict(self.values())

    def sample(self, generator: torch.Generator | None = None) -> dict[str, Tensor]:
        """A state dict with every compressed weight drawn from ``N(centre, sigma)``."""
        sigma = self.sigma
        if sigma is None:
            raise WeightError("this network has no posterior to draw from: save it with one")
        return self._state_dict(ops.sample(self.values(), sigma, generator))

    def apply_to(self, model: nn.Module, *, weights: str = "dense", tile: int | None = None) -> nn.Module:
        """Load the weights into a model of the same architecture, and return it.

        With ``weights="indices"`` layers are replaced by those of :mod:`pwfn.runtime`, which hold indices
        and palettes and no dense weight; ``tile`` is then how many output channels of a convolution are
        dense at a time, all unless said. Where the network was trained with quantised activations, the model
        gets their quantisers too (``import pwfn.lab`` first). What the model's state dict holds beside tensors
        (the extra state of a module) stays its own.
        """
        if weights not in ("dense", "indices") or (tile is not None and weights == "dense"):
            raise WeightError(
                f"weights={weights!r} with tile={tile}: give 'dense', or 'indices' with or without a tile"
            )
        self._check_fits(model)
        self._attach(model)
        if weights == "indices":
            # Here and not above: the runtime stands on this value, not this value on it.
            from pwfn.runtime import apply_indices

            return apply_indices(self, model, tile)
        model.load_state_dict({**model.state_dict(), **self.dense_state_dict()})
        return model

    def _attach(self, model: nn.Module) -> None:
        """Put what the record describes into the model, such as the quantisers of its activations."""
        for key, attach in ATTACH.items():
            if key in self.record and not hasattr(model, ATTACHED):
                attach(model, self.record[key])
        if "activations" in self.record and not hasattr(model, ATTACHED):
            raise WeightError(
                "the network was trained with quantised activations, which are part of the lab: "
                "import pwfn.lab before applying it to a model"
            )

    def _check_fits(self, model: nn.Module) -> None:
        """An error that names the tensors in which a model's state dict differs, before it is changed."""
        ours: dict[str, tuple[int, ...]] = {name: tuple(held.shape) for name, held in self.untouched.items()}
        for entry in self.layout.entries:
            ours |= dict.fromkeys((entry.name, *entry.aliases), entry.shape)
        state: Mapping[str, object] = model.state_dict()
        theirs = {name: tuple(value.shape) for name, value in state.items() if isinstance(value, Tensor)}
        names = ours.keys() | theirs.keys()
        differing = [
            f"{name} is {_shape(theirs, name)} in the model, {_shape(ours, name)} here"
            for name in sorted(names)
            # What this network has attached to it is not in a model as its author wrote it.
            if _shape(ours, name) != _shape(theirs, name) and not name.startswith(f"{ATTACHED}.")
        ]
        if differing:
            more = f"; and {len(differing) - 10} more" if len(differing) > 10 else ""
            raise LayoutError("the model does not match: " + "; ".join(differing[:10]) + more)

    def save(
        self, path: str | Path, *, posterior: str | None = None, record: Mapping[str, Any] | None = None
    ) -> int:
        """Write a .pwfn file and return its size in bytes; see :func:`pwfn.file.format.save`.

        ``record`` is added to the facts of the run that the file keeps.
        """
        # Here and not above: the file format stands on this value, not this value on it.
        from pwfn.file import format as fileformat

        whole = replace(self, record={**self.record, **(record or {})})
        return fileformat.save(whole, path, posterior=posterior)

    def centre_sigmas(self) -> tuple[Tensor, ...] | None:
        """One sigma for each value of each codebook: the root mean square over its weights."""
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

    def pieces(self, vector: Tensor) -> list[tuple[int, Tensor, Tensor]]:
        """For every part of every entry: its codebook, its indices, and its share of a vector."""
        found = []
        for entry, division in zip(self.layout.entries, self.divisions, strict=True):
            shape = entry.shape or (1,)
            parts = len(division.codebooks)
            cut = self.indices[entry.span].view(shape).tensor_split(parts, division.axis)
            share = vector[entry.span].view(shape).tensor_split(parts, division.axis)
            found += list(zip(division.codebooks, cut, share, strict=True))
        return found

    def _looked_up(self, tables: tuple[Tensor, ...]) -> Tensor:
        """For every weight the entry of its codebook's table."""
        if len(tables) == 1:
            return tables[0][self.indices.to(torch.int64)]
        out = torch.empty(self.layout.size, dtype=tables[0].dtype)
        for book, index, place in self.pieces(out):
            place.copy_(tables[book][index.to(torch.int64)])
        return out

    def _state_dict(self, vector: Tensor) -> dict[str, Tensor]:
        weights = {name: view.clone() for name, view in self.layout.views(vector).items()}
        return weights | {name: tensor.clone() for name, tensor in self.untouched.items()}


def _whole(layout: Layout, values: Tensor) -> tuple[tuple[Tensor, ...], tuple[Division, ...], Tensor]:
    codebook, indices = unique(values)
    return (codebook,), (Division(),) * len(layout.entries), indices


def _divided(
    layout: Layout, values: Tensor, divide: Divide
) -> tuple[tuple[Tensor, ...], tuple[Division, ...], Tensor]:
    books: list[Tensor] = []
    divisions: list[Division] = []
    indices = torch.empty(layout.size, dtype=torch.int64)
    for entry in layout.entries:
        shape = entry.shape or (1,)
        axis, parts = divide(entry)
        if not 0 <= axis < len(shape) or parts < 1 or shape[axis] % parts:
            raise WeightError(
                f"{entry.name} of shape {shape} cannot be cut along axis {axis} into {parts} parts"
            )
        place = indices[entry.span].view(shape).tensor_split(parts, axis)
        share = values[entry.span].view(shape).tensor_split(parts, axis)
        divisions.append(Division(tuple(range(len(books), len(books) + parts)), axis))
        for where, part in zip(place, share, strict=True):
            book, index = unique(part.reshape(-1))
            books.append(book)
            where.copy_(index.view(part.shape))
    return tuple(books), tuple(divisions), indices


def _shape(shapes: Mapping[str, tuple[int, ...]], name: str) -> str:
    return "×".join(str(n) for n in shapes[name]) or "scalar" if name in shapes else "absent"


def index_dtype(count: int) -> torch.dtype:
    """The narrowest type that holds indices into that many values."""
    if count <= 2**8:
        return torch.uint8
    return torch.int16 if count <= 2**15 else torch.int32
