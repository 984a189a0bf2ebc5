"""Authorization of calls by bearer token, the same for gRPC and HTTP."""

from __future__ import annotations

from contextvars import ContextVar
from pathlib import Path
from typing import Final

from edge.errors import Literally, PermissionDenied, Unauthenticated
from edge.security.scopes import OPEN, RPC_SCOPES
from edge.security.tokens import Token, find_token, read_tokens
from edge.security.watched import Watched

#: The name of the caller's token, or its address. A transport sets it for each call, and the call's tasks inherit it.
CALLER: ContextVar[str] = ContextVar("caller", default="")

_FIX: Final = "Send `authorization: Bearer TOKEN`; `fewheads token` makes tokens."


class Access:
    """The tokens of a file, which is read again when it changes.

    Args:
        path: the file.
        check_seconds: minimum time between two checks for a change.

    Raises:
        UsageError: the file is invalid.
    """

    def __init__(self, path: Path, check_seconds: float = 1.0) -> None:
        self._tokens = Watched(f"--tokens {path}", (path,), lambda: read_tokens(path), check_seconds)

    @property
    def problem(self) -> str:
        """Why the current file is not in force; empty if it is."""
        return self._tokens.problem

    def authorize(self, header: str | None, rpc: str) -> str:
        """Check that a caller may call an RPC.

        Args:
            header: value of the ``authorization`` header; None without one.
            rpc: the gRPC path, such as ``/inference.GRPCInferenceService/ModelInfer``. HTTP endpoints give the path of
                the equivalent RPC.

        Returns:
            The name of the caller's token; empty if the RPC needs none.

        Raises:
            Unauthenticated: there is no token, or it is unknown.
            PermissionDenied: the token has none of the RPC's scopes.
        """
        scopes = RPC_SCOPES.get(rpc)
        if scopes == OPEN:
            return ""
        scheme, _, secret = (header or "").partition(" ")
        token: Token | None = None
        # No message quotes the header: it may hold a mistyped token.
        if not header:
            given, expected = "nothing", "a token"
        elif scheme.lower() != "bearer":
            given, expected = "another scheme", "the scheme Bearer"
        else:
            given, expected = "an unknown token", "one of the server's tokens"
            token = find_token(self._tokens.value, secret.strip())
        if token is None:
            raise Unauthenticated("authorization", given=Literally(given), expected=expected, fix=_FIX)
        if not scopes or scopes.isdisjoint(token.scopes):
            given = Literally(f"token {token.name!r} with the scope {', '.join(token.scopes)}")
            expected = f"the scope {' or '.join(sorted(scopes))}" if scopes else "no call: the RPC has no scope"
            fix = "Get a token with that scope from the server's administrator."
            raise PermissionDenied(rpc.rpartition("/")[2], given=given, expected=expected, fix=fix)
        return token.name
