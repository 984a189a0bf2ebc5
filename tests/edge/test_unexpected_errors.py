"""Unexpected errors: they leak nothing to clients, leave no memory behind, and loops and threads go on."""

from __future__ import annotations

import asyncio
import gc
import inspect
import sys
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import grpc
import numpy as np
import pytest

from edge.connections.quota import Quota
from edge.errors import INTERNAL, InvalidRequest
from edge.health.health import Health
from edge.health.supervisor import Notifier, Supervisor
from edge.instruments.memory import MemorySampler
from edge.instruments.sensors import Sensors
from edge.pb import inference_pb2 as pb
from edge.protocol import INFERENCE, TELEMETRY
from edge.repository.loader import Loader
from edge.repository.repository import Repository
from edge.rpc.servicers import InferenceServicer, TelemetryServicer
from edge.scheduling.scheduler import Scheduler
from edge.serving.call import Call
from edge.serving.inference import InferenceService
from edge.serving.streams import Streams
from edge.settings import TRANSPORTS
from edge.telemetry import telemetry
from edge.telemetry.telemetry import Sources
from tests.support.commands import python
from tests.support.in_process import running_service, serving_here
from tests.support.loop_model import NAME, prompt, write_halving_bundle
from tests.support.sample_requests import REQUESTS, good, methods


def test_health_that_could_not_be_published_is_published_later(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    device = Scheduler(1)
    repository = Repository(tmp_path, Loader(device))
    health, errors = Health(repository, device.runs), [OSError("no file is left")]

    def models_ready() -> bool:
        if errors:
            raise errors.pop()
        return True

    monkeypatch.setattr(health, "models_ready", models_ready)
    health.accepting = True
    supervisor = Supervisor(health, repository, device, Notifier({}))
    for published in (False, True):
        changed = health.changed
        supervisor.publish()
        assert (health.serving[""], changed.is_set()) == (published, published)
    assert caplog.text.count("no file is left") == 1
    device.close()


async def test_samples_go_on_and_their_error_is_logged_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    sampled = asyncio.Event()
    errors = [OSError("no file is left")] * 3

    class Failing(MemorySampler):
        def observe(self) -> None:
            if errors:
                raise errors.pop()
            sampled.set()

    device = Scheduler(1)
    repository = Repository(tmp_path, Loader(device))
    health = Health(repository, device.runs)
    streams: Streams = None  # type: ignore[assignment] # samples need none
    sources = Sources(device, repository, health, Failing(), Sensors(), streams, Quota(1, 1))
    monkeypatch.setattr(telemetry, "_SAMPLE_SECONDS", 0.01)
    watching = asyncio.create_task(telemetry.Telemetry(sources).watch())
    await asyncio.wait_for(sampled.wait(), 10)
    watching.cancel()
    assert caplog.messages == ["memory and load cannot be sampled"]
    device.close()


def test_shutdown_ends_although_the_health_cannot_be_read() -> None:
    done = python(
        """
import time
from edge.health.supervisor import Watchdog

class Unreadable:
    def failure(self, seconds):
        raise OSError("no file is left")

Watchdog(Unreadable(), 1.0).bound_shutdown(0.5)
time.sleep(60)
"""
    )
    assert (done.returncode, "no file is left" in done.stderr) == (10, True)


SECRET = "/etc/a-path-that-no-client-should-see"
OURS = [rpc for rpc in methods() if rpc.split("/")[1] in (INFERENCE, TELEMETRY)]


@contextmanager
def failing(code: CodeType) -> Iterator[None]:
    """Raise an error in the first frame that enters ``code``, as if it had failed by itself."""
    failed = []

    def look(frame: FrameType, event: str, argument: Any) -> None:
        if frame.f_code is code and event == "call" and not failed:
            failed.append(True)
            raise RuntimeError(SECRET)

    sys.setprofile(look)
    try:
        yield
    finally:
        sys.setprofile(None)
    assert failed


def code_of(rpc: str, transport: str) -> CodeType:
    _, service, method = rpc.split("/")
    if (method, transport) == ("ModelInfer", "nghttp2"):  # it has a function of its own
        method = "start_model_infer"
    servicer = InferenceServicer if service == INFERENCE else TelemetryServicer
    found: CodeType = inspect.unwrap(getattr(servicer, method)).__code__
    return found


async def end(channel: grpc.aio.Channel, rpc: str) -> tuple[grpc.StatusCode, str]:
    request = REQUESTS.get(rpc.rpartition("/")[2])
    answers = 0
    try:
        if rpc.endswith("ModelStreamInfer"):  # it may end before anything is written, which grpc.aio does not support
            await channel.stream_stream(rpc)(timeout=1).read()
            return grpc.StatusCode.OK, ""
        call = channel.stream_stream(rpc)(iter([request.SerializeToString() if request else b""]), timeout=10)
        async for _ in call:
            answers += 1
    except grpc.aio.AioRpcError as error:
        assert not answers
        return error.code(), error.details() or ""
    return grpc.StatusCode.OK, ""


async def stream_errors(channel: grpc.aio.Channel, *requests: pb.ModelInferRequest) -> list[str]:
    method, parse = f"/{INFERENCE}/ModelStreamInfer", pb.ModelStreamInferResponse.FromString
    stream = channel.stream_stream(method, response_deserializer=parse)
    messages = iter([request.SerializeToString() for request in requests])
    return [answer.error_message async for answer in stream(messages, timeout=10)]


@pytest.mark.parametrize("transport", TRANSPORTS)
async def test_failing_rpc_hides_its_error(tmp_path: Path, caplog: pytest.LogCaptureFixture, transport: str) -> None:
    async with serving_here(tmp_path, transport) as channel:
        for rpc in OURS:
            caplog.clear()
            with failing(code_of(rpc, transport)):
                assert await end(channel, rpc) == (grpc.StatusCode.INTERNAL, INTERNAL), rpc
            assert SECRET in caplog.text  # for the operator
            if not rpc.endswith("/Watch"):  # it would not end
                assert SECRET not in (await end(channel, rpc))[1]


@pytest.mark.parametrize("transport", TRANSPORTS)
@pytest.mark.parametrize("place", ["wire.Sent.decode", "call.ResponseBuilder.build"])
async def test_failed_request_leaves_no_cycle_with_its_tensors(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, transport: str, place: str
) -> None:
    held: list[weakref.ref[Any]] = []

    def fail(*arguments: Any, **options: Any) -> None:
        tensor = np.ones(3)
        held.append(weakref.ref(tensor))
        raise InvalidRequest("x", given=tensor.size, expected="2", fix="Send 2.")

    monkeypatch.setattr(f"edge.serving.{place}", fail)
    async with serving_here(tmp_path, transport) as channel:
        call = channel.unary_unary(f"/{INFERENCE}/ModelInfer")
        gc.disable()  # it would free tensors in a cycle, too late
        try:
            for _ in range(3):
                with pytest.raises(grpc.aio.AioRpcError, match=r"x: got 3, expected 2\. Send 2\."):
                    await call(good().SerializeToString(), timeout=10)
            await asyncio.sleep(0.1)
            assert [tensor() is None for tensor in held] == [True] * 3
        finally:
            gc.enable()


async def test_failing_stream_request_hides_its_error(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    async with serving_here(tmp_path) as channel:
        with failing(InferenceService._call.__code__):
            assert await stream_errors(channel, *[good()] * 3) == [INTERNAL, "", ""]
        assert SECRET in caplog.text


async def test_error_after_a_run_is_answered(tmp_path: Path) -> None:
    request = pb.ModelInferRequest(model_name=NAME)
    request.inputs.add(name="xs", datatype="FP32", shape=[1, *prompt(1).shape[1:]])
    request.raw_input_contents.append(prompt(1).tobytes())
    async with running_service(tmp_path, lambda repository: write_halving_bundle(repository / NAME)) as running:
        with failing(Call.end_of.__code__), pytest.raises(RuntimeError, match=SECRET):
            await running.infer(request)
        assert (await running.infer(request)).parameters["stopped"].string_param
        assert await running.at_rest(NAME)


async def test_failing_runtime_hides_its_error(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    request = pb.ModelInferRequest(model_name="failing")
    request.inputs.add(name="index", datatype="INT64", shape=[1])
    request.raw_input_contents.append((99).to_bytes(8, "little"))
    async with serving_here(tmp_path) as channel:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await channel.unary_unary(f"/{INFERENCE}/ModelInfer")(request.SerializeToString(), timeout=10)
        (error,) = await stream_errors(channel, request)
    assert caught.value.code() is grpc.StatusCode.INTERNAL
    for shown in (str(caught.value.details()), error):
        assert "failing" in shown
        assert "eshape" not in shown
    assert "cannot be reshaped" in caplog.text
