"""Types of ASGI, the interface between the HTTP server and its applications."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any, Final

from edge.connections.quota import Share

Scope = MutableMapping[str, Any]
Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
Application = Callable[[Scope, Receive, Send], Awaitable[None]]

_SHARE: Final = "fewheads.share"


def state_of(share: Share) -> dict[str, Any]:
    """Return the state of a request's scope, for :func:`accepted`."""
    return {_SHARE: share}


def accepted(scope: Scope) -> None:
    """Note that a caller may do what a request of it asks for, so that its connection does not make room for others."""
    share = scope.get("state", {}).get(_SHARE)
    if share:
        share.proven = True
