"""INT8 with scales computed at run time, for ONNX Runtime, and with fixed ones, for TensorRT."""

from __future__ import annotations

import tempfile
from collections.abc import Mapping, Sequence
from contextlib import closing
from pathlib import Path

import numpy as np
import onnx
from onnx import ModelProto, NodeProto, numpy_helper
from onnx.helper import make_node
from onnxruntime.quantization import QuantType, quantize_dynamic
from onnxruntime.quantization.quant_utils import add_pre_process_metadata

from edge.datatypes import Array
from edge.runtimes.onnxruntime_runner import OnnxRuntimeRunner
from export.quantize.precision import checked, loaded
from export.quantize.ranges import LEVELS, Feeds, InputRange, projections, scale_of, with_outputs

#: A product stays FP32 in :func:`dynamic_int8` if rounding its input moves the output of every second token by more
#: than this share of its length. Of all-mpnet-base-v2, the second products of feed-forwards 6 to 10 have 0.36 to 0.60,
#: because one hidden unit is up to 137 times the root mean square of all. Other products, and those of
#: all-MiniLM-L6-v2, have at most 0.18.
_COARSE = 0.25
#: Inputs for that measurement, at most.
_MEASURED = 16


def dynamic_int8(model: bytes, batches: Sequence[Feeds] = (), *, has_head: bool = True) -> bytes:
    """Return the model for ONNX Runtime with INT8 weights, per channel, and inputs quantised at run time.

    ``model`` is the plain one: ONNX Runtime fuses the rest when it loads, and is no slower than on a fused one.
    Embeddings stay FP32: they cost memory but no time, and would be quantised per tensor. The head stays FP32, too, and
    so do products for whose inputs eight bits are too few.

    Weights have all eight bits. ARM, and x86 with VNNI or AMX, add their products exactly. On x86 without these, ONNX
    Runtime adds pairs of them in 16 bits, which clips the largest sums: in an emulation with MiniLM at most 7 % of a
    product's sums had one such pair, on average 0.4 %, and the error against FP32 was no larger. Seven bits
    (``reduce_range``) would avoid that, and cost every other processor a bit.

    Args:
        batches: inputs without padding, some of which show for which products that is; none leaves all of them in INT8.
        has_head: whether a task head follows the last normalisation.
    """
    source = _without_gemm(loaded(model))
    coarse = _coarse_products(source, has_head, batches[:_MEASURED])
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory) / "int8.onnx"
        quantize_dynamic(
            _preprocessed(source),
            path,
            op_types_to_quantize=["MatMul"],
            nodes_to_quantize=[node.name for node in projections(source, has_head) if node.name not in coarse],
            per_channel=True,
            weight_type=QuantType.QInt8,
        )
        return checked(onnx.load(path))


def _coarse_products(model: ModelProto, has_head: bool, batches: Sequence[Feeds]) -> set[str]:
    """Return the names of the products that :data:`_COARSE` leaves in FP32."""
    if not batches:
        return set()
    products = projections(model, has_head)
    weights = {tensor.name: numpy_helper.to_array(tensor) for tensor in model.graph.initializer}
    read = list(dict.fromkeys(node.input[0] for node in products))
    shares: dict[str, list[Array]] = {}
    measured = ModelProto.FromString(model.SerializeToString())  # with other outputs
    with closing(OnnxRuntimeRunner(with_outputs(measured, read), subject="model to measure")) as runner:
        for batch in batches:
            found = runner.infer(batch)
            for node in products:
                values, weight = found[node.input[0]], weights[node.input[1]]
                moved = np.linalg.norm((_in_levels(values) - values) @ weight, axis=-1)
                length = np.linalg.norm(values @ weight, axis=-1)
                shares.setdefault(node.name, []).append((moved / np.where(length, length, 1)).ravel())
    return {name for name, parts in shares.items() if np.median(np.concatenate(parts)) > _COARSE}


def _in_levels(values: Array) -> Array:
    """Return values as DynamicQuantizeLinear rounds them: 256 levels from the smallest to the largest, 0 among them."""
    low, high = min(values.min(), np.float32(0)), max(values.max(), np.float32(0))
    scale = (high - low) / np.float32(255) or np.float32(1)
    zero = np.round(-low / scale)
    rounded: Array = (np.clip(np.round(values / scale) + zero, 0, 255) - zero) * scale
    return rounded


def _without_gemm(model: ModelProto) -> ModelProto:
    """Write each Gemm as products and sums: the quantizer transposes its weights even where another node reads them."""
    nodes = list(model.graph.node)
    del model.graph.node[:]
    for node in nodes:
        if node.op_type != "Gemm":
            model.graph.node.append(node)
            continue
        values = {attribute.name: onnx.helper.get_attribute_value(attribute) for attribute in node.attribute}
        plain = not values.get("transA") and values.get("alpha", 1) == values.get("beta", 1) == 1
        assert plain, f"{node.name} is not a layer's product"
        left, right = node.input[:2]
        added, output = list(node.input[2:]), node.output[0]
        product = f"{output}.product" if added else output
        if values.get("transB"):
            turned = f"{output}.transposed"
            made = onnx.helper.make_node("Transpose", [right], [turned], f"{node.name}.transpose", perm=[1, 0])
            model.graph.node.append(made)
            right = turned
        model.graph.node.append(onnx.helper.make_node("MatMul", [left, right], [product], node.name))
        if added:
            model.graph.node.append(onnx.helper.make_node("Add", [product, *added], [output], f"{node.name}.add"))
    return model


def _preprocessed(model: ModelProto) -> ModelProto:
    """Mark the model as preprocessed, because the exporter has folded its constants; otherwise each call warns."""
    add_pre_process_metadata(model)
    return model


#: QuantizeLinear and DequantizeLinear take FP16 scales from here on; TensorRT 10.3 reads up to 20.
INT8_OPSET = 19


def quantized(model: bytes, ranges: Mapping[str, InputRange]) -> bytes:
    """Return the model with INT8 matrix products and convolutions, and FP32 for the rest.

    Each node with a range gets QuantizeLinear and DequantizeLinear on both inputs: symmetric, as TensorRT demands,
    per channel for weights, and per tensor for activations. Other nodes read an input as it was.

    Args:
        model: in FP32, such as :func:`export.models.convert.to_onnx` writes.
        ranges: by the names of ``MatMul``, ``Gemm`` and ``Conv`` nodes with weights as their second input; those of
            :func:`export.quantize.ranges.input_ranges`.
    """
    source = loaded(model)
    if next(one.version for one in source.opset_import if one.domain in ("", "ai.onnx")) < INT8_OPSET:
        source = onnx.version_converter.convert_version(source, INT8_OPSET)
    graph = source.graph
    weights = {tensor.name: tensor for tensor in graph.initializer}
    nodes = list(graph.node)
    chosen = {node.name for node in nodes if len(node.input) > 1 and node.input[1] in weights} & ranges.keys()
    assert chosen == ranges.keys(), f"ranges of products that the model lacks: {sorted(ranges.keys() - chosen)}"
    del graph.node[:]
    done: set[str] = set()
    for node in nodes:
        if node.name in chosen:
            read, weight = node.input[0], numpy_helper.to_array(weights[node.input[1]])  # of a product [inner, outputs]
            largest, factors = ranges[node.name]
            if read not in done:  # queries, keys and values share it
                done.add(read)
                graph.node.extend(_input_nodes(source, read, largest, factors))
            scaled = weight if factors is None else weight * factors[:, None]
            graph.node.append(_weight_node(source, node.name, scaled, _channels(node)))
            node.input[:2] = [f"{read}.rounded", f"{node.name}.weight.rounded"]
        graph.node.append(node)
    used = {name for node in graph.node for name in node.input} | {output.name for output in graph.output}
    for tensor in [tensor for tensor in graph.initializer if tensor.name not in used]:
        graph.initializer.remove(tensor)
    return checked(source)


def _channels(node: NodeProto) -> int:
    """Return the dimension of the output channels in a node's weights."""
    transposed = any(attribute.name == "transB" and attribute.i for attribute in node.attribute)
    return 0 if node.op_type == "Conv" or transposed else 1


def _input_nodes(model: ModelProto, read: str, largest: float, factors: Array | None) -> list[NodeProto]:
    """Return what rounds an input, as ``INPUT.rounded``."""
    nodes, smoothed = [], read
    if factors is not None:
        smoothed = f"{read}.smoothed"
        nodes.append(make_node("Mul", [read, _constant(model, f"{read}.factors", 1 / factors)], [smoothed], smoothed))
    scale = _constant(model, f"{read}.scale", scale_of(np.float32(largest)))
    zero = _constant(model, f"{read}.zero", np.zeros((), np.int8))
    for operator, source, made in (
        ("QuantizeLinear", smoothed, f"{read}.int8"),
        ("DequantizeLinear", f"{read}.int8", f"{read}.rounded"),
    ):
        nodes.append(make_node(operator, [source, scale, zero], [made], made))
    return nodes


def _weight_node(model: ModelProto, name: str, weight: Array, axis: int) -> NodeProto:
    """Return what gives the rounded weights of a node, with a scale for each channel of ``axis``."""
    others = tuple(dimension for dimension in range(weight.ndim) if dimension != axis)
    scales = scale_of(np.abs(weight).max(axis=others, keepdims=True))
    levels = np.clip(np.round(weight / scales), -LEVELS, LEVELS).astype(np.int8)
    arrays = {"int8": levels, "scale": scales.ravel(), "zero": np.zeros(weight.shape[axis], np.int8)}
    inputs = [_constant(model, f"{name}.weight.{what}", array) for what, array in arrays.items()]
    made = f"{name}.weight.rounded"  # a tensor may have the name of a node
    return make_node("DequantizeLinear", inputs, [made], made, axis=axis)


def _constant(model: ModelProto, name: str, array: Array) -> str:
    model.graph.initializer.append(numpy_helper.from_array(array, name))
    return name
