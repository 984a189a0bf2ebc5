"""Scheduling over a real socket: priorities, tiers, and the model's configuration."""

from __future__ import annotations

import time
from collections.abc import Iterator

import grpc
import pytest

from edge.launch import running_server
from edge.pb import inference_pb2 as pb
from tests.support import text_model
from tests.support.busy_model import Stub, busy
from tests.support.metrics import wait_until
from tests.support.sample_requests import text
from tests.support.server_models import write_busy_bundle


@pytest.fixture(scope="module")
def stub(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stub]:
    directory = tmp_path_factory.mktemp("scheduling")
    text_model.write_sentiment_bundle(directory / "sentiment")
    write_busy_bundle(directory)
    arguments = ["--instances=1", "--max-queue-delay-us=2000", "--default-timeout-ms=60000"]
    bundles = [directory / name for name in ("sentiment", "busy-1")]
    with (
        running_server(bundles, cache=directory / "cache", arguments=arguments) as ready,
        grpc.insecure_channel(f"127.0.0.1:{ready.grpc_port}") as channel,
    ):
        yield Stub(channel)


def test_higher_priority_goes_first(stub: Stub) -> None:
    begun = time.perf_counter()
    stub.ModelInfer(busy(200))
    holding = stub.ModelInfer.future(busy(int(200 / (time.perf_counter() - begun))))  # about a second
    time.sleep(0.05)
    done: list[str] = []
    calls = []
    for tier, priority in (("full", 10), ("lean", 1), ("auto", 0)):  # tiers, so that none shares a run
        calls.append(stub.ModelInfer.future(text("good good", tier=tier, priority=priority)))
        calls[-1].add_done_callback(lambda _, tier=tier: done.append(tier))
        time.sleep(0.02)
    assert [call.result().parameters["tier"].string_param for call in calls] == ["full", "lean", "lean"]
    assert holding.result().raw_output_contents
    assert wait_until(lambda: len(done) == 3)
    assert done == ["lean", "auto", "full"]


@pytest.mark.parametrize(
    ("parameters", "tier", "reason"),
    [
        ({}, "full", "pinned"),
        ({"tier": "lean"}, "lean", "requested"),
        ({"tier": "auto"}, "lean", "router"),
        ({"policy": "deadline", "timeout": 60_000_000}, "full", "full"),
    ],
)
def test_response_gives_the_tier_and_the_reason(
    stub: Stub, parameters: dict[str, str | int], tier: str, reason: str
) -> None:
    response = stub.ModelInfer(text("good good", **parameters))
    assert (response.parameters["tier"].string_param, response.parameters["tier_reason"].string_param) == (tier, reason)


@pytest.mark.parametrize(
    ("parameters", "message"),
    [
        ({"policy": "fast"}, "one of pinned, router, deadline, load"),
        ({"policy": 7}, "string_param"),
        ({"priority": 11}, "1, the highest, to 10"),
    ],
)
def test_wrong_parameters_are_rejected(stub: Stub, parameters: dict[str, str | int], message: str) -> None:
    with pytest.raises(grpc.RpcError, match=message) as caught:
        stub.ModelInfer(text("good", **parameters))
    assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT


def test_model_config_describes_the_scheduling(stub: Stub) -> None:
    config = stub.ModelConfig(pb.ModelConfigRequest(name="sentiment")).config
    assert [group.count for group in config.instance_group] == [1]
    batching = config.dynamic_batching
    levels = (batching.priority_levels, batching.default_priority_level)
    assert (batching.max_queue_delay_microseconds, *levels) == (2000, 10, 5)
    policy = batching.default_queue_policy
    assert (policy.max_queue_size, policy.default_timeout_microseconds) == (256, 60_000_000)
    assert policy.allow_timeout_override
    assert not stub.ModelConfig(pb.ModelConfigRequest(name="busy")).config.HasField("dynamic_batching")
