"""Faults around a server: their pages, signals under load, disks, calls abandoned at each stage, and the clock."""

import ast
import asyncio
import os
import re
import signal
import subprocess
import sys
import time
from contextlib import asynccontextmanager
from itertools import pairwise
from pathlib import Path

import grpc
import numpy as np
import pytest
from hyperframe.frame import DataFrame, RstStreamFrame, SettingsFrame

import edge
from edge.client import Client
from edge.client.connection import open_stub
from edge.http2.messages import prefix
from edge.launch import running_server, serving
from edge.pb import inference_pb2 as pb
from edge.pb import telemetry_pb2
from edge.serving.forms import take_apart
from tests.support.commands import answer, fewheads, refusal
from tests.support.conditions import can_mount
from tests.support.http2_client import RawClient
from tests.support.metrics import gauge, gauges, is_at_rest, wait_until
from tests.support.models import write_oracle_bundle
from tests.support.server_models import busy, write_busy_bundle
from tests.support.server_processes import is_ready, problems, served
from tests.support.traffic import INPUTS, traffic

HERE = Path(__file__).parent
_NAME = r"`(test_\w+\.py)(?:::(test_\w+))?`"


def rows(page):
    """Return the cells of each row of a page's tables, without their heads."""
    lines = page.splitlines()
    heads = [before for before, line in pairwise(lines) if line.startswith("| ---")]
    body = [line for line in lines if line.startswith("| ") and not line.startswith("| ---") and line not in heads]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in body]


def missing(page):
    return [f"{file}::{name}" for file, name in re.findall(_NAME, page) if not _exists(file, name)]


def _exists(file, name):
    folders = (HERE, *(HERE.parent / name for name in ("deploy", "attacks", "conformance")))
    path = next((folder / file for folder in folders if (folder / file).exists()), None)
    if path is None:
        return False
    tree = ast.parse(path.read_text())
    found = {node.name for node in tree.body if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)}
    return name in found if name else any(one.startswith("test_") for one in found)


PAGES = {"faults": HERE / "FAULTS.md", "threats": HERE.parents[1] / "deploy" / "THREATS.md"}


@pytest.mark.parametrize(("name", "columns", "enough"), [("faults", 3, 40), ("threats", 4, 15)])
def test_rows_are_complete_and_name_existing_tests(name, columns, enough):
    page = PAGES[name].read_text()
    assert len(rows(page)) > enough
    for row in rows(page):
        assert len(row) == columns
        assert all(cell.endswith(".") for cell in row[:2])
        assert re.fullmatch(f"{_NAME}(, {_NAME})*", row[-1]), row[-1]
    assert not missing(page)


ON_EVERY_TRANSPORT = True  # it tests the protocol

CLIENTS = 4


@pytest.fixture
def repository(tmp_path):
    return write_oracle_bundle(tmp_path / "repository" / "oracle", "oracle", 1).path.parent


def test_sigterm_under_load(repository, transport):
    with (
        served(repository, f"--transport={transport}", "--drain-seconds=20") as server,
        traffic(f"127.0.0.1:{server.ready.grpc_port}", "oracle", threads=CLIENTS, streams=1) as sent,
    ):
        assert wait_until(lambda: len(sent.answers) > 20 * CLIENTS)
        begun = time.monotonic()
        code, log = server.stop()
        assert time.monotonic() - begun < 10  # there was nothing to wait for
        assert wait_until(lambda: len(sent.failures) > CLIENTS)
    assert code == 0
    # Rarely grpcio cancels a call that arrives at the moment when it stops.
    refused = {"UNAVAILABLE", "CANCELLED"} if transport == "grpcio" else {"UNAVAILABLE"}
    assert {error.code for _, error in sent.failures} <= refused
    assert "Traceback" not in log
    assert "ERROR" not in log


@pytest.mark.slow
def test_sigkill_under_load(repository, transport):
    """Clients get an error at once; the next server on the same port needs no cleanup."""
    before = sorted(path.name for path in repository.rglob("*"))
    with served(repository, f"--transport={transport}") as server:
        url = f"127.0.0.1:{server.ready.grpc_port}"
        with traffic(url, "oracle", threads=CLIENTS, streams=1) as sent:
            assert wait_until(lambda: len(sent.answers) > 20 * CLIENTS)
            os.kill(server.ready.process_id, signal.SIGKILL)
            assert wait_until(lambda: len(sent.failures) > CLIENTS, 5)
        assert server.end()[0] == -signal.SIGKILL
    assert {error.code for _, error in sent.failures} == {"UNAVAILABLE"}
    assert sorted(path.name for path in repository.rglob("*")) == before
    port = url.rpartition(":")[2]
    with running_server([repository / "oracle"], arguments=[f"--grpc-port={port}", f"--transport={transport}"]):
        assert Client(url).infer("oracle", INPUTS)


def is_served(server):
    with Client(f"127.0.0.1:{server.ready.grpc_port}") as client:
        return bool(client.infer("oracle", INPUTS).outputs["value"] == 2)


def test_server_that_can_write_nothing_serves(repository):
    """It can write neither a file nor a line of its debug log."""
    program = "tests.support.conditions no-room -"
    with served(repository, "--model-control=explicit", "--load-model=*", "--log-level=debug", program=program) as one:
        assert is_served(one)
        with pytest.raises(grpc.RpcError) as caught:
            one.stub.ModelInfer(pb.ModelInferRequest(model_name="zz"), timeout=10)
        assert caught.value.code() is grpc.StatusCode.NOT_FOUND
        one.stub.RepositoryModelLoad(pb.RepositoryModelLoadRequest(model_name="oracle"), timeout=20)
        assert is_served(one)
        assert one.stop() == (0, "")


@pytest.mark.slow
@pytest.mark.skipif(not can_mount("/tmp"), reason="needs mounts of a user's own")
def test_read_only_cache_is_used_and_not_written(repository, tmp_path):
    cache = tmp_path / "builds"
    cache.mkdir()
    arguments = ["build", str(repository / "oracle"), "--target=onnxruntime", f"--cache={cache}", "--json"]
    program = f"tests.support.conditions read-only {cache}"
    command = [sys.executable, "-m", *program.split(), *arguments]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)
    assert "Read-only file system" in refusal(done, 2)
    for source in ("bundle", "cache"):
        with served(repository, f"--cache={cache}", program=program) as server:
            assert is_served(server)
            code, log = server.stop()
        assert (code, f"was read from the {source}" in log) == (0, True)
        answer(fewheads(*arguments))


STAGES = ("arriving", "queued", "running", "answered", "streaming", "stream not read")
CANCEL = 8
#: Longer than a request takes to reach its stage.
DEADLINE = "250m"
NO_WINDOW = {SettingsFrame.INITIAL_WINDOW_SIZE: 0}


class Busy:
    """The one model of a server, and its telemetry; ``long`` steps take longer than :data:`DEADLINE`."""

    def __init__(self, ready, channel):
        self.ready = ready
        self.stub = open_stub(channel)
        self.long = max(int(200 * 0.5 / min(self._seconds() for _ in range(3))), 1)

    def _seconds(self):
        begun = time.perf_counter()
        self.stub.ModelInfer(busy(200))
        return time.perf_counter() - begun

    def reading(self):
        (model,) = self.stub.Get(telemetry_pb2.GetRequest()).models
        return model

    def dropped(self, place):
        return sum(drop.count for drop in self.reading().drops if drop.place == place)


@pytest.fixture(scope="module")
def model(tmp_path_factory, transport):
    directory = tmp_path_factory.mktemp("controlled")
    write_busy_bundle(directory / "repository")
    arguments = ["--instances=1", "--model-control=explicit", "--load-model=*", "--no-admission"]
    arguments.append(f"--transport={transport}")
    with (
        serving(directory / "repository", cache=directory / "cache", arguments=arguments) as ready,
        grpc.insecure_channel(f"127.0.0.1:{ready.grpc_port}") as channel,
    ):
        yield Busy(ready, channel)


@asynccontextmanager
async def at_stage(model, stage, how):
    """Yield a client whose one call has reached a stage; disconnect at the end."""
    unread = stage in ("answered", "stream not read")
    async with RawClient(model.ready.grpc_port) as client:
        client.greet(NO_WINDOW if unread else None)
        await client.agreed()
        long, short = (busy(steps).SerializeToString() for steps in (model.long, 1))
        method = "ModelStreamInfer" if "stream" in stage else "ModelInfer"
        timeout = {"grpc_timeout": DEADLINE} if how == "deadline" else {}
        client.send(client.head(1, method, _path=f"/inference.GRPCInferenceService/{method}", **timeout))
        if stage == "arriving":
            client.send(DataFrame(1, (prefix(short) + short)[:-3]))
        elif stage == "streaming":
            client.send(*(DataFrame(1, prefix(message) + message) for message in (short, long, long, long)))
            await client.until(lambda: 1 in client.answers and bool(client.answers[1].data))
        elif stage == "stream not read":
            client.send(*[DataFrame(1, prefix(short) + short)] * 5)
        else:
            client.send(client.body(1, long if stage == "running" else short))
        await client.writer.drain()
        yield client


async def abandon(model, stage, how):
    """Abandon a call, which leaves nothing waiting; return whether it was at its stage then."""
    place = {"queued": "queued", "running": "running", "streaming": "running"}.get(stage)
    ahead = model.stub.ModelInfer.future(busy(model.long)) if stage == "queued" else None
    before, answered, reached = model.dropped(place or ""), model.reading().success_count, True
    async with at_stage(model, stage, how) as client:
        if stage == "queued" and how != "deadline":
            held = 8 + len(take_apart(busy(1))[1])  # the tensor, and the message around it
            reached = wait_until(lambda: gauges(model.ready, "queue_depth", "queue_bytes") == [1, held], 5)
        if stage == "running":
            await asyncio.sleep(0.2)
        if stage == "streaming" and how != "deadline":
            reached = wait_until(lambda: gauge(model.ready, "stream_requests") == 3, 5)
        if stage in ("answered", "stream not read"):
            assert wait_until(lambda: model.reading().success_count > answered)
        if how == "cancel":
            client.send(RstStreamFrame(1, error_code=CANCEL))
            await client.writer.drain()
        if how == "deadline":
            await asyncio.sleep(0.3)
        if how != "hang up":
            assert wait_until(lambda: is_at_rest(model.ready), 5)
    assert wait_until(lambda: is_at_rest(model.ready), 5)
    if ahead:
        assert ahead.result().raw_output_contents
    return not place or (reached and wait_until(lambda: model.dropped(place) > before, 5))


@pytest.mark.parametrize("how", ["cancel", "hang up", pytest.param("deadline", marks=pytest.mark.slow)])
@pytest.mark.parametrize("stage", STAGES)
async def test_abandoned_call_leaves_nothing(model, stage, how):
    for _ in range(4):
        if there := await abandon(model, stage, how):
            break
        model.long *= 2  # on a busy machine its runs may have ended before
    assert there
    # A model without requests is closed at once; a use that is not given back would block this for ever.
    model.stub.RepositoryModelUnload(pb.RepositoryModelUnloadRequest(model_name="busy"), timeout=20)
    model.stub.RepositoryModelLoad(pb.RepositoryModelLoadRequest(model_name="busy"), timeout=20)
    assert model.stub.ModelInfer(busy(3), timeout=10).raw_output_contents[0] == np.int64(3).tobytes()


LIBRARIES = sorted(Path("/usr/lib").glob("*-linux-gnu/faketime/libfaketimeMT.so.1"))
#: Files that read the clock, for times that people read and for the validity of certificates.
#: Completions have the time of their making, and models that of their load, as OpenAI's do. HTTP has the header Date.
ALLOWED = {
    *("certificates.py", "completions.py", "entry.py", "logs.py", "messages.py", "model.py", "on_device.py"),
    *("statistics.py", "telemetry.py", "traces.py"),
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
        before = server.stub.Get(telemetry_pb2.GetRequest())
        server.stub.ModelInfer(busy(20))
        long = server.stub.ModelInfer.future(busy(8000), timeout=60)
        in_time = server.stub.ModelInfer.future(busy(1), timeout=60)
        too_late = server.stub.ModelInfer.future(busy(1, timeout_us=200_000), timeout=60)
        clock.write_text(jump)
        assert too_late.code() in (grpc.StatusCode.DEADLINE_EXCEEDED, grpc.StatusCode.RESOURCE_EXHAUSTED)
        assert not long.done()
        assert long.code() is in_time.code() is grpc.StatusCode.OK
        after = server.stub.Get(telemetry_pb2.GetRequest())
        assert abs(after.time_ms - before.time_ms) > 3000 * 86_400_000  # the clock has really jumped
        assert 0 < after.uptime_seconds - before.uptime_seconds < 60
        assert is_ready(server)
        assert problems(server) == []
        assert server.stop()[0] == 0
