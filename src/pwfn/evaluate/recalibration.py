"""BatchNorm statistics of a draw's own: those of the point estimate do not fit a network with noise on it."""

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


@dataclass(frozen=True, eq=False)
class Settling:
    """Gathers BatchNorm statistics anew, always from the same batches; what :func:`settled_by` gives.

    Of a channel, over m batches with n_b numbers x each::

        mean = 1/m sum_b mean_b        mean_b = sum x / n_b
        var  = 1/m sum_b var_b         var_b  = sum (x - mean_b)^2 / (n_b - 1)

    as torch has it for a momentum of None. Layers without running statistics, or with
    ``track_running_stats=False``, are left alone; one that no batch comes through keeps its own.
    """

    batches: tuple[Batch, ...]

    @property
    def examples(self) -> int:
        """In all batches together."""
        return sum(batch.size for batch in self.batches)

    @property
    def note(self) -> str:
        """What is done, in a sentence, to stand beside the figures."""
        amount = "1 training batch" if len(self.batches) == 1 else f"{len(self.batches)} training batches"
        noun = "example" if self.examples == 1 else "examples"
        return (
            f"BatchNorm statistics were gathered anew for every draw, from {amount} "
            f"({self.examples:,} {noun})"
        )

    def check(self, model: nn.Module) -> None:
        """An error if a network has no statistics to gather, or has them in its scales and shifts."""
        reason = why_not(model)
        if reason is not None:
            raise WeightError(reason)

    @torch.no_grad()
    def __call__(self, model: nn.Module) -> None:
        """Give a network, on the device of the batches, the statistics that fit its weights.

        All else is in evaluation mode meanwhile; then every layer has its mode and momentum again, and
        after an error its statistics too.
        """
        self.check(model)
        with gathering(model), full_float32():
            for number, batch in enumerate(self.batches, 1):
                # A copy: a network that works on its input in place would change it for the next draw.
                batch.cloned().through(model, f"{_NAME}, batch {number}")


def settled_by(
    loader: Iterable[Any], batches: int = 8, *, seed: int = 0, device: torch.device | str = "cpu"
) -> Settling:
    """For ``settle=`` of ``ensemble`` and ``assess``: every draw with BatchNorm statistics of its own.

    Noise on the weights adds variance to what a BatchNorm layer sees, ``sum_i sigma_i^2 x_i^2`` to that of
    ``w . x``, and statistics from without the noise have none of it. Here they are gathered from the
    first ``batches`` of training data, or as many as one pass has. These are taken once and kept on
    ``device``, which is the network's; the seed is for loaders that shuffle from global random states.

    >>> settle = settled_by([torch.tensor([[0.0], [2.0]]), torch.tensor([[4.0], [8.0]])])
    >>> layer = nn.BatchNorm1d(1)
    >>> settle(layer)
    >>> layer.running_mean.item(), layer.running_var.item()  # means 1 and 6, variances 2 and 8
    (3.5, 5.0)
    """
    if batches < 1:
        raise DataError(f"batches is {batches}: allowed is at least 1")
    chosen = usable_device(device)
    with seeded(seed, chosen):
        taken = itertools.islice(Source(_NAME, loader, chosen).batches(epoch=0), batches)
        kept = tuple(batch.cloned() for batch in taken)  # a loader may use its memory again for the next
    if not kept:
        raise DataError(f"{_NAME} gave no batch: pass a loader that is not empty")
    return Settling(kept)


def why_not(model: nn.Module) -> str | None:
    """Why a network cannot be given statistics that fit its weights, and what to do; None where it can."""
    layers = tracked(model)
    if not layers:
        return (
            f"{type(model).__name__} has no BatchNorm layer with running statistics, so that there are "
            "none to gather for a draw: score it without (settle=None, or no --settle)"
        )
    folded = next((name for name, layer in layers.items() if _is_folded(layer)), None)
    if folded is None:
        return None
    return (
        f"BatchNorm {folded!r} has its statistics folded into its scale and shift "
        "(finish.fold_batchnorm): they are no longer there, and gathering new ones would undo the "
        "fold; use a file without it, or score it as it is (settle=None, or no --settle)"
    )


def _is_folded(layer: _BatchNorm) -> bool:
    """Whether a layer is as ``pwfn.bayes.fold_batchnorm.fold_batchnorm`` leaves it: mean 0, variance 1, no batch seen.

    So is a layer that was never trained, but its scales are one and the same number, and its shifts 0.
    """
    mean, var, seen = layer.running_mean, layer.running_var, layer.num_batches_tracked
    if mean is None or var is None or layer.weight is None or layer.bias is None:
        return False
    empty = not mean.any() and bool((var == 1).all()) and (seen is None or seen == 0)
    return bool(empty and (layer.bias.any() or (layer.weight != layer.weight.view(-1)[0]).any()))
