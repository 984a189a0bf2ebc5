"""From a trained transformer to the ONNX files of one tier, each checked through ONNX Runtime against torch."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import nn

from edge.bundles.golden import Golden
from edge.bundles.manifest import Artifact, Tolerance
from edge.datatypes import Array
from export.convert import OPSET, dynamic_of, golden_of, largest_difference, to_onnx
from export.exported import RUNTIMES
from export.precision import INT8_OPSET, dynamic_int8, fused, half, static_int8

#: Input to dimension to symbolic name.
Dynamic = Mapping[str, Mapping[int, str]]


class ExportedArtifact(NamedTuple):
    """One ONNX file.

    Attributes:
        largest_difference: absolute difference of its outputs to torch's over the given inputs.
    """

    artifact: Artifact
    data: bytes
    largest_difference: float


class _Precision(NamedTuple):
    """Allowed error of a precision.

    Attributes:
        worst: the largest difference to torch that may be exported, as a share of the outputs' spread.
        margin: the tolerance as a multiple of the largest difference, because other machines round differently.
        least: the smallest tolerance, as a share of the outputs' spread.
    """

    worst: float
    margin: float
    least: float


_PRECISIONS = {
    "fp32": _Precision(worst=1e-3, margin=10, least=1e-4),
    "fp16": _Precision(worst=0.05, margin=4, least=0.01),
    "int8": _Precision(worst=1.5, margin=2, least=0.05),
}


def export_tier(
    module: nn.Module,
    inputs: Mapping[str, Array],
    calibration: Mapping[str, Array],
    outputs: Sequence[str],
    *,
    name: str = "full",
    dynamic: Dynamic | None = None,
    runtimes: Sequence[str] = RUNTIMES,
    precisions: Sequence[str] = ("fp32", "fp16", "int8"),
    has_head: bool = True,
) -> list[ExportedArtifact]:
    """Return the files of a tier: ONNX Runtime in FP32 and INT8, TensorRT in FP16 and INT8.

    Args:
        module: takes the inputs in their order; a head on a :class:`export.transformer.Transformer`.
        inputs: real inputs by name, at least two rows, with which the files are checked. Token ids, masks and segments
            are INT64 [N, T] with dynamic N and T; pixels are [N, channels, size, size] with dynamic N.
        calibration: other real inputs by the same names, for the ranges of INT8.
        name: of the tier; the files are named after it.
        dynamic: input to the symbolic names of its dynamic dimensions; None for those above.
        has_head: whether a task head follows the last normalisation; its products are never INT8.

    Raises:
        GoldenError: the outputs of a file differ from torch's.
    """
    examples = {name: torch.from_numpy(array) for name, array in inputs.items()}
    plain = to_onnx(module, examples, outputs, dynamic_of(inputs) if dynamic is None else dynamic)
    golden = golden_of(module, inputs, outputs)
    kinds: list[tuple[str, str, int, Callable[[], bytes]]] = [
        ("onnxruntime", "fp32", OPSET, lambda: fused(plain)),
        ("onnxruntime", "int8", OPSET, lambda: dynamic_int8(plain, has_head=has_head)),
        ("tensorrt", "fp16", OPSET, lambda: half(plain)),
        ("tensorrt", "int8", INT8_OPSET, lambda: static_int8(plain, calibration, has_head=has_head)),
    ]
    exported = []
    for runtime, precision, opset, make in kinds:
        if runtime not in runtimes or precision not in precisions:
            continue
        file, data = f"{name}.{runtime}.{precision}.onnx", make()
        difference, tolerance = _measured(data, golden, precision, file)
        artifact = Artifact(file=file, runtime=runtime, precision=precision, opset=opset, tolerance=tolerance)
        exported.append(ExportedArtifact(artifact, data, difference))
    return exported


def worst_tolerance(golden: Golden, precision: str) -> Tolerance:
    """Return the largest difference to torch that may be exported in a precision."""
    return Tolerance(atol=_PRECISIONS[precision].worst * _spread(golden), rtol=0.0)


def allowed_tolerance(golden: Golden, precision: str, difference: float) -> Tolerance:
    """Return the tolerance for other machines, of a file with this largest difference to torch."""
    cost = _PRECISIONS[precision]
    allowed = max(cost.margin * difference, cost.least * _spread(golden))
    # Two digits, for those who read manifests.
    return Tolerance(atol=float(f"{allowed:.1e}"), rtol=0.0)


def _measured(data: bytes, golden: Golden, precision: str, subject: str) -> tuple[float, Tolerance]:
    """Return the largest difference to torch, and the tolerance for other machines."""
    difference = largest_difference(data, golden, worst_tolerance(golden, precision), subject)
    return difference, allowed_tolerance(golden, precision, difference)


def _spread(golden: Golden) -> float:
    return max(float(output.std()) for output in golden.outputs.values())
