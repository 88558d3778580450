"""Fixing is conditioning: weights still free take up the rounding error, from the inputs of their layer."""
