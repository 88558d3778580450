"""Any eager model whose compressed weights come from elsewhere, anew for every pass."""

from __future__ import annotations

import copy
from abc import abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor, nn
from torch.func import functional_call

from pwfn.config import Config
from pwfn.errors import ConfigError, LayoutError, WeightError
from pwfn.file.compressed import Compressed
from pwfn.layout import Layout


class WeightNetwork(nn.Module):
    """A copy of a model without its compressed weights, which :meth:`views` gives for each pass.

    The model given is not changed; the copy's other parameters (BatchNorm, tokens, …) are trained along.
    """

    is_recordable: ClassVar[bool] = True  # a plain step is the same kernels each time, as a CUDA graph needs

    def __init__(self, model: nn.Module, config: Config | None = None) -> None:
        super().__init__()
        self.config = config or Config()
        if not isinstance(self.config, Config):
            raise ConfigError(f"config is a {type(self.config).__name__}: allowed is a pwfn.Config")
        self.layout = self.layout_of(model, self.config)
        check_finite(self.layout.gather(model), self.layout, "weight")
        self.model = _hollow_copy(model, self.layout)
        self._places = _places(self.model, self.layout)
        self._is_placed = False
        self.training = model.training  # not train(): the copy's layers keep their own modes

    @classmethod
    def layout_of(cls, model: nn.Module, config: Config) -> Layout:
        """Which weights are compressed: all that the settings name, unless a method leaves some out."""
        return Layout.of(model, config.layout.include, config.layout.exclude)

    @abstractmethod
    def views(self) -> dict[str, Tensor]:
        """The weights of one pass, by every name that each has."""

    def term(self, loss: Tensor) -> Tensor | None:
        """What is added to the task's loss of a pass before backward; it may look at that loss."""
        return None

    def penalty(self) -> Tensor | None:
        """A regulariser of the parameters alone; its gradient is added after the task's was clipped."""
        return None

    @contextmanager
    def sampling(
        self,
        on: bool = True,
        generator: torch.Generator | None = None,
        *,
        at: tuple[int, int] | None = None,
    ) -> Iterator[None]:
        """Within the block: draw weights (``on``) or not; nothing to choose where none are drawn."""
        yield

    @property
    def device(self) -> torch.device:
        """Where it lies."""
        return next(self.parameters()).device

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The model's own forward, with the weights of :meth:`views`."""
        if self._is_placed:
            return self.model(*args, **kwargs)
        # Recorded even where the caller records nothing: torch chooses between matrix products by
        # whether a weight requires gradients, as a model's own do, and they differ in the last bits.
        with torch.inference_mode(False), torch.enable_grad():
            views = self.views()
        weights = {place.name: views[place.name] for place in self._places}
        return functional_call(self.model, weights, args, kwargs, tie_weights=False)

    @contextmanager
    def placed(self, weights: Sequence[nn.Parameter]) -> Iterator[None]:
        """Within the block the model has these parameters, one per entry of the layout, for its own.

        For an optimiser that makes the weights itself (:mod:`pwfn.bayes.optimizer`): nothing is made here.
        """
        try:
            for place in self._places:
                place.owner._parameters[place.leaf] = weights[place.entry]
            self._is_placed = True
            yield
        finally:
            self._is_placed = False
            for place in self._places:
                place.owner._parameters[place.leaf] = None

    def check_same_layout(self, compressed: Compressed) -> None:
        """An error unless a compressed network has the same weights in the same places."""
        theirs, ours = (
            [(entry.name, entry.shape) for entry in layout.entries]
            for layout in (compressed.layout, self.layout)
        )
        if theirs != ours:
            raise LayoutError("the compressed network is of another model: its weights lie elsewhere")


def _hollow_copy(model: nn.Module, layout: Layout) -> nn.Module:
    """A deep copy of the model without its compressed parameters, whose places hold None.

    ``functional_call`` puts the weights there for one forward pass; elsewhere the copy has only
    what is trained or kept beside the vector, so that ``parameters()`` and ``state_dict()`` do too.
    """
    parameters = dict(model.named_parameters(remove_duplicate=False))
    covered = [parameters[entry.name] for entry in layout.entries]
    stand_in = nn.Parameter(torch.empty(0), requires_grad=False)
    try:
        hollow = copy.deepcopy(model, {id(parameter): stand_in for parameter in covered})
    except (TypeError, RuntimeError, ValueError, AttributeError) as error:
        raise LayoutError(
            f"{type(model).__name__} cannot be copied ({error}): remove what copy.deepcopy cannot "
            "take, such as open files, locks or tensors that are part of a graph"
        ) from error
    for entry in layout.entries:
        for name in (entry.name, *entry.aliases):
            layer, _, leaf = name.rpartition(".")
            hollow.get_submodule(layer).register_parameter(leaf, None)
    return hollow


class _Place(NamedTuple):
    """Where a weight is put: a module's parameter, by one of its names, and the number of its entry."""

    owner: nn.Module
    leaf: str
    name: str
    entry: int


def _places(model: nn.Module, layout: Layout) -> list[_Place]:
    """Each place once: a module with two names is filled once, a tied weight goes to several."""
    places: dict[tuple[int, str], _Place] = {}
    for number, entry in enumerate(layout.entries):
        for name in (entry.name, *entry.aliases):
            layer, _, leaf = name.rpartition(".")
            owner = model.get_submodule(layer)
            places.setdefault((id(owner), leaf), _Place(owner, leaf, name, number))
    return list(places.values())


def check_finite(vector: Tensor, layout: Layout, what: str) -> None:
    """An error that names the first weight that is not finite."""
    finite = torch.isfinite(vector)
    if not bool(finite.all()):
        position = int(torch.nonzero(~finite)[0])
        raise WeightError(
            f"{what} {layout.locate(position)} is {float(vector[position])} (one of "
            f"{int((~finite).sum()):,} that are not finite): start from finite weights, or lower "
            "the learning rate"
        )
