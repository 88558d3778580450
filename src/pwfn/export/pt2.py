"""A torch program (``torch.export``) without the filters that the network does not need.

What can go is decided once, by :mod:`pwfn.export.prune`, on the ONNX graph of the same program. There every
parameter keeps its name, so the constants of the smaller graph are the parameters of the smaller program. The
program is kept only if it gives the outputs of the network, else the whole program is written.
"""

from __future__ import annotations

import io
import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, fx, nn
from torch.fx.experimental.symbolic_shapes import statically_known_true

from pwfn.errors import PwfnError
from pwfn.export.onnx import optimised
from pwfn.export.prune import Pruned, prune
from pwfn.export.reference import Reference, accepted, cause, check, provenance, quiet, traceable
from pwfn.file.compressed import Compressed
from pwfn.file.storage import replacing

if TYPE_CHECKING:
    import onnx
    from torch.export import ExportedProgram

_ATEN = torch.ops.aten


@dataclass(frozen=True)
class ProgramExport:
    """What was written, and how it compares with the network."""

    path: Path
    file_bytes: int
    largest_error: float  # difference from the output of the network, on batches of random inputs
    largest_output: float
    filters: int | None  # of the network; None if they could not be counted
    dropped: int  # of these, because they are zero or nothing reads them
    kept_because: str  # why the program is the whole network, where filters could not be dropped; else empty


def to_pt2(compressed: Compressed, model: nn.Module, example: Tensor, path: str | Path) -> ProgramExport:
    """Export a program that ``torch.export.load(path).module()`` runs without the source of the model.

    Weights are dense, in fp32. The file is kept only if it reproduces the output of the network.

    ``model`` has the same architecture; it is copied, not changed. ``example`` is an input batch: the size of
    its first axis is free in the program.
    """
    path = Path(path)
    reference = Reference.of(compressed, model, example, "pt2")
    notes = {"provenance.json": json.dumps(provenance(compressed))}
    whole, batch = _program(reference)
    pruned: Pruned | None = None
    kept_because = ""
    try:
        pruned, changes = _changes(whole)
        program = _smaller(whole, batch, changes) if pruned.dropped else whole
        blob = _serialised(program, notes)
        differences = _differences(blob, reference)
        if not all(accepted(*each) for each in differences):
            raise PwfnError("without them the outputs differ")
    except Exception as error:  # the exporters may raise anything
        kept_because = cause(error)
        blob = _serialised(whole, notes)
        differences = _differences(blob, reference)
        check(differences, path, "the program")
    with replacing(path) as temporary:
        temporary.write_bytes(blob)
    filters, dropped = (pruned.filters, 0 if kept_because else pruned.dropped) if pruned else (None, 0)
    return ProgramExport(path, len(blob), *max(differences), filters, dropped, kept_because)


def _program(reference: Reference) -> tuple[ExportedProgram, Tensor]:
    """The whole network as a program, and the batch that it was traced with."""
    name = type(reference.module).__name__
    try:
        with quiet():
            module, batch = traceable(reference.module, reference.example)
            return _traced(module, batch), batch
    except Exception as error:  # the model is the user's and may raise anything
        raise PwfnError(
            f"torch cannot export {name} as a program: {cause(error)}: make its forward independent of the "
            "batch size and of values, or export dense safetensors instead"
        ) from error


def _traced(module: nn.Module, batch: Tensor) -> ExportedProgram:
    """A program for batches of any size."""
    with torch.no_grad():
        return torch.export.export(module, (batch,), dynamic_shapes=({0: torch.export.Dim("batch", min=1)},))


def _serialised(program: ExportedProgram, notes: dict[str, str]) -> bytes:
    """The bytes of a file, without the example and without traces of this machine."""
    program.example_inputs = None
    for graph in program.graph_module.modules():
        for node in graph.graph.nodes if isinstance(graph, fx.GraphModule) else ():
            for key in ("stack_trace", "from_node"):  # with names of folders and addresses in memory
                node.meta.pop(key, None)
    file = io.BytesIO()
    try:
        with quiet():
            torch.export.save(program, file, extra_files=dict(notes))
    except Exception as error:  # an operator may have no form in a file
        raise PwfnError(
            f"torch cannot write the program: {cause(error)}: export dense safetensors instead"
        ) from error
    return file.getvalue()


def _differences(blob: bytes, reference: Reference) -> list[tuple[float, float]]:
    with quiet(), torch.no_grad():
        return reference.differences(lambda: torch.export.load(io.BytesIO(blob)).module(), "torch.export")


class _Changes(NamedTuple):
    """What dropping filters changes in a program."""

    parameters: dict[str, Tensor]  # by name
    biases: dict[str, Tensor]  # of layers that had none, by the name of their weights


def _changes(program: ExportedProgram) -> tuple[Pruned, _Changes]:
    """Drop filters from the ONNX graph of a program; constants that are no parameters there are not cut."""
    from onnx import ModelProto

    with quiet():
        made = torch.onnx.export(program, (), dynamo=True, optimize=False, verbose=False)
    assert made is not None
    names = {item.name for item in made.model_proto.graph.initializer}
    # Small constants keep their names too: those of BatchNorm are cut with the filters.
    proto = optimised(made.model_proto, names, smallest=0)
    _put_in_shape(proto)
    before, tensors = _constants(proto), {**program.state_dict, **program.constants}
    both = tensors.keys() & before.keys()
    own = {name for name in both if _equal(before[name].ravel(), tensors[name].detach().numpy().ravel())}
    kept: set[str] = set()
    while True:
        graph = ModelProto.FromString(proto.SerializeToString())
        pruned, after = prune(graph, kept), _constants(graph)
        changed = {name for name in after if name not in before or not _equal(before[name], after[name])}
        layers = [node.input for node in graph.graph.node if node.op_type in ("Conv", "Gemm")]
        biases = {names[2]: names[1] for names in layers if len(names) > 2}
        unknown = changed - own - set(biases)
        if not unknown:
            break
        if unknown <= kept:
            raise PwfnError(f"{min(unknown)} is no parameter of the program")
        kept |= unknown
    new = {name: torch.from_numpy(after[name].copy()) for name in sorted(changed)}
    for name in new.keys() & own:
        if before[name].shape != (shape := tensors[name].shape):  # a vector
            new[name] = new[name].reshape(_free(shape, shape.numel()))
    gained = {biases[name]: bias for name, bias in new.items() if name not in own and bias.any()}
    return pruned, _Changes({name: tensor for name, tensor in new.items() if name in own}, gained)


def _put_in_shape(proto: onnx.ModelProto) -> None:
    """Give a vector the shape in which it is read, if it is once: slopes of PReLU, scales of channels."""
    from onnx import numpy_helper

    constants = {item.name: item for item in proto.graph.initializer}
    uses = Counter(name for node in proto.graph.node for name in node.input)
    for node in [node for node in proto.graph.node if node.op_type in ("Reshape", "Unsqueeze")]:
        item, places = (constants.get(name) for name in node.input)
        if item is None or places is None or uses[item.name] > 1 or sum(n != 1 for n in item.dims) > 1:
            continue
        vector, numbers = numpy_helper.to_array(item), numpy_helper.to_array(places).tolist()
        reshape = np.reshape if node.op_type == "Reshape" else np.expand_dims
        item.CopyFrom(numpy_helper.from_array(reshape(vector, tuple(numbers)), item.name))
        uses[item.name] = uses[node.output[0]]
        for reader in proto.graph.node:
            for i, name in enumerate(reader.input):
                if name == node.output[0]:
                    reader.input[i] = item.name
        proto.graph.node.remove(node)


def _free(shape: Sequence[Any], count: int) -> list[Any]:
    """The shape of a vector of that many numbers, for any count."""
    return [-1 if size == count else size for size in shape]


def _constants(proto: onnx.ModelProto) -> dict[str, NDArray[Any]]:
    from onnx import numpy_helper

    return {i.name: numpy_helper.to_array(i) for i in proto.graph.initializer if i.data_type == i.FLOAT}


def _equal(a: NDArray[Any], b: NDArray[Any]) -> bool:
    return np.array_equal(a, b, equal_nan=True)


def _smaller(program: ExportedProgram, batch: Tensor, changes: _Changes) -> ExportedProgram:
    """The program with other parameters, and with what depends on their shapes."""
    module = program.module(check_guards=False)
    for weight, bias in changes.biases.items():
        holder, leaf = _place(module, weight)
        setattr(holder, f"{leaf}_bias", nn.Parameter(bias))
    for name, tensor in changes.parameters.items():
        holder, leaf = _place(module, name)
        old = getattr(holder, leaf)
        new = nn.Parameter(tensor, old.requires_grad) if isinstance(old, nn.Parameter) else tensor
        setattr(holder, leaf, new)
    for node in list(module.graph.nodes):
        if isinstance(node.target, torch._ops.OpOverload):
            _adapt(node, changes)
    module.recompile()
    with quiet():
        return _traced(module, batch)


def _adapt(node: fx.Node, changes: _Changes) -> None:
    """A new bias, the groups of a depthwise convolution, and a number of features that is written out."""
    assert isinstance(node.target, torch._ops.OpOverload)
    args: list[Any] = list(node.args)
    names = [argument.name for argument in node.target._schema.arguments][: len(args)]
    if node.target in (_ATEN.view.default, _ATEN.reshape.default):
        x, y = args[0].meta["val"].shape, node.meta["val"].shape
        if str(args[0].target) in changes.parameters:
            args[1] = _free(y, x.numel())
        # From batch × anything to batch × features, as many as there are.
        elif len(y) == 2 <= len(x) and statically_known_true(x[0] == y[0]):
            node.target, args = _ATEN.flatten.using_ints, [args[0], 1]
    elif names[1:2] == ["weight"] and isinstance(args[1], fx.Node):
        weight = str(args[1].target)
        if weight in changes.biases:
            with node.graph.inserting_before(node):
                args[2:3] = [node.graph.get_attr(f"{weight}_bias")]
        groups = names.index("groups") if "groups" in names else None
        if groups and args[groups] > 1 and weight in changes.parameters:  # a depthwise convolution
            args[groups] = len(changes.parameters[weight])
    node.args = tuple(args)


def _place(module: nn.Module, name: str) -> tuple[nn.Module, str]:
    """The submodule that has the tensor of this name, and its name there."""
    owner, _, leaf = name.rpartition(".")
    return module.get_submodule(owner), leaf
