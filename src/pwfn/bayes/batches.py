"""Batches of a data loader: split into inputs and target, moved to a device, named in errors."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Sized
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from pwfn.config import TrainingConfig
from pwfn.errors import DataError, PwfnError, TooLargeError, cause
from pwfn.zoo.epochs import as_tensor

_TARGET_KEYS = ("labels", "label", "target", "targets")
# What a model or a loss raises for a batch that it cannot process. Anything else is a bug of its own.
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
    """One batch: the arguments of the model, and the target of the loss."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    target: Any  # None for unlabelled data

    @classmethod
    def of(cls, raw: Any, device: torch.device, channels_last: bool = False) -> Batch:
        """From ``(x, y)``, ``(x1, x2, …, y)``, a mapping with ``labels`` or ``target``, or ``x`` alone."""

        def move(tensor: Tensor) -> Tensor:
            form = torch.channels_last if channels_last and tensor.dim() == 4 else torch.preserve_format
            moved = tensor.to(device, non_blocking=True, memory_format=form)
            return moved.clone() if moved.is_inference() else moved  # autograd takes none made in that mode

        raw = _map(move, raw)
        if isinstance(raw, dict):
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

    def through(self, model: Callable[..., Any], where: str) -> Any:
        """The model's output; a :class:`~pwfn.DataError` if the model cannot process the batch."""
        try:
            return model(*self.args, **self.kwargs)
        except BATCH_ERRORS as error:
            if is_out_of_memory(error):
                raise self.too_large(where) from error
            advice = ""
            if self.size == 1 and "more than 1 value per channel" in str(error):  # BatchNorm on a last batch
                advice = ": leave batches of one example out (drop_last=True)"
            elif self._looks_like_one_image():
                advice = ": if that is one image, stack images to a batch (torch.stack), or give a DataLoader"
            raise DataError(
                f"{where}: the model cannot take inputs {self.describe()}: {cause(error)}{advice}"
            ) from error

    def _looks_like_one_image(self) -> bool:
        shapes = [x.shape for x in _tensors((self.args, self.kwargs)) if x.is_floating_point()]
        return any(len(shape) == 3 and shape[0] in (1, 3) for shape in shapes)

    def too_large(self, where: str, fits: int | None = None) -> TooLargeError:
        """The error for a batch that does not fit in memory; ``fits``: the size that does, if known."""
        if fits is None:
            advice = "use smaller batches"
        elif fits == 0:
            advice = "not even one example fits: use a smaller model or image, or a larger device"
        else:
            advice = f"a batch of {fits:,} fits"
        return TooLargeError(f"{where}: out of memory with inputs {self.describe()}: {advice}")

    def first(self, count: int) -> Batch:
        """The first examples."""
        return self.part(0, count)

    def part(self, start: int, stop: int) -> Batch:
        """Some of the examples: these rows of every tensor that is as long as the batch."""
        size = self.size
        return self._mapped(lambda x: x[start:stop] if x.dim() > 0 and x.shape[0] == size else x)

    def parts(self, most: int) -> Iterator[Batch]:
        """Nearly equal parts of at most so many examples."""
        size = -(-self.size // -(-self.size // most))
        return (self.part(start, start + size) for start in range(0, self.size, size))

    def mixed(self, share: float) -> Batch:
        """Every example with ``1 - share`` of its neighbour added to ``share`` of itself.

        Batches with tensors of whole numbers, such as tokens, stay as they are.

        >>> Batch((torch.tensor([[0.0], [10.0]]),), {}, None).mixed(0.75).args[0].tolist()
        [[2.5], [7.5]]
        """
        size, found = self.size, list(_tensors((self.args, self.kwargs)))
        if not all(x.is_floating_point() and x.dim() > 0 and x.shape[0] == size for x in found):
            return self
        return replace(self._mapped(lambda x: share * x + (1 - share) * x.roll(1, 0)), target=None)

    def can_join(self, other: Batch) -> bool:
        """Whether the two are examples of one kind: alike but for their number."""
        both = ((batch.size, batch.tensors()) for batch in (self, other))
        whole = all(x.dim() > 0 and x.shape[0] == size for size, found in both for x in found)
        return whole and self.first(1).shape() == other.first(1).shape()

    def cloned(self) -> Batch:
        """A copy with its own tensors."""
        return self._mapped(Tensor.clone)

    def _mapped(self, function: Callable[[Tensor], Tensor]) -> Batch:
        return Batch(*_map(function, (self.args, self.kwargs, self.target)))

    def tensors(self) -> list[Tensor]:
        """Every tensor of inputs and target, in a fixed order."""
        return list(_tensors((self.args, self.kwargs, self.target)))

    def shape(self) -> tuple[Any, ...]:
        """What batches must have in common to replay one CUDA graph.

        Shape, type and strides of every tensor, and everything else as it is: numbers and words are part of a
        recording. An object that is neither is equal to no other one.

        >>> one, two = (Batch((torch.zeros(2), layer), {}, None) for layer in (1, 2))
        >>> one.shape() == one.shape(), one.shape() == two.shape()
        (True, False)
        """
        return _shape((self.args, self.kwargs, self.target))

    def describe(self) -> str:
        """Shapes and types of the inputs."""
        named = [("", value) for value in self.args] + [(f"{k}=", v) for k, v in self.kwargs.items()]
        return ", ".join(
            f"{name}{tuple(v.shape)} {str(v.dtype).removeprefix('torch.')}"
            if isinstance(v, Tensor)
            else f"{name}{type(v).__name__}"
            for name, v in named
        )


def is_out_of_memory(error: BaseException) -> bool:
    """Whether memory ran out; the CPU allocator raises a plain RuntimeError."""
    kinds = (MemoryError, torch.OutOfMemoryError)
    return isinstance(error, kinds) or "can't allocate memory" in str(error)


def _map(function: Callable[[Tensor], Tensor], value: Any) -> Any:
    """The same structure with the function applied to every tensor or array; lists become tuples."""
    value = as_tensor(value)
    if isinstance(value, Tensor):
        return function(value)
    if isinstance(value, Mapping):
        return {key: _map(function, item) for key, item in value.items()}
    return tuple(_map(function, item) for item in value) if isinstance(value, (tuple, list)) else value


def gathered(batches: Iterable[Batch], size: int) -> Iterator[Batch]:
    """Batches of at least ``size`` examples, joined from smaller ones where those can be.

    >>> [batch.size for batch in gathered([Batch((torch.ones(n, 1),), {}, None) for n in (2, 2, 9, 1)], 4)]
    [4, 9, 1]
    """
    held: list[Batch] = []
    for batch in batches:
        if held and not held[0].can_join(batch):
            yield _joined(held)
            held = []
        held.append(batch)
        if sum(each.size for each in held) >= size:
            yield _joined(held)
            held = []
    if held:
        yield _joined(held)


def cut(batches: Iterable[Batch], count: int) -> tuple[list[Batch], list[Batch]]:
    """The first ``count`` examples, and the others."""
    first, rest = [], []
    for batch in batches:
        own = min(batch.size, count)
        count -= own
        first += [batch.first(own)] if own else []
        rest += [batch.part(own, batch.size)] if own < batch.size else []
    return first, rest


def _joined(batches: Sequence[Batch]) -> Batch:
    if len(batches) == 1:
        return batches[0]
    columns = zip(*(batch.tensors() for batch in batches), strict=True)
    tensors = iter([torch.cat(column) for column in columns])
    return batches[0]._mapped(lambda _: next(tensors))


def _shape(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.shape, value.dtype, value.stride()
    if isinstance(value, Mapping):
        return tuple((key, _shape(item)) for key, item in value.items())
    if isinstance(value, (tuple, list)):
        return tuple(map(_shape, value))
    return value if value is None or isinstance(value, (bool, int, float, str)) else object()


def _tensors(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, Mapping):
        yield from _tensors(tuple(value.values()))
    elif isinstance(value, tuple):
        for item in value:
            yield from _tensors(item)


@dataclass(frozen=True)
class Source:
    """A data loader, its name in error messages, and the device its batches are moved to."""

    name: str
    loader: Iterable[Any]
    device: torch.device
    channels_last: bool = False  # memory format of images

    def steps_per_epoch(self, config: TrainingConfig) -> int:
        """Batches per epoch: ``training.steps_per_epoch``, or the loader's length."""
        loader = self._iterable()
        if config.steps_per_epoch is not None:
            return config.steps_per_epoch
        advice = "set training.steps_per_epoch to the number of its batches"
        if not isinstance(loader, Sized):
            raise DataError(f"{self.name} has no length: {advice}")
        try:
            length = len(loader)
        except Exception as error:  # for example, a DataLoader over a data set without a length
            raise DataError(f"{self.name} has no length ({cause(error)}): {advice}") from error
        if length == 0:
            raise DataError(f"{self.name} is empty: it has no batch to train or test on")
        return length

    def batches(self, epoch: int | None = None, start: int = 0) -> Iterator[Batch]:
        """One pass; where the loader numbers its epochs, epoch ``epoch`` from batch ``start``."""
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
            except Exception as error:  # a user's data set may raise anything
                raise DataError(f"{self.name} failed at batch {number}: {cause(error)}") from error
            yield Batch.of(raw, self.device, self.channels_last)

    def repeatable(self) -> Source:
        """Itself; an error for a generator, or Python's ``map`` or ``zip``, which give one pass only."""
        kind = type(self.loader)
        if isinstance(self.loader, Iterator) and kind.__module__ in ("builtins", "itertools"):
            raise DataError(
                f"{self.name} is a {kind.__name__}, which can be read only once: pass a loader that can be "
                "iterated again and again"
            )
        return self

    def endless(self, drawn: int = 0) -> Stream:
        """Pass after pass without end, as if ``drawn`` batches had been taken already."""
        return Stream(self, drawn)

    def apart(self) -> Source:
        """The same data, read by iterators of its own: a pass over it leaves other passes alone."""
        return replace(self, loader=_apart(self.loader))

    @property
    def has_epochs(self) -> bool:
        """Whether an epoch can start at any batch, as with :class:`pwfn.zoo.data.Epochs`."""
        return isinstance(self.loader, Sized) and callable(getattr(self.loader, "epoch", None))

    def _iterable(self) -> Iterable[Any]:
        if not isinstance(self.loader, Iterable) or isinstance(self.loader, str):
            raise DataError(
                f"{self.name} is a {type(self.loader).__name__}: allowed is an iterable of batches, such as "
                "a torch.utils.data.DataLoader"
            )
        return self.loader


class Stream:
    """An endless iterator over batches that counts them (``drawn``); an empty pass is an error."""

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
            empty, batches, start = True, source.batches(epoch, start), 0
            for batch in batches:
                empty = False
                yield batch
            if empty:
                only_once = f"gave nothing in pass {epoch + 1}: it can be read only once"
                why = "is empty" if epoch == 0 else only_once
                raise DataError(f"{source.name} {why}; pass a loader that can be iterated repeatedly")


def _apart(loader: Any) -> Any:
    """A shallow copy, with its own samplers, which may count passes; the data set is shared.

    Workers that persist serve one pass at a time, so that a DataLoader gets its own.
    """
    try:
        other = copy.copy(loader)
    except TypeError:  # a generator, say, which gives one pass only
        return loader
    for name, value in list(getattr(other, "__dict__", {}).items()):
        if isinstance(value, DataLoader) or name in ("sampler", "batch_sampler"):
            other.__dict__[name] = _apart(value)
    if isinstance(other, DataLoader):
        other._iterator = None
    return other


def device_of(model: nn.Module) -> torch.device:
    """The device of a model's parameters; the CPU where it has none."""
    parameters = model.parameters() if isinstance(model, nn.Module) else iter(())
    return next((p.device for p in parameters), torch.device("cpu"))
