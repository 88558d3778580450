"""Q-ViT whole: codebooks by head and channel, the teacher, and that the file computes what was trained."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from cases import VITS, own_vit, timm_vit
from test_attention import images
from torch import Tensor, nn
from torch.nn import functional as F
from waiting import NoWaiting

from pwfn import Config, ConfigError, LayoutError, load
from pwfn.bayes.method import DataProbe, FixedNetwork
from pwfn.bayes.optimizer import optimizer_for
from pwfn.lab.activations import attach, capturing, plan_capture, similarity_distance
from pwfn.lab.baselines.qvit import QVit
from pwfn.layout import Layout
from pwfn.zoo.models import digits_resnet

NETWORKS = pytest.mark.parametrize("make", VITS)
ACTIVATIONS = pytest.mark.parametrize("activation_bits", [None, 4])


def config(**quantiser: Any) -> Config:
    return Config.preset("recommended", "q-vit").override({"options": {"bits": 3, **quantiser}})


def begun(net: QVit, batch: Tensor | None = None) -> QVit:
    """After a first batch."""
    net.start(DataProbe(lambda module: module(images() if batch is None else batch), loss=lambda: 0.0))
    return net


def network(make: Any = own_vit, **quantiser: Any) -> QVit:
    return begun(QVit(make(), config(**quantiser)))


def distillation(net: QVit) -> Tensor:
    """The term of the pass before."""
    term = net.loss_term(torch.tensor(0.0))
    assert isinstance(term, Tensor)
    return term


def trained(net: QVit, steps: int = 3) -> QVit:
    net.train()
    optimizer = optimizer_for(net, net.settings.training, 0)
    for _ in range(steps):
        loss = F.cross_entropy(net(images(4)), torch.arange(4))
        (loss + distillation(net)).backward()
        optimizer.step()
        optimizer.zero_grad()
    return net


# Weights


@NETWORKS
def test_codebooks_by_head_and_by_channel(make: Any) -> None:
    net = trained(network(make), steps=1)
    net.fix(1.0)
    compressed = net.finish()
    layout = compressed.layout
    for entry, division in zip(layout.entries, compressed.divisions, strict=True):
        parts = 3 * entry.attention.heads if entry.attention else entry.shape[0]
        assert len(division.codebooks) == parts, entry.name
        longest = max(compressed.codebooks[book].numel() for book in division.codebooks)
        assert longest <= (2**8 if entry.layer in layout.ends else 2**3), entry.name
        assert not entry.name.endswith("bias")
    # Every head's values are multiples of one step, its own.
    qkv = layout.entry("blocks.0.attn.qkv.weight")
    step = net.get_submodule(f"quantisers.{layout.entries.index(qkv)}").lsq.step
    rows = compressed.values()[qkv.span].view(len(step), -1) / step.detach().view(-1, 1)
    assert torch.allclose(rows, rows.round(), atol=1e-4)
    assert rows.min() >= -4
    assert rows.max() <= 3


def test_other_codebooks_can_be_had_and_the_networks_cannot() -> None:
    for codebooks, parts in (("layer", 1), ("channel", 72), ("head", 9)):
        net = network(codebooks=codebooks)
        assert net.divided(net.layout.entry("blocks.0.attn.qkv.weight"))[1] == parts
    with pytest.raises(ConfigError, match=r'codebooks is "network"'):
        network(codebooks="network")


# The teacher


@NETWORKS
def test_the_term_is_the_distance_to_the_network_as_it_came(make: Any) -> None:
    net, x = network(make).train(), images(4)
    net(x)
    term = distillation(net).item()
    assert net.loss_term(torch.tensor(0.0)) is None  # once for each pass
    teacher = attach(make(), plan_capture(Layout.of(make())))
    net.eval()
    with capturing(teacher) as theirs, capturing(net.model) as ours, torch.no_grad():
        teacher(x)
        net(x)
    assert term == pytest.approx(similarity_distance(ours, theirs).item(), rel=1e-5)
    assert term > 0


def test_distillation_pulls_the_similarities_to_the_teachers() -> None:
    net = network(bits=2).train()
    optimizer = torch.optim.Adam(net.parameters(), 1e-3)
    distances = []
    for _ in range(30):
        net(images(8))
        distance = distillation(net)
        distances.append(distance.item())
        optimizer.zero_grad()
        distance.backward()
        optimizer.step()
    assert distances[-1] < 0.7 * distances[0]


def test_the_teacher_is_neither_trained_nor_saved_but_moves_along() -> None:
    model = own_vit()
    was = copy.deepcopy(model.state_dict())
    net = trained(begun(QVit(model, config())))
    assert not any("teacher" in name for name in net.state_dict())
    assert sum(p.numel() for p in net.parameters()) < 1.2 * sum(p.numel() for p in model.parameters())
    teacher = net._teacher[0]
    for name, tensor in was.items():
        assert torch.equal(teacher.state_dict()[name], tensor)
        assert torch.equal(model.state_dict()[name], tensor)
    assert not hasattr(model, "pwfn_activations")
    assert not teacher.training
    net.to(torch.float64)
    assert {p.dtype for p in (*teacher.parameters(), *net.parameters())} == {torch.float64}


def test_no_teacher_is_asked_where_nothing_is_learned() -> None:
    net = network().eval()
    net(images())
    assert net.loss_term(torch.tensor(0.0)) is None
    net.train()
    with torch.no_grad():
        net(images())
    assert net.loss_term(torch.tensor(0.0)) is None


# From beginning to end


@NETWORKS
@ACTIVATIONS
def test_the_file_computes_what_was_trained(make: Any, activation_bits: int | None, tmp_path: Path) -> None:
    net = trained(network(make, activation_bits=activation_bits)).eval()
    x = images(6)
    with torch.no_grad():
        in_training = net(x)
        rounded = net.rounded().eval()
        net.fix(1.0)
        final = net(x)
        assert torch.equal(final, in_training)
        assert torch.equal(rounded(x), final)
        net.finish().save(tmp_path / "vit.pwfn")
        again = load(tmp_path / "vit.pwfn").apply_to(make()).eval()
        assert torch.equal(again(x), final)
        assert not torch.equal(make()(x), final)
        other = FixedNetwork(net, load(tmp_path / "vit.pwfn"))
        assert torch.equal(other.eval()(x), final)


@ACTIVATIONS
def test_the_state_dict_is_enough_to_resume(activation_bits: int | None) -> None:
    net = trained(network(activation_bits=activation_bits), steps=2)
    other = QVit(own_vit(), config(activation_bits=activation_bits))
    other.load_state_dict(net.state_dict())
    ends = []
    for each in (net, other):
        trained(each, steps=2).fix(1.0)
        ends.append(each.finish().values())
    assert torch.equal(*ends)


def test_a_copy_can_be_made_between_forward_and_term() -> None:
    net = network().train()
    net(images())
    assert copy.deepcopy(net).loss_term(torch.tensor(0.0)) is None
    assert net.loss_term(torch.tensor(0.0)) is not None


def test_a_step_reaches_every_parameter_and_waits_for_nothing() -> None:
    net = network(timm_vit, activation_bits=2).train()
    with NoWaiting():
        loss = F.cross_entropy(net(images(4)), torch.arange(4))
        (loss + distillation(net)).backward()
    for name, parameter in net.named_parameters():
        assert parameter.grad is not None, name
        assert torch.isfinite(parameter.grad).all(), name
        if not name.endswith("offset"):  # whose gradient is 0 where nothing is clipped
            assert parameter.grad.abs().sum() > 0, name


class Packed(nn.Module):
    """``nn.MultiheadAttention`` computes its attention within one function of torch."""

    def __init__(self) -> None:
        super().__init__()
        self.attn = nn.MultiheadAttention(4, 2, batch_first=True)

    def forward(self, x: Tensor) -> Any:
        return self.attn(x, x, x)[0]


def test_networks_whose_attention_cannot_be_reached_are_refused() -> None:
    with pytest.raises(LayoutError, match="Q-ViT needs transformer blocks"):
        QVit(digits_resnet(), config())
    with pytest.raises(LayoutError, match="scaled_dot_product_attention"):
        begun(QVit(Packed(), config()), torch.randn(2, 3, 4))
