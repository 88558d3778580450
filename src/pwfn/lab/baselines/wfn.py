"""WFN: weights fixed round by round by relative distance (Subia-Waud & Dasmahapatra, ECCV 2022)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from pwfn.bayes.method import Method, WeightState, register
from pwfn.bayes.network import check_finite
from pwfn.config import Config, Number, Section, setting
from pwfn.errors import WeightError
from pwfn.file.compressed import Compressed
from pwfn.fixing.record import FixRecord, relative_moves
from pwfn.lab.baselines.baseline import PLAIN_STEPS
from pwfn.lab.baselines.wfn_rounds import Pull, fix_round, scaled
from pwfn.layout import held, untouched


@dataclass(frozen=True)
class WfnOptions(Section):
    """Options of WFN."""

    _name = "options"
    delta: float = setting(
        0.015, Number(0, 0.5, above_low=True), "mean relative distance that a cluster may move"
    )
    omega_max: int = setting(20, Number(0, 30, whole=True), "order at which delta doubles instead")
    ratio: float = setting(0.4, Number(0), "the pull to the centres, as a fraction of the task loss")
    temperature: float = setting(0.05, Number(0, above_low=True), "of the softmin over the centres")
    nearest: int = setting(16, Number(1, whole=True), "centres that a weight is pulled to, the nearest")


@register("wfn")
class Wfn(Method):
    """One codebook for the network; between fixings free weights are pulled to the centres chosen so far.

    A fixed weight lives in a buffer, as PWFN's do. The pull, the softmin-weighted relative distance, is
    scaled at every step to a set share of the task's loss.

    >>> net = Wfn(nn.Linear(4, 2), Config(method="wfn"))
    >>> net.fix(1.0).fixed, net.finish().layout.size
    (10, 10)
    """

    defaults: ClassVar[Mapping[str, Any]] = {**PLAIN_STEPS, "training.clip_norm": None}
    Options = WfnOptions
    options: WfnOptions
    fixed: Tensor
    fixed_weight: Tensor

    def __init__(self, model: nn.Module, config: Config) -> None:
        super().__init__(model, config)
        weight = self.layout.gather(model)
        self.free_weight = nn.Parameter(weight)
        self.register_buffer("fixed", torch.zeros_like(weight, dtype=torch.bool))
        self.register_buffer("fixed_weight", torch.zeros_like(weight))
        self._pull: Pull | None = None  # to the centres, once there are any

    @property
    def weight(self) -> Tensor:
        """Every weight, fixed where fixed."""
        return torch.where(self.fixed, self.fixed_weight, self.free_weight)

    def weights(self) -> dict[str, Tensor]:
        """The weights themselves."""
        return self.layout.views(self.weight)

    def loss_term(self, loss: Tensor) -> Tensor | None:
        """The pull, ``ratio`` times as large as the task's loss; none before the first fixing."""
        wfn = self.options
        if wfn.ratio == 0 or not self.free_weight.requires_grad:
            return None
        if self._pull is None:
            centres = self.fixed_weight[self.fixed].unique()
            self._pull = Pull(centres, ~self.fixed, wfn.temperature, wfn.nearest)
        return scaled(loss, self._pull(self.free_weight), wfn.ratio)

    def fix(self, fraction: float) -> FixRecord:
        """Fix weights up to the fraction."""
        wfn, before = self.options, self.weight.detach()
        check_finite(before, self.layout, "weight")
        result = fix_round(before, self.fixed, fraction, delta=wfn.delta, omega_max=wfn.omega_max)
        new = result.fixed & ~self.fixed
        moves = relative_moves(before[new], result.weights[new])
        self.fixed_weight.copy_(torch.where(new, result.weights, self.fixed_weight))
        self.fixed.copy_(result.fixed)
        self._pull = None
        fixed = int(self.fixed.sum())
        record = FixRecord(fraction, fixed, tuple(result.steps), tuple(moves))
        self.free_weight.requires_grad_(fixed < self.layout.size)
        return record

    def state(self) -> WeightState:
        """The weights, and which of them are fixed."""
        return WeightState(self.weight.detach(), None, self.fixed)

    def finish(self) -> Compressed:
        """The fixed weights and their one codebook."""
        free = int((~self.fixed).sum())
        if free:
            raise WeightError(f"{free:,} of {self.layout.size:,} weights are still free: fix them first")
        values = held(self.layout, self.fixed_weight)
        return Compressed.of(self.layout, values, None, untouched(self.model, self.layout))

    def get_extra_state(self) -> dict[str, bool]:
        """Whether any weight is free."""
        return {"is_final": not self.free_weight.requires_grad}

    def set_extra_state(self, state: dict[str, bool]) -> None:
        """What ``get_extra_state`` gave; the pull is made anew for the centres that came with it."""
        self.free_weight.requires_grad_(not state["is_final"])
        self._pull = None
