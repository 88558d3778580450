"""WFN on the flat vector: relative distance, candidates, one fixing round, and the pull between rounds.

Subia-Waud & Dasmahapatra, "Weight Fixing Networks", ECCV 2022. The free weights of a round are sorted
once. The votes for candidates are a search for the few edges between them in that list, and the
weights near a centre are one slice of it: no table of weights by candidates is ever made.
"""

from __future__ import annotations

import math
from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

from pwfn.errors import WeightError
from pwfn.fixing.fix_round import target_count
from pwfn.fixing.record import FixStep
from pwfn.lab.quantisers.gradients import with_gradients

SMALLEST = 2.0**-7
"""Smaller weights, in absolute value, go to 0; it is also the first point of the grid."""

_MAX_POINTS = 2**20  # of a grid; usual are 35 between two powers of two (d = 0.01)
_MAX_CELLS = 2**22  # of a block of weights by nearby centres


class WfnResult(NamedTuple):
    """Weights and mask after a round, and the choices that led there."""

    weights: Tensor
    fixed: Tensor
    steps: list[FixStep]


def relative_distance(weights: Tensor, centre: float) -> Tensor:
    """``D(w, c) = |w - c| / |w|`` in float64; where ``|w| < 2^-7``, 0 for ``c = 0`` and infinity otherwise.

    >>> relative_distance(torch.tensor([0.5, -0.5, 0.001]), 0.25).tolist()
    [0.5, 1.5, inf]
    >>> relative_distance(torch.tensor([0.5, 0.001, 0.0]), 0.0).tolist()
    [1.0, 0.0, 0.0]
    """
    weights = weights.detach().double()
    size = weights.abs()
    distance = (weights - centre).abs_().div_(size)
    return distance.masked_fill_(size < SMALLEST, 0.0 if centre == 0 else math.inf)


def grid_size(largest: float, d: float) -> int:
    """Points of the :func:`grid` up to the first within d of the largest weight, ``g_k >= (1 - d) largest``.

    >>> grid_size(0.07, 1 / 3)
    4
    """
    steps = math.log(max((1 - d) * largest / SMALLEST, 1.0)) / math.log((1 + d) / (1 - d))
    # Rounding of the logarithms must not add a point if the last one is just within d.
    size = math.ceil(steps - 1e-9) + 1
    if size > _MAX_POINTS:
        raise WeightError(f"d = {d:g} gives {size:,} grid points up to {largest:g}: raise d")
    return size


def grid(size: int, d: float) -> Tensor:
    """The geometric grid ``g_k = 2^-7 r^k`` with ``r = (1 + d) / (1 - d)``, rounded to float32, as float64.

    Every w from 2^-7 to the largest has a point with ``|w - g| <= d |w|`` (up to float32's rounding, 2^-24):
    the worst w is midway between two points, where ``(r - 1) / (r + 1) = d``.

    >>> (grid(4, 1 / 3) * 2**7).tolist()
    [1.0, 2.0, 4.0, 8.0]
    """
    ratio = torch.tensor((1 + d) / (1 - d), dtype=torch.float64)
    return (SMALLEST * ratio.pow(torch.arange(size, dtype=torch.float64))).float().double()


def round_to_powers(values: Tensor, terms: int) -> Tensor:
    """The nearest sums of at most ``terms`` signed powers of two, as float64.

    Each term is the power nearest to what is left (midway: the smaller one) and leaves at most a third of it,
    so ``|v - sum| <= 3^-terms |v|``. Exact for float32 values.

    >>> values = torch.tensor([0.0, 3.0, 0.7, -11.0])
    >>> round_to_powers(values, 1).tolist(), round_to_powers(values, 2).tolist()
    ([0.0, 2.0, 0.5, -8.0], [0.0, 3.0, 0.75, -10.0])
    """
    left = values.detach().double()
    total = torch.zeros_like(left)
    for _ in range(terms):
        mantissa, exponent = torch.frexp(left)  # left = mantissa * 2^exponent, 1/2 <= |mantissa| < 1
        up = mantissa.abs() > 0.75
        power = torch.ldexp(mantissa.sign(), exponent - 1 + up.to(exponent.dtype))
        total, left = total + power, left - power
        if not left.any():
            break
    return total


@lru_cache(maxsize=64)
def candidates(size: int, d: float, omega: int) -> Tensor:
    """Sorted candidates of order omega, as float64: 0 and ± the grid in at most ``omega + 1`` powers of two.

    With ``e = 3^-(omega + 1)``, every w with ``2^-7 <= |w| <= largest`` has a candidate within
    ``|w - c| / |w| <= d + e (1 + d)``; from ``omega = 12`` on, within d up to 2^-23, because a float32 is a
    sum of at most 13 such terms.

    >>> (candidates(grid_size(0.07, 1 / 3), 1 / 3, omega=0) * 2**7).tolist()
    [-8.0, -4.0, -2.0, -1.0, 0.0, 1.0, 2.0, 4.0, 8.0]
    """
    positive = round_to_powers(grid(size, d), omega + 1).unique()
    return torch.cat((-positive.flip(0), positive.new_zeros(1), positive))


def fix_round(
    weights: Tensor, fixed: Tensor, fraction: float, *, delta: float = 0.01, omega_max: int = 20
) -> WfnResult:
    """Fix weights until ``ceil(N * fraction)`` of them are fixed; the inputs are not changed.

    From ``omega = 0``: the candidate ``c*`` to which most free weights are nearest takes free weights in
    order of ``D = |w - c*| / |w|`` while the running mean of the D above 0 is at most delta, never more than
    still needed. If it takes none, omega rises by one; past ``omega_max`` delta doubles instead. The grid
    keeps ``d``, the first delta, and ends at the largest weight still free at each choice.

    Weights below 2^-7 are at D = 0 from 0 and go nowhere else. A weight midway between two candidates
    votes for the smaller one; of equally popular candidates the smallest wins; equal D keep the order of
    the vector. Means are summed in float64.

    >>> done = fix_round(torch.tensor([0.5, 0.502, 0.3, 0.001]), torch.zeros(4, dtype=torch.bool), 0.5)
    >>> done.weights[done.fixed].tolist(), [(step.centre, step.count) for step in done.steps]
    ([0.5, 0.5], [(0.5, 2)])
    """
    weights = weights.detach().clone(memory_format=torch.contiguous_format)
    fixed = fixed.clone()
    steps: list[FixStep] = []
    needed = target_count(weights.numel(), fraction) - int(fixed.count_nonzero())
    at = torch.nonzero(~fixed).squeeze(1)
    values, order = weights[at].sort(stable=True)
    at = at[order]
    d, omega = delta, 0
    while needed > 0:
        centre = _most_popular(values, d, omega)
        start, stop, taken = _admitted(values, at, centre, delta, needed)
        there = at[start:stop][taken]
        count = there.numel()
        if count == 0:
            omega, delta = (omega + 1, delta) if omega < omega_max else (omega, 2 * delta)
            continue
        weights[there] = centre
        fixed[there] = True
        values, at = (torch.cat((v[:start], v[start:stop][~taken], v[stop:])) for v in (values, at))
        steps.append(FixStep(centre, omega, delta, count))
        needed -= count
    return WfnResult(weights, fixed, steps)


class Pull:
    """Mean softmin-weighted distance of the free weights to the centres, differentiable in w.

    ``L = mean_i sum_j p_ij D_ij`` with ``D_ij = |w_i - c_j| / |w_i|`` and
    ``p_ij = exp(-D_ij / temperature) / sum_l exp(-D_il / temperature)``. Weights below 2^-7 are at D = 0:
    they add nothing but count in the mean. Without centres or free weights, L is 0.

    Value and gradient are computed together in blocks, from
    ``dL_i/dw_i = sum_j p_ij (1 - (D_ij - L_i) / temperature) D'_ij`` with
    ``D'_ij = sign(1 - c_j / w_i) c_j / w_i^2`` (0 on a centre), so the memory is N plus one block, never
    N × K. The sums run over the ``nearest`` centres of each weight, or over all if None. If the centres left
    out are farther than the nearest one by m or more, they change ``L_i`` by at most
    ``K exp(-m / temperature) max_j D_ij``; a dense codebook has many within ``m = 0.1``.

    ``centres`` are the unique values of the fixed weights, ascending, and ``free`` is the mask of the weights
    that count. A call has fixed shapes and never waits for the device: a CUDA graph can capture it.

    >>> term = Pull(torch.tensor([0.4], dtype=torch.float64), torch.tensor([True, True, False]))
    >>> w = torch.tensor([0.5, 0.2, 0.7], dtype=torch.float64, requires_grad=True)
    >>> loss = term(w)  # one centre: D = 0.2 and 1
    >>> loss.backward()
    >>> round(loss.item(), 6), [round(g, 6) for g in w.grad.tolist()]  # c / w^2 and -c / w^2, each / 2
    (0.6, [0.8, -5.0, 0.0])
    """

    def __init__(
        self, centres: Tensor, free: Tensor, temperature: float = 0.05, nearest: int | None = None
    ) -> None:
        self._temperature = temperature
        count = min(nearest or centres.numel(), centres.numel())
        at = torch.nonzero(free).squeeze(1)
        self._size = max(at.numel(), 1)
        self._at = at if count else at[:0]
        # The nearest centres of a sorted list are contiguous; their first moves on from c[s] to c[s + 1]
        # where w is nearer to c[s + count] than to c[s].
        centres = centres.detach().clone()
        self._windows = centres.unfold(0, count, 1) if count else centres[None]
        self._edges = (centres[: centres.numel() - count] + centres[count:]) / 2
        self._block = max(_MAX_CELLS // max(count, 1), 1)

    def __call__(self, weights: Tensor) -> Tensor:
        """``L`` of the whole vector, of which only the free weights are read."""
        gradient = torch.zeros_like(weights)
        total = weights.new_zeros((), dtype=torch.float64)
        if self._at.numel():
            slopes = []
            for part in weights.detach()[self._at].split(self._block):
                counted = part.abs() >= SMALLEST
                value, slope = self._of_each(torch.where(counted, part, 1.0))
                total += torch.where(counted, value, 0.0).sum(dtype=torch.float64)
                slopes.append(torch.where(counted, slope, 0.0))
            gradient[self._at] = torch.cat(slopes).div_(self._size)
        return with_gradients((total / self._size).to(weights.dtype), (weights, gradient))

    def _of_each(self, w: Tensor) -> tuple[Tensor, Tensor]:
        """``L_i`` and ``dL_i/dw_i`` of each weight, over the centres in its window."""
        c = self._windows
        if len(c) > 1:
            c = c[torch.bucketize(w, self._edges)]
        share = c / w[:, None]
        signed = 1 - share
        distance = signed.abs()
        p = torch.softmax(distance / -self._temperature, dim=1)
        value = (p * distance).sum(1)
        p *= 1 - (distance - value[:, None]) / self._temperature
        slope = p.mul_(signed.sign_()).mul_(share).sum(1) / w
        return value, slope


def scaled(task_loss: Tensor, term: Tensor, ratio: float = 0.4) -> Tensor:
    """``(ratio * task_loss / term) * term``, the bracket a constant to autograd; 0 where the term is 0.

    Its value is ``ratio * task_loss``, its gradient has the direction of the term's. Add it to the task loss.

    >>> term = torch.tensor(5.0, requires_grad=True)
    >>> loss = scaled(torch.tensor(2.0), term)
    >>> loss.backward()
    >>> round(loss.item(), 6), round(term.grad.item(), 6)
    (0.8, 0.16)
    """
    value = term.detach()
    factor = torch.where(value > 0, ratio * task_loss.detach() / value, 0.0)
    return factor * term


@lru_cache(maxsize=64)
def _edges(size: int, d: float, omega: int, dtype: torch.dtype) -> Tensor:
    """Largest number nearest to each candidate but the last; a number midway belongs to the smaller one."""
    centres = candidates(size, d, omega)
    middle = (centres[:-1] + centres[1:]) / 2  # exact: candidates are float32 values
    ends = middle.to(dtype)
    ends = torch.where(ends.double() > middle, torch.nextafter(ends, torch.full_like(ends, -math.inf)), ends)
    zero = centres.numel() // 2
    smallest = torch.tensor(SMALLEST, dtype=dtype)
    ends[zero - 1] = -smallest
    ends[zero] = torch.nextafter(smallest, torch.zeros_like(smallest))
    return ends


def _most_popular(values: Tensor, d: float, omega: int) -> float:
    """The candidate nearest to most of the sorted values; of equally popular ones, the smallest."""
    size = grid_size(max(-float(values[0]), float(values[-1])), d)
    ends = _edges(size, d, omega, values.dtype).to(values.device)
    below = torch.searchsorted(values, ends, right=True).cpu()
    counts = torch.diff(below, prepend=below.new_zeros(1), append=below.new_tensor([values.numel()]))
    most = int((counts == counts.max()).nonzero()[0])  # argmax may return any of equal ones
    return float(candidates(size, d, omega)[most])


def _admitted(
    values: Tensor, at: Tensor, centre: float, delta: float, needed: int
) -> tuple[int, int, Tensor]:
    """A slice of the sorted values, and a mask of those in it that the centre takes."""
    reach = 3 * delta  # for evenly spread weights the mean is delta at a reach of 2 delta
    while True:
        start, stop = _slice(values, centre, reach)
        distance = relative_distance(values[start:stop], centre)
        # On the host: prefix sums on a GPU differ in their last digits from run to run.
        ascending = distance.sort().values.cpu()
        sums, counted = ascending.cumsum(0), (ascending > 0).cumsum(0)
        # Running means of an ascending list never fall.
        length = min(int((sums / counted.clamp_min(1) <= delta).count_nonzero()), needed)
        within = int((ascending <= reach).count_nonzero())  # no weight outside the slice is so near
        is_complete = stop - start == values.numel() or length < within or length == needed <= within
        if not is_complete and length == within:  # would a weight at the reach be too far for the mean?
            total, number = (float(sums[within - 1]), int(counted[within - 1])) if within else (0.0, 0)
            is_complete = (total + reach) / (number + 1) > delta
        if is_complete:
            break
        reach *= 2
    if length == 0:
        return start, stop, torch.zeros_like(distance, dtype=torch.bool)
    last = float(ascending[length - 1])
    taken = distance < last
    # Of those as far as the last one, the first in the vector.
    level = torch.nonzero(distance == last).squeeze(1)
    ties = length - int(taken.count_nonzero())
    taken[level[at[start:stop][level].argsort()[:ties]]] = True
    return start, stop, taken


def _slice(values: Tensor, centre: float, reach: float) -> tuple[int, int]:
    """Where the values with D up to reach are: w from ``c / (1 + reach)`` to ``c / (1 - reach)``."""
    if reach >= 1 - 1e-6:  # then they have no outer end, and the other sign may be within reach
        return 0, values.numel()
    if centre == 0:
        low, high = -SMALLEST, SMALLEST
    else:
        slack = 1e-6  # more than any rounding of D and of the ends
        ends = centre / (1 + reach) * (1 - slack), centre / (1 - reach) * (1 + slack)
        low, high = min(ends), max(ends)
    bounds = values.new_tensor([low, high])
    return int(torch.searchsorted(values, bounds[0])), int(torch.searchsorted(values, bounds[1], right=True))
