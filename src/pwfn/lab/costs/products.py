"""How many products each weight takes part in, counted in one forward pass.

The counter observes torch operations, not modules. A weight is counted in every operation that uses it, also
if several layers share it, if it is split into q, k and v, or in ``F.linear(x, other.weight)``.
A weight is recognised by its memory, of which transposed, expanded and sliced tensors are views.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._python_dispatch import TorchDispatchMode

from pwfn.bayes.objective import evaluating
from pwfn.errors import DataError, LayoutError, PwfnError, cause
from pwfn.file.compressed import Compressed
from pwfn.fixing import candidates as pow2
from pwfn.fixing.unique import unique
from pwfn.layout.coverage import check_model

Example: TypeAlias = Tensor | tuple[Any, ...] | Mapping[str, Any]
"""A tensor, a tuple of the model's inputs, or a mapping of them by name."""

_ORDERS = 32  # more than any float64 has: its 53 bits are at most 27 signed powers of two


class Products(NamedTuple):
    """Multiply-accumulates of one forward pass."""

    by_order: tuple[dict[int, int], ...]  # for each entry of the layout, by the order of the weight's value
    uncompressed: int  # without a compressed weight


def count_products(compressed: Compressed, model: nn.Module, example: Example) -> Products:
    """Count in one forward pass of a dense model in evaluation mode; the values of its weights do not matter.

    A weight of a convolution takes part in one product per output position (of a transposed convolution:
    input position), a weight of a linear layer in one per token, every time it is used.

    >>> from pwfn.layout import Layout
    >>> model = nn.Linear(2, 1, bias=False)
    >>> small = Compressed.of(Layout.of(model), torch.tensor([0.5, 0.0]), None, {})
    >>> count_products(small, model, torch.ones(1, 7, 2)).by_order
    ({0: 7, 1: 7},)
    """
    check_model(model)
    entries = len(compressed.layout.entries)
    counter = _Counter(_codes(compressed, model), 1 + _ORDERS * entries)
    with _decomposed_attention(), evaluating(model), torch.no_grad():
        _run(model, example, counter)
    counts = counter.counts[1:]
    return Products(
        tuple({order: n for order, n in enumerate(row) if n} for row in counts.view(entries, -1).tolist()),
        counter.total - int(counts.sum()),
    )


def _codes(compressed: Compressed, model: nn.Module) -> dict[int, Tensor]:
    """By memory address, one code per number: 1 + 32 × entry + order for compressed weights, else 0."""
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


_aten = torch.ops.aten
_FIRST_OPERAND = {
    **dict.fromkeys((_aten.mm, _aten.bmm, _aten.mv, _aten.dot, _aten.convolution, _aten._trilinear), 0),
    **dict.fromkeys((_aten.addmm, _aten.baddbmm, _aten.addmv), 1),
}
"""The operations that consist of products, and the position of the first of their two operands."""


def _products(operation: Any, args: tuple[Any, ...], out: Tensor) -> tuple[int, tuple[Tensor, ...]]:
    """The number of products in an operation, and its tensors that may be weights, likely ones first."""
    first = _FIRST_OPERAND[operation]
    a, b = args[first], args[first + 1]
    if operation is _aten.convolution:
        is_transposed = args[6]  # then every weight meets every input position, else every output position
        return b.numel() * a.shape[0] * math.prod((a if is_transposed else out).shape[2:]), (b,)
    if operation is _aten._trilinear:  # of the two products of x weight y the one with the weight
        return b.numel() * a.shape[0], (b,)
    return out.numel() * a.shape[-1], (a, b) if a.dim() > b.dim() else (b, a)


class _Counter(TorchDispatchMode):
    """Runs every operation unchanged, and counts products by the code of their weight."""

    def __init__(self, codes: dict[int, Tensor], size: int) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch has no types for it
        self.total = 0
        self.counts = torch.zeros(size, dtype=torch.int64)
        self._codes = codes

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func.overloadpacket not in _FIRST_OPERAND:
            # Composite operations arrive whole in inference mode, such as a linear layer.
            with self:
                out = func.decompose(*args, **kwargs)
            return func(*args, **kwargs) if out is NotImplemented else out
        out = func(*args, **kwargs)
        self._count(*_products(func.overloadpacket, args, out))
        return out

    def _count(self, products: int, tensors: tuple[Tensor, ...]) -> None:
        self.total += products
        for tensor in tensors:
            code = self._codes.get(tensor.untyped_storage().data_ptr())
            if code is not None and tensor.numel():
                seen = _by_code(code, tensor) * (products // tensor.numel())
                self.counts[: len(seen)] += seen
                return  # a product of two weights is one product


def _by_code(code: Tensor, view: Tensor) -> Tensor:
    """How often each code occurs in a view of the weights' memory."""
    # An axis along which a weight is repeated has stride 0: counted once, and multiplied by its length.
    axes = [(n, step) for n, step in zip(view.shape, view.stride(), strict=True) if step]
    repeated = math.prod(n for n, step in zip(view.shape, view.stride(), strict=True) if not step)
    there = code.as_strided([n for n, _ in axes], [step for _, step in axes], view.storage_offset())
    return torch.bincount(there.reshape(-1)) * repeated


@contextmanager
def _decomposed_attention() -> Iterator[None]:
    """Attention as matrix products, not as one fused operation."""
    fast = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        with sdpa_kernel(SDPBackend.MATH):
            yield
    finally:
        torch.backends.mha.set_fastpath_enabled(fast)


def _run(model: nn.Module, example: Example, counter: _Counter) -> None:
    args = example if isinstance(example, tuple) else () if isinstance(example, Mapping) else (example,)
    kwargs = example if isinstance(example, Mapping) else {}
    first = next((x for x in (*args, *kwargs.values()) if isinstance(x, Tensor)), None)
    if first is None:
        raise DataError("the example has no tensor: pass what the model takes, as a batch of one")
    if first.shape[:1] != (1,):
        shape = tuple(first.shape)
        raise DataError(f"the example is {shape}, and not a batch of one along the first axis: pass x[:1]")
    try:
        with counter:
            model(*args, **kwargs)
    except PwfnError:
        raise
    except Exception as error:  # a user's model may raise any error
        raise DataError(f"the model cannot take the example {tuple(first.shape)}: {cause(error)}") from error
