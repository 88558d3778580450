"""ONNX with weights kept as small indices into a palette, for stock runtimes.

Each compressed tensor becomes two constants and two operators: ``Gather(palette, Cast(indices))``.
A runtime that folds constants (onnxruntime does when a session starts) then runs ordinary dense
weights, so that the file is small and the speed is that of the dense model.
"""

from __future__ import annotations

import copy
import logging
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor, nn

from pwfn.compressed import Compressed
from pwfn.errors import PwfnError
from pwfn.storage import replacing

if TYPE_CHECKING:
    import onnx

_SMALLEST = 256  # weights; below, two operators cost more bytes than they save
TOLERANCE = 1e-5
"""Largest difference from torch, relative to the largest output (at least 1), that is accepted."""


@dataclass(frozen=True)
class OnnxExport:
    """What was written, and how it compares with torch."""

    path: Path
    file_bytes: int
    palettes: int  # tensors kept as indices
    largest_error: float  # of the runtime's output against torch's, on a batch of random inputs
    largest_output: float


def to_onnx(compressed: Compressed, model: nn.Module, example: Tensor, path: str | Path) -> OnnxExport:
    """Export the network, check it against torch in onnxruntime, and only then keep the file.

    Args:
        compressed: the weights.
        model: a model of the same architecture; it is copied, not changed.
        example: an input batch; its first axis is the batch, of any size in the exported graph.
        path: the file to write.
    """
    path = Path(path)
    module = compressed.apply_to(copy.deepcopy(model)).float().eval().cpu()
    proto = _exported(module, example)
    names = {name for e in compressed.layout.entries for name in (e.name, *e.aliases)}
    proto, palettes = _with_palettes(proto, names)
    blob: bytes = proto.SerializeToString()
    error, largest = _difference(blob, module, example)
    if not error <= TOLERANCE * max(1.0, largest):
        raise PwfnError(
            f"{path}: not written, because onnxruntime's output differs from torch's by {error:.2g} "
            f"(largest output {largest:.2g}): report the model, or export dense safetensors instead"
        )
    with replacing(path) as temporary:
        temporary.write_bytes(blob)
    return OnnxExport(path, len(blob), palettes, error, largest)


def _exported(module: nn.Module, example: Tensor) -> onnx.ModelProto:
    """The plain graph: constants not folded, so that every weight is there under its own name."""
    try:
        import onnx  # noqa: F401
        import onnxruntime  # noqa: F401
        import onnxscript  # noqa: F401
    except ImportError as error:
        raise PwfnError(f"export to ONNX needs {error.name}: pip install 'pwfn[onnx]'") from error
    # Two examples: with one, the exporter would take the batch for a constant.
    batch = example.detach().cpu()
    batch = torch.cat((batch, batch))[:2] if batch.shape[0] < 2 else batch
    shapes = ({0: torch.export.Dim("batch", min=1)},)
    logger = logging.getLogger("torch.onnx")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # the exporter's own deprecations, nothing of the user's
            program = torch.onnx.export(
                module,
                (batch,),
                dynamo=True,
                dynamic_shapes=shapes,
                input_names=["input"],
                output_names=["output"],
                optimize=False,
                verbose=False,
            )
    except torch.onnx.errors.OnnxExporterError as error:
        cause = str(error).strip().splitlines()[0]
        raise PwfnError(f"torch cannot export {type(module).__name__} to ONNX: {cause}") from error
    finally:
        logger.setLevel(level)
    if program is None:
        raise PwfnError(f"torch gave no ONNX program for {type(module).__name__}")
    return program.model_proto


def _with_palettes(proto: onnx.ModelProto, names: set[str]) -> tuple[onnx.ModelProto, int]:
    """The graph simplified, with each named weight as ``Gather(palette, indices)``."""
    import onnxscript.optimizer
    from onnx import TensorProto, helper, numpy_helper

    weights = {
        item.name: item
        for item in proto.graph.initializer
        if item.name in names and item.data_type == TensorProto.FLOAT and np.prod(item.dims) >= _SMALLEST
    }
    # While the graph is simplified the weights are inputs: nothing may be folded into them, or
    # a BatchNorm would be, and their values would no longer be few.
    others = [item for item in proto.graph.initializer if item.name not in weights]
    _replace(proto.graph.initializer, others)
    proto.graph.input.extend(
        helper.make_tensor_value_info(name, TensorProto.FLOAT, list(item.dims))
        for name, item in weights.items()
    )
    proto = onnxscript.optimizer.optimize(proto)
    _replace(proto.graph.input, [item for item in proto.graph.input if item.name not in weights])
    nodes = []
    for name, item in weights.items():
        palette, indices = np.unique(numpy_helper.to_array(item), return_inverse=True)
        if len(palette) > 2**16:
            proto.graph.initializer.append(item)
            continue
        narrow = indices.reshape(tuple(item.dims)).astype(np.uint8 if len(palette) <= 2**8 else np.uint16)
        proto.graph.initializer.append(numpy_helper.from_array(palette, f"{name}.palette"))
        proto.graph.initializer.append(numpy_helper.from_array(narrow, f"{name}.indices"))
        # Gather takes 32- or 64-bit indices only.
        wide = f"{name}.wide_indices"
        nodes.append(helper.make_node("Cast", [f"{name}.indices"], [wide], to=TensorProto.INT32))
        nodes.append(helper.make_node("Gather", [f"{name}.palette", wide], [name], axis=0))
    _replace(proto.graph.node, [*nodes, *proto.graph.node])
    _strip(proto)
    return proto, len(nodes) // 2


def _strip(proto: onnx.ModelProto) -> None:
    """Leave away the exporter's notes on where each operator came from: they outweigh small networks."""
    del proto.graph.value_info[:]
    for holder in (proto, proto.graph, *proto.graph.node, *proto.graph.initializer):
        del holder.metadata_props[:]
        holder.doc_string = ""


def _replace(field: Any, items: list[Any]) -> None:
    del field[:]
    field.extend(items)


def _difference(blob: bytes, module: nn.Module, example: Tensor) -> tuple[float, float]:
    """Largest difference and largest output, on a batch of three that no example had."""
    import onnxruntime

    generator = torch.Generator().manual_seed(0)
    shape = (3, *example.shape[1:])
    if example.is_floating_point():
        batch = torch.randn(shape, generator=generator).to(example.dtype)
    else:
        batch = example[torch.arange(3) % len(example)].cpu()
    session = onnxruntime.InferenceSession(blob, providers=["CPUExecutionProvider"])
    name = session.get_inputs()[0].name
    found = torch.from_numpy(session.run(None, {name: batch.numpy()})[0])
    with torch.no_grad():
        wanted = module(batch)
    if not isinstance(wanted, Tensor):
        raise PwfnError(f"the model returns a {type(wanted).__name__}: wrap it so that it returns one tensor")
    return float((found - wanted).abs().max()), float(wanted.abs().max())
