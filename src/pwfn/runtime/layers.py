"""Layers whose weight is stored as indices and palettes.

A layer remains what it is, with its hooks. Indices, palettes and the biases of linear layers are buffers:
``.to(device)``, ``.to(dtype)``, ``state_dict`` and ``deepcopy`` work as usual, a change of type converts
palettes but not indices, and no optimiser finds them. The input gets a gradient, the weight does not.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from pwfn.errors import WeightError
from pwfn.runtime.library import MOST_PACKED, expand, indexed_conv2d, indexed_linear
from pwfn.runtime.reference import pack, unpack


class IndexedWeight(nn.Module):
    """A tensor as indices into palettes: one palette, or one for each equal part of an axis.

    It takes one index per element and stores two in each byte, see :func:`pwfn.runtime.pack`, if the palettes
    have at most 16 values. Tied layers share one instance, also after ``.to`` and ``deepcopy``.

    >>> weight = IndexedWeight(torch.tensor([[0, 1]], dtype=torch.uint8), torch.tensor([[0.5, 2.0]]))
    >>> weight.dense().tolist(), weight.indices.tolist()
    ([[0.5, 2.0]], [[16]])
    >>> weight
    IndexedWeight(1×2, two indices per byte, palette of 2 float32)
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
        self.shape = indices.shape
        self.axis = axis if palettes.shape[0] > 1 else 0
        if indices.dtype == torch.uint8 and indices.dim() > 1 and palettes.shape[1] <= MOST_PACKED:
            indices = pack(indices)
        self.register_buffer("indices", indices)
        self.register_buffer("palettes", palettes)

    @property
    def packed_columns(self) -> int | None:
        """The length of axis 1 if two indices share a byte, else None."""
        return None if self.indices.shape == self.shape else self.shape[1]

    def one_per_element(self) -> Tensor:
        """The indices in the shape of the weight."""
        columns = self.packed_columns
        return self.indices if columns is None else unpack(self.indices, columns)

    def dense(self, dtype: torch.dtype | None = None) -> Tensor:
        """A new dense tensor."""
        palettes = self.palettes.to(dtype or self.palettes.dtype)
        return expand(self.indices, palettes, self.axis, self.packed_columns)

    def extra_repr(self) -> str:
        """Shape and types."""
        parts, size = self.palettes.shape
        index, value = (str(tensor.dtype).removeprefix("torch.") for tensor in (self.indices, self.palettes))
        stored = f"{index} indices" if self.packed_columns is None else "two indices per byte"
        shape, number = "×".join(map(str, self.shape)), "palette" if parts == 1 else f"{parts} palettes"
        return f"{shape}, {stored}, {number} of {size} {value}"


def _check_width(x: Tensor, axis: int, width: int, what: str) -> None:
    """Packed indices of n and n + 1 columns look alike to the operators, so the layers compare."""
    if x.dim() < -axis or x.shape[axis] != width:
        raise WeightError(
            f"the input has shape {tuple(x.shape)}: {width} {what} are needed along axis {axis}"
        )


def _of_one_type(x: Tensor, palettes: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor, Tensor | None]:
    """All in the type of the palettes, or of autocast where that is enabled."""
    dtype, device = palettes.dtype, x.device.type
    if torch.is_autocast_enabled(device) and dtype != torch.float64:
        dtype = torch.get_autocast_dtype(device)
        x = x.to(dtype)
    return x, palettes.to(dtype), None if bias is None else bias.to(dtype)


def read_from_indices(module: nn.Module, leaf: str, indexed: IndexedWeight) -> None:
    """Replace the parameter ``module.leaf`` by a property that makes the dense tensor at each access.

    ``nn.Linear``, ``nn.Conv2d``, ``nn.Embedding`` and ``Conv1D`` of transformers compute from indices. All
    others run their own code, and the weight is dense for as long as that code keeps it.

    >>> layer = nn.Linear(3, 1, bias=False)
    >>> indices = torch.tensor([[0, 1, 1]], dtype=torch.uint8)
    >>> read_from_indices(layer, "weight", IndexedWeight(indices, torch.tensor([[0.5, 2.0]])))
    >>> layer(torch.tensor([[2.0, 3.0, 4.0]])).tolist(), list(layer.state_dict())
    ([[15.0]], ['indexed_weight.indices', 'indexed_weight.palettes'])
    """
    if leaf == "weight" and _is_transposed(type(module)):
        turned = indexed.one_per_element().t().contiguous()
        indexed = IndexedWeight(turned, indexed.palettes, 1 - indexed.axis)
    del module._parameters[leaf]
    module.add_module(f"indexed_{leaf}", indexed)
    _add_property(module, leaf)
    if type(module).forward is _multiply and (bias := module._parameters.get("bias")) is not None:
        del module._parameters["bias"]
        module.register_buffer("bias", bias.detach())


def _add_property(module: nn.Module, leaf: str) -> None:
    # A property belongs to a class, so this module gets a class of its own, as torch's parametrisations do.
    # It may have one already, for another parameter; pickle can name only the class that is behind it.
    made: type[nn.Module] = type(module)
    own, leaves = getattr(made, "_pwfn_dense", (made, ()))
    content = {name: property(_reader(name, _is_transposed(own))) for name in (*leaves, leaf)}
    reduce = lambda self: (_restored, (own, tuple(content)), self.__dict__)  # noqa: E731
    facts = {"__module__": own.__module__, "__reduce__": reduce, "_pwfn_dense": (own, tuple(content))}
    if "weight" in content and (own.forward in _FORWARDS or _is_transposed(own)):
        facts["forward"] = _FORWARDS.get(own.forward, _multiply)
    module.__class__ = type(own.__name__, (own,), {**content, **facts})


def _is_transposed(kind: type[nn.Module]) -> bool:
    """Whether it is the linear layer of transformers, whose weight is (in, out)."""
    return (kind.__module__, kind.__name__) == ("transformers.pytorch_utils", "Conv1D")


def _multiply(module: nn.Linear, x: Tensor) -> Tensor:
    """``x W^T + b``, in the type of autocast where that is enabled."""
    indexed = module.indexed_weight
    assert isinstance(indexed, IndexedWeight)
    _check_width(x, -1, indexed.shape[1], "features")
    x, palettes, bias = _of_one_type(x, indexed.palettes, module.bias)
    if indexed.axis == 0:
        return indexed_linear(x, indexed.indices, palettes, bias)
    return F.linear(x, indexed.dense(palettes.dtype), bias)


def _convolve(module: nn.Conv2d, x: Tensor) -> Tensor:
    indexed = module.indexed_weight
    assert isinstance(indexed, IndexedWeight)
    if indexed.axis or module.padding_mode != "zeros" or isinstance(module.padding, str):
        return nn.Conv2d.forward(module, x)
    _check_width(x, -3, indexed.shape[1] * module.groups, "channels")
    x, palettes, bias = _of_one_type(x, indexed.palettes, module.bias)
    geometry = module.stride, module.padding, module.dilation, module.groups
    return indexed_conv2d(x, indexed.indices, palettes, bias, *geometry)


def _embed(module: nn.Embedding, x: Tensor) -> Tensor:
    """The rows with these numbers: only they become dense."""
    indexed = module.indexed_weight
    assert isinstance(indexed, IndexedWeight)
    # Subscripts would count negative numbers from the end, and take truth values for a mask.
    rows, palettes = F.embedding(x, indexed.indices), indexed.palettes
    parts, size = palettes.shape
    if (columns := indexed.packed_columns) is not None:
        rows = unpack(rows.view(-1, rows.shape[-1]), columns).view(*x.shape, columns)
    if parts == 1 or indexed.axis == 1:
        return expand(rows, palettes, rows.dim() - 1)
    part = torch.div(x * parts, indexed.shape[0], rounding_mode="floor")
    return palettes.reshape(-1)[part.unsqueeze(-1) * size + rows.to(torch.int32)]


_FORWARDS: dict[Callable[..., Any], Callable[..., Tensor]] = {
    nn.Linear.forward: _multiply,
    nn.Conv2d.forward: _convolve,
    nn.Embedding.forward: _embed,
}
"""What computes from indices, by the forward that it replaces."""


def _reader(leaf: str, transposed: bool) -> Callable[[nn.Module], Tensor]:
    def dense(module: nn.Module) -> Tensor:
        tensor: Tensor = getattr(module, f"indexed_{leaf}").dense()
        return tensor.t() if transposed else tensor

    return dense


def _restored(own: type[nn.Module], leaves: Sequence[str]) -> nn.Module:
    """An empty module of such a class, for unpickling."""
    module = own.__new__(own)
    for leaf in leaves:
        _add_property(module, leaf)
    return module
