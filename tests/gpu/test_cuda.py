"""Results on a GPU: equal to those of the CPU where they must be, and the same in every run."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

from pwfn import Config, GaussianNetwork, compress, fix_round, load
from pwfn.lab.baselines import kmeans
from pwfn.lab.baselines import wfn_rounds as wfn
from pwfn.zoo.models import digits_resnet

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


@pytest.mark.parametrize("rule", ["mean", "each", "nearest"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("sweep", [None, 4.0])
def test_fixing_rounds_are_those_of_the_cpu(rule: str, dtype: torch.dtype, sweep: float | None) -> None:
    generator = torch.Generator().manual_seed(0)
    mu = torch.randn(100_003, generator=generator, dtype=dtype) * 0.1
    sigma = torch.rand(100_003, generator=generator, dtype=dtype) * 0.02
    here = mu, sigma, torch.zeros(100_003, dtype=torch.bool)
    there = tuple(tensor.cuda() for tensor in here)
    for fraction in (0.2, 0.6, 0.9, 1.0):
        cpu = fix_round(*here, fraction, rule=rule, sweep=sweep)
        gpu = fix_round(*there, fraction, rule=rule, sweep=sweep)
        assert [tuple(step) for step in gpu.steps if step.centre == step.centre] == [
            tuple(step) for step in cpu.steps if step.centre == step.centre
        ]
        assert torch.equal(gpu.mu.cpu(), cpu.mu)
        assert torch.equal(gpu.fixed.cpu(), cpu.fixed)
        assert torch.allclose(gpu.sigma.cpu(), cpu.sigma, rtol=1e-6, atol=0)
        here = cpu.mu, cpu.sigma, cpu.fixed
        there = gpu.mu, gpu.sigma, gpu.fixed


def test_the_rounds_of_wfn_and_clusters_of_kmeans_are_those_of_the_cpu() -> None:
    w = 0.05 * torch.randn(270_001, generator=torch.Generator().manual_seed(0))
    here, there = kmeans.kmeans(w.cuda(), 16), kmeans.kmeans(w, 16)
    assert torch.equal(here.centroids.cpu(), there.centroids)
    assert torch.equal(here.indices.cpu(), there.indices)
    fixed = torch.zeros_like(w, dtype=torch.bool)
    for fraction in (0.4, 0.9, 1.0):
        gpu = wfn.fix_round(w.cuda(), fixed.cuda(), fraction, delta=0.015)
        cpu = wfn.fix_round(w, fixed, fraction, delta=0.015)
        assert gpu.steps == cpu.steps
        assert torch.equal(gpu.weights.cpu(), cpu.weights)
        w, fixed = cpu.weights, cpu.fixed


def test_before_training_the_output_is_the_models_own() -> None:
    model = digits_resnet().cuda().eval()
    images = torch.randn(7, 1, 8, 8, device="cuda")
    with torch.no_grad():
        assert torch.equal(GaussianNetwork(model)(images), model(images))


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_the_same_seed_gives_the_same_bits(precision: str) -> None:
    torch.manual_seed(0)
    model = digits_resnet().cuda()
    batches = [(torch.randn(64, 1, 8, 8), torch.randint(0, 10, (64,))) for _ in range(8)]
    config = Config().override({"training.precision": precision, "schedule.epochs_per_round": 1.0})
    first, second = (compress(model, batches, config=config).compressed for _ in range(2))
    assert torch.equal(first.values(), second.values())
    assert first.sigma is not None
    assert second.sigma is not None
    assert torch.equal(first.sigma, second.sigma)
    assert all(torch.equal(first.untouched[name], second.untouched[name]) for name in first.untouched)


# Advice from the compiler, and a deprecation within torch itself.
@pytest.mark.filterwarnings("ignore:TensorFloat32 tensor cores", "ignore:.torch.jit.script_method")
def test_a_compiled_step_trains_free_weights_only() -> None:
    net = GaussianNetwork(nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 4))).cuda().train()
    net.fix(0.5)
    fixed = net.mu[net.fixed].clone()
    step = torch.compile(net)
    optimizer = torch.optim.SGD(net.parameter_groups(lr=0.1, weight_decay=1e-4), momentum=0.9)
    free = net.free_mu.detach().clone()
    for _ in range(3):
        loss = step(torch.randn(8, 16, device="cuda")).square().mean() + net.penalty()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    assert torch.equal(net.mu[net.fixed], fixed)
    assert not torch.equal(net.free_mu[~net.fixed], free[~net.fixed])


@pytest.mark.parametrize("method", ["pwfn", "wfn", "lsq", "kmeans", "baseline"])
@pytest.mark.parametrize("target", [None, 100.0])
def test_a_result_of_the_gpu_is_saved_and_read_on_the_cpu(
    method: str, target: float | None, tmp_path: Path
) -> None:
    torch.manual_seed(0)
    model = digits_resnet().cuda()
    data = [(torch.randn(16, 1, 8, 8), torch.randint(0, 10, (16,))) for _ in range(4)]
    rounds = [0.5, 1.0] if method in ("pwfn", "wfn") else [1.0]
    changes = {"schedule.fractions": rounds, "schedule.epochs_per_round": [1.0] * len(rounds)}
    config = Config.preset("recommended", method).override({**changes, "target.max_drop": target})
    result = compress(model, data, data, config)
    assert result.save(tmp_path / "model.pwfn") == result.file_bytes
    assert "bytes" in str(result)
    twin = load(tmp_path / "model.pwfn").apply_to(digits_resnet()).eval()
    with torch.no_grad():
        here, there = twin(data[0][0]), result.model()(data[0][0].cuda()).cpu()
    torch.testing.assert_close(here, there, rtol=1e-3, atol=1e-3)
