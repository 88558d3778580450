"""What a network computes between its weights: quantised inputs of layers, and Q-ViT's attention.

description = plan(model, Layout.of(model), ActivationKind.LSQ, bits=4)
attach(model, description)             # in place; its learned tensors are model.pwfn_activations.…
with observing(model), torch.no_grad():
    model(images)                      # starting values from a first batch
attach(other, describe(model)).load_state_dict(model.state_dict())
"""

from __future__ import annotations

from pwfn.lab.activations.attaching import NAME, attach, capturing, describe, observing
from pwfn.lab.activations.description import ActivationKind
from pwfn.lab.activations.planning import plan, plan_capture
from pwfn.lab.activations.similarity import similarity_distance

__all__ = [
    "NAME",
    "ActivationKind",
    "attach",
    "capturing",
    "describe",
    "observing",
    "plan",
    "plan_capture",
    "similarity_distance",
]
