"""Every method behind the one protocol: a run, its file, a crash, a target; and the truths of each."""

from __future__ import annotations

import ast
import copy
import dataclasses
import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import Call, look_with
from torch import Tensor, nn
from torch.nn import functional as F

import pwfn
from pwfn import Compressed, Config, ConfigError, Layout, WeightError, compress, load
from pwfn.config import MethodName
from pwfn.export.onnx import to_onnx
from pwfn.lab import baselines as methods
from pwfn.lab.baselines import Method
from pwfn.lab.baselines.wfn_rounds import relative_distance
from pwfn.run.checkpoint import Store
from pwfn.zoo.data import Repeated
from pwfn.zoo.models import VisionTransformer

ROOT = Path(pwfn.__file__).parent
NAMES = list(MethodName)
TRAINED = [name for name in NAMES if name is not MethodName.BASELINE]


class Convnet(nn.Module):
    """Three convolutions with BatchNorm and biases here and there, for 8×8 images of three classes."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(1, 6, 3, padding=1, bias=False)
        self.norm = nn.BatchNorm2d(6)
        self.middle = nn.Conv2d(6, 6, 3, padding=1)
        self.wide = nn.Conv2d(6, 8, 3, padding=1)
        self.head = nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.norm(self.stem(x)))
        x = F.relu(self.wide(F.relu(self.middle(x))))
        return self.head(x.mean((2, 3)))


def bars(count: int, seed: int) -> list[tuple[Tensor, Tensor]]:
    """Which of three bars an image has, under noise."""
    generator = torch.Generator().manual_seed(seed)
    y = torch.randint(0, 3, (count,), generator=generator)
    x = 0.3 * torch.randn(count, 1, 8, 8, generator=generator)
    for row, target in enumerate(y.tolist()):
        x[row, 0, :, 2 * target + 1] += 1.0
    return list(zip(x.split(32), y.split(32), strict=True))


TRAIN, VAL = bars(320, 0), bars(160, 1)


def trained(model: nn.Module) -> nn.Module:
    optimizer = torch.optim.Adam(model.parameters(), 5e-3)
    for _ in range(4):
        for x, y in TRAIN:
            optimizer.zero_grad()
            F.cross_entropy(model(x), y).backward()
            optimizer.step()
    return model.eval()


@pytest.fixture(scope="module")
def convnet() -> nn.Module:
    torch.manual_seed(0)
    return trained(Convnet())


@pytest.fixture(scope="module")
def transformer() -> nn.Module:
    torch.manual_seed(0)
    return trained(
        VisionTransformer(image_size=8, patch=2, width=12, depth=2, heads=3, classes=3, image_channels=1)
    )


def network(name: str, convnet: nn.Module, transformer: nn.Module) -> nn.Module:
    return transformer if name == MethodName.QVIT else convnet


def settings(name: str, **changes: Any) -> Config:
    brief = {
        "schedule.fractions": [0.5, 0.9, 1.0],
        "schedule.epochs_per_round": 1.0,
        "schedule.epochs": 3.0,
    }
    given = {key.replace("__", "."): value for key, value in changes.items()}
    return Config.preset("recommended", name).override({**brief, **given})


@pytest.mark.parametrize("name", NAMES)
def test_a_run_keeps_the_accuracy_and_its_file_is_the_network(
    name: str, convnet: nn.Module, transformer: nn.Module, tmp_path: Path
) -> None:
    model = network(name, convnet, transformer)
    before = copy.deepcopy(model.state_dict())
    result = compress(model, TRAIN, VAL, settings(name))
    assert result.before is not None
    assert result.after is not None
    assert result.after.metric >= result.before.metric - 0.05  # of 1; all of them keep this easy task
    assert result.epochs == pytest.approx(
        2.05 + result.config.finish.polish_epochs if name in ("pwfn", "wfn") else 3
    )
    result.save(tmp_path / "model.pwfn")
    loaded = load(tmp_path / "model.pwfn")
    assert loaded.record["method"] == name
    whole, kept = result.compressed.dense_state_dict(), loaded.dense_state_dict()
    assert whole.keys() == kept.keys()
    assert all(torch.equal(whole[key], kept[key]) for key in whole)
    twin = loaded.apply_to(copy.deepcopy(model)).eval()
    with torch.no_grad():
        assert all(torch.equal(twin(x), result.model()(x)) for x, _ in VAL)
    assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items())


@pytest.mark.parametrize("name", NAMES)
def test_the_same_seed_gives_the_same_bits(name: str, convnet: nn.Module, transformer: nn.Module) -> None:
    model = network(name, convnet, transformer)
    one, two = (compress(model, TRAIN, config=settings(name)).compressed for _ in range(2))
    assert torch.equal(one.values(), two.values())
    assert all(torch.equal(one.untouched[key], two.untouched[key]) for key in one.untouched)


class StopError(Exception):
    """Ends a run in its midst."""


@pytest.mark.parametrize("name", TRAINED)
@pytest.mark.parametrize("last", [4, 10, 13, 20])
def test_a_run_that_was_stopped_anywhere_ends_in_the_same_bits(
    name: str, last: int, convnet: nn.Module, transformer: nn.Module, tmp_path: Path
) -> None:
    """Ten steps an epoch: in the first, at its end, in the second, at its end; by way of a file."""
    model = network(name, convnet, transformer)
    config = settings(name, schedule__warmup_epochs=1.0)
    if name in ("lsq", "lsq+", "apot", "q-vit"):
        config = config.override({"quantiser.activation_bits": 4})
    batches = Repeated(TRAIN)
    whole = compress(model, batches, config=config).compressed
    kept: list[pwfn.Progress] = []

    def keep(progress: Callable[[], pwfn.Progress], is_last: bool) -> None:
        kept.append(progress())
        if len(kept) == last:
            raise StopError

    with pytest.raises(StopError):
        compress(model, batches, config=config, keep=keep)
    store = Store(tmp_path, {"settings": config.to_dict()})
    store.save(kept[-1])
    again = compress(model, batches, config=config, resume=store.newest()).compressed
    assert torch.equal(again.values(), whole.values())
    assert all(torch.equal(again.untouched[key], whole.untouched[key]) for key in whole.untouched)


@pytest.mark.parametrize("name", TRAINED)
def test_a_target_keeps_a_state_on_the_way(name: str, convnet: nn.Module, transformer: nn.Module) -> None:
    model = network(name, convnet, transformer)
    result = compress(model, TRAIN, VAL, settings(name, target__max_drop=100.0))
    assert result.choice is not None
    assert len(result.states) == 3
    smallest = min(result.states, key=lambda state: len(state.content))
    chosen = next(state for state in result.states if state.round == result.choice.round)
    assert len(chosen.content) <= 1.01 * len(smallest.content)
    if not result.config.finish.polish_epochs and not result.config.finish.reestimate_batchnorm:
        assert chosen.scores is not None
        assert result.after == chosen.scores


@pytest.mark.parametrize("name", TRAINED)
def test_what_is_scored_is_what_is_saved(name: str, convnet: nn.Module, transformer: nn.Module) -> None:
    """The network in training, once its weights are in place, computes what its file does."""
    model = network(name, convnet, transformer)
    config = settings(name, posterior__init="powers")  # for which no loss is asked
    net = methods.of(config)(model, config)
    net.begin(look_with(lambda module: module(TRAIN[0][0])))
    net.between(3, 1.0)
    small = net.finish().apply_to(copy.deepcopy(model)).eval()
    net.eval()
    with torch.no_grad():
        for x, _ in VAL:
            torch.testing.assert_close(net(x), small(x), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("name", ["lsq", "lsq+", "apot", "q-vit"])
@pytest.mark.parametrize("bits", [2, 3, 8])
def test_a_quantised_layer_has_no_more_values_than_its_bits_allow(
    name: str, bits: int, convnet: nn.Module, transformer: nn.Module
) -> None:
    model = network(name, convnet, transformer)
    config = settings(name, quantiser__bits=bits, quantiser__include_ends=True, schedule__epochs=1.0)
    compressed = compress(model, TRAIN, config=config).compressed
    assert max(book.numel() for book in compressed.codebooks) <= 2**bits


@pytest.mark.parametrize("name", ["lsq", "lsq+", "apot", "q-vit"])
def test_first_and_last_layer_have_eight_bits_unless_they_are_included(
    name: str, convnet: nn.Module, transformer: nn.Module
) -> None:
    model = network(name, convnet, transformer)
    for ends, limit in ((False, 256), (True, 4)):
        config = settings(name, quantiser__bits=2, quantiser__include_ends=ends)
        net = methods.of(config)(model, config)
        net.between(3, 1.0)
        compressed = net.finish()
        for entry, division in zip(compressed.layout.entries, compressed.divisions, strict=True):
            longest = max(compressed.codebooks[book].numel() for book in division.codebooks)
            is_end = entry.layer in compressed.layout.ends
            assert longest <= (limit if is_end else 4)
            if is_end and not ends and len(division.codebooks) == 1:
                assert longest > 4


@pytest.mark.parametrize("name", ["lsq", "lsq+", "apot", "q-vit"])
def test_a_run_with_quantised_activations_is_in_its_file_whole(
    name: str, convnet: nn.Module, transformer: nn.Module, tmp_path: Path
) -> None:
    model = network(name, convnet, transformer)
    result = compress(model, TRAIN, VAL, settings(name, quantiser__activation_bits=4))
    assert result.before is not None
    assert result.after is not None
    assert result.after.metric >= result.before.metric - 0.1
    result.save(tmp_path / "model.pwfn")
    twin = load(tmp_path / "model.pwfn").apply_to(copy.deepcopy(model)).eval()
    indexed = load(tmp_path / "model.pwfn").apply_to(copy.deepcopy(model), weights="indices").eval()
    weights_only = copy.deepcopy(model).eval()
    weights_only.load_state_dict(
        {k: v for k, v in result.compressed.dense_state_dict().items() if k in model.state_dict()}
    )
    x = VAL[0][0]
    with torch.no_grad():
        assert torch.equal(twin(x), result.model()(x))
        assert not torch.equal(twin(x), weights_only(x))  # so the activations were quantised
        torch.testing.assert_close(indexed(x), twin(x), rtol=1e-5, atol=1e-5)
    seen: list[Tensor] = []
    layer = next(m for n, m in twin.named_modules() if n in ("wide", "blocks.1.mlp.fc2"))
    layer.register_forward_pre_hook(lambda _, args: seen.append(args[0]))
    with torch.no_grad():
        twin(x)
    axis = -1 if name == "q-vit" else None  # of which every channel has its own step and offset
    rows = seen[0].reshape(1, -1) if axis is None else seen[0].movedim(axis, 0).flatten(1)
    assert max(row.unique().numel() for row in rows) <= 16


def test_quantised_activations_are_not_exported_to_onnx(convnet: nn.Module, tmp_path: Path) -> None:
    config = settings("lsq", quantiser__activation_bits=4, schedule__epochs=1.0)
    compressed = compress(convnet, TRAIN, config=config).compressed
    with pytest.raises(pwfn.PwfnError, match="quantised or rectified activations, which are not written"):
        to_onnx(compressed, convnet, VAL[0][0], tmp_path / "model.onnx")
    assert not (tmp_path / "model.onnx").exists()


def test_a_model_that_does_not_fit_is_left_as_it_was(convnet: nn.Module) -> None:
    config = settings("lsq", quantiser__activation_bits=4, schedule__epochs=1.0)
    compressed = compress(convnet, TRAIN, config=config).compressed
    other = Convnet()
    other.head = nn.Linear(8, 5)
    with pytest.raises(pwfn.LayoutError, match=r"head\.weight is 5×8 in the model, 3×8 here"):
        compressed.apply_to(other)
    assert not hasattr(other, "pwfn_activations")
    assert not any(module._forward_pre_hooks for module in other.modules())


CODEBOOKS = {
    ("lsq", "method"): "layer",
    ("lsq", "layer"): "layer",
    ("lsq", "channel"): "channel",
    ("lsq+", "method"): "layer",
    ("lsq+", "channel"): "channel",
    ("apot", "method"): "layer",
    ("kmeans", "method"): "layer",
    ("kmeans", "network"): "network",
    ("wfn", "method"): "network",
    ("pwfn", "method"): "network",
}


@pytest.mark.parametrize(("name", "wanted"), CODEBOOKS)
def test_what_has_a_codebook_of_its_own(name: str, wanted: str, convnet: nn.Module) -> None:
    config = settings(name, quantiser__codebooks=wanted)
    net = methods.of(config)(convnet, config)
    net.between(3, 1.0)
    compressed = net.finish()
    entries = compressed.layout.entries
    channels = sum(entry.shape[0] for entry in entries)
    expected = {"network": 1, "layer": len(entries), "channel": channels}[CODEBOOKS[name, wanted]]
    assert len(compressed.codebooks) == expected


def test_lsq_plus_has_a_step_for_each_channel_of_a_transformer(transformer: nn.Module) -> None:
    config = settings("lsq+")
    compressed = methods.of(config)(transformer, config).rounded().finish()
    assert len(compressed.codebooks) == sum(entry.shape[0] for entry in compressed.layout.entries)


@pytest.mark.parametrize(("name", "wanted"), [("lsq", "network"), ("apot", "channel"), ("kmeans", "channel")])
def test_codebooks_that_a_method_does_not_have_are_refused(
    name: str, wanted: str, convnet: nn.Module
) -> None:
    config = settings(name, quantiser__codebooks=wanted)
    with pytest.raises(ConfigError, match=f'^quantiser.codebooks is "{wanted}": {name} can have "'):
        methods.of(config)(convnet, config)


def test_biases_are_left_as_they_are_by_the_quantisers_alone(convnet: nn.Module) -> None:
    for name in NAMES:
        if name == MethodName.QVIT:
            continue
        net = methods.of(settings(name))(convnet, settings(name))
        kept = {item.name for item in net.layout.left_out}
        assert ("head.bias" in kept) == (name in ("lsq", "lsq+", "apot", "kmeans"))


def test_kmeans_starts_from_each_layers_own_clusters_and_training_moves_them(convnet: nn.Module) -> None:
    config = settings("kmeans", quantiser__bits=3)
    net = methods.of(config)(convnet, config)
    books = net.rounded().finish().codebooks
    original = net.layout.pieces(net.layout.gather(convnet))
    for book, piece in zip(books, original, strict=True):
        nearest = book[(piece.reshape(-1, 1) - book).abs().argmin(1)]
        means = torch.stack([piece.reshape(-1)[nearest == c].double().mean() for c in book])
        torch.testing.assert_close(book.double(), means, rtol=0, atol=1e-6)
    after = compress(convnet, TRAIN, config=config).compressed
    assert [book.numel() for book in after.codebooks] == [book.numel() for book in books]
    assert not torch.equal(torch.cat(after.codebooks), torch.cat(books))


def test_wfns_pull_is_a_set_share_of_the_loss_once_there_are_centres(convnet: nn.Module) -> None:
    config = settings("wfn", wfn__ratio=0.25)
    net = methods.of(config)(convnet, config)
    loss = torch.tensor(0.8)
    before = net.term(loss)
    assert before is not None
    assert before.item() == 0
    net.between(1, 0.5)
    term = net.term(loss)
    assert term is not None
    assert term.item() == pytest.approx(0.25 * 0.8, rel=1e-5)
    term.backward()
    fixed = net.get_buffer("fixed")
    gradient = net.get_parameter("free_weight").grad
    assert gradient is not None
    assert bool((gradient[fixed] == 0).all())
    assert bool(gradient.any())
    net.between(2, 1.0)
    assert net.term(loss) is None


def test_wfn_moves_a_weight_by_no_more_than_its_clusters_mean_allows(convnet: nn.Module) -> None:
    config = settings("wfn", wfn__delta=0.05)
    net = methods.of(config)(convnet, config)
    before = net.layout.gather(convnet)
    record = net.between(1, 0.6).record
    fixed, after = net.get_buffer("fixed"), net.get_buffer("fixed_weight")
    assert record.fixed == int(fixed.sum()) == math.ceil(0.6 * net.layout.size)
    for step in record.steps:
        assert step.delta == 0.05
    for centre in after[fixed].unique().tolist():
        moved = relative_distance(before[fixed & (after == centre)], centre)
        counted = moved[moved > 0]
        assert counted.numel() == 0 or float(counted.mean()) <= 0.05 + 1e-6


def test_a_method_that_is_not_done_says_so(convnet: nn.Module, transformer: nn.Module) -> None:
    for name in ("pwfn", "wfn", "lsq", "apot", "q-vit"):
        net = methods.of(settings(name))(network(name, convnet, transformer), settings(name))
        with pytest.raises(WeightError, match="still"):
            net.finish()


@pytest.mark.parametrize("name", TRAINED)
def test_a_state_of_another_network_is_not_adopted(
    name: str, convnet: nn.Module, transformer: nn.Module
) -> None:
    net = methods.of(settings(name))(network(name, convnet, transformer), settings(name))
    other = nn.Linear(3, 2)
    layout = Layout.of(other)
    with pytest.raises(pwfn.LayoutError, match="of another model"):
        net.adopt(Compressed.of(layout, layout.gather(other), None, {}))


def test_the_learning_rate_falls_along_half_a_cosine_over_the_whole_run(convnet: nn.Module) -> None:
    rates: list[float] = []
    config = settings("lsq", schedule__epochs=2.0, training__learning_rate=0.1)
    compress(convnet, TRAIN, config=config, on_step=lambda now: rates.append(now.learning_rate))
    assert rates[0] <= 0.1
    assert rates == sorted(rates, reverse=True)
    last = 0.1 * (1 + math.cos(math.pi * 19 / 20)) / 2
    assert rates[-1] == pytest.approx(last)


def test_the_learning_rate_falls_over_each_round_of_a_method_with_rounds(convnet: nn.Module) -> None:
    seen: dict[str, float] = {}
    config = settings(
        "pwfn", training__decay="cosine", training__learning_rate=0.1, finish__polish_epochs=0.0
    )
    for fused in (True, False):
        seen.clear()
        chosen = config.override({"training.fused": fused})
        compress(
            convnet, TRAIN, config=chosen, on_step=lambda now: seen.update({now.stage: now.learning_rate})
        )
        last = 0.1 * (1 + math.cos(math.pi * 9 / 10)) / 2
        assert seen["round 2 of 3"] == pytest.approx(last)
        assert seen["round 3 of 3"] == pytest.approx(last)


def test_the_optimiser_lives_through_all_epochs_of_a_method_without_rounds(convnet: nn.Module) -> None:
    """With momentum, three epochs are not three times one epoch with fresh state."""
    config = settings("lsq", training__decay="none")
    whole = compress(convnet, TRAIN * 3, config=config.override({"schedule.epochs": 1.0}))
    parts = compress(convnet, TRAIN, config=config)
    assert torch.equal(whole.compressed.values(), parts.compressed.values())


def test_a_run_gone_on_with_at_another_learning_rate_has_that(convnet: nn.Module) -> None:
    config, rates = settings("lsq", training__decay="none"), list[float]()

    def stop(progress: pwfn.Progress) -> None:
        raise StopError

    with pytest.raises(StopError) as caught:
        compress(convnet, TRAIN, config=config, on_round=stop)
    lower = config.override({"training.learning_rate": 1e-5})
    progress: pwfn.Progress = caught.value.progress  # type: ignore[attr-defined]  # every error has it
    compress(
        convnet, TRAIN, config=lower, resume=progress, on_step=lambda now: rates.append(now.learning_rate)
    )
    assert set(rates) == {1e-5}


@pytest.mark.parametrize("name", NAMES)
def test_the_command_line_has_every_method(name: str, call: Call, tmp_path: Path) -> None:
    model, data = "digits_resnet", "digits"
    if name == MethodName.QVIT:
        file = tmp_path / "net.py"
        file.write_text(
            "import torch\n"
            "from pwfn.zoo.models import VisionTransformer\n"
            "def make():\n"
            "    return VisionTransformer(image_size=8, patch=2, width=12, depth=1, heads=3)\n"
            "def data():\n"
            "    batch = torch.linspace(-1, 1, 1536).view(8, 3, 8, 8).sin(), torch.arange(8)\n"
            "    return [batch] * 2, [batch]\n"
        )
        model, data = f"python:{file}:make", f"python:{file}:data"
    common = (
        "--model",
        model,
        "--weights",
        "random",
        "--data",
        data,
        "--method",
        name,
        "--device",
        "cpu",
    )
    small = ("--set", "schedule.epochs=1", "--set", "training.steps_per_epoch=2")
    rounds = ("--set", "schedule.fractions=[0.5, 1.0]", "--set", "schedule.epochs_per_round=0.5")
    run = ("compress", *common, *small, *rounds, "--out", str(tmp_path / "run"), "--json")
    status, out, err = call(*run)
    assert (status, err) == (0, "")
    facts = json.loads(out)
    record = json.loads((tmp_path / "run" / "record.json").read_text())
    assert record["identity"]["settings"]["method"] == name
    assert facts["file_bytes"] == (tmp_path / "run" / "model.pwfn").stat().st_size
    again = call("evaluate", str(tmp_path / "run/model.pwfn"), "--data", data, "--model", model, "--json")
    assert json.loads(again[1])["after"] == facts["after"]
    status, out, _ = call(
        "compress", *common, *small, *rounds, "--out", str(tmp_path / "dry"), "--dry-run", "--json"
    )
    assert status == 0
    assert json.loads(out)["file_bytes"] > 0
    assert not (tmp_path / "dry").exists()


def test_a_method_by_a_wrong_name_gets_a_suggestion(call: Call, tmp_path: Path) -> None:
    run = ("compress", "--model", "digits_resnet", "--data", "digits", "--out", str(tmp_path / "run"))
    assert call(*run, "--method", "qvit") == (
        2,
        "",
        "pwfn: method 'qvit' is unknown: did you mean 'q-vit'?\n",
    )
    assert not (tmp_path / "run").exists()


# The shape of the package


ORDER = (
    *(
        "layout_of",
        "plan",
        "__init__",
        "quantiser",
        "attached",
        "begin",
        "rehearse",
        "views",
        "forward",
        "term",
    ),
    *("penalty", "between", "rounded", "adopt", "finish", "divided", "compared", "optimizer"),
    *("get_extra_state", "set_extra_state"),
)
"""In which the files of the package define what the protocol names."""

FILES = sorted(path for path in (ROOT / "methods").glob("*.py") if path.name != "__init__.py")


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_every_file_defines_the_same_things_in_the_same_order(path: Path) -> None:
    tree = ast.parse(path.read_text(encoding="utf-8"))
    classes = [node for node in tree.body if isinstance(node, ast.ClassDef)]
    names = [
        node.name
        for node in classes[-1 if path.stem == "protocol" else 0].body
        if isinstance(node, ast.FunctionDef)
    ]
    known = [name for name in names if name in ORDER]
    assert known == sorted(known, key=ORDER.index)


def test_every_name_has_its_class_and_the_run_knows_none_of_them() -> None:
    classes = {methods.of(Config(method=name)) for name in NAMES}
    assert len(classes) == len(NAMES)
    assert all(issubclass(each, Method) for each in classes)
    for module in ("rounds", "training", "pipeline", "runs", "dryrun", "checkpoint", "keeping"):
        text = (ROOT / f"{module}.py").read_text(encoding="utf-8")
        assert not [
            each.__name__ for each in classes if f"{each.__name__}(" in text or f"{each.__name__})" in text
        ]
        assert "MethodName" not in text


def test_what_every_method_tells_of_itself_is_plain() -> None:
    for stretch in (s for name in NAMES for s in methods.of(settings(name)).plan(settings(name))):
        assert stretch.epochs >= 0
        assert 0 < stretch.fraction <= 1
    fields = {item.name for item in dataclasses.fields(methods.Between)}
    assert fields == {"record", "fixed", "sigma_quartiles"}
