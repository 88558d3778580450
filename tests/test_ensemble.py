"""Ensembles against a literal loop over draws, and the table of rivals against its parts."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from cases import batchnorm_classifier, compressed_of, numbers
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn import functional as F

from pwfn import Compressed, ConfigError, DataError, LayoutError, WeightError, load
from pwfn.evaluate.calibration import (
    auroc,
    calibration_error,
    false_positive_rate,
    fit_temperature,
    negative_log_likelihood,
    reliability,
    risk_coverage,
    tempered,
)
from pwfn.evaluate.ensemble import Score, ensemble, point
from pwfn.lab.uncertainty.assess import Comparison, Rival, assess, split_in_half
from pwfn.lab.uncertainty.file import evaluated
from pwfn.run.options import RunOptions, TrustOptions
from pwfn.run.scores import file_facts, open_file
from pwfn.zoo.models import digits_resnet

CLASSES = 3


def batches(x: Tensor, y: Tensor | None, size: int = 16) -> list[Any]:
    parts = x.split(size)
    return list(parts) if y is None else list(zip(parts, y.split(size), strict=True))


def network(seed: int = 1) -> Any:
    return batchnorm_classifier(seed)


def posterior(model: nn.Module, scale: float) -> Compressed:
    """A sigma that differs from weight to weight."""
    size = compressed_of(model).layout.size
    return compressed_of(model, sigma=scale * torch.rand(size, generator=torch.Generator().manual_seed(1)))


SMALL = posterior(network(0), 0.3)
X = numbers(50, 4, seed=2)
with torch.no_grad():  # two labels of three are what the network predicts
    Y = SMALL.apply_to(network()).eval()(X).argmax(1)
    Y = torch.where(torch.arange(50) % 3 == 0, (Y + 1) % CLASSES, Y)
LOADER = batches(X, Y)


# Draws


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
    ("samples", "scale", "size"), [(1, 1.0, 50), (7, 1.0, 16), (20, 0.4, 2), (20, 2.5, 49)]
)
def test_an_ensemble_is_what_a_literal_loop_says(samples: int, scale: float, size: int) -> None:
    p = literal(SMALL, X, samples, 5, scale)
    found = ensemble(SMALL, network(), batches(X, Y, size), samples, 5, sigma_scale=scale)
    near = {"rtol": 1e-5, "atol": 1e-7}
    mean = p.mean(0)
    assert torch.allclose(found.probabilities, mean, **near)
    entropy, expected = -(mean * mean.log()).sum(1), -(p * p.log()).sum(2).mean(0)
    assert torch.allclose(found.predictive_entropy, entropy, **near)
    assert torch.allclose(found.expected_entropy, expected, **near)
    assert torch.allclose(found.mutual_information, entropy - expected, rtol=1e-4, atol=1e-6)
    votes = F.one_hot(p.argmax(2), CLASSES).double().mean(0)
    assert torch.allclose(found.disagreement, 1 - votes[torch.arange(50), mean.argmax(1)])
    assert torch.equal(found.targets, Y)  # type: ignore[arg-type]  # there are labels
    assert repr(found) == f"Predictions(examples=50, classes=3, samples={samples})"
    if samples > 1:
        assert 0 < float(found.disagreement.mean()) < 1


def test_without_sigma_an_ensemble_is_the_point_estimate() -> None:
    model = network()
    found = ensemble(SMALL, model, LOADER, 20, sigma_scale=0.0)
    alone = point(model, LOADER)  # which has the point estimate's weights now
    assert torch.allclose(found.probabilities, alone.probabilities, rtol=1e-12)
    for same in (found, alone):
        assert same.mutual_information.tolist() == [0.0] * 50
        assert same.disagreement.tolist() == [0.0] * 50


def test_sigmas_of_centres_are_scaled_too() -> None:
    centres = replace(SMALL, weight_sigma=None, centre_sigma=SMALL.centre_sigmas())
    doubled = replace(centres, centre_sigma=tuple(2 * s for s in centres.centre_sigma or ()))
    found = [
        ensemble(held, network(), LOADER, 3, sigma_scale=scale).probabilities
        for held, scale in ((centres, 2.0), (doubled, 1.0))
    ]
    assert torch.equal(*found)


def test_every_draw_starts_from_the_same_buffers_and_the_model_ends_as_the_point_estimate() -> None:
    model, seen = network().train(), []
    model[3].eval()

    def see(layer: Any, inputs: Any) -> None:
        seen.append(layer.running_mean.clone())
        layer.running_mean += 5.0 * (len(seen) % len(LOADER) == 0)  # after the last batch of a draw

    handle = model[1].register_forward_pre_hook(see)
    ensemble(SMALL, model, LOADER, 4)
    handle.remove()
    assert all(torch.equal(mean, SMALL.untouched["1.running_mean"]) for mean in seen)
    assert [module.training for module in model] == [True, True, True, False, True, True, True, True]
    for name, value in SMALL.dense_state_dict().items():
        assert torch.equal(model.state_dict()[name], value), name


@settings(max_examples=25, deadline=None)
@given(st.integers(0, 10**6), st.integers(1, 8), st.floats(0, 30))
def test_mutual_information_is_at_least_0_and_at_most_the_entropy(
    seed: int, samples: int, scale: float
) -> None:
    found = ensemble(SMALL, network(), LOADER, samples, seed, sigma_scale=scale)
    assert (found.mutual_information >= 0).all()
    assert (found.mutual_information <= found.predictive_entropy + 1e-12).all()
    assert (found.predictive_entropy <= math.log(CLASSES) + 1e-12).all()


class Shuffled:
    """Another order in every pass."""

    def __init__(self, labelled: bool = True) -> None:
        self.passes, self.labelled = 0, labelled

    def __iter__(self) -> Iterator[Any]:
        self.passes += 1
        order = torch.randperm(50, generator=torch.Generator().manual_seed(self.passes))
        return iter(batches(X[order], Y[order] if self.labelled else None))


class Gives(nn.Module):
    """The same answer to every input."""

    def __init__(self, answer: Any) -> None:
        super().__init__()
        self.answer = answer

    def forward(self, x: Tensor) -> Any:
        return self.answer


@pytest.mark.parametrize(
    ("loader", "message"),
    [
        (Shuffled(), "test data: pass 2 gave other examples"),
        (Shuffled(labelled=False), "other examples"),
        (iter(LOADER), "iterated"),
        ([], "not empty"),
        (batches(X, Y + 1), "batch 1: the target is not a class from 0 to 2"),
        (batches(X, F.one_hot(Y).float()), "one label per example"),
        (batches(X * math.inf, Y), "not finite"),
        ([*LOADER, X], "having labels"),
    ],
)
def test_a_loader_that_will_not_do_is_an_error(loader: Any, message: str) -> None:
    with pytest.raises(DataError, match=message):
        ensemble(SMALL, network(), loader, 2)


def test_other_mistakes() -> None:
    with pytest.raises(DataError, match="samples is 0"):
        ensemble(SMALL, network(), LOADER, 0)
    for samples in (2.5, "2"):
        with pytest.raises(DataError, match="allowed is a whole number of at least 1"):
            ensemble(SMALL, network(), LOADER, samples)  # type: ignore[arg-type]
    for seed in (2**64, 0.5):
        with pytest.raises(ConfigError, match=r"seed is .*: allowed is a whole number"):
            ensemble(SMALL, network(), LOADER, 2, seed)  # type: ignore[arg-type]
    for model in ("resnet20", None, [network(), "resnet20"]):
        with pytest.raises(DataError, match=r"allowed is a torch\.nn\.Module"):
            ensemble([SMALL, SMALL], model, LOADER)  # type: ignore[arg-type]
    for scale in (-1.0, math.nan, math.inf):
        with pytest.raises(ConfigError, match="sigma_scale is"):
            ensemble(SMALL, network(), LOADER, 2, sigma_scale=scale)
    with pytest.raises(WeightError, match="no posterior"):
        ensemble(replace(SMALL, weight_sigma=None), network(), LOADER, 2)
    with pytest.raises(LayoutError, match="does not match"):
        ensemble(SMALL, nn.Linear(4, CLASSES), LOADER, 2)
    with pytest.raises(ConfigError, match="cannot be used"):
        ensemble(SMALL, network(), LOADER, 2, device="cuda:99")
    for answer in (torch.zeros(16, 3, 2), {"logits": 1}):
        with pytest.raises(DataError, match="one score per class"):
            point(Gives(answer), LOADER)


# The table of rivals

OOD = {
    "far": batches(numbers(30, 4, seed=7), torch.zeros(30).long(), 30),
    "unlabelled": [3 * numbers(20, 4, seed=8)],
}


def test_rows_are_the_measures_of_the_half_that_is_scored() -> None:
    original, found_by = network(3), {}
    table = assess(SMALL, network(), LOADER, original=original, ood=OOD, samples=6, seed=4)
    assert [row.rival for row in table.rows] == list(Rival)
    fitted, scored = split_in_half(50)
    assert (table.examples, table.calibration_examples, table.notes) == (25, 25, ())
    model = SMALL.apply_to(network())
    for name, loader in {"": LOADER, **OOD}.items():
        found_by[name] = {
            Rival.ORIGINAL: point(original, loader),
            Rival.POINT: point(model, loader),
            Rival.ENSEMBLE: ensemble(SMALL, network(), loader, 6, 4),
        }
    for rival, found in found_by[""].items():
        log_p, row = found.log_probabilities, table.row(rival)
        is_wrong = (log_p.argmax(1) != Y).double()
        assert row.temperature is None
        assert row.nll == negative_log_likelihood(log_p[scored], Y[scored])
        assert row.calibration_error == calibration_error(reliability(log_p[scored].exp(), Y[scored]))
        confidence = found.uncertainty(Score.MAX_PROBABILITY)[scored]
        assert row.risk_coverage_area == float(risk_coverage(confidence, is_wrong[scored]).mean())
        assert row.accuracy == pytest.approx(1 - float(is_wrong[scored].mean()))
        assert row.accuracy_all == pytest.approx(1 - float(is_wrong.mean()))
        scaled = table.row(Rival(f"{rival}, tempered"))
        assert scaled.temperature == fit_temperature(log_p[fitted], Y[fitted])
        assert scaled.nll == negative_log_likelihood(tempered(log_p[scored], scaled.temperature), Y[scored])
        assert scaled.accuracy == row.accuracy
        for name in OOD:
            scores = list(Score) if rival is Rival.ENSEMBLE else list(Score)[:2]
            assert list(row.auroc[name]) == scores
            assert list(scaled.auroc[name]) == list(Score)[:2]
            for score in scores:
                inside = found.uncertainty(score)[scored]
                outside = found_by[name][rival].uncertainty(score)
                assert row.auroc[name][score] == auroc(inside, outside)
                assert row.fpr95[name][score] == false_positive_rate(inside, outside)


def test_a_temperature_does_not_depend_on_the_examples_it_is_scored_on() -> None:
    """Other labels in the scored half change no temperature; in the other half they do."""
    fitted, scored = split_in_half(50)

    def temperatures(changed: Tensor) -> list[float | None]:
        y = Y.clone()
        y[changed] = (y[changed] + 1) % CLASSES
        return [row.temperature for row in assess(SMALL, network(), batches(X, y), samples=3).rows]

    unchanged = temperatures(torch.tensor([], dtype=torch.int64))
    assert temperatures(scored) == unchanged
    assert temperatures(fitted) != unchanged


def test_the_split_is_half_and_half_and_always_the_same() -> None:
    for n in (2, 3, 127, 1000):
        fitted, scored = split_in_half(n)
        assert torch.equal(torch.cat((fitted, scored)).sort().values, torch.arange(n))
        assert (len(fitted), len(scored)) == (n // 2, n - n // 2)
        assert torch.equal(split_in_half(n)[0], fitted)
    # Sorted data: about as many of the first class in either half.
    assert 200 < int((split_in_half(1000)[0] < 500).sum()) < 300


def test_rows_that_cannot_be_computed_are_left_out_with_a_note() -> None:
    table = assess(SMALL, network(), LOADER, samples=0)
    assert [row.rival for row in table.rows] == [Rival.POINT, Rival.POINT_TEMPERED]
    assert sum("left out" in note for note in table.notes) == 2
    assert set(table.notes) <= set(table.lines())
    assert table.comparisons == ()
    with pytest.raises(DataError, match="no row for ensemble"):
        table.row(Rival.ENSEMBLE)


def test_comparisons_are_of_paired_differences() -> None:
    table = assess(SMALL, network(), LOADER, original=network(3), samples=6)
    assert [c.rival for c in table.comparisons] == list(Rival)[:4]
    for each in table.comparisons:
        losses = table.row(Rival.ENSEMBLE).losses - table.row(each.rival).losses
        assert each.difference == pytest.approx(table.row(Rival.ENSEMBLE).nll - table.row(each.rival).nll)
        expected = math.sqrt(float((losses - losses.mean()).square().sum()) / 24 / 25)
        assert each.standard_error == pytest.approx(expected, rel=1e-9)
    verdicts = [Comparison(Rival.POINT, *pair).verdict for pair in ((-0.3, 0.1), (0.3, 0.1), (0.2, 0.1))]
    assert verdicts == ["better", "worse", "no difference"]
    alike = assess(SMALL, network(), LOADER, samples=6, sigma_scale=0.0).comparisons[0]
    assert alike.verdict == "no difference"


def test_the_table_as_lines_and_as_json() -> None:
    table = assess(SMALL, network(), LOADER, original=network(3), ood=OOD, samples=6, seed=4)
    facts = json.loads(json.dumps(table.to_dict(), allow_nan=False))
    assert [row["name"] for row in facts["rows"]] == [rival.value for rival in Rival]
    assert facts["rows"][4]["auroc"]["far"].keys() == {score.value for score in Score}
    assert facts["comparisons"][0].keys() == {"rival", "difference", "standard_error", "verdict"}
    assert sum(b["examples"] for b in facts["reliability"]["ensemble"]) == 25
    lines = table.lines()
    assert lines[0].startswith("6 draws, sigma × 1, seed 4; scored on 25 of 50 examples")
    assert lines[2].split() == ["accuracy", "NLL", "Brier", "ECE", "AURC", "T"]
    assert lines[3].split()[1:3] == [f"{table.rows[0].accuracy:.2%}", f"{table.rows[0].nll:.4f}"]
    assert sum(line.startswith("against ") for line in lines) == 2
    assert repr(table) == "Assessment(rows=6, examples=25, samples=6)"
    assert repr(table.rows[0]).startswith("Row('original', accuracy=")


@pytest.mark.parametrize(
    ("loader", "samples", "message"),
    [
        (Shuffled(), 0, "other examples to one network than to another"),
        (batches(X, None), 2, "have no labels"),
        (batches(X[:1], Y[:1]), 2, "one example cannot be split"),
        (LOADER, -1, "samples is -1"),
    ],
)
def test_an_assessment_that_cannot_be_made(loader: Any, samples: int, message: str) -> None:
    with pytest.raises(DataError, match=message):
        assess(SMALL, network(), loader, original=network(), samples=samples)


def test_inputs_that_are_not_a_number_are_the_same_in_every_pass() -> None:
    x = X.clone()
    x[3, 1] = math.nan
    model = nn.Sequential(Filled(), *network())
    small = posterior(model, 0.3)
    assert torch.equal(
        ensemble(small, model, batches(x, Y), 2).probabilities,
        ensemble(small, model, batches(x.nan_to_num(0.0), Y), 2).probabilities,
    )


class Filled(nn.Module):
    """Zeros for missing numbers."""

    def forward(self, x: Tensor) -> Tensor:
        return x.nan_to_num(0.0)


# Several networks


def test_several_networks_are_the_mean_of_their_predictions() -> None:
    other = posterior(network(3), 0.2)
    alone = [ensemble(one, network(), LOADER, 4, seed=5).probabilities for one in (SMALL, other)]
    models = [network(), network()]
    for held in (network(), models):
        together = ensemble([SMALL, other], held, LOADER, 4, seed=5)
        assert together.samples == 8
        torch.testing.assert_close(together.probabilities, (alone[0] + alone[1]) / 2)
    for model, one in zip(models, (SMALL, other), strict=True):
        assert torch.equal(model.state_dict()["0.weight"], one.dense_state_dict()["0.weight"])


def test_a_network_without_a_posterior_counts_as_much_as_the_draws_of_another() -> None:
    plain = replace(SMALL, weight_sigma=None)
    zero = replace(plain, sigma_codes=(0,) * len(plain.layout.entries))
    other = posterior(network(3), 0.2)
    centre = point(plain.apply_to(network()), LOADER).probabilities
    drawn = ensemble(other, network(), LOADER, 4).probabilities
    for one in (plain, zero):
        found = ensemble([one, other], network(), LOADER, 4).probabilities
        torch.testing.assert_close(found, (centre + drawn) / 2)
    centres = [point(one.apply_to(network()), LOADER).probabilities for one in (plain, other)]
    torch.testing.assert_close(
        ensemble([plain, other], network(), LOADER, 0).probabilities, (centres[0] + centres[1]) / 2
    )
    with pytest.raises(WeightError, match="no posterior"):
        ensemble(plain, network(), LOADER, 4)


def test_several_networks_need_a_model_each() -> None:
    for networks, models in (([], network()), ([SMALL, SMALL], [network()])):
        with pytest.raises(DataError, match="one model for each"):
            ensemble(networks, models, LOADER)


def test_networks_that_cannot_vote_together() -> None:
    model, other = nn.Linear(4, 2), nn.Linear(4, 5)
    inputs = [numbers(8, 4)]
    with pytest.raises(DataError, match="5 classes and the first 2"):
        ensemble([compressed_of(model), compressed_of(other)], [model, other], inputs)
    for wrong in ("a.pwfn", ["a.pwfn", "b.pwfn"]):
        with pytest.raises(DataError, match=r"pwfn\.load"):
            ensemble(wrong, model, inputs)  # type: ignore[arg-type]


def test_a_tensor_of_inputs_is_enough() -> None:
    model, inputs = network(), numbers(600, 4)
    whole = point(model, [inputs]).probabilities
    torch.testing.assert_close(point(model, inputs).probabilities, whole)
    centres = ensemble([SMALL, SMALL], model, inputs, 0).probabilities
    torch.testing.assert_close(centres, point(model, [inputs]).probabilities)


def test_several_files_are_assessed_with_their_bytes_together(tmp_path: Path, call: Any) -> None:
    paths = [tmp_path / "a.pwfn", tmp_path / "b.pwfn"]
    for seed, path in enumerate(paths):
        torch.manual_seed(seed)
        made = compressed_of(digits_resnet())
        codes = (160,) * len(made.layout.entries)
        replace(made, sigma_codes=codes).save(path, record={"model": "digits_resnet"})
    words = ("--data", "digits", "--device", "cpu", "--samples", "2", "--json")
    status, said, err = call("evaluate", *map(str, paths), *words)
    assert (status, err) == (0, "")
    facts = json.loads(said)
    assert facts["file_bytes"] == sum(path.stat().st_size for path in paths)
    assert [one["file_bytes"] for one in facts["files"]] == [path.stat().st_size for path in paths]
    names = [row["name"] for row in facts["uncertainty"]["rows"]]
    assert names == [rival.value for rival in Rival if not rival.startswith("original")]
    status, said, _ = call("evaluate", *map(str, paths), *words[:-1])
    assert "2 files together" in said
    assert f"several files together: {paths[0]}, {paths[1]}" in said
    assert f"{facts['file_bytes']:,} bytes" in said


def digits_files(folder: Path, **codes: int | float | None) -> dict[str, str]:
    """Files by name, with one code of sigma for all tensors, a sigma of training, or nothing."""
    paths = {}
    for name, code in codes.items():
        torch.manual_seed(len(paths))
        made = compressed_of(digits_resnet(), sigma=code if isinstance(code, float) else None)
        if isinstance(code, int):
            made = replace(made, sigma_codes=(code,) * len(made.layout.entries))
        paths[name] = str(folder / f"{name}.pwfn")
        made.save(paths[name], record={"model": "digits_resnet"})
    return paths


def test_by_default_only_a_fitted_sigma_is_drawn(tmp_path: Path, call: Any) -> None:
    """That of training may be far too large to predict with."""
    paths = digits_files(tmp_path, fitted=160, trained=0.3, none=None)
    words = ("--data", "digits", "--device", "cpu", "--json")
    load(paths["trained"]).save(paths["none"], posterior="none")
    found = {}
    for other in ("trained", "none"):
        status, said, _ = call("evaluate", paths["fitted"], paths[other], *words)
        assert status == 0
        found[other] = json.loads(said)["uncertainty"]
        assert any("no fitted sigma, so that it predicts by its point" in n for n in found[other]["notes"])
    assert found["trained"]["rows"] == found["none"]["rows"]
    drawn = json.loads(call("evaluate", paths["fitted"], paths["trained"], *words, "--samples", "20")[1])
    assert drawn["uncertainty"]["rows"] != found["trained"]["rows"]


def test_what_is_not_drawn_is_said(tmp_path: Path, call: Any) -> None:
    paths = digits_files(tmp_path, zero=0, none=None)
    words = ("--data", "digits", "--device", "cpu")
    assert "\nno posterior worth drawing from\n" in call("evaluate", paths["zero"], *words)[1]
    said = call("evaluate", paths["none"], *words, "--sigma-scale", "2")[1]
    assert "--sigma-scale has no effect: nothing is drawn" in said
    said = call("evaluate", paths["none"], paths["none"], *words)[1]
    assert "given twice has two votes" in said


def test_a_fitted_network_without_one_class_per_example_is_scored_without_draws(
    tmp_path: Path, call: Any
) -> None:
    file = tmp_path / "nets.py"
    file.write_text(
        "import torch\n"
        "def make(): return torch.nn.Conv2d(3, 4, 1)\n"
        "def data():\n"
        "    batches = [(torch.ones(2, 3, 5, 5), torch.ones(2, 5, 5).long())]\n"
        "    return batches, batches\n"
    )
    small = compressed_of(nn.Conv2d(3, 4, 1))
    replace(small, sigma_codes=(160, 160)).save(tmp_path / "a.pwfn")
    words = ("--model", f"python:{file}:make", "--data", f"python:{file}:data", "--device", "cpu")
    status, said, _ = call("evaluate", str(tmp_path / "a.pwfn"), *words)
    assert status == 0
    assert "its fitted sigma is not drawn: uncertainty is measured where an example has one class" in said


def test_mistakes_name_the_file_and_come_before_the_work(
    tmp_path: Path, call: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    paths = digits_files(tmp_path, a=160, b=160)
    words = ("--data", "digits", "--device", "cpu")
    replace(load(paths["b"]), record={}).save(paths["b"])
    assert f"{paths['b']}: the file does not say which model" in call("evaluate", *paths.values(), *words)[2]
    for name in ("pwfn.lab.uncertainty.file.open_files", "pwfn.run.scores.fit_posterior"):
        monkeypatch.setattr(name, lambda *given, **more: pytest.fail("begun"))
    for command in ("evaluate", "posterior"):
        status, _, err = call(command, paths["a"], *words, "--out", str(tmp_path))
        assert status == 2
        assert "is a folder: name a file in it" in err


# A file and data by name


def test_a_file_is_assessed_on_data_by_name(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model, file = digits_resnet(), tmp_path / "model.pwfn"
    torch.save(model.state_dict(), tmp_path / "original.pt")
    posterior(model, 0.05).save(file, posterior="weight", record={"model": "digits_resnet"})
    options = RunOptions("", "digits", tmp_path, device="cpu")
    facts, _ = evaluated(
        [file],
        options,
        TrustOptions(
            samples=3,
            seed=2,
            original=str(tmp_path / "original.pt"),
            ood=("noise", "shift:rotate:90"),
            sigma_scale=0.5,
            out=tmp_path / "uncertainty.json",
        ),
    )
    plain = file_facts(open_file(file, options, 2), file)
    assert {name: facts[name] for name in plain} == plain
    table = facts["uncertainty"]
    rows = {row["name"]: row for row in table["rows"]}
    assert list(rows) == [rival.value for rival in Rival]
    assert list(rows["original"]["auroc"]) == ["noise", "shift:rotate:90"]
    assert "noise" in [note.split(":")[0] for note in table["notes"]]
    assert table["sigma_scale"] == 0.5
    assert json.loads((tmp_path / "uncertainty.json").read_text()) == json.loads(json.dumps(table))
    assert rows["point estimate"]["accuracy_all"] == facts["after"]["metric"]
    whole, _ = evaluated([file], options, TrustOptions(samples=3, seed=2))
    drawn = next(row for row in whole["uncertainty"]["rows"] if row["name"] == Rival.ENSEMBLE)
    assert whole["ensemble"] == drawn["accuracy_all"]
