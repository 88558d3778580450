"""Random states: seeded for a run, and restored afterwards."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest
import torch

from pwfn.bayes.randomness import seeded, undisturbed

CPU = torch.device("cpu")


def states() -> tuple[Any, ...]:
    kind, keys, position, has_gauss, cached = np.random.get_state()
    return torch.get_rng_state().tolist(), random.getstate(), kind, keys.tolist(), position, has_gauss, cached


def draws() -> tuple[float, ...]:
    return torch.rand(()).item(), random.random(), float(np.random.rand()), torch.randn(()).item()


def test_a_seeded_block_repeats_itself_and_leaves_every_random_state_as_it_was() -> None:
    before = states()
    with seeded(7, CPU):
        first = draws()
    assert states() == before
    draws()
    between = states()
    with seeded(7, CPU):
        assert draws() == first
    with seeded(8, CPU):
        assert all(a != b for a, b in zip(draws(), first, strict=True))
    assert states() == between


def test_a_seeded_block_that_fails_leaves_everything_as_it_was() -> None:
    before = states()
    flags = torch.backends.cudnn.deterministic, torch.backends.cudnn.benchmark

    def fail() -> None:
        with seeded(2**63 - 1, CPU):
            draws()
            assert torch.backends.cudnn.deterministic
            assert not torch.backends.cudnn.benchmark
            raise KeyError

    with pytest.raises(KeyError):
        fail()
    assert states() == before
    assert (torch.backends.cudnn.deterministic, torch.backends.cudnn.benchmark) == flags


class Nested:
    """Holds generators as a loader does: in itself, in its sampler, in its data set."""

    def __init__(self) -> None:
        self.torch, self.numpy = torch.Generator().manual_seed(1), np.random.default_rng(2)
        self.sampler = torch.utils.data.RandomSampler(range(9), generator=self.torch)
        self.python = random.Random(3)

    def draws(self) -> tuple[object, ...]:
        return draws(), list(self.sampler), self.numpy.random(), self.python.random()


def test_what_is_read_undisturbed_can_be_read_again() -> None:
    loader = Nested()
    for _ in range(2):
        with undisturbed(loader, None):
            first = loader.draws()
        assert loader.draws() == first


def test_what_fails_undisturbed_can_be_read_again_too() -> None:
    loader, drawn = Nested(), []

    def fail() -> None:
        with undisturbed(loader):
            drawn.append(loader.draws())
            raise KeyError

    with pytest.raises(KeyError):
        fail()
    assert loader.draws() == drawn[0]
