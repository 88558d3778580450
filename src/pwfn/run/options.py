"""What a run is asked for: names of network and data, and settings."""

from __future__ import annotations

import tomllib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pwfn.config import Config, MethodName
from pwfn.errors import ConfigError


@dataclass(frozen=True)
class RunOptions:
    """What a run is made of, beside its settings.

    >>> RunOptions("cifar_resnet20", "npz:cifar10.npz", Path("run"), weights="random").batch_size
    128
    """

    model: str  # one of our own, timm's, or python:FILE:FUNCTION; "" for the one that a file names
    data: str  # a source: npz:PATH, imagefolder:DIR, …
    out: Path
    weights: str = "pretrained"  # that (timm's own), a file, or "random"
    classes: int | None = None  # the network's outputs, where neither it nor the weights say
    device: str | None = None  # CUDA where there is one, unless given
    batch_size: int = 128  # of each process
    test_batch_size: int | None = None  # as suits the data, unless given
    workers: int = 4
    holdout: int = 0  # test on so many training images, held out, instead of the test images
    limit: int | None = None  # train on so many images only
    resume: bool = False
    checkpoint_minutes: float = 10.0
    tensorboard: bool = False  # curves as well
    posterior: str | None = None  # what the file keeps of it: centre (unless given), weight or none


@dataclass(frozen=True)
class TrustOptions:
    """What is asked beside accuracy: how far a file's predictions can be trusted.

    >>> TrustOptions().wanted, TrustOptions(samples=20).wanted
    (False, True)
    """

    samples: int = 0  # draws of the ensemble
    seed: int = 0  # of the draws
    original: str | None = None  # weights from before: a file, or "pretrained"
    ood: tuple[str, ...] = ()  # data from elsewhere, by name
    sigma_scale: float = 1.0
    out: Path | None = None  # a file for the table of rivals, as JSON
    recalibrate: int = 0  # training batches for the BatchNorm statistics of each draw; 0: not recalibrated

    @property
    def wanted(self) -> bool:
        """Whether anything is asked."""
        return bool(self.samples or self.ood or self.original or self.out or self.recalibrate)


def settings(
    preset: str | None,
    file: Path | None,
    changes: Sequence[str] = (),
    seed: int | None = None,
    max_drop: float | None = None,
    target_bits: float | None = None,
    method: str | None = None,
) -> Config:
    """The settings of a preset or a file for a method, with ``section.name=value`` changes on top.

    >>> settings("paper", None, ["clustering.rule=each", "clustering.b=8"]).clustering.b
    8
    """
    if preset and file:
        raise ConfigError("give --config or --preset, not both: a file names its own preset")
    if file and method:
        raise ConfigError("give --config or --method, not both: a file names its own method")
    config = Config.load(file) if file else Config.preset(preset or "recommended", method or MethodName.PWFN)
    named = {"seed": seed, "target.max_drop": max_drop, "target.bits": target_bits}
    given = {name: value for name, value in named.items() if value is not None}
    return config.override({**dict(_change(text) for text in changes), **given})


def _change(text: str) -> tuple[str, Any]:
    """One ``section.name=value``, the value as TOML has it; what is not TOML is text."""
    name, equals, value = text.partition("=")
    if not equals:
        raise ConfigError(f"{text!r} is not of the form section.name=value")
    try:
        return name.strip(), tomllib.loads(f"value = {value}")["value"]
    except tomllib.TOMLDecodeError:
        return name.strip(), value.strip()
