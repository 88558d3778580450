"""What loaders give: batches split for model and loss, on their device, and errors that name them."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Mapping, Sized
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from pwfn.config import TrainingConfig
from pwfn.errors import DataError, PwfnError, TooLargeError, cause

_TARGET_KEYS = ("labels", "label", "target", "targets")
# What a model or loss raises on a batch it cannot take; anything else is a fault of its own.
BATCH_ERRORS = (
    RuntimeError,
    TypeError,
    ValueError,
    IndexError,
    KeyError,
    AttributeError,
    AssertionError,
)


@dataclass(frozen=True)
class Batch:
    """What a loader gave, split into what the model takes and what the loss compares with."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    target: Any  # None for unlabelled data

    @classmethod
    def of(cls, raw: Any, device: torch.device, channels_last: bool = False) -> Batch:
        """``(x, y)``, ``(x1, x2, …, y)``, a mapping with ``labels`` or ``target``, or ``x`` alone."""
        raw = _moved(raw, device, channels_last)
        if isinstance(raw, Mapping):
            key = next((key for key in _TARGET_KEYS if key in raw), None)
            inputs = {str(name): value for name, value in raw.items() if name != key}
            return cls((), inputs, raw[key] if key else None)
        if isinstance(raw, tuple):
            return cls(raw[:-1], {}, raw[-1]) if len(raw) > 1 else cls(raw, {}, None)
        return cls((raw,), {}, None)

    @property
    def size(self) -> int:
        """Number of examples: the length of the first tensor."""
        sizes = (x.shape[0] for x in _tensors((self.args, self.kwargs)) if x.dim() > 0)
        return next(sizes, 1)

    def through(self, model: nn.Module, where: str) -> Any:
        """The model's output; a batch it cannot take is the user's to mend, and says so."""
        try:
            return model(*self.args, **self.kwargs)
        except BATCH_ERRORS as error:
            if is_out_of_memory(error):
                raise self.too_large(where) from error
            raise DataError(
                f"{where}: the model cannot take inputs {self.describe()}: {cause(error)}"
            ) from error

    def too_large(self, where: str, fits: int | None = None) -> TooLargeError:
        """The error for a batch that does not fit in memory; with ``fits``, what would, as tried out."""
        if fits is None:
            advice = "use smaller batches"
        elif fits == 0:
            advice = "not even one example fits: use a smaller model or image, or a larger device"
        else:
            advice = f"a batch of {fits:,} fits"
        return TooLargeError(f"{where}: out of memory with inputs {self.describe()}: {advice}")

    def first(self, count: int) -> Batch:
        """Its first examples: of every tensor as long as the batch, so many rows."""
        size = self.size

        def cut(value: Any) -> Any:
            if isinstance(value, Tensor):
                return value[:count] if value.dim() > 0 and value.shape[0] == size else value
            if isinstance(value, Mapping):
                return {key: cut(item) for key, item in value.items()}
            return tuple(cut(item) for item in value) if isinstance(value, tuple) else value

        return Batch(cut(self.args), cut(self.kwargs), cut(self.target))

    def tensors(self) -> list[Tensor]:
        """Every tensor of inputs and target, in one order."""
        return list(_tensors((self.args, self.kwargs, self.target)))

    def shape(self) -> tuple[Any, ...]:
        """What two batches must have in common to take the same way through a network."""
        return tuple((tensor.shape, tensor.dtype, tensor.stride()) for tensor in self.tensors())

    def cloned(self) -> Batch:
        """A copy with tensors of its own."""

        def clone(value: Any) -> Any:
            if isinstance(value, Tensor):
                return value.clone()
            if isinstance(value, Mapping):
                return {key: clone(item) for key, item in value.items()}
            return tuple(clone(item) for item in value) if isinstance(value, tuple) else value

        return Batch(clone(self.args), clone(self.kwargs), clone(self.target))

    def describe(self) -> str:
        """Shapes and number types of the inputs."""
        named = [("", value) for value in self.args] + [(f"{k}=", v) for k, v in self.kwargs.items()]
        return ", ".join(
            f"{name}{tuple(v.shape)} {str(v.dtype).removeprefix('torch.')}"
            if isinstance(v, Tensor)
            else f"{name}{type(v).__name__}"
            for name, v in named
        )


def is_out_of_memory(error: BaseException) -> bool:
    """Whether memory ran out; the CPU's allocator has no class of its own for that."""
    return isinstance(error, torch.OutOfMemoryError) or "can't allocate memory" in str(error)


def _tensors(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, Mapping):
        yield from _tensors(tuple(value.values()))
    elif isinstance(value, tuple):
        for item in value:
            yield from _tensors(item)


def _moved(raw: Any, device: torch.device, channels_last: bool) -> Any:
    if isinstance(raw, Tensor):
        form = torch.channels_last if channels_last and raw.dim() == 4 else torch.preserve_format
        return raw.to(device, non_blocking=True, memory_format=form)
    if isinstance(raw, Mapping):
        return {key: _moved(value, device, channels_last) for key, value in raw.items()}
    if isinstance(raw, (tuple, list)):
        return tuple(_moved(value, device, channels_last) for value in raw)
    return raw


@dataclass(frozen=True)
class Source:
    """A loader with its name in messages, on its way to a device."""

    name: str
    loader: Iterable[Any]
    device: torch.device
    channels_last: bool = False  # the order of images in memory

    def steps_per_epoch(self, config: TrainingConfig) -> int:
        """Batches in an epoch: as configured, or the loader's length."""
        loader = self._iterable()
        if config.steps_per_epoch is not None:
            return config.steps_per_epoch
        if not isinstance(loader, Sized):
            raise DataError(
                f"{self.name} has no length: set training.steps_per_epoch to the number of its batches"
            )
        try:
            length = len(loader)
        except Exception as error:  # a DataLoader over a data set without a length, say
            raise DataError(
                f"{self.name} has no length ({cause(error)}): set training.steps_per_epoch to the "
                "number of its batches"
            ) from error
        if length == 0:
            raise DataError(f"{self.name} is empty: it has no batch to train or test on")
        return length

    def batches(self, epoch: int | None = None, start: int = 0) -> Iterator[Batch]:
        """One pass; with ``epoch``, that one from batch ``start`` on, if the loader can tell them apart."""
        loader = self._iterable()
        iterator: Iterator[Any] | None = None
        for number in itertools.count(start + 1):
            try:
                if iterator is None:
                    numbered = epoch is not None and self.has_epochs
                    iterator = iter(loader.epoch(epoch, start) if numbered else loader)  # type: ignore[attr-defined]  # has_epochs
                raw = next(iterator)
            except StopIteration:
                return
            except PwfnError:
                raise
            except Exception as error:  # a user's data set may raise anything at all
                raise DataError(f"{self.name} failed at batch {number}: {cause(error)}") from error
            yield Batch.of(raw, self.device, self.channels_last)

    def endless(self, drawn: int = 0) -> Stream:
        """Pass after pass, from where ``drawn`` batches have been taken."""
        return Stream(self, drawn)

    @property
    def has_epochs(self) -> bool:
        """Whether the loader gives any epoch from any batch on, as :class:`pwfn.zoo.data.Epochs` does."""
        return isinstance(self.loader, Sized) and callable(getattr(self.loader, "epoch", None))

    def _iterable(self) -> Iterable[Any]:
        if not isinstance(self.loader, Iterable):
            raise DataError(
                f"{self.name} is a {type(self.loader).__name__}: allowed is an iterable of batches"
            )
        return self.loader


class Stream:
    """Batches without end, which knows how many have been taken; an empty pass is an error."""

    def __init__(self, source: Source, drawn: int = 0) -> None:
        self.drawn = drawn
        self._batches = self._passes(source, drawn)

    def __iter__(self) -> Iterator[Batch]:
        return self

    def __next__(self) -> Batch:
        batch = next(self._batches)
        self.drawn += 1
        return batch

    @staticmethod
    def _passes(source: Source, drawn: int) -> Iterator[Batch]:
        first, start = divmod(drawn, max(len(source.loader), 1)) if source.has_epochs else (0, 0)  # type: ignore[arg-type]  # Sized
        for epoch in itertools.count(first):
            empty = True
            for batch in source.batches(epoch, start):
                empty = False
                yield batch
            if empty:
                why = (
                    "is empty"
                    if epoch == 0
                    else f"gave nothing in pass {epoch + 1}: it can be read only once"
                )
                raise DataError(f"{source.name} {why}; pass a loader that can be iterated again and again")
            start = 0
