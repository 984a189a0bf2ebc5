"""The spans of HTTP requests."""

from __future__ import annotations

from typing import Final

from edge.http.messages import Application, Message, Receive, Scope, Send
from edge.serving.traces import Traces

#: Statuses of callers that may not ask. Without a token, anyone could else fill the collector, by a trace of their own.
_STRANGERS: Final = (401, 403)


class Traced:
    """An application of ASGI whose requests have spans, except those of callers that it refuses."""

    def __init__(self, app: Application, traces: Traces, route: str) -> None:
        self._app, self._traces, self._route = app, traces, route

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        headers = {name.decode("latin-1"): value.decode("latin-1") for name, value in scope["headers"]}
        named = {"url.scheme": scope["scheme"], "url.path": scope["path"]}
        # The name under which the client knows the server; on a Unix socket there is no other.
        host, port = _split(headers.get("host", ""))
        if host:
            named["server.address"] = host
        known = {**named, "server.port": port} if port else named
        span = self._traces.begin_http(scope["method"], self._route, known, headers)
        status: int | None = None

        async def watch(message: Message) -> None:
            nonlocal status
            status = message.get("status", status)
            await send(message)

        try:
            await self._app(scope, receive, watch)
        finally:
            if status not in _STRANGERS:  # a span that does not end is not sent
                self._traces.end_http(span, status)


def _split(host: str) -> tuple[str, int | None]:
    """Return name and port of a header ``Host``, the port None if there is none."""
    name, colon, port = host.rpartition(":")
    if not colon or not port.isdecimal() or len(port) > 5:
        return host.strip("[]"), None
    return name.strip("[]"), int(port)
