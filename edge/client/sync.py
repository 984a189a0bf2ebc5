"""The blocking client: NumPy in, NumPy out, where the time went, and which server answered.

Several servers are asked in turns; :mod:`edge.client.retries` says what is sent again, and
:mod:`edge.client.rotation` which servers are left out. :class:`edge.client.aio.AsyncClient` is the same for asyncio.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import closing
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


class Client:
    """A connection to one server, or to several of the same models. Safe to share between threads.

    Make one in each process: it cannot be used after a fork, and says so.

    Args:
        url: ``host:port``, or several of them, which are asked in turns.
        timeout_seconds: the time for a call, all its attempts together.
        retries: how often something is sent again; :data:`ONCE` never does.
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
        self._connections = [Connection(server, credentials, grpc) for server in self.servers]
        self._watched: set[int] = set()
        self._lock = threading.Lock()

    def __enter__(self) -> Client:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def infer(
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
        """Ask a model.

        Args:
            model: its name.
            inputs: its inputs by name; text as arrays of ``bytes`` or ``str``, see :func:`text`.
            version: empty for the highest.
            outputs: which to send back; none means all of them.
            request_id: comes back with the answer.
            priority: from 1, the highest, to 10; 0 is the server's default.
            tier: which tier shall answer; empty leaves it open.
            policy: how the server shall choose the tier; empty for its own way.
            timings: ask for the stage times too.
            timeout_seconds: for this call, all attempts together; None is the client's.
            server: the only one to ask; empty for the next in turn.

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
        return self._call(rpcs.infer(request), timeout_seconds, server)

    def infer_stream(
        self, requests: Iterable[InferRequest], *, timeout_seconds: float | None = None, server: str = ""
    ) -> Iterator[StreamAnswer]:
        """Ask many questions on one connection, and yield the answers in the order of the questions.

        A thread of gRPC takes the questions from the iterator, as fast as the server takes them. The stream stays with
        one server, and nothing of it is sent again. Closing the iterator cancels what is on its way; nothing is sent
        before its first answer is asked for.

        Args:
            requests: the questions.
            timeout_seconds: for the whole stream; None has no end.
            server: which to ask; empty for the next in turn.

        Yields:
            An :class:`InferFailure` where the server refused one question; the stream goes on after it.

        Raises:
            ServerError: the stream broke; what was not answered by then will not be.
            Exception: what ``requests`` raised, once the questions before that are answered.
        """
        sent = Sent()

        def messages() -> Iterator[pb.ModelInferRequest]:
            try:
                for request in requests:
                    yield sent.encode(request)
            except Exception as error:  # raised below, on the caller's thread
                sent.failure = error

        with closing(self._stream(rpcs.STREAM_INFER, messages(), timeout_seconds, server)) as responses:
            for response, asked in responses:
                yield sent.decode(response, asked)
        if sent.failure:
            raise sent.failure

    def metadata(self, model: str, version: str = "", *, server: str = "") -> Specs:
        """Return a model's inputs and outputs.

        Raises:
            ServerError: as :meth:`infer`.
        """
        return self._call(rpcs.metadata(model, version), None, server)

    def index(self, *, server: str = "") -> list[dict[str, str]]:
        """Return name, version, state and reason of every bundle of one server.

        Raises:
            ServerError: as :meth:`infer`.
        """
        return self._call(rpcs.index(), None, server)

    def load(self, model: str, *, timeout_seconds: float | None = None, server: str = "") -> None:
        """Load a model, or load it again. It is asked for once: whether a call that broke was done is not known.

        Raises:
            ServerError: as :meth:`infer`.
            UsageError: there are several servers, and none is named.
        """
        self._call(rpcs.load_model(model), timeout_seconds, self._fleet.the_one(server, "load"))

    def unload(self, model: str, *, timeout_seconds: float | None = None, server: str = "") -> None:
        """Unload a model; as :meth:`load`."""
        self._call(rpcs.unload_model(model), timeout_seconds, self._fleet.the_one(server, "unload"))

    def ready(self, model: str = "", version: str = "", *, server: str = "") -> bool:
        """Say whether any server, or the one that is named, is ready; one that cannot be reached is not.

        Args:
            model: ask about this model; empty asks about the server as a whole.
            version: of the model; empty for the highest.
            server: the only one to ask.
        """
        return any(self._ready(model, version, one) for one in ([server] if server else self.servers))

    def _ready(self, model: str, version: str, server: str) -> bool:
        try:
            return self._call(rpcs.ready(model, version), None, server)
        except ServerError:
            return False

    def telemetry(self, *, server: str = "") -> telemetry_pb2.Reading:
        """Return one telemetry reading of one server.

        Raises:
            ServerError: as :meth:`infer`.
        """
        return self._call(rpcs.telemetry(), None, server)

    def watch(self, interval_ms: int = 0, *, server: str = "") -> Iterator[telemetry_pb2.Reading]:
        """Yield a telemetry reading of one server now and after every interval, until the iterator is closed.

        Args:
            interval_ms: 100 at least; 0 is the server's default.
            server: which to ask; empty for the next in turn.

        Raises:
            ServerError: it cannot be reached, refused, or went.
        """
        with closing(self._stream(rpcs.WATCH, rpcs.watch(interval_ms), None, server)) as readings:
            for reading, _ in readings:
                yield reading

    def close(self) -> None:
        """Close the connections; calls that are on their way end with CANCELLED."""
        self._fleet.close()
        for connection in self._connections:
            connection.channel.close()

    def _call(self, rpc: Rpc[R], timeout_seconds: float | None, server: str) -> R:
        attempts = self._fleet.call(rpc.repeatable, timeout_seconds, server)
        while True:
            refusal, started_ns = None, time.perf_counter_ns()
            try:
                connection = self._connections[attempts.server]
                response = connection.call(rpc.method, rpc.request, attempts.remaining())
            except grpc.RpcError as error:
                refusal = Refusal.of(error)
            except ValueError:
                self._fleet.check()  # gRPC's word for a channel that another thread has closed
                raise
            if refusal is None:
                return rpc.read(response, self._fleet.trip(attempts, started_ns))
            time.sleep(self._fleet.refused(attempts, refusal, rpc.subject))
            self._fleet.check()

    def _stream(
        self, method: str, request: Any, timeout_seconds: float | None, server: str
    ) -> Generator[tuple[Any, str], None, None]:
        """Yield the answers, each with the server that gave it."""
        attempts = self._fleet.stream(timeout_seconds, server)
        call = self._connections[attempts.server].call(method, request, attempts.remaining())
        try:
            for response in call:
                attempts.answered()
                yield response, self.servers[attempts.server]
            return
        except grpc.RpcError as error:
            refusal = Refusal.of(error)
        finally:
            call.cancel()
        self._fleet.refused(attempts, refusal, method)

    def _watch(self, server: int) -> None:
        with self._lock:
            if server in self._watched:
                return
            self._watched.add(server)

        def stands() -> None:
            self._watched.discard(server)
            self._fleet.rotation.connected(server)

        try:
            self._connections[server].when_it_stands(stands)
        except ValueError:  # gRPC's word for a channel that another thread has closed
            stands()
