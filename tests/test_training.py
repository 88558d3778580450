"""The fit loop, evaluation and BatchNorm re-estimation against values computed by hand."""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.distributions import Categorical, kl_divergence
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset, IterableDataset, TensorDataset

from pwfn import Config, GaussianNetwork, compress
from pwfn.bayes.batches import Batch, Source, is_out_of_memory
from pwfn.bayes.objective import Objective, Scores, accuracy, divergence, evaluate
from pwfn.bayes.randomness import seeded
from pwfn.bayes.train import diagonal_fisher, fit, reestimate_batchnorm, steps_in
from pwfn.config import Precision, TrainingConfig
from pwfn.errors import ConfigError, DataError, DivergedError, LayoutError, TooLargeError

CPU = torch.device("cpu")
PLAIN = TrainingConfig(momentum=0.0, weight_decay=0.0, learning_rate=0.1)


def sigma_learns(**posterior: Any) -> Config:
    """The paper's sigma, which learns, with these settings of it."""
    given = {"init": "powers", "learn_sigma": True, "noise_on_fixed": True, **posterior}
    return Config().override({f"posterior.{name}": value for name, value in given.items()})


@pytest.fixture(autouse=True)
def _same_random_state_for_every_test() -> None:
    torch.manual_seed(0)


def source(loader: Iterable[Any], name: str = "train_loader") -> Source:
    return Source(name, loader, CPU)


def sgd(net: GaussianNetwork, config: TrainingConfig) -> torch.optim.SGD:
    groups = net.parameter_groups(
        lr=config.learning_rate, sigma_lr=config.sigma_learning_rate, weight_decay=config.weight_decay
    )
    return torch.optim.SGD(groups, momentum=config.momentum)


def train(
    net: GaussianNetwork, loader: Iterable[Any], steps: int, loss_fn: Any, config: TrainingConfig
) -> float:
    return fit(
        net,
        source(loader).endless(),
        steps,
        Objective(loss_fn),
        config,
        optimizer=sgd(net, config),
        where="round 2 of 9",
    )


def sum_of_outputs(output: Tensor, target: Tensor) -> Tensor:
    return output.sum()


# The step


@pytest.mark.parametrize("clip_norm", [1.0, 0.25])
@pytest.mark.parametrize("alpha", [2**-11, 0.0, 0.5])
def test_the_clip_comes_before_the_regularisers_gradient(clip_norm: float, alpha: float) -> None:
    """With a task gradient of norm 10^6 and more, sigma moves by lr * (clipped - alpha)."""
    model = nn.Linear(3, 2, bias=False).double()
    config = sigma_learns(alpha=alpha, init="constant", constant_sigma=0.01)
    net = GaussianNetwork(model, config)
    mu, sigma = net.free_mu.detach().clone(), net.free_sigma.detach().clone()
    x = torch.tensor([[1e6, -2e6, 3e6]], dtype=torch.float64)
    training = TrainingConfig(momentum=0.0, weight_decay=0.0, learning_rate=0.1, clip_norm=clip_norm)
    torch.manual_seed(5)
    noise = torch.randn_like(mu)
    torch.manual_seed(5)
    train(net, [(x, torch.zeros(1))], 1, sum_of_outputs, training)

    gradient = x.expand(2, 3).reshape(-1)  # of the sum of outputs, at every sampled weight
    norm = torch.cat((gradient, gradient * noise)).norm()
    assert norm > 1e6
    clipped_mu, clipped_sigma = clip_norm * gradient / norm, clip_norm * gradient * noise / norm
    torch.testing.assert_close(net.free_mu.detach(), mu - 0.1 * clipped_mu, rtol=0, atol=1e-11)
    torch.testing.assert_close(
        net.free_sigma.detach(), sigma - 0.1 * (clipped_sigma - alpha), rtol=0, atol=1e-11
    )


def test_a_gradient_below_the_clip_is_taken_whole_and_off_means_off() -> None:
    for clip_norm, scale in ((10.0, 1.0), (None, 1e4)):
        net = GaussianNetwork(nn.Linear(2, 1, bias=False).double(), sigma_learns(alpha=0))
        mu = net.free_mu.detach().clone()
        x = scale * torch.tensor([[0.5, -0.25]], dtype=torch.float64)
        training = TrainingConfig(momentum=0.0, weight_decay=0.0, learning_rate=0.1, clip_norm=clip_norm)
        train(net, [(x, torch.zeros(1))], 1, sum_of_outputs, training)
        torch.testing.assert_close(net.free_mu.detach(), mu - 0.1 * x.reshape(-1), rtol=1e-14, atol=0)


def test_the_clip_counts_the_uncompressed_parameters_too() -> None:
    """LayerNorm's bias has gradient 1 an output: of the norm of all three kinds, each gets its part."""
    model = nn.Sequential(nn.Linear(2, 2, bias=False), nn.LayerNorm(2, elementwise_affine=True)).double()
    net = GaussianNetwork(model, sigma_learns(alpha=0))
    bias_before = model[1].bias.detach().clone()
    x = torch.tensor([[1.0, 2.0]], dtype=torch.float64)
    training = TrainingConfig(momentum=0.0, weight_decay=0.0, learning_rate=1.0, clip_norm=0.01)
    before = [p.detach().clone() for p in net.parameters()]
    train(net, [(x, torch.zeros(1))], 1, sum_of_outputs, training)
    moved = torch.cat([(p.detach() - q).reshape(-1) for p, q in zip(net.parameters(), before, strict=True)])
    assert moved.norm().item() == pytest.approx(0.01, rel=1e-5)  # clip_grad_norm_ adds 1e-6 to the norm
    assert torch.equal(model[1].bias, bias_before)  # of the user's own model
    assert not torch.equal(net.model.get_parameter("1.bias"), bias_before)


def test_weight_decay_is_on_mu_and_the_uncompressed_never_on_sigma() -> None:
    model = nn.Sequential(nn.Linear(3, 4), nn.LayerNorm(4)).double()
    net = GaussianNetwork(model, sigma_learns(alpha=0))
    mu, sigma = net.free_mu.detach().clone(), net.free_sigma.detach().clone()
    config = TrainingConfig(momentum=0.9, weight_decay=0.5, learning_rate=0.1)
    nothing = [(torch.ones(1, 3, dtype=torch.float64), torch.zeros(1))]
    train(net, nothing, 2, lambda output, target: 0 * output.sum(), config)
    # SGD: v1 = 0.5 mu, mu1 = mu - 0.1 v1; v2 = 0.9 v1 + 0.5 mu1, mu2 = mu1 - 0.1 v2
    expected = 0.95 - 0.1 * (0.9 * 0.5 + 0.5 * 0.95)
    torch.testing.assert_close(net.free_mu.detach(), expected * mu, rtol=1e-14, atol=0)
    torch.testing.assert_close(
        net.model.get_parameter("1.weight").detach(),
        torch.full((4,), expected, dtype=torch.float64),
        rtol=1e-14,
        atol=0,
    )
    assert torch.equal(net.free_sigma.detach(), sigma)


def test_sigma_has_its_own_learning_rate() -> None:
    config = sigma_learns(init="constant", constant_sigma=0.01)
    net = GaussianNetwork(nn.Linear(2, 1).double(), config)
    mu = net.free_mu.detach().clone()
    training = TrainingConfig(momentum=0.0, weight_decay=0.0, learning_rate=0.0, sigma_learning_rate=2.0)
    nothing = [(torch.ones(1, 2, dtype=torch.float64), torch.zeros(1))]
    train(net, nothing, 3, lambda output, target: 0 * output.sum(), training)
    assert torch.equal(net.free_mu.detach(), mu)
    expected = torch.full((3,), 0.01 + 3 * 2.0 * 2**-11, dtype=torch.float64)
    torch.testing.assert_close(net.free_sigma.detach(), expected, rtol=1e-14, atol=0)


def test_fit_returns_the_mean_task_loss_without_the_regulariser_and_leaves_training_mode_on() -> None:
    net = GaussianNetwork(nn.Linear(2, 1), sigma_learns(alpha=1e6)).eval()
    values = iter([1.0, 2.0, 6.0])
    modes = []

    def loss_fn(output: Tensor, target: Tensor) -> Tensor:
        modes.append(net.training)
        return 0 * output.sum() + next(values)

    config = TrainingConfig(learning_rate=0.0, weight_decay=0.0)
    assert train(net, [(torch.ones(1, 2), torch.zeros(1))], 3, loss_fn, config) == 3.0
    assert modes == [True] * 3


def test_a_polishing_optimiser_leaves_the_weights_alone() -> None:
    """An optimiser over the uncompressed parameters only: no regulariser, no step for mu and sigma."""
    net = GaussianNetwork(nn.Sequential(nn.Linear(3, 2), nn.LayerNorm(2)))
    mu, sigma = net.free_mu.detach().clone(), net.free_sigma.detach().clone()
    scale = net.model.get_parameter("1.weight").detach().clone()
    optimizer = torch.optim.SGD(net.model.parameters(), lr=0.1, momentum=0.9, weight_decay=0.1)
    data = [(torch.randn(8, 3), torch.randint(0, 2, (8,)))]
    batches = source(data).endless()
    fit(net, batches, 3, Objective(F.cross_entropy), PLAIN, optimizer=optimizer, where="polish")
    assert torch.equal(net.free_mu.detach(), mu)
    assert torch.equal(net.free_sigma.detach(), sigma)
    assert not torch.equal(net.model.get_parameter("1.weight").detach(), scale)


@pytest.mark.parametrize(("precision", "dtype"), [("fp32", torch.float32), ("bf16", torch.bfloat16)])
def test_precision_is_the_number_type_of_the_forward_pass(precision: str, dtype: torch.dtype) -> None:
    net = GaussianNetwork(nn.Linear(4, 2))
    seen = []

    def loss_fn(output: Tensor, target: Tensor) -> Tensor:
        seen.append(output.dtype)
        return output.float().square().mean()

    config = TrainingConfig(precision=Precision(precision))
    data = [(torch.randn(3, 4), torch.zeros(3))]
    assert math.isfinite(train(net, data, 2, loss_fn, config))
    evaluate(net, source(data), Objective(loss_fn), None, Precision(precision))
    assert seen == [dtype] * 3
    assert net.free_mu.dtype == torch.float32


@pytest.mark.parametrize("bad", [1, 5, 32, 33, 40])
@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_a_loss_that_is_not_finite_is_told_with_its_step(bad: int, value: float) -> None:
    """Also where it comes between two looks, and where the loss is finite again afterwards."""
    net = GaussianNetwork(nn.Linear(2, 1))
    calls = itertools.count(1)

    def loss_fn(output: Tensor, target: Tensor) -> Tensor:
        return torch.zeros((), requires_grad=True) + (value if next(calls) == bad else 1.0)

    with pytest.raises(DivergedError) as caught:
        train(net, [(torch.ones(1, 2), torch.zeros(1))], 40, loss_fn, TrainingConfig())
    assert str(caught.value).startswith("round 2 of 9: ")
    assert f"no longer finite at step {bad} of 40: lower training.learning_rate" in str(caught.value)


@pytest.mark.parametrize("clip_norm", [1.0, None])
def test_a_gradient_that_is_not_finite_is_told_though_the_loss_is_finite(clip_norm: float | None) -> None:
    """The square root's slope at 0 is infinite, and 0 * infinity is NaN."""
    net = GaussianNetwork(nn.Linear(2, 1))
    data = [(torch.ones(1, 2), torch.zeros(1))]
    with pytest.raises(DivergedError, match="the loss or its gradient is no longer finite at step 1 of 1"):
        train(net, data, 1, lambda output, _: (0 * output.sum()).sqrt(), TrainingConfig(clip_norm=clip_norm))


# Several batches to a step


def test_two_batches_of_four_are_a_step_as_one_of_eight() -> None:
    """Without BatchNorm, which sees batches one by one, and with the least noise that there is."""
    config = Config().override(
        {
            "schedule.fractions": [0.5, 1.0],
            "schedule.warmup_epochs": 1.0,
            "schedule.epochs_per_round": 1.5,
            "training.learning_rate": 0.05,
            "training.sigma_learning_rate": 0.0,
            "training.clip_norm": None,
            "posterior.init": "constant",
            "posterior.constant_sigma": 1e-12,
            "posterior.alpha": 0.0,
            "posterior.learn_sigma": True,
            "posterior.noise_on_fixed": False,
            "clustering.b": 7,
        }
    )
    model = nn.Sequential(nn.Linear(6, 8), nn.LayerNorm(8), nn.Tanh(), nn.Linear(8, 3)).double()
    x, y = torch.randn(32, 6, dtype=torch.float64), torch.randint(0, 3, (32,))
    eights, fours = (list(zip(x.split(size), y.split(size), strict=True)) for size in (8, 4))
    one = compress(model, eights, config=config)
    two = compress(model, fours, config=config.override({"training.accumulate": 2}))
    assert [done.steps for done in one.rounds] == [done.steps for done in two.rounds] == [4, 6]
    for first, second in zip(one.rounds, two.rounds, strict=True):
        assert first.loss == pytest.approx(second.loss, rel=1e-6)
    assert torch.equal(one.compressed.values(), two.compressed.values())
    assert not torch.equal(one.compressed.untouched["1.weight"], model[1].weight)
    for name, tensor in one.compressed.untouched.items():
        torch.testing.assert_close(tensor, two.compressed.untouched[name], rtol=0, atol=1e-8)


@pytest.mark.parametrize(("accumulate", "steps"), [(1, 6), (2, 3), (4, 2), (9, 1)])
def test_steps_are_of_the_optimiser_and_epochs_of_the_data(accumulate: int, steps: int) -> None:
    """Five batches, an epoch and a fifth: six batches, in steps of so many, the last of them whole."""
    config = Config().override(
        {
            "schedule.fractions": [1.0],
            "schedule.warmup_epochs": 1.2,
            "training.accumulate": accumulate,
            "finish.polish_epochs": 0.0,
        }
    )
    data = [(torch.randn(2, 3), torch.randint(0, 2, (2,)))] * 5
    last = []
    result = compress(
        nn.Linear(3, 2),
        data,
        config=config,
        on_step=last.append,
        on_round=lambda progress: last.append(progress.batches),
    )
    assert result.rounds[0].steps == steps
    pulse, batches = last[-2:]
    assert (pulse.step, pulse.steps, pulse.done) == (steps, steps, 1.0)
    assert pulse.epoch == pytest.approx(steps * accumulate / 5)
    assert batches == steps * accumulate


# Sixteen bits


def test_sixteen_bits_learn_on_the_cpu_too() -> None:
    data = [(torch.randn(64, 4), torch.zeros(64, dtype=torch.int64))]
    data[0][1][data[0][0][:, 0] > 0] = 1
    config = TrainingConfig(precision=Precision.FP16, learning_rate=0.5)
    net = GaussianNetwork(nn.Linear(4, 2))
    seen = []

    def loss_fn(output: Tensor, target: Tensor) -> Tensor:
        assert output.dtype == torch.float16
        seen.append(float(F.cross_entropy(output.detach().float(), target)))
        return F.cross_entropy(output, target)

    train(net, data, 30, loss_fn, config)
    assert seen[-1] < seen[0] / 4
    assert net.free_mu.dtype == torch.float32


def test_a_gradient_too_large_for_sixteen_bits_halves_the_scale_and_leaves_the_step_out() -> None:
    """The scale starts at 65,536: 16 times that is above 65,504, until five halvings make it 2,048."""
    data = [(torch.ones(1, 2), torch.zeros(1))]
    config = TrainingConfig(precision=Precision.FP16, clip_norm=None)
    for steps, moves in ((5, False), (6, True)):
        net = GaussianNetwork(nn.Linear(2, 1))
        before = [p.detach().clone() for p in net.parameters()]
        snapshots = []
        fit(
            net,
            source(data).endless(),
            steps,
            Objective(lambda output, target: 16 * output.float().sum()),
            config,
            optimizer=sgd(net, config),
            where="round 1 of 1",
            after_step=lambda snapshot: snapshots.append(snapshot()),  # noqa: B023
        )
        assert [s.scaler["scale"] for s in snapshots] == [32768, 16384, 8192, 4096, 2048, 2048][:steps]
        assert moves != all(torch.equal(p, q) for p, q in zip(net.parameters(), before, strict=True))


def test_a_loss_that_is_no_number_ends_sixteen_bits_too() -> None:
    net = GaussianNetwork(nn.Linear(2, 1))
    data = [(torch.ones(1, 2), torch.zeros(1))]
    config = TrainingConfig(precision=Precision.FP16)
    with pytest.raises(DivergedError, match="no longer finite at step 1 of 3"):
        train(net, data, 3, lambda output, _: output.sum() * math.nan, config)


# Out of memory


class Hungry(torch.autograd.Function):
    """Runs out of memory with more than so many examples, on the way there or on the way back."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, most: int, backward: bool) -> Tensor:
        ctx.most, ctx.backward = most, backward
        if not backward and len(x) > most:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.\nAnd so on.")
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        if ctx.backward and len(gradient) > ctx.most:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.\nAnd so on.")
        return gradient, None, None


class Fed(nn.Module):
    def __init__(self, most: int, backward: bool = False) -> None:
        super().__init__()
        self.linear, self.most, self.backward = nn.Linear(3, 2), most, backward

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = Hungry.apply(self.linear(x), self.most, self.backward)
        return found


SIXTY_FOUR = [(torch.zeros(64, 3), torch.zeros(64, dtype=torch.int64))]
NOT_EVEN_ONE = "not even one example fits: use a smaller model or image, or a larger device"


@pytest.mark.parametrize("accumulate", [1, 3])
@pytest.mark.parametrize("backward", [False, True])
@pytest.mark.parametrize(("most", "advice"), [(20, "a batch of 16 fits"), (63, "a batch of 32 fits")])
def test_a_batch_too_large_to_train_on_says_what_fits(
    most: int, advice: str, backward: bool, accumulate: int
) -> None:
    net = GaussianNetwork(Fed(most, backward))
    with pytest.raises(TooLargeError) as caught:
        train(net, SIXTY_FOUR, 1, F.cross_entropy, TrainingConfig(accumulate=accumulate))
    assert str(caught.value) == (f"round 2 of 9, step 1: out of memory with inputs (64, 3) float32: {advice}")


@pytest.mark.parametrize("backward", [False, True])
def test_where_not_even_one_example_fits_that_is_said(backward: bool) -> None:
    with pytest.raises(TooLargeError, match=f"float32: {NOT_EVEN_ONE}$"):
        train(GaussianNetwork(Fed(0, backward)), SIXTY_FOUR, 1, F.cross_entropy, PLAIN)
    one = [(torch.zeros(1, 3), torch.zeros(1, dtype=torch.int64))]
    with pytest.raises(TooLargeError, match=f"float32: {NOT_EVEN_ONE}$"):
        train(GaussianNetwork(Fed(0, backward)), one, 1, F.cross_entropy, PLAIN)


def test_a_batch_too_large_to_score_says_what_fits() -> None:
    with pytest.raises(TooLargeError) as caught:
        evaluate(Fed(20), source(SIXTY_FOUR, "val_loader"), Objective(F.cross_entropy), accuracy)
    assert str(caught.value) == (
        "val_loader, batch 1: out of memory with inputs (64, 3) float32: a batch of 16 fits"
    )
    with pytest.raises(TooLargeError, match=NOT_EVEN_ONE):
        evaluate(Fed(0), source(SIXTY_FOUR, "val_loader"), Objective(F.cross_entropy), accuracy)


def test_the_first_examples_of_a_batch_in_any_form() -> None:
    x, y = torch.arange(6.0).view(3, 2), torch.arange(3)
    batch = Batch.of({"a": x, "b": (x, torch.zeros(5)), "c": 7, "labels": y}, CPU).first(2)
    assert torch.equal(batch.kwargs["a"], x[:2])
    assert torch.equal(batch.kwargs["b"][0], x[:2])
    assert batch.kwargs["b"][1].shape == (5,)  # not one for each example
    assert batch.kwargs["c"] == 7
    assert torch.equal(batch.target, y[:2])


def test_the_cpus_own_way_to_say_that_memory_ran_out_is_known() -> None:
    class Greedy(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            if len(x) > 20:
                torch.empty(2**50, dtype=torch.uint8)
            return super().forward(x)

    with pytest.raises(RuntimeError) as caught:
        torch.empty(2**50, dtype=torch.uint8)
    assert is_out_of_memory(caught.value)
    assert not is_out_of_memory(RuntimeError("mat1 and mat2 shapes cannot be multiplied"))
    with pytest.raises(TooLargeError, match=r"a batch of 16 fits$"):
        train(GaussianNetwork(Greedy(3, 2)), SIXTY_FOUR, 1, F.cross_entropy, PLAIN)


# Objectives


def test_a_loss_must_be_one_differentiable_number() -> None:
    data = [(torch.randn(3, 2), torch.zeros(3, 1))]

    def message(loss_fn: Any) -> str:
        with pytest.raises(DataError) as caught:
            train(GaussianNetwork(nn.Linear(2, 1)), data, 1, loss_fn, PLAIN)
        assert "\n" not in str(caught.value)
        assert str(caught.value).startswith("round 2 of 9, step 1: ")
        return str(caught.value)

    assert "not a single number: reduce it to its mean" in message(lambda o, t: (o - t) ** 2)
    assert "not a single number" in message(lambda o, t: 3.0)
    assert "not a single number" in message(lambda o, t: None)
    assert "does not depend on the weights" in message(lambda o, t: t.sum())
    assert "the loss cannot take the output and the target" in message(F.nll_loss)
    assert "the loss cannot take the output and the target" in message(lambda o: o.sum())
    assert "the loss cannot take the output and the target" in message("mse")

    class NoWayBack(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return x.sum()

        @staticmethod
        def backward(ctx: Any, gradient: Tensor) -> Tensor:
            raise RuntimeError("no way back\nat all")

    assert message(lambda o, t: NoWayBack.apply(o)).endswith("has no gradient: RuntimeError: no way back")


def test_a_loss_with_one_element_is_a_number() -> None:
    net = GaussianNetwork(nn.Linear(2, 1))
    data = [(torch.ones(1, 2), torch.zeros(1, 1))]
    assert train(net, data, 2, lambda o, t: F.mse_loss(o, t, reduction="none") * 0 + 2, PLAIN) == 2.0
    scores = evaluate(net, source(data), Objective(lambda o, t: 0 * o[0] + 3), lambda o, t: o.new_ones(1, 1))
    assert (scores.loss, scores.metric) == (3.0, 1.0)


def test_targets_are_asked_for_unless_the_original_teaches() -> None:
    net, x = nn.Linear(2, 3), torch.randn(4, 2)
    batch = Batch.of(x, CPU)
    with pytest.raises(
        DataError, match=r"step 1 has no target: give \(input, target\) batches, or distill=True"
    ):
        Objective(F.cross_entropy)(net, batch, "round 1 of 2, step 1")
    teacher = nn.Linear(2, 3)
    loss = Objective(F.cross_entropy, teacher, divergence)(net, batch, "here")
    torch.testing.assert_close(loss, divergence(net(x), teacher(x)))
    loss.backward()
    assert teacher.weight.grad is None
    assert net.weight.grad is not None


@pytest.mark.parametrize("shape", [(5, 3), (1, 2), (4, 3, 2, 5)])
def test_divergence_is_the_kullback_leibler_divergence_from_the_reference(shape: tuple[int, ...]) -> None:
    generator = torch.Generator().manual_seed(0)
    output, reference = 3 * torch.randn(2, *shape, generator=generator)
    p, q = (Categorical(logits=x.movedim(1, -1).double()) for x in (reference, output))
    expected = kl_divergence(p, q).mean()
    assert divergence(output, reference).item() == pytest.approx(expected.item(), rel=1e-5)
    assert divergence(reference, output).item() != pytest.approx(expected.item(), rel=1e-3)


@given(st.lists(st.floats(-20, 20), min_size=2, max_size=6), st.floats(-5, 5))
@settings(deadline=None, max_examples=50)
def test_divergence_is_zero_for_equal_distributions_and_never_negative(
    logits: list[float], shift: float
) -> None:
    x = torch.tensor([logits])
    assert divergence(x, x).item() == 0
    assert abs(divergence(x + shift, x).item()) < 1e-5  # softmax does not see a shift
    assert divergence(x.flip(1) * 2, x).item() > -1e-6


def test_accuracy_by_hand() -> None:
    output = torch.tensor([[0.1, 0.7, 0.2], [0.9, 0.0, 0.1], [0.2, 0.3, 0.5], [0.4, 0.3, 0.3]])
    assert accuracy(output, torch.tensor([1, 0, 0, 2])).item() == 0.5
    assert accuracy(output, torch.tensor([1, 0, -100, -100])).item() == 1.0  # as cross entropy ignores them
    assert accuracy(output, torch.eye(3)[torch.tensor([1, 0, 0, 2])]).item() == 0.5  # as probabilities
    pixels = output.t().reshape(1, 3, 2, 2)
    assert accuracy(pixels, torch.tensor([[[1, 0], [2, 2]]])).item() == 0.75
    with pytest.raises(ValueError, match="predictions for"):
        accuracy(output, torch.zeros(4, 1, dtype=torch.int64))  # would be compared four by four


# Batches


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


# Sources


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


# Evaluation


class Modes(nn.Module):
    """Notes the mode it runs in, and has a part whose mode differs."""

    def __init__(self) -> None:
        super().__init__()
        self.frozen = nn.Identity().eval()
        self.seen: list[tuple[bool, bool]] = []

    def forward(self, x: Tensor) -> Tensor:
        self.seen.append((self.training, self.frozen.training))
        return x


def test_evaluation_weights_batches_by_their_size() -> None:
    """Three batches of 3, 3 and 1 with mean losses 1, 2 and 9: 18 / 7, not 4."""
    losses, marks = {3.0: 1.0, 4.0: 2.0, 5.0: 9.0}, {3.0: 0.5, 4.0: 0.5, 5.0: 1.0}
    data = [(torch.full((n, 1), key), torch.zeros(n)) for n, key in ((3, 3.0), (3, 4.0), (1, 5.0))]
    scores = evaluate(
        nn.Identity(),
        source(data),
        Objective(lambda output, target: torch.tensor(losses[float(output[0])])),
        lambda output, target: torch.tensor(marks[float(output[0])]),
    )
    assert scores.loss == pytest.approx((3 * 1 + 3 * 2 + 1 * 9) / 7, rel=1e-15)
    assert scores.metric == pytest.approx((3 * 0.5 + 3 * 0.5 + 1) / 7, rel=1e-15)
    assert scores.examples == 7


def test_evaluation_does_not_depend_on_how_the_data_are_cut() -> None:
    torch.manual_seed(0)
    model, x, y = nn.Linear(4, 3).double(), torch.randn(23, 4).double(), torch.randint(0, 3, (23,))
    objective = Objective(F.cross_entropy)
    whole = evaluate(model, source([(x, y)]), objective, accuracy)
    for size in (1, 4, 7, 22):
        cut = list(zip(x.split(size), y.split(size), strict=True))
        scores = evaluate(model, source(cut), objective, accuracy)
        assert scores.loss == pytest.approx(whole.loss, rel=1e-12)
        assert scores.metric == pytest.approx(float((model(x).argmax(1) == y).double().mean()), rel=1e-12)
        assert scores.examples == 23


def test_evaluation_runs_in_evaluation_mode_without_gradient_and_puts_every_mode_back() -> None:
    model = Modes()
    data = [(torch.zeros(2, 1, requires_grad=True), torch.zeros(2))]

    def loss_fn(output: Tensor, target: Tensor) -> Tensor:
        assert not torch.is_grad_enabled()
        return output.sum()

    evaluate(model, source(data), Objective(loss_fn), None)
    assert model.seen == [(False, False)]
    assert model.training
    assert not model.frozen.training

    def failing(output: Tensor, target: Tensor) -> Tensor:
        raise ValueError("no")

    with pytest.raises(DataError, match="val_loader, batch 1: the loss cannot take"):
        evaluate(model, source(data, "val_loader"), Objective(failing), None)
    assert model.training
    assert not model.frozen.training


def test_unlabelled_batches_have_a_loss_but_no_metric() -> None:
    teacher = nn.Linear(2, 3)
    objective = Objective(F.cross_entropy, teacher, divergence)
    x, y = torch.randn(4, 2), torch.tensor([0, 1, 2, 0])
    assert evaluate(teacher, source([x]), objective, accuracy) == Scores(0.0, None, 4)
    mixed = evaluate(teacher, source([x, (x, teacher(x).argmax(1)), x]), objective, accuracy)
    assert mixed == Scores(0.0, 1.0, 12)
    assert evaluate(teacher, source([(x, y)]), objective, None).metric is None


def test_evaluation_tells_what_is_wrong_with_the_data() -> None:
    model, objective = nn.Linear(2, 3), Objective(F.cross_entropy)
    good = (torch.randn(4, 2), torch.tensor([0, 1, 2, 0]))
    with pytest.raises(DataError, match="val_loader gave no batch: it is empty, or can be read only once"):
        evaluate(model, source([], "val_loader"), objective, accuracy)
    with pytest.raises(
        DataError, match=r"val_loader, batch 2: the model cannot take inputs \(4, 5\) float32"
    ):
        evaluate(model, source([good, (torch.randn(4, 5), good[1])], "val_loader"), objective, accuracy)
    with pytest.raises(DataError, match="val_loader, batch 1 has no target"):
        evaluate(model, source([good[0]], "val_loader"), objective, accuracy)
    for metric in (lambda o, t: o == t, lambda o, t: o, lambda o, t: None, lambda o: 0.0):
        with pytest.raises(DataError, match="val_loader, batch 1: the metric cannot take"):
            evaluate(model, source([good], "val_loader"), objective, metric)
    assert evaluate(model, source([good]), objective, lambda o, t: 0.25).metric == 0.25  # a plain number


# BatchNorm


def batchnorm_net(**options: Any) -> tuple[nn.Sequential, GaussianNetwork]:
    torch.manual_seed(1)
    model = nn.Sequential(
        nn.Linear(3, 4), nn.BatchNorm1d(4, **options), nn.Dropout(0.5), nn.Linear(4, 2)
    ).double()
    config = sigma_learns(init="constant", constant_sigma=0.5)
    return model, GaussianNetwork(model, config)


@pytest.mark.parametrize("momentum", [0.1, None])
def test_batchnorm_statistics_are_plain_means_over_batches_at_the_point_estimate(
    momentum: float | None,
) -> None:
    model, net = batchnorm_net(momentum=momentum)
    inputs = [torch.randn(n, 3, dtype=torch.float64) + n for n in (5, 5, 2)]
    net.train()
    assert reestimate_batchnorm(net, source([*inputs, torch.zeros(9, 3)]).batches(), 3, "here") == 1
    linear = model[0]
    activations = [x @ linear.weight.detach().T + linear.bias.detach() for x in inputs]
    layer = net.model.get_submodule("1")
    mean = torch.stack([a.mean(0) for a in activations]).mean(0)
    variance = torch.stack([a.var(0, unbiased=True) for a in activations]).mean(0)
    torch.testing.assert_close(layer.running_mean, mean, rtol=1e-12, atol=1e-14)
    torch.testing.assert_close(layer.running_var, variance, rtol=1e-12, atol=1e-14)
    assert layer.momentum == momentum
    assert net.training
    assert all(module.training for module in net.modules())
    assert torch.equal(model[1].running_mean, torch.zeros(4).double())  # the user's own


def test_every_batchnorm_sees_the_one_before_it_normalise() -> None:
    torch.manual_seed(2)
    model = nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3), nn.Linear(3, 2), nn.BatchNorm1d(2)).double()
    net = GaussianNetwork(model).eval()
    x = torch.randn(6, 2, dtype=torch.float64)
    assert reestimate_batchnorm(net, source([x]).endless(), 1, "here") == 2
    hidden = F.linear(x, model[0].weight, model[0].bias).detach()
    normal = (hidden - hidden.mean(0)) / (hidden.var(0, unbiased=False) + 1e-5).sqrt()
    second = F.linear(normal, model[2].weight, model[2].bias).detach()
    torch.testing.assert_close(
        net.model.get_submodule("3").running_mean, second.mean(0), rtol=1e-10, atol=1e-12
    )
    torch.testing.assert_close(
        net.model.get_submodule("3").running_var, second.var(0), rtol=1e-10, atol=1e-12
    )
    assert not any(module.training for module in net.modules())


def test_reestimation_changes_nothing_else() -> None:
    _, net = batchnorm_net()
    before = {name: value.clone() for name, value in net.state_dict().items() if isinstance(value, Tensor)}
    data = [torch.randn(5, 3).double()]
    random_state = torch.get_rng_state()
    reestimate_batchnorm(net, source(data).endless(), 1, "here")
    assert torch.equal(torch.get_rng_state(), random_state)  # neither noise nor dropout was drawn
    after = net.state_dict()
    changed = {name for name in before if not torch.equal(before[name], after[name])}
    assert changed == {"model.1.running_mean", "model.1.running_var", "model.1.num_batches_tracked"}


def test_a_failure_in_reestimation_puts_momentum_and_mode_back() -> None:
    _, net = batchnorm_net(momentum=0.3)
    net.eval()
    with pytest.raises(DataError, match="there: the model cannot take"):
        reestimate_batchnorm(net, source([torch.zeros(5, 7).double()]).endless(), 1, "there")
    layer = net.model.get_submodule("1")
    assert layer.momentum == 0.3
    assert torch.equal(layer.running_var, torch.ones(4).double())
    assert not net.training
    assert not layer.training


def test_layers_without_running_statistics_of_batches_are_left_alone() -> None:
    torch.manual_seed(3)
    model = nn.Sequential(
        nn.Conv1d(1, 2, 1),
        nn.InstanceNorm1d(2, track_running_stats=True),
        nn.BatchNorm1d(2, track_running_stats=False),
        nn.GroupNorm(1, 2),
    )
    model(torch.randn(4, 1, 5))  # gathers statistics of instances
    net = GaussianNetwork(model).eval()
    gathered = net.model.get_submodule("1").running_mean.clone()
    assert gathered.abs().sum() > 0
    assert reestimate_batchnorm(net, source([torch.randn(4, 1, 5)]).endless(), 2, "here") == 0
    assert torch.equal(net.model.get_submodule("1").running_mean, gathered)


def test_a_batchnorm_that_no_batch_comes_through_keeps_its_statistics() -> None:
    class Branches(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.main = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
            self.helper = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))

        def forward(self, x: Tensor) -> Tensor:
            return self.main(x) + self.helper(x) if self.training else self.main(x)

    torch.manual_seed(4)
    model = Branches()
    model(torch.randn(8, 2) + 3)
    net = GaussianNetwork(model)
    helper = {k: v.clone() for k, v in net.model.get_submodule("helper.1").state_dict().items()}
    assert reestimate_batchnorm(net, source([torch.randn(8, 2)]).endless(), 2, "here") == 1
    after = net.model.get_submodule("helper.1").state_dict()
    assert all(torch.equal(helper[name], after[name]) for name in helper)
    assert int(net.model.get_submodule("main.1").num_batches_tracked) == 2


# Steps and seeds


@pytest.mark.parametrize(
    ("epochs", "length", "steps"),
    [
        (0.05, 391, 20),
        (0.05, 20, 1),
        (0.05, 1, 1),
        (3, 391, 1173),
        (0, 391, 0),
        (0.1, 30, 3),
        (0.7, 10, 7),
        (1.5, 3, 5),
    ],
)
def test_steps_are_rounded_up_and_forgive_rounding(epochs: float, length: int, steps: int) -> None:
    assert steps_in(epochs, length) == steps


@given(st.integers(0, 1000), st.integers(1, 1000))
@settings(deadline=None, max_examples=50)
def test_parts_of_an_epoch_are_whole_steps_where_they_should_be(part: int, length: int) -> None:
    assert steps_in(part / length, length) == part


def states() -> tuple[Any, ...]:
    kind, keys, position, has_gauss, cached = np.random.get_state()
    return torch.get_rng_state().tolist(), random.getstate(), kind, keys.tolist(), position, has_gauss, cached


def draws() -> tuple[float, ...]:
    return torch.rand(()).item(), random.random(), float(np.random.rand()), torch.randn(()).item()


def test_a_seeded_block_repeats_itself_and_leaves_every_random_state_as_it_was() -> None:
    before = states()
    with seeded(7, CPU):
        first = draws()
    assert states() == before
    draws()
    between = states()
    with seeded(7, CPU):
        assert draws() == first
    with seeded(8, CPU):
        assert all(a != b for a, b in zip(draws(), first, strict=True))
    assert states() == between


def test_a_seeded_block_that_fails_leaves_everything_as_it_was() -> None:
    before = states()
    flags = torch.backends.cudnn.deterministic, torch.backends.cudnn.benchmark

    def fail() -> None:
        with seeded(2**63 - 1, CPU):
            draws()
            assert torch.backends.cudnn.deterministic
            assert not torch.backends.cudnn.benchmark
            raise KeyError

    with pytest.raises(KeyError):
        fail()
    assert states() == before
    assert (torch.backends.cudnn.deterministic, torch.backends.cudnn.benchmark) == flags


def test_scores_in_float32_are_of_float32_in_full_and_the_users_choice_comes_back() -> None:
    """TF32 gives a few images in ten thousand another class, and a file other figures on a GPU."""
    flags: list[str] = []
    cudnn, cuda = torch.backends.cudnn, torch.backends.cuda

    class Watched(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            flags.extend((cudnn.conv.fp32_precision, cuda.matmul.fp32_precision))
            return super().forward(x)

    source = Source("data", [(torch.zeros(2, 4), torch.zeros(2, dtype=torch.int64))], torch.device("cpu"))
    before = cudnn.conv.fp32_precision, cuda.matmul.fp32_precision
    for precision in (Precision.FP32, Precision.BF16):
        evaluate(Watched(4, 3), source, Objective(F.cross_entropy), None, precision)
    assert flags == ["ieee", "ieee", *before]
    assert (cudnn.conv.fp32_precision, cuda.matmul.fp32_precision) == before


# A teacher and the labels, both


def test_a_blend_of_divergence_and_labels_by_hand() -> None:
    class Fixed(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return torch.tensor([[0.0, 0.0]])

    output = torch.log(torch.tensor([[0.25, 0.75]]))
    batch = Batch((torch.zeros(1, 1),), {}, torch.tensor([0]))
    # sum p log(p / q) for p = 1/2, 1/2 and q = 1/4, 3/4; the label's own -log(1/4)
    taught, labelled = 0.5 * math.log(2) + 0.5 * math.log(2 / 3), math.log(4)
    for share in (0.0, 0.25, 1.0):
        blend = Objective(F.cross_entropy, Fixed(), divergence, share)
        expected = share * taught + (1 - share) * labelled
        assert blend.of_output(output, batch, "here").item() == pytest.approx(expected, rel=1e-5)
    unlabelled = Batch(batch.args, {}, None)
    assert Objective(F.cross_entropy, Fixed(), divergence).of_output(output, unlabelled, "here") > 0
    with pytest.raises(DataError, match="here has no target"):
        Objective(F.cross_entropy, Fixed(), divergence, 0.5).of_output(output, unlabelled, "here")


# The curvature of the loss


def fisher(net: GaussianNetwork, loader: Iterable[Any], count: int, loss_fn: Any) -> Tensor:
    batches = source(loader).endless()
    where = "the curvature"
    return diagonal_fisher(net, net.free_mu, batches, count, Objective(loss_fn), Precision.FP32, where)


def test_the_fisher_of_a_line_by_hand() -> None:
    """y = w x + b, loss mean (y - t)^2: a batch's gradient is 2 mean((y - t) x) and 2 mean(y - t)."""
    model = nn.Linear(1, 1)
    with torch.no_grad():
        model.weight.fill_(2.0)
        model.bias.fill_(1.0)
    # y - t is 1 and 3 for x of 1 and 2, then -1 for x of 3: gradients (7, 4) of two, (-6, -2) of one.
    data = [
        (torch.tensor([[1.0], [2.0]]), torch.tensor([[2.0], [2.0]])),
        (torch.tensor([[3.0]]), torch.tensor([[8.0]])),
    ]
    net = GaussianNetwork(model)
    assert fisher(net, data, 2, F.mse_loss).tolist() == [(2 * 49 + 36) / 2, (2 * 16 + 4) / 2]
    assert fisher(net, data, 1, F.mse_loss).tolist() == [2 * 49, 2 * 16]
    # more batches than the loader has: it begins again
    assert fisher(net, data, 3, F.mse_loss).tolist() == pytest.approx([(4 * 49 + 36) / 3, (4 * 16 + 4) / 3])


def test_the_fisher_is_of_the_network_as_it_came_and_leaves_it_so() -> None:
    model = nn.Sequential(
        nn.Conv2d(1, 3, 3), nn.BatchNorm2d(3), nn.Dropout(0.5), nn.Flatten(), nn.Linear(12, 4)
    )
    data = [(torch.randn(8, 1, 4, 4), torch.randint(0, 4, (8,))) for _ in range(3)]
    net = GaussianNetwork(model, Config().override({"posterior.init": "constant"})).train()
    state = {name: value.clone() for name, value in net.state_dict().items() if isinstance(value, Tensor)}
    with torch.no_grad():  # as a run calls it
        found = fisher(net, data, 3, F.cross_entropy)
    assert net.training
    assert net.model[1].training
    assert net.free_mu.grad is None
    assert all(torch.equal(net.state_dict()[name], value) for name, value in state.items())
    expected = torch.zeros_like(found)
    model.eval()
    for x, y in data:
        model.zero_grad()
        F.cross_entropy(model(x), y).backward()
        pieces = [p.grad.flatten() for name, p in model.named_parameters() if not name.startswith("1.")]
        expected += 8 * torch.cat(pieces).square() / 3
    torch.testing.assert_close(found, expected)


def test_the_fisher_of_noise_is_its_curvature() -> None:
    """Where targets are the network's own and Gaussian noise of variance 1/2, the Fisher is the Hessian."""
    torch.manual_seed(1)
    x = torch.randn(20_000, 3, dtype=torch.float64) * torch.tensor([0.5, 1.0, 2.0], dtype=torch.float64)
    model = nn.Linear(3, 1, bias=False).double()
    with torch.no_grad():
        y = model(x) + torch.randn(20_000, 1, dtype=torch.float64) * math.sqrt(0.5)
    net = GaussianNetwork(model)
    hessian = 2 * x.square().mean(0)  # of mean (y - w x)^2
    for size in (1, 10):
        data = list(zip(x.split(size), y.split(size), strict=True))
        found = fisher(net, data, len(data), F.mse_loss)
        # 2000 squares of normal numbers and more: their mean is right to 1 / sqrt(1000), times three
        torch.testing.assert_close(found, hessian, rtol=0.1, atol=0)


def test_a_loss_without_gradient_has_no_curvature() -> None:
    net = GaussianNetwork(nn.Linear(2, 1))
    data = [(torch.randn(4, 2), torch.randn(4, 1))]
    with pytest.raises(DataError, match="the curvature, batch 1: the loss has no gradient"):
        fisher(net, data, 1, lambda output, target: output.detach().mean())


def test_statistics_are_as_they_were_after_an_error_in_the_middle() -> None:
    """The first batch is gathered from, the second cannot be taken."""
    torch.manual_seed(0)
    net = GaussianNetwork(nn.Sequential(nn.Linear(6, 4), nn.BatchNorm1d(4), nn.Linear(4, 3)), Config())
    before = {name: buffer.clone() for name, buffer in net.model[1].named_buffers()}
    wrong = iter([Batch((torch.randn(8, 6),), {}, None), Batch((torch.randn(8, 5),), {}, None)])
    with pytest.raises(DataError, match="here: the model cannot take inputs"):
        reestimate_batchnorm(net, wrong, 2, "here")
    assert all(torch.equal(buffer, before[name]) for name, buffer in net.model[1].named_buffers())
    assert net.model[1].momentum == 0.1


# The moving average


def test_the_network_has_the_average_of_its_steps_in_the_end() -> None:
    data = [(torch.randn(8, 3), torch.randn(8, 2)) for _ in range(4)]
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2))
    config = sigma_learns()
    one, other = GaussianNetwork(model, config), GaussianNetwork(model, config)
    seen: list[dict[str, Tensor]] = []

    def numbers(net: GaussianNetwork) -> dict[str, Tensor]:
        named = (*net.named_parameters(), *net.named_buffers())
        return {name: value.detach().clone() for name, value in named if value.is_floating_point()}

    def after_step(_: Any) -> None:
        seen.append(numbers(one))

    batches = source(data).endless()
    kept = numbers(one)
    options: dict[str, Any] = {"where": "here", "seed": 3}
    objective = Objective(F.mse_loss)
    fit(one, batches, 30, objective, PLAIN, optimizer=sgd(one, PLAIN), after_step=after_step, **options)
    averaged = TrainingConfig(momentum=0.0, weight_decay=0.0, learning_rate=0.1, average=0.6)
    batches = source(data).endless()
    fit(other, batches, 30, objective, averaged, optimizer=sgd(other, averaged), **options)
    for step, now in enumerate(seen, 1):
        decay = min(0.6, step / (step + 9))
        kept = {name: decay * kept[name] + (1 - decay) * value for name, value in now.items()}
    found = numbers(other)
    moved = [name for name in found if not torch.allclose(found[name], seen[-1][name])]
    assert {"free_mu", "model.1.weight", "model.1.running_mean"} <= {*moved}
    for name, value in found.items():
        assert torch.allclose(value, kept[name], atol=1e-6), name


def test_a_run_fixes_what_the_average_says_and_others_than_rounds_have_none() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 3))
    data = [(torch.randn(8, 6), torch.randint(0, 3, (8,))) for _ in range(4)]
    short = Config().override({"schedule.fractions": [0.5, 1.0], "training.learning_rate": 0.1})
    plain = compress(model, data, data, short)
    found = compress(model, data, data, short.override({"training.average": 0.9}))
    assert found.rounds[0].loss == plain.rounds[0].loss  # the steps themselves are the same
    assert not torch.equal(found.compressed.values(), plain.compressed.values())
    lsq = short.override({"method": "lsq", "training.average": 0.9})
    with pytest.raises(ConfigError, match=r"training.average is 0.9, and method lsq does not fix in rounds"):
        compress(model, data, data, lsq)
