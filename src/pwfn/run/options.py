"""What a run is started with: names of network and data, and settings."""

from __future__ import annotations

import tomllib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pwfn.config import Config
from pwfn.errors import ConfigError


@dataclass(frozen=True)
class RunOptions:
    """Network, data and folder of a run: everything except its settings.

    >>> RunOptions("cifar_resnet20", "npz:cifar10.npz", Path("run"), weights="random").batch_size
    128
    """

    model: str  # a name known to pwfn or timm, or python:FILE:FUNCTION; "": the one that a file names
    data: str  # a source: npz:PATH, imagefolder:DIR, images:DIR, …
    out: Path
    weights: str = "pretrained"  # "pretrained" (timm's or torchvision's), a file, or "random"
    classes: int | None = None  # outputs of the network, if neither the name nor the weights tell
    device: str | None = None  # None: CUDA if there is a device
    batch_size: int = 128  # per process
    test_batch_size: int | None = None  # None: chosen for the data
    workers: int = 4
    holdout: int = 0  # score on this many held-out training images instead of the test images
    limit: int | None = None  # train on this many images only
    resume: bool = False
    checkpoint_minutes: float = 10.0
    tensorboard: bool = False
    posterior: str | None = None  # which sigmas the file stores: tensor, centre, weight or none
    eval_data: str | None = None  # a source to score on, instead of the test images of data


@dataclass(frozen=True)
class TrustOptions:
    """What ``pwfn evaluate`` measures besides accuracy: how reliable the predictions are.

    >>> TrustOptions().wanted, TrustOptions(samples=20).wanted
    (False, True)
    """

    samples: int | None = None  # draws of the ensemble; None: 20 where a predictive sigma was fitted, else 0
    seed: int = 0  # of the draws
    original: str | None = None  # the weights before compression: a file, or "pretrained"
    ood: tuple[str, ...] = ()  # out-of-distribution data, by name
    sigma_scale: float = 1.0
    out: Path | None = None  # a file for the table of rivals, as JSON

    @property
    def wanted(self) -> bool:
        """Whether anything is asked."""
        return bool(self.samples or self.ood or self.original or self.out)


def settings(
    preset: str | None,
    file: Path | None,
    changes: Sequence[str] = (),
    seed: int | None = None,
    max_drop: float | None = None,
    target_bits: float | None = None,
    target_bytes: int | None = None,
    method: str | None = None,
) -> Config:
    """The settings of a preset or a file, then the ``section.name=value`` changes, then the named options.

    >>> settings("paper", None, ["fixing.rule=each", "fixing.grid_exponent=8"]).fixing.grid_exponent
    8
    """
    if preset and file:
        raise ConfigError("give --config or --preset, not both: a file names its own preset")
    if file and method:
        raise ConfigError("give --config or --method, not both: a file names its own method")
    config = Config.load(file) if file else Config.preset(preset or "recommended", method)
    named = {
        "seed": seed,
        "target.max_drop": max_drop,
        "target.bits": target_bits,
        "target.bytes": target_bytes,
    }
    given = {name: value for name, value in named.items() if value is not None}
    return config.override({**dict(_change(text) for text in changes), **given})


def _change(text: str) -> tuple[str, Any]:
    """One ``section.name=value``; the value is TOML, and text if it is not valid TOML."""
    name, equals, value = text.partition("=")
    if not equals:
        raise ConfigError(f"{text!r} is not of the form section.name=value")
    try:
        return name.strip(), tomllib.loads(f"value = {value}")["value"]
    except tomllib.TOMLDecodeError:
        return name.strip(), value.strip()
