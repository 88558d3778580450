"""How an operation is made known to torch: plain torch for every device, a kernel over it for CUDA."""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import torch


def define(
    library: torch.library.Library, name: str, schema: str, reference: Callable[..., Any], kernels: str
) -> Any:  # of a class that torch does not name in public
    """``torch.ops.pwfn.<name>``: the reference and, where Triton is installed, the kernel of that name.

    ``kernels`` is the module that has it; it is imported, and Triton with it, at the first call on a
    CUDA tensor. Where Triton is not installed the reference stays in force there too.

    Not by torch.library.custom_op, which is safer and slower: its layers of Python would take a tenth
    of a millisecond for each call that writes in place, as long as the kernels themselves.
    """
    library.define(name + schema, tags=(torch.Tag.pt2_compliant_tag,))
    library.impl(name, reference, "CompositeExplicitAutograd")
    if find_spec("triton") is not None:  # looks for it without importing it
        library.impl(name, _launcher(kernels, name), "CUDA")
    return getattr(torch.ops.pwfn, name).default


def _launcher(kernels: str, name: str) -> Callable[..., Any]:
    def launch(*args: Any, **kwargs: Any) -> Any:
        return getattr(import_module(kernels), name)(*args, **kwargs)

    return launch
