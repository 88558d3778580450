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
from pwfn.fixing.conditioning.columns import DAMPING, damped
from pwfn.fixing.conditioning.network import Conditioning, MatrixOf
from pwfn.fixing.record import FixRecord
from pwfn.layout import Layout, untouched

_CLOSE = 1e-4  # relative residual of a conditional mean: rounding is far coarser


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
        _ToMeans(original, model, self.layout, self.fixed).run(batches)
        return self.layout.gather(model)

    def _with(self, values: Tensor) -> nn.Module:
        """A model of its own with these weights, in evaluation mode."""
        model = copy.deepcopy(self._dense[0]).to(values.device)
        state = {**untouched(self.model, self.layout), **self.layout.views(values)}
        model.load_state_dict(state, strict=False)
        return model


class _ToMeans(Conditioning):
    """Weights that are ``fixed`` (one flat mask) stay as they are; the others move to their means."""

    def __init__(self, original: nn.Module, model: nn.Module, layout: Layout, fixed: Tensor) -> None:
        super().__init__(original, model, layout, step=1.0)  # which nothing uses
        self._kept = fixed

    def _placed(
        self, target: Tensor, moments: Tensor, damping: float, matrix_of: MatrixOf, block: slice
    ) -> Tensor:
        own, kept = (matrix_of(of)[..., block] for of in (self._weights[1].memory, self._kept_memory))
        return conditional_mean(target, own.float(), kept, moments, damping, _CLOSE)

    def _kept_memory(self, entry: int) -> Tensor:
        """Which weights of a parameter stay, in the order of its memory."""
        parameter, span = self._weights[1].parameters[entry], self.layout.entries[entry].span
        mask = torch.empty_like(parameter, dtype=torch.bool)  # with the strides of the parameter
        mask.copy_(self._kept[span].view(parameter.shape))
        return mask.as_strided((parameter.numel(),), (1,))

    def _round_the_rest(self) -> None:
        """Weights that no operation used stay as they are."""


def conditional_mean(
    weight: Tensor,
    values: Tensor,
    fixed: Tensor,
    moments: Tensor,
    damping: float = DAMPING,
    tolerance: float = 1e-9,
) -> Tensor:
    """The weights given those that are fixed: ``values`` where ``fixed``, the conditional mean elsewhere.

    For every row the minimum of ``(v - w) H (v - w)^T`` over its free weights: conjugate gradients on all
    rows at once, one matrix product per iteration, until the residual is ``tolerance`` times the first.

    >>> w, h = torch.tensor([[[0.6, 0.6]]]), torch.tensor([[[1.0, 0.5], [0.5, 1.0]]])
    >>> fixed = torch.tensor([[[True, False]]])
    >>> conditional_mean(w, torch.ones(1, 1, 2), fixed, h, damping=0.0)       # 0.6 - 0.5 * (1 - 0.6)
    tensor([[[1.0000, 0.4000]]])
    """
    h, start = damped(moments, damping), weight.double()
    free = (~fixed).double()
    error = torch.where(fixed, values.double() - start, 0.0)
    residual = -(error @ h) * free
    # Jacobi's preconditioner: inputs of a layer differ by orders of magnitude in energy.
    scale = 1 / h.diagonal(dim1=-2, dim2=-1)[:, None, :]
    direction = scale * residual
    size = (residual * direction).sum(-1, keepdim=True)
    goal = tolerance**2 * size
    for _ in range(2 * h.shape[-1]):
        if not bool((size > goal).any()):
            break
        product = (direction @ h) * free
        along = size / (direction * product).sum(-1, keepdim=True).clamp_min(torch.finfo(h.dtype).tiny)
        along = torch.where(size > goal, along, 0.0)
        error = error + along * direction
        residual = residual - along * product
        rescaled = scale * residual
        new = (residual * rescaled).sum(-1, keepdim=True)
        direction = rescaled + torch.where(size > goal, new / size, 0.0) * direction
        size = new
    return torch.where(fixed, values, (start + error).to(weight.dtype))
