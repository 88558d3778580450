"""Quantisers, shared weights and WFN's pull on a GPU: recorded as CUDA graphs, the same bits every time."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
import torch
from torch import Tensor, nn

from pwfn.lab.activations import ActivationKind
from pwfn.lab.activations.quantise import ActivationQuantiser
from pwfn.lab.baselines import kmeans_clusters as kmeans
from pwfn.lab.baselines import wfn_rounds as wfn
from pwfn.lab.baselines.wfn_rounds import Pull
from pwfn.lab.quantisers import ApotQuantiser, LsqPlusQuantiser, LsqQuantiser
from pwfn.lab.quantisers.together import LsqTogether, Part

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


def started(kind: ActivationKind, x: Tensor) -> nn.Module:
    quantiser = ActivationQuantiser(kind, 4).to(x.device)
    quantiser.start(x)
    return quantiser


QUANTISERS: dict[str, Callable[[Tensor], nn.Module]] = {
    "lsq": lambda w: LsqQuantiser.for_weights(w, 4),
    "lsq per channel": lambda w: LsqQuantiser.for_weights(w, 4, axis=0),
    "lsq+": lambda w: LsqPlusQuantiser.for_weights(w, 3),
    "lsq+ activations": lambda x: started(ActivationKind.LSQ_PLUS, x),
    "apot": lambda w: ApotQuantiser.for_weights(w, 4),
    "apot activations": lambda x: started(ActivationKind.APOT, x),
}


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).cuda()


def replayed(action: Callable[[], Tensor], leaves: Sequence[Tensor]) -> tuple[list[Tensor], list[Tensor]]:
    """Value and gradients of an action done plainly, and of the same recorded and then replayed twice."""

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
def test_a_recorded_quantiser_is_the_plain_one(name: str) -> None:
    x, factor = normal(32, 16, 3, 3).requires_grad_(), normal(32, 16, 3, 3, seed=1)
    quantiser = QUANTISERS[name](x.detach())
    assert_bit_equal(replayed(lambda: (quantiser(x) * factor).sum(), [x, *quantiser.parameters()]))
    cpu = QUANTISERS[name](x.detach().cpu())
    cpu.load_state_dict(quantiser.state_dict())
    # APoT's mean and sigma are added in another order: to rounding, but for a weight midway between two.
    same = torch.isclose(quantiser(x).cpu(), cpu(x.cpu()), rtol=1e-5, atol=1e-7)
    assert int((~same).sum()) <= 2


def test_quantisers_at_once_are_recorded_as_they_are_and_as_on_a_cpu() -> None:
    weights, factor = normal(4, 1025).requires_grad_(), normal(4100, seed=1)
    parts = []
    plain_weights = weights.detach()  # a slice of a leaf would tie its gradient to the stream of here
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
def test_a_recorded_pull_is_the_plain_one_and_that_of_a_cpu(nearest: int | None) -> None:
    weights = (0.05 * normal(270_001)).requires_grad_()
    centres, free = (0.05 * normal(150, seed=1)).sort().values, normal(270_001, seed=2) > 0
    term = Pull(centres, free, nearest=nearest)
    plain, found = replayed(lambda: term(weights), [weights])
    assert_bit_equal((plain, found))
    at_home = weights.detach().cpu().requires_grad_()
    value = Pull(centres.cpu(), free.cpu(), nearest=nearest)(at_home)
    torch.testing.assert_close(plain[0].cpu(), value.detach(), rtol=1e-5, atol=0)
    (gradient,) = torch.autograd.grad(value, at_home)
    torch.testing.assert_close(plain[1].cpu(), gradient, rtol=1e-3, atol=1e-4 * float(gradient.abs().max()))


@pytest.mark.parametrize(("size", "count"), [(1, 1), (1025, 3), (270_001, 16), (1_000_003, 256)])
def test_a_recorded_sum_over_members_is_the_plain_one_every_time(size: int, count: int) -> None:
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


def test_rounds_and_clusters_are_those_of_a_cpu() -> None:
    weights = 0.05 * normal(270_001)
    w, fixed = weights, torch.zeros_like(weights, dtype=torch.bool)
    for fraction in (0.4, 0.9, 1.0):
        here = wfn.fix_round(w, fixed, fraction, delta=0.015)
        there = wfn.fix_round(w.cpu(), fixed.cpu(), fraction, delta=0.015)
        assert here.steps == there.steps
        assert torch.equal(here.weights.cpu(), there.weights)
        w, fixed = here.weights, here.fixed
    here, there = kmeans.kmeans(weights, 16), kmeans.kmeans(weights.cpu(), 16)
    assert torch.equal(here.centroids.cpu(), there.centroids)
    assert torch.equal(here.indices.cpu(), there.indices)
