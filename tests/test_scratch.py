"""Training from scratch: recipes, augmentation, repeatability, and the weights on disk."""

from __future__ import annotations

import json
import math
import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from pwfn import ConfigError, DataError, DivergedError, data
from pwfn.config import Precision
from pwfn.errors import FileError
from pwfn.models import OWN, VisionTransformer, create, data_config, load_weights
from pwfn.scratch import Epoch, Optimizer, Recipe, cutout, recipe_for, save_weights, train, untrained
from pwfn.scratch.augmentation import mixed
from pwfn.scratch.loop import _optimizer
from pwfn.scratch.recipe import rise_and_fall

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
