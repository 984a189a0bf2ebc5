"""The asyncio client: :class:`edge.client.Client`, awaited. Cancelling a call also cancels it at the server."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterable, Callable, Coroutine, Iterable
from contextlib import aclosing, suppress
from functools import partial
from typing import Any, Concatenate, ParamSpec, TypeVar

import grpc

from edge.client import rpcs
from edge.client.connection import BaseClient
from edge.client.inference import InferRequest
from edge.client.rpcs import CallSpec, PendingRequests, StreamAnswer
from edge.errors import ServerError
from edge.pb import telemetry_pb2

P = ParamSpec("P")
R = TypeVar("R")


def _awaited(rpc: Callable[P, CallSpec[R]]) -> Callable[Concatenate[AsyncClient, P], Coroutine[Any, Any, R]]:
    async def method(self: AsyncClient, /, *arguments: P.args, **options: P.kwargs) -> R:
        return await self._call(partial(rpc, *arguments, **options))

    return rpcs.as_method_of(rpc, method)


class AsyncClient(BaseClient):
    """Asyncio client of one server, or of several; :class:`BaseClient` lists its arguments.

    Make it, use it and close it in one event loop.
    """

    _transport = grpc.aio

    infer = _awaited(rpcs.infer)
    metadata = _awaited(rpcs.metadata)
    preprocess = _awaited(rpcs.preprocess)
    space = _awaited(rpcs.space)
    index = _awaited(rpcs.index)
    load = _awaited(rpcs.load)
    unload = _awaited(rpcs.unload)
    telemetry = _awaited(rpcs.telemetry)

    async def __aenter__(self) -> AsyncClient:
        return self

    async def __aexit__(self, *error: object) -> None:
        await self.close()

    async def infer_stream(
        self,
        requests: AsyncIterable[InferRequest] | Iterable[InferRequest],
        *,
        timeout_seconds: float | None = None,
        server: str = "",
    ) -> AsyncGenerator[StreamAnswer, None]:
        """Send many requests on one stream; as :meth:`edge.client.Client.infer_stream`.

        ``requests`` may be asynchronous. To leave the loop over the answers early, wrap them in
        :func:`contextlib.aclosing`: Python closes an abandoned asynchronous generator only at some later time.
        """
        pending = PendingRequests()
        messages = (
            pending.encode_each(requests) if isinstance(requests, AsyncIterable) else pending.encode_all(requests)
        )
        async with aclosing(self._stream("ModelStreamInfer", messages, timeout_seconds, server)) as responses:
            async for response, answering in responses:
                yield pending.decode(response, answering)
        pending.check()

    async def ready(self, model: str = "", version: str = "", *, server: str = "") -> bool:
        """Return whether any server, or the one named, is ready; as :meth:`edge.client.Client.ready`."""
        for address in [server] if server else self.servers:
            with suppress(ServerError):
                if await self._call(partial(rpcs.ready, model, version, address)):
                    return True
        return False

    async def watch(self, interval_ms: int = 0, *, server: str = "") -> AsyncGenerator[telemetry_pb2.Reading, None]:
        """Yield a telemetry reading of one server after every interval; as :meth:`edge.client.Client.watch`."""
        request = telemetry_pb2.WatchRequest(interval_ms=interval_ms)
        async with aclosing(self._stream("Watch", request, None, server)) as readings:
            async for reading, _ in readings:
                yield reading

    async def close(self) -> None:
        """Close the connections; calls in progress end with CANCELLED."""
        self._closed = True
        for channel in self._channels:
            await channel.close()

    async def _call(self, make: Callable[[], CallSpec[R]]) -> R:
        rpc, attempts = self._begin_call(make)
        while True:
            try:
                response = await self._start(attempts, rpc.method, rpc.request)
            except grpc.RpcError as error:
                pause = self._failed(attempts, error, rpc.subject)
            else:
                return rpc.read(response, self._answered(attempts))
            await asyncio.sleep(pause)
            self._check_usable()

    async def _stream(
        self, method: str, request: Any, timeout_seconds: float | None, server: str
    ) -> AsyncGenerator[tuple[Any, str], None]:
        attempts, finds = self._begin_stream(server, timeout_seconds)
        if finds:
            attempts.server = self.servers.index(await self._call(partial(rpcs.live, timeout_seconds)))
        call = self._start(attempts, method, request)
        try:
            async for response in call:
                yield response, self._answered(attempts).server
        except grpc.RpcError as error:
            self._failed(attempts, error, method)
        finally:
            call.cancel()
