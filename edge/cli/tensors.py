"""Tensors on the command line of ``fewheads infer``: as JSON, or from files."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any
from zipfile import BadZipFile

import numpy as np

from edge.datatypes import NUMPY_TYPES, Array, TensorSpec
from edge.errors import Raw, UsageError, elided

#: What reading and converting malformed input raises.
_MALFORMED = (OSError, EOFError, BadZipFile, ValueError, TypeError, OverflowError, RecursionError)
#: NumPy's kinds of the elements of JSON, the kinds that each kind of tensor takes, and their names.
_KINDS = {bool: "b", int: "i", float: "f"}
_TAKEN = {"b": "b", "i": "iu", "u": "iu", "f": "iuf"}
_WORDS = {"b": "true or false", "i": "a whole number", "u": "a whole number", "f": "a number"}
_MOST_QUOTED_CHARS = 80


def read_tensors(arguments: Sequence[str], specs: Mapping[str, TensorSpec]) -> dict[str, Array]:
    """Return the tensors of ``--input``, by name.

    Args:
        arguments: ``NAME=JSON``; ``NAME=@FILE.npy``; or ``@FILE``, an ``.npz`` or a JSON object of tensors by name.
        specs: the model's inputs.

    Raises:
        UsageError: a file cannot be read, or a tensor does not fit its input.
    """
    inputs = {}
    for argument in arguments:
        for name, value in _named(argument, specs):
            inputs[name] = _converted(value, specs[name])
    return inputs


def _named(argument: str, specs: Mapping[str, TensorSpec]) -> Iterator[tuple[str, Any]]:
    """Yield the names in an argument with their JSON or arrays."""
    if argument.startswith("@"):
        path = Path(argument[1:])
        expected = f"an .npz file or a JSON object, with tensors of {sorted(specs)}"
        try:
            found = np.load(path, allow_pickle=False) if path.suffix == ".npz" else json.loads(path.read_bytes())
            values = dict(found)
        except _MALFORMED as error:
            given, fix = Raw(f"{argument} ({error})"), "Correct the file, or give --input NAME=JSON."
            raise UsageError("--input", given=given, expected=expected, fix=fix) from None
        unknown = [name for name in values if name not in specs]
        if unknown:
            raise UsageError(f"--input {argument}", given=unknown[0], expected=expected, fix="Rename it.")
        yield from values.items()
        return
    name, found, value = argument.partition("=")
    if not found or name not in specs:
        expected = f"NAME=JSON with NAME of {sorted(specs)}"
        raise UsageError("--input", given=argument, expected=expected, fix="Name it.")
    try:
        yield name, np.load(Path(value[1:]), allow_pickle=False) if value.startswith("@") else json.loads(value)
    except _MALFORMED as error:
        raise _malformed(specs[name], value, error) from None


def _converted(value: Any, spec: TensorSpec) -> Array:
    try:
        if spec.datatype == "BYTES":
            array = np.asarray(np.frompyfunc(_encoded, 1, 1)(np.asarray(value, np.object_)))
        else:
            array = _numbers(value, NUMPY_TYPES[spec.datatype])
    except _MALFORMED as error:
        raise _malformed(spec, json.dumps(value, default=str), error) from None
    if not spec.accepts(array.shape):
        fix = "The model's metadata has these sizes, -1 being any."
        if spec.accepts((1, *array.shape)):
            fix = "The first dimension is that of the rows: put a single one into one more pair of brackets."
        given = Raw(f"the shape {list(array.shape)}")
        raise UsageError(f"--input {spec.name}", given=given, expected=f"{list(spec.shape)}", fix=fix)
    return array


def _numbers(value: Any, dtype: np.dtype[Any]) -> Array:
    """Return JSON or an array as numbers of a type, which must hold each of them; floats are rounded."""
    # As objects, because NumPy would make numbers of the truth values beside them.
    given = value if isinstance(value, np.ndarray) else np.asarray(value, np.object_)
    kinds = {_KINDS.get(type(item), "") for item in given.flat} if given.dtype.kind == "O" else {given.dtype.kind}
    if wrong := kinds - set(_TAKEN[dtype.kind]):
        words = " or ".join(sorted(_WORDS.get(kind, "something else") for kind in wrong))
        raise TypeError(f"{words}, and not {_WORDS[dtype.kind]}")
    with np.errstate(all="ignore"):
        array = given.astype(dtype)
        held = np.isfinite(array) | ~np.isfinite(given.astype(np.float64)) if dtype.kind == "f" else array == given
    if not np.all(held):
        raise ValueError(f"{given[~held].flat[0]} is out of its range")
    return array


def _malformed(spec: TensorSpec, value: str, error: Exception) -> UsageError:
    expected = f"{spec.datatype} of shape {list(spec.shape)}, as JSON or @file.npy"
    given = Raw(f"{elided(value, _MOST_QUOTED_CHARS)} ({error})")
    fix = f"Send what {spec.datatype} can hold, quoted for the shell as in --input x='[[1, 2]]'."
    return UsageError(f"--input {spec.name}", given=given, expected=expected, fix=fix)


def _encoded(item: object) -> bytes:
    if not isinstance(item, str | bytes):
        raise TypeError(f"{item!r} is not text")
    return item.encode() if isinstance(item, str) else item
