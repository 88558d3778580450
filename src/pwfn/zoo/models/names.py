"""From a name to a network."""

from __future__ import annotations

import difflib
import runpy
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from torch import nn

from pwfn.errors import PwfnError
from pwfn.zoo.models.resnet import SmallResNet, cifar_resnet18, cifar_resnet20, cifar_resnet56
from pwfn.zoo.models.torchvision import ready_torchvision
from pwfn.zoo.models.vit import cifar_vit_tiny


def digits_resnet(classes: int = 10) -> nn.Module:
    """The demo's network for 8×8 grey images: seven convolutions and a linear layer."""
    return SmallResNet(blocks=1, channels=16, image_channels=1, classes=classes)


OWN: dict[str, Callable[..., nn.Module]] = {
    "cifar_resnet20": cifar_resnet20,
    "cifar_resnet56": cifar_resnet56,
    "cifar_resnet18": cifar_resnet18,
    "cifar_vit_tiny": cifar_vit_tiny,
    "digits_resnet": digits_resnet,
}


INPUT_SHAPES: dict[str, tuple[int, ...]] = {
    "cifar_resnet20": (3, 32, 32),
    "cifar_resnet56": (3, 32, 32),
    "cifar_resnet18": (3, 32, 32),
    "cifar_vit_tiny": (3, 32, 32),
    "digits_resnet": (1, 8, 8),
}


def create(name: str, *, pretrained: bool = False, classes: int | None = None, **options: Any) -> nn.Module:
    """A network by name: one of our own, ``python:FILE:FUNCTION``, or any that timm has.

    ``pretrained`` lets timm fetch its weights; ``classes`` is the number of outputs, where it is
    not the network's usual one. ``options`` go to the function that makes it. The file of
    ``python:`` is run: name only files that you trust.
    """
    if classes is not None and classes < 1:
        raise PwfnError(f"model {name!r} with {classes} classes: allowed is at least 1")
    is_file = name.startswith("python:")
    if pretrained and (is_file or name in OWN):
        what = "is made by your own function" if is_file else "is pwfn's own and has none to download"
        raise PwfnError(f"pre-trained weights of model {name!r}: it {what}: give them with --weights FILE")
    if is_file or name in OWN:
        counted = options if classes is None else {"classes": classes, **options}
        return _from_file(name, **counted) if is_file else _own(name, **counted)
    counted = options if classes is None else {"num_classes": classes, **options}
    return timm_model(name, **counted, **({"pretrained": True} if pretrained else {}))


def input_shape(name: str, model: nn.Module) -> tuple[int, ...] | None:
    """Shape of one input, where it is known: for our own networks, and for timm's."""
    known = getattr(model, "default_cfg", None) or {}
    shape = INPUT_SHAPES.get(name) or known.get("input_size")
    return tuple(shape) if shape else None


def _own(name: str, **options: Any) -> nn.Module:
    try:
        return OWN[name](**options)
    except TypeError as error:
        raise PwfnError(f"model {name!r} cannot be made: {error}") from error


def _from_file(name: str, **options: Any) -> nn.Module:
    path, _, function = name.removeprefix("python:").rpartition(":")
    if not path or not function:
        raise PwfnError(f"model {name!r} is not of the form python:FILE:FUNCTION")
    try:
        there = Path(path).is_file()
    except OSError as error:  # even to ask may be forbidden
        raise PwfnError(f"model {name!r}: cannot be read: {error.strerror or error}") from error
    if not there:
        raise PwfnError(f"model {name!r}: there is no file {path}")
    try:
        found = runpy.run_path(path).get(function)
        model = found(**options) if callable(found) else None
    except Exception as error:  # the file is the user's, and so may be any error in it
        raise PwfnError(f"model {name!r}: {path} failed: {type(error).__name__}: {error}") from error
    if not callable(found):
        raise PwfnError(f"model {name!r}: {path} defines no function {function}")
    if not isinstance(model, nn.Module):
        raise PwfnError(
            f"model {name!r}: {function} returned a {type(model).__name__}, not a torch.nn.Module"
        )
    return model


def timm_model(name: str, **options: Any) -> nn.Module:
    """``timm.create_model``, with torchvision made importable first (see ``ready_torchvision``)."""
    ready_torchvision()
    try:
        import timm
    except ImportError as error:
        raise PwfnError(
            f"model {name!r} needs timm: pip install 'pwfn[timm]'{_near(name, list(OWN), cutoff=0.8)}"
        ) from error
    if not timm.is_model(name):
        near = _near(name, [*OWN, *timm.list_models()])
        raise PwfnError(f"model {name!r} is not known to pwfn or timm{near or ': see timm.list_models()'}")
    try:
        model: nn.Module = timm.create_model(name, **options)
    except Exception as error:  # an unknown tag or option: each model raises its own
        if isinstance(error, OSError) and options.get("pretrained"):  # so are all errors of a download
            raise PwfnError(
                f"the pre-trained weights of model {name!r} cannot be downloaded "
                f"({type(error).__name__}): check the network, or give a file with --weights"
            ) from error
        raise PwfnError(f"timm cannot make model {name!r}: {error}") from error
    return model


def _near(name: str, names: list[str], cutoff: float = 0.6) -> str:
    """The end of a sentence about an unknown name: what may have been meant, or nothing."""
    base = name.partition(".")[0]  # what follows is timm's tag of the weights
    near = difflib.get_close_matches(base, names, n=3, cutoff=cutoff)
    return f": did you mean {' or '.join(repr(item) for item in near)}?" if near else ""


def recorded(record: Mapping[str, Any]) -> str:
    """The model that a file's record names; but a file may not choose which code is run.

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
    """The number of outputs that a file's record names; None for the network's usual number.

    A file may come from anyone: one that names more than 2^24 is not believed.

    >>> recorded_classes({"classes": 100}), recorded_classes({"classes": 2**40})
    (100, None)
    """
    classes = record.get("classes")
    return classes if type(classes) is int and 0 < classes <= 2**24 else None
