"""Log-probabilities of the tokens of generated text: values, padding, heads, streams, OpenAI's fields."""

import asyncio
import json

import numpy as np
import pytest
import pytest_asyncio

from edge.client import InferRequest
from edge.client.inference import encode
from edge.errors import InvalidRequest
from edge.health.health import Health
from edge.pb import inference_pb2 as pb
from edge.scheduling.job import MOST_PARTIAL_ANSWERS
from edge.serving.call import MESSAGE
from edge.serving.metadata import Metadata
from edge.serving.wire import from_raw
from tests.support.http_requests import ask
from tests.support.in_process import running_service
from tests.support.letters_model import (
    GAIN,
    LETTERS,
    NAME,
    PROMPT,
    TEXT,
    completion,
    continued,
    text_request,
    write_letters_bundle,
    write_letters_head,
)
from tests.support.loop_model import NAME as LOOP
from tests.support.loop_model import loop_request, write_halving_bundle
from tests.support.sample_requests import column

HEAD = "plus-one"


@pytest_asyncio.fixture
async def running(tmp_path):
    def write(repository):
        base = write_letters_bundle(repository / NAME, failing="")
        write_letters_head(repository / HEAD, base, HEAD, 1)
        write_halving_bundle(repository / LOOP)

    async with running_service(tmp_path, write) as running:
        yield running


def arrays(response):
    return {
        tensor.name: from_raw(raw, tensor.datatype, tuple(tensor.shape), tensor.name)
        for tensor, raw in zip(response.outputs, response.raw_output_contents, strict=True)
    }


def expected(prompt, tokens, alpha=0.0):
    """Return the log-probabilities of tokens after a prompt; the head with an alpha favours the next letter but one."""
    ids, found = [LETTERS.index(letter) for letter in prompt], []
    for token in tokens:
        total = sum(ids) % len(LETTERS)
        logits = -np.abs(np.arange(len(LETTERS)) - float(total))
        logits[(total + 1) % len(LETTERS)] += alpha * GAIN
        found.append(logits[token] - np.log(np.exp(logits).sum()))
        ids.append(token)
    return found


async def test_values_and_padding(running):
    for parameters in (
        {"max_tokens": 9},
        {"max_tokens": 9, "temperature": 1.5, "seed": 1, "top_k": 5},
        {"max_tokens": 9, "temperature": 1.5, "seed": 1, "head": HEAD, "alpha": 0.02},
    ):
        request = text_request("yb", PROMPT, logprobs=True, **parameters)
        found = arrays(await running.infer(request))
        assert [*found] == ["text", "generated", "logprobs", "token_ids"]
        ids, logprobs, lengths = found["token_ids"], found["logprobs"], found["generated"][:, 0].tolist()
        assert ids.shape == logprobs.shape == (2, max(lengths))
        assert "seed" in parameters or lengths == [1, 9]
        for row, prompt in enumerate(("yb", PROMPT)):
            tokens = ids[row, : lengths[row]].tolist()
            wanted = expected(prompt, tokens, float(parameters.get("alpha", 0)))
            np.testing.assert_allclose(logprobs[row, : lengths[row]], wanted, atol=2e-5)
            assert (ids[row, lengths[row] :] == -1).all()
            assert (logprobs[row, lengths[row] :] == 0).all()
            # The end belongs to the tokens, and not to the text.
            assert found["text"][row, 0].decode() == "".join(LETTERS[token] for token in tokens if token)


async def test_requests_get_them_only_if_they_ask(running):
    def named(*names, **parameters):
        request = text_request(PROMPT, **parameters)
        for name in names:
            request.outputs.add(name=name)
        return request

    for request, names in (
        (named(), ["text", "generated"]),
        (named(logprobs=False), ["text", "generated"]),
        (named("token_ids"), ["token_ids"]),
        (named("logprobs", "text", logprobs=True), ["logprobs", "text", "token_ids"]),
        (encode(InferRequest(NAME, {"prompt": column(PROMPT)}, outputs=["logprobs"], logprobs=True)), None),
    ):
        found = [output.name for output in (await running.infer(request)).outputs]
        assert found == (names or ["logprobs", "token_ids"])
    health = Health(running.repository, running.scheduler.runs)
    metadata = Metadata(running.repository, running.scheduler, health).model_metadata(
        pb.ModelMetadataRequest(name=NAME)
    )
    offered = {"text": "BYTES", "generated": "INT32", "logprobs": "FP32", "token_ids": "INT64"}
    assert {output.name: output.datatype for output in metadata.outputs} == offered
    wrong = loop_request(1)
    wrong.parameters["logprobs"].bool_param = True
    for request, message in (
        (wrong, "'logprobs' of '.*': got True, expected none: the model generates no text"),
        (named(logprobs=1), "parameter 'logprobs': got 'int64_param', expected bool_param"),
    ):
        with pytest.raises(InvalidRequest, match=message):
            await running.infer(request)


@pytest.mark.parametrize("late", [False, True])
async def test_responses_of_a_stream_have_their_own_tokens(running, late):
    """The reader of a ``late`` stream begins after the end."""
    parameters = {"max_tokens": 40, "logprobs": True, "stop": "zz"}
    whole = arrays(await running.infer(text_request("yb", PROMPT, **parameters)))
    end = asyncio.get_running_loop().create_future()
    parts = []

    def take():
        while call and (part := running.service.partial(call)):
            parts.append(arrays(part))

    request = text_request("yb", PROMPT, stream_partial=True, **parameters)
    call = running.service.start(request, None, end.set_result, MESSAGE, (lambda: None) if late else take)
    last = await end
    take()
    parts.append(arrays(last))
    assert len(parts) == MOST_PARTIAL_ANSWERS + 1 if late else len(parts) > 5
    for row, length in enumerate(whole["generated"][:, 0].tolist()):
        ids = np.concatenate([part["token_ids"][row] for part in parts])
        logprobs = np.concatenate([part["logprobs"][row] for part in parts])
        assert ids[ids >= 0].tolist() == whole["token_ids"][row, :length].tolist()
        assert logprobs[ids >= 0].tolist() == whole["logprobs"][row, :length].tolist()
        assert not logprobs[ids < 0].any()


def test_logprobs_of_completions(writer):
    address = f"127.0.0.1:{writer.http_port}"
    body = completion(prompt=["yb", PROMPT], max_tokens=6, logprobs=0)
    first, second = (choice["logprobs"] for choice in ask(address, "/v1/completions", body).json["choices"])
    assert (first["tokens"], first["text_offset"]) == ([""], [0])
    assert (second["tokens"], second["text_offset"], second["top_logprobs"]) == ([*TEXT], [*range(6)], None)
    wanted = expected(PROMPT, [LETTERS.index(letter) for letter in continued(PROMPT, 6)])
    assert second["token_logprobs"] == pytest.approx(wanted, abs=1e-5)

    heard = ask(address, "/v1/completions", completion(max_tokens=6, logprobs=1, stream=True, stop=f"{TEXT[4:]}zz"))
    choices = [json.loads(event[6:])["choices"][0] for event in heard.body.decode().split("\n\n")[:-2]]
    for field in ("tokens", "token_logprobs", "text_offset"):
        assert [one for choice in choices for one in choice["logprobs"][field]] == second[field]
    assert "".join(choice["text"] for choice in choices) == TEXT
    assert ask(address, "/v1/completions", completion()).json["choices"][0]["logprobs"] is None
