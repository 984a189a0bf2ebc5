"""The asyncio client: :class:`edge.client.Client`, awaited. Cancelling a call also cancels it at the server."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, AsyncIterable, AsyncIterator, Callable, Coroutine, Iterable
from contextlib import aclosing
from types import TracebackType
from typing import Any, Concatenate, ParamSpec, TypeVar

import grpc

from edge.client import rpcs
from edge.client.base import BaseClient
from edge.client.inference import InferRequest
from edge.client.refusals import Refusal
from edge.client.rpcs import PendingRequests, Rpc, StreamAnswer
from edge.errors import ServerError
from edge.pb import inference_pb2 as pb
from edge.pb import telemetry_pb2

P = ParamSpec("P")
R = TypeVar("R")


def _awaited(rpc: Callable[P, Rpc[R]]) -> Callable[Concatenate[AsyncClient, P], Coroutine[Any, Any, R]]:
    """Return the coroutine method that makes a call and awaits its answer."""

    @rpcs.as_method_of(rpc)
    async def method(self: AsyncClient, /, *arguments: P.args, **options: P.kwargs) -> R:
        return await self._call(rpc(*arguments, **options))

    return method


class AsyncClient(BaseClient):
    """Asyncio client of one server, or of several; :class:`BaseClient` lists its arguments.

    Make it, use it and close it in one event loop.
    """

    _transport = grpc.aio

    infer = _awaited(rpcs.infer)
    metadata = _awaited(rpcs.metadata)
    index = _awaited(rpcs.index)
    load = _awaited(rpcs.load)
    unload = _awaited(rpcs.unload)
    telemetry = _awaited(rpcs.telemetry)

    async def __aenter__(self) -> AsyncClient:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def infer_stream(
        self,
        requests: AsyncIterable[InferRequest] | Iterable[InferRequest],
        *,
        timeout_seconds: float | None = None,
        server: str = "",
    ) -> AsyncIterator[StreamAnswer]:
        """Send many requests on one stream; as :meth:`edge.client.Client.infer_stream`.

        ``requests`` may be asynchronous. To leave the loop over the answers early, wrap them in
        :func:`contextlib.aclosing`: Python closes an abandoned asynchronous generator only at some later time.
        """
        pending = PendingRequests()

        async def messages() -> AsyncIterator[pb.ModelInferRequest]:
            try:
                if isinstance(requests, AsyncIterable):
                    async for request in requests:
                        yield pending.encode(request)
                else:
                    for request in requests:
                        yield pending.encode(request)
            except Exception as error:  # raised below, where the answers are read
                pending.failure = error

        async with aclosing(self._stream(rpcs.STREAM_INFER, messages(), timeout_seconds, server)) as responses:
            async for response, answering in responses:
                yield pending.decode(response, answering)
        if pending.failure:
            raise pending.failure

    async def ready(self, model: str = "", version: str = "", *, server: str = "") -> bool:
        """Return whether any server, or the one named, is ready; as :meth:`edge.client.Client.ready`."""
        for one in [server] if server else self.servers:
            if await self._ready(model, version, one):
                return True
        return False

    async def _ready(self, model: str, version: str, server: str) -> bool:
        try:
            return await self._call(rpcs.ready(model, version, server))
        except ServerError:
            return False

    async def watch(self, interval_ms: int = 0, *, server: str = "") -> AsyncIterator[telemetry_pb2.Reading]:
        """Yield a telemetry reading of one server after every interval; as :meth:`edge.client.Client.watch`."""
        async with aclosing(self._stream(rpcs.WATCH, rpcs.watch(interval_ms), None, server)) as readings:
            async for reading, _ in readings:
                yield reading

    async def close(self) -> None:
        """Close the connections; calls in progress end with CANCELLED."""
        self._pool.close()
        for connection in self._connections:
            await connection.channel.close()

    async def _call(self, rpc: Rpc[R]) -> R:
        attempts = self._pool.call(rpc)
        while True:
            refusal, started_ns = None, time.perf_counter_ns()
            try:
                connection = self._connections[attempts.server]
                response = await connection.call(rpc.method, rpc.request, attempts.remaining())
            except grpc.RpcError as error:
                refusal = Refusal.of(error)
            if refusal is None:
                return rpc.read(response, self._pool.answered(attempts, started_ns))
            await asyncio.sleep(self._pool.refused(attempts, refusal, rpc.subject))
            self._pool.check()

    async def _stream(
        self, method: str, request: Any, timeout_seconds: float | None, server: str
    ) -> AsyncGenerator[tuple[Any, str], None]:
        """Yield the answers, each with the address of the server that gave it."""
        attempts = self._pool.stream(timeout_seconds, server)
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
        self._pool.refused(attempts, refusal, method)
