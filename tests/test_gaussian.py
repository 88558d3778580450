"""Gaussian weights: where sigma starts, what a forward pass draws, gradients, and that fixed is fixed."""

from __future__ import annotations

import copy
import io
import itertools
import math
import pickle
import shutil
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from fractions import Fraction
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn import functional as F

from pwfn import (
    PAPER_FRACTIONS,
    Config,
    ConfigError,
    GaussianNetwork,
    LayoutError,
    WeightError,
    initial_sigma,
)
from pwfn.zoo import data

FLOOR = 2.0**-30
PAPER_SIGMA: dict[str, Any] = {
    "posterior.init": "powers",
    "training.sigma_learning_rate": 1e-3,
    "fixing.grid_exponent": 7,
}
"""Sigma as in the paper, which most of this file is about; otherwise as recommended."""


# --- sigma before training ------------------------------------------------------------------------


def test_every_parameter_has_its_own_quartile() -> None:
    model = nn.Sequential(nn.Linear(5, 4), nn.Linear(4, 3))
    net = GaussianNetwork(model, config())
    expected = [initial_sigma(parameter).flatten() for parameter in model.parameters()]
    assert torch.equal(net.sigma, torch.cat(expected))


def test_no_prior_is_one_constant() -> None:
    net = GaussianNetwork(nn.Linear(5, 4), config(init="constant"))
    assert torch.equal(net.sigma, torch.full((24,), 1e-3))


def test_until_it_is_known_what_is_tolerated_sigma_is_a_third_of_the_root_mean_square() -> None:
    model = nn.Linear(2, 2)
    with torch.no_grad():
        model.weight.copy_(torch.tensor([[1.0, -2.0], [0.0, 2.0]]))
        model.bias.copy_(torch.tensor([3.0, -6.0]))
    settings = Config().override({"posterior.tolerance": 0.1})
    net = GaussianNetwork(model, settings)  # the mean square is (1 + 4 + 0 + 4 + 9 + 36) / 6 = 9
    assert net.sigma.tolist() == pytest.approx([0.99] * 6, rel=1e-6)
    assert net.penalty().item() == 0
    assert net.parameter_groups(lr=0.1)[1]["lr"] == 0
    half = settings.override({"posterior.rms_fraction": 0.5})
    assert GaussianNetwork(model, half).sigma.tolist() == [1.5] * 6
    net.tolerate(lambda: net.sigma[0].item())
    assert net.sigma.tolist() == pytest.approx([0.1] * 6, rel=0.01)  # the tolerance


# --- a network whose output is its weights -------------------------------------------------------

SIDE = 4


def config(**posterior: Any) -> Config:
    return Config().override(
        {**PAPER_SIGMA, **{f"posterior.{name}": value for name, value in posterior.items()}}
    )


def readable(
    side: int = SIDE, settings: Config | None = None, seed: int = 0, sigma: float | None = None
) -> GaussianNetwork:
    """A float64 linear layer: given the unit vectors it puts out its weights (see ``drawn``)."""
    layer = nn.Linear(side, side, bias=False, dtype=torch.float64)
    with torch.no_grad():
        layer.weight.copy_(torch.randn(side, side, generator=torch.Generator().manual_seed(seed)))
    net = GaussianNetwork(layer, settings or config())
    if sigma is not None:
        net.free_sigma.data.fill_(sigma)
    return net


def drawn(net: GaussianNetwork) -> Tensor:
    """The weights of one forward pass, in the order of the vector; multiplying by 0 and 1 is exact."""
    side = math.isqrt(net.layout.size)
    return net(torch.eye(side, dtype=torch.float64)).T.flatten()


def noise_of(seed: int, size: int) -> Tensor:
    return torch.randn(size, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def seeded_generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


# --- the forward pass ----------------------------------------------------------------------------


def test_training_mode_draws_anew_each_pass() -> None:
    net = readable().train()
    first, second = drawn(net), drawn(net)
    assert bool((first != second).all())
    assert bool((first != net.mu).all())


def test_evaluation_mode_uses_the_means() -> None:
    net = readable().eval()
    assert torch.equal(drawn(net), net.mu)
    assert torch.equal(drawn(net), drawn(net))


def test_a_draw_is_mu_plus_sigma_times_noise() -> None:
    net = readable()
    expected = net.mu + net.sigma * noise_of(3, SIDE**2)
    for mode in (True, False):
        net.train(mode)
        with net.sampling(generator=seeded_generator(3)):
            torch.testing.assert_close(drawn(net), expected, rtol=1e-15, atol=0)


def test_draws_have_the_mean_and_spread_they_say() -> None:
    net = readable(sigma=0.5).train()
    torch.manual_seed(0)
    count = 2000
    draws = torch.stack([drawn(net).detach() for _ in range(count)])
    standard = (draws - net.mu.detach()) / 0.5
    # Five standard errors of a mean, of a variance and of a covariance of unit normals.
    assert standard.mean(0).abs().max() < 5 / math.sqrt(count)
    covariance = standard.T @ standard / count
    assert (covariance.diagonal() - 1).abs().max() < 5 * math.sqrt(2 / count)
    assert (covariance - covariance.diagonal().diag()).abs().max() < 5 / math.sqrt(count)


def test_sampling_in_evaluation_mode() -> None:
    net = readable().eval()
    with net.sampling():
        assert bool((drawn(net) != drawn(net)).all())
    assert torch.equal(drawn(net), net.mu)


def test_sampling_with_a_generator_repeats_and_leaves_the_global_one_alone() -> None:
    net = readable().eval()
    state = torch.get_rng_state()
    with net.sampling(generator=seeded_generator(5)):
        first, second = drawn(net), drawn(net)
    with net.sampling(generator=seeded_generator(5)):
        assert torch.equal(drawn(net), first)
        assert torch.equal(drawn(net), second)
    assert not torch.equal(first, second)
    assert torch.equal(torch.get_rng_state(), state)


def test_sampling_off_in_training_mode() -> None:
    net = readable().train()
    with net.sampling(False):
        assert torch.equal(drawn(net), net.mu)
        drawn(net).sum().backward()
    assert torch.equal(net.free_mu.grad, torch.ones(SIDE**2))
    assert net.free_sigma.grad is None
    assert not torch.equal(drawn(net), net.mu)


def test_sampling_blocks_nest_and_end_with_an_error() -> None:
    net = readable().eval()
    with net.sampling():
        with net.sampling(False):
            assert torch.equal(drawn(net), net.mu)
        assert not torch.equal(drawn(net), net.mu)
    with pytest.raises(ZeroDivisionError), net.sampling():
        raise ZeroDivisionError
    assert torch.equal(drawn(net), net.mu)


@pytest.mark.parametrize("noisy", [True, False])
def test_noise_on_fixed_weights(noisy: bool) -> None:
    net = readable(settings=config(noise_on_fixed=noisy), sigma=0.3)
    net.fix(0.5)
    assert bool((net.sigma[net.fixed] > 0).any())
    spread = net.fixed & (net.sigma > 0)
    net.train()
    draw = drawn(net)
    assert bool((draw[~net.fixed] != net.mu[~net.fixed]).all())
    assert bool((draw[spread] != net.mu[spread]).all()) is noisy
    assert torch.equal(draw[spread], net.mu[spread]) is not noisy
    net.eval()
    with net.sampling():  # outside training the setting has no say: a draw is a draw
        assert bool((drawn(net)[spread] != net.mu[spread]).all())


def test_arguments_reach_the_model() -> None:
    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(3, 2)

        def forward(self, x: Tensor, *, scale: float = 1.0) -> dict[str, Tensor]:
            return {"out": scale * self.layer(x)}

    model = Scaled()
    net = GaussianNetwork(model).eval()
    x = torch.randn(2, 3)
    assert torch.equal(net(x, scale=3.0)["out"], model(x, scale=3.0)["out"])
    assert torch.equal(net(x=x)["out"], model(x)["out"])


# --- gradients -----------------------------------------------------------------------------------


def test_gradients_are_those_of_the_formulas() -> None:
    """d/dmu = g and d/dsigma = g·eps, with g = 2(w - a) at the sampled weight."""
    net = readable().train()
    goal, noise = noise_of(1, SIDE**2), noise_of(2, SIDE**2)
    with net.sampling(generator=seeded_generator(2)):
        (drawn(net) - goal).square().sum().backward()
    gradient = 2 * (net.mu + net.sigma * noise - goal).detach()
    torch.testing.assert_close(net.free_mu.grad, gradient, rtol=1e-12, atol=1e-14)
    torch.testing.assert_close(net.free_sigma.grad, gradient * noise, rtol=1e-12, atol=1e-14)


def test_gradients_through_a_network_are_those_of_the_sampled_weights() -> None:
    """The same formulas where g comes from the plain model holding the sampled weights."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(1, 3, 3), nn.Tanh(), nn.Flatten(), nn.Linear(12, 2)).double()
    x, noise = torch.randn(5, 1, 4, 4, dtype=torch.float64), noise_of(2, 3 * 9 + 3 + 24 + 2)
    net = GaussianNetwork(model)
    with net.sampling(generator=seeded_generator(2)):
        net(x).square().sum().backward()
    plain = copy.deepcopy(model)
    plain.load_state_dict(net.layout.views((net.mu + net.sigma * noise).detach()))
    plain(x).square().sum().backward()
    gradient = torch.cat([parameter.grad.flatten() for parameter in plain.parameters()])
    torch.testing.assert_close(net.free_mu.grad, gradient, rtol=1e-12, atol=1e-14)
    torch.testing.assert_close(net.free_sigma.grad, gradient * noise, rtol=1e-12, atol=1e-14)


def test_gradients_are_finite_differences_under_the_same_noise() -> None:
    net = readable(sigma=0.3).eval()
    goal = noise_of(1, SIDE**2)

    def loss() -> Tensor:
        with net.sampling(generator=seeded_generator(7)):
            return (drawn(net) - goal).square().sum()

    loss().backward()
    step = 1e-4  # central differences of a quadratic have no truncation error at any step
    for parameter in (net.free_mu, net.free_sigma):
        for i in range(parameter.numel()):
            with torch.no_grad():
                parameter[i] += step
                above = loss()
                parameter[i] -= 2 * step
                below = loss()
                parameter[i] += step
            difference = (above - below).item() / (2 * step)
            assert parameter.grad[i].item() == pytest.approx(difference, rel=1e-8, abs=1e-9)


def test_gradients_of_the_expected_quadratic_loss() -> None:
    """E[(w - a)²] = (mu - a)² + sigma², so the mean gradients are 2(mu - a) and 2·sigma."""
    net = readable(sigma=0.5).train()
    goal, count = noise_of(1, SIDE**2), 3000
    torch.manual_seed(0)
    total = torch.zeros((), dtype=torch.float64)
    for _ in range(count):
        loss = (drawn(net) - goal).square().sum()
        loss.backward()
        total += loss.detach()
    offset, sigma = (net.mu - goal).detach(), net.sigma.detach()
    # Standard deviations of one draw: of the loss, of 2(w - a), of 2(w - a)·eps.
    loss_spread = float((4 * offset**2 * sigma**2 + 2 * sigma**4).sum().sqrt())
    expected_loss = float((offset**2 + sigma**2).sum())
    assert abs(total.item() / count - expected_loss) < 5 * loss_spread / math.sqrt(count)
    mu_error = (net.free_mu.grad / count - 2 * offset).abs()
    assert bool((mu_error < 5 * 2 * sigma / math.sqrt(count)).all())
    sigma_error = (net.free_sigma.grad / count - 2 * sigma).abs()
    spread = 2 * (offset**2 + 2 * sigma**2).sqrt()
    assert bool((sigma_error < 5 * spread / math.sqrt(count)).all())
    # The bounds are narrow enough to tell 2·sigma from nothing.
    assert float((5 * spread / math.sqrt(count)).min()) < 1.0 == 2 * sigma[0].item()


def test_gradient_of_fixed_weights_is_zero() -> None:
    net = readable().train()
    net.fix(0.5)
    (drawn(net).square().sum() + net.penalty()).backward()
    for parameter in (net.free_mu, net.free_sigma):
        assert torch.equal(parameter.grad == 0, net.fixed)


@pytest.mark.parametrize("way", ["one backward", "two backwards"])
def test_gradient_accumulation(way: str) -> None:
    def gradients(*seeds: int) -> tuple[Tensor, Tensor]:
        net = readable().train()
        losses = []
        for seed in seeds:
            with net.sampling(generator=seeded_generator(seed)):
                losses.append(drawn(net).square().sum() + net.penalty())
            if way == "two backwards":
                losses.pop().backward()
        if losses:
            sum(losses).backward()
        return net.free_mu.grad, net.free_sigma.grad

    for both, first, second in zip(gradients(1, 2), gradients(1), gradients(2), strict=True):
        torch.testing.assert_close(both, first + second, rtol=1e-12, atol=0)


def test_sigma_may_stand_in_a_loss_of_ones_own() -> None:
    """The projection onto the floor, made in the forward pass, must not spoil a graph that is open."""
    net = readable().train()
    own = net.sigma.square().sum() + net.penalty()
    with net.sampling(generator=seeded_generator(2)):
        (drawn(net).sum() + own).backward()
    expected = noise_of(2, SIDE**2) + 2 * net.sigma.detach() - 2**-11
    torch.testing.assert_close(net.free_sigma.grad, expected, rtol=1e-12, atol=1e-15)


# --- the regulariser -----------------------------------------------------------------------------


def test_penalty_by_hand() -> None:
    net = readable(2, config(alpha=0.25, cap=0.5))
    with torch.no_grad():
        net.free_sigma.copy_(torch.tensor([0.125, 0.5, 0.75, 0.25]))
    assert net.penalty().item() == 0.25 * (0.375 + 0 + 0 + 0.25)
    net.penalty().backward()
    assert net.free_sigma.grad.tolist() == [-0.25, 0.0, 0.0, -0.25]
    assert net.free_mu.grad is None


def test_penalty_is_over_the_free_weights_only() -> None:
    net = readable(settings=config(alpha=0.25, cap=0.5))
    net.fix(0.5)
    short = (0.5 - net.sigma[~net.fixed]).clamp_min(0)
    torch.testing.assert_close(net.penalty(), 0.25 * short.sum())
    net.penalty().backward()
    expected = torch.where(net.fixed, 0.0, -0.25).double()
    assert torch.equal(net.free_sigma.grad, expected)
    net.fix(1.0)
    assert net.penalty().item() == 0


def test_penalty_of_the_paper() -> None:
    net = GaussianNetwork(nn.Linear(9, 7), Config.preset("paper"))
    expected = 2**-11 * (0.05 - net.sigma.double()).sum()
    torch.testing.assert_close(net.penalty().double(), expected, rtol=1e-6, atol=0)


def test_sigma_settles_where_the_two_gradients_balance() -> None:
    """With curvature h the expected loss is h/2·sigma² - alpha·sigma + …: least at sigma = alpha / h."""
    alpha, curvature = 0.02, 0.5
    for start in (0.01, 0.09):
        net = readable(30, config(alpha=alpha, cap=1.0), sigma=start).train()
        goal = net.mu.detach().clone()
        optimizer = torch.optim.SGD(net.parameter_groups(lr=0.02, sigma_lr=0.02))
        torch.manual_seed(0)
        tail = []
        for step in range(900):
            optimizer.zero_grad()
            loss = curvature / 2 * (drawn(net) - goal).square().sum() + net.penalty()
            loss.backward()
            optimizer.step()
            if step >= 700:
                tail.append(net.sigma.mean().item())
        # Of the start's distance e^-(0.02 · 0.5 · 700) = 0.1 % is left.
        assert sum(tail) / len(tail) == pytest.approx(alpha / curvature, rel=0.02)


def digits() -> tuple[Tensor, Tensor]:
    train, _ = data.digits()
    return train.images, train.targets


def test_sigma_collapses_without_the_regulariser_and_grows_with_it() -> None:
    """The paper's claim, with its numbers, on a small convolutional network with BatchNorm."""
    torch.manual_seed(0)
    images, targets = digits()
    model = nn.Sequential(
        nn.Conv2d(1, 8, 3, padding=1, bias=False),
        nn.BatchNorm2d(8),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(8, 16, 3, padding=1, bias=False),
        nn.BatchNorm2d(16),
        nn.ReLU(),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(16, 10),
    )

    def train(net: nn.Module, optimizer: torch.optim.Optimizer, steps: int) -> float:
        for _ in range(steps):
            batch = torch.randint(0, len(images), (128,))
            optimizer.zero_grad()
            loss = F.cross_entropy(net(images[batch]), targets[batch])
            loss.backward()
            if isinstance(net, GaussianNetwork):
                nn.utils.clip_grad_norm_(net.parameters(), 1.0)
                net.penalty().backward()
            optimizer.step()
        return loss.item()

    pretrained = train(model, torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9), 150)
    assert pretrained < 0.5
    growth = {}
    for alpha in (0.0, 2**-11):
        torch.manual_seed(1)
        net = GaussianNetwork(model, config(alpha=alpha)).train()
        before = net.sigma.median().item()
        groups = net.parameter_groups(lr=1e-3, weight_decay=1e-4)
        train(net, torch.optim.SGD(groups, momentum=0.9), 500)
        growth[alpha] = net.sigma.median().item() / before
    assert growth[0.0] < 0.85
    assert growth[2**-11] > 1.4


# --- training: fixed is fixed, and sigma has a floor ---------------------------------------------


def small_net(seed: int = 0, settings: Config | None = None) -> GaussianNetwork:
    torch.manual_seed(seed)
    model = nn.Sequential(
        nn.Conv2d(1, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(64, 3)
    )
    return GaussianNetwork(model, settings or config()).train()


def train(
    net: nn.Module, optimizer: torch.optim.Optimizer, steps: int, inner: GaussianNetwork | None = None
) -> None:
    images = torch.randn(8, 1, 4, 4, generator=seeded_generator(0))
    targets = torch.arange(8) % 3
    gaussian = inner or net

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = F.cross_entropy(net(images), targets) + gaussian.penalty()
        loss.backward()
        return loss

    for _ in range(steps):
        optimizer.step(closure)


OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9, weight_decay=0.1),
    "nesterov": lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9, weight_decay=0.1, nesterov=True),
    "adam": lambda p: torch.optim.Adam(p, lr=0.01, weight_decay=0.1, amsgrad=True),
    "adamw": lambda p: torch.optim.AdamW(p, lr=0.01, weight_decay=0.5),
    "adamw, fused": lambda p: torch.optim.AdamW(p, lr=0.01, weight_decay=0.5, fused=True),
    "rmsprop": lambda p: torch.optim.RMSprop(p, lr=0.01, momentum=0.9, weight_decay=0.1),
    "adagrad": lambda p: torch.optim.Adagrad(p, lr=0.05, weight_decay=0.1),
    "rprop": lambda p: torch.optim.Rprop(p, lr=0.01),
    "lbfgs": lambda p: torch.optim.LBFGS(p, lr=0.1, max_iter=4),
}


@pytest.mark.parametrize("make", OPTIMIZERS.values(), ids=OPTIMIZERS.keys())
@pytest.mark.parametrize("kept", [True, False], ids=["one optimiser", "afresh each round"])
def test_fixed_weights_do_not_move(make: Callable[[Any], torch.optim.Optimizer], kept: bool) -> None:
    net = small_net()
    optimizer = make(net.parameters())
    train(net, optimizer, 3)  # momentum before anything is fixed
    for fraction in PAPER_FRACTIONS:
        net.fix(fraction)
        if not kept:
            optimizer = make(net.parameters())
        fixed = net.fixed.clone()
        mu, sigma = net.mu.detach().clone(), net.sigma.detach().clone()
        trained = net.free_mu.detach().clone(), net.free_sigma.detach().clone()
        train(net, optimizer, 3)
        assert torch.equal(net.fixed, fixed)
        assert torch.equal(net.mu[fixed], mu[fixed])
        assert torch.equal(net.sigma[fixed], sigma[fixed])
        if fraction < 0.99:  # the very last may happen to have no gradient
            for parameter, before in zip((net.free_mu, net.free_sigma), trained, strict=True):
                assert not torch.equal(parameter[~fixed], before[~fixed])


def test_weights_fixed_once_keep_their_centre_in_later_rounds() -> None:
    net = small_net()
    optimizer = OPTIMIZERS["adam"](net.parameters())
    centres = torch.full((net.layout.size,), math.nan)
    spreads = centres.clone()
    for fraction in PAPER_FRACTIONS:
        train(net, optimizer, 2)
        net.fix(fraction)
        known = ~centres.isnan()
        assert bool(net.fixed[known].all())
        assert torch.equal(net.mu[known], centres[known])
        assert torch.equal(net.sigma[known], spreads[known])
        centres[net.fixed], spreads[net.fixed] = net.mu[net.fixed].detach(), net.sigma[net.fixed].detach()
        assert int(net.fixed.sum()) == math.ceil(net.layout.size * fraction - 1e-9)
    assert torch.equal(net.finish().values(), centres)


def test_what_lies_behind_a_fixed_weight_has_no_effect() -> None:
    """Not even NaN in the parameter behind it, from whatever an optimiser made of it."""
    net = small_net()
    net.fix(0.6)
    spoilt = copy.deepcopy(net)
    with torch.no_grad():
        spoilt.free_mu[spoilt.fixed] = math.nan
        spoilt.free_sigma[spoilt.fixed] = math.nan
    images = torch.randn(8, 1, 4, 4)
    for one in (net, spoilt):
        with one.sampling(generator=seeded_generator(4)):
            (one(images).square().sum() + one.penalty()).backward()
    assert torch.equal(net.free_mu.grad, spoilt.free_mu.grad)
    assert torch.equal(net.free_sigma.grad, spoilt.free_sigma.grad)
    assert torch.equal(net.penalty(), spoilt.penalty())
    net.fix(1.0), spoilt.fix(1.0)
    assert torch.equal(net.mu, spoilt.mu)
    assert torch.equal(net.sigma, spoilt.sigma)


@pytest.mark.parametrize("lr", [1.0, 1e3, 1e6])
def test_sigma_has_a_floor_at_any_learning_rate(lr: float) -> None:
    net = readable(settings=config(alpha=0)).train()
    optimizer = torch.optim.SGD([net.free_sigma], lr=lr)
    torch.manual_seed(0)
    below = 0
    for _ in range(5):
        optimizer.zero_grad()
        (drawn(net) - net.mu.detach()).square().sum().backward()
        assert bool((net.free_sigma >= FLOOR).all())  # the draw was made with at least that
        optimizer.step()
        below += int((net.free_sigma < FLOOR).sum())
        assert net.sigma.min().item() >= FLOOR
    assert below > 0


def test_sigma_below_the_floor_is_at_the_floor_in_every_use() -> None:
    net = readable().eval()
    with torch.no_grad():
        net.free_sigma.fill_(-5.0)
    assert torch.equal(net.sigma, torch.full((SIDE**2,), FLOOR, dtype=torch.float64))
    expected = net.mu + FLOOR * noise_of(3, SIDE**2)
    for mode in (False, True):
        net.train(mode)
        with net.sampling(generator=seeded_generator(3)):
            assert torch.equal(drawn(net), expected)


def test_sigma_comes_back_from_the_floor() -> None:
    """A step that overshot is undone by the next: the gradient is not cut off below the floor."""
    net = readable(settings=config(alpha=0.01)).train()
    with torch.no_grad():
        net.free_sigma.fill_(-5.0)
    optimizer = torch.optim.SGD([net.free_sigma], lr=1.0)
    with net.sampling(False):
        drawn(net)
    net.penalty().backward()
    optimizer.step()
    assert torch.equal(net.sigma, torch.full((SIDE**2,), FLOOR + 0.01, dtype=torch.float64))


def test_parameter_groups() -> None:
    net = small_net()
    others, sigma = net.parameter_groups(lr=0.1, weight_decay=0.2)
    assert (others["lr"], others["weight_decay"]) == (0.1, 0.2)
    assert (sigma["lr"], sigma["weight_decay"]) == (1e-3, 0.0)  # the setting
    assert [id(p) for p in sigma["params"]] == [id(net.free_sigma)]
    listed = [id(p) for p in (*others["params"], *sigma["params"])]
    assert sorted(listed) == sorted(id(p) for p in net.parameters())
    assert net.parameter_groups(lr=0.1, sigma_lr=0.3)[1]["lr"] == 0.3
    assert net.parameter_groups(lr=0.1, sigma_lr=0.0)[1]["lr"] == 0.0


def test_a_sigma_that_is_not_trained_has_no_rate_and_no_regulariser() -> None:
    net = small_net(settings=config().override({"training.sigma_learning_rate": None}))
    assert [group["lr"] for group in net.parameter_groups(lr=0.1)] == [0.1, 0.0]
    assert net.penalty().item() == 0


def test_trained_beside_the_vector_is_what_the_layout_left_out() -> None:
    net = small_net()
    names = [name for name, _ in net.named_parameters()]
    assert names == ["free_mu", "free_sigma", "model.1.weight", "model.1.bias"]
    before = net.model[1].weight.detach().clone()
    train(net, OPTIMIZERS["sgd"](net.parameters()), 2)
    assert not torch.equal(net.model[1].weight, before)


# --- autocast and torch.compile ------------------------------------------------------------------


def test_autocast() -> None:
    net = small_net()
    model = nn.Sequential(nn.Linear(5, 4), nn.ReLU(), nn.Linear(4, 3))
    plain = GaussianNetwork(model).eval()
    x = torch.randn(6, 5)
    with torch.autocast("cpu", torch.bfloat16):
        assert plain(x).dtype == torch.bfloat16
        assert torch.equal(plain(x), model(x))
        assert not torch.equal(plain.train()(x), plain(x))  # no cast weight is kept from pass to pass
    net.fix(0.5)
    mu = net.mu.detach().clone()
    optimizer = OPTIMIZERS["adamw"](net.parameters())
    images, targets = torch.randn(8, 1, 4, 4), torch.arange(8) % 3
    for _ in range(3):
        optimizer.zero_grad()
        with torch.autocast("cpu", torch.bfloat16):
            loss = F.cross_entropy(net(images), targets)
        loss.backward()
        net.penalty().backward()
        assert net.free_mu.grad.dtype == torch.float32
        assert bool((net.free_mu.grad[~net.fixed] != 0).any())
        assert bool((net.free_sigma.grad[~net.fixed] != 0).all())
        optimizer.step()
    assert torch.equal(net.mu[net.fixed], mu[net.fixed])
    assert not torch.equal(net.mu[~net.fixed], mu[~net.fixed])


@pytest.fixture
def fresh_compiler() -> Iterator[None]:
    torch.compiler.reset()
    yield
    torch.compiler.reset()


def assert_works_compiled(net: GaussianNetwork, backend: str, rtol: float) -> None:
    """Noise, gradients, fixing and both modes, through one compiled callable in one graph."""
    compiled = torch.compile(net, backend=backend, fullgraph=True)
    images = torch.randn(8, 1, 4, 4)
    first, second = compiled(images), compiled(images)
    assert not torch.equal(first, second)
    (first.square().sum() + second.square().sum() + net.penalty()).backward()
    gradients = [net.free_mu.grad, net.free_sigma.grad]
    assert all(bool((gradient != 0).all()) for gradient in gradients)
    net.fix(0.5)  # between two calls of what was compiled before
    net.zero_grad()
    (compiled(images).square().sum() + net.penalty()).backward()
    for gradient in (net.free_mu.grad, net.free_sigma.grad):
        assert torch.equal(gradient == 0, net.fixed)
    mu, sigma = net.mu.detach().clone(), net.sigma.detach().clone()
    train(compiled, OPTIMIZERS["adamw"](net.parameters()), 3, inner=net)
    assert torch.equal(net.mu[net.fixed], mu[net.fixed])
    assert torch.equal(net.sigma[net.fixed], sigma[net.fixed])
    assert not torch.equal(net.mu[~net.fixed], mu[~net.fixed])
    net.eval()
    with torch.no_grad():
        torch.testing.assert_close(compiled(images), net(images), rtol=rtol, atol=rtol)
        with net.sampling():
            assert not torch.equal(compiled(images), compiled(images))


# torch.compile imports parts of torch that still use TorchScript and say so.
@pytest.mark.filterwarnings("ignore:`torch.jit.*is deprecated:DeprecationWarning")
@pytest.mark.usefixtures("fresh_compiler")
class TestCompiled:
    def test_traced(self) -> None:
        assert_works_compiled(small_net(), "aot_eager", rtol=0)

    @pytest.mark.skipif(not any(map(shutil.which, ("g++", "clang++", "c++"))), reason="needs a C++ compiler")
    def test_generated_code(self) -> None:
        # Another order of summation: a few roundings of float32.
        assert_works_compiled(small_net(), "inductor", rtol=1e-5)

    def test_traced_gradients_are_the_eager_ones(self) -> None:
        net = small_net()
        images = torch.randn(8, 1, 4, 4)
        gradients = []
        for one in (net, torch.compile(net, backend="aot_eager", fullgraph=True)):
            net.zero_grad()
            with net.sampling(False):
                one(images).square().sum().backward()
            gradients.append(net.free_mu.grad)
        assert torch.equal(*gradients)


# --- copies and state ----------------------------------------------------------------------------


def restored(net: GaussianNetwork, into: GaussianNetwork) -> GaussianNetwork:
    """Through a file and the safe loader."""
    file = io.BytesIO()
    torch.save(net.state_dict(), file)
    file.seek(0)
    into.load_state_dict(torch.load(file, weights_only=True))
    return into


def assert_same_state(one: GaussianNetwork, other: GaussianNetwork) -> None:
    mine, theirs = one.state_dict(), other.state_dict()
    assert mine.keys() == theirs.keys()
    for name, value in mine.items():
        if isinstance(value, Tensor):
            assert torch.equal(value, theirs[name]), name
    assert repr(one.records) == repr(other.records)  # text, for the nan of a sweep


def test_state_round_trip_and_the_same_future() -> None:
    # A sweep threshold that the first round reaches puts a nan among the records.
    net = small_net(settings=config().override({"fixing.sweep": 1.0}))
    train(net, OPTIMIZERS["sgd"](net.parameters()), 3)
    net.fix(0.3), net.fix(0.6)
    assert any(math.isnan(step.centre) for record in net.records for step in record.steps)
    twin = restored(net, into=small_net(seed=99, settings=net.settings))
    assert_same_state(net, twin)
    assert twin.records[0] is not net.records[0]
    assert type(twin.records[0]) is type(net.records[0])
    for one in (net, twin):
        torch.manual_seed(7)
        train(one, OPTIMIZERS["adam"](one.parameters()), 3)
        one.fix(0.9)
        train(one, OPTIMIZERS["adam"](one.parameters()), 3)
        one.fix(1.0)
    assert_same_state(net, twin)
    assert len(net.records) == 4
    assert torch.equal(net.finish().values(), twin.finish().values())


def test_deepcopy_is_independent() -> None:
    net = small_net()
    net.fix(0.4)
    state = copy.deepcopy(net.state_dict())
    twin = copy.deepcopy(net)
    assert_same_state(net, twin)
    train(twin, OPTIMIZERS["sgd"](twin.parameters()), 2)
    twin.fix(1.0)
    assert len(net.records) == 1
    for name, value in net.state_dict().items():
        if isinstance(value, Tensor):
            assert torch.equal(value, state[name]), name


def test_pickle() -> None:
    net = small_net().eval()
    net.fix(0.4)
    twin = pickle.loads(pickle.dumps(net))
    assert_same_state(net, twin)
    images = torch.randn(2, 1, 4, 4)
    assert torch.equal(twin(images), net(images))


def test_state_of_another_network_is_refused() -> None:
    with pytest.raises(RuntimeError, match="size mismatch for free_mu"):
        readable(3).load_state_dict(readable(4).state_dict())


# --- the user's model ----------------------------------------------------------------------------


def test_users_model_is_left_as_it_was() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(1, 4, 3, padding=1), nn.BatchNorm2d(4), nn.Flatten(), nn.Linear(64, 3))
    model[1].weight.requires_grad_(False)
    model[1].eval()
    state = copy.deepcopy(model.state_dict())
    parameters = {name: (id(p), p.requires_grad) for name, p in model.named_parameters()}
    modes = [module.training for module in model.modules()]
    net = GaussianNetwork(model).train()
    train(net, OPTIMIZERS["sgd"]([p for p in net.parameters() if p.requires_grad]), 3)
    net.fix(1.0)
    net.finish()
    assert all(torch.equal(value, state[name]) for name, value in model.state_dict().items())
    assert {name: (id(p), p.requires_grad) for name, p in model.named_parameters()} == parameters
    assert [module.training for module in model.modules()] == modes
    assert all(p.grad is None for p in model.parameters())


@pytest.mark.parametrize("training", [True, False])
def test_the_copy_has_the_models_modes(training: bool) -> None:
    """Also where a layer's differs from the model's, as a frozen BatchNorm's does."""
    model = nn.Sequential(nn.Conv2d(1, 2, 1), nn.BatchNorm2d(2), nn.Dropout()).train(training)
    model[1].train(not training)
    net = GaussianNetwork(model)
    assert net.training is training
    assert [m.training for m in net.model.modules()] == [m.training for m in model.modules()]


def test_batchnorm_of_the_copy_learns_in_training_mode_only() -> None:
    net = small_net()
    norm = net.model[1]
    images = torch.randn(8, 1, 4, 4)
    net.eval()(images)
    assert (int(norm.num_batches_tracked), norm.running_mean.tolist()) == (0, [0.0] * 4)
    net.train()
    with net.sampling(False):
        net(images)
    assert int(norm.num_batches_tracked) == 1
    weight, bias = (net.layout.views(net.mu)[f"0.{leaf}"] for leaf in ("weight", "bias"))
    expected = 0.1 * F.conv2d(images, weight, bias, padding=1).mean((0, 2, 3))
    torch.testing.assert_close(norm.running_mean, expected.detach())


def test_model_that_cannot_be_copied() -> None:
    model = nn.Linear(2, 2)
    model.cached = model.weight * 2  # part of a graph
    with pytest.raises(LayoutError, match=r"^Linear cannot be copied \(.*\): remove .*prune\.remove"):
        GaussianNetwork(model)


@pytest.mark.parametrize("wrong", [{"alpha": 0}, "paper", Config().posterior])
def test_config_of_the_wrong_kind(wrong: Any) -> None:
    with pytest.raises(ConfigError, match=r"^config is a \w+: allowed is a pwfn\.Config$"):
        GaussianNetwork(nn.Linear(2, 2), wrong)


# --- weights that are not numbers ----------------------------------------------------------------


@pytest.mark.parametrize(("value", "text"), [(math.nan, "nan"), (math.inf, "inf"), (-math.inf, "-inf")])
def test_weight_that_is_not_finite(value: float, text: str) -> None:
    model = nn.Sequential(nn.Linear(3, 3), nn.Conv2d(1, 2, 3))
    with torch.no_grad():
        model[1].weight[1, 0, 2, 1] = value
        model[1].bias[0] = value
    with pytest.raises(WeightError) as caught:
        GaussianNetwork(model)
    sentence = str(caught.value)
    assert sentence.startswith(f"weight 1.weight[1, 0, 2, 1] is {text} (one of 2 that are not finite)")
    assert "\n" not in sentence


@pytest.mark.parametrize(("parameter", "what"), [("free_mu", "mean of"), ("free_sigma", "sigma of")])
def test_training_that_ran_into_nan_loses_nothing_that_was_fixed(parameter: str, what: str) -> None:
    net = small_net()
    net.fix(0.5)
    state = copy.deepcopy({name: value for name, value in net.state_dict().items() if "fixed" in name})
    position = int(torch.nonzero(~net.fixed)[3])
    with torch.no_grad():
        getattr(net, parameter)[position] = math.nan
    with pytest.raises(WeightError) as caught:
        net.fix(1.0)
    assert str(caught.value).startswith(f"{what} {net.layout.locate(position)} is nan")
    assert len(net.records) == 1
    assert all(torch.equal(net.state_dict()[name], value) for name, value in state.items())


@pytest.mark.parametrize("fraction", [1.2, -0.1, math.nan, "half"])
def test_fraction_out_of_range(fraction: Any) -> None:
    net = small_net()
    with pytest.raises(WeightError, match="allowed is a number from 0 to 1"):
        net.fix(fraction)
    assert net.records == []
    assert not net.fixed.any()


# --- fixing and finishing ------------------------------------------------------------------------


def test_record_of_a_fixing() -> None:
    net = small_net()
    before = net.mu.detach().clone()
    record = net.fix(0.4)
    size = net.layout.size
    assert net.records == [record]
    assert (record.fraction, record.fixed) == (0.4, math.ceil(0.4 * size)) == (0.4, int(net.fixed.sum()))
    assert sum(step.count for step in record.steps) == record.fixed
    assert sum(move.count for move in record.moves) == record.fixed
    assert [move.centre for move in record.moves] == net.mu[net.fixed].unique().tolist()
    for move in record.moves:
        at = net.fixed & (net.mu == move.centre)
        moved = ((before[at].double() - move.centre) / before[at].double()).abs()
        assert (move.count, move.from_zero) == (int(at.sum()), 0)
        assert move.mean == pytest.approx(float(moved.mean()))
        assert move.largest == pytest.approx(float(moved.max()))


def test_fraction_already_reached_changes_nothing() -> None:
    net = small_net()
    net.fix(0.6)
    mu, sigma = net.mu.detach().clone(), net.sigma.detach().clone()
    for fraction in (0.6, 0.2, 0.0):
        record = net.fix(fraction)
        assert (record.steps, record.moves, record.fixed) == ((), (), net.records[0].fixed)
    assert torch.equal(net.mu, mu)
    assert torch.equal(net.sigma, sigma)


def test_finish_needs_every_weight_fixed() -> None:
    net = readable()
    with pytest.raises(WeightError, match=r"^16 of 16 weights are still free: call fix\(1\.0\) first$"):
        net.finish()
    net.fix(0.75)
    with pytest.raises(WeightError, match=r"^4 of 16 weights are still free"):
        net.finish()
    net.fix(1.0)
    assert net.finish().layout is net.layout


def signed_sums(powers: list[Fraction], most: int) -> set[Fraction]:
    """All sums of at most ``most`` distinct powers, each with either sign, by enumeration."""
    sums = {Fraction(0)}
    for count in range(1, most + 1):
        for chosen in itertools.combinations(powers, count):
            for signs in itertools.product((1, -1), repeat=count):
                sums.add(sum((s * p for s, p in zip(signs, chosen, strict=True)), Fraction(0)))
    return sums


@pytest.mark.parametrize("rule", ["mean", "each", "nearest"])
@pytest.mark.parametrize("sweep", [None, 4.0])
def test_every_value_is_a_sum_of_few_powers_of_two(rule: str, sweep: float | None) -> None:
    changes = {"fixing.rule": rule, "fixing.sweep": sweep, "fixing.grid_exponent": 6}
    net = small_net(settings=config().override(changes))
    with torch.no_grad():
        net.free_mu.mul_(6)
    for fraction in (0.3, 0.7, 1.0):
        train(net, OPTIMIZERS["sgd"](net.parameters()), 1)
        net.fix(fraction)
    values = {Fraction(value) for value in net.finish().codebook.tolist()}
    powers = [Fraction(2) ** exponent for exponent in range(-6, 4)]
    assert max(abs(value) for value in values) < 8
    assert values <= signed_sums(powers, 4)
    if sweep is not None:  # the finer candidates are used, not only allowed
        assert not values <= signed_sums(powers, 3)


def test_float64_weights_stay_float64() -> None:
    net = readable()
    assert net.mu.dtype == net.sigma.dtype == torch.float64
    net.fix(1.0)
    done = net.finish()
    assert done.codebook.dtype == done.sigma.dtype == torch.float64


@settings(max_examples=25, deadline=None)
@given(st.integers(1, 9), st.integers(1, 9), st.floats(0, 1), st.integers(0, 2**31))
def test_exactly_the_asked_share_is_fixed(rows: int, columns: int, fraction: float, seed: int) -> None:
    torch.manual_seed(seed)
    net = GaussianNetwork(nn.Linear(rows, columns))
    record = net.fix(fraction)
    expected = math.ceil(Fraction(fraction) * net.layout.size - Fraction(1, 10**9))
    assert record.fixed == int(net.fixed.sum()) == max(expected, 0)


def test_values_are_those_a_narrow_model_can_hold() -> None:
    model = nn.Linear(2, 1, bias=False).bfloat16()
    with torch.no_grad():
        model.weight.copy_(torch.tensor([[4.0, 0.0]]))
    net = GaussianNetwork(model)
    with torch.no_grad():
        net.free_mu[1] = 3.0078125  # 2 + 1 + 2^-7: three powers of two, but nine bits
    net.fix(1.0)
    compressed = net.finish()
    assert torch.equal(compressed.values(), compressed.dense_state_dict()["weight"].float().reshape(-1))


def test_threads_may_share_a_network_in_evaluation_mode() -> None:
    class Slow(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            time.sleep(0.002)  # another thread begins or ends its pass meanwhile
            return super().forward(x)

    net = GaussianNetwork(nn.Sequential(Slow(4, 4), Slow(4, 3))).eval()
    inputs = torch.randn(24, 2, 4)
    with torch.no_grad():
        wanted = [net(x) for x in inputs]
        with ThreadPoolExecutor(4) as threads:
            found = list(threads.map(net, inputs))
    assert all(map(torch.equal, found, wanted))
    assert torch.equal(copy.deepcopy(net)(inputs[0]), wanted[0])  # which has a lock of its own
