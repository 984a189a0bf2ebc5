"""Random and mutated messages to the RPCs of Triton's extensions, all of them switched on: none harms the server."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import psutil
import pytest
from google.protobuf.message import DecodeError
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from edge.launch import running_server
from edge.pb import inference_pb2 as pb
from edge.pb import inference_pb2_grpc
from edge.server import Ready
from tests.edge.test_status_codes import ROWS
from tests.support.fuzzing import mutated
from tests.support.fuzzing import requests as infer_requests
from tests.support.metrics import is_at_rest, wait_until
from tests.support.models import ORACLE, ORACLE_BUNDLE
from tests.support.sample_requests import good

EXAMPLES = 150  # of each of the three kinds
ALLOWED_GROWTH_BYTES = 24 * 2**20
ALLOWED = {
    grpc.StatusCode.OK,
    grpc.StatusCode.INVALID_ARGUMENT,
    grpc.StatusCode.NOT_FOUND,
    grpc.StatusCode.ALREADY_EXISTS,
    grpc.StatusCode.RESOURCE_EXHAUSTED,
    grpc.StatusCode.UNIMPLEMENTED,
    grpc.StatusCode.UNAVAILABLE,
    grpc.StatusCode.DEADLINE_EXCEEDED,
}
PROFILE = settings(
    max_examples=EXAMPLES,
    deadline=None,
    database=None,
    phases=[Phase.generate],
    suppress_health_check=list(HealthCheck),
    derandomize=True,
)
KEY = f"/fewheads-fuzz-{os.getpid()}"
REGION = pb.SystemSharedMemoryRegisterRequest(name="a", key=KEY, byte_size=4096)

models = st.one_of(st.sampled_from([ORACLE, "oracle", ""]), st.text(max_size=6))
regions = st.sampled_from(["a", "a", "b", "", "é\n"])
keys = st.one_of(st.sampled_from([KEY, KEY[1:], "/", "..", "../../etc/passwd", "sem.a"]), st.text(max_size=6))
sizes = st.one_of(st.sampled_from([0, 1, 60, 4096, 4097, 2**63, 2**64 - 1]), st.integers(0, 200))
model_parameters = st.dictionaries(
    st.one_of(st.sampled_from(["config", "file:1/model.onnx", "unload_dependents"]), st.text(max_size=4)),
    st.one_of(
        st.builds(pb.ModelRepositoryParameter, bool_param=st.booleans()),
        st.builds(pb.ModelRepositoryParameter, bytes_param=st.binary(max_size=8)),
        st.just(pb.ModelRepositoryParameter()),
    ),
    max_size=1,
)
log_values = st.one_of(
    st.builds(pb.LogSettingsRequest.SettingValue, bool_param=st.booleans()),
    st.builds(pb.LogSettingsRequest.SettingValue, uint32_param=st.integers(0, 2**32 - 1)),
    st.builds(pb.LogSettingsRequest.SettingValue, string_param=st.sampled_from(["", "default", "ISO8601", "/tmp/x"])),
    st.just(pb.LogSettingsRequest.SettingValue()),
)
log_names = st.sampled_from(["log_info", "log_warning", "log_verbose_level", "log_format", "log_file", "zz"])
trace_values = st.builds(
    pb.TraceSettingRequest.SettingValue, value=st.lists(st.sampled_from(["OFF", "TIMESTAMPS", ""]), max_size=2)
)
REQUESTS: dict[str, st.SearchStrategy[Any]] = {
    "RepositoryModelLoad": st.builds(
        pb.RepositoryModelLoadRequest, model_name=models, parameters=model_parameters, repository_name=st.just("")
    ),
    "RepositoryModelUnload": st.builds(
        pb.RepositoryModelUnloadRequest, model_name=models, parameters=model_parameters, repository_name=regions
    ),
    "SystemSharedMemoryStatus": st.builds(pb.SystemSharedMemoryStatusRequest, name=regions),
    "SystemSharedMemoryRegister": st.one_of(
        st.just(REGION),  # most random ones are none, and without one the other requests would meet nothing
        st.builds(pb.SystemSharedMemoryRegisterRequest, name=regions, key=keys, offset=sizes, byte_size=sizes),
    ),
    "SystemSharedMemoryUnregister": st.builds(pb.SystemSharedMemoryUnregisterRequest, name=regions),
    "CudaSharedMemoryStatus": st.builds(pb.CudaSharedMemoryStatusRequest, name=regions),
    "CudaSharedMemoryRegister": st.builds(pb.CudaSharedMemoryRegisterRequest, name=regions),
    "CudaSharedMemoryUnregister": st.builds(pb.CudaSharedMemoryUnregisterRequest, name=regions),
    "TraceSetting": st.builds(
        pb.TraceSettingRequest,
        model_name=models,
        settings=st.dictionaries(st.sampled_from(["trace_level", "trace_rate", "zz"]), trace_values, max_size=2),
    ),
    "LogSettings": st.builds(pb.LogSettingsRequest, settings=st.dictionaries(log_names, log_values, max_size=2)),
    "RepositoryIndex": st.builds(pb.RepositoryIndexRequest, ready=st.booleans()),
}
any_request = st.sampled_from(list(REQUESTS)).flatmap(lambda method: st.tuples(st.just(method), REQUESTS[method]))
SEEDS = {method: [row.request.SerializeToString() for row in ROWS if row.method == method] for method in REQUESTS}
any_bytes = st.sampled_from(list(SEEDS)).flatmap(lambda method: st.tuples(st.just(method), mutated(SEEDS[method])))


def shared(rows: int) -> pb.ModelInferRequest:
    """A request whose tensors lie in the regions that the other requests may have registered."""
    request = good(rows)
    del request.raw_input_contents[:]
    for parameters in (request.inputs[0].parameters, request.outputs.add(name="value").parameters):
        parameters["shared_memory_region"].string_param = "a"
        parameters["shared_memory_byte_size"].int64_param = 60 * rows
    return request


STREAMED = [shared(1).SerializeToString(), good().SerializeToString(), good(65).SerializeToString()]
streams = st.lists(
    st.one_of(st.sampled_from(STREAMED), mutated(STREAMED), infer_requests.map(lambda r: r.SerializeToString())),
    max_size=6,
)


@pytest.fixture(scope="module")
def opened(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ready]:
    """A server with everything on, and an object in shared memory for its regions."""
    Path(f"/dev/shm{KEY}").write_bytes(good().raw_input_contents[0] + bytes(4036))
    arguments = ["--model-control=explicit", "--load-model=*", "--allow-shared-memory", "--allow-log-settings"]
    try:
        with running_server([ORACLE_BUNDLE], cache=tmp_path_factory.mktemp("cache"), arguments=arguments) as ready:
            yield ready
    finally:
        os.unlink(f"/dev/shm{KEY}")


def test_random_and_mutated_extensions(opened: Ready) -> None:
    seen: Counter[tuple[str, grpc.StatusCode]] = Counter()
    process = psutil.Process(opened.process_id)
    with grpc.insecure_channel(f"127.0.0.1:{opened.grpc_port}") as channel:
        stub = inference_pb2_grpc.GRPCInferenceServiceStub(channel)

        def send(method: str, data: bytes) -> grpc.StatusCode:
            try:
                channel.unary_unary(f"/inference.GRPCInferenceService/{method}")(data, timeout=20)
                code: grpc.StatusCode = grpc.StatusCode.OK
            except grpc.RpcError as error:
                code = error.code()
            seen[method, code] += 1
            return code

        @PROFILE
        @given(any_request)
        def random_ones(call: tuple[str, Any]) -> None:
            assert send(call[0], call[1].SerializeToString()) in ALLOWED

        @PROFILE
        @given(any_bytes)
        def mutated_ones(call: tuple[str, bytes]) -> None:
            code = send(*call)
            assert code in ALLOWED or (code is grpc.StatusCode.INTERNAL and not _parses(*call))

        @PROFILE
        @given(streams)
        def streamed_ones(messages: list[bytes]) -> None:
            answers: list[bytes] = []
            try:
                answers.extend(
                    channel.stream_stream("/inference.GRPCInferenceService/ModelStreamInfer")(iter(messages))
                )
                assert len(answers) == len(messages)
                code = grpc.StatusCode.OK
            except grpc.RpcError as error:
                code = error.code()
            whole = all(_parses("ModelInfer", message) for message in messages)
            assert code is (grpc.StatusCode.OK if whole else grpc.StatusCode.INTERNAL)

        files = process.num_fds()
        for method in SEEDS:
            for data in SEEDS[method] * 3:  # whatever grows once has grown before the memory is compared
                send(method, data)
        before = process.memory_info().rss
        random_ones()
        mutated_ones()
        streamed_ones()
        assert wait_until(lambda: is_at_rest(opened))
        assert process.memory_info().rss - before < ALLOWED_GROWTH_BYTES
        # A fuzzer that never gets through tests nothing.
        never = {"CudaSharedMemoryRegister"}
        assert {method for method, code in seen if code is grpc.StatusCode.OK} == set(REQUESTS) - never
        assert {code for _, code in seen} >= {grpc.StatusCode.INVALID_ARGUMENT, grpc.StatusCode.NOT_FOUND}
        stub.SystemSharedMemoryUnregister(pb.SystemSharedMemoryUnregisterRequest())
        assert process.num_fds() <= files + 2  # the connection of this client
        stub.RepositoryModelLoad(pb.RepositoryModelLoadRequest(model_name=ORACLE))
        stub.SystemSharedMemoryRegister(REGION)
        assert list(stub.ModelInfer(shared(1)).raw_output_contents) == [b""]
        assert len(stub.ModelInfer(good()).raw_output_contents[0]) == 4


def _parses(method: str, data: bytes) -> bool:
    try:
        getattr(pb, f"{method}Request").FromString(data)
    except DecodeError:
        return False
    return True
