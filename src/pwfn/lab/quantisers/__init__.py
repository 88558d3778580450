"""Quantisers with learned parameters: LSQ, LSQ+ and APoT, for weights and activations."""

from __future__ import annotations

from pwfn.lab.quantisers.apot import ApotQuantiser
from pwfn.lab.quantisers.lsq import Codes, LsqQuantiser, PartsQuantiser
from pwfn.lab.quantisers.lsqplus import LsqPlusQuantiser

__all__ = ["ApotQuantiser", "Codes", "LsqPlusQuantiser", "LsqQuantiser", "PartsQuantiser"]
