"""The first description for a fresh model: whose inputs are quantised, in how many bits; which attention."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import nn
from torch.nn.modules.conv import _ConvNd

from pwfn.errors import LayoutError
from pwfn.lab.activations.description import ActivationKind, AttentionFacts, Description, InputFacts
from pwfn.layout import Entry, Kind, Layout
from pwfn.layout.coverage import is_hf_conv1d

END_BITS = 8
"""Of the inputs of the first and the last layer, as the methods' papers have it."""


def plan(
    model: nn.Module,
    layout: Layout,
    kind: ActivationKind,
    bits: int | None,
    *,
    include_ends: bool = False,
) -> dict[str, Any]:
    """A description to :func:`attach`: the input of every convolution and linear layer in ``bits`` bits.

    The first and the last layer's have 8, unless ``include_ends``; the first one's is the image. With
    bits of None inputs stay as they are. For Q-ViT attention is rectified in any case, and a network in
    which there is none is an error.

    >>> model = nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 3), nn.Linear(3, 2))
    >>> [row["bits"] for row in plan(model, Layout.of(model), ActivationKind.LSQ, 4)["inputs"]]
    [8, 4, 8]
    """
    inputs = []
    if bits is not None:
        for entry, name, module in _layers(model, layout):
            own = bits if include_ends or entry.layer not in layout.ends else END_BITS
            channels = input_channels(module) if kind is ActivationKind.QVIT else None
            inputs.append(InputFacts(name, own, channels))
    attention = _attention(layout, rectified=True, bits=bits) if kind is ActivationKind.QVIT else ()
    return Description(kind, tuple(inputs), attention).to_plain()


def plan_capture(layout: Layout) -> dict[str, Any]:
    """A description that changes nothing: queries and keys can be captured, of a teacher's attention."""
    return Description(ActivationKind.QVIT, (), _attention(layout, rectified=False, bits=None)).to_plain()


def input_channels(module: nn.Module) -> int:
    """Of a convolution or a linear layer."""
    if isinstance(module, _ConvNd):
        return module.in_channels
    if isinstance(module, nn.Linear):
        return module.in_features
    return int(module.nx)  # type: ignore[arg-type]  # transformers' Conv1D, which is not imported here


def channel_axis(module: nn.Module) -> int:
    """Of a layer's input, from the end of its shape, so that there may be a batch or none."""
    return -1 - len(module.kernel_size) if isinstance(module, _ConvNd) else -1


def takes_input(module: nn.Module) -> bool:
    """Whether it is a layer whose input can be quantised."""
    return isinstance(module, (_ConvNd, nn.Linear)) or is_hf_conv1d(module)


def _layers(model: nn.Module, layout: Layout) -> Iterator[tuple[Entry, str, nn.Module]]:
    """Every layer that uses a compressed weight, once, by a name."""
    done: set[int] = set()
    for entry in layout.entries:
        if entry.kind is not Kind.WEIGHT:
            continue
        for parameter in (entry.name, *entry.aliases):
            name = parameter.rpartition(".")[0]
            module = model.get_submodule(name)
            if isinstance(module, (nn.MultiheadAttention, nn.Bilinear)):
                raise LayoutError(
                    f"{name or 'the model'} is a {type(module).__name__}, the inputs of whose products "
                    'cannot be quantised from without: set quantiser.activation_bits = "off"'
                )
            if id(module) not in done and takes_input(module):
                done.add(id(module))
                yield entry, name, module


def _attention(layout: Layout, *, rectified: bool, bits: int | None) -> tuple[AttentionFacts, ...]:
    """A line for every module that holds projections to queries, keys and values."""
    heads: dict[str, dict[str, int]] = {}
    for entry in layout.entries:
        if entry.attention is None or entry.kind is not Kind.WEIGHT:
            continue
        # Packed projections are nn.MultiheadAttention's own parameters, others those of a linear layer in it.
        holder = entry.layer if entry.layer_type == "MultiheadAttention" else entry.layer.rpartition(".")[0]
        heads.setdefault(holder, {}).update(dict.fromkeys(entry.attention.parts, entry.attention.heads))
    found = tuple(
        AttentionFacts(holder, parts["q"], parts["k"], rectified, bits)
        for holder, parts in heads.items()
        if {"q", "k"} <= parts.keys()
    )
    if not found:
        raise LayoutError(
            "no attention is found in the network (projections called qkv, or q, k and v, in a module that "
            "says its num_heads): Q-ViT needs transformer blocks; choose another method, LSQ or LSQ+ say"
        )
    return found
