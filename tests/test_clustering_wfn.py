"""WFN: its rounds are those of a literal loop, its candidates within reach, its pull the dense formula."""

from __future__ import annotations

import math
from collections.abc import Sequence
from fractions import Fraction

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from oracles import wfn as oracle
from torch import Tensor
from waiting import NoWaiting

from pwfn import PAPER_FRACTIONS
from pwfn.fixing.candidates import candidates as pow2_candidates
from pwfn.fixing.candidates import order
from pwfn.lab.baselines import wfn_rounds as wfn
from pwfn.lab.baselines.wfn_rounds import Pull

SMALLEST = 2.0**-7


def normal(size: int, seed: int = 0, scale: float = 0.05, dtype: torch.dtype = torch.float32) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(size, generator=generator, dtype=torch.float64).mul(scale).to(dtype)


def none_fixed(weights: Tensor) -> Tensor:
    return torch.zeros_like(weights, dtype=torch.bool)


def nearest_distance(weights: Tensor, centres: Tensor) -> Tensor:
    """Smallest |w - c| / |w| over a whole table."""
    return ((weights[:, None] - centres).abs() / weights[:, None].abs()).amin(1)


# The rounds against a literal loop


def compare_rounds(weights: Tensor, fractions: Sequence[float], delta: float, omega_max: int = 20) -> None:
    w, fixed = weights, none_fixed(weights)
    slow_w, slow_fixed = weights.double().tolist(), fixed.tolist()
    cache: dict[tuple[float, int], list[float]] = {}
    for fraction in fractions:
        done = wfn.fix_round(w, fixed, fraction, delta=delta, omega_max=omega_max)
        slow_w, slow_fixed, steps = oracle.fix_round(slow_w, slow_fixed, fraction, delta, omega_max, cache)
        assert [tuple(step) for step in done.steps] == steps
        assert done.fixed.tolist() == slow_fixed
        assert done.weights.double().tolist() == slow_w
        w, fixed = done.weights, done.fixed


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize(("size", "delta"), [(1, 0.01), (127, 0.01), (127, 0.0075), (1025, 0.015)])
def test_rounds_are_those_of_a_literal_loop(size: int, delta: float, dtype: torch.dtype) -> None:
    compare_rounds(normal(size, seed=size, dtype=dtype), PAPER_FRACTIONS, delta)


def test_weights_of_the_other_sign_by_hand() -> None:
    # The outermost candidates are ±1/2, a third away. At delta 0.2 they take none, at 0.4 their own.
    weights = torch.tensor([0.75, 0.75, 0.75, -0.75])
    done = wfn.fix_round(weights, none_fixed(weights), 1.0, delta=0.2, omega_max=0)
    assert [tuple(step) for step in done.steps] == [(0.5, 0, 0.4, 3), (-0.5, 0, 0.4, 1)]
    # From 1/2 to -0.75 it is 5/3, but the mean over all ten is (9/3 + 5/3) / 10 < 0.5.
    weights = torch.tensor([0.75] * 9 + [-0.75])
    done = wfn.fix_round(weights, none_fixed(weights), 1.0, delta=0.5, omega_max=0)
    assert [tuple(step) for step in done.steps] == [(0.5, 0, 0.5, 10)]


def test_small_weights_by_hand() -> None:
    # Those below 2^-7 vote for 0 and are on it; 2^-7 itself is a candidate.
    weights = torch.tensor([-0.0078, 0.0078, -0.004, 0.0, SMALLEST, -SMALLEST, 0.5])
    done = wfn.fix_round(weights, none_fixed(weights), 1.0, omega_max=0)
    expected = [(0.0, 4), (-SMALLEST, 1), (SMALLEST, 1), (0.5, 1)]
    assert [(step.centre, step.count) for step in done.steps] == expected


grids = st.integers(-96, 96).map(lambda n: n / 64)  # many ties, zeros, small ones, exact powers


@settings(max_examples=80, deadline=None)
@given(
    st.lists(grids, min_size=1, max_size=40) | st.lists(st.floats(-2, 2, width=32), min_size=1, max_size=30),
    st.sampled_from([(1.0,), (0.3, 1.0), PAPER_FRACTIONS]),
    st.sampled_from([(0.01, 20), (0.25, 2), (0.5, 0), (0.9, 0)]),
)
def test_rounds_of_any_floats_and_of_many_ties_are_those_of_a_literal_loop(
    values: list[float], fractions: Sequence[float], setting: tuple[float, int]
) -> None:
    compare_rounds(torch.tensor(values), fractions, *setting)


# The rounds' own truths


def test_fixed_weights_stay_and_inputs_are_untouched() -> None:
    weights = normal(1025)
    fixed = torch.arange(1025) % 3 == 0
    before = weights.clone(), fixed.clone()
    done = wfn.fix_round(weights, fixed, 0.8)
    assert torch.equal(weights, before[0])
    assert torch.equal(fixed, before[1])
    assert torch.equal(done.weights[fixed], weights[fixed])
    assert int(done.fixed.sum()) == math.ceil(1025 * 0.8)
    assert torch.equal(done.weights[~done.fixed], weights[~done.fixed])


def test_an_empty_vector_and_a_fraction_already_met_change_nothing() -> None:
    assert wfn.fix_round(torch.zeros(0), torch.zeros(0, dtype=torch.bool), 1.0).steps == []
    weights = normal(10)
    assert wfn.fix_round(weights, ~none_fixed(weights), 1.0).steps == []


# Candidates


@pytest.mark.parametrize("d", [0.0075, 0.01, 0.015, 0.3])
@pytest.mark.parametrize("largest", [SMALLEST, 0.0079, 0.1, 1.0, 3.7])
def test_every_weight_in_range_has_a_grid_point_within_d(d: float, largest: float) -> None:
    points = wfn.grid(wfn.grid_size(largest, d), d)
    weights = torch.linspace(SMALLEST, max(largest, SMALLEST), 10_007, dtype=torch.float64)
    middles = (points[1:] + points[:-1]) / 2
    weights = torch.cat((weights, middles[middles <= largest]))
    assert float(nearest_distance(weights, points).max()) <= d + 2**-24
    assert points[0] == SMALLEST
    assert points[-1] <= max((1 + d) * largest, SMALLEST) * (1 + 2**-23)
    if len(points) > 1:  # not one more than needed
        assert float(points[-2]) < (1 - d) * largest


@pytest.mark.parametrize("d", [0.0075, 0.015])
@pytest.mark.parametrize("omega", [0, 1, 2, 3, 5, 12, 20])
def test_every_weight_in_range_has_a_candidate_within_the_stated_distance(d: float, omega: int) -> None:
    weights = torch.linspace(SMALLEST, 1.3, 5_003, dtype=torch.float64)
    weights = torch.cat((weights, -weights))
    centres = wfn.candidates(wfn.grid_size(1.3, d), d, omega)
    bound = d + 3.0 ** -(omega + 1) * (1 + d) if omega < 12 else d
    assert float(nearest_distance(weights, centres).max()) <= bound + 2**-23


@pytest.mark.parametrize("omega", [0, 1, 2, 4])
def test_candidates_have_at_most_omega_plus_one_powers_and_are_symmetric(omega: int) -> None:
    centres = wfn.candidates(wfn.grid_size(2.0, 0.01), 0.01, omega)
    assert max(order(c) for c in centres.tolist()) <= omega + 1
    assert torch.equal(centres, -centres.flip(0))
    assert bool((centres.diff() > 0).all())
    assert torch.equal(centres, centres.float().double())


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_an_edge_is_the_last_number_nearer_to_the_candidate_below(dtype: torch.dtype) -> None:
    size = wfn.grid_size(1.3, 0.01)
    centres, ends = wfn.candidates(size, 0.01, 20), wfn._edges(size, 0.01, 20, dtype)
    after = torch.nextafter(ends, torch.full_like(ends, math.inf)).double()
    ends, lower, upper = ends.double(), centres[:-1], centres[1:]
    away = (lower != 0) & (upper != 0)  # around 0 the edges are ±2^-7
    assert bool((ends - lower <= upper - ends)[away].all())
    assert bool((after - lower > upper - after)[away].all())


def test_candidates_of_order_zero_by_hand() -> None:
    # The last grid point is within 1 % of 0.1, and 0.1 is nearer to 1/8 than to 1/16.
    expected = [2.0**-e for e in (7, 6, 5, 4, 3)]
    found = wfn.candidates(wfn.grid_size(0.1, 0.01), 0.01, 0)
    assert found.tolist() == [-c for c in expected[::-1]] + [0.0] + expected


@pytest.mark.parametrize("terms", [1, 2, 3, 4])
def test_rounding_to_powers_is_the_nearest_of_all_such_sums(terms: int) -> None:
    # All sums of at most so many powers from 2^-9 to 2^1; inputs are multiples of 2^-9.
    sums = pow2_candidates(2.0, 9, terms)
    values = torch.arange(-512, 513, dtype=torch.float64) / 512
    best = (values[:, None] - sums).abs().amin(1)
    rounded = wfn.round_to_powers(values, terms)
    assert torch.equal((values - rounded).abs(), best)
    assert max(order(c) for c in rounded.tolist()) <= terms
    assert bool((best <= 3.0**-terms * values.abs()).all())


@given(st.floats(-8, 8, width=32, allow_subnormal=False), st.integers(1, 21))
def test_rounding_to_powers_is_exact_arithmetic(value: float, terms: int) -> None:
    rounded = float(wfn.round_to_powers(torch.tensor([value]), terms))
    assert order(rounded) <= terms
    assert abs(Fraction(value) - Fraction(rounded)) <= Fraction(1, 3**terms) * abs(Fraction(value))
    if terms >= 13:
        assert rounded == value


# The pull to the centres


def value_and_gradient(loss: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
    return loss.detach(), torch.autograd.grad(loss, weights)[0]


@pytest.mark.parametrize("nearest", [None, 1, 5, 99])
@pytest.mark.parametrize(("size", "count", "temperature"), [(1, 1, 0.05), (127, 2, 0.01), (1025, 37, 1.0)])
def test_pull_is_the_dense_formula(
    size: int, count: int, temperature: float, nearest: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(wfn, "_MAX_CELLS", 300)  # several blocks
    weights = normal(size, seed=size, scale=0.2, dtype=torch.float64).requires_grad_()
    centres = normal(count, seed=count + 1, scale=0.2, dtype=torch.float64).sort().values
    free = torch.arange(size) % 4 != 1
    value, gradient = value_and_gradient(3 * Pull(centres, free, temperature, nearest)(weights), weights)
    dense, by_autograd = value_and_gradient(
        3 * oracle.pull(weights, centres, free, temperature, nearest), weights
    )
    torch.testing.assert_close(value, dense, rtol=1e-12, atol=0)
    torch.testing.assert_close(gradient, by_autograd, rtol=1e-12, atol=1e-12 * float(by_autograd.abs().max()))
    skipped = ~free | (weights.detach().abs() < SMALLEST)
    assert bool((gradient[skipped] == 0).all())
    assert bool((gradient[~skipped] != 0).all())


def test_what_does_not_count_may_be_anything() -> None:
    """Fixed weights and small ones, 0 among them, change neither value nor gradient of the others."""
    centres = torch.tensor([-0.25, 0.0, 0.5])
    free = torch.tensor([True, False, True, True, True])
    term, found = Pull(centres, free), []
    for others in ((0.3, 0.001, 0.0), (math.inf, -0.001, 0.007), (0.0, 0.0, -0.0)):
        weights = torch.tensor([0.4, others[0], others[1], -0.3, others[2]], requires_grad=True)
        value, gradient = value_and_gradient(term(weights), weights)
        assert gradient[[1, 2, 4]].tolist() == [0.0, 0.0, 0.0]
        found.append((value.item(), gradient.tolist()))
    assert found[0] == found[1] == found[2]


@pytest.mark.parametrize("nearest", [None, 4])
def test_a_step_of_float32_waits_for_nothing_and_is_near_that_of_float64(nearest: int | None) -> None:
    weights, centres = normal(1025, scale=0.2).requires_grad_(), normal(37, seed=1, scale=0.2).sort().values
    free = torch.arange(1025) % 3 != 0
    term = Pull(centres, free, nearest=nearest)
    with NoWaiting():
        value = term(weights)
        (value + wfn.scaled(weights.square().sum(), value)).backward(retain_graph=True)
    found = value_and_gradient(value, weights)
    exact = weights.detach().double().requires_grad_()
    wanted = value_and_gradient(oracle.pull(exact, centres.double(), free, nearest=nearest), exact)
    torch.testing.assert_close(found[0].double(), wanted[0], rtol=1e-5, atol=0)
    torch.testing.assert_close(found[1].double(), wanted[1], rtol=1e-3, atol=1e-6)


def test_a_pull_keeps_the_centres_it_was_made_with() -> None:
    weights, centres, free = torch.tensor([0.5, 0.3]), torch.tensor([0.4]), torch.tensor([True, True])
    term = Pull(centres, free)
    before = term(weights)
    centres.fill_(0.1)
    free.fill_(False)
    assert torch.equal(term(weights), before)


def test_leaving_out_far_centres_changes_no_more_than_stated() -> None:
    weights = normal(127, scale=0.2, dtype=torch.float64)
    weights = weights[weights.abs() >= SMALLEST]
    centres = normal(37, seed=1, scale=0.2, dtype=torch.float64).sort().values
    free = torch.tensor([True])
    terms = {nearest: Pull(centres, free, nearest=nearest) for nearest in (1, 5, 20)}
    whole = Pull(centres, free)
    for w in weights.split(1):
        distance = ((w - centres).abs() / w.abs()).sort().values
        for nearest, term in terms.items():
            margin = float(distance[nearest] - distance[0])
            bound = 37 * math.exp(-margin / 0.05) * float(distance[-1])
            assert abs(float(term(w) - whole(w))) <= bound + 1e-12


def test_pull_is_zero_where_there_is_nothing_to_pull() -> None:
    weights = torch.tensor([0.001, -0.0005], requires_grad=True)
    some, none = torch.tensor([True, True]), torch.tensor([False, False])
    for term in (
        Pull(torch.tensor([0.5]), some),
        Pull(torch.zeros(0), some),
        Pull(torch.tensor([0.5]), none),
    ):
        loss = term(weights)
        assert torch.autograd.grad(loss, weights)[0].tolist() == [0.0, 0.0]
        assert float(wfn.scaled(torch.tensor(2.0), loss).detach()) == 0.0


def test_scaled_term_is_the_ratio_of_the_task_loss_and_keeps_its_direction() -> None:
    weights = normal(127, scale=0.2, dtype=torch.float64).requires_grad_()
    task = (weights**2).sum() + 3
    centres = torch.tensor([-0.25, 0.0, 0.25], dtype=torch.float64)
    term = Pull(centres, torch.ones(127, dtype=torch.bool))(weights)
    whole = wfn.scaled(task, term, 0.4)
    assert float(whole.detach()) == pytest.approx(0.4 * float(task.detach()), rel=1e-12)
    plain, grown = (torch.autograd.grad(t, weights, retain_graph=True)[0] for t in (term, whole))
    torch.testing.assert_close(grown, plain * float(0.4 * task.detach() / term.detach()))
