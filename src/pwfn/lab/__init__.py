"""Comparing and reproducing: baselines, tables of methods, training from scratch, costs.

Importing it registers the baselines as methods, and lets files with quantised activations be applied.
"""

from pwfn.file.compressed import ATTACH
from pwfn.lab import activations, baselines

__all__ = ["activations", "baselines"]

ATTACH["activations"] = activations.attach
