"""ONNX with weights as small indices into a palette, for standard runtimes.

Each compressed tensor becomes two constants and two operators: ``Gather(palette, Cast(indices))``. A runtime
that folds constants (onnxruntime does so when a session starts) then computes with ordinary dense weights:
the file is small, and the speed is that of the dense model without the filters that it does not need.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor, nn

from pwfn.errors import PwfnError
from pwfn.export.prune import prune
from pwfn.export.reference import WRAPPED, Reference, cause, check, provenance, quiet, traceable
from pwfn.file.compressed import Compressed
from pwfn.file.storage import replacing
from pwfn.version import __version__

if TYPE_CHECKING:
    import onnx

_SMALLEST = 256  # weights; below, two operators cost more bytes than they save


@dataclass(frozen=True)
class OnnxExport:
    """What was written, and how it compares with torch."""

    path: Path
    file_bytes: int
    palettes: int  # tensors stored as indices
    largest_error: float  # difference from the output of torch, on batches of random inputs
    largest_output: float
    filters: int  # of the network
    dropped: int  # of these, because they are zero or nothing reads them


def to_onnx(compressed: Compressed, model: nn.Module, example: Tensor, path: str | Path) -> OnnxExport:
    """Export the network. The file is kept only if onnxruntime reproduces the output of torch.

    ``model`` has the same architecture; it is copied, not changed. ``example`` is an input batch: the size of
    its first axis is free in the exported graph.
    """
    path = Path(path)
    reference = Reference.of(compressed, model, example, "ONNX")
    names = {name for e in compressed.layout.entries for name in (e.name, *e.aliases)}
    names |= {f"{WRAPPED}{name}" for name in names}
    proto = optimised(_exported(reference.module, reference.example), names)
    pruned = prune(proto)
    palettes = _add_palettes(proto, names, pruned.summed)
    proto.producer_name, proto.producer_version = "pwfn", __version__
    for key, value in provenance(compressed).items():
        proto.metadata_props.add(key=key, value=value)
    blob: bytes = proto.SerializeToString()
    differences = _differences(blob, reference)
    check(differences, path, "onnxruntime")
    with replacing(path) as temporary:
        temporary.write_bytes(blob)
    return OnnxExport(path, len(blob), palettes, *max(differences), pruned.filters, pruned.dropped)


def _exported(module: nn.Module, example: Tensor) -> onnx.ModelProto:
    """The plain graph without constant folding, so that every weight has its own name."""
    try:
        with quiet(), torch.no_grad():
            exported, batch = traceable(module, example)
            program = torch.onnx.export(
                exported,
                (batch,),
                dynamo=True,
                dynamic_shapes=({0: torch.export.Dim("batch", min=1)},),
                input_names=["input"],
                output_names=["output"],
                optimize=False,
                verbose=False,
            )
    except torch.onnx.errors.OnnxExporterError as error:
        raise PwfnError(
            f"torch cannot export {type(module).__name__} to ONNX: {cause(error)}: change the model, or "
            "export dense safetensors instead"
        ) from error
    if program is None:
        raise PwfnError(f"torch gave no ONNX program for {type(module).__name__}")
    proto = program.model_proto
    if not proto.graph.input[0].type.tensor_type.shape.dim[0].dim_param:
        raise PwfnError(
            f"torch can export {type(module).__name__} for batches of {len(batch)} only: make its forward "
            "independent of the batch size"
        )
    return proto


def optimised(proto: onnx.ModelProto, names: set[str], smallest: int = _SMALLEST) -> onnx.ModelProto:
    """The graph without needless operators, and with the named weights as they were."""
    import onnxscript.optimizer
    from onnx import TensorProto, helper

    weights = {item.name: item for item in proto.graph.initializer if _large(item, names, smallest)}
    # During optimisation the weights are inputs. Otherwise a BatchNorm would be folded into them, and they
    # would no longer have few values.
    _replace(proto.graph.initializer, [item for item in proto.graph.initializer if item.name not in weights])
    proto.graph.input.extend(
        helper.make_tensor_value_info(name, TensorProto.FLOAT, list(item.dims))
        for name, item in weights.items()
    )
    proto = onnxscript.optimizer.optimize(proto)
    _replace(proto.graph.input, [item for item in proto.graph.input if item.name not in weights])
    proto.graph.initializer.extend(weights.values())
    # The notes of the exporter on the origin of each operator are larger than a small network.
    del proto.graph.value_info[:]
    for holder in (proto, proto.graph, *proto.graph.node, *proto.graph.initializer):
        del holder.metadata_props[:]
        holder.doc_string = ""
    return proto


def _add_palettes(proto: onnx.ModelProto, names: set[str], summed: dict[str, int]) -> int:
    """Make each named weight ``Gather(palette, indices)``, in place; returns their number.

    The last input channel of a weight in ``summed`` is a sum that is not in the codebook: it stays dense.
    """
    from onnx import TensorProto, helper, numpy_helper

    nodes, constants, palettes = [], [], 0
    for item in proto.graph.initializer:
        if not _large(item, names):
            constants.append(item)
            continue
        name, axis, dense = item.name, summed.get(item.name), numpy_helper.to_array(item)
        rest, sums = (dense, None) if axis is None else np.split(dense, [-1], axis)
        palette, indices = np.unique(rest, return_inverse=True)
        narrow = indices.reshape(rest.shape).astype(np.min_scalar_type(len(palette) - 1))
        if palette.nbytes + narrow.nbytes >= rest.nbytes:
            constants.append(item)
            continue
        palettes += 1
        constants.append(numpy_helper.from_array(palette, f"{name}.palette"))
        constants.append(numpy_helper.from_array(narrow, f"{name}.indices"))
        # Gather takes 32- or 64-bit indices only.
        wide, gathered = f"{name}.wide_indices", name if sums is None else f"{name}.gathered"
        nodes.append(helper.make_node("Cast", [f"{name}.indices"], [wide], to=TensorProto.INT32))
        nodes.append(helper.make_node("Gather", [f"{name}.palette", wide], [gathered], axis=0))
        if sums is not None:
            constants.append(numpy_helper.from_array(sums, f"{name}.sums"))
            nodes.append(helper.make_node("Concat", [gathered, f"{name}.sums"], [name], axis=axis))
    _replace(proto.graph.initializer, constants)
    _replace(proto.graph.node, [*nodes, *proto.graph.node])
    return palettes


def _large(item: onnx.TensorProto, names: set[str], smallest: int = _SMALLEST) -> bool:
    """A named weight of some size, in fp32."""
    return item.name in names and item.data_type == item.FLOAT and np.prod(item.dims) >= smallest


def _replace(field: Any, items: list[Any]) -> None:
    del field[:]
    field.extend(items)


def _differences(blob: bytes, reference: Reference) -> list[tuple[float, float]]:
    import onnxruntime

    def load() -> Callable[[Tensor], Tensor]:
        session = onnxruntime.InferenceSession(blob, providers=["CPUExecutionProvider"])
        name = session.get_inputs()[0].name
        return lambda batch: torch.from_numpy(session.run(None, {name: batch.numpy()})[0])

    return reference.differences(load, "onnxruntime")
