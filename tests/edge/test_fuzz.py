"""Random and mutated messages to every RPC: each call gets a status, and none harms the server."""

import os
from collections import Counter
from pathlib import Path

import grpc
import psutil
import pytest
from google.protobuf import message_factory
from google.protobuf.message import DecodeError
from grpc_health.v1 import health_pb2
from grpc_reflection.v1alpha import reflection_pb2
from hypothesis import given
from hypothesis import strategies as st

from edge.client.connection import open_stub
from edge.launch import running_server
from edge.pb import inference_pb2 as pb
from edge.pb import telemetry_pb2
from edge.pb.pool import POOL
from edge.protocol import INFERENCE, TELEMETRY
from tests.support.fuzzing import mutated, profile
from tests.support.fuzzing import requests as infer_requests
from tests.support.metrics import is_at_rest, wait_until
from tests.support.models import ORACLE, ORACLE_BUNDLE, VERSIONED
from tests.support.sample_requests import SEEDS, good, in_region, methods

ON_EVERY_TRANSPORT = True  # it tests the protocol

#: Examples for each RPC, for ModelInfer, and for each kind of the extensions.
EXAMPLES, INFER_EXAMPLES, EXTENSION_EXAMPLES = 20, 200, 60
#: Growth that is not a leak: allocator pools, and counters of error kinds.
ALLOWED_GROWTH_BYTES = 24 * 2**20
ALLOWED = {
    grpc.StatusCode.OK,
    grpc.StatusCode.INVALID_ARGUMENT,
    grpc.StatusCode.NOT_FOUND,
    grpc.StatusCode.UNIMPLEMENTED,
    grpc.StatusCode.UNAVAILABLE,
    grpc.StatusCode.DEADLINE_EXCEEDED,
}
HEALTH, REFLECTION = "grpc.health.v1.Health", "grpc.reflection.v1alpha.ServerReflection"
STREAM = f"/{INFERENCE}/ModelStreamInfer"
KEY = f"/fewheads-fuzz-{os.getpid()}"
REGION = pb.SystemSharedMemoryRegisterRequest(name="a", key=KEY, byte_size=4096)

models = st.just(ORACLE) | st.sampled_from([ORACLE, VERSIONED, "busy", "broken", "zz", ""]) | st.text(max_size=6)
versions = st.sampled_from(["", "1", "3", "0", "-1", "9" * 30, "²"]) | st.text(max_size=4)
services = st.sampled_from(["", INFERENCE, TELEMETRY, HEALTH, REFLECTION, ORACLE]) | st.text(max_size=8)
#: RPCs that change the state of the server, and the index that shows it, with messages by method.
EXTENSIONS = {method: SEEDS[method] for method in SEEDS if method != "ModelInfer"}
EXTENSIONS["SystemSharedMemoryRegister"] = [REGION.SerializeToString()]  # the other requests need a region
any_bytes = st.sampled_from(list(EXTENSIONS)).flatmap(
    lambda method: st.tuples(st.just(method), st.sampled_from(EXTENSIONS[method]) | mutated(EXTENSIONS[method]))
)
#: The other RPCs, by path.
REQUESTS = {
    f"/{INFERENCE}/ModelInfer": infer_requests,
    **{
        f"/{INFERENCE}/{name}": st.builds(
            getattr(pb, f"{name}Request"), name=st.just(ORACLE) | models, version=versions
        )
        for name in ("ModelConfig", "ModelMetadata", "ModelReady", "ModelStatistics")
    },
    **{f"/{INFERENCE}/{name}": st.just(None) for name in ("ServerLive", "ServerMetadata", "ServerReady")},
    f"/{TELEMETRY}/Get": st.just(None),
    f"/{TELEMETRY}/Watch": st.builds(
        telemetry_pb2.WatchRequest, interval_ms=st.sampled_from([0, 1, 99, 100, 60_000, 2**32 - 1])
    ),
    **{f"/{HEALTH}/{name}": st.builds(health_pb2.HealthCheckRequest, service=services) for name in ("Check", "Watch")},
    f"/{REFLECTION}/ServerReflectionInfo": st.builds(
        reflection_pb2.ServerReflectionRequest, file_containing_symbol=services
    ),
}


def test_every_rpc_is_fuzzed():
    assert sorted([*REQUESTS, STREAM, *(f"/{INFERENCE}/{name}" for name in EXTENSIONS)]) == methods()


def parses(rpc, data):
    _, service, method = rpc.split("/")
    described = POOL.FindServiceByName(service).methods_by_name[method]
    try:
        message_factory.GetMessageClass(described.input_type).FromString(data)
    except DecodeError:
        return False
    return True


@pytest.mark.parametrize("rpc", REQUESTS)
def test_random_and_mutated_messages(server, channel, rpc):
    seen = Counter()
    process = psutil.Process(server.process_id)
    seeds = SEEDS.get(rpc.rpartition("/")[2])

    def send(data):
        """Return the status of a call, which is cancelled after its first response."""
        call = channel.stream_stream(rpc)(iter([data]), timeout=10)
        try:
            next(iter(call), None)
            code = grpc.StatusCode.OK
        except grpc.RpcError as error:
            code = error.code()
        call.cancel()
        seen[code] += 1
        return code

    @profile(INFER_EXAMPLES if seeds else EXAMPLES)
    @given(REQUESTS[rpc], st.data(), st.booleans())
    def messages(request, data, whole):
        sent = bytes(request.SerializeToString()) if request else b""
        if not whole:
            sent = data.draw(mutated(seeds or [sent]))
        code = send(sent)
        # UNKNOWN and INTERNAL come from the libraries of health and reflection.
        refused = {grpc.StatusCode.INTERNAL, grpc.StatusCode.UNKNOWN}
        assert code in ALLOWED or (code in refused and not parses(rpc, sent)), (code, sent)

    for seed in (seeds or []) * 5:  # first growth of the server's memory
        send(seed)
    before = process.memory_info().rss
    messages()
    assert grpc.StatusCode.OK in seen  # otherwise the test exercises nothing
    if seeds:
        assert {grpc.StatusCode.INVALID_ARGUMENT, grpc.StatusCode.NOT_FOUND} <= set(seen)
        assert channel.unary_unary(rpc)(good().SerializeToString(), timeout=10)
    assert wait_until(lambda: is_at_rest(server))
    assert process.memory_info().rss - before < ALLOWED_GROWTH_BYTES


def shared(rows):
    """A request with its tensors in the region that other requests may have registered."""
    request = good(rows)
    del request.raw_input_contents[:]
    for tensor in (request.inputs[0], request.outputs.add(name="value")):
        in_region(tensor, "a", 60 * rows)
    return request


STREAMED = [shared(1).SerializeToString(), good().SerializeToString(), good(65).SerializeToString()]
streams = st.lists(
    st.one_of(st.sampled_from(STREAMED), mutated(STREAMED), infer_requests.map(lambda r: r.SerializeToString())),
    max_size=6,
)


@pytest.fixture(scope="module")
def opened(tmp_path_factory, transport):
    """A server with everything enabled, and an object in shared memory for its regions."""
    Path(f"/dev/shm{KEY}").write_bytes(good().raw_input_contents[0] + bytes(4036))
    arguments = ["--model-control=explicit", "--load-model=*", "--allow-shared-memory", "--allow-log-settings"]
    arguments.append(f"--transport={transport}")
    try:
        with running_server([ORACLE_BUNDLE], cache=tmp_path_factory.mktemp("cache"), arguments=arguments) as ready:
            yield ready
    finally:
        os.unlink(f"/dev/shm{KEY}")


def test_random_and_mutated_extensions(opened):
    seen = Counter()
    process = psutil.Process(opened.process_id)
    allowed = {*ALLOWED, grpc.StatusCode.ALREADY_EXISTS, grpc.StatusCode.RESOURCE_EXHAUSTED}
    with grpc.insecure_channel(f"127.0.0.1:{opened.grpc_port}") as channel:
        stub = open_stub(channel)

        def send(method, data):
            try:
                channel.unary_unary(f"/{INFERENCE}/{method}")(data, timeout=20)
                code = grpc.StatusCode.OK
            except grpc.RpcError as error:
                code = error.code()
            seen[method, code] += 1
            malformed = code is grpc.StatusCode.INTERNAL and not parses(f"/{INFERENCE}/{method}", data)
            assert code in allowed or malformed, (method, data)

        @profile(2 * EXTENSION_EXAMPLES)
        @given(any_bytes)
        def random_ones(call):
            send(*call)

        @profile(EXTENSION_EXAMPLES)
        @given(streams)
        def streamed_ones(messages):
            answers = []
            try:
                answers.extend(channel.stream_stream(STREAM)(iter(messages)))
                assert len(answers) == len(messages)
                code = grpc.StatusCode.OK
            except grpc.RpcError as error:
                code = error.code()
            whole = all(parses(STREAM, message) for message in messages)
            assert code is (grpc.StatusCode.OK if whole else grpc.StatusCode.INTERNAL)

        files = process.num_fds()
        for method in EXTENSIONS:
            for data in EXTENSIONS[method] * 3:  # first growth of the server's memory
                send(method, data)
        before = process.memory_info().rss
        random_ones()
        streamed_ones()
        assert wait_until(lambda: is_at_rest(opened))
        assert process.memory_info().rss - before < ALLOWED_GROWTH_BYTES
        successful = {method for method, code in seen if code is grpc.StatusCode.OK}
        assert successful == set(EXTENSIONS) - {"CudaSharedMemoryRegister"}  # otherwise the test exercises less
        assert {code for _, code in seen} >= {grpc.StatusCode.INVALID_ARGUMENT, grpc.StatusCode.NOT_FOUND}
        stub.SystemSharedMemoryUnregister(pb.SystemSharedMemoryUnregisterRequest())
        assert process.num_fds() <= files + 2  # the connection of this client
        stub.RepositoryModelLoad(pb.RepositoryModelLoadRequest(model_name=ORACLE))
        stub.SystemSharedMemoryRegister(REGION)
        assert list(stub.ModelInfer(shared(1)).raw_output_contents) == [b""]
        assert len(stub.ModelInfer(good()).raw_output_contents[0]) == 4
