"""The result as a value: a codebook, one index per weight, sigma, and what was left untouched."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from pwfn import ops
from pwfn.errors import LayoutError, WeightError
from pwfn.layout import Layout


@dataclass(frozen=True, eq=False)
class Compressed:
    """A network whose compressed weights are ``codebook[indices]``, all on the CPU.

    ``sigma`` has one entry per weight; ``untouched`` holds every other parameter and buffer by
    its state-dict name.

    >>> layout = Layout.of(nn.Linear(2, 1, bias=False))
    >>> small = Compressed.of(layout, torch.tensor([0.5, -0.25]), torch.zeros(2), {})
    >>> small.codebook.tolist(), small.indices.tolist()
    ([-0.25, 0.5], [1, 0])
    """

    layout: Layout
    codebook: Tensor
    indices: Tensor
    sigma: Tensor
    untouched: dict[str, Tensor]

    @classmethod
    def of(cls, layout: Layout, values: Tensor, sigma: Tensor, untouched: dict[str, Tensor]) -> Compressed:
        """From one value per weight: the distinct values, ascending, are the codebook."""
        if values.shape != (layout.size,) or sigma.shape != (layout.size,):
            raise WeightError(
                f"{values.numel():,} values and {sigma.numel():,} sigmas for a layout of "
                f"{layout.size:,} weights: all three must agree"
            )
        # + 0.0 turns -0.0 into 0.0, which would be a second zero in the codebook.
        codebook, indices = torch.unique(values.detach().cpu() + 0.0, return_inverse=True)
        return cls(
            layout,
            codebook,
            indices.to(_index_dtype(codebook.numel())),
            sigma.detach().cpu().clone(),
            {name: tensor.detach().cpu().clone() for name, tensor in untouched.items()},
        )

    def values(self) -> Tensor:
        """One value per weight, as a vector."""
        return self.codebook[self.indices.to(torch.int64)]

    def dense_state_dict(self) -> dict[str, Tensor]:
        """A state dict of the whole model, every compressed weight at its centre."""
        return self._state_dict(self.values())

    def sample(self, generator: torch.Generator | None = None) -> dict[str, Tensor]:
        """A state dict with every compressed weight drawn from ``N(centre, sigma)``."""
        return self._state_dict(ops.sample(self.values(), self.sigma, generator))

    def apply_to(self, model: nn.Module) -> nn.Module:
        """Load the weights into a model of the same architecture, and return it."""
        state = self.dense_state_dict()
        theirs = model.state_dict()
        differing = [
            f"{name} is {_shape(theirs, name)} in the model, {_shape(state, name)} here"
            for name in sorted(state.keys() | theirs.keys())
            if _shape(state, name) != _shape(theirs, name)
        ]
        if differing:
            more = f"; and {len(differing) - 10} more" if len(differing) > 10 else ""
            raise LayoutError("the model does not match: " + "; ".join(differing[:10]) + more)
        model.load_state_dict(state)
        return model

    def _state_dict(self, vector: Tensor) -> dict[str, Tensor]:
        weights = {name: view.clone() for name, view in self.layout.views(vector).items()}
        return weights | {name: tensor.clone() for name, tensor in self.untouched.items()}


def _shape(state: dict[str, Tensor], name: str) -> str:
    return "×".join(str(n) for n in state[name].shape) or "scalar" if name in state else "absent"


def _index_dtype(count: int) -> torch.dtype:
    if count <= 2**8:
        return torch.uint8
    return torch.int16 if count <= 2**15 else torch.int32
