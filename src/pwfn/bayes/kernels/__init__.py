"""The few hot operations on flat vectors; ``reference`` says what each one computes."""

from pwfn.bayes.kernels.library import adamw_, draw, draw_, draw_backward, grad_squared_norm, sgd_
from pwfn.bayes.kernels.reference import free_offsets, sample, unpacked

__all__ = [
    "adamw_",
    "draw",
    "draw_",
    "draw_backward",
    "free_offsets",
    "grad_squared_norm",
    "sample",
    "sgd_",
    "unpacked",
]
