"""What is seen of a network at a moment of a run: enough to draw its course, and little to keep.

A run looks at its start, and in every round just before and just after the fixing. What it sees is plain
numbers, the same on every machine that takes the same way, and nothing that it does is changed by looking.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from enum import StrEnum
from typing import Any, NamedTuple

import torch
from torch import Tensor

from pwfn.bayes.method import WeightState
from pwfn.config.seeds import generator_from
from pwfn.evaluate.entropy import Pool
from pwfn.fixing.record import FixRecord, Move
from pwfn.fixing.unique import counted
from pwfn.layout import Entry, Kind, Layout

BINS_PER_OCTAVE = 8
"""A sigma lies in bin ``floor(8 * log2 sigma)``: each is 9 % wide."""

LOWEST_BIN, HIGHEST_BIN = -31 * BINS_PER_OCTAVE, 4 * BINS_PER_OCTAVE - 1
"""From 2^-31, half of the smallest sigma of a free weight, up to 2^4; what lies beyond is in the last bin."""

MOST_CENTRES = 1024
MOST_OF_A_LAYER = 400
MOST_OF_ALL = 20_000


class Moment(StrEnum):
    """When a network was looked at."""

    START = "start"  # before any training
    BEFORE = "before"  # a fixing
    AFTER = "after"  # it


class Histogram(NamedTuple):
    """Counts of sigma in bins of equal width in log2: bin ``first + i`` holds ``counts[i]``."""

    first: int
    counts: tuple[int, ...]

    @property
    def total(self) -> int:
        """How many were counted."""
        return sum(self.counts)

    def edges(self) -> list[float]:
        """The values between bins, one more than there are counts.

        >>> Histogram(-16, (3, 1)).edges()[0], Histogram(-16, (3, 1)).edges()[-1] == 2**-1.75
        (0.25, True)
        """
        return [2 ** ((self.first + i) / BINS_PER_OCTAVE) for i in range(len(self.counts) + 1)]


class Layer(NamedTuple):
    """The weights of one parameter that are in place."""

    name: str
    weights: int
    entropy_bits: float
    unique: int


class Sample(NamedTuple):
    """Some weights of one parameter, the same ones whenever it is looked at; to six digits."""

    name: str
    mu: tuple[float, ...]
    sigma: tuple[float, ...]


@dataclass(frozen=True)
class Trace:
    """What was seen; a method without sigmas, or a moment without centres, leaves those fields empty."""

    moment: Moment
    round: int  # from 1; 0 at the start
    fraction: float  # of the weights that are in place
    sigma: Histogram | None = None  # of the weights that are free
    centres: int = 0  # distinct values of those that are in place
    codebook: tuple[tuple[float, int], ...] = ()  # value and weights, ascending; the most popular 1,024
    moves: tuple[Move, ...] = ()  # by centre, in this fixing; those that most weights moved to
    layers: tuple[Layer, ...] = ()  # of the weights that are in place
    sample: tuple[Sample, ...] = ()  # of the weights of layers, at the start and after the last fixing

    def to_line(self) -> str:
        """As a line of JSON, the same for the same values."""
        plain = {**asdict(self), "moment": str(self.moment)}
        # A method may leave the whole line without most of them; zero is a fact and stays.
        kept = {key: value for key, value in plain.items() if value is not None and value != ()}
        return json.dumps(kept, separators=(",", ":"), allow_nan=False)

    def to_plain(self) -> dict[str, Any]:
        """Numbers, strings, lists and mappings only, as a checkpoint can hold them."""
        found: dict[str, Any] = json.loads(self.to_line())
        return found

    @classmethod
    def of_plain(cls, plain: Mapping[str, Any]) -> Trace:
        """What ``to_plain`` or ``to_line`` was given.

        >>> seen = Trace(Moment.BEFORE, 2, 0.5, sigma=Histogram(-20, (1, 0, 4)))
        >>> Trace.of_plain(seen.to_plain()) == seen
        True
        """
        sigma = plain.get("sigma")
        return cls(
            moment=Moment(plain["moment"]),
            round=plain["round"],
            fraction=plain["fraction"],
            sigma=Histogram(sigma[0], tuple(sigma[1])) if sigma else None,
            centres=plain["centres"],
            codebook=tuple((value, count) for value, count in plain.get("codebook", ())),
            moves=tuple(Move(*move) for move in plain.get("moves", ())),
            layers=tuple(Layer(*layer) for layer in plain.get("layers", ())),
            sample=tuple(Sample(name, tuple(mu), tuple(s)) for name, mu, s in plain.get("sample", ())),
        )


@torch.no_grad()
def at_start(layout: Layout, weights: WeightState) -> Trace:
    """Before any training; methods that put every weight in place at once have a codebook already."""
    return _seen(Moment.START, 0, layout, weights, wants_sample=True)


@torch.no_grad()
def before_fixing(number: int, layout: Layout, weights: WeightState) -> Trace | None:
    """After a stretch of training: the sigmas of the free weights; None where there are none.

    All else is as it was after the fixing before.
    """
    if weights.sigma is None:
        return None
    histogram = sigma_histogram(layout, weights)
    return Trace(Moment.BEFORE, number, _share_in_place(weights), sigma=histogram)


@torch.no_grad()
def after_fixing(number: int, record: FixRecord, layout: Layout, weights: WeightState) -> Trace:
    """After a fixing, and what it moved."""
    moves = sorted(sorted(record.moves, key=lambda move: -move.count)[:MOST_CENTRES])
    rounded = tuple(move._replace(mean=_short(move.mean), largest=_short(move.largest)) for move in moves)
    return _seen(Moment.AFTER, number, layout, weights, moves=rounded, wants_sample=record.fraction >= 1)


def _seen(
    moment: Moment,
    number: int,
    layout: Layout,
    weights: WeightState,
    *,
    moves: tuple[Move, ...] = (),
    wants_sample: bool,
) -> Trace:
    placed = weights.mu if weights.fixed is None else weights.mu[weights.fixed]
    values, counts = counted(placed)
    return Trace(
        moment,
        number,
        _share_in_place(weights),
        sigma=sigma_histogram(layout, weights),
        centres=values.numel(),
        codebook=_most_popular(values, counts),
        moves=moves,
        layers=tuple(_layers(layout, weights)),
        sample=tuple(_samples(layout, weights)) if wants_sample else (),
    )


def _share_in_place(weights: WeightState) -> float:
    if weights.fixed is None:
        return 1.0
    return int(weights.fixed.count_nonzero()) / weights.fixed.numel()


def sigma_histogram(layout: Layout, weights: WeightState) -> Histogram | None:
    """How many free weights have their sigma in each bin ``floor(8 log2 sigma)``, without empty ends.

    >>> from torch import nn
    >>> sigma, fixed = torch.tensor([0.25, 0.26, 0.35, 9.0]), torch.tensor([False, False, False, True])
    >>> layout = Layout.of(nn.Linear(4, 1, bias=False))
    >>> sigma_histogram(layout, WeightState(torch.zeros(4), sigma, fixed))
    Histogram(first=-16, counts=(2, 0, 0, 1))
    """
    if weights.sigma is None or weights.fixed is None:
        return None
    bins = range(LOWEST_BIN, HIGHEST_BIN + 1)
    # Compared with the edges, not rounded from a logarithm, which is another on another device.
    inner = torch.tensor([2 ** (b / BINS_PER_OCTAVE) for b in bins[1:]], dtype=torch.float64)
    edges = inner.to(weights.sigma)
    counts = torch.zeros(len(bins), dtype=torch.int64, device=weights.sigma.device)
    for entry in layout.entries:  # one after the other, so that no long vector of indices is made
        free = weights.sigma[entry.span][~weights.fixed[entry.span]]
        index = torch.bucketize(free, edges, out_int32=True, right=True)
        counts += torch.bincount(index, minlength=len(bins))
    found = counts.tolist()
    filled = [i for i, count in enumerate(found) if count]
    if not filled:
        return None
    return Histogram(bins[filled[0]], tuple(found[filled[0] : filled[-1] + 1]))


def _most_popular(values: Tensor, counts: Tensor) -> tuple[tuple[float, int], ...]:
    """Ascending; of equally popular ones the smaller."""
    order = counts.argsort(stable=True, descending=True)[:MOST_CENTRES].sort().values
    return tuple(zip(values[order].tolist(), counts[order].tolist(), strict=True))


def _layers(layout: Layout, weights: WeightState) -> Iterable[Layer]:
    for entry in layout.entries:
        values = weights.mu[entry.span]
        if weights.fixed is not None:
            values = values[weights.fixed[entry.span]]
        if values.numel():
            pool = Pool.of(values)
            yield Layer(entry.name, pool.weights, _short(pool.entropy_bits), pool.unique)


def _samples(layout: Layout, weights: WeightState) -> Iterable[Sample]:
    if weights.sigma is None:
        return
    entries = [entry for entry in layout.entries if entry.kind is Kind.WEIGHT]
    most = min(MOST_OF_A_LAYER, math.ceil(MOST_OF_ALL / max(len(entries), 1)))
    for entry in entries:
        at = sample_positions(entry, most).to(weights.mu.device)
        mu, sigma = (vector[entry.span][at].tolist() for vector in (weights.mu, weights.sigma))
        yield Sample(entry.name, tuple(map(_short, mu)), tuple(map(_short, sigma)))


def sample_positions(entry: Entry, most: int) -> Tensor:
    """Which weights of a parameter are looked at: one in each of so many equal stretches of it.

    A function of its name and its size alone.

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
    """Six digits: all that a figure shows, in half the space."""
    return float(f"{number:.6g}")
