"""Conditioning against a dense Gaussian in float64, written out with numpy."""

import math
from fractions import Fraction

import numpy as np
import pytest
import torch
from conditioned_rounds import conditional_mean
from hypothesis import given, settings
from hypothesis import strategies as st

from pwfn.errors import WeightError
from pwfn.fixing.conditioning.columns import (
    DAMPING,
    best_linear,
    damped,
    fix_columns,
    inverse_factor,
)
from pwfn.fixing.step import dyadic, next_dyadic

KINDS = ("full", "few", "rank 1", "zero rows", "zero")


def dense(moments, damping):
    """One group's H, by the definition of damping."""
    h = moments.double().numpy()
    mean = np.trace(h) / len(h)
    return h + (damping * mean if mean > 0 else 1.0) * np.eye(len(h))


def dense_mean(w, c, fixed, h):
    """One row: w_R - H_RR^-1 H_RF (c_F - w_F), and c_F."""
    free, out = ~fixed, np.where(fixed, c, w)
    if free.any() and fixed.any():
        out[free] -= np.linalg.solve(h[np.ix_(free, free)], h[np.ix_(free, fixed)] @ (c - w)[fixed])
    return out


def literal_columns(w, h, step):
    """One row: fix a column at its nearest multiple, then condition all others on all that are fixed."""
    fixed, now = np.zeros(len(w), dtype=bool), w
    for j in range(len(w)):
        now = now.copy()
        now[j] = np.round(now[j] / step) * step
        fixed[j] = True
        now = dense_mean(w, now, fixed, h)
    return now


def cost(change, h):
    """``dw H dw^T`` of every row."""
    return ((change @ h) * change).sum(-1)


def make_inputs(generator, groups, columns, kind):
    """Correlated inputs with energies that differ by orders of magnitude; groups × samples × columns."""
    samples = {"full": 4 * columns + 3, "few": columns // 2 + 1, "rank 1": 1}.get(kind, 2 * columns)
    x = torch.randn(groups, samples, columns, generator=generator, dtype=torch.float64)
    x = x + torch.randn(groups, samples, 1, generator=generator, dtype=torch.float64)
    x = x * 10 ** (2 * torch.rand(groups, 1, columns, generator=generator, dtype=torch.float64) - 1)
    if kind == "zero rows":
        x[:, :, ::2] = 0
    if kind == "zero":
        x[0] = 0  # other groups keep their inputs
    return x


def make_case(seed, groups, rows, columns, kind, dtype=torch.float64):
    generator = torch.Generator().manual_seed(seed)
    x = make_inputs(generator, groups, columns, kind)
    weight = torch.randn(groups, rows, columns, generator=generator, dtype=torch.float64)
    return weight.to(dtype), (x.mT @ x / x.shape[1]).to(dtype), generator


shapes = st.tuples(st.integers(1, 3), st.integers(1, 5), st.integers(1, 23))
seeds = st.integers(0, 2**32)


# ---- the conditional mean


@settings(max_examples=300, deadline=None)
@given(
    seeds,
    shapes,
    st.sampled_from(KINDS),
    st.sampled_from([0.0, 0.1, 0.5, 0.9, 1.0]),
    st.sampled_from([0.01, 0.3]),
)
def test_conditional_mean_is_that_of_a_dense_gaussian(seed, shape, kind, share, damping):
    weight, moments, generator = make_case(seed, *shape, kind)
    fixed = torch.rand(shape, generator=generator) < share
    values = (weight * 2).round() / 2
    got = conditional_mean(weight, values, fixed, moments, damping, tolerance=1e-13)
    assert torch.equal(got[fixed], values[fixed])
    assert torch.equal(got[~fixed], weight[~fixed]) or bool(fixed.any())
    for g in range(shape[0]):
        h = dense(moments[g], damping)
        for r in range(shape[1]):
            expected = dense_mean(weight[g, r].numpy(), values[g, r].numpy(), fixed[g, r].numpy(), h)
            np.testing.assert_allclose(got[g, r].numpy(), expected, rtol=1e-7, atol=1e-7)


def test_conditional_mean_without_damping():
    weight, moments, generator = make_case(0, 2, 4, 17, "full")
    fixed = torch.rand(weight.shape, generator=generator) < 0.5
    got = conditional_mean(weight, weight.round(), fixed, moments, damping=0.0, tolerance=1e-13)
    for g in range(2):
        for r in range(4):
            row = weight[g, r].numpy()
            expected = dense_mean(row, row.round(), fixed[g, r].numpy(), moments[g].numpy())
            np.testing.assert_allclose(got[g, r].numpy(), expected, rtol=1e-7, atol=1e-7)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_the_default_tolerance_reaches_the_least_cost(kind, dtype):
    weight, moments, generator = make_case(1, 2, 6, 131, kind, dtype)
    fixed = torch.rand(weight.shape, generator=generator) < 0.6
    values = weight.round()
    got = conditional_mean(weight, values, fixed, moments)
    assert got.dtype == dtype
    for g in range(2):
        h = dense(moments[g], DAMPING)
        for r in range(6):
            row, c, mask = weight[g, r].double().numpy(), values[g, r].double().numpy(), fixed[g, r].numpy()
            least = cost(dense_mean(row, c, mask, h) - row, h)
            reached = cost(got[g, r].double().numpy() - row, h)
            assert reached == pytest.approx(least, rel=1e-9 if dtype == torch.float64 else 1e-5)


def test_values_of_free_weights_do_not_matter():
    weight, moments, generator = make_case(2, 2, 3, 9, "few")
    fixed = torch.rand(weight.shape, generator=generator) < 0.5
    values = weight.round()
    unknown = torch.where(fixed, values, math.nan)
    assert torch.equal(
        conditional_mean(weight, values, fixed, moments), conditional_mean(weight, unknown, fixed, moments)
    )


def test_conditioning_on_the_mean_itself_moves_nothing():
    weight, moments, generator = make_case(3, 2, 3, 9, "full")
    fixed = torch.rand(weight.shape, generator=generator) < 0.5
    assert torch.equal(conditional_mean(weight, weight, fixed, moments), weight)


def test_conditioning_twice_is_conditioning_once():
    # N(w, S) given F and G: given F first, then G, with F still fixed.
    weight, moments, generator = make_case(4, 1, 5, 12, "full")
    first = torch.rand(weight.shape, generator=generator) < 0.3
    both = first | (torch.rand(weight.shape, generator=generator) < 0.4)
    values = weight.round()
    once = conditional_mean(weight, values, both, moments, tolerance=1e-13)
    between = conditional_mean(weight, values, first, moments, tolerance=1e-13)
    h = dense(moments[0], DAMPING)
    for r in range(5):
        # The posterior that is left has the mean `between` and the precision H_RR.
        rest = ~first[0, r].numpy()
        twice = dense_mean(
            between[0, r].numpy()[rest],
            values[0, r].numpy()[rest],
            both[0, r].numpy()[rest],
            h[np.ix_(rest, rest)],
        )
        np.testing.assert_allclose(once[0, r].numpy()[rest], twice, rtol=1e-8, atol=1e-8)


def test_the_units_of_inputs_do_not_matter():
    # x_i measured in units of 2^-b_i: w_i is 2^b_i times as large and so is its conditional mean.
    weight, moments, generator = make_case(18, 2, 4, 40, "full")
    fixed = torch.rand(weight.shape, generator=generator) < 0.5
    unit = torch.ldexp(torch.ones(40), torch.randint(-20, 20, (40,), generator=generator)).double()
    values, scaled = weight.round(), moments / unit / unit[:, None]
    got = conditional_mean(weight * unit, values * unit, fixed, scaled, damping=0.0)
    torch.testing.assert_close(got / unit, conditional_mean(weight, values, fixed, moments, damping=0.0))


def test_a_row_stops_when_it_has_converged_itself():
    # With a loose tolerance one iteration more or less shows: rows must not depend on those beside them.
    weight, moments, generator = make_case(19, 1, 20, 60, "full")
    fixed = torch.rand(weight.shape, generator=generator) < torch.linspace(0.1, 0.9, 20)[:, None]
    values = weight.round()
    together = conditional_mean(weight, values, fixed, moments, tolerance=1e-2)
    for r in range(20):
        row = slice(r, r + 1)
        alone = conditional_mean(weight[:, row], values[:, row], fixed[:, row], moments, tolerance=1e-2)
        torch.testing.assert_close(together[:, row], alone, rtol=1e-10, atol=1e-10)


# ---- the factor


@settings(max_examples=100, deadline=None)
@given(seeds, shapes, st.sampled_from(KINDS), st.sampled_from([0.01, 0.3]))
def test_factor_of_the_inverse(seed, shape, kind, damping):
    _, moments, _ = make_case(seed, *shape, kind)
    factor = inverse_factor(moments, damping)
    assert torch.equal(factor, factor.triu())
    for g in range(shape[0]):
        h, u = dense(moments[g], damping), factor[g].numpy()
        np.testing.assert_allclose(damped(moments, damping)[g].numpy(), h, rtol=1e-12, atol=0)
        np.testing.assert_allclose(u.T @ u @ h, np.eye(len(h)), atol=1e-7)


@pytest.mark.parametrize("kind", KINDS)
def test_squared_diagonal_is_the_variance_given_all_columns_before(kind):
    # Columns before j are fixed, columns after j are not: the first element of H_RR^-1, R = j and later.
    _, moments, _ = make_case(5, 2, 1, 19, kind)
    factor = inverse_factor(moments)
    for g in range(2):
        covariance = np.linalg.inv(dense(moments[g], DAMPING))
        for j in range(19):
            # The Schur complement: the textbook's conditional covariance, which knows nothing of H_RR.
            s_rr, s_rf, s_ff = covariance[j:, j:], covariance[j:, :j], covariance[:j, :j]
            left = s_rr - s_rf @ np.linalg.solve(s_ff, s_rf.T)
            u = factor[g, j:, j:].numpy()
            assert u[0, 0] ** 2 == pytest.approx(left[0, 0], rel=1e-7)
            np.testing.assert_allclose(u.T @ u, left, rtol=1e-6, atol=1e-6 * abs(left).max())


def test_damping_is_relative():
    weight, moments, _ = make_case(6, 2, 4, 10, "few")
    torch.testing.assert_close(damped(moments * 1024), damped(moments) * 1024, rtol=1e-15, atol=0)
    assert torch.equal(fix_columns(weight, moments * 1024, 0.5), fix_columns(weight, moments, 0.5))


# ---- a column at a time


@settings(max_examples=200, deadline=None)
@given(seeds, shapes, st.sampled_from(KINDS), st.sampled_from([0.25, 0.7, 2.0]), st.sampled_from([0.01, 0.3]))
def test_fix_columns_is_the_literal_loop(seed, shape, kind, step, damping):
    weight, moments, _ = make_case(seed, *shape, kind)
    got = fix_columns(weight, moments, step, damping)
    for g in range(shape[0]):
        h = dense(moments[g], damping)
        for r in range(shape[1]):
            expected = literal_columns(weight[g, r].numpy(), h, step)
            np.testing.assert_allclose(got[g, r].numpy(), expected, rtol=1e-12)


@pytest.mark.parametrize("columns", [63, 64, 65, 130])
@pytest.mark.parametrize("kind", ["full", "few"])
def test_the_size_of_a_block_does_not_show(columns, kind):
    weight, moments, _ = make_case(7, 2, 2, columns, kind)
    got = fix_columns(weight, moments, 0.5)
    for g in range(2):
        h = dense(moments[g], DAMPING)
        for r in range(2):
            np.testing.assert_allclose(got[g, r].numpy(), literal_columns(weight[g, r].numpy(), h, 0.5))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("columns", [1, 13, 67])
def test_fix_columns_is_a_loop_over_conditional_means(kind, columns):
    weight, moments, _ = make_case(8, 2, 3, columns, kind)
    now, fixed = weight.clone(), torch.zeros_like(weight, dtype=torch.bool)
    for j in range(columns):
        now[:, :, j] = torch.round(now[:, :, j] / 0.5) * 0.5
        fixed[:, :, j] = True
        now = conditional_mean(weight, now, fixed, moments, tolerance=1e-13)
    assert torch.equal(fix_columns(weight, moments, 0.5), now)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_values_are_multiples_and_the_weights_given_stay(dtype):
    weight, moments, _ = make_case(9, 2, 5, 70, "few", dtype)
    before = weight.clone(), moments.clone()
    step = dyadic(0.3)
    fixed = fix_columns(weight, moments, step)
    assert fixed.dtype == dtype
    assert fixed.shape == weight.shape
    # A dyadic step is exact: no rounding error to allow for.
    assert torch.equal(fixed / step, (fixed / step).round())
    assert torch.equal(weight, before[0])
    assert torch.equal(moments, before[1])


@pytest.mark.parametrize("damping", [0.0, 0.01])
def test_independent_inputs_mean_plain_rounding(damping):
    weight, _, generator = make_case(10, 3, 5, 70, "full")
    moments = torch.diag_embed(torch.rand(3, 70, generator=generator, dtype=torch.float64) + 0.1)
    assert torch.equal(fix_columns(weight, moments, 0.25, damping), (weight / 0.25).round() * 0.25)


def test_inputs_that_are_all_zero_mean_plain_rounding():
    weight, moments, _ = make_case(11, 1, 5, 70, "zero")
    assert not moments.any()
    assert torch.equal(fix_columns(weight, moments, 0.25), (weight / 0.25).round() * 0.25)


@pytest.mark.parametrize("kind", KINDS)
def test_a_tiny_step_keeps_the_weights(kind):
    weight, moments, _ = make_case(12, 2, 3, 70, kind)
    torch.testing.assert_close(fix_columns(weight, moments, 2.0**-40), weight, rtol=0, atol=1e-7)


def test_weights_on_the_grid_stay():
    weight, moments, _ = make_case(13, 2, 3, 70, "few")
    on_grid = weight.round()
    assert torch.equal(fix_columns(on_grid, moments, 1.0), on_grid)


def test_rows_and_groups_do_not_see_each_other():
    weight, moments, _ = make_case(14, 3, 4, 20, "few")
    together = fix_columns(weight, moments, 0.5)
    for g in range(3):
        for r in range(4):
            alone = fix_columns(weight[g : g + 1, r : r + 1], moments[g : g + 1], 0.5)
            assert torch.equal(together[g : g + 1, r : r + 1], alone)


@settings(max_examples=100, deadline=None)
@given(seeds, shapes, st.sampled_from(KINDS), st.floats(0.05, 3.0))
def test_the_cost_has_a_bound(seed, shape, kind, step):
    # (w - c) H (w - c)^T = sum_j e_j^2 / U_jj^2, and an error e_j of rounding is at most step / 2.
    weight, moments, _ = make_case(seed, *shape, kind)
    change = weight - fix_columns(weight, moments, step)
    h, u = damped(moments), inverse_factor(moments).diagonal(dim1=1, dim2=2)
    bound = step**2 / 4 * (u**-2).sum(1, keepdim=True)
    assert bool((cost(change, h) <= bound * (1 + 1e-6)).all())
    # Never worse than the bound of plain rounding, step^2 / 4 times the diagonal of H.
    assert bool((u**-2 <= h.diagonal(dim1=1, dim2=2) * (1 + 1e-6)).all())


def test_the_cost_is_below_that_of_rounding():
    # In the mean step^2 / 12 a column: times 1 / U_jj^2 with conditioning, times H_jj without.
    step, reached, plain, expected, without = 0.3, 0.0, 0.0, 0.0, 0.0
    for seed in range(40):
        weight, moments, _ = make_case(seed, 1, 50, 30, "full")
        h, u = damped(moments), inverse_factor(moments).diagonal(dim1=1, dim2=2)
        scale = 1 / h.diagonal(dim1=1, dim2=2).mean()  # every case counts alike
        reached += float(scale * cost(weight - fix_columns(weight, moments, step), h).mean())
        plain += float(scale * cost(weight - (weight / step).round() * step, h).mean())
        expected += float(scale * step**2 / 12 * (u**-2).sum())
        without += float(scale * step**2 / 12 * h.diagonal(dim1=1, dim2=2).sum())
    assert reached < 0.8 * plain
    assert reached == pytest.approx(expected, rel=0.05)
    assert plain == pytest.approx(without, rel=0.1)


# ---- inputs that have changed


@pytest.mark.parametrize(("groups", "rows", "columns"), [(1, 5, 7), (3, 1, 4), (2, 8, 33)])
def test_best_linear_is_least_squares(groups, rows, columns):
    generator = torch.Generator().manual_seed(15)
    x = make_inputs(generator, groups, columns, "full")
    mix = torch.randn(groups, columns, columns, generator=generator, dtype=torch.float64)
    noise = torch.randn(x.shape, generator=generator, dtype=torch.float64)
    changed = x + 0.1 * x @ mix + 0.2 * noise
    weight = torch.randn(groups, rows, columns, generator=generator, dtype=torch.float64)
    count = x.shape[1]
    got = best_linear(weight, x.mT @ changed / count, changed.mT @ changed / count, damping=0.0)
    expected = torch.linalg.lstsq(changed, x @ weight.mT).solution.mT
    torch.testing.assert_close(got, expected, rtol=1e-7, atol=1e-7)


def test_best_linear_with_damping_is_least_squares_with_a_pull_to_the_weights():
    # Samples sqrt(n * d) * I with targets of the weights themselves: ridge regression as plain least squares.
    generator = torch.Generator().manual_seed(16)
    x = make_inputs(generator, 1, 9, "few")
    changed = x + 0.2 * torch.randn(x.shape, generator=generator, dtype=torch.float64)
    weight = torch.randn(1, 4, 9, generator=generator, dtype=torch.float64)
    count = x.shape[1]
    moments = changed.mT @ changed / count
    pull = math.sqrt(count * 0.05 * float(moments[0].trace()) / 9) * torch.eye(9, dtype=torch.float64)
    samples = torch.cat([changed[0], pull])
    targets = torch.cat([x[0] @ weight[0].T, pull @ weight[0].T])
    expected = torch.linalg.lstsq(samples, targets).solution.T
    got = best_linear(weight, x.mT @ changed / count, moments, damping=0.05)
    torch.testing.assert_close(got[0], expected, rtol=1e-8, atol=1e-8)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_inputs_that_have_not_changed_keep_the_weights(kind, dtype):
    weight, moments, _ = make_case(17, 2, 3, 11, kind, dtype)
    assert torch.equal(best_linear(weight, moments, moments), weight)


# ---- steps of a few powers of two

steps = st.floats(min_value=0, exclude_min=True, allow_infinity=False)
usual = st.floats(2.0**-100, 2.0**100)


def mantissa(step):
    """The m of ``m * 2^-b`` with m from 8 up to 16, as a fraction."""
    m = Fraction(step)
    while m >= 16:
        m /= 2
    while m < 8:
        m *= 2
    return m


@given(steps)
def test_dyadic_is_not_above_and_within_an_eighth(step):
    below = dyadic(step)
    assert 0 < below <= step
    assert Fraction(step) < Fraction(below) * Fraction(9, 8)
    assert mantissa(below) in range(8, 16)
    assert dyadic(below) == below


@given(usual)
def test_no_dyadic_is_between_a_step_and_the_next(step):
    below, above = dyadic(step), next_dyadic(step, 1)
    assert below <= step < above
    assert mantissa(above) in range(8, 16)
    assert dyadic(math.nextafter(above, 0)) == below


@given(usual, st.integers(-100, 100), st.integers(-100, 100))
def test_places_add_up(step, a, b):
    assert next_dyadic(next_dyadic(step, a), b) == next_dyadic(step, a + b)
    assert next_dyadic(next_dyadic(step, a), -a) == next_dyadic(step, 0) == dyadic(step)
    assert next_dyadic(step, 8 + a) == 2 * next_dyadic(step, a)
    assert (next_dyadic(step, a) < next_dyadic(step, b)) == (a < b)


@given(usual, st.integers(-15, 15))
def test_multiples_of_a_dyadic_step_are_exact_in_float32(step, k):
    exact = Fraction(dyadic(step)) * k
    assert Fraction(torch.tensor(float(exact), dtype=torch.float32).item()) == exact


# ---- errors

BAD_STEPS = [0.0, -0.0, -1.0, math.nan, math.inf, -math.inf]


@pytest.mark.parametrize("step", BAD_STEPS)
def test_bad_steps(step):
    for use in (dyadic, lambda s: next_dyadic(s, 1)):
        with pytest.raises(WeightError, match="step"):
            use(step)
