"""Conversion of protobuf tensors to NumPy arrays and back. Sizes are checked first; raw contents are not copied."""

from __future__ import annotations

import json
import struct
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from math import prod
from typing import Any, Final, NamedTuple

import numpy as np

from edge.datatypes import NUMPY_TYPES, WIRE_TYPES, Array, TensorSpec, byte_size
from edge.errors import InvalidRequest, Raw
from edge.pb import inference_pb2 as pb
from edge.scheduling.batching import byte_size as byte_size_of
from edge.serving.request import InputTensor, RequestedOutput, check_name, parameter_kind
from edge.serving.shared_memory import SharedMemory, TensorRegion, is_shared, no_shared_memory, tensor_region

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
_LENGTHS_FIX: Final = "Write 4 bytes of little-endian length before each element."
#: A bytes object of Python without its contents, and the reference to it.
_OBJECT_BYTES: Final = 41
#: A typed number is converted in a fraction of the time that a text of BYTES takes.
_NUMBERS_PER_TEXT: Final = 8
#: Numbers that are converted at once, in about a millisecond.
_CHUNK: Final = 16 * 1024


class Sent(NamedTuple):
    """A tensor that a request declares; its contents have the declared size, and are not decoded yet.

    ``size_bytes`` are those of the contents, of BYTES without the objects that they become. ``elements`` are converted
    one by one, numbers counted by the time of a text.
    """

    datatype: str
    shape: tuple[int, ...]
    subject: str
    contents: bytes | TensorRegion | pb.InferTensorContents | Array
    size_bytes: int
    elements: int

    @property
    def held_bytes(self) -> int:
        """The bytes that it takes decoded, at most."""
        return self.size_bytes + _OBJECT_BYTES * self.elements

    @property
    def copied(self) -> bool:
        """Whether :meth:`decode` copies it."""
        if isinstance(self.contents, np.ndarray):
            return False
        return self.datatype == "BOOL" or not isinstance(self.contents, bytes)

    def again(self, data: bytes) -> Sent:
        """Return what declares the same with other raw contents; raise an InvalidRequest if their size is wrong."""
        _check_size(len(data), self.datatype, self.shape, self.subject)
        return Sent(self.datatype, self.shape, self.subject, data, len(data), self.elements)

    def decode(self) -> Array:
        """Return the tensor; on any thread. Raise an InvalidRequest for elements that cannot be read."""
        contents = self.contents
        if isinstance(contents, np.ndarray):
            return contents
        if isinstance(contents, pb.InferTensorContents):
            return from_typed(contents, self.datatype, self.shape, self.subject)
        raw = contents if isinstance(contents, bytes) else contents.read()
        return from_raw(raw, self.datatype, self.shape, self.subject)


def sent_inputs(
    inputs: Iterable[InputTensor],
    raw: Sequence[bytes],
    specs: Mapping[str, TensorSpec],
    shared_memory: SharedMemory | None = None,
) -> dict[str, Sent]:
    """Return a request's tensors by name, after checks of names, datatypes, ranks, fixed dimensions and sizes.

    No element is decoded, so the time does not grow with their number; the model checks the rest. ``raw`` are a
    message's raw contents, one for each input that is not in shared memory, which is None if the server does not allow
    it.
    """
    named: dict[str, InputTensor] = {}
    in_regions = 0
    for tensor in inputs:  # ends at the first superfluous one, however many there are
        name = tensor.name
        if name not in specs:
            check_name("input name", name)
            raise InvalidRequest("input name", given=name, expected=f"one of {sorted(specs)}", fix=_METADATA_FIX)
        if name in named:
            raise _repeated(f"input {name!r}")
        in_regions += is_shared(tensor.parameters)
        named[name] = tensor
    in_messages = len(named) - in_regions
    if in_regions and shared_memory is None:
        raise no_shared_memory("inputs")
    if raw and len(raw) != in_messages:
        expected = f"{in_messages}, one for each input that is not in shared memory"
        fix = "Send each input raw and in order, or all of them typed."
        raise InvalidRequest("raw_input_contents", given=Raw(f"{len(raw)} entries"), expected=expected, fix=fix)
    contents = iter(raw)
    return {
        name: _sent(tensor, contents if raw else None, specs[name], shared_memory) for name, tensor in named.items()
    }


def _sent(
    tensor: InputTensor,
    contents: Iterator[bytes] | None,
    spec: TensorSpec,
    shared_memory: SharedMemory | None,
) -> Sent:
    """Check what a tensor declares; ``contents`` are the message's raw ones that are left, None without any."""
    subject, datatype, shape = f"input {tensor.name!r}", spec.datatype, tensor.shape
    if tensor.datatype != datatype:
        raise InvalidRequest(f"{subject} datatype", given=tensor.datatype, expected=datatype, fix=_METADATA_FIX)
    if min(shape, default=1) < 1 or not spec.accepts(shape):
        expected = f"{list(spec.shape)}, where -1 is any size above 0"
        raise InvalidRequest(f"{subject} shape", given=list(shape), expected=expected, fix=_METADATA_FIX)
    shared = is_shared(tensor.parameters)
    if (contents or shared) and tensor.contents is not None:
        fix = "Send either contents, or raw_input_contents, or a region of shared memory."
        given = Raw(f"{'shared memory' if shared else 'raw'} and typed contents")
        raise InvalidRequest(subject, given=given, expected="one of them", fix=fix)
    if shared:
        region = tensor_region(tensor.parameters, shared_memory, subject, write=False)
        _check_size(region.byte_size, datatype, shape, subject)
        return Sent(datatype, shape, subject, region, region.byte_size, prod(shape) if datatype == "BYTES" else 0)
    typed = tensor.contents if contents is None else next(contents)
    if isinstance(typed, bytes):
        _check_size(len(typed), datatype, shape, subject)
        return Sent(datatype, shape, subject, typed, len(typed), prod(shape) if datatype == "BYTES" else 0)
    if isinstance(typed, np.ndarray):
        elements = prod(shape) if datatype == "BYTES" else 0
        return Sent(datatype, shape, subject, typed, byte_size_of({"": typed}), elements)
    typed = typed or pb.InferTensorContents()
    count = check_typed(typed, datatype, shape, subject)
    if datatype == "BYTES":
        return Sent(datatype, shape, subject, typed, sum(map(len, typed.bytes_contents)), count)
    return Sent(datatype, shape, subject, typed, count * NUMPY_TYPES[datatype].itemsize, count // _NUMBERS_PER_TEXT)


def from_raw(data: bytes, datatype: str, shape: tuple[int, ...], subject: str) -> Array:
    """Return a tensor that shares memory with its raw contents; only BYTES and BOOL are copied."""
    _check_size(len(data), datatype, shape, subject)
    if datatype == "BYTES":
        return _split_bytes(data, shape, subject)
    if datatype == "BOOL":
        flags: Array = np.frombuffer(data, np.uint8) != 0  # NumPy's bool has only the bit patterns 0 and 1
        return flags.reshape(shape)
    return np.frombuffer(data, WIRE_TYPES[datatype]).reshape(shape)


def _check_size(size: int, datatype: str, shape: tuple[int, ...], subject: str) -> None:
    """Check the raw bytes of a tensor before anything is copied, or allocated for a huge shape."""
    if datatype == "BYTES":
        least = 4 * prod(shape)
        if size < least:
            given, expected = Raw(f"{size} raw bytes"), f"at least {least} for {least // 4} elements"
            raise InvalidRequest(subject, given=given, expected=expected, fix=_LENGTHS_FIX)
        return
    expected_bytes = byte_size(datatype, shape)
    if size != expected_bytes:
        given, fix = Raw(f"{size} raw bytes"), "Send every element, row-major, unpadded."
        raise InvalidRequest(subject, given=given, expected=f"{expected_bytes} for {datatype} {list(shape)}", fix=fix)


def _split_bytes(data: bytes, shape: tuple[int, ...], subject: str) -> Array:
    """Split BYTES: each element is 4 bytes of little-endian length, then the element."""
    count = prod(shape)
    elements: list[bytes] = []
    position = 0
    while position + 4 <= len(data) and len(elements) < count:
        (length,) = struct.unpack_from("<I", data, position)
        position += 4 + length
        elements.append(data[position - length : position])
    if position != len(data) or len(elements) != count:
        given = Raw(f"{len(data)} raw bytes that hold {len(elements)} elements in {position} bytes")
        raise InvalidRequest(subject, given=given, expected=f"{count} elements that fill them", fix=_LENGTHS_FIX)
    return _bytes_array(elements, shape)


def check_typed(contents: pb.InferTensorContents, datatype: str, shape: tuple[int, ...], subject: str) -> int:
    """Return the number of typed elements; check that their field is the datatype's, and has as many as the shape."""
    field = CONTENTS_FIELDS.get(datatype)
    if field is None:
        fix = "Put the bytes into raw_input_contents."
        raise InvalidRequest(subject, given=Raw(f"typed {datatype}"), expected="raw contents", fix=fix)
    for descriptor, _ in contents.ListFields():
        if descriptor.name != field:
            fix = f"Put {datatype} into {field}."
            raise InvalidRequest(f"{subject} contents", given=descriptor.name, expected=field, fix=fix)
    count = len(getattr(contents, field))
    if count != prod(shape):
        given, expected = Raw(f"{count} elements in {field}"), f"{prod(shape)} for shape {list(shape)}"
        raise InvalidRequest(subject, given=given, expected=expected, fix="Send as many elements as the shape says.")
    return count


def from_typed(contents: pb.InferTensorContents, datatype: str, shape: tuple[int, ...], subject: str) -> Array:
    """Return a copy of a tensor's typed contents, which have passed the check of their number."""
    values: Sequence[Any] = getattr(contents, CONTENTS_FIELDS[datatype])
    if datatype == "BYTES":
        return _bytes_array(values, shape)
    dtype = NUMPY_TYPES[datatype]
    narrow = dtype.itemsize < 4 and dtype.kind in "iu"  # their field has 32 bits, so a value can be too large
    parts: list[Array] = []
    for start in range(0, max(len(values), 1), _CHUNK):  # between two chunks other threads take their turn
        part = np.array(values[start : start + _CHUNK], np.int64 if narrow else dtype)
        if narrow:
            limits = np.iinfo(dtype)
            outside = part[(part < limits.min) | (part > limits.max)]
            if outside.size:
                expected = f"{datatype} values from {limits.min} to {limits.max}"
                raise InvalidRequest(subject, given=int(outside[0]), expected=expected, fix="Send values that fit.")
        parts.append(part.astype(dtype, copy=False))
    return (parts[0] if len(parts) == 1 else np.concatenate(parts)).reshape(shape)


def _bytes_array(elements: Iterable[bytes], shape: tuple[int, ...]) -> Array:
    array = np.empty(prod(shape), np.object_)
    array[:] = list(elements)
    return array.reshape(shape)


def requested_outputs(
    outputs: Sequence[RequestedOutput], specs: Mapping[str, TensorSpec], on_request: Collection[str] = ()
) -> list[str]:
    """Return the names of the outputs to send, in the request's order; without any, all but those ``on_request``."""
    names: list[str] = []
    for output in outputs:
        if output.name not in specs:
            check_name("output name", output.name)
            expected = f"one of {sorted(specs)}"
            raise InvalidRequest("output name", given=output.name, expected=expected, fix=_METADATA_FIX)
        if output.name in names:
            raise _repeated(f"output {output.name!r}")
        names.append(output.name)
    return names or [name for name in specs if name not in on_request]


def requested_classes(outputs: Sequence[RequestedOutput], specs: Mapping[str, TensorSpec]) -> dict[str, int]:
    """Return how many of the largest values a request wants, by output; raise an InvalidRequest if that is no number.

    ``specs`` contains the outputs that the request names.
    """
    classes: dict[str, int] = {}
    for output in outputs:
        if _CLASSIFICATION not in output.parameters:
            continue
        subject = f"parameter {_CLASSIFICATION!r} of output {output.name!r}"
        count = output.parameters[_CLASSIFICATION]
        if type(count) is not int or count < 1:
            kind = parameter_kind(count)
            given = Raw(f"{kind}: {json.dumps(count)}" if kind else "nothing")
            fix = "Send the number of values to return."
            raise InvalidRequest(subject, given=given, expected="an integer of 1 or more", fix=fix)
        datatype = specs[output.name].datatype
        if NUMPY_TYPES[datatype].kind not in "fiu":
            fix = "Rank an output of numbers, such as the logits."
            raise InvalidRequest(subject, given=datatype, expected="a datatype of numbers", fix=fix)
        classes[output.name] = count
    return classes


def _repeated(subject: str) -> InvalidRequest:
    return InvalidRequest(subject, expected="each name once", fix="Remove one of them.")


def to_raw(array: Array, datatype: str) -> bytes:
    """Return a tensor as raw contents: row-major, little-endian, BYTES with lengths."""
    if datatype != "BYTES":
        return array.astype(WIRE_TYPES[datatype], copy=False).tobytes()
    elements = [item.encode() if isinstance(item, str) else item for item in array.ravel().tolist()]
    return b"".join(struct.pack("<I", len(element)) + element for element in elements)
