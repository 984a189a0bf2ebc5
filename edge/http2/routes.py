"""Routing table from method names to handlers."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from edge.http2.metadata import Field, read_metadata
from edge.rpc.limits import Limits
from edge.rpc.methods import Find
from edge.rpc.parsing import Refused
from edge.security.access import CALLER
from edge.serving.statuses import Code


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
        handler: the :class:`edge.rpc.methods.Method`, or None for a refused call.
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

    def __init__(self, find: Find, limits: Limits, by_path: bool, direct: Mapping[str, Direct] | None = None) -> None:
        self._find = find
        self._limits = limits
        self._by_path = by_path
        self._direct = direct or {}
        self._found: dict[str, Route] = {}

    def find(self, path: str, fields: Sequence[Field]) -> Route:
        """Return the route of a call with this path and these header fields.

        Raises:
            Refused: there is no such method, or the caller may not use it.
        """
        route = self._found.get(path)
        if route is None:
            method = self._find(path, read_metadata(fields))
            if method is None:
                raise Refused(Code.UNIMPLEMENTED, "the server has no such method")
            proves = self._by_path or bool(CALLER.get())
            route = Route(method, self._limits.max_request_bytes(path), self._direct.get(path), proves)
            if self._by_path:
                self._found[path] = route
        return route
