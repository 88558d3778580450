"""Training for the bytes: the loss plus a price for the length of the code, ``loss + lambda * bits / n``.

Every forward pass uses the weights rounded to multiples of one step; gradients pass through the rounding.
Between steps the code length pulls each weight towards shorter codes, most of all towards zero. With a
target in bytes or bits, lambda is adjusted while training so that the network ends there.
"""

from __future__ import annotations

import copy
import json
import math
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from pwfn.bayes.distributed import Distributed
from pwfn.bayes.method import DataProbe, Method, WeightState, phases, register
from pwfn.bayes.network import check_finite, forget_graphs
from pwfn.bayes.sigma import root_mean_square
from pwfn.config import METHOD_DEFAULTS, Config, Number, Section, setting
from pwfn.errors import ConfigError, WeightError
from pwfn.file.compressed import Compressed
from pwfn.file.fold_batchnorm import shrink_uncompressed
from pwfn.file.format import dumps
from pwfn.file.native import library
from pwfn.fixing.code_length import CodeLength, Rounded, code_length
from pwfn.fixing.conditioning.scale import even_layers
from pwfn.fixing.record import FixRecord, FixStep, relative_moves
from pwfn.fixing.step import bisected, dyadic, next_dyadic
from pwfn.fixing.unique import entropy_bits
from pwfn.layout import held, untouched

_REFRESH = 100  # steps between two fits of the code's tables; fewer in a short run,
_REFRESHES = 50  # which has at least so many
_MEASURE = 10  # refreshes between two encodings of the network, which show what the tables miss
_EVEN = 0.5  # power by which layers before BatchNorm are brought to one size; 1: entirely
_START = 1.25  # bits at the first step: those of the target times this; without a target, as such
_LATENT_RATE = 10.0  # learning rate of the levels: this times training.learning_rate, in steps of the grid
_DRIFT = 0.25  # levels by which the code length alone would move a weight in the whole run, at the start
_GAIN, _DAMPING = 200.0, 25.0  # of log lambda: by the mean excess over the whole run; by its changes
_LARGEST_CHANGE = 0.7  # of log lambda per refresh
_LOWEST, _HIGHEST = 1e-6, 1e3  # lambda, where a target cannot be reached
_MARGIN = 0.999  # of the target: the uncompressed part may still change by a few bytes
_SCORE_BYTES = 80  # of a file: the scores, which are not known in training
_SPARED = 3  # times that the last fixing is done again, where its file is larger than it could know
_HALVINGS = 8
_LADDER = 512  # steps that are tried at most, eight of which double the first
_MOST_CUT = 0.01  # of the weights, set to zero after training without a word


@dataclass(frozen=True)
class RateOptions(Section):
    """Settings of the method ``rate``."""

    _name = "options"
    price: float = setting(
        0.1,
        Number(0),
        "lambda: loss (in nats) that one bit per weight is worth; with a target, where its search starts",
    )


@register("rate")
class RateNetwork(Method):
    """Any eager model whose weights are multiples of one step, trained for a short code.

    ``levels`` are the trained parameters, in steps of the grid; a pass uses ``step * round(levels)``. The
    step is chosen so that rounding the given weights costs about what the target allows: training then has
    to keep the rate rather than to reach it.

    >>> net = RateNetwork(nn.Linear(8, 4), Config.preset("small"))
    >>> net.fix(1.0).fixed
    36
    >>> values = net.finish().values() / net.grid_step
    >>> bool((values == values.round()).all())
    True
    """

    defaults = METHOD_DEFAULTS["rate"]
    Options = RateOptions
    lengths: Tensor
    contexts: Tensor
    fixed: Tensor
    price: Tensor  # lambda, on the device
    gradient_norm: Tensor  # of the task, at the levels, in the last step

    def __init__(self, model: nn.Module, config: Config | None = None) -> None:
        super().__init__(model, config or Config.preset("small"))
        weights = self.layout.gather(model)
        if root_mean_square(weights) == 0:
            raise WeightError("every weight is zero: there is nothing to compress")
        self._price, self._refreshes, self._coder_ratio = float(self.options.price), 0, 1.0
        self._last: float | None = None  # the excess at the last refresh
        self._grid, self._reserve, self._spared = 1.0, 0, 0
        self._trained: tuple[Tensor, float] | None = None  # levels and step before the last fixing
        self._empty_bytes = self._file_bytes(torch.zeros(self.layout.size), {})
        some = (weights / root_mean_square(weights)).round()
        self._rest_bytes = self._rest(some, self._index_bytes(some))
        self._original = (None if self.frozen else copy.deepcopy(model),)  # out of reach of state_dict and to
        self._grid = self.grid_step = self._starting_step(weights)
        self.levels = nn.Parameter(weights / self._grid)
        self.register_buffer("fixed", torch.zeros((), dtype=torch.bool, device=weights.device))
        table = code_length(self.layout, levels := self.levels.detach().round())
        self._measure(levels, _bytes(table, levels))
        self.register_buffer("price", torch.tensor(self._price), persistent=False)
        self.register_buffer("gradient_norm", torch.zeros_like(self.price))
        self.register_buffer("lengths", table.lengths)
        self.register_buffer("contexts", table.contexts)

    @torch.no_grad()
    def start(self, probe: DataProbe) -> None:
        """Bring the layers that BatchNorm follows closer to one size; the step is then found again."""
        original, self._original = self._original[0], (None,)
        batches = probe.examples(1)
        if original is None or not batches:
            return
        model = original.to(self.device).eval()
        if not even_layers(model, self.layout, batches[0], _EVEN):
            return
        self.model.load_state_dict(untouched(model, self.layout), strict=False)
        weights = self.layout.gather(model)
        self._grid = self.grid_step = self._starting_step(weights)
        self.levels.copy_(weights / self._grid)
        table = self._fit_tables(levels := self.levels.round())
        self._measure(levels, _bytes(table, levels))

    def weights(self) -> dict[str, Tensor]:
        """The rounded weights, by name."""
        levels: Tensor = Rounded.apply(self.levels)  # type: ignore[no-untyped-call]  # torch's own
        return self.layout.views(levels * self._grid)

    def before_step(self, step: int, steps: int, distributed: Distributed) -> None:
        """Every few steps: fit the tables again, and adjust lambda."""
        whole = steps * len(self.settings.schedule.fractions)  # of all phases, if they are equally long
        every = max(1, min(_REFRESH, whole // _REFRESHES))
        if step and step % every == 0:
            if self._last is None and self._has_size:
                self._price = self._starting_price(whole)
            self._refresh(every / whole, distributed)

    def penalty(self) -> Tensor:
        """``lambda * bits / n``."""
        if self.levels.grad is not None:  # it is the task's alone here, and a run that resumes has lost it
            self.gradient_norm.copy_(torch.linalg.vector_norm(self.levels.grad))
        table = CodeLength(self.lengths, self.contexts)
        return self.price / self.layout.size * table.total(self.levels)

    @torch.no_grad()
    def rate_bytes(self) -> float:
        """The estimate times what the coder made of the last one, and what is not compressed."""
        estimate = _bytes(CodeLength(self.lengths, self.contexts), self.levels.round())
        return self._coder_ratio * estimate + self._rest_bytes

    def fix(self, fraction: float) -> FixRecord:
        """Round all weights. Where the target is missed, more of the smallest go to zero, or the step grows.

        For a fraction below 1 nothing is done: every weight is on the grid from the first step on.
        """
        if fraction < 1:
            return FixRecord(fraction, self.layout.size, (), ())
        with torch.no_grad():
            check_finite(self.levels, self.layout, "level of")
            self._trained = None if self.settings.target.bytes is None else (self.levels.clone(), self._grid)
            before, step = self.levels * self._grid, self._grid
            rounded = self.levels.round()
            self._measure(rounded, _bytes(self._fit_tables(rounded), rounded))
            self._meet_target()
            final = self.levels
            zeros = int(((rounded != 0) & (final == 0)).sum())
            self.notes = self._cut(zeros, self._grid / step) + self._dead(before)
            self._measure(final, _bytes(self._fit_tables(final), final))
            self.fixed.fill_(True)
            moves = relative_moves(before, self.levels * self._grid)
        made = FixStep(math.nan, 0, self._grid, self.layout.size)
        return FixRecord(1.0, self.layout.size, (made,), tuple(moves))

    @torch.no_grad()
    def spare(self, count: int) -> bool:
        """BatchNorm has other statistics behind weights that were cut, and they may take more bytes."""
        if count == 0 or self._trained is None or self._spared == _SPARED:
            return False
        (levels, self._grid), self._spared = self._trained, self._spared + 1
        self.grid_step = self._grid
        self.levels.copy_(levels)
        self._reserve += count + math.ceil((1 - _MARGIN) * (self.settings.target.bytes or 0))
        return True

    def finish(self) -> Compressed:
        """The compressed network; it has no posterior."""
        if not bool(self.fixed):
            raise WeightError("no weight is fixed yet: call fix(1.0) first")
        return self._compressed(self.levels, untouched(self.model, self.layout))

    def state(self) -> WeightState:
        """The rounded weights; all are fixed, or none."""
        values = (self.levels.detach().round() * self._grid).to(self.layout.dtype)
        return WeightState(values, fixed=self.fixed.expand(values.shape))

    def parameter_groups(self, *, lr: float, weight_decay: float = 0.0) -> list[dict[str, Any]]:
        """The levels have a learning rate of their own, ten times ``lr``, and no weight decay."""
        others = [p for p in self.parameters() if p is not self.levels]
        levels = {"params": [self.levels], "lr": _LATENT_RATE * lr, "weight_decay": 0.0}
        return [levels, {"params": others, "lr": lr, "weight_decay": weight_decay}]

    def get_extra_state(self) -> Tensor:
        """What the feedback knows, as JSON in a tensor of bytes."""
        kept = [self._price, self._refreshes, self._coder_ratio, self._last, self._grid, self._rest_bytes]
        return torch.tensor(list(json.dumps(kept).encode()), dtype=torch.uint8)

    def set_extra_state(self, state: Tensor) -> None:
        """What the feedback knew."""
        kept = json.loads(bytes(state.tolist()))
        self._price, self._refreshes, self._coder_ratio, self._last, self._grid, self._rest_bytes = kept
        if not self._has_size:  # nothing was found: it is as the settings say, which may have changed
            self._price = float(self.options.price)
        self.grid_step, self._original = self._grid, (None,)
        self.price.fill_(self._price)

    @torch.no_grad()
    def _refresh(self, share: float, distributed: Distributed) -> None:
        """Fit the tables to the levels; with a target, adjust lambda by how far it is away.

        ``share`` is that of the run between two refreshes: a short run has fewer, each with a larger effect.
        """
        levels = self.levels.round()
        if not bool(levels.isfinite().all()):
            return  # the run says so when it next reads the loss
        table = self._fit_tables(levels)
        estimate, self._refreshes = _bytes(table, levels), self._refreshes + 1
        # Powers of two, too: much changes at first.
        if self._refreshes % _MEASURE == 0 or self._refreshes.bit_count() == 1:
            self._measure(levels, estimate, distributed)
        excess = self._excess(levels, estimate)
        if excess is None or not math.isfinite(excess):
            return
        last = excess if self._last is None else self._last
        change = _GAIN * share * excess + _DAMPING * (excess - last)
        factor = math.exp(min(max(change, -_LARGEST_CHANGE), _LARGEST_CHANGE))
        self._price = min(max(self._price, _LOWEST) * factor, _HIGHEST)
        self.price.fill_(self._price)
        self._last = excess

    def _starting_price(self, steps: int) -> float:
        """The lambda at which the code length alone would move a weight by ``_DRIFT`` levels in the run.

        Adam divides by the root mean square g of the gradients, and the learning rates of all steps sum up to
        ``rate * steps / 2``: ``lambda / n * slope / g * rate * steps / 2 = _DRIFT``, with slopes in bits.
        """
        levels = self.levels.detach().requires_grad_()
        with torch.enable_grad():
            bits = CodeLength(self.lengths, self.contexts).total(levels)
        (slopes,) = torch.autograd.grad(bits, levels)
        distance = _LATENT_RATE * self.settings.training.learning_rate * steps / 2
        reached = float(torch.linalg.vector_norm(slopes)) * distance
        found = _DRIFT * self.layout.size * float(self.gradient_norm) / max(reached, 1e-30)
        return found if math.isfinite(found) and found > 0 else self._price

    def _fit_tables(self, levels: Tensor) -> CodeLength:
        table = code_length(self.layout, levels)
        self.lengths.copy_(table.lengths)
        self.contexts.copy_(table.contexts)
        return table

    def _measure(self, levels: Tensor, estimate: float, distributed: Distributed | None = None) -> None:
        """Compare the estimate with what the file's coder makes of the same levels; count the rest again.

        In training each process has its own statistics of BatchNorm; the first one's count.
        """

        def work() -> tuple[float, int]:
            index = self._index_bytes(levels)
            return index / max(estimate, 1.0), self._rest(levels, index)

        self._coder_ratio, self._rest_bytes = work() if distributed is None else distributed.first(work)

    def _excess(self, levels: Tensor, estimate: float) -> float | None:
        """Logarithm of the size over the target's, of bytes or bits, the larger; None without a target."""
        target = self.settings.target
        found = []
        if target.bytes is not None:
            found.append(math.log(max(self._coder_ratio * estimate, 1.0) / max(self._index_goal, 1.0)))
        if target.bits is not None:
            found.append(math.log(max(entropy_bits(levels), 1e-6) / (_MARGIN * target.bits)))
        return max(found, default=None)

    @property
    def _has_size(self) -> bool:
        """Whether there is a size to reach."""
        return self.settings.target.bytes is not None or self.settings.target.bits is not None

    @property
    def _index_goal(self) -> float:
        """Bytes that the target leaves for the weights."""
        return _MARGIN * float(self.settings.target.bytes or 0) - self._rest_bytes

    def _starting_step(self, weights: Tensor) -> float:
        """The step at which the rounded weights have the rate to start with, by bisection."""
        target, size = self.settings.target, self.layout.size
        if target.bytes is not None and self._index_goal <= 0:
            raise ConfigError(
                f"target.bytes is {target.bytes:,}, and what is not compressed takes {self._rest_bytes:,} "
                "bytes without any weight: give a larger target, or compress more (layout.include; "
                "print(pwfn.Layout.of(model).table()) lists what is left out)"
            )
        goal = size / 8 if target.bytes is None else self._index_goal

        def estimated(levels: Tensor) -> float:
            """The size over the target's; over one bit per weight without a target."""
            share = 0.0 if target.bits is None else entropy_bits(levels) / target.bits
            if target.bits is None or target.bytes is not None:
                share = max(share, _bytes(code_length(self.layout, levels), levels) / goal)
            return share

        def coded(levels: Tensor) -> float:
            return self._index_bytes(levels) / goal

        def at(places: int) -> Tensor:
            self._grid = next_dyadic(first, places)
            return (weights / self._grid).round()

        # Places on the ladder, from 64 below the root mean square; eight double the step. Outliers may be
        # nearly all of it: the others still need a step that is finer than they are.
        first, low = dyadic(root_mean_square(weights)), -64
        usual = float(weights[weights != 0].abs().median())
        while usual < 8 * next_dyadic(first, low) and low > -_LADDER:
            low -= 64
        found = bisected(lambda places: estimated(at(places)) <= _START, low, 64)
        # The estimate knows neither levels above LARGEST nor what the codebook takes.
        if target.bytes is not None and coded(at(found)) > _START**2:
            found = bisected(lambda places: coded(at(places)) <= _START, found, 64)
        return next_dyadic(first, found)

    def _meet_target(self) -> None:
        """Round the levels; with a target, so that they meet it.

        The zero bin becomes as wide as it must, at most twice as wide. Where that is not enough, the step
        becomes coarser instead, as little as it can.
        """
        if self._fits(self.levels.round()):
            wide = 0.5
        elif self._fits(self._zeroed(1.0)):
            narrow, wide = 0.5, 1.0
            for _ in range(_HALVINGS):
                middle = (narrow + wide) / 2
                narrow, wide = (narrow, middle) if self._fits(self._zeroed(middle)) else (middle, wide)
        else:
            wide = 0.5
            self._coarsen()
        self.levels.copy_(self._zeroed(wide))

    def _coarsen(self) -> None:
        """Take the finest step at which the rounded weights meet the target; where none does, none."""
        weights, step = self.levels * self._grid, self._grid

        def fits(places: int) -> bool:
            self._grid = next_dyadic(step, places)
            return self._fits((weights / self._grid).round())

        self._grid = next_dyadic(step, bisected(fits, 0, _LADDER)) if fits(_LADDER) else step
        self.grid_step = self._grid
        self.levels.copy_(weights / self._grid)

    def _cut(self, count: int, coarser: float) -> tuple[str, ...]:
        """What the user should know about weights that were changed for the target's sake."""
        done = f"{count:,} of {self.layout.size:,} weights were set to zero"
        if coarser > 1:
            done = f"the step of the grid was made {coarser:.3g} times as large"
        elif count <= _MOST_CUT * self.layout.size:
            return ()
        return (
            f"{done} after training to meet the target, which costs accuracy: train longer "
            "(schedule.epochs_per_round), or give a larger target",
        )

    def _dead(self, before: Tensor) -> tuple[str, ...]:
        """The layers that are zero now, and were not: on one grid for all, theirs were small weights."""
        pieces = zip(self.layout.entries, *map(self.layout.pieces, (before, self.levels)), strict=True)
        names = [e.name for e, one, now in pieces if len(e.shape) > 1 and one.any() and not now.any()]
        more = f" and of {len(names) - 1} more layers" if len(names) > 1 else ""
        return (f"every weight of {names[0]}{more} is zero in the file",) if names else ()

    def _zeroed(self, below: float) -> Tensor:
        return torch.where(self.levels.abs() < below, 0.0, self.levels.round())

    def _fits(self, levels: Tensor) -> bool:
        target = self.settings.target
        if target.bytes is not None and self._index_bytes(levels) > self._index_goal:
            return False
        return target.bits is None or entropy_bits(levels) <= target.bits

    def _index_bytes(self, levels: Tensor) -> int:
        """Bytes of these weights in a file, and of what the run notes there."""
        return self._file_bytes(levels, {}) - self._empty_bytes

    def _rest(self, levels: Tensor, index: int) -> int:
        """Bytes of a file with these weights, less those of the weights (``index``)."""
        forget_graphs(self.model)
        model = copy.deepcopy(self.model)
        if self.settings.finish.shrinks:
            shrink_uncompressed(model, self.settings.finish)
        return self._file_bytes(levels, untouched(model, self.layout)) + _SCORE_BYTES + self._reserve - index

    def _file_bytes(self, levels: Tensor, rest: dict[str, Tensor]) -> int:
        record = {"method": self.settings.method, "settings": self.settings.to_dict(), **self.record}
        made = replace(self._compressed(levels, rest), record=record)
        if any(phase.epochs for phase in phases(self.settings)):  # a classifier then gets a posterior
            made = replace(made, sigma_codes=(0,) * len(self.layout.entries))
        # Without the compiled coder version 2 takes minutes; version 1 is an upper bound.
        return len(dumps(made, version=1 if library() is None else 2))

    def _compressed(self, levels: Tensor, rest: dict[str, Tensor]) -> Compressed:
        values = (levels.detach().round() * self._grid).to(self.layout.dtype)
        return Compressed.of(self.layout, held(self.layout, values), None, rest)


def _bytes(table: CodeLength, levels: Tensor) -> float:
    return float(table.bits(levels).double().sum()) / 8
