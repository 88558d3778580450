"""Inference from indices: weights stay as small as in the file and are looked up where they are used.

``pwfn.load(path).apply_to(model, weights="indices")`` lets the layers of a model compute from indices;
``capture(model, example)`` launches all of it as one CUDA graph.
"""

from pwfn.runtime.apply import Coded, apply_indices
from pwfn.runtime.cuda_graph import capture
from pwfn.runtime.layers import IndexedWeight
from pwfn.runtime.library import expand, index_dtype, indexed_conv2d, indexed_linear
from pwfn.runtime.reference import pack

__all__ = [
    "Coded",
    "IndexedWeight",
    "apply_indices",
    "capture",
    "expand",
    "index_dtype",
    "indexed_conv2d",
    "indexed_linear",
    "pack",
]
