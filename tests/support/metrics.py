"""What a server says of itself over Prometheus, and waiting until it says so."""

from __future__ import annotations

import time
import urllib.request
from collections.abc import Callable

from edge.server import Ready


def gauges(server: Ready, *names: str) -> list[float]:
    """The values of metrics without labels, read at one moment."""
    with urllib.request.urlopen(f"http://127.0.0.1:{server.metrics_port}/metrics", timeout=20) as page:
        return values(page.read().decode(), *names)


def values(page: str, *names: str) -> list[float]:
    """The values of metrics without labels on a page."""
    lines = [line.split() for line in page.splitlines() if "{" not in line]
    found = {line[0]: line[1] for line in lines if line[0] != "#"}
    return [float(found[f"fewheads_{name}"]) for name in names]


def gauge(server: Ready, name: str) -> float:
    """The value of one metric without labels."""
    (value,) = gauges(server, name)
    return value


def wait_until(reached: Callable[[], bool], seconds: float = 20) -> bool:
    """Whether something becomes true within some seconds."""
    limit = time.monotonic() + seconds
    while not reached() and time.monotonic() < limit:
        time.sleep(0.01)
    return reached()


def is_at_rest(server: Ready) -> bool:
    """Whether no stream is open, none of its requests on their way, and nothing waits."""
    return not any(gauges(server, "streams", "stream_requests", "queue_depth"))
