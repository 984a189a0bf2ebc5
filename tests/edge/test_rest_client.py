"""The stock HTTP clients of Triton, unmodified, against our server: every call, with the same results as over gRPC."""

import shutil

import numpy as np
import pytest
import tritonclient.grpc as triton_grpc
import tritonclient.http as triton
from tritonclient.utils import InferenceServerException, shared_memory

from edge.bundles.expression import tokenize
from edge.launch import running_server, serving
from tests.support.models import ORACLE, ORACLE_BUNDLE, VERSIONED
from tests.support.sample_requests import TEXTS, TRUTH, column, triton_input


@pytest.fixture
def client(http_url):
    with triton.InferenceServerClient(http_url) as client:
        yield client


def text_input(module=triton, **how):
    return triton_input("expression", column(*TEXTS), module, **how)


def token_input(module=triton, **how):
    return triton_input("x", tokenize(TEXTS), module, **how)


def test_server_and_models(client):
    assert client.is_server_live()
    assert not client.is_server_ready()  # one bundle of the repository is broken, and readiness is strict
    assert client.get_server_metadata()["name"] == "fewheads"
    models = ((ORACLE,), (ORACLE, "1"), (ORACLE, "2"), ("broken",))
    assert [client.is_model_ready(*model) for model in models] == [True, True, False, False]
    index = {(model["name"], model["version"]): model for model in client.get_model_repository_index()}
    assert index[ORACLE, "1"]["state"] == "READY"
    assert "model.onnx" in index["broken", ""]["reason"]


@pytest.mark.parametrize("call", ["get_model_metadata", "get_model_config", "get_inference_statistics"])
def test_descriptions_equal_those_of_grpc(client, url, call):
    with triton_grpc.InferenceServerClient(url) as other:
        over_grpc = getattr(other, call)(VERSIONED, "3", as_json=True)
    over_http = getattr(client, call)(VERSIONED, "3")
    assert over_grpc
    # gRPC's client writes whole numbers of 64 bits as strings, and leaves out what is empty.
    assert _plain(over_http) == _plain(over_grpc.get("config", over_grpc))


def _plain(value):
    if isinstance(value, dict):
        return {name: kept for name, kept in ((name, _plain(item)) for name, item in value.items()) if kept}
    if isinstance(value, list):
        return [_plain(item) for item in value]
    return "" if str(value) in ("0", "False") else str(value)


@pytest.mark.parametrize("tensor", [text_input, token_input])
@pytest.mark.parametrize("binary_in", [True, False])
@pytest.mark.parametrize("binary_out", [True, False])
def test_infer(client, tensor, binary_in, binary_out):
    wanted = [triton.InferRequestedOutput("value", binary_data=binary_out)]
    result = client.infer(ORACLE, [tensor(binary_data=binary_in)], request_id="abc", outputs=wanted)
    np.testing.assert_array_equal(result.as_numpy("value"), TRUTH)
    response = result.get_response()
    assert (response["id"], response["model_name"], response["model_version"]) == ("abc", ORACLE, "1")
    assert ("data" in response["outputs"][0]) is not binary_out


def test_versions_and_parameters(client):
    assert client.infer(VERSIONED, [token_input()]).get_response()["model_version"] == "3"
    timed = client.infer(VERSIONED, [token_input()], model_version="1", parameters={"timings": True}, priority=1)
    assert timed.get_response()["model_version"] == "1"
    assert timed.get_response()["parameters"]["request_ns"] > 0


def test_settings(client):
    assert client.get_log_settings()["log_info"] is True
    for wanted in (False, True):
        assert client.update_log_settings({"log_info": wanted, "log_format": "default"})["log_info"] is wanted
    assert client.get_trace_settings()["trace_level"] == ["OFF"]
    assert client.update_trace_settings(model_name=ORACLE, settings={"trace_level": None})["trace_rate"] == "1000"


def test_shared_memory(tmp_path):
    arguments = ["--allow-shared-memory", "--http-port=0"]
    tokens, key = tokenize(TEXTS), f"/fewheads-rest-{tmp_path.name}"
    size = tokens.nbytes
    region = shared_memory.create_shared_memory_region("both", key, size + TRUTH.nbytes)
    try:
        with (
            running_server([ORACLE_BUNDLE], cache=tmp_path, arguments=arguments) as ready,
            triton.InferenceServerClient(f"127.0.0.1:{ready.http_port}") as client,
        ):
            client.unregister_cuda_shared_memory()
            client.register_system_shared_memory("both", key, size + TRUTH.nbytes)
            (status,) = client.get_system_shared_memory_status("both")
            assert (status["name"], status["offset"], status["byte_size"]) == ("both", 0, size + TRUTH.nbytes)
            assert client.get_system_shared_memory_status() == [status]
            with pytest.raises(InferenceServerException, match="'both'") as caught:
                client.register_system_shared_memory("both", key, 1)
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
    finally:
        shared_memory.destroy_shared_memory_region(region)


def test_load_and_unload(tmp_path):
    shutil.copytree(ORACLE_BUNDLE, tmp_path / "repository" / "oracle")
    arguments = ["--model-control=explicit", "--http-port=0"]
    with (
        serving(tmp_path / "repository", cache=tmp_path, arguments=arguments) as ready,
        triton.InferenceServerClient(f"127.0.0.1:{ready.http_port}") as client,
    ):
        assert not client.is_model_ready(ORACLE)
        assert [model["state"] for model in client.get_model_repository_index()] == ["UNAVAILABLE"]
        client.load_model(ORACLE)
        np.testing.assert_array_equal(client.infer(ORACLE, [token_input()]).as_numpy("value"), TRUTH)
        with pytest.raises(InferenceServerException, match="load parameter"):
            client.load_model(ORACLE, config="{}")
        client.unload_model(ORACLE, unload_dependents=True)
        assert not client.is_model_ready(ORACLE)
