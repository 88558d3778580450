"""A model's compressed weights as one vector, and the reasons why other parameters are left out."""

from pwfn.layout.layout import Attention, Entry, Kind, Layout, LeftOut, held, untouched

__all__ = ["Attention", "Entry", "Kind", "Layout", "LeftOut", "held", "untouched"]
