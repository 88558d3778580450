"""Distance of a weight from a centre, in sigmas."""

from __future__ import annotations

from torch import Tensor


def distance(mu: Tensor, sigma: Tensor, centre: Tensor | float, floor: float = 2**-30) -> Tensor:
    """``D = |mu - c| / max(sigma, floor)`` (paper, eq. 6).

    >>> import torch
    >>> distance(torch.tensor([0.5, 0.375]), torch.tensor([0.25, 0.0]), 0.25, floor=0.25).tolist()
    [1.0, 0.5]
    """
    return (mu - centre).abs_().div_(sigma.clamp_min(floor))


def farthest(reach: float, largest_sigma: float) -> float:
    """The largest ``|mu - c|`` of a weight whose distance is at most ``reach``.

    >>> farthest(2.0, 0.25)
    0.5
    """
    return reach * largest_sigma
