"""Golden inputs and outputs of an ONNX file, and the checks that they are reliable."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from pathlib import Path

import numpy as np

from edge.bundles.golden import Golden, compare, compute
from edge.bundles.manifest import Tolerance
from edge.datatypes import Array
from edge.errors import GoldenError, Raw, RunnerError, UsageError
from edge.runtimes.onnxruntime_runner import OnnxRuntimeRunner
from export.bundle.tolerance import spread_of, two_digits

#: The tolerance of the golden check as a share of an output's spread: other processors round differently.
_SHARES = {"fp32": 1e-3, "fp16": 0.02, "int8": 0.1}
#: The tolerance as a multiple of a file's largest difference from the outputs in FP32.
_MARGIN = 2
#: Fixes by whether the inputs are the user's.
_FIXES = {
    False: "Give real inputs with --inputs.",
    True: "Give other inputs with --inputs, or correct the model.",
}


def golden_outputs(
    runner: OnnxRuntimeRunner, inputs: Mapping[str, Array], max_batch_size: int, path: Path, *, given: bool
) -> dict[str, Array]:
    """Return the outputs for golden inputs; ``given`` is whether they are the user's, not random.

    Raises:
        UsageError: ONNX Runtime fails, an output has other rows than the inputs, or a value is not finite.
    """
    rows = len(next(iter(inputs.values())))
    outputs = outputs_of(runner, inputs, max_batch_size, f"model {path}", _FIXES[given])
    for name, output in outputs.items():
        subject = f"output {name!r} of {path} on the golden inputs"
        if max_batch_size and len(output) != rows:
            fix = "Give --max-batch-size 0, because it has no batch dimension."
            raise UsageError(subject, given=Raw(f"{len(output)} rows"), expected=f"{rows}, as sent", fix=fix)
        if output.size == 0 or (output.dtype.kind == "f" and not np.isfinite(output).all()):
            found = Raw("nothing" if output.size == 0 else "NaN or Inf")
            raise UsageError(subject, given=found, expected="finite values", fix=_FIXES[given])
    return outputs


def outputs_of(
    runner: OnnxRuntimeRunner, inputs: Mapping[str, Array], max_rows: int, subject: str, fix: str = _FIXES[True]
) -> dict[str, Array]:
    """Return the outputs for any number of rows.

    Raises:
        UsageError: ONNX Runtime fails; ``subject`` is what it runs, and ``fix`` the way out.
    """
    log = logging.getLogger(OnnxRuntimeRunner.__module__)
    level = log.level
    log.setLevel(logging.CRITICAL)  # the runtime's message is in the error below, without its traceback
    try:
        return compute(runner, inputs, max_rows)
    except RunnerError as error:
        expected = "outputs for the golden inputs"
        raise UsageError(subject, given=Raw(str(error.__cause__).strip()), expected=expected, fix=fix) from None
    finally:
        log.setLevel(level)


def tolerance_of(golden: Golden, precision: str, got: Mapping[str, Array] | None = None) -> Tolerance:
    """Return the tolerance on other machines for a file in a precision, of each output by its own spread.

    Args:
        got: what the file computes here; None for the file that made the golden outputs.
    """
    differences = compare(got or golden.outputs, golden, Tolerance(atol=0.0, rtol=0.0)).outputs
    limits = {
        diff.name: two_digits(
            max(_SHARES[precision] * spread_of(golden.outputs[diff.name]), _MARGIN * diff.max_abs_diff)
        )
        for diff in differences
    }
    return Tolerance(atol=max(limits.values()), rtol=0.0, outputs=limits if len(limits) > 1 else {})


def check_repeatable(
    runner: OnnxRuntimeRunner, golden: Golden, tolerance: Tolerance, max_batch_size: int, path: Path
) -> None:
    """Check that a second run of the graph gives the golden outputs."""
    again = outputs_of(runner, golden.inputs, max_batch_size, f"model {path}")
    for diff in compare(again, golden, tolerance).outputs:
        if not diff.passed:
            raise GoldenError(
                f"output {diff.name!r} of {path} for the same inputs",
                given=Raw(f"a largest difference of {diff.max_abs_diff:.3g}"),
                expected=f"at most {diff.allowed:.3g}",
                fix="Export the model in evaluation mode, without random operators.",
            )


def check_rows_independent(runner: OnnxRuntimeRunner, golden: Golden, tolerance: Tolerance, path: Path) -> None:
    """Check that a row's output does not depend on its neighbours: a server joins the requests of several clients."""
    row = {name: array[:1] for name, array in golden.inputs.items()}
    beside = {name: np.concatenate([array, _neighbour(golden.inputs[name])]) for name, array in row.items()}
    joined = {name: output[:1] for name, output in outputs_of(runner, beside, 0, f"model {path}").items()}
    alone = Golden(row, outputs_of(runner, row, 0, f"model {path}"))
    for diff in compare(joined, alone, tolerance).outputs:
        if not diff.passed:
            raise UsageError(
                f"output {diff.name!r} of {path} for a row alone and beside another one",
                given=Raw(f"a difference of {diff.max_abs_diff:.3g}"),
                expected=f"at most {diff.allowed:.3g}, because a server joins the requests of several clients",
                fix="Export the model in evaluation mode, or give --max-batch-size 0 if it has no batch dimension.",
            )


def _neighbour(array: Array) -> Array:
    """Return another row [1, ...] of an input: zeros, or a given text, because no text is valid for every model."""
    return array[-1:] if array.dtype.kind in "OSU" else np.zeros_like(array[:1])
