"""Checks of requests, and the cache of validated request forms.

Clients send similar requests. The form of a request is everything but its id and its tensor values: names, datatypes,
shapes, parameters and requested outputs. A request whose form is in the cache skips validation.
"""

from __future__ import annotations

from collections.abc import Collection, Hashable, Mapping, Sequence
from typing import Final, NamedTuple, TypeAlias, TypeVar

import numpy as np

from edge.bundles.preprocess import GoOn, always
from edge.datatypes import WIRE_TYPES, Array
from edge.datatypes import byte_size as tensor_bytes
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
from edge.serving.wire import Sent, decode_inputs, requested_classes, requested_outputs, sent_inputs

T = TypeVar("T")
#: A further form empties the cache.
_MAX_FORMS: Final = 256
#: Forms that are larger, such as those with data in parameters, are not kept.
_MAX_FORM_BYTES: Final = 4096
#: Elements that are decoded one by one, and bytes that are copied or checked, in a millisecond or two.
_INLINE_ELEMENTS, _INLINE_BYTES = 4096, 1024**2


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
    options: Options  # of the full tier
    classes: Mapping[str, int]  # how many of the largest values to return, by the outputs that are ranked
    texts: bool  # whether the response contains texts, such as ranks
    use: Use  # of the model, and of a head
    size: int  # what the time of its run grows with
    size_bytes: int
    shapes: Hashable  # the key that requests of one run share

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


#: The fields of a form before its size.
_Known: TypeAlias = tuple[
    Entry, Model, tuple[_Tensor, ...], Parameters, Sequence[str], int, Options, Mapping[str, int], bool, Use
]


class Prepared(NamedTuple):
    """A request that has passed all checks, and the inputs of the graph."""

    form: Form
    inputs: Mapping[str, Array]


class Draft(NamedTuple):
    """A request that has passed the checks of all but its values, which are not decoded yet.

    Attributes:
        known: the first fields of its form.
        message_bytes: of the message without raw contents, which the request holds until its end.
        windows: the shared memory of the outputs that go there, by name.
        slow: whether :meth:`prepare` takes milliseconds, so that no event loop may call it.
    """

    known: _Known
    sent: Mapping[str, Sent]
    message_bytes: int
    windows: Mapping[str, Window]
    slow: bool

    @property
    def model(self) -> Model:
        """The model of the request."""
        return self.known[1]

    @property
    def use(self) -> Use:
        """The use of the model, and of a head, that the request has taken."""
        return self.known[-1]

    def prepare(self, go_on: GoOn = always) -> Prepared:
        """Decode and preprocess the values, on any thread; raise an InvalidRequest if they are wrong.

        ``go_on`` is called before each part that takes long, and raises an error if the client has gone.
        """
        model = self.model
        inputs = model.prepare(decode_inputs(self.sent), go_on)
        assembler = model.executors[model.full_tier].assembler
        size_bytes = byte_size(inputs) + self.message_bytes
        return Prepared(Form(*self.known, assembler.size(inputs), size_bytes, assembler.key(inputs)), inputs)

    def unprepared(self) -> Form:
        """Return the form without what the values decide, and with the bytes that the request holds meanwhile."""
        model, rows = self.model, self.known[5]
        held = self.message_bytes + sum(tensor.held_bytes for tensor in self.sent.values())
        if model.step and model.step.inputs[0].name in self.sent:
            for spec in model.manifest.inputs:
                if spec.name in model.step.graph_inputs and -1 not in spec.shape[1:]:  # as pixels, beside their files
                    held += tensor_bytes(spec.datatype, (rows, *spec.shape[1:]))
        return Form(*self.known, 1, held, ())


class Forms:
    """Validates requests, and keeps the forms of those that determine all but the values. For the event loop only."""

    def __init__(self, repository: Repository, shared_memory: SharedMemory | None) -> None:
        self._repository, self._shared_memory = repository, shared_memory
        self._forms: dict[bytes, Form] = {}
        # Of requests with texts and others whose values decide more, what their form declares.
        self._declared: dict[bytes, tuple[_Known, Mapping[str, Sent]]] = {}
        self._generation = -1

    def find(self, key: bytes, generation: int) -> Form | None:
        """Return the form of a key from :func:`take_apart`; a new generation of the repository empties the cache."""
        if generation != self._generation:
            self._generation = generation
            self._forms.clear()
            self._declared.clear()
        return self._forms.get(key)

    def check(
        self, request: pb.ModelInferRequest, contents: Sequence[bytes], key: bytes, entry: Entry, model: Model
    ) -> Draft:
        """Check all but the values of a request to a model, of which the caller has taken a use.

        The time does not grow with the number of elements. This takes a use of the head that the request names.

        Args:
            contents, key: from :func:`take_apart`.

        Raises:
            RequestError: the first check that it does not pass. No use is taken.
        """
        if draft := self._declared_before(contents, key, model):
            return draft
        parameters = parse(request)
        names = requested_outputs(request, model.outputs, model.on_request)
        names, text = with_logprobs(names, parameters.text, model.by_token)
        classes = requested_classes(request, model.outputs)
        windows = output_windows(request, self._shared_memory)
        sent = sent_inputs(request, contents, model.inputs, self._shared_memory)
        rows = model.check_shapes({name: tensor.shape for name, tensor in sent.items()})
        slow = _is_slow(model, sent)
        tensors: tuple[_Tensor, ...] | None = None
        if key and not windows and not slow:
            graph = [spec.name for spec in model.manifest.inputs if spec.name in sent]
            tensors = tensors_of(request, contents, graph, model.largest)
        message_bytes = len(key) or sum(tensor.held_bytes for tensor in sent.values())
        options = model.options(parameters.loop, text)
        use: Use = model.use
        if parameters.head:
            head = self._head(parameters.head)
            options = model.apply_head(options, head, parameters.alpha)
            take(head.use, head.name)
            use = BothUses(use, head.use)
        texts = bool(classes) or not model.texts.isdisjoint(names)
        known = (entry, model, tensors or (), parameters, names, rows, options, classes, texts, use)
        if not tensors and not windows and use is model.use:
            self._declare(key, known, sent)
        return Draft(known, sent, message_bytes, windows, slow)

    def _declare(self, key: bytes, known: _Known, sent: Mapping[str, Sent]) -> None:
        if 0 < len(key) <= _MAX_FORM_BYTES and all(isinstance(tensor.contents, bytes) for tensor in sent.values()):
            _keep(self._declared, key, (known, {name: tensor._replace(contents=b"") for name, tensor in sent.items()}))

    def _declared_before(self, contents: Sequence[bytes], key: bytes, model: Model) -> Draft | None:
        known, declared = self._declared.get(key, (None, {}))
        if not known or known[1] is not model or len(contents) != len(declared):
            return None
        sent = {name: tensor.again(data) for (name, tensor), data in zip(declared.items(), contents, strict=True)}
        return Draft(known, sent, len(key), {}, _is_slow(model, sent))

    def _head(self, name: str) -> Model:
        """Return the model that a request names as its head, as name or name:version; its errors speak of the head."""
        model, _, version = name.partition(":")
        try:
            return self._repository.ready(model, version)[1]
        except RequestError as error:
            subject, given = f"head {name!r}", error.given
            raise type(error)(subject, given=given, expected=error.expected, fix=error.fix) from None

    def remember(self, key: bytes, form: Form) -> None:
        """Keep the form of a request, if it determines how to read its raw contents."""
        if form.tensors and len(key) <= _MAX_FORM_BYTES:
            _keep(self._forms, key, form)


def _keep(forms: dict[bytes, T], key: bytes, form: T) -> None:
    if len(forms) >= _MAX_FORMS:
        forms.clear()
    forms[key] = form


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
    request: pb.ModelInferRequest, contents: Sequence[bytes], inputs: Collection[str], largest: Mapping[str, np.float32]
) -> tuple[_Tensor, ...] | None:
    """Return how to read the graph's ``inputs`` in further requests of a form; None if each needs validation."""
    if len(contents) != len(request.inputs) or {tensor.name for tensor in request.inputs} != set(inputs):
        return None  # typed contents, shared memory, or a text that becomes other inputs
    tensors = []
    for tensor, data in zip(request.inputs, contents, strict=True):
        if tensor.datatype in ("BOOL", "BYTES") or tensor.parameters:
            return None
        dtype, limit = WIRE_TYPES[tensor.datatype], largest.get(tensor.name)
        tensors.append(_Tensor(tensor.name, dtype, tuple(tensor.shape), len(data), limit))
    return tuple(tensors)


def _is_slow(model: Model, sent: Mapping[str, Sent]) -> bool:
    """Return whether decoding, preprocessing and checking the values takes more than two milliseconds or so."""
    size_bytes = elements = 0
    for tensor in sent.values():
        size_bytes += tensor.size_bytes
        elements += tensor.elements
    if model.step and model.step.inputs[0].name in sent and model.step.slow(size_bytes):
        return True
    if elements > _INLINE_ELEMENTS:
        return True
    checked = model.checks_values or model.largest
    return size_bytes > _INLINE_BYTES and bool(checked or any(tensor.copied for tensor in sent.values()))
