"""Finds operations that make the host wait for a device, or whose shapes depend on data.

Neither can be captured in a CUDA graph. It works on a CPU, where nothing waits.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

_WAITS = {
    "aten::_local_scalar_dense",
    "aten::nonzero",
    "aten::masked_select",
    "aten::equal",
    "aten::bincount",
}
_INDEXES = {"aten::index.Tensor", "aten::index_put_", "aten::index_put", "aten::_index_put_impl_"}


class NoWaiting(TorchDispatchMode):
    """Within it, reading a number on the host and indexing by a mask are assertion errors."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.name()
        assert name not in _WAITS, name
        if name in _INDEXES:
            masks = [i for i in args[1] if isinstance(i, Tensor) and i.dtype in (torch.bool, torch.uint8)]
            assert not masks, f"{name} by a mask"
        return func(*args, **(kwargs or {}))
