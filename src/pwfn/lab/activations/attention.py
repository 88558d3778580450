"""Q-ViT's attention, put between the projections of any module that calls torch's own attention function.

Li et al., "Q-ViT: Accurate and Fully Quantized Low-bit Vision Transformer", NeurIPS 2022.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from pwfn.errors import LayoutError
from pwfn.lab.activations.description import ActivationKind, AttentionFacts
from pwfn.lab.activations.quantising import ActivationQuantiser
from pwfn.lab.activations.similarity import QueriesAndKeys

_EPSILON = 1e-6
_HEADS = -3  # the axis of heads in (batch, heads, tokens, width of a head)


class Rectification(nn.Module):
    """Queries or keys re-centred and rescaled: ``gain (x - mu) / sqrt(sigma^2 + epsilon) + shift``.

    Mean and variance are those of a sample's head, over its tokens and channels; gain and shift are
    learned, one pair a head. The paper writes ``mu(q)`` and ``sigma(q)`` without saying over what; its
    released program normalises every token by itself, with gain 1 and shift 0 to start from. That
    makes all tokens equally long, which no gain undoes. Statistics of the whole head keep tokens in
    proportion, and with the gain started at the mean deviation and the shift at the mean of a first
    batch, the rectified attention begins next to the unrectified one.

    >>> rectification = Rectification(heads=1)
    >>> rectification.observing = True
    >>> x = torch.tensor([[[[1.0, 3.0], [5.0, 7.0]]]])
    >>> torch.allclose(rectification(x), x)  # of the batch that it started from, all is kept
    True
    >>> rectification.observing = False
    >>> torch.allclose(rectification(10 * x + 3), x)  # another location and scale are undone
    True
    """

    def __init__(self, heads: int, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.gain = nn.Parameter(torch.ones(heads, dtype=dtype))
        self.shift = nn.Parameter(torch.zeros(heads, dtype=dtype))
        self.observing = False
        self.seen = False

    def forward(self, x: Tensor) -> Tensor:
        """Of shape (batch, heads, tokens, width), and so is the result."""
        wide = x.to(torch.promote_types(x.dtype, torch.float32))
        variance, mu = torch.var_mean(wide, dim=(-2, -1), correction=0, keepdim=True)
        sigma = (variance + _EPSILON).sqrt()
        if self.observing and not self.seen:
            self._start(mu, sigma)
        gain, shift = (p.view(-1, 1, 1) for p in (self.gain, self.shift))
        return (gain * ((wide - mu) / sigma) + shift).to(x.dtype)

    @torch.no_grad()
    def _start(self, mu: Tensor, sigma: Tensor) -> None:
        """The least squares of ``out - x`` over the batch: the means of sigma and of mu, head by head."""
        self.seen = True
        heads = self.gain.numel()
        self.gain.copy_(sigma.reshape(-1, heads).mean(0))
        self.shift.copy_(mu.reshape(-1, heads).mean(0))


class RectifiedAttention(nn.Module):
    """What is done in one attention module: rectified queries and keys, and quantisers by head.

    ``softmax(Q(q') Q(k')^T scale)``, quantised in turn, times ``Q(v)``: with q' and k' the rectified
    queries and keys and Q the quantisers, which are there if the facts have bits. It takes the place of
    ``scaled_dot_product_attention`` while the module runs: :meth:`enter` and :meth:`leave` are its hooks.
    """

    def __init__(self, facts: AttentionFacts, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.facts = facts
        self.rectifications = nn.ModuleDict()
        self.quantisers = nn.ModuleDict()
        if facts.rectified:
            self.rectifications["query"] = Rectification(facts.heads, dtype)
            self.rectifications["key"] = Rectification(facts.key_heads, dtype)
        if facts.bits is not None:
            for name, heads, signed in (
                ("query", facts.heads, True),
                ("key", facts.key_heads, True),
                ("value", facts.key_heads, True),
                ("probabilities", facts.heads, False),
            ):
                self.quantisers[name] = ActivationQuantiser(
                    ActivationKind.QVIT, facts.bits, heads, _HEADS, signed, dtype
                )
        self.captured: list[QueriesAndKeys] | None = None  # filled while it is a list
        self.calls = 0  # of the attention function, in the module's last pass
        self._modes: list[_Interception] = []

    def enter(self, module: nn.Module, args: Any) -> None:
        """The module's forward pre-hook."""
        self.calls = 0
        mode = _Interception(self)
        mode.__enter__()  # type: ignore[no-untyped-call]  # torch's
        self._modes.append(mode)

    def leave(self, module: nn.Module, args: Any, result: Any) -> None:
        """The module's forward hook, called after a failure as well."""
        if self._modes:
            self._modes.pop().__exit__(None, None, None)  # type: ignore[no-untyped-call]  # torch's

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
        """In place of ``scaled_dot_product_attention``, and with its arguments."""
        self.calls += 1
        self._check(query, key, is_causal)
        if "query" in self.rectifications:
            query = self.rectifications["query"](query)
            key = self.rectifications["key"](key)
        if self.captured is not None:
            self.captured.append((query, key))
        if not self.quantisers:
            return F.scaled_dot_product_attention(
                query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa
            )
        return attention(
            self.quantisers["query"](query),
            self.quantisers["key"](key),
            self.quantisers["value"](value),
            attn_mask,
            dropout_p,
            scale,
            self.quantisers["probabilities"],
        )

    def _check(self, query: Tensor, key: Tensor, is_causal: bool) -> None:
        found = (query.shape[_HEADS], key.shape[_HEADS]) if query.dim() > 2 else (None, None)
        if found != (self.facts.heads, self.facts.key_heads):
            raise LayoutError(
                f"{self.facts.module}: its attention has {found[0]} heads of queries and {found[1]} of keys, "
                f"its projections have {self.facts.heads} and {self.facts.key_heads}: Q-ViT needs attention "
                "of (batch, heads, tokens, width)"
            )
        if is_causal and (self.rectifications or self.quantisers):
            raise LayoutError(
                f"{self.facts.module}: its attention is causal, and Q-ViT rectifies by all tokens, later "
                "ones included: choose another method for it, LSQ+ say"
            )

    def __getstate__(self) -> dict[str, Any]:
        # Captured tensors are part of a graph, and modes belong to a pass: copies have neither.
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

    A mask of booleans has False where nothing is attended to. Fewer heads of keys than of queries
    serve as many queries each.
    """
    shared = query.shape[_HEADS] // key.shape[_HEADS]
    if shared > 1:
        key, value = key.repeat_interleave(shared, _HEADS), value.repeat_interleave(shared, _HEADS)
    factor = 1 / math.sqrt(query.shape[-1]) if scale is None else scale
    logits = (query * factor) @ key.transpose(-2, -1)
    if mask is not None:
        logits = logits.masked_fill(~mask, -math.inf) if mask.dtype == torch.bool else logits + mask
    probabilities = F.dropout(logits.softmax(-1), dropout, training=dropout > 0)
    # Softmax is float32 under autocast, the values are not.
    return quantise(probabilities).to(value.dtype) @ value


class _Interception(TorchFunctionMode):
    """While it is entered, torch's attention function goes to a module of ours."""

    def __init__(self, to: RectifiedAttention) -> None:
        super().__init__()
        self.to = to

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is F.scaled_dot_product_attention:
            return self.to.attend(*args, **(kwargs or {}))
        return func(*args, **(kwargs or {}))
