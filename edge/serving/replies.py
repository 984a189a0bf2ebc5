"""The ends of inference requests: responses and errors are built, sent and counted, once for each call."""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from collections.abc import Sequence
from functools import partial
from typing import Final

from edge.errors import DeadlineExceeded, Overloaded
from edge.instruments.logs import ABOUT, About
from edge.instruments.snapshot import TextEnd
from edge.pb import inference_pb2 as pb
from edge.programs.generate import PROMPT_TOKENS
from edge.protocol import STOPPED
from edge.repository.entry import Entry
from edge.scheduling.job import Answer, Job, expired
from edge.scheduling.scheduler import Scheduler
from edge.serving.call import Call, Reply, ResponseBuilder
from edge.serving.parameters import TIER, TIER_REASON
from edge.serving.threads import Threads
from edge.serving.traces import CARRIER, Traces

log = logging.getLogger(__name__)

#: A transport's timer may fire this much too early.
_CLOCK_SECONDS: Final = 0.005
_STAGES: Final = ("queue_ns", "compute_input_ns", "compute_infer_ns", "compute_output_ns", "request_ns")


class Replies:
    """Replies to calls. It belongs to the event loop in which it is created."""

    def __init__(self, scheduler: Scheduler, threads: Threads, traces: Traces | None) -> None:
        self._scheduler = scheduler
        self._threads = threads
        self._traces = traces
        self._responses = ResponseBuilder()
        self._loop = asyncio.get_running_loop()
        self._ended: deque[Call] = deque()
        self._progressed: deque[Call] = deque()  # with partial answers that their readers have not been told of
        self._waking = False

    def partial(self, call: Call) -> pb.ModelInferResponse | None:
        """Return the next partial answer of a call, also after its reply; None if none waits."""
        answer = call.partials.take() if call.partials else None
        if answer is None:
            return None
        form, identity = call.form, call.request_id
        return self._responses.build(
            form.model, call.unsent(answer), form.output_names, request_id=identity, tier=call.executor.tier, windows={}
        )

    def deliver(self, calls: Sequence[Job]) -> None:
        """Accept ended calls on the thread that ended them, and wake the event loop once for all of them."""
        self._ended.extend(calls)  # type: ignore[arg-type]  # this service makes no other jobs
        self._wake()

    def tell(self, call: Job) -> None:
        """Accept a call with a partial answer on the thread that computed it."""
        self._progressed.append(call)  # type: ignore[arg-type]  # as above
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
                self.finish(call)
            except Exception:  # must not affect other calls
                log.exception("a response cannot be built or sent")
        if call and call.computed_ns:  # the last call waited longest
            self._scheduler.returned((time.perf_counter_ns() - call.computed_ns) / 1e9)

    def finish(self, call: Call) -> None:
        """Reply to a call that has ended; texts that take milliseconds to write are written on a thread."""
        answer, form = call.answer, call.form
        if answer and form.texts and not call.partials and self._responses.slow(form.model, answer, form.classes):
            size_bytes = sum(array.nbytes for array in answer.outputs.values())
            work = partial(self._built, call, answer)
            self._threads.submit(size_bytes, work, partial(self._reply, call), accepted=True)
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
        self.end(call, type(error).__name__)
        if not isinstance(error, Exception):  # a KeyboardInterrupt in a runtime must not end the event loop
            error = RuntimeError(f"{type(error).__name__} in a run")
        fail(reply, error, form.model.name, call.request_id)
        del error, reply, response  # the error's traceback may refer to this frame

    def timed_out(self, call: Call) -> None:
        """Reply to a call whose time limit has passed."""
        reply = call.reply
        assert reply is not None  # the end of a call cancels its timer
        self.end(call, DeadlineExceeded.__name__)
        fail(reply, expired(time.perf_counter_ns() - call.started_ns), call.form.model.name, call.request_id)

    def end(self, call: Call, reason: str) -> None:
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

    def refused(self, entry: Entry, error: BaseException, name: str, request_id: str, started_ns: int) -> None:
        """Count a request that fails before the queue."""
        if isinstance(error, Exception):
            place = "refused" if isinstance(error, DeadlineExceeded) else ""
            place = error.cause if isinstance(error, Overloaded) else place
            entry.statistics.failed(type(error).__name__, time.perf_counter_ns() - started_ns, place)
            if self._traces:
                self._traces.failed(name, request_id, started_ns, type(error).__name__, CARRIER.get())


def fail(reply: Reply, error: Exception, model: str, request_id: str) -> None:
    """Send an error to the client, in a context that adds the request to log lines."""
    token = ABOUT.set(About(model, request_id))
    try:
        reply(error)
    finally:
        ABOUT.reset(token)
