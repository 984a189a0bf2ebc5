"""The one path of an inference request, whatever transport it came by: check, queue, respond, account."""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from collections.abc import Mapping, Sequence
from typing import Final

from edge.datatypes import Array
from edge.errors import DeadlineExceeded, ModelNotReady, Overloaded
from edge.instruments.logs import ABOUT, About
from edge.pb import inference_pb2 as pb
from edge.programs.program import TIER as TIER_FACT
from edge.repository.entry import Entry
from edge.repository.model import Model
from edge.repository.repository import Repository
from edge.scheduling.batching import byte_size
from edge.scheduling.job import Answer, Job, expired
from edge.scheduling.scheduler import Scheduler
from edge.scheduling.tier_executor import TierExecutor
from edge.scheduling.tier_selection import PINNED, Demand
from edge.security.access import CALLER
from edge.security.rate import RateLimit
from edge.serving.call import Call, Reply
from edge.serving.forms import Form, Forms, take_apart, tensors_of
from edge.serving.parameters import TIER, TIER_REASON, parse
from edge.serving.responses import ResponseBuilder
from edge.serving.shared_memory import SharedMemory, Window
from edge.serving.shared_tensors import output_windows
from edge.serving.traces import CARRIER, Traces
from edge.serving.wire import decode_inputs, requested_outputs

log = logging.getLogger(__name__)

#: A transport's timer may be this early.
_CLOCK_SECONDS: Final = 0.005
_STAGES: Final = ("queue_ns", "compute_input_ns", "compute_infer_ns", "compute_output_ns", "request_ns")


class InferenceService:
    """Answers inference requests. It belongs to one event loop, in which it must be made.

    Args:
        repository: the models.
        scheduler: where they compute.
        default_timeout_seconds: for requests that bring no deadline of their own; None lets them wait for ever.
        shared_memory: where tensors may be; None where that is not allowed.
        limit: how often each caller may send a request; None sets no limit.
        traces: where requests are traced; None traces none.
    """

    def __init__(
        self,
        repository: Repository,
        scheduler: Scheduler,
        *,
        default_timeout_seconds: float | None = None,
        shared_memory: SharedMemory | None = None,
        limit: RateLimit | None = None,
        traces: Traces | None = None,
    ) -> None:
        self._repository = repository
        self._scheduler = scheduler
        self._default_timeout = default_timeout_seconds
        self._shared_memory = shared_memory
        self._limit = limit
        self._traces = traces
        self._responses = ResponseBuilder()
        self._forms = Forms()
        self._loop = asyncio.get_running_loop()
        self._ended: deque[Call] = deque()
        self._waking = False
        self._deliver = self._delivered  # one object, so that the jobs of a run are delivered together

    @property
    def limited(self) -> bool:
        """Whether there is a limit for each caller, so that callers have to be named."""
        return self._limit is not None

    @property
    def traced(self) -> bool:
        """Whether requests are traced."""
        return self._traces is not None

    async def infer(self, request: pb.ModelInferRequest, deadline: float | None) -> pb.ModelInferResponse:
        """Answer one request. Cancelling this drops it wherever it waits.

        Args:
            request: the client's message; parts of it are taken out.
            deadline: ``time.monotonic()`` seconds at which the client stops waiting; None if it waits for ever.

        Raises:
            RequestError: it cannot be answered. It is counted already.
        """
        outcome: asyncio.Future[pb.ModelInferResponse | Exception] = self._loop.create_future()

        def reply(end: pb.ModelInferResponse | Exception) -> None:
            if not outcome.done():  # the task was cancelled in this turn of the loop
                outcome.set_result(end)

        ABOUT.set(About(request.model_name, request.id))  # of the task, in which the transport logs
        call = self.start(request, deadline, reply)
        try:
            response = await outcome
        except asyncio.CancelledError:
            if call:
                self.cancel(call)
            raise
        finally:
            del call
        if isinstance(response, Exception):
            try:
                raise response
            finally:
                # The error holds its traceback, that this frame, and this frame must not hold the error in turn: such
                # a circle would keep the request's tensors until Python's collector came by.
                del response, outcome, reply
        return response

    def start(self, request: pb.ModelInferRequest, deadline: float | None, reply: Reply) -> Call | None:
        """Check a request, preprocess it and queue it.

        Args:
            request: the client's message; parts of it are taken out.
            deadline: ``time.monotonic()`` seconds at which the client stops waiting; None if it waits for ever.
            reply: receives the response or the error, once, on the event loop, maybe before this returns.

        Returns:
            What :meth:`cancel` takes; None where the reply was given already.
        """
        request_id = request.id
        try:
            if self._limit:
                self._limit.take(CALLER.get())
            call = self._call(request)
            call.reply = reply
            limit_seconds = self._set_deadline(call, deadline)
            try:
                ended = self._submit(call)
            except BaseException as error:
                self._scheduler.forget(call)
                self._refused(call.entry, error, request.model_name, request_id, call.started_ns)
                raise
        except Exception as error:
            _fail(reply, error, request.model_name, request_id)
            return None
        finally:
            del reply  # which may hold an error, and that this frame by its traceback
        if ended:
            self._finish(call)
            return None
        if limit_seconds is not None:
            call.timer = self._loop.call_later(limit_seconds, self._timed_out, call)
        return call

    def cancel(self, call: Call) -> None:
        """Drop a call whose answer nobody waits for any more; it gets no reply."""
        if call.reply is not None:
            self._end(call, "Cancelled")

    def _call(self, request: pb.ModelInferRequest) -> Call:
        """Return the call of a request that has passed all checks.

        Raises:
            RequestError: the request cannot be answered. It is counted already.
        """
        started_ns = time.perf_counter_ns()
        request_id, contents, key = take_apart(request)
        windows: Mapping[str, Window] = {}
        form = self._forms.find(key, self._repository.generation) if key else None
        inputs: Mapping[str, Array] | None = form.inputs(contents) if form else None
        if form is None or inputs is None or not form.model.use.take():
            form, inputs, windows = self._checked(request, request_id, contents, key, started_ns)
        model = form.model
        call = Call(
            model.executors[model.full_tier],
            inputs,
            form.rows,
            deliver=self._deliver,
            priority=form.parameters.priority,
            use=model.use,
            statistics=form.entry.statistics,
            size=form.size,
            size_bytes=form.size_bytes,
            shapes=form.shapes,
        )
        call.request_id, call.entry, call.model, call.parameters = request_id, form.entry, model, form.parameters
        call.output_names, call.windows, call.started_ns = form.output_names, windows, started_ns
        call.tier_reason, call.timer = PINNED, None
        call.trace_context = CARRIER.get() if self._traces else None
        return call

    def _checked(
        self, request: pb.ModelInferRequest, request_id: str, contents: Sequence[bytes], key: bytes, started_ns: int
    ) -> tuple[Form, Mapping[str, Array], Mapping[str, Window]]:
        """Check a request of a form that is not known yet, and remember its form where that says everything.

        Returns:
            The form, the inputs of the graph, and the shared memory of its outputs. The model is in use.
        """
        entry, model = self._taken(request)
        try:
            parameters = parse(request)
            names = requested_outputs(request, model.outputs)
            windows = output_windows(request, self._shared_memory)
            inputs, rows = model.prepare(decode_inputs(request, contents, model.inputs, self._shared_memory))
            tensors = tensors_of(request, contents, inputs) if key and not windows else None
            assembler = model.executors[model.full_tier].assembler
            known = (rows, assembler.size(inputs), byte_size(inputs), assembler.key(inputs))
            form = Form(entry, model, tensors or (), parameters, names, *known)
        except BaseException as error:
            model.use.give_back()
            self._refused(entry, error, request.model_name, request_id, started_ns)
            raise
        if tensors:
            self._forms.remember(key, form)
        return form, inputs, windows

    def _taken(self, request: pb.ModelInferRequest) -> tuple[Entry, Model]:
        """Return the model of a request, which is not closed until its use is given back."""
        entry, model = self._repository.ready(request.model_name, request.model_version)
        if not model.use.take():
            fix = "Send the request again later."
            raise ModelNotReady(f"model {model.name!r}", given="UNLOADING", expected="READY", fix=fix)
        return entry, model

    def _set_deadline(self, call: Call, deadline: float | None) -> float | None:
        """Set when a call ends: at the client's deadline, or at the server's limit where that comes first.

        Returns:
            The seconds after which the server has to end it; None where the client does so.
        """
        call.deadline = deadline
        limit = call.parameters.timeout_seconds
        if limit is None:
            limit = self._default_timeout
        if limit is not None:
            at = time.monotonic() + limit
            if deadline is None or at < deadline:
                call.deadline = at
                return limit
        return None

    def _submit(self, call: Call) -> bool:
        """Choose the tier of a call and give it to the scheduler; return whether it has ended already."""
        parameters = call.parameters
        if len(call.model.executors) > 1 or parameters.tier or parameters.policy:
            choice = call.model.selector.choose(parameters.tier, parameters.policy, lambda: self._demand(call))
            call.executor, call.tier_reason = choice.executor, choice.reason
        call.queued_ns = time.perf_counter_ns()
        call.timings.compute_input_ns = call.queued_ns - call.started_ns
        return self._scheduler.submit(call)

    def _demand(self, call: Call) -> Demand:
        now = time.monotonic()

        def finish(executor: TierExecutor) -> float:
            call.executor = executor
            return self._scheduler.finish_seconds(call)

        left = None if call.deadline is None else call.deadline - now
        return Demand(now, call.size, left, finish, self._scheduler.queue.fullness, self._scheduler.instances)

    def _delivered(self, calls: Sequence[Job]) -> None:
        """Take calls that have ended, on the thread that ended them, and wake the event loop once for all of them."""
        self._ended.extend(calls)  # type: ignore[arg-type]  # this service makes no other jobs
        if not self._waking:
            self._waking = True
            try:
                self._loop.call_soon_threadsafe(self._finish_all)
            except RuntimeError:  # the loop is closed, and nobody waits any more
                log.debug("%d answers came after the end of the event loop", len(calls))

    def _finish_all(self) -> None:
        self._waking = False  # before the first is taken: what comes after the last wakes the loop again
        call = None
        while self._ended:
            call = self._ended.popleft()
            if call.reply is not None:
                try:
                    self._finish(call)
                except Exception:  # it must harm no other call
                    log.exception("an answer could not be given")
        if call and call.computed_ns:  # the last of them waited longest
            self._scheduler.returned((time.perf_counter_ns() - call.computed_ns) / 1e9)

    def _finish(self, call: Call) -> None:
        """Give a call its reply, and count it."""
        answer, reply = call.answer, call.reply
        assert reply is not None
        error = call.take_error()
        if answer:
            begun_ns = time.perf_counter_ns()
            try:
                tier = _answering_tiers(call, answer) if len(call.model.tiers) > 1 else ""
                response = self._responses.build(
                    call.model,
                    answer,
                    call.output_names,
                    request_id=call.request_id,
                    tier=tier or call.executor.tier,
                    windows=call.windows,
                )
            except Exception as wrong:
                error = wrong
            else:
                self._measure(call, response, begun_ns, tier)
                try:
                    reply(response)
                finally:
                    self._account(call, tier)  # what reads these numbers comes after this on the same thread
                return
        assert error is not None
        self._end(call, type(error).__name__)
        if not isinstance(error, Exception):  # a KeyboardInterrupt in a runtime, say, ends no event loop
            error = RuntimeError(f"{type(error).__name__} in a run")
        _fail(reply, error, call.model.name, call.request_id)
        del error, reply  # its traceback may lead to this frame, which must not hold it in turn

    def _measure(self, call: Call, response: pb.ModelInferResponse, begun_ns: int, tier: str) -> None:
        """Take the times of an answered call, and add those that it requested to its response."""
        if call.timer:
            call.timer.cancel()
        call.reply = None
        timings = call.timings
        now_ns = time.perf_counter_ns()
        timings.compute_output_ns += now_ns - begun_ns
        timings.request_ns = now_ns - call.started_ns
        if tier:
            response.parameters[TIER].string_param = tier
            response.parameters[TIER_REASON].string_param = call.tier_reason
        if call.parameters.timings:
            for stage in _STAGES:
                response.parameters[stage].int64_param = getattr(timings, stage)

    def _account(self, call: Call, tier: str) -> None:
        """Count an answered call."""
        call.entry.statistics.succeeded(call, tier)
        if self._traces:
            self._traces.answered(call, tier)

    def _timed_out(self, call: Call) -> None:
        reply = call.reply
        if reply is not None:
            self._end(call, DeadlineExceeded.__name__)
            _fail(reply, expired(time.perf_counter_ns() - call.started_ns), call.model.name, call.request_id)

    def _end(self, call: Call, reason: str) -> None:
        """Count a call that ends without an answer, and drop it if it waits still.

        Args:
            call: the call.
            reason: the class of its error, or ``Cancelled``. A transport cancels what runs out of time too; that counts
                as DeadlineExceeded.
        """
        call.reply = None
        if call.timer:
            call.timer.cancel()
        if not call.ended:
            self._scheduler.cancel(call)
        place = ""
        if reason == "Cancelled" and call.deadline is not None and time.monotonic() > call.deadline - _CLOCK_SECONDS:
            reason = DeadlineExceeded.__name__
        if reason in ("Cancelled", DeadlineExceeded.__name__):
            place = call.place
        if call.computed_ns and reason == DeadlineExceeded.__name__:
            self._scheduler.returned((time.perf_counter_ns() - call.computed_ns) / 1e9)  # at least
        call.entry.statistics.failed(reason, time.perf_counter_ns() - call.started_ns, place)
        if self._traces:
            self._traces.failed(call.model.name, call.request_id, call.started_ns, reason, call.trace_context)

    def _refused(self, entry: Entry, error: BaseException, name: str, request_id: str, started_ns: int) -> None:
        """Count a request that is refused before it is queued."""
        if isinstance(error, Exception):
            place = error.cause if isinstance(error, Overloaded) else _refused_at(error)
            entry.statistics.failed(type(error).__name__, time.perf_counter_ns() - started_ns, place)
            if self._traces:
                self._traces.failed(name, request_id, started_ns, type(error).__name__, CARRIER.get())


def _answering_tiers(call: Call, answer: Answer) -> str:
    """Return the tier that answered, or with a comma between them those that answered some rows, the leaner first."""
    rows = answer.facts.get(TIER_FACT)
    if rows is None:
        return call.executor.tier
    names = set(rows.tolist())
    return ",".join([name for name in reversed(call.model.tiers) if name in names])


def _fail(reply: Reply, error: Exception, model: str, request_id: str) -> None:
    """Give an error to the client; what is logged of it names the request."""
    token = ABOUT.set(About(model, request_id))
    try:
        reply(error)
    finally:
        ABOUT.reset(token)


def _refused_at(error: Exception) -> str:
    return "refused" if isinstance(error, DeadlineExceeded) else ""
