"""Makes the golden files of the current version of the format: ``python tests/golden/make.py``.

A golden file is what an older program wrote, and must stay readable. It is made once; this script refuses to
overwrite one, and a change of the format gets files with a new number beside the old ones.
"""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

HERE = Path(__file__).parent


class Small(nn.Module):
    """A convolution, a norm, and a linear layer that has two names."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(2, 4, 3, bias=False)
        self.norm = nn.BatchNorm2d(4)
        self.head = nn.Linear(4, 5)
        self.same = self.head
        self.register_buffer("mask", torch.tensor([True, False, True]))


def content(compressed: Any) -> dict[str, Any]:
    """Everything in a file, for people and for comparison: numbers as decimal text that is exact."""
    sigma = compressed.sigma
    return {
        "record": dict(compressed.record),
        "codebooks": [book.tolist() for book in compressed.codebooks],
        "indices": compressed.indices.tolist(),
        "sigma": None if sigma is None else sigma.tolist(),
        "dense": {
            name: {
                "dtype": str(tensor.dtype),
                "shape": list(tensor.shape),
                "values": tensor.reshape(-1).tolist(),
            }
            for name, tensor in compressed.dense_state_dict().items()
        },
    }


def as_text(facts: dict[str, Any]) -> str:
    """JSON with a line for each tensor."""
    dense = ",\n".join(
        f"  {json.dumps(name)}: {json.dumps(tensor)}" for name, tensor in facts["dense"].items()
    )
    rest = [f" {json.dumps(name)}: {json.dumps(facts[name])}" for name in facts if name != "dense"]
    return "{\n" + ",\n".join(rest) + ',\n "dense": {\n' + dense + "\n }\n}\n"


def networks() -> dict[str, tuple[Any, str]]:
    """Name of each file, the network in it, and how much of its posterior."""
    from pwfn import Compressed, Layout
    from pwfn.layout import untouched

    model = Small()
    state = {
        name: (torch.arange(tensor.numel()) * 3 % 17 / 8 - 1).view(tensor.shape).to(tensor.dtype)
        for name, tensor in model.state_dict().items()
        if name != "mask"
    }
    model.load_state_dict({**state, "mask": model.mask})
    layout = Layout.of(model)
    steps = torch.arange(layout.size)
    values = ((steps * steps) % 7 - 3) / 4
    sigma = (steps % 3 + 1) / 32
    record = {"method": "golden", "rounds": 3, "accuracy": 0.75}
    rest = untouched(model, layout)
    one = Compressed.of(layout, values, sigma, rest, record=record)
    several = Compressed.of(
        layout,
        values + (steps % 2) / 16,
        sigma,
        rest,
        divide=lambda entry: (0, entry.shape[0]),
        record=record,
    )
    return {
        "v1_centre": (one, "centre"),
        "v1_channels_weight": (several, "weight"),
        "v2_channels_weight": (several, "weight"),
        "v2_contexts": (neighbours_alike(record), "centre"),
        "v2_tensor": (replace(one, sigma_codes=(0, 150, 177)), "tensor"),
    }


def neighbours_alike(record: dict[str, Any]) -> Any:
    """A network whose streams are shorter with contexts: kernels of one sign, some of them empty."""
    from pwfn import Compressed, Layout
    from pwfn.layout import untouched

    model = nn.Sequential(nn.Conv2d(6, 10, 3, bias=False), nn.BatchNorm2d(10), nn.Linear(10, 12))
    state = {
        name: (torch.arange(tensor.numel()) * 5 % 11 / 16 + 0.5).view(tensor.shape).to(tensor.dtype)
        for name, tensor in model.state_dict().items()
    }
    model.load_state_dict(state)
    layout = Layout.of(model)
    steps = torch.arange(layout.size)
    kernels = steps // 9
    signs = 1 - 2 * (kernels * kernels // 3 % 2)
    values = signs * (kernels % 3 > 0) * (steps * steps // 5 % 3) / 8
    return Compressed.of(layout, values, (steps % 2 + 1) / 64, untouched(model, layout), record=record)


def main() -> None:
    """Write what is not there yet."""
    from pwfn import load

    for name, (compressed, posterior) in networks().items():
        path, text = HERE / f"{name}.pwfn", HERE / f"{name}.json"
        if path.exists() or text.exists():
            print(f"{path.name} is there and stays: golden files are not made again")
            continue
        compressed.save(path, posterior=posterior, version=int(name[1]))
        text.write_text(as_text(content(load(path))))
        print(f"{path.name}: {path.stat().st_size:,} bytes")


if __name__ == "__main__":
    sys.exit(main())
