"""Toy models that several test files use."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from pwfn.zoo.models import ready_torchvision

# --- layout, file, runtime, export ---------------------------------------------------------------


class Tied(nn.Module):
    """An embedding tied to the head, one layer under two names, a norm, and buffers of both kinds."""

    def __init__(self, tokens: int = 11, width: int = 6) -> None:
        super().__init__()
        self.embedding = nn.Embedding(tokens, width)
        self.first = nn.Linear(width, width)
        self.norm = nn.BatchNorm1d(width)
        self.second = self.first
        self.head = nn.Linear(width, tokens, bias=False)
        self.head.weight = self.embedding.weight
        self.register_buffer("scale", torch.tensor(2.0))
        self.register_buffer("not_saved", torch.tensor(3.0), persistent=False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.norm(self.first(self.embedding(tokens)).flatten(0, -2))
        return self.scale * self.head(self.second(x)).view(*tokens.shape, -1)


def tiny_gpt2() -> Any:
    """Two blocks, three heads, a head tied to the embedding."""
    ready_torchvision()
    import transformers

    sizes = {"n_layer": 2, "n_head": 3, "n_embd": 12, "vocab_size": 37, "n_positions": 16}
    return transformers.GPT2LMHeadModel(transformers.GPT2Config(**sizes, bos_token_id=0, eos_token_id=0))


def convnet() -> nn.Module:
    """A convolution, a BatchNorm and a linear layer, for inputs of 3×4×4."""
    return nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.Flatten(), nn.Linear(8 * 16, 5)
    )
