"""The stock gRPC clients of Triton, unmodified, against our server: every RPC, blocking and asyncio."""

from __future__ import annotations

from collections.abc import Iterator
from queue import Queue
from typing import Any

import numpy as np
import pytest
import tritonclient.grpc as triton
import tritonclient.grpc.aio as triton_aio
from tritonclient.utils import InferenceServerException

from edge.bundles.expression import tokenize
from tests.support.models import ORACLE, VERSIONED
from tests.support.sample_requests import TEXTS, TRUTH, column, triton_input

ON_EVERY_TRANSPORT = True  # it tests the protocol


@pytest.fixture
def client(url: str) -> Iterator[triton.InferenceServerClient]:
    with triton.InferenceServerClient(url) as client:
        yield client


def text_input(*texts: str) -> triton.InferInput:
    return triton_input("expression", column(*texts or TEXTS))


def token_input() -> triton.InferInput:
    return triton_input("x", tokenize(TEXTS))


def test_description_of_server_and_models(client: triton.InferenceServerClient) -> None:
    assert client.is_server_live()
    assert not client.is_server_ready()  # one bundle of the repository is broken, and readiness is strict
    assert {"statistics", "model_configuration"} <= set(client.get_server_metadata().extensions)
    models = ((ORACLE,), (ORACLE, "1"), (ORACLE, "2"), ("broken",))
    assert [client.is_model_ready(*model) for model in models] == [True, True, False, False]
    assert client.get_model_metadata(ORACLE).platform == "onnxruntime_onnx"
    assert client.get_model_config(ORACLE).config.backend == "onnxruntime"
    assert client.get_inference_statistics(VERSIONED, "3").model_stats[0].version == "3"
    assert len(client.get_inference_statistics().model_stats) > 10
    index = {(m.name, m.version): m for m in client.get_model_repository_index().models}
    assert index[VERSIONED, "3"].state == "READY"
    assert "model.onnx" in index["broken", ""].reason


@pytest.mark.parametrize("tensor", [text_input, token_input])
def test_infer(client: triton.InferenceServerClient, tensor: Any) -> None:
    result = client.infer(ORACLE, [tensor()], request_id="abc", outputs=[triton.InferRequestedOutput("value")])
    np.testing.assert_array_equal(result.as_numpy("value"), TRUTH)
    response = result.get_response()
    assert (response.id, response.model_name, response.model_version) == ("abc", ORACLE, "1")
    assert not response.parameters
    for algorithm in ("gzip", "deflate"):
        result = client.infer(ORACLE, [tensor()], compression_algorithm=algorithm, headers={"x-mine": "1"})
        np.testing.assert_array_equal(result.as_numpy("value"), TRUTH)


def test_highest_version_answers(client: triton.InferenceServerClient) -> None:
    assert client.infer(VERSIONED, [token_input()]).get_response().model_version == "3"
    assert client.infer(VERSIONED, [token_input()], model_version="1").get_response().model_version == "1"


def test_callbacks(client: triton.InferenceServerClient) -> None:
    done: Queue[tuple[Any, Any]] = Queue()
    for number in range(20):
        client.async_infer(
            ORACLE, [token_input()], lambda result, error: done.put((result, error)), request_id=str(number)
        )
    answers = [done.get(timeout=10) for _ in range(20)]
    assert {result.get_response().id for result, error in answers if error is None} == {str(n) for n in range(20)}


def test_keep_alive_pings_are_tolerated(url: str) -> None:
    options = triton.KeepAliveOptions(
        keepalive_time_ms=1000, keepalive_permit_without_calls=True, http2_max_pings_without_data=0
    )
    with triton.InferenceServerClient(url, keepalive_options=options) as client:
        assert client.is_server_live()


async def test_asyncio_client(url: str) -> None:
    async with triton_aio.InferenceServerClient(url) as client:
        assert await client.is_server_live()
        assert not await client.is_server_ready()
        assert await client.is_model_ready(ORACLE)
        assert (await client.get_server_metadata()).name == "fewheads"
        assert (await client.get_model_metadata(ORACLE)).name == ORACLE
        assert (await client.get_model_config(ORACLE)).config.name == ORACLE
        assert len((await client.get_model_repository_index()).models) > 10
        result = await client.infer(ORACLE, [text_input()], request_id="7")
        np.testing.assert_array_equal(result.as_numpy("value"), TRUTH)
        assert (await client.get_inference_statistics(ORACLE)).model_stats[0].inference_count > 0
        with pytest.raises(InferenceServerException, match="zz"):
            await client.infer("zz", [text_input()])
