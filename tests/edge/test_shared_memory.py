"""Tensors in shared memory: the stock client's, and what a hostile one might try."""

from __future__ import annotations

import os
import stat
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import psutil
import pytest
import tritonclient.grpc as triton
import tritonclient.utils.shared_memory as shm
from hypothesis import given, settings
from hypothesis import strategies as st
from tritonclient.utils import InferenceServerException, serialize_byte_tensor

from edge.bundles.expression import tokenize
from edge.datatypes import Array
from edge.errors import AlreadyThere, InvalidRequest, NotFound, Overloaded, RequestError
from edge.launch import running_server
from edge.pb import inference_pb2_grpc
from edge.server import Ready
from edge.serving.shared_memory import MAX_REGIONS, SharedMemory
from tests.support.busy_model import busy
from tests.support.metrics import wait_until
from tests.support.models import ORACLE
from tests.support.server_models import ECHO_MAX

TEXTS = ["3 - -4 + 2", "-5 + 1"]
TRUTH = np.array([[9], [-4]], np.float32)
SIZE = 4096
LIMIT = 1_000_000


@pytest.fixture(scope="module")
def allowing(bundles: list[Path], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ready]:
    """A server that lets its clients use shared memory."""
    names = ("oracle", "echo-fp32-1", "echo-bytes-1", "echo-bool-1", "busy-1")
    only = [bundle for bundle in bundles if bundle.name in names]
    arguments = ["--allow-shared-memory", f"--max-shared-memory-bytes={LIMIT}", "--max-message-bytes=100000"]
    with running_server(only, cache=tmp_path_factory.mktemp("cache"), arguments=arguments) as ready:
        yield ready


@pytest.fixture
def client(allowing: Ready) -> Iterator[triton.InferenceServerClient]:
    with triton.InferenceServerClient(f"127.0.0.1:{allowing.grpc_port}") as client:
        yield client
        client.unregister_system_shared_memory()


def key(name: str) -> str:
    return f"/fewheads-test-{os.getpid()}-{name}"


@contextmanager
def memory(name: str, size: int = SIZE) -> Iterator[Any]:
    """A shared memory object as the stock client makes it."""
    handle = shm.create_shared_memory_region(name, key(name), size, create_only=True)
    try:
        yield handle
    finally:
        shm.destroy_shared_memory_region(handle)


def put(client: triton.InferenceServerClient, name: str, size: int = SIZE, offset: int = 0) -> None:
    client.register_system_shared_memory(name, key(name), size, offset)


def code(caught: pytest.ExceptionInfo[InferenceServerException]) -> str:
    return str(caught.value.status()).removeprefix("StatusCode.")


def token_input(region: str, offset: int = 0, rows: int = 2) -> triton.InferInput:
    tensor = triton.InferInput("x", [rows, 15], "FP32")
    tensor.set_shared_memory(region, rows * 60, offset)
    return tensor


def value_output(region: str, size: int = 8, offset: int = 0) -> triton.InferRequestedOutput:
    output = triton.InferRequestedOutput("value")
    output.set_shared_memory(region, size, offset)
    return output


def test_inputs_and_outputs_of_the_stock_client(client: triton.InferenceServerClient) -> None:
    assert "system_shared_memory" in client.get_server_metadata().extensions
    with memory("in") as inputs, memory("out") as outputs:
        shm.set_shared_memory_region(inputs, [tokenize(TEXTS)], offset=64)
        put(client, "in")
        put(client, "out")
        result = client.infer(ORACLE, [token_input("in", 64)], outputs=[value_output("out", 16, 100)])
        np.testing.assert_array_equal(shm.get_contents_as_numpy(outputs, np.float32, [2, 1], 100), TRUTH)
        response = result.get_response()
        assert list(response.raw_output_contents) == [b""]  # C++ clients index it without a check
        assert list(response.outputs[0].shape) == [2, 1]
        told = response.outputs[0].parameters
        assert told["shared_memory_region"].string_param == "out"
        assert told["shared_memory_byte_size"].int64_param == 8
        assert told["shared_memory_offset"].int64_param == 100
        # One of the two in the message, as it likes.
        plain = client.infer(ORACLE, [token_input("in", 64)])
        np.testing.assert_array_equal(plain.as_numpy("value"), TRUTH)
        sent = triton.InferInput("x", [2, 15], "FP32").set_data_from_numpy(tokenize(TEXTS[::-1]))
        client.infer(ORACLE, [sent], outputs=[value_output("out")])
        np.testing.assert_array_equal(shm.get_contents_as_numpy(outputs, np.float32, [2, 1]), TRUTH[::-1])


@pytest.mark.parametrize("datatype", ["FP32", "BYTES", "BOOL"])
def test_every_kind_of_datatype(client: triton.InferenceServerClient, datatype: str) -> None:
    values: dict[str, Array] = {
        "FP32": np.arange(5, dtype=np.float32),
        "BYTES": np.array([b"", b"a\0b", "é".encode(), b"x" * 100, b"1"], np.object_),
        "BOOL": np.array([True, False, True, True, False]),
    }
    sent = values[datatype]
    data = serialize_byte_tensor(sent).item() if datatype == "BYTES" else sent.tobytes()
    name = datatype.lower()
    with memory("both") as both:
        both._mpsm_handle.buf[: len(data)] = data
        put(client, "both")
        tensor = triton.InferInput(f"in_{name}", [5], datatype)
        tensor.set_shared_memory("both", len(data))
        output = triton.InferRequestedOutput(f"out_{name}")
        output.set_shared_memory("both", 1000, 2000)
        client.infer(f"echo-{name}", [tensor], outputs=[output])
        kind = np.object_ if datatype == "BYTES" else sent.dtype
        np.testing.assert_array_equal(shm.get_contents_as_numpy(both, kind, [5], 2000), sent)


def test_streams_use_it_too(client: triton.InferenceServerClient) -> None:
    answers: list[Any] = []
    with memory("in") as inputs, memory("out") as outputs:
        shm.set_shared_memory_region(inputs, [tokenize(TEXTS)])
        put(client, "in")
        put(client, "out")
        client.start_stream(lambda result, error: answers.append((result, error)))
        client.async_stream_infer(ORACLE, [token_input("in")], outputs=[value_output("out")])
        client.async_stream_infer(ORACLE, [token_input("zz")])
        client.stop_stream()
        np.testing.assert_array_equal(shm.get_contents_as_numpy(outputs, np.float32, [2, 1]), TRUTH)
    assert answers[0][1] is None
    assert "'zz'" in str(answers[1][1])


def test_register_status_and_unregister(client: triton.InferenceServerClient) -> None:
    with memory("a"), memory("b"):
        put(client, "a", 1000, 96)
        put(client, "b")
        regions = client.get_system_shared_memory_status().regions
        assert set(regions) == {"a", "b"}
        a = regions["a"]
        assert (a.name, a.key, a.offset, a.byte_size) == ("a", key("a"), 96, 1000)
        assert set(client.get_system_shared_memory_status("b").regions) == {"b"}
        with pytest.raises(InferenceServerException) as caught:
            put(client, "a")  # as with Triton
        assert code(caught) == "ALREADY_EXISTS"
        for _ in range(2):
            client.unregister_system_shared_memory("a")
        with pytest.raises(InferenceServerException) as caught:
            client.get_system_shared_memory_status("a")
        assert code(caught) == "NOT_FOUND"
        put(client, "a")
        client.unregister_system_shared_memory()
        assert not client.get_system_shared_memory_status().regions


def test_cuda(client: triton.InferenceServerClient) -> None:
    client.unregister_cuda_shared_memory()
    assert not client.get_cuda_shared_memory_status().regions
    with pytest.raises(InferenceServerException, match="CUDA IPC") as caught:
        client.register_cuda_shared_memory("a", b"aGFuZGxl", 0, 8)
    assert code(caught) == "UNIMPLEMENTED"


def asked(client: triton.InferenceServerClient, **change: Any) -> pytest.ExceptionInfo[InferenceServerException]:
    with pytest.raises(InferenceServerException) as caught:
        client.infer(
            ORACLE, [change.get("x") or token_input("in")], outputs=[change.get("value") or value_output("in")]
        )
    return caught


def test_requests_that_point_wrongly(client: triton.InferenceServerClient) -> None:
    with memory("in") as inputs:
        shm.set_shared_memory_region(inputs, [tokenize(TEXTS)])
        put(client, "in")
        for wrong, status, text in (
            ({"x": token_input("zz")}, "NOT_FOUND", "'zz'"),
            ({"value": value_output("zz")}, "NOT_FOUND", "'zz'"),
            ({"x": token_input("in", SIZE - 119)}, "INVALID_ARGUMENT", "a part of the 4096 bytes"),
            ({"x": token_input("in", 2**63 - 1)}, "INVALID_ARGUMENT", "a part of the 4096 bytes"),
            ({"x": token_input("in", -8)}, "INVALID_ARGUMENT", "a part of the 4096 bytes"),
            ({"value": value_output("in", 8, SIZE - 7)}, "INVALID_ARGUMENT", "a part of the 4096 bytes"),
            ({"value": value_output("in", 0)}, "INVALID_ARGUMENT", "a part of the 4096 bytes"),
            ({"value": value_output("in", -1)}, "INVALID_ARGUMENT", "a part of the 4096 bytes"),
            ({"value": value_output("in", 7)}, "INVALID_ARGUMENT", "at least 8"),
        ):
            caught = asked(client, **wrong)
            assert (code(caught), text in str(caught.value)) == (status, True), caught.value
        short = token_input("in")
        short.set_shared_memory("in", 119)
        assert "120 for FP32 [2, 15]" in str(asked(client, x=short).value)
        for name in ("shared_memory_region", "shared_memory_byte_size"):
            half = token_input("in")
            del half._input.parameters[name]
            assert f"{name} as nothing" in str(asked(client, x=half).value)
        text = token_input("in")
        text._input.parameters["shared_memory_offset"].string_param = "0"
        assert "shared_memory_offset as string_param" in str(asked(client, x=text).value)
        assert ask_well(client)


def ask_well(client: triton.InferenceServerClient) -> bool:
    result = client.infer(ORACLE, [token_input("in")])
    return bool((result.as_numpy("value") == TRUTH).all())


def test_raw_and_typed_contents_beside_it(client: triton.InferenceServerClient) -> None:
    stub = inference_pb2_grpc.GRPCInferenceServiceStub(client._channel)
    from edge.pb import inference_pb2 as pb

    with memory("in") as inputs:
        shm.set_shared_memory_region(inputs, [tokenize(TEXTS)])
        put(client, "in")
        good = pb.ModelInferRequest.FromString(
            triton._utils._get_inference_request(  # type: ignore[attr-defined]
                ORACLE, [token_input("in")], "", "", None, 0, False, False, 0, None, None
            ).SerializeToString()
        )
        assert stub.ModelInfer(good).raw_output_contents[0] == TRUTH.tobytes()
        for change in (
            lambda r: r.raw_input_contents.append(tokenize(TEXTS).tobytes()),
            lambda r: r.inputs[0].contents.fp32_contents.extend([0] * 30),
        ):
            wrong = pb.ModelInferRequest.FromString(good.SerializeToString())
            change(wrong)
            with pytest.raises(grpc.RpcError) as caught:
                stub.ModelInfer(wrong)
            assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT


def test_a_tensor_larger_than_a_message(client: triton.InferenceServerClient) -> None:
    with memory("large", 2**18):
        put(client, "large", 2**18)
        tensor = triton.InferInput("in_fp32", [2**16], "FP32")
        tensor.set_shared_memory("large", 2**18)
        with pytest.raises(InferenceServerException, match="at most 100000"):
            client.infer("echo-fp32", [tensor])


def test_an_object_that_shrinks_harms_nobody(client: triton.InferenceServerClient) -> None:
    with memory("in") as inputs, memory("out"):
        shm.set_shared_memory_region(inputs, [tokenize(TEXTS)])
        put(client, "in")
        put(client, "out")
        os.truncate(f"/dev/shm{key('out')}", 4)
        assert "an object of 4 bytes" in str(asked(client, value=value_output("out")).value)
        assert os.path.getsize(f"/dev/shm{key('out')}") == 4
        os.truncate(f"/dev/shm{key('in')}", 100)
        assert "100 bytes that are there" in str(asked(client).value)
        os.truncate(f"/dev/shm{key('in')}", 0)
        assert "0 bytes that are there" in str(asked(client).value)
    assert client.is_server_live()


def test_an_object_that_is_unlinked_or_unregistered_while_it_is_used(client: triton.InferenceServerClient) -> None:
    stub = inference_pb2_grpc.GRPCInferenceServiceStub(client._channel)
    with memory("in") as inputs, memory("out") as outputs:
        inputs._mpsm_handle.buf[:8] = np.int64(300).tobytes()
        put(client, "in")
        put(client, "out")
        flying = []
        for _ in range(2):
            request = busy(300)
            del request.raw_input_contents[:]
            request.inputs[0].parameters["shared_memory_region"].string_param = "in"
            request.inputs[0].parameters["shared_memory_byte_size"].int64_param = 8
            output = request.outputs.add(name="done")
            output.parameters["shared_memory_region"].string_param = "out"
            output.parameters["shared_memory_byte_size"].int64_param = 8
            output.parameters["shared_memory_offset"].int64_param = 8 * len(flying)
            flying.append(stub.ModelInfer.future(request))
        assert wait_until(lambda: client.get_inference_statistics("busy").model_stats[0].execution_count > 0)
        client.unregister_system_shared_memory()
        os.unlink(f"/dev/shm{key('in')}")
        inputs._mpsm_handle.buf[:8] = np.int64(1).tobytes()  # it was read when the request came
        assert [list(future.result().raw_output_contents) for future in flying] == [[b""], [b""]]
        np.testing.assert_array_equal(shm.get_contents_as_numpy(outputs, np.int64, [2]), [300, 300])
        with suppress(FileNotFoundError), open(f"/dev/shm{key('in')}", "xb"):
            pass  # so that the helper finds something to remove


def test_nothing_leaks(client: triton.InferenceServerClient, allowing: Ready) -> None:
    process = psutil.Process(allowing.process_id)

    def mapped() -> int:
        return sum("fewheads-test" in line.path for line in process.memory_maps(grouped=False))

    with memory("in") as inputs, memory("out"):
        shm.set_shared_memory_region(inputs, [tokenize(TEXTS)])

        def turn() -> None:
            put(client, "in")
            put(client, "out")
            client.infer(ORACLE, [token_input("in")], outputs=[value_output("out")])
            asked(client, value=value_output("out", 1))
            client.unregister_system_shared_memory()

        turn()  # the client is connected from now on
        files, memory_before = process.num_fds(), process.memory_info().rss
        for _ in range(100):
            turn()
        assert process.num_fds() == files
        assert mapped() == 0
        assert process.memory_info().rss - memory_before < 4 * 2**20


# The registry itself


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    (tmp_path / "shm").mkdir()
    (tmp_path / "shm" / "object").write_bytes(bytes(range(256)) * 16)
    (tmp_path / "secret").write_bytes(b"secret")
    return tmp_path / "shm"


@pytest.fixture
def registry(directory: Path) -> SharedMemory:
    return SharedMemory(LIMIT, SIZE, directory)


@pytest.mark.parametrize(
    "bad",
    [
        *("", "/", ".", "..", "../secret", "/../secret", "a/b", "//object", "object/", "a\0b", "x" * 256),
        *("sem.object", "triton_python_backend_shm_region_1", "/triton_python_backend_shm_region_1"),
        *("link", "directory", "pipe"),
    ],
)
def test_keys_that_are_no_object(registry: SharedMemory, directory: Path, bad: str) -> None:
    (directory / "link").symlink_to("../secret")
    (directory / "directory").mkdir()
    os.mkfifo(directory / "pipe")
    (directory / "sem.object").write_bytes(b"semaphore")
    begun = time.monotonic()
    with pytest.raises(InvalidRequest):
        registry.register("a", bad, 0, 1)
    assert time.monotonic() - begun < 5
    assert not registry.regions()


def test_an_object_that_is_not_there(registry: SharedMemory) -> None:
    with pytest.raises(NotFound, match="zz"):
        registry.register("a", "zz", 0, 1)


@pytest.mark.parametrize("name", ["", "x" * 256])
def test_names_that_are_none(registry: SharedMemory, name: str) -> None:
    with pytest.raises(InvalidRequest, match="1 to 255 bytes"):
        registry.register(name, "object", 0, 1)


def test_any_other_name_is_good(registry: SharedMemory) -> None:
    for name in ("../../etc", "é" * 100, " ", "a\nb"):
        registry.register(name, "/object", 0, 1)
    assert len(registry.regions()) == 4


@given(offset=st.integers(0, 2**64 - 1), size=st.integers(0, 2**64 - 1))
@settings(deadline=None)
def test_a_region_lies_inside_its_object(tmp_path_factory: pytest.TempPathFactory, offset: int, size: int) -> None:
    directory = tmp_path_factory.mktemp("shm")
    (directory / "object").write_bytes(bytes(100))
    registry = SharedMemory(2**65, SIZE, directory)
    if size and offset + size <= 100:
        registry.register("a", "object", offset, size)
        assert len(registry.window("a", 0, size, "t").read()) == size
    else:
        with pytest.raises(InvalidRequest):
            registry.register("a", "object", offset, size)


INT64 = st.integers(-(2**63), 2**63 - 1) | st.integers(-2, 70)


@given(offset=INT64, size=INT64)
@settings(deadline=None)
def test_a_window_lies_inside_its_region(tmp_path_factory: pytest.TempPathFactory, offset: int, size: int) -> None:
    directory = tmp_path_factory.mktemp("shm")
    content = bytes(range(100))
    (directory / "object").write_bytes(content)
    registry = SharedMemory(SIZE, SIZE, directory)
    registry.register("a", "object", 17, 64)
    if offset >= 0 and size >= 1 and offset + size <= 64:
        assert registry.window("a", offset, size, "t").read() == content[17 + offset : 17 + offset + size]
        registry.window("a", offset, size, "t", write=True).write(b"\xff" * size)
        expected = bytearray(content)
        expected[17 + offset : 17 + offset + size] = b"\xff" * size
        assert (directory / "object").read_bytes() == expected
    else:
        with pytest.raises(InvalidRequest):
            registry.window("a", offset, size, "t")


def test_regions_are_bounded_in_number_and_size(directory: Path) -> None:
    registry = SharedMemory(MAX_REGIONS + 9, SIZE, directory)
    registry.register("ten", "object", 0, 10)
    with pytest.raises(Overloaded, match="--max-shared-memory-bytes"):
        registry.register("all", "object", 0, MAX_REGIONS)
    for number in range(MAX_REGIONS - 1):
        registry.register(str(number), "object", 0, 1)
    with pytest.raises(Overloaded, match="at most 256"):
        registry.register("one more", "object", 0, 1)
    registry.unregister("7")
    registry.register("one more", "object", 0, 1)


def test_files_are_closed_when_nobody_holds_them(registry: SharedMemory) -> None:
    before = len(os.listdir("/proc/self/fd"))
    for number in range(10):
        registry.register(str(number), "object", 0, SIZE)
    for wrong in ({"offset": SIZE}, {"key": "zz"}, {"name": "1"}):
        with pytest.raises(RequestError):
            registry.register(**{"name": "x", "key": "object", "offset": 0, "byte_size": 1, **wrong})  # type: ignore[arg-type]
    assert len(os.listdir("/proc/self/fd")) == before + 10
    window = registry.window("3", 0, 4, "t")
    registry.unregister()
    assert len(os.listdir("/proc/self/fd")) == before + 1
    assert window.read() == bytes(range(4))
    del window
    assert len(os.listdir("/proc/self/fd")) == before


@pytest.mark.skipif(os.geteuid() == 0, reason="nothing is closed to root")
def test_an_object_that_may_only_be_read(registry: SharedMemory, directory: Path) -> None:
    (directory / "object").chmod(stat.S_IRUSR)
    registry.register("a", "object", 0, SIZE)
    assert registry.window("a", 0, 4, "t").read() == bytes(range(4))
    with pytest.raises(InvalidRequest, match="may only read"):
        registry.window("a", 0, 4, "t", write=True)


def test_a_name_is_taken_once(registry: SharedMemory) -> None:
    registry.register("a", "object", 0, 1)
    with pytest.raises(AlreadyThere, match="region 'a'"):
        registry.register("a", "object", 0, 1)
    registry.unregister("zz")
    registry.unregister("a")
    registry.register("a", "object", 0, 1)


def test_the_largest_echo_fits() -> None:
    """The test above of tensors that are larger than messages must not be about the model's own limit."""
    assert ECHO_MAX * 4 < 100_000
