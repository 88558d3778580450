"""Quantisers with learned parameters: LSQ, LSQ+ and APoT, of weights and of activations."""

from __future__ import annotations

from pwfn.lab.quantisers.apot import AlphaGradient, ApotQuantiser
from pwfn.lab.quantisers.lsq import Codes, LsqQuantiser, signed_codes, unsigned_codes
from pwfn.lab.quantisers.lsqplus import LsqPlusQuantiser
from pwfn.lab.quantisers.parts import PartsQuantiser
from pwfn.lab.quantisers.protocol import WeightQuantiser

__all__ = [
    "AlphaGradient",
    "ApotQuantiser",
    "Codes",
    "LsqPlusQuantiser",
    "LsqQuantiser",
    "PartsQuantiser",
    "WeightQuantiser",
    "signed_codes",
    "unsigned_codes",
]
