"""WFN as plainly as it can be written: lists, loops, whole tables. Slow on purpose.

Nothing here is shared with `pwfn.lab.baselines.wfn_rounds`.
"""

from __future__ import annotations

import math

import numpy as np
import torch
from torch import Tensor

SMALLEST = 2.0**-7


def candidates(largest: float, d: float, omega: int) -> list[float]:
    """Return 0 and ± every point of the geometric grid in at most omega + 1 signed powers of two."""
    ratio = (1 + d) / (1 - d)
    points, k = [], 0
    while True:
        point = float(np.float32(SMALLEST * ratio**k))
        points.append(point)
        if point / (1 - d) >= largest * (1 - 1e-7):
            break
        k += 1
    powers = [2.0**e for e in range(-60, 60)]
    found = {0.0}
    for point in points:
        left, total = point, 0.0
        for _ in range(omega + 1):
            if left == 0:
                break
            power = min(powers, key=lambda p: (abs(abs(left) - p), p))
            power = math.copysign(power, left)
            total, left = total + power, left - power
        found |= {total, -total}
    return sorted(found)


def distance(w: float, c: float) -> float:
    """Return |w - c| / |w|; a weight below 2^-7 is on 0, and near nothing else."""
    if abs(w) < SMALLEST:
        return 0.0 if c == 0 else math.inf
    return abs(w - c) / abs(w)


def fix_round(
    weights: list[float],
    fixed: list[bool],
    fraction: float,
    delta: float,
    omega_max: int,
    cache: dict[tuple[float, int], list[float]],
) -> tuple[list[float], list[bool], list[tuple[float, int, float, int]]]:
    """Return weights, mask and choices after a round; the cache is for one delta's candidates."""
    weights, fixed = list(weights), list(fixed)
    size, steps = len(weights), []
    d, omega = delta, 0
    target = math.ceil(size * fraction - 1e-9)
    while sum(fixed) < target:
        free = [i for i in range(size) if not fixed[i]]
        largest = max(abs(weights[i]) for i in free)
        if (largest, omega) not in cache:
            cache[largest, omega] = candidates(largest, d, omega)
        centres = cache[largest, omega]
        votes = [0] * len(centres)
        table = np.abs(np.array(weights)[free][:, None] - np.array(centres)[None, :])
        for place, i in enumerate(free):
            small = abs(weights[i]) < SMALLEST
            votes[centres.index(0.0) if small else int(table[place].argmin())] += 1
        centre = centres[votes.index(max(votes))]
        total, number, taken = 0.0, 0, []
        for away, i in sorted((distance(weights[i], centre), i) for i in free):
            if sum(fixed) + len(taken) == target:
                break
            if away > 0:
                total, number = total + away, number + 1
                if total / number > delta:
                    break
            taken.append(i)
        if taken:
            for i in taken:
                weights[i], fixed[i] = centre, True
            steps.append((centre, omega, delta, len(taken)))
        elif omega < omega_max:
            omega += 1
        else:
            delta *= 2
    return weights, fixed, steps


def pull(
    weights: Tensor, centres: Tensor, free: Tensor, temperature: float = 0.05, nearest: int | None = None
) -> Tensor:
    """Return the mean softmin-weighted distance of the free weights, from a whole table and by autograd."""
    away = (weights[:, None] - centres).abs() / weights[:, None].abs()
    if nearest is not None:  # those of the smallest distance
        away = away.gather(1, away.detach().argsort(dim=1)[:, :nearest])
    p = torch.softmax(-away / temperature, dim=1)
    counted = free & (weights.detach().abs() >= SMALLEST)
    return (p * away).sum(1)[counted].sum() / free.sum()
