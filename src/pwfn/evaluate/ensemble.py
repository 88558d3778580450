"""What one network, or many draws from a posterior, say of every example."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Any

import torch
from torch import Tensor, nn

from pwfn.bayes.batches import Batch, Source
from pwfn.bayes.distributed import usable_device
from pwfn.bayes.objective import evaluating
from pwfn.errors import ConfigError, DataError
from pwfn.evaluate.score import full_float32
from pwfn.file.compressed import Compressed

Settle = Callable[[nn.Module], None]
"""Called on every drawn network before it is scored: to gather BatchNorm statistics again, for one."""


_ROUNDING_NATS = 1e-13


class Score(StrEnum):
    """Numbers that are larger the less sure a prediction is."""

    MAX_PROBABILITY = "max_probability"  # 1 - max_k p_k
    PREDICTIVE_ENTROPY = "predictive_entropy"  # H(mean p)
    MUTUAL_INFORMATION = "mutual_information"  # H(mean p) - mean H(p)


@dataclass(frozen=True, eq=False)
class Predictions:
    """The mean prediction of some draws for every example, and how far the draws differ; on the CPU.

    All of float64, entropies in nats. One network is one draw: its mutual information is 0.
    """

    log_probabilities: Tensor  # log of the mean p; examples × classes
    expected_entropy: Tensor  # mean H(p) of the draws
    disagreement: Tensor  # share of draws whose class is not the mean prediction's
    variation_ratio: Tensor  # share of draws whose class is not the most frequent one
    draws_right: Tensor | None  # share of draws whose class is the target
    targets: Tensor | None  # None: the data have no labels
    samples: int
    marks: Tensor  # the sum of each example's input: tells whether two passes saw the same data

    @property
    def probabilities(self) -> Tensor:
        """Mean p."""
        return self.log_probabilities.exp()

    @property
    def predictive_entropy(self) -> Tensor:
        """``H(mean p) = -sum_k p_k log p_k``: all the doubt there is."""
        return _entropy(self.log_probabilities)

    @property
    def mutual_information(self) -> Tensor:
        """``H(mean p) - mean H(p) >= 0``: the doubt that comes of not knowing the weights."""
        difference = self.predictive_entropy - self.expected_entropy
        # Of two rounded numbers: what is left of equal ones, of either sign, is not information.
        return torch.where(difference > _ROUNDING_NATS, difference, 0.0)

    def uncertainty(self, score: Score) -> Tensor:
        """One number per example, larger where the prediction is less sure."""
        if score is Score.MAX_PROBABILITY:
            return missing_probability(self.log_probabilities)
        if score is Score.PREDICTIVE_ENTROPY:
            return self.predictive_entropy
        return self.mutual_information

    def chosen(self, index: Tensor) -> Predictions:
        """Those for some of the examples."""
        return replace(
            self,
            log_probabilities=self.log_probabilities[index],
            expected_entropy=self.expected_entropy[index],
            disagreement=self.disagreement[index],
            variation_ratio=self.variation_ratio[index],
            draws_right=self.draws_right[index] if self.draws_right is not None else None,
            targets=self.targets[index] if self.targets is not None else None,
            marks=self.marks[index],
        )


def point(
    model: nn.Module,
    loader: Iterable[Any],
    device: torch.device | str | None = None,
    *,
    name: str = "test data",
) -> Predictions:
    """What one network says of every example, in evaluation mode; it is moved to the device, if one is given.

    >>> loader = [(torch.zeros(3, 2), torch.tensor([0, 1, 1]))]
    >>> found = point(nn.Linear(2, 4), loader)
    >>> found.probabilities.shape, found.mutual_information.tolist()
    (torch.Size([3, 4]), [0.0, 0.0, 0.0])
    """
    return _gathered(iter([model]), Source(name, loader, _placed(model, device)))


def ensemble(
    compressed: Compressed,
    model: nn.Module,
    loader: Iterable[Any],
    samples: int = 20,
    seed: int = 0,
    device: torch.device | str | None = None,
    *,
    sigma_scale: float = 1.0,
    settle: Settle | None = None,
    name: str = "test data",
) -> Predictions:
    """What the mean of draws from a network's posterior says of every example: ``1/S sum_s softmax(f_s(x))``.

    One pass over the data per draw; what is kept has examples × classes numbers, however many draws
    there are. ``sigma_scale`` is a temperature t on sigma, ``w = mu + t sigma eps``: the same noise
    for every t. Afterwards the model has the point estimate's weights, as ``compressed.apply_to``
    leaves it. The loader must give the same examples in the same order in every pass.
    """
    if samples < 1:
        raise DataError(f"samples is {samples}: allowed is at least 1")
    scaled = with_sigma_scale(compressed, sigma_scale)
    source = Source(name, loader, _placed(model, device))
    compressed.apply_to(model)
    try:
        return _gathered(_drawn(scaled, model, samples, seed, settle), source)
    finally:
        compressed.apply_to(model)


def with_sigma_scale(compressed: Compressed, scale: float) -> Compressed:
    """The same network with every sigma multiplied by ``scale``; 0 is the point estimate.

    >>> from pwfn.layout import Layout
    >>> small = Compressed.of(Layout.of(nn.Linear(1, 1, bias=False)), torch.ones(1), torch.ones(1), {})
    >>> with_sigma_scale(small, 0.5).sigma.tolist()
    [0.5]
    """
    if not (math.isfinite(scale) and scale >= 0):
        raise ConfigError(f"sigma_scale is {scale}: allowed is a finite number of at least 0")
    each, centres = compressed.weight_sigma, compressed.centre_sigma
    return replace(
        compressed,
        weight_sigma=each * scale if each is not None else None,
        centre_sigma=tuple(sigma * scale for sigma in centres) if centres is not None else None,
    )


def _drawn(
    compressed: Compressed, model: nn.Module, samples: int, seed: int, settle: Settle | None
) -> Iterator[nn.Module]:
    """The model with the weights of one draw after another."""
    generator = torch.Generator().manual_seed(seed)
    for _ in range(samples):
        model.load_state_dict({**model.state_dict(), **compressed.sample(generator)})
        if settle is not None:
            settle(model)
        yield model


@dataclass
class _Rows:
    """Sums over the draws so far, for the examples of one batch."""

    log_total: Tensor  # log sum_s p_s
    entropy: Tensor
    votes: Tensor  # examples × classes: draws that chose each
    target: Tensor | None
    marks: Tensor

    @classmethod
    def of(cls, log_p: Tensor, batch: Batch, where: str) -> _Rows:
        target = batch.target
        if target is not None:
            target = _checked_target(target, log_p.shape, where)
        none = torch.zeros(log_p.shape, dtype=torch.int32)
        rows = cls(log_p.clone(), torch.zeros(len(log_p), dtype=torch.float64), none, target, _marks(batch))
        rows._count(log_p)
        return rows

    def add(self, log_p: Tensor, batch: Batch, where: str) -> None:
        if log_p.shape != self.log_total.shape or not torch.equal(_marks(batch), self.marks):
            raise DataError(_CHANGED.format(where=where))
        torch.logaddexp(self.log_total, log_p, out=self.log_total)
        self._count(log_p)

    def _count(self, log_p: Tensor) -> None:
        self.entropy += _entropy(log_p)
        chosen = log_p.argmax(1, keepdim=True)
        self.votes.scatter_add_(1, chosen, torch.ones_like(chosen, dtype=torch.int32))


_CHANGED = (
    "{where}: other examples than in the pass before: pass a loader that gives the same ones in the same "
    "order each time (shuffle=False, no random augmentation)"
)


@torch.no_grad()
def _gathered(networks: Iterator[nn.Module], source: Source) -> Predictions:
    """One pass over the data for each network."""
    rows: list[_Rows] = []
    samples = 0
    for samples, model in enumerate(networks, 1):
        number = 0
        with evaluating(model), full_float32():
            for number, batch in enumerate(source.batches(), 1):
                where = f"{source.name}, batch {number}"
                log_p = _log_probabilities(batch.through(model, where), batch, where)
                if samples == 1:
                    rows.append(_Rows.of(log_p, batch, where))
                elif number > len(rows):
                    raise DataError(_CHANGED.format(where=where))
                else:
                    rows[number - 1].add(log_p, batch, where)
        if number < max(len(rows), 1):
            raise DataError(
                f"{source.name} gave {number} batches in pass {samples} and {len(rows)} in the first: pass a "
                "loader that is not empty and can be iterated again and again"
            )
    return _predictions(rows, samples, source.name)


def _predictions(rows: list[_Rows], samples: int, name: str) -> Predictions:
    if len({(row.log_total.shape[1], row.target is None) for row in rows}) > 1:
        raise DataError(f"{name}: batches differ in their number of classes, or in having labels")
    log_p = torch.cat([row.log_total for row in rows]).sub_(math.log(samples))
    votes = torch.cat([row.votes for row in rows])
    labels = [row.target for row in rows if row.target is not None]
    targets = torch.cat(labels) if labels else None
    chosen = log_p.argmax(1)
    return Predictions(
        log_probabilities=log_p,
        expected_entropy=torch.cat([row.entropy for row in rows]) / samples,
        disagreement=1 - _share(votes, chosen, samples),
        variation_ratio=1 - votes.amax(1).double() / samples,
        draws_right=_share(votes, targets, samples) if targets is not None else None,
        targets=targets,
        samples=samples,
        marks=torch.cat([row.marks for row in rows]),
    )


def _share(votes: Tensor, classes: Tensor, samples: int) -> Tensor:
    return votes.gather(1, classes[:, None]).squeeze(1).double() / samples


def _log_probabilities(output: Any, batch: Batch, where: str) -> Tensor:
    """Log softmax in float64: float32 has no probabilities between 1 - 6e-8 and 1."""
    if not isinstance(output, Tensor) or output.dim() != 2 or len(output) != batch.size:
        gave = tuple(output.shape) if isinstance(output, Tensor) else f"a {type(output).__name__}"
        raise DataError(
            f"{where}: the network gave {gave} for {batch.size} examples: allowed is a score per class for "
            "each"
        )
    log_p = output.cpu().double().log_softmax(1)
    if not log_p.isfinite().all():
        raise DataError(
            f"{where}: the network gave a number that is not finite: check the inputs, or use a smaller "
            "sigma_scale"
        )
    return log_p


def _checked_target(target: Any, shape: torch.Size, where: str) -> Tensor:
    good = isinstance(target, Tensor) and target.shape == shape[:1] and not target.is_floating_point()
    if not good or ((target < 0) | (target >= shape[1])).any():
        raise DataError(
            f"{where}: the target is not a class from 0 to {shape[1] - 1} for each example: uncertainty is "
            "measured for classifiers with one label per example"
        )
    return target.cpu().long()


def _marks(batch: Batch) -> Tensor:
    first = next(x for x in batch.tensors() if x.dim() > 0)
    return first.reshape(len(first), -1).double().sum(1).cpu()


def missing_probability(log_probabilities: Tensor) -> Tensor:
    """``1 - max_k p_k`` as the sum of the other classes' p: near 1 the difference would be rounded to 0.

    >>> missing_probability(torch.tensor([[0.0, -50.0]])).item() > 0
    True
    """
    largest = log_probabilities.argmax(1, keepdim=True)
    return log_probabilities.exp().scatter(1, largest, 0.0).sum(1)


def _entropy(log_p: Tensor) -> Tensor:
    """``-sum_k p_k log p_k``."""
    return -(log_p.exp() * log_p).sum(1)


def _placed(model: nn.Module, device: torch.device | str | None) -> torch.device:
    """Move a model to a device, if one is given, and say where it is."""
    if device is None:
        held = itertools.chain(model.parameters(), model.buffers())
        return next((tensor.device for tensor in held), torch.device("cpu"))
    chosen = usable_device(device)
    model.to(chosen)
    return chosen
