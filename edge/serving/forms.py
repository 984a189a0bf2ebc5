"""Checks of requests, and the cache of validated request forms.

Clients send similar requests. The form of a request is everything but its id and its tensor values: names, datatypes,
shapes, parameters and requested outputs. A request whose form is in the cache skips validation.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Final, NamedTuple

import numpy as np

from edge.datatypes import WIRE_TYPES, Array
from edge.errors import ModelNotReady, RequestError
from edge.pb import inference_pb2 as pb
from edge.programs.program import Options
from edge.repository.entry import Entry
from edge.repository.model import Model
from edge.repository.repository import Repository
from edge.scheduling.batching import byte_size, within
from edge.scheduling.job import BothUses, Use
from edge.serving.parameters import Parameters, parse, with_logprobs
from edge.serving.shared_memory import SharedMemory, Window, output_windows
from edge.serving.wire import decode_inputs, requested_classes, requested_outputs

#: A further form empties the cache.
_MAX_FORMS: Final = 256
#: Forms that are larger, such as those with data in parameters, are not kept.
_MAX_FORM_BYTES: Final = 4096


#: Returns the inputs of a graph that a slow step computes.
Preprocess = Callable[[], dict[str, Array]]


class _Tensor(NamedTuple):
    name: str
    dtype: np.dtype[np.generic]  # of its raw contents, as size_bytes
    shape: tuple[int, ...]
    size_bytes: int
    largest: np.float32 | None  # size of its numbers, if there is a limit


class Form(NamedTuple):
    """An accepted request without its id and values."""

    entry: Entry
    model: Model
    tensors: tuple[_Tensor, ...]
    parameters: Parameters
    output_names: Sequence[str]
    rows: int
    size: int  # what the time of its run grows with
    size_bytes: int
    shapes: Hashable  # the key that requests of one run share
    options: Options  # of the full tier
    classes: Mapping[str, int]  # how many of the largest values to return, by the outputs that are ranked
    use: Use  # of the model, and of a head

    def inputs(self, contents: Sequence[bytes]) -> dict[str, Array] | None:
        """Return the inputs in raw contents, without a copy; None where a validation has to say what is wrong."""
        if len(contents) != len(self.tensors):
            return None
        inputs = {}
        for (name, dtype, shape, size_bytes, largest), data in zip(self.tensors, contents, strict=True):
            if len(data) != size_bytes:
                return None
            inputs[name] = np.frombuffer(data, dtype).reshape(shape)
            if largest is not None and not within(inputs[name], largest).all():
                return None
        return None if self.model.checks_values and self.model.wrong_values(inputs) else inputs


class Checked(NamedTuple):
    """A request that has passed all checks."""

    form: Form
    inputs: Mapping[str, Array]
    windows: Mapping[str, Window]  # the shared memory of the outputs that go there, by name
    preprocess: Preprocess | None  # of the inputs that are still zeros


class Forms:
    """Validates requests, and keeps the forms of those that determine all but the values. For the event loop only."""

    def __init__(self, repository: Repository, shared_memory: SharedMemory | None) -> None:
        self._repository, self._shared_memory = repository, shared_memory
        self._forms: dict[bytes, Form] = {}
        self._generation = -1

    def find(self, key: bytes, generation: int) -> Form | None:
        """Return the form of a key from :func:`take_apart`; a new generation of the repository empties the cache."""
        if generation != self._generation:
            self._generation = generation
            self._forms.clear()
        return self._forms.get(key)

    def check(
        self, request: pb.ModelInferRequest, contents: Sequence[bytes], key: bytes, entry: Entry, model: Model
    ) -> Checked:
        """Validate a request to a model, of which the caller has taken a use, and take one of the head that it names.

        Args:
            contents, key: from :func:`take_apart`.

        Raises:
            RequestError: the first check that it does not pass. No use is taken.
        """
        parameters = parse(request)
        names = requested_outputs(request, model.outputs, model.on_request)
        names, text = with_logprobs(names, parameters.text, model.by_token)
        classes = requested_classes(request, model.outputs)
        windows = output_windows(request, self._shared_memory)
        sent = decode_inputs(request, contents, model.inputs, self._shared_memory)
        inputs, rows, preprocess = model.prepare(sent)
        tensors = tensors_of(request, contents, inputs, model.largest) if key and not windows else None
        assembler = model.executors[model.full_tier].assembler
        size_bytes = byte_size(inputs) + (byte_size(sent) if preprocess else 0)  # files wait beside their pixels
        known = (rows, assembler.size(inputs), size_bytes, assembler.key(inputs))
        options = model.options(parameters.loop, text)
        use: Use = model.use
        if parameters.head:
            head = self._head(parameters.head)
            options = model.apply_head(options, head, parameters.alpha)
            take(head.use, head.name)
            use = BothUses(use, head.use)
        form = Form(entry, model, tensors or (), parameters, names, *known, options, classes, use)
        if tensors:
            self._remember(key, form)
        return Checked(form, inputs, windows, preprocess)

    def _head(self, name: str) -> Model:
        """Return the model that a request names as its head, as name or name:version; its errors speak of the head."""
        model, _, version = name.partition(":")
        try:
            return self._repository.ready(model, version)[1]
        except RequestError as error:
            subject, given = f"head {name!r}", error.given
            raise type(error)(subject, given=given, expected=error.expected, fix=error.fix) from None

    def _remember(self, key: bytes, form: Form) -> None:
        if len(key) <= _MAX_FORM_BYTES:
            if len(self._forms) >= _MAX_FORMS:
                self._forms.clear()
            self._forms[key] = form


def take(use: Use, model: str) -> None:
    """Take a use of a model; raise a ModelNotReady if it is being unloaded."""
    if not use.take():
        fix = "Send the request again later."
        raise ModelNotReady(f"model {model!r}", given="UNLOADING", expected="READY", fix=fix)


def take_apart(request: pb.ModelInferRequest) -> tuple[str, list[bytes], bytes]:
    """Remove id and raw contents from a request, and return both and the serialized rest, the key of its form.

    The key is empty without raw contents: then the rest holds values, and may be large.
    """
    request_id, contents = request.id, list(request.raw_input_contents)
    request.ClearField("raw_input_contents")
    request.ClearField("id")
    return request_id, contents, request.SerializeToString(deterministic=True) if contents else b""


def tensors_of(
    request: pb.ModelInferRequest,
    contents: Sequence[bytes],
    inputs: Mapping[str, Array],
    largest: Mapping[str, np.float32],
) -> tuple[_Tensor, ...] | None:
    """Return how to read the graph's inputs in further requests of a form; None if each of them needs validation."""
    if len(contents) != len(request.inputs) or {tensor.name for tensor in request.inputs} != inputs.keys():
        return None  # typed contents, shared memory, or a text that became other inputs
    tensors = []
    for tensor, data in zip(request.inputs, contents, strict=True):
        if tensor.datatype in ("BOOL", "BYTES") or tensor.parameters:
            return None
        dtype, limit = WIRE_TYPES[tensor.datatype], largest.get(tensor.name)
        tensors.append(_Tensor(tensor.name, dtype, tuple(tensor.shape), len(data), limit))
    return tuple(tensors)
