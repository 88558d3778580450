"""One activation tensor's quantiser, with its start from a first batch, and the hook on a layer's input."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from pwfn.errors import LayoutError, WeightError
from pwfn.lab.activations.description import ActivationKind
from pwfn.lab.quantisers import ApotQuantiser, LsqPlusQuantiser, LsqQuantiser, signed_codes, unsigned_codes
from pwfn.lab.quantisers.apot import activation_magnitudes, weight_magnitudes
from pwfn.lab.quantisers.lsq import initial_step

Quantiser = LsqQuantiser | LsqPlusQuantiser | ApotQuantiser

_FRESH, _UNSIGNED, _SIGNED = 0, 1, 2
_ENOUGH = 2**16
"""Values to fit a start to: a fit passes over them many times, and a layer has millions."""


class ActivationQuantiser(nn.Module):
    """Quantises the tensor it is called with, once it has its starting values from a first batch.

    Whether its codes are signed is asked for, or seen in that batch: any value below 0 makes them so.
    ``state`` keeps what came of it among the tensors, so that a state dict is all that is needed to go on;
    ``channels`` steps lie along ``axis``, which counts from the end of the shape.

    >>> quantiser = ActivationQuantiser(ActivationKind.LSQ, bits=2)
    >>> quantiser.observing = True
    >>> quantiser(torch.tensor([[-4.0, 0.0], [1.0, 3.0]])).tolist()  # signed, so the step is 2 * 2 / 1
    [[-4.0, 0.0], [0.0, 4.0]]
    """

    state: Tensor

    def __init__(
        self,
        kind: ActivationKind,
        bits: int,
        channels: int | None = None,
        axis: int | None = None,
        signed: bool | None = None,
        dtype: torch.dtype = torch.float32,
    ) -> None:
        super().__init__()
        self.kind, self.bits, self.channels, self.axis, self.signed = kind, bits, channels, axis, signed
        self.quantiser = _fresh(kind, bits, channels, axis, dtype)
        self.register_buffer("state", torch.tensor(_FRESH, dtype=torch.int8))
        self.is_started = False
        self.observing = False
        self.seen = False

    def forward(self, x: Tensor) -> Tensor:
        """The quantised tensor, of the same type; a narrower one than float32 is widened in between."""
        if self.observing and not self.seen:
            self.start(x)
        if not self.is_started:
            raise WeightError(
                "an activation quantiser has no starting values yet: put a first batch through the model "
                "within `with observing(model):`, or load a state dict that has them"
            )
        # Under autocast x can be bfloat16, whose 8 bits would round x / s to the wrong code.
        wide = x.to(torch.promote_types(x.dtype, torch.float32))
        quantised: Tensor = self.quantiser(wide)
        return quantised.to(x.dtype)

    @torch.no_grad()
    def start(self, x: Tensor) -> None:
        """Take the starting values from a batch, in place: an optimiser may hold the parameters already."""
        self.seen = True
        signed = self.signed if self.signed is not None else bool((x < 0).any())
        made = _started(
            self.kind, x.to(torch.promote_types(x.dtype, torch.float32)), self.bits, self.axis, signed
        )
        for name, parameter in self.quantiser.named_parameters():
            parameter.copy_(made.get_parameter(name))
        self.state.fill_(_SIGNED if signed else _UNSIGNED)
        self._become(signed)

    def quantise_input(
        self, layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The forward pre-hook of a layer: its first argument is quantised."""
        if args:
            return (self(args[0]), *args[1:]), kwargs
        if "input" not in kwargs:
            raise LayoutError(
                f"a {type(layer).__name__} was called with {', '.join(kwargs) or 'nothing'}: its quantised "
                "input must be its first argument, or called input"
            )
        return args, {**kwargs, "input": self(kwargs["input"])}

    def _become(self, signed: bool) -> None:
        """Have signed or unsigned codes; LSQ+'s are unsigned, its offset does the rest."""
        self.is_started, self.signed = True, signed
        if isinstance(self.quantiser, ApotQuantiser):
            magnitudes = weight_magnitudes(self.bits) if signed else activation_magnitudes(self.bits)
            self.quantiser.levels = magnitudes.to(self.quantiser.alpha)
            self.quantiser.signed = signed
        elif self.kind is not ActivationKind.LSQ_PLUS:
            self.quantiser.codes = signed_codes(self.bits) if signed else unsigned_codes(self.bits)

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any) -> None:
        super()._load_from_state_dict(state_dict, prefix, *args)
        state = int(self.state)  # here, where tensors are copied anyway, and never in a step
        if state in (_UNSIGNED, _SIGNED):
            self._become(state == _SIGNED)


def _fresh(
    kind: ActivationKind, bits: int, channels: int | None, axis: int | None, dtype: torch.dtype
) -> Quantiser:
    """With tensors of the right shapes and any values."""
    one = torch.ones(() if channels is None else channels, dtype=dtype)
    if kind is ActivationKind.LSQ:
        return LsqQuantiser(one, unsigned_codes(bits), axis, batched=True)
    if kind is ActivationKind.APOT:
        return ApotQuantiser(activation_magnitudes(bits), one, False, normalise=False).to(dtype)
    return LsqPlusQuantiser(one, torch.zeros_like(one), unsigned_codes(bits), axis)


def _started(kind: ActivationKind, x: Tensor, bits: int, axis: int | None, signed: bool) -> Quantiser:
    """Made from a first batch, each as its method has it.

    Q-ViT's has LSQ's step and an offset of 0, to be learned: ``round(clip((x - z) / s)) s + z``.
    """
    match kind:
        case ActivationKind.LSQ:
            return LsqQuantiser.for_activations(x, bits, axis, signed)
        case ActivationKind.LSQ_PLUS:
            return LsqPlusQuantiser.for_activations(_some(x), bits, axis)
        case ActivationKind.APOT:
            return ApotQuantiser.for_activations(_some(x), bits, axis, signed)
        case ActivationKind.QVIT:
            codes = signed_codes(bits) if signed else unsigned_codes(bits)
            step = initial_step(x, codes, axis)
            return LsqPlusQuantiser(step, torch.zeros_like(step), codes, axis)


def _some(x: Tensor) -> Tensor:
    """All of few values, or as many as are enough, drawn the same way each time, as one batch."""
    if x.numel() <= _ENOUGH:
        return x
    drawn = torch.randint(x.numel(), (_ENOUGH,), generator=torch.Generator().manual_seed(0))
    return x.reshape(-1)[drawn.to(x.device)].unsqueeze(0)
