"""The operations of a forward pass that use compressed weights: matrix products and convolutions.

They are recognised by the memory of their arguments, below the modules: linear layers, convolutions of
every kind, packed attention projections and the ``Conv1D`` of transformers are all one of two operations,
whatever module calls them. Each is ``y = W x`` for rows W of weights and many inputs x.
"""

from __future__ import annotations

import bisect
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from pwfn.layout import Layout


class Place(NamedTuple):
    """Part of a compressed parameter: its entry in the layout, and where its numbers lie in memory."""

    entry: int
    offset: int  # of the first number from the parameter's own
    shape: tuple[int, ...]
    stride: tuple[int, ...]

    def positions(self, device: torch.device) -> Tensor:
        """For every number its position from the parameter's first."""
        found = torch.full(self.shape, self.offset, device=device)
        for axis, (length, stride) in enumerate(zip(self.shape, self.stride, strict=True)):
            along = torch.arange(length, device=device) * stride
            found += along.view(-1, *([1] * (len(self.shape) - axis - 1)))
        return found


@dataclass(frozen=True)
class Product:
    """One call ``y = W x + b``."""

    weight: Place
    bias: Place | None
    inputs: Tensor
    convolution: Convolution | None = None

    def positions(self) -> Tensor:
        """Where each weight of groups × rows × columns lies in its parameter."""
        found = self.weight.positions(self.inputs.device)
        if self.convolution is None:
            return found.T[None]  # the operation has columns × rows
        return self.convolution.matrix(found)

    def rows(self, limit: int, seed: int) -> Tensor:
        """Inputs as groups × examples × columns, about ``limit`` of them at random; 1 for the bias."""
        generator = torch.Generator().manual_seed(seed)
        if self.convolution is None:
            found = _some(self.inputs, limit, generator)[None]
        else:
            found = self.convolution.patches(self.inputs, limit, generator)
        if self.bias is not None:
            found = torch.cat([found, torch.ones_like(found[..., :1])], -1)
        return found


class Convolution(NamedTuple):
    """The arguments of a convolution in one, two or three dimensions, transposed or not."""

    kernel: tuple[int, ...]
    stride: tuple[int, ...]
    padding: tuple[int, ...]
    dilation: tuple[int, ...]
    transposed: bool
    output_padding: tuple[int, ...]
    groups: int

    def matrix(self, weight: Tensor) -> Tensor:
        """A weight of the operation's shape as groups × rows × columns."""
        k = math.prod(self.kernel)
        if not self.transposed:  # outputs × inputs of a group × kernel
            return weight.reshape(self.groups, weight.shape[0] // self.groups, -1)
        # inputs × outputs of a group × kernel; as a convolution its kernel is flipped
        parts = weight.reshape(self.groups, weight.shape[0] // self.groups, weight.shape[1], k).flip(-1)
        return parts.transpose(1, 2).flatten(2)

    def patches(self, inputs: Tensor, limit: int, generator: torch.Generator) -> Tensor:
        """The inputs of output positions, at random, as groups × examples × columns."""
        axes = range(len(self.kernel))
        reach = [self.dilation[a] * (self.kernel[a] - 1) for a in axes]
        if self.transposed:  # the same as a convolution of the inputs with zeros in between
            inputs = _spread(inputs, self.stride)
            sides = [
                (reach[a] - self.padding[a], reach[a] - self.padding[a] + self.output_padding[a])
                for a in axes
            ]
            stride: Sequence[int] = [1] * len(axes)
        else:
            sides, stride = [(self.padding[a],) * 2 for a in axes], self.stride
        added = [side for pair in reversed(sides) for side in pair]
        padded = F.pad(inputs, added) if any(added) else inputs
        sizes = [(padded.shape[2 + a] - reach[a] - 1) // stride[a] + 1 for a in axes]
        device = inputs.device
        chosen = _some(
            torch.arange(math.prod(sizes), device=device), -(-limit // max(len(inputs), 1)), generator
        )
        at = torch.unravel_index(chosen, sizes)
        within = torch.unravel_index(torch.arange(math.prod(self.kernel), device=device), self.kernel)
        index = torch.zeros(len(chosen), 1, dtype=torch.long, device=device)
        for a in axes:
            index = index * padded.shape[2 + a] + at[a][:, None] * stride[a] + within[a] * self.dilation[a]
        examples, channels, (positions, k) = len(inputs), inputs.shape[1], index.shape
        found = padded.flatten(2).index_select(2, index.flatten())
        found = found.reshape(examples, self.groups, channels // self.groups, positions, k)
        return found.permute(1, 0, 3, 2, 4).reshape(self.groups, examples * positions, -1)


@dataclass(frozen=True)
class Normalisation:
    """One call of a BatchNorm layer that uses its running statistics."""

    layer: str  # its name in the model
    inputs: Tensor


class Weights:
    """The compressed parameters and BatchNorm statistics of a model, found by memory address."""

    def __init__(self, model: nn.Module, layout: Layout) -> None:
        named = dict(model.named_parameters(remove_duplicate=False))
        self.parameters = [named[entry.name] for entry in layout.entries]
        starts = sorted((p.data_ptr(), number) for number, p in enumerate(self.parameters) if p.numel())
        self._starts, self._numbers = [s for s, _ in starts], [n for _, n in starts]
        self.normalisations = {
            module.running_mean.data_ptr(): name
            for name, module in model.named_modules()
            if isinstance(getattr(module, "running_mean", None), Tensor)
            and isinstance(getattr(module, "running_var", None), Tensor)
            and hasattr(module, "eps")
        }

    def memory(self, entry: int) -> Tensor:
        """A parameter's numbers in the order of memory; writing to it changes the parameter."""
        parameter = self.parameters[entry].detach()
        return parameter.as_strided((parameter.numel(),), (1,), parameter.storage_offset())

    def recognise(self, name: str, args: Sequence[Any]) -> Product | Normalisation | None:
        """What an operation of torch is to these weights; None for all others."""
        if name == "aten::convolution":
            inputs, weight, bias, stride, padding, dilation, transposed, output_padding, groups = args
            place = self._place(weight)
            if place is None:
                return None
            kernel = tuple(weight.shape[2:])
            numbers = (_each(stride, kernel), _each(padding, kernel), _each(dilation, kernel))
            form = Convolution(kernel, *numbers, transposed, _each(output_padding, kernel), groups)
            return Product(place, self._place(bias), inputs, form)
        if name == "aten::addmm":
            place = self._place(args[2])
            bias = self._place(args[0]) if args[0].dim() == 1 else None
            return None if place is None else Product(place, bias, args[1])
        if name == "aten::mm":
            place = self._place(args[1])
            return None if place is None else Product(place, None, args[0])
        if "batch_norm" in name and len(args) > 3 and isinstance(args[3], Tensor):
            layer = self.normalisations.get(args[3].data_ptr())
            return None if layer is None else Normalisation(layer, args[0])
        return None

    def _place(self, tensor: Tensor | None) -> Place | None:
        if tensor is None or not tensor.numel():
            return None
        at = bisect.bisect_right(self._starts, tensor.data_ptr()) - 1
        if at < 0:
            return None
        number = self._numbers[at]
        parameter = self.parameters[number]
        offset = (tensor.data_ptr() - self._starts[at]) // parameter.element_size()
        if offset >= parameter.numel() or tensor.dtype != parameter.dtype:
            return None
        return Place(number, offset, tuple(tensor.shape), tuple(tensor.stride()))


class Watch(TorchDispatchMode):
    """Within the block, ``before`` is called with every operation that uses compressed weights."""

    def __init__(self, weights: Weights, before: Any) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._weights, self._before = weights, before

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Look at one operation, then carry it out."""
        if (output := decomposed(self, func, args, kwargs)) is not NotImplemented:
            return output
        found = self._weights.recognise(func._schema.name, args)
        if found is not None:
            self._before(found)
        return func(*args, **(kwargs or {}))


def decomposed(mode: TorchDispatchMode, func: Any, args: Any, kwargs: Any) -> Any:
    """The output of an operation that is made of others, which ``mode`` sees instead of it.

    A model may use ``torch.inference_mode`` in its forward. There a mode gets whole linear layers and
    convolutions, which torch otherwise decomposes first. ``NotImplemented`` for all other operations.
    """
    if not torch.is_inference_mode_enabled():
        return NotImplemented
    with mode:
        return func.decompose(*args, **(kwargs or {}))


def _some(tensor: Tensor, limit: int, generator: torch.Generator) -> Tensor:
    """At most ``limit`` entries along the first axis, at random."""
    if len(tensor) <= limit:
        return tensor
    return tensor[torch.randperm(len(tensor), generator=generator)[:limit].to(tensor.device)]


def _spread(inputs: Tensor, stride: Sequence[int]) -> Tensor:
    """The inputs with ``stride - 1`` zeros between neighbours."""
    sizes = [(n - 1) * s + 1 for n, s in zip(inputs.shape[2:], stride, strict=True)]
    spread = inputs.new_zeros(*inputs.shape[:2], *sizes)
    spread[(slice(None), slice(None), *(slice(None, None, s) for s in stride))] = inputs
    return spread


def _each(numbers: Sequence[int], kernel: Sequence[int]) -> tuple[int, ...]:
    """One number per axis: torch accepts a single one for all."""
    return tuple(numbers) * len(kernel) if len(numbers) == 1 else tuple(numbers)
