"""Flat optimisers: the same steps as plain ones with torch's optimisers, in fewer passes."""

from __future__ import annotations

import copy
import sys
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from pwfn import Config, GaussianNetwork, compress
from pwfn.bayes import kernels
from pwfn.bayes.batches import Batch
from pwfn.bayes.distributed import Distributed
from pwfn.bayes.method import torch_optimizer
from pwfn.bayes.objective import Objective
from pwfn.bayes.optimizer import FlatAdamW, FlatSGD
from pwfn.bayes.train import fit
from pwfn.config import TrainingConfig
from pwfn.errors import ConfigError, WeightError
from pwfn.file.format import dumps
from pwfn.zoo.models import digits_resnet

CPU = torch.device("cpu")
PAPER_SIGMA: dict[str, Any] = {
    "posterior.init": "powers",
    "training.sigma_learning_rate": 1e-3,
    "fixing.grid_exponent": 7,
}
"""Sigma as in the paper: it is trained."""
SETTINGS = Config().override({**PAPER_SIGMA, "posterior.alpha": 0.01, "posterior.cap": 0.02})


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(1, 4, 3, padding=1, bias=False),
        nn.BatchNorm2d(4),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(4 * 16, 3),
    )


def batches() -> list[Batch]:
    generator = torch.Generator().manual_seed(1)
    return [
        Batch(
            (torch.randn(8, 1, 4, 4, generator=generator),),
            {},
            torch.randint(0, 3, (8,), generator=generator),
        )
        for _ in range(6)
    ]


def half_fixed(config: Config = SETTINGS) -> GaussianNetwork:
    net = GaussianNetwork(network(), config).train()
    net.fix(0.5)
    return net


TASK = Objective(F.cross_entropy)
Flat = FlatSGD | FlatAdamW
RATES: dict[str, Any] = {"lr": 0.05, "sigma_lr": 0.01, "weight_decay": 0.1}


def flat(net: GaussianNetwork, kind: type[Any], **options: Any) -> Flat:
    return kind(net, **RATES, seed=7, **options)


def plain(net: GaussianNetwork, kind: type[Any]) -> torch.optim.Optimizer:
    groups = net.parameter_groups(**RATES)
    if kind is FlatAdamW:
        return torch.optim.AdamW(groups)
    return torch.optim.SGD(groups, momentum=0.9)


KINDS = [(FlatSGD, {"momentum": 0.9}), (FlatAdamW, {})]


@pytest.mark.parametrize(("kind", "options"), KINDS)
@pytest.mark.parametrize("clip", [None, 0.05])
@pytest.mark.parametrize("shared", [False, True])
def test_a_flat_optimiser_takes_the_steps_of_torchs(
    kind: type[Any], options: dict[str, Any], clip: float | None, shared: bool
) -> None:
    config = TrainingConfig(clip_norm=clip)
    ours, theirs = half_fixed(), half_fixed()
    if shared:
        ours.share_storage()
    fixed = [vector[ours.fixed].clone() for vector in (ours.mu, ours.sigma)]
    optimizer = flat(ours, kind, clip_norm=clip, **options)
    loss = fit(ours, iter(batches()), 6, TASK, config, optimizer=optimizer, where="here")
    reference = plain(theirs, kind)
    wanted = fit(
        theirs,
        iter(batches()),
        6,
        TASK,
        config,
        optimizer=reference,
        where="here",
        seed=7,
    )
    assert abs(loss - wanted) < 1e-5
    free = ~ours.fixed
    torch.testing.assert_close(ours.mu[free], theirs.mu[free], rtol=0, atol=2e-5)
    torch.testing.assert_close(ours.sigma[free], theirs.sigma[free], rtol=0, atol=2e-5)
    for mine, other in zip(ours.model.parameters(), theirs.model.parameters(), strict=True):
        torch.testing.assert_close(mine, other, rtol=0, atol=2e-5)
    for vector, before in zip((ours.mu, ours.sigma), fixed, strict=True):
        assert torch.equal(vector[ours.fixed], before)  # to the bit


@pytest.mark.parametrize(("kind", "options"), KINDS)
@pytest.mark.parametrize("fused", [True, False])
def test_a_sigma_that_does_not_learn_is_one_without_rate_and_regulariser(
    kind: type[Any], options: dict[str, Any], fused: bool
) -> None:
    """To the bit, clipped too; and sigma stays as it was."""

    def stepped(posterior: dict[str, Any], sigma_lr: float) -> GaussianNetwork:
        net = half_fixed(SETTINGS.override(posterior))
        rates = {**RATES, "sigma_lr": sigma_lr}
        optimizer: torch.optim.Optimizer
        if fused:
            optimizer = kind(net, **rates, seed=7, clip_norm=0.05, **options)
        else:
            groups = net.parameter_groups(**rates)
            adamw = kind is FlatAdamW
            optimizer = torch.optim.AdamW(groups) if adamw else torch.optim.SGD(groups, momentum=0.9)
        seed = None if fused else 7
        config = TrainingConfig(clip_norm=0.05)
        fit(net, iter(batches()), 6, TASK, config, optimizer=optimizer, where="here", seed=seed)
        return net

    frozen = stepped({"training.sigma_learning_rate": None}, 0.0)
    nothing = stepped({"posterior.alpha": 0.0}, 0.0)
    start = half_fixed()
    assert torch.equal(frozen.sigma, start.sigma)
    assert torch.equal(frozen.sigma, nothing.sigma)
    assert torch.equal(frozen.mu, nothing.mu)
    assert not torch.equal(frozen.mu, start.mu)
    for mine, other in zip(frozen.model.parameters(), nothing.model.parameters(), strict=True):
        assert torch.equal(mine, other)


def test_a_whole_run_ends_in_the_same_clusters_with_and_without(monkeypatch: pytest.MonkeyPatch) -> None:
    generator = torch.Generator().manual_seed(0)
    data = [(torch.randn(16, 1, 8, 8, generator=generator), torch.randint(0, 10, (16,))) for _ in range(4)]
    config = Config().override(
        {**PAPER_SIGMA, "schedule.fractions": [0.4, 1.0], "schedule.epochs_per_round": 1.0}
    )
    torch.manual_seed(0)
    model = digits_resnet()
    results = [compress(model, data, None, config)]
    module = sys.modules["pwfn.compress"]
    monkeypatch.setattr(
        module,
        "optimizer_for",
        lambda net, config, seed, distributed: torch_optimizer(net, config),
    )
    results.append(compress(model, data, None, config))
    first, second = (result.rounds for result in results)
    for one, other in zip(first, second, strict=True):
        # Rounding moves a weight in ten thousand across a threshold, not a centre out of the list.
        assert {step.centre for step in one.fix.steps[:3]} == {step.centre for step in other.fix.steps[:3]}
    values = [result.compressed.values() for result in results]
    assert (values[0] == values[1]).double().mean() > 0.999


def test_the_same_seed_gives_the_same_bits() -> None:
    def run() -> Tensor:
        net = half_fixed()
        optimizer = flat(net, FlatSGD, momentum=0.9)
        fit(
            net,
            iter(batches()),
            6,
            TASK,
            TrainingConfig(),
            optimizer=optimizer,
            where="x",
        )
        return net.mu.detach()

    first = run()
    torch.rand(5)  # torch's own random state has no part in it
    assert torch.equal(first, run())


@pytest.mark.parametrize(("kind", "options"), KINDS)
def test_a_state_that_was_kept_goes_on_as_if_never_stopped(kind: type[Any], options: dict[str, Any]) -> None:
    def steps(optimizer: Flat, some: list[Batch]) -> None:
        for batch in some:
            with optimizer.drawn():
                F.cross_entropy(optimizer.net(*batch.args), batch.target).backward()
            optimizer.step()
            optimizer.zero_grad()

    whole = flat(half_fixed(), kind, **options)
    steps(whole, batches())
    first = flat(half_fixed(), kind, **options)
    steps(first, batches()[:3])
    kept = copy.deepcopy(first.state_dict())
    net = half_fixed()
    net.load_state_dict(first.net.state_dict())
    second = flat(net, kind, **options)
    second.param_groups[0]["seed"] = 99  # the state has its own
    second.load_state_dict(kept)
    steps(second, batches()[3:])
    assert torch.equal(second.net.mu, whole.net.mu)
    assert torch.equal(second.net.sigma, whole.net.sigma)


@pytest.mark.parametrize(("kind", "options"), KINDS)
def test_only_free_weights_have_state(kind: type[Any], options: dict[str, Any]) -> None:
    net = GaussianNetwork(network(), SETTINGS).train()
    for fraction in (0.0, 0.5, 1.0):
        if fraction:
            net.fix(fraction)
        free = int((~net.fixed).sum())
        optimizer = flat(net, kind, **options)
        take_step(optimizer)
        state = [*optimizer.state[net.free_mu].values(), *optimizer.state[net.free_sigma].values()]
        state = [vector for vector in state if vector.dim()]
        assert {vector.numel() for vector in state} == {free}
        assert all(bool(vector.any()) == (free > 0) for vector in state)


def take_step(optimizer: Flat) -> None:
    batch = batches()[0]
    with optimizer.drawn():
        F.cross_entropy(optimizer.net(*batch.args), batch.target).backward()
    optimizer.step()


def changed(net: GaussianNetwork, how: str) -> None:
    if how == "fixed":
        net.fix(0.7)
    elif how == "loaded":
        net.load_state_dict(half_fixed().state_dict())
    else:
        net.double()
        net.fixed = net.fixed.clone()  # as a move to another device does


@pytest.mark.parametrize("how", ["fixed", "loaded", "moved"])
def test_an_optimiser_of_another_mask_is_refused(how: str) -> None:
    net = half_fixed()
    optimizer = flat(net, FlatSGD, momentum=0.9)
    take_step(optimizer)
    with optimizer.drawn():
        F.cross_entropy(net(*batches()[0].args), batches()[0].target).backward()
    changed(net, how)
    before = net.mu.detach().clone()
    with pytest.raises(WeightError, match="since the optimiser was made: make a new one"):
        optimizer.step()
    with pytest.raises(WeightError, match="make a new one"), optimizer.drawn():
        pass
    assert torch.equal(net.mu, before)
    if how != "moved":
        take_step(flat(net, FlatSGD, momentum=0.9))


def test_a_state_of_another_mask_is_not_loaded() -> None:
    first, net = flat(half_fixed(), FlatSGD), half_fixed()
    net.fix(0.7)
    second = flat(net, FlatSGD)
    with pytest.raises(WeightError, match=r"momentum belongs to .* free weights, and the network has"):
        second.load_state_dict(first.state_dict())


def test_no_gradient_is_kept_from_one_step_to_the_next(monkeypatch: pytest.MonkeyPatch) -> None:
    optimizer = flat(half_fixed(), FlatSGD, clip_norm=0.05)
    seen = []

    def watched(*args: Any, **numbers: Any) -> None:
        seen.append(weakref.ref(args[4]))
        assert all(leaf.grad is None for leaf in optimizer.leaves)  # the pieces' own are gone by then
        sgd_(*args, **numbers)

    sgd_ = kernels.sgd_
    monkeypatch.setattr(kernels, "sgd_", watched)
    take_step(optimizer)
    (gradient,) = seen
    assert gradient() is None


def test_weights_in_bfloat16_are_the_draw_rounded_once() -> None:
    net = half_fixed()
    optimizer = flat(net, FlatSGD, dtype=torch.bfloat16)
    with net.sampling(at=(7, 0)):
        drawn = net._vector().detach()
    with optimizer.drawn():
        placed = [p for name, p in net.model.named_parameters() if name in ("0.weight", "4.weight", "4.bias")]
        assert torch.equal(torch.cat([p.detach().reshape(-1) for p in placed]), drawn.to(torch.bfloat16))


def test_a_layer_that_the_step_did_not_go_through_has_a_zero_gradient() -> None:
    class Either(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.used, self.unused = nn.Linear(3, 2), nn.Linear(3, 2)

        def forward(self, x: Tensor) -> Tensor:
            out: Tensor = self.used(x)
            return out

    net = GaussianNetwork(Either(), Config().override({**PAPER_SIGMA, "posterior.alpha": 0.0})).train()
    before = net.mu.detach().clone()
    optimizer = FlatSGD(net, lr=0.1)
    for _ in range(2):
        with optimizer.drawn():
            net(torch.ones(1, 3)).sum().backward()
        optimizer.step()
    moved = net.mu.detach() != before
    assert moved[:8].all()
    assert not moved[8:].any()


def test_tied_weights_get_one_gradient() -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = nn.Linear(3, 3, bias=False), nn.Linear(3, 3, bias=False)
            self.second.weight = self.first.weight

        def forward(self, x: Tensor) -> Tensor:
            out: Tensor = self.second(self.first(x))
            return out

    def stepped(work: Callable[[GaussianNetwork], None]) -> Tensor:
        torch.manual_seed(0)
        net = GaussianNetwork(Tied(), SETTINGS).train()
        work(net)
        return net.mu.detach()

    def ours(net: GaussianNetwork) -> None:
        optimizer = FlatSGD(net, lr=0.1, seed=3)
        with optimizer.drawn():
            net(torch.ones(1, 3)).square().sum().backward()
        optimizer.step()

    def theirs(net: GaussianNetwork) -> None:
        optimizer = torch.optim.SGD(net.parameter_groups(lr=0.1))
        with net.sampling(at=(3, 0)):
            (net(torch.ones(1, 3)).square().sum() + net.penalty()).backward()
        optimizer.step()

    torch.testing.assert_close(stepped(ours), stepped(theirs), rtol=0, atol=1e-6)


def test_the_network_is_itself_again_after_the_block_whatever_happens() -> None:
    net = half_fixed()
    names = list(net.state_dict())
    optimizer = flat(net, FlatSGD)
    with pytest.raises(RuntimeError, match="on the way"), optimizer.drawn():
        raise RuntimeError("on the way")
    assert list(net.state_dict()) == names
    net.eval()
    with torch.no_grad():
        assert net(batches()[0].args[0]).shape == (8, 3)


def test_sharing_storage_changes_nothing_but_the_place() -> None:
    net, other = half_fixed(), half_fixed()
    net.share_storage()
    assert torch.equal(net.mu, other.mu)
    assert torch.equal(net.sigma, other.sigma)
    assert net.fixed_mu.data_ptr() == net.free_mu.data_ptr()
    for each in (net, other):
        each.fix(1.0)
    assert torch.equal(net.finish().values(), other.finish().values())
    copied = copy.deepcopy(net)
    assert copied.fixed_mu.data_ptr() != copied.free_mu.data_ptr()
    assert torch.equal(copied.mu, net.mu)


CONSTANT = SETTINGS.override({"training.sigma_learning_rate": "off"})


@pytest.mark.parametrize(("kind", "options"), KINDS)
@pytest.mark.parametrize("clip", [None, 0.05])
def test_a_step_of_two_batches_by_hand(kind: type[Any], options: dict[str, Any], clip: float | None) -> None:
    """The mean gradient of two draws; in its norm, sigma has the noise of the first."""
    net, twin, both = half_fixed(CONSTANT), half_fixed(CONSTANT), batches()[:2]
    config = TrainingConfig(clip_norm=clip, accumulate=2)
    rates: dict[str, Any] = {**RATES, "sigma_lr": 0.0}
    optimizer = kind(net, **rates, seed=7, clip_norm=clip, draws=2, **options)
    fit(net, iter(both), 1, TASK, config, optimizer=optimizer, where="here")

    groups = twin.parameter_groups(**rates)
    reference: torch.optim.Optimizer
    reference = torch.optim.AdamW(groups) if kind is FlatAdamW else torch.optim.SGD(groups, momentum=0.9)
    for number, batch in enumerate(both):
        with twin.sampling(at=(7, number)):
            (TASK(twin, batch, "here") / 2).backward()
    assert twin.free_mu.grad is not None
    squared = kernels.grad_squared_norm(twin.free_mu.grad, twin.fixed, seed=7, step=0)
    squared = squared + sum(p.grad.square().sum() for p in twin.model.parameters() if p.grad is not None)
    twin.free_sigma.grad = None
    for parameter in twin.parameters():
        if parameter.grad is not None and clip is not None:
            parameter.grad *= clip / squared.sqrt()
    assert clip is None or squared.sqrt() > clip
    reference.step()
    free = ~net.fixed
    torch.testing.assert_close(net.mu[free], twin.mu[free], rtol=0, atol=1e-6)
    assert torch.equal(net.sigma, twin.sigma)
    for mine, other in zip(net.model.parameters(), twin.model.parameters(), strict=True):
        torch.testing.assert_close(mine, other, rtol=0, atol=1e-6)


@pytest.mark.parametrize(("kind", "options"), KINDS)
def test_with_a_scaled_loss_the_steps_are_those_of_torchs(kind: type[Any], options: dict[str, Any]) -> None:
    ours, theirs = half_fixed(), half_fixed()
    for net, optimizer, seed in (
        (ours, flat(ours, kind, clip_norm=0.05, **options), None),
        (theirs, plain(theirs, kind), 7),
    ):
        scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
        config = TrainingConfig(clip_norm=0.05)
        fit(
            *(net, iter(batches()), 6, TASK, config),
            optimizer=optimizer,
            where="here",
            seed=seed,
            scaler=scaler,
        )
    free = ~ours.fixed
    assert not torch.equal(ours.mu, half_fixed().mu)
    torch.testing.assert_close(ours.mu[free], theirs.mu[free], rtol=0, atol=2e-5)
    torch.testing.assert_close(ours.sigma[free], theirs.sigma[free], rtol=0, atol=2e-5)


def test_a_gradient_that_is_not_finite_is_skipped_where_the_loss_is_scaled() -> None:
    def task(output: Tensor, target: Tensor) -> Tensor:
        return F.cross_entropy(output, target) + (0 * output.sum()).sqrt()  # 0, with a gradient of 0 / 0

    net, scaler = half_fixed(), torch.amp.GradScaler("cpu", init_scale=4.0)
    optimizer, before = flat(net, FlatSGD), half_fixed()
    given: dict[str, Any] = {"optimizer": optimizer, "where": "here", "scaler": scaler}
    fit(net, iter(batches()), 1, Objective(task), TrainingConfig(), **given)
    assert torch.equal(net.mu, before.mu)
    assert torch.equal(net.sigma, before.sigma)
    assert scaler.get_scale() == 2.0
    fit(net, iter(batches()), 1, TASK, TrainingConfig(), **given)
    assert not torch.equal(net.mu, before.mu)


def test_a_step_of_several_draws_cannot_train_sigma() -> None:
    with pytest.raises(WeightError, match="cannot train sigma: use a torch optimiser"):
        flat(half_fixed(), FlatSGD, draws=2)


def test_an_optimiser_made_for_other_steps_is_refused() -> None:
    net = half_fixed(CONSTANT)
    optimizer = FlatSGD(net, lr=0.1)
    with pytest.raises(ConfigError, match="1 batches per step in 1 processes, and the run has 2 in 1"):
        fit(
            *(net, iter(batches()), 1, TASK, TrainingConfig(accumulate=2)),
            optimizer=optimizer,
            where="here",
            distributed=Distributed(CPU),
        )


def test_a_model_of_several_types_is_refused() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2).bfloat16())
    with pytest.raises(WeightError, match="several types: use a torch optimiser"):
        FlatSGD(GaussianNetwork(model), lr=0.1)


def test_torchs_schedulers_scale_both_rates() -> None:
    net = half_fixed()
    optimizer = FlatSGD(net, lr=0.5, sigma_lr=0.25)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
    take_step(optimizer)
    scheduler.step()
    assert [group["lr"] for group in optimizer.param_groups] == [0.25, 0.125]


class Precise(nn.Module):
    """A head that computes in float32, as many detectors and language models have, if asked."""

    def __init__(self, precise: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.body, self.attention = nn.Linear(6, 8), nn.MultiheadAttention(8, 2, batch_first=True)
        self.head, self.precise = nn.Linear(8, 3), precise

    def forward(self, x: Tensor) -> Tensor:
        x = self.body(x)[:, None].relu()
        x = (x + self.attention(x, x, x)[0])[:, 0]
        with torch.autocast("cpu", enabled=not self.precise and torch.is_autocast_enabled("cpu")):
            return self.head(x.float() if self.precise else x)


IN_BF16 = {
    "training.precision": "bf16",
    "schedule.fractions": [0.5, 1.0],
    "schedule.epochs_per_round": [1, 1],
}


@pytest.mark.parametrize("precise", [True, False])
@pytest.mark.parametrize("optimizer", ["sgd", "adamw"])
def test_bf16_puts_narrow_weights_only_where_autocast_casts_all(
    precise: bool, optimizer: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And the result is the same, bit for bit, as with weights that autocast casts."""
    data = [(torch.randn(8, 6), torch.randint(0, 3, (8,))) for _ in range(6)]
    config = Config().override({**IN_BF16, "posterior.init": "rms", "training.optimizer": optimizer})
    seen: list[torch.dtype] = []
    kind: type[Any] = FlatSGD if optimizer == "sgd" else FlatAdamW
    collect = kind.collect

    def noted(draw: Any) -> Any:
        seen.extend({leaf.dtype for leaf in draw.leaves})
        return collect(draw)

    monkeypatch.setattr(kind, "collect", noted)
    found = compress(Precise(precise), data, config=config).compressed
    wide = torch.float32 if precise else torch.bfloat16
    assert seen == [torch.float32, *[wide] * 5] * 2
    monkeypatch.setattr(kind, "_narrow_if_cast", lambda *_: None)
    assert dumps(compress(Precise(precise), data, config=config).compressed) == dumps(found)


def test_bf16_with_a_layer_in_float32_that_some_steps_skip() -> None:
    """As with stochastic depth: the first step of a phase does not show how the layer is used."""

    class Skipping(Precise):
        passes = 0

        def forward(self, x: Tensor) -> Tensor:
            self.passes += self.training
            return super().forward(x) if self.passes > 2 else self.body(x)[:, :3]

    data = [(torch.randn(8, 6), torch.randint(0, 3, (8,))) for _ in range(6)]
    result = compress(Skipping(True), data, config=Config().override({**IN_BF16, "posterior.init": "rms"}))
    assert [done.steps for done in result.rounds] == [6, 6]
