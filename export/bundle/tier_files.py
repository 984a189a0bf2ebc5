"""From a trained transformer to the ONNX files of one tier, each checked through ONNX Runtime against torch."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import nn

from edge.bundles.golden import Golden, GoldenReport, compare
from edge.bundles.manifest import Artifact, Tier, Tolerance
from export.bundle.exportable import ExportedArtifact, File
from export.bundle.exported import RUNTIMES, int8_tier
from export.bundle.fewest_kernels import fewest_kernels
from export.bundle.tolerance import spread_of, two_digits
from export.models.convert import OPSET, compared, dynamic_of, largest_difference, outputs_of, to_onnx
from export.quantize.int8 import INT8_OPSET, dynamic_int8, quantized
from export.quantize.precision import fused, half
from export.quantize.ranges import Feeds, InputRange, Scheme, input_ranges

#: Of the files of a tier.
PRECISIONS = ("fp32", "fp16", "int8")
#: Input to dimension to symbolic name.
Dynamic = Mapping[str, Mapping[int, str]]


class _Precision(NamedTuple):
    """Allowed error of a precision.

    Attributes:
        worst: the largest difference to torch that may be exported, as a share of the outputs' spread.
        margin: the tolerance as a multiple of the largest difference, because other machines round differently.
        least: the smallest tolerance, as a share of the outputs' spread.
        worst_rms: the largest root mean square of the differences to torch that may be exported, as a share of the
            outputs' spread; None does not limit it. Within it, few labels change.
        least_rms: the smallest tolerance of the root mean square, as a share of the outputs' spread.
    """

    worst: float
    margin: float
    least: float
    worst_rms: float | None = None
    least_rms: float = 0.0


_PRECISIONS = {
    "fp32": _Precision(worst=1e-3, margin=10, least=1e-4),
    "fp16": _Precision(worst=0.05, margin=4, least=0.01),
    "int8": _Precision(worst=1.5, margin=2, least=0.05, worst_rms=0.4, least_rms=0.015),
}
#: Of a file in INT8: multiples of the differences that another rounding makes, or of the root mean square of those to
#: torch. The largest difference of some values varies more than their root mean square.
_LARGEST_MARGIN, _RMS_MARGIN = 3.0, 1.5
#: The smallest tolerances, as shares of the outputs' spread.
_LEAST_LARGEST, _LEAST_RMS = 0.01, 0.003
_NONE = Tolerance(atol=0.0, rtol=0.0)


def files_of(exported: Sequence[ExportedArtifact]) -> dict[str, File]:
    """Return the ONNX files and their own golden sets by name."""
    files: dict[str, File] = {one.artifact.file: one for one in exported}
    return files | {one.artifact.golden: one.golden for one in exported if one.artifact.golden and one.golden}


def tiers_of(
    name: str, exported: Sequence[ExportedArtifact], golden: str | None = None, space: str | None = None
) -> tuple[Tier, ...]:
    """Return a tier and its twin in INT8, if any: a runtime reads one file of a tier, so precision is another one.

    ``space`` is that of the embeddings of both.
    """
    parts = {name: [one.artifact for one in exported if one.artifact.precision != "int8"]}
    parts[int8_tier(name)] = [one.artifact for one in exported if one.artifact.precision == "int8"]
    made = ((tier, tuple(part)) for tier, part in parts.items() if part)
    return tuple(Tier(name=tier, artifacts=part, golden=golden, space=space) for tier, part in made)


def export_tier(
    module: nn.Module,
    golden: Golden,
    calibration: Sequence[Feeds],
    *,
    name: str = "full",
    dynamic: Dynamic | None = None,
    runtimes: Sequence[str] = RUNTIMES,
    precisions: Sequence[str] = PRECISIONS,
    has_head: bool = True,
) -> list[ExportedArtifact]:
    """Return the files of a tier: ONNX Runtime in FP32 and INT8, TensorRT in FP16 and INT8.

    Args:
        module: takes the inputs in their order; a head on a :class:`export.models.transformer.Transformer`.
        golden: the module's own outputs, with which the files are checked, for at least two rows of real inputs. Token
            ids, masks and segments are INT64 [N, T] with dynamic N and T; pixels are [N, channels, size, size] with
            dynamic N.
        calibration: other real inputs by the same names, without padding, for the ranges of INT8 and for the products
            that stay in FP32 or FP16.
        name: of the tier; the files are named after it.
        dynamic: input to the symbolic names of its dynamic dimensions; None for those above.
        has_head: whether a task head follows the last normalisation; its products are never INT8.

    Raises:
        GoldenError: the outputs of a file differ from torch's.
    """
    examples = {name: torch.from_numpy(array) for name, array in golden.inputs.items()}
    plain = to_onnx(module, examples, list(golden.outputs), dynamic_of(golden.inputs) if dynamic is None else dynamic)
    kinds: list[tuple[str, str, Callable[[], bytes]]] = [
        ("onnxruntime", "fp32", lambda: fused(plain)),
        ("onnxruntime", "int8", lambda: dynamic_int8(plain, calibration, has_head=has_head)),
        ("tensorrt", "fp16", lambda: half(fewest_kernels(plain))),
    ]
    exported = []
    for runtime, precision, make in kinds:
        if runtime not in runtimes or precision not in precisions:
            continue
        exported.append(checked_file(make(), golden, f"{name}.{runtime}.{precision}.onnx", runtime, precision))
    if "tensorrt" in runtimes and "int8" in precisions:
        ranges = input_ranges(plain, calibration, Scheme(), has_head=has_head)
        exported.append(_static(plain, ranges, golden, f"{name}.tensorrt.int8"))
    return exported


def _static(plain: bytes, ranges: Mapping[str, InputRange], golden: Golden, name: str) -> ExportedArtifact:
    """Return the file for TensorRT in INT8, with a golden set and a tolerance of its own.

    A value near the middle of two levels is rounded to either of them by the slightest difference, and later layers
    amplify that. The file's products with all else in FP32, not FP16, show by how much; other devices round differently
    by about as much. So the golden outputs are the file's own on ONNX Runtime, not torch's.
    """
    file, data = f"{name}.onnx", static_int8(plain, ranges)
    difference = largest_difference(data, golden, worst_tolerance(golden, "int8"), file)
    own, other = (
        Golden(golden.inputs, outputs_of(model, golden.inputs, file)) for model in (data, quantized(plain, ranges))
    )
    tolerance = rounding_tolerance(own, compare(other.outputs, own, _NONE))
    artifact = Artifact(
        file=file,
        runtime="tensorrt",
        precision="int8",
        opset=INT8_OPSET,
        tolerance=tolerance,
        golden=f"{name}.golden.npz",
    )
    return ExportedArtifact(artifact, data, difference, own)


def static_int8(model: bytes, ranges: Mapping[str, InputRange]) -> bytes:
    """Return the model for TensorRT in INT8 products, the rest in FP16; see :func:`export.quantize.int8.quantized`."""
    return half(fewest_kernels(quantized(model, ranges)))


def rounding_tolerance(golden: Golden, rounded: GoldenReport) -> Tolerance:
    """Return the tolerance for devices that round differently, from the differences that another rounding makes."""
    spread = _spread(golden)
    largest = max(_LARGEST_MARGIN * rounded.max_abs_diff, _LEAST_LARGEST * spread)
    rms = max(*(_RMS_MARGIN * diff.rms_diff for diff in rounded.outputs), _LEAST_RMS * spread)
    return Tolerance(atol=two_digits(largest), rtol=0.0, rms=two_digits(rms))


def worst_tolerance(golden: Golden, precision: str) -> Tolerance:
    """Return the largest differences to torch that may be exported in a precision."""
    cost, spread = _PRECISIONS[precision], _spread(golden)
    rms = None if cost.worst_rms is None else cost.worst_rms * spread
    return Tolerance(atol=cost.worst * spread, rtol=0.0, rms=rms)


def checked_file(
    data: bytes, golden: Golden, file: str, runtime: str, precision: str, /, *, least: float = 0.0, **fields: Any
) -> ExportedArtifact:
    """Return a file that computes what torch does, with the tolerance for other machines.

    That of INT8 limits the root mean square, too, because a few values may be far off, but not all of them.

    Args:
        least: a largest difference to torch that was found in another way.
        fields: others of the artifact.

    Raises:
        GoldenError: a difference is larger than a file of this precision may have.
    """
    report = compared(data, golden, worst_tolerance(golden, precision), file)
    cost, difference = _PRECISIONS[precision], max(report.max_abs_diff, least)
    allowed = max(cost.margin * difference, cost.least * _spread(golden))
    rms = None
    if cost.worst_rms is not None:
        largest = max(diff.rms_diff for diff in report.outputs)
        rms = two_digits(max(_RMS_MARGIN * largest, cost.least_rms * _spread(golden)))
    tolerance = Tolerance(atol=two_digits(allowed), rtol=0.0, rms=rms)
    artifact = Artifact(file=file, runtime=runtime, precision=precision, opset=OPSET, tolerance=tolerance, **fields)
    return ExportedArtifact(artifact, data, difference)


def _spread(golden: Golden) -> float:
    return max(map(spread_of, golden.outputs.values()))
