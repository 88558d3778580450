"""Which layers a BatchNorm layer follows, and nothing else: seen in one pass of the network."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, fields, is_dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.conv import _ConvNd
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.weak import WeakTensorKeyDictionary

from pwfn.fixing.conditioning.operations import Normalisation, Place, Product, Weights, decomposed
from pwfn.fixing.conditioning.passes import Inputs
from pwfn.layout import Layout


@dataclass(frozen=True)
class Link:
    """A layer, and where its output can be seen: mostly at the one BatchNorm layer that it goes to."""

    product: Product  # without its inputs
    layer: str  # name of the BatchNorm layer or, where nothing is scaled, of its own module
    columns: int  # weights per filter


@torch.no_grad()
def find_links(
    network: nn.Module, weights: Weights, layout: Layout, batch: Inputs
) -> tuple[list[Link], list[Link], Any]:
    """The layers that may be scaled, other linear layers and convolutions, and the network's output."""
    with exact(), _Trace(weights) as trace:
        output = batch.through(network, "train_loader, the first batches")
    trace.note(output, None)  # what the network returns is used, too

    def own(place: Place | None) -> bool:
        """Whether a whole parameter is used once."""
        if place is None:
            return True
        entry = layout.entries[place.entry]
        return trace.entries[place.entry] == 1 and math.prod(place.shape) == entry.size and not entry.aliases

    links = []
    for product, uses in trace.uses:
        if own(product.weight) and own(product.bias) and len(uses) == 1:
            use = uses[0]
            if isinstance(use, Normalisation) and trace.layers[use.layer] == 1:
                links.append(Link(product, use.layer, product.positions().shape[-1]))
    products = {layout.entries[product.weight.entry].name: product for product, _ in trace.uses}
    for link in links:
        del products[layout.entries[link.product.weight.entry].name]
    others = [
        Link(products[f"{name}.weight"], name, products[f"{name}.weight"].positions().shape[-1])
        for name, module in network.named_modules()
        if isinstance(module, (nn.Linear, _ConvNd)) and f"{name}.weight" in products
    ]
    return links, others, output


class _Trace(TorchDispatchMode):
    """Within the block, notes what becomes of the outputs of compressed layers."""

    def __init__(self, weights: Weights) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch: its decorator has no types
        self._weights = weights
        self._outputs = WeakTensorKeyDictionary()  # those that still exist, with their place in uses
        self.uses: list[tuple[Product, list[Product | Normalisation | None]]] = []
        self.entries: Counter[int] = Counter()  # calls by weight or bias
        self.layers: Counter[str] = Counter()  # calls by BatchNorm layer

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Look at one operation, and carry it out."""
        if (output := decomposed(self, func, args, kwargs)) is not NotImplemented:
            return output
        found = self._weights.recognise(func._schema.name, args)
        self.note((args, kwargs), found)
        output = func(*args, **(kwargs or {}))
        if isinstance(found, Normalisation):
            self.layers[found.layer] += 1
        elif found is not None:
            self.entries.update(place.entry for place in (found.weight, found.bias) if place is not None)
            if found.convolution is not None:
                has_bias = args[2] is not None
            else:
                has_bias = func._schema.name == "aten::addmm"
            if has_bias == (found.bias is not None):  # another bias could not be scaled
                self._outputs[output] = len(self.uses)
                self.uses.append((replace(found, inputs=found.inputs.new_empty(0)), []))
        return output

    def note(self, values: object, use: Product | Normalisation | None) -> None:
        """Tensors among ``values`` are used."""
        for tensor in tensors_in(values):
            number = self._outputs.get(tensor)
            if number is not None:
                self.uses[number][1].append(use)


@contextmanager
def exact() -> Iterator[None]:
    """Without TF32, which convolutions on CUDA use: its rounding errors look like another function."""
    convolutions, products = torch.backends.cudnn, torch.backends.cuda.matmul
    kept = convolutions.allow_tf32, products.allow_tf32
    convolutions.allow_tf32 = products.allow_tf32 = False
    try:
        yield
    finally:
        convolutions.allow_tf32, products.allow_tf32 = kept


def tensors_in(values: object) -> Iterator[Tensor]:
    """Every tensor of nested tuples, lists, mappings and dataclasses."""
    if isinstance(values, Tensor):
        yield values
    elif isinstance(values, Mapping):
        yield from tensors_in(list(values.values()))
    elif isinstance(values, (tuple, list)):
        for value in values:
            yield from tensors_in(value)
    elif is_dataclass(values) and not isinstance(values, type):
        yield from tensors_in([getattr(values, field.name) for field in fields(values)])
