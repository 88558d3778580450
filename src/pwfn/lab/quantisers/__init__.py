"""Quantisers with learned parameters: LSQ, LSQ+ and APoT, for weights and activations."""

from __future__ import annotations

from pwfn.lab.quantisers.apot import ApotQuantiser
from pwfn.lab.quantisers.lsq import Codes, LsqQuantiser, PartsQuantiser

__all__ = ["ApotQuantiser", "Codes", "LsqQuantiser", "PartsQuantiser"]
