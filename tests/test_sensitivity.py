"""What is found out before a run begins: the noise that a network tolerates."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from pwfn.bayes.pwfn import Pwfn
from torch import Tensor, nn
from torch.nn import functional as F

from pwfn import Config, compress
from pwfn.bayes.batches import Source
from pwfn.bayes.distributed import Distributed
from pwfn.bayes.gaussian import SIGMA_FLOOR, GaussianNetwork
from pwfn.bayes.objective import Objective
from pwfn.bayes.sensitivity import Looking
from pwfn.errors import WeightError

CPU = torch.device("cpu")
SETTINGS: dict[str, Any] = {
    "posterior.init": "tolerance",
    "posterior.tolerance": 0.2,
    "posterior.learn_sigma": False,
    "posterior.tolerance_batches": 3,
    "training.distill": False,
    "training.distill_share": 1.0,
}


def network() -> nn.Sequential:
    """With all that has a mode: BatchNorm, which counts batches, and dropout, which draws."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Dropout(0.5), nn.Linear(16, 3))


def batches(count: int = 4) -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(1)
    return [
        (torch.randn(32, 6, generator=generator), torch.randint(0, 3, (32,), generator=generator))
        for _ in range(count)
    ]


def looking(changes: dict[str, Any] | None = None) -> tuple[Pwfn, Looking]:
    config = Config().override({**SETTINGS, **(changes or {})})
    task = Objective(F.cross_entropy)
    source = Source("train_loader", batches(), CPU)
    return Pwfn(network(), config), Looking(source, task, task, config, Distributed(CPU))


def with_sigma(net: Pwfn, sigma: float) -> None:
    with torch.no_grad():
        net.free_sigma.fill_(sigma)


def test_the_loss_is_that_of_the_draws_normalised_by_batch_without_dropout() -> None:
    net, found = looking()
    with_sigma(net, SIGMA_FLOOR)
    plain = network()
    plain.train()
    plain[3].eval()
    with torch.no_grad():
        losses = [float(F.cross_entropy(plain(x), y)) for x, y in batches()[:3]]
    assert found.look(net).loss(3) == pytest.approx(sum(losses) / 3, rel=1e-5)


def test_noise_raises_it_and_the_same_noise_is_drawn_at_every_call() -> None:
    net, found = looking()
    values = []
    for sigma in (SIGMA_FLOOR, 0.2, 0.5, 1.0, 2.0):
        with_sigma(net, sigma)
        values.append(found.look(net).loss(4))
        assert found.look(net).loss(4) == values[-1]
    assert values == sorted(values)
    other, elsewhere = Pwfn(network(), Config(seed=1).override(SETTINGS)), looking()[1]
    elsewhere = Looking(
        elsewhere.train, elsewhere.task, elsewhere.scored, other.config, elsewhere.distributed
    )
    with_sigma(other, 1.0)
    assert elsewhere.look(other).loss(4) != values[3]


def tensors_of(net: nn.Module) -> dict[str, Tensor]:
    return {**dict(net.named_parameters()), **dict(net.named_buffers())}


@pytest.mark.parametrize("mode", [True, False])
def test_it_leaves_the_network_as_it_was(mode: bool) -> None:
    net, found = looking()
    net.train(mode)
    net.model[1].train(not mode)  # somebody's choice
    before = {name: tensor.clone() for name, tensor in tensors_of(net).items()}
    state = torch.get_rng_state()
    found.look(net).loss(2)
    after = tensors_of(net)
    assert {"free_sigma", "model.1.running_mean"} <= set(before)
    assert all(torch.equal(tensor, after[name]) for name, tensor in before.items())
    assert net.model[1].training is (not mode)
    assert net.model[3].training is mode
    assert torch.equal(torch.get_rng_state(), state)


def starting_sigma(changes: dict[str, Any], data: Any = None, **options: Any) -> Tensor:
    """Of a whole run, after its first step."""
    seen: list[Tensor] = []

    def keep(progress: Any, ends: bool) -> None:
        if not seen:
            seen.append(progress().state["free_sigma"])

    brief = {"schedule.fractions": [1.0], "schedule.warmup_epochs": 1.0, "finish.polish_epochs": 0.0}
    config = Config().override({**SETTINGS, **brief, **changes})
    compress(network(), batches() if data is None else data, None, config, keep=keep, **options)
    return seen[0]


@pytest.mark.parametrize("tolerance", [0.01, 0.1, 1.0])
def test_a_run_starts_at_the_noise_that_raises_the_loss_by_the_tolerance(tolerance: float) -> None:
    sigma = starting_sigma({"posterior.tolerance": tolerance})
    assert sigma.unique().numel() == 1
    net, found = looking()
    with_sigma(net, SIGMA_FLOOR)
    allowed = found.look(net).loss(3) + tolerance
    with_sigma(net, float(sigma[0]))
    assert found.look(net).loss(3) <= allowed
    with_sigma(net, 1.02 * float(sigma[0]))
    assert found.look(net).loss(3) > allowed


def test_a_divergence_in_the_place_of_the_loss_needs_no_labels() -> None:
    inputs = [x for x, _ in batches()]
    unlabelled = starting_sigma({}, inputs, distill=True)
    assert torch.equal(unlabelled, starting_sigma({}, distill=True))
    assert not torch.equal(unlabelled, starting_sigma({}))


class Shuffled:
    """A loader whose order is another every time, and that counts what it gave."""

    def __init__(self) -> None:
        self.given = 0

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        for number in torch.randperm(4).tolist():
            self.given += 1
            yield batches()[number]


def test_the_batches_are_read_once() -> None:
    net, found = looking()
    loader = Shuffled()
    look = replace(found, train=Source("train_loader", loader, CPU)).look(net)
    assert look.loss(3) == look.loss(3)
    assert loader.given == 3
    look.loss(2)
    assert loader.given == 3


def test_a_network_of_zeros_tolerates_nothing_that_could_be_told() -> None:
    net = GaussianNetwork(nn.Linear(3, 2), Config().override(SETTINGS))
    with torch.no_grad():
        net.free_mu.zero_()
    with pytest.raises(WeightError, match="every weight is zero"):
        net.take_tolerated(lambda: 0.0)


def test_a_loss_that_is_lost_counts_as_too_high() -> None:
    net = GaussianNetwork(nn.Linear(3, 2), Config().override({**SETTINGS, "posterior.tolerance": 1.0}))
    net.take_tolerated(lambda: float("nan") if bool(net.sigma[0] > 0.125) else 0.0)
    assert 0.12 < net.sigma[0].item() <= 0.125


def test_sigmas_that_differ_are_scaled_alike() -> None:
    """The loss is the mean square of sigma here: that of the tolerance is 0.04, whatever the shape."""
    settings = {"posterior.tolerance": 0.04, "posterior.learn_sigma": False, "posterior.scaled": True}
    for init in ("powers", "relative", "curvature_root", "constant"):
        torch.manual_seed(0)
        net = GaussianNetwork(nn.Linear(30, 20), Config().override({**settings, "posterior.init": init}))
        if init == "curvature_root":
            net.take_curvature(torch.rand(620))
        before = net.sigma.detach().clone()
        net.take_tolerated(lambda net=net: float(net.sigma.square().mean()))  # type: ignore[misc]  # bound now
        factors = net.sigma / before
        assert factors.max().item() == pytest.approx(factors.min().item(), rel=1e-4)
        assert net.sigma.square().mean().sqrt().item() == pytest.approx(0.2, rel=0.01)


def test_fixed_weights_keep_their_sigma_when_the_others_are_scaled() -> None:
    settings = {"posterior.tolerance": 0.04, "posterior.init": "relative", "posterior.scaled": True}
    net = GaussianNetwork(nn.Linear(30, 20), Config().override(settings))
    net.fix(0.5)
    fixed = net.fixed
    before = net.sigma.detach().clone()
    net.take_tolerated(lambda: float(net.sigma[~fixed].square().mean()))
    assert torch.equal(net.sigma[fixed], before[fixed])
    assert not torch.equal(net.sigma[~fixed], before[~fixed])


@pytest.mark.parametrize("init", ["powers", "curvature_root"])
def test_a_run_scales_what_it_starts_with(init: str) -> None:
    plain = {"posterior.init": init, "posterior.curvature_batches": 2}
    own = starting_sigma(plain)
    scaled = starting_sigma({**plain, "posterior.scaled": True})
    factors = scaled / own
    assert factors.max().item() == pytest.approx(factors.min().item(), rel=1e-3)
    more = starting_sigma({**plain, "posterior.scaled": True, "posterior.tolerance": 0.4})
    assert bool((more > scaled).all())


@pytest.mark.parametrize(
    ("loss", "said"),
    [
        (lambda sigma: math.nan, "the loss is nan without any noise"),
        (lambda sigma: 0.0, "not even noise of eight times the weights' size raises the loss by 0.2"),
        (lambda sigma: float(sigma > 1e-6), "noise of a 256th of the weights' size raises the loss by 0.2"),
    ],
)
def test_where_there_is_no_such_noise_a_sentence_says_so(loss: Any, said: str) -> None:
    net = GaussianNetwork(nn.Linear(3, 2), Config().override(SETTINGS))
    with pytest.raises(WeightError, match=said):
        net.take_tolerated(lambda: loss(net.sigma[0].item()))


def test_sigma_by_the_size_of_the_network() -> None:
    model = network()
    weights = torch.cat([p.detach().flatten() for name, p in model.named_parameters() if name[0] in "04"])
    config = Config().override({"posterior.init": "network", "posterior.network_sigma": 0.25})
    expected = 0.25 * float(weights.double().square().mean().sqrt())
    torch.testing.assert_close(GaussianNetwork(model, config).sigma, torch.full((163,), expected))
