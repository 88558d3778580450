"""Steps recorded as CUDA graphs are the steps that they were recorded from."""

from __future__ import annotations

import random

import pytest
import torch
from torch import Tensor, nn

from pwfn import Config, ConfigError, Result, compress

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")

# Sigma learns and fixed weights are drawn too: the most that can be recorded.
CONFIG = Config().override(
    {
        "posterior.init": "powers",
        "posterior.learn_sigma": True,
        "posterior.noise_on_fixed": True,
        "clustering.b": 7,
        "schedule.fractions": [0.5, 1.0],
        "schedule.warmup_epochs": 3.0,
        "schedule.epochs_per_round": 3.0,
        "training.learning_rate": 0.01,
    }
)


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(1, 16, 3, padding=1, bias=False),
        nn.BatchNorm2d(16),
        nn.ReLU(),
        nn.Dropout(0.3),
        nn.Flatten(),
        nn.Linear(16 * 64, 10),
    ).cuda()


def data() -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(0)
    sizes = [32] * 7 + [20]  # the last of an epoch is smaller, and is not replayed
    return [
        (torch.randn(n, 1, 8, 8, generator=generator), torch.randint(0, 10, (n,), generator=generator))
        for n in sizes
    ]


def run(model: nn.Module | None = None, **settings: object) -> Result:
    changes = {f"training.{name}": value for name, value in settings.items()}
    return compress(model or network(), data(), data(), CONFIG.override(changes), device="cuda")


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("optimizer", ["sgd", "adamw"])
def test_a_recorded_run_ends_in_the_same_bits(precision: str, optimizer: str) -> None:
    plain = run(precision=precision, optimizer=optimizer)
    recorded = run(precision=precision, optimizer=optimizer, cuda_graph=True)
    assert torch.equal(plain.compressed.values(), recorded.compressed.values())
    assert plain.after == recorded.after
    assert [done.loss for done in plain.rounds] == [done.loss for done in recorded.rounds]


def test_so_does_one_with_changed_batches_and_an_average() -> None:
    changes = {"label_smoothing": 0.1, "cutout": 3, "blend": 0.3, "cutmix": 0.3, "average": 0.9}
    plain, recorded = run(**changes), run(**changes, cuda_graph=True)
    assert torch.equal(plain.compressed.values(), recorded.compressed.values())
    assert [done.loss for done in plain.rounds] == [done.loss for done in recorded.rounds]


def test_a_model_that_asks_the_device_cannot_be_recorded_and_says_so() -> None:
    class Asking(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(64, 10)

        def forward(self, x: Tensor) -> Tensor:
            x = x.flatten(1)
            if float(x.detach().sum()) > 1e9:
                x = x * random.random()
            out: Tensor = self.layer(x)
            return out

    stream = torch.cuda.current_stream()
    with pytest.raises(
        ConfigError, match=r"cannot be recorded as a CUDA graph .*training\.cuda_graph = false"
    ):
        run(Asking().cuda(), cuda_graph=True)
    torch.cuda.synchronize()
    assert torch.cuda.current_stream() == stream
    assert torch.randn(3, device="cuda").isfinite().all()  # torch's own generator is as it was
    assert run(Asking().cuda()).after is not None
