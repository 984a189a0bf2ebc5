"""Routing table from method names to handlers."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from types import SimpleNamespace
from typing import Any, NamedTuple

import grpc

from edge.http2.metadata import Field, read_metadata
from edge.rpc.limits import Limits
from edge.security.access import CALLER


class Direct(NamedTuple):
    """A unary method without a coroutine.

    ``start`` takes the request, the context of the call, and a callback for the response or the
    :class:`edge.rpc.methods.Status`; it returns the argument for ``cancel``, or None if the call has ended.
    """

    start: Callable[[Any, Any, Callable[[Any], None]], Any]
    cancel: Callable[[Any], None]


class Route(NamedTuple):
    """How to answer a call.

    Attributes:
        handler: a ``grpc.RpcMethodHandler``.
        max_bytes: the limit for its requests.
        direct: the direct method that replaces it, if any.
        proves: whether the success of the call shows that its connection is of a client that the server wants: it is
            false for methods that need no token, where the others do.
    """

    handler: Any
    max_bytes: int = 0
    direct: Direct | None = None
    proves: bool = False


class Routes:
    """The methods of a server, ``direct`` by path. ``by_path`` says that one look-up for each path is enough."""

    def __init__(self, limits: Limits, by_path: bool, direct: Mapping[str, Direct] | None = None) -> None:
        self._limits = limits
        self._by_path = by_path
        self._direct = direct or {}
        self._handlers: list[grpc.GenericRpcHandler] = []
        self._found: dict[str, Route] = {}

    def add_generic_rpc_handlers(self, handlers: Sequence[grpc.GenericRpcHandler]) -> None:
        """Add the methods of services."""
        self._handlers.extend(handlers)

    def find(self, path: str, fields: Sequence[Field]) -> Route | None:
        """Return the route of a call with this path and these header fields; None if there is no such method."""
        route = self._found.get(path)
        if route is None:
            details = SimpleNamespace(method=path, invocation_metadata=read_metadata(fields))
            found = (handlers.service(details) for handlers in self._handlers)
            handler = next((handler for handler in found if handler is not None), None)
            if handler is None:
                return None
            # A refusal is a handler of another kind, which nothing may replace.
            direct = self._direct.get(path) if handler.unary_unary else None
            proves = self._by_path or bool(CALLER.get())
            route = Route(handler, self._limits.max_request_bytes(path), direct, proves)
            if self._by_path:
                self._found[path] = route
        return route
