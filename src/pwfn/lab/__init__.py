"""Comparing and reproducing: baselines, tables of methods, training from scratch, costs."""

from pwfn.file.compressed import ATTACH
from pwfn.lab import activations

ATTACH["activations"] = activations.attach
