"""Quantised inputs of layers: what a description says, where they start, and that copies and files agree."""

from __future__ import annotations

import copy
import json
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from cases import grouped_convnet
from torch import Tensor, nn
from torch.func import functional_call
from waiting import NoWaiting

from pwfn import LayoutError
from pwfn.errors import WeightError
from pwfn.lab.activations import ActivationKind, attach, describe, observing, plan
from pwfn.lab.activations.quantise import ActivationQuantiser
from pwfn.layout import Layout

LSQ = ActivationKind.LSQ
KINDS = pytest.mark.parametrize("kind", [LSQ, ActivationKind.LSQ_PLUS, ActivationKind.APOT])


def images(count: int = 4) -> Tensor:
    return torch.randn(count, 3, 7, 7, generator=torch.Generator().manual_seed(2))


def planned(model: nn.Module, kind: ActivationKind = LSQ, bits: int = 4) -> dict[str, Any]:
    """Q-ViT's plan needs attention: for other models, the same inputs with a step per channel."""
    if kind is not ActivationKind.QVIT:
        return plan(model, Layout.of(model), kind, bits)
    description = plan(model, Layout.of(model), LSQ, bits) | {"kind": "q-vit"}
    for row, channels in zip(description["inputs"], (3, 4, 54), strict=True):
        row["channels"] = channels
    return description


def started(kind: ActivationKind, bits: int = 4, model: nn.Module | None = None) -> nn.Module:
    """An attached network that has seen one batch, in evaluation mode."""
    model = (grouped_convnet() if model is None else model).eval()
    attach(model, planned(model, kind, bits))
    with observing(model), torch.no_grad():
        model(images().to(next(model.parameters()).dtype))
    return model


def started_quantiser(kind: ActivationKind, bits: int, x: Tensor, *where: int) -> ActivationQuantiser:
    quantiser = ActivationQuantiser(kind, bits, *where)
    quantiser.observing = True
    quantiser(x)
    return quantiser


def seen_by(model: nn.Module, layer: str, *, before_quantiser: bool = False) -> Tensor:
    """The input of a layer, behind or before its quantiser."""
    seen: list[Tensor] = []
    handle = model.get_submodule(layer).register_forward_pre_hook(
        lambda _, args: seen.append(args[0]), prepend=before_quantiser
    )
    with torch.no_grad():
        model(images())
    handle.remove()
    return seen[0]


# The plan


def test_the_plan_has_8_bits_at_the_ends_unless_they_are_included() -> None:
    model = grouped_convnet()
    for include_ends, bits in ((False, [8, 3, 8]), (True, [3, 3, 3])):
        description = plan(model, Layout.of(model), LSQ, 3, include_ends=include_ends)
        assert [(row["layer"], row["bits"]) for row in description["inputs"]] == list(
            zip("035", bits, strict=True)
        )
        assert description["attention"] == []


def test_a_layer_that_has_two_names_and_one_that_shares_a_weight_are_planned_once_each() -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.one = nn.Linear(3, 3)
            self.same = self.one
            self.other = nn.Linear(3, 3)
            self.other.weight = self.one.weight

    assert [row["layer"] for row in planned(Tied())["inputs"]] == ["one", "other"]


def test_layers_whose_inputs_cannot_be_reached_are_refused() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.MultiheadAttention(4, 2))
    with pytest.raises(LayoutError, match=r"1 is a MultiheadAttention.*activation_bits"):
        planned(model)


@KINDS
def test_the_description_is_json_and_makes_the_same_again(kind: ActivationKind) -> None:
    model = started(kind)
    description = describe(model)
    assert json.loads(json.dumps(description)) == description
    again = attach(grouped_convnet(), description)
    assert describe(again) == description
    assert [(n, t.shape) for n, t in again.state_dict().items()] == [
        (n, t.shape) for n, t in model.state_dict().items()
    ]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda d: d.update(kind="lsqq"), "kind is 'lsqq'"),
        (lambda d: d.pop("attention"), "must have exactly 'kind', 'inputs', 'attention'"),
        (lambda d: d.update(inputs={}), "inputs is a dict"),
        (lambda d: d["inputs"][1].update(bits=9), r"inputs\[1\]: bits is 9"),
        (lambda d: d["inputs"][1].update(bits=True), "bits is True"),
        (lambda d: d["inputs"][1].update(signed=1), "signed is 1"),
        (lambda d: d["inputs"][0].pop("signed"), r"inputs\[0\] must have exactly 'layer'"),
        (lambda d: d["inputs"].append(None), r"inputs\[3\] must have exactly.* is None"),
        (lambda d: d["inputs"][0].update(layer="conv9"), "'conv9'"),
        (lambda d: d["inputs"][0].update(layer="3"), "'3' twice"),
        (lambda d: d["inputs"][0].update(layer="1"), "1 is BatchNorm2d"),
        (lambda d: d["inputs"][0].update(channels=3), "only q-vit"),
        (lambda d: d["inputs"][0].update(channels=0), "channels is 0"),
        (lambda d: (d["inputs"][0].update(channels=4), d.update(kind="q-vit")), "0 is Conv2d.*of 4 inputs"),
        (lambda d: d.update(attention=[{"module": "0"}]), r"attention\[0\] must have"),
    ],
)
def test_a_description_that_does_not_fit_is_refused(
    change: Callable[[dict[str, Any]], Any], message: str
) -> None:
    model = grouped_convnet()
    description = planned(model)
    change(description)
    with pytest.raises(LayoutError, match=message):
        attach(model, description)
    assert not any(module._forward_pre_hooks for module in model.modules())  # nothing is half done


def test_attaching_twice_is_refused_and_describing_nothing() -> None:
    model = started(LSQ)
    with pytest.raises(LayoutError, match="already has pwfn_activations"):
        attach(model, describe(model))
    with pytest.raises(LayoutError, match="has no pwfn_activations"):
        describe(grouped_convnet())


# The start


def test_lsq_starts_from_the_mean_of_what_comes_by_and_sees_the_sign() -> None:
    model = started(LSQ, bits=2)
    # Images have both signs; behind a ReLU there is one; behind a convolution again both.
    assert [row["signed"] for row in describe(model)["inputs"]] == [True, False, True]
    for i, layer in ((0, "0"), (2, "5")):  # each as the quantised layers before it make it
        step = model.get_parameter(f"pwfn_activations.inputs.{i}.quantiser.step").item()
        mean = seen_by(model, layer, before_quantiser=True).abs().mean().item()
        assert step == pytest.approx(2 * mean / math.sqrt(127), rel=1e-6)
    unquantised = seen_by(grouped_convnet().eval(), "5").abs().mean().item()
    assert mean != pytest.approx(unquantised, rel=1e-3)
    hidden = seen_by(model, "3")
    assert hidden.min() >= 0
    assert hidden.unique().numel() <= 4


@pytest.mark.parametrize("kind", ActivationKind)
@pytest.mark.parametrize("bits", [2, 3, 8])
@pytest.mark.parametrize("lowest", [-3.0, 0.0])
def test_a_started_quantiser_has_no_more_values_than_bits_and_is_near(
    kind: ActivationKind, bits: int, lowest: float
) -> None:
    x = torch.randn(3, 5, 41, generator=torch.Generator().manual_seed(0)).clamp_min(lowest)
    quantiser = started_quantiser(kind, bits, x)
    quantised = quantiser(x)
    assert quantiser.signed is (lowest < 0)
    assert quantised.unique().numel() <= 2**bits
    assert (quantised - x).square().mean() < {2: 0.5, 3: 0.2, 8: 0.01}[bits] * x.square().mean()


def test_q_vit_has_a_step_for_each_input_channel() -> None:
    x = torch.tensor([[1.0, -4.0], [-3.0, 8.0]])
    quantiser = started_quantiser(ActivationKind.QVIT, 2, x, 2, -1)
    # 2 mean|x| / sqrt(Q_P), with Q_P = 1 for two signed bits
    assert quantiser.get_parameter("quantiser.step").tolist() == [4.0, 12.0]
    assert quantiser.get_parameter("quantiser.offset").tolist() == [0.0, 0.0]


def test_a_start_is_fitted_to_some_of_many_values_as_well_as_to_all() -> None:
    x = torch.randn(2, 100_000, generator=torch.Generator().manual_seed(0))
    error = (started_quantiser(ActivationKind.LSQ_PLUS, 3, x)(x) - x).square().mean().item()
    assert error == pytest.approx(0.03744, rel=0.02)  # the least of 8 uniform levels (Max, 1960)


def test_only_the_first_batch_gives_a_start() -> None:
    model = grouped_convnet().eval()
    attach(model, planned(model))
    with observing(model), torch.no_grad():
        model(images())
        before = copy.deepcopy(model.state_dict())
        model(3 * images())
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())


def test_without_a_start_a_pass_is_refused_and_so_is_a_layer_that_nothing_reaches() -> None:
    model = grouped_convnet()
    attach(model, planned(model))
    with pytest.raises(WeightError, match=r"no starting values.*observing"):
        model(images())

    class Aside(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.used, self.aside = nn.Linear(2, 2), nn.Linear(2, 2)

        def forward(self, x: Tensor) -> Tensor:
            return self.used(x)

    other = Aside()
    attach(other, planned(other))
    with pytest.raises(LayoutError, match="aside: no input reached it"), observing(other):
        other(torch.ones(1, 2))


def test_an_input_given_by_name_is_quantised_too() -> None:
    class Named(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(2, 2)

        def forward(self, x: Tensor, name: str | None = None) -> Tensor:
            return self.layer(**{name: x}) if name else self.layer(x)

    model, x = Named(), torch.tensor([[0.1, 0.7]])
    plain = model(x)
    attach(model, plan(model, Layout.of(model), LSQ, 2, include_ends=True))
    with observing(model):
        model(x)
    assert torch.equal(model(x, "input"), model(x))
    assert not torch.equal(model(x), plain)
    with pytest.raises(LayoutError, match="called with other"):
        model(x, "other")


# Copies, files, other ways to call


@pytest.mark.parametrize("kind", ActivationKind)
def test_a_state_dict_alone_makes_a_network_that_computes_the_same(kind: ActivationKind) -> None:
    model, x = started(kind), images(9)
    # From the plan, whose signs are unknown, as after a crash; from the description, as from a file.
    for description in (planned(grouped_convnet(), kind), describe(model)):
        again = attach(grouped_convnet().eval(), description)
        again.load_state_dict(model.state_dict())
        assert torch.equal(again(x), model(x))
        assert describe(again) == describe(model)


@KINDS
def test_copies_are_independent_and_functional_call_uses_the_tensors_it_is_given(
    kind: ActivationKind,
) -> None:
    model, x = started(kind), images(5)
    was = model(x)
    other = copy.deepcopy(model)
    assert torch.equal(other(x), was)
    with torch.no_grad():
        for parameter in other.get_submodule("pwfn_activations").parameters():
            parameter.mul_(3)
    assert torch.equal(model(x), was)
    assert not torch.equal(other(x), was)
    assert torch.equal(functional_call(model, dict(other.named_parameters()), (x,)), other(x))


@KINDS
def test_a_step_gives_every_learned_tensor_a_gradient_and_waits_for_nothing(kind: ActivationKind) -> None:
    model = started(kind, bits=2)
    with NoWaiting():
        model(images()).square().sum().backward()
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None, name
        assert parameter.grad.abs().sum() > 0, name


def test_under_autocast_codes_are_those_of_float32() -> None:
    x = torch.linspace(0, 255, 256).to(torch.bfloat16)  # every integer to 255 is a bfloat16
    quantiser = started_quantiser(LSQ, 8, x.float())
    quantiser.get_parameter("quantiser.step").data.fill_(1.5)
    with torch.autocast("cpu", torch.bfloat16):
        quantised = quantiser(x)
    # 97 / 1.5 = 64.67 has the code 65; as a bfloat16 it is 64.5, which rounds to 64.
    assert torch.equal(quantised, ((x.float() / 1.5).round() * 1.5).to(torch.bfloat16))
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.isfinite(started(LSQ)(images())).all()


@KINDS
def test_a_float64_network_stays_one(kind: ActivationKind) -> None:
    model = started(kind, model=grouped_convnet().double())
    assert model(images().double()).dtype == torch.float64
    assert {p.dtype for p in model.parameters()} == {torch.float64}
