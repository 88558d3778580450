"""Gradient checkpointing inside a model: backward computes parts of a pass again, with its weights."""

from __future__ import annotations

import copy
import gc
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from cases import timm_vit, tiny_gpt2
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from pwfn import Config, GaussianNetwork, compress
from pwfn.bayes.method import METHODS
from pwfn.bayes.network import tensors_of
from pwfn.lab.baselines import find

find("lsq")  # registers the rivals
DATA = [(torch.randn(8, 6), torch.randint(0, 3, (8,))) for _ in range(4)]


class Checkpointed(nn.Module):
    """Two blocks that backward computes again, where ``how`` is set; norms and dropout."""

    def __init__(self, how: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.how = how
        self.stem, self.norm = nn.Linear(6, 8), nn.BatchNorm1d(8)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8), nn.Dropout(0.2), nn.GELU(), nn.Linear(8, 8))
            for _ in range(2)
        )
        self.head = nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(self.stem(x))
        for block in self.blocks:
            again = self.how and self.training
            x = x + (checkpoint(block, x, use_reentrant=self.how == "re-entrant") if again else block(x))
        return self.head(x)


HOWS = ["re-entrant", "not re-entrant"]


def gradients(net: GaussianNetwork, passes: int) -> list[Tensor]:
    """Of the sum of several passes, each with its own noise."""
    torch.manual_seed(1)
    losses = [(n + 1) * F.cross_entropy(net(x), y) for n, (x, y) in zip(range(passes), DATA, strict=False)]
    sum(losses, torch.zeros(())).backward()
    return [p.grad for p in net.parameters() if p.grad is not None]


@pytest.mark.parametrize("exclude", [[], ["stem.*", "head.*"]], ids=["all", "blocks alone"])
@pytest.mark.parametrize("passes", [1, 3])
@pytest.mark.parametrize("how", HOWS)
def test_gradients_are_those_without_it(how: str, passes: int, exclude: list[str]) -> None:
    """Also where every compressed weight is in a block, and where one backward is of several passes."""
    config = Config().override({"layout.exclude": exclude, "training.sigma_learning_rate": 0.1})
    plain, net = (GaussianNetwork(Checkpointed(each), config).train() for each in ("", how))
    for found, wanted in zip(gradients(net, passes), gradients(plain, passes), strict=True):
        torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-7)
    names = {name for name, _ in net.named_parameters()}
    assert names == {name for name, _ in plain.named_parameters()}  # no weight of a pass is left in the model
    copy.deepcopy(net).eval()(DATA[0][0])


STRUCTURES: list[Callable[[Tensor], Any]] = [
    lambda x: {"logits": (x,), "other": [1, None]},
    lambda x: SimpleNamespace(scores=x),
    lambda x: torch.distributions.Categorical(logits=x),
]


@pytest.mark.parametrize("structure", STRUCTURES, ids=["containers", "object", "distribution"])
def test_outputs_may_be_structures(structure: Callable[[Tensor], Any]) -> None:
    class Several(Checkpointed):
        def forward(self, x: Tensor) -> Any:
            return structure(super().forward(x))

    found = []
    for how in ("", *HOWS):
        net = GaussianNetwork(Several(how)).train()
        torch.manual_seed(1)
        next(tensors_of(net(DATA[0][0]))).square().sum().backward()
        found.append(net.free_mu.grad)
    for gradient in found[1:]:
        torch.testing.assert_close(gradient, found[0], rtol=1e-5, atol=1e-7)


def test_after_a_backward_that_failed_the_next_pass_is_sound() -> None:
    net = GaussianNetwork(Checkpointed("not re-entrant")).train()
    loss = net(DATA[0][0]).sum()
    hook = net.model.get_submodule("blocks.0").register_forward_pre_hook(lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        loss.backward()
    hook.remove()
    net.zero_grad()
    plain = GaussianNetwork(Checkpointed("")).train()
    for found, wanted in zip(gradients(net, 1), gradients(plain, 1), strict=True):
        torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-7)


def brief(name: str, **changes: Any) -> Config:
    rounds = {"schedule.fractions": [0.5, 1.0], "schedule.epochs_per_round": [1.0, 1.0]}
    if name not in ("pwfn", "wfn"):
        rounds = {"schedule.fractions": [1.0], "schedule.epochs_per_round": [1.0]}
    changes = {key.replace("__", "."): value for key, value in changes.items()}
    return Config.preset("recommended", name).override({**rounds, "finish.polish_epochs": 1.0, **changes})


CHANGES: list[dict[str, Any]] = [
    {},
    {"training__accumulate": 2},
    {"training__precision": "bf16"},
    {"training__precision": "fp16"},
    {"training__distill": True},
]


def assert_same_run(config: Config, how: str) -> None:
    found, wanted = (compress(Checkpointed(each), DATA, config=config) for each in (how, ""))
    torch.testing.assert_close(found.compressed.values(), wanted.compressed.values())
    for name, tensor in wanted.compressed.untouched.items():
        torch.testing.assert_close(found.compressed.untouched[name], tensor, rtol=1e-2, atol=1e-3)


@pytest.mark.parametrize("how", HOWS)
@pytest.mark.parametrize("changes", CHANGES, ids=str)
def test_a_run_is_that_without_it(changes: dict[str, Any], how: str) -> None:
    assert_same_run(brief("pwfn", **changes), how)


@pytest.mark.parametrize("how", HOWS)
@pytest.mark.parametrize("name", [name for name in METHODS if name not in ("pwfn", "q-vit")])
def test_every_rival_runs_as_without_it(name: str, how: str) -> None:
    assert_same_run(brief(name), how)


def test_q_vit_with_timms_own_switch() -> None:
    images = [(torch.randn(4, 3, 8, 8), torch.randint(0, 5, (4,))) for _ in range(3)]
    results = []
    for switched in (False, True):
        model: Any = timm_vit()
        model.set_grad_checkpointing(switched)
        results.append(compress(model, images, config=brief("q-vit")))
    found, wanted = (result.compressed.values() for result in results)
    torch.testing.assert_close(found, wanted)


@pytest.mark.parametrize("kwargs", [None, {"use_reentrant": True}], ids=["default", "re-entrant"])
def test_transformers_own_switch(kwargs: dict[str, Any] | None) -> None:
    torch.manual_seed(0)
    tokens = [{"input_ids": t, "labels": t} for t in torch.randint(0, 37, (3, 4, 9))]

    def next_token(output: Tensor, target: Tensor) -> Tensor:
        return F.cross_entropy(output[:, :-1].flatten(0, 1), target[:, 1:].flatten())

    results = []
    for switched in (False, True):
        torch.manual_seed(0)
        model = tiny_gpt2()
        if switched:
            model.gradient_checkpointing_enable(gradient_checkpointing_kwargs=kwargs)
        config = brief("pwfn", posterior__init="rms", posterior__rms_fraction=0.1)
        results.append(compress(model, tokens, config=config, loss_fn=next_token))
    found, wanted = (result.compressed.values() for result in results)
    torch.testing.assert_close(found, wanted)


def test_a_step_leaves_nothing_behind():
    """The graph of a pass refers to its weights; a cycle between the two would never be freed."""
    net = GaussianNetwork(nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 3))).train()

    def alive() -> int:
        for x, y in DATA:
            F.cross_entropy(net(x), y).backward()
        net(DATA[0][0])  # a pass without backward, too
        gc.collect()
        return sum(type(item) is Tensor for item in gc.get_objects())

    first = alive()
    assert alive() == first
