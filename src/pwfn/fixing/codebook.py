"""A codebook of at most so many values: those that can best be done without go."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from pwfn.errors import WeightError
from pwfn.fixing.unique import unique


def merged(values: Tensor, most: int) -> Tensor:
    """The vector with at most ``most`` distinct values, all of them among those it had.

    Time and again the value goes that costs least to do without, ``n (c - c')^2`` with its ``n`` elements and
    its nearest neighbour ``c'``, which they count for from then on (of equals the smallest). In the end every
    element whose value has gone takes the nearest that is left, the lower of two.

    >>> merged(torch.tensor([0.0, 0.0, 0.5, 0.75, 0.75, 1.0]), 3).tolist()
    [0.0, 0.0, 0.75, 0.75, 0.75, 1.0]
    """
    if not isinstance(most, int) or most < 1:
        raise WeightError(f"most is {most!r}: allowed is a whole number of at least 1")
    book, index = unique(values.detach())
    if book.numel() <= most:
        return values.detach().clone()
    numbers = book.double().cpu().numpy()
    counts = torch.bincount(index, minlength=book.numel()).double().cpu().numpy()
    left = np.arange(numbers.size)
    while left.size > most:
        gaps = np.diff(numbers[left])
        below, above = np.append(np.inf, gaps), np.append(gaps, np.inf)
        leaving = int((counts[left] * np.minimum(below, above) ** 2).argmin())
        heir = leaving - 1 if below[leaving] <= above[leaving] else leaving + 1
        counts[left[heir]] += counts[left[leaving]]
        left = np.delete(left, leaving)
    kept = numbers[left]
    nearest = np.searchsorted((kept[:-1] + kept[1:]) / 2, numbers)
    new = book[torch.from_numpy(left[nearest]).to(book.device)]
    return new[index]
