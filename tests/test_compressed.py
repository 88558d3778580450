"""The result as a value: codebook and indices, back to a whole state dict, into a model, and draws."""

from __future__ import annotations

import copy
import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from pwfn import Compressed, GaussianNetwork, Layout, LayoutError, WeightError
from pwfn.zoo.models import digits_resnet, ready_torchvision


class Tied(nn.Module):
    """An embedding tied to the head, a layer with two names, a norm, and buffers of both kinds."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(11, 6)
        self.first = nn.Linear(6, 6)
        self.norm = nn.BatchNorm1d(6)
        self.second = self.first
        self.head = nn.Linear(6, 11, bias=False)
        self.head.weight = self.embedding.weight
        self.register_buffer("scale", torch.tensor(2.0))
        self.register_buffer("not_saved", torch.tensor(3.0), persistent=False)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.scale * self.head(self.second(self.norm(self.first(self.embedding(tokens)))))


def finished(model: nn.Module, *args: Any) -> tuple[GaussianNetwork, Compressed]:
    """Trained for a step, so that buffers and free parameters have changed, then fixed."""
    net = GaussianNetwork(model).train()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    net(*args).square().mean().backward()
    optimizer.step()
    net.fix(0.5)
    net.fix(1.0)
    return net.eval(), net.finish()


TOKENS = torch.arange(11)


def test_whole_state_with_every_name() -> None:
    torch.manual_seed(0)
    model = Tied()
    net, result = finished(model, TOKENS)
    state = result.dense_state_dict()
    assert state.keys() == model.state_dict().keys()
    views = net.layout.views(net.mu)
    for name, value in net.model.state_dict().items():
        assert torch.equal(state[name], value), name
    for name, view in views.items():
        assert torch.equal(state[name], view), name
    assert set(views) | set(net.model.state_dict()) == set(state)
    assert torch.equal(state["head.weight"], state["embedding.weight"])
    assert torch.equal(state["first.weight"], state["second.weight"])
    assert not torch.equal(state["norm.running_mean"], model.norm.running_mean)  # from the training


@pytest.mark.parametrize("fresh", [True, False])
def test_apply_to_gives_the_trained_networks_output(fresh: bool) -> None:
    torch.manual_seed(0)
    model = Tied()
    net, result = finished(model, TOKENS)
    target = Tied() if fresh else copy.deepcopy(model)
    assert result.apply_to(target) is target
    assert target.head.weight is target.embedding.weight
    target.eval()
    assert torch.equal(target(TOKENS), net(TOKENS))
    for name, value in target.state_dict().items():
        assert torch.equal(value, result.dense_state_dict()[name]), name


def test_convolutional_network_with_batchnorm() -> None:
    torch.manual_seed(0)
    images = torch.randn(4, 1, 8, 8)
    net, result = finished(digits_resnet(), images)
    model = result.apply_to(digits_resnet()).eval()
    assert torch.equal(model(images), net(images))
    covered = torch.cat([model.get_parameter(entry.name).flatten() for entry in result.layout.entries])
    assert torch.equal(covered, net.mu)
    assert torch.equal(covered.unique(), result.codebook)


def test_gpt2_goes_back_into_a_new_one() -> None:
    ready_torchvision()
    transformers = pytest.importorskip("transformers")
    sizes = {"n_layer": 1, "n_head": 2, "n_embd": 8, "vocab_size": 13, "n_positions": 8}
    config = transformers.GPT2Config(**sizes, bos_token_id=0, eos_token_id=0)
    net = GaussianNetwork(transformers.GPT2LMHeadModel(config)).eval()
    net.fix(1.0)
    model = net.finish().apply_to(transformers.GPT2LMHeadModel(config)).eval()
    tokens = torch.arange(8).reshape(1, 8)
    assert torch.equal(model(tokens).logits, net(tokens).logits)
    assert model.lm_head.weight is model.transformer.wte.weight


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_number_types_come_back(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 4), nn.LayerNorm(4)).to(dtype)
    net, result = finished(model, torch.randn(3, 5, dtype=dtype))
    state = result.dense_state_dict()
    assert {value.dtype for value in state.values()} == {dtype}
    target = result.apply_to(copy.deepcopy(model)).eval()
    x = torch.randn(3, 5, dtype=dtype)
    assert torch.equal(target(x), net(x))


# --- codebook and indices ------------------------------------------------------------------------


def of(values: Tensor, sigma: Tensor | None = None) -> Compressed:
    layout = Layout.of(nn.Linear(values.numel(), 1, bias=False))
    return Compressed.of(layout, values, torch.zeros_like(values) if sigma is None else sigma, {})


def test_codebook_by_hand() -> None:
    result = of(torch.tensor([0.5, -0.25, 0.5, 0.0, -0.0]))
    assert result.codebook.tolist() == [-0.25, 0.0, 0.5]
    assert result.indices.tolist() == [2, 0, 2, 1, 1]
    assert result.values().tolist() == [0.5, -0.25, 0.5, 0.0, 0.0]


@pytest.mark.parametrize("numbers", [[-0.0], [-0.0, 0.0], [0.0, -0.0], [-0.0, 1.0, -0.0]])
def test_zero_has_no_sign(numbers: list[float]) -> None:
    result = of(torch.tensor(numbers))
    assert int((result.codebook == 0).sum()) == 1
    assert not torch.signbit(result.codebook).any()
    assert not torch.signbit(result.values()).any()


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


def test_lengths_must_agree() -> None:
    layout = Layout.of(nn.Linear(3, 1, bias=False))
    for values, sigma, wrong in ((2, 3, "2 values"), (3, 2, "2 sigmas"), (3, 4, "4 sigmas")):
        with pytest.raises(WeightError, match=rf"{wrong} for a layout of 3 weights: .*must agree$"):
            Compressed.of(layout, torch.zeros(values), torch.zeros(sigma), {})
    with pytest.raises(WeightError):
        Compressed.of(layout, torch.zeros(3, 1), torch.zeros(3), {})


def test_result_shares_no_memory_with_what_it_came_from() -> None:
    net, result = finished(Tied(), TOKENS)
    before = copy.deepcopy(result.dense_state_dict())
    sigma = result.sigma.clone()
    with torch.no_grad():
        for tensor in (*net.parameters(), *net.buffers()):
            tensor.zero_()
    for value in result.dense_state_dict().values():
        value.zero_()
    assert torch.equal(result.sigma, sigma)
    assert all(torch.equal(value, before[name]) for name, value in result.dense_state_dict().items())


def test_finish_after_more_training_keeps_the_earlier_result() -> None:
    """A network goes on (polish, say); a result taken before stays what it was."""
    net, result = finished(Tied(), TOKENS)
    with torch.no_grad():
        net.model.norm.weight.add_(1)
    later = net.finish()
    assert torch.equal(later.values(), result.values())
    assert torch.equal(later.untouched["norm.weight"], result.untouched["norm.weight"] + 1)


# --- draws ---------------------------------------------------------------------------------------


def test_sample_repeats_with_a_generator() -> None:
    _, result = finished(Tied(), TOKENS)
    first = result.sample(torch.Generator().manual_seed(3))
    again = result.sample(torch.Generator().manual_seed(3))
    other = result.sample(torch.Generator().manual_seed(4))
    assert first.keys() == result.dense_state_dict().keys()
    assert all(torch.equal(first[name], again[name]) for name in first)
    assert not torch.equal(first["first.weight"], other["first.weight"])
    assert torch.equal(first["head.weight"], first["embedding.weight"])
    assert all(torch.equal(first[name], value) for name, value in result.untouched.items())


def test_sample_is_centre_plus_sigma_times_noise() -> None:
    values, sigma = torch.tensor([0.5, -0.25, 0.0]), torch.tensor([0.5, 0.25, 0.0])
    noise = torch.randn(3, generator=torch.Generator().manual_seed(3))
    drawn = of(values, sigma).sample(torch.Generator().manual_seed(3))["weight"].flatten()
    assert torch.equal(drawn, torch.addcmul(values, sigma, noise))
    assert torch.equal(of(values).sample()["weight"].flatten(), values)  # without spread: the centres


def test_sample_is_the_networks_own_draw() -> None:
    net, result = finished(Tied(), TOKENS)
    model = Tied().eval()
    model.load_state_dict(result.sample(torch.Generator().manual_seed(5)))
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


def test_apply_to_another_architecture_lists_what_differs() -> None:
    net = GaussianNetwork(nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4)))
    net.fix(1.0)
    result = net.finish()
    target = nn.Sequential(nn.Linear(3, 5, bias=False), nn.BatchNorm1d(4, affine=False), nn.Linear(4, 1))
    before = copy.deepcopy(target.state_dict())
    with pytest.raises(LayoutError) as caught:
        result.apply_to(target)
    assert str(caught.value) == (
        "the model does not match: "
        "0.bias is absent in the model, 4 here; "
        "0.weight is 5×3 in the model, 4×3 here; "
        "1.bias is absent in the model, 4 here; "
        "1.weight is absent in the model, 4 here; "
        "2.bias is 1 in the model, absent here; "
        "2.weight is 1×4 in the model, absent here"
    )
    assert all(torch.equal(value, before[name]) for name, value in target.state_dict().items())


def test_long_lists_of_differences_are_cut() -> None:
    net = GaussianNetwork(nn.Linear(2, 2))
    net.fix(1.0)
    with pytest.raises(LayoutError, match=r"; and 4 more$") as caught:
        net.finish().apply_to(nn.Sequential(*(nn.Linear(2, 2) for _ in range(6))))
    assert str(caught.value).count(" here") == 10


def test_extra_state_of_a_module_stays_the_models_own() -> None:
    class Versioned(nn.Linear):
        version = 1

        def get_extra_state(self) -> dict[str, int]:
            return {"version": self.version}

        def set_extra_state(self, state: dict[str, int]) -> None:
            self.version = state["version"]

    net = GaussianNetwork(nn.Sequential(Versioned(3, 2)))
    net.fix(1.0)
    target = nn.Sequential(Versioned(3, 2))
    target[0].version = 7
    net.finish().apply_to(target)
    assert target[0].version == 7
    assert torch.equal(target[0].weight.flatten(), net.mu[:6])
