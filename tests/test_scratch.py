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
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from pwfn import ConfigError, DataError, DivergedError
from pwfn.config import Precision
from pwfn.errors import FileError
from pwfn.lab.pretrain import (
    Epoch,
    Optimizer,
    Recipe,
    command,
    cutout,
    recipe_for,
    save_weights,
    train,
    untrained,
)
from pwfn.lab.pretrain.augmentation import mixed
from pwfn.lab.pretrain.loop import _optimizer
from pwfn.lab.pretrain.recipe import rise_and_fall
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
    last = history[-1].scores
    assert last is not None
    assert last.metric is not None
    assert last.metric > 0.95
    # The scores are those of the network that is returned, in evaluation mode.
    assert not model.training
    images, targets = next(iter(split.test))
    with torch.no_grad():
        assert float((model(images).argmax(1) == targets).double().mean()) == last.metric
    assert history[-1].top1 == 100 * last.metric


def test_a_transformer_learns_with_mixing() -> None:
    split = data.digits()
    recipe = replace(
        recipe_for("cifar_vit_tiny"), epochs=8, learning_rate=4e-3, average=0.95, precision=Precision.FP32
    )
    torch.manual_seed(0)
    model = VisionTransformer(image_size=8, patch=2, width=48, depth=2, heads=3, image_channels=1)
    loader = replace(split.train, batch_size=64)
    top1 = train(model, loader, split.test, recipe)[-1].top1
    assert top1 is not None
    assert top1 > 85


@pytest.mark.parametrize(
    "recipe",
    [
        replace(SHORT, epochs=2, cutout=3, mixup=0.4, cutmix=0.4),
        replace(SHORT, epochs=2, optimizer=Optimizer.ADAMW, learning_rate=1e-3, clip_norm=1.0),
        replace(SHORT, epochs=2, average=0.0, precision=Precision.BF16),
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

    def __iter__(self) -> Any:
        order = torch.randperm(96)
        self.given.append(order.tolist())
        return ((self.whole.images[part], self.whole.targets[part]) for part in order.split(32))


class Numbered(Shuffled):
    """The same, with epochs by number."""

    def epoch(self, number: int, start: int = 0) -> Any:
        self.given.append([number, start])
        return ((self.whole.images[part], self.whole.targets[part]) for part in torch.arange(96).split(32))


def test_the_order_of_a_loader_is_the_seed_s_and_changes_every_epoch() -> None:
    one, two = Shuffled(), Shuffled()
    for loader in (one, two):
        train(create("digits_resnet"), loader, None, SHORT)
    assert one.given == two.given
    assert len({tuple(order) for order in one.given}) == 3


def test_a_loader_with_numbered_epochs_is_asked_for_each_in_turn() -> None:
    loader = Numbered()
    train(create("digits_resnet"), loader, None, SHORT)
    assert loader.given == [[0, 0], [1, 0], [2, 0]]


def test_average_is_the_moving_average_of_weights_and_buffers() -> None:
    """By hand: w_avg = d w_avg + (1 - d) w after each step, d = min(average, n / (n + 9))."""
    recipe = replace(SHORT, epochs=1, average=0.15, warmup=0.0)
    start = untrained("digits_resnet", recipe)
    expected = state_of(start)
    for steps in (1, 2):  # the steps of the run without an average are those of the run with one
        loader = _First(first_digits(96), steps, of=3)
        plain = untrained("digits_resnet", recipe)
        train(plain, loader, None, replace(recipe, average=0.0))
        decay = min(0.15, steps / (steps + 9))
        for name, value in plain.state_dict().items():
            smooth = value.is_floating_point()
            expected[name] = decay * expected[name] + (1 - decay) * value if smooth else value
    averaged = untrained("digits_resnet", recipe)
    train(averaged, _First(first_digits(96), 2, of=3), None, recipe)
    for name, value in averaged.state_dict().items():
        torch.testing.assert_close(value, expected[name], rtol=1e-5, atol=1e-7)


class _First:
    """The first few batches of a loader that says it has more."""

    def __init__(self, loader: data.TensorLoader, steps: int, of: int) -> None:
        self.loader, self.steps, self.of = loader, steps, of

    def __len__(self) -> int:
        return self.of

    def __iter__(self) -> Any:
        return (batch for _, batch in zip(range(self.steps), self.loader, strict=False))


def test_decay_is_on_convolutions_and_linear_layers_alone() -> None:
    model = VisionTransformer(image_size=8, patch=4, width=12, depth=1)
    decayed, rest = _optimizer(model, recipe_for("cifar_vit_tiny")).param_groups
    names = {id(p): name for name, p in model.named_parameters()}
    assert {names[id(p)] for p in decayed["params"]} == {
        "patch_embed.weight",
        "blocks.0.attn.qkv.weight",
        "blocks.0.attn.proj.weight",
        "blocks.0.mlp.fc1.weight",
        "blocks.0.mlp.fc2.weight",
        "head.weight",
    }
    assert (decayed["weight_decay"], rest["weight_decay"]) == (0.05, 0.0)
    assert len(decayed["params"]) + len(rest["params"]) == len(names)


def test_memory_format_and_device_are_as_before() -> None:
    model = untrained("digits_resnet", SHORT)
    train(model, first_digits(32), None, replace(SHORT, epochs=1))
    assert all(p.is_contiguous() for p in model.parameters())


@pytest.mark.parametrize("side", [1, 2, 3, 8, 20])
def test_cutout_blanks_one_square_an_image(side: int) -> None:
    torch.manual_seed(0)
    images = cutout(torch.ones(200, 3, 8, 8), side)
    holes = images == 0
    assert torch.equal(holes, holes[:, :1].expand_as(holes))  # the same in every channel
    sizes = holes[:, 0].any(2).sum(1), holes[:, 0].any(1).sum(1)
    assert torch.equal(holes[:, 0].sum((1, 2)), sizes[0] * sizes[1])  # a rectangle, cut by the edge
    assert max(int(size.max()) for size in sizes) == min(side, 8)
    assert len({tuple(map(tuple, hole.nonzero().tolist())) for hole in holes[:, 0]}) > 1 or side == 20


def test_cutout_of_nothing_is_the_images() -> None:
    images = torch.randn(2, 1, 4, 4)
    assert cutout(images, 0) is images


def test_mixing_keeps_the_share_it_says() -> None:
    random.seed(0)
    torch.manual_seed(0)
    images = torch.arange(6.0).view(6, 1, 1, 1).expand(6, 1, 8, 8)
    shares = []
    for recipe in (Recipe(mixup=1.0), Recipe(cutmix=1.0)):
        for _ in range(50):
            out, partner, share = mixed(images, recipe)
            assert partner is not None
            expected = share * torch.arange(6.0) + (1 - share) * partner
            torch.testing.assert_close(out.mean((1, 2, 3)), expected)
            if recipe.cutmix:
                assert torch.equal(out, out.round())  # pixels are of one image or of the other
            shares.append(share)
    assert 0 <= min(shares) < 0.1 < 0.9 < max(shares) <= 1
    assert mixed(images, Recipe()) == (images, None, 1.0)


def test_learning_rate_rises_and_falls() -> None:
    rates = [rise_and_fall(step / 100, 0.3) for step in range(101)]
    peak = rates.index(1.0)
    assert peak == 30
    assert rates[:31] == sorted(rates[:31])
    assert rates[30:] == sorted(rates[30:], reverse=True)
    assert rise_and_fall(0.0, 0.0) == 1.0
    assert rise_and_fall(1.2, 0.1) == 0.0


def test_nan_in_the_data_is_said_with_its_step() -> None:
    loader = first_digits()
    loader.images[70:] = math.nan
    loader.shuffle = False
    recipe = replace(SHORT, average=0.0)
    with pytest.raises(DivergedError, match=r"^epoch 1 of 3: the loss is no longer finite at step 3 of 3: "):
        train(create("digits_resnet"), loader, None, recipe)


def test_loaders_that_cannot_be_used() -> None:
    images, targets = next(iter(first_digits()))
    once = _First(first_digits(), 0, of=3)
    with pytest.raises(DataError, match=r"^the training loader gave nothing in epoch 1 of 3"):
        train(create("digits_resnet"), once, None, SHORT)
    with pytest.raises(DataError, match=r"^the training loader has no length"):
        train(create("digits_resnet"), iter([(images, targets)]), None, SHORT)
    with pytest.raises(DataError, match=r"^the training loader is empty"):
        train(create("digits_resnet"), [], None, SHORT)
    with pytest.raises(DataError, match=r"step 1: allowed is a batch of \(images, labels\)"):
        train(create("digits_resnet"), [(images[0], targets)], None, SHORT)
    with pytest.raises(DataError, match=r"step 1: the model cannot take inputs \(32, 1, 8, 8\)"):
        train(create("cifar_resnet20"), [(images, targets)], None, SHORT)
    with pytest.raises(DataError, match=r"step 1: the loss cannot take"):
        train(create("digits_resnet", classes=3), [(images, targets)], None, SHORT)


def test_every_own_network_has_a_recipe() -> None:
    for name in OWN:
        recipe = recipe_for(name)
        assert Recipe(**json.loads(json.dumps(recipe.to_dict()))) == recipe


@pytest.mark.parametrize(
    ("name", "hint"), [("cifar_resnet19", "did you mean 'cifar_"), ("xyz", "one for each")]
)
def test_no_recipe(name: str, hint: str) -> None:
    with pytest.raises(ConfigError, match=f"^model '{name}' has no recipe .*{hint}"):
        recipe_for(name)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("optimizer", "lion"),
        ("precision", "fp8"),
        ("precision", Precision.FP16),
        ("epochs", 0),
        ("epochs", 2.5),
        ("batch_size", "many"),
        ("learning_rate", 0.0),
        ("learning_rate", math.nan),
        ("warmup", 1.0),
        ("average", -0.1),
        ("weight_decay", -1),
        ("clip_norm", 0),
        ("mixup", 1.5),
        ("cutout", -1),
        ("seed", None),
    ],
)
def test_recipe_checks_itself(name: str, value: Any) -> None:
    with pytest.raises(ConfigError, match=rf"^recipe\.{name} is .*: allowed is "):
        Recipe(**{name: value})


def test_shares_of_mixing_are_at_most_all() -> None:
    with pytest.raises(
        ConfigError, match=r"^recipe\.mixup is 0\.75: allowed is at most 0\.5 beside cutmix 0\.5$"
    ):
        Recipe(mixup=0.75, cutmix=0.5)


def test_weights_come_back_with_their_notes(tmp_path: Path) -> None:
    model, other = create("digits_resnet"), create("digits_resnet")
    model.to(memory_format=torch.channels_last)
    config = data_config("cifar_resnet18", model)
    notes = {**config.metadata(), "top1": 95.25, "recipe": SHORT, "nothing": None}
    save_weights(model, tmp_path / "w.safetensors", notes)
    found = load_weights(other, tmp_path / "w.safetensors")
    assert same(state_of(model), state_of(other))
    assert data_config("cifar_resnet18", other, found) == config
    assert found["top1"] == "95.25"
    assert Recipe(**json.loads(found["recipe"])) == SHORT
    assert "nothing" not in found
    save_weights(model, tmp_path / "w.safetensors", {"normalize_mean": (0.5, 0.25)})
    assert load_weights(other, tmp_path / "w.safetensors") == {"normalize_mean": "0.5,0.25"}
    assert [path.name for path in tmp_path.iterdir()] == ["w.safetensors"]


def test_weights_into_a_folder_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(FileError, match=r"cannot be written: No such file or directory"):
        save_weights(create("digits_resnet"), tmp_path / "absent" / "w.safetensors", {})


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
    assert title == "digits_resnet on digits, 1,347 images: 2 epochs in batches of 32, fp32 on cpu"
    assert heads == "epoch     loss  learning rate  accuracy  seconds  time left"
    assert (len(heads), len(last)) == (len(first), len(first))  # columns stand under one another
    assert first.split()[0] == "1"
    assert first.endswith(" s")
    assert (last.split()[0], last.split()[-1]) == ("2", "-")
    model = create("digits_resnet")
    notes = load_weights(model, path)
    images, targets = next(iter(data.digits().test))
    with torch.no_grad():
        top1 = 100 * float((model.eval()(images).argmax(1) == targets).double().mean())
    assert top1 > 80
    assert float(notes["top1"]) == pytest.approx(top1)
    assert last.split()[3] == f"{top1:.2f}%"
    assert sentence.startswith(
        f"{path}: {path.stat().st_size:,} bytes; {top1:.2f}% of 450 test images right after "
    )
    assert sentence.endswith(f" s; compress it with --model digits_resnet --weights {path}")
    assert (notes["model"], notes["classes"], notes["seed"]) == ("digits_resnet", "10", "3")
    assert Recipe(**json.loads(notes["recipe"])) == replace(recipe_for("digits_resnet"), epochs=2, seed=3)
    assert data_config("digits_resnet", model, notes) == data_config("digits_resnet", model)
    assert list(tmp_path.iterdir()) == [path]


def test_the_facts_of_a_training_as_json(train_command: Any, tmp_path: Path) -> None:
    path = tmp_path / "w.safetensors"
    numbers = ("--epochs", "1", "--batch-size", "64", "--learning-rate", "0.05", "--precision", "bf16")
    status, out, err = train_command(
        *on_digits(path, *numbers, "--limit", "256", "--holdout", "128", "--json")
    )
    assert (status, err, out.count("\n")) == (0, "", 1)
    facts = json.loads(out)
    assert facts["file"] == str(path)
    assert facts["bytes"] == path.stat().st_size
    assert (facts["device"], facts["epochs"], facts["classes"], facts["examples"]) == ("cpu", 1, 10, 128)
    assert 0 <= facts["top1"] <= 100
    assert facts["seconds"] > 0
    changed = {"epochs": 1, "batch_size": 64, "learning_rate": 0.05, "precision": "bf16"}
    assert facts["recipe"] == {**recipe_for("digits_resnet").to_dict(), **changed}
    assert float(load_weights(create("digits_resnet"), path)["top1"]) == facts["top1"]


def test_the_network_has_as_many_classes_as_the_data(tmp_path: Path) -> None:
    draw = np.random.default_rng(0)
    arrays = {"x_train": (8, 8, 8, 1), "x_test": (4, 8, 8, 1)}
    images = {name: draw.integers(256, size=shape, dtype=np.uint8) for name, shape in arrays.items()}
    np.savez(tmp_path / "three.npz", **images, y_train=np.arange(8) % 3, y_test=np.arange(4) % 3)
    path = tmp_path / "w.safetensors"
    how = command.TrainOptions("digits_resnet", f"npz:{tmp_path / 'three.npz'}", path, epochs=1, device="cpu")
    assert command.run(how, lambda line: None)["classes"] == 3
    assert load_weights(create("digits_resnet", classes=3), path)["classes"] == "3"


def test_loaders_of_a_function_get_the_usual_classes(tmp_path: Path) -> None:
    (tmp_path / "own.py").write_text(
        "import torch\nbatch = (torch.zeros(2, 1, 8, 8), torch.tensor([0, 9]))\n"
        "def make():\n    return [batch], [batch]\n"
    )
    path = tmp_path / "w.safetensors"
    how = command.TrainOptions(
        "digits_resnet", f"python:{tmp_path / 'own.py'}:make", path, epochs=1, device="cpu"
    )
    assert command.run(how, lambda line: None)["classes"] is None
    assert "classes" not in load_weights(create("digits_resnet"), path)


def test_the_same_seed_gives_the_same_weights(tmp_path: Path) -> None:
    def weights(seed: int) -> dict[str, Tensor]:
        path = tmp_path / "w.safetensors"
        how = command.TrainOptions(
            "digits_resnet", "digits", path, 1, seed=seed, device="cpu", limit=64, force=True
        )
        command.run(how, lambda line: None)
        model = create("digits_resnet")
        load_weights(model, path)
        return state_of(model)

    first = weights(1)
    assert same(first, weights(1))
    assert not same(first, weights(2))


def test_help_names_every_option_and_says_that_training_does_not_resume(train_command: Any) -> None:
    status, out, _ = train_command("--help")
    text = " ".join(out.split())
    names = [f"--{name.replace('_', '-')}" for name in vars(command.TrainOptions("", "", Path()))]
    assert status == 0
    assert [name for name in (*names, "--json", "does not resume") if name not in text] == []


@pytest.fixture
def no_training(monkeypatch: pytest.MonkeyPatch) -> None:
    """Mistakes are found before anything is trained."""

    def fail(*_: Any, **__: Any) -> None:
        raise AssertionError("training began")

    monkeypatch.setattr(command, "train", fail)


@pytest.mark.usefixtures("no_training")
@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (("--model", "cifar_resnet19"), "model 'cifar_resnet19' has no recipe to train it from scratch: did"),
        (("--data", "digit"), "data source 'digit' is of no known kind: did you mean digits?"),
        (("--data", "npz:{folder}/none.npz"), "{folder}/none.npz: there is no such file"),
        (("--model", "cifar_resnet20"), "digits: images are 8×8×1 and have 1 channels, mean and std have 3"),
        (("--out", "{folder}/none/w"), "{folder}/none/w: cannot be written: No such file or directory"),
        (("--out", "{folder}"), "{folder}: is a folder: name a file in it"),
        (("--out", "{folder}/old"), "{folder}/old: is there already: name another file, or replace it with"),
        (("--precision", "fp8"), "recipe.precision is 'fp8': allowed is one of fp32, bf16\n"),
        (("--learning-rate", "-1"), "recipe.learning_rate is -1.0: allowed is a number above 0"),
        (("--holdout", "1347"), "digits: holdout is 1,347 of 1,347 training images: some must be left"),
        (("--device", "tpu:9"), "device 'tpu:9' cannot be used"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, tuple) else "",
)
def test_a_mistake_is_one_sentence_before_any_training(
    train_command: Any, tmp_path: Path, arguments: tuple[str, ...], sentence: str
) -> None:
    (tmp_path / "old").write_text("old")
    given = on_digits(tmp_path / "w", *(word.format(folder=tmp_path) for word in arguments))
    status, out, err = train_command(*given)
    assert (status, out) == (2, "")
    assert err.startswith(f"pwfn: {sentence.format(folder=tmp_path)}")
    assert err.count("\n") == 1
    assert {path.name: path.read_text() for path in tmp_path.iterdir()} == {"old": "old"}


@pytest.mark.usefixtures("no_training")
def test_a_read_only_file_is_not_replaced_by_force(train_command: Any, tmp_path: Path) -> None:
    path = tmp_path / "old"
    path.write_text("old")
    path.chmod(0o444)
    status, _, err = train_command(*on_digits(path, "--force"))
    assert status == 2
    assert err.startswith(f"pwfn: {path}: is read-only")
    assert path.read_text() == "old"


def test_force_replaces_a_file(train_command: Any, tmp_path: Path) -> None:
    path = tmp_path / "old"
    path.write_text("old")
    assert train_command(*on_digits(path, "--force", "--epochs", "1", "--limit", "64"))[0] == 0
    load_weights(create("digits_resnet"), path)
    assert list(tmp_path.iterdir()) == [path]


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
    sentence = rf"pwfn: stopped by Ctrl-C after \d+ of 1000 epochs: {path} was not written, and .*\n"
    assert re.fullmatch(sentence, err)
    assert list(tmp_path.iterdir()) == []
