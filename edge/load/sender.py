"""Sends requests when they are due and writes down what becomes of each. It runs on one event loop of its own."""

from __future__ import annotations

import asyncio
import re
import selectors
import signal
import threading
import time
from collections.abc import Callable, Coroutine, Iterable
from typing import Any, Final, TypeVar

import grpc

from edge.client.connection import Credentials, open_channel
from edge.errors import Literally, ServerError
from edge.load.record import CANCELLED, EXPIRED, FAILED, LOST, REFUSED, UNSENT, Record
from edge.load.workload import Kind, Workload, timeout_tail
from edge.pb import inference_pb2 as pb
from edge.protocol import RETRY_AFTER_MS

T = TypeVar("T")

_CONNECT_SECONDS = 10.0
_METHOD = "/inference.GRPCInferenceService/ModelInfer"
#: Who says when the time of a request is over: the client, by gRPC's deadline, or the server, by the parameter
#: ``timeout``, whose answer is then waited for.
ENFORCERS: Final = ("client", "server", "both")
#: Statuses with which a server says that it will not, rather than cannot.
_REFUSALS = (grpc.StatusCode.RESOURCE_EXHAUSTED, grpc.StatusCode.UNAVAILABLE)
#: Our errors begin with their subject. gRPC's own words about a connection do not look like that.
_OURS = re.compile(r"([\w ]+?)(?: '.*?')?: got .*, expected ", re.DOTALL)
#: In gRPC's words: what the server never saw. 7 is HTTP/2's REFUSED_STREAM.
_UNSEEN = ("failed to connect", "DNS resolution failed", "connections to all backends failing", "error code 7")


class Sender:
    """A client that does not wait for answers before it asks again.

    Args:
        url: ``host:port``.
        workload: what to ask.
        record: where it is written down.
        channels: connections, which take turns.
        enforcer: of deadlines, one of :data:`ENFORCERS`.
        patience_seconds: how long to wait for an answer where no deadline of the client's ends that. What has not come
            by then is lost.
        max_outstanding: requests on their way at once; further ones are not sent, so that memory stays bounded.
        credentials: to reach the server with.
    """

    def __init__(
        self,
        url: str,
        workload: Workload,
        record: Record,
        *,
        channels: int = 4,
        enforcer: str = "client",
        patience_seconds: float = 30.0,
        max_outstanding: int = 10_000,
        credentials: Credentials | None = None,
    ) -> None:
        self.interrupted = False
        self._url = url
        self._workload = workload
        self._record = record
        self._count = channels
        self._enforcer = enforcer
        self._patience = patience_seconds
        self._max_outstanding = max_outstanding
        self._credentials = credentials
        self._metadata = credentials.metadata() if credentials else None
        self._tasks: set[asyncio.Task[None]] = set()
        self._turn = 0

    async def __aenter__(self) -> Sender:
        options = [
            ("grpc.use_local_subchannel_pool", 1),  # or all channels would share one connection
            ("grpc.max_receive_message_length", -1),
            ("grpc.max_send_message_length", -1),
        ]
        self._channels = [open_channel(self._url, self._credentials, grpc.aio, options) for _ in range(self._count)]
        self._methods = [channel.unary_unary(_METHOD) for channel in self._channels]
        # The first call on a connection pays for it; nobody's latency should.
        ready = asyncio.gather(*(channel.channel_ready() for channel in self._channels))
        try:
            await asyncio.wait_for(ready, _CONNECT_SECONDS)
        except asyncio.TimeoutError:
            given = Literally(f"no connection in {_CONNECT_SECONDS:g} s")
            fix = "Is it running? `fewheads serve REPOSITORY` starts one."
            raise ServerError(f"server at {self._url}", given=given, expected="one that listens", fix=fix) from None
        return self

    async def __aexit__(self, *_: object) -> None:
        for channel in self._channels:
            await channel.close()

    async def open_loop(self, times: Iterable[float], told: Callable[[float], None] = lambda now: None) -> None:
        """Send a request at each of ``times``, and return when all have ended.

        Args:
            times: seconds from now, in order.
            told: called with the seconds that have passed, about ten times a second.
        """
        begun = time.perf_counter()
        beat = 0.0
        for due in times:
            while (ahead := begun + due - time.perf_counter()) > 0 and not self.interrupted:
                told(due - ahead)
                await asyncio.sleep(min(ahead, 0.1))
            if self.interrupted:
                break
            lag = max(time.perf_counter() - begun - due, 0.0)
            if due >= beat:
                told(due)
                beat = due + 0.1
            self._send(begun, due, lag)
            if lag > 0.001:
                await asyncio.sleep(0)  # sending alone would let no answer in
        await self._all_ended()

    async def closed_loop(self, clients: int, seconds: float, at_least: int = 1) -> float:
        """Let clients ask, each again as soon as it has its answer; return the seconds that it took."""
        begun = time.perf_counter()

        async def client() -> None:
            done = 0
            while not self.interrupted and (done < at_least or time.perf_counter() - begun < seconds):
                task = self._send(begun, time.perf_counter() - begun, 0.0)
                if task:
                    await asyncio.wait([task])
                done += 1

        await asyncio.gather(*(client() for _ in range(clients)))
        return time.perf_counter() - begun

    def interrupt(self) -> None:
        """Send nothing more, and cancel what is on its way."""
        self.interrupted = True
        for task in self._tasks:
            task.cancel()

    async def _all_ended(self) -> None:
        while self._tasks:
            await asyncio.wait(self._tasks)

    def _send(self, begun: float, due: float, lag: float) -> asyncio.Task[None] | None:
        number, body = self._workload.draw()
        kind = self._workload.kinds[number]
        row = self._record.sent(due, lag, number)
        if len(self._tasks) >= self._max_outstanding:
            self._record.ended(row, lag, UNSENT, f"{self._max_outstanding} on their way")
            return None
        task = asyncio.get_running_loop().create_task(self._ask(row, body, kind, begun + due, lag))
        self._tasks.add(task)
        task.add_done_callback(lambda done: self._ended(done, row, begun + due))
        return task

    def _ended(self, task: asyncio.Task[None], row: int, due: float) -> None:
        self._tasks.discard(task)
        if task.cancelled():  # maybe before it began, so it could not say so itself
            self._record.ended(row, time.perf_counter() - due, CANCELLED, "interrupted")

    async def _ask(self, row: int, body: bytes, kind: Kind, due: float, lag: float) -> None:
        limit = kind.deadline_ms / 1e3
        left = limit - lag  # a client that is late itself has less time
        by_client = bool(limit) and self._enforcer != "server"
        if limit and self._enforcer != "client":
            body += timeout_tail(left)
        self._turn = (self._turn + 1) % self._count
        try:
            timeout = left if by_client else max(left, 0.0) + self._patience
            answer = await self._methods[self._turn](body, timeout=timeout, metadata=self._metadata)
        except grpc.aio.AioRpcError as error:
            latency = time.perf_counter() - due
            self._record.ended(row, latency, *_ending(error, by_client))
        else:
            latency = time.perf_counter() - due
            self._record.answered(
                row, latency, late=bool(limit) and latency > limit, tier=_tier(answer) if kind.tiered else ""
            )


def _ending(error: grpc.aio.AioRpcError, by_client: bool) -> tuple[str, str, float | None]:
    """Return outcome, cause, and after how many ms to come again."""
    code, details = error.code(), error.details() or ""
    ours = _OURS.match(details)
    cause = f"{code.name} {ours[1] if ours else details[:60]}".strip()
    retry = next((float(value) for key, value in error.trailing_metadata() or () if key == RETRY_AFTER_MS), None)
    if code is grpc.StatusCode.DEADLINE_EXCEEDED:
        # Without a deadline of the client's, it is this client's patience that has ended.
        return (EXPIRED if by_client or ours else LOST), cause, retry
    if code is grpc.StatusCode.CANCELLED:
        return CANCELLED, cause, retry
    if code is grpc.StatusCode.UNAVAILABLE and not ours:
        # Either it was never sent, or the connection broke while it was on its way.
        return (FAILED if any(words in details for words in _UNSEEN) else LOST), cause, retry
    return (REFUSED if code in _REFUSALS else FAILED), cause, retry


def _tier(answer: bytes) -> str:
    parameters = pb.ModelInferResponse.FromString(answer).parameters
    return parameters["tier"].string_param if "tier" in parameters else ""


def run(work: Callable[[], Coroutine[Any, Any, T]], interrupt: Callable[[], None]) -> T:
    """Run a coroutine on a new event loop; Ctrl-C calls ``interrupt`` and ends nothing by itself.

    Timers of asyncio's usual loops are late by up to a millisecond, because epoll counts in those; select does not.
    """
    loop = asyncio.SelectorEventLoop(selectors.SelectSelector())
    in_main = threading.current_thread() is threading.main_thread()
    try:
        if in_main:
            loop.add_signal_handler(signal.SIGINT, interrupt)
        return loop.run_until_complete(work())
    finally:
        if in_main:
            loop.remove_signal_handler(signal.SIGINT)
        loop.close()
