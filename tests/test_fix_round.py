import math
import random
from contextlib import contextmanager
from fractions import Fraction
from itertools import product
from unittest.mock import patch

import pytest
import torch
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st
from oracles import fixing as oracle
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter

from pwfn import PAPER_FRACTIONS, PwfnError, fix_round
from pwfn.config import Rule
from pwfn.fixing import select
from pwfn.fixing.fix_round import FixResult, target_count
from pwfn.fixing.record import relative_moves

RULES = ("mean", "each", "nearest")
SWEEPS = (None, 2.0, 16.0)
DEFAULTS = {
    "rule": "mean",
    "b": 7,
    "delta": 1.0,
    "omega_max": 4,
    "sweep": None,
    "distance_floor": 2.0**-30,
}


def tensors(mu, sigma, fixed=None, dtype=torch.float64):
    mask = torch.zeros(len(mu), dtype=torch.bool) if fixed is None else torch.tensor(fixed, dtype=torch.bool)
    return torch.tensor(mu, dtype=dtype), torch.tensor(sigma, dtype=dtype), mask


def assert_agrees(mu, sigma, fixed, fraction, dtype=torch.float64, **changes) -> FixResult:
    """Both round by the specification: each choice, each mean and each mask exactly, sigma to rounding."""
    config = DEFAULTS | changes
    result = fix_round(*tensors(mu, sigma, fixed, dtype), fraction, **config)
    expected = oracle.fix_round(mu, sigma, fixed, fraction, **config)
    assert result.mu.dtype == result.sigma.dtype == dtype
    assert result.fixed.dtype == torch.bool
    # repr: nan, the centre of a sweep, is not equal to itself
    assert repr([tuple(step) for step in result.steps]) == repr(expected.steps)
    assert result.mu.tolist() == expected.mu
    assert result.fixed.tolist() == expected.fixed
    rounding = 1e-12 if dtype == torch.float64 else 2.0**-23
    assert result.sigma.tolist() == pytest.approx(expected.sigma, rel=rounding, abs=1e-12)
    return result


def smooth(rng: random.Random, size: int, b: int):
    """No ties: like a trained network, some sigmas tiny."""
    mu = [rng.gauss(0, 0.4) for _ in range(size)]
    return mu, [0.05 * 2.0 ** -rng.uniform(0, 12) for _ in range(size)]


def coarse(rng: random.Random, size: int, b: int):
    """Multiples of 2^-(b+1) and few sigmas: midpoints, equal counts and equal distances everywhere."""
    mu = [rng.randint(-24, 24) * 2.0 ** -(b + 1) for _ in range(size)]
    return mu, [2.0 ** -rng.choice((5, 6, 6, 9)) for _ in range(size)]


def heavy_tailed(rng: random.Random, size: int, b: int):
    """A few far weights, many below 2^-b, sigma the same for all or zero."""
    mu = [rng.gauss(0, 1) ** 5 / 8 for _ in range(size)]
    mu = [max(-3.0, min(3.0, m)) for m in mu]
    return mu, [rng.choice((0.0, 0.02, 0.02)) for _ in range(size)]


def near_powers(rng: random.Random, size: int, b: int):
    """Powers of two, their neighbouring floats, and zeros."""
    powers = [0.0, -0.0, *(sign * 2.0**-k for k in range(10) for sign in (1, -1))]
    mu = [math.nextafter(p, rng.choice((-9.0, p, p, 9.0))) for p in rng.choices(powers, k=size)]
    return mu, [rng.choice((2.0**-30, 0.01, 0.05)) for _ in range(size)]


DRAWS = (smooth, coarse, heavy_tailed, near_powers)


@pytest.mark.parametrize("sweep", SWEEPS)
@pytest.mark.parametrize("rule", RULES)
def test_rounds_agree_step_by_step_with_the_literal_reading(rule, sweep):
    rng = random.Random(f"{rule} {sweep}")
    swept, reached = 0, set()
    grid = product((2.0**-30, 2.0**-9), (1, 2, 4), (2, 4, 7), (1, 2, 7, 63, 127), (False, True))
    for case, (distance_floor, omega_max, b, size, training) in enumerate(grid):
        mu, sigma = DRAWS[case % len(DRAWS)](rng, size, b)
        fixed = [rng.random() < 0.1 for _ in range(size)]
        # What is fixed already has no say, be it far outside of the candidates.
        mu = [m + 1000 if f else m for m, f in zip(mu, fixed, strict=True)]
        for fraction in (0.2, 0.4, 0.6, 0.8, 1.0):
            result = assert_agrees(
                mu,
                sigma,
                fixed,
                fraction,
                rule=rule,
                b=b,
                delta=(1.0, 0.5, 3.0)[case % 3],
                omega_max=omega_max,
                sweep=sweep,
                distance_floor=distance_floor,
            )
            mu, sigma, fixed = result.mu.tolist(), result.sigma.tolist(), result.fixed.tolist()
            if training:
                mu = [m if f else m + rng.gauss(0, 0.01) for m, f in zip(mu, fixed, strict=True)]
            swept += sum(math.isnan(step.centre) for step in result.steps)
            reached |= {step.omega for step in result.steps if not math.isnan(step.centre)}
        assert all(fixed)
    assert (swept > 0) == (sweep is not None)
    assert reached >= {1, 2}


SPECIAL = {
    "one": ([0.37], [0.01]),
    "one, sigma zero": ([0.37], [0.0]),
    "one, below the smallest power": ([0.003], [0.001]),
    "all equal": ([0.3] * 9, [0.01] * 9),
    "all equal, at a candidate": ([-0.5] * 9, [0.01] * 9),
    "all zero": ([0.0] * 9, [0.01] * 9),
    "all zero, sigma zero": ([0.0, -0.0] * 4, [0.0] * 8),
    "all powers of two": ([sign * 2.0**-k for k in range(9) for sign in (1, -1)], [2.0**-30] * 18),
    "one huge outlier": ([0.1, -0.2, 0.3, 0.05, 900.7, 0.11, -0.12], [0.01] * 7),
    "one huge negative outlier": ([0.1, -0.2, -2000.0, 0.05, 0.11], [0.01, 0.02, 2.0**-30, 0.0, 0.05]),
    "sigma at its floor": ([0.1, 0.2, 0.3, -0.7, 0.45, 0.011, 1.3], [2.0**-30] * 7),
    "sigma below its floor": ([0.1, 0.2, 0.3, -0.7, 0.45, 0.011, 1.3], [0.0, 2.0**-31] * 3 + [1e-300]),
    "midway": ([0.375, -0.375, 0.75, -0.75, 2.0**-8, -(2.0**-8)], [1.0] * 6),
    "at the edge of zero": ([2.0**-7, -(2.0**-7), math.nextafter(2.0**-7, 0), -0.0078], [0.01] * 4),
}


@pytest.mark.parametrize("sweep", SWEEPS)
@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("name", SPECIAL)
def test_special_vectors_agree_with_the_literal_reading(name, rule, sweep):
    mu, sigma = SPECIAL[name]
    for fraction in (0.0, 0.3, 1.0):
        result = assert_agrees(mu, sigma, [False] * len(mu), fraction, rule=rule, sweep=sweep)
        assert int(result.fixed.sum()) == math.ceil(len(mu) * fraction)


@pytest.mark.parametrize("rule", RULES)
def test_nothing_changes_when_the_fraction_is_reached(rule):
    mu, sigma, fixed = tensors([0.3, 0.7, -0.2, 5.1], [0.1, 0.0, 0.2, 0.3], [True, False, True, False])
    everything = torch.ones(4, dtype=torch.bool)
    nothing = torch.empty(0, dtype=torch.float64)
    for before, fraction in ((fixed, 0.5), (fixed, 0.3), (fixed, 0.0), (everything, 1.0), (everything, 0.1)):
        result = fix_round(mu, sigma, before, fraction, rule=rule, sweep=1.0)
        assert result.steps == []
        assert torch.equal(result.mu, mu)
        assert torch.equal(result.sigma, sigma)
        assert torch.equal(result.fixed, before)
    assert fix_round(nothing, nothing, nothing.bool(), 1.0, rule=rule).steps == []


# Worked by hand. D = |mu - c| / sigma; b = 2, so C^1 = {0, ±1/4, ±1/2, ±1} where a weight reaches 1.


def test_the_rules_differ_as_they_should():
    # Three weights are nearest to 1/2, at D = 0, 0.5 and 1.5 from it; two to 1, at D = 3 and 4 from 1/2.
    start = tensors([0.5, 0.5625, 0.6875, 0.875, 1.0], [0.125] * 5)

    def steps(rule, delta):
        return [tuple(step) for step in fix_round(*start, 1.0, b=2, rule=rule, delta=delta).steps]

    # The mean of the first three is 2/3, of four 5/4; then 1 takes the rest, at D = 0 and 1.
    assert steps("mean", 1.0) == [(0.5, 1, 1.0, 3), (1.0, 1, 1.0, 2)]
    assert steps("nearest", 1.0) == [(0.5, 1, 1.0, 3), (1.0, 1, 1.0, 2)]
    # Two are within 1; two are within 1 of 1; the last, alone, has 1/2 as its highest candidate (3/4 is
    # beyond it), at D = 1.5.
    assert steps("each", 1.0) == [(0.5, 1, 1.0, 2), (1.0, 1, 1.0, 2), (0.5, 2, 2.0, 1)]
    # At delta 2 the mean of all five passes, 9/5: the two at 1 are drawn in, unless only the nearest may be.
    assert steps("mean", 2.0) == [(0.5, 1, 2.0, 5)]
    assert steps("nearest", 2.0) == [(0.5, 1, 2.0, 3), (1.0, 1, 2.0, 2)]
    assert steps("each", 2.0) == [(0.5, 1, 2.0, 3), (1.0, 1, 2.0, 2)]


def test_fixed_weights_get_the_centre_and_the_spread_of_what_moved():
    result = fix_round(*tensors([0.5, 0.53, 0.47, 9.0], [0.1] * 4), 0.75, b=2)
    assert result.mu.tolist() == [0.5, 0.5, 0.5, 9.0]
    assert result.fixed.tolist() == [True, True, True, False]
    # population: sqrt((0.03^2 + 0.03^2) / 3)
    assert result.sigma.tolist() == pytest.approx([math.sqrt(6e-4)] * 3 + [0.1], rel=1e-12)


def test_a_weight_fixed_alone_has_no_spread():
    result = fix_round(*tensors([0.52, -1.0], [0.1, 0.0]), 1.0, b=2)
    assert result.mu.tolist() == [0.5, -1.0]
    assert result.sigma.tolist() == [0.0, 0.0]


def test_ties():
    # Midway between 1/4 and 1/2, and between -1/2 and -1/4: the smaller one. So 1/4, -1/2 and 1 have a
    # vote each, and the smallest is taken.
    midway = fix_round(*tensors([0.375, -0.375, 1.0], [1.0] * 3), 0.3, b=2, rule="nearest")
    assert tuple(midway.steps[0]) == (-0.5, 1, 1.0, 1)
    assert midway.mu.tolist() == [0.375, -0.5, 1.0]
    # Equal D keeps the order of the vector, whatever the sign of the difference.
    for mu in ([0.55, 0.45, 0.55, 0.45], [0.45, 0.55, 0.55, 0.45]):
        result = fix_round(*tensors([round(m * 64) / 64 for m in mu], [0.125] * 4), 0.5, b=1)
        assert result.fixed.tolist() == [True, True, False, False]


def test_order_rises_and_the_threshold_doubles_until_one_is_admitted():
    # 0.32 is 2.24 sigmas from 1/4, its candidate of order 1, and 0.24 from 1/4 + 1/16, that of order 2.
    result = fix_round(*tensors([0.32], [2.0**-5]), 1.0, b=4)
    assert result.mu.tolist() == [0.3125]
    assert tuple(result.steps[0]) == (0.3125, 2, 2.0, 1)
    only_powers = fix_round(*tensors([0.32], [2.0**-5]), 1.0, b=4, omega_max=1)
    assert only_powers.mu.tolist() == [0.25]
    assert tuple(only_powers.steps[0]) == (0.25, 1, 4.0, 1)


def test_sweep_sends_each_weight_to_its_own_candidate():
    mu, sigma = [0.32, 0.7, -0.9, -0.3], [1e-3, 2e-3, 1e-6, 0.5]
    result = fix_round(*tensors(mu, sigma), 0.75, b=4, rule="nearest", sweep=4.0, omega_max=2)
    # Each weight votes for another candidate, and the smallest, -1/2 and then -3/4, has only -0.9, which is
    # far more than 1, 2 and 4 sigmas away. At 8 > 4 the three smallest D go, of order 2: -0.3 to -5/16
    # (D = 0.025), 0.32 to 5/16 (7.5), 0.7 to 3/4 (25).
    assert len(result.steps) == 1
    assert math.isnan(result.steps[0].centre)
    assert tuple(result.steps[0][1:]) == (2, 8.0, 3)
    assert result.mu.tolist() == [0.3125, 0.75, -0.9, -0.3125]
    assert result.fixed.tolist() == [True, True, False, True]
    # sigma is kept, but at most 2^-4 / 4
    assert result.sigma.tolist() == [1e-3, 2e-3, 1e-6, 2.0**-6]


def test_sweep_waits_until_the_threshold_passes_it():
    # 0.3 is 3.2 sigmas from its candidate of order 1: delta 4 will do, and 4 does not pass 4.
    start = tensors([0.3], [2.0**-6])
    assert tuple(fix_round(*start, 1.0, b=4, omega_max=1, sweep=4.0).steps[0]) == (0.25, 1, 4.0, 1)
    swept = fix_round(*start, 1.0, b=4, omega_max=1, sweep=3.9).steps[0]
    assert math.isnan(swept.centre)
    assert tuple(swept[1:]) == (1, 4.0, 1)


def test_distance_floor_is_the_smallest_sigma_in_a_distance():
    start = tensors([0.5 + 2.0**-8], [2.0**-20])
    assert fix_round(*start, 1.0, b=1, distance_floor=2.0**-8).steps[0].delta == 1.0
    assert fix_round(*start, 1.0, b=1, distance_floor=2.0**-9).steps[0].delta == 2.0
    assert fix_round(*start, 1.0, b=1).steps[0].delta == 2.0**12


def test_the_largest_weight_is_taken_anew_at_every_choice():
    # While 1.0 is free it is a candidate for 0.8 (and takes it, midway at 0.75); once it is fixed, 1/2
    # is the highest power within 0.8.
    mu, sigma = [1.0, 1.0, 1.0, 0.8], [0.01] * 4
    result = fix_round(*tensors(mu, sigma), 1.0, b=1, omega_max=1, rule="each")
    assert [step.centre for step in result.steps] == [1.0, 0.5]


def test_rule_by_name_or_by_enum():
    start = tensors([0.5, 0.55, 0.35, 0.9], [0.1] * 4)
    for rule in Rule:
        assert fix_round(*start, 1.0, rule=rule).steps == fix_round(*start, 1.0, rule=str(rule)).steps
    assert fix_round(*start, 1.0).steps == fix_round(*start, 1.0, **DEFAULTS).steps


# float32, in which networks are trained


@pytest.mark.parametrize("rule", RULES)
def test_float32_agrees_with_the_literal_reading_where_its_arithmetic_is_exact(rule):
    rng = random.Random(rule)
    for sweep, size, b in product(SWEEPS, (1, 2, 7, 63, 127), (2, 7)):
        mu, sigma = coarse(rng, size, b)  # multiples of a power of two, over powers of two
        fixed = [False] * size
        for fraction in (0.2, 0.4, 0.6, 0.8, 1.0):
            result = assert_agrees(mu, sigma, fixed, fraction, torch.float32, rule=rule, sweep=sweep, b=b)
            mu, fixed = result.mu.tolist(), result.fixed.tolist()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("rule", RULES)
def test_candidates_one_rounding_step_apart_keep_their_own_weights(rule, dtype):
    # 2^-7 is the distance of neighbouring numbers of that type here: the midpoint of two cannot be written.
    top = 2.0**17 if dtype == torch.float32 else 2.0**45 + 2.0**-6
    # The last three have most votes and are too far from their centre, so that all are swept.
    mu = [top, top - 2.0**-7, *[-0.296875] * 3]
    result = assert_agrees(mu, [2.0**-20] * 5, [False] * 5, 1.0, dtype, rule=rule, sweep=1.0, omega_max=2)
    assert result.mu.tolist() == [top, top - 2.0**-7, *[-0.3125] * 3]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("rule", RULES)
def test_a_floor_that_vanishes_in_the_number_type_ends_all_the_same(rule, dtype):
    mu, sigma, fixed = tensors([0.5, 0.3, 0.0], [0.0] * 3, dtype=dtype)
    result = fix_round(mu, sigma, fixed, 1.0, rule=rule, distance_floor=5e-324)
    assert bool(result.fixed.all())


@st.composite
def vectors(draw):
    size = draw(st.sampled_from((1, 2, 3, 7, 20, 63)))
    numbers = st.floats(-8, 8, width=32) | st.integers(-32, 32).map(lambda n: n / 16)
    sigmas = st.floats(0, 1, width=32) | st.sampled_from((0.0, 2.0**-30, 0.0625))
    mu = draw(st.lists(numbers, min_size=size, max_size=size))
    sigma = draw(st.lists(sigmas, min_size=size, max_size=size))
    return tensors(mu, sigma, draw(st.lists(st.booleans(), min_size=size, max_size=size)), torch.float32)


ANY_SETTINGS = st.fixed_dictionaries(
    {
        "rule": st.sampled_from(RULES),
        "b": st.integers(0, 8),
        "delta": st.sampled_from((0.01, 1.0, 7.0)),
        "omega_max": st.integers(1, 4),
        "sweep": st.sampled_from((None, 0.5, 16.0)),
        "distance_floor": st.sampled_from((2.0**-30, 2.0**-9, 1.0)),
    }
)


@given(start=vectors(), fraction=st.floats(0, 1), config=ANY_SETTINGS)
@hypothesis_settings(deadline=None, max_examples=300, derandomize=True)
def test_what_holds_after_any_round(start, fraction, config):
    copies = [tensor.clone() for tensor in start]
    mu, sigma, fixed = start
    result = fix_round(mu, sigma, fixed, fraction, **config)

    assert all(torch.equal(a, b) for a, b in zip(start, copies, strict=True))
    goal = max(math.ceil(Fraction(fraction) * mu.numel() - Fraction(1, 10**9)), int(fixed.sum()))
    assert int(result.fixed.sum()) == goal == int(fixed.sum()) + sum(step.count for step in result.steps)
    assert bool(result.fixed[fixed].all())
    untouched = fixed | ~result.fixed
    assert torch.equal(result.mu[untouched].view(torch.int32), mu[untouched].view(torch.int32))
    assert torch.equal(result.sigma[untouched].view(torch.int32), sigma[untouched].view(torch.int32))

    moved = result.mu[~untouched].tolist()
    limit = max([2.0 ** -config["b"], *mu[~fixed].abs().tolist()])
    assert all(oracle.is_sum_of_powers(value, config["b"], config["omega_max"]) for value in moved)
    assert all(abs(value) <= limit for value in moved)
    assert bool((torch.isfinite(result.sigma) & (result.sigma >= 0)).all())

    deltas = [step.delta for step in result.steps]
    assert deltas == sorted(deltas)
    assert all(step.count > 0 and 1 <= step.omega <= config["omega_max"] for step in result.steps)
    if config["sweep"] is None:
        assert set(moved) == {step.centre for step in result.steps}

    again = fix_round(mu, sigma, fixed, fraction, **config)
    assert repr(again.steps) == repr(result.steps)
    assert torch.equal(again.mu, result.mu)
    assert torch.equal(again.sigma, result.sigma)
    assert torch.equal(again.fixed, result.fixed)


@pytest.mark.parametrize("rule", RULES)
def test_all_rounds_of_the_paper_on_a_larger_vector(rule):
    generator = torch.Generator().manual_seed(0)
    mu = torch.randn(20_011, generator=generator) * 0.1
    sigma = torch.rand(mu.numel(), generator=generator) * 0.05
    fixed = torch.zeros(mu.numel(), dtype=torch.bool)
    for fraction in PAPER_FRACTIONS:
        result = fix_round(mu, sigma, fixed, fraction, rule=rule)
        assert int(result.fixed.sum()) == math.ceil(mu.numel() * Fraction(str(fraction)))
        assert torch.equal(result.mu[fixed], mu[fixed])
        assert torch.equal(result.sigma[fixed], sigma[fixed])
        mu, sigma, fixed = result.mu, result.sigma, result.fixed
    assert all(oracle.is_sum_of_powers(value, 7, 4) for value in mu.unique().tolist())


def test_parameters_and_strided_vectors_will_do():
    mu, sigma, fixed = tensors([0.5, 0.53, 0.47, 0.9], [0.1] * 4)
    expected = fix_round(mu, sigma, fixed, 0.75)
    parameter = fix_round(torch.nn.Parameter(mu), torch.nn.Parameter(sigma), fixed, 0.75)
    assert not parameter.mu.requires_grad
    assert not parameter.sigma.requires_grad
    strided = [tensor.repeat_interleave(2)[::2] for tensor in (mu, sigma, fixed)]
    for result in (parameter, fix_round(*strided, 0.75)):
        assert result.steps == expected.steps
        assert torch.equal(result.mu, expected.mu)
        assert torch.equal(result.sigma, expected.sigma)


# Size: vectors of length N only, and a number of operations that does not depend on N


class Watch(TorchDispatchMode):
    """Counts operations, and the bytes of all tensors alive that they made, at the highest point."""

    def __init__(self):
        super().__init__()
        self.operations = self.peak_bytes = self.largest = 0
        self._alive: dict[StorageWeakRef, int] = {}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        self.operations += 1
        for tensor in tree_iter(out):
            if isinstance(tensor, torch.Tensor):
                storage = tensor.untyped_storage()
                self._alive[StorageWeakRef(storage)] = storage.nbytes()
                self.largest = max(self.largest, tensor.numel())
        self._alive = {ref: size for ref, size in self._alive.items() if not ref.expired()}
        self.peak_bytes = max(self.peak_bytes, sum(self._alive.values()))
        return out


def test_the_watch_sees_a_table():
    with Watch() as watch:
        table = torch.ones(100)[:, None] - torch.ones(50)
        del table
        torch.ones(7)
    assert watch.largest == 100 * 50
    assert watch.peak_bytes == 4 * (100 * 50 + 100 + 50)


@pytest.mark.parametrize("rule", RULES)
def test_memory_is_a_few_vectors_and_no_loop_goes_over_the_weights(rule):
    size = 200_003
    generator = torch.Generator().manual_seed(0)
    mu = torch.randn(size, generator=generator)
    sigma = torch.rand(size, generator=generator) * 0.01
    fixed = torch.zeros(size, dtype=torch.bool)
    with Watch() as watch:
        result = fix_round(mu, sigma, fixed, 1.0, rule=rule, sweep=4.0)
    assert len(result.steps) > 10
    assert math.isnan(result.steps[-1].centre)
    assert len(oracle.candidates(float(mu.abs().max()), 7, 4)) > 1000
    assert watch.largest == size  # a table would be over 1000 times that
    assert watch.peak_bytes <= 10 * 8 * size
    assert watch.operations <= 100 * (len(result.steps) + 3)  # delta doubled three times


# Bad input: one clear sentence

GOOD = {
    "mu": torch.tensor([0.5, 0.25, -0.1]),
    "sigma": torch.tensor([0.1, 0.0, 0.2]),
    "fixed": torch.zeros(3, dtype=torch.bool),
    "fraction": 1.0,
}


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"mu": torch.tensor([0.5, math.nan, 1.0])}, r"mu\[1\] is nan.*finite"),
        ({"mu": torch.tensor([0.5, 1.0, -math.inf])}, r"mu\[2\] is -inf.*finite"),
        ({"sigma": torch.tensor([math.nan, 0.1, 0.1])}, r"sigma\[0\] is nan.*finite"),
        ({"sigma": torch.tensor([0.1, 0.1, math.inf])}, r"sigma\[2\] is inf.*finite"),
        ({"sigma": torch.tensor([0.1, -0.25, 0.1])}, r"sigma\[1\] is -0.25.*not negative"),
        ({"mu": torch.ones(4)}, "lengths 4, 3 and 3.*alike"),
        ({"sigma": torch.ones(2)}, "lengths 3, 2 and 3.*alike"),
        ({"fixed": torch.zeros(5, dtype=torch.bool)}, "lengths 3, 3 and 5.*alike"),
        ({"mu": torch.ones(3, 1)}, "mu is not a flat tensor"),
        ({"sigma": torch.tensor(1.0)}, "sigma is not a flat tensor"),
        ({"mu": [0.5, 0.25, -0.1]}, "mu is not a flat tensor"),
        ({"fixed": None}, "fixed is not a flat tensor"),
        ({"mu": torch.ones(3, dtype=torch.float64)}, "mu is torch.float64 and sigma torch.float32"),
        ({"mu": torch.ones(3, dtype=torch.int64)}, "mu is torch.int64.*float32"),
        ({"mu": torch.ones(3).half(), "sigma": torch.ones(3).half()}, "mu is torch.float16.*float32"),
        ({"fixed": torch.zeros(3)}, "fixed is torch.float32.*bool"),
        ({"fixed": torch.zeros(3, dtype=torch.uint8)}, "fixed is torch.uint8.*bool"),
        ({"fraction": 1.2}, "fraction is 1.2.*from 0 to 1"),
        ({"fraction": -0.1}, "fraction is -0.1.*from 0 to 1"),
        ({"fraction": math.nan}, "fraction is nan.*from 0 to 1"),
        ({"fraction": "1"}, "fraction is '1'.*from 0 to 1"),
        ({"fraction": "yes"}, "fraction is 'yes'.*from 0 to 1"),
        ({"fraction": None}, "fraction is None.*from 0 to 1"),
        ({"rule": "closest"}, 'rule is \'closest\'.*"mean", "each", "nearest"'),
        ({"rule": None}, 'rule is None.*"mean", "each", "nearest"'),
        ({"b": -1}, "b is -1.*whole number of at least 0"),
        ({"b": 1.5}, "b is 1.5.*whole number"),
        ({"b": "7"}, "b is '7'.*whole number"),
        ({"delta": 0}, "delta is 0.*above 0"),
        ({"delta": -1.0}, "delta is -1.0.*above 0"),
        ({"delta": math.nan}, "delta is nan.*above 0"),
        ({"omega_max": 0}, "omega_max is 0.*at least 1"),
        ({"sweep": 0}, "sweep is 0.*above 0"),
        ({"sweep": math.inf}, "sweep is inf.*above 0"),
        ({"distance_floor": 0}, "distance_floor is 0.*above 0"),
        ({"mu": torch.tensor([1e30, 0.1, 0.2])}, "the largest weight is 1e.30.*rescale or exclude"),
    ],
    ids=lambda value: ", ".join(value) if isinstance(value, dict) else None,
)
def test_bad_input(changes, words):
    arguments = GOOD | changes
    positional = [arguments.pop(name) for name in ("mu", "sigma", "fixed", "fraction")]
    with pytest.raises(PwfnError, match=words) as caught:
        fix_round(*positional, **arguments)
    assert "\n" not in str(caught.value)


def test_the_good_input_of_the_bad_ones_is_good():
    assert int(fix_round(*GOOD.values()).fixed.sum()) == 3


def test_integers_are_numbers_too():
    result = fix_round(*tensors([0.5, 0.3], [0.1, 0.1]), 1, delta=1, sweep=16, b=7)
    assert bool(result.fixed.all())


# Counts and moves


def test_target_count_is_the_exact_ceiling_of_a_decimal_fraction():
    for thousandths in range(1001):
        for size in (0, 1, 2, 7, 63, 127, 1000, 268_346, 11_164_362):
            assert target_count(size, thousandths / 1000) == math.ceil(Fraction(thousandths, 1000) * size)


def test_target_count_forgives_rounding_and_no_more():
    assert 100 * 0.07 > 7
    assert target_count(100, 0.07) == 7
    assert target_count(100, 0.07 + 1e-12) == 7
    assert target_count(100, 0.07 + 1e-10) == 8
    assert target_count(3, 1e-8) == 1


def test_relative_moves_by_hand():
    before = torch.tensor([1.0, 2.0, -0.5, 0.0, 0.3, 0.0, -0.25], dtype=torch.float64)
    after = torch.tensor([1.5, 1.5, -0.5, 0.25, 0.25, 0.0, 0.25], dtype=torch.float64)
    moves = relative_moves(before, after)
    assert [(move.centre, move.count, move.from_zero) for move in moves] == [
        (-0.5, 1, 0),
        (0.0, 1, 1),
        (0.25, 3, 1),
        (1.5, 2, 0),
    ]
    # 0.3 to 0.25 is 1/6 of the way, -0.25 to 0.25 twice its own size
    assert [move.mean for move in moves] == pytest.approx([0, 0, (1 / 6 + 2) / 2, 0.375], rel=1e-12)
    assert [move.largest for move in moves] == pytest.approx([0, 0, 2, 0.5], rel=1e-12)


def test_relative_moves_of_float32_and_of_nothing():
    before = torch.tensor([0.1, -0.2, 0.0])
    moves = relative_moves(before, torch.tensor([0.125, -0.25, 0.125]))
    assert [tuple(move) for move in moves] == [
        (-0.25, 1, pytest.approx(0.25, rel=1e-6), pytest.approx(0.25, rel=1e-6), 0),
        (0.125, 2, pytest.approx(0.25, rel=1e-6), pytest.approx(0.25, rel=1e-6), 1),
    ]
    assert relative_moves(before[:0], before[:0]) == []
    parameter = torch.nn.Parameter(before)
    assert relative_moves(parameter, parameter)[0] == (pytest.approx(-0.2), 1, 0.0, 0.0, 0)


def test_relative_moves_of_a_round_account_for_every_weight():
    generator = torch.Generator().manual_seed(1)
    mu = torch.randn(127, generator=generator)
    result = fix_round(mu, torch.full((127,), 0.05), torch.zeros(127, dtype=torch.bool), 1.0, rule="nearest")
    moves = relative_moves(mu, result.mu)
    assert sum(move.count for move in moves) == 127
    for move in moves:
        own = [abs(m - move.centre) / abs(m) for m in mu[result.mu == move.centre].tolist()]
        assert len(own) == move.count
        assert move.mean == pytest.approx(math.fsum(own) / len(own), rel=1e-12)
        assert move.largest == max(own)


# The machinery: blocks, compaction, and the search for the last distance in bins, at sizes that use them


@contextmanager
def machinery(block=7, worth=1, few=0, bin_bits=3):
    """Make a short vector go the way of a long one."""
    with patch.multiple(select, _BLOCK=block, _WORTH=worth, _FEW=few, _BIN_BITS=bin_bits):
        yield


SMALL = ({"block": 1}, {"block": 64, "few": 2}, {"worth": 10**9}, {"few": 10**9})


@pytest.mark.parametrize("small", SMALL, ids=str)
@pytest.mark.parametrize("rule", RULES)
def test_blocks_and_bins_change_nothing_against_the_literal_reading(rule, small):
    rng = random.Random(f"{rule} {small}")
    cases = product(DRAWS, (1, 2, 63), (None, 4.0))
    for case, (draw, size, sweep) in enumerate(cases):
        mu, sigma = draw(rng, size, 4)
        fixed = [rng.random() < 0.3 for _ in range(size)]
        for fraction in (0.5, 0.9, 1.0):
            with machinery(**small):
                result = assert_agrees(
                    mu,
                    sigma,
                    fixed,
                    fraction,
                    rule=rule,
                    b=4,
                    delta=(1.0, 0.25)[case % 2],
                    sweep=sweep,
                )
            mu, sigma, fixed = result.mu.tolist(), result.sigma.tolist(), result.fixed.tolist()


@pytest.mark.parametrize("rule", RULES)
def test_a_thousand_weights_in_blocks_agree_with_the_literal_reading(rule):
    rng = random.Random(rule)
    for draw, fraction in product(DRAWS, (0.3, 1.0)):
        mu, sigma = draw(rng, 1025, 5)
        with machinery(block=127, few=16):
            assert_agrees(mu, sigma, [False] * 1025, fraction, rule=rule, b=5, omega_max=2, sweep=8.0)


@st.composite
def exact_vectors(draw):
    """Multiples of 1/64 over powers of two: every distance and sum of them is exact, also in float32."""
    size = draw(st.sampled_from((1, 2, 3, 7, 20, 40)))
    numbers = st.integers(-96, 96).map(lambda n: n / 64)
    sigmas = st.sampled_from((0.0, 2.0**-9, 2.0**-6, 2.0**-5, 2.0**-4, 0.5))
    lists = (st.lists(kind, min_size=size, max_size=size) for kind in (numbers, sigmas, st.booleans()))
    return tuple(draw(each) for each in lists)


@given(
    start=exact_vectors(),
    fraction=st.floats(0, 1),
    rule=st.sampled_from(RULES),
    sweep=st.sampled_from((None, 0.5, 4.0)),
    delta=st.sampled_from((0.125, 1.0, 3.0)),
    dtype=st.sampled_from((torch.float32, torch.float64)),
    small=st.fixed_dictionaries(
        {
            "block": st.integers(1, 41),
            "worth": st.sampled_from((0, 10, 100)),
            "few": st.sampled_from((0, 1, 5, 100)),
            "bin_bits": st.integers(1, 5),
        }
    ),
)
@hypothesis_settings(deadline=None, max_examples=300, derandomize=True)
def test_any_blocks_and_bins_agree_with_the_literal_reading(
    start, fraction, rule, sweep, delta, dtype, small
):
    # 2^-9 as the floor, so that distances to it are exact as well
    more = {"distance_floor": 2.0**-9, "b": 4, "omega_max": 2}
    with machinery(**small):
        assert_agrees(*start, fraction, dtype, rule=rule, sweep=sweep, delta=delta, **more)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("sweep", [None, 4.0])
@pytest.mark.parametrize("rule", RULES)
def test_blocks_and_compaction_give_the_same_bits(rule, sweep, dtype):
    generator = torch.Generator().manual_seed(2)
    mu = torch.randn(20_011, generator=generator, dtype=dtype) * 0.1
    sigma = 0.05 * 2 ** (-8 * torch.rand(mu.numel(), generator=generator, dtype=dtype))
    mu[::7] = mu[::7].mul(64).round() / 64  # many equal distances
    sigma[::7] = 0.03125
    fixed = torch.rand(mu.numel(), generator=generator) < 0.1
    for fraction in (0.3, 0.7, 1.0):
        with machinery(block=10**6, worth=10**6, few=10**6):
            plain = fix_round(mu, sigma, fixed, fraction, rule=rule, sweep=sweep)
        with machinery(block=1_000, worth=100, few=50, bin_bits=6):
            result = fix_round(mu, sigma, fixed, fraction, rule=rule, sweep=sweep)
        assert repr(result.steps) == repr(plain.steps)
        assert torch.equal(result.mu, plain.mu)
        assert torch.equal(result.fixed, plain.fixed)
        assert torch.allclose(
            result.sigma, plain.sigma, rtol=1e-6 if dtype == torch.float32 else 1e-12, atol=0
        )
        mu, sigma, fixed = plain.mu, plain.sigma, plain.fixed


@pytest.mark.parametrize("few", [0, 10**9])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_window_holds_its_own_edge(dtype, few):
    # Around 1/2, reach is delta times the largest sigma, 1/16: the weights at its very ends have D = 1.
    ends = torch.tensor([0.4375, 0.5625], dtype=dtype)
    beyond = torch.nextafter(ends, torch.tensor([0.0, 1.0], dtype=dtype))
    mu = torch.cat((ends, beyond, torch.tensor([0.5, 0.5], dtype=dtype)))
    sigma = torch.full_like(mu, 2.0**-4)
    with machinery(few=few, block=2):
        result = fix_round(mu, sigma, torch.zeros(6, dtype=torch.bool), 1.0, rule="each", b=1, omega_max=1)
    assert result.steps[0] == (0.5, 1, 1.0, 4)
    assert result.steps[1] == (0.5, 1, 2.0, 2)


@pytest.mark.parametrize("far", [0.75, 1.0, 1.875, 3.0])
def test_a_prefix_may_reach_far_beyond_delta(far):
    # Many weights on the centre keep the mean low: so the last one admitted is 24, 32, 60 and 96 sigmas away.
    mu, sigma = [0.0] * 200 + [far, far + 0.125], [2.0**-5] * 202
    config = {"rule": "mean", "b": 1, "omega_max": 1}
    for needed in (199, 200, 201, 202):
        with machinery(block=50):
            result = assert_agrees(mu, sigma, [False] * 202, needed / 202, **config)
        assert result.steps[0].centre == 0.0
        assert result.steps[0].count == needed


def test_a_prefix_ends_where_its_mean_is_exactly_delta():
    # Distances 0, 1, 1, 2, 2, 3: the mean of the first four is 1, and of five it is more.
    mu, sigma = [0.0, 0.25, -0.125, 0.125, 0.25, 0.375], [0.125] * 6
    for few in (0, 10**9):
        with machinery(few=few):
            result = assert_agrees(mu, sigma, [False] * 6, 1.0, rule="mean", b=0, omega_max=1)
        # one of the two at distance 2: the earlier one
        assert result.steps[0] == (0.0, 1, 1.0, 4)


def test_votes_are_counted_anew_when_the_largest_weight_is_gone():
    # 4.0 goes first; with 2.0 as the highest power within 2.9 those between 2 and 3 vote otherwise.
    mu = [4.0, 4.0, 4.0, 4.0, 2.9, 2.9, 1.6, 1.6, 1.45, 0.7, 0.7]
    for rule, omega_max in product(RULES, (1, 2)):
        for small in SMALL:
            with machinery(**small):
                assert_agrees(
                    mu, [0.05] * 11, [False] * 11, 1.0, rule=rule, b=2, omega_max=omega_max, delta=0.5
                )


@given(
    values=st.lists(
        st.floats(0, width=32, allow_nan=False) | st.sampled_from((0.0, 0.5, 1.0, math.inf)), max_size=60
    ),
    needed=st.integers(0, 61),
    pieces=st.integers(1, 5),
    few=st.sampled_from((0, 1, 7)),
    bin_bits=st.integers(1, 12),
    dtype=st.sampled_from((torch.float32, torch.float64)),
)
@hypothesis_settings(deadline=None, max_examples=300, derandomize=True)
def test_the_smallest_distances_are_cut_where_a_sort_would(values, needed, pieces, few, bin_bits, dtype):
    parts = list(torch.tensor(values, dtype=dtype).tensor_split(pieces))
    with machinery(few=few, bin_bits=bin_bits):
        found = select.cut(parts, needed)
    ascending = sorted(values)[:needed]
    assert found.length == len(ascending)
    if ascending:
        assert found.last == ascending[-1]
        assert found.ties == ascending.count(ascending[-1])


@given(
    values=st.lists(st.integers(0, 64).map(lambda n: n / 8), max_size=60),
    needed=st.integers(0, 61),
    delta=st.sampled_from((0.125, 1.0, 3.0, 100.0)),
    few=st.sampled_from((0, 1, 7)),
    bin_bits=st.integers(1, 12),
)
@hypothesis_settings(deadline=None, max_examples=300, derandomize=True)
def test_a_prefix_with_a_mean_is_cut_where_a_sort_would(values, needed, delta, few, bin_bits):
    with machinery(few=few, bin_bits=bin_bits):
        found = select.cut([torch.tensor(values)], needed, delta)
    ascending = sorted(values)[:needed]
    while sum(ascending) > delta * len(ascending):
        ascending.pop()
    assert found.length == len(ascending)
    below = sum(value < found.last for value in values)
    assert below + found.ties == len(ascending)
    assert found.ties <= values.count(found.last)


def test_moves_of_many_centres_in_any_order():
    rng = random.Random(0)
    after = [rng.choice((0.0, 0.5, *(n / 64 for n in range(-40, 40)))) for _ in range(1025)]
    before = [a + rng.choice((0.0, 0.01, -a, rng.gauss(0, 0.1))) for a in after]
    moves = relative_moves(*(torch.tensor(v, dtype=torch.float64) for v in (before, after)))
    assert [move.centre for move in moves] == sorted(set(after))
    for move in moves:
        own = [old for old, new in zip(before, after, strict=True) if new == move.centre]
        ratios = [abs(old - move.centre) / abs(old) for old in own if old != 0]
        assert move.count == len(own)
        assert move.from_zero == len(own) - len(ratios)
        assert move.mean == pytest.approx(math.fsum(ratios) / max(len(ratios), 1), rel=1e-12)
        assert move.largest == max(ratios, default=0.0)
