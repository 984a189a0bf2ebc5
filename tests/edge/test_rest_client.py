"""The stock HTTP clients of Triton, unmodified, against our server: every call, with the same results as over gRPC."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tritonclient.grpc as triton_grpc
import tritonclient.http as triton
import tritonclient.http.aio as triton_aio
from tritonclient.utils import InferenceServerException, shared_memory, triton_to_np_dtype

from edge.bundles.expression import tokenize
from edge.datatypes import NUMPY_TYPES, Array
from edge.launch import running_server, serving
from tests.support.models import ORACLE, ORACLE_BUNDLE, VERSIONED
from tests.support.sample_requests import TEXTS, TRUTH, column, triton_input
from tests.support.server_models import echo_input, echo_output


@pytest.fixture
def client(http_url: str) -> Iterator[Any]:
    with triton.InferenceServerClient(http_url) as client:
        yield client


def text_input(module: Any = triton, **how: bool) -> Any:
    return triton_input("expression", column(*TEXTS), module, **how)


def token_input(module: Any = triton, **how: bool) -> Any:
    return triton_input("x", tokenize(TEXTS), module, **how)


def test_server_and_models(client: Any) -> None:
    assert client.is_server_live()
    assert not client.is_server_ready()  # one bundle of the repository is broken, and readiness is strict
    assert client.get_server_metadata()["name"] == "fewheads"
    models = ((ORACLE,), (ORACLE, "1"), (ORACLE, "2"), ("broken",))
    assert [client.is_model_ready(*model) for model in models] == [True, True, False, False]
    index = {(model["name"], model["version"]): model for model in client.get_model_repository_index()}
    assert index[ORACLE, "1"]["state"] == "READY"
    assert "model.onnx" in index["broken", ""]["reason"]


@pytest.mark.parametrize("call", ["get_model_metadata", "get_model_config", "get_inference_statistics"])
def test_descriptions_equal_those_of_grpc(client: Any, url: str, call: str) -> None:
    with triton_grpc.InferenceServerClient(url) as other:
        over_grpc = getattr(other, call)(VERSIONED, "3", as_json=True)
    over_http = getattr(client, call)(VERSIONED, "3")
    assert over_grpc
    # gRPC's client writes whole numbers of 64 bits as strings, and leaves out what is empty.
    assert _plain(over_http) == _plain(over_grpc.get("config", over_grpc))


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: kept for name, kept in ((name, _plain(item)) for name, item in value.items()) if kept}
    if isinstance(value, list):
        return [_plain(item) for item in value]
    return "" if str(value) in ("0", "False") else str(value)


@pytest.mark.parametrize("tensor", [text_input, token_input])
@pytest.mark.parametrize("binary_in", [True, False])
@pytest.mark.parametrize("binary_out", [True, False])
def test_infer(client: Any, tensor: Any, binary_in: bool, binary_out: bool) -> None:
    wanted = [triton.InferRequestedOutput("value", binary_data=binary_out)]
    result = client.infer(ORACLE, [tensor(binary_data=binary_in)], request_id="abc", outputs=wanted)
    np.testing.assert_array_equal(result.as_numpy("value"), TRUTH)
    response = result.get_response()
    assert (response["id"], response["model_name"], response["model_version"]) == ("abc", ORACLE, "1")
    assert ("data" in response["outputs"][0]) is not binary_out


def test_versions_parameters_and_statistics(client: Any) -> None:
    before = client.get_inference_statistics(VERSIONED, "1")["model_stats"][0]
    assert client.infer(VERSIONED, [token_input()]).get_response()["model_version"] == "3"
    timed = client.infer(VERSIONED, [token_input()], model_version="1", parameters={"timings": True}, priority=1)
    assert timed.get_response()["model_version"] == "1"
    assert timed.get_response()["parameters"]["request_ns"] > 0
    after = client.get_inference_statistics(VERSIONED, "1")["model_stats"][0]
    assert after["inference_count"] - before["inference_count"] == len(TEXTS)
    assert after["inference_stats"]["success"]["ns"] > before["inference_stats"]["success"]["ns"]


@pytest.mark.parametrize(
    ("datatype", "binary"),
    [(datatype, binary) for datatype in NUMPY_TYPES for binary in (True, False) if binary or datatype != "FP16"],
)
def test_the_same_bits_as_over_grpc(client: Any, url: str, datatype: str, binary: bool) -> None:
    sent = awkward(datatype)

    def ask(module: Any, channel: Any, **how: bool) -> Array:
        tensor = triton_input(echo_input(datatype), sent, module, **how)
        wanted = [module.InferRequestedOutput(echo_output(datatype), **how)]
        received: Array = channel.infer(f"echo-{datatype.lower()}", [tensor], outputs=wanted).as_numpy(
            echo_output(datatype)
        )
        return received

    with triton_grpc.InferenceServerClient(url) as other:
        over_grpc = ask(triton_grpc, other)
    received = ask(triton, client, binary_data=binary)
    assert over_grpc.dtype == sent.dtype
    if datatype == "BYTES":
        texts = [value if isinstance(value, bytes) else value.encode() for value in received.tolist()]
        assert texts == over_grpc.tolist() == sent.tolist()
    else:
        assert received.tobytes() == over_grpc.tobytes() == sent.tobytes()


def awkward(datatype: str) -> Array:
    """Values at the limits of a datatype."""
    if datatype == "BYTES":
        return np.array([b"", b"a\0b", 'é𝄞"\\\n'.encode(), b"x" * 1000], np.object_)
    dtype = np.dtype(triton_to_np_dtype(datatype))
    if dtype.kind == "f":
        info = np.finfo(dtype)
        return np.array([0.1, -0.0, info.max, info.min, info.smallest_subnormal, info.eps, np.nan, np.inf], dtype)
    if dtype.kind == "b":
        return np.array([True, False])
    return np.array([np.iinfo(dtype).min, 0, 1, np.iinfo(dtype).max], dtype)


def test_asynchronous_requests(http_url: str) -> None:
    with triton.InferenceServerClient(http_url, concurrency=4) as client:
        flying = [client.async_infer(ORACLE, [token_input()], request_id=str(number)) for number in range(20)]
        for number, request in enumerate(flying):
            result = request.get_result()
            assert result.get_response()["id"] == str(number)
            np.testing.assert_array_equal(result.as_numpy("value"), TRUTH)


def test_errors_equal_those_of_grpc(client: Any, url: str) -> None:
    said = []
    with triton_grpc.InferenceServerClient(url) as other:
        for module, channel in ((triton_grpc, other), (triton, client)):
            with pytest.raises(InferenceServerException) as caught:
                channel.infer(ORACLE, [triton_input("x", np.zeros((1, 14), np.float32), module)])
            said.append(caught.value)
    assert said[0].message() == said[1].message()
    assert [error.status() for error in said] == ["StatusCode.INVALID_ARGUMENT", "400"]


def test_settings(client: Any) -> None:
    assert client.get_log_settings()["log_info"] is True
    assert client.update_log_settings({"log_info": False})["log_info"] is False
    assert client.update_log_settings({"log_info": True, "log_format": "default"})["log_info"] is True
    assert client.get_trace_settings()["trace_level"] == ["OFF"]
    assert client.update_trace_settings(model_name=ORACLE, settings={"trace_level": None})["trace_rate"] == "1000"


async def test_asyncio_client(http_url: str) -> None:
    async with triton_aio.InferenceServerClient(http_url) as client:
        assert await client.is_server_live()
        assert (await client.get_model_metadata(ORACLE))["name"] == ORACLE
        result = await client.infer(ORACLE, [text_input()], request_id="7")
        np.testing.assert_array_equal(result.as_numpy("value"), TRUTH)
        with pytest.raises(InferenceServerException, match="zz"):
            await client.infer("zz", [text_input()])


def test_compression_is_refused(client: Any) -> None:
    with pytest.raises(InferenceServerException, match="Content-Encoding"):
        client.infer(ORACLE, [text_input()], request_compression_algorithm="gzip")
    result = client.infer(ORACLE, [text_input()], response_compression_algorithm="gzip")  # not compressed is good too
    np.testing.assert_array_equal(result.as_numpy("value"), TRUTH)


def test_shared_memory(tmp_path: Path) -> None:
    arguments = ["--allow-shared-memory", "--http-port=0"]
    tokens = tokenize(TEXTS)
    size = tokens.nbytes
    region = shared_memory.create_shared_memory_region("both", f"/fewheads-rest-{tmp_path.name}", size + TRUTH.nbytes)
    try:
        with (
            running_server([ORACLE_BUNDLE], cache=tmp_path, arguments=arguments) as ready,
            triton.InferenceServerClient(f"127.0.0.1:{ready.http_port}") as client,
        ):
            client.unregister_system_shared_memory()
            client.unregister_cuda_shared_memory()
            client.register_system_shared_memory("both", f"/fewheads-rest-{tmp_path.name}", size + TRUTH.nbytes)
            (status,) = client.get_system_shared_memory_status("both")
            assert (status["name"], status["offset"], status["byte_size"]) == ("both", 0, size + TRUTH.nbytes)
            assert client.get_system_shared_memory_status() == [status]
            assert client.get_cuda_shared_memory_status() == []
            with pytest.raises(InferenceServerException, match="'both'") as caught:
                client.register_system_shared_memory("both", f"/fewheads-rest-{tmp_path.name}", 1)
            assert caught.value.status() == "409"
            shared_memory.set_shared_memory_region(region, [tokens])
            tensor = triton.InferInput("x", list(tokens.shape), "FP32")
            tensor.set_shared_memory("both", size)
            output = triton.InferRequestedOutput("value")
            output.set_shared_memory("both", TRUTH.nbytes, offset=size)
            response = client.infer(ORACLE, [tensor], outputs=[output]).get_response()
            assert response["outputs"] == [{"name": "value", "datatype": "FP32", "shape": list(TRUTH.shape)}]
            there = shared_memory.get_contents_as_numpy(region, np.float32, TRUTH.shape, size)
            np.testing.assert_array_equal(there, TRUTH)
            client.unregister_system_shared_memory("both")
            assert client.get_system_shared_memory_status() == []
            with pytest.raises(InferenceServerException) as caught:
                client.infer(ORACLE, [tensor])
            assert caught.value.status() == "404"
    finally:
        shared_memory.destroy_shared_memory_region(region)


def test_load_and_unload(tmp_path: Path) -> None:
    repository = tmp_path / "repository"
    repository.mkdir()
    shutil.copytree(ORACLE_BUNDLE, repository / "oracle")
    arguments = ["--model-control=explicit", "--http-port=0"]
    with (
        serving(repository, cache=tmp_path, arguments=arguments) as ready,
        triton.InferenceServerClient(f"127.0.0.1:{ready.http_port}") as client,
    ):
        assert not client.is_model_ready(ORACLE)
        assert [model["state"] for model in client.get_model_repository_index()] == ["UNAVAILABLE"]
        client.load_model(ORACLE)
        np.testing.assert_array_equal(client.infer(ORACLE, [token_input()]).as_numpy("value"), TRUTH)
        with pytest.raises(InferenceServerException, match="load parameter"):
            client.load_model(ORACLE, config="{}")
        with pytest.raises(InferenceServerException, match="zz") as caught:
            client.load_model("zz")
        assert caught.value.status() == "404"
        client.unload_model(ORACLE, unload_dependents=True)
        assert not client.is_model_ready(ORACLE)
        (repository / "oracle" / "model.onnx").write_bytes(b"broken")
        with pytest.raises(InferenceServerException, match=r"model\.onnx") as caught:
            client.load_model(ORACLE)
        assert caught.value.status() == "400"
