"""The paper's own figures (ImageNet), as printed in its tables: they stand beside ours, and are not ours.

They are in ``paper.toml``, with their source.
"""

from __future__ import annotations

import tomllib
from dataclasses import asdict, dataclass
from functools import cache
from importlib import resources
from typing import Any

from pwfn.config.checks import hint
from pwfn.errors import ConfigError

WITHOUT_ENDS = " (w/o FL-Bias)"
"""Ends the name of a line that is counted without first and last layer and without biases."""


@dataclass(frozen=True)
class PaperLine:
    """One line of the paper's table; what it leaves open is None."""

    network: str
    method: str
    layer: bool | None  # whether every layer has a codebook of its own
    channel: bool | None  # every input channel
    attention: bool | None  # every attention head
    top1: float  # percent
    ensemble: float | None  # percent
    entropy_bits: float | None
    unique: int | None
    inner_entropy_bits: float | None  # without first and last layer and biases
    inner_unique: int | None
    epochs: int | None  # extra ones
    bits: int | None  # of its quantiser, where the paper says

    def to_dict(self) -> dict[str, Any]:
        """For JSON."""
        return asdict(self)


@cache
def _tables() -> dict[str, Any]:
    text = resources.files("pwfn.lab.compare").joinpath("paper.toml").read_text(encoding="utf-8")
    return tomllib.loads(text)


def source() -> str:
    """Where the figures are from."""
    return str(_tables()["source"])


def data() -> str:
    """What the paper's networks were scored on."""
    return str(_tables()["data"])


def networks() -> list[str]:
    """The networks of the paper's table.

    >>> networks()
    ['ResNet-18', 'ResNet-34', 'ResNet-50', 'DeiT-Small', 'DeiT-Tiny', 'DenseNet161']
    """
    return list(_tables()["networks"])


def methods() -> list[str]:
    """Every method that the table has a line of, for any network."""
    lines = [name for table in _tables()["networks"].values() for name in table]
    return list(dict.fromkeys(name for name in lines if not name.endswith(WITHOUT_ENDS)))


def line(network: str, method: str) -> PaperLine | None:
    """The figures of a method for a network; None where the table has none.

    >>> found = line("ResNet-18", "PWFN")
    >>> found.top1, found.ensemble, found.entropy_bits, found.unique, found.epochs
    (70.0, 70.1, 2.5, 155, 27)
    >>> line("ResNet-50", "APoT") is None
    True
    """
    lines = _tables()["networks"][network]
    if method not in lines:
        return None
    own, inner = lines[method], lines.get(method + WITHOUT_ENDS, {})
    return PaperLine(
        network=network,
        method=method,
        layer=own.get("layer"),
        channel=own.get("channel"),
        attention=own.get("attention"),
        top1=own["top1"],
        ensemble=own.get("ensemble"),
        entropy_bits=own.get("entropy_bits"),
        unique=own.get("unique"),
        inner_entropy_bits=inner.get("entropy_bits"),
        inner_unique=inner.get("unique"),
        epochs=_tables()["epochs"].get(method),
        bits=_tables()["bits"].get(method),
    )


def check_network(name: str) -> None:
    """Refuse a network that the paper's table does not have."""
    if name not in networks():
        raise ConfigError(f"paper is {name!r}, no network of the paper's table{hint(name, networks())}")


def check_method(name: str) -> None:
    """Refuse a method that the paper's table does not have."""
    if name not in methods():
        raise ConfigError(f"paper is {name!r}, no method of the paper's table{hint(name, methods())}")
