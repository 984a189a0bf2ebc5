"""The path of an inference request, the same for all transports: check, queue, respond, count."""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Final

from edge.datatypes import Array
from edge.errors import DeadlineExceeded, InvalidRequest, Literally, Overloaded
from edge.instruments.logs import ABOUT, About
from edge.instruments.snapshot import TextEnd
from edge.pb import inference_pb2 as pb
from edge.programs.generate import PROMPT_TOKENS
from edge.protocol import STOPPED, STREAM_PARTIAL
from edge.repository.entry import Entry
from edge.repository.repository import Repository
from edge.scheduling.answers import Answer, PartialAnswers
from edge.scheduling.cache_budget import CacheBudget
from edge.scheduling.job import BothUses, Job, Use, expired
from edge.scheduling.scheduler import Scheduler
from edge.scheduling.tier_executor import TierExecutor
from edge.scheduling.tier_selection import PINNED, Demand
from edge.security.access import CALLER
from edge.security.rate import RateLimit
from edge.serving.call import Call, Reply, Told
from edge.serving.forms import Draft, Form, Forms, Prepared, take, take_apart
from edge.serving.parameters import TIER, TIER_REASON
from edge.serving.request_limits import MOST_NAME_CHARS, check_names
from edge.serving.responses import ResponseBuilder
from edge.serving.shared_memory import SharedMemory, Window
from edge.serving.threads import Threads
from edge.serving.traces import CARRIER, Traces

log = logging.getLogger(__name__)

#: A transport's timer may fire this much too early.
_CLOCK_SECONDS: Final = 0.005
#: A best-effort answer is made in time, and one that is late by less than this factor is better than none.
_LATE_ANSWER: Final = 1.25
_STAGES: Final = ("queue_ns", "compute_input_ns", "compute_infer_ns", "compute_output_ns", "request_ns")


class InferenceService:
    """Answers inference requests. It belongs to the event loop in which it is created.

    Args:
        default_timeout_seconds: the limit for requests without a deadline; None sets none.
        shared_memory: the registered regions; None if the server does not allow shared memory.
        cache: the memory for keys and values that requests may reserve; None sets no limit.

    Attributes:
        limited: whether callers have a rate limit, so that transports must name them.
        threads: for what takes milliseconds, here and in transports.
        traced: whether requests are traced, so that transports must pass their trace context.
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
        cache: CacheBudget | None = None,
    ) -> None:
        self._repository = repository
        self._scheduler = scheduler
        self._default_timeout = default_timeout_seconds
        self._limit = limit
        self.limited = limit is not None
        self._traces = traces
        self._cache = cache
        self.traced = traces is not None
        self._responses = ResponseBuilder()
        self._forms = Forms(repository, shared_memory)
        self._loop = asyncio.get_running_loop()
        self._ended: deque[Call] = deque()
        self._progressed: deque[Call] = deque()  # with partial answers that their readers have not been told of
        self.threads = Threads(scheduler.queue)
        self._waking = False
        self._deliver = self._delivered  # one object, so that the jobs of a run are delivered together

    async def infer(
        self, request: pb.ModelInferRequest, deadline: float | None, told: Told | None = None
    ) -> pb.ModelInferResponse:
        """Answer one request; the arguments are those of :meth:`start`. Cancelling this cancels the request."""
        outcome: asyncio.Future[pb.ModelInferResponse | Exception] = self._loop.create_future()

        def reply(end: pb.ModelInferResponse | Exception) -> None:
            if not outcome.done():  # it is when the task was cancelled in this turn of the loop
                outcome.set_result(end)

        about = About(request.model_name[:MOST_NAME_CHARS], request.id[:MOST_NAME_CHARS])
        ABOUT.set(about)  # of the task, in which the transport logs
        call = self.start(request, deadline, reply, told)
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
                # The error's traceback refers to this frame. If the frame also referred to the error, the cycle would
                # keep the request's tensors until the garbage collector runs.
                del response, outcome, reply
        return response

    def start(
        self, request: pb.ModelInferRequest, deadline: float | None, reply: Reply, told: Told | None = None
    ) -> Call | None:
        """Check, preprocess and queue a request; return the argument for :meth:`cancel`, None after the reply.

        Args:
            request: the client's message; this removes parts of it.
            deadline: the client's deadline, in ``time.monotonic()`` seconds; None without one.
            reply: receives the response or the error, once, on the event loop, possibly before this returns.
            told: receives the call of a request for partial answers whenever :meth:`partial` has a first one; None on
                an RPC with one response.
        """
        request_id = request.id
        try:
            if self._limit:
                self._limit.take(CALLER.get())
            if len(request_id) + len(request.model_name) + len(request.model_version) > MOST_NAME_CHARS:
                request_id = ""  # which would be quoted in logs
                check_names(request)
            call, draft = self._call(request)
            call.reply, call.told = reply, None
            limit_seconds = self._set_deadline(call, deadline)
            try:
                if call.form.parameters.stream_partial:
                    self._stream(call, told)
                ended = False
                if draft:
                    work = partial(_prepared, call, draft)
                    self.threads.submit(call.size_bytes, work, partial(self._resume, call))
                else:
                    ended = self._submit(call)
            except BaseException as error:
                self._scheduler.forget(call)
                self._refused(call.form.entry, error, request.model_name, request_id, call.started_ns)
                raise
        except Exception as error:
            _fail(reply, error, request.model_name[:MOST_NAME_CHARS], request_id)
            return None
        finally:
            del reply  # it may hold an error, whose traceback refers to this frame
        if ended:
            self._finish(call)
            return None
        if limit_seconds is not None:
            limit_seconds *= _LATE_ANSWER if call.best_effort else 1.0
            call.timer = self._loop.call_later(limit_seconds, self._timed_out, call)
        return call

    def cancel(self, call: Call) -> None:
        """Cancel a call; it gets no reply."""
        if call.reply is not None:
            self._end(call, "Cancelled")

    def partial(self, call: Call) -> pb.ModelInferResponse | None:
        """Return the next partial answer of a call, also after its reply; None if none waits."""
        answer = call.partials.take() if call.partials else None
        if answer is None:
            return None
        form, identity = call.form, call.request_id
        return self._responses.build(
            form.model, call.unsent(answer), form.output_names, request_id=identity, tier=call.executor.tier, windows={}
        )

    def _call(self, request: pb.ModelInferRequest) -> tuple[Call, Draft | None]:
        """Return the call of a request that passes all checks; count one that does not.

        One whose values take long to prepare comes with its draft, and without its inputs.
        """
        started_ns = time.perf_counter_ns()
        request_id, contents, key = take_apart(request)
        draft: Draft | None = None
        windows: Mapping[str, Window] = {}
        form = self._forms.find(key, self._repository.generation) if key else None
        inputs: Mapping[str, Array] | None = form.inputs(contents) if form else None
        if form is None or inputs is None or not form.use.take():
            draft, form, inputs = self._checked(request, request_id, contents, key, started_ns)
            windows, draft = draft.windows, draft if draft.slow else None
        model = form.model
        call = Call(
            model.executors[model.full_tier],
            inputs,
            form.rows,
            deliver=self._deliver,
            priority=form.parameters.priority,
            use=form.use,
            statistics=form.entry.statistics,
            size=form.size,
            size_bytes=form.size_bytes + len(request_id),
            shapes=form.shapes,
        )
        call.request_id, call.form, call.windows, call.started_ns = request_id, form, windows, started_ns
        call.tier_reason, call.timer, call.end = PINNED, None, None
        options = form.options
        call.options, call.sent = options.of_one_request() if options.sampling else options, {}
        call.trace_context = CARRIER.get() if self._traces else None
        return call, draft

    def _checked(
        self, request: pb.ModelInferRequest, request_id: str, contents: Sequence[bytes], key: bytes, started_ns: int
    ) -> tuple[Draft, Form, Mapping[str, Array]]:
        """Check a request, and its values unless that is slow, and take its uses; count one that does not pass."""
        entry, model = self._repository.ready(request.model_name, request.model_version)
        take(model.use, model.name)
        use: Use = model.use
        try:
            draft = self._forms.check(request, contents, key, entry, model)
            use = draft.use
            if draft.slow:
                return draft, draft.unprepared(), {}
            form, inputs = draft.prepare()
        except BaseException as error:
            use.give_back()
            self._refused(entry, error, request.model_name, request_id, started_ns)
            raise
        if key:
            self._forms.remember(key, form)
        return draft, form, inputs

    def _set_deadline(self, call: Call, deadline: float | None) -> float | None:
        """Set a call's deadline to the client's or the server's, and return the server's limit if that is earlier."""
        call.deadline = deadline
        limit = call.form.parameters.timeout_seconds or self._default_timeout
        if limit is not None:
            at = time.monotonic() + limit
            if deadline is None or at < deadline:
                call.deadline = at
                return limit
        return None

    def _stream(self, call: Call, told: Told | None) -> None:
        """Make a call give partial answers; raise an InvalidRequest if its model or its RPC cannot."""
        given = expected = ""
        if told is None:
            given, expected, fix = "it on an RPC with one response", "it in a stream", "Use ModelStreamInfer."
        elif not call.executor.iterative:
            given, expected, fix = "it", f"no such parameter: {call.form.model.name!r} has one step", "Leave it out."
        elif call.windows:
            given, expected, fix = "it with outputs in shared memory", "one of them", "Take the outputs by message."
        if given:
            raise InvalidRequest(f"parameter {STREAM_PARTIAL!r}", given=Literally(given), expected=expected, fix=fix)
        call.partials, call.told, call.tell = PartialAnswers(), told, self._tell

    def _submit(self, call: Call) -> bool:
        """Choose the tier of a call and submit it to the scheduler; return whether it has ended."""
        model, parameters = call.form.model, call.form.parameters
        if model.chooses or parameters.tier or parameters.policy:
            choice = model.selector.choose(parameters.tier, parameters.policy, lambda: self._demand(call))
            call.executor, call.tier_reason, call.best_effort = choice
            call.options = call.options._replace(tier=choice.executor.tier)
        if self._cache:
            self._reserve(call, self._cache)
        call.queued_ns = time.perf_counter_ns()
        call.timings.compute_input_ns = call.queued_ns - call.started_ns
        return self._scheduler.submit(call)

    def _reserve(self, call: Call, cache: CacheBudget) -> None:
        """Reserve the memory of a call's keys and values until it has ended, or raise an Overloaded."""
        size_bytes = call.executor.program.most_cache_bytes(call.inputs, call.options)
        if not size_bytes:
            return
        reservation = cache.reserve(call.form.model.name, size_bytes)
        if not reservation:
            raise cache.refusal(size_bytes, self._scheduler.finish_seconds(call))
        assert call.use
        call.use = BothUses(call.use, reservation)

    def _demand(self, call: Call) -> Demand:
        now = time.monotonic()

        def finish(executor: TierExecutor) -> float:
            call.executor = executor
            return self._scheduler.finish_seconds(call)

        left = None if call.deadline is None else call.deadline - now
        size = call.executor.call_size(call.rows, call.size)
        return Demand(now, size, left, finish, self._scheduler.queue.fullness, self._scheduler.instances)

    def _delivered(self, calls: Sequence[Job]) -> None:
        """Accept ended calls on the thread that ended them, and wake the event loop once for all of them."""
        self._ended.extend(calls)  # type: ignore[arg-type]  # this service makes no other jobs
        self._wake()

    def _tell(self, call: Job) -> None:
        """Accept a call with a partial answer on the thread that computed it."""
        self._progressed.append(call)  # type: ignore[arg-type]  # as above
        self._wake()

    def _resume(self, call: Call, prepared: Prepared | Exception | None) -> None:
        """Queue a call with its inputs, or reply with the error of their preparation."""
        reply = call.reply
        if reply is None:  # it was cancelled or late meanwhile
            self._scheduler.forget(call)
            return
        error = prepared if isinstance(prepared, Exception) else call.take_error()
        try:
            if error is not None:
                raise error
            assert isinstance(prepared, Prepared)  # else it was cancelled
            call.form, call.inputs = prepared
            call.size, call.shapes = call.form.size, call.form.shapes
            call.size_bytes = call.form.size_bytes + len(call.request_id)
            ended = self._submit(call)
        except Exception as failed:
            call.reply = call.told = None
            if call.timer:
                call.timer.cancel()
            self._scheduler.forget(call)
            form = call.form
            self._refused(form.entry, failed, form.model.name, call.request_id, call.started_ns)
            _fail(reply, failed, form.model.name, call.request_id)
            return
        finally:
            del reply, prepared, error  # an error's traceback may refer to this frame
        if ended:
            self._finish(call)

    def _wake(self) -> None:
        if not self._waking:
            self._waking = True
            try:
                self._loop.call_soon_threadsafe(self._finish_all)
            except RuntimeError:
                log.debug("answers came after the end of the event loop")

    def _finish_all(self) -> None:
        self._waking = False  # first, so that a later call wakes the loop again
        while self._progressed:
            progressed = self._progressed.popleft()
            if progressed.told is not None:
                progressed.told(progressed)
        call = None
        while self._ended:
            call = self._ended.popleft()
            if call.reply is None:
                call.take_error()  # which refers to the call
                continue
            try:
                self._finish(call)
            except Exception:  # must not affect other calls
                log.exception("a response cannot be built or sent")
        if call and call.computed_ns:  # the last call waited longest
            self._scheduler.returned((time.perf_counter_ns() - call.computed_ns) / 1e9)

    def _finish(self, call: Call) -> None:
        """Reply to a call that has ended; texts that take milliseconds to write are written on a thread."""
        answer, form = call.answer, call.form
        if answer and form.texts and not call.partials and self._responses.slow(form.model, answer, form.classes):
            size_bytes = sum(array.nbytes for array in answer.outputs.values())
            work = partial(self._built, call, answer)
            self.threads.submit(size_bytes, work, partial(self._reply, call), accepted=True)
            return
        outcome: pb.ModelInferResponse | Exception | None = None
        try:
            outcome = self._built(call, answer) if answer else None
        except Exception as error:
            outcome = error
        try:
            self._reply(call, outcome)
        finally:
            del outcome  # the error's traceback refers to this frame

    def _built(self, call: Call, answer: Answer) -> pb.ModelInferResponse:
        """Return the response to a call, with the tier and the timings that it requested; on any thread."""
        form, timings, begun_ns = call.form, call.timings, time.perf_counter_ns()
        tier = call.answering_tiers(answer) if len(form.model.tiers) > 1 else ""
        response = self._responses.build(
            form.model,
            call.unsent(answer) if call.partials else answer,
            form.output_names,
            request_id=call.request_id,
            tier=tier or call.executor.tier,
            windows=call.windows,
            classes=form.classes,
        )
        if tier:
            response.parameters[TIER].string_param = tier
            response.parameters[TIER_REASON].string_param = call.tier_reason
        if STOPPED in answer.facts:
            call.end = call.end_of(answer)
            response.parameters[STOPPED].string_param = call.end.stopped
            if isinstance(call.end, TextEnd):
                response.parameters[PROMPT_TOKENS].int64_param = call.end.prompt_tokens
        now_ns = time.perf_counter_ns()
        timings.compute_output_ns += now_ns - begun_ns
        timings.request_ns = now_ns - call.started_ns
        if form.parameters.timings:
            for stage in _STAGES:
                response.parameters[stage].int64_param = getattr(timings, stage)
        return response

    def _reply(self, call: Call, response: pb.ModelInferResponse | Exception | None) -> None:
        """Reply to a call, and count it. Without a response, its job has an error."""
        form, reply, error = call.form, call.reply, call.take_error()
        if reply is None:  # it was cancelled or late meanwhile
            return
        if isinstance(response, pb.ModelInferResponse):
            if call.timer:
                call.timer.cancel()
            call.reply = call.told = None
            try:
                reply(response)
            finally:
                tier = response.parameters[TIER].string_param if len(form.model.tiers) > 1 else ""
                form.entry.statistics.succeeded(call, tier)  # readers of these numbers run later on this thread
                if self._traces:
                    self._traces.answered(call, tier)
            return
        error = error or response
        assert error is not None
        self._end(call, type(error).__name__)
        if not isinstance(error, Exception):  # a KeyboardInterrupt in a runtime must not end the event loop
            error = RuntimeError(f"{type(error).__name__} in a run")
        _fail(reply, error, form.model.name, call.request_id)
        del error, reply, response  # the error's traceback may refer to this frame

    def _timed_out(self, call: Call) -> None:
        reply = call.reply
        assert reply is not None  # the end of a call cancels its timer
        self._end(call, DeadlineExceeded.__name__)
        _fail(reply, expired(time.perf_counter_ns() - call.started_ns), call.form.model.name, call.request_id)

    def _end(self, call: Call, reason: str) -> None:
        """Count a failed call, and remove it from the queue; ``reason`` is the class of its error, or ``Cancelled``."""
        call.reply = call.told = None
        if call.timer:
            call.timer.cancel()
        if not call.ended:
            self._scheduler.cancel(call)
        if reason == "Cancelled" and call.deadline is not None and time.monotonic() > call.deadline - _CLOCK_SECONDS:
            reason = DeadlineExceeded.__name__  # transports also cancel calls at their deadline
        place = call.place if reason in ("Cancelled", DeadlineExceeded.__name__) else ""
        if call.computed_ns and reason == DeadlineExceeded.__name__:
            self._scheduler.returned((time.perf_counter_ns() - call.computed_ns) / 1e9)  # at least
        call.form.entry.statistics.failed(reason, time.perf_counter_ns() - call.started_ns, place)
        if self._traces:
            self._traces.failed(call.form.model.name, call.request_id, call.started_ns, reason, call.trace_context)

    def _refused(self, entry: Entry, error: BaseException, name: str, request_id: str, started_ns: int) -> None:
        """Count a request that fails before the queue."""
        if isinstance(error, Exception):
            place = "refused" if isinstance(error, DeadlineExceeded) else ""
            place = error.cause if isinstance(error, Overloaded) else place
            entry.statistics.failed(type(error).__name__, time.perf_counter_ns() - started_ns, place)
            if self._traces:
                self._traces.failed(name, request_id, started_ns, type(error).__name__, CARRIER.get())


class _Gone(Exception):
    """Nobody waits for the answer to a request any more."""


def _prepared(call: Call, draft: Draft) -> Prepared | None:
    """Return the inputs of a call, on any thread; None if it was cancelled or is late, which is then its error."""

    def go_on() -> None:
        if call.leaves(time.monotonic()):
            raise _Gone

    try:
        go_on()
        return draft.prepare(go_on)
    except _Gone:
        return None


def _fail(reply: Reply, error: Exception, model: str, request_id: str) -> None:
    """Send an error to the client, in a context that adds the request to log lines."""
    token = ABOUT.set(About(model, request_id))
    try:
        reply(error)
    finally:
        ABOUT.reset(token)
