"""What fails inside stays inside: every RPC fails where its own code begins, and a runtime in the middle of a run."""

from __future__ import annotations

import asyncio
import gc
import inspect
import os
import shutil
import signal
import sys
import weakref
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import grpc
import numpy as np
import pytest
from onnx import TensorProto, helper, numpy_helper

from edge.errors import INTERNAL, InvalidRequest
from edge.pb import inference_pb2 as pb
from edge.protocol import INFERENCE, TELEMETRY
from edge.rpc.inference_servicer import InferenceServicer
from edge.rpc.telemetry_servicer import TelemetryServicer
from edge.server import Ready, serve
from edge.serving.inference import InferenceService
from edge.settings import TRANSPORTS, Settings
from tests.edge.models import ORACLE_BUNDLE, serialized
from tests.edge.serving_models import write_bundle_of
from tests.edge.test_access import REQUESTS, methods
from tests.edge.test_status_codes import good

SECRET = "/etc/a-path-that-no-client-should-see"
OURS = [rpc for rpc in methods() if rpc.split("/")[1] in (INFERENCE, TELEMETRY)]


def write_failing_bundle(directory: Path) -> None:
    """``failing``: returns the element at ``index`` of three; beyond them the runtime fails."""
    graph = helper.make_graph(
        [helper.make_node("Gather", ["elements", "index"], ["element"])],
        "failing",
        [helper.make_tensor_value_info("index", TensorProto.INT64, [1])],
        [helper.make_tensor_value_info("element", TensorProto.INT64, [1])],
        [numpy_helper.from_array(np.array([7, 8, 9], np.int64), "elements")],
    )
    index = np.array([1], np.int64)
    write_bundle_of(directory, "failing", serialized(graph), {"index": index}, {"element": index + 7})


@asynccontextmanager
async def serving_here(
    directory: Path, transport: str = Settings.transport, **options: Any
) -> AsyncIterator[grpc.aio.Channel]:
    """A server in this process, with everything on, and a connection to it."""
    repository = directory / "repository"
    repository.mkdir()
    shutil.copytree(ORACLE_BUNDLE, repository / "oracle")
    write_failing_bundle(repository)
    settings = Settings(
        repository=repository,
        cache=directory / "cache",
        grpc_port=0,
        transport=transport,
        metrics_port=None,
        model_control="explicit",
        load_models=("*",),
        allow_shared_memory=True,
        allow_log_settings=True,
        drain_seconds=5,
        **options,
    )
    ready: asyncio.Future[Ready] = asyncio.get_running_loop().create_future()
    server = asyncio.create_task(serve(settings, ready.set_result))
    await asyncio.wait({server, ready}, return_when=asyncio.FIRST_COMPLETED)
    try:
        async with grpc.aio.insecure_channel(f"127.0.0.1:{ready.result().grpc_port}") as channel:
            yield channel
    finally:
        os.kill(os.getpid(), signal.SIGTERM)
        await server


@contextmanager
def failing(code: CodeType) -> Iterator[None]:
    """The interpreter raises an error where some code is entered for the first time, as if it had failed by itself."""
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
    if (method, transport) == ("ModelInfer", "nghttp2"):  # which needs no coroutine for it
        method = "start_model_infer"
    servicer = InferenceServicer if service == INFERENCE else TelemetryServicer
    found: CodeType = inspect.unwrap(getattr(servicer, method)).__code__
    return found


async def end(channel: grpc.aio.Channel, rpc: str) -> tuple[grpc.StatusCode, str]:
    request = REQUESTS.get(rpc.rpartition("/")[2])
    answers = 0
    try:
        if rpc.endswith("ModelStreamInfer"):  # it may end before anything is written, which grpc.aio cannot bear
            await channel.stream_stream(rpc)(timeout=1).read()
            return grpc.StatusCode.OK, ""
        call = channel.stream_stream(rpc)(iter([request.SerializeToString() if request else b""]), timeout=10)
        async for _ in call:
            answers += 1
    except grpc.aio.AioRpcError as error:
        assert not answers
        return error.code(), error.details() or ""
    return grpc.StatusCode.OK, ""


@pytest.mark.parametrize("transport", TRANSPORTS)
async def test_every_rpc_that_fails(tmp_path: Path, caplog: pytest.LogCaptureFixture, transport: str) -> None:
    async with serving_here(tmp_path, transport) as channel:
        for rpc in OURS:
            caplog.clear()
            with failing(code_of(rpc, transport)):
                assert await end(channel, rpc) == (grpc.StatusCode.INTERNAL, INTERNAL), rpc
            assert SECRET in caplog.text  # which is where whoever runs the server can read it
            if not rpc.endswith("/Watch"):  # which goes on for as long as it is let
                assert SECRET not in (await end(channel, rpc))[1]


@pytest.mark.parametrize("transport", TRANSPORTS)
@pytest.mark.parametrize("place", ["decode_inputs", "ResponseBuilder.build"])
async def test_a_failed_request_leaves_nothing_to_the_collector(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, transport: str, place: str
) -> None:
    held: list[weakref.ref[Any]] = []

    def fail(*arguments: Any, **options: Any) -> None:
        tensor = np.ones(3)
        held.append(weakref.ref(tensor))
        raise InvalidRequest("x", given=tensor.size, expected="2", fix="Send 2.")

    monkeypatch.setattr(f"edge.serving.inference.{place}", fail)
    async with serving_here(tmp_path, transport) as channel:
        call = channel.unary_unary(f"/{INFERENCE}/ModelInfer")
        gc.disable()  # tensors in a circle would be freed too late
        try:
            for _ in range(3):
                with pytest.raises(grpc.aio.AioRpcError, match=r"x: got 3, expected 2\. Send 2\."):
                    await call(good().SerializeToString(), timeout=10)
            await asyncio.sleep(0.1)
            assert [tensor() is None for tensor in held] == [True] * 3
        finally:
            gc.enable()


async def test_a_request_of_a_stream_that_fails(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    async with serving_here(tmp_path) as channel:
        stream = channel.stream_stream(
            f"/{INFERENCE}/ModelStreamInfer", response_deserializer=pb.ModelStreamInferResponse.FromString
        )
        with failing(InferenceService.infer.__code__):
            told = [answer.error_message async for answer in stream(iter([good().SerializeToString()] * 3), timeout=10)]
        assert told == [INTERNAL, "", ""]
        assert SECRET in caplog.text


async def test_a_runtime_that_fails(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    request = pb.ModelInferRequest(model_name="failing")
    request.inputs.add(name="index", datatype="INT64", shape=[1])
    request.raw_input_contents.append((99).to_bytes(8, "little"))
    async with serving_here(tmp_path) as channel:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await channel.unary_unary(f"/{INFERENCE}/ModelInfer")(request.SerializeToString(), timeout=10)
        stream = channel.stream_stream(
            f"/{INFERENCE}/ModelStreamInfer", response_deserializer=pb.ModelStreamInferResponse.FromString
        )
        (answer,) = [answer async for answer in stream(iter([request.SerializeToString()]), timeout=10)]
    assert caught.value.code() is grpc.StatusCode.INTERNAL
    for told in (str(caught.value.details()), answer.error_message):
        assert "failing" in told
        assert "Gather" not in told
        assert "out of" not in told
    assert "out of data bounds" in caplog.text
