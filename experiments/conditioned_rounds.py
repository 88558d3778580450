"""PWFN whose free weights move to their conditional mean after every fixing; see docs/method.md.

    pwfn compress --method python:experiments/conditioned_rounds.py:ConditionedRounds …

The weights that are fixed in a round leave an error in every layer. Here the free weights take it up in
closed form, before training goes on. experiments/ablations/conditioned_rounds*.toml compare it with PWFN.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from pwfn.bayes.gaussian import GaussianNetwork
from pwfn.config import Config, Number, Section, setting
from pwfn.errors import DataError
from pwfn.fixing.conditioning.network import Conditioning
from pwfn.fixing.record import FixRecord
from pwfn.layout import untouched


@dataclass(frozen=True)
class Options(Section):
    """Settings of this method alone."""

    _name = "options"
    images: int = setting(1024, Number(1, whole=True), "training images for the conditional means")


class ConditionedRounds(GaussianNetwork):
    """:class:`~pwfn.GaussianNetwork` with a conditional mean after each :meth:`fix` but the last."""

    Options = Options

    def __init__(self, model: nn.Module, config: Config | None = None) -> None:
        super().__init__(model, config)
        self._dense = (copy.deepcopy(model).eval(),)  # out of reach of state_dict; its values do not matter

    def fix(self, fraction: float) -> FixRecord:
        """Fix weights as PWFN does; then move the free ones."""
        before = self.mu.detach().clone()
        record = super().fix(fraction)
        if not bool(self.fixed.all()):
            with torch.no_grad():
                mean = self._conditional_mean(before)
                self.free_mu.copy_(torch.where(self.fixed, self.free_mu, mean))
        return record

    def _conditional_mean(self, before: Tensor) -> Tensor:
        """Of all weights, given those that are fixed, for the outputs that the layers had before.

        BatchNorm is corrected on the way and forgotten: in training it normalises by the batch.
        """
        if self.data is None:
            raise DataError("conditioning needs inputs: set net.data, or call pwfn.compress")
        original, model = self._with(before), self._with(self.mu.detach())
        batches = self.data.examples(self.options.images)
        Conditioning(original, model, self.layout, None, self.fixed).run(batches)
        return self.layout.gather(model)

    def _with(self, values: Tensor) -> nn.Module:
        """A model of its own with these weights, in evaluation mode."""
        model = copy.deepcopy(self._dense[0]).to(values.device)
        state = {**untouched(self.model, self.layout), **self.layout.views(values)}
        model.load_state_dict(state, strict=False)
        return model
