"""Attach quantisers and rectified attention to a model, as a description says."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from pwfn.errors import LayoutError
from pwfn.file.compressed import ATTACHED
from pwfn.lab.activations.attention import QueriesAndKeys, Rectification, RectifiedAttention
from pwfn.lab.activations.plan import Description, channel_axis, input_channels, takes_input
from pwfn.lab.activations.quantise import ActivationQuantiser


class Attached(nn.Module):
    """The submodule with all quantisers and attention modules, in the order of the description."""

    def __init__(self, description: Description) -> None:
        super().__init__()
        self.description = description
        self.inputs = nn.ModuleList()
        self.attention = nn.ModuleList()

    def forward(self, x: Any) -> Any:
        """The identity: an ``nn.Sequential`` calls its submodules in turn, and this one last."""
        return x

    @property
    def quantisers(self) -> list[ActivationQuantiser]:
        """The quantisers of inputs."""
        return [module for module in self.inputs if isinstance(module, ActivationQuantiser)]

    @property
    def rectified(self) -> list[RectifiedAttention]:
        """The attention modules."""
        return [module for module in self.attention if isinstance(module, RectifiedAttention)]


def attach(model: nn.Module, description: Mapping[str, Any]) -> nn.Module:
    """Quantise and rectify inside a model as the description says, in place, and return the model.

    The model gets one submodule, ``pwfn_activations``, whose tensors are trained and saved with it. The
    hooks are methods of that submodule, so a deep copy of the model has its own.

    >>> model = nn.Sequential(nn.Linear(2, 2), nn.ReLU(), nn.Linear(2, 1))
    >>> row = {"layer": "2", "bits": 4, "channels": None, "signed": False}
    >>> _ = attach(model, {"kind": "lsq", "inputs": [row], "attention": []})
    >>> [name for name in model.state_dict() if name.startswith("pwfn")]
    ['pwfn_activations.inputs.0.state', 'pwfn_activations.inputs.0.quantiser.step']
    """
    made = Description.from_plain(description)
    if hasattr(model, ATTACHED):
        raise LayoutError(f"{type(model).__name__} already has {ATTACHED}: attach to an unchanged model")
    layers = _find(model, [row.layer for row in made.inputs])
    holders = _find(model, [row.module for row in made.attention])
    # Everything is checked before anything is changed.
    for row, layer in zip(made.inputs, layers, strict=True):
        if not takes_input(layer) or row.channels not in (None, input_channels(layer)):
            wanted = "a convolution or linear layer" + (f" of {row.channels} inputs" if row.channels else "")
            raise LayoutError(
                f"{row.layer} is {layer} in the model, but {wanted} in the description: they do not match"
            )
    for part, holder in zip(made.attention, holders, strict=True):
        # A file may claim any number of heads: none can have more than the widest parameter has rows.
        widest = max((max(p.shape, default=0) for p in holder.parameters()), default=0)
        if max(part.heads, part.key_heads) > widest:
            raise LayoutError(
                f"{part.module} has no parameter wider than {widest}, but the description has {part.heads:,} "
                f"heads of queries and {part.key_heads:,} of keys: they do not match"
            )
    tensors = [*model.parameters(), *model.buffers()]
    dtype = torch.float64 if any(t.dtype == torch.float64 for t in tensors) else torch.float32
    attached = Attached(made)
    for row, layer in zip(made.inputs, layers, strict=True):
        axis = None if row.channels is None else channel_axis(layer)
        quantiser = ActivationQuantiser(made.kind, row.bits, row.channels, axis, row.signed, dtype)
        attached.inputs.append(quantiser)
        layer.register_forward_pre_hook(quantiser.quantise_input, with_kwargs=True)
    for part, holder in zip(made.attention, holders, strict=True):
        rectified = RectifiedAttention(part, dtype)
        attached.attention.append(rectified)
        holder.register_forward_pre_hook(rectified.enter)
        holder.register_forward_hook(rectified.leave, always_call=True)
    attached.to(tensors[0].device if tensors else torch.device("cpu"))
    model.add_module(ATTACHED, attached.train(model.training))
    return model


def _find(model: nn.Module, names: list[str]) -> list[nn.Module]:
    """The modules with these names, which must be different modules."""
    modules = dict(model.named_modules(remove_duplicate=False))
    found: dict[int, nn.Module] = {}
    for name in names:
        if name not in modules:
            raise LayoutError(f"the description has {name!r}, but the model does not: describe this model")
        if id(modules[name]) in found:
            raise LayoutError(f"the description has {name!r} twice, under this or another name: keep one")
        found[id(modules[name])] = modules[name]
    return list(found.values())


def _attached(model: nn.Module) -> Attached:
    attached = getattr(model, ATTACHED, None)
    if not isinstance(attached, Attached):
        raise LayoutError(f"{type(model).__name__} has no {ATTACHED}: call attach(model, plan(...)) first")
    return attached


def describe(model: nn.Module) -> dict[str, Any]:
    """The description of what is attached to a model, with the signs that the first batch showed."""
    attached = _attached(model)
    rows = zip(attached.description.inputs, attached.quantisers, strict=True)
    inputs = tuple(replace(row, signed=quantiser.signed) for row, quantiser in rows)
    return replace(attached.description, inputs=inputs).to_plain()


@contextmanager
def observing(model: nn.Module) -> Iterator[None]:
    """Inside the block, the first batch gives every quantiser and rectification its starting values.

    One pass starts them in turn: each sees its input as the quantised layers before it produce it.
    Leaving the block is an error if any of them was not reached.
    """
    attached = _attached(model)
    observers = [
        module for module in attached.modules() if isinstance(module, (ActivationQuantiser, Rectification))
    ]
    for observer in observers:
        observer.observing = True
    try:
        yield
        _check_all_started(attached)
    finally:
        for observer in observers:
            observer.observing = False


def _check_all_started(attached: Attached) -> None:
    for part in attached.rectified:
        if any(getattr(module, "observing", False) for module in part.modules()):
            raise LayoutError(
                f"{part.plan.module}: its attention does not go through torch's "
                "scaled_dot_product_attention, where Q-ViT rectifies queries and keys: let the model use it "
                "(timm: fused_attn = True), or choose another method, such as LSQ or LSQ+"
            )
    for row, quantiser in zip(attached.description.inputs, attached.quantisers, strict=True):
        if quantiser.observing:
            raise LayoutError(
                f"{row.layer}: no input reached it in the first batch, so its quantiser has no start: "
                'exclude the layer (layout.exclude), or set options.activation_bits = "off"'
            )


@contextmanager
def capturing(model: nn.Module) -> Iterator[list[QueriesAndKeys]]:
    """Inside the block, the (rectified) queries and keys of every attention module are added to the list."""
    parts = _attached(model).rectified
    captured: list[QueriesAndKeys] = []
    for part in parts:
        part.captured = captured
    try:
        yield captured
    finally:
        for part in parts:
            part.captured = None
