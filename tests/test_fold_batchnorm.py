"""BatchNorm folded into scale and shift, uncompressed tensors rounded to 16 bits, and both in a run."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from cases import convnet, numbers
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn.utils.fusion import fuse_conv_bn_eval
from torch.nn.utils.parametrizations import weight_norm

from pwfn import Config, DataError, GaussianNetwork, PwfnError, Result, WeightError, compress, load, loads
from pwfn.config import FinishConfig, UncompressedDtype
from pwfn.file.fold_batchnorm import fold_batchnorm, round_uncompressed, shrink_uncompressed
from pwfn.file.format import dumps
from pwfn.zoo.data import Repeated

FLOAT16, BFLOAT16, TF32 = UncompressedDtype.FLOAT16, UncompressedDtype.BFLOAT16, UncompressedDtype.TF32


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
    layer: Any = nn.BatchNorm1d(1, eps=0.25).double().eval()
    for name, value in {"weight": 2.0, "bias": 1.0, "running_mean": 3.0, "running_var": 15.75}.items():
        getattr(layer, name).data.fill_(value)
    x = torch.tensor([[-4.0], [3.0], [7.0]], dtype=torch.float64)
    assert layer(x).flatten().tolist() == [-2.5, 1.0, 3.0]
    assert fold_batchnorm(layer) == 1
    assert layer.weight.item() == pytest.approx(0.5 * 1.25**0.5, rel=1e-15)
    assert layer.bias.item() == -0.5
    assert [buffer.item() for buffer in layer.buffers()] == [0, 1, 0]  # mean, variance, batches
    assert layer(x).flatten().tolist() == pytest.approx([-2.5, 1.0, 3.0], rel=1e-15)


@pytest.mark.parametrize(
    ("convolution", "norm", "dimensions"),
    [(nn.Conv1d, nn.BatchNorm1d, 1), (nn.Conv2d, nn.BatchNorm2d, 2), (nn.Conv3d, nn.BatchNorm3d, 3)],
)
def test_it_is_the_function_that_torch_fuses_into_the_convolution(
    convolution: Any, norm: Any, dimensions: int
) -> None:
    torch.manual_seed(dimensions)
    model = nn.Sequential(convolution(3, 33, 3), random_norm(norm(33))).eval()
    x = torch.randn(5, 3, *[6] * dimensions)
    with torch.no_grad():
        expected = fuse_conv_bn_eval(model[0], model[1])(x)
        assert fold_batchnorm(model) == 1
        torch.testing.assert_close(model(x), expected, rtol=1e-5, atol=1e-5 * float(expected.abs().max()))


@settings(deadline=None, max_examples=60)
@example(seed=0, channels=1, eps=1.0, tracked=True)  # gamma / sqrt(2) * sqrt(2) is not gamma here
@given(
    seed=st.integers(0, 10**6),
    channels=st.integers(1, 65),
    eps=st.sampled_from([0.0, 1e-12, 1e-5, 1e-3, 0.9, 1.0, 2.5]),
    tracked=st.booleans(),
)
def test_it_stays_the_same_function_and_folding_again_changes_no_bit(
    seed: int, channels: int, eps: float, tracked: bool
) -> None:
    layer = random_norm(nn.BatchNorm1d(channels, eps=eps).double(), seed)
    layer.track_running_stats = tracked  # evaluation mode uses the statistics either way
    x = numbers(9, channels, seed=seed).double()
    with torch.no_grad():
        before = layer(x)
        assert fold_batchnorm(layer) == 1
        torch.testing.assert_close(layer(x), before, rtol=1e-12, atol=1e-12)
    once = state(layer)
    fold_batchnorm(layer)
    assert same(state(layer), once)


def shared_scale() -> nn.Module:
    model = nn.Sequential(random_norm(nn.BatchNorm1d(3), 1), random_norm(nn.BatchNorm1d(3), 2))
    model[1].weight = model[0].weight
    return model


def compressed_scale() -> nn.Module:
    model = nn.Sequential(nn.Linear(3, 4), random_norm(nn.BatchNorm1d(4)))
    return GaussianNetwork(model, Config().override({"layout.include": ["1.weight"]})).model


SKIPPED = {
    "no scale and shift": lambda: nn.BatchNorm1d(3, affine=False),
    "no statistics": lambda: nn.BatchNorm1d(3, track_running_stats=False),
    "shared scale": shared_scale,
    "compressed scale": compressed_scale,
    "computed scale": lambda: weight_norm(random_norm(nn.BatchNorm1d(3)), dim=None),
    "instance norm": lambda: nn.InstanceNorm1d(3, affine=True, track_running_stats=True),
    "layer norm": lambda: nn.LayerNorm(3),
}


@pytest.mark.parametrize("case", SKIPPED)
def test_what_cannot_be_folded_does_not_change(case: str) -> None:
    model = SKIPPED[case]()
    for buffer in model.buffers():
        buffer += 2
    before = state(model)
    assert before
    assert fold_batchnorm(model) == 0
    assert same(state(model), before)


def test_a_layer_with_two_names_is_folded_once_and_others_beside_those_skipped() -> None:
    layer = random_norm(nn.BatchNorm1d(3))
    model = nn.Sequential(layer, nn.BatchNorm1d(3, affine=False), layer, random_norm(nn.BatchNorm1d(3), 5))
    model.eval()
    x = numbers(4, 3)
    with torch.no_grad():
        before = model(x)
        assert fold_batchnorm(model) == 2
        torch.testing.assert_close(model(x), before, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_tensors_keep_their_type(dtype: torch.dtype) -> None:
    layer = random_norm(nn.BatchNorm1d(5).to(dtype))
    wide = copy.deepcopy(layer).double()
    fold_batchnorm(wide)
    fold_batchnorm(layer)
    assert {tensor.dtype for tensor in layer.state_dict().values()} == {dtype, torch.int64}
    assert torch.equal(layer.weight, wide.weight.to(dtype))
    assert torch.equal(layer.bias, wide.bias.to(dtype))


def test_a_scale_that_is_not_finite_is_an_error_and_nothing_changes() -> None:
    model = nn.Sequential(nn.Linear(2, 2), random_norm(nn.BatchNorm1d(2, eps=0.0)))
    model[1].running_var[1] = 0
    before = state(model)
    with pytest.raises(WeightError, match=r"'1'.*finish\.fold_batchnorm = false"):
        fold_batchnorm(model)
    assert same(state(model), before)


# Rounding


class Kinds(nn.Module):
    """A tensor of every kind that a state dict may hold, and one that it does not."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(numbers(127))
        self.tied = self.weight
        self.register_buffer("wide", numbers(3, 5).double() / 3)
        self.register_buffer("short", numbers(9).half())
        self.register_buffer("count", torch.arange(5) * 100_003)
        self.register_buffer("mask", torch.tensor([True, False]))
        self.register_buffer("odd", torch.tensor([torch.inf, -torch.inf, torch.nan, -0.0]))
        self.register_buffer("passing", numbers(3), persistent=False)

    def get_extra_state(self) -> dict[str, int]:
        return {"seen": 3}

    def set_extra_state(self, state: dict[str, int]) -> None:
        assert state == {"seen": 3}


@pytest.mark.parametrize(
    ("name", "dtype", "error"), [(FLOAT16, torch.float16, 2**-11), (BFLOAT16, torch.bfloat16, 2**-8)]
)
def test_every_number_becomes_the_nearest_of_the_type(
    name: UncompressedDtype, dtype: torch.dtype, error: float
) -> None:
    model, before = Kinds(), Kinds()
    round_uncompressed(model, name)
    for found, exact in ((model.weight.detach(), before.weight.detach()), (model.wide, before.wide)):
        assert found.dtype == exact.dtype
        assert torch.equal(found, exact.to(dtype).to(exact.dtype))
        assert 0 < float((found / exact - 1).abs().max()) <= error
    assert model.tied is model.weight
    for unchanged in ("short", "count", "mask", "passing"):
        assert torch.equal(getattr(model, unchanged), getattr(before, unchanged))
    assert torch.equal(model.odd[:2], before.odd[:2])
    assert bool(model.odd[2].isnan())


def test_float32_without_folding_changes_no_bit() -> None:
    model, before = Kinds(), Kinds()
    exact = FinishConfig(fold_batchnorm=False, uncompressed_dtype=UncompressedDtype.FLOAT32)
    shrink_uncompressed(model, exact)
    assert torch.equal(model.weight, before.weight)
    assert torch.equal(model.wide, before.wide)
    layer = random_norm(nn.BatchNorm1d(33))
    kept = state(layer)
    shrink_uncompressed(layer, exact)
    assert same(state(layer), kept)


@pytest.mark.parametrize("power", [-140, -30, 0, 30, 126])
def test_tf32_has_11_significant_bits_and_the_range_of_float32(power: int) -> None:
    """Where float16 has the range it is the same; a variance of any size keeps its relative precision."""
    layer: Any = nn.BatchNorm1d(500)
    exact = numbers(500).abs().clamp(0.5, 2) * 2.0**power
    layer.running_var.copy_(exact)
    round_uncompressed(layer, TF32)
    wanted = (exact.double() * 2.0**-power).half().double() * 2.0**power
    assert torch.equal(layer.running_var.double(), wanted.float().double())


def test_tf32_changes_no_number_that_is_not_finite_or_would_not_be() -> None:
    odd = torch.tensor([torch.inf, -torch.inf, 0.0, -0.0, torch.finfo(torch.float32).max])
    layer = nn.Module()
    layer.register_buffer("odd", odd.clone())
    layer.register_buffer("nan", torch.tensor([torch.nan, 1.0]))
    round_uncompressed(layer, TF32)
    assert torch.equal(layer.state_dict()["odd"].view(torch.int32), odd.view(torch.int32))
    assert layer.state_dict()["nan"].isnan().tolist() == [True, False]


@pytest.mark.parametrize("norm", [nn.LayerNorm, nn.BatchNorm1d, partial(nn.GroupNorm, 1)])
def test_a_shift_is_no_finer_than_at_its_root_mean_square(norm: Any) -> None:
    """Root mean square 1.5, between 1 and 2: bfloat16 has the step 1/128 there, and 1/64 from 2 to 4."""
    layer = norm(4)
    values = torch.tensor([1 / 1000, 0.5 + 1 / 300, -1.9, 2.26])
    layer.bias.data.copy_(values)
    layer.weight.data.copy_(values)
    round_uncompressed(layer, BFLOAT16)
    assert layer.bias.tolist() == [0, 64 / 128, -243 / 128, 145 / 64]
    assert torch.equal(layer.weight, values.bfloat16().float())


@pytest.mark.parametrize(("value", "dtype"), [(65_504.0, FLOAT16), (131_072.0, BFLOAT16)])
def test_large_numbers_of_the_type_stay(value: float, dtype: UncompressedDtype) -> None:
    layer = nn.LayerNorm(1)
    nn.init.constant_(layer.bias, value)
    round_uncompressed(layer, dtype)
    assert layer.bias.item() == value


@pytest.mark.parametrize(
    ("value", "dtype", "wider"), [(131_072.0, FLOAT16, "bfloat16"), (3.4e38, BFLOAT16, "float32")]
)
def test_a_number_too_large_is_an_error_and_nothing_changes(
    value: float, dtype: UncompressedDtype, wider: str
) -> None:
    model = nn.Sequential(nn.Linear(3, 3), nn.LayerNorm(3))
    nn.init.constant_(model[1].bias, value)
    before = state(model)
    with pytest.raises(WeightError, match=rf'1\.bias.*finish\.uncompressed_dtype = "{wider}"'):
        round_uncompressed(model, dtype)
    assert same(state(model), before)


def dead_channel(eps: float) -> Any:
    layer = random_norm(nn.BatchNorm1d(3, eps=eps))
    layer.running_var[2] = 1e-9
    layer.weight.data[2] = 0.01
    return layer


def test_a_tiny_variance_may_vanish_where_eps_is_larger() -> None:
    """sqrt(1e-5 + 1e-9) is sqrt(1e-5) to 5 parts in 100,000."""
    layer, x = dead_channel(1e-5), numbers(6, 3)
    with torch.no_grad():
        before = layer(x)
        round_uncompressed(layer, FLOAT16)
        assert layer.running_var[2] == 0
        torch.testing.assert_close(layer(x), before, rtol=5e-3, atol=5e-3 * float(before.abs().max()))


@pytest.mark.parametrize("eps", [0.0, 1e-12])
def test_a_tiny_variance_that_its_layer_divides_by_is_an_error_with_two_ways_out(eps: float) -> None:
    layer = dead_channel(eps)
    with pytest.raises(WeightError, match=r'running_var.* = "bfloat16", or finish\.fold_batchnorm = true'):
        round_uncompressed(copy.deepcopy(layer), FLOAT16)
    round_uncompressed(copy.deepcopy(layer), BFLOAT16)
    shrink_uncompressed(layer, FinishConfig(fold_batchnorm=True, uncompressed_dtype=FLOAT16))
    assert layer.running_var.tolist() == [1, 1, 1]


@settings(deadline=None, max_examples=60)
@given(eps=st.sampled_from([0.0, 1e-5, 1e-3]), power=st.integers(-120, 120), share=st.floats(1, 2))
def test_bfloat16_takes_every_variance_of_float32(eps: float, power: int, share: float) -> None:
    layer: Any = nn.BatchNorm1d(1, eps=eps)
    layer.running_var[0] = share * 2.0**power
    round_uncompressed(layer, BFLOAT16)
    assert layer.running_var[0] == pytest.approx(share * 2.0**power, rel=2**-8)


def test_folding_comes_before_rounding() -> None:
    """Rounded statistics that are folded afterwards are no 16-bit numbers."""
    layer = random_norm(nn.BatchNorm1d(33))
    shrink_uncompressed(layer, FinishConfig(fold_batchnorm=True, uncompressed_dtype=BFLOAT16))
    floats = [tensor for tensor in layer.state_dict().values() if tensor.is_floating_point()]
    assert len(floats) == 4
    assert all(torch.equal(tensor, tensor.bfloat16().float()) for tensor in floats)


# In a run


def data(seed: int, scale: float = 1.0) -> list[tuple[Tensor, Tensor]]:
    images = [numbers(32, 3, 4, 4, seed=seed + i) for i in range(4)]
    return [(scale * x, x.mean((2, 3)).argmax(1)) for x in images]


TRAIN, VAL = data(0), data(10)
METHODS = {  # with as many training phases as each has
    "pwfn": {"schedule.fractions": [0.5, 1.0], "schedule.epochs_per_round": [0.25, 0.5]},
    "lsq": {"schedule.epochs_per_round": [0.75]},
}
EXACT = {"finish.fold_batchnorm": False, "finish.uncompressed_dtype": "float32"}
FOLDED = {"finish.fold_batchnorm": True}
SMALL = {**FOLDED, "finish.uncompressed_dtype": "bfloat16"}


@pytest.fixture(scope="module")
def net() -> Any:
    torch.manual_seed(0)
    model: Any = convnet()
    random_norm(model[1])
    return model.eval()


def brief(method: str, changes: dict[str, Any] | None = None) -> Config:
    finish = {"finish.reestimate_epochs": 1.0, "finish.polish_epochs": 0.5, **EXACT}
    return Config.preset("recommended", method).override({**METHODS[method], **finish, **(changes or {})})


_results: dict[tuple[str, str], Result] = {}


def result(net: Any, method: str, changes: dict[str, Any] | None = None) -> Result:
    """One run each, made once and never changed."""
    key = method, repr(changes)
    if key not in _results:
        _results[key] = compress(net, Repeated(TRAIN), VAL, brief(method, changes))
    return _results[key]


@pytest.mark.parametrize("method", METHODS)
def test_only_the_uncompressed_tensors_of_a_run_change(method: str, net: Any) -> None:
    plain, small = result(net, method), result(net, method, SMALL)
    assert torch.equal(plain.compressed.values(), small.compressed.values())
    if method == "pwfn":
        assert torch.equal(plain.compressed.sigma, small.compressed.sigma)
    assert plain.before == small.before
    assert [done.scores for done in plain.rounds] == [done.scores for done in small.rounds]
    by_hand = plain.model()
    shrink_uncompressed(by_hand, brief(method, SMALL).finish)
    for name, value in small.compressed.untouched.items():
        assert torch.equal(by_hand.state_dict()[name], value)
    assert bool(plain.compressed.untouched["1.running_mean"].any())


def test_the_file_gets_smaller_step_by_step(net: Any, tmp_path: Path) -> None:
    sizes = []
    for changes in (None, FOLDED, {**FOLDED, "finish.uncompressed_dtype": "tf32"}, SMALL):
        sizes.append(result(net, "pwfn", changes).save(tmp_path / "net.pwfn"))
        held = load(tmp_path / "net.pwfn").untouched
        if changes:
            assert not bool(held["1.running_mean"].any())
            assert bool((held["1.running_var"] == 1).all())
            assert held["1.num_batches_tracked"] == 0
    assert sizes == sorted(sizes, reverse=True)
    assert len(set(sizes)) == 4


class Failing(Repeated):
    """A loader that raises once it has given so many batches."""

    left = 10**9

    def epoch(self, number: int, start: int = 0) -> Iterator[Any]:
        for batch in super().epoch(number, start):
            if self.left == 0:
                raise OSError("disk full")
            self.left -= 1
            yield batch


@pytest.mark.parametrize("method", METHODS)
def test_a_run_that_stops_in_its_last_steps_resumes_to_the_same_file(method: str, net: Any) -> None:
    """The last ten batches: re-estimation of 4, polish of 2, re-estimation of 4."""
    config, whole = brief(method, SMALL), dumps(result(net, method, SMALL).compressed)
    counted = Failing(TRAIN)
    compress(net, counted, VAL, config)
    given = Failing.left - counted.left
    for missing, finished in ((10, 0), (7, 0), (6, 1), (5, 1), (4, 2), (1, 2)):
        loader = Failing(TRAIN)
        loader.left = given - missing
        with pytest.raises(DataError, match="disk full") as caught:
            compress(net, loader, VAL, config)
        progress = caught.value.progress
        assert progress.finished == finished
        assert dumps(compress(net, Repeated(TRAIN), VAL, config, resume=progress).compressed) == whole


def test_states_on_the_way_are_not_shrunk_but_the_chosen_one_is(net: Any) -> None:
    found = compress(net, Repeated(TRAIN), VAL, brief("pwfn", {**SMALL, "target.max_drop": 100.0}))
    assert len(found.states) == 2
    for each in found.states:
        assert bool(loads(each.content).untouched["1.running_mean"].any())
    assert not bool(found.compressed.untouched["1.running_mean"].any())


def test_what_float16_cannot_hold_from_the_start_is_reported_before_the_work(net: Any) -> None:
    model = copy.deepcopy(net)
    model[1].running_mean[3] = 1e6
    with pytest.raises(WeightError, match=r"1\.running_mean contains 1e\+06") as caught:
        compress(model, TRAIN, VAL, brief("pwfn", {"finish.uncompressed_dtype": "float16"}))
    assert caught.value.progress.rounds == ()


def test_what_float16_cannot_hold_in_the_end_costs_no_round(net: Any) -> None:
    """The data is a thousand times larger than what the network's statistics describe."""
    loud = Repeated(data(0, scale=1000.0))
    changes = {"finish.polish_epochs": 0.0, "training.learning_rate": 1e-9, "posterior.init": "constant"}
    with pytest.raises(PwfnError, match=r"1\.running_var .* \"bfloat16\"") as caught:
        compress(net, loud, None, brief("pwfn", {**changes, "finish.uncompressed_dtype": "float16"}))
    progress = caught.value.progress
    assert (len(progress.rounds), progress.finished) == (2, 3)
    wide = brief("pwfn", {**changes, "finish.uncompressed_dtype": "bfloat16"})
    again, whole = (compress(net, loud, None, wide, resume=each) for each in (progress, None))
    assert same(again.compressed.dense_state_dict(), whole.compressed.dense_state_dict())


def test_quantisers_of_activations_are_rounded_too(net: Any, tmp_path: Path) -> None:
    made = result(net, "lsq", {**SMALL, "options.activation_bits": 4})
    steps = [v for name, v in made.compressed.untouched.items() if name.endswith(".step")]
    assert steps
    assert all(torch.equal(step, step.bfloat16().float()) for step in steps)
    made.save(tmp_path / "model.pwfn")
    loaded = load(tmp_path / "model.pwfn").apply_to(convnet()).eval()
    with torch.no_grad():
        assert all(torch.equal(loaded(x), made.model()(x)) for x, _ in VAL)
