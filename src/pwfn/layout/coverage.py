"""Which parameters of a model are compressed: the rule, the selectors, and the reasons why not."""

from __future__ import annotations

import difflib
from collections.abc import Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import TypeAlias

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.modules.conv import _ConvNd
from torch.nn.parameter import is_lazy

from pwfn.errors import LayoutError

_NORMS = (_NormBase, nn.LayerNorm, nn.GroupNorm, nn.LocalResponseNorm, nn.RMSNorm)
_PACKED_PROJECTIONS = frozenset(
    {"in_proj_weight", "in_proj_bias", "q_proj_weight", "k_proj_weight", "v_proj_weight"}
)


@dataclass(frozen=True)
class Owner:
    """One place of a parameter in the module tree."""

    name: str
    layer: str
    leaf: str
    module: nn.Module
    parent: nn.Module | None

    def type_names(self) -> set[str]:
        """The class of the module and its base classes, by short and by full name."""
        names: set[str] = set()
        for base in type(self.module).__mro__:
            names |= {base.__name__, f"{base.__module__}.{base.__qualname__}"}
        return names


Parameters: TypeAlias = Sequence[tuple[nn.Parameter, list[Owner]]]
"""Each parameter once, with all its places."""


def matches(selectors: Sequence[str | type], parameters: Parameters) -> dict[int, str]:
    """By its position, the first selector that matches each parameter; one that matches none is an error."""
    found: dict[int, str] = {}
    for selector in map(_as_text, selectors):
        positions = [n for n, (_, owners) in enumerate(parameters) if any(_fits(selector, o) for o in owners)]
        if not positions:
            all_owners = [owner for _, owners in parameters for owner in owners]
            known = [text for o in all_owners for text in (o.name, f"type:{type(o.module).__name__}")]
            near = difflib.get_close_matches(selector, known, n=1, cutoff=0.5)
            hint = f"the nearest is {near[0]!r}" if near else "print(Layout.of(model).table()) lists them"
            raise LayoutError(f"{selector!r} matches no parameter of the model: {hint}")
        for n in positions:
            found.setdefault(n, selector)
    return found


def decide(
    owners: list[Owner], parameter: Tensor, included: str | None, excluded: str | None
) -> tuple[Owner, str | None]:
    """The owner that names the parameter, and the reason to leave it out, if there is one."""
    if excluded is not None:
        return owners[0], f"excluded by {excluded!r}"
    if parameter.numel() == 0:
        return owners[0], "empty"
    covered = next((owner for owner in owners if _is_covered(owner)), None)
    if covered is not None:
        return covered, None
    return owners[0], _reason(owners[0]) if included is None else None


def _as_text(selector: str | type) -> str:
    if isinstance(selector, type):
        return f"type:{selector.__module__}.{selector.__qualname__}"
    return selector


def _fits(selector: str, owner: Owner) -> bool:
    if selector.startswith("type:"):
        return selector.removeprefix("type:") in owner.type_names()
    return fnmatchcase(owner.name, selector)


def owned_parameters(model: nn.Module) -> Parameters:
    """Each parameter once, with all its places, in order of first appearance."""
    modules = dict(model.named_modules(remove_duplicate=False))
    owners: dict[int, tuple[nn.Parameter, list[Owner]]] = {}
    for layer, module in modules.items():
        parent = modules.get(layer.rpartition(".")[0]) if layer else None
        for leaf, parameter in module.named_parameters(recurse=False, remove_duplicate=False):
            name = f"{layer}.{leaf}" if layer else leaf
            if is_lazy(parameter):
                raise LayoutError(f"{name} has no shape yet: run one batch through the model first")
            _, places = owners.setdefault(id(parameter), (parameter, []))
            places.append(Owner(name, layer, leaf, module, parent))
    return list(owners.values())


def _is_covered(owner: Owner) -> bool:
    if isinstance(owner.module, nn.MultiheadAttention):
        return owner.leaf in _PACKED_PROJECTIONS
    linear = isinstance(owner.module, (_ConvNd, nn.Linear, nn.Bilinear)) or is_hf_conv1d(owner.module)
    return linear and owner.leaf in ("weight", "bias")


def is_hf_conv1d(module: nn.Module) -> bool:
    """Whether it is ``Conv1D`` of transformers, a linear layer stored as (in, out); does not import it."""
    names = {(base.__module__, base.__name__) for base in type(module).__mro__}
    return ("transformers.pytorch_utils", "Conv1D") in names


def _reason(owner: Owner) -> str:
    kind = type(owner.module).__name__
    if isinstance(owner.module, _NORMS) or kind.endswith(("Norm", "Norm2d", "RMSNorm")):
        return f"{kind}: normalisation stays in full precision"
    if isinstance(owner.module, nn.utils.parametrize.ParametrizationList):
        return "re-parametrised: remove the parametrisation to compress it"
    if isinstance(owner.module, nn.Embedding):
        return "Embedding: include it with 'type:Embedding'"
    return f"{kind}.{owner.leaf}: not a weight or bias of a convolution or linear layer"


def check_model(model: object) -> None:
    """Raise an error unless the model is a plain eager module."""
    if not isinstance(model, nn.Module):
        raise LayoutError(f"the model is a {type(model).__name__}: allowed is a torch.nn.Module")
    if isinstance(model, torch.jit.ScriptModule):
        raise LayoutError("the model is a TorchScript module: pass the eager model it came from")
    if type(model).__name__ == "OptimizedModule":
        raise LayoutError("the model is already compiled: pass the original, and compile what it becomes")
    if isinstance(model, (nn.DataParallel, nn.parallel.DistributedDataParallel)):
        raise LayoutError("the model is wrapped for data parallelism: pass model.module")


def check_compressible(owner: Owner, parameter: nn.Parameter) -> None:
    """Raise an error if a parameter to be compressed cannot be trained."""
    way_out = f"or leave it out with exclude=[{owner.name!r}]"
    if not parameter.is_floating_point():
        raise LayoutError(
            f"{owner.name} is {str(parameter.dtype).removeprefix('torch.')}: only real floating-point "
            f"weights can be compressed; load the unquantised model, {way_out}"
        )
    if not parameter.requires_grad:
        raise LayoutError(
            f"{owner.name} is frozen (requires_grad is False), so it could not be trained around "
            f"its new value: unfreeze it, {way_out}"
        )
