"""Coding of indices by their context in the tensor."""
