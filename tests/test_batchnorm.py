"""BatchNorm statistics gathered again, against values computed by hand."""

from __future__ import annotations

import copy
from collections.abc import Iterable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from pwfn import Config, GaussianNetwork, compress
from pwfn.bayes.batches import Batch, Source
from pwfn.bayes.batchnorm import reestimate_batchnorm, unfolded
from pwfn.bayes.distributed import Distributed
from pwfn.bayes.method import METHODS
from pwfn.errors import DataError
from pwfn.file.fold_batchnorm import fold_batchnorm
from pwfn.lab.baselines import find

find("lsq")  # registers the rivals
SHIFTED = [3 * torch.randn(16, 3, 8, 8, generator=torch.Generator().manual_seed(n)) + 1 for n in range(4)]


def source(loader: Iterable[Any]) -> Source:
    return Source("train_loader", loader, torch.device("cpu"))


def batchnorm_net(**options: Any) -> tuple[nn.Sequential, GaussianNetwork]:
    torch.manual_seed(1)
    model = nn.Sequential(
        nn.Linear(3, 4), nn.BatchNorm1d(4, **options), nn.Dropout(0.5), nn.Linear(4, 2)
    ).double()
    return model, GaussianNetwork(model)


@pytest.mark.parametrize("momentum", [0.1, None])
def test_batchnorm_statistics_are_plain_means_over_batches_at_the_point_estimate(
    momentum: float | None,
) -> None:
    model, net = batchnorm_net(momentum=momentum)
    inputs = [torch.randn(n, 3, dtype=torch.float64) + n for n in (5, 5, 2)]
    net.train()
    assert reestimate_batchnorm(net, source([*inputs, torch.zeros(9, 3)]).batches(), 3, "here") == 1
    linear = model[0]
    activations = [x @ linear.weight.detach().T + linear.bias.detach() for x in inputs]
    layer = net.model.get_submodule("1")
    mean = torch.stack([a.mean(0) for a in activations]).mean(0)
    variance = torch.stack([a.var(0, unbiased=True) for a in activations]).mean(0)
    torch.testing.assert_close(layer.running_mean, mean, rtol=1e-12, atol=1e-14)
    torch.testing.assert_close(layer.running_var, variance, rtol=1e-12, atol=1e-14)
    assert layer.momentum == momentum
    assert net.training
    assert all(module.training for module in net.modules())
    assert torch.equal(model[1].running_mean, torch.zeros(4).double())  # the user's own


def test_every_batchnorm_sees_the_one_before_it_normalise() -> None:
    torch.manual_seed(2)
    model = nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3), nn.Linear(3, 2), nn.BatchNorm1d(2)).double()
    net = GaussianNetwork(model).eval()
    x = torch.randn(6, 2, dtype=torch.float64)
    assert reestimate_batchnorm(net, source([x]).endless(), 1, "here") == 2
    hidden = F.linear(x, model[0].weight, model[0].bias).detach()
    normal = (hidden - hidden.mean(0)) / (hidden.var(0, unbiased=False) + 1e-5).sqrt()
    second = F.linear(normal, model[2].weight, model[2].bias).detach()
    torch.testing.assert_close(
        net.model.get_submodule("3").running_mean, second.mean(0), rtol=1e-10, atol=1e-12
    )
    torch.testing.assert_close(
        net.model.get_submodule("3").running_var, second.var(0), rtol=1e-10, atol=1e-12
    )
    assert not any(module.training for module in net.modules())


def test_reestimation_changes_nothing_else() -> None:
    _, net = batchnorm_net()
    before = {name: value.clone() for name, value in net.state_dict().items() if isinstance(value, Tensor)}
    data = [torch.randn(5, 3).double()]
    random_state = torch.get_rng_state()
    reestimate_batchnorm(net, source(data).endless(), 1, "here")
    assert torch.equal(torch.get_rng_state(), random_state)  # neither noise nor dropout was drawn
    after = net.state_dict()
    changed = {name for name in before if not torch.equal(before[name], after[name])}
    assert changed == {"model.1.running_mean", "model.1.running_var", "model.1.num_batches_tracked"}


def test_a_failure_in_reestimation_puts_momentum_and_mode_back() -> None:
    _, net = batchnorm_net(momentum=0.3)
    net.eval()
    with pytest.raises(DataError, match="there: the model cannot take"):
        reestimate_batchnorm(net, source([torch.zeros(5, 7).double()]).endless(), 1, "there")
    layer = net.model.get_submodule("1")
    assert layer.momentum == 0.3
    assert torch.equal(layer.running_var, torch.ones(4).double())
    assert not net.training
    assert not layer.training


def test_layers_without_running_statistics_of_batches_are_left_alone() -> None:
    torch.manual_seed(3)
    model = nn.Sequential(
        nn.Conv1d(1, 2, 1),
        nn.InstanceNorm1d(2, track_running_stats=True),
        nn.BatchNorm1d(2, track_running_stats=False),
        nn.GroupNorm(1, 2),
    )
    model(torch.randn(4, 1, 5))  # gathers statistics of instances
    net = GaussianNetwork(model).eval()
    gathered = net.model.get_submodule("1").running_mean.clone()
    assert gathered.abs().sum() > 0
    assert reestimate_batchnorm(net, source([torch.randn(4, 1, 5)]).endless(), 2, "here") == 0
    assert torch.equal(net.model.get_submodule("1").running_mean, gathered)


def test_a_batchnorm_that_no_batch_comes_through_keeps_its_statistics() -> None:
    class Branches(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.main = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
            self.helper = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))

        def forward(self, x: Tensor) -> Tensor:
            return self.main(x) + self.helper(x) if self.training else self.main(x)

    torch.manual_seed(4)
    model = Branches()
    model(torch.randn(8, 2) + 3)
    net = GaussianNetwork(model)
    helper = {k: v.clone() for k, v in net.model.get_submodule("helper.1").state_dict().items()}
    assert reestimate_batchnorm(net, source([torch.randn(8, 2)]).endless(), 2, "here") == 1
    after = net.model.get_submodule("helper.1").state_dict()
    assert all(torch.equal(helper[name], after[name]) for name in helper)
    assert int(net.model.get_submodule("main.1").num_batches_tracked) == 2


def test_a_batch_of_one_example_that_cannot_be_trained_on_names_the_way_out() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)).train()
    with pytest.raises(DataError, match=r"Expected more than 1 value .*\(drop_last=True\)$"):
        Batch((torch.ones(1, 4),), {}, None).through(model, "here")


def test_statistics_are_as_they_were_after_an_error_in_the_middle() -> None:
    """The first batch is gathered from, the second cannot be taken."""
    torch.manual_seed(0)
    net = GaussianNetwork(nn.Sequential(nn.Linear(6, 4), nn.BatchNorm1d(4), nn.Linear(4, 3)), Config())
    before = {name: buffer.clone() for name, buffer in net.model[1].named_buffers()}
    wrong = iter([Batch((torch.randn(8, 6),), {}, None), Batch((torch.randn(8, 5),), {}, None)])
    with pytest.raises(DataError, match="here: the model cannot take inputs"):
        reestimate_batchnorm(net, wrong, 2, "here")
    assert all(torch.equal(buffer, before[name]) for name, buffer in net.model[1].named_buffers())
    assert net.model[1].momentum == 0.1


# Statistics that the user wants to keep


class Freezing(nn.Sequential):
    """As in detection: ``train()`` leaves BatchNorm in evaluation mode."""

    def train(self, mode: bool = True) -> Freezing:
        super().train(mode)
        self[1].eval()
        return self


def frozen_by_hand(model: nn.Module) -> nn.Module:
    model.train().get_submodule("1").eval()
    return model


MODELS: dict[str, tuple[Any, dict[str, Any]]] = {
    "by its train()": (lambda *layers: Freezing(*layers), {}),
    "by hand": (lambda *layers: frozen_by_hand(nn.Sequential(*layers)), {}),
    "by the setting": (lambda *layers: nn.Sequential(*layers).eval(), {"finish.reestimate_epochs": "off"}),
}


def kept_model(how: str) -> nn.Module:
    torch.manual_seed(0)
    layer = nn.BatchNorm1d(8)
    nn.init.normal_(layer.running_mean)
    nn.init.uniform_(layer.running_var, 0.5, 2.0)
    model: nn.Module = MODELS[how][0](nn.Linear(6, 8), layer, nn.ReLU(), nn.Linear(8, 3))
    return model


SHORT = {"schedule.fractions": [0.5, 1.0], "schedule.epochs_per_round": [1.0, 1.0], "posterior.init": "rms"}
EXACT = {"finish.fold_batchnorm": False, "finish.uncompressed_dtype": "float32"}


@pytest.mark.parametrize("size", [1, 8])
@pytest.mark.parametrize("target", [None, 8.0])
@pytest.mark.parametrize("how", MODELS)
def test_frozen_statistics_stay_and_batches_of_one_work(how: str, target: float | None, size: int) -> None:
    data = [(torch.randn(size, 6), torch.randint(0, 3, (size,))) for _ in range(8)]
    config = Config().override(
        {**SHORT, **MODELS[how][1], "target.bits": target, "posterior.init": "tolerance"}
    )
    config = config.override({"posterior.tolerance": 0.01, **EXACT})
    model = kept_model(how)
    result = compress(model, data, data, config)
    for name, before in model.named_buffers():
        assert torch.equal(result.compressed.untouched[name], before), name
    assert not torch.equal(result.compressed.untouched["1.weight"], model.get_parameter("1.weight"))


@pytest.mark.parametrize("name", [name for name in METHODS if name != "q-vit"])
def test_every_method_keeps_statistics_where_the_setting_says_so(name: str) -> None:
    data = [(torch.randn(8, 6), torch.randint(0, 3, (8,))) for _ in range(8)]
    changes = {"finish.reestimate_epochs": "off", **EXACT}
    rounds = {"schedule.fractions": [1.0], "schedule.epochs_per_round": [1.0]}
    config = Config.preset("recommended", name).override(
        {**changes, **(rounds if name != "conditioned" else {})}
    )
    model = kept_model("by the setting")
    result = compress(model, data, data, config)
    for key, before in model.named_buffers():
        assert torch.equal(result.compressed.untouched[key], before), key


@pytest.mark.parametrize("preset", ["recommended", "quick"])
@pytest.mark.parametrize("how", ["a block of several", "the layers alone", "by its train()"])
def test_some_layers_may_be_frozen_with_any_preset(how: str, preset: str) -> None:
    """Those keep their statistics, bit for bit, and the others do not."""
    data = [(torch.randn(8, 6), torch.randint(0, 3, (8,))) for _ in range(8)]
    block = kept_model("by its train()" if how == "by its train()" else "by the setting").train()
    model = nn.Sequential(block, nn.BatchNorm1d(3), nn.Linear(3, 3)).train()
    if how == "a block of several":
        block.eval()
    elif how == "the layers alone":
        block.get_submodule("1").eval()
    changes = {"finish.fold_batchnorm": False, "finish.uncompressed_dtype": "float32"}
    rounds = SHORT if preset == "recommended" else {}
    result = compress(model, data, data, Config.preset(preset).override({**changes, **rounds}))
    told = [sentence for sentence in result.warnings if "BatchNorm '0.1'" in sentence]
    assert len(told) == (how != "by its train()")
    assert torch.equal(result.compressed.untouched["0.1.running_var"], model.get_buffer("0.1.running_var"))
    assert not torch.equal(result.compressed.untouched["1.running_var"], model.get_buffer("1.running_var"))


def test_a_model_in_evaluation_mode_is_not_frozen() -> None:
    """It is how most models are given: only a layer that differs from the module around it was frozen."""
    data = [(torch.randn(8, 6), torch.randint(0, 3, (8,))) for _ in range(8)]
    model = kept_model("by the setting")
    for given in (
        model.eval(),
        nn.Sequential(model),
    ):  # the second is in training mode, and what is in it is not
        result = compress(given, data, config=Config().override(SHORT))
        found = [value for key, value in result.compressed.untouched.items() if key.endswith("running_mean")]
        assert not torch.equal(found[0], model.get_buffer("1.running_mean"))


def folded_classifier() -> tuple[nn.Module, nn.Module]:
    """A network in evaluation mode with statistics of its data, and the same one folded."""
    torch.manual_seed(0)
    model = nn.Sequential(
        *(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 8, 3), nn.BatchNorm2d(8)),
        *(nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 3)),
    )
    for layer in (model[1], model[4]):
        layer.weight.data.uniform_(0.5, 3.0)
        layer.momentum = None
    model.train()(torch.cat(SHIFTED))
    folded = copy.deepcopy(model.eval())
    assert fold_batchnorm(folded)
    return model, folded


def test_an_unfolded_network_is_the_same_function_and_can_be_trained() -> None:
    model, folded = folded_classifier()
    before = copy.deepcopy(folded.state_dict())
    whole = torch.cat(SHIFTED)
    found = unfolded(folded, source([whole]), Distributed(torch.device("cpu")))
    assert found is not folded
    assert all(torch.equal(value, before[name]) for name, value in folded.state_dict().items())
    torch.testing.assert_close(found(whole), model(whole), rtol=1e-4, atol=1e-4)
    # In training mode a layer divides by the statistics of the batch: here they are its own.
    torch.testing.assert_close(found.train()(whole), model(whole), rtol=1e-3, atol=1e-3)
    distance = (folded.train()(whole) - model(whole)).square().mean() / model(whole).var()
    assert distance > 0.1
    assert unfolded(found, source([whole]), Distributed(torch.device("cpu"))) is found


def test_networks_that_are_not_folded_stay_as_they_are() -> None:
    loader = source([torch.zeros(0)])  # nothing is read
    for model in (batchnorm_net()[0], folded_classifier()[0], nn.Linear(2, 2)):
        assert unfolded(model, loader, Distributed(torch.device("cpu"))) is model


@pytest.mark.parametrize("preset", ["recommended", "small"])
def test_a_run_from_a_folded_network_starts_as_from_the_original(preset: str) -> None:
    model, folded = folded_classifier()
    changes = {"schedule.fractions": [1.0], "schedule.epochs_per_round": [2], "finish.polish_epochs": 0.0}
    config = Config.preset(preset).override({**changes, "training.distill": True})
    data = [(batch, torch.zeros(len(batch), dtype=torch.long)) for batch in SHIFTED * 4]
    losses = [compress(each, data, config=config).rounds[0].loss for each in (model, folded)]
    assert losses[1] == pytest.approx(losses[0], rel=0.2)
