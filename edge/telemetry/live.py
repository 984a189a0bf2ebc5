"""The live page of a server: the dashboard, and the readings that it draws."""

from __future__ import annotations

import base64
import hashlib
import re
import threading
import time
from collections.abc import Callable
from importlib.resources import files
from typing import Final

import msgspec

from edge.telemetry.pages import Content
from edge.telemetry.window import Reading, Recent, document

#: A reading is reused for this time, so that many viewers cost no more than one.
_FRESH_SECONDS: Final = 0.9
#: After this pause, the difference to the last reading would say little about the present.
_STALE_SECONDS: Final = 30.0


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

    def page(self, _: str) -> tuple[str, Callable[[], Content]]:
        """Return the readings as a :data:`edge.telemetry.pages.Page`."""
        return "readings", lambda: ({"Content-Type": "application/json"}, self.json())


def dashboard() -> Content:
    """Return the page that draws ``/telemetry.json``, and asks its reader for a token where that needs one."""
    html = (files("edge.telemetry") / "dashboard.html").read_bytes()
    return {"Content-Type": "text/html; charset=utf-8", "Content-Security-Policy": _policy(html.decode())}, html


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
