"""Weights from a file into a network; nothing in the file is ever run."""

from __future__ import annotations

import pickle
import warnings
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase

from pwfn.errors import FileError, PwfnError

_WRAPPERS = ("state_dict", "model")  # what training scripts keep the weights under
_PREFIXES = ("module.", "_orig_mod.")  # of DistributedDataParallel and torch.compile
_NAMED = 3  # names of each kind in a message


def load_weights(model: nn.Module, path: str | Path) -> dict[str, str]:
    """Load a file's weights into a network, and return what the file notes beside them.

    The file is safetensors, or of ``torch.save`` (read with ``weights_only``); then there are no
    notes. Every name and shape must fit, or the network stays as it was. The weights may lie
    under ``state_dict`` or ``model``, and their names may begin with ``module.``.
    """
    path = Path(path)
    try:
        with path.open("rb") as file:
            start = file.read(9)
    except OSError as error:
        raise FileError(f"{path}: the weights cannot be read: {error.strerror or error}") from error
    is_safetensors = start[8:] == b"{"  # after the header's length, 8 bytes; no file of torch has it there
    state, notes = _safetensors(path) if is_safetensors else (_torch(path), {})
    state = _bare(state)
    _check_fit(model, state, path)
    model.load_state_dict(state)
    return notes


def noted_classes(path: str | Path) -> int | None:
    """The number of classes that a safetensors file of ours notes; None where there is no such note."""
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, framework="pt") as file:
            noted = (file.metadata() or {}).get("classes", "")
    except (SafetensorError, OSError, ValueError):  # of torch, or unsound: load_weights will say so
        return None
    return int(noted) if noted.isdecimal() and 0 < int(noted) < 2**31 else None


def _safetensors(path: Path) -> tuple[dict[str, Tensor], dict[str, str]]:
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, framework="pt") as file:
            state = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118  # not a dict
            return state, dict(file.metadata() or {})
    except (SafetensorError, OSError, ValueError) as error:
        raise FileError(f"{path}: is not a sound safetensors file: {_first_line(error)}") from error


def _torch(path: Path) -> dict[str, Tensor]:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # about an unusual pickle, which then fails below
            found: Any = torch.load(path, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError as error:
        raise FileError(
            f"{path}: is neither safetensors nor a torch file of weights alone, and nothing else is "
            "loaded, since it could run code: save model.state_dict()"
        ) from error
    except Exception as error:  # torch, zipfile and pickle each have their own for a broken file
        raise FileError(
            f"{path}: is neither a sound safetensors nor a sound torch file: {_first_line(error)}"
        ) from error
    while isinstance(found, Mapping):
        inner = next((found[key] for key in _WRAPPERS if isinstance(found.get(key), Mapping)), None)
        if inner is None:
            break
        found = inner
    if not isinstance(found, Mapping) or not all(isinstance(value, Tensor) for value in found.values()):
        what = (
            f"a mapping with {_listed(str(key) for key in found)}"
            if isinstance(found, Mapping)
            else f"a {type(found).__name__}"
        )
        raise FileError(f"{path}: holds {what}, not weights by name: save model.state_dict()")
    return {str(name): value for name, value in found.items()}


def _bare(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The weights without prefixes that every name has."""
    bare = dict(state)
    while bare:
        prefix = next((p for p in _PREFIXES if all(name.startswith(p) for name in bare)), None)
        if prefix is None:
            break
        bare = {name.removeprefix(prefix): value for name, value in bare.items()}
    return bare


def _check_fit(model: nn.Module, state: Mapping[str, Tensor], path: Path) -> None:
    expected: dict[str, Any] = model.state_dict()
    # Older files lack BatchNorm's count of batches, and torch lets them.
    layers = [name for name, module in model.named_modules() if isinstance(module, _NormBase)]
    counters = {f"{name}.num_batches_tracked".removeprefix(".") for name in layers}
    missing = [name for name in expected if name not in state and name not in counters]
    strange = [name for name in state if name not in expected]
    shapes = [
        f"{name} ({_shape(state[name])}, the model's is {_shape(value)})"
        for name, value in expected.items()
        if name in state and isinstance(value, Tensor) and state[name].shape != value.shape
    ]
    parts = []
    if shapes:
        parts.append(f"of another shape: {_listed(shapes)}")
    if missing:
        parts.append(f"missing in the file: {_listed(missing)}")
    if strange:
        parts.append(f"unknown to the model: {_listed(strange)}")
    if parts:
        raise PwfnError(f"{path} does not fit the {type(model).__name__}: {'; '.join(parts)}")


def _listed(names: Iterable[str]) -> str:
    every = list(names)
    rest = f" and {len(every) - _NAMED:,} more" if len(every) > _NAMED else ""
    return ", ".join(every[:_NAMED]) + rest


def _shape(tensor: Tensor) -> str:
    return "×".join(str(n) for n in tensor.shape) or "scalar"


def _first_line(error: Exception) -> str:
    lines = str(error).strip().splitlines()
    return lines[0] if lines else type(error).__name__
