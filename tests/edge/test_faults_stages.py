"""Calls that are cancelled, time out or lose their client, at each stage: nothing of them is left."""

import asyncio
import time
from contextlib import asynccontextmanager

import grpc
import numpy as np
import pytest
from hyperframe.frame import DataFrame, RstStreamFrame, SettingsFrame

from edge.http2.messages import prefix
from edge.launch import serving
from edge.pb import inference_pb2 as pb
from edge.pb import inference_pb2_grpc, telemetry_pb2, telemetry_pb2_grpc
from edge.serving.forms import take_apart
from tests.support.http2_client import RawClient
from tests.support.metrics import gauge, gauges, wait_until
from tests.support.server_models import busy, write_busy_bundle

ON_EVERY_TRANSPORT = True  # it tests the protocol

STAGES = ("arriving", "queued", "running", "answered", "streaming", "stream not read")
CANCEL = 8
#: Longer than a request takes to reach its stage.
DEADLINE = "250m"
NO_WINDOW = {SettingsFrame.INITIAL_WINDOW_SIZE: 0}


class Busy:
    """The one model of a server, and its telemetry; ``long`` steps take longer than :data:`DEADLINE`."""

    def __init__(self, ready, channel):
        self.ready = ready
        self.stub = inference_pb2_grpc.GRPCInferenceServiceStub(channel)
        self._telemetry = telemetry_pb2_grpc.TelemetryStub(channel)
        self.long = max(int(200 * 0.5 / min(self._seconds() for _ in range(3))), 1)

    def _seconds(self):
        begun = time.perf_counter()
        self.stub.ModelInfer(busy(200))
        return time.perf_counter() - begun

    def reading(self):
        (model,) = self._telemetry.Get(telemetry_pb2.GetRequest()).models
        return model

    def dropped(self, place):
        return sum(drop.count for drop in self.reading().drops if drop.place == place)

    def is_at_rest(self):
        return not any(gauges(self.ready, "queue_depth", "queue_bytes", "streams", "stream_requests"))


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


@pytest.mark.parametrize("how", ["cancel", "hang up", pytest.param("deadline", marks=pytest.mark.slow)])
@pytest.mark.parametrize("stage", STAGES)
async def test_abandoned_call_leaves_nothing(model, stage, how):
    place = {"queued": "queued", "running": "running", "streaming": "running"}.get(stage)
    ahead = model.stub.ModelInfer.future(busy(model.long)) if stage == "queued" else None
    before, answered = model.dropped(place or ""), model.reading().success_count
    async with at_stage(model, stage, how) as client:
        if stage == "queued" and how != "deadline":
            held = 8 + len(take_apart(busy(1))[1])  # the tensor, and the message around it
            assert wait_until(lambda: gauges(model.ready, "queue_depth", "queue_bytes") == [1, held])
        if stage == "running":
            await asyncio.sleep(0.2)
        if stage == "streaming" and how != "deadline":
            assert wait_until(lambda: gauge(model.ready, "stream_requests") == 3)
        if stage in ("answered", "stream not read"):
            assert wait_until(lambda: model.reading().success_count > answered)
        if how == "cancel":
            client.send(RstStreamFrame(1, error_code=CANCEL))
            await client.writer.drain()
        if how == "deadline":
            await asyncio.sleep(0.3)
        if how != "hang up":
            assert wait_until(model.is_at_rest, 5)
    assert wait_until(model.is_at_rest, 5)
    if place:
        assert wait_until(lambda: model.dropped(place) > before)
    if ahead:
        assert ahead.result().raw_output_contents
    # A model without requests is closed at once; a use that is not given back would block this for ever.
    model.stub.RepositoryModelUnload(pb.RepositoryModelUnloadRequest(model_name="busy"), timeout=20)
    model.stub.RepositoryModelLoad(pb.RepositoryModelLoadRequest(model_name="busy"), timeout=20)
    assert model.stub.ModelInfer(busy(3), timeout=10).raw_output_contents[0] == np.int64(3).tobytes()
