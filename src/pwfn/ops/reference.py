"""Plain torch, one line per formula."""

from __future__ import annotations

import torch
from torch import Tensor


def sample(mu: Tensor, sigma: Tensor, generator: torch.Generator | None = None) -> Tensor:
    """One draw of every weight, ``w = mu + sigma * eps`` with ``eps ~ N(0, 1)`` (paper, eq. 1).

    With g the gradient at w, autograd gives ``d/dmu = g`` and ``d/dsigma = g * eps``.

    >>> sample(torch.tensor([1.0, 2.0]), torch.zeros(2)).tolist()
    [1.0, 2.0]
    """
    if generator is None:
        noise = torch.randn_like(mu)
    else:
        noise = torch.randn(mu.shape, dtype=mu.dtype, device=mu.device, generator=generator)
    return torch.addcmul(mu, sigma, noise)
