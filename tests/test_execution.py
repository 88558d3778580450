"""Images in another memory order: only where the model takes them."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import pwfn
from pwfn import Config
from pwfn.bayes.batches import Source
from pwfn.bayes.execution import channels_last
from pwfn.config import Precision

SHORT = {"schedule.fractions": [0.5, 1.0], "schedule.epochs_per_round": [1.0, 1.0]}


class Convolution(nn.Module):
    """A convolution and a linear layer; between them the feature map becomes a vector."""

    def __init__(self, flatten: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.convolution, self.linear, self.flatten = nn.Conv2d(3, 4, 3), nn.Linear(16, 2), flatten

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.linear(self.flatten(self.convolution(x)))
        return found


def viewed(x: Tensor) -> Tensor:
    return x.view(len(x), -1)


@pytest.mark.parametrize(("flatten", "arranged"), [(viewed, False), (nn.Flatten(), True)])
def test_images_are_in_an_order_that_the_model_takes(
    flatten: Callable[[Tensor], Tensor], arranged: bool
) -> None:
    data = torch.utils.data.TensorDataset(torch.randn(16, 3, 4, 4), torch.randint(0, 2, (16,)))
    loader = torch.utils.data.DataLoader(data, 8, shuffle=True, generator=torch.Generator().manual_seed(1))
    model = Convolution(flatten).eval()
    source = channels_last(Source("train_loader", loader, torch.device("cpu")), model, Precision.BF16)
    assert source.channels_last == arranged
    batch = next(source.batches())
    assert batch.args[0].is_contiguous(memory_format=torch.channels_last) == arranged
    config = Config().override({**SHORT, "training.precision": "bf16"})
    assert pwfn.compress(model, loader, loader, config=config).after is not None


def test_trying_an_order_moves_no_loader_on() -> None:
    data = list(range(16))
    loaders = [
        torch.utils.data.DataLoader(data, 4, shuffle=True, generator=torch.Generator().manual_seed(1))
        for _ in range(2)
    ]
    before = torch.get_rng_state()
    channels_last(Source("train_loader", loaders[0], torch.device("cpu")), nn.Identity(), Precision.BF16)
    assert torch.equal(before, torch.get_rng_state())
    assert [x.tolist() for x in loaders[0]] == [x.tolist() for x in loaders[1]]
