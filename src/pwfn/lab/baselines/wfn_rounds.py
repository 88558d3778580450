"""WFN's pure core: relative distance, candidates, one fixing round, and the pull between rounds.

Weight Fixing Networks (Subia-Waud and Dasmahapatra, ECCV 2022) as functions on the flat vector.
The free weights of a round are sorted once. Candidates are counted by a search of the few edges
between them in that list, and the weights within reach of a centre are one slice of it, so no table
of weights by candidates is ever made.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from pwfn.errors import WeightError
from pwfn.fixing.fix_round import target_count
from pwfn.fixing.record import FixStep

SMALLEST = 2.0**-7
"""Weights below it, in absolute value, go to 0; it is also the first point of the grid."""

_MOST_POINTS = 2**20  # of a grid; ordinary are 35 between two powers of two (d = 0.01)
_CELLS = 2**22  # of a table of some weights by the centres near them


@dataclass(frozen=True)
class WfnResult:
    """Weights and mask after a round, and the choices that led there."""

    weights: Tensor
    fixed: Tensor
    steps: list[FixStep]


def relative_distance(weights: Tensor, centre: float) -> Tensor:
    """``D(w, c) = |w - c| / |w|`` in float64; where ``|w| < 2^-7``, 0 for ``c = 0`` and else infinity.

    >>> relative_distance(torch.tensor([0.5, -0.5, 0.001]), 0.25).tolist()
    [0.5, 1.5, inf]
    >>> relative_distance(torch.tensor([0.5, 0.001, 0.0]), 0.0).tolist()
    [1.0, 0.0, 0.0]
    """
    weights = weights.detach().double()
    size = weights.abs()
    distance = (weights - centre).abs_().div_(size)
    return distance.masked_fill_(size < SMALLEST, 0.0 if centre == 0 else math.inf)


def grid(largest: float, d: float) -> Tensor:
    """The geometric grid ``g_k = 2^-7 * r^k``, ``r = (1 + d) / (1 - d)``, rounded to float32, as float64.

    It ends with the first point that is within d of the largest weight, ``g_k >= (1 - d) * largest``
    (so below ``(1 + d) * largest``). Then every w from 2^-7 to the largest has a point with
    ``|w - g| <= d * |w|`` (up to float32's rounding, 2^-24): the worst w is midway between two points,
    where ``(r - 1) / (r + 1) = d``.

    >>> (grid(0.07, 1 / 3) * 2**7).tolist()
    [1.0, 2.0, 4.0, 8.0]
    """
    return _points(_point_count(largest, d), d)


def round_to_powers(values: Tensor, terms: int) -> Tensor:
    """The nearest sums of at most ``terms`` signed powers of two, as float64.

    Term by term, the power nearest to what is left (of 1.5 the smaller): each leaves at most a third,
    so that ``|v - sum| <= 3^-terms * |v|``. Exact for numbers of float32.

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


def candidates(largest: float, d: float, omega: int) -> Tensor:
    """Sorted candidates of order omega as float64: 0 and ± the grid in at most ``omega + 1`` powers of two.

    With ``e = 3^-(omega + 1)`` the most that rounding moves a point, every w with
    ``2^-7 <= |w| <= largest`` has a candidate within ``|w - c| / |w| <= d + e * (1 + d)``, and from
    ``omega = 12`` on (a float32 has no more than 13 such terms) within d alone, up to 2^-23.

    >>> (candidates(0.07, 1 / 3, omega=0) * 2**7).tolist()
    [-8.0, -4.0, -2.0, -1.0, 0.0, 1.0, 2.0, 4.0, 8.0]
    """
    if not isinstance(omega, int) or omega < 0:
        raise WeightError(f"omega is {omega!r}: allowed is a whole number of at least 0")
    return _candidates(_point_count(largest, d), d, omega)


def fix_round(
    weights: Tensor,
    fixed: Tensor,
    fraction: float,
    *,
    delta: float = 0.01,
    omega_max: int = 20,
) -> WfnResult:
    """Fix weights until ``ceil(N * fraction)`` of them are fixed; the inputs stay as they are.

    From ``omega = 0``: the candidate ``c*`` to which most free weights are nearest takes free weights
    in order of ``D = |w - c*| / |w|`` while the running mean of the D above 0 is at most delta, never
    more than still needed. When it takes none, omega rises by one; past ``omega_max`` delta doubles
    instead. The grid keeps the ``d`` that delta began with, and is taken anew for the largest weight
    still free at every choice.

    Weights below 2^-7 are nearest to 0, at D = 0, and go nowhere else. A weight midway between two
    candidates counts for the smaller one; of equally popular candidates the smallest wins; equal D
    keeps the order of the vector; means are summed in float64.

    >>> done = fix_round(torch.tensor([0.5, 0.502, 0.3, 0.001]), torch.zeros(4, dtype=torch.bool), 0.5)
    >>> done.weights[done.fixed].tolist(), [(step.centre, step.count) for step in done.steps]
    ([0.5, 0.5], [(0.5, 2)])
    """
    _check(weights, fixed, fraction, delta)
    weights = weights.detach().clone(memory_format=torch.contiguous_format)
    fixed = fixed.clone()
    steps: list[FixStep] = []
    needed = target_count(weights.numel(), fraction) - int(fixed.count_nonzero())
    at = torch.nonzero(~fixed).squeeze(1)
    values, order = weights[at].sort(stable=True)
    at = at[order]
    d, omega = delta, 0
    while needed > 0:
        largest = max(-float(values[0]), float(values[-1]))
        centre = _most_popular(values, largest, d, omega)
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


def codebook(weights: Tensor, fixed: Tensor) -> Tensor:
    """The centres chosen so far, ascending: the values that fixed weights have.

    >>> codebook(torch.tensor([0.5, -0.25, 0.5, 0.3]), torch.tensor([True, True, True, False])).tolist()
    [-0.25, 0.5]
    """
    return weights.detach()[fixed].unique()


class Pull:
    """The softmin-weighted distance of the free weights to the centres, on average; differentiable in w.

    ``L = mean_i sum_j p_ij D_ij`` with ``D_ij = |w_i - c_j| / |w_i|`` and
    ``p_ij = exp(-D_ij / temperature) / sum_l exp(-D_il / temperature)``. Weights below 2^-7 are on
    their way to 0, where D = 0: they add nothing, and are counted in the mean. No centres, or none
    free: 0.

    Value and gradient are made together in blocks, from
    ``dL_i/dw_i = sum_j p_ij (1 - (D_ij - L_i) / temperature) D'_ij`` with
    ``D'_ij = sign(1 - c_j / w_i) c_j / w_i^2`` (0 on a centre), so the memory is N plus one block, never
    N × K. Exact, to rounding, over the ``nearest`` centres of each weight, and over all of them if None.
    Fewer are an approximation: where those left out are farther than the nearest by m or more, they change
    ``L_i`` by at most ``K exp(-m / temperature) max_j D_ij``; a dense codebook has many within ``m = 0.1``.

    Made once per round, when centres and free weights are known; a call has fixed shapes and waits for
    nothing, so that it can be recorded as a CUDA graph.

    Args:
        centres: ascending, as :func:`codebook` gives them.
        free: which weights count, a flat mask of the length of the weights.
        temperature: of the softmin.
        nearest: how many centres each weight sees.

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
        if not temperature > 0 or (nearest is not None and nearest < 1):
            raise WeightError(
                f"temperature is {temperature!r} and nearest {nearest!r}: allowed are numbers above 0"
            )
        if centres.dim() != 1 or bool((centres.diff() <= 0).any()):
            raise WeightError(
                "the centres are not a flat, ascending list of different numbers: sort them first"
            )
        if free.dim() != 1 or free.dtype != torch.bool or free.device != centres.device:
            raise WeightError(
                f"free is {free.dtype} of shape {tuple(free.shape)} on {free.device}: it must be a flat mask "
                f"on {centres.device}, where the centres are"
            )
        self._length = free.numel()
        self._temperature = temperature
        count = min(nearest or centres.numel(), centres.numel())
        at = torch.nonzero(free).squeeze(1)
        self._size = max(at.numel(), 1)
        self._at = at if count else at[:0]
        # The count nearest of a sorted list lie together; the first of them moves on from c[s] to
        # c[s + 1] where w is nearer to c[s + count] than to c[s].
        centres = centres.detach().clone()
        self._windows = centres.unfold(0, count, 1) if count else centres[None]
        self._edges = (centres[: centres.numel() - count] + centres[count:]) / 2
        self._block = max(_CELLS // max(count, 1), 1)

    def __call__(self, weights: Tensor) -> Tensor:
        """``L`` of the whole vector, of which the free weights alone are looked at."""
        here = self._windows
        if weights.shape != (self._length,) or (weights.dtype, weights.device) != (here.dtype, here.device):
            raise WeightError(
                f"weights are {weights.dtype} of shape {tuple(weights.shape)} on {weights.device}: the mask "
                f"has {self._length} places, the centres are {here.dtype} on {here.device}"
            )
        result: Tensor = _Pull.apply(weights, self)  # type: ignore[no-untyped-call]  # torch's own
        return result

    def _value_and_gradient(self, weights: Tensor) -> tuple[Tensor, Tensor]:
        gradient = torch.zeros_like(weights)
        total = weights.new_zeros((), dtype=torch.float64)
        if self._at.numel() == 0:
            return total.to(weights.dtype), gradient
        slopes = []
        for part in weights[self._at].split(self._block):
            counted = part.abs() >= SMALLEST
            value, slope = self._of_each(torch.where(counted, part, 1.0))
            total += torch.where(counted, value, 0.0).sum(dtype=torch.float64)
            slopes.append(torch.where(counted, slope, 0.0))
        gradient[self._at] = torch.cat(slopes).div_(self._size)
        return (total / self._size).to(weights.dtype), gradient

    def _of_each(self, w: Tensor) -> tuple[Tensor, Tensor]:
        """``L_i`` and ``dL_i/dw_i`` of each weight over the centres in its window."""
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
    """The term times the constant that makes its value ``ratio * task_loss``; 0 where the term is 0.

    ``(ratio * task_loss / term) * term``, the bracket without gradient, so that the gradient keeps the
    term's direction. Add the result to the task loss.

    >>> term = torch.tensor(5.0, requires_grad=True)
    >>> loss = scaled(torch.tensor(2.0), term)
    >>> loss.backward()
    >>> round(loss.item(), 6), round(term.grad.item(), 6)
    (0.8, 0.16)
    """
    value = term.detach()
    factor = torch.where(value > 0, ratio * task_loss.detach() / value, 0.0)
    return factor * term


class _Pull(torch.autograd.Function):
    """:class:`Pull`, its gradient made with the value."""

    @staticmethod
    def forward(ctx: Any, weights: Tensor, pull: Pull) -> Tensor:
        value, gradient = pull._value_and_gradient(weights)
        ctx.save_for_backward(gradient)
        return value

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, above: Tensor) -> tuple[Tensor, None]:
        (gradient,) = ctx.saved_tensors
        return above * gradient, None


def _point_count(largest: float, d: float) -> int:
    if not (math.isfinite(largest) and 0 < d < 1):
        raise WeightError(f"largest is {largest!r} and d {d!r}: allowed are a finite number and 0 < d < 1")
    steps = math.log(max((1 - d) * largest / SMALLEST, 1.0)) / math.log((1 + d) / (1 - d))
    # The logarithms' own rounding must not add a point where the last one is just within d.
    count = math.ceil(steps - 1e-9) + 1
    if count > _MOST_POINTS:
        raise WeightError(f"d = {d:g} up to {largest:g} gives {count:,} grid points: raise d")
    return count


def _points(count: int, d: float) -> Tensor:
    ratio = torch.tensor((1 + d) / (1 - d), dtype=torch.float64)
    return (SMALLEST * ratio.pow(torch.arange(count, dtype=torch.float64))).float().double()


@lru_cache(maxsize=64)
def _candidates(count: int, d: float, omega: int) -> Tensor:
    positive = round_to_powers(_points(count, d), omega + 1).unique()
    return torch.cat((-positive.flip(0), positive.new_zeros(1), positive))


@lru_cache(maxsize=64)
def _edges(count: int, d: float, omega: int, dtype: torch.dtype) -> Tensor:
    """Upper ends of the stretches nearest to each candidate but the last; an end belongs below."""
    centres = _candidates(count, d, omega)
    middle = (centres[:-1] + centres[1:]) / 2  # exact: candidates are numbers of float32
    ends = middle.to(dtype)
    ends = torch.where(ends.double() > middle, torch.nextafter(ends, torch.full_like(ends, -math.inf)), ends)
    zero = centres.numel() // 2
    smallest = torch.tensor(SMALLEST, dtype=dtype)
    ends[zero - 1] = -smallest
    ends[zero] = torch.nextafter(smallest, torch.zeros_like(smallest))
    return ends


def _most_popular(values: Tensor, largest: float, d: float, omega: int) -> float:
    """The candidate nearest to most of the sorted values; the smallest of equals."""
    key = _point_count(largest, d), d, omega
    ends = _edges(*key, values.dtype).to(values.device)
    below = torch.searchsorted(values, ends, right=True).cpu()
    size = below.new_tensor([values.numel()])
    counts = torch.diff(torch.cat((below, size)), prepend=below.new_zeros(1))
    most = int((counts == counts.max()).nonzero()[0])  # argmax need not be the first of equals
    return float(_candidates(*key)[most])


def _admitted(
    values: Tensor, at: Tensor, centre: float, delta: float, needed: int
) -> tuple[int, int, Tensor]:
    """A slice of the sorted values, and which of it (bool) the centre takes."""
    reach = 3 * delta  # where weights lie evenly, the mean is delta at a reach of 2 delta
    while True:
        start, stop = _slice(values, centre, reach)
        distance = relative_distance(values[start:stop], centre)
        # On the host: a running sum on a GPU comes out otherwise in its last digits each time.
        ascending = distance.sort().values.cpu()
        sums, counted = ascending.cumsum(0), (ascending > 0).cumsum(0)
        # Running means of an ascending list never fall.
        length = min(int((sums / counted.clamp_min(1) <= delta).count_nonzero()), needed)
        within = int((ascending <= reach).count_nonzero())  # no weight outside of the slice is so near
        settled = stop - start == values.numel() or length < within or length == needed <= within
        if not settled and length == within:  # the next one is beyond reach: is that too far for the mean?
            total, number = (float(sums[within - 1]), int(counted[within - 1])) if within else (0.0, 0)
            settled = (total + reach) / (number + 1) > delta
        if settled:
            break
        reach *= 2
    if length == 0:
        return start, stop, torch.zeros_like(distance, dtype=torch.bool)
    last = float(ascending[length - 1])
    taken = distance < last
    # Of those just as far as the last one, the first in the vector.
    level = torch.nonzero(distance == last).squeeze(1)
    ties = length - int(taken.count_nonzero())
    taken[level[at[start:stop][level].argsort()[:ties]]] = True
    return start, stop, taken


def _slice(values: Tensor, centre: float, reach: float) -> tuple[int, int]:
    """Where the values with D up to reach lie: w from ``c / (1 + reach)`` to ``c / (1 - reach)``."""
    if reach >= 1 - 1e-6:  # then D up to reach has no outer end, and the other sign may be within it
        return 0, values.numel()
    if centre == 0:
        low, high = -SMALLEST, SMALLEST
    else:
        slack = 1e-6  # outweighs every rounding of D and of the ends
        ends = centre / (1 + reach) * (1 - slack), centre / (1 - reach) * (1 + slack)
        low, high = min(ends), max(ends)
    bounds = values.new_tensor([low, high])
    return int(torch.searchsorted(values, bounds[0])), int(torch.searchsorted(values, bounds[1], right=True))


def _check(weights: Tensor, fixed: Tensor, fraction: float, delta: float) -> None:
    if weights.dim() != 1 or weights.shape != fixed.shape or weights.device != fixed.device:
        raise WeightError("weights and fixed are not flat tensors of one length on one device: flatten both")
    if weights.dtype not in (torch.float32, torch.float64) or fixed.dtype != torch.bool:
        raise WeightError(
            f"weights is {weights.dtype} and fixed {fixed.dtype}: they must be float32 or float64, and bool"
        )
    if not 0 <= fraction <= 1 or not 0 < delta < 1:
        raise WeightError(
            f"fraction is {fraction!r} and delta {delta!r}: allowed are 0 to 1, and between 0 and 1"
        )
    if not bool(torch.isfinite(weights).all()):
        position = int(torch.nonzero(~torch.isfinite(weights))[0])
        raise WeightError(f"weights[{position}] is {float(weights[position])}: every weight must be finite")
