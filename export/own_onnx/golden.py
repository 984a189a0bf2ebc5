"""Golden inputs and outputs of an own ONNX file, and the checks that they are reliable."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

from edge.bundles.golden import Golden, compare, compute
from edge.bundles.manifest import Profile, Tolerance
from edge.datatypes import NUMPY_TYPES, Array, TensorSpec, datatype_of
from edge.errors import GoldenError, Literally, RunnerError, UsageError
from edge.runtimes.onnxruntime_runner import OnnxRuntimeRunner

#: The tolerance of the golden check as a share of the outputs' spread: other processors round differently.
_SHARES = {"fp32": 1e-3, "fp16": 0.02, "int8": 0.1}
_REAL_INPUTS = "Give real inputs with --inputs FILE.npz."
SEED = 0
#: Name of random inputs in the provenance and in the output of the command.
RANDOM = "random"
_ROWS = 8


def random_inputs(
    inputs: Sequence[TensorSpec], profile: Mapping[str, Profile], max_batch_size: int
) -> dict[str, Array]:
    """Return random inputs of the usual shapes, at most 8 rows: normal floats; integers 0 and 1, valid in any table."""
    generator = np.random.default_rng(SEED)
    arrays = {}
    for spec in inputs:
        shape = profile[spec.name].opt if spec.name in profile else spec.shape
        if max_batch_size:
            shape = (min(_ROWS, max_batch_size), *shape[1:])
        if spec.datatype == "BYTES":
            fix = "Give --inputs FILE.npz with real texts."
            raise UsageError(f"golden input {spec.name!r}", given=Literally("text"), expected="numbers", fix=fix)
        floating = NUMPY_TYPES[spec.datatype].kind == "f"
        values = generator.normal(size=shape) if floating else generator.integers(0, 2, size=shape)
        arrays[spec.name] = values.astype(NUMPY_TYPES[spec.datatype])
    return arrays


def read_inputs(
    path: Path, inputs: Sequence[TensorSpec], profile: Mapping[str, Profile], max_batch_size: int
) -> dict[str, Array]:
    """Return the arrays of an ``.npz``, each under the name of its input.

    Args:
        max_batch_size: rows of a run at most; more golden rows are run in parts. 0 where there is no batch dimension.

    Raises:
        UsageError: the file cannot be read, or its arrays are not the inputs.
    """
    try:
        with np.load(path, allow_pickle=False) as archive:
            if not isinstance(archive, np.lib.npyio.NpzFile):
                raise ValueError("one array without a name")
            arrays = {name: archive[name] for name in archive.files}
    except Exception as error:  # broken bytes make zipfile and NumPy raise more kinds than either documents
        given = Literally(error.strerror if isinstance(error, OSError) and error.strerror else error)
        fix = f"Write it with numpy.savez({path.name!r}, {', '.join(f'{spec.name}=…' for spec in inputs)})."
        raise UsageError(f"--inputs {path}", given=given, expected="an .npz without pickles", fix=fix) from None
    names = [spec.name for spec in inputs]
    if set(arrays) != set(names):
        fix = "Name each array after its input."
        raise UsageError(f"names in --inputs {path}", given=sorted(arrays), expected=f"exactly {names}", fix=fix)
    rows = {name: len(array) if array.ndim else 0 for name, array in arrays.items()}
    if max_batch_size and len(set(rows.values())) != 1:
        raise UsageError(
            f"rows in --inputs {path}", given=rows, expected="as many in each array", fix="Make them equal."
        )
    return {
        spec.name: _checked(path, spec, arrays[spec.name], profile.get(spec.name), max_batch_size) for spec in inputs
    }


def _checked(path: Path, spec: TensorSpec, array: Array, profile: Profile | None, max_batch_size: int) -> Array:
    subject = f"array {spec.name!r} in --inputs {path}"
    try:
        datatype = datatype_of(array)
    except KeyError:
        datatype = str(array.dtype)
    if datatype != spec.datatype:
        wanted = NUMPY_TYPES[spec.datatype]
        raise UsageError(subject, given=datatype, expected=spec.datatype, fix=f"Convert it with .astype('{wanted}').")
    free = slice(1 if max_batch_size else 0, None)
    inside = profile is None or all(
        low <= size <= high
        for low, size, high in zip(profile.min[free], array.shape[free], profile.max[free], strict=False)
    )
    if not spec.accepts(array.shape) or not inside or array.size == 0:
        limits = f", from {list(profile.min)} to {list(profile.max)}" if profile else ""
        expected = f"a shape that fits {list(spec.shape)}{limits}"
        raise UsageError(subject, given=list(array.shape), expected=expected, fix="Reshape it, or widen --shape.")
    if array.dtype.kind == "f" and not np.isfinite(array).all():
        raise UsageError(subject, given=Literally("NaN or Inf"), expected="finite values", fix="Remove them.")
    return np.char.encode(array, "utf-8") if array.dtype.kind == "U" else array


def golden_outputs(
    runner: OnnxRuntimeRunner, inputs: Mapping[str, Array], max_batch_size: int, path: Path
) -> dict[str, Array]:
    """Return the outputs for golden inputs.

    Raises:
        UsageError: ONNX Runtime fails, an output has other rows than the inputs, or a value is not finite.
    """
    rows = len(next(iter(inputs.values())))
    outputs = _computed(runner, inputs, max_batch_size, path)
    for name, output in outputs.items():
        subject = f"output {name!r} of {path} on the golden inputs"
        if max_batch_size and len(output) != rows:
            fix = "Give --max-batch-size 0, because it has no batch dimension."
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
    """Return the tolerance of the golden outputs on other machines in a precision."""
    numbers = [output.astype(np.float64) for output in golden.outputs.values() if output.dtype.kind == "f"]
    spread = max((float(output.std()) or float(np.abs(output).max()) for output in numbers), default=0.0)
    # Two digits, for those who read manifests.
    return Tolerance(atol=float(f"{_SHARES[precision] * spread:.1e}"), rtol=0.0)


def check_repeatable(
    runner: OnnxRuntimeRunner, golden: Golden, tolerance: Tolerance, max_batch_size: int, path: Path
) -> None:
    """Check that a second run of the graph gives the golden outputs."""
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
    """Check that a row's output does not depend on its neighbours: a server joins the requests of several clients."""
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
                fix="Export the model in evaluation mode, or give --max-batch-size 0 if it has no batch dimension.",
            )


def _neighbour(array: Array) -> Array:
    """Return another row [1, ...] of an input: zeros, or a given text, because no text is valid for every model."""
    return array[-1:] if array.dtype.kind in "OSU" else np.zeros_like(array[:1])
