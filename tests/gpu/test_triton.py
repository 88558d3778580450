"""The Triton kernels: their noise against an independent Philox, their results against the formulas.

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
from vectors import (  # noqa: E402
    ADAMW,
    FLOOR,
    SGD,
    SHARES,
    SIZES,
    check_independent,
    check_normal,
    new_state,
    operations,
    vectors,
)

from pwfn.bayes import kernels as ops  # noqa: E402
from pwfn.bayes.kernels import triton as kernels  # noqa: E402

DEVICE = "cpu" if INTERPRETED else "cuda"
on_device = pytest.mark.skipif(INTERPRETED, reason="needs a CUDA device")
BLOCKS = (64, 512, 1024, 2048)
MANY = 200_001 if INTERPRETED else 10_000_001


def noise(size: int, seed: int, step: int, block: int = 8192) -> Tensor:
    """The noise itself: a draw with mean 0 and sigma 1."""
    zeros, ones = torch.zeros(size, device=DEVICE), torch.ones(size, device=DEVICE)
    return kernels.draw(zeros, ones, zeros.bool(), zeros, zeros, seed=seed, step=step, block=block)


def update(name: str, *tensors: Tensor, count: int, **numbers: int) -> None:
    """One step of either optimizer with its settings."""
    settings: dict[str, Any] = SGD if name == "sgd_" else {**ADAMW, "count": count}
    getattr(kernels, name)(*tensors, **settings, **numbers)


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
    tl.store(out + tl.arange(0, BLOCK), kernels._noise(seed, step, start, BLOCK))


def test_the_noise_does_not_repeat_past_32_bits() -> None:
    out = torch.empty(16, device=DEVICE)
    for start in (2**31, 2**32 - 8, 2**34, 2**40):
        _noise_from[(1,)](out, start, 2**33 + 7, 2**33 + 3, BLOCK=16)
        wanted = [expected_noise(start + i, 2**33 + 7, 2**33 + 3) for i in range(16)]
        assert out.tolist() == pytest.approx(wanted, rel=1e-4, abs=1e-5)


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("share", SHARES)
def test_the_launch_shape_does_not_matter(size: int, share: str) -> None:
    v, at = vectors(size, SHARES[share], device=DEVICE), {"seed": 3, "step": 4}
    grad, fixed = v["fixed_mu"], v["fixed"]
    scale = torch.tensor(0.5, device=DEVICE)
    assert torch.equal(noise(size + 1000, 3, 4)[:size], noise(size, 3, 4))
    results = []
    for block in BLOCKS:
        made = [kernels.draw(*v.values(), **at, block=block)]
        made += kernels.draw_backward(grad, fixed, **at, block=block)
        for name in ("sgd_", "adamw_"):
            state = [v["free_mu"].clone(), v["free_sigma"].clone(), *new_state(name, fixed)]
            rest = grad, fixed, ops.free_offsets(fixed, block), scale
            for count in (1, 2):  # from zeros, and from the state after the first step
                update(name, *state, *rest, count=count, seed=3, step=count, block=block)
            made += state
        results.append(torch.cat(made))
    assert all(torch.equal(results[0], other) for other in results[1:])
    # The norm alone is a sum, taken by blocks: equal to the rounding of float32, not to the bit.
    norms = [kernels.grad_squared_norm(grad, fixed, **at, block=block).item() for block in BLOCKS]
    assert norms == pytest.approx([norms[0]] * len(BLOCKS), rel=1e-6)


# The interpreter truncates to bfloat16 where a GPU rounds; one unit in the last place covers both.
ULP = {torch.float32: 2**-22, torch.bfloat16: 2**-7, torch.float16: 2**-10, torch.float64: 1e-9}


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("on", [True, False])
def test_draw_is_the_formula(size: int, dtype: torch.dtype, on: bool) -> None:
    v, out = vectors(size, device=DEVICE), torch.empty(size, device=DEVICE, dtype=dtype)
    drawn = kernels.draw(*v.values(), seed=3, step=4, noise_on_fixed=on, dtype=dtype)
    assert drawn.dtype == dtype
    version = out._version
    kernels.draw_(out, *v.values(), seed=3, step=4, noise_on_fixed=on)
    assert torch.equal(out, drawn)
    assert out._version > version  # autograd is told
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


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("share", SHARES)
@pytest.mark.parametrize("on", [True, False])
def test_a_constant_sigma_draws_the_bits_of_a_vector(size: int, share: str, on: bool) -> None:
    """A scalar for the free weights, and one entry per fixed weight."""
    v = vectors(size, SHARES[share], device=DEVICE)
    fixed, one = v["fixed"], torch.tensor(0.03, device=DEVICE)
    given = {"free_sigma": one, "fixed_sigma": v["fixed_sigma"][fixed]}
    outs, at = torch.empty(2, size, device=DEVICE).unbind(), {"seed": 3, "step": 4, "noise_on_fixed": on}
    for block in BLOCKS:
        offsets = ops.free_offsets(fixed, block)
        kernels.draw_(outs[0], *(v | given).values(), **at, offsets=offsets, block=block)
        kernels.draw_(outs[1], *(v | {"free_sigma": one.repeat(size)}).values(), **at)
        assert torch.equal(*outs)


def test_the_sigmas_of_another_mask_are_not_read_past_their_end() -> None:
    v, out = vectors(1025, 1.0, device=DEVICE), torch.empty(1025, device=DEVICE)
    room = torch.full((1025,), torch.nan, device=DEVICE)
    room[:700] = 0.1
    offsets = ops.free_offsets(v["fixed"])
    kernels.draw_(out, *(v | {"fixed_sigma": room[:700]}).values(), seed=3, step=4, offsets=offsets)
    assert bool(out.isfinite().all())


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_parameters_may_be_wide_or_narrow(dtype: torch.dtype) -> None:
    v = vectors(1025, dtype=dtype, device=DEVICE)
    drawn = kernels.draw(*v.values(), seed=3, step=4, dtype=torch.float64)
    wide = {k: t if k == "fixed" else t.double() for k, t in v.items()}
    mu = torch.where(wide["fixed"], wide["fixed_mu"], wide["free_mu"])
    sigma = torch.where(wide["fixed"], wide["fixed_sigma"], wide["free_sigma"].clamp(min=FLOOR))
    wanted = mu + sigma * noise(1025, 3, 4)
    tolerance = 1e-15 if dtype == torch.float64 else 1e-6
    assert torch.allclose(drawn, wanted, rtol=tolerance, atol=tolerance)
    grads = kernels.draw_backward(wide["fixed_mu"], v["fixed"], seed=3, step=4)
    assert grads[1].dtype == torch.float64


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_backward_and_norm_are_the_formulas(size: int, dtype: torch.dtype) -> None:
    v, at = vectors(size, device=DEVICE), {"seed": 1, "step": 2}
    grad, fixed, eps = v["fixed_mu"].to(dtype), v["fixed"], noise(size, 1, 2)
    grad[fixed] = torch.nan  # which must reach nothing
    grad_mu, grad_sigma = kernels.draw_backward(grad, fixed, **at)
    assert grad_mu.dtype == grad_sigma.dtype == torch.float32
    assert torch.equal(grad_mu, grad.float().masked_fill(fixed, 0))
    assert torch.equal(grad_sigma, (grad.float() * eps).masked_fill(fixed, 0))
    squared = kernels.grad_squared_norm(grad, fixed, **at)
    wanted = grad_mu.double().square().sum() + grad_sigma.double().square().sum()
    assert squared.item() == pytest.approx(wanted.item(), rel=1e-6)
    assert torch.equal(squared, kernels.grad_squared_norm(grad, fixed, **at))


def test_a_gradient_may_be_one_number_with_stride_0() -> None:
    fixed = torch.zeros(127, dtype=torch.bool, device=DEVICE)
    grad = torch.ones((), device=DEVICE).expand(127)
    assert torch.equal(kernels.draw_backward(grad, fixed, seed=1, step=2)[1], noise(127, 1, 2))


def new_weights(name: str, state: list[Tensor], grad: Tensor, scale: float, eps: Tensor, count: int) -> None:
    """One step in float64, written out; all weights are free."""
    mu, sigma, *kept = state
    sigma = sigma.clamp(min=FLOOR)
    g_mu, g_sigma = scale * grad, scale * grad * eps
    g_sigma = g_sigma - SGD["alpha"] * (sigma < np.float32(SGD["cap"]).item())
    if name == "sgd_":
        kept[0].copy_(SGD["momentum"] * kept[0] + g_mu + SGD["weight_decay"] * mu)
        kept[1].copy_(SGD["momentum"] * kept[1] + g_sigma)
        mu, sigma = mu - SGD["lr"] * kept[0], sigma - SGD["sigma_lr"] * kept[1]
    else:
        lr, sigma_lr, (beta1, beta2) = ADAMW["lr"], ADAMW["sigma_lr"], (0.9, 0.999)
        mu = mu * (1 - lr * ADAMW["weight_decay"])
        steps = []
        for mean, square, g, rate in ((*kept[::2], g_mu, lr), (*kept[1::2], g_sigma, sigma_lr)):
            mean.copy_(beta1 * mean + (1 - beta1) * g)
            square.copy_(beta2 * square + (1 - beta2) * g * g)
            root = (square / (1 - beta2**count)).sqrt() + 1e-8
            steps.append(rate * mean / (1 - beta1**count) / root)
        mu, sigma = mu - steps[0], sigma - steps[1]
    state[0].copy_(mu)
    state[1].copy_(sigma.clamp(min=FLOOR))


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("name", ["sgd_", "adamw_"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("share", SHARES)
def test_updates_are_the_formulas(size: int, name: str, dtype: torch.dtype, share: str) -> None:
    v = vectors(size, SHARES[share], device=DEVICE)
    fixed, free, offsets = v["fixed"], ~v["fixed"], ops.free_offsets(v["fixed"])
    weights, state = [v["free_mu"], v["free_sigma"]], new_state(name, fixed)
    before = [tensor.clone() for tensor in weights]
    oracle = [tensor.double() for tensor in weights] + [torch.zeros(size).to(DEVICE).double() for _ in state]
    generator = torch.Generator().manual_seed(0)
    for step in range(5):
        grad = torch.randn(size, generator=generator).to(DEVICE, dtype)
        grad[fixed] = torch.nan
        scale = 1.0 / (1 + step)
        rest = grad, fixed, offsets, torch.tensor(scale, device=DEVICE)
        update(name, *weights, *state, *rest, count=step + 1, seed=8, step=step)
        new_weights(name, oracle, grad.double(), scale, noise(size, 8, step).double(), step + 1)
        ours = [*(tensor[free] for tensor in weights), *state]
        for one, other in zip(ours, oracle, strict=True):
            assert torch.allclose(one.double(), other[free], rtol=2e-5, atol=1e-6)
    for now, then in zip(weights, before, strict=True):
        assert torch.equal(now[fixed], then[fixed])
    assert not bool(free.any()) or bool((weights[1][free] >= FLOOR).all())


@pytest.mark.parametrize("name", ["sgd_", "adamw_"])
def test_a_step_whose_numbers_are_on_the_device_is_the_same(name: str) -> None:
    """Draw, norm and update of step 3; sigma is trained, then not, and its state is empty."""
    settings: dict[str, Any] = {**(SGD if name == "sgd_" else {**ADAMW, "count": 4})}
    rates = torch.tensor([settings["lr"], settings["sigma_lr"]], device=DEVICE)
    ahead = torch.tensor(3, device=DEVICE)
    moved = {**settings, "lr": 9.0, "sigma_lr": 9.0, "rates": rates, "step": 0, "ahead": ahead}
    moved |= {} if name == "sgd_" else {"count": 1}
    ends = []
    for numbers, constant in (({**settings, "step": 3}, False), (moved, False), (moved, True)):
        v = vectors(1025, device=DEVICE)
        at = {key: numbers[key] for key in ("step", "ahead") if key in numbers}
        out, state = torch.empty(1025, device=DEVICE), new_state(name, v["fixed"])
        kernels.draw_(out, *v.values(), seed=5, **at)
        norm = kernels.grad_squared_norm(out, v["fixed"], seed=5, **at)
        given = [s[:0] if constant and i % 2 else s for i, s in enumerate(state)]
        rest = out, v["fixed"], ops.free_offsets(v["fixed"]), torch.tensor(0.5, device=DEVICE)
        free_sigma = v["free_sigma"][0].clone() if constant else v["free_sigma"]  # a scalar has no state
        sigma = free_sigma.clone()
        getattr(kernels, name)(v["free_mu"], free_sigma, *given, *rest, **numbers, seed=5)
        assert torch.equal(free_sigma, sigma) is constant
        ends.append(torch.cat([out, norm.reshape(1).float(), v["free_mu"], *state[::2]]))
    assert torch.equal(ends[0], ends[1])
    assert torch.equal(ends[1], ends[2])


def test_a_state_of_another_mask_is_not_written_past_its_end() -> None:
    v = vectors(1025, 0.0, device=DEVICE)
    room = torch.zeros(2, 1025, device=DEVICE)
    state = [row[:700] for row in room]
    rest = v["fixed_mu"], v["fixed"], ops.free_offsets(v["fixed"]), torch.tensor(1.0, device=DEVICE)
    kernels.sgd_(v["free_mu"], v["free_sigma"], *state, *rest, **SGD, seed=8, step=0)
    assert bool((room[:, :700] != 0).all())
    assert not bool(room[:, 700:].any())


def test_an_update_of_wide_parameters_is_wide() -> None:
    v = vectors(1025, dtype=torch.float64, device=DEVICE)
    fixed, free = v["fixed"], ~v["fixed"]
    weights, state = [v["free_mu"], v["free_sigma"]], new_state("sgd_", fixed, torch.float64)
    oracle = [tensor.clone() for tensor in weights] + [torch.zeros_like(v["free_mu"]) for _ in state]
    one = torch.tensor(1.0, device=DEVICE, dtype=torch.float64)
    rest = v["fixed_mu"], fixed, ops.free_offsets(fixed), one
    kernels.sgd_(*weights, *state, *rest, **SGD, seed=8, step=0)
    new_weights("sgd_", oracle, v["fixed_mu"], 1.0, noise(1025, 8, 0).double(), 1)
    # What is left is the rounding of the learning rate to float32.
    assert torch.allclose(weights[0][free], oracle[0][free], rtol=1e-9, atol=1e-9)


def test_a_nan_in_sigma_is_not_hidden_by_the_floor() -> None:
    v = vectors(127, 0.0, device=DEVICE)
    v["free_sigma"][5] = torch.nan
    assert bool(kernels.draw(*v.values(), seed=0, step=0)[5].isnan())


def test_no_weights_are_no_work() -> None:
    none = torch.zeros(0, device=DEVICE)
    assert noise(0, 0, 0).shape == (0,)
    assert kernels.grad_squared_norm(none, none.bool(), seed=0, step=0).item() == 0


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
    v, at = vectors(1025, device=DEVICE), {"seed": 3, "step": 4}
    drawn = ops.draw(**v, **at, dtype=torch.bfloat16)
    assert torch.equal(drawn, kernels.draw(*v.values(), **at, dtype=torch.bfloat16))
    assert torch.equal(drawn, ops.draw(**v, **at).bfloat16())  # rounded to nearest, once
    leaves = v["free_mu"].requires_grad_(), v["free_sigma"].requires_grad_()
    grad = torch.randn(1025, device=DEVICE)
    made = torch.autograd.grad(ops.draw(**v, **at), leaves, grad)
    for one, other in zip(made, kernels.draw_backward(grad, v["fixed"], **at), strict=True):
        assert torch.equal(one, other)


@on_device
@pytest.mark.parametrize("name", operations())
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")  # of torch itself
def test_opcheck(name: str) -> None:
    done = torch.library.opcheck(getattr(torch.ops.pwfn, name).default, *operations(DEVICE)[name])
    assert set(done.values()) == {"SUCCESS"}


@on_device
@pytest.mark.filterwarnings("ignore:Synchronization debug mode is a prototype feature")
def test_a_step_never_waits_for_the_device() -> None:
    v, at = vectors(4099, device=DEVICE), {"seed": 0, "step": 1}
    state, offsets = new_state("sgd_", v["fixed"]), ops.free_offsets(v["fixed"])
    w = torch.empty(4099, device=DEVICE, dtype=torch.bfloat16)
    for mode in ("default", "error"):  # the first step compiles
        torch.cuda.set_sync_debug_mode(mode)
        try:
            ops.draw_(w, *v.values(), **at)
            squared = ops.grad_squared_norm(w, v["fixed"], **at)
            scale = (1 / (squared.sqrt() + 1e-6)).clamp(max=1.0)
            weights = v["free_mu"], v["free_sigma"]
            ops.sgd_(*weights, *state, w, v["fixed"], offsets, scale, **SGD, **at)
        finally:
            torch.cuda.set_sync_debug_mode("default")


@on_device
def test_more_than_two_to_the_31_weights() -> None:
    size = 2**31 + 1029
    if torch.cuda.mem_get_info()[0] < 40 * 2**30:
        pytest.skip("needs 40 GB of free device memory")
    zeros = torch.zeros(size, device=DEVICE, dtype=torch.bfloat16)
    ones, fixed = torch.ones_like(zeros), torch.zeros(size, device=DEVICE, dtype=torch.bool)
    drawn = kernels.draw(zeros, ones, fixed, zeros, zeros, seed=1, step=2)
    wanted = [expected_noise(index, 1, 2) for index in range(size - 64, size)]
    assert drawn[-64:].tolist() == pytest.approx(wanted, rel=2**-7, abs=1e-5)
    grad_mu, grad_sigma = kernels.draw_backward(ones, fixed, seed=1, step=2)
    assert grad_mu[-1].item() == 1.0
    assert grad_sigma[-64:].tolist() == pytest.approx(wanted, rel=1e-4, abs=1e-5)
