"""How a network is trained from scratch."""

from __future__ import annotations

import dataclasses
import difflib
import math
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, NoReturn

from pwfn.config import Precision
from pwfn.errors import ConfigError


class Optimizer(StrEnum):
    """What makes the steps."""

    SGD = "sgd"  # with Nesterov's momentum
    ADAMW = "adamw"


@dataclass(frozen=True)
class Recipe:
    """How a network is trained from scratch; every number is per step or per image.

    The learning rate rises in a line over the first ``warmup`` of the steps, then falls along half
    a cosine to zero. Weight decay is on the weights of convolutions and linear layers alone.
    """

    optimizer: Optimizer = Optimizer.SGD
    epochs: int = 100
    batch_size: int = 512  # of the training loader that is passed in
    learning_rate: float = 0.4  # its peak
    warmup: float = 0.1
    weight_decay: float = 5e-4
    momentum: float = 0.9  # the first beta of AdamW
    clip_norm: float | None = None
    label_smoothing: float = 0.0
    average: float = 0.0  # decay a step of the moving average of weights and buffers; 0: none
    cutout: int = 0  # side of the square that is blanked in every image, in pixels; 0: none
    mixup: float = 0.0  # share of the batches that are blended with themselves in another order
    cutmix: float = 0.0  # share of the batches where a rectangle comes from another image
    precision: Precision = Precision.FP32
    seed: int = 0

    def __post_init__(self) -> None:
        choices: tuple[tuple[str, tuple[StrEnum, ...]], ...] = (
            ("optimizer", tuple(Optimizer)),
            ("precision", (Precision.FP32, Precision.BF16)),  # the loop has no loss scale, as fp16 needs
        )
        for name, allowed in choices:
            if getattr(self, name) not in allowed:
                self._refuse(name, f"one of {', '.join(allowed)}")
            object.__setattr__(self, name, allowed[allowed.index(getattr(self, name))])
        for name, low in (("epochs", 1), ("batch_size", 1), ("cutout", 0), ("seed", 0)):
            value = getattr(self, name)
            if type(value) is not int or value < low:
                self._refuse(name, f"a whole number of at least {low}")
        for name in ("warmup", "momentum", "label_smoothing", "average"):
            if not _is_number(getattr(self, name)) or not 0 <= getattr(self, name) < 1:
                self._refuse(name, "a number of at least 0 and below 1")
        for name in ("mixup", "cutmix"):
            if not _is_number(getattr(self, name)) or not 0 <= getattr(self, name) <= 1:
                self._refuse(name, "a number from 0 to 1")
        if self.mixup + self.cutmix > 1:
            self._refuse("mixup", f"at most {1 - self.cutmix:g} beside cutmix {self.cutmix:g}")
        if not _is_number(self.learning_rate) or self.learning_rate <= 0:
            self._refuse("learning_rate", "a number above 0")
        if not _is_number(self.weight_decay) or self.weight_decay < 0:
            self._refuse("weight_decay", "a number of at least 0")
        if self.clip_norm is not None and (not _is_number(self.clip_norm) or self.clip_norm <= 0):
            self._refuse("clip_norm", "a number above 0, or None")

    def _refuse(self, name: str, allowed: str) -> NoReturn:
        raise ConfigError(f"recipe.{name} is {getattr(self, name)!r}: allowed is {allowed}") from None

    def to_dict(self) -> dict[str, Any]:
        """The recipe as plain values, for JSON."""
        return dataclasses.asdict(self)


def _is_number(value: object) -> bool:
    return type(value) in (int, float) and math.isfinite(value)  # type: ignore[arg-type]


_SMALL = Recipe(epochs=100, batch_size=256, learning_rate=0.2, average=0.998, precision=Precision.BF16)
_RECIPES: dict[str, Recipe] = {
    "cifar_resnet20": _SMALL,
    "cifar_resnet56": dataclasses.replace(_SMALL, cutout=8),
    "cifar_resnet18": Recipe(label_smoothing=0.1, average=0.995, cutout=8, precision=Precision.BF16),
    "cifar_vit_tiny": Recipe(
        optimizer=Optimizer.ADAMW,
        epochs=100,
        batch_size=512,
        learning_rate=1e-3,
        weight_decay=0.05,
        clip_norm=1.0,
        label_smoothing=0.1,
        average=0.998,
        mixup=0.3,
        cutmix=0.3,
        precision=Precision.BF16,
    ),
    "digits_resnet": Recipe(epochs=12, batch_size=32, learning_rate=0.1, average=0.98),
}


def recipe_for(name: str) -> Recipe:
    """The recipe of one of our own networks.

    >>> recipe_for("cifar_vit_tiny").optimizer
    <Optimizer.ADAMW: 'adamw'>
    """
    if name in _RECIPES:
        return _RECIPES[name]
    near = difflib.get_close_matches(name, _RECIPES, n=1)
    hint = f"did you mean {near[0]!r}?" if near else f"there is one for each of {', '.join(_RECIPES)}"
    raise ConfigError(f"model {name!r} has no recipe to train it from scratch: {hint}")


def rise_and_fall(progress: float, warmup: float) -> float:
    """Share of the peak learning rate after a share of the steps: a line up, half a cosine down.

    >>> [round(rise_and_fall(t, 0.2), 6) for t in (0.1, 0.2, 0.6, 1.0)]
    [0.5, 1.0, 0.5, 0.0]
    """
    if progress < warmup:
        return progress / warmup
    return (1 + math.cos(math.pi * min((progress - warmup) / (1 - warmup), 1.0))) / 2
