"""A user's ONNX file: reading, and checks of the requirements of a bundle."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import msgspec

from edge.bundles.onnx_file import check_self_contained
from edge.datatypes import NUMPY_TYPES, TensorName, TensorSpec
from edge.errors import BundleError, Literally, UsageError
from edge.runtimes.onnxruntime_runner import OnnxRuntimeRunner

if TYPE_CHECKING:
    import onnx

_OPSETS = range(13, 21)
_MAX_TENSORS = 16
_QUANTIZED = {"DynamicQuantizeLinear", "QuantizeLinear", "MatMulInteger", "ConvInteger", "QLinearMatMul", "QLinearConv"}


class OwnModel(NamedTuple):
    """An ONNX file.

    Attributes:
        opset: of the ONNX standard.
        precision: the lowest that the graph computes in: ``fp32``, ``fp16`` or ``int8``.
        producer: the program that wrote it, as it names itself.
    """

    path: Path
    data: bytes
    opset: int
    precision: str
    producer: str


def read_model(path: Path) -> OwnModel:
    """Read an ONNX file. Weights in files beside it are embedded.

    Raises:
        UsageError: it is not an ONNX model, too large, or of an opset that bundles do not support.
    """
    model, data = _read(path)
    producer = f"{model.producer_name} {model.producer_version}".strip()
    return OwnModel(path, data, _opset(model, path), _precision(model), producer or "an unnamed producer")


def load_model(model: OwnModel) -> OnnxRuntimeRunner:
    """Return the model in ONNX Runtime, with inputs and outputs that a manifest can describe.

    Raises:
        UsageError: ONNX Runtime rejects the model, or a tensor has a name, type or shape that bundles do not support.
    """
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


def _read(path: Path) -> tuple[onnx.ModelProto, bytes]:
    """Return the model and the bytes to ship: those of the file, unless its weights are in other files."""
    import onnx

    try:
        data = path.read_bytes()
        model = onnx.load(path)
    except Exception as error:  # protobuf, onnx.checker and the operating system raise classes of their own
        given = Literally(error.strerror if isinstance(error, OSError) and error.strerror else error)
        fix = "Give the file that your framework exported; files with its weights belong beside it."
        raise UsageError(f"model {path}", given=given, expected="an ONNX model", fix=fix) from None
    try:
        check_self_contained(data, str(path))
    except BundleError:
        try:
            data = model.SerializeToString()
        except ValueError as error:  # protobuf's limit of 2 GiB
            fix = "Export it in FP16."
            raise UsageError(f"model {path}", given=Literally(error), expected="at most 2 GiB", fix=fix) from None
    return model, data


def _opset(model: onnx.ModelProto, path: Path) -> int:
    opset = next((one.version for one in model.opset_import if one.domain in ("", "ai.onnx")), 0)
    if opset not in _OPSETS:
        expected = f"{_OPSETS[0]} to {_OPSETS[-1]}, which JetPack 6 reads"
        fix = "Export it again with opset_version=18, or convert it with onnx.version_converter."
        raise UsageError(f"opset of {path}", given=opset, expected=expected, fix=fix)
    return int(opset)


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

    if any(node.op_type in _QUANTIZED for node in model.graph.node):
        return "int8"
    half = any(weight.data_type == onnx.TensorProto.FLOAT16 for weight in model.graph.initializer)
    return "fp16" if half else "fp32"
