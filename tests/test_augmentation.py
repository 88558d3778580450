"""What a batch goes through: by the formulas, by its number alone, refused where it cannot be."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from pwfn import Config, ConfigError, DataError, compress
from pwfn.bayes.batches import Batch, Source, Stream
from pwfn.config import TrainingConfig
from pwfn.config.seeds import generator_from
from pwfn.lab.pretrain.augmentation_batches import augmented, blanked, blend, patch, probabilities


def blended(batches: Stream, share: float, seed: int, where: str) -> Iterator[Batch]:
    return augmented(batches, TrainingConfig(blend=share), seed, where, None)


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


# Labels


def test_labels_as_probabilities_are_those_of_torch_with_smoothed_labels() -> None:
    torch.manual_seed(0)
    output, labels = torch.randn(6, 5), torch.tensor([0, 4, 2, 2, 1, 3])
    rows = probabilities(labels, 5, 0.1)
    assert torch.allclose(rows.sum(1), torch.ones(6))
    assert rows[1].tolist() == pytest.approx([0.02, 0.02, 0.02, 0.02, 0.92])
    for smoothing in (0.0, 0.1, 1.0):
        found = F.cross_entropy(output, probabilities(labels, 5, smoothing))
        assert torch.allclose(found, F.cross_entropy(output, labels, label_smoothing=smoothing))
        again = probabilities(probabilities(labels, 5, 0.0), 5, smoothing)
        assert torch.allclose(again, probabilities(labels, 5, smoothing))


def test_a_label_to_be_ignored_has_no_part_in_the_loss() -> None:
    output, labels = torch.randn(3, 4), torch.tensor([1, -100, 2])
    found = F.cross_entropy(output, probabilities(labels, 4, 0.0), reduction="sum")
    assert torch.allclose(found, F.cross_entropy(output, labels, reduction="sum"))


@pytest.mark.parametrize(
    ("target", "said"),
    [
        (torch.tensor([0, 3]), "a target is none of 3 classes"),
        (
            torch.zeros(2, 4, dtype=torch.long),
            r"targets are \(2, 4\), and to blend or smooth labels takes one",
        ),
        (torch.zeros(2), r"targets are \(2,\)"),
        (None, "targets are NoneType"),
    ],
)
def test_targets_that_are_no_classes_are_named(target: object, said: str) -> None:
    with pytest.raises(DataError, match=f"round 1, batch 2: {said}"):
        probabilities(target, 3, 0.1, "round 1, batch 2")


def test_labels_are_blended_as_their_examples_are() -> None:
    rows = probabilities(torch.tensor([0, 1, 2, 1]), 3, 0.1)
    found = blend(Batch((rows.clone(),), {}, rows), generator_from("here"))
    assert torch.allclose(found.args[0], found.target)
    assert not torch.equal(found.target, rows)


# Images


def numbered_images(count: int = 6, height: int = 8, width: int = 10) -> Tensor:
    """Each has its own number in every pixel."""
    return torch.arange(1.0, count + 1).reshape(count, 1, 1, 1).expand(count, 3, height, width).clone()


def test_a_patch_comes_from_one_other_image_and_so_does_its_share_of_the_label() -> None:
    images = numbered_images()
    for seed in range(20):
        batch = Batch((images,), {}, torch.eye(6))
        found = patch(batch, generator_from("here", seed))
        where = (found.args[0] != images).any(1)
        assert (where == where.any(2, keepdim=True) & where.any(1, keepdim=True)).all()  # a rectangle
        for i in range(6):
            numbers, counts = found.args[0][i, 0].unique(return_counts=True)
            expected = torch.zeros(6)
            expected[numbers.long() - 1] = counts / 80
            assert torch.allclose(found.target[i], expected, atol=1e-6)
    assert torch.equal(images, numbered_images())  # the loader's own are untouched


def test_the_share_of_a_patch_is_uniform() -> None:
    images = numbered_images(2, 32, 32)
    shares = []
    for seed in range(400):
        found = patch(Batch((images,), {}, None), generator_from("here", seed)).args[0]
        shares.append(float((found[0, 0] != 1).float().mean()))
    moved = torch.tensor(
        [share for share in shares if share > 0]
    )  # the rest kept their own: the order is drawn
    assert 150 < len(moved) < 250
    assert abs(float(moved.mean()) - 0.5) < 0.06  # three standard errors of a uniform one
    assert abs(float(moved.std()) - 12**-0.5) < 0.04


def test_one_square_of_each_image_is_blanked_in_all_channels() -> None:
    images = numbered_images(400)
    found = blanked(Batch((images,), {}, torch.arange(400)), 4, generator_from("here"))
    holes = found.args[0] == 0
    assert torch.equal(holes.any(1), holes.all(1))
    hole = holes[:, 0]
    rows, columns = hole.any(2), hole.any(1)
    assert torch.equal(hole, rows[:, :, None] & columns[:, None, :])
    # Around the row r lie r - 2 to r + 1, as far as there are such.
    assert torch.bincount(rows.sum(1)).tolist()[:2] == [0, 0]
    assert {2, 3, 4} == set(rows.sum(1).tolist()) == set(columns.sum(1).tolist())
    assert torch.equal(found.args[0].masked_fill(holes, 0), images.masked_fill(holes, 0))
    assert torch.equal(found.target, torch.arange(400))
    assert rows.any(0).all()
    assert columns.any(0).all()


@pytest.mark.parametrize("change", [patch, lambda batch, dice: blanked(batch, 3, dice)])
def test_images_keep_their_order_in_memory(change: Callable[[Batch, torch.Generator], Batch]) -> None:
    batch = Batch((torch.rand(4, 3, 5, 5).to(memory_format=torch.channels_last),), {}, None)
    assert change(batch, generator_from("here")).shape() == batch.shape()


@pytest.mark.parametrize("name", ["cutmix", "cutout"])
def test_where_there_are_no_images_it_says_so(name: str) -> None:
    rows = Source("train_loader", [torch.rand(4, 3)], torch.device("cpu")).endless()
    config = TrainingConfig(**{name: 1})
    with pytest.raises(
        DataError, match=rf"round 1, batch 1: .*there are no images.*: set training.{name} = 0"
    ):
        next(augmented(rows, config, 0, "round 1", None))


# A run


@pytest.mark.parametrize(
    ("changes", "loss_fn", "said"),
    [
        ({"training.blend": 0.6, "training.cutmix": 0.5}, F.cross_entropy, "at most 1 together"),
        (
            {"training.label_smoothing": 0.1, "training.distill": True},
            F.cross_entropy,
            "no label is read: set it to 0, or training.distill_share below 1",
        ),
        (
            {"training.blend": 0.5},
            F.multi_margin_loss,
            r"training.blend would make probabilities of the labels",
        ),
        (
            {"training.cutmix": 0.5, "training.label_smoothing": 0.1},
            F.multi_margin_loss,
            r"training.cutmix and training.label_smoothing would make",
        ),
    ],
)
def test_what_cannot_be_is_refused_before_anything_is_done(
    changes: dict[str, object], loss_fn: Callable[..., Tensor], said: str
) -> None:
    model, data = small()
    with pytest.raises(ConfigError, match=said):
        compress(model, data, data, SHORT.override(changes), loss_fn=loss_fn)


def test_a_run_with_smoothed_labels_is_one_with_the_loss_of_smoothed_labels() -> None:
    model, data = small()
    found = compress(model, data, data, SHORT.override({"training.label_smoothing": 0.2}))
    by_loss = compress(model, data, data, SHORT, loss_fn=nn.CrossEntropyLoss(label_smoothing=0.2))
    assert [done.loss for done in found.rounds] == pytest.approx(
        [done.loss for done in by_loss.rounds], rel=1e-5
    )
    plain = compress(model, data, data, SHORT)
    assert found.before == plain.before  # scores are by the labels as they are
    assert [done.loss for done in found.rounds] != pytest.approx(
        [done.loss for done in plain.rounds], rel=1e-3
    )


def test_a_run_learns_from_blended_examples_and_labels() -> None:
    model, data = small()
    wanted = SHORT.override({"training.blend": 0.5, "training.label_smoothing": 0.1})
    found, again = (compress(model, data, data, wanted) for _ in range(2))
    assert torch.equal(found.compressed.values(), again.compressed.values())
    half = SHORT.override({"training.blend": 0.5, "training.distill": True, "training.distill_share": 0.5})
    assert compress(model, data, data, half).rounds[0].loss != found.rounds[0].loss


def test_a_network_without_one_row_of_classes_is_named() -> None:
    model = nn.Sequential(nn.Conv1d(2, 3, 1))
    data = [(torch.randn(4, 2, 5), torch.randint(0, 3, (4, 5))) for _ in range(2)]
    with pytest.raises(DataError, match="output is not one row of classes for each example"):
        compress(model, data, data, SHORT.override({"training.label_smoothing": 0.1}))
