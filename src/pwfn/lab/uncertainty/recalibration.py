"""BatchNorm statistics of each draw: those of the point estimate do not fit a network with noisy weights."""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from pwfn.bayes.batches import Batch, Source
from pwfn.bayes.batchnorm import gathering, tracked
from pwfn.bayes.distributed import usable_device
from pwfn.bayes.randomness import seeded
from pwfn.errors import DataError, WeightError
from pwfn.evaluate.score import full_float32

_NAME = "training data for BatchNorm statistics"


@dataclass(frozen=True, eq=False, repr=False)
class Recalibration:
    """Recomputes BatchNorm statistics, always from the same batches: ``recalibrate=`` of ``ensemble``.

    Per channel, over m batches with n_b numbers x each, as torch computes them for ``momentum=None``::

        mean = 1/m sum_b mean_b        mean_b = sum x / n_b
        var  = 1/m sum_b var_b         var_b  = sum (x - mean_b)^2 / (n_b - 1)

    Noise on the weights adds ``sum_i sigma_i^2 x_i^2`` to the variance of ``w . x``, which statistics of the
    point estimate do not contain. Layers that do not update running statistics are left alone; a layer that
    no batch reaches keeps its own.
    """

    batches: tuple[Batch, ...]

    @classmethod
    def from_loader(
        cls, loader: Iterable[Any], batches: int = 8, *, seed: int = 0, device: torch.device | str = "cpu"
    ) -> Recalibration:
        """Keep the first ``batches`` of training data, or one pass if it is shorter, on ``device``.

        The device must be that of the network. The seed is for loaders that shuffle by global random states.

        >>> batches = [torch.tensor([[0.0], [2.0]]), torch.tensor([[4.0], [8.0]])]
        >>> recalibrate = Recalibration.from_loader(batches)
        >>> layer = nn.BatchNorm1d(1)
        >>> recalibrate(layer)
        >>> layer.running_mean.item(), layer.running_var.item()  # means 1 and 6, variances 2 and 8
        (3.5, 5.0)
        """
        if batches < 1:
            raise DataError(f"batches is {batches}: allowed is at least 1")
        chosen = usable_device(device)
        with seeded(seed, chosen):
            taken = itertools.islice(Source(_NAME, loader, chosen).batches(epoch=0), batches)
            kept = tuple(batch.cloned() for batch in taken)  # a loader may reuse its memory
        if not kept:
            raise DataError(f"{_NAME} gave no batch: pass a loader that is not empty")
        return cls(kept)

    def __repr__(self) -> str:
        return f"Recalibration(batches={len(self.batches)}, examples={self.examples})"

    @property
    def examples(self) -> int:
        """Number of examples in all batches."""
        return sum(batch.size for batch in self.batches)

    @torch.no_grad()
    def __call__(self, model: nn.Module) -> None:
        """Give a network the statistics that fit its weights.

        Everything else is in evaluation mode meanwhile. Modes and momenta are restored afterwards, and after
        an error the statistics too.
        """
        reason = why_not(model)
        if reason is not None:
            raise WeightError(reason)
        with gathering(model), full_float32():
            for number, batch in enumerate(self.batches, 1):
                # A copy: a network that works in place would change the input of the next draw.
                batch.cloned().through(model, f"{_NAME}, batch {number}")


def why_not(model: nn.Module) -> str | None:
    """Why a network cannot be recalibrated, and what to do; None if it can.

    >>> why_not(nn.BatchNorm1d(3)) is None, why_not(nn.Linear(3, 3)) is None
    (True, False)
    """
    layers = tracked(model)
    if not layers:
        return (
            f"{type(model).__name__} has no BatchNorm layer with running statistics to recalibrate: leave "
            "out recalibrate= (on the command line --recalibrate)"
        )
    folded = next((name for name, layer in layers.items() if _is_folded(layer)), None)
    if folded is None:
        return None
    return (
        f"BatchNorm {folded!r} has its statistics folded into its scale and shift (finish.fold_batchnorm), "
        "and new ones would undo that: use a file without it, or leave out recalibrate= (on the command "
        "line --recalibrate)"
    )


def _is_folded(layer: _BatchNorm) -> bool:
    """Whether a layer is as ``fold_batchnorm`` leaves it: mean 0, variance 1, no batch seen.

    So is a layer that was never trained, but its scales are all equal and its shifts 0.
    """
    mean, var, seen = layer.running_mean, layer.running_var, layer.num_batches_tracked
    if mean is None or var is None or layer.weight is None or layer.bias is None:
        return False
    empty = not mean.any() and bool((var == 1).all()) and (seen is None or seen == 0)
    return bool(empty and (layer.bias.any() or (layer.weight != layer.weight.view(-1)[0]).any()))
