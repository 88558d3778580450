"""How alike two networks' attention sees the patches: Q-ViT's distribution guided distillation."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from pwfn.errors import WeightError

QueriesAndKeys = tuple[Tensor, Tensor]
"""Of one attention module: both of shape (batch, heads, patches, width of a head)."""


def similarity(x: Tensor) -> Tensor:
    """``x x^T / ||x x^T||``, patch against patch, for every sample and head (the norm is Frobenius').

    >>> similarity(torch.tensor([[3.0, 0.0], [0.0, 4.0]]) ** 0.5).tolist()
    [[0.6000000238418579, 0.0], [0.0, 0.800000011920929]]
    """
    products = x @ x.transpose(-2, -1)
    norm = torch.linalg.matrix_norm(products, keepdim=True)
    return products / norm.clamp_min(torch.finfo(products.dtype).tiny)


def similarity_distance(student: Sequence[QueriesAndKeys], teacher: Sequence[QueriesAndKeys]) -> Tensor:
    """``sum over layers and heads of ||G_q - G_q'|| + ||G_k - G_k'||``, the mean over the batch.

    G is :func:`similarity` of queries or keys, the student's and the teacher's, which is not trained
    (Q-ViT's loss of distillation). In float32 or wider whatever the network computes in.

    >>> one, other = torch.eye(2)[None, None], torch.ones(1, 1, 2, 2)
    >>> similarity_distance([(one, one)], [(one, other)]).item()  # G_k: 0.7071 I and 0.5 everywhere
    0.7653668522834778
    """
    if len(student) != len(teacher) or not student:
        raise WeightError(
            f"queries and keys of {len(student)} and {len(teacher)} attention modules: they must be as many"
        )
    # Those of one shape at once, which are all of most networks: it is many small operations otherwise.
    by_shape: dict[torch.Size, list[QueriesAndKeys]] = {}
    for pair, other in zip(student, teacher, strict=True):
        for ours, theirs in zip(pair, other, strict=True):
            by_shape.setdefault(ours.shape, []).append((_wide(ours), _wide(theirs.detach())))
    with torch.autocast(student[0][0].device.type, enabled=False):
        sums = []
        for pairs in by_shape.values():
            ours, theirs = (torch.stack(side) for side in zip(*pairs, strict=True))
            distance = torch.linalg.matrix_norm(similarity(ours) - similarity(theirs))
            # Over all but heads and what was put together: the batch, whose mean it is.
            sums.append(distance.flatten(1, -2).mean(1).sum())
        return torch.stack(sums).sum()


def _wide(x: Tensor) -> Tensor:
    return x.to(torch.promote_types(x.dtype, torch.float32))
