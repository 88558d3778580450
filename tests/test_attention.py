"""Q-ViT's attention: rectification, quantisers by head, what is captured, and which networks are refused."""

from __future__ import annotations

import copy
import math

import pytest
import torch
from test_activations import NoQuestions
from torch import Tensor, nn
from torch.nn import functional as F
from torch.overrides import _get_current_function_mode

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
from pwfn.lab.activations.attention import Rectification, attention
from pwfn.lab.activations.similarity import similarity
from pwfn.layout import Layout
from pwfn.zoo.models import VisionTransformer, digits_resnet, ready_torchvision


def own_vit() -> nn.Module:
    torch.manual_seed(3)
    return VisionTransformer(image_size=8, patch=4, width=24, depth=2, heads=3, classes=5).eval()


def timm_vit() -> nn.Module:
    ready_torchvision()
    from timm.models.vision_transformer import VisionTransformer as TimmTransformer

    torch.manual_seed(3)
    model: nn.Module = TimmTransformer(
        img_size=8, patch_size=4, embed_dim=32, depth=2, num_heads=2, num_classes=5
    )
    return model.eval()


NETWORKS = [own_vit, timm_vit]


def images(count: int = 3) -> Tensor:
    return torch.randn(count, 3, 8, 8, generator=torch.Generator().manual_seed(4))


def started(model: nn.Module, bits: int | None = None) -> nn.Module:
    attach(model, plan(model, Layout.of(model), ActivationKind.QVIT, bits))
    with observing(model), torch.no_grad():
        model(images())
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
    x = torch.randn(7, 2, 5, 3, generator=torch.Generator().manual_seed(0)) * torch.rand(7, 2, 1, 1) + 0.3
    rectification = Rectification(heads=2).double()
    rectification.observing = True
    out = rectification(x.double())
    mu, sigma = x.double().mean((-2, -1), keepdim=True), x.double().std((-2, -1), correction=0, keepdim=True)
    for head in range(2):
        normalised = ((x.double() - mu) / sigma)[:, head].reshape(-1)
        columns = torch.stack((normalised, torch.ones_like(normalised)), dim=1)
        wanted = torch.linalg.lstsq(columns, x.double()[:, head].reshape(-1, 1)).solution[:, 0]
        found = torch.stack((rectification.gain[head], rectification.shift[head]))
        assert torch.allclose(found, wanted, atol=1e-5)  # epsilon in the deviation is all that differs
    assert out.shape == x.shape


@pytest.mark.parametrize("make", NETWORKS)
def test_a_sample_is_rectified_by_itself(make: type) -> None:
    model = started(make())
    assert torch.allclose(model(images(3))[:1], model(images(3)[:1]), atol=1e-6)


@pytest.mark.parametrize("make", NETWORKS)
def test_attention_begins_next_to_the_unrectified(make: type) -> None:
    # With one sample its statistics are the means that the start takes.
    model = make()
    plain = model(images(1))
    attach(model, plan(model, Layout.of(model), ActivationKind.QVIT, None))
    with observing(model), torch.no_grad():
        rectified = model(images(1))
    assert torch.allclose(rectified, plain, atol=1e-5)
    assert not torch.allclose(model(3 * images(1)), make()(3 * images(1)), atol=1e-5)


# The attention that stands in for torch's


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


@pytest.mark.parametrize("make", NETWORKS)
def test_quantisers_of_attention_are_by_head_and_probabilities_unsigned(make: type) -> None:
    model = started(make(), bits=3)
    heads = describe(model)["attention"][0]["heads"]
    attached = model.get_submodule("pwfn_activations.attention.1")
    assert {name: p.numel() for name, p in attached.named_parameters() if "step" in name} == {
        f"quantisers.{name}.quantiser.step": heads for name in ("query", "key", "value", "probabilities")
    }
    seen: list[Tensor] = []
    for name in ("query", "probabilities"):
        attached.get_submodule(f"quantisers.{name}").register_forward_hook(lambda *a: seen.append(a[2]))
    model(images())
    query, probabilities = seen
    assert query.unique().numel() > 8  # heads together
    assert all(query[:, head].unique().numel() <= 8 for head in range(heads))
    assert probabilities.min() >= 0
    assert all(probabilities[:, head].unique().numel() <= 8 for head in range(heads))


@pytest.mark.parametrize("make", NETWORKS)
def test_many_bits_change_little_and_few_change_more(make: type) -> None:
    plain = make()(images())
    errors = [(started(make(), bits)(images()) - plain).norm().item() for bits in (8, 4, 2)]
    assert errors[0] < errors[1] < errors[2]
    assert errors[0] < 0.1 * plain.norm().item()


@pytest.mark.parametrize("make", NETWORKS)
@pytest.mark.parametrize("bits", [None, 4])
def test_copies_state_dicts_gradients_and_recording(make: type, bits: int | None) -> None:
    model = started(make(), bits)
    x = images(5)
    was = model(x)
    fresh = make()
    again = attach(fresh, plan(fresh, Layout.of(fresh), ActivationKind.QVIT, bits))
    again.load_state_dict(model.state_dict())
    assert torch.equal(again(x), was)
    other = copy.deepcopy(model)
    with torch.no_grad():
        for parameter in other.get_submodule("pwfn_activations").parameters():
            parameter.mul_(1.5)
    assert torch.equal(model(x), was)
    assert not torch.equal(other(x), was)
    with NoQuestions():
        model(x).square().sum().backward()
    for name, parameter in model.named_parameters():
        if not name.endswith("quantiser.offset"):  # whose gradient is 0 where nothing is clipped
            assert parameter.grad is not None, name
            assert parameter.grad.abs().sum() > 0, name
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.isfinite(model(x)).all()


# The hooks


class Failing(nn.Module):
    """Attention that breaks off after torch's function, if it is told to."""

    def __init__(self) -> None:
        super().__init__()
        self.num_heads = 2
        self.qkv = nn.Linear(4, 12)
        self.fails = False

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).unflatten(-1, (3, 2, 2)).permute(2, 0, 3, 1, 4).unbind(0)
        out = F.scaled_dot_product_attention(q, k, v)
        if self.fails:
            raise RuntimeError("broken off")
        return out


class Holder(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.attn = inner

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.attn(x)
        return out


def test_a_pass_that_fails_leaves_torch_as_it_was() -> None:
    inner = Failing()
    model = Holder(inner)
    attach(model, plan(model, Layout.of(model), ActivationKind.QVIT, None))
    with observing(model):
        model(torch.randn(2, 3, 4))
    assert _get_current_function_mode() is None
    inner.fails = True
    with pytest.raises(RuntimeError, match="broken off"):
        model(torch.randn(2, 3, 4))
    assert _get_current_function_mode() is None
    inner.fails = False
    model(torch.randn(2, 3, 4))


def test_attention_outside_the_module_is_torchs() -> None:
    model = started(own_vit())
    q = torch.randn(1, 3, 4, 8)
    with capturing(model) as seen:
        F.scaled_dot_product_attention(q, q, q)
    assert seen == []


# What is refused


def test_a_convolutional_network_is_refused() -> None:
    model = digits_resnet()
    with pytest.raises(LayoutError, match=r"no attention is found.*Q-ViT needs transformer blocks; choose"):
        plan(model, Layout.of(model), ActivationKind.QVIT, None)


def test_attention_that_does_not_call_torchs_function_is_refused() -> None:
    model = timm_vit()
    for block in model.blocks:
        block.attn.fused_attn = False
    attach(model, plan(model, Layout.of(model), ActivationKind.QVIT, None))
    with pytest.raises(LayoutError, match=r"blocks\.0\.attn.*scaled_dot_product_attention"), observing(model):
        model(images())


def test_causal_attention_is_refused() -> None:
    class Causal(Failing):
        def forward(self, x: Tensor) -> Tensor:
            q, k, v = self.qkv(x).unflatten(-1, (3, 2, 2)).permute(2, 0, 3, 1, 4).unbind(0)
            return F.scaled_dot_product_attention(q, k, v, is_causal=True)

    model = Holder(Causal())
    attach(model, plan(model, Layout.of(model), ActivationKind.QVIT, None))
    with pytest.raises(LayoutError, match="attn: its attention is causal"):
        model(torch.randn(2, 3, 4))


def test_heads_elsewhere_than_expected_are_refused() -> None:
    class Turned(Failing):
        def forward(self, x: Tensor) -> Tensor:
            q, k, v = self.qkv(x).unflatten(-1, (3, 2, 2)).unbind(2)  # tokens before heads
            return F.scaled_dot_product_attention(q, k, v)

    model = Holder(Turned())
    attach(model, plan(model, Layout.of(model), ActivationKind.QVIT, None))
    with pytest.raises(
        LayoutError, match="has 3 heads of queries and 3 of keys, its projections have 2 and 2"
    ):
        model(torch.randn(2, 3, 4))


def test_more_heads_than_the_module_can_have_are_refused_before_memory_is_taken_for_them() -> None:
    model = Holder(Failing())
    made = plan(model, Layout.of(model), ActivationKind.QVIT, None)
    made["attention"][0]["heads"] = 10**15
    with pytest.raises(LayoutError, match="attn has no parameter wider than 12, the description has 1,000"):
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
    student = [(torch.randn(4, 3, 5, 2), torch.randn(4, 3, 5, 2)) for _ in range(2)]
    teacher = [(torch.randn(4, 3, 5, 2), torch.randn(4, 3, 5, 2)) for _ in range(2)]
    total = 0.0
    for layer in range(2):
        for part in range(2):
            for head in range(3):
                for sample in range(4):
                    one, other = student[layer][part][sample, head], teacher[layer][part][sample, head]
                    g, h = one @ one.T, other @ other.T
                    total += (g / g.norm() - h / h.norm()).norm().item() / 4
    assert similarity_distance(student, teacher).item() == pytest.approx(total, rel=1e-5)
    with pytest.raises(WeightError, match="of 2 and 1 attention modules"):
        similarity_distance(student, teacher[:1])


def test_by_hand_orthogonal_and_equal_patches() -> None:
    # G = I / sqrt(2) and G' = 1/2 everywhere: 2 (1/sqrt(2) - 1/2)^2 + 2 / 4 = 2 - sqrt(2).
    apart, alike = torch.eye(2)[None, None], torch.ones(1, 1, 2, 2)
    distance = similarity_distance([(apart, alike)], [(alike, alike)])
    assert distance.item() == pytest.approx(math.sqrt(2 - math.sqrt(2)), rel=1e-6)


def test_equal_networks_are_at_distance_zero_with_a_finite_gradient() -> None:
    x = torch.randn(2, 3, 5, 4, requires_grad=True)
    distance = similarity_distance([(x, x)], [(x.detach(), x.detach())])
    assert distance.item() == 0
    distance.backward()
    assert x.grad is not None
    assert torch.isfinite(x.grad).all()


@pytest.mark.parametrize("make", NETWORKS)
def test_captured_are_rectified_queries_and_keys_of_student_and_plain_ones_of_teacher(make: type) -> None:
    student, teacher, plain = started(make(), bits=4), make(), make()
    attach(teacher, plan_capture(Layout.of(teacher)))
    assert not list(teacher.get_submodule("pwfn_activations").parameters())
    x = images(4)
    projected: list[Tensor] = []
    teacher.get_submodule("blocks.0.attn.qkv").register_forward_hook(lambda *a: projected.append(a[2]))
    with capturing(student) as ours, capturing(teacher) as theirs:
        student(x)
        assert torch.equal(teacher(x), plain(x))
    assert len(ours) == len(theirs) == 2
    gain, shift = (
        student.get_parameter(f"pwfn_activations.attention.0.rectifications.key.{name}")
        for name in ("gain", "shift")
    )
    key = ours[0][1]
    assert torch.allclose(key.mean((-2, -1)), shift.expand(4, -1), atol=1e-5)
    assert torch.allclose(key.std((-2, -1), correction=0), gain.expand(4, -1), rtol=1e-3)
    query = theirs[0][0]  # of the teacher: the first third of what its projection gives, cut into heads
    assert torch.equal(
        query, projected[0].chunk(3, -1)[0].unflatten(-1, (query.shape[1], -1)).transpose(1, 2)
    )
    distance = similarity_distance(ours, theirs)
    distance.backward()
    assert all(p.grad is None for p in teacher.parameters())
    assert student.blocks[0].attn.qkv.weight.grad.abs().sum() > 0
    copy.deepcopy(student)  # nothing of the graph is left in it
