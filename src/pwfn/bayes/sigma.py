"""The initial sigma: by the powers of two around a weight, one constant, or what the network tolerates."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn

from pwfn.bayes.batches import Batch, Source
from pwfn.bayes.batchnorm import tracked
from pwfn.bayes.distributed import Distributed
from pwfn.bayes.kernels.reference import SIGMA_FLOOR
from pwfn.bayes.method import DataProbe, Method
from pwfn.bayes.network import tensors_of
from pwfn.bayes.objective import Objective, autocast, evaluating, logits, spread
from pwfn.config import PosteriorConfig, SigmaInit
from pwfn.config.seeds import seed_from
from pwfn.errors import DataError, WeightError
from pwfn.layout import Layout

_INITIAL_SCALE = 0.0025
_INITIAL_LARGEST = 0.05
_CONSTANT = 1e-3  # the paper's "no prior"
_LOWEST, _HIGHEST, _HALVINGS = -8.0, 3.0, 10  # of the search for a tolerated sigma: log2 of sigma / rms
_BATCHES = 8
_STREAM = "looking"  # the name of the random stream: another name would change every result


def initial_sigma(weight: Tensor) -> Tensor:
    """The initial sigma, by relative distance to the two powers of two around each weight.

    With ``2^x <= |mu| < 2^(x+1)``, ``lo = 2^x``, ``hi = 2^(x+1)``:
    ``d = (|mu| - lo)/lo * (hi - |mu|)/hi``, zero at a power of two and largest between, and
    ``sigma = clamp(0.0025 * d / q75, 2^-30, 0.05)`` with q75 the third quartile of d over the
    tensor. Zero counts as a power of two. Where q75 is zero (a sparse tensor, say), it is taken
    over the positive d; where no d is positive, every sigma is at the floor. Sigma is float32 for
    narrower weights: narrower types cannot represent 2^-30.

    >>> sigma = initial_sigma(torch.tensor([0.5, 0.75, 0.75, 0.0], dtype=torch.float64))
    >>> sigma.tolist() == [2**-30, 0.0025, 0.0025, 2**-30]
    True
    """
    if not weight.is_floating_point() or not bool(torch.isfinite(weight).all()):
        raise WeightError("initial_sigma needs finite floating-point weights")
    if weight.dtype not in (torch.float32, torch.float64):
        return initial_sigma(weight.float())
    # |mu| = m * 2^e with 1/2 <= m < 1, so lo = 2^(e-1), hi = 2^e and d depends on m alone.
    mantissa = torch.frexp(weight.detach().abs()).mantissa
    d = (2 * mantissa - 1) * (1 - mantissa)
    d = torch.where(mantissa == 0, torch.zeros_like(d), d).reshape(-1)
    quartile = _third_quartile(d)
    if quartile == 0:
        quartile = _third_quartile(d[d > 0])
    if quartile == 0:
        return torch.full_like(weight, SIGMA_FLOOR, requires_grad=False)
    sigma = (_INITIAL_SCALE * d / quartile).clamp(SIGMA_FLOOR, _INITIAL_LARGEST)
    return sigma.view(weight.shape)


def starting_sigma(mu: Tensor, layout: Layout, config: PosteriorConfig) -> Tensor:
    """Sigma of every weight as ``posterior.init`` says, as far as that is known without data."""
    if config.init is SigmaInit.POWERS:
        return torch.cat([initial_sigma(mu[entry.span]) for entry in layout.entries])
    if config.init is SigmaInit.CONSTANT:
        return torch.full_like(mu, _CONSTANT)
    return torch.full_like(mu, max(config.rms_fraction * root_mean_square(mu), SIGMA_FLOOR))


def tolerated_sigma(rms: float, tolerance: float, loss: Callable[[float], float]) -> float:
    """The sigma at which the loss has risen by the tolerance, ``loss(sigma) = loss(0) + tolerance``.

    Found by bisection of its logarithm, from 2^-8 to 2^3 times the root mean square of the weights, to
    one part in a hundred. ``loss`` must draw the same noise at every call.

    >>> abs(tolerated_sigma(1.0, 0.25, lambda sigma: sigma**2) - 0.5) < 0.005
    True
    """
    if rms == 0:
        raise WeightError("every weight is zero: no sigma can be found by what the network tolerates")
    quiet = loss(SIGMA_FLOOR)
    if not math.isfinite(quiet):
        raise WeightError(f"the loss is {quiet} without any noise: look for NaN in the data or the weights")
    low, high = _LOWEST, _HIGHEST
    for _ in range(_HALVINGS):
        middle = (low + high) / 2
        if loss(rms * 2**middle) <= quiet + tolerance:  # false where the loss is nan
            low = middle
        else:
            high = middle
    if low == _LOWEST or high == _HIGHEST:
        said = "even noise of 1/256 of" if low == _LOWEST else "not even noise of eight times"
        raise WeightError(
            f"{said} the weights' size raises the loss by posterior.tolerance = {tolerance:g}: set another "
            "tolerance, or another posterior.init"
        )
    return rms * 2**low


def root_mean_square(values: Tensor) -> float:
    """``sqrt(mean(w^2))`` in float64; 0 for no values."""
    return math.sqrt(float(values.detach().double().square().mean())) if values.numel() else 0.0


def probe(net: Method, train: Source, objective: Objective, distributed: Distributed) -> DataProbe:
    """What a method may ask of the training data; does not advance the run's own pass over it."""

    @cache  # read once: a loader that shuffles would give other batches at every call
    def some() -> list[Batch]:
        return list(itertools.islice(train.endless(), _BATCHES))

    @cache
    def examples(count: int) -> list[Batch]:
        found: list[Batch] = []
        for batch in train.batches(0):
            found.append(batch)
            if sum(item.size for item in found) >= count:
                break
        return found

    return DataProbe(
        lambda module: next(train.endless()).through(module, "the first batch"),
        lambda: noisy_loss(net, some(), objective, distributed),
        examples,
    )


@torch.no_grad()
def noisy_loss(
    net: Method, batches: Sequence[Batch], objective: Objective, distributed: Distributed
) -> float:
    """What noise on the weights costs: a mean over batches, with the same noise at every call.

    A loss that compares classes is in nats, and taken as it is. Other losses have units of their own: there
    the cost is the :func:`relative_error` that the noise causes in the outputs.

    BatchNorm normalises by the batch, as in training, and keeps its running statistics. Everything else
    is in evaluation mode.
    """
    seed = seed_from(_STREAM, net.settings.seed, distributed.rank)
    device, precision = distributed.device, net.settings.training.precision
    total = torch.zeros((), dtype=torch.float64, device=device)
    with evaluating(net), _batch_statistics(net):
        for number, batch in enumerate(batches):
            with net.sampling(True, at=(seed, number)), autocast(device, precision):
                where = f"train_loader, batch {number + 1}"
                output = batch.through(net, where)
                objective.check_labels(output, batch, where)
                cost = objective.of_output(output, batch, where).double()
            if not objective.classifies:
                with net.sampling(False), autocast(device, precision):
                    cost = relative_error(output, batch.through(net, where), where)
            total += cost
    distributed.average_([total])
    return float(total) / len(batches)


def relative_error(output: Any, reference: Any, where: str) -> Tensor:
    """Error of outputs in standard deviations of them over the examples, ``|z' - z| / |z - mean|``.

    It does not depend on the unit; 0.1 of it costs about 0.01 of R^2. Of several tensors, the mean.

    >>> z = torch.tensor([[0.0], [2.0]])
    >>> relative_error(z + 0.5, z, "here").item(), relative_error(64 * z + 32, 64 * z, "here").item()
    (0.5, 0.5)
    """
    pairs = zip(tensors_of(logits(output)), tensors_of(logits(reference)), strict=True)
    found = [(now.double(), z.double()) for now, z in pairs if z.is_floating_point() and z.numel()]
    if not found:
        raise DataError(f'{where}: the output has no tensor to measure noise by: set posterior.init = "rms"')
    return torch.stack([((now - z).square().mean() / spread(z)).sqrt() for now, z in found]).mean()


@contextmanager
def _batch_statistics(net: nn.Module) -> Iterator[None]:
    """Within the block BatchNorm is in training mode unless frozen; its running statistics are restored."""
    layers = list(tracked(net).values())
    before = [(buffer, buffer.clone()) for layer in layers for buffer in layer.buffers()]
    for layer in layers:
        layer.train()
    try:
        yield
    finally:
        for buffer, value in before:
            buffer.copy_(value)


def _third_quartile(values: Tensor) -> float:
    """Linear interpolation between order statistics; ``torch.quantile`` stops at 16 M values."""
    if values.numel() == 0:
        return 0.0
    position = 0.75 * (values.numel() - 1)
    below = int(position)
    low = float(values.kthvalue(below + 1).values)
    high = float(values.kthvalue(min(below + 2, values.numel())).values)
    return low + (position - below) * (high - low)
