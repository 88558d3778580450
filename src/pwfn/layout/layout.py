"""Which parameters of a model are compressed, where each is in one flat vector, and why others are not.

layout = Layout.of(model)
vector = layout.gather(model)          # one tensor with all compressed weights
layout.views(vector)                   # {"layer1.conv.weight": a view of its slice, ...}
print(layout.table())                  # every parameter: its place, or why it is left out
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum

import torch
from torch import Tensor, nn
from torch.nn.modules.conv import _ConvNd, _ConvTransposeNd

from pwfn.errors import LayoutError
from pwfn.layout.coverage import (
    Owner,
    check_compressible,
    check_model,
    decide,
    is_hf_conv1d,
    matches,
    owned_parameters,
)

# The part of a projection, told by its name where the structure of the module does not show it.
_PARTS_OF_NAME = {
    **dict.fromkeys(("qkv", "in_proj", "c_attn", "Wqkv"), ("q", "k", "v")),
    **dict.fromkeys(("q", "q_proj", "query", "to_q"), ("q",)),
    **dict.fromkeys(("k", "k_proj", "key", "to_k"), ("k",)),
    **dict.fromkeys(("v", "v_proj", "value", "to_v"), ("v",)),
}
_CHANNELS_LAST = {4: torch.channels_last, 5: torch.channels_last_3d}
_HEAD_COUNTS = ("num_heads", "num_attention_heads", "n_head", "n_heads", "heads")
_SHARED_HEAD_COUNTS = ("num_key_value_heads", "num_kv_heads", "n_kv_heads")  # of keys and values, if fewer


class Kind(StrEnum):
    """What a compressed parameter is to its layer."""

    WEIGHT = "weight"
    BIAS = "bias"


@dataclass(frozen=True)
class Attention:
    """How the output axis of a projection is divided: first into parts, then each part into heads."""

    parts: tuple[str, ...]  # ("q", "k", "v") for a fused projection, one of them otherwise
    heads: int
    axis: int


@dataclass(frozen=True)
class Entry:
    """One compressed parameter and its place in the vector."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    offset: int
    layer: str  # name of the module that owns it
    layer_type: str
    kind: Kind
    aliases: tuple[str, ...] = ()  # other names of the same, tied parameter
    input_axis: int | None = None
    attention: Attention | None = None
    channels_last: bool = False
    groups: int = 1  # of a convolution

    @property
    def size(self) -> int:
        """Number of weights."""
        return math.prod(self.shape)

    @property
    def output_axis(self) -> int | None:
        """Axis of the output channels of a weight; None for vectors."""
        if len(self.shape) < 2:
            return None
        return 1 if self.input_axis == 0 else 0

    @property
    def span(self) -> slice:
        """Its slice of the vector."""
        return slice(self.offset, self.offset + self.size)


@dataclass(frozen=True)
class LeftOut:
    """One parameter that is not compressed, and why."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    reason: str
    aliases: tuple[str, ...] = ()


@dataclass(frozen=True, repr=False)
class Layout:
    """The compressed parameters of a model as slices of one vector, and the reasons why others are left out.

    Weights and biases of every convolution and linear layer are compressed: ``Conv1d/2d/3d``, transposed,
    grouped, ``Linear``, ``Bilinear``, the packed projections of ``nn.MultiheadAttention`` and ``Conv1D`` of
    transformers. ``include`` adds and ``exclude`` removes parameters, by name pattern
    (``"blocks.*.attn.*"``), by class name (``"type:Embedding"``) or by class (``nn.Embedding``). Tied weights
    count as one.

    >>> layout = Layout.of(nn.Sequential(nn.Linear(3, 2), nn.LayerNorm(2)))
    >>> layout.size, [entry.name for entry in layout.entries]
    (8, ['0.weight', '0.bias'])
    >>> layout.left_out[0].reason
    'LayerNorm: normalisation stays in full precision'
    """

    entries: tuple[Entry, ...]
    left_out: tuple[LeftOut, ...] = ()
    size: int = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "size", sum(entry.size for entry in self.entries))

    def __repr__(self) -> str:
        return f"Layout({self.size:,} weights in {len(self.entries)} tensors, {len(self.left_out)} left out)"

    @classmethod
    def of(
        cls, model: nn.Module, include: Sequence[str | type] = (), exclude: Sequence[str | type] = ()
    ) -> Layout:
        """The layout of a model, in the order in which the model defines its parameters."""
        check_model(model)
        parameters = owned_parameters(model)
        included, excluded = matches(include, parameters), matches(exclude, parameters)
        entries: list[Entry] = []
        left_out: list[LeftOut] = []
        offset = 0
        for n, (parameter, owners) in enumerate(parameters):
            shape = tuple(parameter.shape)
            owner, reason = decide(owners, parameter, included.get(n), excluded.get(n))
            names = [other.name for other in owners if other is not owner]
            if reason is not None:
                left_out.append(LeftOut(owner.name, shape, parameter.dtype, reason, tuple(names)))
                continue
            check_compressible(owner, parameter)
            entries.append(
                Entry(
                    name=owner.name,
                    shape=shape,
                    dtype=parameter.dtype,
                    offset=offset,
                    layer=owner.layer,
                    layer_type=type(owner.module).__name__,
                    kind=Kind.BIAS if "bias" in owner.leaf else Kind.WEIGHT,
                    aliases=tuple(names),
                    input_axis=_input_axis(owner.module, shape),
                    groups=owner.module.groups if isinstance(owner.module, _ConvNd) else 1,
                    attention=_attention(owner, shape),
                    channels_last=_is_channels_last(parameter),
                )
            )
            offset += parameter.numel()
        if not entries:
            name, count = type(model).__name__, len(left_out)
            if exclude:
                raise LayoutError(
                    f"exclude= leaves nothing of {name} to compress ({count} parameters): exclude less"
                )
            raise LayoutError(
                f"{name} has no convolution or linear layer to compress: name its parameters in include= "
                f"({count} are left out)"
            )
        return cls(tuple(entries), tuple(left_out))

    def without_biases(self, reason: str) -> Layout:
        """The layout without biases, which are left out for that reason.

        >>> layout = Layout.of(nn.Linear(3, 2)).without_biases("kept in full precision")
        >>> layout.size, [item.name for item in layout.left_out]
        (6, ['bias'])
        """
        kept = [entry for entry in self.entries if entry.kind is Kind.WEIGHT]
        if not kept:
            raise LayoutError(f"of {len(self.entries)} parameters none is a weight: biases are {reason}")
        rest = (entry for entry in self.entries if entry.kind is not Kind.WEIGHT)
        biases = [LeftOut(e.name, e.shape, e.dtype, reason, e.aliases) for e in rest]
        offsets = itertools.accumulate((entry.size for entry in kept), initial=0)
        moved = (replace(entry, offset=offset) for entry, offset in zip(kept, offsets, strict=False))
        return Layout(tuple(moved), (*self.left_out, *biases))

    @property
    def ends(self) -> frozenset[str]:
        """The first and the last layer, in the order in which the model defines them."""
        return frozenset((self.entries[0].layer, self.entries[-1].layer))

    @property
    def dtype(self) -> torch.dtype:
        """Type of the vector: float64 if any parameter is, else float32, which represents narrower types."""
        wide = any(entry.dtype == torch.float64 for entry in self.entries)
        return torch.float64 if wide else torch.float32

    def gather(self, model: nn.Module) -> Tensor:
        """The model's compressed parameters as one new vector, on the model's device."""
        parameters = dict(model.named_parameters(remove_duplicate=False))
        pieces = [parameters[entry.name].detach().to(self.dtype).reshape(-1) for entry in self.entries]
        devices = sorted({str(piece.device) for piece in pieces})
        if len(devices) > 1:
            raise LayoutError(
                f"the model is on several devices ({', '.join(devices)}): move it to one of them"
            )
        return torch.cat(pieces)

    def views(self, vector: Tensor) -> dict[str, Tensor]:
        """The vector cut into parameters, under every name of each; no copy for float32."""
        return self.named(self.pieces(vector))

    def pieces(self, vector: Tensor) -> list[Tensor]:
        """The vector cut into one tensor per entry, in its shape.

        By one ``split`` instead of many slices: its backward is one concatenation.
        """
        parts = vector.split([entry.size for entry in self.entries])
        return [part.view(entry.shape) for entry, part in zip(self.entries, parts, strict=True)]

    def named(self, pieces: Sequence[Tensor]) -> dict[str, Tensor]:
        """One tensor per entry under every name of it, in the type and memory format of the parameter."""
        named: dict[str, Tensor] = {}
        for entry, piece in zip(self.entries, pieces, strict=True):
            tensor = piece.to(entry.dtype)
            if entry.channels_last:
                tensor = tensor.to(memory_format=_CHANNELS_LAST[len(entry.shape)])
            for name in (entry.name, *entry.aliases):
                named[name] = tensor
        return named

    def entry(self, name: str) -> Entry:
        """The entry with that name or alias."""
        for entry in self.entries:
            if name == entry.name or name in entry.aliases:
                return entry
        raise LayoutError(f"no compressed parameter is called {name!r}")

    def locate(self, position: int) -> str:
        """Name and index of one weight of the vector, for messages: ``conv1.weight[0, 2, 1, 1]``."""
        for entry in self.entries:
            if position < entry.offset + entry.size:
                place = torch.tensor(position - entry.offset)
                return f"{entry.name}{[int(i) for i in torch.unravel_index(place, entry.shape)]}"
        raise IndexError(position)

    def table(self) -> str:
        """One line per parameter of the model: where it is in the vector, or why it is left out."""
        rows = [("parameter", "shape", "weights", "in the vector")]
        for entry in self.entries:
            note = f"{entry.layer_type} {entry.kind} at {entry.offset:,}{_tied_text(entry.aliases)}"
            rows.append((entry.name, _shape_text(entry.shape), f"{entry.size:,}", note))
        for item in self.left_out:
            note = f"left out: {item.reason}{_tied_text(item.aliases)}"
            rows.append((item.name, _shape_text(item.shape), f"{math.prod(item.shape):,}", note))
        widths = [max(len(row[i]) for row in rows) for i in range(3)]
        lines = [f"{a:<{widths[0]}}  {b:<{widths[1]}}  {c:>{widths[2]}}  {d}" for a, b, c, d in rows]
        kept = sum(math.prod(item.shape) for item in self.left_out)
        lines.append(
            f"{self.size:,} weights in {len(self.entries)} parameters are compressed; "
            f"{kept:,} in {len(self.left_out)} are left out"
        )
        return "\n".join(lines)


def _input_axis(module: nn.Module, shape: tuple[int, ...]) -> int | None:
    """Axis of the input channels of a weight; None for vectors and other modules."""
    if len(shape) < 2:
        return None
    if isinstance(module, _ConvTransposeNd) or is_hf_conv1d(module):
        return 0
    if isinstance(module, (_ConvNd, nn.Linear, nn.MultiheadAttention)):
        return 1
    return None


def _attention(owner: Owner, shape: tuple[int, ...]) -> Attention | None:
    """Parts and heads of a query, key or value projection, where names and sizes agree on one."""
    if isinstance(owner.module, nn.MultiheadAttention):
        holder: nn.Module | None = owner.module
        stem = owner.leaf.removesuffix("_weight").removesuffix("_bias")
    else:
        holder = owner.parent
        stem = owner.layer.rpartition(".")[2]
    parts = _PARTS_OF_NAME.get(stem)
    if parts is None:
        return None
    counts = _HEAD_COUNTS if parts == ("q",) else (*_SHARED_HEAD_COUNTS, *_HEAD_COUNTS)
    found = (getattr(holder, name, None) for name in counts)
    heads = next((n for n in found if isinstance(n, int) and n > 0), None)
    axis = len(shape) - 1 if is_hf_conv1d(owner.module) else 0
    if heads is None or shape[axis] % (len(parts) * heads):
        return None
    if len(parts) > 1 and not _is_thrice_its_input(owner.module, shape[axis]):
        return None
    return Attention(parts, heads, axis)


def _is_thrice_its_input(module: nn.Module, outputs: int) -> bool:
    """Whether q, k and v have equal sizes: the fused layers of cross-attention have k and v only."""
    if isinstance(module, nn.MultiheadAttention):
        return True
    weight = module.get_parameter("weight")
    return outputs == 3 * weight.shape[0 if is_hf_conv1d(module) else 1]


def _is_channels_last(parameter: Tensor) -> bool:
    """By strides, because ``is_contiguous`` is true for both formats if an axis has length 1."""
    form = _CHANNELS_LAST.get(parameter.dim())
    if form is None:
        return False
    plain = torch.empty(parameter.shape, device="meta")
    return parameter.stride() == plain.to(memory_format=form).stride() != plain.stride()


def _tied_text(aliases: Sequence[str]) -> str:
    return f", also {', '.join(aliases)}" if aliases else ""


def _shape_text(shape: Sequence[int]) -> str:
    return "×".join(str(n) for n in shape) or "scalar"


def held(layout: Layout, vector: Tensor) -> Tensor:
    """The vector as the parameters store it: rounded where their type is narrower than float32."""
    return torch.cat([vector[e.span].to(e.dtype).to(vector.dtype) for e in layout.entries])


def untouched(model: nn.Module, layout: Layout) -> dict[str, Tensor]:
    """Detached copies of all tensors of the state dict that the layout does not cover."""
    covered = {name for entry in layout.entries for name in (entry.name, *entry.aliases)}
    state: Mapping[str, object] = model.state_dict()
    return {
        name: value.detach().clone()
        for name, value in state.items()
        if name not in covered and isinstance(value, Tensor)
    }
