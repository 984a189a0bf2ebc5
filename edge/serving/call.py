"""One ModelInfer in progress: the job, the response that is built from its answer, and the encoding of that."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable, Collection, Mapping, Sequence
from types import MappingProxyType
from typing import Any, Final, NamedTuple, TypeVar

import numpy as np

from edge.bundles import boxes, spans
from edge.bundles.steps import SpanPostprocess
from edge.datatypes import DATATYPES, WIRE_TYPES, Array, datatype_of
from edge.errors import InvalidRequest, Raw, RunnerError
from edge.instruments.logs import NonfiniteWarnings
from edge.instruments.snapshot import End, LoopEnd, TextEnd
from edge.pb import inference_pb2 as pb
from edge.programs.generate import FIRST_TOKEN_NS, LAST_TOKEN_NS, PROMPT_TOKENS
from edge.programs.loop import RESIDUAL
from edge.programs.program import TIER, TOKENS
from edge.protocol import (
    BY_BUDGET,
    BY_DEADLINE,
    BY_LENGTH,
    BY_STOP,
    BY_TOLERANCE,
    LOOPS,
    STOPPED,
    STREAM_PARTIAL,
    TOP_K,
)
from edge.repository.model import Model
from edge.scheduling.job import MOST_PARTIAL_ANSWERS, Job, JobResult
from edge.scheduling.tier_selection import PINNED
from edge.serving.forms import Form
from edge.serving.parameters import TIER as TIER_PARAMETER
from edge.serving.parameters import TIER_REASON
from edge.serving.request import UncheckedRequest
from edge.serving.shared_memory import TensorRegion, describe
from edge.serving.wire import to_raw

T = TypeVar("T")
#: Why a row of a loop or a text stopped. A response names the first of its rows' reasons.
_REASONS: Final = (BY_DEADLINE, BY_BUDGET, BY_LENGTH, BY_TOLERANCE, BY_STOP)

_STAGES: Final = ("queue_ns", "compute_input_ns", "compute_infer_ns", "compute_output_ns", "request_ns")
#: Elements whose texts are written in a few milliseconds.
_INLINE_ELEMENTS: Final = 4096
#: Logits that take as long to search as an answer that is found takes to write.
_LOGITS_OF_ANSWER: Final = 4


class Arrival(NamedTuple):
    """A request that has arrived: who waits for the response, and since when by ``time.perf_counter_ns()``.

    ``reply`` receives the encoded response, or the error in its place, once, on the event loop. ``on_partial`` is
    called there when an answer is added to empty ``partials``; it is None if the RPC has one response. The wait for its
    models to be loaded, ``loading_ns``, counts in no stage but the whole request.
    """

    request_id: str
    reply: Callable[[Any], None]
    encoder: Encoder
    on_partial: Callable[[], None] | None
    started_ns: int
    carrier: Any  # for :mod:`edge.serving.traces`
    loading_ns: int = 0


class Received(NamedTuple):
    """A request that has arrived, after :func:`edge.serving.forms.take_apart`, and the client's deadline."""

    request: pb.ModelInferRequest | UncheckedRequest
    contents: Sequence[bytes]
    key: bytes
    deadline: float | None
    arrival: Arrival


class Call(Job):
    """A job of the scheduler that answers a client."""

    __slots__ = ("arrival", "end", "form", "over", "regions", "tier_reason", "timer")

    def __init__(
        self,
        form: Form,
        inputs: Mapping[str, Array],
        arrival: Arrival,
        *,
        deadline: float | None,
        regions: Mapping[str, TensorRegion],
        deliver: Callable[[Sequence[Job]], None],
        publish: Callable[[Job], None],
    ) -> None:
        model, options = form.model, form.options
        super().__init__(
            model.executors[model.full_tier],
            inputs,
            form.rows,
            deliver=deliver,
            publish=publish,
            options=options.of_one_request() if options.sampling else options,
            partials=deque(maxlen=MOST_PARTIAL_ANSWERS) if form.parameters.stream_partial else None,
            priority=form.parameters.priority,
            deadline=deadline,
            holds=form.uses,
            statistics=form.entry.statistics,
            size=form.size,
            size_bytes=form.size_bytes + len(arrival.request_id),
            shapes=form.shapes,
        )
        self.form, self.arrival, self.regions = form, arrival, regions
        self.tier_reason = PINNED  # why the scheduler chose the tier
        self.over = False  # whether it was answered or cancelled
        # For the server's time limit; None where the client's deadline comes first.
        self.timer: asyncio.TimerHandle | None = None
        self.end: End | None = None  # how a request to an iterative program ended

    def check_stream(self) -> None:
        """Raise an InvalidRequest if it cannot have the partial answers that it asks for."""
        if self.arrival.on_partial is None:
            expected, fix = "a request in a stream", "Use ModelStreamInfer."
        elif not self.executor.iterative:
            expected, fix = f"no such parameter: {self.form.model.name!r} has one step", "Leave it out."
        elif self.regions:
            expected, fix = "no outputs in shared memory beside it", "Take the outputs by message."
        else:
            return
        raise InvalidRequest(f"parameter {STREAM_PARTIAL!r}", expected=expected, fix=fix)

    def answering_tiers(self, answer: JobResult) -> str:
        """Return the tier that answered; if several answered rows, their names with commas, the leanest first."""
        rows = answer.facts.get(TIER)
        if rows is None:
            return self.executor.tier
        names = set(rows.tolist())
        return ",".join([name for name in reversed(self.form.model.tiers) if name in names])

    def end_of(self, answer: JobResult) -> End:
        """Return how the rows of a loop or a text ended."""
        facts, tier = answer.facts, self.executor.tier
        stopped = facts[STOPPED].tolist()
        reason = next(reason for reason in _REASONS if reason in stopped)
        if RESIDUAL in facts:
            return LoopEnd(tier, int(facts[LOOPS].max()), float(facts[RESIDUAL].max()), reason)
        tokens, first_ns, last_ns = facts[TOKENS], facts[FIRST_TOKEN_NS], facts[LAST_TOKEN_NS]
        token_ns = int((last_ns - first_ns).sum() / max(int(tokens.sum()) - len(tokens), 1))
        first_token_ns = int(first_ns.mean()) - self.arrival.started_ns
        return TextEnd(tier, int(facts[PROMPT_TOKENS].sum()), int(tokens.sum()), first_token_ns, token_ns, reason)


class InferResponse(NamedTuple):
    """The response to a request: the tensors to send, in order, some of them to regions of shared memory.

    ``parameters`` returns those of the response, once the outputs are encoded, because it times that.
    """

    model: Model
    id: str
    outputs: Mapping[str, Array]
    regions: Mapping[str, TensorRegion]
    parameters: Callable[[], dict[str, Any]]


class ResponseBuilder:
    """Builds responses, and logs a warning for outputs that hold a NaN or an infinity."""

    def __init__(self) -> None:
        self._warnings = NonfiniteWarnings()

    def build(
        self,
        form: Form,
        answer: JobResult,
        request_id: str,
        tier: str,
        regions: Mapping[str, TensorRegion] = MappingProxyType({}),
        parameters: Callable[[], dict[str, Any]] = dict,
    ) -> InferResponse:
        """Return the response, with the outputs that the request wants; no label is made of a NaN or an infinity.

        Of the outputs in the form's ``classes``, it has so many of the largest values, as texts.
        """
        model, names, outputs = form.model, form.output_names, answer.outputs
        if answer.nonfinite:  # in any output of the graph: the logits of a label may not be sent
            self._warnings.warn(model.name, tier, answer.nonfinite)
        if model.derived or form.classes:
            outputs = dict(outputs)
            for name, derived in model.derived.items():
                if name in names:
                    if derived.reads in answer.nonfinite and (
                        derived.output.datatype == "BYTES" or name in form.classes
                    ):
                        raise _no_order(model, name, derived.reads)
                    outputs[name] = derived.compute(outputs[derived.reads])
            for name, count in form.classes.items():
                if name in answer.nonfinite:
                    raise _no_order(model, name, name)
                rows = len(outputs[name]) if model.manifest.max_batch_size else 0
                outputs[name] = largest_classes(outputs[name], count, model.labels.get(name, ()), rows)
        step = model.spans or model.boxes
        if step and (form.contexts or form.pictures) and any(spec.name in names for spec in step.results):
            for name in step.reads:
                if name in answer.nonfinite:
                    raise _no_order(model, step.results[0].name, name)
            logits, others = (answer.outputs[name] for name in step.reads)  # they may be ranked in outputs
            if isinstance(step, SpanPostprocess):
                made = spans.extract(step, logits, others, form.contexts, form.parameters.n_best or 1)
            else:
                threshold = step.threshold if form.parameters.threshold is None else form.parameters.threshold
                top_k = form.parameters.text.get(TOP_K, step.top_k)
                made = boxes.extract(step, logits, others, form.pictures, threshold, top_k)
            outputs = {**outputs, **made}
        return InferResponse(model, request_id, {name: outputs[name] for name in names}, regions, parameters)

    def encoded(self, call: Call, answer: JobResult) -> Any:
        """Return the encoded response to a call, with the tier and the timings that it requests; on any thread."""
        form, timings, begun_ns = call.form, call.timings, time.perf_counter_ns()
        tier = call.answering_tiers(answer) if len(form.model.tiers) > 1 else ""

        def parameters() -> dict[str, Any]:
            values: dict[str, Any] = {TIER_PARAMETER: tier, TIER_REASON: call.tier_reason} if tier else {}
            if STOPPED in answer.facts:
                call.end = call.end_of(answer)
                values[STOPPED] = call.end.stopped
                if isinstance(call.end, TextEnd):
                    values[PROMPT_TOKENS] = call.end.prompt_tokens
            now_ns = time.perf_counter_ns()
            timings.compute_output_ns += now_ns - begun_ns
            timings.request_ns = now_ns - call.arrival.started_ns
            if form.parameters.timings:
                values |= {stage: getattr(timings, stage) for stage in _STAGES}
            return values

        tier_name, request_id = tier or call.executor.tier, call.arrival.request_id
        response = self.build(form, answer, request_id, tier_name, call.regions, parameters)
        return call.arrival.encoder.encode(response)


def _no_order(model: Model, name: str, reads: str) -> RunnerError:
    return RunnerError(
        f"output {name!r} of {model.name!r}",
        given=Raw(f"a NaN or an infinity in {reads!r}"),
        expected="finite values to choose from",
        fix=f"Request {reads!r} alone to see them; usual causes are inputs out of range and FP16.",
    )


def largest_classes(values: Array, count: int, labels: Sequence[str], rows: int) -> Array:
    """Return the largest values as ``VALUE:INDEX:LABEL``, the largest first, BYTES [rows, count], or [count] without
    rows.

    Without ``labels`` the last part is left out. There are no more than there are values.
    """
    table = values.reshape(max(rows, 1), -1)
    order = np.argsort(-table.astype(np.float64), axis=1, kind="stable")[:, :count]
    form = "%f" if table.dtype.kind == "f" else "%d"
    texts = np.empty(order.shape, np.object_)
    for cell, index in np.ndenumerate(order):
        label = f":{labels[index]}" if labels else ""
        texts[cell] = f"{form % table[cell[0], index]}:{index}{label}".encode()
    return texts if rows else texts[0]


class Encoder:
    """The encoding of responses: this one leaves them as they are."""

    def check(self, form: Form, regions: Collection[str]) -> None:
        """Raise an InvalidRequest, before the inference, if the outputs that no region takes cannot be encoded."""

    def slow(self, form: Form, answer: JobResult) -> bool:
        """Return whether :meth:`encode` takes milliseconds, so that no event loop may call it."""
        outputs, derived = answer.outputs, form.model.derived
        if form.pictures and form.model.boxes:
            return sum(outputs[name].size for name in form.model.boxes.reads) > _INLINE_ELEMENTS
        if not form.texts:
            return False
        if form.contexts and form.model.spans:
            logits = sum(outputs[name].size for name in form.model.spans.reads)
            answers = len(form.contexts) * (form.parameters.n_best or 1)
            return logits + _LOGITS_OF_ANSWER * answers > _INLINE_ELEMENTS
        sizes = [array.size for array in outputs.values() if array.dtype.kind == "O"]
        sizes += [outputs[label.reads].size for label in derived.values() if label.output.datatype == "BYTES"]
        sizes += [outputs[name if name in outputs else derived[name].reads].size for name in form.classes]
        return sum(sizes) > _INLINE_ELEMENTS

    def encode(self, response: InferResponse) -> Any:
        """Return the encoded response; on any thread."""
        parameters = response.parameters()  # once and now, because they note the end of a text, which is counted next
        return response._replace(parameters=lambda: parameters)


class MessageEncoder(Encoder):
    """Encodes responses as ModelInferResponse, or in a stream as ModelStreamInferResponse."""

    def __init__(self, *, stream: bool = False) -> None:
        self._stream = stream

    def encode(self, response: InferResponse) -> Any:
        """Return the message."""
        if self._stream:
            message = pb.ModelStreamInferResponse()
            _fill(message.infer_response, response)
            return message
        single = pb.ModelInferResponse()
        _fill(single, response)
        return single


MESSAGE: Final = MessageEncoder()


def _fill(message: pb.ModelInferResponse, response: InferResponse) -> None:
    """Set the fields of a message, each output with exactly one raw entry.

    C++ clients index ``raw_output_contents`` without a check, so an output in shared memory has an empty entry.
    """
    model, regions = response.model, response.regions
    message.model_name, message.model_version, message.id = model.name, model.version, response.id
    for name, array in response.outputs.items():
        datatype = DATATYPES.get(array.dtype)
        if datatype:
            raw = array.astype(WIRE_TYPES[datatype], copy=False).tobytes()
        else:  # text, or of another byte order
            datatype = datatype_of(array)
            raw = to_raw(array, datatype)
        tensor = message.outputs.add(name=name, datatype=datatype, shape=array.shape)
        if region := regions.get(name):
            region.write(raw)
            describe(tensor, region, len(raw))
            raw = b""
        message.raw_output_contents.append(raw)
    for name, value in response.parameters().items():
        kind = {bool: "bool_param", str: "string_param"}.get(type(value), "int64_param")
        setattr(message.parameters[name], kind, value)


async def outcome_of(start: Callable[[Callable[[Any], None]], T], cancel: Callable[[T], object]) -> Any:
    """Return what ``start`` makes its argument receive, or raise it if it is an error.

    A cancellation of this is passed on to ``cancel``, with the result of ``start``.
    """
    outcome: asyncio.Future[Any] = asyncio.get_running_loop().create_future()

    def receive(result: Any) -> None:
        if not outcome.done():  # it is when the task was cancelled in this turn of the loop
            outcome.set_result(result)

    started = start(receive)
    try:
        result = await outcome
    except asyncio.CancelledError:
        cancel(started)
        raise
    finally:
        del started
    if isinstance(result, Exception):
        try:
            raise result
        finally:
            # The error's traceback refers to this frame. If the frame also referred to the error, the cycle would keep
            # the request's tensors until the garbage collector runs.
            del result, outcome, receive
    return result
