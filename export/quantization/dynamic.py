"""INT8 for ONNX Runtime, whose scales of inputs are computed at run time."""

from __future__ import annotations

import tempfile
from pathlib import Path

import onnx
from onnx import ModelProto
from onnxruntime.quantization import QuantType, quantize_dynamic
from onnxruntime.quantization.quant_utils import add_pre_process_metadata

from export.quantize.precision import checked, loaded
from export.quantize.ranges import projections


def dynamic_int8(model: bytes, *, has_head: bool = True) -> bytes:
    """Return the model for ONNX Runtime with INT8 weights, per channel, and inputs quantised at run time.

    ``model`` is the plain one: ONNX Runtime fuses the rest when it loads, and is no slower than on a fused one.
    Embeddings stay FP32: they cost memory but no time, and would be quantised per tensor. The head stays FP32, too.

    Weights have all eight bits. ARM, and x86 with VNNI or AMX, add their products exactly. On x86 without these, ONNX
    Runtime adds pairs of them in 16 bits, which clips the largest sums: in an emulation with MiniLM at most 7 % of a
    product's sums had one such pair, on average 0.4 %, and the error against FP32 was no larger. Seven bits
    (``reduce_range``) would avoid that, and cost every other processor a bit.
    """
    source = _without_gemm(loaded(model))
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory) / "int8.onnx"
        quantize_dynamic(
            _preprocessed(source),
            path,
            op_types_to_quantize=["MatMul"],
            nodes_to_quantize=[node.name for node in projections(source, has_head)],
            per_channel=True,
            weight_type=QuantType.QInt8,
        )
        return checked(onnx.load(path))


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
