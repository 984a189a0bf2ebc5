"""The stock clients of Triton, unmodified, against our server: every RPC, blocking and asyncio."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from concurrent.futures import ThreadPoolExecutor
from queue import Queue
from typing import Any

import numpy as np
import pytest
import tritonclient.grpc as triton
import tritonclient.grpc.aio as triton_aio
from tritonclient.utils import InferenceServerException, triton_to_np_dtype

from edge.bundles.expression import evaluate, tokenize
from edge.datatypes import NUMPY_TYPES, Array
from tests.support.models import ORACLE, VERSIONED
from tests.support.server_models import echo_input, echo_output

#: What it says concerns the protocol, whatever carries it.
ON_EVERY_TRANSPORT = True

TEXTS = ["3 - -4 + 2", "-5 + 1", "7", "1 - 2 + 3 - 4 + 5 - 6 + 7 - 8"]
TRUTH = np.array([[evaluate(text)] for text in TEXTS], np.float32)


@pytest.fixture
def client(url: str) -> Iterator[triton.InferenceServerClient]:
    with triton.InferenceServerClient(url) as client:
        yield client


@pytest.fixture
async def aio_client(url: str) -> AsyncIterator[triton_aio.InferenceServerClient]:
    async with triton_aio.InferenceServerClient(url) as client:
        yield client


def text_input() -> triton.InferInput:
    tensor = triton.InferInput("expression", [len(TEXTS), 1], "BYTES")
    tensor.set_data_from_numpy(np.array([[text.encode()] for text in TEXTS], dtype=np.object_))
    return tensor


def token_input(rows: int = len(TEXTS)) -> triton.InferInput:
    tensor = triton.InferInput("x", [rows, 15], "FP32")
    tensor.set_data_from_numpy(tokenize(TEXTS)[:rows])
    return tensor


def test_server(client: triton.InferenceServerClient) -> None:
    assert client.is_server_live()
    assert not client.is_server_ready()  # one bundle of the repository is broken, and readiness is strict
    metadata = client.get_server_metadata()
    assert metadata.name == "fewheads"
    assert {"statistics", "model_configuration"} <= set(metadata.extensions)


def test_model_ready(client: triton.InferenceServerClient) -> None:
    assert client.is_model_ready(ORACLE)
    assert client.is_model_ready(ORACLE, "1")
    assert not client.is_model_ready(ORACLE, "2")
    assert not client.is_model_ready("broken")


def test_model_metadata(client: triton.InferenceServerClient) -> None:
    metadata = client.get_model_metadata(ORACLE, as_json=True)
    assert metadata["versions"] == ["1"]
    assert metadata["platform"] == "onnxruntime_onnx"
    assert metadata["inputs"] == [
        {"name": "expression", "datatype": "BYTES", "shape": ["-1", "1"]},
        {"name": "x", "datatype": "FP32", "shape": ["-1", "15"]},
    ]
    assert metadata["outputs"] == [{"name": "value", "datatype": "FP32", "shape": ["-1", "1"]}]


def test_model_config(client: triton.InferenceServerClient) -> None:
    config = client.get_model_config(ORACLE).config
    assert (config.name, config.backend, config.max_batch_size) == (ORACLE, "onnxruntime", 64)
    assert [(i.name, list(i.dims), i.optional) for i in config.input] == [("expression", [1], True), ("x", [15], True)]
    assert [(o.name, list(o.dims)) for o in config.output] == [("value", [1])]
    assert list(config.version_policy.specific.versions) == [1]
    assert config.instance_group[0].count == 1


def test_repository_index(client: triton.InferenceServerClient) -> None:
    models = {(m.name, m.version): m for m in client.get_model_repository_index().models}
    assert models[ORACLE, "1"].state == "READY"
    assert models[VERSIONED, "3"].state == "READY"
    broken = models["broken", ""]
    assert broken.state == "UNAVAILABLE"
    assert "model.onnx" in broken.reason


@pytest.mark.parametrize("tensor", [text_input, token_input])
def test_infer(client: triton.InferenceServerClient, tensor: Any) -> None:
    result = client.infer(ORACLE, [tensor()], request_id="abc", outputs=[triton.InferRequestedOutput("value")])
    np.testing.assert_array_equal(result.as_numpy("value"), TRUTH)
    response = result.get_response()
    assert (response.id, response.model_name, response.model_version) == ("abc", ORACLE, "1")
    assert not response.outputs[0].HasField("contents")


def test_highest_version_answers(client: triton.InferenceServerClient) -> None:
    assert client.infer(VERSIONED, [token_input()]).get_response().model_version == "3"
    assert client.infer(VERSIONED, [token_input()], model_version="1").get_response().model_version == "1"


@pytest.mark.parametrize("datatype", NUMPY_TYPES)
def test_every_datatype_comes_back(client: triton.InferenceServerClient, datatype: str) -> None:
    values: Array = np.array([0, 1, 1, 0, 1])
    sent = (
        np.array([b"", b"a\0b", "é".encode(), b"x" * 1000, b"1"], np.object_)
        if datatype == "BYTES"
        else values.astype(triton_to_np_dtype(datatype))
    )
    tensor = triton.InferInput(echo_input(datatype), [5], datatype)
    tensor.set_data_from_numpy(sent)
    received = client.infer(f"echo-{datatype.lower()}", [tensor]).as_numpy(echo_output(datatype))
    assert received.dtype == sent.dtype
    np.testing.assert_array_equal(received, sent)


def test_statistics(client: triton.InferenceServerClient) -> None:
    before = client.get_inference_statistics(VERSIONED, "3").model_stats[0]
    for _ in range(3):
        client.infer(VERSIONED, [token_input()])
    with pytest.raises(InferenceServerException):
        client.infer(VERSIONED, [triton.InferInput("zz", [1], "FP32").set_data_from_numpy(np.zeros(1, np.float32))])
    after = client.get_inference_statistics(VERSIONED, "3").model_stats[0]
    assert after.inference_count - before.inference_count == 3 * len(TEXTS)
    assert after.execution_count - before.execution_count == 3
    new, old = after.inference_stats, before.inference_stats
    for stage in ("success", "queue", "compute_input", "compute_infer", "compute_output"):
        assert getattr(new, stage).count - getattr(old, stage).count == 3
        assert getattr(new, stage).ns > getattr(old, stage).ns
    assert new.fail.count - old.fail.count == 1
    assert new.success.ns >= sum(getattr(new, s).ns for s in ("compute_input", "compute_infer", "compute_output"))
    batches = {batch.batch_size: batch for batch in after.batch_stats}
    assert batches[len(TEXTS)].compute_infer.count >= 3
    assert int(after.version) == 3
    assert len(client.get_inference_statistics().model_stats) > 10


def test_stage_times_on_request(client: triton.InferenceServerClient) -> None:
    plain = client.infer(ORACLE, [text_input()]).get_response()
    assert not plain.parameters
    timed = client.infer(ORACLE, [text_input()], parameters={"timings": True}).get_response()
    times = {name: value.int64_param for name, value in timed.parameters.items()}
    stages = {"queue_ns", "compute_input_ns", "compute_infer_ns", "compute_output_ns"}
    assert set(times) == stages | {"request_ns"}
    assert all(time > 0 for time in times.values())
    assert times["request_ns"] >= sum(times[stage] for stage in stages)


def test_callbacks(client: triton.InferenceServerClient) -> None:
    done: Queue[tuple[Any, Any]] = Queue()
    for number in range(20):
        client.async_infer(
            ORACLE, [token_input()], lambda result, error: done.put((result, error)), request_id=str(number)
        )
    answers = [done.get(timeout=10) for _ in range(20)]
    assert {result.get_response().id for result, error in answers if error is None} == {str(n) for n in range(20)}


def test_many_threads_each_get_their_own_answer(url: str) -> None:
    def ask(number: int) -> float:
        with triton.InferenceServerClient(url) as own:
            tensor = triton.InferInput("expression", [1, 1], "BYTES")
            tensor.set_data_from_numpy(np.array([[f"{number} - 1".encode()]], dtype=np.object_))
            return float(own.infer(ORACLE, [tensor]).as_numpy("value")[0, 0])

    with ThreadPoolExecutor(4) as pool:
        assert list(pool.map(ask, range(100))) == [number - 1.0 for number in range(100)]


def test_compression_and_headers(client: triton.InferenceServerClient) -> None:
    for algorithm in ("gzip", "deflate"):
        result = client.infer(ORACLE, [text_input()], compression_algorithm=algorithm, headers={"x-mine": "1"})
        np.testing.assert_array_equal(result.as_numpy("value"), TRUTH)


def test_keep_alive_pings_are_tolerated(url: str) -> None:
    options = triton.KeepAliveOptions(
        keepalive_time_ms=1000, keepalive_permit_without_calls=True, http2_max_pings_without_data=0
    )
    with triton.InferenceServerClient(url, keepalive_options=options) as client:
        assert client.is_server_live()


def test_error_text_names_both_sides(client: triton.InferenceServerClient) -> None:
    tensor = triton.InferInput("x", [1, 14], "FP32")
    tensor.set_data_from_numpy(np.zeros((1, 14), np.float32))
    with pytest.raises(InferenceServerException, match=r"\[1, 14\].*\[-1, 15\]"):
        client.infer(ORACLE, [tensor])


async def test_asyncio_client(aio_client: triton_aio.InferenceServerClient) -> None:
    assert await aio_client.is_server_live()
    assert not await aio_client.is_server_ready()
    assert await aio_client.is_model_ready(ORACLE)
    assert (await aio_client.get_server_metadata()).name == "fewheads"
    assert (await aio_client.get_model_metadata(ORACLE)).name == ORACLE
    assert (await aio_client.get_model_config(ORACLE)).config.name == ORACLE
    assert len((await aio_client.get_model_repository_index()).models) > 10
    result = await aio_client.infer(ORACLE, [text_input()], request_id="7")
    np.testing.assert_array_equal(result.as_numpy("value"), TRUTH)
    assert (await aio_client.get_inference_statistics(ORACLE)).model_stats[0].inference_count > 0
    with pytest.raises(InferenceServerException, match="zz"):
        await aio_client.infer("zz", [text_input()])
