"""Metrics of a server, pages of metrics, and waiting for a condition."""

import asyncio
import time
import urllib.request
from dataclasses import dataclass, field

from prometheus_client.registry import Collector

from edge.instruments.snapshot import End, Timings
from edge.telemetry.board import metrics_page


@dataclass
class CountedRequest:
    timings: Timings = field(default_factory=Timings)
    rows: int = 1
    batch_rows: int = 1
    nonfinite: int = 0
    tier_reason: str = ""
    size: int = 1
    end: End | None = None


class _Families(Collector):
    def __init__(self, families):
        self._families = list(families)

    def collect(self):
        return self._families


def rendered(families, accept="*/*"):
    _, render = metrics_page(_Families(families))(accept)
    return render()[1].decode()


def page_of(server):
    with urllib.request.urlopen(f"http://127.0.0.1:{server.metrics_port}/metrics", timeout=20) as page:
        return str(page.read().decode())


def gauges(server, *names):
    """The values of metrics without labels, read at one moment."""
    return values(page_of(server), *names)


def values(page, *names):
    lines = [line.split() for line in page.splitlines() if "{" not in line]
    found = {line[0]: line[1] for line in lines if line[0] != "#"}
    return [float(found[f"fewheads_{name}"]) for name in names]


def gauge(server, name):
    (value,) = gauges(server, name)
    return value


def wait_until(reached, seconds=20):
    limit = time.monotonic() + seconds
    while not reached() and time.monotonic() < limit:
        time.sleep(0.01)
    return reached()


async def reached(condition, seconds=20):
    """Wait until a condition holds, beside the other tasks of the event loop."""
    limit = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < limit, "it does not come to that"
        await asyncio.sleep(0.005)


def is_at_rest(server):
    return not any(gauges(server, "streams", "stream_requests", "queue_depth", "queue_bytes"))
