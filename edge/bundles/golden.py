"""The golden set of a bundle, an ``.npz``: real inputs, and the outputs that a runner must reproduce to serve."""

from __future__ import annotations

import io
import zipfile
from collections.abc import Mapping
from itertools import takewhile

import msgspec
import numpy as np

from edge.bundles.manifest import Artifact, Manifest, Tolerance
from edge.datatypes import Array, TensorSpec, datatype_of
from edge.errors import BundleError, GoldenError, Raw
from edge.runner import Runner

_FIX = "Export the bundle again."
#: Characters of a text that an error shows, and those of them before the first difference.
_SHOWN, _SHOWN_BEFORE = 60, 20
_KINDS = {"input": "inputs", "output": "outputs", "raw": "raw"}


def encode_npz(arrays: Mapping[str, Array]) -> bytes:
    """Return a file whose bytes depend on nothing but the arrays.

    Those of ``np.savez`` differ around its members, and so the hash, between versions of Python.
    """
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        for name, array in arrays.items():
            member = io.BytesIO()
            np.save(member, array, allow_pickle=False)
            archive.writestr(zipfile.ZipInfo(f"{name}.npy"), member.getvalue())
    return buffer.getvalue()


def decode_npz(data: bytes, subject: str) -> dict[str, Array]:
    """Return the arrays of a file; raise a BundleError about ``subject`` if it is malformed or compressed."""
    try:
        with zipfile.ZipFile(io.BytesIO(data)) as archive:
            # A stored member cannot be larger than the file, so nothing small can unpack to something huge.
            packed = [item.filename for item in archive.infolist() if item.compress_type != zipfile.ZIP_STORED]
        if packed:
            raise BundleError(f"{subject} member {packed[0]!r}", given="compressed", expected="stored", fix=_FIX)
        with np.load(io.BytesIO(data), allow_pickle=False) as arrays:
            return {key: arrays[key] for key in arrays.files}
    except BundleError:
        raise
    except Exception as error:  # broken bytes make zipfile and NumPy raise more kinds than either documents
        raise BundleError(subject, given=Raw(error), expected="an .npz without pickles", fix=_FIX) from None


class Golden(msgspec.Struct, frozen=True):
    """``inputs`` and ``outputs`` of the ONNX graph, and ``raw``, from which the preprocessor makes inputs."""

    inputs: dict[str, Array]
    outputs: dict[str, Array]
    raw: dict[str, Array] = {}

    @property
    def rows(self) -> int:
        return len(next(iter(self.inputs.values())))

    def encode(self) -> bytes:
        """Return the set as an uncompressed ``.npz`` with the keys ``input/x``, ``output/y`` and ``raw/text``."""
        arrays = {
            f"{kind}/{name}": array
            for kind, attribute in _KINDS.items()
            for name, array in getattr(self, attribute).items()
        }
        # Text that a runtime returned is an array of Python objects, which only pickle could write.
        return encode_npz(
            {key: array.astype(np.bytes_) if array.dtype.kind == "O" else array for key, array in arrays.items()}
        )


class OutputDiff(msgspec.Struct, frozen=True):
    """The comparison of one output."""

    name: str
    max_abs_diff: float
    allowed: float  # at the worst value
    passed: bool
    nonfinite: int = 0  # number of values
    rms_diff: float = 0.0  # root mean square
    rms_allowed: float | None = None


class GoldenReport(msgspec.Struct, frozen=True):
    """The comparison of all outputs."""

    rows: int
    outputs: tuple[OutputDiff, ...]

    @property
    def passed(self) -> bool:
        return all(diff.passed for diff in self.outputs)

    @property
    def max_abs_diff(self) -> float:
        return max(diff.max_abs_diff for diff in self.outputs)


def decode(data: bytes, manifest: Manifest, subject: str, part: Artifact | None = None) -> Golden:
    """Return the golden set in ``data`` of the model, or of a part of it.

    Raise a BundleError unless it is a safe ``.npz`` that fits the manifest.
    """
    tensors = manifest.tensors(part) if part else manifest
    step = None if part else manifest.preprocess
    arrays = decode_npz(data, subject)
    kinds: dict[str, dict[str, Array]] = {kind: {} for kind in _KINDS}
    for key, array in arrays.items():
        kind, _, name = key.partition("/")
        if kind not in kinds:
            raise BundleError(f"{subject} array {key!r}", given=key, expected="input/…, output/… or raw/…", fix=_FIX)
        kinds[kind][name] = array
    _check(kinds["input"], tensors.inputs, f"{subject} input")
    _check(kinds["output"], tensors.outputs, f"{subject} output")
    raw = {text.name for text in step.inputs} if step else set()
    if set(kinds["raw"]) != raw:
        raise BundleError(f"{subject} raw", given=sorted(kinds["raw"]), expected=str(sorted(raw)), fix=_FIX)
    has_rows = manifest.batch_size(part) if part else manifest.max_batch_size
    if has_rows and len({len(array) for array in arrays.values()}) != 1:
        lengths = {key: len(array) for key, array in arrays.items()}
        raise BundleError(subject, given=lengths, expected="as many rows in every array", fix=_FIX)
    return Golden(*kinds.values())


def _check(arrays: Mapping[str, Array], specs: tuple[TensorSpec, ...], subject: str) -> None:
    if set(arrays) != {spec.name for spec in specs}:
        expected = f"exactly {sorted(spec.name for spec in specs)}"
        raise BundleError(f"{subject} names", given=sorted(arrays), expected=expected, fix=_FIX)
    for spec in specs:
        array, name = arrays[spec.name], f"{subject} {spec.name!r}"
        if datatype_of(array) != spec.datatype or not spec.accepts(array.shape) or array.size == 0:
            given = Raw(f"{datatype_of(array)} {list(array.shape)}")
            expected = f"{spec.datatype} {list(spec.shape)}, not empty"
            raise BundleError(name, given=given, expected=expected, fix=_FIX)
        if array.dtype.kind == "f" and not np.isfinite(array).all():
            raise BundleError(name, given=Raw("NaN or Inf"), expected="finite values", fix=_FIX)


def compare(got: Mapping[str, Array], golden: Golden, tolerance: Tolerance) -> GoldenReport:
    """Compare a model's outputs with the golden ones. NaN never passes."""
    diffs = []
    for name, want in golden.outputs.items():
        have = got[name]
        if want.dtype.kind in "SUO" or have.shape != want.shape:
            same = have.shape == want.shape and _texts(have) == _texts(want)
            diffs.append(OutputDiff(name, 0.0 if same else float("inf"), 0.0, same))
            continue
        difference = np.abs(have.astype(np.float64) - want.astype(np.float64))
        allowed = tolerance.outputs.get(name, tolerance.atol) + tolerance.rtol * np.abs(want.astype(np.float64))
        worst = np.unravel_index(int(np.argmax(difference - allowed)), difference.shape)  # NaN counts as largest
        rms = float(np.sqrt(np.square(difference).mean()))
        passed = bool((difference <= allowed).all()) and (tolerance.rms is None or rms <= tolerance.rms)
        nonfinite = have.size - int(np.isfinite(have).sum())
        largest = float(difference.max())
        diffs.append(OutputDiff(name, largest, float(allowed[worst]), passed, nonfinite, rms, tolerance.rms))
    return GoldenReport(golden.rows, tuple(diffs))


def compute(runner: Runner, inputs: Mapping[str, Array], max_rows: int) -> dict[str, Array]:
    """Return the outputs for any number of rows, in runs of at most ``max_rows``; 0 computes all in one run."""
    if not max_rows:
        return runner.infer(inputs)
    rows = len(next(iter(inputs.values())))
    parts = [
        runner.infer({name: array[start : start + max_rows] for name, array in inputs.items()})
        for start in range(0, rows, max_rows)
    ]
    return {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}


def check_runner(runner: Runner, golden: Golden, tolerance: Tolerance, subject: str, max_rows: int) -> GoldenReport:
    """Compute the golden inputs and compare; raise a GoldenError about ``subject`` if an output differs too much."""
    return check_outputs(compute(runner, golden.inputs, max_rows), golden, tolerance, subject)


def check_outputs(got: Mapping[str, Array], golden: Golden, tolerance: Tolerance, subject: str) -> GoldenReport:
    """Compare outputs with the golden ones; raise as :func:`check_runner`."""
    report = compare(got, golden, tolerance)
    for diff in report.outputs:
        if not diff.passed:
            row, given, expected = _difference(diff, got[diff.name], golden.outputs[diff.name])
            raise GoldenError(
                f"{subject} output {diff.name!r} on {row or f'{report.rows} golden rows'}",
                given=given,
                expected=expected,
                fix="Do not serve this build: rebuild it, in FP32 if it was reduced, or export the bundle again.",
            )
    return report


def _difference(diff: OutputDiff, have: Array, want: Array) -> tuple[str, object, str]:
    """Return the golden row that differs, empty for all of them, and what it is and should be."""
    if have.shape != want.shape:
        return "", Raw(f"the shape {list(have.shape)}"), f"{list(want.shape)}"
    if want.dtype.kind in "SUO":
        pairs = zip(_texts(have), _texts(want), strict=True)
        index, pair = next((index, pair) for index, pair in enumerate(pairs) if pair[0] != pair[1])
        given, expected = _excerpts(*pair)
        return f"golden row {index * len(want) // want.size}", given, repr(expected)
    if diff.nonfinite:
        return "", Raw(f"{diff.nonfinite} values that are not finite"), f"at most {diff.allowed:.3g}"
    if diff.max_abs_diff <= diff.allowed and diff.rms_allowed is not None:
        return "", Raw(f"a root mean square of {diff.rms_diff:.3g}"), f"at most {diff.rms_allowed:.3g}"
    return "", Raw(f"a largest difference of {diff.max_abs_diff:.3g}"), f"at most {diff.allowed:.3g}"


def _texts(array: Array) -> list[bytes]:
    return [text.encode() if isinstance(text, str) else text for text in array.ravel().tolist()]


def _excerpts(given: bytes, expected: bytes) -> tuple[str, str]:
    """Return the part of two texts in which they begin to differ."""
    texts = given.decode(errors="replace"), expected.decode(errors="replace")
    same = takewhile(lambda pair: pair[0] == pair[1], zip(*texts, strict=False))
    begin = max(sum(1 for _ in same) - _SHOWN_BEFORE, 0)
    first, second = (
        "…" * (begin > 0) + text[begin : begin + _SHOWN] + "…" * (len(text) > begin + _SHOWN) for text in texts
    )
    return first, second
