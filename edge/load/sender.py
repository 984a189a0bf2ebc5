"""Sends requests when they are due and records their outcomes, on an event loop of its own."""

from __future__ import annotations

import asyncio
import math
import re
import selectors
import signal
import threading
import time
from collections.abc import Callable, Coroutine, Iterable
from typing import Any, TypeVar

import grpc
import numpy as np

from edge.bench.plan import Plan
from edge.bench.sender import CANCELLED, EXPIRED, FAILED, LOST, REFUSED, UNSENT, Record
from edge.bench.workload import Kind, Workload, timeout_tail
from edge.client.connection import open_channel
from edge.errors import Raw, ServerError
from edge.pb import inference_pb2 as pb
from edge.protocol import RETRY_AFTER_MS

T = TypeVar("T")

_CONNECT_SECONDS = 10.0
_METHOD = "/inference.GRPCInferenceService/ModelInfer"
#: Each channel has its own connection only without the global pool.
_CHANNEL_OPTIONS = (
    ("grpc.use_local_subchannel_pool", 1),
    ("grpc.max_receive_message_length", -1),
    ("grpc.max_send_message_length", -1),
)
#: Statuses of a server that could answer and rejects the request.
_REFUSALS = (grpc.StatusCode.RESOURCE_EXHAUSTED, grpc.StatusCode.UNAVAILABLE)
#: Errors of our server begin with their subject, unlike gRPC's own messages.
_OURS = re.compile(r"([\w ]+?)(?: '.*?')?: got .*, expected ", re.DOTALL)
#: gRPC's messages for requests that no server has seen. 7 is HTTP/2's REFUSED_STREAM.
_UNSEEN = ("failed to connect", "DNS resolution failed", "connections to all backends failing", "error code 7")


class Sender:
    """Client that sends requests without waiting for responses, and records their outcomes; a context manager."""

    def __init__(self, url: str, workload: Workload, plan: Plan) -> None:
        self.interrupted, self.record = False, Record()
        self._url, self._workload, self._plan = url, workload, plan
        self._metadata = plan.credentials.metadata() if plan.credentials else None
        self._tasks: set[asyncio.Task[None]] = set()
        self._turn = 0

    async def __aenter__(self) -> Sender:
        credentials, count = self._plan.credentials, self._plan.channels
        self._channels = [open_channel(self._url, credentials, grpc.aio, [*_CHANNEL_OPTIONS]) for _ in range(count)]
        self._methods = [channel.unary_unary(_METHOD) for channel in self._channels]
        ready = asyncio.gather(*(channel.channel_ready() for channel in self._channels))
        try:
            await asyncio.wait_for(ready, _CONNECT_SECONDS)  # now, so that no request's latency includes it
        except asyncio.TimeoutError:
            given = Raw(f"no connection in {_CONNECT_SECONDS:g} s")
            fix = "Is it running? `fewheads serve REPOSITORY` starts one."
            raise ServerError(f"server at {self._url}", given=given, expected="one that listens", fix=fix) from None
        return self

    async def __aexit__(self, *_: object) -> None:
        for channel in self._channels:
            await channel.close()

    async def open_loop(self, times: Iterable[float], advanced: Callable[[float], None] = lambda now: None) -> None:
        """Send a request at each of ``times``, in seconds from now, and return when all have ended.

        ``advanced`` receives the elapsed seconds about ten times a second.
        """
        begun = time.perf_counter()
        beat = 0.0
        for due in times:
            while (ahead := begun + due - time.perf_counter()) > 0 and not self.interrupted:
                advanced(due - ahead)
                await asyncio.sleep(min(ahead, 0.1))
            if self.interrupted:
                break
            lag = max(time.perf_counter() - begun - due, 0.0)
            if due >= beat:
                advanced(due)
                beat = due + 0.1
            self._send(begun, due, lag)
            if lag > 0.001:
                await asyncio.sleep(0)  # let responses in
        while self._tasks:
            await asyncio.wait(self._tasks)

    async def closed_loop(self, clients: int, seconds: float, at_least: int = 1) -> float:
        """Let clients send, each waiting for its response before the next request; return the elapsed seconds."""
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
        """Stop sending, and cancel the requests in flight."""
        self.interrupted = True
        for task in self._tasks:
            task.cancel()

    def _send(self, begun: float, due: float, lag: float) -> asyncio.Task[None] | None:
        number, body = self._workload.draw()
        row = self.record.sent(due, lag, number)
        limit = self._plan.max_outstanding
        if len(self._tasks) >= limit:
            self.record.ended(row, lag, UNSENT, f"{limit} in flight")
            return None
        kind = self._workload.kinds[number]
        task = asyncio.get_running_loop().create_task(self._infer(row, body, kind, begun + due, lag))
        self._tasks.add(task)
        task.add_done_callback(lambda done: self._ended(done, row, begun + due))
        return task

    def _ended(self, task: asyncio.Task[None], row: int, due: float) -> None:
        self._tasks.discard(task)
        if task.cancelled():  # perhaps before it started, so it cannot record that itself
            self.record.ended(row, time.perf_counter() - due, CANCELLED, "interrupted")

    async def _infer(self, row: int, body: bytes, kind: Kind, due: float, lag: float) -> None:
        limit = kind.deadline_ms / 1e3
        left = limit - lag
        by_client = bool(limit) and self._plan.enforcer != "server"
        if limit and self._plan.enforcer != "client":
            body += timeout_tail(left)
        self._turn = (self._turn + 1) % len(self._methods)
        timeout = left if by_client else max(left, 0.0) + self._plan.patience_seconds
        try:
            response = await self._methods[self._turn](body, timeout=timeout, metadata=self._metadata)
        except grpc.aio.AioRpcError as error:
            self.record.ended(row, time.perf_counter() - due, *_ending(error, by_client))
        else:
            latency = time.perf_counter() - due
            tier, loops = _facts(response, kind) if kind.tiered or kind.loops else ("", math.nan)
            self.record.answered(row, latency, late=bool(limit) and latency > limit, tier=tier, loops=loops)


def _ending(error: grpc.aio.AioRpcError, by_client: bool) -> tuple[str, str, float | None]:
    """Return the outcome, its cause, and the server's hint in ms when to retry."""
    code, details = error.code(), error.details() or ""
    ours = _OURS.match(details)
    cause = f"{code.name} {ours[1] if ours else details[:60]}".strip()
    retry = next((float(value) for key, value in error.trailing_metadata() or () if key == RETRY_AFTER_MS), None)
    if code is grpc.StatusCode.DEADLINE_EXCEEDED:
        # Without a deadline of the client's, its patience has ended.
        return (EXPIRED if by_client or ours else LOST), cause, retry
    if code is grpc.StatusCode.CANCELLED:
        return CANCELLED, cause, retry
    if code is grpc.StatusCode.UNAVAILABLE and not ours:
        # The request was never sent, or the connection broke while it was in flight.
        return (FAILED if any(words in details for words in _UNSEEN) else LOST), cause, retry
    return (REFUSED if code in _REFUSALS else FAILED), cause, retry


def _facts(response: bytes, kind: Kind) -> tuple[str, float]:
    """Return the tier that answered, empty if the model has one, and the mean loops of the rows, NaN without any."""
    message = pb.ModelInferResponse.FromString(response)
    tier = message.parameters["tier"].string_param  # a map of Protobuf adds what it lacks, empty
    names = [output.name for output in message.outputs]
    if kind.loops not in names:
        return tier, math.nan
    return tier, float(np.frombuffer(message.raw_output_contents[names.index(kind.loops)], np.int32).mean())


def run(work: Callable[[], Coroutine[Any, Any, T]], interrupt: Callable[[], None]) -> T:
    """Run a coroutine on a new event loop, where Ctrl-C only calls ``interrupt``.

    The loop uses select: epoll counts in ms, which would delay timers by up to one.
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
