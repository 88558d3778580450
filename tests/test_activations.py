"""Quantised inputs of layers: what a description says, where they start, and that copies and files agree."""

from __future__ import annotations

import copy
import json
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.utils._python_dispatch import TorchDispatchMode

from pwfn import LayoutError
from pwfn.errors import WeightError
from pwfn.lab.activations import ActivationKind, attach, describe, observing, plan
from pwfn.lab.activations.quantising import ActivationQuantiser
from pwfn.layout import Layout

KINDS = [ActivationKind.LSQ, ActivationKind.LSQ_PLUS, ActivationKind.APOT]


def convnet() -> nn.Module:
    torch.manual_seed(1)
    return nn.Sequential(
        nn.Conv2d(3, 4, 3, bias=False),
        nn.BatchNorm2d(4),
        nn.ReLU(),
        nn.Conv2d(4, 6, 3, groups=2),
        nn.Flatten(),
        nn.Linear(6 * 3 * 3, 5),
    )


def images(count: int = 4) -> Tensor:
    return torch.randn(count, 3, 7, 7, generator=torch.Generator().manual_seed(2))


def started(kind: ActivationKind, bits: int = 4, model: nn.Module | None = None) -> nn.Module:
    """An attached network that has seen one batch, in evaluation mode."""
    model = (convnet() if model is None else model).eval()
    attach(model, plan(model, Layout.of(model), kind, bits))
    with observing(model), torch.no_grad():
        model(images())
    return model


def inputs_of(model: nn.Module, layer: str, x: Tensor) -> Tensor:
    """What a layer computes with, behind every hook that was there before."""
    seen: list[Tensor] = []
    handle = model.get_submodule(layer).register_forward_pre_hook(lambda _, args: seen.append(args[0]))
    with torch.no_grad():
        model(x)
    handle.remove()
    return seen[0]


# The plan


def test_the_plan_has_8_bits_at_the_ends_unless_they_are_included() -> None:
    model = convnet()
    layout = Layout.of(model)
    for include_ends, bits in ((False, [8, 3, 8]), (True, [3, 3, 3])):
        description = plan(model, layout, ActivationKind.LSQ, 3, include_ends=include_ends)
        assert [row["layer"] for row in description["inputs"]] == ["0", "3", "5"]
        assert [row["bits"] for row in description["inputs"]] == bits
        assert description["attention"] == []


def test_a_layer_that_has_two_names_and_one_that_shares_a_weight_are_planned_once_each() -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.one = nn.Linear(3, 3)
            self.same = self.one
            self.other = nn.Linear(3, 3)
            self.other.weight = self.one.weight

    model = Tied()
    description = plan(model, Layout.of(model), ActivationKind.LSQ, 4)
    assert [row["layer"] for row in description["inputs"]] == ["one", "other"]


def test_layers_whose_inputs_cannot_be_reached_are_refused() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.MultiheadAttention(4, 2))
    with pytest.raises(LayoutError, match=r"1 is a MultiheadAttention.*activation_bits"):
        plan(model, Layout.of(model), ActivationKind.LSQ, 4)


@pytest.mark.parametrize("kind", KINDS)
def test_the_description_is_json_and_makes_the_same_again(kind: ActivationKind) -> None:
    model = started(kind)
    description = describe(model)
    assert json.loads(json.dumps(description)) == description
    again = attach(convnet(), description)
    assert describe(again) == description
    assert {n: t.shape for n, t in again.state_dict().items()} == {
        n: t.shape for n, t in model.state_dict().items()
    }


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda d: d.update(kind="lsqq"), r"kind is 'lsqq': allowed is one of lsq, lsq\+, apot, q-vit"),
        (lambda d: d.pop("attention"), "must have 'kind', 'inputs', 'attention'"),
        (lambda d: d.update(inputs={}), "inputs is a dict: allowed is a list"),
        (
            lambda d: d["inputs"][1].update(bits=9),
            r"inputs\[1\]: bits is 9: allowed is a whole number from 2",
        ),
        (lambda d: d["inputs"][1].update(bits=True), "bits is True"),
        (lambda d: d["inputs"][0].pop("signed"), r"inputs\[0\] must have 'layer'"),
        (lambda d: d["inputs"][0].update(layer="conv9"), "'conv9', and the model has no such layer"),
        (lambda d: d["inputs"][0].update(layer="3"), "has '3' twice"),
        (lambda d: d["inputs"][0].update(layer="1"), "1 is BatchNorm2d.*they do not match"),
        (lambda d: d["inputs"][0].update(channels=4), "0 is Conv2d.*of 4 inputs: they do not match"),
        (lambda d: d.update(attention=[{"module": "0"}]), r"attention\[0\] must have"),
    ],
)
def test_a_description_that_does_not_fit_is_refused(
    change: Callable[[dict[str, Any]], Any], message: str
) -> None:
    model = convnet()
    description = plan(model, Layout.of(model), ActivationKind.LSQ, 4)
    change(description)
    with pytest.raises(LayoutError, match=message):
        attach(model, description)
    assert not any(module._forward_pre_hooks for module in model.modules())  # nothing is half done


def test_attaching_twice_is_refused() -> None:
    model = started(ActivationKind.LSQ)
    with pytest.raises(LayoutError, match="has pwfn_activations already"):
        attach(model, describe(model))
    with pytest.raises(LayoutError, match="has no pwfn_activations"):
        describe(convnet())


# The start


def test_lsq_starts_from_the_mean_and_sees_the_sign() -> None:
    model = started(ActivationKind.LSQ, bits=3)
    rows = describe(model)["inputs"]
    # Images have both signs; behind a ReLU there is one; behind a convolution again both.
    assert [row["signed"] for row in rows] == [True, False, True]
    step = model.get_parameter("pwfn_activations.inputs.0.quantiser.step")
    assert step.item() == pytest.approx(2 * images().abs().mean().item() / math.sqrt(127), rel=1e-6)
    hidden = inputs_of(started(ActivationKind.LSQ, bits=3), "3", images())
    assert hidden.min() >= 0
    assert hidden.unique().numel() <= 8


@pytest.mark.parametrize("kind", [*KINDS, ActivationKind.QVIT])
@pytest.mark.parametrize("bits", [2, 3, 8])
@pytest.mark.parametrize("lowest", [-3.0, 0.0])
def test_a_started_quantiser_has_no_more_values_than_bits_and_is_near(
    kind: ActivationKind, bits: int, lowest: float
) -> None:
    x = torch.randn(3, 5, 41, generator=torch.Generator().manual_seed(0)).clamp_min(lowest)
    quantiser = ActivationQuantiser(kind, bits)
    quantiser.observing = True
    quantised = quantiser(x)
    assert quantiser.signed is (lowest < 0)
    assert quantised.unique().numel() <= 2**bits
    error = (quantised - x).square().mean() / x.square().mean()
    assert error < {2: 0.5, 3: 0.2, 8: 0.01}[bits]


def test_each_layer_sees_its_input_as_the_quantised_layers_before_make_it() -> None:
    model = started(ActivationKind.LSQ, bits=2)
    hidden = inputs_of(convnet().eval(), "5", images())
    wanted = 2 * inputs_before(model, "5").abs().mean() / math.sqrt(127)
    step = model.get_parameter("pwfn_activations.inputs.2.quantiser.step")
    assert step.item() == pytest.approx(wanted.item(), rel=1e-6)
    assert step.item() != pytest.approx(2 * hidden.abs().mean().item() / math.sqrt(127), rel=1e-3)


def inputs_before(model: nn.Module, layer: str) -> Tensor:
    """A layer's input as it comes, before its own quantiser."""
    seen: list[Tensor] = []
    module = model.get_submodule(layer)
    handle = module.register_forward_pre_hook(lambda _, args: seen.append(args[0]), prepend=True)
    with torch.no_grad():
        model(images())
    handle.remove()
    return seen[0]


def test_q_vit_has_a_step_for_each_input_channel() -> None:
    x = torch.tensor([[1.0, -4.0], [-3.0, 8.0]])
    quantiser = ActivationQuantiser(ActivationKind.QVIT, 2, channels=2, axis=-1)
    quantiser.observing = True
    quantiser(x)
    # 2 mean|x| / sqrt(Q_P), with Q_P = 1 for two signed bits
    assert quantiser.get_parameter("quantiser.step").tolist() == [4.0, 12.0]
    assert quantiser.get_parameter("quantiser.offset").tolist() == [0.0, 0.0]


def test_without_a_start_a_pass_is_refused_and_so_is_a_layer_that_nothing_comes_by() -> None:
    model = convnet()
    attach(model, plan(model, Layout.of(model), ActivationKind.LSQ, 4))
    with pytest.raises(WeightError, match=r"no starting values yet.*observing"):
        model(images())

    class Aside(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.used, self.aside = nn.Linear(2, 2), nn.Linear(2, 2)

        def forward(self, x: Tensor) -> Tensor:
            out: Tensor = self.used(x)
            return out

    other = Aside()
    attach(other, plan(other, Layout.of(other), ActivationKind.LSQ, 4))
    with pytest.raises(LayoutError, match="aside: no input came by"), observing(other):
        other(torch.ones(1, 2))


def test_an_input_given_by_name_is_quantised_too() -> None:
    class Named(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(2, 2)

        def forward(self, x: Tensor, by_name: bool) -> Tensor:
            out: Tensor = self.layer(input=x) if by_name else self.layer(x)
            return out

    model = Named()
    attach(model, plan(model, Layout.of(model), ActivationKind.LSQ, 2, include_ends=True))
    x = torch.tensor([[0.1, 0.7]])
    with observing(model):
        model(x, False)
    assert torch.equal(model(x, True), model(x, False))
    assert not torch.equal(model(x, True), nn.functional.linear(x, model.layer.weight, model.layer.bias))


# Copies, files, other ways to call


@pytest.mark.parametrize("kind", [*KINDS, ActivationKind.QVIT])
def test_a_state_dict_alone_makes_a_network_that_computes_the_same(kind: ActivationKind) -> None:
    if kind is ActivationKind.QVIT:  # whose plan needs attention: the inputs alone
        model = convnet().eval()
        description = plan(model, Layout.of(model), ActivationKind.LSQ, 4) | {"kind": "q-vit"}
        for row, channels in zip(description["inputs"], (3, 4, 54), strict=True):
            row["channels"] = channels
        attach(model, description)
        with observing(model), torch.no_grad():
            model(images())
    else:
        model, description = started(kind), None
    x = images(9)
    fresh = convnet().eval()
    # From the plan, whose signs are unknown, as after a crash; from the description, as from a file.
    before = description or plan(fresh, Layout.of(fresh), kind, 4)
    for facts in (before, describe(model)):
        again = attach(convnet().eval(), facts)
        again.load_state_dict(model.state_dict())
        assert torch.equal(again(x), model(x))
        assert describe(again) == describe(model)


@pytest.mark.parametrize("kind", KINDS)
def test_a_deep_copy_is_independent(kind: ActivationKind) -> None:
    model = started(kind)
    x = images(5)
    was = model(x)
    other = copy.deepcopy(model)
    assert torch.equal(other(x), was)
    with torch.no_grad():
        for parameter in other.get_submodule("pwfn_activations").parameters():
            parameter.mul_(3)
    assert torch.equal(model(x), was)
    assert not torch.equal(other(x), was)


@pytest.mark.parametrize("kind", KINDS)
def test_functional_call_uses_the_tensors_it_is_given(kind: ActivationKind) -> None:
    model = started(kind)
    x = images(5)
    tripled = {name: p.detach() * (3 if "pwfn" in name else 1) for name, p in model.named_parameters()}
    other = copy.deepcopy(model)
    other.load_state_dict(tripled, strict=False)
    assert torch.equal(functional_call(model, tripled, (x,)), other(x))


@pytest.mark.parametrize("kind", KINDS)
def test_every_learned_tensor_gets_a_gradient(kind: ActivationKind) -> None:
    model = started(kind, bits=2)
    model(images()).square().sum().backward()
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None, name
        assert parameter.grad.abs().sum() > 0, name


def test_under_autocast_codes_are_those_of_float32() -> None:
    x = torch.linspace(0, 255, 256).to(torch.bfloat16)  # every whole number to 255 is a bfloat16
    quantiser = ActivationQuantiser(ActivationKind.LSQ, 8)
    quantiser.observing = True
    quantiser(x.float())
    with torch.no_grad():
        quantiser.get_parameter("quantiser.step").fill_(1.001)
    with torch.autocast("cpu", torch.bfloat16):
        codes = quantiser(x).float() / 1.001
    assert quantiser(x).dtype == torch.bfloat16
    # Half a unit of bfloat16 in 255 is 0.5: nearer than that, the codes are x / 1.001 rounded.
    assert (codes - (x.float() / 1.001).round()).abs().max() < 0.51
    model = started(ActivationKind.LSQ)
    with torch.autocast("cpu", torch.bfloat16):
        out = model(images())
    assert torch.isfinite(out).all()


@pytest.mark.parametrize("kind", KINDS)
def test_a_float64_network_stays_one(kind: ActivationKind) -> None:
    model = convnet().double().eval()
    attach(model, plan(model, Layout.of(model), kind, 4))
    with observing(model), torch.no_grad():
        out = model(images().double())
    assert out.dtype == torch.float64
    assert {p.dtype for p in model.parameters()} == {torch.float64}


class NoQuestions(TorchDispatchMode):
    """Fails where a program waits for a value: a recorded step has none to give."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        assert func is not torch.ops.aten._local_scalar_dense.default
        assert func is not torch.ops.aten.nonzero.default
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("kind", KINDS)
def test_a_step_waits_for_no_value(kind: ActivationKind) -> None:
    model = started(kind)
    with NoQuestions():
        model(images()).sum().backward()
    fresh = convnet()
    attach(fresh, plan(fresh, Layout.of(fresh), kind, 4))
    with pytest.raises(AssertionError), NoQuestions(), observing(fresh):  # the start looks at signs
        fresh(images())


def test_a_start_is_fitted_to_some_of_many_values_as_well_as_to_all() -> None:
    x = torch.randn(2, 100_000, generator=torch.Generator().manual_seed(0))
    quantiser = ActivationQuantiser(ActivationKind.LSQ_PLUS, 3)
    quantiser.observing = True
    error = (quantiser(x) - x).square().mean().item()
    assert error == pytest.approx(
        0.03744, rel=0.02
    )  # the least of a uniform quantiser of 8 levels (Max, 1960)
