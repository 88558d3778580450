"""Ensembles from a posterior against a literal loop, and all rivals in one table."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn import functional as F

from pwfn import Compressed, ConfigError, DataError, LayoutError, WeightError
from pwfn.evaluate import (
    Comparison,
    Rival,
    Score,
    assess,
    auroc,
    calibration_error,
    ensemble,
    false_positive_rate,
    fit_temperature,
    negative_log_likelihood,
    point,
    split_in_half,
    tempered,
)
from pwfn.layout import Layout
from pwfn.run.options import RunOptions
from pwfn.run.scores import assess_file, evaluate_file
from pwfn.zoo.models import digits_resnet

CLASSES = 3


def network(seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(
        nn.Linear(4, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Dropout(0.5), nn.Linear(8, CLASSES)
    )


def compressed(model: nn.Module, sigma: float = 0.3) -> Compressed:
    """The network's own weights, to a quarter, and a sigma that differs from weight to weight."""
    layout = Layout.of(model)
    state = model.state_dict()
    values = torch.cat([state[entry.name].reshape(-1) for entry in layout.entries])
    spread = torch.rand(layout.size, generator=torch.Generator().manual_seed(1))
    covered = {entry.name for entry in layout.entries}
    untouched = {name: value for name, value in state.items() if name not in covered}
    return Compressed.of(layout, (4 * values).round() / 4, sigma * spread, untouched)


def examples(n: int = 50, seed: int = 2) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(n, 4, generator=generator), torch.randint(0, CLASSES, (n,), generator=generator)


def batches(x: Tensor, y: Tensor | None, size: int = 16) -> list[Any]:
    parts = x.split(size)
    return list(parts) if y is None else list(zip(parts, y.split(size), strict=True))


SMALL = compressed(network())
X, Y = examples()
with torch.no_grad():  # two labels of three are what the network says, so that it is right now and then
    said = SMALL.apply_to(network()).eval()(X).argmax(1)
    Y = torch.where(torch.arange(50) % 3 == 0, Y, said)


def literal(small: Compressed, x: Tensor, samples: int, seed: int, scale: float = 1.0) -> Tensor:
    """Probabilities of every draw, draws × examples × classes."""
    generator, model, found = torch.Generator().manual_seed(seed), network().eval(), []
    assert small.sigma is not None
    for _ in range(samples):
        noise = torch.randn(small.layout.size, generator=generator)
        drawn = small.layout.views(small.values() + scale * small.sigma * noise)
        model.load_state_dict({**small.dense_state_dict(), **drawn})
        with torch.no_grad():
            found.append(model(x).double().softmax(1))
    return torch.stack(found)


@pytest.mark.parametrize(
    ("samples", "scale", "size"), [(1, 1.0, 50), (7, 1.0, 16), (20, 0.4, 1), (20, 2.5, 49)]
)
def test_an_ensemble_is_what_a_literal_loop_says(samples: int, scale: float, size: int) -> None:
    p = literal(SMALL, X, samples, 5, scale)
    found = ensemble(SMALL, network(1), batches(X, Y, size), samples, 5, sigma_scale=scale)
    near = {"rtol": 1e-5, "atol": 1e-7}
    mean = p.mean(0)
    assert torch.allclose(found.probabilities, mean, **near)
    entropy, expected = -(mean * mean.log()).sum(1), -(p * p.log()).sum(2).mean(0)
    assert torch.allclose(found.predictive_entropy, entropy, **near)
    assert torch.allclose(found.expected_entropy, expected, **near)
    assert torch.allclose(found.mutual_information, entropy - expected, rtol=1e-4, atol=1e-6)
    votes = F.one_hot(p.argmax(2), CLASSES).double().mean(0)
    assert torch.allclose(found.disagreement, 1 - votes[torch.arange(50), mean.argmax(1)])
    assert torch.allclose(found.variation_ratio, 1 - votes.amax(1))
    assert found.draws_right is not None
    assert torch.allclose(found.draws_right, (p.argmax(2) == Y).double().mean(0))
    assert torch.equal(found.targets, Y)  # type: ignore[arg-type]  # there are labels
    if samples > 1:
        assert 0 < float(found.disagreement.mean()) < 1


def test_without_sigma_an_ensemble_is_the_point_estimate() -> None:
    model = network(1)
    found = ensemble(SMALL, model, batches(X, Y), 20, sigma_scale=0.0)
    alone = point(model, batches(X, Y))  # which has the point estimate's weights now
    assert torch.allclose(found.probabilities, alone.probabilities, rtol=1e-12)
    for same in (found, alone):
        assert same.mutual_information.tolist() == [0.0] * 50
        assert same.disagreement.tolist() == [0.0] * 50
    assert not torch.allclose(ensemble(SMALL, model, batches(X, Y), 20).probabilities, alone.probabilities)


def test_a_centres_sigma_is_scaled_as_a_weights_is() -> None:
    centres = replace(SMALL, weight_sigma=None, centre_sigma=SMALL.centre_sigmas())
    assert centres.sigma is not None
    doubled = replace(centres, centre_sigma=tuple(2 * s for s in centres.centre_sigma or ()))
    found = [
        ensemble(held, network(), batches(X, Y), 3, sigma_scale=scale).probabilities
        for held, scale in ((centres, 2.0), (doubled, 1.0))
    ]
    assert torch.equal(*found)


def test_the_model_is_left_as_the_point_estimate_in_the_mode_it_had() -> None:
    model = network(1).train()
    model[3].eval()

    def unsettle(drawn: nn.Module) -> None:
        drawn[1].running_mean.fill_(9.0)

    ensemble(SMALL, model, batches(X, Y), 2, settle=unsettle)
    assert [module.training for module in model] == [True, True, True, False, True]
    for name, value in SMALL.dense_state_dict().items():
        assert torch.equal(model.state_dict()[name], value), name


def test_every_draw_is_settled_from_the_same_start() -> None:
    """What one draw's settling has changed is not there at the next."""
    seen = []

    def settle(drawn: nn.Module) -> None:
        seen.append(float(drawn[1].running_mean.sum()))
        drawn[1].running_mean += 5.0

    settled = ensemble(SMALL, network(), batches(X, Y), 4, settle=settle)
    assert seen == [0.0] * 4
    assert not torch.allclose(
        settled.probabilities, ensemble(SMALL, network(), batches(X, Y), 4).probabilities
    )


@settings(max_examples=25, deadline=None)
@given(st.integers(0, 10**6), st.integers(1, 8), st.floats(0, 30))
def test_mutual_information_is_at_least_0_and_at_most_the_entropy(
    seed: int, samples: int, scale: float
) -> None:
    found = ensemble(SMALL, network(), batches(X, Y), samples, seed, sigma_scale=scale)
    assert (found.mutual_information >= 0).all()
    assert (found.mutual_information <= found.predictive_entropy + 1e-12).all()
    assert (found.predictive_entropy <= math.log(CLASSES) + 1e-12).all()
    assert (found.variation_ratio <= found.disagreement).all()


def test_examples_in_another_order_have_the_same_predictions() -> None:
    order = torch.randperm(50, generator=torch.Generator().manual_seed(0))
    there = ensemble(SMALL, network(), batches(X, Y), 5).chosen(order)
    back = ensemble(SMALL, network(), batches(X[order], Y[order]), 5)
    assert torch.allclose(there.probabilities, back.probabilities, rtol=1e-5)
    assert torch.allclose(there.mutual_information, back.mutual_information, atol=1e-6)


class Shuffled:
    """Another order in every pass."""

    def __init__(self, labelled: bool = True) -> None:
        self.passes, self.labelled = 0, labelled

    def __iter__(self) -> Iterator[Any]:
        self.passes += 1
        order = torch.randperm(50, generator=torch.Generator().manual_seed(self.passes))
        return iter(batches(X[order], Y[order] if self.labelled else None))


class Gives(nn.Module):
    """The same answer, whatever it is asked."""

    def __init__(self, answer: Any) -> None:
        super().__init__()
        self.answer = answer

    def forward(self, x: Tensor) -> Any:
        return self.answer


@pytest.mark.parametrize(
    ("loader", "message"),
    [
        (Shuffled(), r"test data, batch 1: other examples than in the pass before.*shuffle=False"),
        (Shuffled(labelled=False), "other examples"),
        (iter(batches(X, Y)), "gave 0 batches in pass 2 and 4 in the first"),
        ([], "gave 0 batches in pass 1.*not empty"),
        (batches(X, Y + 1), "batch 1: the target is not a class from 0 to 2"),
        (batches(X, F.one_hot(Y).float()), "one label per example"),
        (batches(X * math.inf, Y), "not finite"),
        ([*batches(X, Y), X], "differ in their number of classes, or in having labels"),
    ],
)
def test_a_loader_that_will_not_do_is_named(loader: Any, message: str) -> None:
    with pytest.raises(DataError, match=message):
        ensemble(SMALL, network(), loader, 2)


def test_other_mistakes() -> None:
    loader = batches(X, Y)
    with pytest.raises(DataError, match="samples is 0"):
        ensemble(SMALL, network(), loader, 0)
    for scale in (-1.0, math.nan, math.inf):
        with pytest.raises(ConfigError, match="sigma_scale is"):
            ensemble(SMALL, network(), loader, 2, sigma_scale=scale)
    with pytest.raises(WeightError, match="no posterior"):
        ensemble(replace(SMALL, weight_sigma=None), network(), loader, 2)
    with pytest.raises(LayoutError, match="does not match"):
        ensemble(SMALL, nn.Linear(4, CLASSES), loader, 2)
    with pytest.raises(ConfigError, match="cannot be used"):
        ensemble(SMALL, network(), loader, 2, device="cuda:99")
    for answer in (torch.zeros(16, 3, 2), {"logits": 1}):
        with pytest.raises(DataError, match="a score per class"):
            point(Gives(answer), loader)


# All rivals

OUTSIDE = {"far": batches(*examples(30, 7), 30), "unlabelled": batches(3 * examples(20, 8)[0], None)}


def test_rows_are_the_measures_of_the_half_that_is_scored() -> None:
    original, found_by = network(3), {}
    table = assess(SMALL, network(), batches(X, Y), original=original, ood=OUTSIDE, samples=6, seed=4)
    assert [row.rival for row in table.rows] == list(Rival)
    fitted, scored = split_in_half(50)
    assert (table.examples, table.calibration_examples, table.notes) == (25, 25, ())
    model = network()
    SMALL.apply_to(model)
    for name, loader in {"": batches(X, Y), **OUTSIDE}.items():
        found_by[name] = {
            Rival.ORIGINAL: point(original, loader),
            Rival.POINT: point(model, loader),
            Rival.ENSEMBLE: ensemble(SMALL, network(), loader, 6, 4),
        }
    for rival, found in found_by[""].items():
        log_p, row = found.log_probabilities, table.row(rival)
        assert row.temperature is None
        assert row.nll == negative_log_likelihood(log_p[scored], Y[scored])
        assert row.calibration_error == calibration_error(log_p[scored].exp(), Y[scored])
        assert row.accuracy_all == float((log_p.argmax(1) == Y).double().mean())
        scaled = table.row(Rival(f"{rival}, tempered"))
        assert scaled.temperature == fit_temperature(log_p[fitted], Y[fitted])
        assert scaled.nll == negative_log_likelihood(tempered(log_p[scored], scaled.temperature), Y[scored])
        assert scaled.accuracy == row.accuracy
        for name in OUTSIDE:
            scores = list(Score) if rival is Rival.ENSEMBLE else list(Score)[:2]
            assert list(row.detection[name]) == scores
            assert list(scaled.detection[name]) == list(Score)[:2]
            for score in scores:
                inside = found.uncertainty(score)[scored]
                outside = found_by[name][rival].uncertainty(score)
                assert row.detection[name][score].auroc == auroc(inside, outside)
                assert row.detection[name][score].fpr95 == false_positive_rate(inside, outside)


def test_a_temperature_knows_nothing_of_the_examples_it_is_scored_on() -> None:
    """Other labels in the scored half leave every temperature as it was; in the other half they do not."""
    fitted, scored = split_in_half(50)

    def temperatures(changed: Tensor) -> list[float | None]:
        y = Y.clone()
        y[changed] = (y[changed] + 1) % CLASSES
        return [row.temperature for row in assess(SMALL, network(), batches(X, y), samples=3).rows]

    as_it_is = temperatures(torch.tensor([], dtype=torch.int64))
    assert temperatures(scored) == as_it_is
    assert temperatures(fitted) != as_it_is


def test_the_split_is_half_and_half_and_always_the_same() -> None:
    for n in (2, 3, 127, 1000):
        fitted, scored = split_in_half(n)
        assert torch.equal(torch.cat((fitted, scored)).sort().values, torch.arange(n))
        assert (len(fitted), len(scored)) == (n // 2, n - n // 2)
        assert torch.equal(split_in_half(n)[0], fitted)
    # Sorted data: about as many of the first class in either half.
    assert 200 < int((split_in_half(1000)[0] < 500).sum()) < 300


def test_with_calibration_data_everything_else_is_scored() -> None:
    x, y = examples(40, 9)
    table = assess(SMALL, network(), batches(X, Y), calibration=batches(x, y), samples=3)
    assert (table.examples, table.calibration_examples) == (50, 40)
    assert "scored on 50 examples; temperatures fitted on 40 others" in table.split
    model = network()
    SMALL.apply_to(model)
    own, other = point(model, batches(X, Y)), point(model, batches(x, y))
    assert table.row(Rival.POINT).nll == negative_log_likelihood(own.log_probabilities, Y)
    assert table.row(Rival.POINT_TEMPERED).temperature == fit_temperature(other.log_probabilities, y)


def test_what_is_not_at_hand_is_left_out_and_said() -> None:
    table = assess(SMALL, network(), batches(X, Y), samples=0)
    assert [row.rival for row in table.rows] == [Rival.POINT, Rival.POINT_TEMPERED]
    assert "the original network's rows are left out: its weights were not given" in table.lines()
    assert "the ensemble's rows are left out: no draws were asked for" in table.lines()
    assert table.comparisons == ()
    with pytest.raises(DataError, match="ensemble was not assessed: there are point estimate, "):
        table.row(Rival.ENSEMBLE)


def test_differences_are_paired_and_said_in_a_word() -> None:
    table = assess(SMALL, network(), batches(X, Y), original=network(3), samples=6)
    assert [c.rival for c in table.comparisons] == list(Rival)[:4]
    for each in table.comparisons:
        gap = table.row(Rival.ENSEMBLE).nll - table.row(each.rival).nll
        assert each.difference == pytest.approx(gap, abs=1e-12)
    assert [Comparison(Rival.POINT, *pair).verdict for pair in ((-0.3, 0.1), (0.3, 0.1), (0.2, 0.1))] == [
        "better",
        "worse",
        "no difference",
    ]
    alike = assess(SMALL, network(), batches(X, Y), samples=6, sigma_scale=0.0).comparisons[0]
    assert alike.verdict == "no difference"


def test_the_standard_error_is_that_of_the_paired_differences() -> None:
    table = assess(SMALL, network(), batches(X, Y), samples=6, calibration=batches(X, Y))
    model = network()
    drawn = ensemble(SMALL, model, batches(X, Y), 6).log_probabilities
    alone = point(model, batches(X, Y)).log_probabilities
    losses = (alone - drawn)[torch.arange(50), Y]
    expected = math.sqrt(float((losses - losses.mean()).square().sum()) / 49 / 50)
    assert table.comparisons[0].standard_error == pytest.approx(expected, rel=1e-9)


def test_the_table_as_lines_and_as_json() -> None:
    table = assess(SMALL, network(), batches(X, Y), original=network(3), ood=OUTSIDE, samples=6, seed=4)
    facts = json.loads(json.dumps(table.to_dict(), allow_nan=False))
    assert [row["name"] for row in facts["rows"]] == [rival.value for rival in Rival]
    assert facts["rows"][4]["auroc"]["far"].keys() == {score.value for score in Score}
    assert sum(b["examples"] for b in facts["reliability"]["ensemble"]) == 25
    assert facts["risk_coverage"]["ensemble"][-1] == [1.0, pytest.approx(1 - facts["rows"][4]["accuracy"])]
    assert facts["doubt"]["own data"]["examples"] == 50
    assert facts["doubt"]["unlabelled"]["accuracy_of_a_draw"] is None
    lines = table.lines()
    assert lines[0].startswith("6 draws, sigma × 1, seed 4; scored on 25 of 50 examples")
    assert lines[2].split() == ["accuracy", "NLL", "Brier", "ECE", "AURC", "T"]
    assert lines[3].split()[1:3] == [f"{table.rows[0].accuracy:.2%}", f"{table.rows[0].nll:.4f}"]
    assert sum(line.startswith("against ") for line in lines) == 2


def test_rivals_that_saw_other_examples_are_not_compared() -> None:
    with pytest.raises(DataError, match="other examples to one network than to another"):
        assess(SMALL, network(), Shuffled(), original=network(), samples=0)
    with pytest.raises(DataError, match="have no labels"):
        assess(SMALL, network(), batches(X, None), samples=2)
    with pytest.raises(DataError, match="one example cannot be split"):
        assess(SMALL, network(), batches(X[:1], Y[:1]), samples=2)
    with pytest.raises(DataError, match="samples is -1"):
        assess(SMALL, network(), batches(X, Y), samples=-1)


# A file and data by name


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An untrained network with a posterior: what it predicts is of no use, but it does predict."""
    folder = tmp_path_factory.mktemp("assessed")
    torch.manual_seed(0)
    model = digits_resnet()
    torch.save(model.state_dict(), folder / "original.pt")
    compressed(model, 0.05).save(folder / "model.pwfn", posterior="weight", record={"model": "digits_resnet"})
    return folder / "model.pwfn"


def options(file: Path, **changes: Any) -> RunOptions:
    return RunOptions(**{"model": "", "data": "digits", "out": file.parent, "device": "cpu", **changes})


def test_a_file_is_assessed_on_data_by_name(file: Path) -> None:
    facts, table = assess_file(
        file,
        options(file),
        original=str(file.parent / "original.pt"),
        ood=["noise", "shift:rotate:90"],
        samples=3,
        seed=2,
        out=file.parent / "uncertainty.json",
    )
    plain = evaluate_file(file, options(file), samples=3, seed=2)
    assert {name: facts[name] for name in plain} == plain
    assert facts["uncertainty"] == table.to_dict()
    assert [row.rival for row in table.rows] == list(Rival)
    assert list(table.rows[0].detection) == ["noise", "shift:rotate:90"]
    assert "noise: uniform noise in place of the images" in table.notes
    written = json.loads((file.parent / "uncertainty.json").read_text())
    assert written == json.loads(json.dumps(table.to_dict()))
    assert table.row(Rival.POINT).accuracy_all == facts["after"]["metric"]


def test_how_the_data_are_cut_makes_no_difference(file: Path) -> None:
    found = [
        assess_file(
            file,
            options(file, test_batch_size=size),
            ood=["noise", "shift:gaussian:0.2"],
            samples=2,
            sigma_scale=0.5,
        )[1]
        for size in (64, 450)
    ]
    assert found[0].sigma_scale == 0.5
    for one, other in zip(found[0].rows, found[1].rows, strict=True):
        assert one.nll == pytest.approx(other.nll, rel=1e-5)
        for name in ("noise", "shift:gaussian:0.2"):
            for score, detection in one.detection[name].items():
                assert detection.auroc == pytest.approx(other.detection[name][score].auroc, abs=1e-3)
