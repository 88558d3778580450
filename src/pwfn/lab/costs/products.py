"""How many products each weight takes part in, seen in one forward pass.

What is watched are the operations that torch runs and not the modules: so a weight that several layers
share, that is cut into q, k and v, or that a model multiplies by itself (``F.linear(x, other.weight)``) is
seen where it is used, as often as it is. A weight is known by its memory, of which a transposed, expanded
or cut tensor is a view.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._python_dispatch import TorchDispatchMode

from pwfn.errors import DataError, LayoutError, PwfnError, cause
from pwfn.file.compressed import Compressed
from pwfn.fixing import candidates as pow2
from pwfn.fixing.unique import unique
from pwfn.layout.coverage import check_model

Example: TypeAlias = Tensor | tuple[Any, ...] | Mapping[str, Any]
"""A tensor, a tuple of the model's inputs, or a mapping of them by name."""

_ORDERS = 32  # more than any float64 has: its 53 bits are at most 27 signed powers of two


@dataclass(frozen=True)
class Products:
    """Multiply-accumulates of one forward pass."""

    by_order: tuple[dict[int, int], ...]  # for each entry of the layout, by the order of the weight's value
    uncompressed: int  # without a compressed weight


def count_products(
    compressed: Compressed, model: nn.Module, example: Example, *, batch_axis: int = 0
) -> Products:
    """One forward pass of a dense model, as at inference; its own weights' values do not matter.

    A weight of a convolution takes part in as many products as there are output positions (of a transposed
    one: input positions), one of a linear layer in as many as there are tokens; each time that it is used.

    >>> from pwfn.layout import Layout
    >>> model = nn.Linear(2, 1, bias=False)
    >>> small = Compressed.of(Layout.of(model), torch.tensor([0.5, 0.0]), None, {})
    >>> count_products(small, model, torch.ones(1, 7, 2)).by_order
    ({0: 7, 1: 7},)
    """
    check_model(model)
    counter = _Counter(_codes(compressed, model))
    with _at_inference(model):
        _run(model, example, batch_axis, counter)
    entries = len(compressed.layout.entries)
    counts = torch.zeros(1 + _ORDERS * entries, dtype=torch.int64)
    for seen in counter.seen:
        counts[: len(seen)] += seen
    rows = counts[1:].view(entries, _ORDERS).tolist()
    return Products(
        tuple({order: n for order, n in enumerate(row) if n} for row in rows),
        counter.total - int(counts[1:].sum()),
    )


def _codes(compressed: Compressed, model: nn.Module) -> dict[int, Tensor]:
    """By address of memory, for each of its numbers: 1 + 32 × entry + order of a weight, 0 for others."""
    values, index = unique(compressed.values())
    orders = torch.tensor([pow2.order(value) for value in values.tolist()], dtype=torch.int32)[index]
    parameters = dict(model.named_parameters(remove_duplicate=False))
    codes: dict[int, Tensor] = {}
    for i, entry in enumerate(compressed.layout.entries):
        for name in (entry.name, *entry.aliases):
            weight = parameters.get(name)
            if weight is None or tuple(weight.shape) != entry.shape:
                there = "absent from" if weight is None else f"{tuple(weight.shape)} in"
                raise LayoutError(
                    f"{name} is {entry.shape} in the compressed network and {there} the model: pass a dense "
                    "model of the same architecture"
                )
            storage = weight.untyped_storage()
            if storage.data_ptr() == 0:
                raise LayoutError(f"{name} has no memory (device {weight.device}): load the model first")
            numbers = storage.nbytes() // weight.element_size()
            code = codes.setdefault(storage.data_ptr(), torch.zeros(numbers, dtype=torch.int32))
            own = orders[entry.span].view(entry.shape) + (1 + _ORDERS * i)
            code.as_strided(entry.shape, weight.stride(), weight.storage_offset()).copy_(own)
    return codes


Factors: TypeAlias = list[tuple[Tensor, int]]
"""Tensors of a product, and in how many products each of their numbers takes part; weights are the first."""


def _matrices(out: Tensor, a: Tensor, b: Tensor) -> Factors:
    """``(…, n, k) @ (…, k, p)``."""
    return [(b, a.shape[-2]), (a, b.shape[-1])]


def _matrix_vector(out: Tensor, a: Tensor, b: Tensor) -> Factors:
    return [(a, 1), (b, a.shape[0])]


def _vectors(out: Tensor, a: Tensor, b: Tensor) -> Factors:
    return [(b, 1), (a, 1)]


def _bilinear(out: Tensor, x: Tensor, weight: Tensor, *_: Any) -> Factors:
    """Of the two products of ``x weight y`` the one with the weight."""
    return [(weight, x.shape[0])]


def _added(factors: Callable[..., Factors]) -> Callable[..., Factors]:
    """The same, added to a first tensor."""
    return lambda out, _, a, b: factors(out, a, b)


def _convolution(
    out: Tensor,
    x: Tensor,
    weight: Tensor,
    bias: Any,
    stride: Any,
    pad: Any,
    wide: Any,
    transposed: bool,
    *_: Any,
) -> Factors:
    """Every position of the output meets every weight; of a transposed one every position of the input."""
    return [(weight, x.shape[0] * math.prod((x if transposed else out).shape[2:]))]


_aten = torch.ops.aten
_FACTORS: dict[Any, Callable[..., Factors]] = {
    _aten.mm: _matrices,
    _aten.bmm: _matrices,
    _aten.addmm: _added(_matrices),
    _aten.baddbmm: _added(_matrices),
    _aten.mv: _matrix_vector,
    _aten.addmv: _added(_matrix_vector),
    _aten.dot: _vectors,
    _aten._trilinear: _bilinear,
    _aten.convolution: _convolution,
}


class _Counter(TorchDispatchMode):
    """Runs every operation as it is, and counts the products of those that are made of them."""

    def __init__(self, codes: dict[int, Tensor]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch's own has no types
        self.total = 0
        self.seen: list[Tensor] = []  # products by code
        self._codes = codes

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        factors = _FACTORS.get(func.overloadpacket)
        if factors is None:
            # A linear layer of tensors that were made in inference mode comes here whole, for one.
            with self:
                out = func.decompose(*args, **kwargs)
            return func(*args, **kwargs) if out is NotImplemented else out
        out = func(*args, **kwargs)
        self._count(factors(out, *args))
        return out

    def _count(self, factors: Factors) -> None:
        first, uses = factors[0]
        self.total += first.numel() * uses
        for tensor, times in factors:
            code = self._codes.get(tensor.untyped_storage().data_ptr())
            if code is not None:
                self.seen.append(_by_code(code, tensor) * times)
                return  # a product of two weights is one product


def _by_code(code: Tensor, view: Tensor) -> Tensor:
    """How often each code occurs in a view of the weights' memory."""
    # An axis along which a weight is repeated has stride 0: counted once, and multiplied by its length.
    axes = [(n, step) for n, step in zip(view.shape, view.stride(), strict=True) if step]
    repeated = math.prod(n for n, step in zip(view.shape, view.stride(), strict=True) if not step)
    there = code.as_strided([n for n, _ in axes], [step for _, step in axes], view.storage_offset())
    return torch.bincount(there.reshape(-1)) * repeated


@contextmanager
def _at_inference(model: nn.Module) -> Iterator[None]:
    """In evaluation mode, and attention as products of matrices, not in one operation of its own."""
    modes = [(module, module.training) for module in model.modules()]
    fast = torch.backends.mha.get_fastpath_enabled()
    model.eval()
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        with torch.no_grad(), sdpa_kernel(SDPBackend.MATH):
            yield
    finally:
        torch.backends.mha.set_fastpath_enabled(fast)
        for module, training in modes:
            module.training = training


def _run(model: nn.Module, example: Example, batch_axis: int, counter: _Counter) -> None:
    args = example if isinstance(example, tuple) else () if isinstance(example, Mapping) else (example,)
    kwargs = example if isinstance(example, Mapping) else {}
    first = next((x for x in (*args, *kwargs.values()) if isinstance(x, Tensor)), None)
    if first is None:
        raise DataError("the example has no tensor: pass what the model takes, as a batch of one")
    if first.dim() <= batch_axis or first.shape[batch_axis] != 1:
        raise DataError(
            f"the example is {tuple(first.shape)}, and its axis {batch_axis} is not a batch of one: pass "
            "x[:1], or batch_axis= where the batch is another"
        )
    try:
        with counter:
            model(*args, **kwargs)
    except PwfnError:
        raise
    except Exception as error:  # a user's model may raise anything at all
        raise DataError(f"the model cannot take the example {tuple(first.shape)}: {cause(error)}") from error
