"""The loss under noise on the weights, and the noise that a run starts with."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from cases import numbers
from torch import Tensor, nn
from torch.nn import functional as F

from pwfn import Config, DataError, GaussianNetwork, compress
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


# Losses that are not in nats


class InUnits(nn.Module):
    """A regression whose outputs and targets are in another unit."""

    def __init__(self, model: nn.Module, unit: float) -> None:
        super().__init__()
        self.model, self.unit = model, unit

    def forward(self, x: Tensor) -> Tensor:
        return self.unit * self.model(x)


def regression(unit: float) -> tuple[nn.Module, list[tuple[Tensor, Tensor]]]:
    """A trained network for a smooth function of four numbers with values from 0 to 1, then in the unit."""
    x = numbers(1024, 4)
    y = torch.sigmoid(2 * x[:, :1].sin() + x[:, 1:2] * x[:, 2:3])
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 32), nn.ReLU(), nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 1))
    optimizer = torch.optim.Adam(model.parameters(), 5e-3)
    for _ in range(15):
        for a, b in zip(x.split(32), y.split(32), strict=True):
            optimizer.zero_grad()
            F.mse_loss(model(a), b).backward()
            optimizer.step()
    return InUnits(model, unit).eval(), [(a, unit * b) for a, b in zip(x.split(32), y.split(32), strict=True)]


def share_explained(model: nn.Module, data: list[tuple[Tensor, Tensor]]) -> float:
    """R^2."""
    x, y = (torch.cat(parts) for parts in zip(*data, strict=True))
    with torch.no_grad():
        return 1 - float(F.mse_loss(model(x), y) / y.var(correction=0))


def absolute(output: Tensor, target: Tensor) -> Tensor:
    return (output - target).abs().mean()


_LOSSES = {"squared": F.mse_loss, "absolute": absolute, "smooth": nn.SmoothL1Loss()}


@pytest.mark.parametrize("loss_fn", _LOSSES.values(), ids=_LOSSES)
@pytest.mark.parametrize("distill", [False, True])
def test_the_unit_of_a_regression_does_not_matter(loss_fn: Any, distill: bool) -> None:
    """Without training, which has a learning rate in units of the loss: the same values, bit for bit."""
    still = {"training.learning_rate": 0.0, "training.weight_decay": 0.0, "finish.polish_epochs": 0.0}
    config = Config().override({**still, "schedule.epochs_per_round": [0.01] * 10})
    found = []
    for unit in (2.0**-7, 1.0, 2.0**7):
        model, data = regression(unit)
        result = compress(model, data, config=config, loss_fn=loss_fn, distill=loss_fn if distill else False)
        found.append(result.compressed.values())
    assert torch.equal(found[0], found[1])
    assert torch.equal(found[2], found[1])


def test_the_default_keeps_a_regression_with_small_targets() -> None:
    model, data = regression(1.0)
    before = share_explained(model, data)
    result = compress(model, data, loss_fn=F.mse_loss)
    after = share_explained(result.compressed.apply_to(copy.deepcopy(model)), data)
    assert before > 0.97
    assert after > before - 0.01


def test_the_cost_of_noise_is_an_error_in_standard_deviations() -> None:
    """Of a linear function it is known: noise s on its weights adds ``s^2 |x|^2`` to the variance."""
    model = nn.Linear(200, 1, bias=False)
    net = GaussianNetwork(model)
    x = numbers(4096, 200)
    nn.init.constant_(net.free_sigma, 0.01)
    cost = noisy_loss(net, [Batch.of((x, x[:, :1]), CPU)], Objective(F.mse_loss), Distributed(CPU))
    assert cost == pytest.approx(0.01 * 200**0.5 / float(model.weight.detach().norm()), rel=0.15)


def test_an_output_may_be_an_object_and_one_without_tensors_says_what_to_set() -> None:
    class Odd(nn.Linear):
        wrapped: Any = SimpleNamespace

        def forward(self, x: Tensor) -> Any:
            return self.wrapped(mean=super().forward(x))

    class Hidden:
        __slots__ = ("mean",)

        def __init__(self, mean: Tensor) -> None:
            self.mean = mean

    def loss_fn(output: Any, target: Tensor) -> Tensor:
        return output.mean.square().mean()  # type: ignore[no-any-return]

    model = Odd(6, 3)
    assert compress(model, DATA, loss_fn=loss_fn).compressed.layout.size == 21
    model.wrapped = Hidden
    with pytest.raises(DataError, match=r"posterior\.init"):
        compress(model, DATA, loss_fn=loss_fn)
