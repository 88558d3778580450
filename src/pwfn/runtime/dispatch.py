"""Registers an operation with torch: plain torch on every device, a Triton kernel on CUDA."""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import torch


def define(
    library: torch.library.Library, name: str, schema: str, reference: Callable[..., Any], kernels: str
) -> Any:  # torch has no public name for this class
    """Define ``torch.ops.pwfn.<name>`` and return it.

    ``reference`` runs on every device. Where Triton is installed, the function ``name`` of the module
    ``kernels`` runs on CUDA; that module, and Triton with it, is imported at the first call on a CUDA tensor.

    ``torch.library.custom_op`` is not used: its Python layers add about 0.1 ms to each call that writes in
    place, as long as the kernels themselves take.
    """

    def launch(*args: Any, **kwargs: Any) -> Any:
        return getattr(import_module(kernels), name)(*args, **kwargs)

    library.define(name + schema, tags=(torch.Tag.pt2_compliant_tag,))
    library.impl(name, reference, "CompositeExplicitAutograd")
    if find_spec("triton") is not None:  # does not import it
        library.impl(name, launch, "CUDA")
    return getattr(torch.ops.pwfn, name).default
