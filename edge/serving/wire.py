"""Conversion of protobuf tensors to NumPy arrays and back. Sizes are checked first; raw contents are not copied."""

from __future__ import annotations

import struct
from collections.abc import Collection, Iterable, Mapping, Sequence
from math import prod
from typing import Any, Final

import numpy as np

from edge.datatypes import NUMPY_TYPES, WIRE_TYPES, Array, TensorSpec, byte_size
from edge.errors import InvalidRequest, Literally
from edge.pb import inference_pb2 as pb
from edge.serving.shared_memory import SharedMemory, is_shared, no_shared_memory, window_of

#: Datatype to its field of InferTensorContents. FP16 and BF16 are raw only.
CONTENTS_FIELDS: dict[str, str] = {
    "BOOL": "bool_contents",
    **dict.fromkeys(("INT8", "INT16", "INT32"), "int_contents"),
    "INT64": "int64_contents",
    **dict.fromkeys(("UINT8", "UINT16", "UINT32"), "uint_contents"),
    "UINT64": "uint64_contents",
    "FP32": "fp32_contents",
    "FP64": "fp64_contents",
    "BYTES": "bytes_contents",
}
_CLASSIFICATION: Final = "classification"
_METADATA_FIX = "ModelMetadata returns the names, datatypes and shapes."


def decode_inputs(
    request: pb.ModelInferRequest,
    raw: Sequence[bytes],
    specs: Mapping[str, TensorSpec],
    shared_memory: SharedMemory | None = None,
) -> dict[str, Array]:
    """Return the request's tensors by name, after checks of names, datatypes, ranks, fixed dimensions and sizes.

    The model checks which inputs are required, and the limits of batch and profile. ``shared_memory`` is None if the
    server does not allow it.
    """
    sent = sum(not is_shared(tensor.parameters) for tensor in request.inputs)
    if sent != len(request.inputs) and shared_memory is None:
        raise no_shared_memory("inputs")
    if raw and len(raw) != sent:
        given, expected = Literally(f"{len(raw)} entries"), f"{sent}, one for each input that is not in shared memory"
        fix = "Send each input raw and in order, or all of them typed."
        raise InvalidRequest("raw_input_contents", given=given, expected=expected, fix=fix)
    contents = iter(raw)
    arrays: dict[str, Array] = {}
    for tensor in request.inputs:
        spec, subject = specs.get(tensor.name), f"input {tensor.name!r}"
        if spec is None:
            raise InvalidRequest("input name", given=tensor.name, expected=f"one of {sorted(specs)}", fix=_METADATA_FIX)
        if tensor.name in arrays:
            raise _repeated(subject)
        if tensor.datatype != spec.datatype:
            expected = spec.datatype
            raise InvalidRequest(f"{subject} datatype", given=tensor.datatype, expected=expected, fix=_METADATA_FIX)
        shape = tuple(tensor.shape)
        if any(size < 1 for size in shape) or not spec.accepts(shape):
            expected = f"{list(spec.shape)}, where -1 is any size above 0"
            raise InvalidRequest(f"{subject} shape", given=list(shape), expected=expected, fix=_METADATA_FIX)
        shared = is_shared(tensor.parameters)
        if (raw or shared) and tensor.HasField("contents"):
            fix = "Send either contents, or raw_input_contents, or a region of shared memory."
            given = Literally(f"{'shared memory' if shared else 'raw'} and typed contents")
            raise InvalidRequest(subject, given=given, expected="one of them", fix=fix)
        if shared:
            window = window_of(tensor.parameters, shared_memory, subject, write=False)
            _check_size(window.byte_size, spec.datatype, shape, subject)
            arrays[tensor.name] = from_raw(window.read(), spec.datatype, shape, subject)
        elif raw:
            arrays[tensor.name] = from_raw(next(contents), spec.datatype, shape, subject)
        else:
            arrays[tensor.name] = from_typed(tensor.contents, spec.datatype, shape, subject)
    return arrays


def from_raw(data: bytes, datatype: str, shape: tuple[int, ...], subject: str) -> Array:
    """Return a tensor that shares memory with its raw contents; only BYTES and BOOL are copied."""
    if datatype == "BYTES":
        return _split_bytes(data, shape, subject)
    _check_size(len(data), datatype, shape, subject)
    if datatype == "BOOL":
        flags: Array = np.frombuffer(data, np.uint8) != 0  # NumPy's bool has only the bit patterns 0 and 1
        return flags.reshape(shape)
    return np.frombuffer(data, WIRE_TYPES[datatype]).reshape(shape)


def _check_size(size: int, datatype: str, shape: tuple[int, ...], subject: str) -> None:
    """Check the raw bytes of a tensor before a copy; :func:`_split_bytes` checks those of BYTES."""
    expected = size if datatype == "BYTES" else byte_size(datatype, shape)
    if size != expected:
        given, fix = Literally(f"{size} raw bytes"), "Send every element, row-major, unpadded."
        raise InvalidRequest(subject, given=given, expected=f"{expected} for {datatype} {list(shape)}", fix=fix)


def _split_bytes(data: bytes, shape: tuple[int, ...], subject: str) -> Array:
    """Split BYTES: each element is 4 bytes of little-endian length, then the element."""
    count = prod(shape)
    fix = "Write 4 bytes of little-endian length before each element."
    if count * 4 > len(data):  # before anything is allocated for a huge shape
        given, expected = Literally(f"{len(data)} raw bytes"), f"at least {count * 4} for {count} elements"
        raise InvalidRequest(subject, given=given, expected=expected, fix=fix)
    elements: list[bytes] = []
    position = 0
    while position + 4 <= len(data) and len(elements) < count:
        (length,) = struct.unpack_from("<I", data, position)
        position += 4 + length
        elements.append(data[position - length : position])
    if position != len(data) or len(elements) != count:
        given = Literally(f"{len(data)} raw bytes that hold {len(elements)} elements in {position} bytes")
        raise InvalidRequest(subject, given=given, expected=f"{count} elements that fill them", fix=fix)
    return _bytes_array(elements, shape)


def from_typed(contents: pb.InferTensorContents, datatype: str, shape: tuple[int, ...], subject: str) -> Array:
    """Return a copy of a tensor's typed contents."""
    field = CONTENTS_FIELDS.get(datatype)
    if field is None:
        fix = "Put the bytes into raw_input_contents."
        raise InvalidRequest(subject, given=Literally(f"typed {datatype}"), expected="raw contents", fix=fix)
    others = [descriptor.name for descriptor, _ in contents.ListFields() if descriptor.name != field]
    if others:
        fix = f"Put {datatype} into {field}."
        raise InvalidRequest(f"{subject} contents", given=others[0], expected=field, fix=fix)
    values: Sequence[Any] = getattr(contents, field)
    if len(values) != prod(shape):
        given, expected = Literally(f"{len(values)} elements in {field}"), f"{prod(shape)} for shape {list(shape)}"
        raise InvalidRequest(subject, given=given, expected=expected, fix="Send as many elements as the shape says.")
    if datatype == "BYTES":
        return _bytes_array(values, shape)
    dtype = NUMPY_TYPES[datatype]
    if dtype.itemsize < 4 and dtype.kind in "iu":  # their field has 32 bits, so a value can be too large
        limits = np.iinfo(dtype)
        outside = [value for value in values if not limits.min <= value <= limits.max]
        if outside:
            expected = f"{datatype} values from {limits.min} to {limits.max}"
            raise InvalidRequest(subject, given=outside[0], expected=expected, fix="Send values that fit.")
    return np.array(values, dtype).reshape(shape)


def _bytes_array(elements: Iterable[bytes], shape: tuple[int, ...]) -> Array:
    array = np.empty(prod(shape), np.object_)
    array[:] = list(elements)
    return array.reshape(shape)


def requested_outputs(
    request: pb.ModelInferRequest, specs: Mapping[str, TensorSpec], on_request: Collection[str] = ()
) -> list[str]:
    """Return the names of the outputs to send, in the request's order; without any, all but those ``on_request``."""
    names: list[str] = []
    for output in request.outputs:
        if output.name not in specs:
            expected = f"one of {sorted(specs)}"
            raise InvalidRequest("output name", given=output.name, expected=expected, fix=_METADATA_FIX)
        if output.name in names:
            raise _repeated(f"output {output.name!r}")
        names.append(output.name)
    return names or [name for name in specs if name not in on_request]


def requested_classes(request: pb.ModelInferRequest, specs: Mapping[str, TensorSpec]) -> dict[str, int]:
    """Return how many of the largest values a request wants, by output; raise an InvalidRequest if that is no number.

    ``specs`` contains the outputs that the request names.
    """
    classes: dict[str, int] = {}
    for output in request.outputs:
        if _CLASSIFICATION not in output.parameters:
            continue
        subject = f"parameter {_CLASSIFICATION!r} of output {output.name!r}"
        parameter = output.parameters[_CLASSIFICATION]
        if parameter.WhichOneof("parameter_choice") != "int64_param" or parameter.int64_param < 1:
            given, fix = Literally(f"{parameter}".strip() or "nothing"), "Send the number of values to return."
            raise InvalidRequest(subject, given=given, expected="an integer of 1 or more", fix=fix)
        datatype = specs[output.name].datatype
        if NUMPY_TYPES[datatype].kind not in "fiu":
            fix = "Rank an output of numbers, such as the logits."
            raise InvalidRequest(subject, given=Literally(f"it for {datatype}"), expected="it for numbers", fix=fix)
        classes[output.name] = parameter.int64_param
    return classes


def _repeated(subject: str) -> InvalidRequest:
    return InvalidRequest(subject, given=Literally("it twice"), expected="it once", fix="Remove one of them.")


def to_raw(array: Array, datatype: str) -> bytes:
    """Return a tensor as raw contents: row-major, little-endian, BYTES with lengths."""
    if datatype != "BYTES":
        return array.astype(WIRE_TYPES[datatype], copy=False).tobytes()
    elements = [item.encode() if isinstance(item, str) else item for item in array.ravel().tolist()]
    return b"".join(struct.pack("<I", len(element)) + element for element in elements)
