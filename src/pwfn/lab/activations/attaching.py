"""Attached to a model: the quantisers and rectifications that a description names, and their hooks."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from pwfn.errors import LayoutError
from pwfn.lab.activations.attention import Rectification, RectifiedAttention
from pwfn.lab.activations.description import AttentionFacts, Description, InputFacts
from pwfn.lab.activations.planning import channel_axis, input_channels, takes_input
from pwfn.lab.activations.quantising import ActivationQuantiser
from pwfn.lab.activations.similarity import QueriesAndKeys

NAME = "pwfn_activations"
"""What the submodule that holds all of it is called in a model."""


class Attached(nn.Module):
    """The submodule: a quantiser for each input, a module for each attention, in the description's order."""

    def __init__(self, description: Description) -> None:
        super().__init__()
        self.description = description
        self.inputs = nn.ModuleList()
        self.attention = nn.ModuleList()

    def forward(self, x: Any) -> Any:
        """What it is given: an ``nn.Sequential`` calls all its submodules in turn, and so this one last."""
        return x

    def described(self) -> Description:
        """As it is now: with the signs that the first batch showed."""
        quantisers = (module for module in self.inputs if isinstance(module, ActivationQuantiser))
        inputs = tuple(
            InputFacts(facts.layer, facts.bits, facts.channels, quantiser.signed)
            for facts, quantiser in zip(self.description.inputs, quantisers, strict=True)
        )
        return Description(self.description.kind, inputs, self.description.attention)


def attach(model: nn.Module, description: Mapping[str, Any]) -> nn.Module:
    """Quantise and rectify within a model as the description says, from now on, and return the model.

    The model gets one submodule, ``pwfn_activations``, whose tensors are trained and saved with it, and
    hooks that are that submodule's methods, so that a deep copy has its own.

    >>> model = nn.Sequential(nn.Linear(2, 2), nn.ReLU(), nn.Linear(2, 1))
    >>> row = {"layer": "2", "bits": 4, "channels": None, "signed": False}
    >>> _ = attach(model, {"kind": "lsq", "inputs": [row], "attention": []})
    >>> [name for name in model.state_dict() if name.startswith("pwfn")]
    ['pwfn_activations.inputs.0.state', 'pwfn_activations.inputs.0.quantiser.step']
    """
    facts = Description.from_plain(description)
    if hasattr(model, NAME):
        raise LayoutError(
            f"{type(model).__name__} has {NAME} already: attach to a model as its author wrote it"
        )
    modules = dict(model.named_modules(remove_duplicate=False))
    layers = _found(modules, [row.layer for row in facts.inputs])
    holders = _found(modules, [row.module for row in facts.attention])
    for row, layer in zip(facts.inputs, layers, strict=True):
        if not takes_input(layer) or row.channels not in (None, input_channels(layer)):
            wanted = "a convolution or linear layer" + (f" of {row.channels} inputs" if row.channels else "")
            raise LayoutError(
                f"{row.layer} is {layer} in the model, the description has {wanted}: they do not match"
            )
    for part, holder in zip(facts.attention, holders, strict=True):
        _check_heads(part, holder)
    attached, dtype = Attached(facts), _dtype(model)
    for row, layer in zip(facts.inputs, layers, strict=True):
        axis = channel_axis(layer) if row.channels is not None else None
        quantiser = ActivationQuantiser(facts.kind, row.bits, row.channels, axis, row.signed, dtype)
        attached.inputs.append(quantiser)
        layer.register_forward_pre_hook(quantiser.quantise_input, with_kwargs=True)
    for part, holder in zip(facts.attention, holders, strict=True):
        rectified = RectifiedAttention(part, dtype)
        attached.attention.append(rectified)
        holder.register_forward_pre_hook(rectified.enter)
        holder.register_forward_hook(rectified.leave, always_call=True)
    model.add_module(NAME, attached.to(_device(model)).train(model.training))
    return model


def _check_heads(facts: AttentionFacts, holder: nn.Module) -> None:
    """A description may come from a file: its numbers are believed as far as the module bears them out."""
    widest = max((max(p.shape, default=0) for p in holder.parameters()), default=0)
    if max(facts.heads, facts.key_heads) > widest:
        raise LayoutError(
            f"{facts.module} has no parameter wider than {widest}, the description has {facts.heads:,} heads "
            f"of queries and {facts.key_heads:,} of keys: they do not match"
        )


def describe(model: nn.Module) -> dict[str, Any]:
    """What is attached to a model, as plain JSON: :func:`attach` makes it again."""
    return _attached(model).described().to_plain()


@contextmanager
def observing(model: nn.Module) -> Iterator[None]:
    """Within the block the first batch that comes along gives every quantiser its starting values.

    They take turns in that one pass: each sees its input as the quantised layers before it make it.
    What the batch does not come past is an error at the end of the block.
    """
    attached = _attached(model)
    observers = [
        module for module in attached.modules() if isinstance(module, (ActivationQuantiser, Rectification))
    ]
    for observer in observers:
        observer.observing, observer.seen = True, False
    for module in attached.attention.children():
        _rectified(module).calls = 0
    try:
        yield
    finally:
        for observer in observers:
            observer.observing = False
    _check_all_seen(attached)


@contextmanager
def capturing(model: nn.Module) -> Iterator[list[QueriesAndKeys]]:
    """Within the block queries and keys, rectified if they are, of every attention are added to the list."""
    parts = [_rectified(module) for module in _attached(model).attention.children()]
    captured: list[QueriesAndKeys] = []
    for part in parts:
        part.captured = captured
    try:
        yield captured
    finally:
        for part in parts:
            part.captured = None


def _check_all_seen(attached: Attached) -> None:
    for part, module in zip(attached.description.attention, attached.attention.children(), strict=True):
        if _rectified(module).calls == 0:
            raise LayoutError(
                f"{part.module}: its attention does not go through torch's scaled_dot_product_attention, "
                "where Q-ViT rectifies queries and keys: let the model use it (timm: fused_attn = True), or "
                "choose another method, LSQ or LSQ+ say"
            )
    for facts, module in zip(attached.description.inputs, attached.inputs.children(), strict=True):
        if isinstance(module, ActivationQuantiser) and not module.seen:
            raise LayoutError(
                f"{facts.layer}: no input came by in the first batch, so its quantiser has no start: "
                'leave the layer out (layout.exclude), or set quantiser.activation_bits = "off"'
            )


def _attached(model: nn.Module) -> Attached:
    attached = getattr(model, NAME, None)
    if not isinstance(attached, Attached):
        raise LayoutError(f"{type(model).__name__} has no {NAME}: attach(model, plan(...)) adds it")
    return attached


def _rectified(module: nn.Module) -> RectifiedAttention:
    assert isinstance(module, RectifiedAttention)  # the list holds no others
    return module


def _found(modules: Mapping[str, nn.Module], names: list[str]) -> list[nn.Module]:
    """The modules of those names, each once."""
    found: dict[int, nn.Module] = {}
    for name in names:
        if name not in modules:
            raise LayoutError(
                f"the description has {name!r}, and the model has no such layer: it is of another model"
            )
        if id(modules[name]) in found:
            raise LayoutError(
                f"the description has {name!r} twice, under this or another name: once is allowed"
            )
        found[id(modules[name])] = modules[name]
    return list(found.values())


def _tensors(model: nn.Module) -> Iterator[torch.Tensor]:
    yield from model.parameters()
    yield from model.buffers()


def _device(model: nn.Module) -> torch.device:
    return next((tensor.device for tensor in _tensors(model)), torch.device("cpu"))


def _dtype(model: nn.Module) -> torch.dtype:
    """float64 where the model has such tensors, float32 otherwise."""
    wide = any(tensor.dtype == torch.float64 for tensor in _tensors(model))
    return torch.float64 if wide else torch.float32
