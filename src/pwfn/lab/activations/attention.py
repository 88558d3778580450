"""Q-ViT's attention, inside any module that calls torch's attention function, and its distillation loss.

Li et al., "Q-ViT: Accurate and Fully Quantized Low-bit Vision Transformer", NeurIPS 2022, arXiv 2210.06707.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from pwfn.errors import LayoutError, WeightError
from pwfn.lab.activations.plan import ActivationKind, AttentionPlan
from pwfn.lab.activations.quantise import ActivationQuantiser

QueriesAndKeys = tuple[Tensor, Tensor]
"""Of one attention module, both of shape (batch, heads, tokens, head width)."""

_EPSILON = 1e-6
_HEADS = -3  # the axis of heads in (batch, heads, tokens, head width)


class Rectification(nn.Module):
    """Queries or keys re-centred and rescaled: ``gain (x - mu) / sqrt(sigma^2 + epsilon) + shift``.

    Mean and variance are those of one head of one sample, over its tokens and channels; gain and shift
    are learned, one pair per head. The paper writes ``mu(q)`` and ``sigma(q)`` without saying over what;
    its released program normalises every token on its own, starting from gain 1 and shift 0. That gives
    all tokens the same length, which no gain can undo. Statistics of the whole head keep tokens in
    proportion, and a gain that starts at the mean deviation and a shift that starts at the mean of a
    first batch put the rectified attention close to the original one.

    >>> rectification = Rectification(heads=1)
    >>> rectification.observing = True  # the next batch gives gain and shift
    >>> x = torch.tensor([[[[1.0, 3.0], [5.0, 7.0]]]])
    >>> torch.allclose(rectification(x), x)
    True
    >>> torch.allclose(rectification(10 * x + 3), x)  # another location and scale are undone
    True
    """

    def __init__(self, heads: int, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.gain = nn.Parameter(torch.ones(heads, dtype=dtype))
        self.shift = nn.Parameter(torch.zeros(heads, dtype=dtype))
        self.observing = False

    def forward(self, x: Tensor) -> Tensor:
        """``x`` and the result have the shape (batch, heads, tokens, head width)."""
        wide = _wide(x)
        variance, mu = torch.var_mean(wide, dim=(-2, -1), correction=0, keepdim=True)
        sigma = (variance + _EPSILON).sqrt()
        if self.observing:
            self._start(mu, sigma)
        gain, shift = (p.view(-1, 1, 1) for p in (self.gain, self.shift))
        return (gain * ((wide - mu) / sigma) + shift).to(x.dtype)

    @torch.no_grad()
    def _start(self, mu: Tensor, sigma: Tensor) -> None:
        """The least squares of ``out - x`` over the batch: the means of sigma and of mu per head."""
        self.observing = False
        heads = self.gain.numel()
        self.gain.copy_(sigma.reshape(-1, heads).mean(0))
        self.shift.copy_(mu.reshape(-1, heads).mean(0))


class RectifiedAttention(nn.Module):
    """Rectified queries and keys, and quantisers per head, for one attention module.

    ``Q(softmax(Q(q') Q(k')^T scale)) Q(v)`` with q' and k' the rectified queries and keys, and Q the
    quantisers if the plan has bits. It replaces ``scaled_dot_product_attention`` while the module runs:
    :meth:`enter` and :meth:`leave` are its hooks.
    """

    def __init__(self, plan: AttentionPlan, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.plan = plan
        self.rectifications = nn.ModuleDict()
        self.quantisers = nn.ModuleDict()
        if plan.rectified:
            self.rectifications["query"] = Rectification(plan.heads, dtype)
            self.rectifications["key"] = Rectification(plan.key_heads, dtype)
        if plan.bits is not None:
            for name, heads, signed in (
                ("query", plan.heads, True),
                ("key", plan.key_heads, True),
                ("value", plan.key_heads, True),
                ("probabilities", plan.heads, False),
            ):
                self.quantisers[name] = ActivationQuantiser(
                    ActivationKind.QVIT, plan.bits, heads, _HEADS, signed, dtype
                )
        self.captured: list[QueriesAndKeys] | None = None  # filled while it is a list
        self._modes: list[_Interception] = []

    def enter(self, module: nn.Module, args: Any) -> None:
        """Forward pre-hook of the module."""
        mode = _Interception(self)
        mode.__enter__()  # type: ignore[no-untyped-call]
        self._modes.append(mode)

    def leave(self, module: nn.Module, args: Any, result: Any) -> None:
        """Forward hook of the module, which is also called after a failure."""
        if self._modes:
            self._modes.pop().__exit__(None, None, None)  # type: ignore[no-untyped-call]

    def attend(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        *,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> Tensor:
        """Called instead of ``scaled_dot_product_attention``, with its arguments."""
        self._check(query, key, is_causal)
        if self.rectifications:
            query = self.rectifications["query"](query)
            key = self.rectifications["key"](key)
        if self.captured is not None:
            self.captured.append((query, key))
        if not self.quantisers:
            return F.scaled_dot_product_attention(
                query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa
            )
        query, key, value = (
            self.quantisers[name](x) for name, x in (("query", query), ("key", key), ("value", value))
        )
        return attention(query, key, value, attn_mask, dropout_p, scale, self.quantisers["probabilities"])

    def _check(self, query: Tensor, key: Tensor, is_causal: bool) -> None:
        plan = self.plan
        found = (query.shape[_HEADS], key.shape[_HEADS]) if query.dim() > 2 else (None, None)
        if found != (plan.heads, plan.key_heads):
            raise LayoutError(
                f"{plan.module}: its attention has {found[0]} heads of queries and {found[1]} of keys, its "
                f"projections have {plan.heads} and {plan.key_heads}: Q-ViT needs attention over tensors of "
                "shape (batch, heads, tokens, width)"
            )
        if is_causal and (self.rectifications or self.quantisers):
            raise LayoutError(
                f"{plan.module}: its attention is causal, but Q-ViT rectifies with statistics of all tokens, "
                "including later ones: choose another method, such as LSQ+"
            )

    def __getstate__(self) -> dict[str, Any]:
        # Captured tensors belong to a graph and modes to a forward pass: a copy has neither.
        return {**self.__dict__, "captured": None, "_modes": []}


def attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    dropout: float,
    scale: float | None,
    quantise: Callable[[Tensor], Tensor],
) -> Tensor:
    """``quantise(softmax(q k^T scale + mask)) v``; the scale is ``1 / sqrt(width)`` unless given.

    A boolean mask is False where nothing is attended to. With fewer heads of keys than of queries, each
    of them serves a group of query heads.

    >>> v = torch.tensor([[[1.0], [3.0]]])
    >>> attention(torch.zeros(1, 1, 2), torch.zeros(1, 2, 2), v, None, 0.0, None, nn.Identity()).item()
    2.0
    """
    groups = query.shape[_HEADS] // key.shape[_HEADS]
    if groups > 1:
        key, value = key.repeat_interleave(groups, _HEADS), value.repeat_interleave(groups, _HEADS)
    factor = 1 / math.sqrt(query.shape[-1]) if scale is None else scale
    logits = (query * factor) @ key.transpose(-2, -1)
    if mask is not None:
        logits = logits.masked_fill(~mask, -math.inf) if mask.dtype == torch.bool else logits + mask
    probabilities = F.dropout(logits.softmax(-1), dropout, training=dropout > 0)
    # Under autocast the softmax is float32 and the values are not.
    return quantise(probabilities).to(value.dtype) @ value


class _Interception(TorchFunctionMode):
    """While it is entered, calls of torch's attention function go to ``to``."""

    def __init__(self, to: RectifiedAttention) -> None:
        super().__init__()
        self.to = to

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is F.scaled_dot_product_attention:
            return self.to.attend(*args, **(kwargs or {}))
        return func(*args, **(kwargs or {}))


def similarity(x: Tensor) -> Tensor:
    """Similarity of patches, ``G = x x^T / ||x x^T||`` (Frobenius norm), for every sample and head.

    >>> similarity(torch.tensor([[3.0, 0.0], [0.0, 4.0]]) ** 0.5).tolist()
    [[0.6000000238418579, 0.0], [0.0, 0.800000011920929]]
    """
    products = x @ x.transpose(-2, -1)
    norm = torch.linalg.matrix_norm(products, keepdim=True)
    return products / norm.clamp_min(torch.finfo(products.dtype).tiny)


def similarity_distance(student: Sequence[QueriesAndKeys], teacher: Sequence[QueriesAndKeys]) -> Tensor:
    """Distribution-guided distillation: ``sum over layers and heads of ||G_q - G_q'|| + ||G_k - G_k'||``.

    G is the :func:`similarity` of the student's queries or keys, G' the teacher's, which gets no gradient.
    The result is the mean over the batch, computed in float32 or wider.

    >>> one, other = torch.eye(2)[None, None], torch.ones(1, 1, 2, 2)
    >>> similarity_distance([(one, one)], [(one, other)]).item()  # G_k = 0.7071 I, G_k' = 0.5 everywhere
    0.7653668522834778
    """
    if len(student) != len(teacher) or not student:
        raise WeightError(
            f"the student has {len(student)} attention modules and the teacher {len(teacher)}: pass the "
            "queries and keys of equally many, at least one"
        )
    # Modules of one shape are computed together: one by one they are many small operations.
    by_shape: dict[torch.Size, list[QueriesAndKeys]] = {}
    for pair, other in zip(student, teacher, strict=True):
        for ours, theirs in zip(pair, other, strict=True):
            by_shape.setdefault(ours.shape, []).append((_wide(ours), _wide(theirs.detach())))
    with torch.autocast(student[0][0].device.type, enabled=False):
        sums = []
        for pairs in by_shape.values():
            ours, theirs = (torch.stack(side) for side in zip(*pairs, strict=True))
            distance = torch.linalg.matrix_norm(similarity(ours) - similarity(theirs))
            sums.append(distance.flatten(1, -2).mean(1).sum())  # the mean over the batch, the sum of the rest
        return torch.stack(sums).sum()


def _wide(x: Tensor) -> Tensor:
    return x.to(torch.promote_types(x.dtype, torch.float32))
