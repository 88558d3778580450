"""How each of our own networks is trained from scratch."""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass

from pwfn.config import Choice, Number, OptimizerName, Precision, Section, hint, setting
from pwfn.errors import ConfigError

_WHOLE, _SHARE, _BELOW_ONE = Number(1, whole=True), Number(0, 1), Number(0, math.nextafter(1, 0))


@dataclass(frozen=True)
class Recipe(Section):
    """How a network is trained from scratch.

    The learning rate rises linearly over the first ``warmup`` of the steps, then falls along half a cosine
    to zero. Weight decay applies to the weights of convolution and linear layers only.

    >>> Recipe(epochs=0)
    Traceback (most recent call last):
    ...
    pwfn.errors.ConfigError: recipe.epochs is 0: allowed is a whole number of at least 1
    """

    _name = "recipe"
    optimizer: OptimizerName = setting(OptimizerName.SGD, Choice(OptimizerName), "SGD has Nesterov momentum")
    epochs: int = setting(100, _WHOLE, "passes over the training data")
    batch_size: int = setting(512, _WHOLE, "of the training loader")
    learning_rate: float = setting(0.4, Number(0, above_low=True), "the peak")
    warmup: float = setting(0.1, _BELOW_ONE, "fraction of the steps")
    weight_decay: float = setting(5e-4, Number(0), "on weights of convolution and linear layers")
    momentum: float = setting(0.9, _BELOW_ONE, "the first beta of AdamW")
    clip_norm: float | None = setting(None, Number(0, above_low=True, optional=True), "of the gradient")
    label_smoothing: float = setting(0.0, _BELOW_ONE, "of the cross entropy")
    average: float = setting(0.0, _BELOW_ONE, "decay per step of a moving average; 0: none")
    cutout: int = setting(0, Number(0, whole=True), "side of the square erased in every image, in pixels")
    mixup: float = setting(0.0, _SHARE, "share of the batches that are mixed with themselves, reordered")
    cutmix: float = setting(0.0, _SHARE, "share of the batches with a rectangle from another image")
    precision: Precision = setting(Precision.FP32, Choice(Precision), "fp32 or bf16")
    seed: int = setting(0, Number(0, whole=True), "of the initial weights and everything drawn in training")

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.mixup + self.cutmix > 1:
            raise ConfigError(
                f"recipe.mixup is {self.mixup:g} and recipe.cutmix {self.cutmix:g}: both are shares of the "
                "batches, allowed is at most 1 together"
            )
        if self.precision is Precision.FP16:
            raise ConfigError("recipe.precision is 'fp16', which needs a loss scale: allowed is fp32 or bf16")


_SMALL = Recipe(epochs=100, batch_size=256, learning_rate=0.2, average=0.998, precision=Precision.BF16)
_RECIPES: dict[str, Recipe] = {
    "cifar_resnet20": _SMALL,
    "cifar_resnet56": dataclasses.replace(_SMALL, cutout=8),
    "cifar_resnet18": Recipe(label_smoothing=0.1, average=0.995, cutout=8, precision=Precision.BF16),
    # Half the usual peak for its batch size: without shortcuts, 13 layers need smaller steps.
    "cifar_vgg16": dataclasses.replace(_SMALL, learning_rate=0.1, label_smoothing=0.1, cutout=8),
    "cifar_vit_tiny": Recipe(
        optimizer=OptimizerName.ADAMW,
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
    <OptimizerName.ADAMW: 'adamw'>
    """
    if name not in _RECIPES:
        raise ConfigError(f"model {name!r} has no recipe for training from scratch{hint(name, _RECIPES)}")
    return _RECIPES[name]
