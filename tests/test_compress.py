"""The whole run on tiny networks: what it promises about results, repeatability and failure."""

from __future__ import annotations

import copy
import dataclasses
import itertools
import math
import random
import sys
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

import pwfn
from pwfn import Config, DataError, DivergedError, PwfnError, Result, WeightError, compress
from pwfn.bayes.gaussian import GaussianNetwork
from pwfn.bayes.randomness import seeded
from pwfn.errors import ConfigError
from pwfn.file.format import dumps
from pwfn.fixing.candidates import order
from pwfn.progress import Progress
from pwfn.zoo.data import Repeated

CPU = torch.device("cpu")
Batches = list[tuple[Tensor, Tensor]]

AS_IN_THE_PAPER: dict[str, Any] = {
    "posterior.init": "powers",
    "fixing.grid_exponent": 7,
    "training.sigma_learning_rate": 0.001,
}
"""Sigma as in the paper, which is trained, with nothing read before the first round to find it."""

SHORT = Config().override(
    {
        **AS_IN_THE_PAPER,
        "schedule.epochs_per_round": 1,
        "training.learning_rate": 0.01,
        "training.sigma_learning_rate": 0.3,
    }
)
"""All ten rounds, one epoch each, with the paper's sigma; it learns fast enough to grow in so few steps."""

BRIEF = Config().override(
    {**AS_IN_THE_PAPER, "schedule.fractions": [0.5, 0.9, 1.0], "schedule.epochs_per_round": 1}
)
"""Three rounds, for tests about everything but the weights."""


@pytest.fixture(autouse=True)
def _same_random_state_for_every_test() -> None:
    torch.manual_seed(0)


def pretrain(model: nn.Module, data: Batches, loss_fn: Any, epochs: int, lr: float) -> nn.Module:
    optimizer = torch.optim.Adam(model.parameters(), lr)
    model.train()
    for _ in range(epochs):
        for x, y in data:
            optimizer.zero_grad()
            loss_fn(model(x), y).backward()
            optimizer.step()
    return model.eval()


def cut(x: Tensor, y: Tensor, size: int = 32) -> Batches:
    return list(zip(x.split(size), y.split(size), strict=True))


# Four small tasks, each a pre-trained network with its data


@dataclasses.dataclass(frozen=True)
class Task:
    model: nn.Module
    train: Batches
    val: Batches
    loss_fn: Any


def classification() -> Task:
    """Which of three bars an 8×8 image has, under noise; a convnet with BatchNorm."""
    y = torch.randint(0, 3, (320,))
    x = torch.randn(320, 1, 8, 8)
    x[torch.arange(320), 0, 2 * y + 1] += 1
    model = nn.Sequential(
        nn.Conv2d(1, 16, 3, padding=1, bias=False),
        nn.BatchNorm2d(16),
        nn.ReLU(),
        nn.AvgPool2d((1, 8)),
        nn.Flatten(),
        nn.Linear(128, 3),
    )
    train = cut(x[:192], y[:192])
    return Task(
        pretrain(model, train, F.cross_entropy, 15, 0.02), train, cut(x[192:], y[192:], 48), F.cross_entropy
    )


def regression() -> Task:
    """A smooth function of four numbers, of variance near 1."""
    x = torch.randn(320, 4)
    y = (x[:, :1] - 0.5 * x[:, 1:2] + 0.5 * x[:, 2:3].abs()) / 1.2
    model = nn.Sequential(nn.Linear(4, 32), nn.ReLU(), nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 1))
    train = cut(x[:192], y[:192])
    return Task(pretrain(model, train, F.mse_loss, 60, 0.01), train, cut(x[192:], y[192:], 48), F.mse_loss)


def segmentation() -> Task:
    """Whether the 3×3 neighbourhood of a pixel is bright."""
    x = torch.randn(80, 1, 6, 6)
    y = (F.avg_pool2d(x, 3, 1, 1) > 0).long().squeeze(1)
    model = nn.Sequential(
        nn.Conv2d(1, 16, 3, padding=1), nn.ReLU(), nn.Conv2d(16, 16, 1), nn.ReLU(), nn.Conv2d(16, 2, 1)
    )
    train = cut(x[:48], y[:48], 8)
    return Task(
        pretrain(model, train, F.cross_entropy, 30, 0.02), train, cut(x[48:], y[48:], 8), F.cross_entropy
    )


class TinyLanguageModel(nn.Module):
    """Embedding, one transformer layer, head: N×T tokens to N×T×V logits."""

    def __init__(self, words: int = 8, width: int = 16) -> None:
        super().__init__()
        self.embedding = nn.Embedding(words, width)
        self.layer = nn.TransformerEncoderLayer(width, 2, 32, dropout=0.0, batch_first=True)
        self.head = nn.Linear(width, words)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.layer(self.embedding(tokens)))


def next_word_loss(output: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(output.flatten(0, 1), target.flatten())


def language() -> Task:
    """The next word follows from the word: a fixed permutation of eight."""
    tokens = torch.randint(0, 8, (96, 6))
    following = torch.randperm(8)[tokens]
    train = cut(tokens[:64], following[:64], 16)
    model = pretrain(TinyLanguageModel(), train, next_word_loss, 25, 0.005)
    return Task(model, train, cut(tokens[64:], following[64:], 16), next_word_loss)


TASKS: dict[str, Callable[[], Task]] = {
    "classification": classification,
    "regression": regression,
    "segmentation": segmentation,
    "language": language,
}
_made: dict[str, tuple[Task, Result]] = {}


def task(name: str) -> Task:
    return compressed_task(name)[0]


def compressed_task(name: str) -> tuple[Task, Result]:
    """The task and one run on it, made once; nothing may change them."""
    if name not in _made:
        with seeded(0, CPU):
            made = TASKS[name]()
        _made[name] = made, compress(made.model, made.train, made.val, SHORT, made.loss_fn)
    return _made[name]


@pytest.mark.parametrize("name", TASKS)
def test_every_weight_ends_on_a_centre_and_the_network_still_works(name: str) -> None:
    made, result = compressed_task(name)
    size = result.compressed.layout.size
    values = result.compressed.values()
    assert size == sum(
        p.numel()
        for module in made.model.modules()
        if isinstance(module, (nn.Conv2d, nn.Linear, nn.MultiheadAttention))
        for p in module.parameters(recurse=False)
    )
    assert len(result.rounds) == 10
    assert result.rounds[-1].fix.fixed == size == values.numel()
    # Few centres, each the sum of at most four powers of two from 2^-7 on.
    assert result.compressed.codebook.numel() == values.unique().numel() < size / 4
    for centre in result.compressed.codebook.tolist():
        assert order(centre) <= 4
        assert (centre * 2**7).is_integer()
    assert result.before is not None
    assert result.after is not None
    untrained = {
        "classification": math.log(3),
        "regression": 1.0,
        "segmentation": math.log(2),
        "language": math.log(8),
    }
    assert result.before.loss < 0.25 * untrained[name]  # or the task would say nothing
    assert result.after.loss < 0.5 * untrained[name]
    if made.loss_fn is F.cross_entropy:
        assert result.before.metric is not None
        assert result.after.metric is not None
        assert result.after.metric > result.before.metric - 0.08
    else:
        assert result.before.metric is None
        assert result.after.metric is None


@pytest.mark.parametrize("name", TASKS)
def test_the_model_of_a_result_scores_what_was_reported(name: str) -> None:
    made, result = compressed_task(name)
    model = result.model()
    assert result.after is not None
    with torch.no_grad():
        outputs, targets = (
            torch.cat([model(x) for x, _ in made.val]),
            torch.cat([y for _, y in made.val]),
        )
    assert made.loss_fn(outputs, targets).item() == pytest.approx(result.after.loss, rel=1e-5)
    if result.after.metric is not None:
        share = (outputs.argmax(1) == targets).double().mean().item()
        assert share == pytest.approx(result.after.metric, rel=1e-12)
    assert result.after.examples == len(targets)
    assert not model.training
    names = [entry.name for entry in result.compressed.layout.entries]
    dense = torch.cat([model.get_parameter(name).detach().reshape(-1) for name in names])
    assert torch.equal(dense, result.compressed.values())
    assert result.model() is not model


def test_the_original_is_scored_before() -> None:
    made, result = compressed_task("classification")
    x, y = torch.cat([x for x, _ in made.val]), torch.cat([y for _, y in made.val])
    with torch.no_grad():
        output = made.model(x)
    assert result.before is not None
    assert result.before.metric == pytest.approx((output.argmax(1) == y).double().mean().item(), rel=1e-12)
    assert result.before.loss == pytest.approx(F.cross_entropy(output, y).item(), rel=1e-5)
    assert result.fixed == result.rounds[-1].scores


def test_the_facts_of_the_rounds() -> None:
    _, result = compressed_task("classification")
    size = result.compressed.layout.size
    assert [done.number for done in result.rounds] == list(range(1, 11))
    for done, fraction in zip(result.rounds, pwfn.PAPER_FRACTIONS, strict=True):
        assert done.fix.fraction == fraction
        assert done.fix.fixed == done.fixed.weights == math.ceil(round(size * fraction, 6))
        low, middle, high = done.sigma_quartiles
        assert 0 < low <= middle <= high
        assert done.seconds > 0
        assert done.loss is not None
        assert math.isfinite(done.loss)
        assert done.scores is not None
        assert sum(step.count for step in done.fix.steps) == sum(move.count for move in done.fix.moves)
    assert sum(step.count for done in result.rounds for step in done.fix.steps) == size
    assert result.summary.whole == result.rounds[-1].fixed
    assert result.config == SHORT


def test_no_validation_data_no_scores() -> None:
    made = task("regression")
    result = compress(made.model, made.train, config=BRIEF, loss_fn=made.loss_fn)
    assert (result.before, result.fixed, result.after) == (None, None, None)
    assert all(done.scores is None for done in result.rounds)


def test_a_metric_of_ones_own() -> None:
    made = task("regression")

    def worst(output: Tensor, target: Tensor) -> Tensor:
        return (output - target).abs().mean()

    result = compress(made.model, made.train, made.val, BRIEF, made.loss_fn, metric=worst)
    assert result.before is not None
    with torch.no_grad():
        expected = torch.cat([(made.model(x) - y).abs() for x, y in made.val]).mean()
    assert result.before.metric == pytest.approx(expected.item(), rel=1e-6)


def test_batches_may_be_mappings_and_models_may_take_names() -> None:
    class Named(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(3, 2)

        def forward(self, *, features: Tensor, scale: Tensor) -> Tensor:
            return self.linear(features) * scale[:, None]

    batch = {"features": torch.randn(6, 3), "labels": torch.randint(0, 2, (6,)), "scale": torch.ones(6)}
    result = compress(Named(), [batch] * 2, [batch], BRIEF)
    assert result.after is not None
    assert result.after.examples == 6


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_number_types(precision: str, dtype: torch.dtype) -> None:
    model = nn.Linear(4, 2).to(dtype)
    data = [(torch.randn(8, 4, dtype=dtype), torch.randint(0, 2, (8,))) for _ in range(2)]
    result = compress(model, data, data, BRIEF.override({"training.precision": precision}))
    assert result.compressed.codebook.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    assert result.model().weight.dtype == dtype


def test_a_model_of_several_number_types() -> None:
    class Mixed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = nn.Linear(4, 6).bfloat16(), nn.Linear(6, 2)

        def forward(self, x: Tensor) -> Tensor:
            return self.second(self.first(x.bfloat16()).float())

    result = compress(Mixed(), tiny_data(2), tiny_data(2), BRIEF)
    kinds = [result.model().get_parameter(name).dtype for name in ("first.weight", "second.weight")]
    assert kinds == [torch.bfloat16, torch.float32]


def test_precision_holds_in_training_and_on_the_way_before_and_after_are_in_float32() -> None:
    """So that figures of runs in different number types can be compared, and are those of the file."""
    seen: list[torch.dtype] = []

    def loss_fn(output: Tensor, target: Tensor) -> Tensor:
        seen.append(output.dtype)
        return F.cross_entropy(output, target)

    for precision, dtype in (("bf16", torch.bfloat16), ("fp32", torch.float32)):
        seen.clear()
        data = tiny_data(2)
        compress(nn.Linear(4, 2), data, data, BRIEF.override({"training.precision": precision}), loss_fn)
        assert seen[:2] == seen[-2:] == [torch.float32] * 2  # two batches of validation data
        assert set(seen[2:-2]) == {dtype}


def test_each_round_may_have_its_own_length() -> None:
    made = task("classification")  # six batches an epoch
    config = BRIEF.override({"schedule.epochs_per_round": [0.5, 0, 2]})
    result = compress(made.model, made.train, None, config)
    assert [done.steps for done in result.rounds] == [3, 0, 12]
    assert result.epochs == pytest.approx(2.5 + 1)  # and polish
    tiny = {"schedule.epochs_per_round": [1e-4, 1e-4, 1e-4], "training.accumulate": 3}
    result = compress(made.model, made.train, None, BRIEF.override(tiny))
    assert result.epochs == pytest.approx(3 * 3 / 6 + 1)  # one step a round at least, three batches each
    equal = {"schedule.epochs_per_round": [0.05, 1, 1]}
    one, two = (compress(made.model, made.train, None, each) for each in (BRIEF, BRIEF.override(equal)))
    assert torch.equal(one.compressed.values(), two.compressed.values())


# Resuming anywhere


LEVERS = BRIEF.override(
    {
        "posterior.init": "tolerance",
        "fixing.grid_exponent": None,
        "training.distill": True,
        "training.scheduler": "cosine",
        "schedule.epochs_per_round": [0.5, 1, 1.5],
        "finish.fold_batchnorm": True,
    }
)


@pytest.mark.parametrize("optimizer", ["sgd", "adamw"])
@pytest.mark.parametrize("last", [1, 3, 7, 18, 20, 24])  # of 3, 6 and 9 steps, and 6 of polish
def test_all_levers_together_stopped_anywhere_end_in_the_same_bits(last: int, optimizer: str) -> None:
    made = task("classification")
    data = Repeated(made.train)
    levers = LEVERS.override({"training.optimizer": optimizer})
    whole = compress(made.model, data, made.val, levers)
    assert whole.rounds[0].fix.steps[0].centre == 0
    assert [done.steps for done in whole.rounds] == [3, 6, 9]
    kept: list[Progress] = []

    def keep(progress: Any, ends: bool) -> None:
        kept.append(progress())
        if len(kept) == last:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        compress(made.model, data, made.val, levers, keep=keep)
    again = compress(made.model, data, made.val, levers, resume=kept[-1])
    assert same(again, whole)
    assert [done.scores for done in again.rounds] == [done.scores for done in whole.rounds]
    assert again.after == whole.after


def test_a_resumed_run_that_is_interrupted_again_still_knows_its_place_in_the_round() -> None:
    made = task("classification")
    data = Repeated(made.train)
    whole = compress(made.model, data, None, BRIEF)
    kept: list[Progress] = []

    def keep(progress: Any, ends: bool) -> None:
        kept.append(progress())
        if len(kept) == 4:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        compress(made.model, data, None, BRIEF, keep=keep)

    def at_once(*_: Any) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt) as caught:
        compress(made.model, data, None, BRIEF, resume=kept[-1], keep=at_once)
    assert caught.value.progress == kept[-1]  # type: ignore[attr-defined]
    again = compress(made.model, data, None, BRIEF, resume=caught.value.progress)  # type: ignore[attr-defined]
    assert same(again, whole)


# Distillation


def test_the_original_teaches_on_unlabelled_data() -> None:
    made, labelled = compressed_task("classification")
    inputs = [x for x, _ in made.train]
    result = compress(made.model, inputs, [x for x, _ in made.val], SHORT, distill=True)
    assert result.before is not None
    assert result.after is not None
    assert result.before.loss == 0  # the divergence of the original from itself
    assert result.before.metric == 1  # without labels: agreement with itself
    assert 0 < result.after.loss < 0.2
    model = result.model()
    with torch.no_grad():
        agreeing = [made.model(x).argmax(1) == model(x).argmax(1) for x, _ in made.val]
    assert result.after.metric == torch.cat(agreeing).double().mean() > 0.92
    assert f"agreement {result.after.metric:.2%}" in str(result)
    # With labelled data the labels go unread in training, but accuracy is told.
    scored = compress(made.model, made.train, made.val, SHORT, distill=True)
    assert torch.equal(scored.compressed.values(), result.compressed.values())
    assert scored.before is not None
    assert labelled.before is not None
    assert scored.before.metric == labelled.before.metric
    assert not torch.equal(labelled.compressed.values(), result.compressed.values())


def test_distillation_as_a_setting_trains_as_the_argument_does_and_is_scored_by_the_labels() -> None:
    made, labelled = compressed_task("classification")
    setting = SHORT.override({"training.distill": True})
    found = compress(made.model, made.train, made.val, setting)
    argument = compress(made.model, made.train, made.val, SHORT, distill=True)
    assert torch.equal(found.compressed.values(), argument.compressed.values())
    assert [done.loss for done in found.rounds] == [done.loss for done in argument.rounds]
    assert found.before == labelled.before  # loss and accuracy
    model = found.model()
    with torch.no_grad():
        x, y = (torch.cat(parts) for parts in zip(*made.val, strict=True))
        loss = F.cross_entropy(model(x), y).item()
    assert found.after is not None
    assert found.after.loss == pytest.approx(loss, rel=1e-5)


def test_a_divergence_of_ones_own() -> None:
    """Labels are nonsense here and must not matter; nor is there an accuracy of a regression."""
    made = task("regression")
    wrong = [(x, torch.full_like(y, torch.nan)) for x, y in made.train]
    result = compress(made.model, wrong, wrong, SHORT, distill=F.mse_loss)
    assert result.before is not None
    assert result.after is not None
    assert result.before.loss == 0
    assert result.before.metric is None
    assert result.after.loss < 0.2
    model = result.model()
    with torch.no_grad():
        x = torch.cat([x for x, _ in wrong])
        expected = F.mse_loss(model(x), made.model(x)).item()
    assert result.after.loss == pytest.approx(expected, rel=1e-5)


# What is left as it was


@pytest.mark.parametrize("training", [True, False])
def test_the_users_model_is_left_as_it_was(training: bool) -> None:
    model = copy.deepcopy(task("classification").model)
    model.train(training)
    model[1].train(not training)
    model[1].bias.requires_grad_(False)
    model[0].weight.grad = torch.ones_like(model[0].weight)
    identities = {name: id(value) for name, value in model.state_dict(keep_vars=True).items()}
    before = copy.deepcopy(model.state_dict())
    made = task("classification")
    compress(model, made.train, made.val, BRIEF)
    after = model.state_dict()
    assert all(torch.equal(before[name], after[name]) for name in before)
    assert {name: id(value) for name, value in model.state_dict(keep_vars=True).items()} == identities
    assert [m.training for m in model] == [training, not training, *[training] * 4]
    assert model.training is training
    assert [name for name, p in model.named_parameters() if not p.requires_grad] == ["1.bias"]
    assert torch.equal(model[0].weight.grad, torch.ones_like(model[0].weight))
    assert all(p.device == CPU for p in model.parameters())
    assert not model[0]._forward_hooks


def random_states() -> tuple[Any, ...]:
    kind, keys, *rest = np.random.get_state()
    return torch.get_rng_state().tolist(), random.getstate(), kind, list(keys), rest


def same(a: Result, b: Result) -> bool:
    x, y = a.compressed, b.compressed
    return (
        torch.equal(x.codebook, y.codebook)
        and torch.equal(x.indices, y.indices)
        and torch.equal(x.sigma, y.sigma)
        and x.untouched.keys() == y.untouched.keys()
        and all(torch.equal(x.untouched[name], y.untouched[name]) for name in x.untouched)
    )


def test_the_same_seed_gives_the_same_bits_and_random_states_are_left_as_they_were() -> None:
    made = task("classification")
    x, y = torch.cat([x for x, _ in made.train]), torch.cat([y for _, y in made.train])
    loader = DataLoader(TensorDataset(x, y), batch_size=32, shuffle=True)
    model = nn.Sequential(*copy.deepcopy(made.model), nn.Dropout(0.1))

    def run(seed: int, disturbance: int) -> Result:
        torch.manual_seed(disturbance)
        random.seed(disturbance)
        np.random.seed(disturbance)
        before = random_states()
        result = compress(model, loader, config=SHORT.override({"seed": seed}))
        assert random_states() == before
        return result

    first = run(3, 1)
    again = run(3, 2)
    assert same(first, again)
    assert [done.loss for done in first.rounds] == [done.loss for done in again.rounds]
    other = run(4, 1)
    assert not same(first, other)
    assert not torch.equal(first.compressed.values(), other.compressed.values())


def test_random_states_are_left_as_they_were_after_an_error() -> None:
    model, before = nn.Linear(4, 2), random_states()
    with pytest.raises(DataError):
        compress(model, [(torch.zeros(2, 4), torch.zeros(2, 9))], config=BRIEF)
    assert random_states() == before


# The schedule


class Counting:
    """A loader that counts the batches it has given."""

    def __init__(self, data: Batches) -> None:
        self.data, self.given = data, 0

    def __len__(self) -> int:
        return len(self.data)

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        for batch in self.data:
            self.given += 1
            yield batch


def tiny_data(batches: int, features: int = 4, size: int = 4) -> Batches:
    generator = torch.Generator().manual_seed(0)
    return [
        (torch.randn(size, features, generator=generator), torch.randint(0, 2, (size,), generator=generator))
        for _ in range(batches)
    ]


def test_the_papers_schedule_is_5_percent_of_an_epoch_then_three_epochs_nine_times() -> None:
    loader = Counting(tiny_data(40))
    given: list[int] = []
    result = compress(
        nn.Linear(4, 2),
        loader,
        config=Config.preset("paper"),
        on_round=lambda progress: given.append(loader.given),
    )
    assert given == [2 + 120 * n for n in range(10)]  # 5 % of 40, then 3 epochs of 40 a round
    assert [done.steps for done in result.rounds] == [2, *[120] * 9]
    assert loader.given == 27 * 40 + 2  # and nothing afterwards


def test_the_finish_reads_an_epoch_for_batchnorm_one_to_polish_and_one_for_batchnorm_again() -> None:
    loader = Counting(tiny_data(5))
    model = nn.Sequential(nn.Linear(4, 2), nn.BatchNorm1d(2))
    for changes, epochs in (
        ({}, 3),
        ({"finish.polish_epochs": 0}, 1),
        ({"finish.reestimate_epochs": 0}, 1),
        ({"finish.polish_epochs": 2, "finish.reestimate_epochs": 0.2}, 2.4),
        ({"finish.reestimate_epochs": 0, "finish.polish_epochs": 0}, 0),
    ):
        loader.given = 0
        compress(model, loader, config=BRIEF.override(changes))
        assert loader.given == 1 + 2 * 5 + epochs * 5, changes


def test_what_is_tolerated_is_found_on_eight_batches_read_once() -> None:
    """Once for all halvings; the recommended settings, which have that, train as the others do."""
    loader = Counting(tiny_data(5))
    given: list[int] = []
    brief = {"schedule.fractions": [0.5, 0.9, 1.0], "schedule.epochs_per_round": 1}
    compress(
        nn.Linear(4, 2),
        loader,
        config=Config().override(brief),
        on_round=lambda progress: given.append(loader.given),
    )
    assert given == [8 + trained for trained in (1, 6, 11)]


def test_steps_per_epoch_takes_the_place_of_the_length() -> None:
    config = BRIEF.override({"training.steps_per_epoch": 7})
    result = compress(nn.Linear(4, 2), itertools.cycle(tiny_data(3)), config=config)
    assert [done.steps for done in result.rounds] == [1, 7, 7]


def test_rounds_without_training() -> None:
    config = BRIEF.override({"schedule.epochs_per_round": [0, 0, 0]})
    model = nn.Linear(4, 2)
    result = compress(model, tiny_data(3), config=config)
    assert [(done.steps, done.loss) for done in result.rounds] == [(0, None)] * 3
    moved = (
        result.compressed.values() - torch.cat([p.detach().reshape(-1) for p in model.parameters()])
    ).abs()
    assert moved.max() < 0.25  # of weights within 1/2: nothing trained them, the fixing alone moved them


@pytest.mark.parametrize("size", [1, 3, 7, 100, 129])
def test_exactly_the_fraction_rounded_up_is_fixed_after_each_round(size: int) -> None:
    fixed: list[int] = []

    def on_round(progress: Progress) -> None:
        assert progress.network is not None
        fixed.append(int(progress.network["fixed"].sum()))

    data = [(torch.randn(4, size), torch.zeros(4, 1))]
    config = Config().override({**AS_IN_THE_PAPER, "schedule.epochs_per_round": 1})
    compress(nn.Linear(size, 1, bias=False), data, None, config, F.mse_loss, on_round=on_round)
    thousandths = [200, 400, 600, 700, 800, 900, 950, 975, 990, 1000]
    assert fixed == [-(-size * part // 1000) for part in thousandths]


def test_a_fixed_weight_never_moves_again() -> None:
    states: list[dict[str, Tensor]] = []
    made = task("classification")

    def on_round(progress: Progress) -> None:
        assert progress.network is not None
        states.append(progress.network)

    result = compress(made.model, made.train, config=SHORT, on_round=on_round)
    final, sigma = result.compressed.values(), result.compressed.sigma
    for state in states:
        fixed = state["fixed"]
        assert torch.equal(state["fixed_mu"][fixed] + 0.0, final[fixed])
        assert torch.equal(state["fixed_sigma"][fixed], sigma[fixed])
    for earlier, later in itertools.pairwise(states):
        assert bool((later["fixed"] | ~earlier["fixed"]).all())


def test_the_optimiser_starts_afresh_in_every_round() -> None:
    """A slope in the first round only: with its momentum gone, no free mean moves in the second."""
    calls = itertools.count()
    states: list[dict[str, Tensor]] = []

    def loss_fn(output: Tensor, target: Tensor) -> Tensor:
        return output.sum() * (1.0 if next(calls) < 6 else 0.0)

    config = BRIEF.override(
        {
            "posterior.alpha": 0,
            "training.weight_decay": 0,
            "schedule.epochs_per_round": [2, 1, 1],
            "finish.polish_epochs": 0,
        }
    )
    model = nn.Linear(4, 2)
    original = torch.cat([p.detach().reshape(-1) for p in model.parameters()])
    compress(
        model,
        tiny_data(3),
        None,
        config,
        loss_fn,
        on_round=lambda progress: states.append(dict(progress.network or {})),
    )
    free = ~states[0]["fixed"]
    assert bool((states[0]["free_mu"] != original)[free].all())  # it did move in the first round
    assert int(free.sum()) == 5
    free &= ~states[1]["fixed"]
    assert int(free.sum()) > 0
    assert torch.equal(states[1]["free_mu"][free], states[0]["free_mu"][free])
    assert torch.equal(states[1]["free_sigma"][free], states[0]["free_sigma"][free])


def test_the_optimiser_of_a_round_is_sgd_with_momentum() -> None:
    """A constant slope g: the velocities of three steps are g, 1.9 g and 2.71 g, together 5.61 g."""
    states: list[dict[str, Tensor]] = []
    config = BRIEF.override(
        {
            "posterior.alpha": 0,
            "training.weight_decay": 0,
            "training.clip_norm": None,
            "training.learning_rate": 0.01,
            "schedule.epochs_per_round": [3, 1, 1],
        }
    )
    model = nn.Linear(2, 1, bias=False).double()
    x = torch.tensor([[0.5, -2.0]], dtype=torch.float64)
    data = [(x, torch.zeros(1))]
    compress(
        model,
        data,
        None,
        config,
        lambda output, _: output.sum(),
        on_round=lambda progress: states.append(dict(progress.network or {})),
    )
    expected = model.weight.detach().reshape(-1) - 0.01 * 5.61 * x.reshape(-1)
    free = ~states[0]["fixed"]
    torch.testing.assert_close(states[0]["free_mu"][free], expected[free], rtol=1e-13, atol=0)


def test_weight_decay_in_a_run_is_never_on_sigma() -> None:
    model, states = nn.Linear(4, 2), []
    config = BRIEF.override(
        {
            "posterior.alpha": 0,
            "training.weight_decay": 0.5,
            "schedule.epochs_per_round": [1, 1, 1],
            "finish.polish_epochs": 0,
        }
    )

    def on_round(progress: Progress) -> None:
        states.append(dict(progress.network or {}))

    compress(model, tiny_data(3), None, config, lambda output, _: 0 * output.sum(), on_round=on_round)
    start = torch.cat([pwfn.initial_sigma(p.detach()).reshape(-1) for p in (model.weight, model.bias)])
    free = ~states[0]["fixed"]
    assert torch.equal(states[0]["free_sigma"][free], start[free])
    mu = torch.cat([model.weight.detach().reshape(-1), model.bias.detach()])
    assert bool((states[0]["free_mu"].abs() < mu.abs())[free].all())


EXACT = {"finish.fold_batchnorm": False, "finish.uncompressed_dtype": "float32"}


def test_batchnorm_statistics_fit_the_point_estimate_at_the_end() -> None:
    made = task("classification")
    config = BRIEF.override({"finish.polish_epochs": 0, **EXACT})
    result = compress(made.model, made.train, config=config)
    convolution, norm = result.model()[0], result.model()[1]
    with torch.no_grad():
        outputs = [convolution(x) for x, _ in made.train]
    mean = torch.stack([o.mean((0, 2, 3)) for o in outputs]).mean(0)
    variance = torch.stack([o.transpose(0, 1).flatten(1).var(1) for o in outputs]).mean(0)
    torch.testing.assert_close(norm.running_mean, mean, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(norm.running_var, variance, rtol=1e-4, atol=1e-5)
    assert norm.momentum == 0.1
    without = compress(made.model, made.train, config=config.override({"finish.reestimate_epochs": 0}))
    assert torch.equal(without.compressed.values(), result.compressed.values())
    assert not torch.allclose(without.model()[1].running_mean, mean, rtol=1e-4, atol=1e-5)


def test_polish_trains_the_uncompressed_parameters_and_nothing_else() -> None:
    made = task("classification")
    plain = compress(made.model, made.train, config=BRIEF.override({"finish.polish_epochs": 0}))
    polished = compress(
        made.model,
        made.train,
        config=BRIEF.override({"finish.polish_epochs": 30}),
    )
    assert torch.equal(plain.compressed.values(), polished.compressed.values())
    assert torch.equal(plain.compressed.sigma, polished.compressed.sigma)
    for name in ("1.weight", "1.bias"):
        assert not torch.equal(plain.compressed.untouched[name], polished.compressed.untouched[name])
    # The statistics are those of the same weights, so polishing leaves them where they were.
    torch.testing.assert_close(
        plain.compressed.untouched["1.running_mean"], polished.compressed.untouched["1.running_mean"]
    )

    def loss(result: Result) -> float:
        with torch.no_grad():
            return float(torch.stack([F.cross_entropy(result.model()(x), y) for x, y in made.train]).mean())

    assert loss(polished) < loss(plain)


def test_polish_runs_without_noise(monkeypatch: pytest.MonkeyPatch) -> None:
    """At a learning rate of 0 on one batch, every step of the polish then has the same loss."""
    losses: list[float] = []

    def loss_fn(output: Tensor, target: Tensor) -> Tensor:
        loss = F.cross_entropy(output, target)
        losses.append(loss.item())
        return loss

    config = BRIEF.override(
        {
            "posterior.init": "rms",
            "training.learning_rate": 0,
            "schedule.epochs_per_round": [4, 1, 1],
            "finish.polish_epochs": 4,
        }
    )
    monkeypatch.setattr(sys.modules["pwfn.bayes.method"], "POLISH_LEARNING_RATE", 0.0)
    result = compress(nn.Sequential(nn.Linear(4, 6), nn.LayerNorm(6)), tiny_data(1), None, config, loss_fn)
    assert float(result.compressed.sigma.max()) > 0
    assert len(losses) == 4 + 1 + 1 + 4
    assert len(set(losses[:4])) == 4  # drawn anew for every pass of training
    assert len(set(losses[-4:])) == 1


def test_what_was_frozen_stays_so() -> None:
    model = copy.deepcopy(task("classification").model)
    model[1].weight.requires_grad_(False)
    model[1].bias.requires_grad_(False)
    made = task("classification")
    result = compress(model, made.train, config=BRIEF.override({"training.weight_decay": 0.1, **EXACT}))
    assert torch.equal(result.compressed.untouched["1.weight"], model[1].weight)
    assert torch.equal(result.compressed.untouched["1.bias"], model[1].bias)


def test_on_round_is_called_after_every_round_with_the_progress() -> None:
    seen: list[tuple[int, float, int]] = []

    def on_round(progress: Progress) -> None:
        assert progress.network is not None
        last = progress.rounds[-1]
        seen.append((len(progress.rounds), last.fix.fraction, int(progress.network["fixed"].sum())))

    compress(nn.Linear(4, 2), tiny_data(2), config=BRIEF, on_round=on_round)
    assert seen == [(1, 0.5, 5), (2, 0.9, 9), (3, 1.0, 10)]


# Failure in mid-run, and going on


def batchnorm_model() -> nn.Sequential:
    torch.manual_seed(9)
    return nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.ReLU(), nn.Linear(6, 2))


SLOW_TO_FAIL = Config().override({**AS_IN_THE_PAPER, "schedule.epochs_per_round": 1})


def nan_from(call: int) -> Callable[[Tensor, Tensor], Tensor]:
    calls = itertools.count(1)

    def loss_fn(output: Tensor, target: Tensor) -> Tensor:
        return F.cross_entropy(output, target) * (torch.nan if next(calls) >= call else 1.0)

    return loss_fn


def equal_states(a: dict[str, Any], b: dict[str, Any]) -> bool:
    return a.keys() == b.keys() and all(
        torch.equal(a[name], b[name]) if isinstance(a[name], Tensor) else a[name] == b[name] for name in a
    )


def failed_in_round_3(model: nn.Module, data: Batches) -> tuple[DivergedError, list[dict[str, Any]]]:
    """Three steps an epoch: round 1 is call 1, round 2 calls 2 to 4, and call 6 is round 3, step 2."""
    states: list[dict[str, Any]] = []

    def on_round(progress: Progress) -> None:
        states.append(copy.deepcopy(progress.network or {}))

    with pytest.raises(DivergedError) as caught:
        compress(model, data, None, SLOW_TO_FAIL, nan_from(6), on_round=on_round)
    return caught.value, states


def test_a_loss_that_turns_nan_in_round_3_names_round_and_step_and_keeps_round_2() -> None:
    model, data = batchnorm_model(), tiny_data(3)
    error, states = failed_in_round_3(model, data)
    assert isinstance(error, PwfnError)
    message = str(error)
    assert "round 3 of 10" in message
    assert "step 2 of 3" in message
    assert "training.learning_rate" in message
    assert "\n" not in message

    progress = error.progress
    assert isinstance(progress, Progress)
    assert [done.fix.fraction for done in progress.rounds] == [0.2, 0.4]
    assert equal_states(progress.network, states[1])
    net = GaussianNetwork(model, SLOW_TO_FAIL)
    progress.restore(net)
    assert equal_states(net.state_dict(), states[1])
    assert int(net.fixed.sum()) == math.ceil(0.4 * net.layout.size)
    assert all(bool(torch.isfinite(v).all()) for v in net.state_dict().values() if isinstance(v, Tensor))


def test_a_run_goes_on_from_the_progress_of_one_that_failed() -> None:
    model, data = batchnorm_model(), tiny_data(3)
    error, states = failed_in_round_3(model, data)
    result = compress(
        model, data, data, SLOW_TO_FAIL.override({"training.learning_rate": 1e-4}), resume=error.progress
    )
    assert [done.fix.fraction for done in result.rounds] == list(pwfn.PAPER_FRACTIONS)
    assert result.rounds[:2] == error.progress.rounds
    fixed = states[1]["fixed"]
    assert torch.equal(result.compressed.values()[fixed], states[1]["fixed_mu"][fixed] + 0.0)
    # The progress itself is as it was: one may try again from it.
    assert len(error.progress.rounds) == 2
    assert equal_states(error.progress.network, states[1])
    again = compress(
        model, data, data, SLOW_TO_FAIL.override({"training.learning_rate": 1e-4}), resume=error.progress
    )
    assert same(result, again)


def test_a_run_that_fails_again_carries_what_both_have_reached() -> None:
    model, data = batchnorm_model(), tiny_data(3)
    first, _ = failed_in_round_3(model, data)
    with pytest.raises(DivergedError, match="round 5 of 10") as caught:
        compress(model, data, None, SLOW_TO_FAIL, nan_from(7), resume=first.progress)
    assert [done.number for done in caught.value.progress.rounds] == [1, 2, 3, 4]
    assert len(first.progress.rounds) == 2
    result = compress(model, data, config=SLOW_TO_FAIL, resume=caught.value.progress)
    assert len(result.rounds) == 10


def test_a_run_goes_on_where_the_fractions_say_though_they_have_changed() -> None:
    model, data = batchnorm_model(), tiny_data(3)
    error, _ = failed_in_round_3(model, data)  # reached 0.4
    config = SLOW_TO_FAIL.override({"schedule.fractions": [0.1, 0.3, 0.4, 0.5, 1.0]})
    result = compress(model, data, config=config, resume=error.progress)
    assert [done.fix.fraction for done in result.rounds] == [0.2, 0.4, 0.5, 1.0]
    at_once = compress(
        model, data, config=config.override({"schedule.fractions": [1.0]}), resume=error.progress
    )
    assert [done.fix.fraction for done in at_once.rounds] == [0.2, 0.4, 1.0]


def test_progress_of_another_network_is_refused() -> None:
    error, _ = failed_in_round_3(batchnorm_model(), tiny_data(3))
    other = nn.Linear(4, 2)
    for use in (
        lambda: compress(other, tiny_data(3), config=SLOW_TO_FAIL, resume=error.progress),
        lambda: error.progress.restore(GaussianNetwork(other)),
    ):
        with pytest.raises(
            WeightError, match=r"^the progress does not fit the model: it belongs to another network"
        ) as caught:
            use()
        assert "\n" not in str(caught.value)


class FailingAt:
    """A loader that raises at the n-th batch of its life."""

    def __init__(self, data: Batches, at: int, error: BaseException) -> None:
        self.data, self.left, self.error = data, at, error

    def __len__(self) -> int:
        return len(self.data)

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        for batch in self.data:
            self.left -= 1
            if self.left == 0:
                raise self.error
            yield batch


def test_data_that_fail_in_round_4_do_not_cost_the_first_three() -> None:
    """Rounds read 1, 3, 3, 3 … batches of an epoch of 3; the ninth batch is in round 4."""
    loader = FailingAt(tiny_data(3), 9, OSError("the disk is gone"))
    with pytest.raises(DataError) as caught:
        compress(batchnorm_model(), loader, config=SLOW_TO_FAIL)
    assert str(caught.value) == "train_loader failed at batch 3: OSError: the disk is gone"
    assert [done.number for done in caught.value.progress.rounds] == [1, 2, 3]
    result = compress(batchnorm_model(), tiny_data(3), config=SLOW_TO_FAIL, resume=caught.value.progress)
    assert len(result.rounds) == 10


def test_validation_data_that_fail_in_round_2_do_not_cost_the_first() -> None:
    val = FailingAt(tiny_data(1), 3, OSError("gone"))  # before, after round 1, after round 2
    with pytest.raises(DataError, match="val_loader failed at batch 1: OSError: gone") as caught:
        compress(batchnorm_model(), tiny_data(3), val, SLOW_TO_FAIL)
    assert [done.number for done in caught.value.progress.rounds] == [1]
    assert caught.value.progress.before is not None


def test_a_failure_in_the_finish_keeps_all_rounds() -> None:
    loader = FailingAt(tiny_data(3), 1 + 9 * 3 + 2, OSError("gone"))
    with pytest.raises(DataError, match="train_loader failed") as caught:
        compress(batchnorm_model(), loader, config=SLOW_TO_FAIL)
    assert len(caught.value.progress.rounds) == 10
    result = compress(batchnorm_model(), tiny_data(3), config=SLOW_TO_FAIL, resume=caught.value.progress)
    assert result.rounds == caught.value.progress.rounds


def test_an_interrupt_and_a_callers_own_error_carry_the_progress_too() -> None:
    with pytest.raises(KeyboardInterrupt) as interrupted:
        compress(batchnorm_model(), FailingAt(tiny_data(3), 6, KeyboardInterrupt()), config=SLOW_TO_FAIL)
    assert len(interrupted.value.progress.rounds) == 2  # type: ignore[attr-defined]

    def on_round(progress: Progress) -> None:
        if len(progress.rounds) == 3:
            raise LookupError("mine")

    with pytest.raises(LookupError, match="mine") as caught:
        compress(batchnorm_model(), tiny_data(3), config=SLOW_TO_FAIL, on_round=on_round)
    assert len(caught.value.progress.rounds) == 3  # type: ignore[attr-defined]


def test_a_loader_that_can_be_read_once_is_told_when_it_runs_out() -> None:
    config = BRIEF.override({"training.steps_per_epoch": 3})
    with pytest.raises(
        DataError, match="train_loader gave nothing in pass 2: it can be read only once"
    ) as caught:
        compress(nn.Linear(4, 2), iter(tiny_data(3)), config=config)
    assert len(caught.value.progress.rounds) == 1


@pytest.mark.parametrize(
    "once", [iter, lambda data: (batch for batch in data), lambda data: map(tuple, data)]
)
def test_validation_data_that_can_be_read_once_are_refused_before_any_training(once: Any) -> None:
    """They are read again after every round: the second time would come after hours."""
    with pytest.raises(DataError, match=r"val_loader is a \w+, which can be read only once") as caught:
        compress(nn.Linear(4, 2), tiny_data(3), once(tiny_data(3)), config=BRIEF)
    assert caught.value.progress.before is None


# Bad input


def broken_linear(value: float) -> nn.Module:
    model = nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 2))
    with torch.no_grad():
        model[1].weight[1, 2] = value
    return model


GOOD = tiny_data(2)
UNLABELLED = [x for x, _ in GOOD]
WIDE = [(torch.zeros(2, 5), torch.zeros(2, dtype=torch.int64))]


def attempt(
    model: Any = None, train: Any = GOOD, val: Any = None, config: Any = BRIEF, **options: Any
) -> Result:
    return compress(nn.Linear(4, 2) if model is None else model, train, val, config, **options)


BAD: dict[str, tuple[Callable[[], Any], type[PwfnError], list[str]]] = {
    "NaN weight": (
        lambda: attempt(broken_linear(math.nan)),
        WeightError,
        ["1.weight[1, 2] is nan", "finite weights"],
    ),
    "infinite weight": (lambda: attempt(broken_linear(-math.inf)), WeightError, ["1.weight[1, 2] is -inf"]),
    "empty loader": (lambda: attempt(train=[]), DataError, ["train_loader is empty"]),
    "empty loader with steps": (
        lambda: attempt(train=[], config=BRIEF.override({"training.steps_per_epoch": 2})),
        DataError,
        ["train_loader is empty"],
    ),
    "empty validation loader": (
        lambda: attempt(val=[]),
        DataError,
        ["val_loader gave no batch", "pass a loader"],
    ),
    "batch too wide": (
        lambda: attempt(train=WIDE),
        DataError,
        ["round 1 of 3, step 1", "the model cannot take inputs (2, 5) float32"],
    ),
    "validation batch too wide": (
        lambda: attempt(val=WIDE),
        DataError,
        ["val_loader, batch 1", "the model cannot take inputs (2, 5) float32"],
    ),
    "three inputs": (
        lambda: attempt(train=[(*GOOD[0], GOOD[0][1])]),
        DataError,
        ["cannot take inputs (4, 4) float32, (4,) int64"],
    ),
    "classes out of range": (
        lambda: attempt(train=[(torch.zeros(2, 4), torch.tensor([0, 7]))]),
        DataError,
        ["round 1 of 3, step 1", "the loss cannot take the output and the target"],
    ),
    "loss of many numbers": (
        lambda: attempt(loss_fn=lambda o, t: F.cross_entropy(o, t, reduction="none")),
        DataError,
        ["round 1 of 3, step 1", "the loss is not a single number: reduce it to its mean"],
    ),
    "loss that is no tensor": (lambda: attempt(loss_fn=lambda o, t: 1.0), DataError, ["not a single number"]),
    "loss without gradient": (
        lambda: attempt(loss_fn=lambda o, t: o.detach().sum()),
        DataError,
        ["round 1 of 3", "the loss does not depend on the weights"],
    ),
    "targets missing": (
        lambda: attempt(train=UNLABELLED),
        DataError,
        ["has no target: give (input, target) batches, or", "distill=True"],
    ),
    "validation targets missing": (
        lambda: attempt(val=UNLABELLED),
        DataError,
        ["val_loader, batch 1 has no target"],
    ),
    "metric that fails": (
        lambda: attempt(val=GOOD, metric=lambda o, t: o @ t),
        DataError,
        ["val_loader, batch 1: the metric cannot take"],
    ),
    "nothing to compress": (
        lambda: attempt(nn.BatchNorm1d(4)),
        pwfn.LayoutError,
        ["BatchNorm1d has no convolution or linear layer to compress", "include="],
    ),
    "no module": (
        lambda: attempt("resnet18"),
        pwfn.LayoutError,
        ["the model is a str: allowed is a torch.nn.Module"],
    ),
    "frozen weight": (
        lambda: attempt(nn.Linear(4, 2).requires_grad_(False)),
        pwfn.LayoutError,
        ["weight is frozen", "exclude="],
    ),
    "unknown device": (lambda: attempt(device="gpu"), ConfigError, ["device 'gpu' cannot be used", '"cpu"']),
    "device of another kind": (lambda: attempt(device=3.5), ConfigError, ["device '3.5' cannot be used"]),
    "device without numbers": (lambda: attempt(device="meta"), ConfigError, ["device 'meta' cannot be used"]),
    "model without numbers": (
        lambda: attempt(nn.Linear(4, 2, device="meta")),
        ConfigError,
        ["device 'meta' cannot be used", "load the model's weights first"],
    ),
    "config as a table": (
        lambda: attempt(config={}),
        ConfigError,
        ["config is a dict: allowed is a pwfn.Config"],
    ),
    "config as a name": (
        lambda: attempt(config="paper"),
        ConfigError,
        ["config is a str", 'pwfn.Config.preset("paper")'],
    ),
    "loader is a number": (
        lambda: attempt(train=5),
        DataError,
        ["train_loader is a int: allowed is an iterable"],
    ),
    "no loader": (lambda: attempt(train=None), DataError, ["train_loader is a NoneType"]),
    "validation loader is a number": (lambda: attempt(val=5), DataError, ["val_loader is a int"]),
    "loader without length": (
        lambda: attempt(train=iter(GOOD)),
        DataError,
        ["train_loader has no length: set training.steps_per_epoch"],
    ),
    "resume is a table": (
        lambda: attempt(resume={"rounds": []}),
        ConfigError,
        ["resume is a dict: allowed is a pwfn.progress.Progress"],
    ),
    "pattern that matches nothing": (
        lambda: attempt(config=BRIEF.override({"layout.exclude": ["wieght"]})),
        pwfn.LayoutError,
        ["'wieght' matches no parameter of the model", "'weight'"],
    ),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_input_is_told_in_one_clear_sentence(case: str) -> None:
    action, kind, words = BAD[case]
    with pytest.raises(PwfnError) as caught:
        action()
    message = str(caught.value)
    assert type(caught.value) is kind
    assert "\n" not in message
    for word in words:
        assert word in message


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device here")
def test_a_cuda_device_that_is_not_there() -> None:
    with pytest.raises(ConfigError, match=r"device 'cuda:1' cannot be used .*\"cpu\""):
        attempt(device="cuda:1")


def test_a_device_may_be_named_or_given() -> None:
    for device in ("cpu", CPU):
        assert attempt(device=device).compressed.codebook.device == CPU


def test_no_settings_means_the_recommended_ones() -> None:
    result = compress(nn.Linear(4, 2), tiny_data(1))
    assert result.config == Config.preset("recommended")


def test_iterables_of_any_kind_are_loaders() -> None:
    class Plain:
        def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
            return iter(GOOD)

    loaders: list[Iterable[Any]] = [tuple(GOOD), Plain(), dict(enumerate(GOOD)).values()]
    config = BRIEF.override({"training.steps_per_epoch": 2})
    torch.manual_seed(0)
    model = nn.Linear(4, 2)
    results = [compress(model, loader, config=config) for loader in loaders]
    assert same(results[0], results[1])
    assert same(results[0], results[2])


def test_cross_entropy_as_a_module_is_scored_by_accuracy_too() -> None:
    data = tiny_data(2)
    result = compress(nn.Linear(4, 2), data, data, loss_fn=nn.CrossEntropyLoss())
    assert result.after is not None
    assert result.after.metric is not None


def test_a_result_whose_scores_are_not_finite_can_be_saved(tmp_path: Path) -> None:
    data = tiny_data(2)
    result = compress(nn.Linear(4, 2), data, data, metric=lambda output, target: torch.tensor(math.nan))
    assert result.save(tmp_path / "model.pwfn") > 0
    loaded = pwfn.load(tmp_path / "model.pwfn")
    assert loaded.record["after"]["metric"] is None
    assert torch.equal(loaded.values(), result.compressed.values())


# What a result shows


def test_a_result_prints_in_ten_lines_and_its_repr_is_one() -> None:
    made, result = compressed_task("classification")
    lines = str(result).splitlines()
    assert len(lines) <= 10
    assert max(map(len, lines)) <= 100
    assert f"{len(dumps(result.compressed)):,} bytes" in str(result)
    assert f"{result.summary.whole.unique}, with" in str(result)
    for shown in (result, result.compressed, result.compressed.layout, result.after, Config()):
        assert "\n" not in repr(shown)
        assert len(repr(shown)) <= 120
    assert len(repr(result)) <= 100
    assert result._repr_html_().count("<tr>") == len(lines)
    silent = compress(made.model, made.train, None, BRIEF)
    assert "not measured" in str(silent)


def test_a_preset_may_be_given_by_name() -> None:
    model, data = nn.Linear(4, 2), tiny_data(2)
    assert same(compress(model, data, preset="paper"), compress(model, data, config=Config.preset("paper")))
    with pytest.raises(ConfigError, match="give config or preset, not both"):
        compress(model, data, config=Config(), preset="quick")


@pytest.mark.parametrize("preset", ["recommended", "quick"])
@pytest.mark.parametrize("mode", [torch.inference_mode, torch.no_grad])
def test_the_callers_mode_of_autograd_does_not_matter(mode: Any, preset: str) -> None:
    made = classification()
    config = Config.preset(preset).override({"schedule.fractions": [1.0]})
    wanted = compress(made.model, made.train, made.val, config)
    with mode():
        data = [(x.clone(), y.clone()) for x, y in made.train]  # tensors that autograd does not take
        found = compress(copy.deepcopy(made.model), data, made.val, config)
        assert torch.is_inference_mode_enabled() == (mode is torch.inference_mode)
        assert not torch.is_grad_enabled()
    assert dumps(found.compressed) == dumps(wanted.compressed)


@pytest.mark.parametrize("target", [None, 8.0])
def test_a_model_may_keep_a_tensor_of_its_last_pass(target: float | None) -> None:
    """As mixtures of experts keep a term of the loss: it belongs to a graph, which cannot be copied."""

    class Keeping(nn.Sequential):
        def forward(self, x: Tensor) -> Tensor:
            x = super().forward(x)
            self.term = x.square().mean()
            return x

    made = classification()
    config = BRIEF.override({"target.bits": target, "finish.reestimate_epochs": 0.0})
    found, wanted = (
        compress(model, made.train, None, config).compressed
        for model in (Keeping(*made.model).eval(), made.model.eval())
    )
    assert dumps(found) == dumps(wanted)
