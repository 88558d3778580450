"""The Triton kernels: against a Philox of our own, and against the formulas with the kernels' own noise.

Runs on a CUDA device, and with TRITON_INTERPRET=1 on the CPU; skipped elsewhere.
"""

from __future__ import annotations

import math
import os
from typing import Any

import numpy as np
import pytest
import torch
from scipy import stats
from torch import Tensor

triton = pytest.importorskip("triton")
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
if not INTERPRETED and not torch.cuda.is_available():
    pytest.skip("needs a CUDA device, or TRITON_INTERPRET=1", allow_module_level=True)

import triton.language as tl  # noqa: E402 - after the skips

from pwfn.bayes import kernels as ops  # noqa: E402
from pwfn.bayes.kernels import kernels as programs  # noqa: E402
from pwfn.bayes.kernels import library  # noqa: E402
from pwfn.bayes.kernels import triton as kernels  # noqa: E402

DEVICE = "cpu" if INTERPRETED else "cuda"
on_device = pytest.mark.skipif(INTERPRETED, reason="needs a CUDA device")
SIZES = (1, 127, 1025, 4099)
BLOCKS = (64, 512, 1024, 2048)
MASKS = {"none": 0.0, "some": 1 / 3, "all": 1.0}  # how many are fixed
MANY = 200_001 if INTERPRETED else 10_000_001
FLOOR = 2.0**-30
SGD = (0.01, 0.02, 0.9, 1e-2, 2.0**-11, 0.05)  # lr, sigma_lr, momentum, weight_decay, alpha, cap
ADAMW = (0.01, 0.002, 0.9, 0.999, 1e-8, 1e-2, 2.0**-11, 0.05)  # lr, sigma_lr, betas, epsilon, and as above


def vectors(size: int, dtype: torch.dtype = torch.float32, share: float = 1 / 3) -> dict[str, Tensor]:
    """Some weights, a share of them fixed, and sigmas on both sides of the cap and at it."""
    generator = torch.Generator().manual_seed(size)
    sigma = torch.rand(size, generator=generator) * 0.1
    sigma[::5] = 0.05
    sigma[3::7] = 0.0
    made = {
        "free_mu": torch.randn(size, generator=generator),
        "free_sigma": sigma,
        "fixed": torch.rand(size, generator=generator) < share,
        "fixed_mu": torch.randn(size, generator=generator),
        "fixed_sigma": torch.rand(size, generator=generator),
    }
    return {k: t.to(DEVICE) if k == "fixed" else t.to(DEVICE, dtype) for k, t in made.items()}


def zeros_for(name: str, fixed: Tensor, dtype: torch.dtype = torch.float32) -> list[Tensor]:
    """An optimiser's state at its start: zeros, one for each free weight."""
    count, free = 2 if name == "sgd_" else 4, int((~fixed).sum())
    return [torch.zeros(free, device=DEVICE, dtype=dtype) for _ in range(count)]


def noise(size: int, seed: int, step: int, block: int = 8192) -> Tensor:
    """The noise itself: a draw with mean 0 and sigma 1."""
    zeros, ones = torch.zeros(size, device=DEVICE), torch.ones(size, device=DEVICE)
    return kernels.draw(zeros, ones, zeros.bool(), zeros, zeros, seed, step, True, torch.float32, block=block)


def philox(key: int, counter: int) -> list[int]:
    """Philox 4x32-10 (Salmon et al., 2011) in whole numbers: four words of a key and a counter."""
    c = [counter >> 32 * i & 0xFFFFFFFF for i in range(4)]
    k = [key >> 32 * i & 0xFFFFFFFF for i in range(2)]
    for _ in range(10):
        a, b = 0xD2511F53 * c[0], 0xCD9E8D57 * c[2]
        c = [b >> 32 ^ c[1] ^ k[0], b & 0xFFFFFFFF, a >> 32 ^ c[3] ^ k[1], a & 0xFFFFFFFF]
        k = [(k[0] + 0x9E3779B9) & 0xFFFFFFFF, (k[1] + 0xBB67AE85) & 0xFFFFFFFF]
    return c


def expected_noise(index: int, seed: int, step: int) -> float:
    words = philox(seed, index // 4 + (step << 64))
    x, y = words[index % 4 // 2 * 2 :][:2]
    radius = math.sqrt(-2 * math.log((x + 0.5) / 2**32))
    return radius * (math.sin if index % 2 else math.cos)(2 * math.pi * y / 2**32)


def test_our_philox_gives_the_published_words() -> None:
    assert [f"{word:08x}" for word in philox(0, 0)] == ["6627e8d5", "e169c58d", "bc57ac4c", "9b00dbd8"]
    ones = [f"{word:08x}" for word in philox(2**64 - 1, 2**128 - 1)]
    assert ones == ["408f276d", "41c83b0e", "a20bc7c6", "6d5451fd"]


@pytest.mark.parametrize(
    ("seed", "step"), [(0, 0), (1, 1), (1, 16), (2**31, 5), (2**40 + 3, 2**35 + 1), (2**63 - 1, 2**63 - 1)]
)
def test_the_noise_is_a_function_of_seed_step_and_index(seed: int, step: int) -> None:
    made = noise(131, seed, step).tolist()
    wanted = [expected_noise(index, seed, step) for index in range(131)]
    assert made == pytest.approx(wanted, rel=1e-4, abs=1e-5)


@triton.jit
def _noise_from(out, start, seed, step, BLOCK: tl.constexpr):  # noqa: N803
    tl.store(out + tl.arange(0, BLOCK), programs._noise(seed, step, start, BLOCK))


def test_the_noise_does_not_repeat_past_32_bits() -> None:
    out = torch.empty(16, device=DEVICE)
    for start in (2**31, 2**32 - 8, 2**34, 2**40):
        _noise_from[(1,)](out, start, 2**33 + 7, 2**33 + 3, BLOCK=16)
        wanted = [expected_noise(start + i, 2**33 + 7, 2**33 + 3) for i in range(16)]
        assert out.tolist() == pytest.approx(wanted, rel=1e-4, abs=1e-5)


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("mask", MASKS)
def test_the_launch_shape_does_not_matter(size: int, mask: str) -> None:
    v = vectors(size, share=MASKS[mask])
    grad, fixed = v["fixed_mu"], v["fixed"]
    scale = torch.tensor(0.5, device=DEVICE)
    arguments = *v.values(), 3, 4, True, torch.float32
    assert torch.equal(noise(size + 1000, 3, 4)[:size], noise(size, 3, 4))
    drawn = [kernels.draw(*arguments, block=block) for block in BLOCKS]
    assert all(torch.equal(drawn[0], other) for other in drawn[1:])
    backward = [torch.stack(kernels.draw_backward(grad, fixed, 3, 4, block=block)) for block in BLOCKS]
    assert all(torch.equal(backward[0], other) for other in backward[1:])
    for name in ("sgd_", "adamw_"):
        results = []
        for block in BLOCKS:
            state = [v["free_mu"].clone(), v["free_sigma"].clone(), *zeros_for(name, fixed)]
            offsets = ops.free_offsets(fixed, block)
            for step in (4, 5):  # from zeros, and from what the first left
                numbers: tuple[Any, ...] = SGD if name == "sgd_" else (*ADAMW, step - 3)
                getattr(kernels, name)(*state, grad, fixed, offsets, scale, *numbers, 3, step, block=block)
            results.append(torch.cat(state))
        assert all(torch.equal(results[0], other) for other in results[1:])
    # The norm alone is a sum, taken by blocks: equal to the rounding of float32, not to the bit.
    norms = [kernels.grad_squared_norm(grad, fixed, 3, 4, block=block).item() for block in BLOCKS]
    assert norms == pytest.approx([norms[0]] * len(BLOCKS), rel=1e-6)


# The interpreter cuts a bfloat16 off where a GPU rounds it; one unit in the last place covers both.
ULP = {torch.float32: 2**-22, torch.bfloat16: 2**-7, torch.float16: 2**-10, torch.float64: 1e-9}


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("on", [True, False])
def test_draw_is_the_formula(size: int, dtype: torch.dtype, on: bool) -> None:
    v = vectors(size)
    drawn = kernels.draw(*v.values(), 3, 4, on, dtype)
    assert drawn.dtype == dtype
    mu = torch.where(v["fixed"], v["fixed_mu"], v["free_mu"])
    fixed_sigma = v["fixed_sigma"] if on else torch.zeros_like(v["fixed_sigma"])
    sigma = torch.where(v["fixed"], fixed_sigma, v["free_sigma"].clamp(min=FLOOR))
    eps = noise(size, 3, 4)
    wanted = mu.double() + sigma.double() * eps.double()
    close = ULP[dtype] * (mu.abs() + (sigma * eps).abs()).double()
    assert bool(((drawn.double() - wanted).abs() <= close).all())
    if not on:
        held = v["fixed"]
        assert torch.allclose(drawn[held].float(), v["fixed_mu"][held], rtol=ULP[dtype], atol=0)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_parameters_may_be_wide_or_narrow(dtype: torch.dtype) -> None:
    v = vectors(1025, dtype)
    drawn = kernels.draw(*v.values(), 3, 4, True, torch.float64)
    wide = {k: t if k == "fixed" else t.double() for k, t in v.items()}
    mu = torch.where(wide["fixed"], wide["fixed_mu"], wide["free_mu"])
    sigma = torch.where(wide["fixed"], wide["fixed_sigma"], wide["free_sigma"].clamp(min=FLOOR))
    wanted = mu + sigma * noise(1025, 3, 4)
    tolerance = 1e-15 if dtype == torch.float64 else 1e-6
    assert torch.allclose(drawn, wanted, rtol=tolerance, atol=tolerance)
    grads = kernels.draw_backward(wide["fixed_mu"], v["fixed"], 3, 4)
    assert grads[1].dtype == torch.float64


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_backward_and_norm_are_the_formulas(size: int, dtype: torch.dtype) -> None:
    v = vectors(size)
    grad, fixed, eps = v["fixed_mu"].to(dtype), v["fixed"], noise(size, 1, 2)
    grad[fixed] = torch.nan  # which must reach nothing
    grad_mu, grad_sigma = kernels.draw_backward(grad, fixed, 1, 2)
    assert grad_mu.dtype == grad_sigma.dtype == torch.float32
    assert torch.equal(grad_mu, grad.float().masked_fill(fixed, 0))
    assert torch.equal(grad_sigma, (grad.float() * eps).masked_fill(fixed, 0))
    squared = kernels.grad_squared_norm(grad, fixed, 1, 2)
    wanted = grad_mu.double().square().sum() + grad_sigma.double().square().sum()
    assert squared.item() == pytest.approx(wanted.item(), rel=1e-6)
    assert torch.equal(squared, kernels.grad_squared_norm(grad, fixed, 1, 2))


def test_a_gradient_may_be_one_number_seen_many_times() -> None:
    fixed = torch.zeros(127, dtype=torch.bool, device=DEVICE)
    grad = torch.ones((), device=DEVICE).expand(127)
    assert torch.equal(kernels.draw_backward(grad, fixed, 1, 2)[1], noise(127, 1, 2))


def new_weights(name: str, state: list[Tensor], grad: Tensor, scale: float, eps: Tensor, count: int) -> None:
    """A step in float64, written out; every weight is taken as free."""
    mu, sigma, *kept = state
    sigma = sigma.clamp(min=FLOOR)
    g_mu, g_sigma = scale * grad, scale * grad * eps
    if name == "sgd_":
        lr, sigma_lr, momentum, decay, alpha, cap = SGD
        g_sigma = g_sigma - alpha * (sigma < np.float32(cap).item())
        kept[0].copy_(momentum * kept[0] + g_mu + decay * mu)
        kept[1].copy_(momentum * kept[1] + g_sigma)
        mu, sigma = mu - lr * kept[0], sigma - sigma_lr * kept[1]
    else:
        lr, sigma_lr, beta1, beta2, epsilon, decay, alpha, cap = ADAMW
        g_sigma = g_sigma - alpha * (sigma < np.float32(cap).item())
        mu = mu * (1 - lr * decay)
        steps = []
        for mean, square, g, rate in ((*kept[::2], g_mu, lr), (*kept[1::2], g_sigma, sigma_lr)):
            mean.copy_(beta1 * mean + (1 - beta1) * g)
            square.copy_(beta2 * square + (1 - beta2) * g * g)
            root = (square / (1 - beta2**count)).sqrt() + epsilon
            steps.append(rate * mean / (1 - beta1**count) / root)
        mu, sigma = mu - steps[0], sigma - steps[1]
    state[0].copy_(mu)
    state[1].copy_(sigma.clamp(min=FLOOR))


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("name", ["sgd_", "adamw_"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("mask", MASKS)
def test_updates_are_the_formulas(size: int, name: str, dtype: torch.dtype, mask: str) -> None:
    v = vectors(size, share=MASKS[mask])
    fixed, free, offsets = v["fixed"], ~v["fixed"], ops.free_offsets(v["fixed"])
    weights, state = [v["free_mu"], v["free_sigma"]], zeros_for(name, fixed)
    before = [tensor.clone() for tensor in weights]
    oracle = [tensor.double() for tensor in weights] + [torch.zeros(size).to(DEVICE).double() for _ in state]
    generator = torch.Generator().manual_seed(0)
    for step in range(5):
        grad = torch.randn(size, generator=generator).to(DEVICE, dtype)
        grad[fixed] = torch.nan
        scale = 1.0 / (1 + step)
        numbers: tuple[Any, ...] = SGD if name == "sgd_" else (*ADAMW, step + 1)
        device_scale = torch.tensor(scale, device=DEVICE)
        getattr(kernels, name)(*weights, *state, grad, fixed, offsets, device_scale, *numbers, 8, step)
        new_weights(name, oracle, grad.double(), scale, noise(size, 8, step).double(), step + 1)
        ours = [*(tensor[free] for tensor in weights), *state]
        for one, other in zip(ours, oracle, strict=True):
            assert torch.allclose(one.double(), other[free], rtol=2e-5, atol=1e-6)
    for now, then in zip(weights, before, strict=True):
        assert torch.equal(now[fixed], then[fixed])
    assert not bool(free.any()) or bool((weights[1][free] >= FLOOR).all())


def test_a_state_of_another_mask_is_not_written_past_its_end() -> None:
    v = vectors(1025, share=0.0)
    room = torch.zeros(2, 1025, device=DEVICE)
    state = [row[:700] for row in room]
    scale, offsets = torch.tensor(1.0, device=DEVICE), ops.free_offsets(v["fixed"])
    kernels.sgd_(v["free_mu"], v["free_sigma"], *state, v["fixed_mu"], v["fixed"], offsets, scale, *SGD, 8, 0)
    assert bool((room[:, :700] != 0).all())
    assert not bool(room[:, 700:].any())


def test_an_update_of_wide_parameters_is_wide() -> None:
    v = vectors(1025, torch.float64)
    fixed, free = v["fixed"], ~v["fixed"]
    weights, state = [v["free_mu"], v["free_sigma"]], zeros_for("sgd_", fixed, torch.float64)
    oracle = [tensor.clone() for tensor in weights] + [torch.zeros_like(v["free_mu"]) for _ in state]
    one = torch.tensor(1.0, device=DEVICE, dtype=torch.float64)
    kernels.sgd_(*weights, *state, v["fixed_mu"], fixed, ops.free_offsets(fixed), one, *SGD, 8, 0)
    new_weights("sgd_", oracle, v["fixed_mu"], 1.0, noise(1025, 8, 0).double(), 1)
    # What is left is the rounding of the learning rate to float32.
    assert torch.allclose(weights[0][free], oracle[0][free], rtol=1e-9, atol=1e-9)


def test_a_nan_in_sigma_is_not_hidden_by_the_floor() -> None:
    v = vectors(127)
    v["fixed"][:] = False
    v["free_sigma"][5] = torch.nan
    assert bool(kernels.draw(*v.values(), 0, 0, True, torch.float32)[5].isnan())


def test_a_draw_into_a_vector_is_the_draw() -> None:
    v = vectors(1025)
    for dtype in (torch.float32, torch.bfloat16):
        out = torch.empty(1025, device=DEVICE, dtype=dtype)
        version = out._version
        kernels.draw_(out, *v.values(), 3, 4, True)
        assert torch.equal(out, kernels.draw(*v.values(), 3, 4, True, dtype))
        assert out._version > version  # autograd is told


def test_no_weights_are_no_work() -> None:
    none = torch.zeros(0, device=DEVICE)
    assert noise(0, 0, 0).shape == (0,)
    assert kernels.grad_squared_norm(none, none.bool(), 0, 0).item() == 0


# Thresholds: a normal statistic of 4.5 or a p-value of 1e-5, for one fixed draw that cannot drift.
def check_normal(sample: Tensor) -> None:
    x = sample.double()
    n = x.numel()
    assert abs(x.mean().item()) < 4.5 / math.sqrt(n)
    assert abs(x.square().mean().item() - 1) < 4.5 * math.sqrt(2 / n)
    assert abs(x.pow(3).mean().item()) < 4.5 * math.sqrt(15 / n)
    assert abs(x.pow(4).mean().item() - 3) < 4.5 * math.sqrt(96 / n)
    assert stats.kstest(x.cpu().numpy(), "norm").pvalue > 1e-5


def check_independent(one: Tensor, other: Tensor) -> None:
    """No correlation of the numbers, nor of their squares."""
    a, b = one.double(), other.double()
    assert abs((a * b).mean().item()) < 4.5 / math.sqrt(a.numel())
    assert abs(((a**2 - 1) * (b**2 - 1)).mean().item()) < 4.5 * 2 / math.sqrt(a.numel())


def test_the_noise_is_standard_normal() -> None:
    check_normal(noise(MANY, 0, 0))
    check_normal(torch.stack([noise(4, 1, step, block=16)[3] for step in range(500)]))


def test_the_noise_of_steps_seeds_ranks_and_neighbours_is_independent() -> None:
    first = noise(MANY, 7, 10)
    assert torch.equal(first, noise(MANY, 7, 10))
    for seed, step in [(7, 11), (7, 10 + 2**32), (8, 10), (8, 11), (7 + 2**32, 10), (10, 7)]:
        check_independent(first, noise(MANY, seed, step))
    for apart in (1, 2, 3, 4):
        check_independent(first[:-apart], first[apart:])
    ranks = torch.stack([noise(1000, 100 + rank, 0) for rank in range(64)])
    check_normal(ranks.mean(0) * 8)


def test_the_distribution_is_the_references() -> None:
    zeros, ones = torch.zeros(MANY), torch.ones(MANY)
    plain = ops.draw(zeros, ones, zeros.bool(), zeros, zeros, seed=1, step=1)
    assert stats.ks_2samp(noise(MANY, 1, 1).cpu().numpy(), plain.numpy()).pvalue > 1e-5


@on_device
def test_the_kernels_are_what_a_cuda_tensor_gets() -> None:
    v = vectors(1025)
    drawn = ops.draw(**v, seed=3, step=4, dtype=torch.bfloat16)
    assert torch.equal(drawn, kernels.draw(*v.values(), 3, 4, True, torch.bfloat16))
    assert torch.equal(drawn, ops.draw(**v, seed=3, step=4).bfloat16())  # rounded to nearest, once
    mu, sigma = v["free_mu"].requires_grad_(), v["free_sigma"].requires_grad_()
    grad = torch.randn(1025, device=DEVICE)
    ops.draw(**v, seed=3, step=4).backward(grad)
    wanted = kernels.draw_backward(grad, v["fixed"], 3, 4)
    assert mu.grad is not None
    assert sigma.grad is not None
    assert torch.equal(mu.grad, wanted[0])
    assert torch.equal(sigma.grad, wanted[1])


@on_device
@pytest.mark.parametrize("name", library.SCHEMAS)
# torch's own deprecations, met while it traces.
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")
def test_opcheck(name: str) -> None:
    v = vectors(127)
    mu, sigma = v["free_mu"].requires_grad_(), v["free_sigma"].requires_grad_()
    weights = [torch.ones(127, device=DEVICE) for _ in range(2)]
    grad, scale = torch.ones(127, device=DEVICE), torch.tensor(0.5, device=DEVICE)
    rest = grad, v["fixed"], ops.free_offsets(v["fixed"]), scale
    fixed = v["fixed"], v["fixed_mu"], v["fixed_sigma"]
    cases: dict[str, tuple[Any, ...]] = {
        "draw": (mu, sigma, *fixed, 1, 2, True, torch.bfloat16),
        "draw_": (grad.bfloat16(), *weights, *fixed, 1, 2, True),
        "draw_backward": (grad.bfloat16(), v["fixed"], 1, 2),
        "grad_squared_norm": (grad, v["fixed"], 1, 2),
        "sgd_": (*weights, *zeros_for("sgd_", v["fixed"]), *rest, *SGD, 1, 2),
        "adamw_": (*weights, *zeros_for("adamw_", v["fixed"]), *rest, *ADAMW, 1, 1, 2),
    }
    done = torch.library.opcheck(getattr(torch.ops.pwfn, name).default, cases[name])
    assert set(done.values()) == {"SUCCESS"}


@on_device
@pytest.mark.filterwarnings("ignore:Synchronization debug mode is a prototype feature")
def test_a_step_never_waits_for_the_device() -> None:
    v = vectors(4099)
    state, offsets = zeros_for("sgd_", v["fixed"]), ops.free_offsets(v["fixed"])
    w = torch.empty(4099, device=DEVICE, dtype=torch.bfloat16)
    names = ("lr", "sigma_lr", "momentum", "weight_decay", "alpha", "cap")
    settings = dict(zip(names, SGD, strict=True))
    for mode in ("default", "error"):  # the first step compiles
        torch.cuda.set_sync_debug_mode(mode)
        try:
            ops.draw_(w, *v.values(), seed=0, step=1)
            squared = ops.grad_squared_norm(w, v["fixed"], seed=0, step=1)
            scale = (1 / (squared.sqrt() + 1e-6)).clamp(max=1.0)
            weights = v["free_mu"], v["free_sigma"]
            ops.sgd_(*weights, *state, w, v["fixed"], offsets, scale, **settings, seed=0, step=1)
        finally:
            torch.cuda.set_sync_debug_mode("default")


@on_device
def test_more_than_two_to_the_31_weights() -> None:
    size = 2**31 + 1029
    if torch.cuda.mem_get_info()[0] < 40 * 2**30:
        pytest.skip("needs 40 GB of free device memory")
    zeros = torch.zeros(size, device=DEVICE, dtype=torch.bfloat16)
    ones, fixed = torch.ones_like(zeros), torch.zeros(size, device=DEVICE, dtype=torch.bool)
    drawn = kernels.draw(zeros, ones, fixed, zeros, zeros, 1, 2, True, torch.bfloat16)
    wanted = [expected_noise(index, 1, 2) for index in range(size - 64, size)]
    assert drawn[-64:].tolist() == pytest.approx(wanted, rel=2**-7, abs=1e-5)
    grad_mu, grad_sigma = kernels.draw_backward(ones, fixed, 1, 2)
    assert grad_mu[-1].item() == 1.0
    assert grad_sigma[-64:].tolist() == pytest.approx(wanted, rel=1e-4, abs=1e-5)
