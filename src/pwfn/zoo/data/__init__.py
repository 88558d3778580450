"""Data sources by name, and loaders whose epochs can be taken up again at any batch."""

from pwfn.zoo.data.arrays import digits, npz
from pwfn.zoo.data.described import INTERPOLATIONS, Data, DataOptions
from pwfn.zoo.data.epochs import Epochs, Loader, Repeated, as_epochs
from pwfn.zoo.data.folder import ImageLoader
from pwfn.zoo.data.sources import SOURCES, SourceKind, open_source
from pwfn.zoo.data.tensors import Split, TensorLoader

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
