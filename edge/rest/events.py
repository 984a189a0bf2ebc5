"""Server-sent events."""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable

from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from edge.rest.endpoint import failed, unless_gone

#: Sends an event with a JSON document, and waits while the client cannot take more.
SendEvent = Callable[[object], Awaitable[None]]


class EventStream(Response):
    """The events that ``work`` sends, and then ``[DONE]``.

    The response begins with the first event, so that an error before it has its own status; a later error is the last
    event. A client that disconnects cancels the work.
    """

    media_type = "text/event-stream"

    def __init__(self, request: Request, work: Callable[[SendEvent], Awaitable[None]]) -> None:
        self.status_code = 200
        self._request, self._work = request, work
        self.init_headers({"Cache-Control": "no-cache"})

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Do the work, and send its events."""
        begun = False

        async def write(data: bytes, more: bool = True) -> None:
            nonlocal begun
            if not begun:
                begun = True
                await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
            await send({"type": "http.response.body", "body": b"data: " + data + b"\n\n", "more_body": more})

        async def send_event(document: object) -> None:
            # In ASCII: some clients take other characters of Unicode for the end of a line.
            await write(json.dumps(document, separators=(",", ":")).encode())

        try:
            await unless_gone(self._request, self._work(send_event))
            last = b"[DONE]"
        except ClientDisconnect:
            return
        except Exception as error:
            failure = failed(self._request, error)
            if not begun:
                await failure(scope, receive, send)
                return
            last = bytes(failure.body)
        await write(last, more=False)
