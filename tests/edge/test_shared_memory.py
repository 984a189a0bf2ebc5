"""Tensors in shared memory: with the stock client, and against a hostile one; tests/conformance has more cases."""

import os
import stat
import time
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import psutil
import pytest
import tritonclient.grpc as triton
from hypothesis import given
from hypothesis import strategies as st
from tritonclient.utils import InferenceServerException

from edge.bundles.expression import tokenize
from edge.client.connection import open_stub
from edge.errors import AlreadyThere, InvalidRequest, NotFound, Overloaded
from edge.launch import running_server
from edge.serving.shared_memory import MAX_REGIONS, SharedMemory
from tests.support.metrics import wait_until
from tests.support.models import ORACLE
from tests.support.sample_requests import in_region
from tests.support.server_models import busy

SIZE = 4096
LIMIT = 1_000_000
MESSAGE = 100_000


@pytest.fixture(scope="module")
def allowing(bundles, tmp_path_factory):
    only = [bundle for bundle in bundles if bundle.name in ("oracle", "echo-fp32-1", "busy-1")]
    arguments = ["--allow-shared-memory", f"--max-shared-memory-bytes={LIMIT}", f"--max-message-bytes={MESSAGE}"]
    with running_server(only, cache=tmp_path_factory.mktemp("cache"), arguments=arguments) as ready:
        yield ready


@pytest.fixture
def client(allowing):
    with triton.InferenceServerClient(f"127.0.0.1:{allowing.grpc_port}") as client:
        yield client
        client.unregister_system_shared_memory()


@contextmanager
def memory(client, *names, size=SIZE):
    """Objects that are registered under these names; each begins with two rows of tokens."""
    paths = [Path(f"/dev/shm/fewheads-test-{os.getpid()}-{name}") for name in names]
    try:
        for name, path in zip(names, paths, strict=True):
            path.write_bytes(tokenize(["3 - -4 + 2", "-5 + 1"]).tobytes().ljust(size, b"\0"))
            client.register_system_shared_memory(name, path.name, size)
        yield paths
    finally:
        for path in paths:
            path.unlink(missing_ok=True)


def token_input(region):
    tensor = triton.InferInput("x", [2, 15], "FP32")
    tensor.set_shared_memory(region, 120)
    return tensor


def value_output(region, size=8):
    output = triton.InferRequestedOutput("value")
    output.set_shared_memory(region, size)
    return output


def refusal(client, x=None, value=None):
    with pytest.raises(InferenceServerException) as caught:
        client.infer(ORACLE, [x or token_input("in")], outputs=[value or value_output("in")])
    return str(caught.value)


def test_incomplete_parameters_are_refused(client):
    with memory(client, "in"):
        for name in ("shared_memory_region", "shared_memory_byte_size"):
            half = token_input("in")
            del half._input.parameters[name]
            assert f"{name} as nothing" in refusal(client, x=half)
        text = token_input("in")
        text._input.parameters["shared_memory_offset"].string_param = "0"
        assert "shared_memory_offset as string_param" in refusal(client, x=text)


def test_tensors_in_regions_are_no_larger_than_messages(client):
    with memory(client, "in", size=2 * MESSAGE):
        large = token_input("in")
        large.set_shared_memory("in", MESSAGE + 1)
        expected = f"in shared memory: got {MESSAGE + 1} bytes, expected at most {MESSAGE}. Split the request"
        assert f"input 'x' {expected}" in refusal(client, x=large)
        assert f"output 'value' {expected}" in refusal(client, value=value_output("in", MESSAGE + 1))
        client.infer(ORACLE, [token_input("in")], outputs=[value_output("in", MESSAGE)])


def test_object_can_be_unlinked_and_unregistered_during_a_request(client):
    stub = open_stub(client._channel)
    with memory(client, "in", "out") as (inputs, outputs), inputs.open("r+b", buffering=0) as file:
        file.write(np.int64(300).tobytes())
        flying = []
        for _ in range(2):
            request = busy(300)
            del request.raw_input_contents[:]
            in_region(request.inputs[0], "in", 8)
            in_region(request.outputs.add(name="done"), "out", 8, 8 * len(flying))
            flying.append(stub.ModelInfer.future(request))
        assert wait_until(lambda: client.get_inference_statistics("busy").model_stats[0].execution_count > 0)
        client.unregister_system_shared_memory()
        inputs.unlink()
        file.seek(0)
        file.write(np.int64(1).tobytes())  # it was read when the request came
        results = [future.result() for future in flying]
        assert [list(result.raw_output_contents) for result in results] == [[b""], [b""]]
        assert [result.outputs[0].parameters["shared_memory_offset"].int64_param for result in results] == [0, 8]
        assert np.fromfile(outputs, np.int64, 2).tolist() == [300, 300]


def test_no_memory_or_file_leaks(client, allowing):
    process = psutil.Process(allowing.process_id)
    for turn in range(101):
        with memory(client, "in", "out") as (_, outputs):
            client.infer(ORACLE, [token_input("in")], outputs=[value_output("out")])
            assert np.fromfile(outputs, np.float32, 2).tolist() == [9, -4]
            refusal(client, value=value_output("out", 1))
            client.unregister_system_shared_memory()
        if not turn:  # the client is connected from now on
            files, size = process.num_fds(), process.memory_info().rss
    assert process.num_fds() == files
    assert not [line.path for line in process.memory_maps(grouped=False) if "fewheads-test" in line.path]
    assert process.memory_info().rss - size < 4 * 2**20


@pytest.fixture
def directory(tmp_path):
    (tmp_path / "shm").mkdir()
    (tmp_path / "shm" / "object").write_bytes(bytes(range(256)) * 16)
    (tmp_path / "secret").write_bytes(b"secret")
    return tmp_path / "shm"


@pytest.fixture
def registry(directory):
    return SharedMemory(LIMIT, SIZE, directory)


@pytest.mark.parametrize(
    "bad",
    [
        *("", "..", "../secret", "/../secret", "a/b", "//object", "object/", "a\0b", "x" * 256),
        *("sem.object", "/triton_python_backend_shm_region_1", "link", "directory", "pipe"),
    ],
)
def test_invalid_keys_are_refused(registry, directory, bad):
    (directory / "link").symlink_to("../secret")
    (directory / "directory").mkdir()
    os.mkfifo(directory / "pipe")
    (directory / "sem.object").write_bytes(b"semaphore")
    begun = time.monotonic()
    with pytest.raises(InvalidRequest):
        registry.register("a", bad, 0, 1)
    assert time.monotonic() - begun < 5
    assert not registry.regions()


def test_names_have_1_to_255_bytes(registry):
    for name in ("", "x" * 256):
        with pytest.raises(InvalidRequest, match="1 to 255 bytes"):
            registry.register(name, "object", 0, 1)
    for name in ("../../etc", "x" * 255, " ", "a\nb"):
        registry.register(name, "/object", 0, 1)
    assert len(registry.regions()) == 4


@given(offset=st.integers(0, 2**64 - 1) | st.integers(0, 110), size=st.integers(0, 2**64 - 1) | st.integers(0, 110))
def test_region_must_be_inside_its_object(tmp_path_factory, offset, size):
    directory = tmp_path_factory.mktemp("shm")
    (directory / "object").write_bytes(bytes(100))
    registry = SharedMemory(2**65, SIZE, directory)
    if size and offset + size <= 100:
        registry.register("a", "object", offset, size)
        assert len(registry.part("a", 0, size, "t", write=False).read()) == size
    else:
        with pytest.raises(InvalidRequest):
            registry.register("a", "object", offset, size)


INT64 = st.integers(-(2**63), 2**63 - 1) | st.integers(-2, 70)


@given(offset=INT64, size=INT64)
def test_window_must_be_inside_its_region(tmp_path_factory, offset, size):
    directory = tmp_path_factory.mktemp("shm")
    content = bytes(range(100))
    (directory / "object").write_bytes(content)
    registry = SharedMemory(SIZE, SIZE, directory)
    registry.register("a", "object", 17, 64)
    if offset >= 0 and size >= 1 and offset + size <= 64:
        assert registry.part("a", offset, size, "t", write=False).read() == content[17 + offset : 17 + offset + size]
        registry.part("a", offset, size, "t", write=True).write(b"\xff" * size)
        expected = bytearray(content)
        expected[17 + offset : 17 + offset + size] = b"\xff" * size
        assert (directory / "object").read_bytes() == expected
    else:
        with pytest.raises(InvalidRequest):
            registry.part("a", offset, size, "t", write=False)


def test_window_of_a_shrunk_object(registry, directory):
    registry.register("a", "object", 17, 64)
    os.truncate(directory / "object", 17 + 40)
    whole, cut = registry.part("a", 32, 8, "t", write=True), registry.part("a", 33, 8, "t", write=True)
    whole.write(b"12345678")
    assert whole.read() == b"12345678"
    with pytest.raises(InvalidRequest, match="got an object of 57 bytes, expected 8 bytes, as when it was registered"):
        cut.write(b"12345678")
    with pytest.raises(InvalidRequest, match="got 7 bytes in the object, expected 8 bytes"):
        cut.read()
    assert os.path.getsize(directory / "object") == 57


def test_number_and_size_of_regions_are_limited(directory):
    registry = SharedMemory(MAX_REGIONS + 9, SIZE, directory)
    registry.register("ten", "object", 0, 10)
    with pytest.raises(Overloaded, match="--max-shared-memory-bytes"):
        registry.register("all", "object", 0, MAX_REGIONS)
    for number in range(MAX_REGIONS - 1):
        registry.register(str(number), "object", 0, 1)
    with pytest.raises(Overloaded, match="at most 256"):
        registry.register("one more", "object", 0, 1)
    registry.unregister("zz")
    registry.unregister("7")
    with pytest.raises(NotFound, match="got '7', expected one of: 0, 1, 10, "):
        registry.part("7", 0, 1, "t", write=False)
    registry.register("one more", "object", 0, 1)


def test_unused_files_are_closed(registry):
    before = len(os.listdir("/proc/self/fd"))
    for number in range(10):
        registry.register(str(number), "object", 0, SIZE)
    rows = (({"offset": SIZE}, InvalidRequest), ({"key": "zz"}, NotFound), ({"name": "1"}, AlreadyThere))
    for wrong, error in rows:
        with pytest.raises(error):
            registry.register(**{"name": "x", "key": "object", "offset": 0, "byte_size": 1, **wrong})
    assert len(os.listdir("/proc/self/fd")) == before + 10
    window = registry.part("3", 0, 4, "t", write=False)
    registry.unregister()
    assert (len(os.listdir("/proc/self/fd")), window.read()) == (before + 1, bytes(range(4)))
    del window
    assert len(os.listdir("/proc/self/fd")) == before


@pytest.mark.skipif(os.geteuid() == 0, reason="nothing is closed to root")
def test_read_only_object_takes_no_outputs(registry, directory):
    (directory / "object").chmod(stat.S_IRUSR)
    registry.register("a", "object", 0, SIZE)
    assert registry.part("a", 0, 4, "t", write=False).read() == bytes(range(4))
    with pytest.raises(InvalidRequest, match="may only read"):
        registry.part("a", 0, 4, "t", write=True)
