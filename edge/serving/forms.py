"""A cache of validated request forms: clients repeat themselves in everything but ids and values.

Of a request that was checked once, all but its id and the values of its tensors is remembered: names, datatypes,
shapes, parameters and requested outputs. A request of the same form needs none of its checks again.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from typing import Final, NamedTuple

import numpy as np

from edge.datatypes import WIRE_TYPES, Array
from edge.pb import inference_pb2 as pb
from edge.repository.entry import Entry
from edge.repository.model import Model
from edge.serving.parameters import Parameters

#: Forms that are remembered; one more starts the cache anew.
_MAX_FORMS: Final = 256
#: Of a form; a client that fills its parameters with data is not worth the memory.
_MAX_FORM_BYTES: Final = 4096


class _Tensor(NamedTuple):
    """One input: its name, how NumPy reads its raw contents, its shape, and the size of these contents."""

    name: str
    dtype: np.dtype[np.generic]
    shape: tuple[int, ...]
    size_bytes: int


class Form(NamedTuple):
    """An accepted request without its id and values.

    Attributes:
        entry: the bundle that answers.
        model: its model.
        tensors: its inputs, in the request's order.
        parameters: what its parameters ask for.
        output_names: the outputs to send.
        rows: of its batch.
        size: what the time of its run grows with.
        size_bytes: of its inputs.
        shapes: what its inputs must have in common with others to be joined.
    """

    entry: Entry
    model: Model
    tensors: tuple[_Tensor, ...]
    parameters: Parameters
    output_names: Sequence[str]
    rows: int
    size: int
    size_bytes: int
    shapes: Hashable

    def inputs(self, contents: Sequence[bytes]) -> dict[str, Array] | None:
        """Return the inputs in raw contents, without a copy; None where the sizes are not those of the form."""
        if len(contents) != len(self.tensors):
            return None
        inputs = {}
        for (name, dtype, shape, size_bytes), data in zip(self.tensors, contents, strict=True):
            if len(data) != size_bytes:
                return None
            inputs[name] = np.frombuffer(data, dtype).reshape(shape)
        return inputs


class Forms:
    """The forms of the requests that were accepted last. It belongs to the event loop."""

    def __init__(self) -> None:
        self._forms: dict[bytes, Form] = {}
        self._generation = -1

    def find(self, key: bytes, generation: int) -> Form | None:
        """Return the form of a request.

        Args:
            key: from :func:`take_apart`.
            generation: of the repository; when it changes, every form is forgotten.
        """
        if generation != self._generation:
            self._generation = generation
            self._forms.clear()
        return self._forms.get(key)

    def remember(self, key: bytes, form: Form) -> None:
        """Keep a form for the next request like it."""
        if len(key) <= _MAX_FORM_BYTES:
            if len(self._forms) >= _MAX_FORMS:
                self._forms.clear()
            self._forms[key] = form


def take_apart(request: pb.ModelInferRequest) -> tuple[str, list[bytes], bytes]:
    """Take the id and the raw contents out of a request; return both, and the rest as bytes, which is its form.

    The form is empty where there are no raw contents: what is left may be large then, and says more than the form.
    """
    request_id, contents = request.id, list(request.raw_input_contents)
    request.ClearField("raw_input_contents")
    request.ClearField("id")
    return request_id, contents, request.SerializeToString(deterministic=True) if contents else b""


def tensors_of(
    request: pb.ModelInferRequest, contents: Sequence[bytes], inputs: Mapping[str, Array]
) -> tuple[_Tensor, ...] | None:
    """Return how to read the inputs of a request again; None where its form does not say everything about them.

    Args:
        request: without its raw contents.
        contents: these.
        inputs: of the graph, as they were decoded and preprocessed.
    """
    if len(contents) != len(request.inputs) or {tensor.name for tensor in request.inputs} != inputs.keys():
        return None  # typed contents, shared memory, or a text that became other inputs
    tensors = []
    for tensor, data in zip(request.inputs, contents, strict=True):
        if tensor.datatype in ("BOOL", "BYTES") or tensor.parameters:
            return None
        tensors.append(_Tensor(tensor.name, WIRE_TYPES[tensor.datatype], tuple(tensor.shape), len(data)))
    return tuple(tensors)
