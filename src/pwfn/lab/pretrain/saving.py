"""Trained weights to a file."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

from pwfn.file.storage import replacing
from pwfn.lab.pretrain.recipe import Recipe


def save_weights(model: nn.Module, path: str | Path, metadata: Mapping[str, Any]) -> None:
    """Write the weights as safetensors, whole or not at all.

    Of ``metadata``, sequences of numbers are joined by commas (``normalize_mean``,
    ``normalize_std``), a recipe becomes JSON, all else text; what is None is left out.
    """
    from safetensors.torch import save

    state = {
        name: tensor.detach().cpu().clone(memory_format=torch.contiguous_format)
        for name, tensor in model.state_dict().items()
    }
    content = save(state, {key: _text(value) for key, value in metadata.items() if value is not None})
    with replacing(path) as temporary:
        temporary.write_bytes(content)


def _text(value: Any) -> str:
    if isinstance(value, Recipe):
        return json.dumps(value.to_dict())
    if isinstance(value, (tuple, list)):
        return ",".join(str(item) for item in value)
    return str(value)
