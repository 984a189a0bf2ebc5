"""Inputs for the golden set and for calibration: random ones, or those of an ``.npz``."""

from __future__ import annotations

import zipfile
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
from msgspec.structs import replace

from edge.bundles.manifest import Profile
from edge.datatypes import NUMPY_TYPES, Array, TensorSpec, datatype_of
from edge.errors import Raw, UsageError

SEED = 0
#: Name of random inputs in the provenance and in the output of the command.
RANDOM = "random"
#: Rows of random inputs, and of a run that calibrates, whose intermediate results all stay in memory.
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
            raise UsageError(f"golden input {spec.name!r}", given=Raw("text"), expected="numbers", fix=fix)
        floating = NUMPY_TYPES[spec.datatype].kind == "f"
        values = generator.normal(size=shape) if floating else generator.integers(0, 2, size=shape)
        arrays[spec.name] = values.astype(NUMPY_TYPES[spec.datatype])
    return arrays


def read_inputs(
    option: str, path: Path, inputs: Sequence[TensorSpec], profile: Mapping[str, Profile], max_batch_size: int
) -> dict[str, Array]:
    """Return the arrays of an ``.npz``, each under the name of its input.

    Args:
        option: that names the file, for errors.
        max_batch_size: rows of a run at most; more golden rows are run in parts. 0 where there is no batch dimension.

    Raises:
        UsageError: the file cannot be read, or its arrays are not the inputs.
    """
    arrays = _read(option, path, inputs)
    if max_batch_size:
        _check_rows(option, path, arrays)
    return {
        spec.name: _checked(option, path, spec, arrays[spec.name], profile.get(spec.name), max_batch_size)
        for spec in inputs
    }


def read_items(
    option: str, path: Path, inputs: Sequence[TensorSpec], profile: Mapping[str, Profile], max_batch_size: int
) -> list[dict[str, Array]]:
    """Return the runs of an ``.npz``: 8 rows each, or without a batch one item, which the first dimension counts."""
    if max_batch_size:
        return in_runs(read_inputs(option, path, inputs, profile, max_batch_size), max_batch_size)
    specs = [replace(spec, shape=(-1, *spec.shape)) for spec in inputs]
    items = {name: Profile(min=(1, *one.min), opt=(1, *one.opt), max=(1, *one.max)) for name, one in profile.items()}
    arrays = read_inputs(option, path, specs, items, 1)
    return [{name: array[item] for name, array in arrays.items()} for item in range(len(next(iter(arrays.values()))))]


def in_runs(inputs: Mapping[str, Array], max_batch_size: int) -> list[dict[str, Array]]:
    """Return the rows of some inputs in runs of 8 at most; all in one run without a batch dimension."""
    if not max_batch_size:
        return [dict(inputs)]
    rows, step = len(next(iter(inputs.values()))), min(_ROWS, max_batch_size)
    return [{name: array[start : start + step] for name, array in inputs.items()} for start in range(0, rows, step)]


def _read(option: str, path: Path, inputs: Sequence[TensorSpec]) -> dict[str, Array]:
    try:
        with path.open("rb") as file:
            if not zipfile.is_zipfile(file):
                raise ValueError("another format")
        with np.load(path, allow_pickle=False) as archive:
            arrays = {name: archive[name] for name in archive.files}
    except Exception as error:  # broken bytes make zipfile and NumPy raise more kinds than either documents
        given = Raw(error.strerror if isinstance(error, OSError) and error.strerror else error)
        name, keywords = path.with_suffix(".npz").name, ", ".join(f"{spec.name}=…" for spec in inputs)
        fix = f"Write it with numpy.savez({name!r}, {keywords})."
        raise UsageError(f"{option} {path}", given=given, expected="an .npz without pickles", fix=fix) from None
    names = [spec.name for spec in inputs]
    if set(arrays) != set(names):
        fix = "Name each array after its input."
        raise UsageError(f"names in {option} {path}", given=sorted(arrays), expected=f"exactly {names}", fix=fix)
    return arrays


def _check_rows(option: str, path: Path, arrays: Mapping[str, Array]) -> None:
    rows = {name: len(array) if array.ndim else 0 for name, array in arrays.items()}
    if len(set(rows.values())) != 1 or 0 in rows.values():
        expected = "as many in each array, at least one"
        raise UsageError(f"rows in {option} {path}", given=rows, expected=expected, fix="Make them equal.")


def _checked(
    option: str, path: Path, spec: TensorSpec, array: Array, profile: Profile | None, max_batch_size: int
) -> Array:
    subject = f"array {spec.name!r} in {option} {path}"
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
        fix = "Reshape it, or widen --shape." if -1 in spec.shape[free] else "Reshape it."
        raise UsageError(subject, given=list(array.shape), expected=expected, fix=fix)
    if array.dtype.kind == "f" and not np.isfinite(array).all():
        raise UsageError(subject, given=Raw("NaN or Inf"), expected="finite values", fix="Remove them.")
    return np.char.encode(array, "utf-8") if array.dtype.kind == "U" else array
