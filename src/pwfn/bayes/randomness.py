"""Random states: seed them for a run, save them for a checkpoint, restore them."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from types import ModuleType
from typing import Any

import numpy as np
import torch

from pwfn.config.seeds import seed_from

_MOST_ITEMS = 100  # a longer list holds examples, not transforms


def rank_seed(seed: int, rank: int) -> int:
    """The seed of one process of a run: the run's own for rank 0, an unrelated one for every other rank.

    >>> rank_seed(5, 0), rank_seed(5, 1) == rank_seed(6, 0)
    (5, False)
    """
    return seed if rank == 0 else seed_from("rank", seed, rank)


@contextmanager
def seeded(seed: int, device: torch.device) -> Iterator[None]:
    """Within the block all random states start from the seed, cuDNN is deterministic, gradients are recorded.

    Afterwards every state is restored, so that a run does not affect its caller.
    """
    # torch.manual_seed seeds every CUDA device, so the state of each must be restored.
    uses_cuda = device.type == "cuda" or torch.cuda.is_initialized()
    cuda = range(torch.cuda.device_count()) if uses_cuda else ()
    python_state, numpy_state = random.getstate(), np.random.get_state()
    cudnn = torch.backends.cudnn
    flags = cudnn.deterministic, cudnn.benchmark
    with torch.random.fork_rng(devices=cuda), torch.inference_mode(False), torch.enable_grad():
        try:
            torch.manual_seed(seed)
            random.seed(seed)
            np.random.seed(seed % 2**32)
            cudnn.deterministic, cudnn.benchmark = True, False
            yield
        finally:
            random.setstate(python_state)
            np.random.set_state(numpy_state)
            cudnn.deterministic, cudnn.benchmark = flags


def random_states() -> dict[str, Any]:
    """Every random state that a run uses, as plain values and tensors."""
    numpy_state: Any = np.random.get_state()
    name, keys, position, has_gauss, gauss = numpy_state
    version, internal, next_gauss = random.getstate()
    return {
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else [],
        "numpy": [str(name), torch.from_numpy(keys.astype(np.int64)), position, has_gauss, gauss],
        "python": [version, list(internal), next_gauss],
    }


def restore_random_states(states: dict[str, Any]) -> None:
    """Restore what ``random_states`` returned.

    >>> with seeded(0, torch.device("cpu")):
    ...     before = random_states()
    ...     first = torch.rand(())
    ...     restore_random_states(before)
    ...     bool(first == torch.rand(()))
    True
    """
    torch.set_rng_state(states["torch"])
    if states["cuda"]:
        torch.cuda.set_rng_state_all(states["cuda"])
    name, keys, position, has_gauss, gauss = states["numpy"]
    np.random.set_state((name, keys.numpy().astype(np.uint32), position, has_gauss, gauss))
    version, internal, next_gauss = states["python"]
    random.setstate((version, tuple(internal), next_gauss))


@contextmanager
def undisturbed(*readers: object) -> Iterator[None]:
    """Afterwards every random state is as it was, also those of generators that these loaders hold.

    >>> loader = torch.utils.data.DataLoader(range(9), shuffle=True, generator=torch.Generator())
    >>> with undisturbed(loader):
    ...     first = [int(x) for x in loader]
    >>> first == [int(x) for x in loader]
    True
    """
    states = random_states()
    held = [_restoring(generator) for reader in readers for generator in _generators(reader)]
    try:
        yield
    finally:
        restore_random_states(states)
        for restore in held:
            restore()


def _generators(reader: object) -> Iterator[Any]:
    """The generators that a loader holds: its own, its sampler's, its data set's, those of transforms."""
    seen, rest = set(), [reader]
    while rest:
        thing = rest.pop()
        if id(thing) in seen or isinstance(thing, (type, ModuleType)):
            continue
        seen.add(id(thing))
        if isinstance(thing, (torch.Generator, random.Random, np.random.RandomState, np.random.Generator)):
            yield thing
        elif isinstance(thing, (list, tuple, dict)):
            if len(thing) <= _MOST_ITEMS:
                rest += thing.values() if isinstance(thing, dict) else thing
        else:
            rest += getattr(thing, "__dict__", {}).values()


def _restoring(generator: Any) -> Callable[[], object]:
    if isinstance(generator, np.random.Generator):
        return partial(setattr, generator.bit_generator, "state", generator.bit_generator.state)
    if isinstance(generator, random.Random):
        return partial(generator.setstate, generator.getstate())
    return partial(generator.set_state, generator.get_state())
