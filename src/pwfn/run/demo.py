"""The demo: train a small network on the digits of the package, and compress it as ``pwfn compress`` does."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
from safetensors.torch import save_file
from torch import nn
from torch.nn import functional as F

from pwfn.bayes.distributed import Distributed
from pwfn.bayes.randomness import seeded
from pwfn.config import Config
from pwfn.file.storage import replacing
from pwfn.result import Result
from pwfn.run.console import View
from pwfn.run.folder import prepare, run
from pwfn.run.options import RunOptions
from pwfn.zoo import models
from pwfn.zoo.data import digits

CPU = torch.device("cpu")
MODEL, DATA, BATCH_SIZE, EPOCHS = "digits_resnet", "digits", 32, 12


def demo(
    config: Config, out: Path | None, view: View | None = None, say: Callable[[str], None] = print
) -> Result:
    """Train the network, then compress it into ``out``, a run folder; without it, nothing is left."""
    with ExitStack() as stack:
        # Images of 8×8 pixels gain nothing from more threads, which wait for each other on a busy machine.
        stack.callback(torch.set_num_threads, torch.get_num_threads())
        torch.set_num_threads(1)
        folder = out or Path(stack.enter_context(TemporaryDirectory())) / "demo"
        prepare(folder)  # an error before the work, not after it
        weights = folder / "weights.safetensors"
        options = RunOptions(MODEL, DATA, folder, str(weights), batch_size=BATCH_SIZE, device="cpu")
        say(f"Training a small residual network on handwritten digits, {EPOCHS} epochs …")
        with replacing(weights) as path:
            save_file(pretrained(config.seed).state_dict(), path)
        rounds = "each round trains the network, then fixes more of its weights to shared values"
        if config.method == "conditioned":
            rounds = "layer by layer the weights go to shared values, and those still free take up the error"
        say(f"Compressing it: {rounds}.")
        return run(options, config, view, Distributed(CPU))


def pretrained(seed: int) -> nn.Module:
    """The demo's network, trained from scratch with a one-cycle learning rate."""
    train, _ = digits()
    with seeded(seed, CPU):
        model = models.create(MODEL).train()
        optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9, weight_decay=5e-4, nesterov=True)
        scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=EPOCHS * len(train))
        for number in range(EPOCHS):
            for images, targets in train.epoch(number):
                optimizer.zero_grad()
                F.cross_entropy(model(images), targets).backward()
                optimizer.step()
                scheduler.step()
    return model.eval()
