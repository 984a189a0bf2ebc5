"""A user's ONNX file, checked against what a bundle may hold."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple, TypeAlias

import msgspec

from edge.datatypes import NUMPY_TYPES, TensorName, TensorSpec
from edge.errors import BundleError, Raw, UsageError
from edge.runtimes.onnxruntime_runner import OnnxRuntimeRunner
from export.bundle.pack.graph import Operators, all_nodes, check_operators, read_with_weights, tensors_of

if TYPE_CHECKING:
    import onnx

#: A change of a graph in place; the path is for errors.
Change: TypeAlias = "Callable[[onnx.ModelProto, Path], None]"

_OPSETS = range(13, 21)
_MAX_TENSORS = 16
_QUANTIZED = {
    *("DynamicQuantizeLinear", "QuantizeLinear", "DequantizeLinear"),
    *("MatMulInteger", "ConvInteger", "QLinearMatMul", "QLinearConv", "MatMulNBits"),
}


class OnnxModel(NamedTuple):
    """An ONNX file.

    Attributes:
        data: with all weights inside.
        opset: of the ONNX standard.
        precision: the lowest that the graph computes in, or has weights in: ``fp32``, ``fp16`` or ``int8``.
        producer: the program that wrote it, as it names itself.
        dimensions: of each input, as the file writes them: a size, a name, or ``?`` for a dimension without a name.
    """

    path: Path
    data: bytes
    opset: int
    precision: str
    producer: str
    operators: Operators
    dimensions: dict[str, list[str]]


def read_model(path: Path, changes: Sequence[Change] = ()) -> OnnxModel:
    """Read an ONNX file, with weights in files beside it, and change it; errors as those of ``changes``.

    Raises:
        UsageError: it is not a model that bundles support.
    """
    model, data = read_with_weights(path)
    for change in changes:
        change(model, path)
    data = model.SerializeToString() if changes else data
    opset = _opset(model, path)
    operators = check_operators(model, opset, path)
    producer = f"{model.producer_name} {model.producer_version}".strip() or "an unnamed producer"
    dimensions = {
        tensor.name: [size.dim_param or str(size.dim_value or "?") for size in tensor.type.tensor_type.shape.dim]
        for tensor in model.graph.input
    }
    return OnnxModel(path, data, opset, _precision(model), producer, operators, dimensions)


def load_model(model: OnnxModel) -> OnnxRuntimeRunner:
    """Return the model in ONNX Runtime; a UsageError refuses tensors that a manifest cannot describe."""
    try:
        runner = OnnxRuntimeRunner(model.data, subject=f"model {model.path}")
    except BundleError as error:
        fix = "Export it again from its framework, with standard operators and opset 13 to 20."
        raise UsageError(error.subject, given=error.given, expected=error.expected, fix=fix) from None
    for kind, specs in (("input", runner.inputs), ("output", runner.outputs)):
        if not 1 <= len(specs) <= _MAX_TENSORS:
            subject, expected = f"{kind}s of {model.path}", f"1 to {_MAX_TENSORS}"
            fix = "Combine tensors, or leave some out, when you export the model."
            raise UsageError(subject, given=len(specs), expected=expected, fix=fix)
        for spec in specs:
            _check_spec(f"{kind} {spec.name!r} of {model.path}", spec)
    return runner


def _opset(model: onnx.ModelProto, path: Path) -> int:
    opset = next((one.version for one in model.opset_import if one.domain in ("", "ai.onnx")), None)
    if opset is not None and opset in _OPSETS:
        return int(opset)
    given, fix = Raw("none of the ONNX standard" if opset is None else opset), "Export it with opset_version=18"
    if opset is not None:
        new = str(path.with_name(f"{path.stem}-opset18.onnx"))
        code = f"onnx.save(onnx.version_converter.convert_version(onnx.load({str(path)!r}), 18), {new!r})"
        fix += f', or convert it: python -c "import onnx; {code}"'
    expected = f"{_OPSETS[0]} to {_OPSETS[-1]}, which JetPack 6 reads"
    raise UsageError(f"opset of {path}", given=given, expected=expected, fix=f"{fix}.")


def _check_spec(subject: str, spec: TensorSpec) -> None:
    if spec.datatype not in NUMPY_TYPES:
        expected = f"a tensor of {', '.join(NUMPY_TYPES)}"
        fix = "Export it without this type; for skl2onnx, give options={'zipmap': False}."
        raise UsageError(subject, given=spec.datatype, expected=expected, fix=fix)
    if not 1 <= len(spec.shape) <= 8 or 0 in spec.shape:
        expected = "1 to 8 dimensions, none of them 0"
        fix = "Export it with a shape; a scalar becomes a tensor by reshape(1)."
        raise UsageError(f"shape of {subject}", given=list(spec.shape), expected=expected, fix=fix)
    try:
        msgspec.convert(spec.name, TensorName)
    except msgspec.ValidationError:
        expected = "a letter or '_', then letters, digits and any of '_.:/-', 128 at most"
        fix = "Name the tensors when you export the model (torch.onnx.export: input_names, output_names)."
        raise UsageError(f"name of {subject}", given=spec.name, expected=expected, fix=fix) from None


def _precision(model: onnx.ModelProto) -> str:
    import onnx

    if any(node.op_type in _QUANTIZED for node in all_nodes(model)):
        return "int8"
    half = any(tensor.data_type == onnx.TensorProto.FLOAT16 for tensor in tensors_of(model))
    return "fp16" if half else "fp32"
