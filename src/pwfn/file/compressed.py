"""A compressed network as a value: made from weights, saved to a file, put into a model."""

from __future__ import annotations

import functools
import logging
import os
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from pwfn.errors import FileError, LayoutError, WeightError
from pwfn.file import writer
from pwfn.file.content import Content, Division, parts, within
from pwfn.file.storage import replacing
from pwfn.fixing.unique import unique
from pwfn.layout import Entry, Layout
from pwfn.layout.coverage import check_model
from pwfn.runtime import Coded, apply_indices, index_dtype
from pwfn.runtime.apply import load_dense

LOGGER = logging.getLogger("pwfn")
Divide = Callable[[Entry], tuple[int, int]]
"""The axis along which an entry is cut, and the number of equal parts, each with its own codebook."""

ATTACHED = "pwfn_activations"
"""Name of the submodule that holds what was attached to a model."""

ATTACH: dict[str, Callable[[nn.Module, Any], object]] = {}
"""For a key of the record, the function that attaches what it describes to a model; the lab adds its own."""


class Compressed(Content):
    """A network whose compressed weights are values of a few codebooks, all on the CPU.

    Probabilistic weight fixing has one codebook for the whole network; other methods have one per layer or
    channel. Draws use the predictive sigma of each tensor (``tensor_sigma``), see :func:`pwfn.fit_posterior`.
    Without it they use the sigma of training, per weight (``weight_sigma``) or per value of a codebook
    (``centre_sigma``). ``untouched`` holds every other parameter and buffer by its state-dict name,
    ``record`` the facts of the run.

    >>> layout = Layout.of(nn.Linear(2, 1, bias=False))
    >>> small = Compressed.of(layout, torch.tensor([0.5, -0.25]), torch.zeros(2), {})
    >>> small.codebook.tolist(), small.indices.tolist()
    ([-0.25, 0.5], [1, 0])
    >>> small
    Compressed(2 weights, 2 values, 1 tensor)
    """

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
        """From one value per weight: the unique values, ascending, are the codebook.

        With ``divide``, every part of every entry has its own codebook.
        """
        for name, vector in (("values", values), ("sigmas", sigma)):
            if vector is not None and vector.shape != (layout.size,):
                raise WeightError(
                    f"{vector.numel():,} {name} for a layout of {layout.size:,} weights: they must agree"
                )
        # + 0.0 turns -0.0 into 0.0, which would be a second zero in the codebook.
        values = values.detach().cpu() + 0.0
        if divide is None:
            book, indices = unique(values)
            books, divisions = [book], [Division()] * len(layout.entries)
        else:
            books, divisions, indices = _divided(layout, values, divide)
        return cls(
            layout,
            tuple(books),
            tuple(divisions),
            indices.to(index_dtype(max(book.numel() for book in books))),
            {name: tensor.detach().cpu().clone() for name, tensor in untouched.items()},
            weight_sigma=sigma.detach().cpu().clone() if sigma is not None else None,
            record=dict(record or {}),
        )

    def __repr__(self) -> str:
        count, tensors = sum(book.numel() for book in self.codebooks), len(self.layout.entries)
        books = f" in {len(self.codebooks):,} codebooks" if len(self.codebooks) > 1 else ""
        plural = "s" if tensors != 1 else ""
        return f"Compressed({self.layout.size:,} weights, {count:,} values{books}, {tensors} tensor{plural})"

    @property
    def codebook(self) -> Tensor:
        """The one codebook of the whole network."""
        if len(self.codebooks) != 1:
            raise WeightError(
                f"this network has {len(self.codebooks)} codebooks: see codebooks and divisions"
            )
        return self.codebooks[0]

    def dumps(self, *, posterior: str | None = None, version: int = writer.VERSION) -> bytes:
        """The bytes of a .pwfn file, for :func:`pwfn.loads`.

        ``posterior`` is ``"tensor"`` (the predictive sigma), ``"centre"`` (the sigma of training, one per
        codebook value), ``"weight"`` (the same, exact for every weight) or ``"none"``. The default is the
        first of ``"tensor"`` and ``"centre"`` that the network has. ``version`` is
        that of the format: files of version 1 are larger, and faster to read and write.

        >>> layout = Layout.of(nn.Linear(2, 1, bias=False))
        >>> Compressed.of(layout, torch.tensor([0.5, -0.25]), None, {}).dumps()[1:5]
        b'PWFN'
        """
        return writer.dumps(self, posterior, version)

    def save(
        self,
        target: writer.PathOrFile,
        *,
        posterior: str | None = None,
        record: Mapping[str, Any] | None = None,
        version: int = writer.VERSION,
    ) -> int:
        """Write a .pwfn file to a path or a binary file object, and return its size in bytes.

        For ``posterior`` and ``version`` see :meth:`dumps`. ``record`` is added to the facts of the run. A
        path is written completely or not at all: an error leaves the old file.
        """
        whole = replace(self, record={**self.record, **(record or {})})
        if not isinstance(target, (str, os.PathLike)):
            if not hasattr(target, "write") or hasattr(target, "encoding"):  # as text streams have
                raise FileError(f"a {type(target).__name__} is no path and no binary file object")
            data = whole.dumps(posterior=posterior, version=version)
            target.write(data)
            return len(data)
        with within(os.fspath(target)):
            data = whole.dumps(posterior=posterior, version=version)
        with replacing(Path(target)) as temporary:
            temporary.write_bytes(data)
        return len(data)

    def dense_state_dict(self) -> dict[str, Tensor]:
        """A state dict of the whole model, with every compressed weight at its centre."""
        return self._state_dict(self.values())

    def sample(self, generator: torch.Generator | None = None) -> dict[str, Tensor]:
        """A state dict with each compressed weight drawn: ``centre + sigma * eps`` with ``eps ~ N(0, 1)``.

        Where no posterior is worth drawing from, every sigma is 0, and every draw the point estimate. Sigmas
        of training are as large as rounding tolerates, not fitted to predict: the logger ``pwfn`` says so,
        once.
        """
        values, per_tensor = self.values(), self.tensor_sigma
        if self.posterior == "none":
            raise WeightError(
                "there is no posterior to draw from: fit one (pwfn.fit_posterior, pwfn posterior)"
            )
        noise = torch.randn(values.shape, dtype=values.dtype, generator=generator)
        if per_tensor is None:
            _say_that_sigmas_are_of_training()
            return self._state_dict(values.addcmul_(self.sigma, noise))  # type: ignore[arg-type]  # not None
        for entry, sigma in zip(self.layout.entries, per_tensor.tolist(), strict=True):
            values[entry.span].add_(noise[entry.span], alpha=sigma)
        return self._state_dict(values)

    def apply_to(self, model: nn.Module, *, weights: str = "dense") -> nn.Module:
        """Load the weights into a model of the same architecture, and return it.

        With ``weights="indices"`` the model keeps indices and palettes instead of dense weights, see
        :mod:`pwfn.runtime`. If the network was trained with quantised activations, the model gets their
        quantisers too (``import pwfn.lab`` first). The extra state of modules stays as it is. A model on the
        meta device gets the weights on the CPU.
        """
        if weights not in ("dense", "indices"):
            raise WeightError(f"weights is {weights!r}: allowed is 'dense' or 'indices'")
        # TorchScript takes dense weights, though it cannot be compressed.
        if weights == "indices" or not isinstance(model, torch.jit.ScriptModule):
            check_model(model)
        with torch.device("cpu"):  # whatever the caller's default device
            self._check_fits(model)
            self._attach(model)
            if weights == "dense":
                load_dense(model, self.dense_state_dict())
                return model
            coded = [
                Coded(
                    entry,
                    self.indices[entry.span].view(entry.shape),
                    [self.codebooks[book] for book in division.codebooks],
                    division.axis,
                )
                for entry, division in zip(self.layout.entries, self.divisions, strict=True)
            ]
            return apply_indices(model, coded, self.untouched)

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
        """Raise an error that names the tensors in which the model differs, before it is changed."""
        ours = {name: tuple(tensor.shape) for name, tensor in self.untouched.items()}
        for entry in self.layout.entries:
            ours |= dict.fromkeys((entry.name, *entry.aliases), entry.shape)
        state: Mapping[str, object] = model.state_dict()
        for name, value in state.items():
            if isinstance(value, Tensor) and is_lazy(value):
                raise LayoutError(f"{name} has no shape yet: run one batch through the model first")
        theirs = {name: tuple(value.shape) for name, value in state.items() if isinstance(value, Tensor)}
        differing = [
            f"{name} is {_shape(theirs, name)} in the model, {_shape(ours, name)} here"
            for name in sorted(ours.keys() | theirs.keys())
            # What was attached is not part of the model as its author wrote it.
            if ours.get(name) != theirs.get(name) and not name.startswith(f"{ATTACHED}.")
        ]
        if differing:
            more = f"; and {len(differing) - 10} more" if len(differing) > 10 else ""
            raise LayoutError("the model does not match: " + "; ".join(differing[:10]) + more)

    def _state_dict(self, vector: Tensor) -> dict[str, Tensor]:
        weights = {name: view.clone() for name, view in self.layout.views(vector).items()}
        return weights | {name: tensor.clone() for name, tensor in self.untouched.items()}


def _divided(layout: Layout, values: Tensor, divide: Divide) -> tuple[list[Tensor], list[Division], Tensor]:
    books: list[Tensor] = []
    divisions: list[Division] = []
    indices = torch.empty(layout.size, dtype=torch.int64)
    for entry in layout.entries:
        shape = entry.shape or (1,)
        axis, count = divide(entry)
        if not 0 <= axis < len(shape) or count < 1 or shape[axis] % count:
            raise WeightError(
                f"{entry.name} of shape {shape} cannot be cut along axis {axis} into {count} parts"
            )
        divisions.append(Division(tuple(range(len(books), len(books) + count)), axis))
        cut = (parts(entry, vector[entry.span], axis, count) for vector in (indices, values))
        for place, part in zip(*cut, strict=True):
            book, index = unique(part.reshape(-1))
            books.append(book)
            place.copy_(index.view(part.shape))
    return books, divisions, indices


def _shape(shapes: Mapping[str, tuple[int, ...]], name: str) -> str:
    return "×".join(str(n) for n in shapes[name]) or "scalar" if name in shapes else "absent"


@functools.cache
def _say_that_sigmas_are_of_training() -> None:
    LOGGER.warning(
        "these sigmas are those of training, and networks drawn with them may be worth nothing: "
        "pwfn.fit_posterior or pwfn posterior fits sigmas to predict with"
    )
