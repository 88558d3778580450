"""BatchNorm folded into scale and shift, 16-bit numbers for the rest, and what a run does with both."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from pwfn.rounds import Run
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils.fusion import fuse_conv_bn_eval
from torch.nn.utils.parametrizations import weight_norm

from pwfn import Compressed, Config, GaussianNetwork, Progress, Result, WeightError, compress, load
from pwfn.bayes.fold_batchnorm import fold_batchnorm, lighten, round_rest
from pwfn.config import FinishConfig, Rest
from pwfn.export.onnx import to_onnx
from pwfn.file.format import dumps
from pwfn.run.checkpoint import Store
from pwfn.zoo.data import Repeated

CONVOLUTIONS: dict[int, tuple[type, type]] = {
    1: (nn.Conv1d, nn.BatchNorm1d),
    2: (nn.Conv2d, nn.BatchNorm2d),
    3: (nn.Conv3d, nn.BatchNorm3d),
}


def random_norm(layer: Any, seed: int = 0) -> Any:
    """A BatchNorm layer with statistics and parameters of all sizes, in evaluation mode."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for tensor in (layer.weight, layer.bias, layer.running_mean):
            tensor.copy_(torch.randn(tensor.shape, generator=generator))
        layer.running_var.copy_(torch.randn(layer.running_var.shape, generator=generator).exp())
        layer.num_batches_tracked.fill_(7)
    return layer.eval()


def state(model: nn.Module) -> dict[str, Any]:
    return copy.deepcopy(model.state_dict())


def same(one: dict[str, Any], two: dict[str, Any]) -> bool:
    return one.keys() == two.keys() and all(torch.equal(one[name], two[name]) for name in one)


# Folding


def test_one_channel_by_hand() -> None:
    """scale = 2 / sqrt(15.75 + 0.25) = 1/2; gamma' = scale * sqrt(1.25); beta' = 1 - 3 * 1/2."""
    layer = nn.BatchNorm1d(1, eps=0.25).double().eval()
    for tensor, value in zip(
        (layer.weight.data, layer.bias.data, layer.running_mean, layer.running_var),
        (2.0, 1.0, 3.0, 15.75),
        strict=True,
    ):
        assert tensor is not None
        tensor.fill_(value)
    x = torch.tensor([[-4.0], [3.0], [7.0]], dtype=torch.float64)
    assert layer(x).flatten().tolist() == [-2.5, 1.0, 3.0]
    assert fold_batchnorm(layer) == 1
    assert layer.weight.item() == pytest.approx(0.5 * 1.25**0.5, rel=1e-15)
    assert layer.bias.item() == -0.5
    assert {name: value.item() for name, value in layer.named_buffers()} == {
        "running_mean": 0,
        "running_var": 1,
        "num_batches_tracked": 0,
    }
    assert layer(x).flatten().tolist() == pytest.approx([-2.5, 1.0, 3.0], rel=1e-15)


@pytest.mark.parametrize("dimensions", [1, 2, 3])
@pytest.mark.parametrize("channels", [1, 7, 33])
def test_it_is_the_function_that_torch_fuses_into_the_convolution(dimensions: int, channels: int) -> None:
    torch.manual_seed(dimensions)
    convolution, norm = CONVOLUTIONS[dimensions]
    model = nn.Sequential(convolution(3, channels, 3), random_norm(norm(channels))).eval()
    fused = fuse_conv_bn_eval(model[0], model[1])
    x = torch.randn(5, 3, *[6] * dimensions)
    assert fold_batchnorm(model) == 1
    assert not bool(model[1].running_mean.any())
    with torch.no_grad():
        expected = fused(x)
        torch.testing.assert_close(model(x), expected, rtol=1e-5, atol=1e-5 * float(expected.abs().max()))


@settings(deadline=None, max_examples=60)
@given(
    seed=st.integers(0, 10**6),
    channels=st.integers(1, 65),
    eps=st.sampled_from([0.0, 1e-12, 1e-5, 1e-3, 0.9, 1.0, 2.5]),
)
def test_it_stays_the_same_function_and_folding_again_changes_no_bit(
    seed: int, channels: int, eps: float
) -> None:
    layer = random_norm(nn.BatchNorm1d(channels, eps=eps).double(), seed)
    x = torch.randn(9, channels, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
    with torch.no_grad():
        before = layer(x)
        fold_batchnorm(layer)
        torch.testing.assert_close(layer(x), before, rtol=1e-12, atol=1e-12)
    once = state(layer)
    fold_batchnorm(layer)
    assert same(state(layer), once)


def test_in_training_mode_it_is_another_function() -> None:
    """So the file is for inference, as the docs have it."""
    layer = random_norm(nn.BatchNorm1d(4)).train()
    x = torch.randn(16, 4, generator=torch.Generator().manual_seed(1))
    before = copy.deepcopy(layer)(x)
    fold_batchnorm(layer)
    assert not torch.allclose(layer(x), before, rtol=0.05, atol=0.05)


class Twins(nn.Module):
    """Two layers with statistics of their own, and one scale for both."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = random_norm(nn.BatchNorm1d(3), 1), random_norm(nn.BatchNorm1d(3), 2)
        self.two.weight = self.one.weight


def hollow() -> nn.Module:
    """The scale is compressed, so that it is not in the model."""
    model = nn.Sequential(nn.Linear(3, 4), random_norm(nn.BatchNorm1d(4)))
    return GaussianNetwork(model, Config().override({"layout.include": ["1.weight"]})).model


LEFT_ALONE = {
    "no scale and shift": lambda: nn.BatchNorm1d(3, affine=False),
    "no statistics": lambda: nn.BatchNorm1d(3, track_running_stats=False),
    "a scale for two": Twins,
    "a compressed scale": hollow,
    "a scale that is computed": lambda: weight_norm(random_norm(nn.BatchNorm1d(3)), dim=None),
    "instance normalisation": lambda: nn.InstanceNorm1d(3, affine=True, track_running_stats=True),
    "layer normalisation": lambda: nn.LayerNorm(3),
}


@pytest.mark.parametrize("case", LEFT_ALONE)
def test_what_cannot_be_folded_is_left_as_it_is(case: str) -> None:
    model = LEFT_ALONE[case]()
    for buffer in model.buffers():
        buffer += 2
    before = state(model)
    assert before
    assert fold_batchnorm(model) == 0
    assert same(state(model), before)


def test_a_layer_with_two_names_is_folded_once_and_others_beside_those_left() -> None:
    layer = random_norm(nn.BatchNorm1d(3))
    model = nn.Sequential(layer, nn.BatchNorm1d(3, affine=False), layer, random_norm(nn.BatchNorm1d(3), 5))
    model.eval()
    x = torch.randn(4, 3, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        before = model(x)
        assert fold_batchnorm(model) == 2
        torch.testing.assert_close(model(x), before, rtol=1e-5, atol=1e-5)


def test_statistics_that_are_no_longer_tracked_are_folded_too() -> None:
    layer = random_norm(nn.BatchNorm1d(3))
    layer.track_running_stats = False
    x = torch.randn(4, 3, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        before = layer(x)
        assert fold_batchnorm(layer) == 1
        torch.testing.assert_close(layer(x), before, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_tensors_keep_their_type(dtype: torch.dtype) -> None:
    layer = random_norm(nn.BatchNorm1d(5).to(dtype))
    wide = copy.deepcopy(layer).double()
    fold_batchnorm(wide)
    fold_batchnorm(layer)
    assert {tensor.dtype for tensor in layer.state_dict().values()} == {dtype, torch.int64}
    assert torch.equal(layer.weight, wide.weight.to(dtype))
    assert torch.equal(layer.bias, wide.bias.to(dtype))


def test_a_scale_that_is_not_finite_is_refused_and_the_layer_left_as_it_was() -> None:
    model = nn.Sequential(nn.Linear(2, 2), random_norm(nn.BatchNorm1d(2, eps=0.0)))
    model[1].running_var[1] = 0
    before = state(model)
    words = r"BatchNorm '1' divides by the root of 0, and a scale and shift .* not finite: set finish\.fold_b"
    with pytest.raises(WeightError, match=words):
        fold_batchnorm(model)
    assert same(state(model), before)


# Rounding


class Kinds(nn.Module):
    """A tensor of every kind that a state dict may hold, and one that it does not."""

    def __init__(self) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        self.weight = nn.Parameter(torch.randn(127, generator=generator))
        self.tied = self.weight
        self.register_buffer("wide", torch.randn(3, 5, generator=generator, dtype=torch.float64))
        self.register_buffer("short", torch.randn(9, generator=generator).half())
        self.register_buffer("count", torch.arange(5) * 100_003)
        self.register_buffer("mask", torch.tensor([True, False]))
        self.register_buffer("odd", torch.tensor([torch.inf, -torch.inf, torch.nan, -0.0]))
        self.register_buffer("passing", torch.randn(3, generator=generator), persistent=False)

    def get_extra_state(self) -> dict[str, int]:
        return {"seen": 3}

    def set_extra_state(self, state: dict[str, int]) -> None:
        assert state == {"seen": 3}


@pytest.mark.parametrize(("rest", "dtype"), [("float16", torch.float16), ("bfloat16", torch.bfloat16)])
def test_every_number_becomes_the_nearest_that_the_type_holds(rest: str, dtype: torch.dtype) -> None:
    model, before = Kinds(), Kinds()
    round_rest(model, Rest(rest))
    for name in ("weight", "wide"):
        found, exact = getattr(model, name).detach(), getattr(before, name).detach()
        assert found.dtype == exact.dtype
        assert torch.equal(found, exact.to(dtype).to(exact.dtype))
        assert not torch.equal(found, exact)
        assert float((found / exact - 1).abs().max()) <= (2**-11 if dtype == torch.float16 else 2**-8)
    assert model.tied is model.weight
    for name in ("short", "count", "mask", "passing"):
        assert torch.equal(getattr(model, name), getattr(before, name))
    assert torch.equal(model.odd[:2], before.odd[:2])
    assert bool(model.odd[2].isnan())
    once = {name: value.clone() for name, value in model.named_parameters()}
    round_rest(model, Rest(rest))
    assert same(dict(model.named_parameters()), once)


def test_as_they_are_means_every_bit() -> None:
    model, before = Kinds(), Kinds()
    lighten(model, FinishConfig())
    assert torch.equal(model.weight, before.weight)
    assert torch.equal(model.wide, before.wide)
    wanted = {"fold_batchnorm": True}, {"rest": "float16"}, {"rest": "bfloat16"}, {}
    assert [FinishConfig(**each).lightens for each in wanted] == [True, True, True, False]


def test_a_number_too_large_is_named_with_the_way_out_and_nothing_is_changed() -> None:
    model = nn.Sequential(nn.Linear(3, 3), random_norm(nn.BatchNorm1d(3)))
    model[1].running_var[1] = 131_072.0
    before = state(model)
    words = r'^1\.running_var holds 131072, and float16 ends at 65504: set finish\.rest = "bfloat16"$'
    with pytest.raises(WeightError, match=words):
        round_rest(model, Rest.FLOAT16)
    assert same(state(model), before)
    round_rest(model, Rest.BFLOAT16)
    assert model[1].running_var[1] == 131_072


def test_a_number_too_large_for_bfloat16_stays_in_float32() -> None:
    model = nn.LayerNorm(2)
    nn.init.constant_(model.bias, 3.4e38)
    with pytest.raises(WeightError, match=r'bias holds 3\.4e\+38, and .* set finish\.rest = "float32"$'):
        round_rest(model, Rest.BFLOAT16)


def test_the_largest_number_of_float16_is_not_too_large() -> None:
    model = nn.LayerNorm(1)
    nn.init.constant_(model.bias, 65_504.0)
    round_rest(model, Rest.FLOAT16)
    assert model.bias.item() == 65_504


def dead_channel(eps: float) -> nn.BatchNorm1d:
    layer: nn.BatchNorm1d = random_norm(nn.BatchNorm1d(3, eps=eps))
    assert layer.running_var is not None
    layer.running_var[2] = 1e-9
    layer.weight.data[2] = 0.01
    return layer


def test_a_tiny_variance_may_vanish_where_eps_takes_its_place() -> None:
    """sqrt(1e-5 + 1e-9) is sqrt(1e-5) to 5 parts in 100,000."""
    layer = dead_channel(1e-5)
    x = torch.randn(6, 3, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        before = layer(x)
        round_rest(layer, Rest.FLOAT16)
        assert layer.running_var is not None
        assert layer.running_var[2] == 0
        torch.testing.assert_close(layer(x), before, rtol=5e-3, atol=5e-3 * float(before.abs().max()))


@pytest.mark.parametrize("eps", [0.0, 1e-12])
def test_a_tiny_variance_that_its_layer_divides_by_is_named_with_both_ways_out(eps: float) -> None:
    layer = dead_channel(eps)
    words = (
        r"^running_var holds 1e-09, which float16 has as 0, and the layer divides by its root "
        rf'\(eps is {eps:g}\): set finish\.rest = "bfloat16", or finish\.fold_batchnorm = true$'
    )
    with pytest.raises(WeightError, match=words):
        round_rest(copy.deepcopy(layer), Rest.FLOAT16)
    round_rest(copy.deepcopy(layer), Rest.BFLOAT16)
    lighten(layer, FinishConfig(fold_batchnorm=True, rest=Rest.FLOAT16))
    assert layer.running_var is not None
    assert layer.running_var.tolist() == [1, 1, 1]


@settings(deadline=None, max_examples=60)
@given(eps=st.sampled_from([0.0, 1e-5, 1e-3]), power=st.integers(-120, 120), share=st.floats(1, 2))
def test_bfloat16_takes_every_variance_of_float32(eps: float, power: int, share: float) -> None:
    layer = nn.BatchNorm1d(1, eps=eps)
    assert layer.running_var is not None
    layer.running_var[0] = share * 2.0**power
    round_rest(layer, Rest.BFLOAT16)
    assert layer.running_var[0] == pytest.approx(share * 2.0**power, rel=2**-8)


def test_folding_comes_before_rounding() -> None:
    """Rounded statistics that are folded then are not 16-bit numbers any more."""
    layer = random_norm(nn.BatchNorm1d(33))
    lighten(layer, FinishConfig(fold_batchnorm=True, rest=Rest.BFLOAT16))
    floats = [tensor for tensor in layer.state_dict().values() if tensor.is_floating_point()]
    assert len(floats) == 4
    assert all(torch.equal(tensor, tensor.bfloat16().float()) for tensor in floats)


# In a run


class Net(nn.Module):
    """Two convolutions with BatchNorm, for 8×8 images of three classes."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm = nn.Conv2d(1, 16, 3, padding=1, bias=False), nn.BatchNorm2d(16)
        self.second, self.other = nn.Conv2d(16, 24, 3, padding=1, bias=False), nn.BatchNorm2d(24)
        self.head = nn.Linear(24, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.norm(self.first(x)))
        return self.head(F.relu(self.other(self.second(x))).mean((2, 3)))


def bars(count: int, seed: int, scale: float = 1.0) -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(seed)
    y = torch.randint(0, 3, (count,), generator=generator)
    x = 0.3 * torch.randn(count, 1, 8, 8, generator=generator)
    x[torch.arange(count), 0, :, 2 * y + 1] += 1.0
    return list(zip((scale * x).split(32), y.split(32), strict=True))


TRAIN, VAL = bars(128, 0), bars(96, 1)
METHODS = ["pwfn", "lsq", "baseline"]
FOLDED = {"finish.fold_batchnorm": True}
SMALL = {**FOLDED, "finish.rest": "bfloat16"}


@pytest.fixture(scope="module")
def net() -> nn.Module:
    torch.manual_seed(0)
    model = Net()
    optimizer = torch.optim.Adam(model.parameters(), 5e-3)
    for x, y in 6 * TRAIN:
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        optimizer.step()
    return model.eval()


def brief(method: str, changes: dict[str, Any] | None = None) -> Config:
    short = {
        "schedule.fractions": [0.5, 1.0],
        "schedule.epochs_per_round": 0.5,
        "schedule.epochs": 1.0,
        "finish.reestimate_batchnorm": True,
        "finish.polish_epochs": 0.5,
    }
    return Config.preset("recommended", method).override({**short, **(changes or {})})


_results: dict[tuple[str, str], Result] = {}


def result(net: nn.Module, method: str, changes: dict[str, Any] | None = None) -> Result:
    """One run each, made once; nothing may change it."""
    key = method, repr(changes)
    if key not in _results:
        _results[key] = compress(net, Repeated(TRAIN), VAL, brief(method, changes))
    return _results[key]


@pytest.mark.parametrize("method", METHODS)
def test_all_else_of_a_run_is_the_same_to_the_bit(method: str, net: nn.Module) -> None:
    plain, small = result(net, method), result(net, method, SMALL)
    assert torch.equal(plain.compressed.values(), small.compressed.values())
    if method == "pwfn":
        assert torch.equal(plain.compressed.sigma, small.compressed.sigma)
    assert plain.before == small.before
    assert [done.scores for done in plain.rounds] == [done.scores for done in small.rounds]
    by_hand = plain.model()
    lighten(by_hand, FinishConfig(fold_batchnorm=True, rest=Rest.BFLOAT16))
    for name, value in small.compressed.untouched.items():
        assert torch.equal(by_hand.state_dict()[name], value)
    assert bool(plain.compressed.untouched["norm.running_mean"].any())


@pytest.mark.parametrize("method", METHODS)
def test_a_folded_network_is_the_same_function(method: str, net: nn.Module) -> None:
    plain, folded = result(net, method), result(net, method, FOLDED)
    with torch.no_grad():
        for x, _ in VAL:
            expected = plain.model()(x)
            scale = float(expected.abs().max())
            torch.testing.assert_close(folded.model()(x), expected, rtol=1e-5, atol=1e-5 * scale)
    assert plain.after is not None
    assert folded.after is not None
    assert folded.after.metric == plain.after.metric
    assert folded.after.loss == pytest.approx(plain.after.loss, rel=1e-5)


@pytest.mark.parametrize("method", METHODS)
def test_the_file_is_smaller_and_holds_a_scale_and_a_shift_alone(
    method: str, net: nn.Module, tmp_path: Path
) -> None:
    sizes = []
    for number, changes in enumerate((None, FOLDED, {**FOLDED, "finish.rest": "float16"}, SMALL)):
        path = tmp_path / f"{number}.pwfn"
        sizes.append(result(net, method, changes).compressed.save(path))
        held = load(path).untouched
        for layer in ("norm", "other") if changes else ():
            assert not bool(held[f"{layer}.running_mean"].any())
            assert bool((held[f"{layer}.running_var"] == 1).all())
            assert held[f"{layer}.num_batches_tracked"] == 0
    assert sizes == sorted(sizes, reverse=True)
    assert (
        sizes[0] - sizes[1] > 40 * 4
    )  # of 40 channels with two numbers less each, which zstd had made smaller


class StopError(Exception):
    """Ends a run in its midst."""


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("finished", [0, 1, 2, 3, 4])
def test_a_run_stopped_between_any_two_steps_of_the_end_gives_the_same_file(
    method: str, finished: int, net: nn.Module, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = brief(method, SMALL)
    whole = dumps(result(net, method, SMALL).compressed)
    advance = Run.advance

    def stopping(run: Run) -> None:
        advance(run)
        if len(run.progress.rounds) == len(run.plan) and run.progress.finished == finished:
            raise StopError

    monkeypatch.setattr(Run, "advance", stopping)
    with pytest.raises(StopError) as caught:
        compress(net, Repeated(TRAIN), VAL, config)
    monkeypatch.undo()
    progress: Progress = caught.value.progress  # type: ignore[attr-defined]  # every error has it
    assert progress.finished == finished
    store = Store(tmp_path, {"settings": config.to_dict()})
    store.save(progress)
    again = compress(net, Repeated(TRAIN), VAL, config, resume=store.newest())
    assert dumps(again.compressed) == whole


def test_a_run_that_had_three_steps_of_the_end_done_takes_the_fourth(
    net: nn.Module, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As a checkpoint of an earlier version has it, and a run that is gone on with for a smaller file."""
    seen: list[Progress] = []
    with monkeypatch.context() as patched:
        patched.setattr(Run, "lighten", lambda run: seen.append(copy.deepcopy(run.progress)))
        compress(net, Repeated(TRAIN), VAL, brief("pwfn"))
    assert seen[0].finished == 3
    small = compress(net, Repeated(TRAIN), VAL, brief("pwfn", SMALL), resume=seen[0])
    assert dumps(small.compressed) == dumps(result(net, "pwfn", SMALL).compressed)


def test_states_on_the_way_are_not_lightened_and_the_end_is_whichever_is_chosen(
    net: nn.Module, tmp_path: Path
) -> None:
    found = compress(net, Repeated(TRAIN), VAL, brief("pwfn", {**SMALL, "target.max_drop": 100.0}))
    assert len(found.states) == 2
    for state in found.states:
        (tmp_path / "state.pwfn").write_bytes(state.content)
        assert bool(load(tmp_path / "state.pwfn").untouched["norm.running_mean"].any())
    assert not bool(found.compressed.untouched["norm.running_mean"].any())


def test_what_float16_cannot_hold_from_the_start_is_told_before_the_work(net: nn.Module) -> None:
    model = copy.deepcopy(net)
    assert isinstance(model.norm, nn.BatchNorm2d)
    model.norm.running_mean[3] = 1e6  # type: ignore[index]  # it has statistics
    with pytest.raises(WeightError, match=r"^norm\.running_mean holds 1e\+06, and float16 ends") as caught:
        compress(model, TRAIN, VAL, brief("pwfn", {"finish.rest": "float16"}))
    assert caught.value.progress.rounds == []


def test_what_float16_cannot_hold_in_the_end_costs_no_round(net: nn.Module) -> None:
    """The data are a thousand times larger than those that the network's statistics are of."""
    loud = Repeated(bars(128, 0, scale=1000.0))
    changes = {"finish.rest": "float16", "finish.polish_epochs": 0.0, "training.learning_rate": 1e-9}
    with pytest.raises(
        WeightError, match=r"^norm\.running_var holds .* finish\.rest = \"bfloat16\"$"
    ) as caught:
        compress(net, loud, None, brief("pwfn", changes))
    progress = caught.value.progress
    assert (len(progress.rounds), progress.finished) == (2, 3)
    wide = brief("pwfn", {**changes, "finish.rest": "bfloat16"})
    again, whole = (compress(net, loud, None, wide, resume=each) for each in (progress, None))
    assert same(again.compressed.dense_state_dict(), whole.compressed.dense_state_dict())


def test_quantisers_of_activations_are_rounded_with_the_rest(net: nn.Module, tmp_path: Path) -> None:
    made = result(net, "lsq", {**SMALL, "quantiser.activation_bits": 4})
    steps = [v for name, v in made.compressed.untouched.items() if name.endswith(".step")]
    assert steps
    assert all(torch.equal(step, step.bfloat16().float()) for step in steps)
    made.save(tmp_path / "model.pwfn")
    loaded = load(tmp_path / "model.pwfn").apply_to(Net()).eval()
    with torch.no_grad():
        assert all(torch.equal(loaded(x), made.model()(x)) for x, _ in VAL)


def test_indices_and_onnx_take_a_lightened_network_as_any_other(net: nn.Module, tmp_path: Path) -> None:
    compressed: Compressed = result(net, "pwfn", SMALL).compressed
    x = VAL[0][0]
    with torch.no_grad():
        dense = compressed.apply_to(Net()).eval()(x)
        indexed = compressed.apply_to(Net(), weights="indices").eval()(x)
    torch.testing.assert_close(indexed, dense, rtol=1e-5, atol=1e-5)
    session = pytest.importorskip("onnxruntime")
    to_onnx(compressed, Net(), x, tmp_path / "model.onnx")
    run = session.InferenceSession(str(tmp_path / "model.onnx"))
    found = run.run(None, {run.get_inputs()[0].name: x.numpy()})[0]
    torch.testing.assert_close(torch.from_numpy(found), dense, rtol=1e-4, atol=1e-4)
