"""Which handler answers which method."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import grpc

from edge.http2.metadata import Field, Metadata, read_metadata


class _Details(NamedTuple):
    """What a generic handler of gRPC asks of a call."""

    method: str
    invocation_metadata: Metadata


class Routes:
    """The methods of a server. Generated code takes it for a ``grpc.aio.Server`` and registers its handlers here.

    Args:
        by_path: whether nothing but its path decides what answers a call, so that it needs to be looked up only once.
    """

    def __init__(self, by_path: bool) -> None:
        self._by_path = by_path
        self._handlers: list[grpc.GenericRpcHandler] = []
        self._found: dict[str, Any] = {}

    def add_generic_rpc_handlers(self, handlers: Sequence[grpc.GenericRpcHandler]) -> None:
        """Add the methods of services."""
        self._handlers.extend(handlers)

    def add_registered_method_handlers(self, service: str, handlers: Mapping[str, Any]) -> None:
        """Do nothing, as grpc.aio's own; generated code calls it beside the other."""

    def find(self, path: str, fields: Sequence[Field]) -> Any:
        """Return what answers a call, a ``grpc.RpcMethodHandler``; None if there is no such method.

        Args:
            path: of the method.
            fields: what the call begins with.
        """
        handler = self._found.get(path)
        if handler is None:
            details = _Details(path, read_metadata(fields))
            found = (handlers.service(details) for handlers in self._handlers)
            handler = next((handler for handler in found if handler is not None), None)
            if handler and self._by_path:
                self._found[path] = handler
        return handler
