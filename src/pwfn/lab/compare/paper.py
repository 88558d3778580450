"""The paper's own figures (ImageNet), as printed in its tables, for reference: ``paper.toml``."""

from __future__ import annotations

import tomllib
from dataclasses import dataclass
from functools import cache
from importlib import resources
from typing import Any

WITHOUT_ENDS = " (w/o FL-Bias)"
"""Suffix of lines that count neither the first and last layer nor biases."""


@dataclass(frozen=True)
class PaperLine:
    """One line of the paper's table; what it leaves open is None."""

    method: str
    top1: float  # percent
    ensemble: float | None = None  # percent
    layer: bool | None = None  # whether every layer has a codebook of its own
    channel: bool | None = None  # every input channel
    attention: bool | None = None  # every attention head
    entropy_bits: float | None = None
    unique: int | None = None
    inner_entropy_bits: float | None = None  # without first and last layer and biases
    inner_unique: int | None = None
    epochs: int | None = None  # additional ones
    bits: int | None = None  # of its quantiser, where the paper says


@cache
def tables() -> dict[str, Any]:
    """The content of ``paper.toml``: source and data of the figures, networks, epochs and bits.

    >>> list(tables()["networks"])
    ['ResNet-18', 'ResNet-34', 'ResNet-50', 'DeiT-Small', 'DeiT-Tiny', 'DenseNet161']
    """
    text = resources.files("pwfn.lab.compare").joinpath("paper.toml").read_text(encoding="utf-8")
    return tomllib.loads(text)


def line(network: str, method: str) -> PaperLine | None:
    """The figures of a method for a network; None where the table has none.

    >>> found = line("ResNet-18", "PWFN")
    >>> found.top1, found.ensemble, found.entropy_bits, found.unique, found.epochs
    (70.0, 70.1, 2.5, 155, 27)
    >>> line("ResNet-50", "APoT") is None
    True
    """
    lines = tables()["networks"][network]
    if method not in lines:
        return None
    inner = lines.get(method + WITHOUT_ENDS, {})
    return PaperLine(
        method,
        **lines[method],
        inner_entropy_bits=inner.get("entropy_bits"),
        inner_unique=inner.get("unique"),
        epochs=tables()["epochs"].get(method),
        bits=tables()["bits"].get(method),
    )
