import math
from fractions import Fraction
from itertools import combinations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from oracles import fixing as oracle

from pwfn import PwfnError, candidates
from pwfn.fixing.candidates import order

MAX_ABS = [
    0.0,
    1e-30,  # far below 2^-b: the three candidates that are always in
    2.0**-7 * 0.75,
    2.0**-7,
    math.nextafter(2.0**-4, 0.0),
    2.0**-4,
    0.3,
    math.nextafter(1.0, 0.0),
    1.0,
    math.nextafter(1.0, 2.0),
    1.5,  # itself a candidate of order 2
    2.7,
    100.0,
    1000.3,
]


@pytest.mark.parametrize("omega", [1, 2, 3, 4])
@pytest.mark.parametrize("b", [0, 1, 3, 7])
@pytest.mark.parametrize("max_abs", MAX_ABS)
def test_candidates_are_all_the_sums_and_no_others(max_abs, b, omega):
    grid = candidates(max_abs, b, omega)
    assert grid.dtype == torch.float64
    assert [Fraction(c) for c in grid.tolist()] == list(oracle.candidates(max_abs, b, omega))


@pytest.mark.parametrize("omega", [5, 6])
def test_candidates_of_high_order(omega):
    grid = candidates(3.3, 4, omega)
    assert [Fraction(c) for c in grid.tolist()] == list(oracle.candidates(3.3, 4, omega))


def test_candidates_by_hand():
    assert candidates(1.0, 2, 1).tolist() == [-1, -0.5, -0.25, 0, 0.25, 0.5, 1]
    # Two powers with top = 0: 1 + 0.25 is beyond 1.2, 1 - 0.25 and 0.5 + 0.25 are one candidate.
    assert candidates(1.2, 2, 2).tolist() == [-1, -0.75, -0.5, -0.25, 0, 0.25, 0.5, 0.75, 1]
    # 7 = 8 - 1 needs three powers here, since 8 is beyond 7.5: 4 + 2 + 1.
    assert 7.0 not in candidates(7.5, 0, 2).tolist()
    assert 7.0 in candidates(7.5, 0, 3).tolist()
    assert 7.0 in candidates(8.0, 0, 2).tolist()
    # All weights zero: as if the largest were 2^-b.
    assert candidates(0.0, 7, 4).tolist() == [-(2.0**-7), 0, 2.0**-7]


@given(
    max_abs=st.floats(0, 64),
    b=st.integers(0, 12),
    omega=st.integers(1, 4),
)
@settings(deadline=None, max_examples=150, derandomize=True)
def test_candidates_are_sorted_symmetric_unique_and_bounded(max_abs, b, omega):
    grid = candidates(max_abs, b, omega)
    assert bool((grid[1:] > grid[:-1]).all())
    assert torch.equal(grid, -grid.flip(0))
    assert {0.0, 2.0**-b, -(2.0**-b)} <= set(grid.tolist())
    assert float(grid[-1]) <= max(max_abs, 2.0**-b)
    assert all(oracle.is_sum_of_powers(c, b, omega) for c in grid.tolist())
    lower = set(candidates(max_abs, b, omega - 1).tolist()) if omega > 1 else {0.0}
    assert lower <= set(grid.tolist())


def test_each_call_gives_a_tensor_of_its_own():
    candidates(1.0, 7, 2).zero_()
    assert candidates(1.0, 7, 2).unique().numel() == candidates(1.0, 7, 2).numel() > 3


def test_max_abs_may_be_an_integer_or_a_scalar_tensor():
    assert torch.equal(candidates(2, 3, 2), candidates(2.0, 3, 2))
    assert torch.equal(candidates(torch.tensor(2.0), 3, 2), candidates(2.0, 3, 2))


@pytest.mark.parametrize(
    ("max_abs", "b", "omega", "words"),
    [
        (-1.0, 7, 2, "max_abs is -1.0"),
        (math.nan, 7, 2, "max_abs is nan"),
        (math.inf, 7, 2, "max_abs is inf"),
        ("1.0", 7, 2, "max_abs is '1.0'"),
        (None, 7, 2, "max_abs is None"),
        (10**400, 7, 2, "allowed is a finite number of at least 0"),
        (torch.ones(2), 7, 2, "allowed is a finite number of at least 0"),
        (1.0, -1, 2, "b is -1"),
        (1.0, 7.5, 2, "b is 7.5"),
        (1.0, "7", 2, "b is '7'"),
        (1.0, 7, 0, "omega 0"),
        (1.0, 7, 1.0, "omega 1.0"),
        (1e30, 7, 1, "the largest weight is 1e.30.*rescale or exclude"),
        (2.0**40, 7, 6, "the largest weight is .*rescale or exclude"),
    ],
)
def test_bad_arguments_of_candidates(max_abs, b, omega, words):
    with pytest.raises(PwfnError, match=words) as caught:
        candidates(max_abs, b, omega)
    assert "\n" not in str(caught.value)


def brute_force_orders(below: int) -> dict[int, int]:
    """The size of the smallest set of distinct signed powers that sums to each integer, by trying all."""
    powers = [sign * 2**k for k in range(below.bit_length() + 1) for sign in (1, -1)]
    found: dict[int, int] = {}
    for size in range(6):
        for chosen in combinations(powers, size):
            found.setdefault(sum(chosen), size)
    return {n: found[n] for n in range(-below, below + 1)}


def test_order_is_the_size_of_the_smallest_sum():
    for n, size in brute_force_orders(300).items():
        assert oracle.fewest_powers(n) == size
        for scale in (2.0**-20, 2.0**-7, 1.0, 2.0**10):
            assert order(n * scale) == size


def test_order_by_hand():
    assert order(0.0) == order(-0.0) == 0
    assert order(5e-324) == order(2.0**1023) == 1
    assert order(7.0) == 2  # 8 - 1
    assert order(-0.34375) == 3  # -(11/32) = -(8 + 4 - 1)/32


@given(st.floats(allow_nan=False, allow_infinity=False))
@settings(deadline=None, max_examples=200, derandomize=True)
def test_order_of_any_float(value):
    assert order(value) == order(-value) == oracle.fewest_powers(Fraction(value).numerator)


@pytest.mark.parametrize("omega", [1, 2, 3, 4])
def test_order_of_a_candidate_is_at_most_omega(omega):
    orders = [order(c) for c in candidates(5.0, 7, omega).tolist()]
    assert max(orders) == omega
