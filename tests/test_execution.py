"""Training through torch.compile: the same result as without, for models and methods of all kinds.

Its tracing is torch's own; the graphs are then run as they are, because a real backend takes half a minute.
Images in another memory order: only where the model takes them.
"""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from cases import Shuffled, normalised_classifier
from functorch.compile import make_boxed_func
from torch import Tensor, nn
from torch._dynamo.backends.common import aot_autograd
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import pwfn.lab  # the baselines by name
from pwfn import Config, DataError
from pwfn.bayes.batches import Source
from pwfn.bayes.execution import Compiled, channels_last
from pwfn.bayes.grid.rate import RateNetwork
from pwfn.config import Precision

SHORT = {"schedule.fractions": [0.5, 1.0], "schedule.epochs_per_round": [1.0, 1.0]}
Graph = torch.fx.GraphModule


def as_it_is(graph: Graph, inputs: Any) -> Any:
    return make_boxed_func(graph.forward)


class Backend:
    """Counts what it is given, and runs it as it is."""

    def __init__(self) -> None:
        self.compiled: list[Graph] = []
        self.passes = 0
        self.run: Callable[..., Any] = lambda graph, inputs: graph.forward

    def __call__(self, graph: Graph, inputs: Any) -> Any:
        found = self.run(graph, inputs)
        self.compiled.append(graph)

        def passed(*args: Any) -> Any:
            self.passes += 1
            return found(*args)

        return passed


@pytest.fixture
def backend(monkeypatch: pytest.MonkeyPatch) -> Iterator[Backend]:
    found, real = Backend(), torch.compile
    torch._dynamo.reset()
    monkeypatch.setattr(torch, "compile", lambda module, **others: real(module, backend=found, **others))
    yield found
    torch._dynamo.reset()


class Body(nn.Module):
    """For 6 numbers; 3 classes."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(6, 16), nn.LayerNorm(16), nn.Linear(16, 3)

    def forward(self, x: Tensor) -> Any:
        return self.last(self.hidden(x))

    def hidden(self, x: Tensor) -> Tensor:
        return self.norm(self.first(x)).relu()


class Dictionary(Body):
    def forward(self, x: Tensor) -> Any:
        return {"logits": super().forward(x)}


class Keywords(Body):
    def forward(self, *, values: Tensor, scale: float = 1.0) -> Any:
        return super().forward(scale * values)


class Breaks(Body):
    """Python decides by the value of a tensor: two graphs."""

    def forward(self, x: Tensor) -> Any:
        hidden = self.hidden(x)
        return self.last(2 * hidden if float(hidden.detach().sum()) > 1e6 else hidden)


class Checkpointed(Body):
    def forward(self, x: Tensor) -> Any:
        return self.last(checkpoint(self.hidden, x, use_reentrant=False))


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lstm, self.last = nn.LSTM(3, 8, batch_first=True), nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Any:
        return self.last(self.lstm(x.view(-1, 2, 3))[0][:, -1])


def compress(make: Callable[[], nn.Module], method: str, data: Any = None, **changes: Any) -> Any:
    torch.manual_seed(0)
    config = Config.preset("recommended", method).override({**SHORT, **changes})
    return pwfn.compress(make(), data or Shuffled(), config=config)


def both(make: Callable[[], nn.Module], method: str, data: Any = None, **changes: Any) -> None:
    """A run with and one without end in the same values."""
    plain, fast = (
        compress(make, method, data, **{**changes, "training.compile": on}).compressed for on in (False, True)
    )
    assert torch.allclose(fast.values(), plain.values(), atol=1e-6)
    assert fast.untouched.keys() == plain.untouched.keys()
    for name, tensor in plain.untouched.items():
        assert torch.allclose(fast.untouched[name], tensor, atol=1e-5), name


@pytest.mark.parametrize("method", ["pwfn", "rate", "lsq", "kmeans"])
def test_every_method_ends_as_without(backend, method):
    """Two rounds compile the network once, and the teacher, where there is one, once."""
    both(normalised_classifier, method)
    assert len(backend.compiled) == (2 if method == "rate" else 1)
    assert backend.passes >= 5


@pytest.mark.parametrize("make", [Dictionary, Breaks, Checkpointed, Recurrent])
@pytest.mark.parametrize("method", ["pwfn", "rate"])
def test_models_of_all_kinds(backend, make, method):
    backend.run = aot_autograd(fw_compiler=as_it_is)
    both(make, method)


def test_keywords(backend):
    data = [{"values": x, "scale": 0.5, "labels": y} for x, y in Shuffled()]
    both(Keywords, "rate", data)
    assert backend.passes


def test_other_shapes_are_computed_as_usual(backend):
    data = [*Shuffled(), (torch.randn(5, 6), torch.tensor([0, 1, 2, 0, 1]))]
    both(normalised_classifier, "rate", data)
    assert len(backend.compiled) == 2


def test_several_batches_for_a_step(backend):
    both(normalised_classifier, "pwfn", **{"training.accumulate": 2})
    assert len(backend.compiled) == 1


@pytest.mark.parametrize("method", ["pwfn", "rate"])
def test_a_backend_that_fails_gives_one_warning_and_the_same_result(backend, caplog, method):
    def fails(graph: Graph, inputs: Any) -> Any:
        raise OSError("there is no compiler")

    backend.run = fails
    with caplog.at_level(logging.WARNING, "pwfn"):
        both(normalised_classifier, method)
    found = [record.getMessage() for record in caplog.records if "compiled" in record.getMessage()]
    assert len(found) == 1
    assert "there is no compiler" in found[0]


def test_a_torch_that_cannot_compile_gives_a_warning(monkeypatch, caplog):
    def missing(module: object, **others: object) -> None:
        raise RuntimeError("not with this Python")

    monkeypatch.setattr(torch, "compile", missing)
    both(normalised_classifier, "rate")
    assert sum("not with this Python" in record.getMessage() for record in caplog.records) == 1


def test_a_backward_pass_that_cannot_be_compiled_is_an_error_with_a_way_out(backend):
    """It is compiled when it is needed: the step's forward pass has been taken by then."""

    def fails(graph: Graph, inputs: Any) -> Any:
        raise RuntimeError("there is no compiler")

    backend.run = aot_autograd(
        fw_compiler=lambda graph, inputs: make_boxed_func(graph.forward), bw_compiler=fails
    )
    with pytest.raises(DataError, match=r"training\.compile"):
        compress(normalised_classifier, "rate", **{"training.compile": True})


def test_an_error_of_the_model_stays_its_own(backend):
    class Wrong(Body):
        def forward(self, x: Tensor) -> Any:
            return super().forward(x) if x.sum() < 1e6 else super().forward(x[:, :5])

    compiled, usual = Compiled(Wrong()), torch.ones(2, 6)
    for _ in range(4):
        compiled(usual)
    with pytest.raises(RuntimeError, match="shapes"):
        compiled(1e9 * usual)


def test_a_copy_of_a_network_is_not_compiled():
    net = RateNetwork(Body(), Config.preset("small"))
    net.compiled = Compiled(net.model)
    assert copy.deepcopy(net).compiled is None
    assert net.compiled is not None


def test_a_stopped_run_resumes(backend):
    changes = {"training.compile": True, "target.bits": 1.5}
    whole, kept = compress(normalised_classifier, "rate", **changes), []

    def keep(snapshot: Callable[[], Any], last: bool) -> None:
        kept.append(snapshot())
        if len(kept) == 4:
            raise KeyboardInterrupt

    torch.manual_seed(0)
    config = Config.preset("recommended", "rate").override({**SHORT, **changes})
    with pytest.raises(KeyboardInterrupt):
        pwfn.compress(normalised_classifier(), Shuffled(), config=config, keep=keep)
    resumed = pwfn.compress(normalised_classifier(), Shuffled(), config=config, resume=kept[-1])
    assert torch.allclose(resumed.compressed.values(), whole.compressed.values(), atol=1e-6)


def test_a_loss_of_ones_own(backend):
    def loss_fn(output: Tensor, target: Tensor) -> Tensor:
        return F.cross_entropy(output, target, label_smoothing=0.1)

    torch.manual_seed(0)
    config = Config.preset("small").override({**SHORT, "training.compile": True, "training.distill": False})
    result = pwfn.compress(normalised_classifier(), Shuffled(), Shuffled(), config, loss_fn)
    assert result.after is not None
    assert len(backend.compiled) == 1


class Convolution(nn.Module):
    """A convolution and a linear layer; between them the feature map becomes a vector."""

    def __init__(self, flatten: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.convolution, self.linear, self.flatten = nn.Conv2d(3, 4, 3), nn.Linear(16, 2), flatten

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.linear(self.flatten(self.convolution(x)))
        return found


def viewed(x: Tensor) -> Tensor:
    return x.view(len(x), -1)


@pytest.mark.parametrize(("flatten", "arranged"), [(viewed, False), (nn.Flatten(), True)])
def test_images_are_in_an_order_that_the_model_takes(
    flatten: Callable[[Tensor], Tensor], arranged: bool
) -> None:
    data = torch.utils.data.TensorDataset(torch.randn(16, 3, 4, 4), torch.randint(0, 2, (16,)))
    loader = torch.utils.data.DataLoader(data, 8, shuffle=True, generator=torch.Generator().manual_seed(1))
    model = Convolution(flatten).eval()
    source = channels_last(Source("train_loader", loader, torch.device("cpu")), model, Precision.BF16)
    assert source.channels_last == arranged
    batch = next(source.batches())
    assert batch.args[0].is_contiguous(memory_format=torch.channels_last) == arranged
    config = Config().override({**SHORT, "training.precision": "bf16"})
    assert pwfn.compress(model, loader, loader, config=config).after is not None


def test_trying_an_order_moves_no_loader_on() -> None:
    data = list(range(16))
    loaders = [
        torch.utils.data.DataLoader(data, 4, shuffle=True, generator=torch.Generator().manual_seed(1))
        for _ in range(2)
    ]
    before = torch.get_rng_state()
    channels_last(Source("train_loader", loaders[0], torch.device("cpu")), nn.Identity(), Precision.BF16)
    assert torch.equal(before, torch.get_rng_state())
    assert [x.tolist() for x in loaders[0]] == [x.tolist() for x in loaders[1]]
