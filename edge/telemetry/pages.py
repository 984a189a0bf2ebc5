"""The pages of the metrics port: the dashboard, the readings that it draws, and the metrics for Prometheus."""

from __future__ import annotations

import base64
import hashlib
import logging
import re
import threading
import time
from collections.abc import Callable, Mapping
from importlib.resources import files
from types import MappingProxyType
from typing import TYPE_CHECKING, Final

import msgspec

from edge.errors import PermissionDenied, Unauthenticated
from edge.security.access import Access
from edge.security.scopes import TELEMETRY_GET
from edge.serving.statuses import STATUSES
from edge.telemetry.http import Response
from edge.telemetry.window import Reading, Recent, document

if TYPE_CHECKING:
    from email.message import Message

log = logging.getLogger(__name__)

#: A reading is reused for this time, so that many viewers cost no more than one.
_FRESH_SECONDS: Final = 0.9
#: After this pause, the difference to the last reading would say little about the present.
_STALE_SECONDS: Final = 30.0
#: In every response: for this origin only, never cached, and without guesses at the content type.
_HEADERS: Final = {
    "Cache-Control": "no-store",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
}

#: Takes the header ``Accept`` and returns headers and body of a page.
Page = Callable[[str], tuple[Mapping[str, str], bytes]]


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


class Pages:
    """Answers ``/``, ``/telemetry.json`` and ``/metrics``, to GET and HEAD. Without ``access``, everyone may read."""

    def __init__(self, metrics: Page, live: LiveReading, access: Access | None = None) -> None:
        html = (files("edge.telemetry") / "dashboard.html").read_bytes()
        of_html = {"Content-Type": "text/html; charset=utf-8", "Content-Security-Policy": _policy(html.decode())}
        self._pages: dict[str, Page] = {
            "/": lambda _: (of_html, html),
            "/telemetry.json": lambda _: ({"Content-Type": "application/json"}, live.json()),
            "/metrics": metrics,
        }
        self._access = access

    def answer(self, method: str, path: str, headers: Message[str, str]) -> Response:
        """Answer one request, as :data:`edge.telemetry.http.Answer`."""
        try:
            # A browser sends no token with a typed address; the script of the page / sends it for the readings.
            if self._access and path != "/":
                self._access.authorize(headers.get("Authorization"), TELEMETRY_GET)
        except (Unauthenticated, PermissionDenied) as error:
            log.debug("a request over HTTP: %s", error)
            challenge = {"WWW-Authenticate": "Bearer"} if isinstance(error, Unauthenticated) else {}
            return _text(STATUSES[type(error)].http, f"{error}\n", challenge)
        if method not in ("GET", "HEAD"):
            return _text(405, "GET or HEAD.\n", {"Allow": "GET, HEAD"})
        if path not in self._pages:
            return _text(404, f"There are {', '.join(self._pages)}.\n")
        own, body = self._pages[path](headers.get("Accept", ""))
        return Response(200, {**own, **_HEADERS}, body)


def _text(status: int, text: str, headers: Mapping[str, str] = MappingProxyType({})) -> Response:
    return Response(status, {"Content-Type": "text/plain; charset=utf-8", **headers, **_HEADERS}, text.encode())


def _policy(page: str) -> str:
    """Allow the page's own style and script by their hashes, and requests to its own origin; nothing else."""
    sources = []
    for tag in ("script", "style"):
        found = (
            hashlib.sha256(text.encode()).digest() for text in re.findall(rf"<{tag}>(.*?)</{tag}>", page, re.DOTALL)
        )
        sources.append(f"{tag}-src " + " ".join(f"'sha256-{base64.b64encode(each).decode()}'" for each in found))
    none = [f"{kind} 'none'" for kind in ("default-src", "base-uri", "form-action", "frame-ancestors")]
    return "; ".join([*none, *sources, "connect-src 'self'", "img-src data:"])
