"""A codebook of limited size: values that are cheap to replace are merged into their neighbours."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from pwfn.errors import WeightError
from pwfn.fixing.unique import unique


def merge_rare(values: Tensor, max_size: int) -> Tensor:
    """The vector with at most ``max_size`` unique values, all of them from its own.

    The value that costs least is removed until few enough are left. The cost of c is ``n (c - c')^2``,
    with n its number of elements and c' its nearest neighbour, to which they count from then on. Of equal
    costs the smallest value is removed. At the end each element takes the nearest remaining value; midway
    between two, the lower one.

    >>> merge_rare(torch.tensor([0.0, 0.0, 0.5, 0.75, 0.75, 1.0]), 3).tolist()
    [0.0, 0.0, 0.75, 0.75, 0.75, 1.0]
    """
    if not isinstance(max_size, int) or max_size < 1:
        raise WeightError(f"max_size is {max_size!r}: allowed is a whole number of at least 1")
    codebook, index = unique(values.detach())
    if codebook.numel() <= max_size:
        return values.detach().clone()
    numbers = codebook.double().cpu().numpy()
    counts = torch.bincount(index, minlength=codebook.numel()).double().cpu().numpy()
    left = np.arange(numbers.size)
    while left.size > max_size:
        gaps = np.diff(numbers[left])
        below, above = np.append(np.inf, gaps), np.append(gaps, np.inf)
        removed = int((counts[left] * np.minimum(below, above) ** 2).argmin())
        neighbour = removed - 1 if below[removed] <= above[removed] else removed + 1
        counts[left[neighbour]] += counts[left[removed]]
        left = np.delete(left, removed)
    kept = numbers[left]
    nearest = np.searchsorted((kept[:-1] + kept[1:]) / 2, numbers)
    new = codebook[torch.from_numpy(left[nearest]).to(codebook.device)]
    return new[index]
