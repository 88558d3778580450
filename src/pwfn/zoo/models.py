"""Networks by name: pwfn's for small images, any of timm's and torchvision's, and yours from a Python file.

model = create("cifar_resnet20")
notes = load_weights(model, "resnet20.safetensors")
config = data_config("cifar_resnet20", model, notes)        # how its images are prepared
"""

from __future__ import annotations

import difflib
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import nn

from pwfn.errors import PwfnError, cause
from pwfn.zoo.function import user_function
from pwfn.zoo.networks import SmallResNet as SmallResNet
from pwfn.zoo.networks import SmallVGG as SmallVGG
from pwfn.zoo.networks import VisionTransformer as VisionTransformer
from pwfn.zoo.weights import load_weights as load_weights
from pwfn.zoo.weights import noted_classes as noted_classes


def digits_resnet(classes: int = 10) -> nn.Module:
    """The demo's network for 8×8 grey images: seven convolutions and a linear layer.

    >>> digits_resnet()(torch.zeros(2, 1, 8, 8)).shape
    torch.Size([2, 10])
    """
    return SmallResNet(blocks=1, image_channels=1, classes=classes)


OWN: dict[str, Callable[..., nn.Module]] = {
    "cifar_resnet20": partial(SmallResNet, blocks=3),
    "cifar_resnet56": partial(SmallResNet, blocks=9),
    "cifar_resnet18": partial(SmallResNet, blocks=2, channels=64, stages=4, project=True),
    "cifar_vgg16": SmallVGG,
    "cifar_vit_tiny": VisionTransformer,
    "digits_resnet": digits_resnet,
}


def create(name: str, *, pretrained: bool = False, classes: int | None = None, **options: Any) -> nn.Module:
    """A network by name: one of :data:`OWN`, ``python:FILE:FUNCTION``, or any of timm's and torchvision's.

    A name that both have is timm's; ``torchvision:NAME`` is torchvision's. ``pretrained`` lets them download
    the weights. ``classes`` is the number of outputs if it is not the network's usual one. ``options`` are
    passed to the function that makes it. The file of ``python:`` is run: name only files that you trust.

    >>> create("digits_resnet", classes=3).linear.out_features
    3
    """
    if classes is not None and classes < 1:
        raise PwfnError(f"model {name!r} with {classes} classes: allowed is at least 1")
    is_file = name.startswith("python:")
    if not is_file and name not in OWN:
        if classes is not None:
            options["num_classes"] = classes
        if (torchvisions := _torchvision_name(name)) is not None:
            return torchvision_model(torchvisions, pretrained=pretrained, **options)
        return timm_model(name, pretrained=pretrained, **options)
    if pretrained:
        own = ", or --weights random for those that its function gives" if is_file else ""
        raise PwfnError(f"model {name!r} has no pre-trained weights: give a file with --weights FILE{own}")
    if classes is not None:
        options["classes"] = classes
    make = user_function(name, PwfnError)[1] if is_file else OWN[name]
    try:
        model = make(**options)
    except Exception as error:  # the user's function may raise anything
        raise PwfnError(f"model {name!r} cannot be made: {cause(error)}") from error
    if not isinstance(model, nn.Module):
        raise PwfnError(f"model {name!r} is a {type(model).__name__}: allowed is a torch.nn.Module")
    return model


def timm_model(name: str, **options: Any) -> nn.Module:
    """``timm.create_model``, after :func:`ready_torchvision`."""
    ready_torchvision()
    try:
        import timm
    except ImportError as error:
        near = _near(name, list(OWN), cutoff=0.8)
        raise PwfnError(f"model {name!r} needs timm: pip install 'pwfn[timm]'{near}") from error
    if not timm.is_model(name):
        near = _near(name, list({**OWN, **dict.fromkeys([*timm.list_models(), *_torchvision_names()])}))
        raise PwfnError(
            f"model {name!r} is not known to pwfn, timm or torchvision{near or ': see timm.list_models()'}"
        )
    return _made("timm", name, lambda: timm.create_model(name, **options))


def torchvision_model(name: str, *, pretrained: bool = False, **options: Any) -> nn.Module:
    """A classifier of torchvision; ``pretrained``: its default weights."""
    from torchvision import models  # type: ignore[import-untyped]  # it has no types

    weights = "DEFAULT" if pretrained else None
    return _made("torchvision", name, lambda: models.get_model(name, weights=weights, **options))


def _made(library: str, name: str, make: Callable[[], nn.Module]) -> nn.Module:
    try:
        return make()
    except OSError as error:  # every failed download is one
        raise PwfnError(
            f"the pre-trained weights of model {name!r} cannot be downloaded "
            f"({type(error).__name__}): check the network, or give a file with --weights"
        ) from error
    except Exception as error:  # each model raises its own errors for an unknown tag or option
        raise PwfnError(f"{library} cannot make model {name!r}: {cause(error)}") from error


_TORCHVISION = "torchvision:"


def _torchvision_names() -> list[str]:
    """The classifiers of torchvision; none where it is not installed."""
    ready_torchvision()
    try:
        from torchvision import models
    except ImportError:
        return []
    return list(models.list_models(module=models))


def _torchvision_name(name: str) -> str | None:
    """What torchvision calls a network; None for one that it does not have, or that timm has too."""
    names, own = _torchvision_names(), name.removeprefix(_TORCHVISION)
    if own not in names:
        if own == name:
            return None
        raise PwfnError(f"model {name!r} is not known to torchvision{_near(own, names)}")
    if own != name:
        return own
    try:
        import timm
    except ImportError:  # whose network it is must not depend on what is installed
        return None
    return None if timm.is_model(name) else own


def _near(name: str, names: list[str], cutoff: float = 0.6) -> str:
    base = name.partition(".")[0]  # timm's tag of the weights follows
    near = difflib.get_close_matches(base, names, n=3, cutoff=cutoff)
    return f": did you mean {' or '.join(repr(item) for item in near)}?" if near else ""


_library: torch.library.Library | None = None


def ready_torchvision() -> None:
    """Declare two operators that torchvision's import expects, if its compiled part cannot be loaded.

    torchvision's wheels are compiled for CUDA builds of torch. With a CPU build the compiled part does not
    load, and importing its Python part, all that timm needs, fails because ``torchvision::nms`` does not
    exist. With the declarations the import works; calling the operators still fails.
    """
    global _library
    if torch.version.cuda is not None or hasattr(torch.ops.torchvision, "nms"):
        return
    _library = torch.library.Library("torchvision", "DEF")
    for name in ("nms", "qnms"):
        _library.define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")


def input_shape(name: str, model: nn.Module) -> tuple[int, ...] | None:
    """Shape of one input, channels first, if it is known: for pwfn's networks, timm's and torchvision's.

    >>> input_shape("digits_resnet", digits_resnet())
    (1, 8, 8)
    """
    if name in OWN:
        return (1, 8, 8) if name == "digits_resnet" else (3, 32, 32)
    shape = (getattr(model, "default_cfg", None) or {}).get("input_size")
    if not shape and (found := _torchvision_config(name)) is not None and found.image_size:
        return (3, found.image_size, found.image_size)
    return tuple(shape) if shape else None


def recorded(record: Mapping[str, Any]) -> str:
    """The model that a file's record names. A file may not choose code to run: ``python:`` is refused.

    >>> recorded({"model": "resnet18"})
    'resnet18'
    """
    name = record.get("model")
    if not isinstance(name, str):
        raise PwfnError("the file does not say which model it is of: name it with --model")
    if name.startswith("python:"):
        raise PwfnError(
            f"the file wants to run {name.removeprefix('python:')}: if you trust it, say --model {name}"
        )
    return name


def recorded_classes(record: Mapping[str, Any]) -> int | None:
    """The number of outputs in a file's record; None: the network's usual number.

    More than 2^24 is ignored: a file from a stranger must not make a huge network.

    >>> recorded_classes({"classes": 100}), recorded_classes({"classes": 2**40})
    (100, None)
    """
    classes = record.get("classes")
    return classes if type(classes) is int and 0 < classes <= 2**24 else None


@dataclass(frozen=True)
class DataConfig:
    """Normalisation, size and crop of the images that a network was trained on.

    An image is resized so that its shorter side is ``image_size / crop_pct``, its centre is cropped to
    ``image_size``, and each channel becomes ``(x - mean) / std`` with x in [0, 1]. If the size is not known,
    arrays keep theirs and image files get ImageNet's.
    """

    mean: tuple[float, ...]
    std: tuple[float, ...]
    image_size: int | None
    interpolation: str = "bicubic"
    crop_pct: float = 1.0

    def metadata(self) -> dict[str, str]:
        """The normalisation as metadata of a weight file.

        >>> DataConfig((0.5,), (0.25,), 8).metadata()
        {'normalize_mean': '0.5', 'normalize_std': '0.25'}
        """
        return {f"normalize_{key}": ",".join(map(repr, getattr(self, key))) for key in ("mean", "std")}


_CIFAR = DataConfig((0.4914, 0.4822, 0.4465), (0.2470, 0.2435, 0.2616), 32)
_DIGITS = DataConfig((0.0,), (1.0,), 8)
# ImageNet's, at any size.
_OTHER = DataConfig((0.485, 0.456, 0.406), (0.229, 0.224, 0.225), None, crop_pct=0.875)


def data_config(name: str, model: nn.Module, metadata: Mapping[str, str] | None = None) -> DataConfig:
    """How the images of a network are prepared.

    The ``metadata`` of its weight file decides the normalisation (``normalize_mean``, ``normalize_std``).
    Otherwise, and for the rest: CIFAR's for pwfn's networks (none for digits), timm's for its models, that
    of the default weights for torchvision's, and ImageNet's at any size for others.
    """
    config = _usual(name, model)
    notes = metadata or {}
    if "normalize_mean" not in notes and "normalize_std" not in notes:
        return config
    mean, std = (_numbers(notes.get(key, "")) for key in ("normalize_mean", "normalize_std"))
    if not mean or len(mean) != len(std) or not all(x > 0 for x in std):
        raise PwfnError(
            f"the weights' metadata has normalize_mean {notes.get('normalize_mean')!r} and normalize_std "
            f"{notes.get('normalize_std')!r}: allowed is one number of each per channel, with commas between "
            "them, the latter above 0"
        )
    return replace(config, mean=mean, std=std)


def _usual(name: str, model: nn.Module) -> DataConfig:
    if name in OWN:
        return _DIGITS if name == "digits_resnet" else _CIFAR
    if not getattr(model, "pretrained_cfg", None):
        return _torchvision_config(name) or _OTHER
    ready_torchvision()
    try:
        from timm.data import resolve_model_data_config
    except ImportError as error:
        raise PwfnError(f"{name}: model.pretrained_cfg needs timm: pip install 'pwfn[timm]'") from error
    try:
        found = resolve_model_data_config(model)
        return DataConfig(
            mean=tuple(map(float, found["mean"])),
            std=tuple(map(float, found["std"])),
            image_size=max(found["input_size"][1:]),
            interpolation=found["interpolation"],
            crop_pct=float(found["crop_pct"]),
        )
    except Exception as error:  # it may have been written by hand
        raise PwfnError(
            f"{name}: model.pretrained_cfg cannot be used: {cause(error)}: allowed is such as "
            '{"mean": (0.5,), "std": (0.25,), "input_size": (1, 28, 28)}'
        ) from error


def _torchvision_config(name: str) -> DataConfig | None:
    """How torchvision prepares images for the default weights of a network; None where it has none."""
    if name.startswith("python:") or (own := _torchvision_name(name)) is None:
        return None
    from torchvision import models

    found = models.get_model_weights(own).DEFAULT.transforms()
    size, resized = found.crop_size[0], found.resize_size[0]
    mean, std = tuple(found.mean), tuple(found.std)
    return DataConfig(mean, std, size, found.interpolation.value, crop_pct=size / resized)


def _numbers(text: str) -> tuple[float, ...]:
    """Numbers with commas between them; empty if any is not a finite number."""
    try:
        numbers = tuple(float(part) for part in text.split(","))
    except ValueError:
        return ()
    return numbers if all(map(math.isfinite, numbers)) else ()
