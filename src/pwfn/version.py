"""The version, alone, so that any module may name it."""

__version__ = "0.2.0"
