"""Any eager model whose compressed weights are provided anew for every forward pass."""

from __future__ import annotations

import copy
import inspect
import itertools
import threading
import weakref
from abc import abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, ClassVar, NamedTuple, Self

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn.modules.batchnorm import _BatchNorm
from torch.utils._python_dispatch import TorchDispatchMode

from pwfn.config import Config
from pwfn.errors import ConfigError, LayoutError, WeightError
from pwfn.layout import Layout


class WeightNetwork(nn.Module):
    """A copy of a model without its compressed weights, which :meth:`weights` provides for each pass.

    The model given is not changed. The copy's other parameters (BatchNorm, tokens, …) are trained along.
    Several threads may call it in evaluation mode; their passes run one after the other.
    """

    graph_safe: ClassVar[bool] = True  # a plain step runs the same kernels each time, as a CUDA graph needs
    recordable = True  # until a step of it could not be recorded

    def __init__(self, model: nn.Module, config: Config | None = None) -> None:
        super().__init__()
        self.settings = config or Config()
        if not isinstance(self.settings, Config):
            raise ConfigError(f"config is a {type(self.settings).__name__}: allowed is a pwfn.Config")
        self.layout = self.layout_of(model, self.settings)
        check_finite(self.layout.gather(model), self.layout, "weight")
        self.model = hollow_copy(model, self.layout)
        self.frozen = _frozen(self.model, self.settings)
        self._place(model.training)
        self._given = _Given(model)

    def _place(self, training: bool) -> None:
        """Find where the weights belong in the model's copy; its layers keep their own modes."""
        self._places = _places(self.model, self.layout)
        self._is_placed = False
        self._turn = _Turn()
        self._given = _Given()
        self.training = training

    def train(self, mode: bool = True) -> Self:
        """As of any module; BatchNorm layers that keep their statistics stay in evaluation mode."""
        super().train(mode)
        for name in self.frozen:
            self.model.get_submodule(name).eval()
        return self

    @classmethod
    def layout_of(cls, model: nn.Module, config: Config) -> Layout:
        """Which weights are compressed: by default everything that the settings select."""
        return Layout.of(model, config.layout.include, config.layout.exclude)

    @abstractmethod
    def weights(self) -> dict[str, Tensor]:
        """The weights of one forward pass, by every name that each has."""

    @contextmanager
    def sampling(
        self,
        on: bool = True,
        generator: torch.Generator | None = None,
        *,
        at: tuple[int, int] | None = None,
    ) -> Iterator[None]:
        """Within the block: draw weights (``on``) or use the means. No effect without a posterior."""
        yield

    @property
    def config(self) -> Any:
        """The ``config`` of the model itself, where it has one: libraries expect it. Ours is ``settings``."""
        return self.model.config

    @property
    def accepts_loss_kwargs(self) -> bool:
        """Whether the model's own forward takes any keyword; transformers' Trainer then gives one more."""
        taken = inspect.signature(self.model.forward).parameters.values()
        any_keyword = any(parameter.kind is parameter.VAR_KEYWORD for parameter in taken)
        return bool(getattr(self.model, "accepts_loss_kwargs", any_keyword))

    def gradient_checkpointing_enable(self, **kwargs: Any) -> None:
        """That of a transformers model: its Trainer calls it for ``gradient_checkpointing=True``."""
        model: Any = self.model
        model.gradient_checkpointing_enable(**kwargs)

    @property
    def device(self) -> torch.device:
        """The device of the weights; a network whose weights are final may have no parameter."""
        return next(itertools.chain(self.parameters(), self.buffers())).device

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The model's own forward, with :meth:`weights`."""
        if not self._given.parameters or torch.compiler.is_compiling():
            return self._pass(args, kwargs)
        with _Foreign(self._given):
            output = self._pass(args, kwargs)
        self._given = _Given()  # one pass has shown it
        return output

    def _pass(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if self._is_placed:
            return self.model(*args, **kwargs)
        # With gradients enabled even where the caller disabled them: torch chooses between matrix
        # products by whether a weight requires gradients, and they differ in the last bits.
        with torch.inference_mode(False), torch.enable_grad():
            found = self.weights()
        if torch.compiler.is_compiling():
            weights = {place.name: found[place.name] for place in self._places}
            return functional_call(self.model, weights, args, kwargs, tie_weights=False)
        pieces = [found[entry.name] for entry in self.layout.entries]
        again = _Again(pieces) if torch.is_grad_enabled() else None
        with self._holding(pieces if again is None else again.joined(pieces)):
            output = self.model(*args, **kwargs)
        if again is not None:
            self._ready_backward(output, again)
        return output

    @contextmanager
    def placed(self, weights: Sequence[nn.Parameter]) -> Iterator[None]:
        """Within the block the model owns these parameters, one per entry of the layout.

        For an optimiser that draws the weights itself (:mod:`pwfn.bayes.optimizer`).
        """
        with self._holding(weights):
            self._is_placed = True
            try:
                yield
            finally:
                self._is_placed = False

    @contextmanager
    def _holding(self, weights: Sequence[Tensor]) -> Iterator[None]:
        with self._turn.lock:
            try:
                self._hold(weights)
                yield
            finally:
                self._hold(None)

    def _hold(self, weights: Sequence[Tensor] | None) -> None:
        """Put these weights in their places, or none."""
        recurrent: list[nn.RNNBase] = []
        for place in self._places:
            place.owner._parameters[place.leaf] = None if weights is None else weights[place.entry]  # type: ignore[assignment]  # torch's own functional_call does it
            if isinstance(place.owner, nn.RNNBase):
                recurrent.append(place.owner)
        for layer in recurrent:  # they keep a list of their own, and weak references to see whether it is old
            layer._flat_weights = [getattr(layer, name) for name in layer._flat_weights_names]
            layer._flat_weight_refs = [w if w is None else weakref.ref(w) for w in layer._flat_weights]

    def _ready_backward(self, output: Any, again: _Again) -> None:
        """Have backward find the weights of this pass: gradient checkpointing computes parts of it again."""

        def begin(gradients: object) -> None:
            self._hold(again.leaves)
            torch.autograd.Variable._execution_engine.queue_callback(end)

        def end() -> None:
            self._hold(None)
            again.pass_on()

        for node in {tensor.grad_fn for tensor in tensors_of(output)}:
            if node is not None:
                node.register_prehook(begin)


class _Turn:
    """One pass at a time: the weights are in the model itself meanwhile. A copy has a lock of its own."""

    def __init__(self) -> None:
        self.lock = threading.RLock()

    def __reduce__(self) -> tuple[type[_Turn], tuple[()]]:
        return _Turn, ()


class _Given:
    """The parameters of the model given, as long as it exists, until a pass has shown that none is used."""

    def __init__(self, model: nn.Module | None = None) -> None:
        named = model.named_parameters() if model is not None else ()
        self.parameters = [(weakref.ref(p), name) for name, p in named if p.requires_grad]

    def __reduce__(self) -> tuple[type[_Given], tuple[()]]:
        return _Given, ()


class _Foreign(TorchDispatchMode):
    """Within the block, refuse a model whose copy reads parameters of the model given.

    A function inside the model that refers to it is not copied.
    """

    def __init__(self, given: _Given) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        found = [(p, name) for reference, name in given.parameters if (p := reference()) is not None]
        self._memory = [(range(p.data_ptr(), p.data_ptr() + p.nbytes), name) for p, name in found]

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Look at one operation, then carry it out."""
        for tensor in tensors_of((args, kwargs or {})):
            at = tensor.data_ptr() if tensor.layout is torch.strided else 0
            name = next((name for memory, name in self._memory if at in memory), None)
            if name is not None:
                raise LayoutError(
                    f"a copy of the model still uses {name} of the original, from a function that refers to "
                    "it: make that function a method of the module"
                )
        return func(*args, **(kwargs or {}))


class _Again:
    """The weights of one pass, for the parts of it that backward computes again.

    Those parts use leaves: a re-entrant checkpoint runs a backward pass of its own, which would go through
    the graph of the weights once for every part. Their gradients are added where the pass's own arrive. The
    graph refers to this object, which must not refer to anything behind it: nothing would free them.
    """

    def __init__(self, weights: Sequence[Tensor]) -> None:
        self._inner = [w for w in weights if w.requires_grad and not w.is_leaf]
        leaves = {id(w): w.detach().requires_grad_() for w in self._inner}
        self.leaves = [leaves.get(id(w), w) for w in weights]
        self._own = [leaves[id(w)] for w in self._inner]

    def joined(self, weights: Sequence[Tensor]) -> list[Tensor]:
        """The weights for the pass itself."""
        found = dict(zip(map(id, self._inner), _Join.apply(self, *self._inner), strict=True))  # type: ignore[no-untyped-call]
        return [found.get(id(w), w) for w in weights]

    def taken(self) -> list[Tensor | None]:
        """The gradients of the leaves, which forget them."""
        gradients = [leaf.grad for leaf in self._own]
        for leaf in self._own:
            leaf.grad = None
        return gradients

    def pass_on(self) -> None:
        """Where the pass's own backward did not come to the weights, take the leaves' gradients there."""
        found = [(w, g) for w, g in zip(self._inner, self.taken(), strict=True) if g is not None]
        if found:
            torch.autograd.backward([w for w, _ in found], [g for _, g in found])


class _Join(torch.autograd.Function):
    """The weights as they are; backward adds the gradients of the leaves.

    It is older than every node of the model, so that autograd comes to it after all of them.
    """

    @staticmethod
    def forward(again: _Again, *weights: Tensor) -> tuple[Tensor, ...]:
        """The same tensors."""
        return tuple(weight.detach() for weight in weights)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: object) -> None:
        """Keep where the leaves are."""
        ctx.again = inputs[0]
        ctx.set_materialize_grads(False)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        """Their gradients, from the pass itself and from what was computed again."""
        pairs = zip(gradients, ctx.again.taken(), strict=True)
        return None, *(g if more is None else more if g is None else g + more for g, more in pairs)


def tensors_of(output: Any, depth: int = 6) -> Iterator[Tensor]:
    """The tensors of a model's output, which may be a structure of them: containers, or any object.

    >>> [x.item() for x in tensors_of({"logits": torch.tensor(1), "states": [torch.tensor(2), None]})]
    [1, 2]
    """
    if isinstance(output, Tensor):
        yield output
    elif depth:
        if isinstance(output, Mapping):
            output = output.values()
        elif not isinstance(output, (tuple, list)):
            output = getattr(output, "__dict__", {}).values()
        for item in tuple(output):
            yield from tensors_of(item, depth - 1)


def forget_graphs(net: nn.Module) -> None:
    """Detach what modules keep of their last pass, such as a term of the loss: a graph cannot be copied."""
    own = {id(module): module for module in net.modules()}
    for module in own.values():
        for name, value in vars(module).items():
            found = () if name == "_modules" else tensors_of(value)
            kept = [tensor for tensor in found if not isinstance(tensor, _Absent)]
            if not all(tensor.is_leaf for tensor in kept):  # deepcopy knows every kind of container
                plain = {id(tensor): tensor if tensor.is_leaf else tensor.detach() for tensor in kept}
                module.__dict__[name] = copy.deepcopy(value, {**own, **plain})


def hollow_copy(model: nn.Module, layout: Layout) -> nn.Module:
    """A deep copy of the model without its compressed parameters, whose places hold None.

    So ``parameters()`` and ``state_dict()`` have only what is trained or kept beside the vector.
    """
    parameters = dict(model.named_parameters(remove_duplicate=False))
    covered = {id(parameters[entry.name]): _Absent.of(entry.name) for entry in layout.entries}
    try:
        hollow = copy.deepcopy(model, dict(covered))
    except (TypeError, RuntimeError, ValueError, AttributeError) as error:
        raise LayoutError(
            f"{type(model).__name__} cannot be copied ({error}): remove what copy.deepcopy cannot "
            "take, such as open files, locks, tensors that are part of a graph, or weights computed from "
            "others (torch.nn.utils.prune.remove, remove_weight_norm)"
        ) from error
    for entry in layout.entries:
        for name in (entry.name, *entry.aliases):
            layer, _, leaf = name.rpartition(".")
            hollow.get_submodule(layer).register_parameter(leaf, None)
    return hollow


def _frozen(model: nn.Module, config: Config) -> list[str]:
    """BatchNorm layers that keep their statistics: all if the settings say so, else those that are frozen.

    That is, left in evaluation mode by the model's own ``train()``; or in evaluation mode while the module
    around it, or another BatchNorm layer, is in training mode.
    """
    modules = dict(model.named_modules())
    modes = {name: module.training for name, module in modules.items()}
    layers = [name for name, module in modules.items() if isinstance(module, _BatchNorm)]
    mixed = any(modes[name] for name in layers)
    model.train()
    frozen = [
        name
        for name in layers
        if config.finish.keeps_statistics
        or not modules[name].training
        or (not modes[name] and (mixed or (name and modes[name.rpartition(".")[0]])))
    ]
    for name, module in modules.items():
        module.training = modes[name]
    return frozen


class _Absent(nn.Parameter):
    """Takes the place of a compressed parameter that a model also holds outside its modules, as in a list.

    The weights of a pass cannot be put there. A model that used it would compute something else.
    """

    @classmethod
    def of(cls, name: str) -> _Absent:
        made = cls(torch.empty(0), requires_grad=False)
        made.absent = name
        return made

    absent: str

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = [item for item in tensors_of((args, kwargs or {})) if isinstance(item, _Absent)]
        raise LayoutError(
            f"the model uses {found[0].absent if found else 'a parameter'} from outside of its modules, such "
            "as a list, where compressed weights cannot be put: use the module's own attribute, or leave the "
            "parameter out with layout.exclude"
        )

    def __deepcopy__(self, memo: Any) -> _Absent:
        return self

    def __reduce_ex__(self, protocol: Any) -> Any:
        return _Absent.of, (self.absent,)


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
