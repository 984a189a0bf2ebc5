"""The path of an inference request to the queue, the same for all transports; :mod:`replies` has that back."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Final

from edge.datatypes import Array
from edge.errors import InvalidRequest
from edge.instruments.logs import ABOUT, About
from edge.pb import inference_pb2 as pb
from edge.protocol import STREAM_PARTIAL
from edge.repository.repository import Repository
from edge.scheduling.admission import CacheBudget
from edge.scheduling.job import BothUses, PartialAnswers, Use
from edge.scheduling.scheduler import Scheduler
from edge.scheduling.tier_executor import TierExecutor
from edge.scheduling.tier_selection import PINNED, Demand
from edge.security.access import CALLER
from edge.security.rate import RateLimit
from edge.serving.call import Call, Reply, Told
from edge.serving.forms import Draft, Form, Forms, Prepared, take, take_apart
from edge.serving.replies import Replies, fail
from edge.serving.request import MOST_NAME_CHARS, check_names
from edge.serving.shared_memory import SharedMemory, Window
from edge.serving.threads import Threads
from edge.serving.traces import CARRIER, Traces

log = logging.getLogger(__name__)

#: A best-effort answer is made in time, and one that is late by less than this factor is better than none.
_LATE_ANSWER: Final = 1.25


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
        self._forms = Forms(repository, shared_memory)
        self._loop = asyncio.get_running_loop()
        self.threads = Threads(scheduler.queue)
        self._replies = Replies(scheduler, self.threads, traces)
        self._deliver = self._replies.deliver  # one object, so that the jobs of a run are delivered together

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
                self._replies.refused(call.form.entry, error, request.model_name, request_id, call.started_ns)
                raise
        except Exception as error:
            fail(reply, error, request.model_name[:MOST_NAME_CHARS], request_id)
            return None
        finally:
            del reply  # it may hold an error, whose traceback refers to this frame
        if ended:
            self._replies.finish(call)
            return None
        if limit_seconds is not None:
            limit_seconds *= _LATE_ANSWER if call.best_effort else 1.0
            call.timer = self._loop.call_later(limit_seconds, self._replies.timed_out, call)
        return call

    def cancel(self, call: Call) -> None:
        """Cancel a call; it gets no reply."""
        if call.reply is not None:
            self._replies.end(call, "Cancelled")

    def partial(self, call: Call) -> pb.ModelInferResponse | None:
        """Return the next partial answer of a call, also after its reply; None if none waits."""
        return self._replies.partial(call)

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
            self._replies.refused(entry, error, request.model_name, request_id, started_ns)
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
        expected = ""
        if told is None:
            expected, fix = "a request in a stream", "Use ModelStreamInfer."
        elif not call.executor.iterative:
            expected, fix = f"no such parameter: {call.form.model.name!r} has one step", "Leave it out."
        elif call.windows:
            expected, fix = "no outputs in shared memory beside it", "Take the outputs by message."
        if expected:
            raise InvalidRequest(f"parameter {STREAM_PARTIAL!r}", expected=expected, fix=fix)
        call.partials, call.told, call.tell = PartialAnswers(), told, self._replies.tell

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
            self._replies.refused(form.entry, failed, form.model.name, call.request_id, call.started_ns)
            fail(reply, failed, form.model.name, call.request_id)
            return
        finally:
            del reply, prepared, error  # an error's traceback may refer to this frame
        if ended:
            self._replies.finish(call)


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
