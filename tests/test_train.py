"""The fit loop, evaluation and BatchNorm re-estimation against values computed by hand."""

from __future__ import annotations

import copy
import itertools
import math
from collections.abc import Iterable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn import functional as F

from pwfn import Config, FlatSGD, GaussianNetwork, compress
from pwfn.bayes.batches import Source, is_out_of_memory
from pwfn.bayes.objective import Objective
from pwfn.bayes.train import fit, steps_in
from pwfn.config import Precision, TrainingConfig
from pwfn.errors import DataError, DivergedError, TooLargeError
from pwfn.evaluate.score import accuracy, mean_scores

CPU = torch.device("cpu")
PLAIN = TrainingConfig(weight_decay=0.0, learning_rate=0.1)


def sigma_learns(**posterior: Any) -> Config:
    """The paper's sigma, which learns, with these settings of it."""
    given = {f"posterior.{name}": value for name, value in {"init": "powers", **posterior}.items()}
    return Config().override({**given, "training.sigma_learning_rate": 0.1})


@pytest.fixture(autouse=True)
def _same_random_state_for_every_test() -> None:
    torch.manual_seed(0)


def source(loader: Iterable[Any], name: str = "train_loader") -> Source:
    return Source(name, loader, CPU)


def sgd(net: GaussianNetwork, config: TrainingConfig, momentum: float = 0.0) -> torch.optim.SGD:
    sigma_lr = config.sigma_learning_rate
    if sigma_lr is None:
        sigma_lr = 0.0 if net.settings.training.sigma_learning_rate is None else config.learning_rate
    groups = net.parameter_groups(
        lr=config.learning_rate, sigma_lr=sigma_lr, weight_decay=config.weight_decay
    )
    return torch.optim.SGD(groups, momentum=momentum)


def train(
    net: GaussianNetwork,
    loader: Iterable[Any],
    steps: int,
    loss_fn: Any,
    config: TrainingConfig,
    momentum: float = 0.0,
) -> float:
    return fit(
        net,
        source(loader).endless(),
        steps,
        Objective(loss_fn),
        config,
        optimizer=sgd(net, config, momentum),
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
    config = sigma_learns(alpha=alpha, init="constant")
    net = GaussianNetwork(model, config)
    mu, sigma = net.free_mu.detach().clone(), net.free_sigma.detach().clone()
    x = torch.tensor([[1e6, -2e6, 3e6]], dtype=torch.float64)
    training = TrainingConfig(weight_decay=0.0, learning_rate=0.1, clip_norm=clip_norm)
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
        training = TrainingConfig(weight_decay=0.0, learning_rate=0.1, clip_norm=clip_norm)
        train(net, [(x, torch.zeros(1))], 1, sum_of_outputs, training)
        torch.testing.assert_close(net.free_mu.detach(), mu - 0.1 * x.reshape(-1), rtol=1e-14, atol=0)


def test_the_clip_counts_the_uncompressed_parameters_too() -> None:
    """LayerNorm's bias has gradient 1 an output: of the norm of all three kinds, each gets its part."""
    model = nn.Sequential(nn.Linear(2, 2, bias=False), nn.LayerNorm(2, elementwise_affine=True)).double()
    net = GaussianNetwork(model, sigma_learns(alpha=0))
    bias_before = model[1].bias.detach().clone()
    x = torch.tensor([[1.0, 2.0]], dtype=torch.float64)
    training = TrainingConfig(weight_decay=0.0, learning_rate=1.0, clip_norm=0.01)
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
    config = TrainingConfig(weight_decay=0.5, learning_rate=0.1)
    nothing = [(torch.ones(1, 3, dtype=torch.float64), torch.zeros(1))]
    train(net, nothing, 2, lambda output, target: 0 * output.sum(), config, momentum=0.9)
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
    config = sigma_learns(init="constant")
    net = GaussianNetwork(nn.Linear(2, 1).double(), config)
    mu = net.free_mu.detach().clone()
    training = TrainingConfig(weight_decay=0.0, learning_rate=0.0, sigma_learning_rate=2.0)
    nothing = [(torch.ones(1, 2, dtype=torch.float64), torch.zeros(1))]
    train(net, nothing, 3, lambda output, target: 0 * output.sum(), training)
    assert torch.equal(net.free_mu.detach(), mu)
    expected = torch.full((3,), 1e-3 + 3 * 2.0 * 2**-11, dtype=torch.float64)
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
    mean_scores(net, source(data), Objective(loss_fn), None, Precision(precision))
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
            "schedule.epochs_per_round": [1.0, 1.5],
            "training.learning_rate": 0.05,
            "training.clip_norm": None,
            "posterior.init": "rms",
            "posterior.rms_fraction": 1e-12,
            "posterior.noise_on_fixed": False,
            "fixing.grid_exponent": 7,
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
            "schedule.epochs_per_round": [1.2],
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

    train(net, data, 30, loss_fn, config, momentum=0.9)
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
            after_step=lambda _, snapshot: snapshots.append(snapshot()),  # noqa: B023
        )
        assert [s.scaler["scale"] for s in snapshots] == [32768, 16384, 8192, 4096, 2048, 2048][:steps]
        assert moves != all(torch.equal(p, q) for p, q in zip(net.parameters(), before, strict=True))


def test_a_loss_that_is_no_number_ends_sixteen_bits_too() -> None:
    net = GaussianNetwork(nn.Linear(2, 1))
    data = [(torch.ones(1, 2), torch.zeros(1))]
    config = TrainingConfig(precision=Precision.FP16)
    with pytest.raises(DivergedError, match="no longer finite at step 1 of 3"):
        train(net, data, 3, lambda output, _: output.sum() * math.nan, config)


# Losses


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
    scores = mean_scores(
        net, source(data), Objective(lambda o, t: 0 * o[0] + 3), lambda o, t: o.new_ones(1, 1)
    )
    assert (scores.loss, scores.metric) == (3.0, 1.0)


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


# The learning rate


@pytest.mark.parametrize("kind", ["plain", "flat"])
def test_the_cosine_falls_to_zero_and_a_resumed_phase_has_the_same_rates(kind: str) -> None:
    data = [(torch.randn(8, 3), torch.randint(0, 2, (8,)))]
    config = TrainingConfig(learning_rate=0.5, scheduler="cosine")
    rates: list[float] = []
    states: list[Any] = []

    def run(net: GaussianNetwork, start: Any = None, stop: int = 99) -> None:
        def after_step(step: int, snapshot: Any) -> None:
            rates.append(optimizer.param_groups[0]["lr"])
            if step == stop:
                states.append((snapshot(), copy.deepcopy(net.state_dict())))

        optimizer = FlatSGD(net, lr=0.5, seed=1) if kind == "flat" else sgd(net, config)
        fit(
            net,
            source(data).endless(),
            8,
            Objective(F.cross_entropy),
            config,
            optimizer=optimizer,
            where="here",
            seed=1,
            start=start,
            after_step=after_step,
        )

    model = nn.Linear(3, 2)
    net = GaussianNetwork(model)
    run(net, stop=3)
    expected = [0.25 * (1 + math.cos(math.pi * step / 8)) for step in range(8)]
    assert rates == pytest.approx(expected, rel=1e-12)
    again = GaussianNetwork(model)
    again.load_state_dict(states[0][1])
    rates.clear()
    run(again, start=states[0][0])
    assert rates == pytest.approx(expected[3:], rel=1e-12)
    assert torch.equal(again.mu, net.mu)


def test_a_phase_resumed_with_another_learning_rate_uses_it() -> None:
    data = [(torch.ones(1, 2), torch.zeros(1))]
    states: list[Any] = []
    net = GaussianNetwork(nn.Linear(2, 1))
    objective = Objective(sum_of_outputs)
    for rate in (0.5, 0.125):
        config = TrainingConfig(learning_rate=rate, weight_decay=0.0, clip_norm=None)
        optimizer = sgd(net, config)
        fit(
            net,
            source(data).endless(),
            2,
            objective,
            config,
            optimizer=optimizer,
            where="here",
            start=states[0] if states else None,
            after_step=lambda step, snapshot: states.append(snapshot()),
        )
        assert optimizer.param_groups[0]["lr"] == rate


# Steps


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


def test_a_batch_too_large_to_score_says_what_fits() -> None:
    with pytest.raises(TooLargeError) as caught:
        mean_scores(Fed(20), source(SIXTY_FOUR, "val_loader"), Objective(F.cross_entropy), accuracy)
    assert str(caught.value) == (
        "val_loader, batch 1: out of memory with inputs (64, 3) float32: a batch of 16 fits"
    )
    with pytest.raises(TooLargeError, match=NOT_EVEN_ONE):
        mean_scores(Fed(0), source(SIXTY_FOUR, "val_loader"), Objective(F.cross_entropy), accuracy)
