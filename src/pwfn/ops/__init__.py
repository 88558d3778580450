"""The few hot operations on flat vectors: the plain versions are the truth."""

from pwfn.ops.reference import sample

__all__ = ["sample"]
