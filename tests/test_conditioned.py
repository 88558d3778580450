"""The preset quick: inputs without labels, one step for all weights, no training."""

import copy
import threading
from types import SimpleNamespace

import pytest
import torch
from cases import batchnorm_classifier, numbers
from torch import nn
from torch.nn import functional as F

import pwfn
from pwfn import Config, DataError, WeightError
from pwfn.bayes.batches import Batch, Source
from pwfn.bayes.distributed import Distributed
from pwfn.bayes.grid.conditioned import ConditionedNetwork
from pwfn.bayes.method import fix_alike
from pwfn.bayes.objective import Objective
from pwfn.bayes.sigma import probe
from pwfn.file.format import dumps
from pwfn.fixing.conditioning.network import Conditioning
from pwfn.layout import Layout
from pwfn.zoo.arrays import digits

QUICK = Config.preset("quick")
FIXED = QUICK.override({"options.step": 0.5})
IMAGES = numbers(150, 4)


@pytest.fixture(autouse=True)
def no_thread_is_left():
    before = threading.active_count()
    yield
    assert threading.active_count() == before


def step_of(result):
    return result.rounds[-1].fix.steps[0].delta


def assert_on_grid(result):
    values = result.compressed.values().double() / step_of(result)
    assert values.equal(values.round())


def rms_of(model):
    return float(Layout.of(model).gather(model).double().square().mean().sqrt())


def content(result):
    return dumps(result.compressed)


# What is given


def test_images_alone_are_enough():
    model = batchnorm_classifier()
    state = {name: value.clone() for name, value in model.state_dict().items()}
    modes = [module.training for module in model.modules()]
    result = pwfn.compress(model, IMAGES, preset="quick")
    assert_on_grid(result)
    assert result.before is None
    assert result.epochs == 0
    assert all(value.equal(state[name]) for name, value in model.state_dict().items())
    assert modes == [module.training for module in model.modules()]


def test_labels_of_the_training_data_change_nothing_but_the_posterior():
    labelled = [(part, torch.zeros(len(part), dtype=torch.long)) for part in IMAGES.split(64)]
    alone = pwfn.compress(batchnorm_classifier(), IMAGES, preset="quick")
    other = pwfn.compress(batchnorm_classifier(), labelled, preset="quick")
    assert dumps(other.compressed, "none") == dumps(alone.compressed, "none")


def test_dropout_and_batch_statistics_are_off():
    """A network in training mode gives the same file as one in evaluation mode."""
    training, evaluating = batchnorm_classifier().train(), batchnorm_classifier().eval()
    assert content(pwfn.compress(training, IMAGES, preset="quick")) == content(
        pwfn.compress(evaluating, IMAGES, preset="quick")
    )


def test_validation_data_without_labels_give_agreement():
    model = batchnorm_classifier()
    result = pwfn.compress(model, IMAGES[:100], IMAGES[100:], config=FIXED)
    assert result.after.agreement
    own, before = result.model()(IMAGES[100:]).argmax(1), model.eval()(IMAGES[100:]).argmax(1)
    assert result.after.metric == pytest.approx((own == before).double().mean().item())


def test_validation_data_with_labels_give_accuracy():
    model, labels = batchnorm_classifier(), torch.arange(50) % 3
    result = pwfn.compress(model, IMAGES[:100], [(IMAGES[100:], labels)], config=FIXED)
    assert not result.after.agreement
    accuracy = (result.model()(IMAGES[100:]).argmax(1) == labels).double().mean().item()
    assert result.after.metric == pytest.approx(accuracy)


class Wrapped(nn.Module):
    """As in transformers: an object with logits; or whatever ``wrap`` makes of them."""

    def __init__(self, wrap):
        super().__init__()
        self.inner, self.wrap = batchnorm_classifier(), wrap

    def forward(self, x):
        return self.wrap(self.inner(x))


@pytest.mark.parametrize(
    "wrap",
    [
        lambda y: SimpleNamespace(logits=y),
        lambda y: {"logits": y},
        lambda y: (y, 3),
        lambda y: {"labels": y.argmax(1), "boxes": [y]},
    ],
)
def test_outputs_that_hold_the_scores(wrap):
    plain = pwfn.compress(batchnorm_classifier(), IMAGES, preset="quick")
    wrapped = pwfn.compress(Wrapped(wrap), IMAGES, preset="quick")
    assert wrapped.compressed.values().equal(plain.compressed.values())


def test_outputs_that_cannot_be_compared_need_a_step():
    model = Wrapped(lambda y: {"labels": [y.argmax(1)]})
    with pytest.raises(DataError, match=r"options\.step"):
        pwfn.compress(model, IMAGES, preset="quick")
    assert_on_grid(pwfn.compress(model, IMAGES, config=FIXED))


@pytest.mark.parametrize("count", [1, 3, 129, 150])
def test_any_number_of_images(count):
    """129: the last part has one image."""
    assert_on_grid(pwfn.compress(batchnorm_classifier(), IMAGES[:count], preset="quick"))


def test_no_images():
    with pytest.raises(DataError):
        pwfn.compress(batchnorm_classifier(), IMAGES[:0], preset="quick")


def test_no_more_images_are_read_than_are_used():
    used, config = IMAGES[:40], FIXED.override({"options.images": 40})
    spoilt = torch.cat([used, torch.full((60, 4), float("nan"))])
    few = pwfn.compress(batchnorm_classifier(), used, config=config)
    assert (
        pwfn.compress(batchnorm_classifier(), spoilt, config=config)
        .compressed.values()
        .equal(few.compressed.values())
    )


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64], ids=str)
def test_other_types(dtype):
    model = batchnorm_classifier().to(dtype)
    result = pwfn.compress(model, IMAGES.to(dtype), IMAGES.to(dtype), config=FIXED)
    assert_on_grid(result)
    assert next(result.model().parameters()).dtype == dtype


# The step


def test_a_step_that_is_given():
    model = batchnorm_classifier()
    result = pwfn.compress(model, IMAGES, config=FIXED)
    assert 0.4375 < step_of(result) / rms_of(model) <= 0.5  # the next below it of at most four bits


@torch.no_grad()
def test_a_larger_tolerance_is_a_larger_step():
    model = batchnorm_classifier().eval()
    found = []
    for tolerance in (0.001, 0.01, 0.1):
        result = pwfn.compress(model, IMAGES, config=QUICK.override({"options.tolerance": tolerance}))
        log_q, log_p = (F.log_softmax(net(IMAGES), 1) for net in (result.model(), model))
        divergence = float((log_p.exp() * (log_p - log_q)).sum(1).mean())
        assert divergence < 3 * tolerance  # the search is short, and the file holds the rest in 16 bits
        found.append(step_of(result))
    assert found == sorted(set(found))


def regression(scale=1.0, offset=0.0):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 32), nn.Tanh(), nn.Linear(32, 32), nn.Tanh(), nn.Linear(32, 1))
    return nn.Sequential(model, Affine(scale, offset)).eval()


class Affine(nn.Module):
    def __init__(self, scale, offset):
        super().__init__()
        self.scale, self.offset = scale, offset

    def forward(self, x):
        return self.scale * x + self.offset


@pytest.mark.parametrize("count", [128, 129, 150])
def test_a_regression_network_is_compared_by_relative_error(count):
    model, images = regression(), IMAGES[:count]
    result = pwfn.compress(model, images, preset="quick")
    own, before = result.model()(images).detach(), model(images).detach()
    error = float((own - before).square().mean() / before.var(correction=0))
    assert 1e-4 < error < 0.04  # about the tolerance, 0.01: so small a network depends on luck


def test_the_unit_of_a_regression_does_not_matter():
    alike = [regression(), regression(1024.0), regression(1.0, 10.0)]
    assert len({step_of(pwfn.compress(model, IMAGES[:129], preset="quick")) for model in alike}) == 1


def test_a_regression_network_is_scored_by_its_squared_error():
    model = regression()
    result = pwfn.compress(model, IMAGES[:100], IMAGES[100:], config=FIXED)
    error = (result.model()(IMAGES[100:]) - model(IMAGES[100:])).square().mean().item()
    assert result.after.loss == pytest.approx(error, rel=1e-4)
    assert result.after.metric is None


@pytest.mark.parametrize("seed", range(8))
def test_a_tiny_network_keeps_to_the_tolerance(seed):
    """Its distance jumps from one try to the next, so the network itself is measured."""
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2)).eval()
    result = pwfn.compress(model, IMAGES, preset="quick")
    kept = Batch((IMAGES[113:],), {}, None).mixed(0.7).args[0]
    with torch.no_grad():
        now, before = (z - z.mean(1, keepdim=True) for z in (result.model()(kept), model(kept)))
    error = (now - before).square().sum() / (before - before.mean(0)).square().sum()
    assert error < 0.0135  # 1.3 times the tolerance; the file has the rest in 16 bits


def test_outputs_that_never_move_do_not_make_the_grid_coarser():
    """As of a new vision transformer, whose head is zero: any weights give the same outputs."""
    model = batchnorm_classifier()
    nn.init.zeros_(model[-1].weight)
    nn.init.zeros_(model[-1].bias)
    result = pwfn.compress(model, IMAGES, preset="quick")
    assert step_of(result) <= 0.6 * rms_of(model)


def test_an_offset_that_all_images_share_does_not_hide_an_error():
    """Two outputs around 0 and 1000 that vary by less than 1: of all numbers, 1 % of the variance is 50^2."""
    model = nn.Sequential(nn.Linear(4, 16), nn.Tanh(), nn.Linear(16, 2)).eval()
    with torch.no_grad():
        model[2].bias += torch.tensor([0.0, 1000.0])
    result = pwfn.compress(model, IMAGES, preset="quick")
    with torch.no_grad():
        before, now = model(IMAGES), result.model()(IMAGES)
    assert (now - before).var() < 0.05 * before.var(0).mean()


@pytest.mark.parametrize("images", [IMAGES[:1], IMAGES[:3], IMAGES[:1].expand(40, -1)], ids=len)
def test_images_that_any_step_fits_do_not_make_the_grid_coarser(images):
    model = regression()
    result = pwfn.compress(model, images, preset="quick")
    assert_on_grid(result)
    assert step_of(result) <= 0.3 * rms_of(model)


def test_one_huge_weight_does_not_make_the_others_zero():
    """As in a regression on prices: the root mean square is that of one bias."""
    torch.manual_seed(0)
    model = regression()
    with torch.no_grad():
        last = [module for module in model.modules() if isinstance(module, nn.Linear)][-1]
        last.weight *= 100.0
        last.bias += 200_000.0
        result = pwfn.compress(model, IMAGES, preset="quick")
        before, now = model(IMAGES), result.model()(IMAGES)
    assert (now - before).var() < 0.1 * before.var()
    assert result.warnings == ()


def test_an_error_above_the_tolerance_is_said():
    """No float32 holds weights of 1e-7 and of 1e7 on one grid."""
    model = nn.Sequential(nn.Linear(4, 8, bias=False), nn.Tanh(), nn.Linear(8, 2, bias=False)).eval()
    with torch.no_grad():
        model[0].weight *= 1e-7
        model[2].weight *= 1e7
    warnings = pwfn.compress(model, IMAGES, preset="quick").warnings
    assert "of their variance" in warnings[0]
    assert "layout.exclude" in warnings[0]


def test_frozen_weights_are_compressed_alike():
    """Nothing is trained, so requires_grad makes no difference; the model given stays frozen."""
    model = batchnorm_classifier()
    free = pwfn.compress(model, IMAGES, config=FIXED)
    model.requires_grad_(False)
    frozen = pwfn.compress(model, IMAGES, config=FIXED)
    assert content(frozen) == content(free)
    assert not any(p.requires_grad for p in model.parameters())
    assert frozen.model()(IMAGES).equal(free.model()(IMAGES))


def test_one_input_is_worth_a_warning():
    assert "only 1 input:" in pwfn.compress(regression(), IMAGES[:1], preset="quick").warnings[0]


# A target: the step is searched


class Uncopied(list):
    """Batches that nobody has a reason to copy."""

    def __deepcopy__(self, memo):
        raise AssertionError("the data were copied")


def labelled_by(model):
    """What the network says, some of it wrong."""
    with torch.no_grad():
        labels = model.eval()(IMAGES).argmax(1)
    labels[::10] = (labels[::10] + 1) % 3
    return Uncopied([(IMAGES, labels)])


TARGETS = {"bits": 2.5, "bytes": 1550, "max_drop": 2.0}


@pytest.mark.parametrize("name", TARGETS)
def test_a_target_is_met_and_survives_an_interrupt(name):
    model = batchnorm_classifier()
    config = QUICK.override({f"target.{name}": TARGETS[name]})
    data = Uncopied(IMAGES.split(64)), labelled_by(model)
    whole = pwfn.compress(model, *data, config=config)
    assert whole.target_met
    assert len(whole.states) > 3
    assert len({state.step for state in whole.states}) == len(whole.states)

    def stop(progress):
        if len(progress.rounds) == 3:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt) as stopped:
        pwfn.compress(model, *data, config=config, on_round=stop)
    assert len(stopped.value.progress.rounds) == 3
    resumed = pwfn.compress(model, *data, config=config, resume=stopped.value.progress)
    assert content(resumed) == content(whole)
    assert [state.to_dict() for state in resumed.states] == [state.to_dict() for state in whole.states]


def test_a_try_is_as_large_as_the_file_that_it_becomes():
    """A file also contains its scores: without them a target in bytes is missed by a few."""
    model = batchnorm_classifier()
    config = QUICK.override({"target.bytes": 1550})
    result = pwfn.compress(model, IMAGES.split(64), labelled_by(model), config=config)
    chosen = next(state for state in result.states if state.round == result.choice.round)
    assert 0 <= len(chosen.content) - result.file_bytes < 10  # a try also names its round
    assert result.file_bytes <= 1550


def test_an_interrupt_within_the_first_try():
    model, config = batchnorm_classifier(), QUICK.override({"target.bits": 2.5})

    def stop(event):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt) as stopped:
        pwfn.compress(model, IMAGES, config=config, on_step=stop)
    resumed = pwfn.compress(model, IMAGES, config=config, resume=stopped.value.progress)
    assert content(resumed) == content(pwfn.compress(model, IMAGES, config=config))


# The file


def convolutions():
    torch.manual_seed(0)
    return nn.Sequential(
        *(nn.Conv2d(1, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU()),
        *(nn.Conv2d(8, 16, 3, stride=2), nn.BatchNorm2d(16), nn.ReLU()),
        *(nn.Flatten(), nn.Linear(144, 10)),
    )


def test_the_file_holds_the_network_of_the_result(tmp_path):
    """BatchNorm is folded, and the statistics are those that conditioning has corrected."""
    model, images = convolutions(), numbers(32, 1, 8, 8)
    with torch.no_grad():
        for module in model.modules():
            if isinstance(module, nn.BatchNorm2d):
                module.running_mean.normal_()
                module.running_var.uniform_(0.5, 2.0)
                module.weight.uniform_(0.5, 1.5)
    result = pwfn.compress(model, images, config=FIXED)
    result.save(tmp_path / "model.pwfn")
    loaded = pwfn.load(tmp_path / "model.pwfn").apply_to(convolutions()).eval()
    assert loaded(images).equal(result.model()(images))
    assert pwfn.load(tmp_path / "model.pwfn").values().unique().numel() == result.summary.whole.unique


class Unused(Wrapped):
    def __init__(self):
        super().__init__(lambda y: y)
        self.unused = nn.Linear(4, 4)


def test_layers_that_no_image_reaches_are_named_in_the_result():
    result = pwfn.compress(Unused(), IMAGES, config=FIXED)
    (warning,) = result.warnings
    assert "unused.weight" in warning
    assert "inner" not in warning


@pytest.mark.parametrize("settings", [QUICK, FIXED])
def test_progress_over_all_passes_rises_to_at_most_its_end(settings):
    seen = []
    pwfn.compress(
        batchnorm_classifier(),
        IMAGES,
        config=settings,
        on_step=lambda event: seen.append((event.step, event.steps)),
    )
    layers = [layer for layer, _ in seen]
    assert layers == sorted(set(layers))
    assert all(layer < last for layer, last in seen)


def test_a_search_uses_some_of_the_images_and_the_network_all(monkeypatch):
    sizes = []
    run = Conditioning.run

    def noted(self, batches, on_layer=None):
        sizes.append(sum(batch.size for batch in batches))
        run(self, batches, on_layer)

    monkeypatch.setattr(Conditioning, "run", noted)
    pwfn.compress(batchnorm_classifier(), numbers(700, 4), preset="quick")
    assert set(sizes[:-1]) == {384}
    assert sizes[-1] == 700


def test_few_images_are_worth_a_warning():
    for count, warnings in ((64, 0), (63, 1)):
        result = pwfn.compress(batchnorm_classifier(), IMAGES[:count], config=FIXED)
        assert len(result.warnings) == warnings


# What goes wrong


def test_outputs_that_are_not_finite():
    with pytest.raises(DataError, match="not finite"):
        pwfn.compress(Wrapped(lambda y: y * float("nan")), IMAGES, preset="quick")


def test_images_that_are_not_finite_name_the_first_layer():
    spoilt = IMAGES.clone()
    spoilt[70, 2] = float("nan")
    with pytest.raises(WeightError, match=r"^0\.weight"):
        pwfn.compress(batchnorm_classifier(), spoilt, preset="quick")


def test_images_that_the_network_cannot_take():
    with pytest.raises(DataError):
        pwfn.compress(batchnorm_classifier(), numbers(20, 5), preset="quick")


def test_weights_that_are_all_zero():
    model = nn.Linear(4, 3)
    nn.init.zeros_(model.weight)
    nn.init.zeros_(model.bias)
    with pytest.raises(WeightError):
        pwfn.compress(model, IMAGES, preset="quick")


def test_a_network_alone_needs_data_and_a_fixing():
    net = ConditionedNetwork(batchnorm_classifier())
    with pytest.raises(DataError, match=r"net\.data"):
        net.fix(1.0)
    with pytest.raises(WeightError, match="fix"):
        net.finish()


# Several processes


class Second(Distributed):
    """The other of two processes: it receives what the first has made."""

    rank, world = 1, 2

    def __init__(self, made):
        super().__init__(torch.device("cpu"))
        self.made = made

    def first(self, work):
        return self.made


class First(Distributed):
    rank, world = 0, 2

    def first(self, work):
        self.made = work()
        return self.made


def test_the_first_process_conditions_for_all():
    nets = [ConditionedNetwork(batchnorm_classifier()) for _ in range(2)]
    device = torch.device("cpu")
    for net, share in zip(nets, IMAGES.split(75), strict=True):
        source = Source("data", [share], device)
        net.data = probe(net, source, Objective(F.cross_entropy), Distributed(device))
    first = First(device)
    records = [fix_alike(nets[0], 1.0, first), fix_alike(nets[1], 1.0, Second(first.made))]
    assert records[0] == records[1]
    assert nets[0].grid_step == nets[1].grid_step
    states = [net.state_dict() for net in nets]
    assert states[0].keys() == states[1].keys()
    assert all(value.equal(states[1][name]) for name, value in states[0].items())


# What it is for


@pytest.fixture(scope="module")
def trained():
    """A small network, trained for a second on the digits, with its data."""
    data, model = digits(batch_size=64), convolutions()
    optimizer = torch.optim.Adam(model.parameters(), 3e-3)
    for _ in range(4):
        for images, labels in data.train:
            optimizer.zero_grad()
            F.cross_entropy(model(images), labels).backward()
            optimizer.step()
    return model.eval(), torch.cat([x for x, _ in data.train]), torch.cat([x for x, _ in data.test])


@torch.no_grad()
def test_it_agrees_more_than_rounding_does(trained):
    """At the same step, on images that it has not seen."""
    model, images, test = trained
    result = pwfn.compress(model, images[:512], config=QUICK.override({"options.step": 2.0}))
    rounded = copy.deepcopy(model)
    for entry in Layout.of(model).entries:
        weight = rounded.get_parameter(entry.name)
        weight.copy_((weight / step_of(result)).round() * step_of(result))
    before = model(test).argmax(1)
    wrong, wrong_rounded = (int((net(test).argmax(1) != before).sum()) for net in (result.model(), rounded))
    assert wrong_rounded > 50
    assert wrong < 0.3 * wrong_rounded


# What is read once, and what says nothing


@pytest.mark.parametrize("change", [{}, {"target.bits": 3.0}], ids=["once", "with a target"])
def test_inputs_of_a_generator_are_enough(change):
    config = (QUICK if change else FIXED).override(change)
    whole = pwfn.compress(batchnorm_classifier(), IMAGES.split(64), config=config)
    result = pwfn.compress(batchnorm_classifier(), (part for part in IMAGES.split(64)), config=config)
    assert result.compressed.values().equal(whole.compressed.values())


def test_inputs_that_are_all_the_same_are_worth_a_warning():
    images = torch.zeros(100, 4)
    result = pwfn.compress(batchnorm_classifier(), images, config=FIXED)
    assert sum("all 100 inputs are the same" in warning for warning in result.warnings) == 1
    images[99, 3] = 1
    assert not pwfn.compress(batchnorm_classifier(), images, config=FIXED).warnings


# Networks that are only used for inference


UNSCALED = "filters were not scaled, because the network has no gradients"


class NoBackward(torch.autograd.Function):
    """Has a forward only."""

    @staticmethod
    def forward(ctx, x):
        """The same numbers."""
        return x.clone()


class InferenceOnly(nn.Module):
    """The classifier, whose hidden activations go through a function."""

    def __init__(self, function):
        super().__init__()
        self.net, self.function = batchnorm_classifier(), function

    def forward(self, x):
        return self.net[2:](self.function(self.net[:2](x)))


def changed_in_place(x):
    y = x.sigmoid()
    return y.mul_(2)  # sigmoid keeps its output for the backward


@pytest.mark.parametrize(
    "function",
    [changed_in_place, NoBackward.apply, lambda x: torch.from_numpy(x.numpy().copy())],
    ids=["in place", "no backward", "numpy"],
)
def test_a_network_without_gradients_needs_none(function):
    result = pwfn.compress(InferenceOnly(function), IMAGES, IMAGES, config=FIXED)
    assert_on_grid(result)
    assert result.after.metric > 0.8
    assert [sentence.split(":")[0] for sentence in result.warnings] == [UNSCALED]


def test_too_little_memory_for_gradients_is_an_error(monkeypatch):
    """Or the file would depend on how much was free."""

    def scale(*args):
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr("pwfn.bayes.grid.conditioned.scale_filters", scale)
    with pytest.raises(torch.OutOfMemoryError):
        pwfn.compress(batchnorm_classifier(), IMAGES, config=FIXED)


class InInferenceMode(nn.Sequential):
    """The classifier, whose author knows that it is not trained."""

    @torch.inference_mode()
    def forward(self, x):
        return super().forward(x)


def test_inference_mode_in_the_forward_changes_nothing():
    def no_gradients(module, args, output):  # as in inference mode, so that nothing is scaled
        return output.detach()

    plain = batchnorm_classifier()
    inference = InInferenceMode(*copy.deepcopy(plain))
    plain.register_forward_hook(no_gradients)
    expected = pwfn.compress(plain, IMAGES, config=FIXED)
    result = pwfn.compress(inference, IMAGES, config=FIXED)
    assert result.compressed.values().equal(expected.compressed.values())
    assert not result.warnings


@pytest.mark.filterwarnings("ignore:.*is deprecated", "ignore:The .grad attribute")
def test_a_part_in_torchscript_is_left_alone():
    model = batchnorm_classifier()
    model[7] = torch.jit.script(model[7])
    result = pwfn.compress(model, IMAGES, IMAGES, config=FIXED)
    assert result.after.metric > 0.8


class AlwaysDropout(nn.Module):
    """Drops activations in evaluation mode, too."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.last = nn.Linear(4, 64), nn.Linear(64, 3)

    def forward(self, x):
        return self.last(F.dropout(self.first(x).relu(), 0.5, training=True))


def test_a_network_that_draws_random_numbers_is_compared_with_the_same_ones():
    result = pwfn.compress(AlwaysDropout(), IMAGES, preset="quick")
    assert not result.warnings  # noise of its own would look like an error of the weights, at any step
    assert result.summary.whole.unique < 60
    assert content(result) == content(pwfn.compress(AlwaysDropout(), IMAGES, preset="quick"))


def test_inputs_of_a_scale_that_the_network_does_not_know_are_worth_a_warning():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 3))
    assert not pwfn.compress(model, IMAGES, preset="quick").warnings
    result = pwfn.compress(model, 1e-4 * IMAGES, preset="quick")  # the outputs hardly differ
    assert any("scaled wrongly" in warning for warning in result.warnings)
