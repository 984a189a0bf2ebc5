"""Base of the blocking and the asyncio client: credentials, connections, attempts."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar, Final, TypeVar

import grpc
from google.protobuf.message_factory import GetMessageClass

from edge.client.failures import FailedCall
from edge.client.inference import CallInfo, checked_timeout
from edge.client.retries import DEFAULT_RETRIES, Attempts, Retries, Servers
from edge.client.rpcs import CallSpec
from edge.errors import Raw, UsageError
from edge.pb import inference_pb2, telemetry_pb2
from edge.security.certificates import read_certificates, read_pem

DEFAULT_URL: Final = "127.0.0.1:8001"
R = TypeVar("R")
CHANNEL_OPTIONS: Final[tuple[tuple[str, int], ...]] = (
    ("grpc.max_receive_message_length", -1),
    ("grpc.max_send_message_length", -1),
    # gRPC's default is up to two minutes, too long for a server that has restarted.
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 2000),
    # In spite of its name, the time limit of a connection attempt. A board without power answers nothing; two seconds
    # allow for one lost packet.
    ("grpc.min_reconnect_backoff_ms", 2000),
    # edge.client.retries decides about retries, not a service config from the name server.
    ("grpc.service_config_disable_resolution", 1),
)
#: Schemes that gRPC does not know. Its own, such as dns: and unix:, stay possible.
_SCHEMES: Final = ("http", "https", "grpc", "grpcs", "tcp")


@dataclass(frozen=True, kw_only=True)
class Credentials:
    """TLS settings and token of a client. Its ``repr`` holds no secret.

    Attributes:
        tls: from :func:`channel_credentials`; None connects without TLS.
        token: sent with each call; empty sends none. Without TLS it can be read on the network.
    """

    tls: grpc.ChannelCredentials | None = field(default=None, repr=False)
    token: str = field(default="", repr=False)

    def metadata(self) -> tuple[tuple[str, str], ...]:
        """Return the metadata of each call."""
        return (("authorization", f"Bearer {self.token}"),) if self.token else ()


def open_channel(
    server: str, credentials: Credentials | None, transport: Any, options: Sequence[tuple[str, int]] = CHANNEL_OPTIONS
) -> Any:
    """Return a channel of ``transport``, :mod:`grpc` or :mod:`grpc.aio`; raise a UsageError for a URL with a scheme."""
    scheme, separator, address = server.partition("://")
    if separator and scheme.lower() in _SCHEMES:
        address = address.rstrip("/")
        tls = " TLS is an option of its own: --tls." if scheme.lower() in ("https", "grpcs") else ""
        raise UsageError("url", given=server, expected="HOST:PORT without a scheme", fix=f"Give {address}.{tls}")
    if credentials and credentials.tls:
        return transport.secure_channel(server, credentials.tls, options=options)
    return transport.insecure_channel(server, options=options)


def open_stub(channel: Any) -> SimpleNamespace:
    """Return the callables of all RPCs by name, on a channel of :mod:`grpc` or :mod:`grpc.aio`."""
    calls = {}
    for file in (inference_pb2, telemetry_pb2):
        for service in file.DESCRIPTOR.services_by_name.values():
            for rpc in service.methods:
                sides = ("stream" if streams else "unary" for streams in (rpc.client_streaming, rpc.server_streaming))
                calls[rpc.name] = getattr(channel, "_".join(sides))(
                    f"/{service.full_name}/{rpc.name}",
                    GetMessageClass(rpc.input_type).SerializeToString,
                    GetMessageClass(rpc.output_type).FromString,
                )
    return SimpleNamespace(**calls)


def channel_credentials(
    tls_ca: Path | None = None, tls_certificate: Path | None = None, tls_key: Path | None = None
) -> grpc.ChannelCredentials:
    """Return credentials for blocking and asyncio channels. Without ``tls_ca`` they trust the authorities of gRPC."""
    if (tls_certificate is None) != (tls_key is None):
        given = Raw("--tls-key alone" if tls_certificate is None else "--tls-certificate alone")
        fix = "Give both, or leave both out."
        raise UsageError("--tls-certificate and --tls-key", given=given, expected="both or none", fix=fix)
    roots = read_pem("--tls-ca", tls_ca) if tls_ca else None
    if tls_certificate is None or tls_key is None:
        return grpc.ssl_channel_credentials(roots)
    client = read_certificates(tls_certificate, tls_key, None)
    return grpc.ssl_channel_credentials(roots, client.key, client.chain)


class BaseClient:
    """Connections to one server, or to several that serve the same models.

    Every call raises a :class:`ServerError` with status, server and number of attempts if no server answers it, a
    :class:`ServerRefused` if a server refuses it, and a :class:`UsageError` if an argument is out of range.

    Args:
        url: ``host:port``, or several of them, which take turns.
        timeout_seconds: time limit of a call, all its attempts together.
        retries: limits of the retries; :data:`ONCE` disables them.
        credentials: TLS and a token, the same for all servers; None uses neither.

    Attributes:
        servers: addresses of the servers.
    """

    _transport: ClassVar[Any]  # grpc or grpc.aio

    def __init__(
        self,
        url: str | Sequence[str] = DEFAULT_URL,
        timeout_seconds: float = 10.0,
        *,
        retries: Retries = DEFAULT_RETRIES,
        credentials: Credentials | None = None,
    ) -> None:
        self.servers = (url,) if isinstance(url, str) else tuple(url)
        if not self.servers or not all(self.servers) or len(set(self.servers)) < len(self.servers):
            fix = "Name each server once."
            raise UsageError("url", given=list(self.servers), expected="one server, or different ones", fix=fix)
        self._timeout_seconds = checked_timeout(timeout_seconds)
        self._turns = Servers(len(self.servers), retries)
        self._tls = bool(credentials and credentials.tls)
        self._metadata = credentials.metadata() if credentials else ()
        self._channels = [open_channel(server, credentials, self._transport) for server in self.servers]
        self._stubs = [open_stub(channel) for channel in self._channels]
        self._process_id = os.getpid()
        self._closed = False

    def _begin(self, server: str, timeout_seconds: float | None, repeatable: bool = False) -> Attempts:
        self._check_usable()
        if server and server not in self.servers:
            fix = "Leave it out to use any of them."
            raise UsageError("server", given=server, expected=f"one of {', '.join(self.servers)}", fix=fix)
        limit = None if timeout_seconds is None else checked_timeout(timeout_seconds)
        only = self.servers.index(server) if server else None
        return Attempts(self._turns, repeatable=repeatable, timeout_seconds=limit, only=only)

    def _begin_call(self, make: Callable[[], CallSpec[R]]) -> tuple[CallSpec[R], Attempts]:
        rpc = make()
        if not (rpc.repeatable or rpc.server) and len(self.servers) > 1:
            given, fix = Raw(f"{len(self.servers)} servers"), "Name it with server=; change one server at a time."
            raise UsageError(f"server for {rpc.subject}", given=given, expected="one of them", fix=fix)
        limit = self._timeout_seconds if rpc.timeout_seconds is None else rpc.timeout_seconds
        return rpc, self._begin(rpc.server, limit, rpc.repeatable)

    def _begin_stream(self, server: str, timeout_seconds: float | None) -> tuple[Attempts, bool]:
        """Return the attempt of a stream, and whether a call has to find its server first: it is not sent again."""
        finds = not server and len(self.servers) > 1 and self._turns.failing
        return self._begin(self.servers[0] if finds else server, timeout_seconds), finds

    def _start(self, attempts: Attempts, method: str, request: Any) -> Any:
        """Call an RPC by its name; depending on RPC and transport, return an answer, an awaitable or an iterator."""
        call = getattr(self._stubs[attempts.server], method)
        return call(request, timeout=attempts.start(), metadata=self._metadata)

    def _answered(self, attempts: Attempts) -> CallInfo:
        taken_ns = attempts.answered()
        return CallInfo(server=self.servers[attempts.server], attempts=attempts.count, round_trip_ns=taken_ns)

    def _failed(self, attempts: Attempts, error: Any, subject: str) -> float:
        """Record a failed attempt; return the seconds to wait before the next, or raise the error of the last."""
        server, count, failure = attempts.server, attempts.count, FailedCall.of(error)
        pause = attempts.failed(failure)
        if pause is None:
            raise failure.error(subject, self.servers[server], count, tls=self._tls) from None
        return pause

    def _check_usable(self) -> None:
        if self._closed:
            given = Raw("a call after close()")
            raise UsageError("the client", given=given, expected="none", fix="Make a new client.")
        if os.getpid() != self._process_id:  # a fork ends gRPC's threads
            given = Raw(f"a call in process {os.getpid()}, a fork of {self._process_id}")
            fix = "Make a client in each process, after the fork."
            raise UsageError("the client", given=given, expected="one of this process", fix=fix)
