"""WFN: weights fixed round by round by relative distance (Subia-Waud & Dasmahapatra, ECCV 2022)."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Self

import torch
from torch import Tensor, nn

from pwfn.bayes.method import Between, InForce, Method, Stretch, rounds_of_fixing
from pwfn.config import Config
from pwfn.errors import WeightError
from pwfn.file.compressed import Compressed
from pwfn.fixing.fix_round import FixRecord, relative_moves
from pwfn.lab.baselines.wfn_rounds import Pull, codebook, fix_round, scaled
from pwfn.layout import held, untouched


class Wfn(Method):
    """One codebook for the network; between fixings free weights are pulled to the centres chosen so far.

    A fixed weight lives in a buffer, as PWFN's do. The pull, the softmin-weighted relative distance, is
    scaled at every step to a set share of the task's loss.

    >>> net = Wfn(nn.Linear(4, 2), Config(method="wfn"))
    >>> net.between(1, 1.0).record.fixed, net.finish().layout.size
    (10, 10)
    """

    keeps_optimizer = False
    fixed: Tensor
    fixed_weight: Tensor

    @classmethod
    def plan(cls, config: Config) -> tuple[Stretch, ...]:
        """A stretch of training before every fixing."""
        return rounds_of_fixing(config)

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

    def views(self) -> dict[str, Tensor]:
        """The weights themselves."""
        return self.layout.views(self.weight)

    def term(self, loss: Tensor) -> Tensor | None:
        """The pull, ``ratio`` times as large as the task's loss; none before the first fixing."""
        wfn = self.config.wfn
        if wfn.ratio == 0 or not self.free_weight.requires_grad:
            return None
        if self._pull is None:
            centres = codebook(self.fixed_weight, self.fixed)
            self._pull = Pull(centres, ~self.fixed, wfn.temperature, wfn.nearest)
        return scaled(loss, self._pull(self.free_weight), wfn.ratio)

    def between(self, number: int, fraction: float) -> Between:
        """Fix weights up to the fraction."""
        wfn, before = self.config.wfn, self.weight.detach()
        result = fix_round(before, self.fixed, fraction, delta=wfn.delta, omega_max=wfn.omega_max)
        new = result.fixed & ~self.fixed
        moves = relative_moves(before[new], result.weights[new])
        self.fixed_weight.copy_(torch.where(new, result.weights, self.fixed_weight))
        self.fixed.copy_(result.fixed)
        self._pull = None
        fixed = int(self.fixed.sum())
        record = FixRecord(fraction, fixed, tuple(result.steps), tuple(moves))
        self.free_weight.requires_grad_(fixed < self.layout.size)
        return Between(record, self.fixed_weight[self.fixed])

    def in_force(self) -> InForce:
        """The weights, and which of them are fixed."""
        return InForce(self.weight.detach(), None, self.fixed)

    def rounded(self) -> Self:
        """A copy whose free weights are fixed too, as a last round would do it now."""
        other = copy.deepcopy(self)
        other.between(0, 1.0)
        return other

    def adopt(self, compressed: Compressed) -> None:
        """Take over a finished state."""
        self.check_same_layout(compressed)
        with torch.no_grad():
            self.fixed.fill_(True)
            self.fixed_weight.copy_(compressed.values())
        self.free_weight.requires_grad_(False)
        self.model.load_state_dict(compressed.untouched, strict=False)

    def finish(self) -> Compressed:
        """The fixed weights and their one codebook."""
        free = int((~self.fixed).sum())
        if free:
            raise WeightError(f"{free:,} of {self.layout.size:,} weights are still free: fix them first")
        values = held(self.layout, self.fixed_weight)
        return Compressed.of(self.layout, values, None, untouched(self.model, self.layout))

    def compared(self) -> Sequence[Tensor]:
        """Which weights are fixed, and every weight."""
        return (self.fixed, self.weight)

    def get_extra_state(self) -> dict[str, bool]:
        """Whether any weight is free."""
        return {"is_final": not self.free_weight.requires_grad}

    def set_extra_state(self, state: dict[str, bool]) -> None:
        """What ``get_extra_state`` gave; the pull is made anew for the centres that came with it."""
        self.free_weight.requires_grad_(not state["is_final"])
        self._pull = None
