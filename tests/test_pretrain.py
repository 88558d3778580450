"""Training from scratch: recipes, augmentation, repeatability, and the weights on disk."""

from __future__ import annotations

import json
import math
import os
import random
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from pwfn import ConfigError, DataError, DivergedError
from pwfn.config import Precision
from pwfn.lab.pretrain import Epoch, Recipe, command, recipe_for, train, untrained
from pwfn.lab.pretrain.loop import cutout, mixed, moving_average, optimizer_for, rise_and_fall
from pwfn.zoo import data
from pwfn.zoo.models import OWN, VisionTransformer, create, data_config, load_weights

SHORT = replace(recipe_for("digits_resnet"), epochs=3)


def first_digits(count: int = 96, batch_size: int = 32) -> data.TensorLoader:
    whole = data.digits().train
    return data.TensorLoader(whole.images[:count], whole.targets[:count], batch_size, shuffle=True)


def state_of(model: nn.Module) -> dict[str, Tensor]:
    return {name: value.clone() for name, value in model.state_dict().items()}


def same(one: dict[str, Tensor], two: dict[str, Tensor]) -> bool:
    return one.keys() == two.keys() and all(torch.equal(one[name], two[name]) for name in one)


def test_digits_in_three_epochs() -> None:
    split = data.digits()
    model = untrained("digits_resnet", SHORT)
    seen: list[Epoch] = []
    history = train(model, split.train, split.test, SHORT, on_epoch=seen.append)
    assert seen == history
    assert [epoch.number for epoch in history] == [1, 2, 3]
    assert history[0].loss > history[-1].loss
    # The scores are those of the network that is returned, in evaluation mode and as it lay in memory.
    assert not model.training
    assert all(p.is_contiguous() for p in model.parameters())
    images, targets = next(iter(split.test))
    with torch.no_grad():
        right = 100 * float((model(images).argmax(1) == targets).double().mean())
    assert history[-1].top1 == right > 95


def test_a_transformer_learns_with_mixing() -> None:
    split = data.digits()
    recipe = replace(
        recipe_for("cifar_vit_tiny"), epochs=8, learning_rate=4e-3, average=0.95, precision=Precision.FP32
    )
    torch.manual_seed(0)
    model = VisionTransformer(image_size=8, patch=2, width=48, depth=2, heads=3, image_channels=1)
    top1 = train(model, replace(split.train, batch_size=64), split.test, recipe)[-1].top1
    assert top1 is not None
    assert top1 > 85


@pytest.mark.parametrize(
    "recipe",
    [
        replace(SHORT, epochs=2, cutout=3, mixup=0.4, cutmix=0.4),
        replace(SHORT, epochs=2, optimizer="adamw", learning_rate=1e-3, clip_norm=1.0),
        replace(SHORT, epochs=2, average=0.0, precision="bf16"),
    ],
    ids=["mixing", "adamw", "bf16"],
)
def test_a_seed_repeats_bit_for_bit_and_another_does_not(recipe: Recipe) -> None:
    def run(recipe: Recipe) -> tuple[dict[str, Tensor], list[float]]:
        model = untrained("digits_resnet", recipe)
        history = train(model, first_digits(), None, recipe)
        return state_of(model), [epoch.loss for epoch in history]

    before = torch.get_rng_state(), random.getstate()
    first, losses = run(recipe)
    again, losses_again = run(recipe)
    assert losses == losses_again
    assert same(first, again)
    assert not same(first, run(replace(recipe, seed=1))[0])
    assert torch.equal(torch.get_rng_state(), before[0])
    assert random.getstate() == before[1]


class Shuffled:
    """A loader that shuffles from torch's global random state, and keeps what it gave."""

    def __init__(self) -> None:
        self.whole = first_digits()
        self.given: list[list[int]] = []

    def __len__(self) -> int:
        return 3

    def __iter__(self) -> Iterator[Any]:
        order = torch.randperm(96)
        self.given.append(order.tolist())
        return ((self.whole.images[part], self.whole.targets[part]) for part in order.split(32))


class Numbered(Shuffled):
    """The same, with epochs by number."""

    def epoch(self, number: int, start: int = 0) -> Iterator[Any]:
        self.given.append([number, start])
        return ((self.whole.images[part], self.whole.targets[part]) for part in torch.arange(96).split(32))


def test_the_order_of_a_loader_comes_from_the_seed_or_from_its_own_epochs() -> None:
    one, two, own = Shuffled(), Shuffled(), Numbered()
    for loader in (one, two, own):
        train(create("digits_resnet"), loader, None, SHORT)
    assert one.given == two.given
    assert len({tuple(order) for order in one.given}) == 3
    assert own.given == [[0, 0], [1, 0], [2, 0]]


def test_the_average_by_hand() -> None:
    """The first is copied; then ``a = d a + (1 - d) w``, d = min(0.2, (n + 1) / (n + 10)) for n = 1, 2."""
    model = nn.Sequential(nn.Linear(1, 1, bias=False), nn.BatchNorm1d(1))
    averaged = moving_average(model, 0.2)
    for count, value in enumerate((1.0, 2.0, 5.0), 1):
        with torch.no_grad():
            model[0].weight.fill_(value)
            model[1].running_mean.fill_(value)
            model[1].num_batches_tracked.fill_(count)
        averaged.update_parameters(model)
    expected = 0.2 * (2 / 11 * 1.0 + 9 / 11 * 2.0) + 0.8 * 5.0
    state = averaged.module.state_dict()
    assert [float(state[name]) for name in ("0.weight", "1.running_mean")] == pytest.approx([expected] * 2)
    assert int(state["1.num_batches_tracked"]) == 3


def test_a_network_ends_with_its_average() -> None:
    plain, averaged = (untrained("digits_resnet", SHORT) for _ in range(2))
    train(plain, first_digits(), None, replace(SHORT, average=0.0))
    train(averaged, first_digits(), None, SHORT)
    assert not same(state_of(plain), state_of(averaged))


def test_decay_is_on_convolutions_and_linear_layers_only() -> None:
    model = VisionTransformer(image_size=8, patch=4, width=12, depth=1)
    decayed, rest = optimizer_for(model, recipe_for("cifar_vit_tiny")).param_groups
    names = {id(p): name for name, p in model.named_parameters()}
    layers = (
        "patch_embed",
        "blocks.0.attn.qkv",
        "blocks.0.attn.proj",
        "blocks.0.mlp.fc1",
        "blocks.0.mlp.fc2",
    )
    assert {names[id(p)] for p in decayed["params"]} == {f"{name}.weight" for name in (*layers, "head")}
    assert (decayed["weight_decay"], rest["weight_decay"]) == (0.05, 0.0)
    assert len(decayed["params"]) + len(rest["params"]) == len(names)


@pytest.mark.parametrize("side", [1, 2, 3, 8, 20])
def test_cutout_erases_one_square_per_image(side: int) -> None:
    torch.manual_seed(0)
    images = cutout(torch.ones(200, 3, 8, 8), side)
    holes = images == 0
    assert torch.equal(holes, holes[:, :1].expand_as(holes))  # the same in every channel
    sizes = holes[:, 0].any(2).sum(1), holes[:, 0].any(1).sum(1)
    assert torch.equal(holes[:, 0].sum((1, 2)), sizes[0] * sizes[1])  # a rectangle, cut by the edge
    assert max(int(size.max()) for size in sizes) == min(side, 8)
    assert len({tuple(map(tuple, hole.nonzero().tolist())) for hole in holes[:, 0]}) > 1 or side == 20


def test_mixing_keeps_the_share_it_says() -> None:
    random.seed(0)
    torch.manual_seed(0)
    images = torch.arange(6.0).view(6, 1, 1, 1).expand(6, 1, 8, 8)
    shares = []
    for recipe in (Recipe(mixup=1.0), Recipe(cutmix=1.0)):
        for _ in range(50):
            out, order, share = mixed(images, recipe)
            assert order is not None
            expected = share * torch.arange(6.0) + (1 - share) * order
            torch.testing.assert_close(out.mean((1, 2, 3)), expected)
            if recipe.cutmix:
                assert torch.equal(out, out.round())  # pixels are of one image or of the other
            shares.append(share)
    assert 0 <= min(shares) < 0.1 < 0.9 < max(shares) <= 1


def test_learning_rate_rises_and_falls() -> None:
    rates = [rise_and_fall(step / 100, 0.3) for step in range(101)]
    assert rates.index(1.0) == 30
    assert rates[:31] == sorted(rates[:31])
    assert rates[30:] == sorted(rates[30:], reverse=True)
    assert (rise_and_fall(0.0, 0.0), rise_and_fall(1.2, 0.1)) == (1.0, 0.0)


def test_nan_in_the_data_is_reported_with_its_step() -> None:
    loader = first_digits()
    loader.images[70:] = math.nan
    loader.shuffle = False
    with pytest.raises(DivergedError, match=r"^epoch 1 of 3: .* at step 3 of 3: "):
        train(create("digits_resnet"), loader, None, replace(SHORT, average=0.0))


class _Empty:
    """Says it has batches, and gives none."""

    def __len__(self) -> int:
        return 3

    def __iter__(self) -> Iterator[Any]:
        return iter(())


def test_loaders_that_cannot_be_used() -> None:
    images, targets = next(iter(first_digits()))
    cases: list[tuple[Any, str, str]] = [
        (_Empty(), "digits_resnet", "gave nothing in epoch 1 of 3"),
        (iter([(images, targets)]), "digits_resnet", "has no length"),
        ([], "digits_resnet", "is empty"),
        ([(images[0], targets)], "digits_resnet", "step 1: allowed is a batch of"),
        ([(images, targets)], "cifar_resnet20", "step 1: the model cannot take inputs"),
        ([(images, targets + 5)], "digits_resnet", "step 1: the loss cannot take"),
    ]
    for loader, name, said in cases:
        with pytest.raises(DataError, match=said):
            train(create(name), loader, None, SHORT)


def test_every_own_network_has_a_recipe() -> None:
    for name in OWN:
        recipe = recipe_for(name)
        assert Recipe(**json.loads(json.dumps(asdict(recipe)))) == recipe
    with pytest.raises(ConfigError, match=r"^model 'cifar_resnet19' has no recipe .*did you mean 'cifar_"):
        recipe_for("cifar_resnet19")


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("optimizer", "lion"),
        ("precision", Precision.FP16),
        ("epochs", 2.5),
        ("batch_size", "many"),
        ("learning_rate", math.nan),
        ("warmup", 1.0),
        ("average", -0.1),
        ("clip_norm", 0),
        ("mixup", 1.5),
        ("seed", None),
    ],
)
def test_a_recipe_checks_itself(name: str, value: Any) -> None:
    with pytest.raises(ConfigError, match=rf"^recipe\.{name} is "):
        Recipe(**{name: value})


def test_shares_of_mixing_are_at_most_all() -> None:
    with pytest.raises(ConfigError, match=r"^recipe\.mixup is 0\.75 and recipe\.cutmix 0\.5"):
        Recipe(mixup=0.75, cutmix=0.5)


# The command


@pytest.fixture
def train_command(call: Any) -> Any:
    """The command ``pwfn train`` in this process."""
    return partial(call, "train")


def on_digits(out: Path, *more: str) -> tuple[str, ...]:
    return ("--model", "digits_resnet", "--data", "digits", "--out", str(out), "--device", "cpu", *more)


def test_a_network_is_trained_and_its_weights_load_again(train_command: Any, tmp_path: Path) -> None:
    path = tmp_path / "digits.safetensors"
    status, out, err = train_command(*on_digits(path, "--epochs", "2", "--seed", "3"))
    assert (status, err) == (0, "")
    title, heads, first, last, sentence = out.splitlines()
    assert title.startswith("digits_resnet on digits, 1,347 images: 2 epochs, batches of 32")
    assert len(heads) == len(last) == len(first)  # columns are aligned
    assert (first.split()[0], last.split()[0], last.split()[-1]) == ("1", "2", "-")
    model = create("digits_resnet")
    notes = load_weights(model, path)
    images, targets = next(iter(data.digits().test))
    with torch.no_grad():
        top1 = 100 * float((model.eval()(images).argmax(1) == targets).double().mean())
    assert top1 > 80
    assert float(notes["top1"]) == pytest.approx(top1)
    assert last.split()[3] == f"{top1:.2f}%"
    assert f"{path}: {path.stat().st_size:,} bytes; {top1:.2f}% of 450 test images right" in sentence
    assert (notes["model"], notes["classes"], notes["seed"]) == ("digits_resnet", "10", "3")
    assert Recipe(**json.loads(notes["recipe"])) == replace(recipe_for("digits_resnet"), epochs=2, seed=3)
    assert data_config("digits_resnet", model, notes) == data_config("digits_resnet", model)
    assert list(tmp_path.iterdir()) == [path]


def test_the_facts_of_a_training_as_json(train_command: Any, tmp_path: Path) -> None:
    path = tmp_path / "w.safetensors"
    numbers = ("--epochs", "1", "--batch-size", "64", "--learning-rate", "0.05", "--precision", "bf16")
    limits = ("--limit", "256", "--holdout", "128", "--json")
    status, out, err = train_command(*on_digits(path, *numbers, *limits))
    assert (status, err, out.count("\n")) == (0, "", 1)
    facts = json.loads(out)
    assert (facts["file"], facts["bytes"]) == (str(path), path.stat().st_size)
    assert (facts["device"], facts["epochs"], facts["classes"], facts["examples"]) == ("cpu", 1, 10, 128)
    changed = {"epochs": 1, "batch_size": 64, "learning_rate": 0.05, "precision": "bf16"}
    assert facts["recipe"] == {**asdict(recipe_for("digits_resnet")), **changed}
    assert float(load_weights(create("digits_resnet"), path)["top1"]) == facts["top1"]


def test_the_network_has_as_many_classes_as_the_data(tmp_path: Path) -> None:
    draw = np.random.default_rng(0)
    shapes = {"x_train": (8, 8, 8, 1), "x_test": (4, 8, 8, 1)}
    images = {name: draw.integers(256, size=shape, dtype=np.uint8) for name, shape in shapes.items()}
    np.savez(tmp_path / "three.npz", **images, y_train=np.arange(8) % 3, y_test=np.arange(4) % 3)
    (tmp_path / "own.py").write_text(
        "import torch\nbatch = (torch.zeros(2, 1, 8, 8), torch.tensor([0, 9]))\n"
        "def make():\n    return [batch], [batch]\n"
    )
    for source, classes in ((f"npz:{tmp_path}/three.npz", 3), (f"python:{tmp_path}/own.py:make", None)):
        how = command.TrainOptions(
            "digits_resnet", source, tmp_path / "w", epochs=1, device="cpu", force=True
        )
        assert command.run(how, lambda line: None)["classes"] == classes
        found = load_weights(create("digits_resnet", classes=classes), tmp_path / "w")
        assert found.get("classes") == (None if classes is None else str(classes))


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (("--model", "cifar_resnet19"), "model 'cifar_resnet19' has no recipe"),
        (("--data", "digit"), "data source 'digit'"),
        (("--data", "npz:{folder}/none.npz"), "{folder}/none.npz: "),
        (("--model", "cifar_resnet20"), "digits: images are 8×8×1"),
        (("--out", "{folder}/none/w"), "{folder}/none/w: cannot be written"),
        (("--out", "{folder}"), "{folder}: is a folder"),
        (("--out", "{folder}/old"), "{folder}/old: exists already"),
        (("--out", "{folder}/fixed", "--force"), "{folder}/fixed: is read-only"),
        (("--precision", "fp8"), "recipe.precision is 'fp8'"),
        (("--learning-rate", "-1"), "recipe.learning_rate is -1.0"),
        (("--holdout", "1347"), "digits: holdout is 1,347 of 1,347"),
        (("--device", "tpu:9"), "device 'tpu:9'"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, tuple) else "",
)
def test_a_mistake_is_one_sentence_before_any_training(
    train_command: Any,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    arguments: tuple[str, ...],
    sentence: str,
) -> None:
    def fail(*_: Any, **__: Any) -> None:
        raise AssertionError("training began")

    monkeypatch.setattr(command, "train", fail)
    for name in ("old", "fixed"):
        (tmp_path / name).write_text(name)
    (tmp_path / "fixed").chmod(0o444)
    given = on_digits(tmp_path / "w", *(word.format(folder=tmp_path) for word in arguments))
    status, out, err = train_command(*given)
    assert (status, out) == (2, "")
    assert err.startswith(f"pwfn: {sentence.format(folder=tmp_path)}")
    assert err.count("\n") == 1
    assert {path.name: path.read_text() for path in tmp_path.iterdir()} == {"old": "old", "fixed": "fixed"}


@pytest.mark.skipif(sys.platform == "win32", reason="Windows has another Ctrl-C")
def test_ctrl_c_ends_in_one_sentence_and_leaves_nothing(tmp_path: Path) -> None:
    path = tmp_path / "w.safetensors"
    child = subprocess.Popen(
        [sys.executable, "-u", "-m", "pwfn", "train", *on_digits(path, "--epochs", "1000")],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        # Tests that were started in the background ignore Ctrl-C, and so would their children.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )
    try:
        assert child.stdout is not None
        while not child.stdout.readline().startswith("    1 "):
            assert child.poll() is None
        child.send_signal(signal.SIGINT)
        _, err = child.communicate(timeout=60)
    finally:
        child.kill()
        child.wait()
    assert child.returncode == 130
    assert re.fullmatch(rf"pwfn: stopped by Ctrl-C after \d+ of 1000 epochs: {path} .*\n", err)
    assert list(tmp_path.iterdir()) == []
