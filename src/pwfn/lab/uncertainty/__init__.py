"""How reliable predictions are: an ensemble against its rivals, out-of-distribution data, recalibration."""
