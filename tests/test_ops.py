"""The operations on flat vectors: the reference against formulas, autograd and torch's optimisers."""

from __future__ import annotations

import importlib.util
import math
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from scipy import stats
from torch import Tensor, nn

from pwfn import WeightError
from pwfn.bayes import kernels as ops
from pwfn.bayes.kernels import library, reference

SIZES = (1, 127, 1025, 4099)
MASKS = {"none": 0.0, "some": 1 / 3, "all": 1.0}  # how many are fixed
FLOOR = 2.0**-30
PENALTY = {"alpha": 2.0**-11, "cap": 0.05}
SGD = {"lr": 0.01, "sigma_lr": 0.02, "momentum": 0.9, "weight_decay": 1e-2, **PENALTY}
ADAMW = {"lr": 0.01, "sigma_lr": 0.002, "weight_decay": 1e-2, **PENALTY}


def vectors(size: int, seed: int = 0, share: float = 1 / 3) -> dict[str, Tensor]:
    """Some weights, a share of them fixed, and sigmas on both sides of the cap and at it."""
    generator = torch.Generator().manual_seed(seed)
    sigma = torch.rand(size, generator=generator) * 0.1
    sigma[::5] = 0.05
    sigma[3::7] = 0.0
    return {
        "free_mu": torch.randn(size, generator=generator),
        "free_sigma": sigma,
        "fixed": torch.rand(size, generator=generator) < share,
        "fixed_mu": torch.randn(size, generator=generator),
        "fixed_sigma": torch.rand(size, generator=generator),
    }


def noise(size: int, seed: int, step: int) -> Tensor:
    """The noise itself: a draw with mean 0 and sigma 1."""
    zeros, ones = torch.zeros(size), torch.ones(size)
    return ops.draw(zeros, ones, zeros.bool(), zeros, zeros, seed=seed, step=step)


def state(count: int, fixed: Tensor) -> list[Tensor]:
    """Zeros, one for each free weight."""
    return [torch.zeros(int((~fixed).sum())) for _ in range(count)]


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_draw_is_the_formula(size: int, dtype: torch.dtype) -> None:
    v, eps = vectors(size), noise(size, 3, 4)
    for on in (True, False):
        drawn = ops.draw(**v, seed=3, step=4, noise_on_fixed=on, dtype=dtype)
        mu = torch.where(v["fixed"], v["fixed_mu"], v["free_mu"])
        fixed_sigma = v["fixed_sigma"] if on else torch.zeros(size)
        sigma = torch.where(v["fixed"], fixed_sigma, v["free_sigma"].clamp(min=FLOOR))
        assert torch.equal(drawn, torch.addcmul(mu, sigma, eps).to(dtype))
        if not on:
            assert torch.equal(drawn[v["fixed"]], v["fixed_mu"][v["fixed"]].to(dtype))


def test_a_sigma_below_the_floor_is_drawn_at_the_floor() -> None:
    zeros = torch.zeros(3)
    v = zeros, torch.tensor([0.0, -1.0, 2 * FLOOR]), zeros.bool(), zeros, zeros
    drawn = ops.draw(*v, seed=0, step=0)
    assert torch.equal(drawn, noise(3, 0, 0) * torch.tensor([FLOOR, FLOOR, 2 * FLOOR]))


def test_float64_is_computed_in_float64() -> None:
    v = {name: t if name == "fixed" else t.double() for name, t in vectors(127).items()}
    v["free_mu"][0], v["free_sigma"][0], v["fixed"][0] = 1.0, 2**-29, False
    drawn = ops.draw(**v, seed=0, step=0)
    assert drawn.dtype == torch.float64
    assert drawn[0] - 1 == pytest.approx(2**-29 * noise(127, 0, 0)[0].item(), rel=1e-6, abs=0)
    assert ops.draw_backward(drawn, v["fixed"], seed=0, step=0)[1].dtype == torch.float64


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_gradients_are_those_of_autograd(size: int, dtype: torch.dtype) -> None:
    v, weight = vectors(size), torch.linspace(-2, 2, size)
    v["free_sigma"].clamp_(min=FLOOR)
    leaves = [v["free_mu"].requires_grad_(), v["free_sigma"].requires_grad_()]
    drawn = ops.draw(**v, seed=1, step=2, dtype=dtype)
    (drawn.float() * weight).sum().backward()
    ours = [leaf.grad for leaf in leaves]
    mu = torch.where(v["fixed"], v["fixed_mu"], v["free_mu"])
    sigma = torch.where(v["fixed"], v["fixed_sigma"], v["free_sigma"])
    plain = torch.addcmul(mu, sigma, noise(size, 1, 2)).to(dtype)
    theirs = torch.autograd.grad((plain.float() * weight).sum(), leaves)
    for one, other in zip(ours, theirs, strict=True):
        assert one is not None
        assert torch.equal(one, other)
    assert v["fixed_mu"].grad is None


def test_a_sigma_below_the_floor_still_gets_its_gradient() -> None:
    zeros, sigma = torch.zeros(4), torch.zeros(4, requires_grad=True)
    ops.draw(zeros, sigma, zeros.bool(), zeros, zeros, seed=0, step=0).sum().backward()
    assert sigma.grad is not None
    assert torch.equal(sigma.grad, noise(4, 0, 0))


@pytest.mark.parametrize("size", SIZES)
def test_backward_makes_the_noise_of_the_draw_again(size: int) -> None:
    fixed = vectors(size)["fixed"]
    for step in (0, 1, 2**40):
        grad_mu, grad_sigma = ops.draw_backward(torch.ones(size), fixed, seed=9, step=step)
        assert torch.equal(grad_mu, (~fixed).float())
        assert torch.equal(grad_sigma, noise(size, 9, step).masked_fill(fixed, 0))


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_norm_is_that_of_both_gradients(size: int, dtype: torch.dtype) -> None:
    grad_w, fixed = vectors(size)["free_mu"].to(dtype), vectors(size)["fixed"]
    both = torch.cat(ops.draw_backward(grad_w, fixed, seed=1, step=1)).double()
    squared = ops.grad_squared_norm(grad_w, fixed, seed=1, step=1)
    assert squared.dtype == torch.float64
    assert squared.item() == pytest.approx(both.norm().item() ** 2, rel=1e-12)
    bad = torch.where(fixed, torch.nan, grad_w)
    assert torch.equal(ops.grad_squared_norm(bad, fixed, seed=1, step=1), squared)


def plain_step(
    optimizer: torch.optim.Optimizer, mu: nn.Parameter, sigma: nn.Parameter, v: dict[str, Tensor], step: int
) -> Tensor:
    """A step as the plain loop takes it; returns the gradient at the drawn weight."""
    with torch.no_grad():
        sigma.clamp_(min=FLOOR)
    both_mu = torch.where(v["fixed"], v["fixed_mu"], mu)
    both_sigma = torch.where(v["fixed"], v["fixed_sigma"], sigma)
    w = torch.addcmul(both_mu, both_sigma, noise(mu.numel(), 5, step))
    w.retain_grad()
    optimizer.zero_grad()
    (torch.sin(3 * w) * 0.2).sum().backward()
    nn.utils.clip_grad_norm_([mu, sigma], 1.0)
    short = torch.relu(PENALTY["cap"] - sigma)
    (PENALTY["alpha"] * short.masked_fill(v["fixed"], 0).sum()).backward()
    optimizer.step()
    with torch.no_grad():
        sigma.clamp_(min=FLOOR)
    assert w.grad is not None
    return w.grad


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("name", ["sgd_", "adamw_"])
@pytest.mark.parametrize("mask", MASKS)
def test_updates_are_those_of_the_plain_loop(size: int, name: str, mask: str) -> None:
    v = vectors(size, share=MASKS[mask])
    offsets = ops.free_offsets(v["fixed"])
    mu, sigma = nn.Parameter(v["free_mu"].clone()), nn.Parameter(v["free_sigma"].clone())
    settings: dict[str, Any] = dict(SGD if name == "sgd_" else ADAMW)
    groups = [
        {"params": [mu], "lr": settings["lr"], "weight_decay": settings["weight_decay"]},
        {"params": [sigma], "lr": settings["sigma_lr"], "weight_decay": 0.0},
    ]
    optimizer: torch.optim.Optimizer = (
        torch.optim.SGD(groups, momentum=0.9) if name == "sgd_" else torch.optim.AdamW(groups)
    )
    kept = state(2 if name == "sgd_" else 4, v["fixed"])
    before = {key: tensor.clone() for key, tensor in v.items()}
    free = ~v["fixed"]
    for step in range(6):
        # One clipped step and one unclipped, both from the weights that the plain loop has as well.
        w = ops.draw(**v, seed=5, step=step).requires_grad_()
        (torch.sin(3 * w) * 0.2).sum().backward()
        assert w.grad is not None
        norm = ops.grad_squared_norm(w.grad, v["fixed"], seed=5, step=step).sqrt()
        scale = (1.0 / (norm + 1e-6)).clamp(max=1.0)
        theirs = plain_step(optimizer, mu, sigma, v, step)
        assert torch.allclose(w.grad, theirs, rtol=1e-5, atol=1e-6)
        count = {} if name == "sgd_" else {"count": step + 1}
        arguments = v["free_mu"], v["free_sigma"], *kept, w.grad, v["fixed"], offsets, scale
        getattr(ops, name)(*arguments, **settings, **count, seed=5, step=step)
        assert torch.allclose(v["free_mu"][free], mu.detach()[free], rtol=1e-5, atol=1e-7)
        assert torch.allclose(v["free_sigma"][free], sigma.detach()[free], rtol=1e-5, atol=1e-7)
    for key in ("free_mu", "free_sigma"):
        assert torch.equal(v[key][v["fixed"]], before[key][v["fixed"]])
        assert not free.any() or not torch.equal(v[key][free], before[key][free])
    names = ("momentum_buffer",) if name == "sgd_" else ("exp_avg", "exp_avg_sq")
    theirs_kept = [optimizer.state[parameter][key][free] for key in names for parameter in (mu, sigma)]
    for one, other in zip(kept, theirs_kept, strict=True):  # the free weights' state, in their order
        assert torch.allclose(one, other, rtol=1e-5, atol=1e-6)
    assert all(torch.equal(v[key], before[key]) for key in ("fixed", "fixed_mu", "fixed_sigma"))


@pytest.mark.parametrize("name", ["sgd_", "adamw_"])
def test_a_fixed_weight_keeps_its_bits_whatever_its_gradient_is(name: str) -> None:
    odd = torch.tensor([math.nan, -0.0, 1e-45, math.inf])
    mu, sigma = odd.clone(), odd.clone()
    settings: dict[str, Any] = SGD if name == "sgd_" else {**ADAMW, "count": 1}
    fixed, one = torch.ones(4, dtype=torch.bool), torch.tensor(1.0)
    kept, offsets = state(2 if name == "sgd_" else 4, fixed), ops.free_offsets(fixed)
    getattr(ops, name)(mu, sigma, *kept, odd.flip(0), fixed, offsets, one, **settings, seed=0, step=0)
    for tensor in (mu, sigma):
        assert torch.equal(tensor.view(torch.int32), odd.view(torch.int32))


def test_a_step_of_sgd_by_hand() -> None:
    mu, sigma = torch.tensor([2.0, 2.0, 2.0]), torch.tensor([0.25, 0.5, 1.0])
    m_mu, m_sigma = torch.tensor([4.0, 4.0, 4.0]), torch.tensor([0.0, 0.0, 8.0])
    settings = {"lr": 0.5, "sigma_lr": 0.25, "momentum": 0.5, "weight_decay": 0.125}
    fixed = torch.zeros(3, dtype=torch.bool)
    ops.sgd_(
        *(mu, sigma, m_mu, m_sigma, torch.zeros(3), fixed, ops.free_offsets(fixed), torch.tensor(1.0)),
        **settings,
        alpha=1.0,
        cap=0.5,
        seed=0,
        step=0,
    )
    # m = 0.5 * 4 + 0.125 * 2 and mu = 2 - 0.5 * m. The regulariser pulls only below the cap, not at it.
    assert m_mu.tolist() == [2.25] * 3
    assert mu.tolist() == [0.875] * 3
    assert m_sigma.tolist() == [-1.0, 0.0, 4.0]
    assert sigma.tolist() == [0.5, 0.5, FLOOR]


def test_the_regulariser_has_the_gradient_of_relu() -> None:
    sigma = torch.tensor([0.04, 0.05, 0.06], requires_grad=True)
    torch.relu(0.05 - sigma).sum().backward()
    assert sigma.grad is not None
    assert sigma.grad.tolist() == [-1.0, 0.0, 0.0]
    fixed, ours = torch.zeros(3, dtype=torch.bool), sigma.detach().clone()
    kept = state(3, fixed)
    still = {"lr": 0.0, "sigma_lr": 1.0, "momentum": 0.0, "weight_decay": 0.0, "alpha": 1.0, "cap": 0.05}
    ops.sgd_(
        torch.zeros(3),
        ours,
        *kept[:2],
        kept[2],
        fixed,
        ops.free_offsets(fixed),
        torch.tensor(1.0),
        **still,
        seed=0,
        step=0,
    )
    assert torch.equal(kept[1], sigma.grad)


def test_only_the_gradient_of_the_task_is_scaled() -> None:
    v = vectors(127)
    kept, offsets, free = state(2, v["fixed"]), ops.free_offsets(v["fixed"]), ~v["fixed"]
    settings = {"lr": 1.0, "sigma_lr": 1.0, "momentum": 0.0, "weight_decay": 0.0, "alpha": 0.5, "cap": 10.0}
    grad, scale = torch.randn(127, generator=torch.Generator().manual_seed(1)), torch.tensor(0.25)
    both = v["free_mu"], v["free_sigma"]
    ops.sgd_(*both, *kept, grad.bfloat16(), v["fixed"], offsets, scale, **settings, seed=2, step=3)
    grad_mu, grad_sigma = ops.draw_backward(grad.bfloat16(), v["fixed"], seed=2, step=3)
    assert torch.equal(kept[0], 0.25 * grad_mu[free])
    assert torch.equal(kept[1], 0.25 * grad_sigma[free] - 0.5)


def test_parameters_are_updated_in_place_and_autograd_is_told() -> None:
    v, one = vectors(127), torch.tensor(1.0)
    kept, offsets = state(2, v["fixed"]), ops.free_offsets(v["fixed"])
    mu = nn.Parameter(v["free_mu"].clone())
    square = (mu * mu).sum()  # keeps mu for its backward pass
    grad = torch.ones(127)
    ops.sgd_(mu, v["free_sigma"], *kept, grad, v["fixed"], offsets, one, **SGD, seed=0, step=0)
    assert mu.is_leaf
    assert mu.requires_grad
    assert not torch.equal(mu, v["free_mu"])
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        square.backward()


def test_no_weights_are_no_work() -> None:
    none, one = torch.zeros(0), torch.tensor(1.0)
    assert noise(0, 0, 0).shape == (0,)
    assert ops.grad_squared_norm(none, none.bool(), seed=0, step=0).item() == 0
    offsets = ops.free_offsets(none.bool())
    assert offsets.shape == (0,)
    ops.sgd_(*(torch.zeros(0) for _ in range(4)), none, none.bool(), offsets, one, **SGD, seed=0, step=0)


# Thresholds: a normal statistic of 4.5 or a p-value of 1e-5, for one fixed draw that cannot drift.
def check_normal(sample: Tensor) -> None:
    x = sample.double()
    n = x.numel()
    assert abs(x.mean().item()) < 4.5 / math.sqrt(n)
    assert abs(x.square().mean().item() - 1) < 4.5 * math.sqrt(2 / n)
    assert abs(x.pow(3).mean().item()) < 4.5 * math.sqrt(15 / n)
    assert abs(x.pow(4).mean().item() - 3) < 4.5 * math.sqrt(96 / n)
    assert stats.kstest(x.numpy(), "norm").pvalue > 1e-5


def check_independent(one: Tensor, other: Tensor) -> None:
    """No correlation of the numbers, nor of their squares."""
    a, b = one.double(), other.double()
    assert abs((a * b).mean().item()) < 4.5 / math.sqrt(a.numel())
    assert abs(((a**2 - 1) * (b**2 - 1)).mean().item()) < 4.5 * 2 / math.sqrt(a.numel())


def test_the_noise_is_standard_normal() -> None:
    check_normal(noise(200_001, 0, 0))
    check_normal(torch.stack([noise(17, 1, step) for step in range(5000)])[:, 3])


def test_the_noise_of_steps_seeds_and_ranks_is_independent() -> None:
    first = noise(100_003, 7, 10)
    assert torch.equal(first, noise(100_003, 7, 10))
    for seed, step in [
        (7, 11),
        (7, 12),
        (7, 10 + 2**32),
        (8, 10),
        (8, 11),
        (9, 10),
        (7 + 2**32, 10),
        (10, 7),
    ]:
        check_independent(first, noise(100_003, seed, step))
    check_independent(first[:-1], first[1:])
    ranks = torch.stack([noise(1000, 100 + rank, 0) for rank in range(64)])
    check_normal(ranks.mean(0) * 8)


def test_the_states_of_the_reference_never_meet_within_a_seed() -> None:
    steps = [*range(100_000), *range(2**31, 2**31 + 100_000)]
    assert len({reference.generator_seed(3, step) % 2**32 for step in steps}) == len(steps)
    # Why the lower half: to the CPU's generator these two seeds are one.
    low, high = (torch.Generator().manual_seed(seed) for seed in (1, 1 + 2**32))
    assert torch.equal(torch.randn(5, generator=low), torch.randn(5, generator=high))


def cases() -> dict[str, tuple[Any, ...]]:
    v, grad, one = vectors(127), torch.ones(127), torch.tensor(0.5)
    leaves = v["free_mu"].requires_grad_(), v["free_sigma"].requires_grad_()
    fixed, out = v["fixed"], torch.zeros(127, dtype=torch.bfloat16)
    rest = grad, fixed, ops.free_offsets(fixed), one
    sgd = (torch.ones(127), torch.ones(127), *state(2, fixed), *rest, 0.1, 0.1, 0.9, 0.01, 0.5, 0.05, 1, 2)
    adamw = (torch.ones(127), torch.ones(127), *state(4, fixed), *rest)
    plain = (torch.zeros(127), torch.ones(127), fixed, v["fixed_mu"], v["fixed_sigma"])
    return {
        "draw": (*leaves, fixed, v["fixed_mu"], v["fixed_sigma"], 1, 2, True, torch.bfloat16),
        "draw_": (out, *plain, 1, 2, True),
        "draw_backward": (grad.bfloat16(), fixed, 1, 2),
        "grad_squared_norm": (grad, fixed, 1, 2),
        "sgd_": sgd,
        "adamw_": (*adamw, 0.1, 0.1, 0.9, 0.999, 1e-8, 0.01, 0.5, 0.05, 1, 1, 2),
    }


@pytest.mark.parametrize("name", library.SCHEMAS)
# torch's own deprecations, met while it traces.
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")
def test_opcheck(name: str) -> None:
    done = torch.library.opcheck(getattr(torch.ops.pwfn, name).default, cases()[name])
    assert set(done.values()) == {"SUCCESS"}


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"free_sigma": torch.zeros(4)}, r"free_sigma has shape \(4,\).*one length"),
        ({"fixed_mu": torch.zeros(3, device="meta")}, "fixed_mu .* on meta"),
        ({"fixed": torch.zeros(3)}, "fixed is torch.float32.*vector of bool"),
        ({"fixed": torch.zeros(3, 1).bool()}, r"shape \(3, 1\)"),
        ({"free_mu": torch.zeros(3, dtype=torch.int64)}, "free_mu is not .* floating-point"),
        ({"free_mu": torch.zeros(6)[::2]}, "free_mu is not a contiguous"),
        ({"seed": -1}, "seed -1 and step 0"),
        ({"step": 2**63}, "must lie between"),
    ],
)
def test_what_does_not_fit_is_named(change: dict[str, Any], words: str) -> None:
    sound = {name: torch.zeros(3) for name in ("free_mu", "free_sigma", "fixed_mu", "fixed_sigma")}
    with pytest.raises(WeightError, match=words):
        ops.draw(**{**sound, "fixed": torch.zeros(3).bool(), "seed": 0, "step": 0, **change})


def test_a_scale_or_count_that_does_not_fit_is_named() -> None:
    v = vectors(5)
    offsets = ops.free_offsets(v["fixed"])
    arguments = v["free_mu"], v["free_sigma"], *state(2, v["fixed"]), torch.ones(5), v["fixed"], offsets
    with pytest.raises(WeightError, match=r"scale has shape \(1,\)"):
        ops.sgd_(*arguments, torch.ones(1), **SGD, seed=0, step=0)
    more = v["free_mu"], v["free_sigma"], *state(4, v["fixed"]), torch.ones(5), v["fixed"], offsets
    with pytest.raises(WeightError, match="count is 0"):
        ops.adamw_(*more, torch.tensor(1.0), **ADAMW, count=0, seed=0, step=0)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"momentum_mu": torch.zeros(4)}, r"momentum_sigma has shape \(3,\).*number of free weights"),
        ({"momentum_sigma": torch.zeros(3, 1)}, r"momentum_sigma has shape \(3, 1\)"),
        ({"momentum_sigma": torch.zeros(3, device="meta")}, "momentum_sigma .* on meta"),
        ({"momentum_sigma": torch.zeros(3).long()}, "momentum_sigma is not .* floating-point"),
        ({"momentum_mu": torch.zeros(9), "momentum_sigma": torch.zeros(9)}, "9 entries for 5 weights"),
        # What only a look at the mask can tell; the reference looks.
        ({"momentum_mu": torch.zeros(4), "momentum_sigma": torch.zeros(4)}, "each of the 3 free weights"),
        ({"momentum_mu": torch.zeros(1), "momentum_sigma": torch.zeros(1)}, "each of the 3 free weights"),
        ({"offsets": torch.zeros(2).long()}, r"offsets is torch.int64 of shape \(2,\).*free_offsets"),
        ({"offsets": torch.zeros(1)}, "offsets is torch.float32"),
    ],
)
def test_a_state_that_does_not_fit_is_named(change: dict[str, Tensor], words: str) -> None:
    fixed = torch.tensor([True, False, False, True, False])
    sound = {name: torch.ones(5) for name in ("free_mu", "free_sigma", "grad_w")}
    sound |= {name: torch.zeros(3) for name in ("momentum_mu", "momentum_sigma")}
    sound |= {"fixed": fixed, "offsets": ops.free_offsets(fixed), "scale": torch.tensor(1.0)}
    with pytest.raises(WeightError, match=words):
        ops.sgd_(**{**sound, **change}, **SGD, seed=0, step=0)


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("mask", MASKS)
def test_offsets_count_the_free_weights_before_each_block(size: int, mask: str) -> None:
    fixed = vectors(size, share=MASKS[mask])["fixed"]
    for block in (4, 1024):
        wanted = [int((~fixed[:start]).sum()) for start in range(0, size, block)]
        assert ops.free_offsets(fixed, block).tolist() == wanted


def test_a_draw_into_a_vector_is_the_draw() -> None:
    v = vectors(127)
    for dtype in (torch.float32, torch.bfloat16):
        for on in (True, False):
            out = torch.empty(127, dtype=dtype)
            ops.draw_(out, *v.values(), seed=3, step=4, noise_on_fixed=on)
            assert torch.equal(out, ops.draw(**v, seed=3, step=4, noise_on_fixed=on, dtype=dtype))
    with pytest.raises(WeightError, match=r"out has shape \(126,\)"):
        ops.draw_(out[:126], *v.values(), seed=3, step=4)


def run(program: str, path: str = "") -> str:
    done = subprocess.run(
        [sys.executable, "-c", program],
        env={**os.environ, "PYTHONPATH": path},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


KERNELS = (
    "import torch, pwfn.bayes.kernels.library as library\n"
    "has = torch._C._dispatch_has_kernel_for_dispatch_key\n"
    "print([has('pwfn::' + name, 'CUDA') for name in library.SCHEMAS], 'triton' in sys.modules)"
)


def test_without_triton_the_reference_stays_in_force_on_cuda() -> None:
    said = run(
        "import sys; sys.modules['triton'] = None\n" + KERNELS.replace(", 'triton' in sys.modules", "")
    )
    assert said == str([False] * len(library.SCHEMAS))


def test_with_triton_kernels_are_registered_and_it_is_not_imported(tmp_path: Path) -> None:
    (tmp_path / "triton.py").write_text("raise RuntimeError('imported')")
    assert run("import sys\n" + KERNELS, str(tmp_path)) == f"{[True] * len(library.SCHEMAS)} False"


@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="needs Triton")
def test_the_kernels_in_tritons_interpreter() -> None:
    done = subprocess.run(
        [
            sys.executable,
            "-m",
            "pytest",
            "-p",
            "no:cacheprovider",
            str(Path(__file__).parent / "gpu/test_triton.py"),
        ],
        env={**os.environ, "TRITON_INTERPRET": "1"},
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.returncode == 0, done.stdout[-5000:]
    assert "passed" in done.stdout
