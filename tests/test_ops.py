"""The operations on flat vectors: the reference against formulas, autograd and the optimizers of torch."""

from __future__ import annotations

import importlib.util
import inspect
import math
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from vectors import (
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

from pwfn import WeightError
from pwfn.bayes import kernels as ops
from pwfn.bayes.kernels import reference


def noise(size: int, seed: int, step: int) -> Tensor:
    """The noise itself: a draw with mean 0 and sigma 1."""
    zeros, ones = torch.zeros(size), torch.ones(size)
    return ops.draw(zeros, ones, zeros.bool(), zeros, zeros, seed=seed, step=step)


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("on", [True, False])
def test_draw_is_the_formula(size: int, dtype: torch.dtype, on: bool) -> None:
    v, out = vectors(size), torch.empty(size, dtype=dtype)
    drawn = ops.draw(**v, seed=3, step=4, noise_on_fixed=on, dtype=dtype)
    mu = torch.where(v["fixed"], v["fixed_mu"], v["free_mu"])
    fixed_sigma = v["fixed_sigma"] if on else torch.zeros(size)
    sigma = torch.where(v["fixed"], fixed_sigma, v["free_sigma"].clamp(min=FLOOR))
    assert torch.equal(drawn, torch.addcmul(mu, sigma, noise(size, 3, 4)).to(dtype))
    assert on or torch.equal(drawn[v["fixed"]], v["fixed_mu"][v["fixed"]].to(dtype))
    ops.draw_(out, *v.values(), seed=3, step=4, noise_on_fixed=on)
    assert torch.equal(out, drawn)


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("share", SHARES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("on", [True, False])
def test_a_constant_sigma_draws_the_bits_of_a_vector(
    size: int, share: str, dtype: torch.dtype, on: bool
) -> None:
    """A scalar for the free weights, and one entry per fixed weight."""
    v = vectors(size, SHARES[share], dtype)
    fixed, one = v["fixed"], torch.tensor(0.03, dtype=dtype)
    wanted, at = v | {"free_sigma": one.repeat(size)}, {"seed": 3, "step": 4, "noise_on_fixed": on}
    assert torch.equal(ops.draw(**v | {"free_sigma": one}, **at), ops.draw(**wanted, **at))
    given, out = (
        v | {"free_sigma": one, "fixed_sigma": v["fixed_sigma"][fixed]},
        torch.empty_like(v["free_mu"]),
    )
    ops.draw_(out, **given, **at, offsets=ops.free_offsets(fixed))
    assert torch.equal(out, ops.draw(**wanted, **at))
    assert torch.equal(ops.unpacked(given["fixed_sigma"], fixed)[fixed], v["fixed_sigma"][fixed])


def test_the_gradient_of_a_scalar_sigma_is_the_sum_of_that_of_a_vector() -> None:
    v, gradients = vectors(127), []
    for sigma in (torch.tensor(0.03), torch.full((127,), 0.03)):
        leaves = v["free_mu"].requires_grad_(), sigma.requires_grad_()
        drawn = ops.draw(**v | {"free_sigma": sigma}, seed=3, step=4)
        gradients.append(torch.autograd.grad(drawn.sin().sum(), leaves))
    (mu, sigma), (mu_of_vector, sigma_of_vector) = gradients
    assert torch.equal(mu, mu_of_vector)
    torch.testing.assert_close(sigma, sigma_of_vector.sum())


def test_a_sigma_below_the_floor_is_drawn_at_the_floor_and_gets_its_gradient() -> None:
    zeros, sigma = torch.zeros(3), torch.tensor([0.0, -1.0, 2 * FLOOR], requires_grad=True)
    drawn = ops.draw(zeros, sigma, zeros.bool(), zeros, zeros, seed=0, step=0)
    assert torch.equal(drawn, noise(3, 0, 0) * torch.tensor([FLOOR, FLOOR, 2 * FLOOR]))
    drawn.sum().backward()
    assert sigma.grad is not None
    assert torch.equal(sigma.grad, noise(3, 0, 0))


def test_float64_is_computed_in_float64() -> None:
    v = vectors(127, dtype=torch.float64)
    v["free_mu"][0], v["free_sigma"][0], v["fixed"][0] = 1.0, 2**-29, False
    drawn = ops.draw(**v, seed=0, step=0)
    assert drawn.dtype == torch.float64
    assert drawn[0] - 1 == pytest.approx(2**-29 * noise(127, 0, 0)[0].item(), rel=1e-6, abs=0)
    assert ops.draw_backward(drawn, v["fixed"], seed=0, step=0)[1].dtype == torch.float64


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("step", [2, 2**40])
def test_gradients_and_their_norm_are_those_of_autograd(size: int, dtype: torch.dtype, step: int) -> None:
    v, weight = vectors(size), torch.linspace(-2, 2, size)
    v["free_sigma"].clamp_(min=FLOOR)
    leaves = [v["free_mu"].requires_grad_(), v["free_sigma"].requires_grad_()]
    drawn = ops.draw(**v, seed=1, step=step, dtype=dtype)
    ours = torch.autograd.grad((drawn.float() * weight).sum(), leaves)
    mu = torch.where(v["fixed"], v["fixed_mu"], v["free_mu"])
    sigma = torch.where(v["fixed"], v["fixed_sigma"], v["free_sigma"])
    plain = torch.addcmul(mu, sigma, noise(size, 1, step)).to(dtype)
    theirs = torch.autograd.grad((plain.float() * weight).sum(), leaves)
    grad_w = torch.where(v["fixed"], torch.nan, weight.to(dtype))  # NaN where fixed must reach nothing
    for one, other, third in zip(
        ours, theirs, ops.draw_backward(grad_w, v["fixed"], seed=1, step=step), strict=True
    ):
        assert torch.equal(one, other)
        assert torch.equal(third, other)
    squared = ops.grad_squared_norm(grad_w, v["fixed"], seed=1, step=step)
    assert squared.dtype == torch.float64
    assert squared.item() == pytest.approx(torch.cat(theirs).double().norm().item() ** 2, rel=1e-12)


def plain_step(
    optimizer: torch.optim.Optimizer, mu: nn.Parameter, sigma: nn.Parameter, v: dict[str, Tensor], step: int
) -> None:
    """A step by autograd and an optimizer of torch."""
    with torch.no_grad():
        sigma.clamp_(min=FLOOR)
    both_mu = torch.where(v["fixed"], v["fixed_mu"], mu)
    both_sigma = torch.where(v["fixed"], v["fixed_sigma"], sigma)
    w = torch.addcmul(both_mu, both_sigma, noise(mu.numel(), 5, step))
    optimizer.zero_grad()
    (torch.sin(3 * w) * 0.2).sum().backward()
    nn.utils.clip_grad_norm_([mu, sigma], 1.0)
    short = torch.relu(SGD["cap"] - sigma)
    (SGD["alpha"] * short.masked_fill(v["fixed"], 0).sum()).backward()
    optimizer.step()
    with torch.no_grad():
        sigma.clamp_(min=FLOOR)


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("name", ["sgd_", "adamw_"])
@pytest.mark.parametrize("share", SHARES)
def test_updates_are_those_of_the_plain_loop(size: int, name: str, share: str) -> None:
    v = vectors(size, SHARES[share])
    offsets, free = ops.free_offsets(v["fixed"]), ~v["fixed"]
    mu, sigma = nn.Parameter(v["free_mu"].clone()), nn.Parameter(v["free_sigma"].clone())
    settings: dict[str, Any] = SGD if name == "sgd_" else ADAMW
    groups = [
        {"params": [mu], "lr": settings["lr"], "weight_decay": settings["weight_decay"]},
        {"params": [sigma], "lr": settings["sigma_lr"], "weight_decay": 0.0},
    ]
    optimizer: torch.optim.Optimizer = (
        torch.optim.SGD(groups, momentum=0.9) if name == "sgd_" else torch.optim.AdamW(groups)
    )
    state, before = new_state(name, v["fixed"]), {key: tensor.clone() for key, tensor in v.items()}
    for step in range(6):
        w = ops.draw(**v, seed=5, step=step).requires_grad_()
        (torch.sin(3 * w) * 0.2).sum().backward()
        assert w.grad is not None
        norm = ops.grad_squared_norm(w.grad, v["fixed"], seed=5, step=step).sqrt()
        scale = (1.0 / (norm + 1e-6)).clamp(max=1.0)
        plain_step(optimizer, mu, sigma, v, step)
        count = {} if name == "sgd_" else {"count": step + 1}
        arguments = v["free_mu"], v["free_sigma"], *state, w.grad, v["fixed"], offsets, scale
        getattr(ops, name)(*arguments, **settings, **count, seed=5, step=step)
        assert torch.allclose(v["free_mu"][free], mu.detach()[free], rtol=1e-5, atol=1e-7)
        assert torch.allclose(v["free_sigma"][free], sigma.detach()[free], rtol=1e-5, atol=1e-7)
    for key in ("free_mu", "free_sigma"):
        assert torch.equal(v[key][v["fixed"]], before[key][v["fixed"]])
    names = ("momentum_buffer",) if name == "sgd_" else ("exp_avg", "exp_avg_sq")
    theirs = [optimizer.state[parameter][key][free] for key in names for parameter in (mu, sigma)]
    for one, other in zip(state, theirs, strict=True):  # one entry per free weight, in their order
        assert torch.allclose(one, other, rtol=1e-5, atol=1e-6)
    assert all(torch.equal(v[key], before[key]) for key in ("fixed", "fixed_mu", "fixed_sigma"))


@pytest.mark.parametrize("name", ["sgd_", "adamw_"])
def test_a_fixed_weight_keeps_its_bits_whatever_its_gradient_is(name: str) -> None:
    odd = torch.tensor([math.nan, -0.0, 1e-45, math.inf])
    mu, sigma = odd.clone(), odd.clone()
    settings: dict[str, Any] = SGD if name == "sgd_" else {**ADAMW, "count": 1}
    fixed, one = torch.ones(4, dtype=torch.bool), torch.tensor(1.0)
    rest = *new_state(name, fixed), odd.flip(0), fixed, ops.free_offsets(fixed), one
    getattr(ops, name)(mu, sigma, *rest, **settings, seed=0, step=0)
    for tensor in (mu, sigma):
        assert torch.equal(tensor.view(torch.int32), odd.view(torch.int32))


def test_a_step_of_sgd_by_hand() -> None:
    mu, sigma = torch.tensor([2.0, 2.0, 2.0]), torch.tensor([0.25, 0.5, 1.0])
    m_mu, m_sigma = torch.tensor([4.0, 4.0, 4.0]), torch.tensor([0.0, 0.0, 8.0])
    settings = {"lr": 0.5, "sigma_lr": 0.25, "momentum": 0.5, "weight_decay": 0.125, "alpha": 1.0, "cap": 0.5}
    fixed = torch.zeros(3, dtype=torch.bool)
    rest = torch.zeros(3), fixed, ops.free_offsets(fixed), torch.tensor(1.0)
    ops.sgd_(mu, sigma, m_mu, m_sigma, *rest, **settings, seed=0, step=0)
    # m = 0.5 * 4 + 0.125 * 2 and mu = 2 - 0.5 * m. The penalty acts below the cap only, not at it.
    assert m_mu.tolist() == [2.25] * 3
    assert mu.tolist() == [0.875] * 3
    assert m_sigma.tolist() == [-1.0, 0.0, 4.0]
    assert sigma.tolist() == [0.5, 0.5, FLOOR]


def test_only_the_gradient_of_the_task_is_scaled() -> None:
    v, grad = vectors(127), vectors(127)["fixed_mu"].bfloat16()
    settings = {"lr": 1.0, "sigma_lr": 1.0, "momentum": 0.0, "weight_decay": 0.0, "alpha": 0.5, "cap": 10.0}
    state, free = new_state("sgd_", v["fixed"]), ~v["fixed"]
    rest = grad, v["fixed"], ops.free_offsets(v["fixed"]), torch.tensor(0.25)
    ops.sgd_(v["free_mu"], v["free_sigma"], *state, *rest, **settings, seed=2, step=3)
    grad_mu, grad_sigma = ops.draw_backward(grad, v["fixed"], seed=2, step=3)
    assert torch.equal(state[0], 0.25 * grad_mu[free])
    assert torch.equal(state[1], 0.25 * grad_sigma[free] - 0.5)


def test_parameters_are_updated_in_place_and_autograd_is_told() -> None:
    arguments, numbers = operations()["sgd_"]
    mu = nn.Parameter(arguments[0])
    square = (mu * mu).sum()  # saves mu for its backward pass
    ops.sgd_(mu, *arguments[1:], **numbers)
    assert mu.is_leaf
    assert mu.requires_grad
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        square.backward()


def test_no_weights_are_no_work() -> None:
    none, one = torch.zeros(0), torch.tensor(1.0)
    assert noise(0, 0, 0).shape == (0,)
    assert ops.grad_squared_norm(none, none.bool(), seed=0, step=0).item() == 0
    offsets = ops.free_offsets(none.bool())
    assert offsets.shape == (0,)
    ops.sgd_(*(torch.zeros(0) for _ in range(4)), none, none.bool(), offsets, one, **SGD, seed=0, step=0)


def test_the_noise_is_standard_normal() -> None:
    check_normal(noise(200_001, 0, 0))
    check_normal(torch.stack([noise(17, 1, step) for step in range(5000)])[:, 3])


def test_the_noise_of_steps_seeds_and_ranks_is_independent() -> None:
    first = noise(100_003, 7, 10)
    assert torch.equal(first, noise(100_003, 7, 10))
    for seed, step in [(7, 11), (7, 12), (7, 10 + 2**32), (8, 10), (8, 11), (7 + 2**32, 10), (10, 7)]:
        check_independent(first, noise(100_003, seed, step))
    check_independent(first[:-1], first[1:])
    ranks = torch.stack([noise(1000, 100 + rank, 0) for rank in range(64)])
    check_normal(ranks.mean(0) * 8)


def test_the_generator_seeds_of_one_seed_do_not_collide() -> None:
    steps = [*range(100_000), *range(2**31, 2**31 + 100_000)]
    assert len({reference.generator_seed(3, step) % 2**32 for step in steps}) == len(steps)
    # Why the lower half: the CPU generator does not tell these two seeds apart.
    low, high = (torch.Generator().manual_seed(seed) for seed in (1, 1 + 2**32))
    assert torch.equal(torch.randn(5, generator=low), torch.randn(5, generator=high))


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("share", SHARES)
def test_offsets_count_the_free_weights_before_each_block(size: int, share: str) -> None:
    fixed = vectors(size, SHARES[share])["fixed"]
    for block in (4, 1024):
        wanted = [int((~fixed[:start]).sum()) for start in range(0, size, block)]
        assert ops.free_offsets(fixed, block).tolist() == wanted


# Deprecation warnings of torch itself while it traces.
@pytest.mark.parametrize("name", operations())
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")
def test_opcheck(name: str) -> None:
    done = torch.library.opcheck(getattr(torch.ops.pwfn, name).default, *operations()[name])
    assert set(done.values()) == {"SUCCESS"}


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")
def test_a_step_compiles_to_one_graph_for_all_steps() -> None:
    v, graphs = vectors(127), []
    leaves = v["free_mu"].requires_grad_(), v["free_sigma"].requires_grad_()

    def loss(step: int) -> Tensor:
        return ops.draw(**v, seed=3, step=step).sin().sum()

    def keep(graph: torch.fx.GraphModule, inputs: list[Any]) -> Any:
        graphs.append(graph)
        return graph

    compiled = torch.compile(loss, backend=keep, fullgraph=True)
    for step in range(2, 7):
        grads = [torch.autograd.grad(function(step), leaves) for function in (loss, compiled)]
        assert all(torch.equal(one, other) for one, other in zip(*grads, strict=True))
    assert len(graphs) <= 2  # the first for its step alone, the second for any


SHORT = torch.ones(4)


@pytest.mark.parametrize(
    ("name", "change", "words"),
    [
        *[
            ("sgd_", {name: bad}, f"{name} is a")
            for name in ("free_mu", "free_sigma", "grad_w", "momentum_mu", "momentum_sigma", "fixed")
            for bad in (torch.ones(6), torch.ones(5).long(), torch.ones(5, device="meta"), torch.ones(5, 1))
        ],
        *[("draw", {name: SHORT}, f"{name} is a") for name in ("free_mu", "fixed_mu", "fixed_sigma")],
        ("draw", {"free_mu": torch.ones(10)[::2]}, "free_mu is a strided"),
        ("draw", {"fixed": torch.zeros(5, 1).bool()}, "fixed is a"),
        ("draw_", {"out": SHORT}, "out is a"),
        ("draw_backward", {"grad_w": SHORT}, "grad_w is a"),
        ("grad_squared_norm", {"grad_w": SHORT}, "grad_w is a"),
        ("sgd_", {"momentum_sigma": torch.zeros(2)}, "momentum_sigma is a"),
        ("sgd_", {"free_sigma": torch.tensor(1.0)}, "momentum_sigma is a"),  # only a vector has state
        ("adamw_", {"free_sigma": torch.tensor(1.0)}, "mean_sigma is a"),
        *[("draw", {name: torch.tensor(1.0)}, f"{name} is a") for name in ("fixed_mu", "fixed_sigma")],
        ("draw_", {"fixed_sigma": torch.ones(6)}, "fixed_sigma is a"),
        ("draw_", {"fixed_sigma": SHORT}, "4 entries for 2 fixed weights"),
        # Whether the state fits the mask is known to the reference, which counts the free weights.
        ("sgd_", {"momentum_mu": SHORT, "momentum_sigma": SHORT}, "4 entries for 3 free weights"),
        ("adamw_", dict.fromkeys(("mean_mu", "mean_sigma", "square_mu", "square_sigma"), SHORT), "4 entries"),
        ("sgd_", {"offsets": torch.zeros(2).long()}, "offsets is a"),
        ("sgd_", {"offsets": torch.zeros(1)}, "offsets is a"),
        ("sgd_", {"scale": torch.ones(1)}, "scale is a"),
        ("sgd_", {"scale": torch.tensor(1)}, "scale is a"),
        ("draw", {"seed": -1}, "seed is -1"),
        ("sgd_", {"step": 2**63}, f"step is {2**63}"),
        ("adamw_", {"count": 0}, "count is 0"),
    ],
)
def test_an_argument_that_does_not_fit_is_named(name: str, change: dict[str, Any], words: str) -> None:
    fixed = torch.tensor([True, False, False, True, False])
    sound: dict[str, Any] = {
        **dict.fromkeys(("out", "free_mu", "free_sigma", "fixed_mu", "fixed_sigma", "grad_w"), torch.ones(5)),
        **dict.fromkeys(("momentum_mu", "momentum_sigma"), torch.zeros(3)),
        **dict.fromkeys(("mean_mu", "mean_sigma", "square_mu", "square_sigma"), torch.zeros(3)),
        "fixed": fixed,
        "offsets": ops.free_offsets(fixed),
        "scale": torch.tensor(1.0),
        **SGD,
        **dict.fromkeys(("count", "seed", "step"), 1),
    }
    operation = getattr(ops, name)
    given = {key: sound[key] for key in inspect.signature(operation).parameters if key in sound}
    with pytest.raises(WeightError, match=words):
        operation(**{**given, **change})
    assert torch.equal(sound["free_mu"], torch.ones(5))  # nothing was written


def run(program: str, *folders: Path) -> str:
    paths = [*map(str, folders), *filter(None, [os.environ.get("PYTHONPATH")])]
    done = subprocess.run(
        [sys.executable, "-c", program],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(paths)},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


HAS_KERNEL = """
import torch, pwfn.bayes.kernels
names = ("draw", "draw_", "draw_backward", "grad_squared_norm", "sgd_", "adamw_")
print({torch._C._dispatch_has_kernel_for_dispatch_key("pwfn::" + name, "CUDA") for name in names})
"""
ON_CUDA = """
assert "pwfn.bayes.kernels.triton" not in sys.modules
cuda = torch._C.DispatchKeySet(torch._C.DispatchKey.CUDA)
try:
    torch.ops.pwfn.grad_squared_norm.default.redispatch(cuda, torch.ones(3), torch.ones(3), seed=1, step=2)
except RuntimeError as error:
    print(error)
"""


def test_without_triton_the_reference_runs_on_cuda() -> None:
    assert run("import sys; sys.modules['triton'] = None\n" + HAS_KERNEL) == "{False}"


def test_with_triton_kernels_are_registered_and_imported_at_the_first_call(tmp_path: Path) -> None:
    (tmp_path / "triton.py").write_text("raise RuntimeError('imported now')")
    assert run("import sys\n" + HAS_KERNEL + ON_CUDA, tmp_path).split("\n") == ["{True}", "imported now"]


@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="needs Triton")
def test_the_kernels_in_tritons_interpreter() -> None:
    tests = str(Path(__file__).parent / "gpu/test_triton.py")
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", tests],
        env={**os.environ, "TRITON_INTERPRET": "1"},
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.returncode == 0, done.stdout[-5000:]
    assert "passed" in done.stdout


@pytest.mark.parametrize("name", ["sgd_", "adamw_"])
def test_numbers_on_the_device_give_the_same_step_as_numbers_of_python(name: str) -> None:
    settings: dict[str, Any] = SGD if name == "sgd_" else ADAMW
    ends = []
    for on_device in (False, True):
        v, made = vectors(1025), []
        state, offsets = new_state(name, v["fixed"]), ops.free_offsets(v["fixed"])
        for step in range(3):
            at: dict[str, Any] = {"seed": 5, "step": step}
            count = {} if name == "sgd_" else {"count": step + 1}
            numbers = settings
            if on_device:
                at = {"seed": 5, "step": 0, "ahead": torch.tensor(step)}
                count = {} if name == "sgd_" else {"count": 1}
                rates = torch.tensor([settings["lr"], settings["sigma_lr"]])
                numbers = {**settings, "lr": 9.0, "sigma_lr": 9.0, "rates": rates}
            out = torch.empty(1025)
            ops.draw_(out, *v.values(), **at)
            norm = ops.grad_squared_norm(out, v["fixed"], **at)
            rest = out, v["fixed"], offsets, torch.tensor(0.5)
            getattr(ops, name)(v["free_mu"], v["free_sigma"], *state, *rest, **numbers, **count, **at)
            made += [out, norm.reshape(1).float()]
        ends.append(torch.cat([*made, v["free_mu"], v["free_sigma"], *state]))
    torch.testing.assert_close(ends[0], ends[1], rtol=1e-6, atol=1e-7)  # rates are float32 there


@pytest.mark.parametrize("name", ["sgd_", "adamw_"])
def test_a_sigma_without_state_stays_and_mu_moves_as_ever(name: str) -> None:
    settings: dict[str, Any] = {**(SGD if name == "sgd_" else {**ADAMW, "count": 1}), "sigma_lr": 0.0}
    ends = []
    for constant, scalar in ((False, False), (True, False), (True, True)):
        v = vectors(1025)
        free_sigma, state = v["free_sigma"], new_state(name, v["fixed"])
        free_sigma = free_sigma[0].clone() if scalar else free_sigma
        sigma = free_sigma.clone()
        given = [s if i % 2 == 0 or not constant else s[:0] for i, s in enumerate(state)]
        rest = v["fixed_mu"], v["fixed"], ops.free_offsets(v["fixed"]), torch.tensor(0.5)
        getattr(ops, name)(v["free_mu"], free_sigma, *given, *rest, **settings, seed=5, step=2)
        assert not constant or torch.equal(free_sigma, sigma)
        ends.append(torch.cat([v["free_mu"], *state[::2]]))
    assert torch.equal(ends[0], ends[1])
    assert torch.equal(ends[0], ends[2])
