"""Dense weights as safetensors or as a torch state dict."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from pwfn.errors import FileError
from pwfn.file.compressed import Compressed
from pwfn.file.storage import replacing

_TYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


class Exactness(NamedTuple):
    """Whether the numbers survived the change of type."""

    dtype: str
    weights_exact: bool  # every compressed weight
    untouched_exact: bool  # every other floating-point tensor

    def sentence(self) -> str:
        """As text."""
        weights, rest = (
            "exact" if same else "rounded" for same in (self.weights_exact, self.untouched_exact)
        )
        return f"in {self.dtype} the compressed weights are {weights}, the other tensors {rest}"


def to_safetensors(compressed: Compressed, path: str | Path, dtype: str = "fp32") -> Exactness:
    """Write dense weights as safetensors, in ``fp32``, ``bf16`` or ``fp16``.

    Tied weights are written once, under their first name, as the format requires.
    """
    from safetensors.torch import save_file

    state, exactness = _converted(compressed, dtype)
    layout = compressed.layout
    aliases = {alias for entry in layout.entries for alias in entry.aliases}
    aliases |= {alias for item in layout.left_out for alias in item.aliases}
    once = {name: tensor.contiguous() for name, tensor in state.items() if name not in aliases}
    for name, tensor in once.items():
        if tensor.dtype == torch.complex128:
            raise FileError(
                f"{name} is complex128, which safetensors has no type for: write a torch state dict"
            )
    with replacing(path) as temporary:
        save_file(once, temporary, metadata={"format": "pt"})
    return exactness


def to_torch(compressed: Compressed, path: str | Path, dtype: str = "fp32") -> Exactness:
    """Write a state dict for ``torch.load(path, weights_only=True)``."""
    state, exactness = _converted(compressed, dtype)
    # A file object, because torch writes the name of a path into the archive, and the temporary one varies.
    with replacing(path) as temporary, temporary.open("wb") as file:
        torch.save(state, file)
    return exactness


def _converted(compressed: Compressed, dtype: str) -> tuple[dict[str, Tensor], Exactness]:
    if dtype not in _TYPES:
        raise FileError(f"dtype is {dtype!r}: allowed is one of {', '.join(_TYPES)}")
    state = compressed.dense_state_dict()
    exact = {"weights": True, "untouched": True}
    for name, tensor in state.items():
        if tensor.is_floating_point():
            state[name] = tensor.to(_TYPES[dtype])
            # Compared in the widest type, NaN equal to itself.
            same = torch.equal(state[name].double().nan_to_num(nan=0.0), tensor.double().nan_to_num(nan=0.0))
            exact["untouched" if name in compressed.untouched else "weights"] &= same
    return state, Exactness(dtype, exact["weights"], exact["untouched"])
