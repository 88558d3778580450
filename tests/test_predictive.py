"""The predictive sigma: known answers, zero where the data say so, and the same bytes for the same seed."""

from __future__ import annotations

import itertools
import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from cases import batchnorm_classifier, compressed_of, numbers
from torch import Tensor, nn
from torch.nn import functional as F

from pwfn import (
    Compressed,
    Config,
    ConfigError,
    DataError,
    Layout,
    LayoutError,
    compress,
    fit_posterior,
    load,
    loads,
)
from pwfn.bayes import predictive
from pwfn.bayes.batches import Batch, Source, gathered
from pwfn.file.content import codes_of, sigma_of
from pwfn.zoo.arrays import digits
from pwfn.zoo.models import digits_resnet

NOISE = 1.0  # of the linear model's targets


def linear(spread: float, weights: Tensor, seed: int = 0) -> list[tuple[Tensor, Tensor]]:
    """Targets of a linear model whose weights differ from example to example by N(0, spread)."""
    generator = torch.Generator().manual_seed(seed)
    found = []
    for _ in range(72):
        x, own = torch.randn(2, 256, len(weights), generator=generator)
        noise = torch.randn(256, generator=generator)
        found.append((x, (x * (weights + spread * own)).sum(1) + NOISE * noise))
    return found


def log_normal(output: Tensor, target: Tensor) -> Tensor:
    return torch.distributions.Normal(output.squeeze(1), NOISE).log_prob(target)


@pytest.mark.parametrize("spread", [0.5, 1.0, 2.0])
def test_the_sigma_of_a_linear_gaussian_model_is_recovered(
    spread: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its predictive distribution is N(w x, 1 + sigma^2 x^2), whose likelihood is the oracle here."""
    monkeypatch.setattr(predictive, "_DRAWS", 16)
    monkeypatch.setattr(predictive, "_CHECK_DRAWS", 64)
    monkeypatch.setattr(predictive, "_CHECK_EXAMPLES", 9216)  # with fewer, smaller noise is as good
    weights = torch.tensor([1.5, -2.0])
    model, data = nn.Linear(2, 1, bias=False), linear(spread, weights)
    small = Compressed.of(Layout.of(model), weights, None, {})
    x, y = (torch.cat(parts) for parts in zip(*data, strict=True))

    def cost(sigma: float) -> float:
        scale = (NOISE**2 + sigma**2 * x.square().sum(1)).sqrt()
        return -float(torch.distributions.Normal(x @ weights, scale).log_prob(y).mean())

    best = min((2 ** (step / 16) for step in range(-48, 33)), key=cost)
    assert abs(math.log2(best / spread)) < 0.1
    fitted = fit_posterior(small, model, data, unseen=True, log_likelihood=log_normal)
    assert fitted.tensor_sigma is not None
    assert abs(math.log2(float(fitted.tensor_sigma[0]) / best)) < 0.35


def test_zero_is_found_where_the_data_say_zero() -> None:
    weights = torch.tensor([1.5, -2.0])
    model = nn.Linear(2, 1, bias=False)
    small = Compressed.of(Layout.of(model), weights, None, {})
    fitted = fit_posterior(small, model, linear(0.0, weights), unseen=True, log_likelihood=log_normal)
    assert fitted.sigma_codes == (0,)
    assert (fitted.posterior, fitted.drawable) == ("tensor", False)
    assert fitted.posterior_sentence == "no posterior worth drawing from"
    again = loads(fitted.dumps())
    assert again.sigma_codes == (0,)
    assert torch.equal(again.sample()["weight"], small.dense_state_dict()["weight"])


def test_the_smallest_noise_that_is_as_good_as_the_best_is_chosen() -> None:
    """By paired differences: +1 and -1 in turn have standard error 0.1 over a hundred examples."""
    turns = torch.tensor([1.0, -1.0] * 50)
    best = 2 + torch.zeros(100)
    tried = [(4,), (3,), (2,), (1,)]
    near, far = best - 0.19 + turns, best - 0.21 + turns
    assert predictive.chosen([best - 1, best, near, far], tried) == (2,)
    assert predictive.chosen([best - 1, best, far, far], tried) == (3,)
    # Equal to the best, but not better than the point estimate by two standard errors.
    noisy = 0.19 + turns
    assert predictive.chosen([noisy, noisy], tried[:2]) == (0,)
    assert predictive.chosen([noisy + 0.02, noisy], tried[:2]) == (4,)
    infinite = torch.full((100,), -math.inf)
    assert predictive.chosen([infinite, best], tried[:2]) == (3,)
    assert predictive.chosen([infinite, infinite], tried[:2]) == (0,)


def overconfident(scale: float, seed: int = 0) -> tuple[nn.Module, list[Any]]:
    """A classifier that is wrong once in four, and sure of itself by ``scale``."""
    model, generator = nn.Linear(3, 3), torch.Generator().manual_seed(seed)
    with torch.no_grad():
        model.weight.copy_(scale * torch.eye(3))
        model.bias.zero_()
    data = []
    for _ in range(24):
        right = torch.randint(0, 3, (64,), generator=generator)
        moved = (torch.rand(64, generator=generator) < 0.25).long()
        data.append((F.one_hot(right, 3).float(), (right + moved) % 3))
    return model, data


def test_a_network_that_is_too_sure_gets_noise_and_a_modest_one_gets_none() -> None:
    for scale, drawn in ((12.0, True), (1.0, False)):
        model, data = overconfident(scale)
        fitted = fit_posterior(compressed_of(model), model, data, unseen=True)
        assert fitted.drawable is drawn


def test_the_same_seed_gives_the_same_bytes_and_the_caller_is_left_alone() -> None:
    model, small = batchnorm_classifier(0), compressed_of(batchnorm_classifier(0))
    x = numbers(96, 4, seed=2)
    data = list(zip(x.split(16), (torch.arange(96) % 3).split(16), strict=True))
    before, state = torch.get_rng_state(), {k: v.clone() for k, v in model.state_dict().items()}
    made = [fit_posterior(small, model, data, seed=seed).dumps() for seed in (3, 3, 4)]
    assert made[0] == made[1]
    assert torch.equal(before, torch.get_rng_state())
    assert all(torch.equal(value, state[name]) for name, value in model.state_dict().items())
    assert loads(made[0]).content_sha256() != small.content_sha256()


def test_a_draw_is_the_plain_formula() -> None:
    small = compressed_of(batchnorm_classifier(0))
    codes = tuple(170 + 3 * n for n in range(len(small.layout.entries)))
    small = replace(small, sigma_codes=(0, *codes[1:]))
    noise = torch.randn(small.layout.size, generator=torch.Generator().manual_seed(1))
    assert small.sigma is not None
    plain = small.layout.views(small.values() + small.sigma * noise)
    drawn = small.sample(torch.Generator().manual_seed(1))
    for name, value in plain.items():
        torch.testing.assert_close(drawn[name], value)
    first = small.layout.entries[0].name
    assert torch.equal(drawn[first], small.dense_state_dict()[first])


def test_codes_are_the_nearest_of_a_logarithmic_scale() -> None:
    codes = tuple(range(256))
    assert codes_of(sigma_of(codes)) == codes
    sigma = torch.logspace(-7, 2, 50, dtype=torch.float64)
    assert ((sigma_of(codes_of(sigma)) / sigma).log2().abs() <= 1 / 16 + 1e-9).all()


def test_both_sigmas_are_kept_and_the_fitted_one_is_drawn_and_saved() -> None:
    model = batchnorm_classifier(0)
    trained = compressed_of(model, sigma=torch.ones(Layout.of(model).size))
    both = replace(trained, sigma_codes=(192,) * len(trained.layout.entries))
    assert both.sigma is not None
    assert set(both.sigma.tolist()) == {0.5}
    assert [loads(both.dumps(posterior=kind)).posterior for kind in (None, "weight", "centre", "none")] == [
        *("tensor", "weight", "centre", "none")
    ]
    # One byte per tensor, and one for the block.
    sizes = [len(both.dumps(posterior=kind)) for kind in ("tensor", "none")]
    assert 0 < sizes[0] - sizes[1] < len(trained.layout.entries) + 16


def test_data_without_labels_need_the_original_network() -> None:
    model = batchnorm_classifier(0).eval()
    small, x = compressed_of(model), numbers(64, 4, seed=2)
    with pytest.raises(DataError, match="original="):
        fit_posterior(small, model, x)
    assert fit_posterior(small, model, x, original=model).posterior == "tensor"


@pytest.mark.parametrize(
    ("data", "message"),
    [([], "empty"), ([(torch.ones(0, 4), torch.ones(0).long())], "empty"),
     ([(torch.ones(4, 4), torch.tensor([0]))] * 2, "likelihood")],
)  # fmt: skip
def test_data_that_will_not_do(data: list[Any], message: str) -> None:
    model = batchnorm_classifier(0)
    with pytest.raises(DataError, match=message):
        fit_posterior(compressed_of(model), model, data)


def test_the_original_network_is_not_changed() -> None:
    small, original = compressed_of(batchnorm_classifier(0)), batchnorm_classifier(1).train()
    original[1].eval()
    fit_posterior(small, batchnorm_classifier(0), numbers(64, 4), original=original)
    assert [module.training for module in original] == [True, False, *[True] * 6]


@pytest.mark.parametrize("size", [1, 10, 64, 90, 128, 256, 2048])
def test_every_size_of_batch_gives_the_same_examples(size: int) -> None:
    """64 of them in a step, a quarter for the check, and all others in the fit."""
    x = torch.arange(2048.0)[:, None]
    source = Source("data", x.split(size), torch.device("cpu"))
    fit, check, _ = predictive._divided(source)
    assert fit is not None
    checked = torch.cat([batch.args[0] for batch in check])
    assert torch.equal(checked, x[:512])
    seen = [batch.args[0] for batch in itertools.islice(fit, 48)]
    assert max(map(len, seen)) <= 70
    assert min(map(len, seen[:24])) >= 10
    assert set(torch.cat(seen).flatten().tolist()) == set(range(512, 2048))


def test_what_is_read_in_one_pass_has_1024_examples_for_the_check() -> None:
    for size in (16, 100):
        batches = torch.arange(10240.0)[:, None].split(size)
        fit, check, _ = predictive._divided(Source("data", batches, torch.device("cpu")))
        assert sum(batch.size for batch in check) == 1024
        assert fit is not None
        assert min(batch.size for batch in itertools.islice(fit, 64)) >= 64


def test_no_pass_has_more_examples_than_a_batch_of_the_loader() -> None:
    """They may be all that fits; the result is that of larger batches, which mix the same inputs."""
    seen, x, found = [], numbers(400, 4), []
    model, original = batchnorm_classifier(0), batchnorm_classifier(1)
    for layer in (model, original):
        layer.register_forward_pre_hook(lambda _, inputs: seen.append(len(inputs[0])))
    for size in (1, 64):
        seen.clear()
        data = x.split(size)
        small = compressed_of(batchnorm_classifier(0))
        found.append(fit_posterior(small, model, data, original=original).sigma_codes)
        assert max(seen) == size
    assert found[0] is not None
    assert any(found[0])
    assert max(abs(a - b) for a, b in zip(*found, strict=True)) <= 16


def test_inputs_of_different_shapes_are_not_joined() -> None:
    batches = [Batch((torch.ones(1, side, side),), {}, torch.ones(1)) for side in (2, 2, 3, 2)]
    assert [each.size for each in gathered(batches, 4)] == [2, 1, 1]


def test_too_few_examples_to_check_a_fit_give_no_noise() -> None:
    """The spread of three numbers says nothing: noise that helped them by chance is not worth drawing."""
    for scale in (12.0, 1.0):
        model, data = overconfident(scale)
        few = [(x[:1], (x[:1].argmax(1) + 1) % 3) for x, _ in data[:12]]  # all wrong: any noise helps
        assert fit_posterior(compressed_of(model), model, few, unseen=True).sigma_codes == (0, 0)
        many = fit_posterior(compressed_of(model), model, few * 4, unseen=True)
        assert many.drawable


def test_pixels_of_one_image_are_no_independent_examples() -> None:
    """Two hundred copies of a pixel say as much as one."""
    model, found = nn.Conv2d(3, 3, 1), []
    with torch.no_grad():
        model.weight.copy_(3.5 * torch.eye(3)[..., None, None])
        assert model.bias is not None
        model.bias.zero_()
    x = torch.cat([x for x, _ in overconfident(1.0)[1]])[:160, :, None, None]
    y = torch.cat([y for _, y in overconfident(1.0)[1]])[:160, None, None]
    for side in (1, 14):
        data = [(x.expand(-1, -1, side, side), y.expand(-1, side, side))]
        found.append(fit_posterior(compressed_of(model), model, data, unseen=True).sigma_codes)
    assert found[0] == found[1]


def test_numbers_that_are_not_finite_are_an_error_and_no_verdict() -> None:
    model, x = batchnorm_classifier(0), numbers(320, 4)
    for example in (3, 300):  # in the check, and in the fit
        bad = x.clone()
        bad[example, 0] = math.nan
        data = list(zip(bad.split(64), (torch.arange(320) % 3).split(64), strict=True))
        with pytest.raises(DataError, match=r"1 of \d+ examples is not finite: check"):
            fit_posterior(compressed_of(model), model, data, unseen=True)


@pytest.mark.parametrize(
    "target", [numbers(64, 3), numbers(64, 1), numbers(64), torch.ones(64, 3), -torch.eye(3)[[0] * 64]]
)
def test_targets_that_are_no_classes_are_an_error(target: Tensor) -> None:
    """Of a regression or of several labels at once; by the likelihood of classes they would say something."""
    model = batchnorm_classifier(0)
    with pytest.raises(DataError, match="no probabilities of 3 classes"):
        fit_posterior(compressed_of(model), model, [(numbers(64, 4), target)])
    soft = numbers(64, 3).softmax(1).bfloat16().float()
    assert fit_posterior(compressed_of(model), model, [(numbers(64, 4), soft)]).posterior == "tensor"


def test_mistakes_are_one_sentence() -> None:
    model, x = batchnorm_classifier(0), numbers(64, 4)
    small, good = compressed_of(model), [(x, torch.arange(64) % 3)]
    with pytest.raises(DataError, match=r"label 3 is out of range, because the network has 3 outputs"):
        fit_posterior(small, model, [(x, torch.arange(64) % 4)])
    with pytest.raises(DataError, match=r"compressed is a str: allowed is what pwfn\.load returns"):
        fit_posterior("a.pwfn", model, good)  # type: ignore[arg-type]
    for names in ({"model": "resnet"}, {"model": model, "original": "resnet"}):
        with pytest.raises(DataError, match=r"is a str: allowed is a torch\.nn\.Module"):
            fit_posterior(small, loader=good, **names)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="precision is 'fp8': allowed is one of fp32, bf16, fp16"):
        fit_posterior(small, model, good, precision="fp8")
    with pytest.raises(LayoutError, match="the model is a str"):
        small.apply_to("resnet")  # type: ignore[arg-type]


def test_a_loader_with_fewer_batches_than_it_says() -> None:
    class Long(list[Any]):
        def __len__(self) -> int:
            return 500

    model, small = batchnorm_classifier(0), compressed_of(batchnorm_classifier(0))
    batch = numbers(64, 4), torch.arange(64) % 3
    with pytest.raises(DataError, match="fewer batches than their length says"):
        fit_posterior(small, model, Long([batch] * 16))
    assert fit_posterior(small, model, Long([batch] * 20)).posterior == "tensor"


def test_files_without_a_fitted_sigma_are_evaluated_without_draws(tmp_path: Path, call: Any) -> None:
    torch.manual_seed(0)
    model = digits_resnet()
    for kind in ("none", "centre"):
        small = compressed_of(model, sigma=torch.full((Layout.of(model).size,), 0.1))
        small.save(tmp_path / "a.pwfn", posterior=kind, record={"model": "digits_resnet"})
        assert load(tmp_path / "a.pwfn").tensor_sigma is None
        words = ("evaluate", str(tmp_path / "a.pwfn"), "--data", "digits", "--device", "cpu", "--json")
        status, said, _ = call(*words)
        assert status == 0
        assert not {"ensemble", "uncertainty"} & json.loads(said).keys()


def test_one_example_is_too_few_to_check_a_fit() -> None:
    model = batchnorm_classifier(0)
    found = fit_posterior(compressed_of(model), model, [(torch.ones(1, 4), torch.tensor([0]))])
    assert (found.posterior, found.drawable) == ("tensor", False)


@pytest.mark.parametrize(
    ("preset", "labelled", "kind"),
    [("recommended", True, "tensor"), ("small", True, "tensor"), ("small", False, "tensor"),
     ("quick", True, "none"), ("quick", False, "none"), ("paper", True, "weight")],
)  # fmt: skip
def test_runs_that_train_fit_one_except_the_papers_own(preset: str, labelled: bool, kind: str) -> None:
    torch.manual_seed(0)
    model, data = digits_resnet(), list(digits().train)[:6]
    config = Config.preset(preset).override({"training.steps_per_epoch": 4})
    result = compress(model, data if labelled else torch.cat([x for x, _ in data]), config=config)
    assert result.compressed.posterior == kind
    assert result.compressed.posterior_sentence in str(result)


def test_a_regression_has_no_fitted_posterior() -> None:
    data = [(torch.randn(8, 4), torch.randn(8, 1)) for _ in range(2)]
    config = Config().override({"posterior.init": "rms", "training.steps_per_epoch": 4})
    result = compress(nn.Linear(4, 1), data, loss_fn=F.mse_loss, config=config)
    assert result.compressed.sigma_codes is None


def test_a_file_gets_a_posterior_by_command(tmp_path: Path, call: Any) -> None:
    torch.manual_seed(0)
    old, new = tmp_path / "old.pwfn", tmp_path / "new.pwfn"
    compressed_of(digits_resnet()).save(old, record={"model": "digits_resnet"})
    words = ("posterior", str(old), "--data", "digits", "--device", "cpu")
    assert call(*words, "--out", str(new))[0] == 0
    found = load(new)
    assert found.posterior == "tensor"
    assert torch.equal(found.values(), load(old).values())
    assert call(*words, "--out", str(tmp_path / "again.pwfn"))[0] == 0
    assert (tmp_path / "again.pwfn").read_bytes() == new.read_bytes()
    assert "posterior: tensor" in call("inspect", str(new), "--no-zstd")[1]
    grown = new.stat().st_size - old.stat().st_size
    assert f"(+{grown})" in call(*words, "--out", str(old))[1]  # it replaces the file that it reads


def test_a_likelihood_is_one_number_for_each_example() -> None:
    model = nn.Linear(2, 1)
    data = [(torch.ones(8, 2), torch.ones(8, 1)) for _ in range(4)]
    with pytest.raises(DataError, match="each example"):
        fit_posterior(compressed_of(model), model, data, log_likelihood=lambda z, y: -(z - y).square().mean())
