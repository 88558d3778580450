"""Gaussian weights to few values: candidates, selection and one fixing round."""
