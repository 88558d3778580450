"""Methods whose weights are multiples of one step: conditioned (quick) and rate (small)."""
