"""Random and mutated messages to every RPC that the other fuzzers leave out, and requests to every path of REST."""

from __future__ import annotations

import json
from collections import Counter
from typing import Any

import grpc
import psutil
import pytest
from google.protobuf import message_factory
from google.protobuf.message import DecodeError, Message
from grpc_health.v1 import health_pb2
from grpc_reflection.v1alpha import reflection_pb2
from hypothesis import given
from hypothesis import strategies as st

from edge.pb import inference_pb2 as pb
from edge.pb import telemetry_pb2
from edge.pb.pool import POOL
from edge.protocol import INFERENCE, TELEMETRY
from edge.server import Ready
from tests.edge import test_fuzz_extensions
from tests.edge.test_rest_fuzz import ALLOWED as ALLOWED_OVER_HTTP
from tests.edge.test_rest_fuzz import changes, profile
from tests.support.fuzzing import mutated
from tests.support.http_requests import ask
from tests.support.metrics import is_at_rest, wait_until
from tests.support.models import ORACLE, VERSIONED
from tests.support.rpcs import methods

#: What it says concerns the protocol, whatever carries it.
ON_EVERY_TRANSPORT = True

#: The long way is for those who change what reads the messages.
EXAMPLES = pytest.mark.parametrize("examples", [25, pytest.param(1000, marks=pytest.mark.slow)])
#: Of requests to every path.
ROUNDS = pytest.mark.parametrize("examples", [5, pytest.param(100, marks=pytest.mark.slow)])
ALLOWED_GROWTH_BYTES = 16 * 2**20
ALLOWED = {grpc.StatusCode.OK, grpc.StatusCode.INVALID_ARGUMENT, grpc.StatusCode.NOT_FOUND, grpc.StatusCode.UNAVAILABLE}
HEALTH, REFLECTION = "grpc.health.v1.Health", "grpc.reflection.v1alpha.ServerReflection"
models = st.sampled_from([ORACLE, VERSIONED, "busy", "broken", "zz", ""]) | st.text(max_size=6)
versions = st.sampled_from(["", "1", "3", "0", "-1", "9" * 30, "²"]) | st.text(max_size=4)
services = st.sampled_from(["", INFERENCE, TELEMETRY, HEALTH, REFLECTION, ORACLE]) | st.text(max_size=8)
REQUESTS: dict[str, st.SearchStrategy[Any]] = {
    **{
        f"/{INFERENCE}/{name}": st.builds(request, name=st.just(ORACLE))
        | st.builds(request, name=models, version=versions)
        for name, request in {
            "ModelConfig": pb.ModelConfigRequest,
            "ModelMetadata": pb.ModelMetadataRequest,
            "ModelReady": pb.ModelReadyRequest,
            "ModelStatistics": pb.ModelStatisticsRequest,
        }.items()
    },
    f"/{INFERENCE}/ServerLive": st.just(pb.ServerLiveRequest()),
    f"/{INFERENCE}/ServerMetadata": st.just(pb.ServerMetadataRequest()),
    f"/{INFERENCE}/ServerReady": st.just(pb.ServerReadyRequest()),
    f"/{TELEMETRY}/Get": st.just(telemetry_pb2.GetRequest()),
    f"/{TELEMETRY}/Watch": st.builds(
        telemetry_pb2.WatchRequest, interval_ms=st.sampled_from([0, 1, 99, 100, 60_000, 2**32 - 1])
    ),
    f"/{HEALTH}/Check": st.builds(health_pb2.HealthCheckRequest, service=services),
    f"/{HEALTH}/Watch": st.builds(health_pb2.HealthCheckRequest, service=services),
    f"/{REFLECTION}/ServerReflectionInfo": st.one_of(
        st.builds(reflection_pb2.ServerReflectionRequest, list_services=services),
        st.builds(reflection_pb2.ServerReflectionRequest, file_by_filename=st.text(max_size=8)),
        st.builds(reflection_pb2.ServerReflectionRequest, file_containing_symbol=services),
        st.builds(
            reflection_pb2.ServerReflectionRequest,
            file_containing_extension=st.builds(
                reflection_pb2.ExtensionRequest, containing_type=services, extension_number=st.integers(-2, 2**31 - 1)
            ),
        ),
        st.builds(reflection_pb2.ServerReflectionRequest, all_extension_numbers_of_type=services),
        st.just(reflection_pb2.ServerReflectionRequest()),
    ),
}
#: What the other modules fuzz.
ELSEWHERE = {"ModelInfer", "ModelStreamInfer", *test_fuzz_extensions.REQUESTS}


def test_every_rpc_is_fuzzed() -> None:
    assert sorted([*REQUESTS, *(f"/{INFERENCE}/{name}" for name in ELSEWHERE)]) == methods()


def request_of(rpc: str) -> type[Message]:
    _, service, method = rpc.split("/")
    described = POOL.FindServiceByName(service).methods_by_name[method]
    return message_factory.GetMessageClass(described.input_type)


def parses(rpc: str, data: bytes) -> bool:
    try:
        request_of(rpc).FromString(data)
    except DecodeError:
        return False
    return True


@EXAMPLES
@pytest.mark.parametrize("rpc", REQUESTS)
def test_random_and_mutated_messages(server: Ready, channel: grpc.Channel, rpc: str, examples: int) -> None:
    seen: Counter[grpc.StatusCode] = Counter()
    process = psutil.Process(server.process_id)

    def send(data: bytes) -> grpc.StatusCode:
        """How a call ends; one that goes on is left after its first answer."""
        call = channel.stream_stream(rpc)(iter([data]), timeout=10)
        try:
            next(iter(call), None)
            code: grpc.StatusCode = grpc.StatusCode.OK
        except grpc.RpcError as error:
            code = error.code()
        call.cancel()
        seen[code] += 1
        return code

    written = REQUESTS[rpc].map(lambda request: bytes(request.SerializeToString()))

    @profile(examples)
    @given(written, st.data(), st.booleans())
    def messages(message: bytes, data: st.DataObject, whole: bool) -> None:
        sent = message if whole else data.draw(mutated([message]))
        code = send(sent)
        # UNKNOWN and INTERNAL are what the libraries of health and reflection say of what is no message.
        refused = {grpc.StatusCode.INTERNAL, grpc.StatusCode.UNKNOWN}
        assert code in ALLOWED or (code in refused and not parses(rpc, sent)), (code, sent)

    before = process.memory_info().rss
    messages()
    # A fuzzer that never gets through tests nothing.
    assert grpc.StatusCode.OK in seen
    assert wait_until(lambda: is_at_rest(server))
    assert process.memory_info().rss - before < ALLOWED_GROWTH_BYTES


def routes() -> list[tuple[str, str]]:
    """Method and path of everything that REST answers."""
    from edge.rest.paths import RestApi  # its libraries are an extra

    nobody: Any = None
    api = RestApi(nobody, nobody, nobody, None, 0)
    found: list[Any] = list(api.application.routes)
    return sorted((method, route.path) for route in found for method in route.methods - {"HEAD"})


@ROUNDS
def test_every_path_of_rest(http_url: str, examples: int) -> None:
    pytest.importorskip("starlette")
    paths = routes()
    assert len(paths) > 20
    words = st.sampled_from([ORACLE, VERSIONED, "1", "3", "a", "%2e%2e", "%00", "%ff"]) | st.integers().map(str)
    bodies = changes.map(lambda body: json.dumps(body).encode()) | st.binary(max_size=20)

    @profile(examples)
    @given(st.lists(words, min_size=3, max_size=3), bodies)
    def any_of_them(chosen: list[str], body: bytes) -> None:
        names = dict(zip(("model", "version", "region"), chosen, strict=True))
        for method, path in paths:
            heard = ask(http_url, path.format(**names), body if method == "POST" else None, method=method)
            assert heard.status in {*ALLOWED_OVER_HTTP, 405}, (method, path, heard.body)

    any_of_them()
    assert ask(http_url, "/v2/health/live").status == 200
