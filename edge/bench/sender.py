"""Sends requests when they are due and records their outcomes, on an event loop of its own."""

from __future__ import annotations

import asyncio
import math
import re
import selectors
import signal
import threading
import time
from collections.abc import Callable, Coroutine, Iterable, Sequence
from typing import Any, TypeVar

import grpc
import msgspec
import numpy as np

from edge.bench.inputs import ModelRequests, drawn
from edge.bench.load_plan import LoadPlan
from edge.client.connection import open_channel
from edge.client.inference import InferRequest, encode
from edge.errors import Raw, ServerError
from edge.pb import inference_pb2 as pb
from edge.protocol import RETRY_AFTER_MS

T = TypeVar("T")

#: Each request has one outcome.
#:
#: - ``in_time``, ``late``: it got a response, within its deadline or after it
#: - ``refused``: the server rejected it at once, perhaps with a time to retry after
#: - ``expired``: its deadline passed, here or in the server
#: - ``cancelled``: by this client, after an interrupt, or by the server
#: - ``failed``: any other error, also that there was no connection
#: - ``lost``: it was sent, and no response came
#: - ``unsent``: too many others were in flight
OUTCOMES = ("in_time", "late", "refused", "expired", "cancelled", "failed", "lost", "unsent")
IN_TIME, LATE, REFUSED, EXPIRED, CANCELLED, FAILED, LOST, UNSENT = OUTCOMES
_CONNECT_SECONDS = 10.0
#: Time after which a response is lost if no deadline of the client ends the request.
_PATIENCE_SECONDS = 30.0
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
_OURS = re.compile(r"([\w ]+?)(?: '.*?')?: (?:got .*, )?expected ", re.DOTALL)
#: gRPC's messages for requests that no server has seen. 7 is HTTP/2's REFUSED_STREAM.
_UNSEEN = ("failed to connect", "DNS resolution failed", "connections to all backends failing", "error code 7")


class SentRequest(msgspec.Struct, gc=False):
    """One request and what became of it; it stays ``lost`` if it never ends.

    Attributes:
        due_seconds: when it was due, from the start.
        lag_seconds: how much later it was sent.
        latency_seconds: from when it was due to its end; NaN if it never ends.
        cause: of an end without a response, in a few words.
        tier: that answered; empty if the model has one.
        loops: mean of its rows; NaN without any.
        retry_ms: the server's hint when to retry; NaN without one.
    """

    model: str
    due_seconds: float
    lag_seconds: float
    outcome: str = LOST
    latency_seconds: float = math.nan
    cause: str = ""
    tier: str = ""
    loops: float = math.nan
    retry_ms: float = math.nan

    @property
    def answered(self) -> bool:
        """Whether it got a response, in time or late."""
        return self.outcome in (IN_TIME, LATE)


class Sender:
    """Client that sends requests without waiting for responses, and keeps their outcomes."""

    def __init__(self, url: str, models: Sequence[ModelRequests], plan: LoadPlan) -> None:
        self.interrupted = False
        self.sent: list[SentRequest] = []
        self._url, self._drawn, self._plan = url, drawn(models, plan.seed), plan
        self._metadata = plan.credentials.metadata() if plan.credentials else None
        self._tasks: set[asyncio.Task[None]] = set()

    def run(self, work: Callable[[], Coroutine[Any, Any, T]]) -> T:
        """Connect, and run one of the loops below on a new event loop, where Ctrl-C only interrupts it.

        The event loop uses select: epoll counts in ms, which would delay timers by up to one.
        """
        loop = asyncio.SelectorEventLoop(selectors.SelectSelector())
        in_main = threading.current_thread() is threading.main_thread()
        try:
            if in_main:
                loop.add_signal_handler(signal.SIGINT, self._interrupt)
            return loop.run_until_complete(self._connected(work))
        finally:
            if in_main:
                loop.remove_signal_handler(signal.SIGINT)
            loop.close()

    async def _connected(self, work: Callable[[], Coroutine[Any, Any, T]]) -> T:
        credentials, count = self._plan.credentials, self._plan.channels
        channels = [open_channel(self._url, credentials, grpc.aio, [*_CHANNEL_OPTIONS]) for _ in range(count)]
        self._methods = [channel.unary_unary(_METHOD) for channel in channels]
        ready = asyncio.gather(*(channel.channel_ready() for channel in channels))
        try:
            await asyncio.wait_for(ready, _CONNECT_SECONDS)  # now, so that no request's latency includes it
        except asyncio.TimeoutError:
            given = Raw(f"no connection in {_CONNECT_SECONDS:g} s")
            fix = "Is it running? `fewheads serve REPOSITORY` starts one."
            raise ServerError(f"server at {self._url}", given=given, expected="one that listens", fix=fix) from None
        try:
            return await work()
        finally:
            for channel in channels:
                await channel.close()

    async def open_loop(self, times: Iterable[float], advanced: Callable[[float], None] = lambda now: None) -> None:
        """Send a request at each of ``times``, in seconds from now, and return when all have ended.

        ``advanced`` receives the elapsed seconds about ten times a second.
        """
        begun, beat = time.perf_counter(), 0.0
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

    async def closed_loop(self, clients: int, seconds: float) -> float:
        """Let clients send, each waiting for its response before the next request; return the elapsed seconds."""
        begun = time.perf_counter()

        async def client() -> None:
            while not self.interrupted and time.perf_counter() - begun < seconds:
                if task := self._send(begun, time.perf_counter() - begun, 0.0):
                    await asyncio.wait([task])

        await asyncio.gather(*(client() for _ in range(clients)))
        return time.perf_counter() - begun

    def _interrupt(self) -> None:
        self.interrupted = True
        for task in self._tasks:
            task.cancel()

    def _send(self, begun: float, due: float, lag: float) -> asyncio.Task[None] | None:
        model, message = next(self._drawn)
        sent, limit = SentRequest(model.model, due, lag), self._plan.max_outstanding
        self.sent.append(sent)
        if len(self._tasks) >= limit:
            sent.outcome, sent.latency_seconds, sent.cause = UNSENT, lag, f"{limit} in flight"
            return None
        method = self._methods[len(self.sent) % len(self._methods)]
        task = asyncio.get_running_loop().create_task(self._infer(method, sent, model, message, begun + due))
        self._tasks.add(task)
        task.add_done_callback(lambda done: self._ended(done, sent, begun + due))
        return task

    def _ended(self, task: asyncio.Task[None], sent: SentRequest, due: float) -> None:
        self._tasks.discard(task)
        if task.cancelled():  # perhaps before it started, so it cannot record that itself
            sent.outcome, sent.latency_seconds, sent.cause = CANCELLED, time.perf_counter() - due, "interrupted"

    async def _infer(self, method: Any, sent: SentRequest, model: ModelRequests, message: bytes, due: float) -> None:
        plan, limit = self._plan, (self._plan.deadline_ms or 0.0) / 1e3
        left = limit - sent.lag_seconds
        by_client = bool(limit) and plan.enforcer != "server"
        if limit and plan.enforcer != "client":
            timeout = InferRequest("", {}, timeout_seconds=max(left, 1e-6))
            message += encode(timeout, in_stream=True).SerializeToString()  # concatenated messages merge
        timeout_seconds = left if by_client else max(left, 0.0) + _PATIENCE_SECONDS
        try:
            response = await method(message, timeout=timeout_seconds, metadata=self._metadata)
            sent.latency_seconds = time.perf_counter() - due
        except grpc.aio.AioRpcError as error:
            sent.latency_seconds = time.perf_counter() - due
            sent.outcome, sent.cause, sent.retry_ms = _ending(error, by_client)
        else:
            sent.outcome = LATE if limit and sent.latency_seconds > limit else IN_TIME
            if model.tiered or model.loops:
                sent.tier, sent.loops = _facts(response, model.loops)


def _ending(error: grpc.aio.AioRpcError, by_client: bool) -> tuple[str, str, float]:
    """Return the outcome, its cause, and the server's hint in ms when to retry, NaN without one."""
    code, details = error.code(), error.details() or ""
    ours = _OURS.match(details)
    cause = f"{code.name} {ours[1] if ours else details[:60]}".strip()
    retry = next((float(value) for key, value in error.trailing_metadata() or () if key == RETRY_AFTER_MS), math.nan)
    if code is grpc.StatusCode.DEADLINE_EXCEEDED:
        # Without a deadline of the client's, its patience has ended.
        return (EXPIRED if by_client or ours else LOST), cause, retry
    if code is grpc.StatusCode.CANCELLED:
        return CANCELLED, cause, retry
    if code is grpc.StatusCode.UNAVAILABLE and not ours:
        # The request was never sent, or the connection broke while it was in flight.
        return (FAILED if any(words in details for words in _UNSEEN) else LOST), cause, retry
    return (REFUSED if code in _REFUSALS else FAILED), cause, retry


def _facts(response: bytes, loops: str) -> tuple[str, float]:
    """Return the tier that answered, empty if the model has one, and the mean of the output ``loops``, NaN without."""
    message = pb.ModelInferResponse.FromString(response)
    tier = message.parameters["tier"].string_param  # a map of Protobuf adds what it lacks, empty
    names = [output.name for output in message.outputs]
    if loops not in names:
        return tier, math.nan
    return tier, float(np.frombuffer(message.raw_output_contents[names.index(loops)], np.int32).mean())
