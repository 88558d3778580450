"""BatchNorm statistics of a draw: by hand, restored afterwards, refused where there are none."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from cases import batchnorm_classifier as network
from cases import compressed_of, numbers
from torch import Tensor, nn

from pwfn import DataError, WeightError, load
from pwfn.evaluate.ensemble import ensemble, point
from pwfn.file.fold_batchnorm import fold_batchnorm
from pwfn.lab.uncertainty.assess import Rival, assess
from pwfn.lab.uncertainty.recalibration import Recalibration
from pwfn.zoo.data import DataOptions, open_source
from pwfn.zoo.models import digits_resnet

from_loader = Recalibration.from_loader
SMALL = compressed_of(network(), sigma=0.5)
TRAIN = [numbers(5, 4, seed=2), 3 + 2 * numbers(9, 4, seed=3), numbers(2, 4, seed=4)]  # very uneven
TEST = [(numbers(40, 4, seed=5), torch.arange(40) % 3)]


def buffers(model: nn.Module) -> dict[str, Tensor]:
    return {name: value.clone() for name, value in model.named_buffers()}


def same(one: dict[str, Tensor], other: dict[str, Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


# What is computed


def test_one_draw_by_hand() -> None:
    """Weight w: of w·(0, 2) mean w and variance 2w², of w·(4, 8) 6w and 8w², of w·(1, 1, 4) 2w and 3w²."""
    model = nn.Sequential(nn.Linear(1, 1, bias=False), nn.BatchNorm1d(1))
    small = compressed_of(model, torch.tensor([0.5]), 2.0)
    recalibrate = from_loader([torch.tensor(x)[:, None] for x in ([0.0, 2.0], [4.0, 8.0], [1.0, 1.0, 4.0])])
    seen: list[tuple[float, float, float]] = []

    def watched(drawn: Any) -> None:
        recalibrate(drawn)
        assert int(drawn[1].num_batches_tracked) == 3
        seen.append((float(drawn[0].weight), float(drawn[1].running_mean), float(drawn[1].running_var)))

    ensemble(small, model, [torch.ones(2, 1)], 4, seed=3, recalibrate=watched)
    noise = torch.randn(4, generator=torch.Generator().manual_seed(3)).tolist()
    assert [w for w, _, _ in seen] == pytest.approx([0.5 + 2.0 * e for e in noise], rel=1e-6)
    for w, mean, var in seen:
        assert mean == pytest.approx(w * (1 + 6 + 2) / 3, rel=1e-6)
        assert var == pytest.approx(w * w * (2 + 8 + 3) / 3, rel=1e-6)


def test_a_later_layer_sees_earlier_ones_normalised_by_the_batch_and_no_dropout() -> None:
    model = SMALL.apply_to(network())
    from_loader(TRAIN)(model)
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


def test_noise_adds_sigma_squared_times_the_variance_of_the_inputs() -> None:
    """E var = mu' Cov(x) mu + sum_i sigma_i^2 Var(x_i), over draws."""
    x = 1 + numbers(30, 3) * torch.tensor([1.0, 2.0, 0.5])
    mu, sigma = torch.tensor([1.0, -0.5, 2.0]), torch.tensor([0.3, 1.0, 2.0])
    model: Any = nn.Sequential(nn.Linear(3, 1, bias=False), nn.BatchNorm1d(1))
    recalibrate = from_loader([x])
    found, generator = [], torch.Generator().manual_seed(0)
    for _ in range(2000):
        model[0].weight.data = (mu + sigma * torch.randn(3, generator=generator))[None]
        recalibrate(model)
        found.append(float(model[1].running_var))
    variances = torch.tensor(found)
    expected = float((x @ mu).var() + (sigma.square() * x.var(0)).sum())
    error = float(variances.std()) / 2000**0.5
    assert error < 0.03 * expected
    assert abs(float(variances.mean()) - expected) < 3 * error


def test_a_recalibrated_ensemble_is_that_of_a_literal_loop() -> None:
    recalibrate, model, generator, found = from_loader(TRAIN), network(), torch.Generator().manual_seed(4), []
    for _ in range(3):
        model.load_state_dict(SMALL.sample(generator))
        recalibrate(model)
        with torch.no_grad():
            found.append(model.eval()(TEST[0][0]).double().softmax(1))
    recalibrated = ensemble(SMALL, network(), TEST, 3, 4, recalibrate=recalibrate).probabilities
    assert torch.allclose(recalibrated, torch.stack(found).mean(0), rtol=1e-10)
    plain = ensemble(SMALL, network(), TEST, 3, 4).probabilities
    assert float((recalibrated - plain).abs().max()) > 0.05


# What is restored


@pytest.mark.parametrize("scored", ["assess", "ensemble"])
def test_the_model_ends_with_the_statistics_modes_and_momenta_of_the_point_estimate(scored: str) -> None:
    model, recalibrate = network().train(), from_loader(TRAIN)
    model[3].eval()
    model[5].eval()
    modes = [module.training for module in model]
    recalibrate(model)
    assert not same(buffers(model), buffers(network()))
    assert [module.training for module in model] == modes
    if scored == "assess":
        assess(SMALL, model, TEST, samples=2, ood={"other": [numbers(4, 4)]}, recalibrate=recalibrate)
    else:
        ensemble(SMALL, model, TEST, 2, recalibrate=recalibrate)
    assert all(torch.equal(model.state_dict()[k], v) for k, v in SMALL.dense_state_dict().items())
    assert (model[1].momentum, model[5].momentum) == (0.1, 0.3)
    assert [module.training for module in model] == modes


def test_the_point_estimate_is_scored_with_its_own_statistics() -> None:
    plain, recalibrated = (
        assess(SMALL, network(), TEST, samples=2, recalibrate=r) for r in (None, from_loader(TRAIN))
    )
    assert plain.row(Rival.POINT).nll == recalibrated.row(Rival.POINT).nll
    assert plain.row(Rival.ENSEMBLE).nll != recalibrated.row(Rival.ENSEMBLE).nll


def test_after_an_error_everything_is_as_before() -> None:
    model = network().train()
    recalibrate = from_loader([TRAIN[0], numbers(6, 3)])  # the second batch has too few columns
    with pytest.raises(DataError, match="batch 2: the model cannot"):
        recalibrate(model)
    assert same(buffers(model), buffers(network()))
    assert (model[1].momentum, model[5].momentum) == (0.1, 0.3)
    assert all(module.training for module in model.modules())


class Aside(nn.Module):
    """Two layers that update nothing, and one that no batch reaches, beside one that is recalibrated."""

    def __init__(self) -> None:
        super().__init__()
        self.used, self.unused = nn.BatchNorm1d(4), nn.BatchNorm1d(4)
        self.bare, self.frozen = nn.BatchNorm1d(4, track_running_stats=False), nn.BatchNorm1d(4)
        self.frozen.track_running_stats = False  # has statistics, and keeps them
        for number, layer in enumerate((self.unused, self.frozen), 2):
            assert layer.running_mean is not None
            layer.running_mean.fill_(number)

    def forward(self, x: Tensor) -> Tensor:
        assert (self.used.training, self.bare.training, self.frozen.training) == (True, False, False)
        found: Tensor = self.used(self.frozen(self.bare(x)))
        return found


def test_layers_without_tracked_statistics_or_inputs_are_left_alone() -> None:
    model = Aside()
    before = buffers(model)
    from_loader(TRAIN)(model)
    now = buffers(model)
    changed = {name.split(".")[0] for name in now if not torch.equal(now[name], before[name])}
    assert changed == {"used"}
    assert all(layer.momentum == 0.1 for layer in model.children())


# Which batches


class Changing:
    """Other batches in every pass, in the same memory, as a fast loader may give them."""

    def __init__(self) -> None:
        self.memory = torch.empty(6, 4)
        self.asked = 0

    def __iter__(self) -> Iterator[Tensor]:
        while True:
            self.asked += 1
            yield self.memory.normal_()  # from torch's global random state


def test_batches_are_taken_once_and_by_the_seed() -> None:
    loader, state = Changing(), torch.get_rng_state()
    kept = [from_loader(loader, 3, seed=seed) for seed in (1, 1, 2)]
    assert torch.equal(torch.get_rng_state(), state)
    assert loader.asked == 9
    first, again, other = [torch.cat([batch.args[0] for batch in each.batches]) for each in kept]
    assert len(first.unique(dim=0)) == 18
    assert torch.equal(first, again)
    assert not torch.equal(first, other)
    for each in kept:
        ensemble(SMALL, network(), TEST, 3, recalibrate=each)
    assert loader.asked == 9


def test_a_network_that_works_in_place_does_not_change_the_batches() -> None:
    kept = [x.clone() for x in TRAIN]
    recalibrate = from_loader(kept)
    recalibrate(nn.Sequential(nn.ReLU(inplace=True), nn.BatchNorm1d(4)))
    assert all(torch.equal(x, y) for x, y in zip(kept, TRAIN, strict=True))
    assert all(torch.equal(b.args[0], y) for b, y in zip(recalibrate.batches, TRAIN, strict=True))


def test_one_pass_is_the_most_there_is() -> None:
    assert repr(from_loader(TRAIN, 2)) == "Recalibration(batches=2, examples=14)"
    assert repr(from_loader(TRAIN, 8)) == "Recalibration(batches=3, examples=16)"


# Refusals


def test_no_or_unusable_batches() -> None:
    with pytest.raises(DataError, match="gave no batch"):
        from_loader([])
    with pytest.raises(DataError, match="batches is 0"):
        from_loader(TRAIN, 0)
    with pytest.raises(DataError, match=r"batch 1: .*more than 1 val"):
        from_loader([numbers(1, 4)])(network())


@pytest.mark.parametrize(
    "model", [nn.Linear(4, 2), nn.LayerNorm(4), nn.BatchNorm1d(4, track_running_stats=False)]
)
def test_a_network_without_statistics_is_refused(model: nn.Module) -> None:
    with pytest.raises(WeightError, match=f"{type(model).__name__} has no BatchNorm layer"):
        from_loader(TRAIN)(model)


@pytest.mark.parametrize("which", [1, 5])
def test_a_file_with_a_folded_batchnorm_is_refused(which: int, tmp_path: Path) -> None:
    """Even one layer of several; the model is left as the file has it."""
    folded = network()
    assert fold_batchnorm(folded[which]) == 1
    compressed_of(folded, sigma=0.5).save(tmp_path / "folded.pwfn")
    model = network()
    with pytest.raises(WeightError, match=f"BatchNorm '{which}' has its statistics folded"):
        ensemble(load(tmp_path / "folded.pwfn"), model, TEST, 2, recalibrate=from_loader(TRAIN))
    assert same(buffers(model), buffers(folded))


def test_a_network_that_was_never_trained_is_not_taken_for_a_folded_one() -> None:
    model: Any = nn.Sequential(nn.BatchNorm1d(4), nn.BatchNorm1d(4), nn.BatchNorm1d(4, affine=False))
    nn.init.zeros_(model[1].weight)  # as some residual networks begin
    from_loader(TRAIN)(model)
    assert all(int(layer.num_batches_tracked) == 3 for layer in model)


# The command


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Small images, and files of a network with a large sigma: as it is, folded, and without BatchNorm.

    The labels of the test images are the predictions of the point estimate, so noise can only do harm.
    """
    folder = tmp_path_factory.mktemp("recalibration")
    torch.manual_seed(0)
    model = digits_resnet()
    from_loader([numbers(64, 1, 8, 8)])(model)  # statistics that a trained network could have
    record = {"model": "digits_resnet"}
    compressed_of(model, sigma=0.2).save(folder / "model.pwfn", posterior="weight", record=record)
    fold_batchnorm(model)
    compressed_of(model, sigma=0.2).save(folder / "folded.pwfn", posterior="weight", record=record)
    (folder / "nets.py").write_text(
        "from torch import nn\n"
        "def make(classes=10):\n"
        "    return nn.Sequential(nn.Flatten(), nn.Linear(64, classes))\n"
    )
    bare = nn.Sequential(nn.Flatten(), nn.Linear(64, 10))
    shown: dict[str, Any] = {"preparation": {"mean": [], "std": [], "image_size": 8}}
    compressed_of(bare, sigma=0.5).save(folder / "bare.pwfn", posterior="weight", record=shown)
    x, y = np.random.default_rng(0).integers(0, 256, (200, 8, 8, 1), dtype=np.uint8), np.arange(200) % 10
    arrays = {"x_train": x[:40], "y_train": y[:40], "x_test": x, "y_test": y}
    np.savez(folder / "data.npz", **arrays)
    test = open_source(f"npz:{folder / 'data.npz'}", DataOptions()).test
    said = point(load(folder / "model.pwfn").apply_to(digits_resnet()), test).probabilities.argmax(1)
    np.savez(folder / "data.npz", **{**arrays, "y_test": said.numpy()})
    return folder


def asked(folder: Path, *more: str, file: str = "model.pwfn") -> tuple[str, ...]:
    return ("evaluate", str(folder / file), "--data", f"npz:{folder / 'data.npz'}", "--device", "cpu", *more)


def test_the_command_recalibrates_draws_and_says_so(call: Any, folder: Path) -> None:
    draws = ("--samples", "3", "--seed", "5", "--batch-size", "16")
    note = "on 2 training batches (32 examples)"
    status, out, err = call(*asked(folder, *draws, "--recalibrate", "2"))
    assert (status, err) == (0, "")
    assert note in out
    recalibrated, plain = (
        json.loads(call(*asked(folder, *draws, *more, "--json"))[1]) for more in (("--recalibrate", "2"), ())
    )
    assert any(note in line for line in recalibrated["uncertainty"]["notes"])
    assert not any("recalibrated" in line for line in plain["uncertainty"]["notes"])
    assert recalibrated["after"] == plain["after"]
    losses = [{row["name"]: row["nll"] for row in f["uncertainty"]["rows"]} for f in (recalibrated, plain)]
    assert losses[0]["point estimate"] == losses[1]["point estimate"]
    # The figures are those of the first batches of the training loader.
    own = open_source(f"npz:{folder / 'data.npz'}", DataOptions(batch_size=16, seed=5))
    first = from_loader([next(own.train.epoch(0, start)) for start in (0, 1)])
    found = assess(
        load(folder / "model.pwfn"), digits_resnet(), own.test, samples=3, seed=5, recalibrate=first
    )
    assert losses[0]["ensemble"] == pytest.approx(found.row(Rival.ENSEMBLE).nll, rel=1e-9)
    assert losses[0]["ensemble"] != losses[1]["ensemble"]


@pytest.mark.parametrize("file", ["model.pwfn", "folded.pwfn"])
def test_a_note_suggests_recalibration_where_it_could_help(call: Any, folder: Path, file: str) -> None:
    told = json.loads(call(*asked(folder, "--samples", "5", "--json", file=file))[1])["uncertainty"]
    assert (told["comparisons"][0]["rival"], told["comparisons"][0]["verdict"]) == ("point estimate", "worse")
    notes = [note for note in told["notes"] if "--recalibrate 8" in note]
    assert len(notes) == (file == "model.pwfn")  # a folded one cannot be recalibrated


@pytest.mark.parametrize(
    ("file", "more", "words"),
    [
        ("model.pwfn", (), "give --samples"),
        ("folded.pwfn", ("--samples", "2"), "BatchNorm 'bn1' has its statistics folded"),
        ("bare.pwfn", ("--samples", "2", "--model", "python:{}/nets.py:make"), "has no BatchNorm layer"),
    ],
)
def test_the_refusals_of_the_command(
    call: Any, folder: Path, file: str, more: tuple[str, ...], words: str
) -> None:
    arguments = ("--recalibrate", "8", *(word.format(folder) for word in more))
    status, out, err = call(*asked(folder, *arguments, file=file))
    assert (status, out, err.count("\n")) == (2, "", 1)
    assert words in err
