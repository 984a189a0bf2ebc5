"""The files of a bundle beside the given one: FP16 for TensorRT, and a tier in INT8 for both runtimes."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from typing import NamedTuple, TypeVar

import numpy as np

from edge.bundles.golden import Golden, compare
from edge.bundles.manifest import Artifact, Measure
from edge.datatypes import Array
from edge.errors import BundleError, Raw, UsageError
from edge.runtimes.onnxruntime_runner import OnnxRuntimeRunner
from export.bundle.exported import FULL, int8_tier
from export.bundle.pack.golden import OutputError, check_accuracy, measures_of, outputs_of, tolerance_of
from export.bundle.pack.model import OnnxModel

T = TypeVar("T")
_LOG = logging.getLogger(__name__)
INT8_TIER = int8_tier(FULL)


class Variant(NamedTuple):
    """One file of a tier, and its errors against the golden outputs."""

    tier: str
    artifact: Artifact
    data: bytes
    errors: list[OutputError]
    measures: list[Measure]


class Checks(NamedTuple):
    """What a variant is checked with.

    Attributes:
        golden: of the given file.
        place: name of the golden inputs in measures.
        absent: options for real inputs that are not given.
    """

    golden: Golden
    max_batch_size: int
    place: str
    absent: Sequence[str]


def check_convertible(model: OnnxModel, option: str) -> None:
    """Raise a UsageError if ``--fp16`` or ``--int8`` cannot convert a model."""
    operators = model.operators
    given = ""
    if model.precision != "fp32":
        given, expected = f"a graph in {model.precision.upper()}", "a graph in FP32"
        instead = "give the model in FP32"
    elif operators.control_flow:
        given = f"{', '.join(operators.control_flow)} in the graph"
        expected = "a graph without control flow, because the conversion does not take nested graphs"
        instead = "export the model without branches and loops"
    elif operators.only_onnxruntime:
        given, expected = operators.only_onnxruntime, "operators that TensorRT builds, because the file is for it"
        instead = f"export the model without {given}"
    if given:
        fix = f"Leave {option} out, or {instead}."
        raise UsageError(f"{option} for {model.path}", given=Raw(given), expected=expected, fix=fix)


def fp16_variant(model: OnnxModel, checks: Checks) -> Variant:
    """Return the FP16 file for TensorRT; raise a UsageError if it cannot be made, or computes something else."""
    import onnx
    from onnxruntime.transformers.float16 import DEFAULT_OP_BLOCK_LIST

    from export.bundle.pack.quantize import simplified
    from export.quantize.precision import half

    def convert() -> bytes:
        folded: bytes = simplified(onnx.load_model_from_string(model.data)).SerializeToString()
        return half(_with_fewest_kernels(folded, checks), fp32_operators=DEFAULT_OP_BLOCK_LIST)

    data = _converted(model, "--fp16", convert)
    return _checked(model, "--fp16", FULL, "tensorrt", model.opset, data, checks)


def int8_variants(model: OnnxModel, calibration: Sequence[Mapping[str, Array]], checks: Checks) -> list[Variant]:
    """Return the files in INT8 for both runtimes, from the inputs of some runs; errors as :func:`fp16_variant`."""
    from onnxruntime.transformers.float16 import DEFAULT_OP_BLOCK_LIST

    from export.bundle.pack.quantize import in_int8
    from export.quantize.int8 import INT8_OPSET
    from export.quantize.precision import half

    plain = _converted(model, "--int8", lambda: in_int8(model.data, calibration, model.opset))
    if plain is None:
        expected = "Conv, MatMul or Gemm with weights in FP32"
        given, fix = Raw("none of them"), "Leave --int8 out."
        raise UsageError(f"--int8 for {model.path}", given=given, expected=expected, fix=fix)
    opset = max(model.opset, INT8_OPSET)
    mixed = _converted(model, "--int8", lambda: half(plain, fp32_operators=DEFAULT_OP_BLOCK_LIST))
    return [
        _checked(model, "--int8", INT8_TIER, runtime, opset, data, checks)
        for runtime, data in (("onnxruntime", plain), ("tensorrt", mixed))
    ]


def _with_fewest_kernels(folded: bytes, checks: Checks) -> bytes:
    """Return a model in FP32 with fewer kernels, or as it is where that fails or computes something else."""
    from export.bundle.fewest_kernels import fewest_kernels

    golden = checks.golden
    try:
        changed = fewest_kernels(folded)
        with closing(OnnxRuntimeRunner(changed, subject="model with fewer kernels")) as runner:
            got = outputs_of(runner, golden.inputs, checks.max_batch_size, "model with fewer kernels")
    except Exception:  # onnx and ONNX Runtime raise classes of their own
        _LOG.debug("The graph keeps its kernels", exc_info=True)
        return folded
    return changed if compare(got, golden, tolerance_of(golden, "fp32")).passed else folded


def _converted(model: OnnxModel, option: str, convert: Callable[[], T]) -> T:
    try:
        return convert()
    except Exception as error:  # onnx, protobuf and ONNX Runtime raise classes of their own, or asserts
        reason = str(error).strip().splitlines() or [type(error).__name__]
        fix = f"Leave {option} out, or export the model with opset_version=19 and standard layers."
        expected = "a graph that the converters of ONNX and ONNX Runtime take"
        raise UsageError(f"{option} for {model.path}", given=Raw(reason[0]), expected=expected, fix=fix) from None


def _checked(
    model: OnnxModel, option: str, tier: str, runtime: str, opset: int, data: bytes, checks: Checks
) -> Variant:
    """Return a file that runs on ONNX Runtime, with its errors, and a tolerance for other machines."""
    precision = option.removeprefix("--")
    file = f"{tier}.{runtime}.{precision}.onnx"
    subject = f"{model.path} in {precision.upper()} for {runtime}"
    try:
        runner = OnnxRuntimeRunner(data, subject=subject)
    except BundleError as error:
        fix = f"Leave {option} out."
        raise UsageError(error.subject, given=error.given, expected=error.expected, fix=fix) from None
    with closing(runner):
        got = outputs_of(runner, checks.golden.inputs, checks.max_batch_size, subject, f"Leave {option} out.")
    if runtime == "tensorrt":
        _check_range(data, option, subject, checks)
    errors = check_accuracy(got, checks.golden, checks.max_batch_size > 0, option, subject, checks.absent)
    tolerance = tolerance_of(checks.golden, precision, got)
    artifact = Artifact(file=file, runtime=runtime, precision=precision, opset=opset, tolerance=tolerance)
    place = f"{checks.place}, tier {tier}, {precision} for {runtime}"
    return Variant(tier, artifact, data, errors, measures_of(errors, place))


def _check_range(data: bytes, option: str, subject: str, checks: Checks) -> None:
    """Check the first golden row alone, because all intermediate results stay in memory."""
    rows = slice(0, 1 if checks.max_batch_size else None)
    inputs = {name: array[rows] for name, array in checks.golden.inputs.items()}
    tensor = overflowing_tensor(data, inputs, subject)
    if tensor is not None:
        given = Raw("NaN, or a value above 65504")
        fix = f"Leave {option} out, or scale the weights so that it is smaller."
        raise UsageError(f"tensor {tensor!r} of {subject}", given=given, expected="the range of FP16", fix=fix)


def overflowing_tensor(model: bytes, inputs: Mapping[str, Array], subject: str) -> str | None:
    """Return the first FP16 tensor that is NaN or +Inf for some inputs; None if there is none.

    ONNX Runtime on a CPU computes chains of operators in FP32 where it has no FP16 kernels, and drops the casts between
    them, so that the outputs alone do not show what a GPU would compute. -Inf is a usual mask, and no overflow.
    """
    import onnx

    shown = onnx.shape_inference.infer_shapes(onnx.load_model_from_string(model))
    graph = shown.graph
    halves = [one for one in graph.value_info if one.type.tensor_type.elem_type == onnx.TensorProto.FLOAT16]
    graph.output.extend(halves)
    order = {name: place for place, node in enumerate(graph.node) for name in node.output}
    with closing(OnnxRuntimeRunner(shown.SerializeToString(), subject=subject)) as runner:
        outputs = runner.infer(inputs)
    bad = [one.name for one in halves if (np.isnan(outputs[one.name]) | np.isposinf(outputs[one.name])).any()]
    return min(bad, key=lambda name: order.get(name, -1), default=None)
