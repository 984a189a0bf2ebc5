"""Authorization of calls by bearer token, the same for gRPC and HTTP."""

from __future__ import annotations

from contextvars import ContextVar
from pathlib import Path
from typing import Final

from edge.errors import PermissionDenied, Raw, Unauthenticated
from edge.security.access import OPEN, RPC_SCOPES
from edge.security.tokens import Token, find_token, read_tokens
from edge.security.watched import Watched

#: The name of the caller's token, or its address. A transport sets it for each call, and the call's tasks inherit it.
CALLER: ContextVar[str] = ContextVar("caller", default="")

_FIX: Final = "Send `authorization: Bearer TOKEN`; `fewheads token` makes tokens."


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
