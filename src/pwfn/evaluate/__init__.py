"""File to figures: scores, entropy, uncertainty, targets."""
