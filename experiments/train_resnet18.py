"""Train the CIFAR ResNet-18 from scratch and print one JSON line: accuracy, time, machine.

python experiments/train_resnet18.py --data data/cifar10.npz --out data/resnet18_cifar10.safetensors
"""

from __future__ import annotations

import argparse
import json
import time
from dataclasses import replace
from pathlib import Path

import torch

from pwfn.lab import pretrain as scratch
from pwfn.zoo import data
from pwfn.zoo.models import data_config


def main() -> None:
    """Train, save the weights, and say what came of it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--data", type=Path, default=Path("data/cifar10.npz"))
    parser.add_argument("--out", type=Path, default=Path("data/resnet18_cifar10.safetensors"))
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--epochs", type=int, default=None, help="in place of the recipe's")
    options = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    recipe = replace(scratch.recipe_for("cifar_resnet18"), seed=options.seed)
    recipe = replace(recipe, epochs=options.epochs) if options.epochs else recipe
    model = scratch.untrained("cifar_resnet18", recipe)
    config = data_config("cifar_resnet18", model)
    train, test = data.npz(
        options.data,
        mean=config.mean,
        std=config.std,
        batch_size=recipe.batch_size,
        device=device,
        seed=options.seed,
    )
    started = time.perf_counter()
    history = scratch.train(model, train, test, recipe, device=device, on_epoch=_say)
    facts = {
        "model": "cifar_resnet18",
        "top1": history[-1].top1,
        "seconds": round(time.perf_counter() - started, 1),
        "recipe": recipe.to_dict(),
        "device": torch.cuda.get_device_name() if device == "cuda" else "cpu",
        "torch": torch.__version__,
    }
    scratch.save_weights(
        model, options.out, {**config.metadata(), "top1_cifar10_test": history[-1].top1, "recipe": recipe}
    )
    print(json.dumps(facts), flush=True)


def _say(epoch: scratch.Epoch) -> None:
    print(f"epoch {epoch.number} of {epoch.epochs}: loss {epoch.loss:.4f}, top-1 {epoch.top1}", flush=True)


if __name__ == "__main__":
    main()
