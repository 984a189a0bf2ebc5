"""Blocking client: NumPy arrays in, NumPy arrays out.

:mod:`edge.client.retries` says which calls are repeated, and which servers are called.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Generator, Iterable
from contextlib import closing, suppress
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


def _blocking(rpc: Callable[P, CallSpec[R]]) -> Callable[Concatenate[Client, P], R]:
    def method(self: Client, /, *arguments: P.args, **options: P.kwargs) -> R:
        return self._call(partial(rpc, *arguments, **options))

    return rpcs.as_method_of(rpc, method)


class Client(BaseClient):
    """Blocking client of one server, or of several; :class:`BaseClient` lists its arguments.

    Safe to share between threads. It cannot be used after a fork: make one in each process.
    """

    _transport = grpc

    infer = _blocking(rpcs.infer)
    metadata = _blocking(rpcs.metadata)
    preprocess = _blocking(rpcs.preprocess)
    space = _blocking(rpcs.space)
    index = _blocking(rpcs.index)
    load = _blocking(rpcs.load)
    unload = _blocking(rpcs.unload)
    telemetry = _blocking(rpcs.telemetry)

    def __enter__(self) -> Client:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def infer_stream(
        self, requests: Iterable[InferRequest], *, timeout_seconds: float | None = None, server: str = ""
    ) -> Generator[StreamAnswer, None, None]:
        """Send many requests on one stream, and yield an answer to each, in the order of the requests.

        The answer to a request that the server refused is an :class:`InferFailure`, after which the stream goes on.
        A thread of gRPC takes the requests from the iterator as fast as the server accepts them. The stream stays with
        one server, and nothing of it is sent again; while any server fails, a call before it finds one that answers.
        Nothing is sent before the first answer is awaited; closing the iterator cancels the stream.

        Args:
            requests: the requests; what the iterator raises is raised after the answers to the requests before it.
            timeout_seconds: time limit of the whole stream; None for no limit.
            server: the server to call; empty for the next in turn.

        Raises:
            ServerError: the stream broke; requests without an answer get none.
        """
        pending = PendingRequests()
        messages = pending.encode_all(requests)
        with closing(self._stream("ModelStreamInfer", messages, timeout_seconds, server)) as responses:
            for response, answering in responses:
                yield pending.decode(response, answering)
        pending.check()

    def ready(self, model: str = "", version: str = "", *, server: str = "") -> bool:
        """Return whether any server, or the one named, is ready. A server that cannot be reached is not.

        Args:
            model: name of a model; empty for the server as a whole.
            version: of the model; empty for the highest.
            server: the only server to call.
        """
        for address in [server] if server else self.servers:
            with suppress(ServerError):
                if self._call(partial(rpcs.ready, model, version, address)):
                    return True
        return False

    def watch(self, interval_ms: int = 0, *, server: str = "") -> Generator[telemetry_pb2.Reading, None, None]:
        """Yield a telemetry reading of one server now and after every interval, until the iterator is closed.

        Args:
            interval_ms: at least 100; 0 for the server's default.
            server: the server to call; empty for the next in turn.
        """
        request = telemetry_pb2.WatchRequest(interval_ms=interval_ms)
        with closing(self._stream("Watch", request, None, server)) as readings:
            yield from (reading for reading, _ in readings)

    def close(self) -> None:
        """Close the connections; calls in progress end with CANCELLED."""
        self._closed = True
        for channel in self._channels:
            channel.close()

    def _call(self, make: Callable[[], CallSpec[R]]) -> R:
        rpc, attempts = self._begin_call(make)
        while True:
            try:
                response = self._start(attempts, rpc.method, rpc.request)
            except grpc.RpcError as error:
                pause = self._failed(attempts, error, rpc.subject)
            except ValueError:
                self._check_usable()  # grpc raises it if another thread has closed the channel
                raise
            else:
                return rpc.read(response, self._answered(attempts))
            time.sleep(pause)
            self._check_usable()

    def _stream(
        self, method: str, request: Any, timeout_seconds: float | None, server: str
    ) -> Generator[tuple[Any, str], None, None]:
        attempts, finds = self._begin_stream(server, timeout_seconds)
        if finds:
            attempts.server = self.servers.index(self._call(partial(rpcs.live, timeout_seconds)))
        call = self._start(attempts, method, request)
        try:
            for response in call:
                yield response, self._answered(attempts).server
        except grpc.RpcError as error:
            self._failed(attempts, error, method)
        finally:
            call.cancel()
