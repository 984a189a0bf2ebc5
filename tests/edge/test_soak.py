"""All kinds of clients at once for minutes: every request ends as it should, and neither memory nor files grow.

FEWHEADS_SOAK_MINUTES sets the duration, 10 by default.
"""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import numpy as np
import psutil
import pytest

from edge.pb import inference_pb2 as pb
from tests.support.metrics import gauges, wait_until
from tests.support.models import write_oracle_bundle
from tests.support.server_models import write_busy_bundle
from tests.support.server_processes import served
from tests.support.soak import NAMES, Traffic

#: These tests concern the protocol, which every transport carries.
ON_EVERY_TRANSPORT = True

MINUTES = float(os.environ.get("FEWHEADS_SOAK_MINUTES", "10"))
SAMPLE_SECONDS = 2.0
#: Share of the duration in which growth is normal.
WARM_UP = 0.4
ALLOWED_SLOPE_BYTES_PER_MINUTE = 2**20
#: The pools of the allocator grow with the first few hundred reloads; shorter runs show no trend.
ENOUGH_MINUTES = 4
ALLOWED_FILES = 10
MODELS = (*NAMES[:2], "busy")


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    for name in NAMES:
        write_oracle_bundle(tmp_path / "repository" / name, name, 1)
    write_busy_bundle(tmp_path / "repository")
    return tmp_path / "repository"


@pytest.mark.slow
@pytest.mark.timeout(MINUTES * 60 + 300)
def test_soak(repository: Path, transport: str) -> None:
    arguments = ["--model-control=explicit", "--http-port=0", "--log-level=warning", f"--transport={transport}"]
    with served(repository, *arguments, *(f"--load-model={name}" for name in MODELS)) as server:
        process = psutil.Process(server.ready.process_id)
        files, start = process.num_fds(), process.memory_info().rss
        traffic = Traffic(server.ready, repository)
        traffic.start()
        sizes: list[int] = []
        until = time.monotonic() + MINUTES * 60
        while time.monotonic() < until and not traffic.faults:
            time.sleep(SAMPLE_SECONDS)
            sizes.append(process.memory_info().rss)
        traffic.stop()
        warm = sizes[int(WARM_UP * len(sizes)) :]
        per_minute = np.polyfit(np.arange(len(warm)), warm, 1)[0] * 60 / SAMPLE_SECONDS
        megabytes = " ".join(f"{size / 1e6:.1f}" for size in (start, warm[0], warm[-1]))
        total = traffic.ended.total()
        print(f"\nstart, warm, end: {megabytes} MB; {per_minute / 1e3:.1f} kB a minute; {total} requests")
        print({f"{kind} {how}": count for (kind, how), count in sorted(traffic.ended.items())})
        assert not traffic.faults, traffic.faults[:10]
        assert all(traffic.ended[kind, "OK"] for kind, _ in traffic.ended)
        at_rest = ("queue_depth", "queue_bytes", "streams", "stream_requests")
        assert wait_until(lambda: not any(gauges(server.ready, *at_rest)))
        assert gauges(server.ready, "problems") == [0]
        for name in MODELS:  # succeeds only if every request has ended
            server.stub.RepositoryModelUnload(pb.RepositoryModelUnloadRequest(model_name=name), timeout=20)
        assert wait_until(lambda: process.num_fds() <= files + ALLOWED_FILES), process.num_fds()
        assert per_minute < ALLOWED_SLOPE_BYTES_PER_MINUTE or MINUTES < ENOUGH_MINUTES
        os.kill(server.ready.process_id, signal.SIGTERM)
        code, log = server.end()
    assert (code, log) == (0, "")
