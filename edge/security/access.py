"""Authorization of calls, the same for gRPC and HTTP: scopes by bearer token, and names that a server answers to.

An RPC without an entry in :data:`RPC_SCOPES` is denied.
"""

from __future__ import annotations

from collections.abc import Iterable
from contextvars import ContextVar
from functools import lru_cache
from ipaddress import ip_address
from pathlib import Path
from typing import Final

from edge.errors import PermissionDenied, Raw, Unauthenticated
from edge.protocol import HEALTH, INFERENCE, REFLECTION, TELEMETRY
from edge.security.tokens import SCOPES, Token, find_token, read_tokens
from edge.security.watched import Watched

#: The name of the caller's token, or its address. A transport sets it for each call, and the call's tasks inherit it.
CALLER: ContextVar[str] = ContextVar("caller", default="")

_FIX: Final = "Send `authorization: Bearer TOKEN`; `fewheads token` makes tokens."

_INFER: Final = frozenset(("infer",))
_CONTROL: Final = frozenset(("control",))
_METRICS: Final = frozenset(("metrics",))
_ANY: Final = frozenset(SCOPES)
#: The RPC needs no token.
OPEN: Final[frozenset[str]] = frozenset()

TELEMETRY_GET: Final = f"/{TELEMETRY}/Get"
#: Long calls, whose callers are authorized again for each message.
TELEMETRY_WATCH: Final = f"/{TELEMETRY}/Watch"
INFER: Final = f"/{INFERENCE}/ModelInfer"
INFER_STREAM: Final = f"/{INFERENCE}/ModelStreamInfer"


def _all(scopes: frozenset[str], service: str, *methods: str) -> dict[str, frozenset[str]]:
    return {f"/{service}/{method}": scopes for method in methods}


#: gRPC path to scopes; a caller needs one of them.
RPC_SCOPES: Final[dict[str, frozenset[str]]] = {
    # Orchestrators and load balancers check health without a token.
    **_all(OPEN, HEALTH, "Check", "Watch"),
    **_all(_ANY, REFLECTION, "ServerReflectionInfo"),
    **_all(_ANY, INFERENCE, "ServerLive", "ServerReady", "ServerMetadata", "RepositoryIndex"),
    **_all(_ANY, INFERENCE, "ModelReady", "ModelMetadata", "ModelConfig"),
    **_all(_INFER, INFERENCE, "ModelInfer", "ModelStreamInfer"),
    # perf_analyzer reads the statistics of the model that it measures.
    **_all(_INFER | _METRICS, INFERENCE, "ModelStatistics"),
    **_all(_CONTROL, INFERENCE, "RepositoryModelLoad", "RepositoryModelUnload", "TraceSetting", "LogSettings"),
    # Regions give access to memory of this host.
    **_all(_CONTROL, INFERENCE, *(f"SystemSharedMemory{verb}" for verb in ("Status", "Register", "Unregister"))),
    **_all(_CONTROL, INFERENCE, *(f"CudaSharedMemory{verb}" for verb in ("Status", "Register", "Unregister"))),
    **_all(_METRICS, TELEMETRY, "Get", "Watch"),
}


class Access(Watched[tuple[Token, ...]]):
    """Authorizes calls by the tokens in a file."""

    def __init__(self, path: Path, check_seconds: float = 1.0) -> None:
        super().__init__(f"--tokens {path}", (path,), lambda: read_tokens(path), check_seconds)

    def authorize(self, header: str | None, rpc: str) -> str:
        """Check that a caller may call an RPC, and return the name of the caller's token; empty if the RPC needs none.

        Args:
            header: value of the ``authorization`` header; None without one.
            rpc: the gRPC path, also for HTTP endpoints.

        Raises:
            Unauthenticated: there is no token, or it is unknown.
            PermissionDenied: the token has none of the RPC's scopes.
        """
        scopes = RPC_SCOPES.get(rpc)
        if scopes == OPEN:
            return ""
        scheme, _, secret = (header or "").partition(" ")
        bearer = scheme.lower() == "bearer"
        token = find_token(self.value, secret.strip()) if bearer else None
        if token is None:  # the message does not quote the header, which may hold a mistyped token
            given, expected = "an unknown token", "one of the server's tokens"
            if not bearer:
                given, expected = ("another scheme", "the scheme Bearer") if header else ("nothing", "a token")
            raise Unauthenticated("authorization", given=Raw(given), expected=expected, fix=_FIX)
        if not scopes or scopes.isdisjoint(token.scopes):
            given = Raw(f"token {token.name!r} with the scope {', '.join(token.scopes)}")
            expected = f"the scope {' or '.join(sorted(scopes))}" if scopes else "no call: the RPC has no scope"
            fix = "Get a token with that scope from the server's administrator."
            raise PermissionDenied(rpc.rpartition("/")[2], given=given, expected=expected, fix=fix)
        return token.name


#: Below these, nobody can register a name.
_LOCAL: Final = (".localhost", ".local", ".internal", ".home.arpa")


class Hosts:
    """The names under which a server on a loopback address answers over HTTP: addresses, local and further ones.

    A web page may have its own name resolved to the loopback address (DNS rebinding), and its reader's browser then
    takes the server for the page's own. The name, which the browser sends, is what such a request cannot hide.
    """

    def __init__(self, names: Iterable[str] = ()) -> None:
        self._names = frozenset(name.lower() for name in names)

    def check(self, host: str | None) -> None:
        """Check the header ``Host`` of a request; a browser always sends one.

        Raise a PermissionDenied if anyone might have registered the name.
        """
        name = (host or "").strip().lower()
        name = name[1:].partition("]")[0] if name.startswith("[") else name.partition(":")[0].rstrip(".")
        if "." not in name or name.endswith(_LOCAL) or name in self._names or _is_address(name):
            return
        expected = "an address, a local name, or one that --allow-host names"
        fix = "Use the server's address, or start it with --allow-host NAME."
        raise PermissionDenied("Host", given=host, expected=expected, fix=fix)


@lru_cache  # a client sends the same name with every request
def _is_address(name: str) -> bool:
    try:
        ip_address(name)
    except ValueError:
        return False
    return True
