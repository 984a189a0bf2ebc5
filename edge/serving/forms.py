"""Checks of requests, and the cache of validated forms: everything of a request but its id and its tensors' values."""

from __future__ import annotations

from collections.abc import Callable, Collection, Hashable, Mapping, Sequence
from contextlib import suppress
from typing import Final, NamedTuple, TypeVar

import numpy as np

from edge.bundles.boxes import Picture
from edge.bundles.preprocess import GoOn, always
from edge.bundles.spans import Context
from edge.datatypes import WIRE_TYPES, Array
from edge.datatypes import byte_size as tensor_bytes
from edge.errors import InvalidRequest, ModelNotReady, Raw, RequestError
from edge.pb import inference_pb2 as pb
from edge.programs.program import Options
from edge.protocol import THRESHOLD, TOP_K
from edge.repository.entry import Entry
from edge.repository.model import Model
from edge.repository.repository import Repository
from edge.scheduling.batching import byte_size, within
from edge.scheduling.job import UseCount
from edge.serving.parameters import N_BEST, Parameters, parse, with_logprobs
from edge.serving.request import UncheckedRequest, request_of
from edge.serving.shared_memory import SharedMemory, TensorRegion, is_shared, tensor_region
from edge.serving.wire import Sent, requested_classes, requested_outputs, sent_inputs

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
    uses: tuple[UseCount, ...]  # of the model, and of a head
    # What the values decide, or their preprocessing:
    size: int = 1  # what the time of its run grows with
    size_bytes: int = 0
    shapes: Hashable = ()  # the key that requests of one run share
    contexts: Sequence[Context] = ()  # whose windows are then the rows
    pictures: Sequence[Picture] = ()  # of the rows, before boxes

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


class _Gone(Exception):
    """Nobody waits for the answer to a request any more."""


class Prepared(NamedTuple):
    """A request that has passed all checks, and the inputs of the graph."""

    form: Form
    inputs: Mapping[str, Array]


class Draft(NamedTuple):
    """A request that has passed the checks of all but its values, which are not decoded yet.

    ``form`` is without what the values decide; ``message_bytes`` are of the message without raw contents, which the
    request holds until its end; ``slow`` says that :meth:`prepare` takes milliseconds, so that no event loop may call
    it.
    """

    form: Form
    sent: Mapping[str, Sent]
    message_bytes: int
    regions: Mapping[str, TensorRegion]
    slow: bool

    def prepare(self, go_on: GoOn = always) -> Prepared:
        """Decode and preprocess the values, on any thread; raise an InvalidRequest if they are wrong.

        ``go_on`` is called before each part that takes long, and raises an error if the client has gone.
        """
        model = self.form.model
        inputs, contexts, pictures = model.prepare({name: tensor.decode() for name, tensor in self.sent.items()}, go_on)
        assembler = model.executors[model.full_tier].assembler
        form = self.form._replace(
            size=assembler.size(inputs),
            size_bytes=byte_size(inputs) + self.message_bytes,
            shapes=assembler.key(inputs),
            contexts=contexts,
            pictures=pictures,
        )
        if contexts:
            form = _with_windows(form, contexts)
        return Prepared(form, inputs)

    def prepare_while(self, is_wanted: Callable[[], bool]) -> Prepared | None:
        """Return as :meth:`prepare`; None if it is not wanted any more, such as of a client that has gone."""

        def go_on() -> None:
            if not is_wanted():
                raise _Gone

        with suppress(_Gone):
            go_on()
            return self.prepare(go_on)
        return None

    def unprepared(self) -> Form:
        """Return the form with the bytes that the request holds until it is prepared."""
        model = self.form.model
        held = self.message_bytes + sum(tensor.held_bytes for tensor in self.sent.values())
        if model.step and model.step.inputs[0].name in self.sent:
            for spec in model.manifest.inputs:
                if spec.name in model.step.graph_inputs and -1 not in spec.shape[1:]:  # as pixels, beside their files
                    held += tensor_bytes(spec.datatype, (self.form.rows, *spec.shape[1:]))
        return self.form._replace(size_bytes=held)


class Forms:
    """Validates requests, and keeps the forms of those that determine all but the values. For the event loop only."""

    def __init__(self, repository: Repository, shared_memory: SharedMemory | None) -> None:
        self._repository, self._shared_memory = repository, shared_memory
        self._forms: dict[bytes, Form] = {}
        # Of requests with texts and others whose values decide more, what their form declares.
        self._declared: dict[bytes, tuple[Form, Mapping[str, Sent]]] = {}
        self._generation = -1

    def find(self, key: bytes, generation: int) -> Form | None:
        """Return the form of a key from :func:`take_apart`; a new generation of the repository empties the cache."""
        if generation != self._generation:
            self._generation = generation
            self._forms.clear()
            self._declared.clear()
        return self._forms.get(key)

    def check(
        self,
        message: pb.ModelInferRequest | UncheckedRequest,
        contents: Sequence[bytes],
        key: bytes,
        entry: Entry,
        model: Model,
    ) -> Draft:
        """Check all but the values of a request to a model, of which the caller has taken a use; take one of its head.

        ``contents`` and ``key`` are of :func:`take_apart`. The time does not grow with the number of elements. The
        first check that a request does not pass raises a RequestError, and no use is taken.
        """
        if draft := self._declared_before(contents, key, model):
            return draft
        request = message if isinstance(message, UncheckedRequest) else request_of(message)
        parameters = parse(request.parameters)
        names = requested_outputs(request.outputs, model.outputs, model.on_request)
        names, text = with_logprobs(names, parameters.text, model.by_token)
        classes = requested_classes(request.outputs, model.outputs)
        regions = {
            name: tensor_region(values, self._shared_memory, f"output {name!r}", write=True)
            for name, values in request.outputs
            if is_shared(values)
        }
        sent = sent_inputs(request.inputs, contents, model.inputs, self._shared_memory)
        rows = model.check_shapes({name: tensor.shape for name, tensor in sent.items()})
        if model.spans or model.boxes or parameters.n_best or parameters.threshold is not None:
            names = _with_made(model, names, [output.name for output in request.outputs], sent, parameters)
        slow = _is_slow(model, sent)
        tensors: tuple[_Tensor, ...] | None = None
        if key and not regions and not slow:
            tensors = _tensors_of(sent, {spec.name for spec in model.manifest.inputs}, model.largest)
        message_bytes = len(key) or sum(tensor.held_bytes for tensor in sent.values() if tensor.copied)
        options = model.options(parameters.loop, text)
        uses: tuple[UseCount, ...] = (model.use,)
        if parameters.head:
            head = self._head(parameters.head)
            options = model.apply_head(options, head, parameters.alpha)
            take(head)
            uses = (model.use, head.use)
        if model.spans or model.boxes:
            _check_unranked(model, classes)
        texts = bool(classes) or not model.texts.isdisjoint(names)
        form = Form(entry, model, tensors or (), parameters, names, rows, options, classes, texts, uses)
        raw = all(isinstance(tensor.contents, bytes) for tensor in sent.values())
        if raw and not tensors and not regions and len(uses) == 1 and 0 < len(key) <= _MAX_FORM_BYTES:
            _keep(self._declared, key, (form, {name: tensor._replace(contents=b"") for name, tensor in sent.items()}))
        return Draft(form, sent, message_bytes, regions, slow)

    def _declared_before(self, contents: Sequence[bytes], key: bytes, model: Model) -> Draft | None:
        form, declared = self._declared.get(key, (None, {}))
        if not form or form.model is not model or len(contents) != len(declared):
            return None
        sent = {name: tensor.again(data) for (name, tensor), data in zip(declared.items(), contents, strict=True)}
        return Draft(form, sent, len(key), {}, _is_slow(model, sent))

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


def _with_made(
    model: Model, names: list[str], requested: Sequence[str], sent: Collection[str], parameters: Parameters
) -> list[str]:
    """Return the outputs to send: without any ``requested``, answers and boxes of texts and pictures, else the graph's.

    Raise an InvalidRequest for answers to tokens, which have no text, for boxes of pixels, whose picture has no known
    size, and for parameters of answers and boxes where there are none.
    """
    step = model.spans or model.boxes
    made = [spec.name for spec in step.results] if step else []
    sources = [spec.name for spec in model.step.inputs] if model.step else []
    is_source = bool(made) and sources[0] in sent
    if not requested:
        names = [name for name in names if (name in made) == is_source]
    found = [name for name in names if name in made]
    if found and not is_source:
        given, what = ("pixels", "pictures") if model.boxes else ("token ids", "texts")
        subject, fix = f"output {found[0]!r} of {model.name!r}", f"Send the {what}, or leave the output out."
        raise InvalidRequest(subject, given=Raw(given), expected=" and ".join(map(repr, sources)), fix=fix)
    for name, value, of, what in (
        (N_BEST, parameters.n_best, model.spans, "answers to questions"),
        (THRESHOLD, parameters.threshold, model.boxes, "boxes"),
        (TOP_K, parameters.text.get(TOP_K) if model.boxes else None, model.boxes, "boxes"),
    ):
        if value is not None and not (of and found):
            subject, expected = f"parameter {name!r} of {model.name!r}", f"none: the request gets no {what}"
            raise InvalidRequest(subject, given=value, expected=expected, fix="Leave it out.")
    return names


def _check_unranked(model: Model, classes: Mapping[str, int]) -> None:
    step, parameter, what = (model.spans, N_BEST, "answers") if model.spans else (model.boxes, TOP_K, "boxes")
    for spec in step.results if step else ():
        if spec.name in classes:
            subject, fix = f"classes of output {spec.name!r} of {model.name!r}", f"Send the parameter {parameter!r}."
            raise InvalidRequest(subject, given=classes[spec.name], expected=f"none: {what} are ranked", fix=fix)


def _with_windows(form: Form, contexts: Sequence[Context]) -> Form:
    """Return a form whose rows are the windows; refuse outputs of the graph unless each context has one window."""
    rows = sum(len(context.windows) for context in contexts)
    logits = [name for name in form.output_names if any(spec.name == name for spec in form.model.manifest.outputs)]
    if logits and rows > form.rows:
        step = form.model.step
        given, expected = Raw(f"{rows} windows of tokens"), f"{form.rows}, one for each row, beside the logits"
        fix = f"Shorten the text in {step.inputs[1].name!r}, or request answers alone." if step else ""
        raise InvalidRequest(f"output {logits[0]!r} of {form.model.name!r}", given=given, expected=expected, fix=fix)
    held = sum(len(context.text) + context.offsets.nbytes for context in contexts)
    return form._replace(rows=rows, size_bytes=form.size_bytes + held)


def take(model: Model) -> None:
    """Take a use of a model; raise a ModelNotReady if it is being unloaded."""
    if not model.use.take():
        fix = "Send the request again later."
        raise ModelNotReady(f"model {model.name!r}", given="UNLOADING", expected="READY", fix=fix)


def take_apart(request: pb.ModelInferRequest | UncheckedRequest) -> tuple[Sequence[bytes], bytes]:
    """Remove id and raw contents from a message; return the contents and the serialized rest, the key of its form.

    Serializing costs a few microseconds. The key is empty without raw contents: then the rest holds values.
    """
    if isinstance(request, UncheckedRequest):
        return request.contents, request.key
    contents = list(request.raw_input_contents)
    request.ClearField("raw_input_contents")
    request.ClearField("id")
    return contents, request.SerializeToString(deterministic=True) if contents else b""


def _tensors_of(
    sent: Mapping[str, Sent], inputs: Collection[str], largest: Mapping[str, np.float32]
) -> tuple[_Tensor, ...] | None:
    """Return how to read the graph's ``inputs`` in further requests of a form; None if each needs validation."""
    tensors = []
    for name, tensor in sent.items():
        if name not in inputs or tensor.datatype in ("BOOL", "BYTES") or not isinstance(tensor.contents, bytes):
            return None  # a text that becomes other inputs, typed contents, or shared memory
        dtype = WIRE_TYPES[tensor.datatype]
        tensors.append(_Tensor(name, dtype, tensor.shape, tensor.size_bytes, largest.get(name)))
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
