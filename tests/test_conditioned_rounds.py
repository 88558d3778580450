"""PWFN whose free weights move to their conditional mean after every fixing."""

from __future__ import annotations

import copy

import pytest
import torch
from cases import numbers
from conditioned_rounds import ConditionedRounds
from torch import nn

from pwfn import DataError, GaussianNetwork
from pwfn.bayes.batches import Batch
from pwfn.bayes.method import DataProbe


def test_free_weights_take_up_the_error_of_those_just_fixed() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 5)).eval()
    inputs = numbers(256, 3) @ numbers(3, 8)  # correlated
    plain, own = GaussianNetwork(copy.deepcopy(model)).eval(), ConditionedRounds(copy.deepcopy(model)).eval()
    own.data = DataProbe(lambda module: None, lambda: 0.0, lambda count: [Batch((inputs,), {}, None)])
    for net in (plain, own):
        net.fix(0.6)
    assert own.fixed.equal(plain.fixed)
    assert own.mu[own.fixed].equal(plain.mu[own.fixed])
    assert not own.mu[~own.fixed].equal(plain.mu[~own.fixed])
    with torch.no_grad():
        errors = [float((net(inputs) - model(inputs)).square().mean()) for net in (own, plain)]
    assert errors[0] < 0.5 * errors[1]
    assert own.fix(1.0).fixed == own.layout.size


def test_without_inputs_it_says_so() -> None:
    with pytest.raises(DataError, match=r"net\.data"):
        ConditionedRounds(nn.Linear(4, 3)).fix(0.5)
