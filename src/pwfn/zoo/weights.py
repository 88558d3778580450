"""Weights from a file into a network; no code in the file is run."""

from __future__ import annotations

import pickle
import warnings
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase

from pwfn.errors import FileError, PwfnError, cause
from pwfn.file.writer import MAGIC

_WRAPPERS = ("state_dict", "model")  # keys under which training scripts store the weights
_PREFIXES = ("module.", "_orig_mod.")  # of DistributedDataParallel and torch.compile
_LISTED = 3  # names of each kind in a message


def load_weights(model: nn.Module, path: str | Path) -> dict[str, str]:
    """Load a file's weights into a network, and return the file's metadata.

    The file is safetensors, or written by ``torch.save`` (read with ``weights_only``), which has no
    metadata. All names and shapes must fit, otherwise the network is unchanged. The weights may be under
    ``state_dict`` or ``model``, and their names may begin with ``module.``.
    """
    path = Path(path)
    try:
        with path.open("rb") as file:
            start = file.read(9)
    except OSError as error:
        raise FileError(f"{path}: the weights cannot be read: {error.strerror or error}") from error
    if start.startswith(MAGIC):
        raise FileError(
            f"{path}: is a compressed network, not plain weights: export them with pwfn export {path} "
            "--to safetensors"
        )
    # The JSON header follows 8 bytes with its length; no file of torch has a brace there.
    state, metadata = _safetensors(path) if start[8:] == b"{" else (_torch(path), {})
    while prefix := next((p for p in _PREFIXES if state and all(k.startswith(p) for k in state)), None):
        state = {name.removeprefix(prefix): value for name, value in state.items()}
    _check_fit(model, state, path)
    model.load_state_dict(state)
    return metadata


def noted_classes(path: str | Path) -> int | None:
    """The number of classes in the metadata of a safetensors file; None if it has none."""
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, framework="pt") as file:
            noted = (file.metadata() or {}).get("classes", "")
    except (SafetensorError, OSError, ValueError):  # a file of torch, or broken: load_weights reports it
        return None
    return int(noted) if noted.isdecimal() and 0 < int(noted) < 2**31 else None


def _safetensors(path: Path) -> tuple[dict[str, Tensor], dict[str, str]]:
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, framework="pt") as file:
            state = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118  # not a dict
            return state, dict(file.metadata() or {})
    except (SafetensorError, OSError, ValueError) as error:
        raise FileError(f"{path}: is not a sound safetensors file: {cause(error)}") from error


def _torch(path: Path) -> dict[str, Tensor]:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # about an unusual pickle, which then fails below
            found: Any = torch.load(path, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError as error:
        raise FileError(
            f"{path}: is neither safetensors nor a torch file with only weights, and nothing else is "
            "loaded, since it could run code: save model.state_dict()"
        ) from error
    except Exception as error:  # torch, zipfile and pickle raise different errors for a broken file
        raise FileError(f"{path}: is neither safetensors nor a sound torch file: {cause(error)}") from error
    while isinstance(found, Mapping):
        inner = next((found[key] for key in _WRAPPERS if isinstance(found.get(key), Mapping)), None)
        if inner is None:
            break
        found = inner
    if not isinstance(found, Mapping) or not all(isinstance(value, Tensor) for value in found.values()):
        keys = f" with {_listed(map(str, found))}" if isinstance(found, Mapping) else ""
        what = f"{type(found).__name__}{keys}"
        raise FileError(f"{path}: holds a {what}, not weights by name: save model.state_dict()")
    return {str(name): value for name, value in found.items()}


def _check_fit(model: nn.Module, state: Mapping[str, Tensor], path: Path) -> None:
    expected: dict[str, Any] = model.state_dict()
    # Older files lack BatchNorm's count of batches, and load_state_dict accepts that.
    layers = [name for name, module in model.named_modules() if isinstance(module, _NormBase)]
    counters = {f"{name}.num_batches_tracked".removeprefix(".") for name in layers}
    problems = {
        "of another shape": [
            f"{name} ({_shape(state[name])}, the model's is {_shape(value)})"
            for name, value in expected.items()
            if name in state and isinstance(value, Tensor) and state[name].shape != value.shape
        ],
        "missing in the file": [name for name in expected if name not in state and name not in counters],
        "unknown to the model": [name for name in state if name not in expected],
    }
    parts = [f"{what}: {_listed(names)}" for what, names in problems.items() if names]
    if parts:
        raise PwfnError(f"{path} does not fit the {type(model).__name__}: {'; '.join(parts)}")


def _listed(names: Iterable[str]) -> str:
    every = list(names)
    rest = f" and {len(every) - _LISTED:,} more" if len(every) > _LISTED else ""
    return ", ".join(every[:_LISTED]) + rest


def _shape(tensor: Tensor) -> str:
    return "×".join(str(n) for n in tensor.shape) or "scalar"
