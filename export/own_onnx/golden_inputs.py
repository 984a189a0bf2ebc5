"""Golden inputs for an own ONNX file: those of an ``.npz``, or seeded random ones."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

from edge.bundles.manifest import Profile
from edge.datatypes import NUMPY_TYPES, Array, TensorSpec, datatype_of
from edge.errors import Literally, UsageError

SEED = 0
#: What provenance and the command call random inputs.
RANDOM = "random"
_ROWS = 8


def random_inputs(
    inputs: Sequence[TensorSpec], profile: Mapping[str, Profile], max_batch_size: int
) -> dict[str, Array]:
    """Return random inputs of the usual shapes, at most 8 rows: normal floats; integers 0 and 1, which index any table.

    Raises:
        UsageError: an input is text, which cannot be made up.
    """
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
        profile: of each input with a -1.
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
