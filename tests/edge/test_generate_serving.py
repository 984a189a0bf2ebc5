"""Generated text from a server, with stock clients on every transport."""

from __future__ import annotations

from collections.abc import Iterator
from queue import Queue
from typing import Any

import grpc
import pytest
import tritonclient.grpc as triton

from edge.bundles.bundle import Bundle
from edge.launch import running_server
from edge.pb import inference_pb2_grpc
from edge.server import Ready
from tests.support.letters_model import (
    BYTES,
    MAX_BATCH_SIZE,
    NAME,
    POSITIONS,
    continued,
    spelt,
    text_request,
    write_letters_bundle,
)
from tests.support.metrics import is_at_rest, wait_until
from tests.support.sample_requests import Sender, column, triton_input

ON_EVERY_TRANSPORT = True  # it tests the protocol

SPELT = "spelt"


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory, letters_bundle: Bundle, transport: str) -> Iterator[Ready]:
    other = write_letters_bundle(tmp_path_factory.mktemp("spelt") / SPELT, SPELT, spelling=BYTES)
    arguments = [f"--transport={transport}", "--http-port=0"]
    with running_server([letters_bundle.path, other.path], arguments=arguments) as ready:
        yield ready


@pytest.fixture
def client(server: Ready) -> Iterator[triton.InferenceServerClient]:
    with triton.InferenceServerClient(f"127.0.0.1:{server.grpc_port}") as client:
        yield client


def inputs(*prompts: str) -> list[Any]:
    return [triton_input("prompt", column(*prompts))]


def text(client: triton.InferenceServerClient, *prompts: str, model: str = NAME, **parameters: Any) -> list[str]:
    result = client.infer(model, inputs(*prompts), parameters=parameters, client_timeout=20)
    return [row.decode() for row in result.as_numpy("text").ravel()]


def streamed(client: triton.InferenceServerClient, requests: list[dict[str, Any]]) -> list[list[tuple[str, int, str]]]:
    """Return, for each request, the text, the number of tokens and the reason to stop of every answer in a stream.

    The last answer is known by ``triton_final_response``; an error is a last answer with its message.
    """
    answers: Queue[tuple[Any, Any]] = Queue()
    client.start_stream(lambda result, error: answers.put((result, error)))
    for number, request in enumerate(requests):
        model, prompt, parameters = request.get("model", NAME), request["prompt"], request.get("parameters", {})
        client.async_stream_infer(
            model, inputs(prompt), request_id=str(number), parameters={"stream_partial": True, **parameters}
        )
    parts: list[list[tuple[str, int, str]]] = [[] for _ in requests]
    ended = 0
    while ended < len(requests):
        result, error = answers.get(timeout=20)
        if error:
            parts[-1].append((error.message(), -1, "error"))  # a stock client does not say which request it was
            ended += 1
            continue
        response = result.get_response()
        ended += response.parameters["triton_final_response"].bool_param
        generated = int(result.as_numpy("generated").item())
        part = result.as_numpy("text").item().decode(), generated, response.parameters["stopped"].string_param
        parts[int(response.id)].append(part)
    client.stop_stream()
    return parts


def test_stock_client_gets_texts(client: triton.InferenceServerClient) -> None:
    result = client.infer(NAME, inputs("abc", "ab"), parameters={"max_tokens": 5, "timings": True})
    assert result.as_numpy("text").tolist() == [[continued(prompt, 5).encode()] for prompt in ("abc", "ab")]
    assert result.as_numpy("generated").tolist() == [[5], [5]]
    assert result.get_response().parameters["stopped"].string_param == "length"
    assert text(client, "abc", stop='["zz", "ux", "uo"]') == ["flx"]
    assert text(client, "a" * (POSITIONS - 4) + "f", max_tokens=99) == [continued("a" * (POSITIONS - 4) + "f", 99)]
    metadata = client.get_model_metadata(NAME)
    outputs = {"text": "BYTES", "generated": "INT32", "logprobs": "FP32", "token_ids": "INT64"}
    assert {output.name: output.datatype for output in metadata.outputs} == outputs


def test_streams_add_up_to_the_texts_of_single_requests(client: triton.InferenceServerClient) -> None:
    requests: list[dict[str, Any]] = [
        {"prompt": "abc", "parameters": {"max_tokens": 50}},
        {"prompt": "abc", "parameters": {"max_tokens": 50}, "model": SPELT},
        {"prompt": "dh", "model": SPELT},  # begins in the middle of a character
        {"prompt": "ab", "parameters": {"temperature": 1.2, "seed": 7, "top_k": 3, "max_tokens": 8}},
        {"prompt": "abc", "parameters": {"stop": "oc", "max_tokens": 30}},
        {"prompt": "sh"},
        {"prompt": "i", "parameters": {"max_tokens": 1}},
    ]
    for request, parts in zip(requests, streamed(client, requests), strict=True):
        model, parameters = request.get("model", NAME), request.get("parameters", {})
        assert ["".join(part for part, _, _ in parts)] == text(client, request["prompt"], model=model, **parameters)
        tokens = [generated for _, generated, _ in parts]
        assert tokens == sorted(tokens)
        assert [stopped for _, _, stopped in parts[:-1]] == [""] * (len(parts) - 1)
        assert parts[-1][2] in ("length", "stop")
    whole = spelt(continued("abc", 50), BYTES).decode(errors="ignore")  # it ends in the middle of a character
    assert text(client, "abc", model=SPELT, max_tokens=50) == [whole]


def test_cancelled_stream_leaves_room(server: Ready) -> None:
    with grpc.insecure_channel(f"127.0.0.1:{server.grpc_port}") as channel:
        stub = inference_pb2_grpc.GRPCInferenceServiceStub(channel)
        for _ in range(10):
            sender = Sender()
            stream = stub.ModelStreamInfer(iter(sender))
            sender.queue.put(text_request(*["abc"] * MAX_BATCH_SIZE, max_tokens=90, stream_partial=True))
            next(stream)
            stream.cancel()
            sender.queue.put(None)
        full = text_request(*["ab"] * MAX_BATCH_SIZE)
        assert continued("ab").encode() in stub.ModelInfer(full, timeout=20).raw_output_contents[0]
    assert wait_until(lambda: is_at_rest(server))
