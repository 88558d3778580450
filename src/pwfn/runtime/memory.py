"""Memory of a model that computes from indices: at rest, and dense weights while it runs."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from importlib.util import find_spec
from typing import NamedTuple

from torch import nn

from pwfn.runtime.apply import KEPT_DENSE
from pwfn.runtime.layers import IndexedEmbedding, IndexedLinear, IndexedWeight
from pwfn.runtime.library import MOST_PLACES


class Held(NamedTuple):
    """One tensor: its name, its bytes, and why or when it is dense."""

    name: str
    bytes: int
    reason: str


@dataclass(frozen=True)
class MemoryReport:
    """Bytes of a model; tensors with several names count once.

    ``kept_dense`` lists every tensor that is always dense. ``transient`` lists the weights that are dense
    during the call of their layer, one at a time.
    """

    index_bytes: int
    palette_bytes: int
    kept_dense: tuple[Held, ...]
    transient: tuple[Held, ...]
    dense_bytes: int  # of the same model with dense weights

    @property
    def kept_dense_bytes(self) -> int:
        """Bytes of all tensors that are always dense."""
        return sum(held.bytes for held in self.kept_dense)

    @property
    def resident_bytes(self) -> int:
        """Bytes of the model at rest."""
        return self.index_bytes + self.palette_bytes + self.kept_dense_bytes

    @property
    def largest_transient_bytes(self) -> int:
        """Bytes of the largest dense weight that exists while the model runs layer by layer."""
        return max((held.bytes for held in self.transient), default=0)

    def __str__(self) -> str:
        """A summary, then one line for each dense tensor."""
        lines = [
            f"{self.resident_bytes:,} bytes at rest; {self.dense_bytes:,} with dense weights",
            f"  {self.index_bytes:,} indices, {self.palette_bytes:,} palettes, "
            f"{self.kept_dense_bytes:,} tensors that stay dense",
            f"  up to {self.largest_transient_bytes:,} more during the call of a layer",
        ]
        for title, items in (("dense during a call", self.transient), ("always dense", self.kept_dense)):
            lines += [f"{title}: {held.name}, {held.bytes:,} bytes: {held.reason}" for held in items]
        return "\n".join(lines)


def memory_report(model: nn.Module, *, inputs: int | None = None) -> MemoryReport:
    """Memory of a model from ``apply_to(model, weights="indices")``.

    ``inputs`` is how many rows a linear layer is given at once (batch times sequence). If that is at most 32
    (4 in float32) and the model is on CUDA with Triton installed, linear layers need no dense weight. By
    default they are counted with one.

    >>> from pwfn.runtime import IndexedLinear, IndexedWeight
    >>> import torch
    >>> weight = IndexedWeight(torch.zeros(3, 4, dtype=torch.uint8), torch.tensor([[0.5]]))
    >>> found = memory_report(nn.Sequential(IndexedLinear(weight, torch.zeros(3))))
    >>> found.index_bytes, found.palette_bytes, found.kept_dense_bytes, found.dense_bytes
    (6, 4, 12, 60)
    >>> found.largest_transient_bytes
    48
    """
    reasons: Mapping[str, str] = getattr(model, KEPT_DENSE, {})
    weights = [module for module in model.modules() if isinstance(module, IndexedWeight)]
    inside = {id(tensor) for weight in weights for tensor in (weight.indices, weight.palettes)}
    kept = tuple(
        Held(name, tensor.nbytes, reasons.get(name, "not compressed"))
        for name, tensor in (*model.named_parameters(), *model.named_buffers())  # each tensor once
        if id(tensor) not in inside
    )
    return MemoryReport(
        index_bytes=sum(weight.indices.nbytes for weight in weights),
        palette_bytes=sum(weight.palettes.nbytes for weight in weights),
        kept_dense=kept,
        transient=tuple(_transient(model, inputs)),
        dense_bytes=sum(weight.dense_bytes for weight in weights) + sum(held.bytes for held in kept),
    )


def _transient(model: nn.Module, inputs: int | None) -> Iterator[Held]:
    for name, module in model.named_modules():
        if isinstance(module, IndexedLinear):
            on_cuda = module.indexed.indices.is_cuda and find_spec("triton") is not None
            if not (on_cuda and inputs is not None and inputs <= module.most_inputs):
                reason = f"linear layer, unless on CUDA with at most {module.most_inputs} inputs"
                yield Held(name, module.indexed.dense_bytes, reason)
        elif not isinstance(module, IndexedEmbedding):  # whose dense rows are its result
            for leaf, child in module.named_children():
                if isinstance(child, IndexedWeight):
                    full = f"{name}.{leaf}" if name else leaf
                    reason = f"{type(module).__name__} computes with a dense weight"
                    if isinstance(module, nn.Conv2d):
                        reason += f", unless on CUDA, channels-last, with at most {MOST_PLACES} places"
                    yield Held(full, child.dense_bytes, reason)
