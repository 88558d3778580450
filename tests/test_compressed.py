"""The compressed network as a value: codebook and indices, state dicts, models, and draws."""

from __future__ import annotations

import copy
import io
import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from cases import Tied, tiny_gpt2
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from pwfn import Compressed, FileError, GaussianNetwork, Layout, LayoutError, WeightError
from pwfn.file import compressed as compressed_module
from pwfn.zoo.models import digits_resnet

TOKENS = torch.arange(11)


def finished(model: nn.Module, *args: Any) -> tuple[GaussianNetwork, Compressed]:
    """Trained for a step, so that buffers and free parameters have changed, then fixed."""
    net = GaussianNetwork(model).train()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    output = net(*args)
    getattr(output, "logits", output).square().mean().backward()
    optimizer.step()
    net.fix(0.5)
    net.fix(1.0)
    return net.eval(), net.finish()


MODELS = {
    "tied": (Tied, TOKENS),
    "convolutions": (digits_resnet, torch.randn(4, 1, 8, 8, generator=torch.Generator().manual_seed(0))),
    "gpt2": (tiny_gpt2, torch.arange(8).view(1, 8)),
    "float64": (lambda: nn.Sequential(nn.Linear(5, 4), nn.LayerNorm(4)).double(), torch.ones(3, 5).double()),
    "bfloat16": (
        lambda: nn.Sequential(nn.Linear(5, 4), nn.LayerNorm(4)).bfloat16(),
        torch.ones(3, 5).bfloat16(),
    ),
}


@pytest.mark.parametrize("name", MODELS)
def test_a_new_model_gives_the_output_of_the_trained_network(name: str) -> None:
    make, x = MODELS[name]
    torch.manual_seed(0)
    net, result = finished(make(), x)
    state = result.dense_state_dict()
    assert state.keys() == make().state_dict().keys()
    for values in (net.model.state_dict(), net.layout.views(net.mu)):
        assert all(torch.equal(state[name], value) for name, value in values.items())
    target = make()
    assert result.apply_to(target) is target
    found, wanted = target.eval()(x), net(x)
    assert torch.equal(getattr(found, "logits", found), getattr(wanted, "logits", wanted))
    assert all(torch.equal(value, state[name]) for name, value in target.state_dict().items())
    if isinstance(target, Tied):
        assert target.head.weight is target.embedding.weight


# --- codebook and indices ------------------------------------------------------------------------


def of(values: Tensor, sigma: Tensor | None = None) -> Compressed:
    layout = Layout.of(nn.Linear(values.numel(), 1, bias=False))
    return Compressed.of(layout, values, torch.zeros_like(values) if sigma is None else sigma, {})


@pytest.mark.parametrize("numbers", [[-0.0], [0.0, -0.0], [-0.0, 1.0, -0.0], [0.5, -0.25, 0.5, 0.0, -0.0]])
def test_zero_has_no_sign(numbers: list[float]) -> None:
    result = of(torch.tensor(numbers))
    assert result.codebook.tolist() == sorted(set(numbers))
    assert not torch.signbit(result.codebook[result.codebook == 0]).any()


@settings(deadline=None)
@given(st.lists(st.floats(allow_nan=False, allow_infinity=False, width=32), min_size=1, max_size=60))
def test_codebook_and_indices_are_the_values(numbers: list[float]) -> None:
    values = torch.tensor(numbers)
    result = of(values)
    assert torch.equal(result.values(), values)
    assert result.codebook.tolist() == sorted(set(numbers))
    assert sorted(set(result.indices.tolist())) == list(range(result.codebook.numel()))


@pytest.mark.parametrize(
    ("count", "dtype"),
    [
        (1, torch.uint8),
        (256, torch.uint8),
        (257, torch.int16),
        (2**15, torch.int16),
        (2**15 + 1, torch.int32),
    ],
)
def test_indices_are_as_narrow_as_the_codebook_allows(count: int, dtype: torch.dtype) -> None:
    values = torch.randperm(count, generator=torch.Generator().manual_seed(0)).float()
    result = of(torch.cat((values, values)))
    assert result.indices.dtype == dtype
    assert torch.equal(result.values(), torch.cat((values, values)))


def test_repr_is_one_short_line() -> None:
    layout = Layout.of(nn.Sequential(nn.Linear(50, 40), nn.Linear(40, 2)))
    values = torch.arange(layout.size) % 3 / 4
    assert repr(Compressed.of(layout, values, None, {})) == "Compressed(2,122 weights, 3 values, 4 tensors)"
    divided = Compressed.of(layout, values, None, {}, divide=lambda entry: (0, 2))
    assert len(repr(divided)) < 100
    assert "8 codebooks" in repr(divided)
    with pytest.raises(WeightError, match="8 codebooks"):
        _ = divided.codebook


@pytest.mark.parametrize("target", [None, 5, io.StringIO()])
def test_a_target_that_takes_no_bytes_is_refused(target: Any) -> None:
    with pytest.raises(FileError, match=f"a {type(target).__name__} is no path and no binary file object"):
        fixed(nn.Linear(2, 2)).save(target)


def test_lengths_must_agree() -> None:
    layout = Layout.of(nn.Linear(3, 1, bias=False))
    for values, sigma in (((2,), (3,)), ((3,), (2,)), ((3,), (4,)), ((3, 1), (3,))):
        with pytest.raises(WeightError, match="for a layout of 3 weights"):
            Compressed.of(layout, torch.zeros(values), torch.zeros(sigma), {})
    with pytest.raises(WeightError, match="cannot be cut along axis 1 into 2 parts"):
        Compressed.of(layout, torch.zeros(3), None, {}, divide=lambda entry: (1, 2))


def test_a_result_shares_no_memory_and_stays_what_it_was() -> None:
    net, result = finished(Tied(), TOKENS)
    before, sigma = copy.deepcopy(result.dense_state_dict()), result.sigma.clone()
    with torch.no_grad():
        net.model.norm.weight.add_(1)
        assert torch.equal(net.finish().untouched["norm.weight"], result.untouched["norm.weight"] + 1)
        for tensor in (*net.parameters(), *net.buffers()):
            tensor.zero_()
    for value in result.dense_state_dict().values():
        value.zero_()
    assert torch.equal(result.sigma, sigma)
    assert all(torch.equal(value, before[name]) for name, value in result.dense_state_dict().items())


# --- draws ---------------------------------------------------------------------------------------


def test_sample_is_centre_plus_sigma_times_noise() -> None:
    values, sigma = torch.tensor([0.5, -0.25, 0.0]), torch.tensor([0.5, 0.25, 0.0])
    noise = torch.randn(3, generator=torch.Generator().manual_seed(3))
    result = of(values, sigma)
    drawn = result.sample(torch.Generator().manual_seed(3))["weight"].flatten()
    assert torch.equal(drawn, torch.addcmul(values, sigma, noise))
    torch.manual_seed(3)
    assert torch.equal(result.sample()["weight"].flatten(), drawn)  # the global generator
    with pytest.raises(WeightError, match="no posterior"):
        Compressed.of(Layout.of(nn.Linear(3, 1, bias=False)), values, None, {}).sample()


def test_sample_is_the_networks_own_draw() -> None:
    net, result = finished(Tied(), TOKENS)
    drawn = result.sample(torch.Generator().manual_seed(5))
    assert torch.equal(drawn["head.weight"], drawn["embedding.weight"])
    assert all(torch.equal(drawn[name], value) for name, value in result.untouched.items())
    model = Tied().eval()
    model.load_state_dict(drawn)
    with net.sampling(generator=torch.Generator().manual_seed(5)):
        assert torch.equal(net(TOKENS), model(TOKENS))
    assert not torch.equal(net(TOKENS), model(TOKENS))


def test_sample_has_the_sigma_it_says() -> None:
    count = 40_000
    values, sigma = torch.full((count,), 0.25), torch.full((count,), 0.125)
    drawn = of(values, sigma).sample(torch.Generator().manual_seed(0))["weight"].flatten().double()
    assert abs(float(drawn.mean()) - 0.25) < 5 * 0.125 / math.sqrt(count)
    assert abs(float(drawn.var()) / 0.125**2 - 1) < 5 * math.sqrt(2 / count)


# --- another architecture ------------------------------------------------------------------------


def fixed(model: nn.Module) -> Compressed:
    net = GaussianNetwork(model)
    net.fix(1.0)
    return net.finish()


def test_apply_to_another_architecture_lists_what_differs() -> None:
    result = fixed(nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4)))
    target = nn.Sequential(nn.Linear(3, 5, bias=False), nn.BatchNorm1d(4, affine=False), nn.Linear(4, 1))
    before = copy.deepcopy(target.state_dict())
    with pytest.raises(LayoutError) as caught:
        result.apply_to(target)
    for part in (
        *("0.bias is absent in the model, 4 here", "0.weight is 5×3 in the model, 4×3 here"),
        *("1.bias is absent in the model, 4 here", "2.weight is 1×4 in the model, absent here"),
    ):
        assert part in str(caught.value)
    assert all(torch.equal(value, before[name]) for name, value in target.state_dict().items())
    with pytest.raises(LayoutError, match=r"; and 4 more$") as caught:
        fixed(nn.Linear(2, 2)).apply_to(nn.Sequential(*(nn.Linear(2, 2) for _ in range(6))))
    assert str(caught.value).count(" here") == 10


@pytest.mark.parametrize("weights", ["dense", "indices"])
@pytest.mark.parametrize(
    ("target", "words"),
    [
        (None, "the model is a NoneType: allowed is a torch.nn.Module"),
        (nn.Linear, "the model is a type: allowed is a torch.nn.Module"),
        (nn.LazyLinear(4), "weight has no shape yet: run one batch through the model first"),
        (nn.DataParallel(nn.Linear(3, 4)), "the model is wrapped for data parallelism: pass model.module"),
        (torch.compile(nn.Linear(3, 4), backend="eager"), "the model is already compiled: pass the original"),
    ],
    ids=["nothing", "a class", "lazy", "wrapped", "compiled"],
)
def test_what_is_no_model_to_apply_to_is_named(target: Any, words: str, weights: str) -> None:
    with pytest.raises(LayoutError, match=f"^{words}"):
        fixed(nn.Linear(3, 4)).apply_to(target, weights=weights)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_torchscript_takes_dense_weights_only() -> None:
    result, script = fixed(nn.Linear(3, 4)), torch.jit.trace(nn.Linear(3, 4), torch.ones(1, 3))
    with pytest.raises(LayoutError, match=r"^the model is a TorchScript module: pass the eager model"):
        result.apply_to(script, weights="indices")
    x = torch.randn(2, 3)
    assert torch.equal(result.apply_to(script)(x), result.apply_to(nn.Linear(3, 4))(x))


@pytest.mark.parametrize("weights", ["dense", "indices"])
def test_a_model_without_memory_gets_it_and_stays_tied(weights: str) -> None:
    """Its own types count, as for any other model."""

    def make() -> nn.Module:
        layers = [nn.Linear(4, 4), nn.LayerNorm(4), nn.Bilinear(4, 4, 4), nn.Linear(4, 4), nn.LayerNorm(4)]
        layers[3].weight, layers[4].weight = layers[0].weight, layers[1].weight
        return nn.ModuleList(layers)

    result = fixed(make())
    target = make().double().to("meta")
    target[3].weight, target[4].weight = target[0].weight, target[1].weight
    wanted, found = make().double(), result.apply_to(target, weights=weights)
    result.apply_to(wanted)
    x = torch.randn(2, 4, dtype=torch.float64)
    for i in (0, 1, 3, 4):
        assert torch.equal(found[i](x), wanted[i](x))
    assert torch.equal(found[2](x, x), wanted[2](x, x))
    assert found[4].weight is found[1].weight
    assert weights == "indices" or found[3].weight is found[0].weight


def test_extra_state_of_a_module_stays() -> None:
    class Versioned(nn.Linear):
        version = 1

        def get_extra_state(self) -> dict[str, int]:
            return {"version": self.version}

        def set_extra_state(self, state: dict[str, int]) -> None:
            self.version = state["version"]

    target = nn.Sequential(Versioned(3, 2))
    target[0].version = 7
    result = fixed(nn.Sequential(Versioned(3, 2)))
    result.apply_to(target)
    assert target[0].version == 7
    assert torch.equal(target[0].weight.flatten(), result.values()[:6])


def test_sigmas_of_training_are_told_once_when_they_are_drawn(caplog: pytest.LogCaptureFixture) -> None:
    compressed_module._say_that_sigmas_are_of_training.cache_clear()
    model = nn.Linear(1, 2, bias=False)
    trained = Compressed.of(Layout.of(model), torch.ones(2), torch.ones(2), {})
    replace(trained, weight_sigma=None, sigma_codes=(128,)).sample()
    assert caplog.messages == []  # fitted
    for _ in range(2):
        trained.sample()
    (said,) = caplog.messages
    assert said.startswith("these sigmas are those of training")
