"""A compression method: what a run asks of PWFN, of a baseline, or of a method of your own.

A method is a network with five functions, called in this order::

    start(probe)            once, before training: starting values that need data
    weights()               every forward pass: the compressed weights by name
    loss_term(loss)         every training step: a term added to the task loss, or None
    fix(fraction)           after every training phase: put that fraction of the weights in place
    finish()                once: the compressed network

Everything else has a default. Settings that differ from the usual ones are in ``defaults``, settings of
the method alone in ``Options``.
"""

from __future__ import annotations

import copy
from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, NamedTuple, Self, TypeVar

import torch
from torch import Tensor, nn

from pwfn.bayes.batches import Batch
from pwfn.bayes.distributed import Distributed
from pwfn.bayes.network import WeightNetwork
from pwfn.config import METHOD_DEFAULTS, WARMUP_EPOCHS, Config, OptimizerName, Section, TrainingConfig, hint
from pwfn.errors import ConfigError
from pwfn.file.compressed import Compressed
from pwfn.file.fold_batchnorm import shrink_uncompressed
from pwfn.fixing.record import FixRecord
from pwfn.layout import held, untouched

MOMENTUM = 0.9
POLISH_LEARNING_RATE = 1e-3
BETAS = (0.9, 0.999)


class Phase(NamedTuple):
    """One phase of training, and the fraction of the weights that is fixed after it."""

    epochs: float
    fraction: float


def phases(config: Config) -> tuple[Phase, ...]:
    """The training phases: a short one before the first of several fixings, then equal ones, or as listed.

    >>> changes = {"schedule.fractions": [0.5, 1.0], "schedule.epochs_per_round": 3}
    >>> [tuple(phase) for phase in phases(Config().override(changes))]
    [(0.05, 0.5), (3.0, 1.0)]
    >>> [tuple(phase) for phase in phases(Config.preset("small").override({"schedule.epochs_per_round": 3}))]
    [(3.0, 1.0)]
    """
    fractions, epochs = config.schedule.fractions, config.schedule.epochs_per_round
    if isinstance(epochs, Sequence):
        return tuple(map(Phase, epochs, fractions))
    first = WARMUP_EPOCHS if len(fractions) > 1 else epochs
    return tuple(Phase(epochs if i else first, fraction) for i, fraction in enumerate(fractions))


class WeightState(NamedTuple):
    """The weights at one moment, without noise."""

    mu: Tensor
    sigma: Tensor | None = None  # where weights are distributions
    fixed: Tensor | None = None  # which of them are fixed; None: all

    def sigma_quartiles(self) -> tuple[float, float, float] | None:
        """Quartiles of sigma over the free weights; zeros where none is free."""
        if self.sigma is None or self.fixed is None:
            return None
        values = self.sigma[~self.fixed]
        if values.numel() == 0:
            return (0.0, 0.0, 0.0)
        at = [round(q * (values.numel() - 1)) for q in (0.25, 0.5, 0.75)]
        low, middle, high = (float(values.kthvalue(position + 1).values) for position in at)
        return (low, middle, high)


@dataclass(frozen=True)
class DataProbe:
    """What a method may ask of the training data before the first step. Nothing is computed until it is."""

    through: Callable[[nn.Module], object]  # puts the first batch through a module
    loss: Callable[[], float]  # mean loss over the first batches, each with the same noise at every call
    # The first batches with so many examples, or all that there are.
    examples: Callable[[int], Sequence[Batch]] = lambda count: ()


class Method(WeightNetwork):
    """The base class of all methods; see the module for the order of calls.

    The state dict is all that a method needs to resume after a crash.
    """

    defaults: ClassVar[Mapping[str, Any]] = {}  # settings that differ from Config's
    Options: ClassVar[type[Section] | None] = None  # settings of this method alone: a frozen dataclass
    has_posterior: ClassVar[bool] = False  # whether finish() gives one sigma per weight
    data: DataProbe | None = None  # what fix() may ask of the training data; a run provides it
    record: Mapping[str, Any] = {}  # facts that a run keeps in the file beside its settings and scores
    on_layer: Callable[[int, int], None] | None = None  # called in a long fixing: layers done, and in all
    notes: tuple[str, ...] = ()  # what the user should know about the last fixing, in one sentence each
    has_grid: ClassVar[bool] = False  # whether the weights lie on a grid whose step a target may decide
    grid_step: float | None = None  # of that grid

    def __init__(self, model: nn.Module, config: Config | None = None) -> None:
        super().__init__(model, config)
        self.options: Any = check_options(type(self), self.settings)

    def start(self, probe: DataProbe) -> None:
        """Before the first step: starting values that need data."""
        return

    def before_step(self, step: int, steps: int, distributed: Distributed) -> None:
        """Before step ``step`` (from 0) of a phase of ``steps``, on the host: what cannot be recorded.

        All processes must do the same, although their data and statistics of BatchNorm differ.
        """
        return

    def loss_term(self, loss: Tensor) -> Tensor | None:
        """A term added to the task loss before backward; it may depend on that loss's value."""
        return None

    def penalty(self) -> Tensor | None:
        """A regulariser of the parameters alone; its gradient is added after the task's was clipped."""
        return None

    def rate_bytes(self) -> float | None:
        """Bytes of the whole file as training counts them now; None where it does not train for them."""
        return None

    @abstractmethod
    def fix(self, fraction: float) -> FixRecord:
        """After a phase: put at least this fraction of the weights in place; all of them for 1."""

    def spare(self, count: int) -> bool:
        """After a fixing whose file is so many bytes too large: undo it, so that the next one spares them.

        False where there is nothing to undo: none are, or a fixing does not look at the bytes.
        """
        return False

    @abstractmethod
    def finish(self) -> Compressed:
        """The compressed network, once every weight is in place."""

    def rounded(self) -> Self:
        """A copy as it would be if the run ended here: every weight in place."""
        other = copy.deepcopy(self)
        other.fix(1.0)
        return other

    @torch.no_grad()
    def state(self) -> WeightState:
        """The weights as they are now, for logs and figures."""
        found = self.weights()
        pieces = [found[entry.name].detach().reshape(-1) for entry in self.layout.entries]
        return WeightState(torch.cat([piece.to(self.layout.dtype) for piece in pieces]))

    def own_tensors(self) -> list[Tensor]:
        """The method's own state, without the uncompressed part of the model."""
        state = {k: v for k, v in self.state_dict().items() if not k.startswith(("model.", "_extra_state"))}
        return [value for value in state.values() if isinstance(value, Tensor)]

    def parameter_groups(self, *, lr: float, weight_decay: float = 0.0) -> list[dict[str, Any]]:
        """Groups for a torch optimiser."""
        return [{"params": list(self.parameters()), "lr": lr, "weight_decay": weight_decay}]


def fix_alike(net: Method, fraction: float, distributed: Distributed) -> FixRecord:
    """:meth:`Method.fix`, with the same outcome in all processes.

    Where it looks at the data, of which each process has its own share, the first does it for all.
    """
    if distributed.world == 1 or not net.has_grid:
        return net.fix(fraction)

    def work() -> tuple[FixRecord, tuple[str, ...], float | None, dict[str, Any]]:
        record = net.fix(fraction)
        state = {k: v.cpu() if isinstance(v, Tensor) else v for k, v in net.state_dict().items()}
        return record, net.notes, net.grid_step, state

    record, net.notes, net.grid_step, state = distributed.first(work)
    net.load_state_dict(state)
    return record


def torch_optimizer(net: Method, config: TrainingConfig) -> torch.optim.Optimizer:
    """Torch's own optimiser, for any method."""
    groups = net.parameter_groups(lr=config.learning_rate, weight_decay=config.weight_decay)
    if config.optimizer is OptimizerName.ADAMW:
        # In float16 torch's 1e-8 is zero, and so is the square of a small gradient: 0 / 0.
        half = any(p.dtype == torch.float16 for group in groups for p in group["params"])
        eps = torch.finfo(torch.float16).tiny if half else 1e-8
        return torch.optim.AdamW(groups, lr=config.learning_rate, betas=BETAS, eps=eps, **on_device(groups))
    return torch.optim.SGD(groups, lr=config.learning_rate, momentum=MOMENTUM, fused=fused(groups))


def polish_optimizer(model: nn.Module, config: TrainingConfig) -> torch.optim.Optimizer:
    """For the parameters that are not compressed, after the last fixing."""
    trained = [p for p in model.parameters() if p.requires_grad]
    decay, one = config.weight_decay, fused([{"params": trained}])
    return torch.optim.SGD(trained, POLISH_LEARNING_RATE, MOMENTUM, weight_decay=decay, fused=one)


def fused(groups: list[dict[str, Any]]) -> bool | None:
    """Torch's single kernel where it has one; else its own choice."""
    return all(p.is_cuda and p.is_floating_point() for group in groups for p in group["params"]) or None


def on_device(groups: list[dict[str, Any]]) -> dict[str, Any]:
    """For AdamW: the same, and the number of the step on the device, so that a step can be recorded."""
    return {"fused": fused(groups), "capturable": bool(fused(groups))}


M = TypeVar("M", bound=type[Method])
METHODS: dict[str, type[Method]] = {}
"""The methods by name. The lab registers the baselines."""


def register(name: str) -> Callable[[M], M]:
    """A class decorator that makes a method known by a name, with its settings."""

    def known(method: M) -> M:
        METHODS[name], METHOD_DEFAULTS[name] = method, method.defaults
        return method

    return known


def check_options(method: type[Method], config: Config) -> Section | None:
    """The method's own settings, checked; an error where it does not have one that was given."""
    known = getattr(method.Options, "__dataclass_fields__", {})
    for name in config.options:
        if name not in known:
            advice = hint(name, known) if known else f": {config.method} has no options"
            raise ConfigError(f"setting 'options.{name}' is unknown{advice}")
    return method.Options(**config.options) if method.Options else None


class FixedNetwork(WeightNetwork):
    """A network whose compressed weights are final: what is trained and measured after the last fixing.

    ``net`` is the method's network, whose copied model keeps what is attached to it; ``compressed`` is
    its result, or an earlier state of the same run.
    """

    values: Tensor

    def __init__(self, net: Method, compressed: Compressed) -> None:
        nn.Module.__init__(self)
        self.settings, self.layout, self._compressed = net.settings, net.layout, compressed
        self.model = copy.deepcopy(net.model)
        self.model.load_state_dict(compressed.untouched, strict=False)
        self.frozen = net.frozen
        self._place(net.training)
        self.register_buffer("values", held(net.layout, compressed.values()).to(net.device), persistent=False)

    def weights(self) -> dict[str, Tensor]:
        """The final values."""
        return self.layout.views(self.values)

    def finish(self) -> Compressed:
        """The compressed network, on the CPU, with the other tensors as they are now."""
        tensors = {name: tensor.cpu() for name, tensor in untouched(self.model, self.layout).items()}
        return replace(self._compressed, untouched=tensors)

    def shrunk(self) -> Compressed:
        """The same as a file has it: with BatchNorm folded and numbers rounded, as the settings say."""
        shrink_uncompressed(self.model, self.settings.finish)
        return self.finish()
