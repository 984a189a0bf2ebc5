"""Routing table from method names to handlers."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import grpc

from edge.http2.metadata import Field, Metadata, read_metadata


class Direct(NamedTuple):
    """A unary method that needs no coroutine.

    Attributes:
        start: called with the request, the context of the call, and what receives the response or the
            :class:`edge.rpc.methods.Status`; returns what ``cancel`` takes, or None where the call has ended.
        cancel: drops the call.
    """

    start: Callable[[Any, Any, Callable[[Any], None]], Any]
    cancel: Callable[[Any], None]


class _Details(NamedTuple):
    """Details of a call for gRPC's generic handlers."""

    method: str
    invocation_metadata: Metadata


class Route(NamedTuple):
    """What answers a call.

    Attributes:
        handler: a ``grpc.RpcMethodHandler``.
        direct: answers in place of the handler; None where there is only the handler.
    """

    handler: Any
    direct: Direct | None = None


class Routes:
    """The methods of a server. Generated code takes it for a ``grpc.aio.Server`` and registers its handlers here.

    Args:
        by_path: whether nothing but its path decides what answers a call, so that it needs to be looked up only once.
        direct: by the ``unary_unary`` of a handler, what answers in its place.
    """

    def __init__(self, by_path: bool, direct: Mapping[Any, Direct] | None = None) -> None:
        self._by_path = by_path
        self._direct = direct or {}
        self._handlers: list[grpc.GenericRpcHandler] = []
        self._found: dict[str, Route] = {}

    def add_generic_rpc_handlers(self, handlers: Sequence[grpc.GenericRpcHandler]) -> None:
        """Add the methods of services."""
        self._handlers.extend(handlers)

    def add_registered_method_handlers(self, service: str, handlers: Mapping[str, Any]) -> None:
        """Do nothing, as grpc.aio's own; generated code calls it beside the other."""

    def find(self, path: str, fields: Sequence[Field]) -> Route | None:
        """Return what answers a call; None if there is no such method.

        Args:
            path: of the method.
            fields: what the call begins with.
        """
        route = self._found.get(path)
        if route is None:
            details = _Details(path, read_metadata(fields))
            found = (handlers.service(details) for handlers in self._handlers)
            handler = next((handler for handler in found if handler is not None), None)
            if handler is None:
                return None
            route = Route(handler, self._direct.get(handler.unary_unary))
            if self._by_path:
                self._found[path] = route
        return route
