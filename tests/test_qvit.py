"""Q-ViT whole: codebooks by head and channel, the teacher, and that the file computes what was trained."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import look_with
from test_activations import NoQuestions
from test_attention import NETWORKS, images, own_vit, timm_vit
from torch import Tensor, nn
from torch.nn import functional as F

from pwfn import Config, ConfigError, LayoutError, load
from pwfn.lab.activations import attach, capturing, plan_capture, similarity_distance
from pwfn.lab.baselines.qvit import QVit
from pwfn.lab.quantisers import LsqQuantiser, PartsQuantiser
from pwfn.layout import Layout
from pwfn.zoo.models import digits_resnet

SETTINGS = {"method": "q-vit", "quantiser.bits": 3}


def config(**changes: Any) -> Config:
    return Config().override(SETTINGS | {name.replace("__", "."): value for name, value in changes.items()})


def network(make: Any = own_vit, **changes: Any) -> QVit:
    """Begun with a first batch."""
    net = QVit(make(), config(**changes))
    net.begin(look_with(lambda module: module(images())))
    return net


def trained(net: QVit, steps: int = 3) -> QVit:
    torch.manual_seed(0)
    net.train()
    optimizer = net.optimizer(0, alone=True)
    for _ in range(steps):
        loss = F.cross_entropy(net(images(4)), torch.arange(4))
        term = net.term(loss)
        assert isinstance(term, Tensor)
        (loss + term).backward()
        optimizer.step()
        optimizer.zero_grad()
    return net


# Weights


@pytest.mark.parametrize("make", NETWORKS)
def test_codebooks_by_head_and_by_channel(make: Any) -> None:
    net = trained(network(make), steps=1)
    net.between(1, 1.0)
    compressed = net.finish()
    layout = compressed.layout
    sizes = {
        entry.name: [compressed.codebooks[book].numel() for book in division.codebooks]
        for entry, division in zip(layout.entries, compressed.divisions, strict=True)
    }
    heads = {entry.attention.heads for entry in layout.entries if entry.attention}
    assert len(heads) == 1
    for name, books in sizes.items():
        entry = layout.entry(name)
        parts = 3 * heads.copy().pop() if entry.attention else entry.shape[0]
        assert len(books) == parts, name
        assert max(books) <= (2**8 if entry.layer in layout.ends else 2**3), name
    assert not any(name.endswith("bias") for name in sizes)
    # Every head's values are multiples of one step, its own.
    qkv = layout.entry("blocks.0.attn.qkv.weight")
    step = net.get_submodule(f"quantisers.{layout.entries.index(qkv)}").lsq.step
    rows = compressed.values()[qkv.span].view(len(step), -1) / step.detach().view(-1, 1)
    assert torch.allclose(rows, rows.round(), atol=1e-4)
    assert rows.min() >= -4
    assert rows.max() <= 3


def test_other_codebooks_can_be_had_and_the_networks_cannot() -> None:
    for codebooks, parts in (("layer", 1), ("channel", 72), ("head", 9)):
        net = network(quantiser__codebooks=codebooks)
        assert net.divided(net.layout.entry("blocks.0.attn.qkv.weight"))[1] == parts
    with pytest.raises(
        ConfigError, match=r'codebooks is "network": q-vit can have "layer", "channel", "head"'
    ):
        network(quantiser__codebooks="network")


@pytest.mark.parametrize("axis", [0, 1])
def test_a_quantiser_of_parts_is_one_quantiser_for_each(axis: int) -> None:
    weight = torch.randn(6, 9, generator=torch.Generator().manual_seed(0), requires_grad=True)
    quantiser = PartsQuantiser(weight, 3, axis, 3)
    out = quantiser(weight)
    pieces = [piece.detach().requires_grad_() for piece in weight.chunk(3, axis)]
    alone = [LsqQuantiser.for_weights(piece, 3) for piece in pieces]
    wanted = torch.cat([one(piece) for one, piece in zip(alone, pieces, strict=True)], axis)
    assert torch.equal(out, wanted)
    out.square().sum().backward()
    wanted.square().sum().backward()
    assert weight.grad is not None
    assert torch.allclose(
        weight.grad, torch.cat([piece.grad for piece in pieces if piece.grad is not None], axis)
    )
    steps = torch.stack([one.step.grad for one in alone if one.step.grad is not None])
    assert quantiser.lsq.step.grad is not None
    assert torch.allclose(quantiser.lsq.step.grad, steps)


# The teacher


@pytest.mark.parametrize("make", NETWORKS)
def test_the_term_is_the_distance_to_the_network_as_it_came(make: Any) -> None:
    net = network(make).train()
    x = images(4)
    net(x)
    term = net.term(torch.tensor(0.0))
    teacher = attach(make(), plan_capture(Layout.of(make())))
    with capturing(teacher) as theirs, torch.no_grad():
        teacher(x)
    net.eval()
    with capturing(net.model) as ours, torch.no_grad():
        net(x)
    assert isinstance(term, Tensor)
    assert term.item() == pytest.approx(similarity_distance(ours, theirs).item(), rel=1e-5)
    assert term.item() > 0
    assert net.term(torch.tensor(0.0)) is None  # once for each pass


def test_distillation_pulls_the_similarities_to_the_teachers() -> None:
    net = network(quantiser__bits=2)
    net.train()
    optimizer = torch.optim.Adam(net.parameters(), 1e-3)
    distances = []
    for _ in range(30):
        net(images(8))
        term = net.term(torch.tensor(0.0))
        assert isinstance(term, Tensor)
        distances.append(term.item())
        optimizer.zero_grad()
        term.backward()
        optimizer.step()
    assert distances[-1] < 0.7 * distances[0]


def test_the_teacher_is_neither_trained_nor_saved_but_moves_along() -> None:
    model = own_vit()
    was = copy.deepcopy(model.state_dict())
    net = QVit(model, config())
    net.begin(look_with(lambda module: module(images())))
    trained(net)
    assert not any("teacher" in name for name in net.state_dict())
    assert sum(p.numel() for p in net.parameters()) < 1.2 * sum(p.numel() for p in model.parameters())
    teacher = net._teacher[0]
    for name, tensor in was.items():
        assert torch.equal(teacher.state_dict()[name], tensor)
        assert torch.equal(model.state_dict()[name], tensor)
    assert not hasattr(model, "pwfn_activations")
    assert not teacher.training
    net.to(torch.float64)
    assert {p.dtype for p in teacher.parameters()} == {torch.float64}
    assert {p.dtype for p in net.parameters()} == {torch.float64}


def test_no_teacher_is_asked_where_nothing_is_learned() -> None:
    net = network()
    net.eval()
    net(images())
    assert net.term(torch.tensor(0.0)) is None
    net.train()
    with torch.no_grad():
        net(images())
    assert net.term(torch.tensor(0.0)) is None


# From beginning to end


@pytest.mark.parametrize("make", NETWORKS)
@pytest.mark.parametrize("activation_bits", [None, 4])
def test_the_file_computes_what_was_trained(make: Any, activation_bits: int | None, tmp_path: Path) -> None:
    net = trained(network(make, quantiser__activation_bits=activation_bits))
    net.eval()
    x = images(6)
    with torch.no_grad():
        soft = net(x)
    rounded = net.rounded().eval()
    net.between(1, 1.0)
    with torch.no_grad():
        final = net(x)
    assert torch.equal(final, soft)
    assert torch.equal(rounded(x), final)
    compressed = net.finish()
    compressed.save(tmp_path / "vit.pwfn")
    again = load(tmp_path / "vit.pwfn").apply_to(make()).eval()
    with torch.no_grad():
        assert torch.equal(again(x), final)
        assert not torch.equal(make()(x), final)
    other = QVit(make(), config(quantiser__activation_bits=activation_bits))
    other.adopt(load(tmp_path / "vit.pwfn"))
    other.eval()
    with torch.no_grad():
        assert torch.equal(other(x), final)


@pytest.mark.parametrize("activation_bits", [None, 4])
def test_the_state_dict_is_enough_to_go_on(activation_bits: int | None) -> None:
    net = trained(network(quantiser__activation_bits=activation_bits), steps=2)
    other = QVit(own_vit(), config(quantiser__activation_bits=activation_bits))
    other.load_state_dict(net.state_dict())
    ends = []
    for each in (net, other):
        trained(each, steps=2)
        each.between(2, 1.0)
        ends.append(each.finish().values())
    assert torch.equal(*ends)


def test_a_copy_can_be_made_between_forward_and_term() -> None:
    net = network().train()
    net(images())
    other = copy.deepcopy(net)
    assert other.term(torch.tensor(0.0)) is None
    assert net.term(torch.tensor(0.0)) is not None


@pytest.mark.parametrize("activation_bits", [None, 4])
def test_a_step_waits_for_no_value(activation_bits: int | None) -> None:
    net = network(quantiser__activation_bits=activation_bits).train()
    with NoQuestions():
        loss = net(images()).sum()
        term = net.term(loss)
        assert isinstance(term, Tensor)
        (loss + term).backward()


def test_every_parameter_is_learned() -> None:
    net = network(timm_vit, quantiser__activation_bits=2).train()
    loss = F.cross_entropy(net(images(4)), torch.arange(4))
    term = net.term(loss)
    assert isinstance(term, Tensor)
    (loss + term).backward()
    for name, parameter in net.named_parameters():
        assert parameter.grad is not None, name
        assert torch.isfinite(parameter.grad).all(), name
        if not name.endswith("offset"):  # whose gradient is 0 where nothing is clipped
            assert parameter.grad.abs().sum() > 0, name


def test_networks_without_transformer_blocks_are_refused() -> None:
    with pytest.raises(LayoutError, match="Q-ViT needs transformer blocks; choose another method"):
        QVit(digits_resnet(), config())
    unfused = timm_vit()
    for block in unfused.blocks:
        block.attn.fused_attn = False
    net = QVit(unfused, config())
    with pytest.raises(LayoutError, match="does not go through torch's scaled_dot_product_attention"):
        net.begin(look_with(lambda module: module(images())))
    packed = QVit(Packed(), config())
    with pytest.raises(LayoutError, match="does not go through torch's scaled_dot_product_attention"):
        packed.begin(look_with(lambda module: module(torch.randn(2, 3, 4))))


class Packed(nn.Module):
    """``nn.MultiheadAttention`` computes its attention within one function of torch."""

    def __init__(self) -> None:
        super().__init__()
        self.attn = nn.MultiheadAttention(4, 2, batch_first=True)

    def forward(self, x: Tensor) -> Any:
        return self.attn(x, x, x)[0]
