"""Data sources by name, and loaders whose epochs can be taken up again at any batch."""

from pwfn.data.arrays import digits, npz
from pwfn.data.described import INTERPOLATIONS, Data, DataOptions
from pwfn.data.epochs import Epochs, Loader, Repeated, as_epochs
from pwfn.data.folder import ImageLoader
from pwfn.data.sources import SOURCES, SourceKind, open_source
from pwfn.data.tensors import Split, TensorLoader

__all__ = [
    "INTERPOLATIONS",
    "SOURCES",
    "Data",
    "DataOptions",
    "Epochs",
    "ImageLoader",
    "Loader",
    "Repeated",
    "SourceKind",
    "Split",
    "TensorLoader",
    "as_epochs",
    "digits",
    "npz",
    "open_source",
]
