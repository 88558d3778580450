"""ONNX with weights as small indices into a palette, for standard runtimes.

Each compressed tensor becomes two constants and two operators: ``Gather(palette, Cast(indices))``. A runtime
that folds constants (onnxruntime does so when a session starts) then computes with ordinary dense weights:
the file is small, and the speed is that of the dense model without the filters that it does not need.
"""

from __future__ import annotations

import contextlib
import copy
import importlib
import io
import logging
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor, nn

from pwfn.bayes.objective import logits
from pwfn.errors import PwfnError
from pwfn.export.prune import prune
from pwfn.file.compressed import Compressed
from pwfn.file.storage import replacing
from pwfn.version import __version__

if TYPE_CHECKING:
    import onnx

TOLERANCE = 1e-5
"""Largest accepted difference from torch, relative to the largest output (at least 1)."""

_WRAPPED = "network."  # before the names of a network whose output is an object with logits
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

    Args:
        compressed: the weights.
        model: a model of the same architecture; it is copied, not changed.
        example: an input batch; its first axis is the batch, of any size in the exported graph.
        path: the file to write.
    """
    path = Path(path)
    _check_packages()
    if "activations" in compressed.record:
        raise PwfnError(
            "the network computes with quantised or rectified activations, which are not written to ONNX: "
            "export it to safetensors, or run it in torch with apply_to"
        )
    module = compressed.apply_to(copy.deepcopy(model).float()).eval().cpu()
    example = example.detach().cpu()
    if example.ndim == 0 or len(example) == 0:
        raise PwfnError("the example holds no input: give a batch of at least one")
    example = example.float() if example.is_floating_point() else example
    batches = _test_batches(example)
    wanted = [_output(module, batch) for batch in batches]
    names = {name for e in compressed.layout.entries for name in (e.name, *e.aliases)}
    names |= {f"{_WRAPPED}{name}" for name in names}
    proto = _optimised(_exported(module, example), names)
    pruned = prune(proto)
    palettes = _add_palettes(proto, names, pruned.summed)
    proto.producer_name, proto.producer_version = "pwfn", __version__
    for key, value in provenance(compressed).items():
        proto.metadata_props.add(key=key, value=value)
    blob: bytes = proto.SerializeToString()
    differences = _differences(blob, batches, wanted)
    for error, largest in differences:
        if not error <= TOLERANCE * max(1.0, largest):
            raise PwfnError(
                f"{path}: not written, because the output of onnxruntime differs from torch by {error:.2g} "
                f"(largest output {largest:.2g}): report the model, or export dense safetensors instead"
            )
    with replacing(path) as temporary:
        temporary.write_bytes(blob)
    return OnnxExport(path, len(blob), palettes, *max(differences), pruned.filters, pruned.dropped)


def provenance(compressed: Compressed) -> dict[str, str]:
    """Where an exported file comes from: the version of pwfn, and content and method of its .pwfn file."""
    return {
        "pwfn_version": __version__,
        "pwfn_content_sha256": compressed.content_sha256(),
        "pwfn_method": str(compressed.record.get("method", "")),
    }


class _Logits(nn.Module):
    """A network that returns its logits alone, where it returns an object that holds them."""

    def __init__(self, network: nn.Module) -> None:
        super().__init__()
        self.network = network
        self.eval()

    def forward(self, x: Tensor) -> Any:
        """The logits."""
        return logits(self.network(x))


def _check_packages() -> None:
    for name in ("onnx", "onnxruntime", "onnxscript"):
        try:
            importlib.import_module(name)
        except ImportError as error:
            raise PwfnError(f"export to ONNX needs {name}: pip install 'pwfn[onnx]'") from error


def _test_batches(example: Tensor) -> tuple[Tensor, ...]:
    """Batches of three and of one, sizes that the exporter does not see; random if the input is a float."""
    if example.is_floating_point():
        three = torch.randn((3, *example.shape[1:]), generator=torch.Generator().manual_seed(0))
    else:
        three = example[torch.arange(3) % len(example)]
    return three, three[:1]


def _output(module: nn.Module, batch: Tensor) -> Tensor:
    """The output of torch, which the runtime must reproduce."""
    name = type(module).__name__
    try:
        with torch.no_grad():
            wanted = logits(module(batch))
    except Exception as error:  # the model is the user's and may raise anything
        shape = "×".join(str(size) for size in batch.shape)
        kind = str(batch.dtype).removeprefix("torch.")
        raise PwfnError(
            f"{name} cannot run on an input of shape {shape} and type {kind}: {_cause(error)}: give an "
            "example that it can take, and support batches of any size"
        ) from error
    if not isinstance(wanted, Tensor):
        raise PwfnError(f"{name} returns a {type(wanted).__name__}: wrap it so that it returns one tensor")
    if wanted.numel() == 0:
        raise PwfnError(f"{name} returns an empty tensor: there is nothing to compare")
    return wanted


def _exported(module: nn.Module, example: Tensor) -> onnx.ModelProto:
    """The plain graph without constant folding, so that every weight has its own name."""
    # Two examples: with one, the exporter would take the batch for a constant.
    batch = torch.cat((example, example))[:2] if example.shape[0] < 2 else example
    try:
        with _quiet(), torch.no_grad():
            exported = module if isinstance(module(batch), Tensor) else _Logits(module)
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
            f"torch cannot export {type(module).__name__} to ONNX: {_cause(error)}: change the model, or "
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


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Discard the warnings, logs and printed graphs of the exporter; our errors say the same in short."""
    level = logging.root.manager.disable
    logging.disable(logging.CRITICAL)
    nowhere = io.StringIO()
    try:
        with (
            warnings.catch_warnings(),
            contextlib.redirect_stdout(nowhere),
            contextlib.redirect_stderr(nowhere),
        ):
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(level)


def _cause(error: BaseException) -> str:
    """First line of the innermost error, which names the problem."""
    while error.__cause__ is not None:
        error = error.__cause__
    lines = str(error).strip().splitlines()
    return lines[0].strip().rstrip(".:") if lines else type(error).__name__


def _optimised(proto: onnx.ModelProto, names: set[str]) -> onnx.ModelProto:
    """The graph without needless operators, and with the named weights as they were."""
    import onnxscript.optimizer
    from onnx import TensorProto, helper

    weights = {item.name: item for item in proto.graph.initializer if _large(item, names)}
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


def _large(item: onnx.TensorProto, names: set[str]) -> bool:
    """A named weight of some size, in fp32."""
    return item.name in names and item.data_type == item.FLOAT and np.prod(item.dims) >= _SMALLEST


def _replace(field: Any, items: list[Any]) -> None:
    del field[:]
    field.extend(items)


def _differences(
    blob: bytes, batches: Sequence[Tensor], wanted: Sequence[Tensor]
) -> list[tuple[float, float]]:
    """For each batch the largest difference between onnxruntime and torch, and the largest output."""
    import onnxruntime

    try:
        session = onnxruntime.InferenceSession(blob, providers=["CPUExecutionProvider"])
        name = session.get_inputs()[0].name
        found = [torch.from_numpy(session.run(None, {name: batch.numpy()})[0]) for batch in batches]
    except Exception as error:  # the errors of onnxruntime have no common class
        raise PwfnError(
            f"onnxruntime cannot run the exported network: {_cause(error)}: export dense safetensors instead"
        ) from error
    differences = []
    for batch, ours, torchs in zip(batches, found, wanted, strict=True):
        if ours.shape != torchs.shape:
            raise PwfnError(
                f"for a batch of {len(batch)} the output has shape {tuple(ours.shape)} in onnxruntime and "
                f"{tuple(torchs.shape)} in torch: make the model treat batches of any size alike"
            )
        largest = (ours.double() - torchs.double()).abs().max()
        differences.append((float(largest), float(torchs.double().abs().max())))
    return differences
