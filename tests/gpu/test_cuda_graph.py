"""Steps captured as CUDA graphs give the same bits as the steps they were captured from."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from pwfn import Config, Result, compress
from pwfn.lab.activations import ActivationKind
from pwfn.lab.activations.quantise import ActivationQuantiser
from pwfn.lab.baselines import kmeans
from pwfn.lab.baselines.wfn_rounds import Pull
from pwfn.lab.quantisers import ApotQuantiser, Codes, LsqQuantiser, lsqplus
from pwfn.lab.quantisers.lsq import LsqTogether, Part

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")

# A run. Sigma is trained and fixed weights are drawn too: the most that a graph can contain.

CONFIG = Config().override(
    {
        "posterior.init": "powers",
        "posterior.noise_on_fixed": True,
        "fixing.grid_exponent": 7,
        "schedule.fractions": [0.5, 1.0],
        "schedule.epochs_per_round": [3.0, 3.0],
        "training.learning_rate": 0.01,
        "training.sigma_learning_rate": 0.01,
    }
)


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(1, 16, 3, padding=1, bias=False),
        nn.BatchNorm2d(16),
        nn.ReLU(),
        nn.Dropout(0.3),
        nn.Flatten(),
        nn.Linear(16 * 64, 10),
    ).cuda()


def data() -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(0)
    sizes = [32] * 7 + [20]  # the last batch of an epoch is smaller, and is not replayed
    return [
        (torch.randn(n, 1, 8, 8, generator=generator), torch.randint(0, 10, (n,), generator=generator))
        for n in sizes
    ]


def run(model: nn.Module | None = None, *, init: str = "powers", **training: Any) -> Result:
    changes = {f"training.{name}": value for name, value in training.items()} | {"posterior.init": init}
    return compress(model or network(), data(), data(), CONFIG.override(changes), device="cuda")


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("scheduler", ["none", "cosine"])
@pytest.mark.parametrize(("init", "sigma"), [("powers", 0.01), ("powers", None), ("constant", None)])
@pytest.mark.parametrize("optimizer", ["sgd", "adamw"])
def test_a_captured_run_ends_with_the_same_bits(
    precision: str, scheduler: str, init: str, sigma: float | None, optimizer: str
) -> None:
    changes: dict[str, Any] = {"optimizer": optimizer, "scheduler": scheduler}
    changes |= {"init": init, "sigma_learning_rate": sigma}
    plain = run(precision=precision, **changes, cuda_graph=False)
    captured = run(precision=precision, **changes)
    assert torch.equal(plain.compressed.values(), captured.compressed.values())
    assert plain.after == captured.after
    assert [done.loss for done in plain.rounds] == [done.loss for done in captured.rounds]


class Synchronising(nn.Module):
    """Reads a value from the device in its forward pass, which a graph cannot contain."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(64, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = x.flatten(1)
        if float(x.detach().sum()) > 1e9:
            x = x * random.random()
        return self.layer(x)


def test_a_model_that_cannot_be_captured_trains_as_usual_and_says_so(
    caplog: pytest.LogCaptureFixture,
) -> None:
    torch.manual_seed(0)
    stream, model = torch.cuda.current_stream(), Synchronising().cuda()
    recorded = run(model)
    assert sum("not recorded as a CUDA graph" in message for message in caplog.messages) == 1
    torch.cuda.synchronize()
    assert torch.cuda.current_stream() == stream
    assert torch.randn(3, device="cuda").isfinite().all()  # torch's own generator works again
    plain = run(model, cuda_graph=False)
    assert torch.equal(plain.compressed.values(), recorded.compressed.values())


class HostDropout(nn.Module):
    """Leaves a layer out by a random number of the host, as LayerDrop does."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(64, 64), nn.Linear(64, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = x.flatten(1)
        if self.training and float(torch.rand(())) < 0.5:
            x = x + self.first(x)
        out: Tensor = self.second(x)
        return out


def test_a_model_that_draws_on_the_host_trains_as_usual() -> None:
    torch.manual_seed(0)
    model = HostDropout().cuda()
    recorded, plain = run(model), run(model, cuda_graph=False)
    assert torch.equal(plain.compressed.values(), recorded.compressed.values())


@pytest.mark.parametrize("method", ["rate", "wfn", "lsq", "apot", "kmeans"])
def test_other_methods_end_with_the_same_bits(method: str) -> None:
    fractions = [0.5, 1.0] if method == "wfn" else [1.0]
    config = Config.preset("recommended", method).override(
        {"schedule.fractions": fractions, "schedule.epochs_per_round": [8.0] * len(fractions)}
    )
    if method == "rate":
        config = config.override({"target.bytes": 9000})
    results = [
        compress(network(), data(), data(), config.override({"training.cuda_graph": on}), device="cuda")
        for on in (False, True)
    ]
    assert torch.equal(results[0].compressed.values(), results[1].compressed.values())
    assert results[0].after == results[1].after


# What the baselines add to a step.


def started(kind: ActivationKind, x: Tensor) -> nn.Module:
    quantiser = ActivationQuantiser(kind, 4).to(x.device)
    quantiser.start(x)
    return quantiser


QUANTISERS: dict[str, Callable[[Tensor], nn.Module]] = {
    "lsq": lambda w: LsqQuantiser.for_weights(w, 4),
    "lsq per channel": lambda w: LsqQuantiser.for_weights(w, 4, axis=0),
    "lsq+": lambda w: LsqQuantiser(lsqplus.initial_step(w, 3), Codes.of(3, signed=True)),
    "lsq+ activations": lambda x: started(ActivationKind.LSQ_PLUS, x),
    "apot": lambda w: ApotQuantiser.for_weights(w, 4),
    "apot activations": lambda x: started(ActivationKind.APOT, x),
}


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).cuda()


def replayed(action: Callable[[], Tensor], leaves: Sequence[Tensor]) -> tuple[list[Tensor], list[Tensor]]:
    """Value and gradients of an action, and those of the same action captured and then replayed twice."""

    def step() -> list[Tensor]:
        value = action()
        return [value.detach(), *torch.autograd.grad(value, leaves)]

    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        plain = [tensor.clone() for tensor in step()]
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = step()
    for _ in range(2):
        graph.replay()
    torch.cuda.synchronize()
    return plain, found


def assert_bit_equal(pair: tuple[list[Tensor], list[Tensor]]) -> None:
    for one, other in zip(*pair, strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize("name", QUANTISERS)
def test_a_captured_quantiser_is_the_plain_one(name: str) -> None:
    x, factor = normal(32, 16, 3, 3).requires_grad_(), normal(32, 16, 3, 3, seed=1)
    quantiser = QUANTISERS[name](x.detach())
    assert_bit_equal(replayed(lambda: (quantiser(x) * factor).sum(), [x, *quantiser.parameters()]))
    cpu = QUANTISERS[name](x.detach().cpu())
    cpu.load_state_dict(quantiser.state_dict())
    # APoT sums its mean and sigma in another order: equal up to rounding, except midway between two codes.
    same = torch.isclose(quantiser(x).cpu(), cpu(x.cpu()), rtol=1e-5, atol=1e-7)
    assert int((~same).sum()) <= 2


def test_captured_quantisers_together_are_the_plain_ones_and_each_alone() -> None:
    weights, factor = normal(4, 1025).requires_grad_(), normal(4100, seed=1)
    parts = []
    plain_weights = weights.detach()  # a slice of a leaf would tie its gradient to the current stream
    for piece, axis in ((plain_weights[:1], None), (plain_weights[1:], 0)):
        parts.append(Part(LsqQuantiser.for_weights(piece, 4, axis), piece.numel()))
    together = LsqTogether(parts, weights.device)
    steps = [part.quantiser.step for part in parts]
    plain, found = replayed(lambda: (together(weights.reshape(-1)) * factor).sum(), [weights, *steps])
    assert_bit_equal((plain, found))
    each = torch.cat(
        [parts[0].quantiser(weights[:1]).reshape(-1), parts[1].quantiser(weights[1:]).reshape(-1)]
    )
    assert torch.equal(together(weights.reshape(-1)), each)


@pytest.mark.parametrize("nearest", [None, 16])
def test_a_captured_pull_is_the_plain_one_and_that_of_the_cpu(nearest: int | None) -> None:
    weights = (0.05 * normal(270_001)).requires_grad_()
    centres, free = (0.05 * normal(150, seed=1)).sort().values, normal(270_001, seed=2) > 0
    term = Pull(centres, free, nearest=nearest)
    plain, found = replayed(lambda: term(weights), [weights])
    assert_bit_equal((plain, found))
    on_cpu = weights.detach().cpu().requires_grad_()
    value = Pull(centres.cpu(), free.cpu(), nearest=nearest)(on_cpu)
    torch.testing.assert_close(plain[0].cpu(), value.detach(), rtol=1e-5, atol=0)
    (gradient,) = torch.autograd.grad(value, on_cpu)
    torch.testing.assert_close(plain[1].cpu(), gradient, rtol=1e-3, atol=1e-4 * float(gradient.abs().max()))


@pytest.mark.parametrize(("size", "count"), [(1, 2), (1025, 3), (270_001, 16), (1_000_003, 256)])
def test_a_captured_sum_over_members_is_the_plain_one_every_time(size: int, count: int) -> None:
    shared = kmeans.kmeans(normal(size), count)
    number = shared.centroids.numel()
    of, factor = kmeans.members(shared.indices, number), normal(size, seed=1)
    centroids = shared.centroids.requires_grad_()
    pair = replayed(lambda: (kmeans.share(centroids, shared.indices, of) * factor).sum(), [centroids])
    assert_bit_equal(pair)
    expected = torch.zeros(number, dtype=torch.float64).index_add_(
        0, shared.indices.cpu(), factor.cpu().double()
    )
    torch.testing.assert_close(pair[0][1].cpu().double(), expected, rtol=1e-6, atol=1e-6)
