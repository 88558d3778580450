"""BatchNorm statistics of a draw: by hand, put back as they were, refused where there are none to gather."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from pwfn import Compressed, DataError, WeightError, load
from pwfn.bayes.fold_batchnorm import fold_batchnorm
from pwfn.evaluate import Rival, assess, ensemble, point, settled_by
from pwfn.layout import Layout
from pwfn.zoo.models import digits_resnet

CLASSES = 3
SIGMA = 0.5


def network() -> Any:
    """With statistics and momentum unlike those of a new layer."""
    torch.manual_seed(0)
    model: Any = nn.Sequential(
        *(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.ReLU(inplace=True), nn.Dropout(0.5)),
        *(nn.Linear(8, 8), nn.BatchNorm1d(8, momentum=0.3), nn.ReLU(), nn.Linear(8, CLASSES)),
    )
    with torch.no_grad():
        for number in (1, 5):
            layer = model[number]
            layer.weight.uniform_(0.5, 1.5)
            layer.bias.normal_()
            layer.running_mean.normal_()
            layer.running_var.uniform_(0.5, 2.0)
            layer.num_batches_tracked.fill_(7)
    return model


def compressed(model: nn.Module, sigma: float = SIGMA) -> Compressed:
    layout = Layout.of(model)
    state = model.state_dict()
    values = torch.cat([state[entry.name].reshape(-1) for entry in layout.entries])
    covered = {entry.name for entry in layout.entries}
    untouched = {name: value for name, value in state.items() if name not in covered}
    return Compressed.of(layout, (4 * values).round() / 4, torch.full_like(values, sigma), untouched)


def numbers(*shape: int, seed: int = 1) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def buffers(model: nn.Module) -> dict[str, Tensor]:
    return {name: value.clone() for name, value in model.named_buffers()}


def same(one: dict[str, Tensor], other: dict[str, Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


SMALL = compressed(network())
TRAIN = [numbers(5, 4, seed=2), 3 + 2 * numbers(9, 4, seed=3), numbers(2, 4, seed=4)]  # as uneven as can be
TEST = [(numbers(40, 4, seed=5), torch.arange(40) % CLASSES)]


# What is gathered


def test_one_draw_by_hand() -> None:
    """Weight w: of w·(0, 2) mean w and variance 2w², of w·(4, 8) 6w and 8w², of w·(1, 1, 4) 2w and 3w²."""
    model = nn.Sequential(nn.Linear(1, 1, bias=False), nn.BatchNorm1d(1))
    small = Compressed.of(
        Layout.of(model),
        torch.tensor([0.5]),
        torch.tensor([2.0]),
        {f"1.{name}": value for name, value in model[1].state_dict().items()},
    )
    settle = settled_by([torch.tensor(x)[:, None] for x in ([0.0, 2.0], [4.0, 8.0], [1.0, 1.0, 4.0])])
    seen: list[tuple[float, float, float]] = []

    def watched(drawn: Any) -> None:
        settle(drawn)
        assert int(drawn[1].num_batches_tracked) == 3
        seen.append((float(drawn[0].weight), float(drawn[1].running_mean), float(drawn[1].running_var)))

    ensemble(small, model, [torch.ones(2, 1)], 4, seed=3, settle=watched)
    noise = torch.randn(4, generator=torch.Generator().manual_seed(3)).tolist()
    assert [w for w, _, _ in seen] == pytest.approx([0.5 + 2.0 * e for e in noise], rel=1e-6)
    for w, mean, var in seen:
        assert mean == pytest.approx(w * (1 + 6 + 2) / 3, rel=1e-6)
        assert var == pytest.approx(w * w * (2 + 8 + 3) / 3, rel=1e-6)


def test_a_later_layer_sees_the_earlier_ones_normalised_by_the_batch_and_no_dropout() -> None:
    model = network()
    SMALL.apply_to(model)
    settled_by(TRAIN)(model)
    means, variances = [], []
    for x in TRAIN:
        y = x.double() @ model[0].weight.double().T + model[0].bias.double()
        y = (y - y.mean(0)) / (y.var(0, correction=0) + model[1].eps).sqrt()
        y = (y * model[1].weight.double() + model[1].bias.double()).relu()
        y = y @ model[4].weight.double().T + model[4].bias.double()
        means.append(y.mean(0))
        variances.append(y.var(0, correction=1))
    found = model[5]
    assert torch.allclose(found.running_mean.double(), torch.stack(means).mean(0), rtol=1e-4, atol=1e-5)
    assert torch.allclose(found.running_var.double(), torch.stack(variances).mean(0), rtol=1e-4, atol=1e-5)


def test_noise_adds_sigma_squared_times_the_inputs_variance_to_what_is_gathered() -> None:
    """E var = mu' Cov(x) mu + sum_i sigma_i^2 Var(x_i), over draws; the docs have it so."""
    x = 1 + numbers(30, 3) * torch.tensor([1.0, 2.0, 0.5])
    mu, sigma = torch.tensor([1.0, -0.5, 2.0]), torch.tensor([0.3, 1.0, 2.0])
    model: Any = nn.Sequential(nn.Linear(3, 1, bias=False), nn.BatchNorm1d(1))
    settle = settled_by([x])
    found, generator = [], torch.Generator().manual_seed(0)
    for _ in range(2000):
        model[0].weight.data = (mu + sigma * torch.randn(3, generator=generator))[None]
        settle(model)
        found.append(float(model[1].running_var))
    gathered = torch.tensor(found)
    expected = float((x @ mu).var() + (sigma.square() * x.var(0)).sum())
    error = float(gathered.std()) / 2000**0.5
    assert error < 0.03 * expected
    assert abs(float(gathered.mean()) - expected) < 3 * error


def test_an_ensemble_with_statistics_of_its_own_is_that_of_a_literal_loop_and_another_than_without() -> None:
    settle, model, generator, found = settled_by(TRAIN), network(), torch.Generator().manual_seed(4), []
    for _ in range(3):
        model.load_state_dict(SMALL.sample(generator))
        settle(model)
        with torch.no_grad():
            found.append(model.eval()(TEST[0][0]).double().softmax(1))
    settled = ensemble(SMALL, network(), TEST, 3, 4, settle=settle).probabilities
    assert torch.allclose(settled, torch.stack(found).mean(0), rtol=1e-10)
    plain = ensemble(SMALL, network(), TEST, 3, 4).probabilities
    assert float((settled - plain).abs().max()) > 0.05


def test_statistics_of_its_own_undo_the_size_of_the_weights_before_them() -> None:
    """Twice the weights of a layer before BatchNorm are the same network, where statistics are its own."""
    settle, outputs = settled_by(TRAIN), []
    for factor in (1.0, 2.0):
        model = network().eval()
        model[0].weight.data *= factor
        model[0].bias.data *= factor
        settle(model)
        outputs.append(point(model, TEST).probabilities)
    assert torch.allclose(outputs[0], outputs[1], rtol=1e-3, atol=1e-4)


# What is put back


def test_modes_and_momentum_are_as_they_were() -> None:
    model = network().train()
    model[3].eval()
    model[5].eval()
    before = [(m.training, getattr(m, "momentum", None)) for m in model.modules()]
    settled_by(TRAIN)(model)
    assert [(m.training, getattr(m, "momentum", None)) for m in model.modules()] == before
    assert (model[1].momentum, model[5].momentum) == (0.1, 0.3)
    assert not any(p.grad_fn or p.grad is not None for p in model.parameters())


@pytest.mark.parametrize("scored", ["assess", "ensemble"])
def test_the_model_ends_with_the_point_estimates_own_statistics(scored: str) -> None:
    model, settle = network().train(), settled_by(TRAIN)
    settle(model)  # what it comes with does not matter either
    assert not same(buffers(model), buffers(network()))
    if scored == "assess":
        assess(SMALL, model, TEST, samples=2, ood={"other": [numbers(4, 4)]}, settle=settle)
    else:
        ensemble(SMALL, model, TEST, 2, settle=settle)
    assert same(buffers(model), buffers(network()))
    assert all(torch.equal(model.state_dict()[k], v) for k, v in SMALL.dense_state_dict().items())
    assert (model[1].momentum, model[5].momentum) == (0.1, 0.3)
    assert all(module.training for module in model.modules())


def test_the_point_estimate_is_scored_with_its_own_statistics() -> None:
    rows = [assess(SMALL, network(), TEST, samples=2, settle=s) for s in (None, settled_by(TRAIN))]
    assert rows[0].row(Rival.POINT).nll == rows[1].row(Rival.POINT).nll
    assert rows[0].row(Rival.ENSEMBLE).nll != rows[1].row(Rival.ENSEMBLE).nll


def test_after_an_error_all_is_as_it_was() -> None:
    model = network().train()
    settle = settled_by([TRAIN[0], numbers(6, 3)])  # the second batch has too few columns
    with pytest.raises(
        DataError, match=r"^training data for BatchNorm statistics, batch 2: the model cannot"
    ):
        settle(model)
    assert same(buffers(model), buffers(network()))
    assert (model[1].momentum, model[5].momentum) == (0.1, 0.3)
    assert all(module.training for module in model.modules())


class Aside(nn.Module):
    """Two layers that update nothing, and one that no batch comes through, beside one that is settled."""

    def __init__(self) -> None:
        super().__init__()
        self.settled, self.unused = nn.BatchNorm1d(4), nn.BatchNorm1d(4)
        self.bare, self.frozen = nn.BatchNorm1d(4, track_running_stats=False), nn.BatchNorm1d(4)
        self.frozen.track_running_stats = False  # has its statistics, and keeps them
        for number, layer in enumerate((self.unused, self.frozen), 2):
            assert layer.running_mean is not None
            layer.running_mean.fill_(number)

    def forward(self, x: Tensor) -> Tensor:
        assert (self.settled.training, self.bare.training, self.frozen.training) == (True, False, False)
        found: Tensor = self.settled(self.frozen(self.bare(x)))
        return found


def test_layers_that_track_nothing_or_see_nothing_are_left_alone() -> None:
    model = Aside()
    before = buffers(model)
    settled_by(TRAIN)(model)
    now = buffers(model)
    assert {name for name in now if not torch.equal(now[name], before[name])} == {
        "settled.running_mean",
        "settled.running_var",
        "settled.num_batches_tracked",
    }
    assert all(layer.momentum == 0.1 for layer in model.children())


# Which batches


class Changing:
    """Gives other batches in every pass, in the same memory, as a quick loader may."""

    def __init__(self) -> None:
        self.memory = torch.empty(6, 4)
        self.asked = 0

    def __iter__(self) -> Iterator[Tensor]:
        while True:
            self.asked += 1
            yield self.memory.normal_()  # from torch's global random state


def test_batches_are_taken_once_and_by_the_seed() -> None:
    loader = Changing()
    state = torch.get_rng_state()
    kept = [settled_by(loader, 3, seed=seed) for seed in (1, 1, 2)]
    assert torch.equal(torch.get_rng_state(), state)
    assert loader.asked == 9
    first, again, other = [torch.cat([batch.args[0] for batch in settle.batches]) for settle in kept]
    assert len(first.unique(dim=0)) == 18
    assert torch.equal(first, again)
    assert not torch.equal(first, other)
    found = [ensemble(SMALL, network(), TEST, 3, settle=settle).probabilities for settle in (kept[0], *kept)]
    assert loader.asked == 9
    assert torch.equal(found[0], found[1])
    assert torch.equal(found[0], found[2])
    assert not torch.equal(found[0], found[3])


def test_a_network_that_works_in_place_does_not_change_what_the_next_draw_sees() -> None:
    model = nn.Sequential(nn.ReLU(inplace=True), nn.BatchNorm1d(4))
    kept = [x.clone() for x in TRAIN]
    settle = settled_by(kept)
    settle(model)
    assert all(torch.equal(x, y) for x, y in zip(kept, TRAIN, strict=True))
    assert all(torch.equal(b.args[0], y) for b, y in zip(settle.batches, TRAIN, strict=True))


def test_one_pass_is_the_most_there_is_and_the_note_says_how_much_it_was() -> None:
    assert settled_by(TRAIN, 2).note == (
        "BatchNorm statistics were gathered anew for every draw, from 2 training batches (14 examples)"
    )
    assert settled_by(TRAIN, 8).note.endswith("from 3 training batches (16 examples)")
    assert settled_by(TRAIN, 1).note.endswith("from 1 training batch (5 examples)")


# Refusals


def test_nothing_to_gather_from() -> None:
    with pytest.raises(DataError, match=r"^training data for BatchNorm statistics gave no batch: pass a"):
        settled_by([])
    with pytest.raises(DataError, match=r"^batches is 0: allowed is at least 1$"):
        settled_by(TRAIN, 0)
    with pytest.raises(
        DataError, match=r"^training data for BatchNorm statistics, batch 1: .*more than 1 val"
    ):
        settled_by([numbers(1, 4)])(network())


@pytest.mark.parametrize(
    "model", [nn.Linear(4, 2), nn.LayerNorm(4), nn.BatchNorm1d(4, track_running_stats=False)]
)
def test_a_network_without_statistics_is_refused(model: nn.Module) -> None:
    with pytest.raises(WeightError) as caught:
        settled_by(TRAIN)(model)
    assert str(caught.value) == (
        f"{type(model).__name__} has no BatchNorm layer with running statistics, so that there are none to "
        "gather for a draw: score it without (settle=None, or no --settle)"
    )


FOLDED = (
    "BatchNorm '{}' has its statistics folded into its scale and shift (finish.fold_batchnorm): they are no "
    "longer there, and gathering new ones would undo the fold; use a file without it, or score it as it is "
    "(settle=None, or no --settle)"
)


@pytest.mark.parametrize("which", [1, 5])
def test_a_file_whose_batchnorm_is_folded_is_refused(which: int, tmp_path: Path) -> None:
    """Even where it is one layer of several; the model is left as the file has it."""
    folded = network()
    assert fold_batchnorm(folded[which]) == 1
    compressed(folded).save(tmp_path / "folded.pwfn")
    model = network()
    with pytest.raises(WeightError) as caught:
        ensemble(load(tmp_path / "folded.pwfn"), model, TEST, 2, settle=settled_by(TRAIN))
    assert str(caught.value) == FOLDED.format(which)
    assert same(buffers(model), buffers(folded))


def test_a_network_that_was_never_trained_is_not_taken_for_a_folded_one() -> None:
    model: Any = nn.Sequential(nn.BatchNorm1d(4), nn.BatchNorm1d(4), nn.BatchNorm1d(4, affine=False))
    nn.init.zeros_(model[1].weight)  # as some residual networks begin
    settled_by(TRAIN)(model)
    assert all(int(layer.num_batches_tracked) == 3 for layer in model)


# The command


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Small images, and files of a network with a large sigma: as it is, folded, and without BatchNorm."""
    folder = tmp_path_factory.mktemp("settling")
    dice = np.random.default_rng(0)
    x, y = dice.integers(0, 256, (60, 8, 8, 1), dtype=np.uint8), np.arange(60) % 10
    np.savez(folder / "data.npz", x_train=x[:40], y_train=y[:40], x_test=x[40:], y_test=y[40:])
    torch.manual_seed(0)
    model = digits_resnet()
    settled_by([numbers(64, 1, 8, 8)])(model)  # statistics that a trained network could have
    record = {"model": "digits_resnet"}
    compressed(model, 0.2).save(folder / "model.pwfn", posterior="weight", record=record)
    fold_batchnorm(model)
    compressed(model, 0.2).save(folder / "folded.pwfn", posterior="weight", record=record)
    (folder / "nets.py").write_text(
        "from torch import nn\n"
        "def make(classes=10):\n"
        "    return nn.Sequential(nn.Flatten(), nn.Linear(64, classes))\n"
    )
    bare = nn.Sequential(nn.Flatten(), nn.Linear(64, 10))
    shown: dict[str, Any] = {"preparation": {"mean": [], "std": [], "image_size": 8}}
    compressed(bare).save(folder / "bare.pwfn", posterior="weight", record=shown)
    return folder


def asked(folder: Path, *more: str, file: str = "model.pwfn") -> tuple[str, ...]:
    return ("evaluate", str(folder / file), "--data", f"npz:{folder / 'data.npz'}", "--device", "cpu", *more)


def test_the_command_settles_draws_and_says_so(call: Any, folder: Path) -> None:
    draws = ("--samples", "3", "--seed", "5", "--batch-size", "16")
    note = "BatchNorm statistics were gathered anew for every draw, from 2 training batches (32 examples)"
    status, out, err = call(*asked(folder, *draws, "--settle", "2"))
    assert (status, err) == (0, "")
    assert note in out.splitlines()
    wanted = asked(folder, *draws, "--settle", "2", "--out", str(folder / "table.json"), "--json")
    first, again, plain, other = (
        json.loads(call(*arguments)[1])
        for arguments in (
            wanted,
            wanted,
            asked(folder, *draws, "--json"),
            asked(folder, *draws[:2], "--seed", "6", *draws[4:], "--settle", "2", "--json"),
        )
    )
    assert first == again
    assert json.loads((folder / "table.json").read_text()) == first["uncertainty"]
    assert note in first["uncertainty"]["notes"]
    assert not any("gathered anew" in line for line in plain["uncertainty"]["notes"])
    assert first["after"] == plain["after"]
    losses = [{row["name"]: row["nll"] for row in f["uncertainty"]["rows"]} for f in (first, plain, other)]
    assert losses[0]["point estimate"] == losses[1]["point estimate"] == losses[2]["point estimate"]
    assert len({loss["ensemble"] for loss in losses}) == 3


def test_the_commands_figures_are_those_of_the_training_loaders_first_batches(
    call: Any, folder: Path
) -> None:
    from pwfn.zoo.data import DataOptions, open_source

    facts = json.loads(
        call(
            *asked(folder, "--samples", "2", "--seed", "5", "--batch-size", "16", "--settle", "2", "--json")
        )[1]
    )
    own = open_source(f"npz:{folder / 'data.npz'}", DataOptions(batch_size=16, seed=5))
    raw = [next(own.train.epoch(0, start)) for start in (0, 1)]
    found = assess(
        load(folder / "model.pwfn"), digits_resnet(), own.test, samples=2, seed=5, settle=settled_by(raw)
    )
    rows = {row["name"]: row["nll"] for row in facts["uncertainty"]["rows"]}
    assert rows["ensemble"] == pytest.approx(found.row(Rival.ENSEMBLE).nll, rel=1e-9)


@pytest.mark.parametrize("file", ["model.pwfn", "folded.pwfn"])
def test_where_the_ensemble_is_worse_and_it_could_help_a_note_says_so(
    call: Any, folder: Path, tmp_path: Path, file: str
) -> None:
    """The labels are what the point estimate says, so that noise can only do harm."""
    from pwfn.zoo.data import DataOptions, open_source

    dice = np.random.default_rng(1)
    x = dice.integers(0, 256, (200, 8, 8, 1), dtype=np.uint8)
    y = np.arange(200) % 10
    np.savez(tmp_path / "data.npz", x_train=x[:20], y_train=y[:20], x_test=x, y_test=y)
    model = load(folder / file).apply_to(digits_resnet())
    test = open_source(f"npz:{tmp_path / 'data.npz'}", DataOptions()).test
    said = point(model, test).probabilities.argmax(1)
    np.savez(tmp_path / "data.npz", x_train=x[:20], y_train=y[:20], x_test=x, y_test=said.numpy())
    where = ("evaluate", str(folder / file), "--data", f"npz:{tmp_path / 'data.npz'}", "--device", "cpu")
    told = json.loads(call(*where, "--samples", "5", "--json")[1])["uncertainty"]
    assert told["comparisons"][0] | {"rival": "point estimate", "verdict": "worse"} == told["comparisons"][0]
    notes = [note for note in told["notes"] if "--settle 8" in note]
    assert len(notes) == (file == "model.pwfn")  # a folded one could not be settled


@pytest.mark.parametrize(
    ("file", "more", "sentence"),
    [
        (
            "model.pwfn",
            ("--settle", "8"),
            "--settle 8 gathers BatchNorm statistics for every draw, and no draws are asked for: give "
            "--samples as well",
        ),
        ("folded.pwfn", ("--settle", "8", "--samples", "2"), FOLDED.format("bn1")),
        (
            "bare.pwfn",
            ("--settle", "8", "--samples", "2", "--model", "python:{folder}/nets.py:make"),
            "Sequential has no BatchNorm layer with running statistics, so that there are none to gather for "
            "a draw: score it without (settle=None, or no --settle)",
        ),
    ],
)
def test_the_commands_refusals(
    call: Any, folder: Path, file: str, more: tuple[str, ...], sentence: str
) -> None:
    status, out, err = call(*asked(folder, *(word.format(folder=folder) for word in more), file=file))
    assert (status, out, err) == (2, "", f"pwfn: {sentence}\n")
