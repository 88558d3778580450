"""What a model takes in memory: at rest as indices, and as dense weight while it runs."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from importlib.util import find_spec

from torch import Tensor, nn

from pwfn.runtime.applying import KEPT_DENSE
from pwfn.runtime.layers import IndexedConv, IndexedEmbedding, IndexedLinear, IndexedWeight


@dataclass(frozen=True)
class Held:
    """One tensor: its name, its bytes, and why or when it is dense."""

    name: str
    bytes: int
    reason: str


@dataclass(frozen=True)
class MemoryReport:
    """Bytes of a model; tensors that several names share count once.

    ``transient`` lists the weights that are dense during their layer's call: one at a time, the largest
    being ``largest_transient_bytes``. ``kept_dense`` lists every tensor that is always dense.
    """

    index_bytes: int
    palette_bytes: int
    kept_dense: tuple[Held, ...]
    transient: tuple[Held, ...]
    dense_bytes: int  # of the same model with dense weights

    @property
    def kept_dense_bytes(self) -> int:
        """Of all tensors that are always dense."""
        return sum(held.bytes for held in self.kept_dense)

    @property
    def resident_bytes(self) -> int:
        """Of the model at rest."""
        return self.index_bytes + self.palette_bytes + self.kept_dense_bytes

    @property
    def largest_transient_bytes(self) -> int:
        """The most dense weight that exists while the model runs, one layer after the other."""
        return max((held.bytes for held in self.transient), default=0)

    def __str__(self) -> str:
        """A few lines, then each tensor that is dense and why."""
        lines = [
            f"{self.resident_bytes:,} bytes at rest, {self.dense_bytes:,} with dense weights",
            f"  {self.index_bytes:,} as indices, {self.palette_bytes:,} as palettes, "
            f"{self.kept_dense_bytes:,} in tensors kept dense",
            f"  at most {self.largest_transient_bytes:,} more of dense weight during a layer's call",
        ]
        for title, items in (("dense during a call", self.transient), ("kept dense", self.kept_dense)):
            lines += [f"{title}: {held.name}, {held.bytes:,} bytes: {held.reason}" for held in items]
        return "\n".join(lines)


def memory_report(model: nn.Module, *, inputs: int | None = None) -> MemoryReport:
    """What a model from ``apply_to(model, weights="indices")`` takes, and what of it is dense.

    ``inputs`` is how many rows a linear layer is given at once (batch times sequence). If it is at most
    32 (4 in float32) and the model lies on CUDA with Triton installed, linear layers need no dense
    weight; if it is not said, they are counted with one.

    >>> from pwfn.runtime import IndexedLinear, IndexedWeight
    >>> import torch
    >>> weight = IndexedWeight(torch.zeros(3, 4, dtype=torch.uint8), torch.tensor([[0.5]]))
    >>> found = memory_report(nn.Sequential(IndexedLinear(weight, torch.zeros(3))))
    >>> found.index_bytes, found.palette_bytes, found.kept_dense_bytes, found.dense_bytes
    (12, 4, 12, 60)
    >>> found.largest_transient_bytes
    48
    """
    reasons: Mapping[str, str] = getattr(model, KEPT_DENSE, {})
    seen: set[int] = set()
    inside: set[int] = set()  # tensors of indexed weights
    indices = palettes = dense = 0
    for module in model.modules():
        if isinstance(module, IndexedWeight):
            inside |= {id(module.indices), id(module.palettes)}
            indices += module.indices.nbytes
            palettes += module.palettes.nbytes
            dense += module.dense_bytes
    kept = []
    for name, tensor in _tensors(model):
        if id(tensor) not in inside | seen:
            seen.add(id(tensor))
            kept.append(Held(name, tensor.nbytes, reasons.get(name, "not among the compressed weights")))
    dense += sum(held.bytes for held in kept)
    return MemoryReport(indices, palettes, tuple(kept), tuple(_transient(model, inputs)), dense)


def _tensors(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    yield from model.named_parameters()
    yield from model.named_buffers()


def _transient(model: nn.Module, inputs: int | None) -> Iterator[Held]:
    layers = (IndexedLinear, IndexedConv, IndexedEmbedding)
    for name, module in model.named_modules():
        if isinstance(module, IndexedLinear):
            on_cuda = module.indexed.indices.is_cuda and find_spec("triton") is not None
            if not (on_cuda and inputs is not None and inputs <= module.most_inputs):
                reason = f"linear layer, unless on CUDA with at most {module.most_inputs} inputs"
                yield Held(name, module.transient_bytes, reason)
        elif isinstance(module, IndexedConv):
            yield Held(name, module.transient_bytes, "convolution")
        elif not isinstance(module, layers):
            for leaf, child in module.named_children():
                if isinstance(child, IndexedWeight):
                    full = f"{name}.{leaf}" if name else leaf
                    own = type(module).__name__
                    yield Held(full, child.dense_bytes, f"{own} runs its own code: made at each reading")
