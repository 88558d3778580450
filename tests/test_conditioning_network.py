"""Conditioning a whole network, against float64 references that run both networks layer by layer."""

import copy
import signal
import threading
import time

import numpy as np
import pytest
import torch
from cases import Tied, numbers
from conditioned_rounds import _ToMeans
from torch import nn
from torch.nn import functional as F

from pwfn.bayes.batches import Batch
from pwfn.errors import DataError, WeightError
from pwfn.fixing.conditioning.columns import DAMPING, best_linear, fix_columns
from pwfn.fixing.conditioning.network import MEMORY, Conditioning
from pwfn.layout import Layout

STEP = 0.25


@pytest.fixture(autouse=True)
def no_thread_is_left():
    before = threading.active_count()
    yield
    assert threading.active_count() == before


def parts_of(inputs, count=1):
    return [Batch((part,), {}, None) for part in inputs.chunk(count)]


def conditioned(model, batches, memory=MEMORY, include=(), step=STEP):
    """A copy of the model, conditioned, and the object that did it."""
    own = copy.deepcopy(model.eval())
    work = Conditioning(model, own, Layout.of(model, include), step, memory=memory)
    work.run(batches)
    return own, work


def assert_on_grid(model, layout, step=STEP):
    values = layout.gather(model).double() / step
    assert values.equal(values.round())


def seeded(model_type, *args, **kwargs):
    torch.manual_seed(0)
    return model_type(*args, **kwargs).eval()


# The reference: numpy in float64, one layer after the other


def with_ones(rows):
    return np.concatenate([rows, np.ones((len(rows), 1))], 1)


def literal_damping(rows):
    """The moments with the damping for so many inputs and columns."""
    moments = rows.T @ rows / len(rows)
    damping = max(DAMPING, 0.1 * len(moments) / len(rows))
    return moments + damping * np.trace(moments) / len(moments) * np.eye(len(moments))


def literal_layer(weight, own, original, step=STEP):
    """Least squares, then column by column: round it, and condition the others on all so far."""
    moments, cross = own.T @ own / len(own), original.T @ own / len(own)
    h = literal_damping(own)
    target = weight + weight @ (cross - moments) @ np.linalg.inv(h)
    now = target.copy()
    for j in range(now.shape[1]):
        now[:, j] = np.round(now[:, j] / step) * step
        f, r = slice(0, j + 1), slice(j + 1, None)
        now[:, r] = target[:, r] - (now[:, f] - target[:, f]) @ h[f, r] @ np.linalg.inv(h[r, r])
    return now


def matrix(layer):
    bias = layer.bias.detach().double().numpy()[:, None]
    return np.concatenate([layer.weight.detach().double().flatten(1).numpy(), bias], 1)


def two_layers(inputs=5, hidden=8):
    return seeded(lambda: nn.Sequential(nn.Linear(inputs, hidden), nn.ReLU(), nn.Linear(hidden, 3)))


def test_one_layer_is_fixed_by_its_moments():
    model, inputs = seeded(nn.Linear, 6, 4), numbers(40, 6)
    own, _ = conditioned(model, parts_of(inputs))
    rows = torch.cat([inputs, torch.ones(40, 1)], 1)[None]
    moments = rows.transpose(1, 2) @ rows / 40
    weight = torch.cat([model.weight, model.bias[:, None]], 1)[None].detach()
    expected = fix_columns(best_linear(weight, moments, moments), moments, STEP)[0]
    assert own.weight.equal(expected[:, :-1])
    assert own.bias.equal(expected[:, -1])
    assert not own.weight.equal((model.weight / STEP).round() * STEP)


def test_a_layer_with_few_inputs_is_not_fitted_to_these_alone(monkeypatch):
    """With as many inputs as columns it is nearer to the original on other inputs for its damping."""
    model, inputs, others = seeded(nn.Linear, 40, 16), numbers(40, 40), numbers(400, 40, seed=2)

    def error():
        own, _ = conditioned(model, parts_of(inputs))
        return float((own(others) - model(others)).detach().square().mean())

    damped = error()
    monkeypatch.setattr("pwfn.fixing.conditioning.columns._FEW_INPUTS", 0.0)
    assert damped < 0.8 * error()


def test_a_very_wide_layer_is_fixed_in_blocks_of_columns(monkeypatch):
    monkeypatch.setattr("pwfn.fixing.conditioning.network._WIDEST", 4)
    model, inputs = seeded(nn.Linear, 6, 4), numbers(40, 6)
    own, _ = conditioned(model, parts_of(inputs))
    rows = with_ones(inputs.double().numpy())
    blocks = (slice(0, 4), slice(4, 7))  # seven columns with the bias
    expected = [literal_layer(matrix(model)[:, block], rows[:, block], rows[:, block]) for block in blocks]
    np.testing.assert_allclose(matrix(own), np.concatenate(expected, 1), atol=1e-6)


@pytest.mark.parametrize("parts", [1, 4])
def test_two_layers_are_those_of_the_reference(parts):
    """The second layer sees the first one's errors, and takes them up."""
    model, inputs = two_layers(), numbers(48, 5)
    own, _ = conditioned(model, parts_of(inputs, parts))
    rows = with_ones(inputs.double().numpy())
    first = literal_layer(matrix(model[0]), rows, rows)
    hidden, hidden_before = (with_ones(np.maximum(rows @ w.T, 0)) for w in (first, matrix(model[0])))
    second = literal_layer(matrix(model[2]), hidden, hidden_before)
    np.testing.assert_array_equal(matrix(own[0]), first)
    np.testing.assert_array_equal(matrix(own[2]), second)


def small_convnet():
    model = seeded(
        lambda: nn.Sequential(
            *(nn.Conv2d(2, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(64, 3))
        )
    )
    with torch.no_grad():
        model[1].running_mean.normal_()
        model[1].running_var.uniform_(0.5, 2.0)
    return model


def test_in_rounds_free_weights_move_to_their_conditional_mean():
    model, inputs = two_layers(), numbers(48, 5)
    layout = Layout.of(model)
    fixed = torch.rand(layout.size, generator=torch.Generator().manual_seed(0)) < 0.5
    own = copy.deepcopy(model)
    values = torch.where(fixed, (layout.gather(model) / STEP).round() * STEP, layout.gather(model))
    own.load_state_dict(layout.views(values))
    _ToMeans(model, own, layout, fixed).run(parts_of(inputs, 3))

    masks = layout.views(fixed)
    rows = before = with_ones(inputs.double().numpy())
    for number in (0, 2):
        names = f"{number}.weight", f"{number}.bias"
        kept, given = (
            torch.cat([of[n].reshape(len(model[number].bias), -1) for n in names], 1).double().numpy()
            for of in (masks, layout.views(values))
        )
        kept = kept.astype(bool)
        moments, cross = rows.T @ rows / len(rows), before.T @ rows / len(rows)
        h = literal_damping(rows)
        expected = matrix(model[number])
        expected = expected + expected @ (cross - moments) @ np.linalg.inv(h)
        for row, k in enumerate(kept):
            moved = (given[row, k] - expected[row, k]) @ h[np.ix_(k, ~k)] @ np.linalg.inv(h[np.ix_(~k, ~k)])
            expected[row, ~k] -= moved
            expected[row, k] = given[row, k]
        np.testing.assert_allclose(matrix(own[number]), expected, atol=2e-4)
        before = with_ones(np.maximum(before @ matrix(model[number]).T, 0))
        rows = with_ones(np.maximum(rows @ matrix(own[number]).T, 0))


def test_batchnorm_statistics_move_by_what_compression_changed():
    model, inputs = small_convnet(), numbers(12, 2, 4, 4)
    own, _ = conditioned(model, parts_of(inputs, 3))
    patches = with_ones(F.unfold(inputs.double(), 3, padding=1).transpose(1, 2).flatten(0, 1).numpy())
    before = matrix(model[0])
    first = literal_layer(before, patches, patches)
    np.testing.assert_array_equal(matrix(own[0]), first)
    was, now = patches @ before.T, patches @ first.T
    eps, old = model[1].eps, model[1]
    mean = old.running_mean.double().numpy() + now.mean(0) - was.mean(0)
    variance = (old.running_var.double().numpy() + eps) * (now.var(0) + eps) / (was.var(0) + eps) - eps
    np.testing.assert_allclose(own[1].running_mean.numpy(), mean, rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(own[1].running_var.numpy(), variance, rtol=1e-4)
    # The layer behind it is conditioned on the corrected statistics.
    hidden, hidden_before = (
        with_ones(F.relu(net[1](net[0](inputs))).flatten(1).detach().double().numpy()) for net in (own, model)
    )
    np.testing.assert_array_equal(matrix(own[4]), literal_layer(matrix(model[4]), hidden, hidden_before))


def test_a_channel_that_vanishes_keeps_a_statistic_of_some_size():
    """Its variance would go to zero, and noise would be blown up by its inverse."""
    model = seeded(lambda: nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2), nn.Linear(2, 2)))
    with torch.no_grad():
        model[0].weight[0] *= 0.01 / model[0].weight[0].norm()
    own, _ = conditioned(model, parts_of(numbers(64, 3)), step=1.0)
    assert own[0].weight[0].eq(0).all()
    assert 0.2 < own[1].running_var[0] / model[1].running_var[0] < 1


def test_the_original_is_not_touched():
    model = small_convnet().train()
    model[1].eval()
    state = {name: value.clone() for name, value in model.state_dict().items()}
    facts = [(m.training, len(m._forward_hooks), sorted(vars(m))) for m in model.modules()]
    grads = [p.requires_grad for p in model.parameters()]
    fast = torch.backends.mha.get_fastpath_enabled()
    own = copy.deepcopy(model)
    layout = Layout.of(model)
    Conditioning(model, own, layout, STEP).run(parts_of(numbers(12, 2, 4, 4), 3))
    assert_on_grid(own, layout)
    assert all(value.equal(state[name]) for name, value in model.state_dict().items())
    assert facts == [(m.training, len(m._forward_hooks), sorted(vars(m))) for m in model.modules()]
    assert facts == [(m.training, len(m._forward_hooks), sorted(vars(m))) for m in own.modules()]
    assert grads == [p.requires_grad for p in own.parameters()]
    assert torch.backends.mha.get_fastpath_enabled() == fast
    assert torch.is_grad_enabled()


def test_the_same_bytes_twice():
    """Also where inputs are drawn at random, of more than are needed."""
    model, inputs = small_convnet(), numbers(24, 2, 40, 40)
    model[3] = nn.Sequential(nn.AdaptiveAvgPool2d(4), nn.Flatten())
    first, second = (conditioned(model, parts_of(inputs, 3))[0].state_dict() for _ in range(2))
    assert all(value.equal(second[name]) for name, value in first.items())


def test_few_images_fit_at_the_first_layer_and_all_at_the_second():
    """With little memory the wide layer has the first batch, the narrow one has all of them."""
    model, inputs = two_layers(40, 4), numbers(48, 40)
    per_example = 6 * 40 * 4  # bytes at the wide layer; the narrow one has a tenth
    own, _ = conditioned(model, parts_of(inputs, 6), memory=8 * per_example)
    every = with_ones(inputs.double().numpy())
    first = literal_layer(matrix(model[0]), every[:8], every[:8])
    hidden, hidden_before = (with_ones(np.maximum(every @ w.T, 0)) for w in (first, matrix(model[0])))
    np.testing.assert_array_equal(matrix(own[0]), first)
    np.testing.assert_array_equal(matrix(own[2]), literal_layer(matrix(model[2]), hidden, hidden_before))
    # Twice the memory: two batches at the wide layer.
    own, _ = conditioned(model, parts_of(inputs, 6), memory=16 * per_example)
    np.testing.assert_array_equal(matrix(own[0]), literal_layer(matrix(model[0]), every[:16], every[:16]))


def test_without_memory_one_batch_fixes_all():
    model, inputs = small_convnet(), numbers(12, 2, 4, 4)
    own, work = conditioned(model, parts_of(inputs, 4), memory=1)
    alone, _ = conditioned(model, parts_of(inputs[:3]))
    assert work.notes() == ()
    assert all(value.equal(alone.state_dict()[name]) for name, value in own.state_dict().items())


def test_progress_counts_the_layers():
    model, seen = small_convnet(), []
    work = Conditioning(model, copy.deepcopy(model), Layout.of(model), STEP)
    work.run(parts_of(numbers(4, 2, 4, 4), 2), lambda done, of: seen.append((done, of)))
    assert seen == [(1, 3), (2, 3), (3, 3)]


# Networks that are not a chain of layers


class Strange(nn.Module):
    """Kinds that are not ``y = W x``, and a layer that is never called."""

    def __init__(self):
        super().__init__()
        self.layer, self.unused = nn.Linear(4, 4), nn.Linear(4, 4)
        self.pair, self.lstm = nn.Bilinear(4, 4, 3), nn.LSTM(4, 4, batch_first=True)

    def forward(self, x):
        x = self.layer(x)
        return self.pair(x, self.lstm(x[:, None])[0][:, 0])


def test_layers_that_cannot_be_conditioned_are_rounded_and_named():
    model = seeded(Strange)
    own, work = conditioned(model, parts_of(numbers(16, 4), 2), include=["type:LSTM"])
    assert_on_grid(own, Layout.of(model, ["type:LSTM"]))
    for name in ("unused.weight", "unused.bias", "pair.weight", "lstm.weight_ih_l0"):
        before, after = model.get_parameter(name), own.get_parameter(name)
        assert after.equal((before / STEP).round() * STEP), name
    (note,) = work.notes()
    assert "unused.weight" in note
    assert set(work.silent) >= {"unused.weight", "unused.bias", "pair.weight", "lstm.weight_hh_l0"}
    assert "layer.weight" not in work.silent


class Looped(nn.Module):
    """One layer that is called twice, with a step between that changes the activations in place."""

    def __init__(self):
        super().__init__()
        self.layer, self.head = nn.Linear(4, 4), nn.Linear(4, 2)

    def forward(self, x):
        for _ in range(2):
            x = self.layer(x).relu_()
        return self.head(x)


def test_a_layer_that_is_called_twice_is_fixed_at_its_first_call():
    model, inputs = seeded(Looped), numbers(32, 4)
    own, work = conditioned(model, parts_of(inputs, 2))
    rows = with_ones(inputs.double().numpy())
    np.testing.assert_array_equal(matrix(own.layer), literal_layer(matrix(model.layer), rows, rows))
    assert work.notes() == ()
    assert_on_grid(own, Layout.of(model))


def test_a_head_tied_to_an_embedding():
    model = seeded(Tied)
    own, work = conditioned(model, parts_of(torch.arange(44).view(4, 11) % 11, 2))
    assert_on_grid(own, Layout.of(model))
    assert own.head.weight is own.embedding.weight
    assert work.notes() == ()


class Experts(nn.Module):
    """Every example goes to one of three experts; no example ever goes to the last."""

    def __init__(self):
        super().__init__()
        self.gate = nn.Linear(4, 2)
        self.experts = nn.ModuleList(
            nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 2)) for _ in range(3)
        )

    def forward(self, x):
        chosen, out = self.gate(x).argmax(1), x.new_zeros(len(x), 2)
        for number, expert in enumerate(self.experts):
            out[chosen == number] = expert(x[chosen == number])
        return out


@pytest.mark.parametrize("parts", [1, 5])
def test_a_mixture_of_experts(parts):
    """The copy sends some examples elsewhere; an expert without examples is rounded, and named."""
    model, inputs = seeded(Experts), numbers(50, 4)
    own, work = conditioned(model, parts_of(inputs, parts))
    assert (own.gate(inputs).argmax(1) != model.gate(inputs).argmax(1)).any()
    assert_on_grid(own, Layout.of(model))
    assert [name for name in work.silent if "weight" in name] == ["experts.2.0.weight", "experts.2.2.weight"]
    rounded = (model.experts[0][0].weight / STEP).round() * STEP
    assert not own.experts[0][0].weight.equal(rounded)


class Fork(nn.Module):
    """Whole batches take a short way or a long one, as a first layer decides; both end at the same head."""

    def __init__(self):
        super().__init__()
        self.gate, self.head = nn.Linear(4, 4), nn.Linear(4, 2)
        self.long = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4))
        self.short = nn.Linear(4, 4)

    def forward(self, x):
        x = self.gate(x)
        return self.head(self.long(x) if x.mean() > 0 else self.short(x))


@pytest.mark.parametrize("memory", [1, MEMORY])
def test_batches_that_take_different_ways(memory):
    model = seeded(Fork)
    batches = parts_of(torch.cat([numbers(8, 4, seed=n) + (0.3 * n - 1.2) for n in range(8)]), 8)
    ways = {bool(model.gate(batch.args[0]).mean() > 0) for batch in batches}
    assert ways == {True, False}
    own, work = conditioned(model, batches, memory)
    assert_on_grid(own, Layout.of(model))
    assert work.notes() == ()


class Diverging(nn.Module):
    """A detour that only one of the two networks takes: the way depends on whether the weights are fixed."""

    def __init__(self, detour):
        super().__init__()
        self.first, self.detour, self.last = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 2)
        self.takes = detour

    def forward(self, x):
        x = self.first(x)
        exact = bool((self.first.weight / STEP == (self.first.weight / STEP).round()).all())
        if exact == (self.takes == "copy"):
            x = x + 0 * self.detour(x)
        return self.last(x)


@pytest.mark.parametrize("takes", ["copy", "original"])
def test_networks_that_part_meet_again(takes):
    """The layers behind the detour still see the error of the first layer, where both are there again."""
    model, inputs = seeded(Diverging, takes), numbers(24, 4)
    own, work = conditioned(model, parts_of(inputs, 2))
    assert_on_grid(own, Layout.of(model))
    assert bool(work.notes()) == (takes == "original")
    if takes == "copy":
        hidden, before = (with_ones(net.first(inputs).detach().double().numpy()) for net in (own, model))
        np.testing.assert_array_equal(matrix(own.last), literal_layer(matrix(model.last), hidden, before))


class Remembering(nn.Module):
    """Keeps an activation on itself between two layers, as models with skip connections do."""

    def __init__(self):
        super().__init__()
        self.down, self.up = nn.Linear(4, 4), nn.Linear(4, 4)
        self.kept = None

    def forward(self, x):
        self.kept = self.down(x)
        out = self.up(self.kept.relu())
        return out + self.kept


class Direct(Remembering):
    def forward(self, x):
        kept = self.down(x)
        return self.up(kept.relu()) + kept


def test_activations_kept_on_the_model_do_not_mix():
    model, plain, batches = seeded(Remembering), seeded(Direct), parts_of(numbers(30, 4), 5)
    own, expected = conditioned(model, batches)[0], conditioned(plain, batches)[0]
    assert all(value.equal(expected.state_dict()[name]) for name, value in own.state_dict().items())
    assert model.kept is None


# What goes wrong


class Failing(nn.Module):
    """Raises on its way, between two layers, for inputs that are large."""

    def __init__(self, error):
        super().__init__()
        self.first, self.second, self.error = nn.Linear(4, 4), nn.Linear(4, 2), error

    def forward(self, x):
        y = self.first(x)
        if x.max() > 100:
            raise self.error
        return self.second(y)


@pytest.mark.parametrize("bad", [0, 2])
def test_a_model_that_raises(bad):
    inputs = numbers(20, 4)
    inputs[bad * 5] = 1000
    model = seeded(Failing, ValueError("too large"))
    with pytest.raises(DataError, match="too large"):
        conditioned(model, parts_of(inputs, 4))


def test_an_error_that_is_none_of_the_data_comes_out_as_it_is():
    inputs = numbers(20, 4)
    inputs[10] = 1000
    with pytest.raises(ZeroDivisionError):
        conditioned(seeded(Failing, ZeroDivisionError()), parts_of(inputs, 4))


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_activations_that_are_not_finite_name_the_layer(value):
    model, inputs = two_layers(), numbers(20, 5)
    with torch.no_grad():
        model[1] = nn.Threshold(100.0, value)
    with pytest.raises(WeightError) as raised:
        conditioned(model, parts_of(inputs, 2))
    assert str(raised.value).startswith("2.weight")
    assert "\n" not in str(raised.value)


def test_weights_of_inputs_that_are_always_zero_go_to_the_nearest_multiple():
    model, inputs = seeded(nn.Linear, 6, 4), numbers(40, 6)
    inputs[:, [1, 4]] = 0
    own, _ = conditioned(model, parts_of(inputs, 2))
    nearest = (model.weight / STEP).round() * STEP
    assert own.weight[:, [1, 4]].equal(nearest[:, [1, 4]])


def test_an_interrupt_between_two_layers():
    model, own = small_convnet(), small_convnet()

    def stop(done, of):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        Conditioning(model, own, Layout.of(model), STEP).run(parts_of(numbers(12, 2, 4, 4), 3), stop)


class Interrupted(nn.Module):
    """Interrupts the main thread from within a pass, which goes on; and catches whatever is raised in it."""

    def __init__(self, catches):
        super().__init__()
        self.first, self.second, self.third = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 2)
        self.catches = catches

    def forward(self, x):
        x = self.first(x)
        if threading.current_thread() is not threading.main_thread():
            signal.pthread_kill(threading.main_thread().ident, signal.SIGINT)
            time.sleep(0.05)
        try:
            x = self.second(x)
        except BaseException:
            if not self.catches:
                raise
        return self.third(x)


@pytest.mark.parametrize("catches", [False, True])
def test_an_interrupt_in_the_middle_of_a_pass(catches):
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # a background job ignores it
    try:
        with pytest.raises(KeyboardInterrupt):
            conditioned(seeded(Interrupted, catches), parts_of(numbers(20, 4), 4))
    finally:
        signal.signal(signal.SIGINT, before)
