"""Server under load, for the live page.

python -m tests.support.dashboard_server [PNG]      draws deploy/dashboard.png, or another picture
"""

from __future__ import annotations

import math
import random
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np

from edge.client import Client, text
from edge.client.retries import ONCE
from edge.errors import ServerError
from edge.launch import running_server
from tests.support.browser import browser
from tests.support.models import ORACLE, ORACLE_BUNDLE
from tests.support.server_models import WIDTH, write_tiered_bundle

PICTURE = Path(__file__).parent.parent.parent / "deploy" / "dashboard.png"
#: The queue chooses tiers, and is short enough to refuse some requests.
ARGUMENTS = ("--policy=load", "--max-queue-size=16")
_THREADS = 26
_WAVE_SECONDS = 45.0


@contextmanager
def load(url: str) -> Iterator[None]:
    """Send requests in waves to the oracle and the model with tiers during the block."""
    done = threading.Event()

    def work(number: int) -> None:
        x = np.zeros((1, WIDTH), np.float32)
        with Client(url, retries=ONCE) as client:
            while not done.is_set():
                busy = 0.5 - 0.5 * math.cos(2 * math.pi * time.monotonic() / _WAVE_SECONDS)
                try:
                    if number == 0:
                        client.infer(ORACLE, {"expression": text(["1 + 2"])})
                        done.wait(0.02)
                    elif number > 3 + busy * _THREADS:
                        done.wait(0.5)
                    else:
                        # Every fifth client requests the full tier.
                        client.infer("tiered", {"x": x}, tier="" if number % 5 else "full")
                        done.wait(random.random() * 0.2)
                except ServerError:
                    done.wait(0.2)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(_THREADS)]
    for thread in threads:
        thread.start()
    try:
        yield
    finally:
        done.set()
        for thread in threads:
            thread.join()


def draw(path: Path) -> None:
    with tempfile.TemporaryDirectory() as directory:
        bundles = [write_tiered_bundle(Path(directory) / "tiered").path, ORACLE_BUNDLE]
        with (
            running_server(bundles, arguments=ARGUMENTS) as ready,
            load(f"127.0.0.1:{ready.grpc_port}"),
            browser() as tab,
        ):
            tab.open(f"http://127.0.0.1:{ready.metrics_port}/", width=1180, height=1000)
            time.sleep(120)
            tab.screenshot(path)


if __name__ == "__main__":
    draw(Path(sys.argv[1]) if len(sys.argv) > 1 else PICTURE)
