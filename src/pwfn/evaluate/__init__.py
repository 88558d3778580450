"""Figures of a compressed network: entropy, accuracy, calibration, uncertainty. Import the submodules."""
