"""The pages of a metrics port: who may read them, and how they are rendered."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from types import MappingProxyType
from typing import Final

from edge.errors import PermissionDenied, Unauthenticated
from edge.http.messages import Receive, Scope, Send, accepted
from edge.security.access import TELEMETRY_GET, Access, Hosts
from edge.serving.statuses import STATUSES

log = logging.getLogger(__name__)

#: In every response: for this origin only, never cached, and without guesses at the content type.
_HEADERS: Final = {
    "Cache-Control": "no-store",
    "Connection": "close",  # few may be open, and a scrape needs one for a moment
    "Cross-Origin-Resource-Policy": "same-origin",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
}

#: Headers and body of a page.
Content = tuple[Mapping[str, str], bytes]
#: Takes the header ``Accept``; returns the name of a page, and what renders it in a thread.
Page = Callable[[str], tuple[str, Callable[[], Content]]]


class Renderer:
    """Renders pages in one thread, beside the event loop; all who wait for the same page share it."""

    def __init__(self) -> None:
        self._thread = ThreadPoolExecutor(1, "pages")
        self._rendering: dict[str, asyncio.Future[Content]] = {}

    async def __call__(self, name: str, render: Callable[[], Content]) -> Content:
        """Return the page ``name``, which ``render`` renders if nobody waits for it yet."""
        rendered = self._rendering.get(name)
        if rendered is None:
            rendered = asyncio.get_running_loop().run_in_executor(self._thread, render)
            self._rendering[name] = rendered
            rendered.add_done_callback(lambda _: self._rendering.pop(name))
        return await asyncio.shield(rendered)


class Pages:
    """Answers GET and HEAD for pages by their paths, as an application of ASGI.

    Without ``access``, everyone may read, and without ``hosts``, any header ``Host`` is accepted. The page ``/``, if
    there is ``root``, needs no token: a browser sends none with a typed address; the script of the page sends it.
    """

    def __init__(
        self,
        pages: Mapping[str, Page],
        access: Access | None = None,
        hosts: Hosts | None = None,
        root: Content | None = None,
    ) -> None:
        self._pages, self._access, self._hosts, self._root = pages, access, hosts, root
        self._render = Renderer()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        status, headers, body = await self._answer(scope)
        fields = {**headers, **_HEADERS, "Content-Length": str(len(body))}
        pairs = [(name.lower().encode(), value.encode()) for name, value in fields.items()]
        await send({"type": "http.response.start", "status": status, "headers": pairs})
        await send({"type": "http.response.body", "body": body})

    async def _answer(self, scope: Scope) -> tuple[int, Mapping[str, str], bytes]:
        path = scope["path"]
        headers = {name.decode("latin-1"): value.decode("latin-1") for name, value in scope["headers"]}
        try:
            if self._hosts:
                self._hosts.check(headers.get("host"))
            if self._access and not (self._root and path == "/"):
                self._access.authorize(headers.get("authorization"), TELEMETRY_GET)
        except (Unauthenticated, PermissionDenied) as error:
            log.debug("a request over HTTP: %s", error)
            challenge = {"WWW-Authenticate": "Bearer"} if isinstance(error, Unauthenticated) else {}
            return _text(STATUSES[type(error)].http, f"{error}\n", challenge)
        if scope["method"] not in ("GET", "HEAD"):
            return _text(405, "GET or HEAD.\n", {"Allow": "GET, HEAD"})
        if self._root and path == "/":
            return 200, *self._root
        if path not in self._pages:
            return _text(404, f"There are {', '.join([*(['/'] if self._root else []), *self._pages])}.\n")
        accepted(scope)
        return 200, *await self._render(*self._pages[path](headers.get("accept", "")))


def _text(
    status: int, text: str, headers: Mapping[str, str] = MappingProxyType({})
) -> tuple[int, Mapping[str, str], bytes]:
    return status, {"Content-Type": "text/plain; charset=utf-8", **headers}, text.encode()
