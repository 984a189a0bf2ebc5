"""Access control: the one authorization decision that gRPC and HTTP share, whatever carries the token."""

from __future__ import annotations

from contextvars import ContextVar
from pathlib import Path
from typing import Final

from edge.errors import Literally, PermissionDenied, Unauthenticated
from edge.security.scopes import OPEN, RPC_SCOPES
from edge.security.tokens import Token, holder, read_tokens
from edge.security.watched import Watched

#: Who asks: the name of a token, or an address. A transport sets it for each call, and the tasks of a call inherit it.
CALLER: ContextVar[str] = ContextVar("caller", default="")

_HEADER: Final = "authorization"
_FIX = "Send `authorization: Bearer TOKEN`; `fewheads token` makes tokens."


class Access:
    """The tokens of a file, which is read again when it changes.

    Args:
        path: the file.
        look_seconds: how long a look at the file holds.

    Raises:
        UsageError: the file is wrong.
    """

    def __init__(self, path: Path, look_seconds: float = 1.0) -> None:
        self._tokens: Watched[tuple[Token, ...]] = Watched(
            f"--tokens {path}", (path,), lambda: read_tokens(path), look_seconds
        )

    @property
    def problem(self) -> str:
        """Why the file is not in force as it is now; empty when it is."""
        return self._tokens.problem

    def authorize(self, header: str | None, rpc: str) -> str:
        """Check that a caller may call an RPC.

        Args:
            header: the value of the ``authorization`` header; None if there was none.
            rpc: the gRPC path, as ``/inference.GRPCInferenceService/ModelInfer``; whatever else is served over HTTP
                names the RPC that it stands for.

        Returns:
            The name of the caller's token; empty where none is asked for.

        Raises:
            Unauthenticated: no token, or nobody's.
            PermissionDenied: the token is not good for this.
        """
        scopes = RPC_SCOPES.get(rpc)
        if scopes == OPEN:
            return ""
        # Never the header itself: it may hold a token with a slip of the keyboard.
        if not header:
            raise Unauthenticated("authorization", given=Literally("nothing"), expected="a token", fix=_FIX)
        scheme, _, secret = header.partition(" ")
        if scheme.lower() != "bearer":
            given = Literally("another scheme")
            raise Unauthenticated("authorization", given=given, expected="the scheme Bearer", fix=_FIX)
        token = holder(self._tokens.value, secret.strip())
        if token is None:
            given = Literally("a token that is not known here")
            raise Unauthenticated("authorization", given=given, expected="one of the server's tokens", fix=_FIX)
        if not scopes or scopes.isdisjoint(token.scopes):
            given = Literally(f"token {token.name!r} for {', '.join(token.scopes)}")
            expected = f"one for {' or '.join(sorted(scopes or ())) or 'nobody: the RPC has no scope'}"
            fix = "Ask whoever keeps the server's file of tokens for another one."
            raise PermissionDenied(rpc.rpartition("/")[2], given=given, expected=expected, fix=fix)
        return token.name
