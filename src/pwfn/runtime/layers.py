"""Layers whose weight is held as indices and palettes, and dense for a moment at most.

Everything they hold is a buffer: ``.to(device)``, ``.to(dtype)``, ``state_dict`` and ``deepcopy`` work as
ever, a type changes palettes and biases and leaves indices alone, and no optimiser finds a parameter.
Gradients go to a layer's input, never to its weight.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules.conv import _ConvNd, _ConvTransposeNd

from pwfn.errors import WeightError
from pwfn.runtime.library import FEW_INPUTS, MOST_INPUTS, expand, indexed_linear

_CONVOLUTIONS: dict[tuple[int, bool], Callable[..., Tensor]] = {
    (1, False): F.conv1d,
    (2, False): F.conv2d,
    (3, False): F.conv3d,
    (1, True): F.conv_transpose1d,
    (2, True): F.conv_transpose2d,
    (3, True): F.conv_transpose3d,
}


class IndexedWeight(nn.Module):
    """A tensor as indices into palettes: one palette, or one for each equal part of an axis.

    Tied layers hold the same one, and go on doing so through ``.to`` and ``deepcopy``.

    >>> weight = IndexedWeight(torch.tensor([[0, 1]], dtype=torch.uint8), torch.tensor([[0.5, 2.0]]))
    >>> weight.dense().tolist(), weight
    ([[0.5, 2.0]], IndexedWeight(1×2, uint8 indices, palette of 2 float32))
    """

    indices: Tensor
    palettes: Tensor

    def __init__(self, indices: Tensor, palettes: Tensor, axis: int = 0) -> None:
        super().__init__()
        if indices.numel() and not 0 <= int(indices.min()) <= int(indices.max()) < palettes.shape[1]:
            raise WeightError(
                f"indices from {int(indices.min())} to {int(indices.max())} do not fit a palette of "
                f"{palettes.shape[1]} values"
            )
        self.register_buffer("indices", indices)
        self.register_buffer("palettes", palettes)
        self.axis = axis if palettes.shape[0] > 1 else 0

    @property
    def shape(self) -> torch.Size:
        """Of the tensor it stands for."""
        return self.indices.shape

    @property
    def dense_bytes(self) -> int:
        """What the tensor would take if it were dense, in the palettes' type."""
        return self.indices.numel() * self.palettes.element_size()

    def dense(self, dtype: torch.dtype | None = None) -> Tensor:
        """The whole tensor, made anew; it lives as long as the caller holds it."""
        return expand(self.indices, self.palettes.to(dtype or self.palettes.dtype), self.axis)

    def slice(self, axis: int, start: int, count: int, dtype: torch.dtype) -> Tensor:
        """Some places along an axis of it, dense."""
        taken = self.indices.narrow(axis, start, count)
        length = self.shape[self.axis]
        first = start if axis == self.axis else 0
        return expand(taken, self.palettes.to(dtype), self.axis, first, length)

    def extra_repr(self) -> str:
        """Shape and types."""
        parts, size = self.palettes.shape
        types = (str(tensor.dtype).removeprefix("torch.") for tensor in (self.indices, self.palettes))
        number = "palette" if parts == 1 else f"{parts} palettes"
        return "{}, {} indices, {} of {} {}".format(
            "×".join(map(str, self.shape)), next(types), number, size, next(types)
        )


def _working_type(x: Tensor, palettes: Tensor) -> torch.dtype:
    """The type to multiply in: autocast's where that is on, as for torch's own layers."""
    device = x.device.type
    if torch.is_autocast_enabled(device) and palettes.dtype != torch.float64:
        return torch.get_autocast_dtype(device)
    return palettes.dtype


def _as(tensor: Tensor | None, dtype: torch.dtype) -> Tensor | None:
    return None if tensor is None else tensor.to(dtype)


class _Indexed(nn.Module):
    """What the layers share: the indexed weight, a bias, and the weight made dense for those who ask."""

    bias: Tensor | None

    def __init__(self, indexed: IndexedWeight, bias: Tensor | None = None) -> None:
        super().__init__()
        self.indexed = indexed
        self.register_buffer("bias", None if bias is None else bias.detach())

    @property
    def weight(self) -> Tensor:
        """The dense weight, made anew at each reading: for code that reads it and does not call the layer."""
        return self.indexed.dense()

    @property
    def transient_bytes(self) -> int:
        """The most that a call holds as dense weight."""
        return self.indexed.dense_bytes


class IndexedLinear(_Indexed):
    """``nn.Linear`` from indices, see :func:`pwfn.runtime.indexed_linear`.

    On CUDA up to 32 inputs (4 in float32) go through without a dense weight. More of them, other
    devices, float64, indices wider than a byte, and palettes for parts of the columns take one for as
    long as the product lasts.

    >>> weight = IndexedWeight(torch.tensor([[0, 1, 1]], dtype=torch.uint8), torch.tensor([[0.5, 2.0]]))
    >>> IndexedLinear(weight)(torch.tensor([[2.0, 3.0, 4.0]])).tolist()
    [[15.0]]
    """

    def __init__(self, indexed: IndexedWeight, bias: Tensor | None = None) -> None:
        super().__init__(indexed, bias)
        self.out_features, self.in_features = indexed.shape

    def forward(self, x: Tensor) -> Tensor:
        """``x W^T + b``."""
        palettes = self.indexed.palettes
        dtype = _working_type(x, palettes)
        x = x.to(dtype) if dtype != palettes.dtype else x
        bias = _as(self.bias, dtype)
        if self.indexed.axis == 0:
            return indexed_linear(x, self.indexed.indices, palettes.to(dtype), bias)
        return F.linear(x, self.indexed.dense(dtype), bias)

    @property
    def most_inputs(self) -> int:
        """How many inputs at once a kernel for CUDA takes without a dense weight."""
        palettes = self.indexed.palettes
        if self.indexed.axis or self.indexed.indices.dtype != torch.uint8 or palettes.dtype == torch.float64:
            return 0
        return FEW_INPUTS if palettes.dtype == torch.float32 else MOST_INPUTS

    def extra_repr(self) -> str:
        """As of ``nn.Linear``."""
        return (
            f"in_features={self.in_features}, out_features={self.out_features}, bias={self.bias is not None}"
        )


class IndexedEmbedding(_Indexed):
    """``nn.Embedding`` from indices: only the rows asked for are ever dense.

    >>> weight = IndexedWeight(torch.tensor([[0, 1], [1, 1]], dtype=torch.uint8), torch.tensor([[0.5, 2.0]]))
    >>> IndexedEmbedding(weight)(torch.tensor([1, 0])).tolist()
    [[2.0, 2.0], [0.5, 2.0]]
    """

    def __init__(self, indexed: IndexedWeight) -> None:
        super().__init__(indexed)
        self.num_embeddings, self.embedding_dim = indexed.shape

    def forward(self, x: Tensor) -> Tensor:
        """The rows of these numbers."""
        rows, palettes = self.indexed.indices[x], self.indexed.palettes
        parts, size = palettes.shape
        if parts == 1 or self.indexed.axis == 1:
            return expand(rows, palettes, rows.dim() - 1)
        part = torch.div(x * parts, self.num_embeddings, rounding_mode="floor")
        return palettes.reshape(-1)[part.unsqueeze(-1) * size + rows.to(torch.int32)]

    @property
    def transient_bytes(self) -> int:
        """None: its rows are its result."""
        return 0

    def extra_repr(self) -> str:
        """As of ``nn.Embedding``."""
        return f"{self.num_embeddings}, {self.embedding_dim}"


class IndexedConv(_Indexed):
    """A convolution (1 to 3 axes, grouped, transposed) whose weight is dense during its own call only.

    With ``tile`` it is so for that many output channels at a time (for whole groups, where there are
    groups), and the call takes that much less memory and more time.

    >>> layer, indices = nn.Conv1d(1, 2, 1, bias=False), torch.tensor([[[0]], [[1]]], dtype=torch.uint8)
    >>> IndexedConv(layer, IndexedWeight(indices, torch.tensor([[0.5, 2.0]])))(torch.ones(1, 1, 1)).tolist()
    [[[0.5], [2.0]]]
    """

    def __init__(self, layer: _ConvNd, indexed: IndexedWeight, tile: int | None = None) -> None:
        super().__init__(indexed, layer.bias)
        if tile is not None and tile < 1:
            raise WeightError(f"tile is {tile}: it is a number of output channels, at least 1")
        self.transposed = isinstance(layer, _ConvTransposeNd)
        self.in_channels, self.out_channels = layer.in_channels, layer.out_channels
        self.kernel_size, self.stride, self.dilation = layer.kernel_size, layer.stride, layer.dilation
        self.padding: Any = layer.padding  # numbers, or "same" or "valid"
        self.output_padding = layer.output_padding
        self.groups, self.padding_mode = layer.groups, layer.padding_mode
        self._border: list[int] = list(layer._reversed_padding_repeated_twice)
        self.tile = tile

    def forward(self, x: Tensor, output_size: Sequence[int] | None = None) -> Tensor:
        """As of the convolution that it replaces."""
        dtype = _working_type(x, self.indexed.palettes)
        x = x.to(dtype) if dtype != self.indexed.palettes.dtype else x
        padding = self.padding
        if self.padding_mode != "zeros":
            x = F.pad(x, self._border, mode=self.padding_mode)
            padding = 0
        more: tuple[Any, ...] = ()
        if self.transposed:
            more = (self._output_padding(x, output_size),)
        convolve = _CONVOLUTIONS[len(self.kernel_size), self.transposed]

        def over(x: Tensor, weight: Tensor, bias: Tensor | None, groups: int) -> Tensor:
            settings = (self.stride, padding, *more)
            last = (groups, self.dilation) if self.transposed else (self.dilation, groups)
            return convolve(x, weight, bias, *settings, *last)

        bias = _as(self.bias, dtype)
        steps = self._steps()
        if len(steps) == 1:
            return over(x, self.indexed.dense(dtype), bias, self.groups)
        if self.groups == 1:
            axis = 1 if self.transposed else 0
            made = [
                over(
                    x,
                    self.indexed.slice(axis, at, n, dtype),
                    bias[at : at + n] if bias is not None else None,
                    1,
                )
                for at, n in steps
            ]
        else:
            made = [self._some_groups(over, x, bias, at, n, dtype) for at, n in steps]
        return torch.cat(made, -1 - len(self.kernel_size))

    def _some_groups(
        self,
        over: Callable[..., Tensor],
        x: Tensor,
        bias: Tensor | None,
        first: int,
        count: int,
        dtype: torch.dtype,
    ) -> Tensor:
        """The output channels of some groups, from their own input channels."""
        inputs, outputs = self.in_channels // self.groups, self.out_channels // self.groups
        rows = inputs if self.transposed else outputs  # of the weight, for each group
        weight = self.indexed.slice(0, first * rows, count * rows, dtype)
        taken = x.narrow(-1 - len(self.kernel_size), first * inputs, count * inputs)
        share = None if bias is None else bias.narrow(0, first * outputs, count * outputs)
        return over(taken, weight, share, count)

    def _steps(self) -> list[tuple[int, int]]:
        """Start and count of each tile, in output channels, or in groups where there are any."""
        whole, step = self.out_channels, self.tile or self.out_channels
        if self.groups > 1:
            step = max(1, step * self.groups // self.out_channels)
            whole = self.groups
        return [(at, min(step, whole - at)) for at in range(0, whole, step)]

    def _output_padding(self, x: Tensor, output_size: Sequence[int] | None) -> Any:
        if output_size is None:
            return self.output_padding
        axes = len(self.kernel_size)
        wanted, given = list(output_size)[-axes:], x.shape[-axes:]
        least = [
            (n - 1) * s - 2 * p + d * (k - 1) + 1
            for n, s, p, d, k in zip(
                given, self.stride, self.padding, self.dilation, self.kernel_size, strict=True
            )
        ]
        more = [want - have for want, have in zip(wanted, least, strict=True)]
        if any(not 0 <= extra < step for extra, step in zip(more, self.stride, strict=True)):
            raise WeightError(
                f"an output of {wanted} is not within reach of an input of {list(given)}: from {least} on, "
                f"by less than the stride {list(self.stride)} more"
            )
        return more

    @property
    def transient_bytes(self) -> int:
        """The most that a call holds as dense weight."""
        steps = self._steps()
        return self.indexed.dense_bytes * steps[0][1] // sum(count for _, count in steps)

    def extra_repr(self) -> str:
        """Sizes, and how much of the weight is dense at a time."""
        kind = "transposed, " if self.transposed else ""
        dense = "whole" if self.tile is None else f"{self.tile} output channels at a time"
        return (
            f"{kind}{self.in_channels}, {self.out_channels}, kernel_size={self.kernel_size}, "
            f"stride={self.stride}, groups={self.groups}, "
            f"bias={self.bias is not None}, dense during its call: {dense}"
        )


def read_as_dense(module: nn.Module, leaf: str, indexed: IndexedWeight) -> None:
    """Put an indexed weight in a parameter's place: reading ``module.leaf`` makes the dense tensor anew.

    For modules that this package has no layer for: they run their own code, on a weight that is dense
    for as long as that code holds it.

    >>> layer = nn.Bilinear(1, 1, 2, bias=False)
    >>> indices = torch.tensor([[[0]], [[1]]], dtype=torch.uint8)
    >>> read_as_dense(layer, "weight", IndexedWeight(indices, torch.tensor([[0.5, 2.0]])))
    >>> layer(torch.ones(1, 1), torch.ones(1, 1)).tolist(), list(layer.state_dict())
    ([[0.5, 2.0]], ['indexed_weight.indices', 'indexed_weight.palettes'])
    """
    held = f"indexed_{leaf}"
    del module._parameters[leaf]
    module.add_module(held, indexed)
    own = type(module)
    made = property(lambda self: getattr(self, held).dense())
    # A class for this one module, as torch's own parametrisations make: a property must be a class's.
    module.__class__ = type(own.__name__, (own,), {leaf: made, "__module__": own.__module__})
