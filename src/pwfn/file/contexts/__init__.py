"""Coding of indices by their context: half of what the decoder knows is in the neighbours of a weight."""
