"""Filters that an ONNX graph does not need are dropped, and the graph computes the same.

The output of a filter whose weights are all zero is one constant, its bias. The operators up to the layers
that read it turn this into another constant ``v``; a reader with weights ``w`` makes ``sum(w) * v`` of it.
The filter is dropped, with its input channel in every reader, if

- ``v = 0``, or the weights ``w`` of all readers are zero (then the filter may be anything), or
- the reader does not pad: ``sum(w) * v`` is added to its bias, or
- it pads, and there are others like it: ``w v + w' v' = (w + w' v' / v) v``, one channel for all of them.

Left alone: what reaches the output, sums and concatenations of two tensors, grouped convolutions other than
depthwise ones, weights that two layers share, and every operator that is not named here.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    import onnx

_ELEMENTWISE = {"Add", "Clip", "Div", "Identity", "LeakyRelu", "Max", "Min", "Mul", "PRelu", "Relu", "Sub"}
_ELEMENTWISE |= {"Elu", "Gelu", "HardSigmoid", "HardSwish", "Mish", "Selu", "Sigmoid", "Softplus", "Tanh"}


class Pruned(NamedTuple):
    """The count of filters before, of those dropped, and weights whose last input is a sum, with its axis."""

    filters: int
    dropped: int
    summed: dict[str, int]


@dataclass(frozen=True)
class _Channels:
    """A tensor as one number per channel, for the channels where that is known."""

    value: NDArray[Any]  # of the rank of the tensor, and of size 1 along all other axes
    known: NDArray[np.bool_]
    axis: int
    repeat: int = 1  # features per channel, once flattened


@dataclass(frozen=True)
class _Layer:
    """A convolution or a linear layer with constant weights."""

    node: onnx.NodeProto
    weight: str
    outputs: int  # axes of the weights
    inputs: int


@dataclass(frozen=True)
class _Reach:
    """What depends on the channels of one layer: tensors, operators between, and layers that read them."""

    tensors: dict[str, _Channels]
    between: list[onnx.NodeProto] = field(default_factory=list)
    readers: list[_Layer] = field(default_factory=list)


def prune(proto: onnx.ModelProto, kept: Collection[str] = ()) -> Pruned:
    """Drop filters in place until there are none to drop; every layer keeps at least one.

    The constants in ``kept`` are not cut.
    """
    graph = _Graph(proto, set(kept))
    before = graph.filters()
    # A graph inside an operator may read any tensor.
    nested = any(attribute.HasField("g") for node in graph.nodes for attribute in node.attribute)
    while not nested and sum(graph.shrink(layer) for layer in graph.layers()):
        pass
    graph.write()
    return Pruned(before, before - graph.filters(), graph.summed)


class _Graph:
    """A graph with its constants as arrays, each of which only one operator reads."""

    def __init__(self, proto: onnx.ModelProto, kept: set[str]) -> None:
        from onnx import numpy_helper, shape_inference

        self.kept = kept
        self.proto, self.nodes, self.summed = proto, proto.graph.node, dict[str, int]()
        self.constants = {item.name: numpy_helper.to_array(item) for item in proto.graph.initializer}
        inferred = shape_inference.infer_shapes(proto).graph.value_info
        self.shapes = {i.name: [d.dim_value for d in i.type.tensor_type.shape.dim] for i in inferred}
        self.outputs = {item.name for item in proto.graph.output}
        self.made_by = {name: node for node in self.nodes for name in node.output}
        uses = Counter(name for node in self.nodes for name in node.input)
        self.shared = {name for name, count in uses.items() if count > 1}
        self.copies: dict[str, str] = {}
        for node in self.nodes:
            for i, name in enumerate(node.input):
                if name in self.shared and name in self.constants:
                    node.input[i] = copy = f"{name}.copy{len(self.copies)}"
                    self.copies[copy], self.constants[copy] = name, self.constants[name]

    def write(self) -> None:
        """Put the constants back; copies that are still equal are one again."""
        from onnx import numpy_helper

        first: dict[tuple[str, bytes], str] = {}
        for node in self.nodes:
            for i, name in enumerate(node.input):
                if name in self.copies:
                    array, origin = self.constants[name], self.copies[name]
                    new = first.setdefault((origin, array.tobytes()), name)
                    node.input[i] = origin if array is self.constants[origin] else new
        used = {name for node in self.nodes for name in node.input} | self.outputs
        kept = [numpy_helper.from_array(each, name) for name, each in self.constants.items() if name in used]
        del self.proto.graph.initializer[:], self.proto.graph.value_info[:]
        self.proto.graph.initializer.extend(kept)

    def filters(self) -> int:
        """The filters of all convolutions, grouped ones too, and of linear layers, shared ones each time."""
        linear = [layer for node in self.nodes if node.op_type != "Conv" and (layer := self.found(node))]
        plain = [(layer.weight, layer.outputs) for layer in linear]
        every = plain + [(node.input[1], 0) for node in self.nodes if node.op_type == "Conv"]
        return sum(self.constants[name].shape[axis] for name, axis in every if name in self.constants)

    def layers(self) -> list[_Layer]:
        """In the order of computation."""
        return [layer for node in self.nodes if (layer := self.layer(node))]

    def layer(self, node: onnx.NodeProto) -> _Layer | None:
        """The operator as a layer, if it is one whose weights may be cut."""
        layer = self.found(node)
        return None if layer is None or layer.weight in self.copies else layer

    def found(self, node: onnx.NodeProto) -> _Layer | None:
        """The operator as a layer, even if its weights are those of another layer too."""
        facts = _attributes(node)
        weight, axes = node.input[1] if len(node.input) > 1 else "", (0, 1)
        if node.op_type == "MatMul":
            made, axes = self.made_by.get(weight), (1, 0)
            if made is not None and made.op_type == "Transpose" and weight not in self.shared:
                turned = _attributes(made).get("perm", [1, 0]) == [1, 0]
                weight, axes = made.input[0] if turned else "", (0, 1)
        elif node.op_type == "Gemm":
            axes = (0, 1) if facts.get("transB", 0) else (1, 0)
            if facts.get("transA", 0) or (facts.get("alpha", 1.0), facts.get("beta", 1.0)) != (1.0, 1.0):
                return None
        elif node.op_type != "Conv" or facts.get("group", 1) != 1:
            return None
        weights = self.constants.get(weight)
        if weights is None or weights.dtype != np.float32:
            return None
        if node.op_type == "MatMul" and weights.ndim != 2:
            return None
        wanted = (weights.shape[axes[0]],)
        if any(name not in self.constants or self.constants[name].shape != wanted for name in node.input[2:]):
            return None
        return _Layer(node, weight, *axes)

    def reach(self, layer: _Layer) -> _Reach | None:
        """Follow the output of a layer; None if its channels reach anything that is left alone."""
        weights, name = self.constants[layer.weight], layer.node.output[0]
        linear = layer.node.op_type == "MatMul"  # its channels are on the last axis
        if (linear and name not in self.shapes) or {layer.weight, *layer.node.input} & self.kept:
            return None
        rank = len(self.shapes[name]) if linear else weights.ndim
        shape = [1] * rank
        shape[rank - 1 if linear else 1] = weights.shape[layer.outputs]
        bias = self.constants[layer.node.input[2]] if len(layer.node.input) > 2 else np.zeros(1, np.float32)
        value = np.broadcast_to(bias, weights.shape[layer.outputs]).reshape(shape)
        known = ~_any(weights, layer.outputs) & np.isfinite(value).ravel()
        reach = _Reach({name: _Channels(value, known, rank - 1 if linear else 1)})
        for node in self.nodes:
            inside = [name for name in node.input if name in reach.tensors]
            if not inside:
                continue
            reader, x = self.layer(node), reach.tensors[inside[0]]
            if inside != [node.input[0]] and node.op_type not in _ELEMENTWISE:
                return None
            if {reader.weight if reader else "", *node.input} & self.kept:
                return None
            if reader is not None:
                if x.axis != (x.value.ndim - 1 if node.op_type == "MatMul" else 1):
                    return None
                reach.readers.append(reader)
                continue
            after = self.through(node, [reach.tensors[name] for name in inside])
            if after is None or len(node.output) > 1:
                return None
            reach.between.append(node)
            reach.tensors[node.output[0]] = after
        return None if reach.tensors.keys() & self.outputs else reach

    def through(self, node: onnx.NodeProto, inputs: list[_Channels]) -> _Channels | None:
        """The channels after an operator that keeps them apart, None for any other."""
        facts, x, op = _attributes(node), inputs[0], node.op_type
        others = [self.constants[name] for name in node.input if name in self.constants]
        if len(inputs) + len(others) != sum(map(bool, node.input)):
            return None
        if op in _ELEMENTWISE or (op == "BatchNormalization" and x.axis == 1):
            if any((each.value.shape, each.repeat) != (x.value.shape, x.repeat) for each in inputs):
                return None
            value = self.computed(node, inputs)
            # A constant that differs from place to place gives more numbers than channels.
            if value is None or value.shape != x.value.shape:
                return None
            known = np.logical_and.reduce([each.known for each in inputs]) & np.isfinite(value).ravel()
            return replace(x, value=value, known=known)
        if x.axis != 1:
            return None
        if op in ("MaxPool", "GlobalMaxPool", "GlobalAveragePool"):
            return x
        if op == "AveragePool":  # zeros of the padding may be counted
            border = _padded(facts) or facts.get("ceil_mode", 0)
            return replace(x, known=x.known & (x.value.ravel() == 0)) if border else x
        if op == "ReduceMean":
            axes = facts.get("axes", others[0].tolist() if others else [])
            axes = sorted({axis % x.value.ndim for axis in axes})
            if not axes or axes[0] < 2:
                return None
            return x if facts.get("keepdims", 1) else replace(x, value=x.value.squeeze(tuple(axes)))
        if op in ("Flatten", "Reshape"):
            return self.flattened(node, x)
        if op == "Conv" and not {*node.input[1:]} & self.copies.keys():  # a depthwise one
            weights, bias = others[0], others[1] if len(others) > 1 else 0.0
            if not weights.shape[0] == facts.get("group", 1) == x.known.size:
                return None
            carried = x.known & (not _padded(facts) or x.value.ravel() == 0)
            total = weights.reshape(len(weights), -1).sum(1) * np.where(carried, x.value.ravel(), 0) + bias
            return replace(x, value=total.reshape(x.value.shape), known=carried | ~_any(weights, 0))
        return None

    def flattened(self, node: onnx.NodeProto, x: _Channels) -> _Channels | None:
        """From batch × channels × … to batch × features, nothing else."""
        facts, places = _attributes(node), self.shapes.get(node.input[0], [0, 0, 0])[2:]
        repeat = int(np.prod(places))
        if node.op_type == "Flatten":
            plain = facts.get("axis", 1) == 1
        else:
            target = self.constants[node.input[1]].tolist()
            plain = target == [-1, repeat * x.known.size]
        if not plain or repeat == 0:
            return None
        value = np.repeat(x.value.reshape(1, -1), repeat, axis=1)
        return _Channels(value, np.repeat(x.known, repeat), 1, repeat * x.repeat)

    def computed(self, node: onnx.NodeProto, inputs: list[_Channels]) -> NDArray[Any] | None:
        """The operator's own result for one number per channel, by the runtime; None if it has none."""
        import onnxruntime
        from onnx import TensorProto, helper, numpy_helper

        def described(name: str) -> onnx.ValueInfoProto:
            return helper.make_tensor_value_info(name, TensorProto.FLOAT, None)

        fixed = [numpy_helper.from_array(self.constants[n], n) for n in node.input if n in self.constants]
        names = [name for name in node.input if name and name not in self.constants]
        given = [described(name) for name in dict.fromkeys(names)]
        graph = helper.make_graph([node], "channels", given, [described(node.output[0])], fixed)
        versions = {"opset_imports": self.proto.opset_import, "ir_version": self.proto.ir_version}
        blob = helper.make_model(graph, **versions).SerializeToString()
        options = onnxruntime.SessionOptions()
        options.log_severity_level = 4  # shapes that do not fit are no error here
        try:
            session = onnxruntime.InferenceSession(blob, options, providers=["CPUExecutionProvider"])
            feed = dict(zip(names, (x.value for x in inputs), strict=True))
            return np.asarray(session.run(None, feed)[0])
        except Exception:  # the errors of onnxruntime have no common class
            return None

    def bias(self, layer: _Layer) -> tuple[onnx.NodeProto, int] | None:
        """Operator and input to which a constant can be added, if the layer adds the same everywhere."""
        node = layer.node
        if node.op_type != "MatMul":
            return None if _padded(_attributes(node)) else (node, 2)
        size = self.constants[layer.weight].shape[layer.outputs]
        users = [each for each in self.nodes if node.output[0] in each.input]
        if len(users) == 1 and users[0].op_type == "Add" and node.output[0] not in self.outputs:
            for i, name in enumerate(users[0].input):
                if name not in self.kept and name in self.constants and self.constants[name].shape == (size,):
                    return users[0], i
        return None

    def shrink(self, layer: _Layer) -> bool:
        """Drop what can be dropped of one layer."""
        count = self.constants[layer.weight].shape[layer.outputs]
        reach = self.reach(layer) if count > 1 else None
        if reach is None or not reach.readers:
            return False
        drop, summed, size = np.ones(count, bool), np.zeros(count, bool), np.full(count, np.inf)
        for reader in reach.readers:
            x = reach.tensors[reader.node.input[0]]
            free = ~_any(self.constants[reader.weight], reader.inputs) | (x.known & (x.value.ravel() == 0))
            free, constant = (each.reshape(count, -1).all(1) for each in (free, free | x.known))
            if self.bias(reader) is None:
                summed |= constant & ~free
                size = np.minimum(size, np.where(x.known, abs(x.value.ravel()), 0) if x.repeat == 1 else 0)
            drop &= constant
        summed &= drop
        # One channel stays for the sum, the one that divides best.
        last = int(np.argmax(np.where(summed, size, -1)))
        if summed.sum() < 2 or size[last] == 0:
            drop, last = drop & ~summed, -1
        keep = [c for c in range(count) if not drop[c]] + ([last] if last >= 0 else []) or [0]
        if len(keep) < count:
            self.apply(layer, reach, np.array(keep), last)
        return len(keep) < count

    def apply(self, layer: _Layer, reach: _Reach, keep: NDArray[np.intp], last: int) -> None:
        """Keep these channels; those that go add to the bias of their readers, or to the last channel."""
        for reader in reach.readers:
            self.absorb(reader, reach.tensors[reader.node.input[0]], keep, last)
        self.take(layer.weight, keep, layer.outputs)
        for name in layer.node.input[2:]:
            self.take(name, keep, 0)
        for node in reach.between:
            x = next(reach.tensors[name] for name in node.input if name in reach.tensors)
            features = _features(keep, x)
            if node.op_type == "Reshape":
                x = reach.tensors[node.output[0]]
                self.constants[node.input[1]] = np.array([-1, len(keep) * x.repeat])
            elif node.op_type in ("BatchNormalization", "Conv"):
                for name in node.input[1:]:
                    self.take(name, features, 0)
                for attribute in node.attribute:
                    if attribute.name == "group":
                        attribute.i = len(keep)
            elif node.op_type in _ELEMENTWISE:
                axis = x.axis - x.value.ndim  # shapes are aligned at their ends
                for name in node.input:
                    shape = self.constants[name].shape if name in self.constants else ()
                    if len(shape) >= -axis and shape[axis] == x.known.size:
                        self.take(name, features, axis)

    def absorb(self, reader: _Layer, x: _Channels, keep: NDArray[np.intp], last: int) -> None:
        """Cut the inputs of a reader and keep its function."""
        features, value = _features(keep, x), np.where(x.known, x.value.ravel(), 0).astype(np.float64)
        place = self.bias(reader)
        value[features[:-1] if place is None and last >= 0 else features] = 0
        weights = np.moveaxis(self.constants[reader.weight], reader.inputs, 0).astype(np.float64)
        total = np.tensordot(value, weights, 1)  # per output, and per place of the kernel
        self.take(reader.weight, features, reader.inputs)
        if place is None and last >= 0:
            cut = np.moveaxis(self.constants[reader.weight], reader.inputs, 0)
            cut[-1] = total / value[last]
            self.summed[reader.weight] = reader.inputs
        elif place is not None and total.any():
            node, i = place
            if len(node.input) == i:
                node.input.append(f"{reader.weight}.bias")
                self.constants[node.input[i]] = np.zeros(total.shape[0], np.float32)
            constant = total.reshape(total.shape[0], -1).sum(1)
            self.constants[node.input[i]] = (self.constants[node.input[i]] + constant).astype(np.float32)

    def take(self, name: str, keep: NDArray[np.intp], axis: int) -> None:
        """Cut a constant along one axis."""
        self.constants[name] = self.constants[name].take(keep, axis)


def _features(keep: NDArray[np.intp], x: _Channels) -> NDArray[np.intp]:
    return (keep[:, None] * x.repeat + np.arange(x.repeat)).ravel()


def _any(weights: NDArray[Any], axis: int) -> NDArray[np.bool_]:
    """Along this axis: is there a weight other than zero?"""
    return np.asarray(weights.any(tuple(i for i in range(weights.ndim) if i != axis % weights.ndim)))


def _padded(facts: dict[str, Any]) -> bool:
    return any(facts.get("pads", ())) or facts.get("auto_pad", b"NOTSET") not in (b"NOTSET", b"VALID")


def _attributes(node: onnx.NodeProto) -> dict[str, Any]:
    from onnx import helper

    return {attribute.name: helper.get_attribute_value(attribute) for attribute in node.attribute}
