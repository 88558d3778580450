"""What loaders give: batches split for model and loss, and errors that name them."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, IterableDataset, TensorDataset

from pwfn.bayes.batches import Batch, Source
from pwfn.config import TrainingConfig
from pwfn.errors import DataError, LayoutError
from pwfn.zoo.epochs import batched

CPU = torch.device("cpu")


def source(loader: Iterable[Any]) -> Source:
    return Source("train_loader", loader, CPU)


def assert_batch(batch: Batch, args: tuple[Any, ...], kwargs: dict[str, Any], target: Any) -> None:
    assert len(batch.args) == len(args)
    assert all(a is b for a, b in zip(batch.args, args, strict=True))
    assert batch.kwargs.keys() == kwargs.keys()
    assert all(batch.kwargs[name] is kwargs[name] for name in kwargs)
    assert batch.target is target


def test_a_batch_is_split_into_inputs_and_target() -> None:
    x, z, y = torch.zeros(4, 2), torch.ones(4, 3), torch.arange(4)
    assert_batch(Batch.of((x, y), CPU), (x,), {}, y)
    assert_batch(Batch.of([x, y], CPU), (x,), {}, y)
    assert_batch(Batch.of((x, z, y), CPU), (x, z), {}, y)
    assert_batch(Batch.of(x, CPU), (x,), {}, None)
    assert_batch(Batch.of((x,), CPU), (x,), {}, None)
    assert_batch(Batch.of([x], CPU), (x,), {}, None)
    for key in ("labels", "label", "target", "targets"):
        assert_batch(Batch.of({"a": x, key: y, "b": z}, CPU), (), {"a": x, "b": z}, y)
    assert_batch(Batch.of({"a": x}, CPU), (), {"a": x}, None)
    assert_batch(Batch.of("text", CPU), ("text",), {}, None)


def test_nested_batches_keep_their_structure() -> None:
    x, z, y, w = torch.zeros(4, 2), torch.ones(4, 3), torch.arange(4), torch.ones(4)
    batch = Batch.of([{"a": x, "b": [z]}, (y, w)], CPU)
    (inputs,) = batch.args
    assert inputs["a"] is x
    assert inputs["b"][0] is z
    assert batch.target[0] is y
    assert batch.target[1] is w


def test_every_tensor_of_a_batch_moves_to_the_device() -> None:
    meta = torch.device("meta")
    batch = Batch.of(({"a": torch.zeros(2), "b": [torch.zeros(3)]}, 5, torch.zeros(2)), meta)
    assert batch.args[0]["a"].device == meta
    assert batch.args[0]["b"][0].device == meta
    assert batch.args[1] == 5
    assert batch.target.device == meta


@pytest.mark.parametrize(
    ("raw", "size"),
    [
        ((torch.zeros(4, 2), torch.zeros(1)), 4),
        (torch.zeros(7), 7),
        ({"n": 3, "x": torch.zeros(5, 1)}, 5),
        ((torch.tensor(2.0), torch.zeros(6, 1), torch.zeros(6)), 6),
        (((torch.zeros(3, 2), torch.zeros(3, 1)), torch.zeros(3)), 3),
        (({"x": [torch.zeros(2, 2)]}, torch.zeros(2)), 2),
        ("text", 1),
    ],
)
def test_the_size_of_a_batch_is_the_length_of_its_first_tensor(raw: Any, size: int) -> None:
    assert Batch.of(raw, CPU).size == size


def test_a_batch_that_the_model_cannot_take_is_described() -> None:
    batch = Batch.of({"x": torch.zeros(2, 5), "mode": "fast"}, CPU)

    class Picky(nn.Module):
        def __init__(self, error: Exception) -> None:
            super().__init__()
            self.error = error

        def forward(self, x: Tensor, mode: str) -> Tensor:
            raise self.error

    for error in (
        RuntimeError("wide\nand long"),
        AssertionError("wide"),
        ValueError("wide"),
        TypeError("wide"),
        KeyError("wide"),
        NotImplementedError("wide"),
    ):
        with pytest.raises(DataError) as caught:
            batch.through(Picky(error), "val_loader, batch 3")
        message = str(caught.value)
        assert message.startswith(
            "val_loader, batch 3: the model cannot take inputs x=(2, 5) float32, mode=str: "
        )
        assert message.rstrip("'").endswith("wide")  # KeyError quotes it
        assert caught.value.__cause__ is error
    with pytest.raises(DataError, match=r"out of memory with inputs .*: use smaller batches"):
        batch.through(Picky(torch.OutOfMemoryError("5 GiB")), "here")


class Counted(IterableDataset[Tensor]):
    def __iter__(self) -> Iterator[Tensor]:
        return iter([torch.zeros(2)] * 3)


class NoLength:
    def __init__(self, error: Exception) -> None:
        self.error = error

    def __iter__(self) -> Iterator[Tensor]:
        return iter([torch.zeros(2)] * 3)

    def __len__(self) -> int:
        raise self.error


def test_an_epoch_is_the_loaders_length_or_what_is_set() -> None:
    assert source([1, 2, 3]).steps_per_epoch(TrainingConfig()) == 3
    assert source([1, 2, 3]).steps_per_epoch(TrainingConfig(steps_per_epoch=7)) == 7
    loader = DataLoader(TensorDataset(torch.zeros(7, 2)), batch_size=3)
    assert source(loader).steps_per_epoch(TrainingConfig()) == 3
    assert source(iter([1, 2])).steps_per_epoch(TrainingConfig(steps_per_epoch=2)) == 2


@pytest.mark.parametrize(
    "loader",
    [
        (x for x in [1, 2]),
        DataLoader(Counted(), batch_size=2),
        NoLength(TypeError("no len")),
        NoLength(NotImplementedError()),
        NoLength(RuntimeError("no\nlen")),
    ],
)
def test_a_loader_without_length_says_which_setting_to_use(loader: Any) -> None:
    with pytest.raises(DataError) as caught:
        source(loader).steps_per_epoch(TrainingConfig())
    assert str(caught.value).startswith("train_loader has no length")
    assert str(caught.value).endswith("set training.steps_per_epoch to the number of its batches")
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("steps_per_epoch", [None, 3])
@pytest.mark.parametrize(("loader", "kind"), [(5, "int"), (None, "NoneType"), (object(), "object")])
def test_what_cannot_be_iterated_is_no_loader(loader: Any, kind: str, steps_per_epoch: int | None) -> None:
    for use in (
        lambda: source(loader).steps_per_epoch(TrainingConfig(steps_per_epoch=steps_per_epoch)),
        lambda: next(source(loader).batches()),
    ):
        with pytest.raises(DataError, match=f"train_loader is a {kind}: allowed is an iterable of batches"):
            use()


def test_passes_follow_one_another_without_end() -> None:
    batches = source([torch.tensor([1]), torch.tensor([2])]).endless()
    assert [int(batch.args[0]) for batch in itertools.islice(batches, 5)] == [1, 2, 1, 2, 1]


def test_an_empty_loader_and_one_that_can_be_read_once_are_told_apart() -> None:
    with pytest.raises(DataError, match="train_loader is empty"):
        next(source([]).endless())
    with pytest.raises(DataError, match="train_loader is empty: it has no batch"):
        source([]).steps_per_epoch(TrainingConfig())
    once = source(x for x in [torch.zeros(1), torch.zeros(1)]).endless()
    next(once), next(once)
    with pytest.raises(DataError, match="train_loader gave nothing in pass 2: it can be read only once"):
        next(once)


class Raising(Dataset[Tensor]):
    def __init__(self, at: int, error: BaseException) -> None:
        self.at, self.error = at, error

    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> Tensor:
        if index == self.at:
            raise self.error
        return torch.zeros(2)


def test_a_loader_that_raises_is_told_with_its_batch() -> None:
    batches = source(DataLoader(Raising(5, OSError("disk\nfull")), batch_size=2)).batches()
    next(batches), next(batches)
    with pytest.raises(DataError) as caught:
        next(batches)
    assert str(caught.value) == "train_loader failed at batch 3: OSError: disk"
    assert isinstance(caught.value.__cause__, OSError)

    class Stubborn:
        def __iter__(self) -> Iterator[Tensor]:
            raise OSError

    with pytest.raises(DataError, match=r"^train_loader failed at batch 1: OSError$"):
        next(source(Stubborn()).batches())


def test_our_own_errors_and_interrupts_pass_through_a_loader() -> None:
    for error in (LayoutError("mine"), KeyboardInterrupt()):
        with pytest.raises(type(error)) as caught:
            next(source(DataLoader(Raising(0, error))).batches())
        assert caught.value is error


def test_the_first_examples_of_a_batch_in_any_form() -> None:
    x, y = torch.arange(6.0).view(3, 2), torch.arange(3)
    batch = Batch.of({"a": x, "b": (x, torch.zeros(5)), "c": 7, "labels": y}, CPU).first(2)
    assert torch.equal(batch.kwargs["a"], x[:2])
    assert torch.equal(batch.kwargs["b"][0], x[:2])
    assert batch.kwargs["b"][1].shape == (5,)  # not one for each example
    assert batch.kwargs["c"] == 7
    assert torch.equal(batch.target, y[:2])


def test_arrays_are_tensors() -> None:
    pixels = np.arange(6, dtype=np.float32).reshape(3, 2)
    pixels.flags.writeable = False  # as those of Hugging Face's data sets are
    batch = Batch.of({"x": pixels, "labels": np.array([1, 0, 2]), "names": np.array(["a", "b", "c"])}, CPU)
    assert batch.kwargs["x"].equal(torch.arange(6.0).view(3, 2))
    assert batch.target.equal(torch.tensor([1, 0, 2]))
    assert isinstance(batch.kwargs["names"], np.ndarray)
    pair = batched([pixels, np.array([1, 0, 2])])
    assert [(x.tolist(), y.tolist()) for x, y in pair] == [(pixels.tolist(), [1, 0, 2])]
    for loader in (
        [torch.zeros(3, 2)] * 2,
        [torch.zeros(3), torch.zeros(3)],
        [(torch.zeros(3, 2), torch.zeros(3))],
    ):
        assert batched(loader) is loader
    whole = list(batched(np.zeros((70, 2))))
    assert [each.shape for each in whole] == [(64, 2), (6, 2)]


def test_images_that_are_no_batch_are_told_what_to_do() -> None:
    model, image = nn.BatchNorm2d(3), torch.zeros(3, 5, 5)
    with pytest.raises(DataError, match=r"torch\.stack"):
        Batch.of(image, CPU).through(model, "here")
    with pytest.raises(DataError, match="DataLoader"):
        next(source(TensorDataset(image)).batches())  # type: ignore[arg-type]
