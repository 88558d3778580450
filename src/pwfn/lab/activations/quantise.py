"""The quantiser of one activation tensor, its start from a first batch, and the hook on a layer's input."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from pwfn.errors import LayoutError, WeightError
from pwfn.lab.activations.plan import ActivationKind
from pwfn.lab.quantisers import ApotQuantiser, Codes, LsqQuantiser, apot, lsq, lsqplus

_FRESH, _UNSIGNED, _SIGNED = 0, 1, 2
_SAMPLE = 2**16
"""Values that a start is fitted to: a fit passes over them many times, and a layer has millions."""


class ActivationQuantiser(nn.Module):
    """Quantises the tensor it is called with, from starting values that a first batch gives.

    While ``observing``, the next call takes the starting values from its input. Codes are signed if
    ``signed`` says so, or if it is None and that input has a negative value; the buffer ``state`` records
    it, so that a state dict restores everything. Q-ViT has ``channels`` steps along ``axis``, which
    counts from the end of the shape.

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
        self.kind, self.bits, self.axis, self.signed = kind, bits, axis, signed
        one = torch.ones(() if channels is None else channels, dtype=dtype)  # replaced at the start
        self.quantiser: ApotQuantiser | LsqQuantiser
        if kind is ActivationKind.APOT:
            self.quantiser = ApotQuantiser(apot.levels(bits, signed=False), one, signed=False)
        else:
            offset = None if kind is ActivationKind.LSQ else torch.zeros_like(one)
            self.quantiser = LsqQuantiser(
                one, Codes.of(bits, signed=False), axis, batched=True, offset=offset
            )
        self.register_buffer("state", torch.tensor(_FRESH, dtype=torch.int8))
        self.is_started = False
        self.observing = False

    def forward(self, x: Tensor) -> Tensor:
        """The quantised tensor, of the same type; computed in float32 or wider."""
        # Under autocast x can be bfloat16, whose 8 bits would round x / s to the wrong code.
        wide = x.to(torch.promote_types(x.dtype, torch.float32))
        if self.observing:
            self.start(wide)
        if not self.is_started:
            raise WeightError(
                "an activation quantiser has no starting values: pass a first batch through the model "
                "inside `with observing(model):`, or load a state dict that has them"
            )
        quantised: Tensor = self.quantiser(wide)
        return quantised.to(x.dtype)

    @torch.no_grad()
    def start(self, x: Tensor) -> None:
        """Take the starting values from a batch, in place: an optimizer may already hold the parameters."""
        self.observing = False
        if x.numel() == 0:
            raise WeightError(f"the first batch gave an empty tensor {tuple(x.shape)}: pass a larger one")
        signed = self.signed if self.signed is not None else bool((x < 0).any())
        for name, value in self._starting_values(x, signed).items():
            self.quantiser.get_parameter(name).copy_(value)
        self.state.fill_(_SIGNED if signed else _UNSIGNED)
        self._set_signed(signed)

    def _starting_values(self, x: Tensor, signed: bool) -> dict[str, Tensor]:
        """As each method has them; Q-ViT's are LSQ's step and an offset of 0."""
        match self.kind:
            case ActivationKind.LSQ:
                return {"step": lsq.initial_step(x, Codes.of(self.bits, signed=signed))}
            case ActivationKind.LSQ_PLUS:
                step, offset = lsqplus.initial_step_and_offset(_sample(x), self.bits)
                return {"step": step, "offset": offset}
            case ActivationKind.APOT:
                return {"alpha": apot.fitted_alpha(_sample(x), apot.levels(self.bits, signed=signed), signed)}
            case ActivationKind.QVIT:
                step = lsq.initial_step(x, Codes.of(self.bits, signed=signed), self.axis)
                return {"step": step, "offset": torch.zeros_like(step)}

    def _set_signed(self, signed: bool) -> None:
        """Use signed or unsigned codes; LSQ+'s are always unsigned, because its offset covers the sign."""
        self.is_started, self.signed = True, signed
        if isinstance(self.quantiser, ApotQuantiser):
            self.quantiser.levels = apot.levels(self.bits, signed=signed).to(self.quantiser.alpha)
            self.quantiser.signed = signed
        elif self.kind is not ActivationKind.LSQ_PLUS:
            self.quantiser.codes = Codes.of(self.bits, signed=signed)

    def quantise_input(
        self, layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Forward pre-hook of a layer: quantises its first argument."""
        if args:
            return (self(args[0]), *args[1:]), kwargs
        if "input" not in kwargs:
            raise LayoutError(
                f"a {type(layer).__name__} was called with {', '.join(kwargs) or 'nothing'}: pass the input "
                "to quantise as the first argument, or as input="
            )
        return args, {**kwargs, "input": self(kwargs["input"])}

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any) -> None:
        super()._load_from_state_dict(state_dict, prefix, *args)
        state = int(self.state)  # waits for the device, which is harmless here and never happens in a step
        if state in (_UNSIGNED, _SIGNED):
            self._set_signed(state == _SIGNED)


def _sample(x: Tensor) -> Tensor:
    """All values if they are few, else a fixed random sample of them, as one batch."""
    if x.numel() <= _SAMPLE:
        return x
    drawn = torch.randint(x.numel(), (_SAMPLE,), generator=torch.Generator().manual_seed(0))
    return x.reshape(-1)[drawn.to(x.device)].unsqueeze(0)
