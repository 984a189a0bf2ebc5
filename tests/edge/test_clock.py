"""Nothing depends on the wall clock, which jumps when a board without a battery finds the network."""

import re
from pathlib import Path

import grpc
import pytest

import edge
from edge.pb import telemetry_pb2, telemetry_pb2_grpc
from tests.support.models import write_oracle_bundle
from tests.support.server_models import busy, write_busy_bundle
from tests.support.server_processes import is_ready, problems, served

LIBRARIES = sorted(Path("/usr/lib").glob("*-linux-gnu/faketime/libfaketimeMT.so.1"))
#: Files that read the clock, for times that people read and for the validity of certificates.
#: Completions have the time of their making, and models that of their load, as OpenAI's do. HTTP has the header Date.
ALLOWED = {
    *("certificates.py", "completions.py", "logs.py", "messages.py", "model.py", "on_device.py", "statistics.py"),
    *("telemetry.py", "traces.py"),
}


def test_clock_is_read_only_for_people_and_certificates():
    read = re.compile(r"\b(time|datetime|date)\.(time|time_ns|now|utcnow|today|localtime|gmtime)\b")
    files = Path(edge.__file__).parent.rglob("*.py")
    assert {path.name for path in files if read.search(path.read_text())} <= ALLOWED


@pytest.mark.slow
@pytest.mark.skipif(not LIBRARIES, reason="needs libfaketime")
@pytest.mark.parametrize("jump", ["-3600d", "+3600d"])
def test_requests_deadlines_and_the_watchdog_survive_a_jump(tmp_path, jump):
    repository = tmp_path / "repository"
    write_busy_bundle(repository)
    write_oracle_bundle(repository / "oracle", "oracle", 1)
    clock = tmp_path / "clock"
    clock.write_text("+0")
    variables = {
        "LD_PRELOAD": str(LIBRARIES[0]),
        "FAKETIME_TIMESTAMP_FILE": str(clock),
        "FAKETIME_NO_CACHE": "1",
        "FAKETIME_DONT_FAKE_MONOTONIC": "1",
    }
    with served(repository, "--watchdog-seconds=20", **variables) as server:
        telemetry = telemetry_pb2_grpc.TelemetryStub(server.channel)
        before = telemetry.Get(telemetry_pb2.GetRequest())
        server.stub.ModelInfer(busy(20))
        long = server.stub.ModelInfer.future(busy(8000), timeout=60)
        in_time = server.stub.ModelInfer.future(busy(1), timeout=60)
        too_late = server.stub.ModelInfer.future(busy(1, timeout_us=200_000), timeout=60)
        clock.write_text(jump)
        assert too_late.code() in (grpc.StatusCode.DEADLINE_EXCEEDED, grpc.StatusCode.RESOURCE_EXHAUSTED)
        assert not long.done()
        assert long.code() is in_time.code() is grpc.StatusCode.OK
        after = telemetry.Get(telemetry_pb2.GetRequest())
        assert abs(after.time_ms - before.time_ms) > 3000 * 86_400_000  # the clock has really jumped
        assert 0 < after.uptime_seconds - before.uptime_seconds < 60
        assert is_ready(server)
        assert problems(server) == []
        server.process.terminate()
        assert server.end()[0] == 0
