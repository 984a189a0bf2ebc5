"""The pages of the metrics port: the dashboard, the readings that it draws, and the metrics for Prometheus."""

from __future__ import annotations

import asyncio
import base64
import hashlib
import logging
import re
import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from importlib.resources import files
from types import MappingProxyType
from typing import Final

import msgspec

from edge.errors import PermissionDenied, Unauthenticated
from edge.http.messages import Receive, Scope, Send, accepted
from edge.security.access import TELEMETRY_GET, Access, Hosts
from edge.serving.statuses import STATUSES
from edge.telemetry.window import Reading, Recent, document

log = logging.getLogger(__name__)

#: A reading is reused for this time, so that many viewers cost no more than one.
_FRESH_SECONDS: Final = 0.9
#: After this pause, the difference to the last reading would say little about the present.
_STALE_SECONDS: Final = 30.0
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


class LiveReading:
    """Readings as JSON with the window of the last seconds, at most about one a second."""

    def __init__(self, read: Callable[[], Reading]) -> None:
        self._read = read
        self._lock = threading.Lock()
        self._recent = Recent()
        self._taken = -_STALE_SECONDS
        self._json = b""

    def json(self) -> bytes:
        """Return the last reading if it is fresh (:data:`_FRESH_SECONDS`), otherwise a new one."""
        with self._lock:
            age = time.monotonic() - self._taken
            if age >= _FRESH_SECONDS:
                if age >= _STALE_SECONDS:
                    self._recent = Recent()
                reading = self._read()
                self._json = msgspec.json.encode(document(reading, self._recent.add(reading)))
                self._taken = time.monotonic()
            return self._json


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
    """Answers ``/``, ``/telemetry.json`` and ``/metrics``, to GET and HEAD, as an application of ASGI.

    Without ``access``, everyone may read, and without ``hosts``, any header ``Host`` is accepted.
    """

    def __init__(
        self, metrics: Page, live: LiveReading, access: Access | None = None, hosts: Hosts | None = None
    ) -> None:
        html = (files("edge.telemetry") / "dashboard.html").read_bytes()
        of_html = {"Content-Type": "text/html; charset=utf-8", "Content-Security-Policy": _policy(html.decode())}
        self._dashboard = of_html, html
        self._pages: dict[str, Page] = {
            "/telemetry.json": lambda _: ("readings", lambda: ({"Content-Type": "application/json"}, live.json())),
            "/metrics": metrics,
        }
        self._access, self._hosts = access, hosts
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
            # A browser sends no token with a typed address; the script of the page / sends it for the readings.
            if self._access and path != "/":
                self._access.authorize(headers.get("authorization"), TELEMETRY_GET)
        except (Unauthenticated, PermissionDenied) as error:
            log.debug("a request over HTTP: %s", error)
            challenge = {"WWW-Authenticate": "Bearer"} if isinstance(error, Unauthenticated) else {}
            return _text(STATUSES[type(error)].http, f"{error}\n", challenge)
        if scope["method"] not in ("GET", "HEAD"):
            return _text(405, "GET or HEAD.\n", {"Allow": "GET, HEAD"})
        if path == "/":
            return 200, *self._dashboard
        if path not in self._pages:
            return _text(404, f"There are {', '.join(('/', *self._pages))}.\n")
        accepted(scope)
        return 200, *await self._render(*self._pages[path](headers.get("accept", "")))


def _text(
    status: int, text: str, headers: Mapping[str, str] = MappingProxyType({})
) -> tuple[int, Mapping[str, str], bytes]:
    return status, {"Content-Type": "text/plain; charset=utf-8", **headers}, text.encode()


def _policy(page: str) -> str:
    """Allow the page's own style and script by their hashes, and requests to its own origin; nothing else."""
    sources = []
    for tag in ("script", "style"):
        digests = (
            hashlib.sha256(text.encode()).digest() for text in re.findall(rf"<{tag}>(.*?)</{tag}>", page, re.DOTALL)
        )
        sources.append(f"{tag}-src " + " ".join(f"'sha256-{base64.b64encode(each).decode()}'" for each in digests))
    none = [f"{kind} 'none'" for kind in ("default-src", "base-uri", "form-action", "frame-ancestors")]
    return "; ".join([*none, *sources, "connect-src 'self'", "img-src data:"])
