"""The scheduler behind a real socket: shared runs, priorities, refusals that say when to come back, elastic tiers."""

from __future__ import annotations

import time
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import grpc
import numpy as np
import pytest

from edge.launch import running_server
from edge.pb import inference_pb2 as pb
from edge.pb import inference_pb2_grpc, telemetry_pb2, telemetry_pb2_grpc
from edge.server import Ready
from tests.edge.test_overload import wait_until
from tests.support import text_model
from tests.support.busy_model import busy
from tests.support.models import EXPRESSIONS, ORACLE, evaluate, write_oracle_bundle
from tests.support.sample_requests import expression, text
from tests.support.server_models import write_busy_bundle

Stub = inference_pb2_grpc.GRPCInferenceServiceStub
QUEUE_BYTES = 100
#: Steps of the busy model in a second, as often as it was measured.
FASTEST: list[float] = []


@pytest.fixture(scope="module")
def predicting(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ready]:
    """A server with admission, which the one of all tests has not."""
    directory = tmp_path_factory.mktemp("admission")
    text_model.write_sentiment_bundle(directory / "sentiment")
    write_busy_bundle(directory)
    write_oracle_bundle(directory / "oracle", ORACLE)
    arguments = [
        "--instances=1",
        f"--max-queue-bytes={QUEUE_BYTES}",
        "--max-queue-delay-us=2000",
        "--default-timeout-ms=60000",
    ]
    bundles = [directory / name for name in ("sentiment", "busy-1", "oracle")]
    with running_server(bundles, cache=directory / "cache", arguments=arguments) as ready:
        yield ready


@pytest.fixture(scope="module")
def stub(predicting: Ready) -> Iterator[Stub]:
    with grpc.insecure_channel(f"127.0.0.1:{predicting.grpc_port}") as channel:
        yield Stub(channel)


def hold(stub: Stub, seconds: float) -> grpc.Future:
    """Keep the one worker busy for so long, or longer where a neighbour takes the processor."""
    for _ in range(0 if FASTEST else 5):
        begun = time.perf_counter()
        stub.ModelInfer(busy(100))
        FASTEST.append(100 / (time.perf_counter() - begun))
    call = stub.ModelInfer.future(busy(int(max(FASTEST) * seconds)))
    time.sleep(0.05)
    return call


def statistics(stub: Stub, name: str) -> pb.ModelStatistics:
    return stub.ModelStatistics(pb.ModelStatisticsRequest(name=name)).model_stats[0]


def test_a_refusal_says_when_to_come_back(stub: Stub) -> None:
    for _ in range(2):
        hold(stub, 0.3).result()  # what a run of this model usually takes
    holding = hold(stub, 0.6)
    with pytest.raises(grpc.RpcError) as caught:
        stub.ModelInfer(busy(1), timeout=0.1)
    assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
    assert caught.value.details().startswith("deadline: got an answer in ")
    (after,) = [int(value) for key, value in caught.value.trailing_metadata() if key == "retry-after-ms"]
    assert 1 <= after < 10_000
    assert not holding.done()  # refused at once
    assert holding.result().raw_output_contents


def test_bytes_that_wait_are_bounded(stub: Stub) -> None:
    holding = hold(stub, 0.5)
    waiting = [stub.ModelInfer.future(busy(1)) for _ in range(QUEUE_BYTES // 8)]
    late = stub.ModelInfer.future(busy(1))
    assert late.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
    assert "bytes in the waiting requests" in late.details()
    assert [key for key, _ in late.trailing_metadata() if key == "retry-after-ms"]
    assert holding.result().raw_output_contents
    assert all(call.result().raw_output_contents for call in waiting)


def test_requests_that_wait_share_a_run(stub: Stub) -> None:
    before = statistics(stub, ORACLE)
    holding = hold(stub, 0.5)
    request = expression(EXPRESSIONS[1].encode())  # 60 bytes of tokens: only one of them fits into the queue
    first = stub.ModelInfer.future(request)
    words = [stub.ModelInfer.future(text(word)) for word in ("good", "bad")]
    assert holding.result().raw_output_contents
    assert np.frombuffer(first.result().raw_output_contents[0], np.float32) == [evaluate(EXPRESSIONS[1])]
    assert [list(np.frombuffer(call.result().raw_output_contents[0], np.float32)) for call in words] == [[0, 1], [1, 0]]
    now = statistics(stub, "sentiment")
    (pair,) = [batch for batch in now.batch_stats if batch.batch_size == 2]
    assert (pair.compute_infer.count, pair.compute_infer.ns > 0) == (1, True)
    assert now.execution_count < now.inference_count == now.inference_stats.success.count
    assert now.execution_count == sum(batch.compute_infer.count for batch in now.batch_stats)
    oracle = statistics(stub, ORACLE)
    assert oracle.execution_count - before.execution_count == 1


def test_a_higher_priority_goes_first(stub: Stub) -> None:
    holding = hold(stub, 0.5)
    done: list[str] = []
    calls = []
    for tier, priority in (("full", 10), ("lean", 1), ("auto", 0)):  # tiers, so that none shares a run
        call = stub.ModelInfer.future(text("good good", tier=tier, priority=priority))
        call.add_done_callback(lambda _, tier=tier: done.append(tier))
        calls.append(call)
        time.sleep(0.02)
    queues = []
    for call in calls:
        response = call.result()
        queues.append(response.parameters["tier"].string_param)
    assert holding.result().raw_output_contents
    assert wait_until(lambda: len(done) == 3)
    assert queues == ["full", "lean", "lean"]
    assert done.index("lean") < done.index("auto") < done.index("full")


@pytest.mark.parametrize(
    ("parameters", "tier", "reason"),
    [
        ({}, "full", "pinned"),
        ({"tier": "lean"}, "lean", "requested"),
        ({"tier": "auto"}, "lean", "router"),
        ({"policy": "router"}, "lean", "router"),
        ({"policy": "deadline", "timeout": 60_000_000}, "full", "full"),
        ({"policy": "load"}, "full", "full"),
    ],
)
def test_the_response_says_which_tier_and_why(
    stub: Stub, parameters: dict[str, str | int], tier: str, reason: str
) -> None:
    response = stub.ModelInfer(text("good good", **parameters))
    assert (response.parameters["tier"].string_param, response.parameters["tier_reason"].string_param) == (tier, reason)


@pytest.mark.parametrize(
    ("parameters", "message"),
    [
        ({"policy": "fast"}, "one of pinned, router, deadline, load"),
        ({"policy": 7}, "string_param"),
        ({"tier": "lean", "policy": "load"}, "Name a tier or a policy"),
        ({"priority": 11}, "1, the highest, to 10"),
    ],
)
def test_parameters_that_are_refused(stub: Stub, parameters: dict[str, str | int], message: str) -> None:
    with pytest.raises(grpc.RpcError, match=message) as caught:
        stub.ModelInfer(text("good", **parameters))
    assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT


def test_the_config_tells_how_it_is_scheduled(stub: Stub) -> None:
    config = stub.ModelConfig(pb.ModelConfigRequest(name="sentiment")).config
    assert [group.count for group in config.instance_group] == [1]
    batching = config.dynamic_batching
    assert (batching.max_queue_delay_microseconds, batching.priority_levels, batching.default_priority_level) == (
        2000,
        10,
        5,
    )
    policy = batching.default_queue_policy
    assert (policy.max_queue_size, policy.default_timeout_microseconds, policy.allow_timeout_override) == (
        256,
        60_000_000,
        True,
    )
    assert not stub.ModelConfig(pb.ModelConfigRequest(name="busy")).config.HasField("dynamic_batching")


@pytest.mark.parametrize("leave", ["cancel", "deadline", "timeout"])
def test_whoever_leaves_the_queue_is_counted_where_it_was(server: Ready, leave: str) -> None:
    with grpc.insecure_channel(f"127.0.0.1:{server.grpc_port}") as channel:
        _leave(server, Stub(channel), telemetry_pb2_grpc.TelemetryStub(channel), leave)


def _leave(server: Ready, stub: Stub, telemetry: telemetry_pb2_grpc.TelemetryStub, leave: str) -> None:
    def reading() -> telemetry_pb2.Reading:
        return telemetry.Get(telemetry_pb2.GetRequest())

    def drops() -> dict[tuple[str, str], int]:
        (model,) = [model for model in reading().models if model.name == ORACLE]
        return {(drop.reason, drop.place): drop.count for drop in model.drops}

    key = ("Cancelled" if leave == "cancel" else "DeadlineExceeded", "queued")
    before = drops().get(key, 0)
    holding = hold(stub, 0.7)
    request = expression(b"1 + 2")
    if leave == "timeout":
        request.parameters["timeout"].int64_param = 100_000
    call = stub.ModelInfer.future(request, timeout=0.1 if leave == "deadline" else 30)
    if leave == "cancel":
        assert wait_until(lambda: reading().queue_depth == 1)
        assert reading().queue_bytes == 60
        call.cancel()
    else:
        assert call.code() is grpc.StatusCode.DEADLINE_EXCEEDED
    assert wait_until(lambda: drops().get(key, 0) == before + 1)
    assert not holding.done()
    assert (reading().queue_depth, reading().queue_bytes) == (0, 0)
    assert holding.result().raw_output_contents
    with urllib.request.urlopen(f"http://127.0.0.1:{server.metrics_port}/metrics", timeout=10) as page:
        lines = page.read().decode().splitlines()
    labels = f'model="{ORACLE}",place="queued",reason="{key[0]}",version="1"'
    (line,) = [line for line in lines if line.startswith("fewheads_dropped_requests_total") and _same(line, labels)]
    assert float(line.split()[-1]) == before + 1
    assert "fewheads_queue_bytes 0.0" in lines


def _same(line: str, labels: str) -> bool:
    return sorted(line.partition("{")[2].partition("}")[0].split(",")) == sorted(labels.split(","))


def test_many_clients_get_their_own_answers(stub: Stub, tmp_path: Path) -> None:
    words = ["good", "bad", "good good bad", "poor fine", "bad bad bad"]

    def ask(index: int) -> bool:
        chosen = words[index % len(words)]
        tier = ("full", "lean")[index % 2]
        response = stub.ModelInfer(text(chosen, tier=tier))
        got = np.frombuffer(response.raw_output_contents[0], np.float32)
        return bool((got == text_model.logits(chosen, tier)).all())

    with ThreadPoolExecutor(2) as pool:  # more would not fit into the queue
        assert all(pool.map(ask, range(60)))
