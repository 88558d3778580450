"""Every method by the same five functions: a run, its file, a crash, a target; and the truths of each."""

from __future__ import annotations

import copy
import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import Call
from torch import Tensor, nn
from torch.nn import functional as F

import pwfn
from pwfn import Config, ConfigError, WeightError, compress, load
from pwfn.bayes.batches import Batch
from pwfn.bayes.method import METHODS, DataProbe, Method
from pwfn.export.onnx import to_onnx
from pwfn.lab.baselines import find
from pwfn.lab.baselines.wfn_rounds import relative_distance
from pwfn.progress import Progress
from pwfn.run.checkpoint import Store
from pwfn.zoo.data import Repeated
from pwfn.zoo.models import VisionTransformer

NAMES = list(METHODS)
TRAINED = [name for name in NAMES if name != "baseline"]
ROUNDS = ("pwfn", "wfn")  # the others have one phase


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
    return transformer if name == "q-vit" else convnet


def settings(name: str, epochs: float = 3.0, **changes: Any) -> Config:
    brief: dict[str, Any] = {"schedule.fractions": [1.0], "schedule.epochs_per_round": [epochs]}
    if name in ROUNDS:
        brief = {"schedule.fractions": [0.5, 0.9, 1.0], "schedule.epochs_per_round": [1.0, 1.0, 1.0]}
    given = {key.replace("__", "."): value for key, value in changes.items()}
    return Config.preset("recommended", name).override({**brief, **given})


def method(name: str, model: nn.Module, config: Config | None = None) -> Method:
    return METHODS[name](model, config or settings(name))


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
    assert result.epochs == pytest.approx(3 + result.config.finish.polish_epochs)
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
    config = settings(name)
    if name in ("lsq", "lsq+", "apot", "q-vit"):
        config = config.override({"options.activation_bits": 4})
    batches = Repeated(TRAIN)
    whole = compress(model, batches, config=config).compressed
    kept: list[Progress] = []

    def keep(progress: Callable[[], Progress], is_last: bool) -> None:
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
    exact = {"finish__fold_batchnorm": False, "finish__uncompressed_dtype": "float32"}
    result = compress(model, TRAIN, VAL, settings(name, target__max_drop=100.0, **exact))
    assert result.choice is not None
    assert len(result.states) == len(result.rounds)
    smallest = min(result.states, key=lambda state: len(state.content))
    chosen = next(state for state in result.states if state.round == result.choice.round)
    assert len(chosen.content) <= 1.01 * len(smallest.content)
    if not result.config.finish.polish_epochs and not result.config.finish.reestimate_epochs:
        assert chosen.scores is not None
        assert result.after == chosen.scores


@pytest.mark.parametrize("name", TRAINED)
def test_what_is_scored_is_what_is_saved(name: str, convnet: nn.Module, transformer: nn.Module) -> None:
    """The network in training, once its weights are in place, computes what its file does."""
    model = network(name, convnet, transformer)
    config = settings(name, posterior__init="powers")  # for which no loss is asked
    net = method(name, model, config)
    examples = [Batch.of(batch, torch.device("cpu")) for batch in TRAIN]
    net.data = DataProbe(lambda module: module(TRAIN[0][0]), lambda: math.nan, lambda count: examples)
    net.start(net.data)
    net.fix(1.0)
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
    config = settings(name, options__bits=bits, options__include_ends=True, epochs=1.0)
    compressed = compress(model, TRAIN, config=config).compressed
    assert max(book.numel() for book in compressed.codebooks) <= 2**bits


@pytest.mark.parametrize("name", ["lsq", "lsq+", "apot", "q-vit"])
def test_first_and_last_layer_have_eight_bits_unless_they_are_included(
    name: str, convnet: nn.Module, transformer: nn.Module
) -> None:
    model = network(name, convnet, transformer)
    for ends, limit in ((False, 256), (True, 4)):
        config = settings(name, options__bits=2, options__include_ends=ends)
        net = METHODS[config.method](model, config)
        net.fix(1.0)
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
    result = compress(model, TRAIN, VAL, settings(name, options__activation_bits=4))
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
    config = settings("lsq", options__activation_bits=4, epochs=1.0)
    compressed = compress(convnet, TRAIN, config=config).compressed
    with pytest.raises(pwfn.PwfnError, match="quantised or rectified activations, which are not written"):
        to_onnx(compressed, convnet, VAL[0][0], tmp_path / "model.onnx")
    assert not (tmp_path / "model.onnx").exists()


def test_a_model_that_does_not_fit_is_left_as_it_was(convnet: nn.Module) -> None:
    config = settings("lsq", options__activation_bits=4, epochs=1.0)
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
    config = settings(name) if name in ROUNDS else settings(name, options__codebooks=wanted)
    net = METHODS[config.method](convnet, config)
    net.fix(1.0)
    compressed = net.finish()
    entries = compressed.layout.entries
    channels = sum(entry.shape[0] for entry in entries)
    expected = {"network": 1, "layer": len(entries), "channel": channels}[CODEBOOKS[name, wanted]]
    assert len(compressed.codebooks) == expected


def test_lsq_plus_has_a_step_for_each_channel_of_a_transformer(transformer: nn.Module) -> None:
    config = settings("lsq+")
    compressed = METHODS[config.method](transformer, config).rounded().finish()
    assert len(compressed.codebooks) == sum(entry.shape[0] for entry in compressed.layout.entries)


@pytest.mark.parametrize(("name", "wanted"), [("lsq", "network"), ("apot", "channel"), ("kmeans", "channel")])
def test_codebooks_that_a_method_does_not_have_are_refused(
    name: str, wanted: str, convnet: nn.Module
) -> None:
    config = settings(name, options__codebooks=wanted)
    with pytest.raises(ConfigError, match=f'^options.codebooks is "{wanted}": {name} can have "'):
        METHODS[config.method](convnet, config)


def test_biases_are_left_as_they_are_by_the_quantisers_alone(convnet: nn.Module) -> None:
    for name in NAMES:
        if name == "q-vit":
            continue
        net = method(name, convnet)
        kept = {item.name for item in net.layout.left_out}
        assert ("head.bias" in kept) == (name in ("lsq", "lsq+", "apot", "kmeans"))


def test_kmeans_starts_from_each_layers_own_clusters_and_training_moves_them(convnet: nn.Module) -> None:
    config = settings("kmeans", options__bits=3)
    net = METHODS[config.method](convnet, config)
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
    config = settings("wfn", options__ratio=0.25)
    net = METHODS[config.method](convnet, config)
    loss = torch.tensor(0.8)
    before = net.loss_term(loss)
    assert before is not None
    assert before.item() == 0
    net.fix(0.5)
    term = net.loss_term(loss)
    assert term is not None
    assert term.item() == pytest.approx(0.25 * 0.8, rel=1e-5)
    term.backward()
    fixed = net.get_buffer("fixed")
    gradient = net.get_parameter("free_weight").grad
    assert gradient is not None
    assert bool((gradient[fixed] == 0).all())
    assert bool(gradient.any())
    net.fix(1.0)
    assert net.loss_term(loss) is None


def test_wfn_moves_a_weight_by_no_more_than_its_clusters_mean_allows(convnet: nn.Module) -> None:
    config = settings("wfn", options__delta=0.05)
    net = METHODS[config.method](convnet, config)
    before = net.layout.gather(convnet)
    record = net.fix(0.6)
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
        net = method(name, network(name, convnet, transformer))
        with pytest.raises(WeightError, match="still"):
            net.finish()


def test_the_learning_rate_falls_along_half_a_cosine_over_the_whole_run(convnet: nn.Module) -> None:
    rates: list[float] = []
    config = settings("lsq", epochs=2.0, training__learning_rate=0.1)
    compress(convnet, TRAIN, config=config, on_step=lambda now: rates.append(now.learning_rate))
    assert rates[0] <= 0.1
    assert rates == sorted(rates, reverse=True)
    last = 0.1 * (1 + math.cos(math.pi * 19 / 20)) / 2
    assert rates[-1] == pytest.approx(last)


@pytest.mark.parametrize("name", NAMES)
def test_the_command_line_has_every_method(name: str, call: Call, tmp_path: Path) -> None:
    model, data = "digits_resnet", "digits"
    if name == "q-vit":
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
    small = ("--set", "training.steps_per_epoch=2")
    rounds = ("--set", "schedule.fractions=[0.5, 1.0]", "--set", "schedule.epochs_per_round=[0.5, 0.5]")
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
    status, out, err = call(*run, "--method", "qvit")
    assert (status, out) == (2, "")
    assert "did you mean 'q-vit'?" in err
    assert not (tmp_path / "run").exists()


# A method of one's own

ROUNDING = """
from torch import nn
from pwfn.bayes.method import Method
from pwfn.file.compressed import Compressed
from pwfn.fixing.record import FixRecord
from pwfn.layout import untouched


class Rounding(Method):
    defaults = {"schedule.fractions": (1.0,), "schedule.epochs_per_round": (0.0,)}

    def __init__(self, model, config):
        super().__init__(model, config)
        self.weight = nn.Parameter(self.layout.gather(model))

    def weights(self):
        return self.layout.views(self.weight)

    def fix(self, fraction):
        self.weight.data.mul_(64).round_().div_(64)
        return FixRecord(fraction, self.layout.size)

    def finish(self):
        return Compressed.of(self.layout, self.weight.detach(), None, untouched(self.model, self.layout))
"""


def test_a_method_of_ones_own_works_by_name(convnet: nn.Module, tmp_path: Path) -> None:
    (tmp_path / "rounding.py").write_text(ROUNDING)
    name = find(f"python:{tmp_path}/rounding.py:Rounding")
    result = compress(convnet, TRAIN, VAL, Config.preset("recommended", name))
    assert torch.equal(result.compressed.codebook * 64, (result.compressed.codebook * 64).round())
    assert result.after is not None
    assert result.after.metric > 0.8
    assert result.compressed.record["method"] == name


@pytest.mark.parametrize(
    ("content", "place", "words"),
    [
        (ROUNDING, "missing.py:Rounding", "No such file"),
        (ROUNDING, "mine.py:Rounded", "no class 'Rounded': did you mean 'Rounding'"),
        (ROUNDING, "mine.py:nn", "no class 'nn'"),
        ("import nothing_of_that_name", "mine.py:Rounding", "cannot be imported"),
        (ROUNDING + "\nmade = dict", "mine.py:made", "is no subclass of"),
        (ROUNDING, "Rounding", "allowed is python:FILE:CLASS"),
    ],
)
def test_a_method_that_is_none_is_refused(content: str, place: str, words: str, tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(content)
    with pytest.raises(ConfigError, match=words):
        find(f"python:{tmp_path}/{place}")


def test_options_that_a_method_does_not_have_are_refused(convnet: nn.Module) -> None:
    for name, options, words in (
        ("lsq", {"bit": 3}, "did you mean 'bits'"),
        ("lsq", {"bits": 9}, "options.bits is 9: allowed is"),
        ("pwfn", {"bits": 3}, "pwfn has no options"),
    ):
        with pytest.raises(ConfigError, match=words):
            METHODS[name](convnet, Config(method=name, options=options))
