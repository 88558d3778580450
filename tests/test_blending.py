"""Batches blended with themselves: by the formula, by their number alone, refused where labels are read."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor, nn

from pwfn import Config, ConfigError, DataError, compress
from pwfn.batches import Batch, Source, Stream
from pwfn.blending import blend, blended
from pwfn.data.epochs import generator_from


def stream(count: int = 8, start: int = 0) -> Stream:
    batches = [(torch.full((4, 2), float(10 * i)) + torch.arange(4.0)[:, None], i) for i in range(count)]
    return Source("train_loader", Numbered(batches), torch.device("cpu")).endless(start)


class Numbered:
    """Batches in one order, from any of them on."""

    def __init__(self, batches: list[tuple[Tensor, int]]) -> None:
        self.batches = batches

    def __len__(self) -> int:
        return len(self.batches)

    def __iter__(self) -> Iterator[tuple[Tensor, int]]:
        return self.epoch(0)

    def epoch(self, number: int, start: int = 0) -> Iterator[tuple[Tensor, int]]:
        return iter(self.batches[start:])


def test_every_example_has_a_share_of_one_other() -> None:
    x = torch.arange(12.0).reshape(6, 2)
    dice = generator_from("here")
    share = float(torch.rand((), generator=dice, dtype=torch.float64))
    order = torch.randperm(6, generator=dice)
    found = blend(Batch((x,), {}, torch.arange(6)), generator_from("here"))
    expected = torch.stack([share * x[i] + (1 - share) * x[order[i]] for i in range(6)])
    assert torch.allclose(found.args[0], expected)
    assert torch.equal(found.target, torch.arange(6))
    assert torch.equal(x, torch.arange(12.0).reshape(6, 2))  # the loader's own is untouched


def test_all_inputs_are_blended_alike_but_for_whole_numbers_and_those_of_other_length() -> None:
    x, ids, scale = torch.rand(5, 3), torch.arange(5), torch.rand(3)
    kwargs = {"x": x, "again": x.double(), "ids": ids, "scale": scale, "name": "as it is"}
    found = blend(Batch((), kwargs, None), generator_from("here")).kwargs
    assert torch.allclose(found["x"], found["again"].float())
    assert not torch.equal(found["x"], x)
    assert found["ids"] is ids
    assert found["scale"] is scale
    assert found["name"] == "as it is"


def test_order_in_memory_stays() -> None:
    x = torch.rand(4, 3, 5, 5).to(memory_format=torch.channels_last)
    found = blend(Batch((x,), {}, None), generator_from("here"))
    assert found.shape() == Batch((x,), {}, None).shape()


def test_inputs_that_cannot_be_blended_are_named() -> None:
    whole = Source("train_loader", [torch.arange(4)], torch.device("cpu")).endless()
    with pytest.raises(DataError, match=r"round 1, batch 1: inputs \(4,\) int64 cannot be blended.*: set tr"):
        next(blended(whole, 1.0, 0, "round 1"))


def test_a_stream_that_goes_on_blends_as_if_it_had_never_stopped() -> None:
    whole = [batch.args[0] for batch, _ in zip(blended(stream(), 0.5, 3, "here"), range(20), strict=False)]
    later = [
        batch.args[0] for batch, _ in zip(blended(stream(start=13), 0.5, 3, "here"), range(7), strict=False)
    ]
    assert all(torch.equal(a, b) for a, b in zip(whole[13:], later, strict=True))
    plain = [batch.args[0] for batch, _ in zip(stream(), range(20), strict=False)]
    same = sum(torch.equal(a, b) for a, b in zip(whole, plain, strict=True))
    assert 0 < same < 20  # half of them, by the dice
    other = [batch.args[0] for batch, _ in zip(blended(stream(), 0.5, 4, "here"), range(20), strict=False)]
    assert not all(torch.equal(a, b) for a, b in zip(whole, other, strict=True))


def test_the_share_is_that_of_the_batches() -> None:
    def touched(share: float) -> int:
        both = zip(blended(stream(), share, 0, "here"), stream(), range(400), strict=False)
        return sum(not torch.equal(a.args[0], b.args[0]) for a, b, _ in both)

    assert touched(0.0) == 0
    assert touched(1.0) > 380  # a permutation of four leaves all in place once in 24 times
    assert 70 < touched(0.25) < 130  # a hundred, less a 24th, give or take three standard deviations


SHORT = Config().override(
    {
        "posterior.init": "constant",
        "schedule.fractions": [0.5, 1.0],
        "schedule.epochs_per_round": 1,
        "training.learning_rate": 0.05,
    }
)


def small() -> tuple[nn.Module, list[tuple[Tensor, Tensor]]]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 3))
    return model, [(torch.randn(8, 6), torch.randint(0, 3, (8,))) for _ in range(4)]


@pytest.mark.parametrize("changes", [{}, {"training.distill": True, "training.distill_share": 0.5}])
def test_where_labels_are_read_blending_is_refused(changes: dict[str, object]) -> None:
    model, data = small()
    config = SHORT.override({**changes, "training.blend": 0.5})
    with pytest.raises(ConfigError, match=r"training.blend is 0.5, .* set training.distill = true"):
        compress(model, data, data, config)


def test_a_run_learns_from_blended_batches() -> None:
    model, data = small()
    taught = SHORT.override({"training.distill": True, "training.distill_share": 1.0})
    plain = compress(model, data, data, taught)
    found = compress(model, data, data, taught.override({"training.blend": 1.0}))
    again = compress(model, data, data, taught.override({"training.blend": 1.0}))
    assert torch.equal(found.compressed.values(), again.compressed.values())
    assert [done.loss for done in found.rounds] != [done.loss for done in plain.rounds]
    assert found.before == plain.before  # scores are of the data as they are
    argument = compress(model, data, data, SHORT.override({"training.blend": 1.0}), distill=True)
    assert torch.equal(argument.compressed.values(), found.compressed.values())
