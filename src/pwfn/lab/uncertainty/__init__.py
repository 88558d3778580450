"""How reliable predictions are: an ensemble against its rivals, and out-of-distribution data."""
