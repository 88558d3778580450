"""Predictions for every example: of one network, or the mean over draws from a posterior."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from pwfn.bayes.batches import Batch, Source
from pwfn.bayes.objective import evaluating, logits
from pwfn.errors import ConfigError, DataError
from pwfn.evaluate.score import full_float32, placed
from pwfn.file.compressed import Compressed
from pwfn.zoo.epochs import batched

_ROUNDING_NATS = 1e-13


class Score(StrEnum):
    """Measures of uncertainty, one number per example."""

    MAX_PROBABILITY = "max_probability"  # 1 - max_k p_k
    PREDICTIVE_ENTROPY = "predictive_entropy"  # H(mean p)
    MUTUAL_INFORMATION = "mutual_information"  # H(mean p) - mean H(p)


@dataclass(frozen=True, eq=False, repr=False)
class Predictions:
    """The mean prediction of some draws for every example, and how much the draws differ; on the CPU.

    Tensors are float64 with one row per example, entropies in nats. A single network counts as one draw:
    its mutual information is 0.
    """

    log_probabilities: Tensor  # log of the mean p; examples × classes
    expected_entropy: Tensor  # mean H(p) over the draws
    disagreement: Tensor  # share of draws that predict another class than the mean does
    targets: Tensor | None  # None: the data have no labels
    samples: int
    checksums: Tensor  # sum of each example's input, to verify that two passes saw the same data

    def __repr__(self) -> str:
        examples, classes = self.log_probabilities.shape
        return f"Predictions({examples=}, {classes=}, samples={self.samples})"

    @property
    def probabilities(self) -> Tensor:
        """Mean p."""
        return self.log_probabilities.exp()

    @property
    def predictive_entropy(self) -> Tensor:
        """``H(mean p) = -sum_k p_k log p_k``: total uncertainty."""
        return _entropy(self.log_probabilities)

    @property
    def mutual_information(self) -> Tensor:
        """``H(mean p) - mean H(p) >= 0``: the uncertainty that comes from not knowing the weights."""
        difference = self.predictive_entropy - self.expected_entropy
        # Two equal entropies may differ by rounding, in either direction: that is not information.
        return torch.where(difference > _ROUNDING_NATS, difference, 0.0)

    def uncertainty(self, score: Score) -> Tensor:
        """One number per example, larger where the prediction is less certain."""
        if score is Score.MAX_PROBABILITY:
            return missing_probability(self.log_probabilities)
        if score is Score.PREDICTIVE_ENTROPY:
            return self.predictive_entropy
        return self.mutual_information

    def chosen(self, index: Tensor) -> Predictions:
        """The predictions for some of the examples."""
        rows: dict[str, Any] = {name: v[index] for name, v in vars(self).items() if isinstance(v, Tensor)}
        return replace(self, **rows)


def point(
    model: nn.Module,
    loader: Iterable[Any],
    device: torch.device | str | None = None,
    *,
    name: str = "test data",
) -> Predictions:
    """Predictions of one network, in evaluation mode; the model is moved to ``device`` if one is given.

    >>> loader = [(torch.zeros(3, 2), torch.tensor([0, 1, 1]))]
    >>> found = point(nn.Linear(2, 4), loader)
    >>> found
    Predictions(examples=3, classes=4, samples=1)
    >>> found.mutual_information.tolist()
    [0.0, 0.0, 0.0]
    """
    return _mean([(model, 1)], Source(name, batched(loader), placed(model, device)))


def ensemble(
    compressed: Compressed | Sequence[Compressed],
    model: nn.Module | Sequence[nn.Module],
    loader: Iterable[Any],
    samples: int = 20,
    seed: int = 0,
    device: torch.device | str | None = None,
    *,
    sigma_scale: float = 1.0,
    name: str = "test data",
) -> Predictions:
    """Mean prediction of ``samples`` draws from a network's posterior, ``1/S sum_s softmax(f_s(x))``.

    One pass over the data per draw, with ``w = mu + sigma_scale sigma eps``; the noise ``eps`` depends on
    ``seed`` only. Memory is proportional to examples × classes, not to draws. The loader must give the same
    examples in the same order in every pass. Afterwards the model has the weights of the point estimate, as
    ``compressed.apply_to`` sets them.

    Of several networks, the mean of their predictions, each with the same weight. One without a posterior, or
    with none worth drawing from, predicts by its point estimate; with 0 samples all do. ``model`` is then one
    network for all of them, or a list with one for each.

    >>> from pwfn.layout import Layout
    >>> model = nn.Linear(1, 2, bias=False)
    >>> small = Compressed.of(Layout.of(model), torch.tensor([1.0, 2.0]), torch.ones(2), {})
    >>> ensemble(small, model, [torch.ones(5, 1)], samples=3)
    Predictions(examples=5, classes=2, samples=3)
    >>> other = Compressed.of(Layout.of(model), torch.tensor([0.5, 2.0]), None, {})
    >>> ensemble([small, other], model, [torch.ones(5, 1)], samples=3)
    Predictions(examples=5, classes=2, samples=6)
    """
    several = not isinstance(compressed, Compressed)
    members = list(compressed) if isinstance(compressed, Sequence) else [compressed]
    models: list[Any] = list(model) if isinstance(model, (list, tuple)) else [model] * len(members)
    least = 0 if several else 1
    if not isinstance(samples, int) or samples < least:
        raise DataError(f"samples is {samples}: allowed is a whole number of at least {least}")
    if not members or len(models) != len(members):
        raise DataError(
            f"there are {len(members)} networks and {len(models)} models: give one model for each"
        )
    for each in members:
        if not isinstance(each, Compressed):
            raise DataError(f"a network is a {type(each).__name__}: allowed is what pwfn.load returns")
    for own in models:
        if not isinstance(own, nn.Module):
            raise DataError(f"a model is a {type(own).__name__}: allowed is a torch.nn.Module")
    _generator(seed)
    scaled = [_scaled(member, sigma_scale) for member in members]
    places = [placed(each, device) for each in models]
    source = Source(name, batched(loader), places[0])
    points = {n for n, one in enumerate(members) if not samples or (several and one.posterior == "none")}

    def predictors() -> Iterator[tuple[nn.Module, int]]:
        for number, (member, drawn, own) in enumerate(zip(members, scaled, models, strict=True)):
            member.apply_to(own)
            if number in points or (member.posterior == "tensor" and not member.drawable):
                yield own, max(samples, 1)
                continue
            generator = _generator(seed)
            for _ in range(samples):
                own.load_state_dict({**own.state_dict(), **drawn.sample(generator)})
                yield own, 1

    try:
        return _mean(predictors(), source)
    finally:
        for member, own in zip(members, models, strict=True):
            member.apply_to(own)


def _scaled(compressed: Compressed, scale: float) -> Compressed:
    """The same network with every sigma multiplied by ``scale``; 0 is the point estimate."""
    if not (math.isfinite(scale) and scale >= 0):
        raise ConfigError(f"sigma_scale is {scale}: allowed is a finite number of at least 0")
    sigma = compressed.sigma
    if scale == 1 or sigma is None:
        return compressed
    return replace(compressed, sigma_codes=None, weight_sigma=sigma * scale)


def _generator(seed: int) -> torch.Generator:
    try:
        return torch.Generator().manual_seed(seed)
    except (RuntimeError, TypeError, ValueError) as error:
        raise ConfigError(f"seed is {seed!r}: allowed is a whole number from 0 to 2^63 - 1") from error


class _Pass(NamedTuple):
    """What one network predicts."""

    log_p: Tensor
    entropy: Tensor
    targets: Tensor | None
    checksums: Tensor


@torch.no_grad()
def _mean(networks: Iterable[tuple[nn.Module, int]], source: Source) -> Predictions:
    """The mean prediction, with one pass over the data per network; each counts so many times."""
    passes = ((_one_pass(model, source), count) for model, count in networks)
    first, count = next(passes)
    log_total, entropy = first.log_p + math.log(count), count * first.entropy
    classes = [first.log_p.argmax(1)] * count
    for number, (now, count) in enumerate(passes, 2):
        if (own := now.log_p.shape[1]) != (whole := log_total.shape[1]):
            raise DataError(f"one network has {own} classes and the first {whole}: they cannot vote together")
        if now.log_p.shape != log_total.shape or not torch.equal(now.checksums, first.checksums):
            raise DataError(
                f"{source.name}: pass {number} gave other examples than the first: pass a loader "
                "that gives the same ones in the same order each time (shuffle=False, no random "
                "augmentation)"
            )
        log_total = torch.logaddexp(log_total, now.log_p + math.log(count))
        entropy = entropy + count * now.entropy
        classes += [now.log_p.argmax(1)] * count
    samples = len(classes)
    log_p = log_total - math.log(samples)
    return Predictions(
        log_probabilities=log_p,
        expected_entropy=entropy / samples,
        disagreement=1 - (torch.stack(classes) == log_p.argmax(1)).sum(0).double() / samples,
        targets=first.targets,
        samples=samples,
        checksums=first.checksums,
    )


def _one_pass(model: nn.Module, source: Source) -> _Pass:
    found = []
    with evaluating(model), full_float32():
        for number, batch in enumerate(source.batches(), 1):
            where = f"{source.name}, batch {number}"
            log_p = _log_probabilities(logits(batch.through(model, where)), batch, where)
            first = next((x for x in batch.tensors() if x.dim() > 0), torch.zeros(batch.size))
            # NaN is equal to no other one, and some networks take it for a missing number.
            checksums = first.reshape(len(first), -1).double().nan_to_num(0.0, 0.0, 0.0).sum(1).cpu()
            found.append(_Pass(log_p, _entropy(log_p), _targets(batch.target, log_p, where), checksums))
    if not found:
        raise DataError(
            f"{source.name} gave no batch: pass a loader that is not empty and can be iterated repeatedly"
        )
    if len({(one.log_p.shape[1], one.targets is None) for one in found}) > 1:
        raise DataError(f"{source.name}: batches differ in their number of classes, or in having labels")
    labels = [one.targets for one in found if one.targets is not None]
    return _Pass(
        torch.cat([one.log_p for one in found]),
        torch.cat([one.entropy for one in found]),
        torch.cat(labels) if labels else None,
        torch.cat([one.checksums for one in found]),
    )


def _log_probabilities(output: Any, batch: Batch, where: str) -> Tensor:
    """Log softmax in float64: float32 has no probabilities between 1 - 6e-8 and 1."""
    if not isinstance(output, Tensor) or output.dim() != 2 or len(output) != batch.size:
        gave = tuple(output.shape) if isinstance(output, Tensor) else f"a {type(output).__name__}"
        raise DataError(
            f"{where}: the network gave {gave} for {batch.size} examples: allowed is one score per class for "
            "each example"
        )
    log_p = output.cpu().double().log_softmax(1)
    if not log_p.isfinite().all():
        raise DataError(
            f"{where}: the network gave a number that is not finite: check the inputs, or use a smaller "
            "sigma_scale"
        )
    return log_p


def _targets(target: Any, log_p: Tensor, where: str) -> Tensor | None:
    if target is None:
        return None
    examples, classes = log_p.shape
    good = isinstance(target, Tensor) and target.shape == (examples,) and not target.is_floating_point()
    if not good or ((target < 0) | (target >= classes)).any():
        raise DataError(
            f"{where}: the target is not a class from 0 to {classes - 1} for each example: uncertainty is "
            "measured for classifiers with one label per example"
        )
    return target.cpu().long()


def missing_probability(log_probabilities: Tensor) -> Tensor:
    """``1 - max_k p_k`` as the sum over the other classes: near 1 the difference would round to 0.

    >>> missing_probability(torch.tensor([[0.0, -50.0]])).item() > 0
    True
    """
    largest = log_probabilities.argmax(1, keepdim=True)
    return log_probabilities.exp().scatter(1, largest, 0.0).sum(1)


def _entropy(log_p: Tensor) -> Tensor:
    """``-sum_k p_k log p_k``."""
    return -(log_p.exp() * log_p).sum(1)
