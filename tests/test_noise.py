"""The loss under noise on the weights, and the noise that a run starts with."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch
from cases import numbers
from torch import Tensor, nn
from torch.nn import functional as F

from pwfn import Config, GaussianNetwork, compress
from pwfn.bayes.batches import Batch, Source
from pwfn.bayes.distributed import Distributed
from pwfn.bayes.objective import Objective
from pwfn.bayes.sigma import SIGMA_FLOOR, noisy_loss, probe
from pwfn.progress import Progress

CPU = torch.device("cpu")
TASK = Objective(F.cross_entropy)
DATA = [(numbers(32, 6, seed=i), numbers(32, 3, seed=100 + i).argmax(1)) for i in range(4)]
BATCHES = [Batch.of(pair, CPU) for pair in DATA]


def network() -> Any:
    """With everything that has a mode: BatchNorm counts batches, dropout draws."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Dropout(0.5), nn.Linear(16, 3))


def loss_at(sigma: float, batches: Sequence[Batch] = BATCHES, seed: int = 0) -> float:
    net = GaussianNetwork(network(), Config(seed=seed))
    nn.init.constant_(net.free_sigma, sigma)
    return noisy_loss(net, batches, TASK, Distributed(CPU))


def test_without_noise_it_is_the_mean_loss_with_batch_statistics_and_no_dropout() -> None:
    plain = network().train()
    plain[3].eval()
    with torch.no_grad():
        losses = [float(F.cross_entropy(plain(x), y)) for x, y in DATA[:3]]
    assert loss_at(SIGMA_FLOOR, BATCHES[:3]) == pytest.approx(sum(losses) / 3, rel=1e-5)


def test_noise_raises_the_loss_and_depends_on_the_seed_alone() -> None:
    sigmas = (SIGMA_FLOOR, 0.2, 0.5, 1.0, 2.0)
    losses = [loss_at(sigma) for sigma in sigmas]
    assert losses == sorted(losses)
    assert losses == [loss_at(sigma) for sigma in sigmas]
    assert loss_at(1.0, seed=1) != losses[3]


@pytest.mark.parametrize("mode", [True, False])
def test_the_network_and_the_random_state_do_not_change(mode: bool) -> None:
    net = GaussianNetwork(network()).train(mode)
    net.model[1].train(not mode)
    modes = [module.training for module in net.modules()]
    before = {name: value.clone() for name, value in net.named_buffers()} | {
        name: value.clone() for name, value in net.named_parameters()
    }
    assert {"free_sigma", "model.1.running_mean", "model.1.num_batches_tracked"} <= before.keys()
    dice = torch.get_rng_state()
    noisy_loss(net, BATCHES, TASK, Distributed(CPU))
    after = {**dict(net.named_buffers()), **dict(net.named_parameters())}
    assert all(torch.equal(value, after[name]) for name, value in before.items())
    assert [module.training for module in net.modules()] == modes
    assert torch.equal(torch.get_rng_state(), dice)


class Shuffled:
    """A loader with another order in every pass, which counts its batches."""

    given = 0

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        for number in torch.randperm(4).tolist():
            self.given += 1
            yield DATA[number]


def test_a_probe_reads_its_batches_once_and_only_when_asked() -> None:
    loader, net = Shuffled(), GaussianNetwork(network())
    probed = probe(net, Source("train_loader", loader, CPU), TASK, Distributed(CPU))
    assert loader.given == 0
    assert probed.loss() == probed.loss()
    assert loader.given == 8


def test_fixed_weights_keep_their_sigma() -> None:
    net = GaussianNetwork(nn.Linear(30, 20), Config().override({"posterior.tolerance": 0.04}))
    net.fix(0.5)
    fixed, before = net.fixed, net.sigma.detach().clone()
    net.tolerate(lambda: float(net.sigma[~fixed].square().mean()))
    assert torch.equal(net.sigma[fixed], before[fixed])
    assert net.sigma[~fixed].detach().numpy() == pytest.approx(0.2, rel=0.01)


def starting_sigma(tolerance: float, data: Any = DATA, **options: Any) -> Tensor:
    """Sigma after the first step of a whole run."""
    seen: list[Tensor] = []

    def keep(progress: Callable[[], Progress], ends: bool) -> None:
        if not seen:
            network = progress().network
            assert network is not None
            seen.append(network["free_sigma"])

    settings = {"schedule.fractions": [1.0], "schedule.epochs_per_round": [0.5], "finish.polish_epochs": 0.0}
    config = Config().override({**settings, "posterior.tolerance": tolerance})
    compress(network(), data, None, config, keep=keep, **options)
    return seen[0]


@pytest.mark.parametrize("tolerance", [0.01, 0.1, 1.0])
def test_a_run_starts_with_the_noise_that_raises_the_loss_by_the_tolerance(tolerance: float) -> None:
    (sigma,) = starting_sigma(tolerance).unique().tolist()
    allowed = loss_at(SIGMA_FLOOR, 2 * BATCHES) + tolerance
    assert loss_at(sigma, 2 * BATCHES) <= allowed < loss_at(1.02 * sigma, 2 * BATCHES)


def test_a_distilled_run_needs_no_labels() -> None:
    unlabelled = starting_sigma(0.1, [x for x, _ in DATA], distill=True)
    assert torch.equal(unlabelled, starting_sigma(0.1, distill=True))
    assert not torch.equal(unlabelled, starting_sigma(0.1))
