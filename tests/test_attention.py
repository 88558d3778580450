"""Q-ViT's attention: rectification, quantisers per head, what is captured, and which networks are refused."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from cases import VITS, TinyAttention, own_vit, timm_vit
from torch import Tensor, nn
from torch.nn import functional as F
from torch.overrides import _get_current_function_mode
from waiting import NoWaiting

from pwfn import LayoutError
from pwfn.errors import WeightError
from pwfn.lab.activations import (
    ActivationKind,
    attach,
    capturing,
    describe,
    observing,
    plan,
    plan_capture,
    similarity_distance,
)
from pwfn.lab.activations.attention import Rectification, attention, similarity
from pwfn.layout import Layout
from pwfn.zoo.models import digits_resnet

Make = Callable[[], nn.Module]
NETWORKS = pytest.mark.parametrize("make", VITS)


def images(count: int = 3) -> Tensor:
    return torch.randn(count, 3, 8, 8, generator=torch.Generator().manual_seed(4))


def attached(model: nn.Module, bits: int | None = None) -> nn.Module:
    return attach(model, plan(model, Layout.of(model), ActivationKind.QVIT, bits))


def started(model: nn.Module, bits: int | None = None, count: int = 3) -> nn.Module:
    with observing(attached(model, bits)), torch.no_grad():
        model(images(count))
    return model


# Rectification


def test_rectification_by_hand() -> None:
    rectification = Rectification(heads=2)
    with torch.no_grad():
        rectification.gain.copy_(torch.tensor([3.0, 2.0]))
        rectification.shift.copy_(torch.tensor([0.5, -1.0]))
    x = torch.tensor([[[[0.0, 2.0]], [[10.0, 30.0]]]])  # one sample, two heads, one token, two channels
    # Means 1 and 20, deviations 1 and 10: both heads are -1 and 1 before gain and shift.
    assert torch.allclose(rectification(x), torch.tensor([[[[-2.5, 3.5]], [[-3.0, 1.0]]]]), atol=1e-5)


def test_the_start_is_the_least_squares_of_gain_and_shift() -> None:
    torch.manual_seed(0)
    x = torch.randn(7, 2, 5, 3, dtype=torch.float64) * torch.rand(7, 2, 1, 1, dtype=torch.float64) + 0.3
    rectification = Rectification(heads=2, dtype=torch.float64)
    rectification.observing = True
    assert rectification(x).shape == x.shape
    mu, sigma = x.mean((-2, -1), keepdim=True), x.std((-2, -1), correction=0, keepdim=True)
    for head in range(2):
        normalised = ((x - mu) / sigma)[:, head].reshape(-1)
        columns = torch.stack((normalised, torch.ones_like(normalised)), dim=1)
        wanted = torch.linalg.lstsq(columns, x[:, head].reshape(-1, 1)).solution[:, 0]
        found = torch.stack((rectification.gain[head], rectification.shift[head]))
        assert torch.allclose(found, wanted, atol=1e-5)  # epsilon in the deviation is all that differs


@NETWORKS
def test_attention_begins_next_to_the_unrectified_and_takes_each_sample_by_itself(make: Make) -> None:
    model, plain = started(make(), count=1), make()  # the statistics of one sample are the start's means
    assert torch.allclose(model(images(1)), plain(images(1)), atol=1e-5)
    assert not torch.allclose(model(3 * images(1)), plain(3 * images(1)), atol=1e-5)
    assert torch.allclose(model(images(3))[:1], model(images(3)[:1]), atol=1e-6)


# The attention that replaces torch's


@pytest.mark.parametrize("masked", ["no", "bool", "float"])
@pytest.mark.parametrize("key_heads", [6, 2])
@pytest.mark.parametrize("scale", [None, 0.3])
def test_attention_is_torchs_own(masked: str, key_heads: int, scale: float | None) -> None:
    torch.manual_seed(0)
    q, k, v = torch.randn(2, 6, 5, 4), torch.randn(2, key_heads, 7, 4), torch.randn(2, key_heads, 7, 3)
    mask = {"no": None, "bool": torch.rand(5, 7) > 0.3, "float": torch.randn(5, 7)}[masked]
    wanted = F.scaled_dot_product_attention(q, k, v, mask, scale=scale, enable_gqa=key_heads != 6)
    assert torch.allclose(attention(q, k, v, mask, 0.0, scale, nn.Identity()), wanted, atol=1e-6)


def test_dropout_keeps_the_mean() -> None:
    torch.manual_seed(0)
    q, v = torch.zeros(1, 1, 1, 2), torch.ones(1, 1, 100_000, 1)
    out = attention(q, q.expand(1, 1, 100_000, 2), v, None, 0.25, None, nn.Identity())
    assert out.item() == pytest.approx(1.0, abs=0.01)
    assert out.item() != 1.0


@NETWORKS
def test_quantisers_of_attention_are_by_head_and_probabilities_unsigned(make: Make) -> None:
    model = started(make(), bits=3)
    heads = describe(model)["attention"][0]["heads"]
    part = model.get_submodule("pwfn_activations.attention.1")
    assert {name: p.numel() for name, p in part.named_parameters() if "step" in name} == {
        f"quantisers.{name}.quantiser.step": heads for name in ("query", "key", "value", "probabilities")
    }
    seen: list[Tensor] = []
    for name in ("query", "probabilities"):
        part.get_submodule(f"quantisers.{name}").register_forward_hook(lambda *a: seen.append(a[2]))
    model(images())
    query, probabilities = seen
    assert query.unique().numel() > 8  # heads together
    assert probabilities.min() >= 0
    for head in range(heads):
        assert query[:, head].unique().numel() <= 8
        assert probabilities[:, head].unique().numel() <= 8


@NETWORKS
def test_many_bits_change_little_and_few_change_more(make: Make) -> None:
    plain = make()(images())
    errors = [(started(make(), bits)(images()) - plain).norm().item() for bits in (8, 4, 2)]
    assert errors[0] < errors[1] < errors[2]
    assert errors[0] < 0.1 * plain.norm().item()


@NETWORKS
@pytest.mark.parametrize("bits", [None, 4])
def test_copies_state_dicts_gradients_and_waiting(make: Make, bits: int | None) -> None:
    model, x = started(make(), bits), images(5)
    was = model(x)
    again = attached(make(), bits)
    again.load_state_dict(model.state_dict())
    assert torch.equal(again(x), was)
    other = copy.deepcopy(model)
    with torch.no_grad():
        for parameter in other.get_submodule("pwfn_activations").parameters():
            parameter.mul_(1.5)
    assert torch.equal(model(x), was)
    assert not torch.equal(other(x), was)
    with NoWaiting():
        model(x).square().sum().backward()
    for name, parameter in model.named_parameters():
        if not name.endswith("quantiser.offset"):  # whose gradient is 0 where nothing is clipped
            assert parameter.grad is not None, name
            assert parameter.grad.abs().sum() > 0, name
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.isfinite(model(x)).all()


# The hooks


def holding(inner: nn.Module) -> nn.Module:
    return nn.Sequential(inner)


def test_a_pass_that_fails_leaves_torch_as_it_was() -> None:
    class Failing(TinyAttention):
        fails = False

        def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            out = super().attend(q, k, v)
            if self.fails:
                raise RuntimeError("broken off")
            return out

    inner, x = Failing(), torch.randn(2, 3, 4)
    model = attached(holding(inner))
    with observing(model):
        model(x)
    assert _get_current_function_mode() is None
    inner.fails = True
    with pytest.raises(RuntimeError, match="broken off"):
        model(x)
    assert _get_current_function_mode() is None
    inner.fails = False
    model(x)


def test_attention_outside_the_module_is_torchs() -> None:
    q = torch.randn(1, 3, 4, 8)
    with capturing(started(own_vit())) as seen:
        F.scaled_dot_product_attention(q, q, q)
    assert seen == []


# What is refused


def test_a_network_without_attention_is_refused() -> None:
    with pytest.raises(LayoutError, match="Q-ViT needs transformer blocks"):
        attached(digits_resnet())


def test_attention_that_does_not_call_torchs_function_is_refused() -> None:
    model = timm_vit()
    for block in model.blocks:
        block.attn.fused_attn = False
    with pytest.raises(LayoutError, match=r"blocks\.0\.attn.*scaled_dot_product_attention"):
        started(model)


def test_causal_attention_and_heads_elsewhere_than_expected_are_refused() -> None:
    class Causal(TinyAttention):
        def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            return F.scaled_dot_product_attention(q, k, v, is_causal=True)

    class Turned(TinyAttention):
        def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            return super().attend(q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2))

    with pytest.raises(LayoutError, match="0: its attention is causal"):
        attached(holding(Causal()))(torch.randn(2, 3, 4))
    with pytest.raises(LayoutError, match="3 heads of queries and 3 of keys, its projections have 2 and 2"):
        attached(holding(Turned()))(torch.randn(2, 3, 4))


def test_more_heads_than_the_module_can_have_are_refused_before_memory_is_taken_for_them() -> None:
    model = holding(TinyAttention())
    made = plan(model, Layout.of(model), ActivationKind.QVIT, None)
    made["attention"][0]["heads"] = 10**15
    with pytest.raises(LayoutError, match="0 has no parameter wider than 12"):
        attach(model, made)
    assert not hasattr(model, "pwfn_activations")
    assert not any(module._forward_pre_hooks for module in model.modules())


# Similarity


def test_similarity_has_norm_one_and_no_scale() -> None:
    x = torch.randn(2, 3, 5, 4, generator=torch.Generator().manual_seed(0))
    found = similarity(x)
    assert torch.allclose(torch.linalg.matrix_norm(found), torch.ones(2, 3))
    assert torch.allclose(similarity(7 * x), found, atol=1e-6)
    assert torch.equal(similarity(torch.zeros(2, 2)), torch.zeros(2, 2))


def test_the_distance_is_the_sum_over_layers_and_heads_and_the_mean_over_the_batch() -> None:
    torch.manual_seed(0)
    shapes = [(4, 3, 5, 2), (4, 3, 5, 2), (4, 2, 6, 2)]  # of three layers
    student, teacher = ([(torch.randn(shape), torch.randn(shape)) for shape in shapes] for _ in range(2))
    total = 0.0
    for pair, other in zip(student, teacher, strict=True):
        for ours, theirs in zip(pair, other, strict=True):
            for x, y in zip(ours.flatten(0, 1), theirs.flatten(0, 1), strict=True):  # samples and heads
                g, h = x @ x.T, y @ y.T
                total += (g / g.norm() - h / h.norm()).norm().item() / 4
    assert similarity_distance(student, teacher).item() == pytest.approx(total, rel=1e-5)
    with pytest.raises(WeightError, match="3 attention modules and the teacher 1"):
        similarity_distance(student, teacher[:1])


def test_equal_networks_are_at_distance_zero_with_a_finite_gradient() -> None:
    x = torch.randn(2, 3, 5, 4, requires_grad=True)
    distance = similarity_distance([(x, x)], [(x.detach(), x.detach())])
    assert distance.item() == 0
    assert torch.isfinite(torch.autograd.grad(distance, x)[0]).all()


@NETWORKS
def test_captured_are_rectified_queries_and_keys_of_student_and_plain_ones_of_teacher(make: Make) -> None:
    student, teacher, x = started(make(), bits=4), make(), images(4)
    attach(teacher, plan_capture(Layout.of(teacher)))
    assert not list(teacher.get_submodule("pwfn_activations").parameters())
    projected: list[Tensor] = []
    teacher.get_submodule("blocks.0.attn.qkv").register_forward_hook(lambda *a: projected.append(a[2]))
    with capturing(student) as ours, capturing(teacher) as theirs:
        student(x)
        copy.deepcopy(student)  # the captured tensors are part of a graph, which cannot be copied
        assert torch.equal(teacher(x), make()(x))
    assert len(ours) == len(theirs) == 2
    rectification = student.get_submodule("pwfn_activations.attention.0.rectifications.key")
    key = ours[0][1]
    assert torch.allclose(key.mean((-2, -1)), rectification.shift.expand(4, -1), atol=1e-5)
    assert torch.allclose(key.std((-2, -1), correction=0), rectification.gain.expand(4, -1), rtol=1e-3)
    query = theirs[0][0]  # the first third of what the projection gives, cut into heads
    wanted = projected[0].chunk(3, -1)[0].unflatten(-1, (query.shape[1], -1)).transpose(1, 2)
    assert torch.equal(query, wanted)
    similarity_distance(ours, theirs).backward()
    assert all(p.grad is None for p in teacher.parameters())
    assert student.get_parameter("blocks.0.attn.qkv.weight").grad.abs().sum() > 0
