"""The pages over HTTP: the web page, the readings that it draws, and the metrics for Prometheus."""

from __future__ import annotations

import base64
import hashlib
import re
import threading
import time
from collections.abc import Callable, Iterable
from importlib.resources import files
from typing import TYPE_CHECKING, Any

import msgspec

from edge.telemetry.window import Recent, document

if TYPE_CHECKING:
    from _typeshed.wsgi import StartResponse, WSGIApplication, WSGIEnvironment

    from edge.telemetry.window import Reading

#: Pages without data of this server. A browser sends no token with a typed address, so this page needs none, but asks
#: for the token that its readings need.
PUBLIC = frozenset({"/"})
#: A reading is reused for this time, so that many viewers cost no more than one.
_FRESH_SECONDS = 0.9
#: After such a pause, the difference to the last reading says little about the present.
_STALE_SECONDS = 30.0

#: In every answer: for this origin only, not to be cached, and with a content type that browsers must not guess.
_HEADERS = [
    ("Cache-Control", "no-store"),
    ("Cross-Origin-Resource-Policy", "same-origin"),
    ("Referrer-Policy", "no-referrer"),
    ("X-Content-Type-Options", "nosniff"),
]


class LiveReading:
    """Readings as JSON with the window of the last seconds, taken no more often than about once a second.

    Args:
        read: takes a reading; called from one thread at a time.
    """

    def __init__(self, read: Callable[[], Reading]) -> None:
        self._read = read
        self._lock = threading.Lock()
        self._recent = Recent()
        self._taken = -_STALE_SECONDS
        self._json = b""

    def json(self) -> bytes:
        """Return the newest reading."""
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
    """The WSGI application: ``/``, ``/telemetry.json`` and ``/metrics``, to be read and nothing else.

    Args:
        metrics: answers ``/metrics``.
        live: what ``/telemetry.json`` holds.
    """

    def __init__(self, metrics: WSGIApplication, live: LiveReading) -> None:
        page = (files("edge.telemetry") / "dashboard.html").read_bytes()
        policy = ("Content-Security-Policy", _policy(page.decode()))
        self._pages = {
            "/": _answer("200 OK", "text/html; charset=utf-8", lambda: page, policy),
            "/telemetry.json": _answer("200 OK", "application/json", live.json),
            "/metrics": metrics,
        }
        text = "text/plain; charset=utf-8"
        there = f"There are {', '.join(self._pages)}.\n".encode()
        self._unknown = _answer("404 Not Found", text, lambda: there)
        self._refused = _answer("405 Method Not Allowed", text, lambda: b"GET or HEAD.\n", ("Allow", "GET, HEAD"))

    def __call__(self, environ: WSGIEnvironment, start_response: StartResponse) -> Iterable[bytes]:
        """Answer one request; HEAD as GET, without the body."""
        method = environ["REQUEST_METHOD"]
        page = self._pages.get(environ["PATH_INFO"], self._unknown)
        status, headers, body = _asked(page if method in ("GET", "HEAD") else self._refused, environ)
        start_response(status, [*headers, *_HEADERS, ("Content-Length", str(len(body)))])
        return [] if method == "HEAD" else [body]


def _asked(page: WSGIApplication, environ: WSGIEnvironment) -> tuple[str, list[tuple[str, str]], bytes]:
    """Return status, headers and body of what a page answers to GET."""
    begun: list[Any] = []

    def start_response(status: str, headers: list[tuple[str, str]], exc_info: Any = None) -> Callable[[bytes], object]:
        begun.extend((status, headers))
        return begun.append  # to write at once, as WSGI has it from old; none of ours does

    body = b"".join(page({**environ, "REQUEST_METHOD": "GET"}, start_response))
    status, headers = begun
    return status, headers, body


def _answer(status: str, content_type: str, body: Callable[[], bytes], *headers: tuple[str, str]) -> WSGIApplication:
    def application(environ: WSGIEnvironment, start_response: StartResponse) -> Iterable[bytes]:
        start_response(status, [("Content-Type", content_type), *headers])
        return [body()]

    return application


def _policy(page: str) -> str:
    """Allow a page its own style and script, by their hashes, and to ask where it came from; nothing else."""
    own = {
        kind: " ".join(f"'sha256-{_digest(text)}'" for text in re.findall(rf"<{tag}>(.*?)</{tag}>", page, re.DOTALL))
        for kind, tag in (("script-src", "script"), ("style-src", "style"))
    }
    return "; ".join(
        [
            "default-src 'none'",
            *(f"{kind} {hashes}" for kind, hashes in own.items()),
            "connect-src 'self'",
            "img-src data:",
            "base-uri 'none'",
            "form-action 'none'",
            "frame-ancestors 'none'",
        ]
    )


def _digest(text: str) -> str:
    return base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
