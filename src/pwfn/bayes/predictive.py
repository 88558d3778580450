"""The predictive sigma: the noise on the final weights whose mean prediction is the most likely.

Training has a sigma of its own, the noise that rounding tolerates. This one is fitted after the last fixing,
with every weight at its centre: one number per tensor, in a file one byte each.
"""

from __future__ import annotations

import contextlib
import copy
import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Sequence, Sized
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from pwfn.bayes.batches import BATCH_ERRORS, Batch, Source, cut, device_of, gathered
from pwfn.bayes.distributed import usable_device
from pwfn.bayes.method import Method, phases
from pwfn.bayes.network import WeightNetwork, hollow_copy
from pwfn.bayes.objective import Objective, autocast, class_scores, evaluating, is_logits
from pwfn.bayes.randomness import seeded, undisturbed
from pwfn.bayes.sigma import root_mean_square
from pwfn.config import Config, Precision
from pwfn.config.seeds import seed_from
from pwfn.errors import ConfigError, DataError, cause
from pwfn.file.compressed import Compressed
from pwfn.file.content import codes_of, name_of, sigma_of
from pwfn.zoo.epochs import batched

LogLikelihood = Callable[[Any, Any], Tensor]
"""A function of output and target: the log-probability of each example's target, in nats."""

MIXED_SHARE = 0.75
"""Of an example in the inputs of the fit; the rest is its neighbour. See :func:`fit_posterior`."""

_STEPS, _DRAWS, _LEARNING_RATE = 64, 4, 0.15
_EXAMPLES = 64  # per step; four draws of each are in memory together
_CHECK_EXAMPLES, _CHECK_DRAWS = 1024, 8  # examples that are not in the fit, and draws for each
_FEWEST = 8  # examples to check with: the spread of fewer says nothing
_START, _LARGEST, _SMALLEST = 0.1, 2.0, 2.0**-8  # of sigma, in root mean squares of the tensor
_SCALES = (1.0, 0.7, 0.5, 0.35, 0.25, 0.18, 0.125)  # of the fitted sigmas, tried in this order
_ERRORS = 2.0  # a difference of fewer standard errors is none
_SUM_TOLERANCE = 0.01  # bfloat16 probabilities sum to 1 within this


def fit_posterior(
    compressed: Compressed,
    model: nn.Module,
    loader: Iterable[Any],
    *,
    original: nn.Module | None = None,
    unseen: bool = False,
    log_likelihood: LogLikelihood | None = None,
    seed: int = 0,
    device: torch.device | str | None = None,
    precision: Precision | str = Precision.FP32,
    before_batch: Callable[[], None] | None = None,
) -> Compressed:
    """The network with a predictive sigma for every tensor, fitted with all weights at their centres.

    The sigmas s maximise the likelihood of the mean prediction of K draws (in nats, by Adam)::

        sum_j log( 1/K sum_k p(y_j | x_j, w + s eps_k) )        eps_k ~ N(0, 1), in pairs eps, -eps

    A network is sure of the examples that it was trained on, right or wrong: by their likelihood, the best
    sigma is almost zero. So the inputs are mixed, ``0.75 x_j + 0.25 x_(j-1)``, with the target of the first;
    whole numbers, such as tokens, stay as they are.

    Then all sigmas are multiplied by one scale from 1 to 1/8: the smallest that is as good as the best by the
    likelihood of 1,024 examples that were not in the fit, within two standard errors, with 8 draws. If it is
    no better than the point estimate, every sigma is zero: no posterior is worth drawing from.

    Args:
        compressed: the network; its values do not change.
        model: any network of that architecture; it is not changed.
        loader: training data in random order, labelled unless ``original`` is given. The first 1,024 examples
            are for the check, 64 of each of the 64 batches after them for the fit; of fewer data, a quarter
            is for the check. Of fewer than 32 examples, every sigma is zero.
        original: the network before compression, whose softmax output is then the target, not the labels.
        unseen: True if the network was not trained on these data. Inputs are then not mixed.
        log_likelihood: for networks that are no classifiers; by default ``log softmax`` at the target.
        seed: of the noise. The same seed on the same machine gives the same bits.
        device: where to run; the model's own unless given.
        precision: of the forward and backward pass.
        before_batch: called before every batch; it may raise.

    >>> from pwfn.layout import Layout
    >>> model = nn.Linear(1, 2, bias=False)
    >>> small = Compressed.of(Layout.of(model), torch.tensor([4.0, -4.0]), None, {})
    >>> data = [(torch.ones(16, 1), torch.arange(16) % 4 // 3) for _ in range(8)]  # wrong once in four
    >>> fitted = fit_posterior(small, model, data, unseen=True)
    >>> bool(fitted.sigma[0] > 1), fit_posterior(small, model, data[:4], unseen=True).posterior
    (True, 'tensor')
    """
    if not isinstance(compressed, Compressed):
        raise DataError(f"compressed is a {type(compressed).__name__}: allowed is what pwfn.load returns")
    for name, network in (("model", model), ("original", original)):
        if not isinstance(network, nn.Module) and (name == "model" or network is not None):
            raise DataError(f"{name} is a {type(network).__name__}: allowed is a torch.nn.Module")
    if precision not in tuple(Precision):
        allowed = ", ".join(Precision)
        raise ConfigError(f"precision is {precision!r}: allowed is one of {allowed}")
    where = usable_device(device) if device is not None else device_of(model)
    place = compressed.apply_to(copy.deepcopy(model)).to(where)
    likelihood = log_likelihood or class_log_likelihood
    source = Source("data of the posterior", batched(loader), where)
    taught_by = copy.deepcopy(original).to(where).eval() if original is not None else None
    with seeded(seed_from("posterior", seed), where), undisturbed(source):
        net = DrawnNetwork(place, compressed)
        fit, check, most = _divided(source)
        target = _Target(taught_by, unseen, source.name, most)
        job = _Fit(net, likelihood, target, Precision(precision), seed, before_batch or (lambda: None))
        with evaluating(net):
            sigma = torch.zeros_like(net.units) if fit is None else job.fitted(fit)
            codes = job.checked(sigma, check)
    return replace(compressed, sigma_codes=codes)


def wants_posterior(net: Method, objective: Objective) -> bool:
    """Whether a run fits a predictive sigma: where it trains a classifier, but not its sigma.

    The fit costs about as much as a hundred passes over a thousand examples. Beside training that is little;
    beside a run that trains nothing it is most of the time, so that such files get theirs when asked for.
    """
    settings = net.settings
    trains = any(phase.epochs for phase in phases(settings))
    trains_sigma = net.has_posterior and settings.training.sigma_learning_rate is not None
    return objective.classifies and trains and not trains_sigma


def run_posterior(
    compressed: Compressed,
    net: Method,
    train: Source,
    objective: Objective,
    original: nn.Module,
    before_batch: Callable[[], None] | None = None,
) -> tuple[int, ...] | None:
    """The predictive sigmas of a run's network as codes, where one is wanted and there are class scores."""
    batch = next(train.batches(0), None) if wants_posterior(net, objective) else None
    if batch is None:
        return None
    scores = class_scores(batch.through(original, "the first batch"))
    taught = objective.teacher is not None or batch.target is None
    if not is_logits(scores) or not (taught or _is_class_target(batch.target, scores)):
        return None
    return fit_posterior(
        *(compressed, original, train.loader),
        original=original if taught else None,
        log_likelihood=lambda output, target: class_log_likelihood(output, objective.labels(target)),
        seed=net.settings.seed,
        precision=net.settings.training.precision,
        before_batch=before_batch,
    ).sigma_codes


def class_log_likelihood(output: Any, target: Any) -> Tensor:
    """``log softmax(output)`` at the target's class; for probabilities as target, their mean of it.

    Classes lie along axis 1; class -100 counts as certain, so that it has no influence.

    >>> class_log_likelihood(torch.zeros(1, 4), torch.tensor([2])).exp().item()
    0.25
    """
    scores = class_scores(output)
    if not is_logits(scores):
        gave = tuple(scores.shape) if isinstance(scores, Tensor) else f"a {type(scores).__name__}"
        raise DataError(
            f"the network gave {gave}, not one score per class: give pwfn.fit_posterior a log_likelihood of "
            "its own"
        )
    if not _is_class_target(target, scores):
        raise DataError(
            f"the targets are {tuple(target.shape)} {name_of(target.dtype)} and no probabilities of "
            f"{scores.shape[1]} classes: give pwfn.fit_posterior a log_likelihood of its own"
        )
    log_p = scores.float().log_softmax(1)
    if target.is_floating_point():
        return (target * log_p).sum(1)
    return -F.nll_loss(log_p, target, reduction="none")


def _is_class_target(target: Any, scores: Tensor) -> bool:
    """False for targets of regression and several labels at once: numbers, but no probabilities."""
    if not isinstance(target, Tensor) or not target.is_floating_point():
        return True  # classes
    if target.shape != scores.shape or bool((target < 0).any()):
        return False
    return bool(((target.sum(1) - 1).abs() < _SUM_TOLERANCE).all())


class DrawnNetwork(WeightNetwork):
    """The network with weights ``w + s eps``, one s per tensor; those of its centres without noise."""

    values: Tensor

    def __init__(self, model: nn.Module, compressed: Compressed) -> None:
        nn.Module.__init__(self)
        self.settings, self.layout, self.frozen = Config(), compressed.layout, []
        self.model = hollow_copy(model, self.layout).requires_grad_(False)
        self._place(False)
        values = compressed.values()
        self.register_buffer("values", values.to(device_of(model)), persistent=False)
        whole = root_mean_square(values) or 1.0
        self.units = torch.tensor([root_mean_square(values[e.span]) or whole for e in self.layout.entries])
        self.sigma, self.noise = torch.zeros_like(self.units), torch.zeros(0)

    def weights(self) -> dict[str, Tensor]:
        """The weights of one pass, by name."""
        if not self.noise.numel():
            return self.layout.views(self.values)
        triples = zip(
            self.layout.pieces(self.values), self.sigma, self.layout.pieces(self.noise), strict=True
        )
        return self.layout.named([w + s * eps for w, s, eps in triples])


@dataclass(frozen=True)
class _Target:
    """The inputs of the fit, and what they should predict."""

    original: nn.Module | None
    unseen: bool
    name: str
    most: int  # examples in memory together

    @torch.no_grad()
    def __call__(self, batch: Batch) -> Batch:
        target = batch.target
        if self.original is not None:
            outputs = [part.through(self.original, self.name) for part in batch.parts(self.most)]
            target = torch.cat([class_scores(output).float().softmax(1) for output in outputs])
        elif target is None:
            raise DataError(
                f"{self.name} have no labels: give the network before compression (original= or --weights)"
            )
        return replace(batch if self.unseen else batch.mixed(MIXED_SHARE), target=target)


@dataclass(frozen=True)
class _Fit:
    net: DrawnNetwork
    likelihood: LogLikelihood
    target: _Target
    precision: Precision
    seed: int
    before_batch: Callable[[], None]

    def fitted(self, batches: Iterator[Batch]) -> Tensor:
        """One sigma per tensor, by the likelihood of mean predictions."""
        units = self.net.units.to(self.net.device)
        logs = torch.full_like(units, math.log(_START)).requires_grad_()
        optimizer = torch.optim.Adam([logs], _LEARNING_RATE, betas=(0.9, 0.95))
        scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, _STEPS)
        step = -1
        for step, raw in zip(range(_STEPS), batches, strict=False):
            self.before_batch()
            optimizer.zero_grad()
            batch = self.target(raw.first(_EXAMPLES))
            # Pairs of opposite signs: what is linear in the noise cancels, and the gradient is less noisy.
            draws = [sign * eps for eps in self._noise("fit", step, _DRAWS // 2) for sign in (1, -1)]
            for part in batch.parts(self.target.most):
                self.net.sigma = units * logs.exp()
                log_p = self._log_p(part, draws)
                if not log_p.isfinite().all():  # because of the noise, or of the data
                    self._points(part)
                (-log_p.sum() / batch.size).backward()
            logs.grad = torch.nan_to_num(logs.grad) if logs.grad is not None else None
            optimizer.step()
            scheduler.step()
            with torch.no_grad():
                logs.clamp_(max=math.log(_LARGEST))
        if step < 0:
            raise DataError(f"{self.target.name} have fewer batches than their length says: correct it")
        relative = logs.detach().exp()
        return torch.where(relative < _SMALLEST, 0.0, relative).cpu() * self.net.units

    @torch.no_grad()
    def checked(self, sigma: Tensor, batches: Sequence[Batch]) -> tuple[int, ...]:
        """The codes of the smallest scale of sigma that is as good as the best one; else zeros."""
        prepared = [self.target(batch) for batch in batches]
        points = torch.cat([self._points(batch) for batch in prepared])
        tried, gains = [codes_of(scale * sigma) for scale in _SCALES], []
        for codes in tried:
            self.net.sigma = sigma_of(codes).to(self.net.device, torch.float32)
            drawn = []
            for number, batch in enumerate(prepared):
                self.before_batch()
                noise = self._noise("check", number, _CHECK_DRAWS)
                drawn.append(self._per_example(batch, noise))
            gain = torch.cat(drawn) - points
            gains.append(gain.nan_to_num(-math.inf))
            if not equals_best(gains):  # nor will smaller noise be, whose gain goes to zero
                break
        return chosen(gains, tried)

    @torch.no_grad()
    def _points(self, batch: Batch) -> Tensor:
        """The log-likelihood of each example by the point estimate, which must be finite."""
        found = self._per_example(batch, [])
        if bad := int((~found.isfinite()).sum()):
            raise DataError(
                f"{self.target.name}: without noise the likelihood of {bad:,} of {batch.size:,} examples is "
                "not finite: check their inputs and targets"
            )
        return found

    def _per_example(self, batch: Batch, draws: Sequence[Tensor]) -> Tensor:
        """Pixels or tokens of one example depend on each other: only their sums are independent numbers."""
        logs = (self._log_p(part, draws).double() for part in batch.parts(self.target.most))
        return torch.cat([log_p.reshape(len(log_p), -1).sum(1) for log_p in logs])

    def _log_p(self, batch: Batch, draws: Sequence[Tensor]) -> Tensor:
        """The log of the mean probability of each target; of the point estimate for no draws."""
        logs = []
        for noise in draws or [torch.zeros(0)]:
            self.net.noise = noise
            with autocast(self.net.device, self.precision):
                output = batch.through(self.net, self.target.name)
            if self.likelihood is class_log_likelihood:
                Objective(F.cross_entropy).check_labels(output, batch, self.target.name)
            try:
                found = self.likelihood(output, batch.target)
            except BATCH_ERRORS as error:
                raise DataError(
                    f"{self.target.name}: the likelihood cannot take output and target: {cause(error)}"
                ) from error
            if not isinstance(found, Tensor) or found.shape[:1] != (batch.size,):
                raise DataError(f"{self.target.name}: the likelihood is not one number for each example")
            logs.append(found)
        return torch.stack(logs).logsumexp(0) - math.log(len(logs))

    def _noise(self, what: str, number: int, draws: int) -> list[Tensor]:
        """Independent noise of each draw."""
        device = self.net.device
        generator = torch.Generator(device).manual_seed(seed_from("posterior", what, self.seed, number))
        shape, dtype = self.net.values.shape, self.net.values.dtype
        return [torch.randn(shape, generator=generator, device=device, dtype=dtype) for _ in range(draws)]


def chosen(gains: Sequence[Tensor], tried: Sequence[tuple[int, ...]]) -> tuple[int, ...]:
    """The last of ``tried``, from large to small noise, that is within two standard errors of the best.

    ``gains`` are log-likelihoods minus those of the point estimate, one tensor of examples for each. The
    likelihood hardly changes around its best noise, while the accuracy falls with the square of the noise: so
    the smallest of equals is right. If none is better than the point estimate by two standard errors: zeros.

    >>> near, far = torch.tensor([1.0, 2.0, 3.0]), torch.tensor([0.0, 0.1, 0.2])
    >>> chosen([near + torch.tensor([0.1, -0.1, 0.1]), near, far], [(3,), (2,), (1,)])
    (2,)
    """
    for number in range(len(gains), 0, -1):
        mean, error = _mean_and_error(gains[number - 1])
        if equals_best([*gains, gains[number - 1]]) and mean > _ERRORS * error:
            return tried[number - 1]
    return (0,) * len(tried[0])


def equals_best(gains: Sequence[Tensor]) -> bool:
    """Whether the last is within two standard errors of the best, by paired differences.

    >>> equals_best([torch.tensor([1.0, 0.0]), torch.tensor([0.0, 0.5])])
    True
    """
    behind, error = _mean_and_error(max(gains, key=lambda gain: float(gain.mean())) - gains[-1])
    return behind <= _ERRORS * error


def _mean_and_error(numbers: Tensor) -> tuple[float, float]:
    return float(numbers.mean()), float(numbers.std(correction=0)) / math.sqrt(len(numbers))


def _divided(source: Source) -> tuple[Iterator[Batch] | None, list[Batch], int]:
    """Batches for the fit, and others for the check: the first examples; None, and all, of too few data.

    Of few batches the fit takes one part after the other and sees all examples; small ones are joined.
    The last number is the size of the first, which fits in memory.
    """
    read, begun, length = (batch for batch in source.batches(0) if batch.size), [], 0
    if (first := next(read, None)) is None:
        raise DataError(f"{source.name} are empty: give at least one batch")
    most = first.size
    batches = gathered(itertools.chain([first], read), _EXAMPLES)
    if isinstance(source.loader, Sized):
        with contextlib.suppress(TypeError):  # a DataLoader over a data set without a length
            length = len(source.loader) // -(-_EXAMPLES // most)
    for batch in batches:
        begun.append(batch)
        if sum(each.size for each in begun) >= _CHECK_EXAMPLES:
            break
    if length >= _STEPS + len(begun):
        return batches, cut(begun, _CHECK_EXAMPLES)[0], most
    begun += itertools.islice(batches, _STEPS)
    wanted = min(_CHECK_EXAMPLES, sum(batch.size for batch in begun) // 4)
    if wanted < _FEWEST:
        return None, begun, most
    check, rest = cut(begun, wanted)
    turns = itertools.zip_longest(*(batch.parts(_EXAMPLES) for batch in rest))
    return itertools.cycle([part for turn in turns for part in turn if part is not None]), check, most
