"""A network fixed by conditioning: no labels, no training, a thousand images, seconds to minutes.

All weights go to multiples of one step, layer by layer and column by column; see
:mod:`pwfn.fixing.conditioning.network`. Filters before BatchNorm are scaled first where that pays; see
:mod:`pwfn.fixing.conditioning.scale`. Without a step of its own a run finds one at which the outputs stay
close to those of the original network.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from pwfn.bayes.batches import Batch, cut, is_out_of_memory
from pwfn.bayes.method import Method, WeightState, register
from pwfn.bayes.network import tensors_of
from pwfn.bayes.objective import class_scores, evaluating, is_logits
from pwfn.bayes.sigma import root_mean_square
from pwfn.config import METHOD_DEFAULTS, Config, Number, Section, setting
from pwfn.config.seeds import seed_from
from pwfn.errors import DataError, TooLargeError, WeightError, cause
from pwfn.file.compressed import Compressed
from pwfn.fixing.conditioning.network import Conditioning
from pwfn.fixing.conditioning.scale import scale_filters
from pwfn.fixing.record import FixRecord, FixStep, relative_moves
from pwfn.fixing.step import dyadic, next_dyadic
from pwfn.fixing.unique import entropy_bits
from pwfn.layout import Layout, held, untouched

# Bytes of inputs that pass through the network together. On a CPU few are faster: caches hold them.
_PART_BYTES, _PART_BYTES_CPU, _LARGEST_PART = 2**24, 2**22, 128
_FIRST = 0.6  # of the root mean square of the weights: where the search for a step starts
_TRIES, _MOST_TRIES = 5, 15  # the second: while no step was within the tolerance
_TRIED = 512  # images for a try: enough to choose a step with
_USED = 0.75  # of them; networks are compared on the others
_POWER = 2.0  # the distance grows about so fast with the step: rounding noise is step^2 / 12
_SHARE = 0.7  # of an image that networks are compared on; the rest is of another one
_FEW = 64  # fewer inputs are worth a warning
_MANY_BITS = 9.0  # sound networks take 2 to 5 bits, and tiny ones up to 7
_ALIKE = 1e-12  # a variance so small, relative to the square, is rounding
_CLOSE = 1.3  # a distance within this factor of the tolerance ends the search


@dataclass(frozen=True)
class ConditionedOptions(Section):
    """Settings of the method ``conditioned``."""

    _name = "options"
    step: float | None = setting(
        None,
        Number(0, above_low=True, optional=True),
        'distance between values, as a fraction of the root mean square of all weights; "off": by tolerance',
    )
    tolerance: float = setting(
        0.01,
        Number(0, above_low=True),
        "where step is off: squared error of the outputs that is allowed, relative to their variance",
    )
    images: int = setting(1024, Number(1, whole=True), "at most so many training images are used")


@register("conditioned")
class ConditionedNetwork(Method):
    """Any eager model; :meth:`fix` puts all weights in place at once, given some inputs.

    >>> from pwfn.bayes.method import DataProbe
    >>> net = ConditionedNetwork(nn.Linear(4, 2), Config.preset("quick"))
    >>> inputs = [Batch((torch.randn(64, 4),), {}, None)]
    >>> net.data = DataProbe(lambda module: None, lambda: 0.0, lambda count: inputs)
    >>> net.fix(1.0).fixed
    10
    """

    defaults = METHOD_DEFAULTS["conditioned"]
    Options = ConditionedOptions
    has_grid = True
    values: Tensor
    fixed: Tensor
    _tries: dict[float, tuple[float, float]]  # by step: distance and bits, of the network that is adopted
    _unscaled: tuple[str, ...] = ()  # why filters could not be scaled
    _passes, _most_passes = 0, 1  # over all layers: those that are done, and all that there may be

    def __init__(self, model: nn.Module, config: Config | None = None) -> None:
        super().__init__(model, config or Config.preset("quick"))
        start = self.layout.gather(model)
        self.register_buffer("values", start)
        self.register_buffer("fixed", torch.zeros((), dtype=torch.bool, device=start.device))
        # Out of reach of state_dict and to: every try starts from the original, on the CPU.
        self._original = (copy.deepcopy(model).cpu().eval(),)
        self._is_scaled = bool(self.frozen)  # to scale filters changes statistics
        self._adopt(self._original[0])
        if self._root_mean_square == 0:
            raise WeightError("every weight is zero: there is nothing to compress")

    @classmethod
    def layout_of(cls, model: nn.Module, config: Config) -> Layout:
        """What the settings select; also frozen weights, since nothing is trained."""
        given = model.parameters() if isinstance(model, nn.Module) else ()
        frozen = [p for p in given if p.is_floating_point() and not p.requires_grad]
        try:
            for parameter in frozen:
                parameter.requires_grad_()
            return super().layout_of(model, config)
        finally:
            for parameter in frozen:
                parameter.requires_grad_(False)

    def weights(self) -> dict[str, Tensor]:
        """The values."""
        return self.layout.views(self.values)

    def state(self) -> WeightState:
        """The values, and whether they are fixed: all of them are, or none."""
        return WeightState(self.values, fixed=self.fixed.expand(self.values.shape))

    def fix(self, fraction: float) -> FixRecord:
        """Fix all weights at multiples of :attr:`grid_step`; where that is None, it is found first."""
        batches = self._parts(self.options.images)
        with torch.no_grad(), evaluating(self):
            batches[0].through(self, "conditioning")  # refuses a model that its copies would still use
        tried, _ = cut(batches, _TRIED)
        used, kept = cut(tried, math.ceil(_USED * sum(batch.size for batch in tried)))
        kept = [batch.mixed(_SHARE) for batch in kept or used]  # of few, all are both
        searches = self.grid_step is None and self.options.step is None
        self._passes, self._most_passes = 0, _TRIES + 1 if searches else 1
        if not self._is_scaled:
            self._scale_if_smaller(used, kept)
        if self.grid_step is None:
            given = self.options.step
            self.grid_step = dyadic(given * self._root_mean_square) if given else self._found_step(used, kept)
        before = self.values
        self.notes, model = self._conditioned(self.grid_step, batches)
        if searches:
            # The distance of a tiny network is nearly random: that of the try says little about this one.
            tries = 0
            while (distance := self._distance(model, kept)) > _CLOSE * self.options.tolerance:
                if tries == _TRIES:
                    self.notes += (_too_far(distance, self.options.tolerance),)
                    break
                tries += 1
                self.grid_step = next_dyadic(self.grid_step, -2)
                self._most_passes += 1
                self.notes, model = self._conditioned(self.grid_step, batches)
        self.notes += self._unscaled
        count = sum(batch.size for batch in batches)
        if count < _FEW:
            few = "1 input" if count == 1 else f"{count} inputs"
            self.notes += (f"the weights were fixed by only {few}: give some hundred, up to a thousand",)
        if count > 1 and _alike(batches):
            self.notes += (f"all {count:,} inputs are the same: were they read or scaled wrongly?",)
        if searches and (bits := _bits(self.layout, self.layout.gather(model))) > _MANY_BITS:
            self.notes += (f"the outputs need {bits:.1f} bits per weight: are the inputs scaled wrongly?",)
        self.model.load_state_dict(untouched(model, self.layout), strict=False)
        self.values = self.layout.gather(model)
        self.fixed.fill_(True)
        moves = relative_moves(before, self.values)
        step = FixStep(math.nan, 0, self.grid_step, self.layout.size)
        return FixRecord(1.0, self.layout.size, (step,), tuple(moves))

    def finish(self) -> Compressed:
        """The compressed network; it has no posterior."""
        if not bool(self.fixed):
            raise WeightError("no weight is fixed yet: call fix(1.0) first")
        values = held(self.layout, self.values)
        return Compressed.of(self.layout, values, None, untouched(self.model, self.layout))

    def rounded(self) -> ConditionedNetwork:
        """A copy: every weight is in place."""
        return copy.deepcopy(self)

    def _scale_if_smaller(self, used: Sequence[Batch], kept: Sequence[Batch]) -> None:
        """Scale the original's filters if a try shows that this makes the file smaller.

        The function of the network stays the same. Bits at equal distance decide: the distance falls by a
        factor of four for one more bit per weight.
        """
        self._is_scaled = True
        plain = self._original[0]
        model = copy.deepcopy(plain).to(self.device)
        draws = torch.Generator(self.device).manual_seed(seed_from("labels", self.settings.seed))
        try:
            if not scale_filters(model, self.layout, used, partial(_log_likelihood, draws=draws)):
                return
        except Exception as error:  # a network for inference may have no gradients, and raise anything
            if isinstance(error, TooLargeError) or is_out_of_memory(error):
                raise
            self._unscaled = (
                f"filters were not scaled, because the network has no gradients: {cause(error)}",
            )
            return
        self._most_passes += 1 if self._most_passes > 1 else 2  # the search starts with one of the two
        costs, tries = [], []
        for original in (plain, model.cpu()):
            self._adopt(original)
            step = dyadic((self.options.step or _FIRST) * self._root_mean_square)
            distance, bits = self._try(step, used, kept)
            costs.append(bits + 0.5 * math.log2(max(distance, 1e-12)))
            tries.append(self._tries)
        if not costs[1] < costs[0]:
            self._adopt(plain)
            self._tries = tries[0]

    def _adopt(self, original: nn.Module) -> None:
        """Start from this network, which computes the same."""
        self._original = (original,)
        self._root_mean_square = root_mean_square(self.layout.gather(original))
        self._tries = {}

    def _try(self, step: float, used: Sequence[Batch], kept: Sequence[Batch]) -> tuple[float, float]:
        """The distance from the original and the bits per weight at a step; each is computed once."""
        if step not in self._tries:
            _, model = self._conditioned(step, used)
            bits = _bits(self.layout, self.layout.gather(model))
            self._tries[step] = self._distance(model, kept), bits
        return self._tries[step]

    def _found_step(self, used: Sequence[Batch], kept: Sequence[Batch]) -> float:
        """A step at which the outputs are as far from the original's as the tolerance allows, about.

        They are compared on images that the tries do not use, because a wide layer can fit any outputs on the
        images that it was fixed with; and on mixtures of two, because the outputs for an image that the
        network was trained with hardly move, which says little about new ones.
        """
        tolerance = self.options.tolerance
        goal = tolerance / math.sqrt(_CLOSE)  # the middle of what ends the search
        most = math.inf if self._tells(used, kept) else _FIRST / 2 * self._root_mean_square
        step, power = dyadic(min(_FIRST * self._root_mean_square, most)), _POWER
        fine, coarse = 0.0, math.inf  # the largest step within the tolerance, the smallest beyond it
        before: tuple[float, float] | None = None
        for number in range(_MOST_TRIES):
            if number >= _TRIES:  # one large weight makes the root mean square say little about the others
                if fine:
                    break
                self._most_passes += 1
            distance, _ = self._try(step, used, kept)
            if distance <= tolerance:
                fine = max(fine, step)
            else:
                coarse = min(coarse, step)
            if tolerance / _CLOSE <= distance <= tolerance or distance == 0:  # 0: a head of zeros, say
                break
            distance = min(max(distance, tolerance / 1000), tolerance * 1000)
            if before is not None:  # d ~ step^power, through the last two
                slope = math.log(distance / before[1]) / math.log(step / before[0])
                power = min(max(slope, _POWER / 2), _POWER * 2)
            before = step, distance
            factor = min(max((goal / distance) ** (1 / power), 0.25), 4.0)
            step = dyadic(min(max(step * factor, fine), coarse, most))
            if not fine < step < coarse:
                break
        return fine or step

    @torch.no_grad()
    def _tells(self, used: Sequence[Batch], kept: Sequence[Batch]) -> bool:
        """Whether the images that networks are compared on can show that a step is too coarse.

        Fewer than four are those that condition the weights, too: they fit any step. So does one image, or
        several that are alike.
        """
        spread, original = _Spread(), self._original[0].to(self.device)
        for batch in kept:
            output = _output(batch.through(original, "conditioning"))
            if output is not None:
                spread.add(output.double())
        self._original[0].cpu()
        return sum(batch.size for batch in kept) < sum(batch.size for batch in used) and spread.varies

    @torch.no_grad()
    def _conditioned(self, step: float, batches: Sequence[Batch]) -> tuple[tuple[str, ...], nn.Module]:
        """The network at a step, and what the user should know about it."""
        original = self._original[0].to(self.device)
        model = copy.deepcopy(original)
        work = Conditioning(original, model, self.layout, step, frozen=self.frozen)
        work.run(batches, self._at_layer)
        self._passes += 1
        self._original[0].cpu()
        return work.notes(), model

    def _at_layer(self, layer: int, layers: int) -> None:
        """Count the layers of all passes that there may be, so that the time left is not that of one."""
        if self.on_layer is not None:
            self.on_layer(self._passes * layers + layer, self._most_passes * layers)

    @torch.no_grad()
    def _distance(self, model: nn.Module, batches: Sequence[Batch]) -> float:
        """Squared error of the outputs relative to their variance, ``sum |z' - z|^2 / sum |z - mean|^2``.

        The mean is that of each output over the images: an offset that all share says nothing about one.
        Class scores are compared after their mean over the classes is subtracted, which softmax ignores.
        Unlike a divergence it does not depend on how confident the network is.
        """
        original = self._original[0].to(self.device)
        error = torch.zeros((), dtype=torch.float64, device=self.device)
        spread = _Spread()
        for batch in batches:
            with torch.random.fork_rng([self.device] if self.device.type == "cuda" else []):
                before = _output(batch.through(original, "conditioning"))
            now = _output(batch.through(model, "conditioning"))  # the same numbers, if it draws any
            if before is None or now is None:
                raise DataError(
                    "the network's output has no tensor of real numbers to compare networks by: "
                    "set options.step, which needs no comparison"
                )
            if not bool(torch.isfinite(before).all()):
                raise DataError("the network's outputs are not finite: check the images, or the network")
            if is_logits(before):
                before, now = (z - z.mean(1, keepdim=True) for z in (before, now))
            error += (now.double() - before.double()).square().sum()
            spread.add(before.double())
        self._original[0].cpu()
        distance = float(error) / (spread.total() or 1.0)
        return distance if math.isfinite(distance) else math.inf  # too coarse

    def _parts(self, count: int) -> list[Batch]:
        """The first training images, in small parts."""
        if self.data is None:
            raise DataError("conditioning needs inputs: set net.data, or call pwfn.compress")
        parts: list[Batch] = []
        left, most = count, _PART_BYTES_CPU if self.device.type == "cpu" else _PART_BYTES
        for batch in self.data.examples(count):
            size = min(batch.size, left)
            each = sum(x.numel() * x.element_size() for x in batch.tensors()) // max(batch.size, 1)
            stride = min(max(most // max(each, 1), 1), _LARGEST_PART)
            parts += [batch.part(at, min(at + stride, size)) for at in range(0, size, stride)]
            left -= size
        if not parts:
            raise DataError("there is no image to compress with: give some hundred, up to a thousand")
        return parts


class _Spread:
    """Sum of the squared deviations of outputs from their means, over batches."""

    def __init__(self) -> None:
        self._sums: dict[tuple[int, ...], tuple[int, Tensor]] = {}  # by shape: examples; sums of z and z^2

    def add(self, z: Tensor) -> None:
        """Add the outputs for some examples, which lie along the first axis."""
        z = torch.atleast_1d(z)
        sums = torch.stack([z.sum(0), z.square().sum(0)])
        count, before = self._sums.get(z.shape[1:], (0, torch.zeros_like(sums)))
        self._sums[z.shape[1:]] = count + len(z), before + sums

    @property
    def _squares(self) -> float:
        return sum(float(s[1].sum()) for _, s in self._sums.values())

    @property
    def _about_own(self) -> float:
        return sum(float((s[1] - s[0].square() / n).sum()) for n, s in self._sums.values())

    @property
    def varies(self) -> bool:
        """Whether the outputs of examples differ."""
        return self._about_own > _ALIKE * self._squares

    def total(self) -> float:
        """About the means over examples; where all are alike, about the mean of all; else about zero."""
        if self.varies:
            return self._about_own
        count = sum(n * s[0].numel() for n, s in self._sums.values())
        of_all = sum(float(s[0].sum()) for _, s in self._sums.values())
        about_all = self._squares - of_all**2 / max(count, 1)
        return about_all if about_all > _ALIKE * self._squares else self._squares


def _too_far(distance: float, tolerance: float) -> str:
    """What to say where no step was fine enough."""
    return (
        f"the squared error of the outputs is {distance:.2g} of their variance on images that were not used, "
        f"above options.tolerance ({tolerance:g}), even with the finest step that was tried: weights may "
        "differ too much in size for one step; leave the largest out with layout.exclude, or give more images"
    )


def _bits(layout: Layout, values: Tensor) -> float:
    """Entropy per weight, each tensor with its own frequencies."""
    return sum(entry.size * entropy_bits(values[entry.span]) for entry in layout.entries) / layout.size


def _log_likelihood(output: Any, draws: torch.Generator) -> Tensor:
    """Of labels drawn from the output's own distribution; of draws around it where it is no class scores."""
    found = _output(output)
    if found is None or not bool(torch.isfinite(found).all()):
        return torch.zeros(())  # nothing to scale by; where it matters, conditioning says what is wrong
    scores = found.float()
    if not is_logits(scores):
        noise = torch.randn(scores.shape, generator=draws, device=scores.device)
        return (scores * noise).sum()
    flat = scores.movedim(1, -1).flatten(0, -2)
    labels = torch.multinomial(flat.detach().softmax(-1), 1, generator=draws)
    return flat.log_softmax(-1).gather(-1, labels).sum()


def _alike(batches: Sequence[Batch]) -> bool:
    """Whether all inputs are the same, as images of integers that were divided by 255 are."""
    own = [[x for x in tensors_of((b.args, b.kwargs)) if x.dim()] for b in batches]
    pairs = [(x, first[:1]) for tensors in own for x, first in zip(tensors, own[0], strict=False)]
    return bool(pairs) and all(x.shape[1:] == y.shape[1:] and bool((x == y).all()) for x, y in pairs)


def _output(output: Any) -> Tensor | None:
    """Class scores, or the first tensor of numbers in an output; None where there is none."""
    return next((x for x in tensors_of(class_scores(output)) if x.is_floating_point()), None)
