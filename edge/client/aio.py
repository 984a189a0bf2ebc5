"""The client for asyncio: as :mod:`edge.client`, awaited. Cancelling a call cancels it at the server too."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, AsyncIterable, AsyncIterator, Iterable, Mapping, Sequence
from contextlib import aclosing
from types import TracebackType
from typing import Any, TypeVar

import grpc

from edge.client import rpcs
from edge.client.connection import Connection, Credentials
from edge.client.fleet import DEFAULT_URL, Fleet
from edge.client.inference import InferRequest, InferResult
from edge.client.refusals import Refusal
from edge.client.retries import DEFAULT_RETRIES, Retries
from edge.client.rpcs import Rpc, Sent, Specs, StreamAnswer
from edge.datatypes import Array
from edge.errors import ServerError
from edge.pb import inference_pb2 as pb
from edge.pb import telemetry_pb2

R = TypeVar("R")


class AsyncClient:
    """A connection to one server, or to several of the same models; to be made, used and closed in one event loop.

    Arguments, answers and errors are those of :class:`edge.client.Client`.

    Args:
        url: ``host:port``, or several of them, which are asked in turns.
        timeout_seconds: the time for a call, all its attempts together.
        retries: how often something is sent again.
        credentials: TLS and a token, the same for all servers; None uses neither.

    Attributes:
        servers: as they were named.

    Raises:
        UsageError: there is no server, or one twice; or the time is none.
    """

    def __init__(
        self,
        url: str | Sequence[str] = DEFAULT_URL,
        timeout_seconds: float = 10.0,
        *,
        retries: Retries = DEFAULT_RETRIES,
        credentials: Credentials | None = None,
    ) -> None:
        self._fleet = Fleet(url, timeout_seconds, retries, self._watch)
        self.servers = self._fleet.urls
        self._connections = [Connection(server, credentials, grpc.aio) for server in self.servers]
        self._watched: set[int] = set()

    async def __aenter__(self) -> AsyncClient:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def infer(
        self,
        model: str,
        inputs: Mapping[str, Array],
        *,
        version: str = "",
        outputs: Sequence[str] = (),
        request_id: str = "",
        priority: int = 0,
        tier: str = "",
        policy: str = "",
        timings: bool = False,
        timeout_seconds: float | None = None,
        server: str = "",
    ) -> InferResult:
        """Ask a model; as :meth:`edge.client.Client.infer`.

        Raises:
            ServerError: no server can be reached, or one refused; it holds status, server and attempts.
            UsageError: an input is no tensor of the protocol, or an argument makes no sense.
        """
        request = InferRequest(
            model=model,
            inputs=inputs,
            version=version,
            outputs=outputs,
            request_id=request_id,
            priority=priority,
            tier=tier,
            policy=policy,
            timings=timings,
        )
        return await self._call(rpcs.infer(request), timeout_seconds, server)

    async def infer_stream(
        self,
        requests: AsyncIterable[InferRequest] | Iterable[InferRequest],
        *,
        timeout_seconds: float | None = None,
        server: str = "",
    ) -> AsyncIterator[StreamAnswer]:
        """Ask many questions on one connection, and yield the answers in the order of the questions.

        As :meth:`edge.client.Client.infer_stream`; ``requests`` may be asynchronous. Leave the loop over the answers
        early only with :func:`contextlib.aclosing` around them: Python ends an abandoned generator when it comes by.

        Raises:
            ServerError: the stream broke; what was not answered by then will not be.
            Exception: what ``requests`` raised, once the questions before that are answered.
        """
        sent = Sent()

        async def messages() -> AsyncIterator[pb.ModelInferRequest]:
            try:
                if isinstance(requests, AsyncIterable):
                    async for request in requests:
                        yield sent.encode(request)
                else:
                    for request in requests:
                        yield sent.encode(request)
            except Exception as error:  # raised below, where the answers are read
                sent.failure = error

        async with aclosing(self._stream(rpcs.STREAM_INFER, messages(), timeout_seconds, server)) as responses:
            async for response, asked in responses:
                yield sent.decode(response, asked)
        if sent.failure:
            raise sent.failure

    async def metadata(self, model: str, version: str = "", *, server: str = "") -> Specs:
        """Return a model's inputs and outputs.

        Raises:
            ServerError: as :meth:`infer`.
        """
        return await self._call(rpcs.metadata(model, version), None, server)

    async def index(self, *, server: str = "") -> list[dict[str, str]]:
        """Return name, version, state and reason of every bundle of one server.

        Raises:
            ServerError: as :meth:`infer`.
        """
        return await self._call(rpcs.index(), None, server)

    async def load(self, model: str, *, timeout_seconds: float | None = None, server: str = "") -> None:
        """Load a model, or load it again; as :meth:`edge.client.Client.load`."""
        await self._call(rpcs.load_model(model), timeout_seconds, self._fleet.the_one(server, "load"))

    async def unload(self, model: str, *, timeout_seconds: float | None = None, server: str = "") -> None:
        """Unload a model; as :meth:`edge.client.Client.load`."""
        await self._call(rpcs.unload_model(model), timeout_seconds, self._fleet.the_one(server, "unload"))

    async def ready(self, model: str = "", version: str = "", *, server: str = "") -> bool:
        """Say whether any server, or the one that is named, is ready; one that cannot be reached is not."""
        for one in [server] if server else self.servers:
            if await self._ready(model, version, one):
                return True
        return False

    async def _ready(self, model: str, version: str, server: str) -> bool:
        try:
            return await self._call(rpcs.ready(model, version), None, server)
        except ServerError:
            return False

    async def telemetry(self, *, server: str = "") -> telemetry_pb2.Reading:
        """Return one telemetry reading of one server.

        Raises:
            ServerError: as :meth:`infer`.
        """
        return await self._call(rpcs.telemetry(), None, server)

    async def watch(self, interval_ms: int = 0, *, server: str = "") -> AsyncIterator[telemetry_pb2.Reading]:
        """Yield a telemetry reading of one server now and after every interval; as :meth:`edge.client.Client.watch`."""
        async with aclosing(self._stream(rpcs.WATCH, rpcs.watch(interval_ms), None, server)) as readings:
            async for reading, _ in readings:
                yield reading

    async def close(self) -> None:
        """Close the connections; calls that are on their way end with CANCELLED."""
        self._fleet.close()
        for connection in self._connections:
            await connection.channel.close()

    async def _call(self, rpc: Rpc[R], timeout_seconds: float | None, server: str) -> R:
        attempts = self._fleet.call(rpc.repeatable, timeout_seconds, server)
        while True:
            refusal, started_ns = None, time.perf_counter_ns()
            try:
                connection = self._connections[attempts.server]
                response = await connection.call(rpc.method, rpc.request, attempts.remaining())
            except grpc.RpcError as error:
                refusal = Refusal.of(error)
            if refusal is None:
                return rpc.read(response, self._fleet.trip(attempts, started_ns))
            await asyncio.sleep(self._fleet.refused(attempts, refusal, rpc.subject))
            self._fleet.check()

    async def _stream(
        self, method: str, request: Any, timeout_seconds: float | None, server: str
    ) -> AsyncGenerator[tuple[Any, str], None]:
        """Yield the answers, each with the server that gave it."""
        attempts = self._fleet.stream(timeout_seconds, server)
        call = self._connections[attempts.server].call(method, request, attempts.remaining())
        try:
            async for response in call:
                attempts.answered()
                yield response, self.servers[attempts.server]
            return
        except grpc.RpcError as error:
            refusal = Refusal.of(error)
        finally:
            call.cancel()
        self._fleet.refused(attempts, refusal, method)

    def _watch(self, server: int) -> None:
        if server in self._watched:
            return
        self._watched.add(server)

        def stands() -> None:
            self._watched.discard(server)
            self._fleet.rotation.connected(server)

        self._connections[server].when_it_stands(stands)
