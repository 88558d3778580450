"""Running from indices: weights stay as they are in the file, and are looked up where they are used.

``pwfn.load(path).apply_to(model, weights="indices")`` replaces a model's layers with those of this package;
``memory_report(model)`` says what that takes.
"""

from pwfn.runtime.applying import apply_indices
from pwfn.runtime.layers import IndexedConv, IndexedEmbedding, IndexedLinear, IndexedWeight
from pwfn.runtime.library import expand, indexed_linear
from pwfn.runtime.report import Held, MemoryReport, memory_report

__all__ = [
    "Held",
    "IndexedConv",
    "IndexedEmbedding",
    "IndexedLinear",
    "IndexedWeight",
    "MemoryReport",
    "apply_indices",
    "expand",
    "indexed_linear",
    "memory_report",
]
