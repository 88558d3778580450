"""What is recorded of a network's weights at each moment of a run: enough to draw its course, and small.

A run records a trace at its start and, in every round, just before and just after the fixing. A trace holds
plain numbers, the same on every device for the same weights. Recording it does not change the run.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from enum import StrEnum
from typing import NamedTuple

import torch
from torch import Tensor

from pwfn.bayes.method import WeightState
from pwfn.config.seeds import generator_from
from pwfn.fixing.record import FixRecord, Move
from pwfn.fixing.unique import unique_counts
from pwfn.layout import Entry, Kind, Layout

BINS_PER_OCTAVE = 8
"""A sigma lies in bin ``floor(8 * log2 sigma)``: each bin is 9 % wide."""

LOWEST_BIN, HIGHEST_BIN = -31 * BINS_PER_OCTAVE, 4 * BINS_PER_OCTAVE - 1
"""From 2^-31, half of the smallest sigma of a free weight, up to 2^4; the end bins hold what lies beyond."""

MOST_CENTRES = 1024
MOST_PER_LAYER = 400  # sampled weights
MOST_SAMPLED = 20_000  # in the whole network, about


class Moment(StrEnum):
    """When a trace was recorded."""

    START = "start"  # before any training
    BEFORE = "before"  # just before a fixing
    AFTER = "after"  # just after it


class Histogram(NamedTuple):
    """Counts of sigma in bins of equal width in log2: bin ``first + i`` holds ``counts[i]``."""

    first: int
    counts: tuple[int, ...]

    @property
    def total(self) -> int:
        """Number of weights counted."""
        return sum(self.counts)


class Sample(NamedTuple):
    """Some weights of one parameter, the same ones in every trace; six significant digits."""

    name: str
    mu: tuple[float, ...]
    sigma: tuple[float, ...]


@dataclass(frozen=True, repr=False)
class Trace:
    """The weights at one moment; fields that do not apply (no sigmas, no fixed weights) are empty."""

    moment: Moment
    round: int  # from 1; 0 at the start
    fraction: float  # of the weights that are fixed
    sigma: Histogram | None = None  # of the free weights
    centres: int = 0  # unique values of the fixed weights
    codebook: tuple[tuple[float, int], ...] = ()  # value and count, ascending; the 1,024 most frequent
    moves: tuple[Move, ...] = ()  # of this fixing, per centre; the 1,024 with most weights
    sample: tuple[Sample, ...] = ()  # of weights, not biases; at the start and after the last fixing

    def __repr__(self) -> str:
        return f"Trace({self.moment}, round={self.round}, fraction={self.fraction:g}, centres={self.centres})"

    def to_line(self) -> str:
        """One line of JSON, without what is empty; equal traces give equal lines."""
        plain = {**asdict(self), "moment": str(self.moment)}
        kept = {key: value for key, value in plain.items() if value is not None and value != ()}
        return json.dumps(kept, separators=(",", ":"), allow_nan=False)


def at_start(layout: Layout, weights: WeightState) -> Trace:
    """Before any training; a method that fixes every weight at once already has a codebook."""
    return _trace(Moment.START, 0, layout, weights, sampled=True)


def before_fixing(number: int, layout: Layout, weights: WeightState) -> Trace | None:
    """After the training of round ``number``: the sigmas of the free weights; None without sigmas.

    Everything else is as it was after the previous fixing.
    """
    if weights.sigma is None:
        return None
    return Trace(Moment.BEFORE, number, _fixed_share(weights), sigma=sigma_histogram(layout, weights))


def after_fixing(number: int, record: FixRecord, layout: Layout, weights: WeightState) -> Trace:
    """After the fixing of round ``number``, with the moves it made."""
    moves = sorted(sorted(record.moves, key=lambda move: -move.count)[:MOST_CENTRES])
    rounded = tuple(move._replace(mean=_short(move.mean), largest=_short(move.largest)) for move in moves)
    return _trace(Moment.AFTER, number, layout, weights, moves=rounded, sampled=record.fraction >= 1)


@torch.no_grad()
def _trace(
    moment: Moment,
    number: int,
    layout: Layout,
    weights: WeightState,
    *,
    moves: tuple[Move, ...] = (),
    sampled: bool,
) -> Trace:
    values, counts = unique_counts(weights.mu if weights.fixed is None else weights.mu[weights.fixed])
    # Of equally frequent values the smaller ones, all of them ascending.
    order = counts.argsort(stable=True, descending=True)[:MOST_CENTRES].sort().values
    return Trace(
        moment,
        number,
        _fixed_share(weights),
        sigma=sigma_histogram(layout, weights),
        centres=values.numel(),
        codebook=tuple(zip(values[order].tolist(), counts[order].tolist(), strict=True)),
        moves=moves,
        sample=tuple(_samples(layout, weights)) if sampled else (),
    )


def _fixed_share(weights: WeightState) -> float:
    if weights.fixed is None:
        return 1.0
    return int(weights.fixed.count_nonzero()) / weights.fixed.numel()


@torch.no_grad()
def sigma_histogram(layout: Layout, weights: WeightState) -> Histogram | None:
    """Number of free weights per bin ``floor(8 log2 sigma)``, from the first to the last filled bin.

    >>> from torch import nn
    >>> sigma, fixed = torch.tensor([0.25, 0.26, 0.35, 9.0]), torch.tensor([False, False, False, True])
    >>> layout = Layout.of(nn.Linear(4, 1, bias=False))
    >>> sigma_histogram(layout, WeightState(torch.zeros(4), sigma, fixed))
    Histogram(first=-16, counts=(2, 0, 0, 1))
    """
    if weights.sigma is None or weights.fixed is None:
        return None
    bins = range(LOWEST_BIN, HIGHEST_BIN + 1)
    # Compared with edges instead of rounding a logarithm, which differs between devices.
    inner = torch.tensor([2 ** (b / BINS_PER_OCTAVE) for b in bins[1:]], dtype=torch.float64)
    edges = inner.to(weights.sigma)
    counts = torch.zeros(len(bins), dtype=torch.int64, device=weights.sigma.device)
    for entry in layout.entries:  # one by one, to avoid an index vector of the whole network
        free = weights.sigma[entry.span][~weights.fixed[entry.span]]
        index = torch.bucketize(free, edges, out_int32=True, right=True)
        counts += torch.bincount(index, minlength=len(bins))
    filled = counts.nonzero().flatten().tolist()
    if not filled:
        return None
    return Histogram(bins[filled[0]], tuple(counts[filled[0] : filled[-1] + 1].tolist()))


def _samples(layout: Layout, weights: WeightState) -> Iterator[Sample]:
    if weights.sigma is None:
        return
    entries = [entry for entry in layout.entries if entry.kind is Kind.WEIGHT]
    most = min(MOST_PER_LAYER, math.ceil(MOST_SAMPLED / max(len(entries), 1)))
    for entry in entries:
        at = sample_positions(entry, most).to(weights.mu.device)
        mu, sigma = (vector[entry.span][at].tolist() for vector in (weights.mu, weights.sigma))
        yield Sample(entry.name, tuple(map(_short, mu)), tuple(map(_short, sigma)))


def sample_positions(entry: Entry, most: int) -> Tensor:
    """Positions of the sampled weights of a parameter: one at random in each of ``most`` equal intervals.

    Depends on the parameter's name and size only.

    >>> from torch import nn
    >>> entry = Layout.of(nn.Linear(10, 10)).entries[0]
    >>> [place // 25 for place in sample_positions(entry, 4).tolist()], sample_positions(entry, 200).numel()
    ([0, 1, 2, 3], 100)
    """
    if entry.size <= most:
        return torch.arange(entry.size)
    generator = generator_from("observed", entry.name, entry.size)
    edges = torch.arange(most + 1) * entry.size // most
    lengths = edges.diff()
    within = (torch.rand(most, dtype=torch.float64, generator=generator) * lengths).long()
    return edges[:-1] + torch.minimum(within, lengths - 1)


def _short(number: float) -> float:
    """Six significant digits: all that a figure shows, in half the space."""
    return float(f"{number:.6g}")
