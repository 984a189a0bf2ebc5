"""Requests that wait until their models are loaded."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from contextlib import ExitStack
from typing import Final, TypeVar

from edge.datatypes import Array
from edge.errors import DeadlineExceeded, Overloaded, Raw, RequestError
from edge.pb import inference_pb2 as pb
from edge.repository.entry import Entry
from edge.repository.model import Model
from edge.repository.on_demand import OnDemand
from edge.repository.repository import NotLoaded, Repository
from edge.scheduling.job import expired
from edge.scheduling.queue import LATER, JobQueue
from edge.serving.call import Call, Received
from edge.serving.failures import Failures, refused_by, send_error
from edge.serving.forms import take
from edge.serving.parameters import Parameters, parse
from edge.serving.request import UncheckedRequest, request_of

T = TypeVar("T")
#: A transport's timer may fire this much too early.
CLOCK_SECONDS: Final = 0.005
#: Where a request is that a client or a deadline ends, as :attr:`edge.scheduling.job.Job.stage`.
LOADING: Final = "loading"


class Waiting:
    """A request whose model ``entry`` is not loaded; ``call`` is None until it is."""

    def __init__(self, received: Received, entry: Entry) -> None:
        """Take a request; raise an InvalidRequest if its parameters are wrong."""
        request = received.request
        if received.key and not isinstance(request, UncheckedRequest):
            # The message keeps the memory of the raw contents that were taken out of it.
            request = pb.ModelInferRequest.FromString(received.key)
            received = received._replace(request=request)
        self.received, self.arrival, self.entry = received, received.arrival, entry
        unchecked = request if isinstance(request, UncheckedRequest) else request_of(request)
        self.parameters: Parameters = parse(unchecked.parameters)
        self.size_bytes = _held_bytes(received)
        self.call: Call | None = None
        self.over = False  # whether it waits no more
        self.task: asyncio.Task[None] | None = None
        self.timer: asyncio.TimerHandle | None = None

    def seconds_left(self, default_timeout: float | None) -> float | None:
        """Return the time until its deadline or the server's limit; None without one."""
        limit = self.parameters.timeout_seconds or default_timeout
        deadline = self.received.deadline
        left = [] if deadline is None else [deadline - time.monotonic()]
        return min([*left, limit] if limit is not None else left, default=None)

    async def wait(self, models: OnDemand, begin: Callable[[Received], Call | None]) -> None:
        """Call ``begin`` while the models that it needs are loaded and in use; raise the error of those that cannot be.

        What is wrong with its head is left to ``begin``.
        """
        with ExitStack() as held:

            def hold(model: Model) -> None:
                take(model)
                held.callback(model.use.give_back)

            request, model = self.received.request, None
            # Again, because another version of the model may answer once the head is loaded.
            while (found := await models.ready(request.model_name, request.model_version))[1] is not model:
                entry, model = found
                hold(model)
                if self.parameters.head:
                    name, _, version = self.parameters.head.partition(":")
                    try:
                        hold((await models.ready(name, version, base=entry))[1])
                    except Overloaded:
                        raise
                    except RequestError:
                        pass  # the checks of the request find and describe it
            loading_ns = time.perf_counter_ns() - self.arrival.started_ns
            self.call = begin(self.received._replace(arrival=self.arrival._replace(loading_ns=loading_ns)))


class LoadWaits:
    """The requests that wait until models are loaded. Together they take at most half of the queue's limits.

    The other half is for requests to models that are loaded. For the event loop only.

    Args:
        models: loads them; None where no request loads a model.
        default_timeout_seconds: the limit for requests without a deadline; None sets none.
    """

    def __init__(
        self,
        repository: Repository,
        models: OnDemand | None,
        queue: JobQueue,
        failures: Failures,
        default_timeout_seconds: float | None,
    ) -> None:
        self._repository, self._models, self._queue, self._failures = repository, models, queue, failures
        self._default_timeout = default_timeout_seconds
        self._jobs = self._bytes = 0

    async def ready(self, name: str, version: str, size_bytes: int = 0) -> Model:
        """Return a model, loaded for a request that holds so many bytes. It may be unloaded again at any time.

        Raises:
            Overloaded: too many requests, or bytes, wait, or no model can be evicted for this one.
            DeadlineExceeded: it is not loaded within the default timeout.
            RequestError: as :meth:`edge.repository.on_demand.OnDemand.ready`.
        """
        try:
            return self._repository.ready(name, version)[1]
        except NotLoaded:
            assert self._models
        self._enter(size_bytes)
        try:
            return (await in_time(self._models.ready(name, version), self._default_timeout))[1]
        finally:
            self._leave(size_bytes)

    def start(self, received: Received, entry: Entry, begin: Callable[[Received], Call | None]) -> Waiting:
        """Begin a request once its models are loaded, of which ``entry`` is not; raise as :meth:`ready`.

        A failure is counted; one that comes later is the reply to the request.
        """
        try:
            waiting = Waiting(received, entry)
            self._enter(waiting.size_bytes)
        except Exception as error:
            self._failures.refused(entry, entry.name, received.arrival, error)
            raise
        waiting.task = asyncio.create_task(self._load(waiting, begin))
        if (seconds := waiting.seconds_left(self._default_timeout)) is not None:
            waiting.timer = asyncio.get_running_loop().call_later(seconds, self._time_out, waiting)
        return waiting

    def end(self, waiting: Waiting, error: Exception | None) -> None:
        """End a request whose models are not loaded; without an error, its client has gone."""
        self._finish(waiting)
        deadline = waiting.received.deadline
        late = deadline is not None and time.monotonic() > deadline - CLOCK_SECONDS
        reason = type(error).__name__ if error else DeadlineExceeded.__name__ if late else "Cancelled"
        stage = LOADING if reason in ("Cancelled", DeadlineExceeded.__name__) else refused_by(error)
        self._failures.count(waiting.entry, waiting.entry.name, waiting.arrival, reason, stage)
        if error:
            send_error(waiting.arrival, error, waiting.entry.name, waiting.arrival.request_id)
        if waiting.task and waiting.task is not asyncio.current_task():
            waiting.task.cancel()

    async def _load(self, waiting: Waiting, begin: Callable[[Received], Call | None]) -> None:
        def join(received: Received) -> Call | None:
            self._finish(waiting)  # its place in the queue is free now, and is taken before this returns
            return begin(received)

        assert self._models
        try:
            await waiting.wait(self._models, join)
        except Exception as error:
            if waiting.over:  # the request was checked, and has been counted
                send_error(waiting.arrival, error, waiting.entry.name, waiting.arrival.request_id)
            else:
                self.end(waiting, error)

    def _time_out(self, waiting: Waiting) -> None:
        self.end(waiting, expired(time.perf_counter_ns() - waiting.arrival.started_ns))

    def _finish(self, waiting: Waiting) -> None:
        waiting.over = True
        self._leave(waiting.size_bytes)
        if waiting.timer:
            waiting.timer.cancel()

    def _enter(self, size_bytes: int) -> None:
        queue = self._queue
        if full := queue.full(size_bytes):
            raise queue.refusal(full, size_bytes)
        if self._jobs >= max(queue.max_jobs // 2, 1):
            raise _half_full(f"{queue.max_jobs} places", "requests")
        if self._jobs and self._bytes + size_bytes > queue.max_bytes // 2:  # alone, a request may take more
            raise _half_full(f"{queue.max_bytes} bytes", "bytes")
        queue.hold(size_bytes)
        self._jobs += 1
        self._bytes += size_bytes

    def _leave(self, size_bytes: int) -> None:
        self._queue.release(size_bytes)
        self._jobs -= 1
        self._bytes -= size_bytes


async def in_time(work: Awaitable[T], limit_seconds: float | None) -> T:
    """Return the result of some work; cancel it after a limit, and raise a DeadlineExceeded. None sets no limit."""
    begun_ns = time.perf_counter_ns()
    try:
        return await asyncio.wait_for(work, limit_seconds)
    except asyncio.TimeoutError:
        raise expired(time.perf_counter_ns() - begun_ns) from None


def _half_full(limit: str, cause: str) -> Overloaded:
    given = Raw(f"half of its {limit} taken by requests that wait for models")
    return Overloaded("queue", given=given, expected="room in that half", fix=LATER, cause=cause)


def _held_bytes(received: Received) -> int:
    request, raw = received.request, len(received.key) + sum(map(len, received.contents))
    if isinstance(request, UncheckedRequest):
        return raw + request.json_bytes + sum(_size(tensor.contents) for tensor in request.inputs)
    return raw or request.ByteSize()


def _size(contents: pb.InferTensorContents | Array | bytes | None) -> int:
    """Return the bytes of contents, without the texts of BYTES, which come from JSON alone."""
    if contents is None or isinstance(contents, bytes):
        return len(contents or b"")
    return contents.ByteSize() if isinstance(contents, pb.InferTensorContents) else contents.nbytes
