"""Training for the bytes: the code length as a function, the feedback, and the method in whole runs."""

import copy
import json
import math
from dataclasses import replace
from types import SimpleNamespace

import pytest
import rate_variants
import torch
from cases import Shuffled, normalised_classifier, numbers
from torch import nn
from torch.nn import functional as F

import pwfn
from pwfn import Config, ConfigError, WeightError, report
from pwfn.bayes.distributed import Distributed
from pwfn.bayes.grid import rate
from pwfn.bayes.grid.rate import RateNetwork
from pwfn.errors import DataError, DivergedError
from pwfn.file.compressed import Compressed
from pwfn.file.fold_batchnorm import shrink_uncompressed
from pwfn.file.format import dumps
from pwfn.fixing.code_length import LARGEST, CodeLength, code_length
from pwfn.fixing.step import next_dyadic
from pwfn.fixing.unique import entropy_bits
from pwfn.layout import Layout
from pwfn.run.demo import demo
from pwfn.zoo.arrays import digits

SMALL = Config.preset("small")
ALONE = Distributed(torch.device("cpu"))
SHORT = SMALL.override({"schedule.epochs_per_round": [3.0]})


def laplacian(*shape: int, scale: float, seed: int = 0) -> torch.Tensor:
    u = torch.rand(*shape, generator=torch.Generator().manual_seed(seed)) - 0.5
    return -scale * u.sign() * (1 - 2 * u.abs()).log()


def conv(filters: int = 32, channels: int = 48) -> nn.Module:
    model = nn.Sequential(nn.Conv2d(channels, filters, 3, bias=False))
    with torch.no_grad():
        model[0].weight.copy_(laplacian(filters, channels, 3, 3, scale=0.1))
    return model


# Code length


def test_lengths_are_those_of_the_frequencies():
    """A vector has one context: 6 zeros and 2 of magnitude one are coded with 6/8 and 1/8 for each sign."""
    layout = Layout.of(nn.Linear(1, 8), (), ("weight",))
    levels = torch.tensor([0.0, 0, 0, 0, 0, 0, 1, -1])
    bits = code_length(layout, levels).bits(levels)
    assert bits.tolist() == pytest.approx([math.log2(8 / 6)] * 6 + [3.0] * 2, abs=0.03)


@pytest.mark.parametrize("seed", range(20))
def test_the_gradient_is_that_of_finite_differences(seed):
    model = nn.Sequential(nn.Conv2d(3, 5, 3), nn.Flatten(), nn.Linear(7, 2))
    layout = Layout.of(model)
    levels = laplacian(layout.size, scale=3.0, seed=seed).double()
    levels[:3] = torch.tensor([0.25, LARGEST + 3.7, -LARGEST - 0.5])
    table = code_length(layout, levels.round())
    levels.requires_grad_()
    (gradient,) = torch.autograd.grad(table.bits(levels).sum(), levels)
    h = 1e-4
    near = (levels.detach().abs() % 1 - 0.5).abs() < 0.49  # at whole numbers the slope changes
    with torch.no_grad():
        found = (table.bits(levels + h) - table.bits(levels - h)) / (2 * h)
    assert gradient[near].tolist() == pytest.approx(found[near].tolist(), rel=1e-3, abs=1e-3)


def test_zero_is_the_shortest_and_no_level_is_impossible():
    model = conv()
    layout = Layout.of(model)
    table = code_length(layout, laplacian(layout.size, scale=0.1).round())
    assert bool((table.lengths.diff(dim=1) >= 0).all())
    assert bool(torch.isfinite(table.lengths).all())


@pytest.mark.parametrize("scale", [0.15, 0.4, 1.0, 3.0])
def test_the_sum_is_near_the_bytes_of_a_file(scale):
    """Of independent weights: there is nothing that the file's coder knows and the tables do not."""
    model = conv(128, 96)
    layout = Layout.of(model)
    levels = laplacian(layout.size, scale=scale).round()
    coded, empty = (len(dumps(Compressed.of(layout, v, None, {}))) for v in (levels, 0 * levels))
    estimate = float(code_length(layout, levels).bits(levels).sum()) / 8
    assert estimate == pytest.approx(coded - empty, rel=0.03)


def test_a_filter_of_zeros_is_nearly_free_and_a_weight_in_it_expensive():
    layout = Layout.of(conv())
    levels = laplacian(32, 48, 3, 3, scale=1.0).round()
    levels[:16] = 0
    levels[0, 0, 0, 0] = 1
    table = code_length(layout, levels.reshape(-1))
    bits = table.bits(levels.reshape(-1)).view_as(levels)
    assert float(bits[1:16].mean()) < 0.02
    assert float(bits[0, 0, 0, 0]) > 2 * float(bits[16:][levels[16:] == 1].mean())


def test_entropy_of_all_levels():
    assert entropy_bits(torch.tensor([0.0, 0.0, 1.0, -1.0])) == 1.5
    assert entropy_bits(torch.zeros(5)) == 0.0


# The method


def test_weights_are_multiples_of_one_step_in_every_mode():
    net = RateNetwork(conv())
    for mode in (True, False):
        values = net.train(mode).weights()["0.weight"] / net.grid_step
        assert bool((values == values.round()).all())
    assert bin(round(math.frexp(net.grid_step)[0] * 16)).count("1") <= 4
    assert math.frexp(net.grid_step)[0] * 16 == round(math.frexp(net.grid_step)[0] * 16)


def test_gradients_pass_through_the_rounding():
    net = RateNetwork(nn.Linear(3, 1, bias=False)).train()
    x = torch.tensor([[1.0, 2.0, 3.0]])
    net(x).sum().backward()
    assert net.levels.grad.tolist() == pytest.approx([net.grid_step * v for v in (1, 2, 3)])


@pytest.mark.parametrize("target", [0.5, 1.0, 2.0])
def test_the_step_is_the_finest_that_starts_near_the_target(target):
    net = RateNetwork(conv(64, 64), SMALL.override({"target.bits": target}))
    finer = (net.levels.detach() * net.grid_step / next_dyadic(net.grid_step, -1)).round()
    assert entropy_bits(net.levels.detach().round()) <= 1.25 * target < entropy_bits(finer)


def test_the_fast_total_is_the_sum_of_the_bits_with_its_gradient():
    levels = 3 * torch.randn(5000, generator=torch.Generator().manual_seed(2))
    levels[:5] = torch.tensor([0.0, 2.0, -45.5, float(LARGEST), 0.0])
    layout = Layout.of(nn.Linear(100, 50, bias=False))
    table = code_length(layout, levels.round())
    (plain,) = torch.autograd.grad(table.bits(x := levels.clone().requires_grad_()).sum(), x)
    (fast,) = torch.autograd.grad(table.total(y := levels.clone().requires_grad_()), y)
    between = (levels - levels.round()).abs() > 1e-4  # at a whole number either slope is right
    assert int(between.sum()) > 4900
    assert torch.equal(plain[between], fast[between])
    assert float(table.total(levels)) == pytest.approx(float(table.bits(levels).double().sum()), rel=1e-5)


def test_the_penalty_is_the_price_times_the_bits_per_weight():
    net = RateNetwork(conv(), SMALL.override({"options.price": 0.3}))
    expected = 0.3 / net.layout.size * CodeLength(net.lengths, net.contexts).bits(net.levels).sum()
    assert net.penalty().item() == pytest.approx(expected.item())


def test_the_price_rises_above_the_target_and_falls_below_it(monkeypatch):
    monkeypatch.setattr(rate, "_REFRESH", 1)
    prices = []
    for factor in (0.5, 2.0):
        net = RateNetwork(conv(), SMALL.override({"target.bits": 1.0}))
        now = entropy_bits(net.levels.detach().round())
        net.settings = SMALL.override({"target.bits": factor * now})
        net.before_step(1, 1, ALONE)
        prices.append(net._price)
    assert prices[0] > net.options.price > prices[1]


def test_the_starting_price_would_move_the_weights_by_its_drift():
    """A step of Adam: the code length's gradient over the root mean square of the task's, times the rate."""
    net = RateNetwork(conv(), SMALL.override({"target.bits": 1.0}))
    net.gradient_norm.fill_(0.7)
    steps, size = 2000, net.layout.size
    net.price.fill_(net._starting_price(steps))
    (pull,) = torch.autograd.grad(net.penalty(), net.levels)
    task = 0.7 / math.sqrt(size)
    moved = pull.square().mean().sqrt() / task * 0.01 * steps / 2  # half a cosine has half of the sum
    assert moved.item() == pytest.approx(rate._DRIFT, rel=1e-4)


def test_the_price_does_not_depend_on_the_units_of_the_loss():
    net = RateNetwork(conv(), SMALL.override({"target.bits": 1.0}))
    prices = []
    for norm in (1.0, 1000.0, 0.0):
        net.gradient_norm.fill_(norm)
        prices.append(net._starting_price(500))
    assert prices[1] == pytest.approx(1000 * prices[0])
    assert prices[2] == net.options.price  # nothing is known: as given


@pytest.mark.parametrize("target", [{}, {"target.max_drop": 1.0}])
def test_without_a_size_to_reach_the_price_stays_as_given(target):
    net = RateNetwork(conv(), SMALL.override({**target, "options.price": 0.3}))
    net.gradient_norm.fill_(1.0)
    for step in range(10):
        net.before_step(step, 100, ALONE)
    assert net._refreshes > 0
    assert net._price == pytest.approx(0.3)
    assert net.price.item() == pytest.approx(0.3)


@pytest.mark.parametrize("changes", [{}, {"schedule.fractions": [0.5, 1.0]}])
def test_refreshes_are_spread_over_a_run_of_any_length(changes, monkeypatch):
    """At least fifty in a short one, and the shares between them sum up to the whole run."""
    rounds = len(changes.get("schedule.fractions", [1.0]))
    config = SMALL.override({**changes, "schedule.epochs_per_round": [1.0] * rounds})
    net, shares = RateNetwork(conv(), config), []
    monkeypatch.setattr(RateNetwork, "_refresh", lambda self, share, _: shares.append(share))
    for steps in (10, 400, 5000, 20000):
        shares.clear()
        for _ in range(rounds):
            for step in range(steps):
                net.before_step(step, steps, ALONE)
        assert sum(shares) == pytest.approx(1, abs=0.11)
        assert len(shares) >= min(48, rounds * (steps - 1))


def test_a_target_is_met_at_the_end_even_without_training():
    """The zero bin is widened as far as needed, and no further."""
    net = RateNetwork(conv(64, 64), SMALL.override({"target.bytes": 8000}))
    assert net._index_bytes(net.levels.detach().round()) > net._index_goal
    net.fix(1.0)
    assert "were set to zero after training to meet the target" in net.notes[0]
    coded = len(dumps(net.finish()))
    assert 0.9 * 8000 < coded + rate._SCORE_BYTES <= 8000


def mixed() -> nn.Module:
    """For images of 8 × 8: no BatchNorm, a depthwise and a grouped convolution; 14 tensors."""
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(1, 32, 3, padding=1), nn.GroupNorm(4, 32), nn.ReLU(), nn.Conv2d(32, 32, 3, groups=32),
        nn.GELU(), nn.Conv2d(32, 64, 3, groups=4), nn.Flatten(), nn.LayerNorm(1024), nn.Linear(1024, 16),
        nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 10),
    )  # fmt: skip


@pytest.mark.parametrize("epochs", [0.0, 0.5])
@pytest.mark.parametrize("target", [2600, 12_000, 24_000, 10**7])
def test_a_target_is_met_by_a_run_of_any_length(target, epochs):
    """Also at 8 bits per weight, where a wider zero bin takes next to nothing away, with a posterior."""
    data = digits(batch_size=32)
    config = SMALL.override({"target.bytes": target, "schedule.epochs_per_round": [epochs]})
    result = pwfn.compress(mixed(), data.train, data.test, config)
    size = len(dumps(result.compressed))
    assert min(0.85 * target, 20_000) < size <= target
    assert result.target_met
    assert result.rate_bytes == pytest.approx(size, rel=0.02, abs=80)


def test_two_targets_are_both_met():
    data = digits(batch_size=32)
    config = SMALL.override({"target.bytes": 20_000, "target.bits": 1.5, "schedule.epochs_per_round": [2.0]})
    result = pwfn.compress(mixed(), data.train, data.test, config)
    assert result.target_met
    assert 1.3 < result.summary.whole.entropy_bits <= 1.5


def test_a_layer_that_became_zero_is_named():
    """One grid for all: a small layer without BatchNorm is lost beside a large one."""
    model = linear()
    with torch.no_grad():
        model[3].weight.div_(1e4)
    net = RateNetwork(model, SMALL.override({"target.bytes": 5000}))
    net.fix(1.0)
    assert sum("3.weight" in note for note in net.notes) == 1
    assert not any("1.weight" in note for note in net.notes)


def test_a_network_of_zeros_is_ruined_whatever_its_scores_are():
    """A regression has no accuracy that could fall, and without validation data nothing is measured."""
    data = [(x, x.sum(1, keepdim=True)) for x in numbers(64, 6).split(16)]
    model = nn.Sequential(nn.Linear(6, 32), nn.ReLU(), nn.Linear(32, 1))
    for scored in (data, None):
        result = pwfn.compress(model, data, scored, SHORT.override({"target.bits": 1e-3}), F.mse_loss)
        assert result.target_met
        assert result.verdict() == "RUINED: every weight is zero; the target was met"
        assert result.warnings[0] == result.ruined


def test_one_huge_weight_does_not_decide_the_step_alone():
    model = mixed()
    with torch.no_grad():
        model[5].weight[0, 0, 0, 0] = 1e5
    net = RateNetwork(model, SMALL.override({"target.bytes": 12_000}))
    assert entropy_bits(net.levels.detach().round()) > 2


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_other_types_of_numbers(dtype):
    torch.manual_seed(0)
    model = convolutional().to(dtype)
    data = [(x.to(dtype), y) for x, y in digits(batch_size=32).train][:8]
    config = SMALL.override({"target.bits": 2.0, "schedule.epochs_per_round": [1.0]})
    result = pwfn.compress(model, data, data, config)
    assert result.after.loss == pytest.approx(result.before.loss, rel=0.1)
    assert result.target_met


@pytest.mark.parametrize("steps", [3, 40])
def test_a_loss_that_is_no_number_ends_the_run(steps):
    data = Shuffled(steps)
    data.batches[1][0][0] = math.nan
    with pytest.raises(DivergedError):
        pwfn.compress(normalised_classifier(), data, config=SHORT.override({"target.bits": 1.0}))


class Several(nn.Module):
    """Two outputs by name."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = nn.Linear(6, 32), nn.Linear(32, 3)

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        hidden = self.body(x).relu()
        return {"scores": self.head(hidden), "hidden": hidden}


def test_outputs_of_several_tensors():
    """By a loss that takes them, and without labels."""

    def loss_fn(output, target):
        return F.cross_entropy(output["scores"], target)

    torch.manual_seed(0)
    data, config = list(Shuffled()), SHORT.override({"target.bits": 2.0})
    assert pwfn.compress(Several(), data, data, config, loss_fn).target_met
    result = pwfn.compress(Several(), inputs := [x for x, _ in data], inputs, config)
    assert 0 < result.after.loss < 0.1


class Classes(nn.Linear):
    """Whole numbers, which have no gradient."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x).argmax(1)


def test_outputs_that_cannot_be_compared_are_told():
    inputs = [x for x, _ in Shuffled()]
    with pytest.raises(DataError, match="no output is a tensor of floating-point numbers"):
        pwfn.compress(Classes(6, 3), inputs, inputs, SHORT)


class Endless(torch.utils.data.IterableDataset):
    def __iter__(self):
        generator = torch.Generator().manual_seed(0)
        while True:
            yield torch.randn(6, generator=generator), 1


def test_data_without_a_length():
    loader = torch.utils.data.DataLoader(Endless(), batch_size=8)
    config = SHORT.override({"target.bits": 1.0, "training.steps_per_epoch": 5})
    assert pwfn.compress(normalised_classifier(), loader, config=config).epochs == 3


class Keeps(nn.Module):
    """Keeps what it computed in its last pass, as many models do for their figures."""

    def __init__(self, wrap) -> None:
        super().__init__()
        self.body, self.head, self.wrap, self.kept = nn.Linear(6, 16), nn.Linear(16, 3), wrap, None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.kept = self.wrap(hidden := self.body(x).relu())
        return self.head(hidden)


@pytest.mark.parametrize(
    "wrap", [lambda h: h, lambda h: [h], lambda h: {"hidden": (h,)}, lambda h: SimpleNamespace(hidden=h)]
)
def test_a_model_may_keep_what_it_computed(wrap):
    """It is copied in training, and a graph cannot be; after training, its posterior is fitted."""
    data = list(Shuffled())
    assert pwfn.compress(Keeps(wrap), data, data, SHORT.override({"target.bits": 1.0})).target_met


class Recurrent(nn.Module):
    """For sequences of 6 numbers; an LSTM holds a list of its weights."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = nn.LSTM(6, 16, batch_first=True), nn.Linear(16, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.body(x[:, None].expand(-1, 3, -1))[0][:, -1])


@pytest.mark.parametrize("include", [[], ["type:LSTM"]])
def test_recurrent_layers_are_compressed_where_that_is_asked_for(include):
    data = list(Shuffled())
    config = SHORT.override({"target.bytes": 2200 if include else 8000, "layout.include": include})
    assert pwfn.compress(Recurrent(), data, data, config).target_met


def test_what_a_run_learns_survives_in_its_state(monkeypatch):
    monkeypatch.setattr(rate, "_REFRESH", 2)
    net = RateNetwork(conv(), SMALL.override({"target.bytes": 3000}))
    for step in range(5):
        net.before_step(step, 1000, ALONE)
    other = RateNetwork(conv(), SMALL.override({"target.bytes": 3000}))
    other.load_state_dict(copy.deepcopy(net.state_dict()))
    for step in range(5, 9):
        for one in (net, other):
            one.before_step(step, 1000, ALONE)
        assert other.penalty().equal(net.penalty())
    assert other._price == net._price


def test_all_processes_count_the_bytes_of_the_first(monkeypatch):
    """In training each has its own statistics of BatchNorm, and with them other bytes to count."""
    monkeypatch.setattr(rate, "_REFRESH", 1)
    found, prices = [], []

    def first(work):
        found.append(work())
        return found[-1]

    for tell in (first, lambda work: found.pop(0), lambda work: work()):
        torch.manual_seed(0)
        net = RateNetwork(nn.Sequential(conv(), nn.BatchNorm2d(32)), SMALL.override({"target.bytes": 6000}))
        if tell is first:
            net.model[1].running_mean.normal_()
        seat = Distributed(torch.device("cpu"))
        seat.first = tell
        for step in range(1, 5):
            net.before_step(step, 20_000, seat)
        prices.append(net._price)
    assert prices[0] == prices[1] != prices[2]


# Whole runs


def pretrained(model: nn.Module) -> nn.Module:
    """Trained on the digits."""
    optimizer = torch.optim.Adam(model.parameters(), 1e-3)
    for _ in range(6):
        for x, y in digits(batch_size=32).train:
            optimizer.zero_grad()
            F.cross_entropy(model(x), y).backward()
            optimizer.step()
    return model.eval()


@pytest.fixture(scope="module")
def trained():
    """A network for the digits, and its data."""
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(1, 16, 3), nn.BatchNorm2d(16), nn.ReLU(), nn.Flatten(), nn.Linear(576, 32), nn.ReLU(),
        nn.Linear(32, 10),
    )  # fmt: skip
    return pretrained(model), digits(batch_size=32)


def test_a_network_in_a_tenth_of_its_bytes(trained):
    model, data = trained
    config = SMALL.override({"target.bytes": 4500, "schedule.epochs_per_round": [10.0]})
    result = pwfn.compress(model, data.train, data.test, config)
    assert 0.8 * 4500 < len(dumps(result.compressed)) <= 4500
    assert result.after.metric > result.before.metric - 0.02
    assert not result.warnings
    assert result.choice.met


def test_the_target_holds_where_new_statistics_take_more_bytes():
    """After so few steps, and behind weights that are cut, BatchNorm sees other inputs than in training."""
    torch.manual_seed(0)
    layers = [[nn.Conv2d(16, 16, 3, padding=1, bias=False), nn.BatchNorm2d(16), nn.ReLU()] for _ in range(8)]
    model = nn.Sequential(
        nn.Conv2d(1, 16, 3), *(layer for each in layers for layer in each), nn.Flatten(), nn.Linear(576, 10)
    )
    data = digits(batch_size=32)
    config = SMALL.override({"target.bytes": 4200, "schedule.epochs_per_round": [0.05]})
    result = pwfn.compress(model, data.train, data.test, config)
    assert 3000 < len(dumps(result.compressed)) <= 4200
    assert result.choice.met
    assert result.rate_bytes == pytest.approx(result.file_bytes, rel=0.02)


def test_the_target_holds_where_the_uncompressed_part_grows_in_training():
    """A new BatchNorm layer costs nothing in a file; a trained one does."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(32, 400, 3, bias=False), nn.BatchNorm2d(400))
    nn.init.normal_(model[0].weight)
    net = RateNetwork(model, SMALL.override({"target.bytes": 20_000}))
    for parameter in net.model[1].parameters():
        nn.init.normal_(parameter)
    net.fix(1.0)
    compressed = net.finish()
    shrink_uncompressed(net.model, net.settings.finish)
    untouched = {name: tensor for name, tensor in net.model.state_dict().items() if name.startswith("1.")}
    assert 19_000 < len(dumps(replace(compressed, untouched=untouched))) <= 20_000


def linear() -> nn.Module:
    return nn.Sequential(
        nn.Flatten(), nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 64), nn.ReLU(), nn.Linear(64, 10)
    )


def convolutional() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, 32, 3), nn.BatchNorm2d(32), nn.ReLU(), nn.Conv2d(32, 64, 3), nn.ReLU(), nn.Flatten(),
        nn.Linear(1024, 10),
    )  # fmt: skip


@pytest.mark.parametrize("make", [linear, convolutional])
@pytest.mark.parametrize("change", [{"target.bytes": 5000}, {"target.bits": 1.0}, {"options.price": 0.05}])
def test_the_rate_in_training_is_within_two_percent_of_the_file(make, change):
    """Also where weights are set to zero after training to meet a target."""
    torch.manual_seed(0)
    config = SMALL.override({**change, "schedule.epochs_per_round": [6.0]})
    data, events = digits(batch_size=32), []
    result = pwfn.compress(pretrained(make()), data.train, data.test, config, on_step=events.append)
    assert result.rate_bytes == pytest.approx(len(dumps(result.compressed)), rel=0.02)
    assert f"{result.rate_bytes:,.0f} bytes in training" in str(result)
    if not config.target.wanted:
        assert events[-1].rate_bytes == pytest.approx(result.rate_bytes, rel=0.02)


def test_a_run_in_a_folder_keeps_its_rate(tmp_path):
    config = SMALL.override({"target.bytes": 20_000, "schedule.epochs_per_round": [12.0]})
    result = demo(config, tmp_path, say=lambda line: None)
    size = (tmp_path / "model.pwfn").stat().st_size
    assert size <= 20_000
    assert result.rate_bytes == pytest.approx(size, rel=0.02)
    assert json.loads((tmp_path / "record.json").read_text())["rate_bytes"] == result.rate_bytes
    log = [json.loads(line) for line in (tmp_path / "log.jsonl").read_text().splitlines()]
    last = [line["rate_bytes"] for line in log if line["event"] == "epoch"][-1]
    assert last == pytest.approx(size, rel=0.02)
    report.write([tmp_path], tmp_path / "report.html")
    assert f"{result.rate_bytes:,.0f} bytes; on disk {size:,}" in (tmp_path / "report.html").read_text()


def test_a_lower_price_gives_a_larger_file(trained):
    model, data = trained
    sizes = []
    for price in (0.01, 3.0):
        config = SHORT.override({"options.price": price})
        sizes.append(len(dumps(pwfn.compress(model, data.train, config=config).compressed)))
    assert sizes[0] > 1.2 * sizes[1]


def test_the_same_seed_gives_the_same_bytes():
    config = SHORT.override({"target.bits": 1.5})
    one, other = (pwfn.compress(normalised_classifier(), Shuffled(), config=config) for _ in range(2))
    assert dumps(one.compressed) == dumps(other.compressed)


@pytest.mark.parametrize("stop", [1, 5, 9])
def test_a_stopped_run_ends_in_the_same_bytes(stop, monkeypatch):
    """Stopped between two fits of the tables, and at one."""
    monkeypatch.setattr(rate, "_REFRESH", 3)
    config = SHORT.override({"target.bits": 1.5})
    whole = pwfn.compress(normalised_classifier(), Shuffled(), config=config)
    kept = []

    def keep(snapshot, last):
        kept.append(snapshot())
        if len(kept) == stop:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        pwfn.compress(normalised_classifier(), Shuffled(), config=config, keep=keep)
    resumed = pwfn.compress(normalised_classifier(), Shuffled(), config=config, resume=kept[-1])
    assert dumps(resumed.compressed) == dumps(whole.compressed)


def test_several_rounds_are_one_training_with_pauses():
    config = SHORT.override({"schedule.fractions": [0.5, 1.0], "schedule.epochs_per_round": [1.0, 1.0]})
    result = pwfn.compress(normalised_classifier(), Shuffled(), config=config)
    values = result.compressed.values() / result.rounds[-1].fix.steps[0].delta
    assert values.equal(values.round())
    assert [done.fix.fraction for done in result.rounds] == [0.5, 1.0]


def test_a_state_counts_with_the_bytes_of_its_file(trained):
    """Of several rounds, whose BatchNorm is not folded yet because training goes on from there."""
    model, data = trained
    rounds = {"schedule.fractions": [0.5, 1.0], "schedule.epochs_per_round": [1.0, 1.0]}
    result = pwfn.compress(model, data.train, config=SMALL.override({"target.bytes": 4500, **rounds}))
    assert result.target_met
    assert result.choice.met
    kept = result.states[result.choice.round - 1]
    assert kept.file_bytes == pytest.approx(result.file_bytes, rel=0.01)
    assert kept.file_bytes < len(kept.content)


def test_a_run_that_resumes_takes_the_price_of_its_settings():
    """Where there is no target, by which a price would have been found."""
    config, found = SMALL.override({"options.price": 0.1}), SMALL.override({"target.bits": 1.0})
    for earlier in (config, found):
        net = RateNetwork(conv(), earlier)
        net._price = 7.0 if earlier is found else net._price
        other = RateNetwork(conv(), SMALL.override({"options.price": 0.3}))
        other.load_state_dict(net.state_dict())
        assert other.price.item() == pytest.approx(0.3)


def test_labels_that_no_posterior_can_read_do_not_cost_the_network():
    """Training compares with the original network, and does not look at them."""
    data = list(Shuffled())
    unlabelled = [(x, torch.full_like(y, -1)) for x, y in data]
    result = pwfn.compress(normalised_classifier(), unlabelled, data, SHORT.override({"target.bits": 1.0}))
    assert result.target_met
    assert result.compressed.sigma_codes is None
    assert any("no posterior was fitted: data of the posterior" in warning for warning in result.warnings)


def test_other_losses_are_distilled_by_the_squared_error():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 64), nn.ReLU(), nn.Linear(64, 1))
    x = numbers(256, 4)
    data = [(part, model(part).detach()) for part in x.split(32)]
    config = SMALL.override({"target.bits": 6.0, "schedule.epochs_per_round": [40.0]})
    result = pwfn.compress(model, data, data, config, F.mse_loss)
    spread = float(torch.cat([y for _, y in data]).var())
    assert result.after.loss < 0.05 * spread


def test_a_short_run_reaches_its_target_by_training(trained):
    """A hundred steps are enough for lambda: the zero bin at the end has next to nothing left to cut."""
    model, data = trained
    config = SMALL.override({"target.bytes": 5000, "schedule.epochs_per_round": [2.5]})
    result = pwfn.compress(model, data.train, data.test, config)
    assert 4000 < result.file_bytes <= 5000
    assert not any("were set to zero" in warning for warning in result.warnings)


def test_images_without_labels_are_enough(trained):
    model, data = trained
    images = [x for x, _ in data.train]
    config = SMALL.override({"target.bits": 1.5, "schedule.epochs_per_round": [4.0]})
    result = pwfn.compress(model, images, images[:5], config)
    assert result.after.agreement
    assert result.after.metric > 0.95


# What is refused


def test_a_target_below_the_rest_is_refused():
    with pytest.raises(ConfigError, match=r"target\.bytes is 600, and what is not compressed takes"):
        RateNetwork(conv(), SMALL.override({"target.bytes": 600}))


def test_it_is_refused_too_where_even_layers_leave_a_larger_rest():
    """Statistics of layers that were scaled take more bytes than those of a new network."""
    torch.manual_seed(0)
    layers = [nn.Sequential(nn.Linear(64, 64, bias=False), nn.BatchNorm1d(64)) for _ in range(2)]
    nn.init.normal_(layers[0][0].weight, std=0.3)
    model, data = nn.Sequential(nn.Flatten(), *layers, nn.Linear(64, 10)), digits(batch_size=32)
    rest = RateNetwork(model, SMALL)._rest_bytes
    config = SMALL.override({"target.bytes": math.ceil((rest + 5) / 0.999)})
    with pytest.raises(ConfigError, match="what is not compressed takes"):
        pwfn.compress(model, data.train, data.test, config)


def test_the_progress_of_another_method_is_refused():
    kept = []
    pwfn.compress(normalised_classifier(), Shuffled(), config=SHORT, on_round=kept.append)
    with pytest.raises(WeightError, match="it belongs to another network or method"):
        pwfn.compress(normalised_classifier(), Shuffled(), resume=kept[0])


def test_weights_of_zero_are_refused():
    model = nn.Linear(2, 2)
    nn.init.zeros_(model.weight)
    nn.init.zeros_(model.bias)
    with pytest.raises(WeightError, match="every weight is zero"):
        RateNetwork(model)


def test_finish_needs_fix():
    with pytest.raises(WeightError, match="call fix"):
        RateNetwork(nn.Linear(2, 2)).finish()


# The variants in experiments


@pytest.mark.parametrize("variant", [rate_variants.Noise, rate_variants.EachSigma])
def test_variants_draw_in_training_and_round_otherwise(variant):
    net = variant(conv())
    net.train()
    assert not torch.equal(net.weights()["0.weight"], net.weights()["0.weight"])
    net.penalty().backward()
    net.eval()
    values = net.weights()["0.weight"] / net.grid_step
    assert bool((values == values.round()).all())


@pytest.mark.parametrize("target", [{}, {"target.bits": 1.0}])
def test_rounds_keep_what_is_fixed(target):
    """Also where that misses the target."""
    rounds = {"schedule.fractions": [0.5, 1.0], "schedule.epochs_per_round": 1.0}
    net = rate_variants.Rounds(conv(), SMALL.override({**rounds, **target}))
    assert net.fix(0.5).fixed == net.layout.size / 2
    kept = net.values[net.mask].clone()
    with torch.no_grad():
        net.levels.add_(5.0)
    net.fix(1.0)
    assert net.levels[net.mask].equal(kept)
