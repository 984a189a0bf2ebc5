"""The path of an inference request to the queue and back, the same for all transports."""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from typing import Any, Final

from edge.datatypes import Array
from edge.errors import DeadlineExceeded, Overloaded
from edge.instruments.logs import ABOUT, About
from edge.instruments.snapshot import TextEnd
from edge.pb import inference_pb2 as pb
from edge.programs.generate import PROMPT_TOKENS
from edge.protocol import STOPPED
from edge.repository.entry import Entry
from edge.repository.on_demand import OnDemand
from edge.repository.repository import NotLoaded, Repository
from edge.scheduling.admission import CacheBudget
from edge.scheduling.job import Job, JobResult, UseCount, expired, take_all
from edge.scheduling.scheduler import Scheduler
from edge.scheduling.tier_executor import TierExecutor
from edge.scheduling.tier_selection import Demand
from edge.security.access import CALLER
from edge.security.rate import RateLimit
from edge.serving.call import MESSAGE, Arrival, Call, Encoder, Received, ResponseBuilder, outcome_of
from edge.serving.forms import Draft, Form, Forms, Prepared, take, take_apart
from edge.serving.parameters import TIER, TIER_REASON
from edge.serving.request import MOST_NAME_CHARS, UncheckedRequest, check_names
from edge.serving.shared_memory import SharedMemory, TensorRegion
from edge.serving.threads import Threads
from edge.serving.traces import CARRIER, Traces
from edge.serving.waiting import LOADING, Waiting

log = logging.getLogger(__name__)

#: A best-effort answer is made in time, and one that is late by less than this factor is better than none.
_LATE_ANSWER: Final = 1.25
#: A transport's timer may fire this much too early.
_CLOCK_SECONDS: Final = 0.005
_STAGES: Final = ("queue_ns", "compute_input_ns", "compute_infer_ns", "compute_output_ns", "request_ns")


class InferenceService:
    """Answers inference requests. It belongs to the event loop in which it is created.

    Args:
        default_timeout_seconds: the limit for requests without a deadline.
        shared_memory, cache: the regions, and the memory for keys and values; None allows none, or sets no limit.
        models: loads models that requests need; None where no request loads one.
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
        models: OnDemand | None = None,
    ) -> None:
        self._repository, self._scheduler = repository, scheduler
        self._default_timeout = default_timeout_seconds
        self._limit, self.limited = limit, limit is not None  # transports must name callers
        self.traces = traces  # for which transports set CARRIER
        self._cache, self._models = cache, models
        self._forms = Forms(repository, shared_memory)
        self._responses = ResponseBuilder()
        self._loop = asyncio.get_running_loop()
        self.threads = Threads(scheduler.queue)  # for what takes milliseconds, here and in transports
        # One object each, so that the jobs of a run are delivered together.
        self._deliver, self._publish = self._accept_ended, self._accept_partial
        self._ended: deque[Call] = deque()
        self._with_partials: deque[Call] = deque()  # with partial answers that their readers do not know of
        self._waking = False

    async def infer(
        self, request: pb.ModelInferRequest | UncheckedRequest, deadline: float | None, encoder: Encoder = MESSAGE
    ) -> Any:
        """Return the encoded response to :meth:`start`, or raise its error. Cancelling this cancels the request."""
        about = About(request.model_name[:MOST_NAME_CHARS], request.id[:MOST_NAME_CHARS])
        ABOUT.set(about)  # of the task, in which the transport logs
        return await outcome_of(lambda reply: self.start(request, deadline, reply, encoder), self.cancel)

    def admit(self, *, refuse: bool = True) -> None:
        """Count a request of the current caller in its rate, as :meth:`RateLimit.take`."""
        if self._limit:
            self._limit.take(CALLER.get(), refuse=refuse)

    def start(
        self,
        request: pb.ModelInferRequest | UncheckedRequest,
        deadline: float | None,
        reply: Callable[[Any], None],
        encoder: Encoder = MESSAGE,
        on_partial: Callable[[], None] | None = None,
        *,
        admitted: bool = False,
    ) -> Call | Waiting | None:
        """Check, preprocess and queue a request; return the argument for :meth:`cancel`, None after the reply.

        A request to a model that is loaded on demand waits for that first.

        Args:
            request: the client's; this removes parts of a message.
            deadline: the client's deadline, in ``time.monotonic()`` seconds; None without one.
            reply, on_partial: of an :class:`Arrival`; both may be called before this returns.
            admitted: whether :meth:`admit` has counted it already.
        """
        request_id, carrier = request.id, CARRIER.get() if self.traces else None
        arrival = Arrival(request_id, reply, encoder, on_partial, time.perf_counter_ns(), carrier)
        received: Received | None = None
        try:
            if not admitted:
                self.admit()
            if len(request_id) + len(request.model_name) + len(request.model_version) > MOST_NAME_CHARS:
                request_id = ""  # which would be quoted in logs
                check_names(request)
            received = Received(request, *take_apart(request), deadline, arrival)
            try:
                return self._begin(received)
            except NotLoaded as missing:
                entry = missing.entry
            return self._wait(received, entry)
        except Exception as error:
            _send_error(arrival, error, request.model_name[:MOST_NAME_CHARS], request_id)
            return None
        finally:
            del reply, arrival, received  # they may hold an error, whose traceback refers to this frame

    def cancel(self, started: Call | Waiting | None) -> None:
        """Cancel a call, unless it is over; it gets no reply."""
        if isinstance(started, Waiting):
            if not started.over:
                self._end_waiting(started, None)
                return
            started = started.call
        if started:
            self._end(started, None)

    def partial(self, started: Call | Waiting) -> Any:
        """Return the next partial answer of a call, encoded, also after its reply; None if none waits."""
        call = started.call if isinstance(started, Waiting) else started
        if not call or not call.partials:
            return None
        arrival = call.arrival
        form = call.form._replace(classes={})  # which rank the outputs of the last response alone
        response = self._responses.build(form, call.partials.popleft(), arrival.request_id, call.executor.tier)
        return arrival.encoder.encode(response)

    def _begin(self, received: Received) -> Call | None:
        """Do the work of :meth:`start` for a request whose models are loaded; raise NotLoaded if one is not."""
        call = None
        try:
            call, limit_seconds, draft = self._call(received)
            call.arrival.encoder.check(call.form, call.regions)
            if call.partials is not None:
                call.check_stream()
            if draft:
                self.threads.submit(call.size_bytes, partial(_prepared, call, draft), partial(self._resume, call))
            elif self._submit(call):
                self._finish(call)
                return None
        except Exception as error:
            if not call:
                raise
            self._end(call, error, refused=True)
            return None
        finally:
            del received  # it may hold an error, whose traceback refers to this frame
        if limit_seconds is not None:
            limit_seconds *= _LATE_ANSWER if call.best_effort else 1.0
            call.timer = self._loop.call_later(limit_seconds, self._time_out, call)
        return call

    def _wait(self, received: Received, entry: Entry) -> Waiting:
        """Begin a request when its models are loaded, within the limits of the queue."""
        try:
            waiting = Waiting(received, entry)
            self.threads.enter(waiting.size_bytes)
        except Exception as error:
            self._count_failure(entry, entry.name, received.arrival, type(error).__name__, _refused_by(error))
            raise
        waiting.task = asyncio.create_task(self._load(waiting))
        if (seconds := waiting.seconds_left(self._default_timeout)) is not None:
            waiting.timer = self._loop.call_later(seconds, self._time_out, waiting)
        return waiting

    async def _load(self, waiting: Waiting) -> None:
        def begin(received: Received) -> Call | None:
            self._leave(waiting)
            return self._begin(received)

        assert self._models
        try:
            await waiting.wait(self._models, begin)
        except Exception as error:
            if waiting.over:  # the request was checked, and has been counted
                _send_error(waiting.arrival, error, waiting.entry.name, waiting.arrival.request_id)
            else:
                self._end_waiting(waiting, error)

    def _leave(self, waiting: Waiting) -> None:
        waiting.over = True
        self.threads.leave(waiting.size_bytes)
        if waiting.timer:
            waiting.timer.cancel()

    def _end_waiting(self, waiting: Waiting, error: Exception | None) -> None:
        """End a request whose models are not loaded; without an error, its client has gone."""
        self._leave(waiting)
        deadline = waiting.received.deadline
        late = deadline is not None and time.monotonic() > deadline - _CLOCK_SECONDS
        reason = type(error).__name__ if error else DeadlineExceeded.__name__ if late else "Cancelled"
        stage = LOADING if reason in ("Cancelled", DeadlineExceeded.__name__) else _refused_by(error)
        self._count_failure(waiting.entry, waiting.entry.name, waiting.arrival, reason, stage)
        if error:
            _send_error(waiting.arrival, error, waiting.entry.name, waiting.arrival.request_id)
        if waiting.task and waiting.task is not asyncio.current_task():
            waiting.task.cancel()

    def _call(self, received: Received) -> tuple[Call, float | None, Draft | None]:
        """Return the call of a request that passes all checks; count one that does not.

        With it comes the server's time limit, if it is earlier than the client's deadline, and, of a request whose
        values take long to prepare, the draft in place of its inputs.
        """
        _, contents, key, deadline, arrival = received
        draft: Draft | None = None
        regions: Mapping[str, TensorRegion] = {}
        form = self._forms.find(key, self._repository.generation) if key else None
        inputs: Mapping[str, Array] | None = form.inputs(contents) if form else None
        if form is None or inputs is None or not take_all(form.uses):
            draft, form, inputs = self._checked(received)
            regions, draft = draft.regions, draft if draft.slow else None
        limit = form.parameters.timeout_seconds or self._default_timeout
        if limit is not None:
            limit -= arrival.loading_ns / 1e9
            at = time.monotonic() + limit
            deadline, limit = (at, limit) if deadline is None or at < deadline else (deadline, None)
        deliver, publish = self._deliver, self._publish
        call = Call(form, inputs, arrival, deadline=deadline, regions=regions, deliver=deliver, publish=publish)
        return call, limit, draft

    def _checked(self, received: Received) -> tuple[Draft, Form, Mapping[str, Array]]:
        """Check a request, and its values unless that is slow, and take its uses; count one that does not pass."""
        request, contents, key, _, arrival = received
        entry, model = self._repository.ready(request.model_name, request.model_version)
        take(model)
        uses: Sequence[UseCount] = (model.use,)
        try:
            draft = self._forms.check(request, contents, key, entry, model)
            uses = draft.form.uses
            if draft.slow:
                return draft, draft.unprepared(), {}
            form, inputs = draft.prepare()
        except BaseException as error:
            for use in uses:
                use.give_back()
            if not isinstance(error, NotLoaded):
                self._count_failure(entry, request.model_name, arrival, type(error).__name__, _refused_by(error))
            raise
        if key:
            self._forms.remember(key, form)
        return draft, form, inputs

    def _submit(self, call: Call) -> bool:
        """Choose the tier of a call and submit it to the scheduler; return whether it has ended."""
        model, parameters = call.form.model, call.form.parameters
        if model.chooses or parameters.tier or parameters.policy:
            choice = model.selector.choose(parameters.tier, parameters.policy, lambda: self._demand(call))
            call.executor, call.tier_reason, call.best_effort = choice
            call.options = call.options._replace(tier=choice.executor.tier)
        if self._cache and (size_bytes := call.executor.program.most_cache_bytes(call.inputs, call.options)):
            reservation = self._cache.reserve(model.name, size_bytes)
            if not reservation:
                raise self._cache.refusal(size_bytes, self._scheduler.finish_seconds(call))
            call.holds = (*call.holds, reservation)
        call.queued_ns = time.perf_counter_ns()
        call.timings.compute_input_ns = call.queued_ns - call.arrival.started_ns - call.arrival.loading_ns
        return self._scheduler.submit(call)

    def _demand(self, call: Call) -> Demand:
        now = time.monotonic()

        def finish(executor: TierExecutor) -> float:
            call.executor = executor
            return self._scheduler.finish_seconds(call)

        left = None if call.deadline is None else call.deadline - now
        size = call.executor.call_size(call.rows, call.size)
        return Demand(now, size, left, finish, self._scheduler.queue.fullness, self._scheduler.instances)

    def _resume(self, call: Call, prepared: Prepared | Exception | None) -> None:
        """Queue a call with its inputs, or end it with the error of their preparation."""
        error = prepared if isinstance(prepared, Exception) else call.take_error()
        try:
            if call.over:  # it was cancelled or late meanwhile
                self._scheduler.forget(call)
                return
            if error is not None:
                raise error
            assert isinstance(prepared, Prepared)  # else it was cancelled
            call.form, call.inputs = prepared
            call.rows, call.size, call.shapes = call.form.rows, call.form.size, call.form.shapes
            call.size_bytes = call.form.size_bytes + len(call.arrival.request_id)
            if self._submit(call):
                self._finish(call)
        except Exception as failed:
            self._end(call, failed, refused=True)
        finally:
            del prepared, error  # an error's traceback may refer to this frame

    # The way back. The first three are called on the threads that compute, and wake the event loop once for all calls.

    def _accept_ended(self, calls: Sequence[Job]) -> None:
        self._ended.extend(calls)  # type: ignore[arg-type]  # this service makes no other jobs
        self._wake()

    def _accept_partial(self, call: Job) -> None:
        self._with_partials.append(call)  # type: ignore[arg-type]  # as above
        self._wake()

    def _wake(self) -> None:
        if not self._waking:
            self._waking = True
            try:
                self._loop.call_soon_threadsafe(self._finish_all)
            except RuntimeError:
                log.debug("answers came after the end of the event loop")

    def _finish_all(self) -> None:
        self._waking = False  # first, so that a later call wakes the loop again
        while self._with_partials:
            call = self._with_partials.popleft()
            if not call.over and call.arrival.on_partial:
                call.arrival.on_partial()
        last = None
        while self._ended:
            last = self._ended.popleft()
            try:
                self._finish(last)
            except Exception:  # must not affect other calls
                log.exception("a response cannot be built or sent")
        if last and last.computed_ns:  # the last call waited longest
            self._scheduler.returned((time.perf_counter_ns() - last.computed_ns) / 1e9)

    def _finish(self, call: Call) -> None:
        """Reply to a call that has ended; what takes milliseconds to encode is encoded on a thread."""
        answer = call.answer
        if call.over or answer is None:
            self._end(call, call.take_error())  # the error refers to the call, so it is taken in any case
            return
        build = partial(self._response, call, answer)
        if call.partials is None and call.arrival.encoder.slow(call.form, answer):
            size_bytes = sum(array.nbytes for array in answer.outputs.values())
            self.threads.submit(size_bytes, build, partial(self._end, call), accepted=True)
            return
        outcome: Any = None
        try:
            outcome = build()
        except Exception as error:
            outcome = error
        try:
            self._end(call, outcome)
        finally:
            del outcome  # the error's traceback refers to this frame

    def _response(self, call: Call, answer: JobResult) -> Any:
        """Return the encoded response to a call, with the tier and the timings that it requests; on any thread."""
        form, timings, begun_ns = call.form, call.timings, time.perf_counter_ns()
        tier = call.answering_tiers(answer) if len(form.model.tiers) > 1 else ""

        def parameters() -> dict[str, Any]:
            values: dict[str, Any] = {TIER: tier, TIER_REASON: call.tier_reason} if tier else {}
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
        response = self._responses.build(form, answer, request_id, tier_name, call.regions, parameters)
        return call.arrival.encoder.encode(response)

    def _time_out(self, started: Call | Waiting) -> None:
        error = expired(time.perf_counter_ns() - started.arrival.started_ns)
        if isinstance(started, Waiting):
            self._end_waiting(started, error)
        else:
            self._end(started, error)

    def _end(self, call: Call, outcome: Any, *, refused: bool = False) -> None:
        """End a call, unless it is over: reply, count and trace it, and release what it holds.

        ``outcome`` is the encoded response or an error, None if the client has gone. A ``refused`` call was not
        submitted.
        """
        if call.over:
            return
        call.over = True
        if call.timer:
            call.timer.cancel()
        form, traces = call.form, self.traces
        if outcome is not None and not isinstance(outcome, BaseException):
            try:
                call.arrival.reply(outcome)
            finally:
                tier = call.answering_tiers(call.answer) if call.answer and len(form.model.tiers) > 1 else ""
                form.entry.statistics.succeeded(call, tier)  # readers of these numbers run later on this thread
                if traces:
                    traces.answered(call, tier)
            return
        reason = "Cancelled" if outcome is None else type(outcome).__name__
        if refused:
            self._scheduler.forget(call)
            stage = _refused_by(outcome)
        else:
            if not call.ended:
                self._scheduler.cancel(call)
            if outcome is None and call.deadline is not None and time.monotonic() > call.deadline - _CLOCK_SECONDS:
                reason = DeadlineExceeded.__name__  # transports also cancel calls at their deadline
            stage = call.stage if reason in ("Cancelled", DeadlineExceeded.__name__) else ""
            if call.computed_ns and reason == DeadlineExceeded.__name__:
                self._scheduler.returned((time.perf_counter_ns() - call.computed_ns) / 1e9)  # at least
        self._count_failure(form.entry, form.model.name, call.arrival, reason, stage)
        if outcome is not None:
            if not isinstance(outcome, Exception):  # a KeyboardInterrupt in a runtime must not end the event loop
                outcome = RuntimeError(f"{reason} in a run")
            _send_error(call.arrival, outcome, form.model.name, call.arrival.request_id)
        del outcome  # the error's traceback may refer to this frame

    def _count_failure(self, entry: Entry, model: str, arrival: Arrival, reason: str, stage: str) -> None:
        entry.statistics.failed(reason, time.perf_counter_ns() - arrival.started_ns, stage)
        if self.traces:
            self.traces.failed(model, arrival, reason)


def _refused_by(error: Any) -> str:
    if isinstance(error, Overloaded):
        return error.cause
    return "refused" if isinstance(error, DeadlineExceeded) else ""


def _send_error(arrival: Arrival, error: Exception, model: str, request_id: str) -> None:
    token = ABOUT.set(About(model, request_id))
    try:
        arrival.reply(error)
    finally:
        ABOUT.reset(token)


class _Gone(Exception):
    """Nobody waits for the answer to a request any more."""


def _prepared(call: Call, draft: Draft) -> Prepared | None:
    """Return the inputs of a call, on any thread; None if it was cancelled or is late, which is then its error."""

    def go_on() -> None:
        if call.leaves(time.monotonic()):
            raise _Gone

    with suppress(_Gone):
        go_on()
        return draft.prepare(go_on)
    return None
