"""Golden outputs of an own ONNX file by ONNX Runtime, and the checks that they can be relied on."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from pathlib import Path

import numpy as np

from edge.bundles.golden import Golden, compare, compute
from edge.bundles.manifest import Tolerance
from edge.datatypes import Array
from edge.errors import GoldenError, Literally, RunnerError, UsageError
from edge.runtimes.onnxruntime_runner import OnnxRuntimeRunner

#: The tolerance of the golden check as a share of the outputs' spread: other processors round differently.
_SHARES = {"fp32": 1e-3, "fp16": 0.02, "int8": 0.1}
_REAL_INPUTS = "Give real inputs with --inputs FILE.npz."


def golden_outputs(
    runner: OnnxRuntimeRunner, inputs: Mapping[str, Array], max_batch_size: int, path: Path
) -> dict[str, Array]:
    """Return the outputs for golden inputs.

    Args:
        max_batch_size: rows of a run at most; 0 where there is no batch dimension.

    Raises:
        UsageError: ONNX Runtime fails, an output has other rows than the inputs, or a value is not finite.
    """
    rows = len(next(iter(inputs.values())))
    outputs = _computed(runner, inputs, max_batch_size, path)
    for name, output in outputs.items():
        subject = f"output {name!r} of {path} on the golden inputs"
        if max_batch_size and len(output) != rows:
            fix = "Give --max-batch-size 0, because its first dimension is no batch."
            raise UsageError(subject, given=Literally(f"{len(output)} rows"), expected=f"{rows}, as sent", fix=fix)
        if output.size == 0 or (output.dtype.kind == "f" and not np.isfinite(output).all()):
            given = Literally("nothing" if output.size == 0 else "NaN or Inf")
            raise UsageError(subject, given=given, expected="finite values", fix=_REAL_INPUTS)
    return outputs


def _computed(runner: OnnxRuntimeRunner, inputs: Mapping[str, Array], max_rows: int, path: Path) -> dict[str, Array]:
    log = logging.getLogger(OnnxRuntimeRunner.__module__)
    level = log.level
    log.setLevel(logging.CRITICAL)  # the runtime's message is in the error below, without its traceback
    try:
        return compute(runner, inputs, max_rows)
    except RunnerError as error:
        expected = "outputs for the golden inputs"
        given = Literally(str(error.__cause__).strip())
        raise UsageError(f"model {path}", given=given, expected=expected, fix=_REAL_INPUTS) from None
    finally:
        log.setLevel(level)


def tolerance_of(golden: Golden, precision: str) -> Tolerance:
    """Return how far another machine may be from the golden outputs in a precision."""
    numbers = [output.astype(np.float64) for output in golden.outputs.values() if output.dtype.kind == "f"]
    spread = max((float(output.std()) or float(np.abs(output).max()) for output in numbers), default=0.0)
    # Two digits, for those who read manifests.
    return Tolerance(atol=float(f"{_SHARES[precision] * spread:.1e}"), rtol=0.0)


def check_repeatable(
    runner: OnnxRuntimeRunner, golden: Golden, tolerance: Tolerance, max_batch_size: int, path: Path
) -> None:
    """Check that the graph computes the golden outputs again.

    Raises:
        GoldenError: it does not; the message gives the difference.
    """
    again = golden_outputs(runner, golden.inputs, max_batch_size, path)
    for diff in compare(again, golden, tolerance).outputs:
        if not diff.passed:
            raise GoldenError(
                f"output {diff.name!r} of {path} for the same inputs",
                given=Literally(f"a largest difference of {diff.max_abs_diff:.3g}"),
                expected=f"at most {diff.allowed:.3g}",
                fix="Export the model in evaluation mode, without random operators.",
            )


def check_rows_independent(runner: OnnxRuntimeRunner, golden: Golden, tolerance: Tolerance, path: Path) -> None:
    """Check that a row's answer does not depend on its neighbours: a server joins the requests of several clients.

    Raises:
        UsageError: it does; the message gives the difference.
    """
    row = {name: array[:1] for name, array in golden.inputs.items()}
    beside = {name: np.concatenate([array, _neighbour(golden.inputs[name])]) for name, array in row.items()}
    joined = {name: output[:1] for name, output in _computed(runner, beside, 0, path).items()}
    alone = Golden(row, _computed(runner, row, 0, path))
    for diff in compare(joined, alone, tolerance).outputs:
        if not diff.passed:
            raise UsageError(
                f"output {diff.name!r} of {path} for a row alone and beside another one",
                given=Literally(f"a difference of {diff.max_abs_diff:.3g}"),
                expected=f"at most {diff.allowed:.3g}, because a server joins the requests of several clients",
                fix="Export the model in evaluation mode; if its first dimension is no batch, give --max-batch-size 0.",
            )


def _neighbour(array: Array) -> Array:
    """Return another row [1, ...] of an input: zeros, or a given text, because no text is valid for every model."""
    return array[-1:] if array.dtype.kind in "OSU" else np.zeros_like(array[:1])
