"""Quantised activations: inputs of layers, and Q-ViT's attention.

description = plan(model, Layout.of(model), ActivationKind.LSQ, bits=4)
attach(model, description)             # in place; the learned tensors are model.pwfn_activations.…
with observing(model), torch.no_grad():
    model(images)                      # the first batch gives the starting values
attach(other, describe(model)).load_state_dict(model.state_dict())
"""

from __future__ import annotations

from pwfn.lab.activations.attach import attach, capturing, describe, observing
from pwfn.lab.activations.attention import similarity_distance
from pwfn.lab.activations.plan import END_BITS, ActivationKind, plan, plan_capture

__all__ = [
    "END_BITS",
    "ActivationKind",
    "attach",
    "capturing",
    "describe",
    "observing",
    "plan",
    "plan_capture",
    "similarity_distance",
]
