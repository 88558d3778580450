"""Dense weights, for whatever reads safetensors or a torch state dict."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from pwfn.errors import FileError
from pwfn.file.compressed import Compressed
from pwfn.file.storage import replacing

FLOATS = ("fp32", "bf16", "fp16")
_TYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


@dataclass(frozen=True)
class Exactness:
    """Whether the numbers survived the change of type."""

    dtype: str
    weights_exact: bool  # every value of every codebook
    untouched_exact: bool  # every floating-point tensor that was not compressed

    def sentence(self) -> str:
        """For people."""
        weights = "exact" if self.weights_exact else "rounded"
        rest = "exact" if self.untouched_exact else "rounded"
        return f"in {self.dtype} the compressed weights are {weights}, the other tensors {rest}"


def to_safetensors(compressed: Compressed, path: str | Path, dtype: str = "fp32") -> Exactness:
    """Write dense weights as safetensors, in ``fp32``, ``bf16`` or ``fp16``.

    Tied weights are written once, under their first name, as the format wants it.
    """
    from safetensors.torch import save_file

    state, exactness = _converted(compressed, dtype)
    layout = compressed.layout
    aliases = {alias for entry in layout.entries for alias in entry.aliases}
    aliases |= {alias for left_out in layout.left_out for alias in left_out.aliases}
    once = {name: tensor.contiguous() for name, tensor in state.items() if name not in aliases}
    with replacing(path) as temporary:
        save_file(once, temporary, metadata={"format": "pt"})
    return exactness


def to_torch(compressed: Compressed, path: str | Path, dtype: str = "fp32") -> Exactness:
    """Write a state dict that ``torch.load(path, weights_only=True)`` reads."""
    state, exactness = _converted(compressed, dtype)
    # A path would be named within the archive, and the temporary one differs each time.
    with replacing(path) as temporary, temporary.open("wb") as file:
        torch.save(state, file)
    return exactness


def _converted(compressed: Compressed, dtype: str) -> tuple[dict[str, Tensor], Exactness]:
    if dtype not in _TYPES:
        raise FileError(f"dtype is {dtype!r}: allowed is one of {', '.join(FLOATS)}")
    target = _TYPES[dtype]
    covered = {name for e in compressed.layout.entries for name in (e.name, *e.aliases)}
    state: dict[str, Tensor] = {}
    exact = {True: True, False: True}
    for name, tensor in compressed.dense_state_dict().items():
        if not tensor.is_floating_point():
            state[name] = tensor
            continue
        state[name] = tensor.to(target)
        # Compared in the wider type of the two, NaN equal to itself.
        same = torch.equal(state[name].double().nan_to_num(nan=0.0), tensor.double().nan_to_num(nan=0.0))
        exact[name in covered] &= same
    return state, Exactness(dtype, exact[True], exact[False])
