"""Routing table from method names to handlers."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import grpc

from edge.http2.metadata import Field, Metadata, read_metadata


class Direct(NamedTuple):
    """A unary method without a coroutine.

    Attributes:
        start: called with the request, the context of the call, and a callback for the response or the
            :class:`edge.rpc.methods.Status`; returns the argument for ``cancel``, or None if the call has ended.
        cancel: cancels the call.
    """

    start: Callable[[Any, Any, Callable[[Any], None]], Any]
    cancel: Callable[[Any], None]


class _Details(NamedTuple):
    """Details of a call for gRPC's generic handlers."""

    method: str
    invocation_metadata: Metadata


class Route(NamedTuple):
    """A ``grpc.RpcMethodHandler``, and the direct method that replaces it if there is one."""

    handler: Any
    direct: Direct | None = None


class Routes:
    """The methods of a server. Generated code registers handlers here as it does at a ``grpc.aio.Server``.

    Args:
        by_path: whether the route depends on the path alone, so that one look-up is enough.
        direct: the direct methods, by path.
    """

    def __init__(self, by_path: bool, direct: Mapping[str, Direct] | None = None) -> None:
        self._by_path = by_path
        self._direct = direct or {}
        self._handlers: list[grpc.GenericRpcHandler] = []
        self._found: dict[str, Route] = {}

    def add_generic_rpc_handlers(self, handlers: Sequence[grpc.GenericRpcHandler]) -> None:
        """Add the methods of services."""
        self._handlers.extend(handlers)

    def add_registered_method_handlers(self, service: str, handlers: Mapping[str, Any]) -> None:
        """Do nothing, like grpc.aio; generated code calls this in addition."""

    def find(self, path: str, fields: Sequence[Field]) -> Route | None:
        """Return the route of a call with this path and these header fields; None if there is no such method."""
        route = self._found.get(path)
        if route is None:
            details = _Details(path, read_metadata(fields))
            found = (handlers.service(details) for handlers in self._handlers)
            handler = next((handler for handler in found if handler is not None), None)
            if handler is None:
                return None
            # A refusal is a handler of another kind, which nothing may replace.
            route = Route(handler, self._direct.get(path) if handler.unary_unary else None)
            if self._by_path:
                self._found[path] = route
        return route
