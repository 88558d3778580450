"""A constant sigma takes no vector in a run, and the run is the same, bit for bit, as with one."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
from cases import Shuffled
from cases import normalised_classifier as network
from torch import Tensor, nn
from torch.nn import functional as F

from pwfn import Config, GaussianNetwork, WeightError, compress
from pwfn.bayes.optimizer import FlatAdamW, FlatSGD, optimizer_for
from pwfn.file.compressed import Compressed
from pwfn.progress import Progress

CONFIG = Config().override(
    {
        "posterior.init": "rms",
        "schedule.fractions": [0.4, 0.8, 1.0],
        "schedule.epochs_per_round": 1.0,
        "training.learning_rate": 0.05,
        "finish.polish_epochs": 0.0,
    }
)
VARIANTS: dict[str, dict[str, Any]] = {
    "tolerance": {"posterior.init": "tolerance"},
    "rms": {},
    "constant": {"posterior.init": "constant"},
    "still": {"posterior.noise_on_fixed": False},
    "adamw": {"training.optimizer": "adamw"},
    "accumulation": {"training.accumulate": 2},
    "bf16": {"training.precision": "bf16"},
    "fp16": {"training.precision": "fp16"},
}
X = torch.randn(8, 6, generator=torch.Generator().manual_seed(5))


@pytest.fixture
def vectors(monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    """From the call on, sigma is a vector in every run: the plain twin."""
    return lambda: monkeypatch.setattr(GaussianNetwork, "_constant_sigma", lambda net: None)


def run(config: Config, model: nn.Module | None = None, **how: Any) -> Compressed:
    data: Any = Shuffled()
    if model is not None and next(model.parameters()).dtype != torch.float32:
        data = [(x.to(next(model.parameters()).dtype), y) for x, y in data]
    return compress(model or network(), data, None, config, **how).compressed


def content(compressed: Compressed) -> bytes:
    return compressed.dumps(posterior="weight")


@pytest.mark.parametrize("name", VARIANTS)
def test_a_run_is_that_with_a_vector_of_sigmas(name: str, vectors: Callable[[], None]) -> None:
    shapes: list[torch.Size] = []

    def on_round(progress: Progress) -> None:
        assert progress.network is not None
        shapes.append(progress.network["free_sigma"].shape)

    config = CONFIG.override(VARIANTS[name])
    found = content(run(config, on_round=on_round))
    vectors()
    assert content(run(config, on_round=on_round)) == found
    assert [len(shape) for shape in shapes] == [0, 0, 0, 1, 1, 1]


@pytest.mark.parametrize("dtype", [torch.float64, torch.float16])
def test_other_types_too(dtype: torch.dtype, vectors: Callable[[], None]) -> None:
    found = content(run(CONFIG, network().to(dtype)))
    vectors()
    assert content(run(CONFIG, network().to(dtype))) == found


def shared(config: Config = CONFIG, fraction: float = 0.0) -> tuple[GaussianNetwork, FlatSGD | FlatAdamW]:
    """A network in a run, and its optimiser."""
    net = GaussianNetwork(network(), config).train()
    if fraction:
        net.fix(fraction)
    optimizer = optimizer_for(net, config.training, seed=3)
    assert isinstance(optimizer, (FlatSGD, FlatAdamW))
    return net, optimizer


def take_steps(net: GaussianNetwork, optimizer: FlatSGD | FlatAdamW, count: int = 3) -> list[float]:
    """Norms of the gradients."""
    norms = []
    for _ in range(count):
        optimizer.zero_grad()
        with optimizer.drawn():
            net(X).square().sum().backward()
        norms.append(optimizer.step().item())
    return norms


@pytest.mark.parametrize("kind", ["sgd", "adamw"])
@pytest.mark.parametrize("fraction", [0.0, 0.5])
def test_norms_and_means_are_those_with_a_vector(
    kind: str, fraction: float, vectors: Callable[[], None]
) -> None:
    """The norm counts the gradient that sigma would have."""
    config = CONFIG.override({"training.optimizer": kind})
    net, optimizer = shared(config, fraction)
    norms = take_steps(net, optimizer)
    vectors()
    twin, other = shared(config, fraction)
    assert take_steps(twin, other) == norms
    assert (net.free_sigma.dim(), twin.free_sigma.dim()) == (0, 1)
    assert torch.equal(net.mu, twin.mu)
    assert torch.equal(net.sigma, twin.sigma)


def held_bytes(tensors: Iterable[Tensor]) -> int:
    """Bytes of their storages, each once; without those of a few numbers."""
    storages = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}
    return sum(size for size in storages.values() if size > 1000)


@pytest.mark.parametrize(("kind", "moments"), [("sgd", 1), ("adamw", 2)])
def test_no_round_holds_a_vector_of_sigmas(kind: str, moments: int) -> None:
    """Mean, mask, drawn weight, momenta: besides the mask and the draw it is what fine-tuning has."""
    torch.manual_seed(0)
    config = CONFIG.override({"training.optimizer": kind})
    net = GaussianNetwork(nn.Linear(1000, 10, bias=False), config).train()
    size, held = net.layout.size, []
    for fraction in (0.2, 0.5, 0.9):
        optimizer = optimizer_for(net, config.training, seed=3)
        assert isinstance(optimizer, (FlatSGD, FlatAdamW))
        with optimizer.drawn():
            F.mse_loss(net(torch.ones(1, 1000)), torch.ones(1, 10)).backward()
        optimizer.step()
        optimizer.zero_grad()
        state = [t for of in optimizer.state.values() for t in of.values()]
        tensors = [*net.parameters(), *net.buffers(), *state, *optimizer.leaves]
        assert not any(p.grad is not None for p in net.parameters())
        held.append(held_bytes(tensors) / size)
        net.fix(fraction)
    # Sigmas of fixed weights take at most the place of their momenta.
    assert held == pytest.approx([4 + 1 + 4 + 4 * (moments * (1 - f) + f) for f in (0, 0.2, 0.5)])


class CutOffError(Exception):
    """The run was cut off."""


def cut_off(config: Config, step: int) -> Progress:
    taken: list[Progress] = []

    def keep(progress: Callable[[], Progress], ends: bool) -> None:
        taken.append(progress())
        if len(taken) == step:
            raise CutOffError

    with pytest.raises(CutOffError):
        run(config, keep=keep)
    return taken[-1]


@pytest.mark.parametrize("step", [1, 3, 5, 8])
def test_a_run_resumes_in_any_round(step: int) -> None:
    assert content(run(CONFIG, resume=cut_off(CONFIG, step))) == content(run(CONFIG))


@pytest.mark.parametrize("step", [1, 3, 8])
def test_a_run_that_began_with_a_vector_resumes_without(step: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """As checkpoints of earlier versions have it."""
    with monkeypatch.context() as patch:
        patch.setattr(GaussianNetwork, "_constant_sigma", lambda net: None)
        began = cut_off(CONFIG, step)
    assert began.network is not None
    assert began.network["free_sigma"].dim() == 1
    assert content(run(CONFIG, resume=began)) == content(run(CONFIG))


@pytest.mark.parametrize("fraction", [0.0, 0.5, 1.0])
def test_a_state_gives_vectors_to_any_network(fraction: float) -> None:
    net, optimizer = shared()
    take_steps(net, optimizer)
    net.fix(fraction)
    assert net.free_sigma.shape == ()
    assert net.fixed_sigma.shape == (int(net.fixed.sum()),)
    other, _ = shared()
    for fresh in (GaussianNetwork(network(), CONFIG), other):
        fresh.load_state_dict(net.state_dict())
        assert torch.equal(fresh.mu, net.mu)
        assert torch.equal(fresh.sigma, net.sigma)
        assert fresh.free_sigma.shape == fresh.fixed_sigma.shape == (net.layout.size,)
        assert fresh.free_sigma.requires_grad
    plain = GaussianNetwork(network(), CONFIG)
    other, _ = shared(fraction=0.3)
    other.load_state_dict(plain.state_dict())
    assert torch.equal(other.sigma, plain.sigma)


def test_a_state_whose_sigmas_belong_to_another_mask_is_refused() -> None:
    net, _ = shared(fraction=0.5)
    state = net.state_dict()
    state["fixed"] = torch.zeros_like(net.fixed)
    with pytest.raises(WeightError, match="entries for 0 fixed weights"):
        GaussianNetwork(network(), CONFIG).load_state_dict(state)


def test_draws_copies_and_tolerance_are_those_with_a_vector(vectors: Callable[[], None]) -> None:
    net, _ = shared(fraction=0.5)
    vectors()
    twin, _ = shared(fraction=0.5)
    for each in (net, twin):
        each.tolerate(lambda each=each: float(each.sigma[~each.fixed].square().mean()))
    sigma = net.sigma[~net.fixed]
    assert bool((sigma == net.free_sigma).all())
    assert torch.equal(net.sigma, twin.sigma)
    for at in ((3, 4), None):
        for training in (True, False):
            drawn = []
            for each in (net, twin, copy.deepcopy(net)):
                generator = None if at else torch.Generator().manual_seed(0)
                with each.train(training).sampling(True, generator, at=at):
                    drawn.append(torch.cat([w.reshape(-1) for w in each.weights().values()]))
            assert torch.equal(drawn[0], drawn[1])
            assert torch.equal(drawn[0], drawn[2])
    with net.sampling(at=(3, 4)):
        net(X).sum().backward()
    assert net.free_mu.grad is not None
    assert net.free_sigma.grad is None
    assert content(net.rounded().finish()) == content(twin.rounded().finish())
    for each in (net, twin):
        each.fix(1.0)
    assert content(net.finish()) == content(twin.finish())


def test_only_a_constant_that_is_not_trained_is_one_number() -> None:
    powers = {"posterior.init": "powers"}
    for changes in (
        powers,
        {**powers, "training.sigma_learning_rate": 0.1},
        {"training.sigma_learning_rate": 0.1},
    ):
        net, _ = shared(CONFIG.override(changes))
        assert net.free_sigma.shape == (net.layout.size,)
    net, _ = shared()
    assert [group["lr"] for group in net.parameter_groups(lr=0.1)] == [0.1, 0.0]
    assert net.penalty().item() == 0
    with pytest.raises(WeightError, match=r"training\.sigma_learning_rate"):
        FlatSGD(net, lr=0.1, sigma_lr=0.1)
