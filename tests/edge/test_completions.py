"""OpenAI's completions over HTTP: events, refusals, deadlines, clients that leave, and its stock client."""

import http.client
import json
import re
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing

import pytest

from edge.bundles.bundle import write_bundle
from edge.launch import running_server
from tests.support import text_model
from tests.support.http_requests import ask
from tests.support.letters_model import FAILING, MAX_BATCH_SIZE, MOST, NAME, PROMPT, TEXT, completion, continued
from tests.support.metrics import gauge, is_at_rest, page_of, wait_until
from tests.support.models import ORACLE
from tests.support.secured_servers import tokens_file

COMPLETIONS = "/v1/completions"


def address(ready):
    return f"127.0.0.1:{ready.http_port}"


def error_of(heard):
    error = heard.json["error"]
    assert error.keys() == {"message", "type", "param", "code"}
    return dict(error)


def test_format_of_events(writer):
    options = {"include_usage": True}
    heard = ask(address(writer), COMPLETIONS, completion(max_tokens=3, stream=True, stream_options=options))
    assert (heard.status, heard.headers["content-type"]) == (200, "text/event-stream; charset=utf-8")
    *events, done, rest = heard.body.decode().split("\n\n")
    assert (done, rest) == ("data: [DONE]", "")
    documents = [json.loads(event.removeprefix("data: ")) for event in events]
    assert all(event.startswith("data: {") for event in events)
    keys = {"id", "object", "created", "model", "choices", "usage"}
    assert all(document.keys() == keys and document["object"] == "text_completion" for document in documents)
    assert len({(document["id"], document["created"]) for document in documents}) == 1
    *texts, usage = documents
    assert usage["usage"] == {"prompt_tokens": 3, "completion_tokens": 3, "total_tokens": 6}
    assert all(document["usage"] is None for document in texts)
    choices = [choice for document in texts for choice in document["choices"]]
    assert "".join(choice["text"] for choice in choices) == TEXT[:3]
    assert [choice["finish_reason"] for choice in choices] == [None] * (len(choices) - 1) + ["length"]
    # Without the option, no event has the numbers of tokens.
    heard = ask(address(writer), COMPLETIONS, completion(max_tokens=3, stream=True))
    assert b"usage" not in heard.body


REFUSED = [
    ({"prompt": 1}, "prompt", "got a whole number, expected a string, ids of tokens, or a list of such prompts. Send"),
    ({"prompt": [1, "a"]}, "prompt", "got a string"),
    ({"prompt": ["a", 1]}, "prompt", "got a whole number"),
    ({"prompt": [[1], [[2]]]}, "prompt", "got a list"),
    ({"prompt": [1, 27]}, None, "from 0 to 26. Use the model's tokenizer, or send text."),
    ({"prompt": [[1], [-1]]}, None, "from 0 to 26"),
    ({"prompt": [1, 2**63]}, "prompt", "an id of prompt of body: got 9223372036854775808"),
    ({"prompt": [[]]}, None, "input 'ids' shape: got [1, 0], expected"),
    ({"prompt": [1] * 100}, None, "got [1, 100], expected between [1, 1] and [4, 99]"),
    ({"prompt": []}, "prompt", "got 0 prompts, expected 1 to 256"),
    ({"prompt": ["a"] * 257}, "prompt", "got 257 prompts"),
    ({"prompt": None}, "prompt", "got null"),
    ({"prompt": ""}, "prompt", "got 0 tokens, expected 1 to 99"),
    ({"prompt": "a" * 100}, "prompt", "got 100 tokens"),
    ({"model": None}, "model", "model of body: got nothing"),
    ({"max_tokens": 0}, "max_tokens", "got 0, expected 1 to 99"),
    ({"max_tokens": 1.5}, "max_tokens", "got a number, expected a whole number"),
    ({"temperature": "hot"}, "temperature", "got a string, expected a number"),
    ({"temperature": float("nan")}, "temperature", "got nan"),
    ({"seed": -1}, "seed", "got -1"),
    ({"seed": 2**70}, "seed", "got 1180591620717411303424"),
    ({"stop": [1]}, "stop", "got a whole number, expected a string"),
    ({"stop": ["a"] * 5}, "stop", "got 5 texts, expected at most 4"),
    ({"prompt": "a" * 10_000}, "prompt", "got 10000 bytes, expected at most"),
    ({"prompt": [[25, 2]] * 2 + [[1] * 100]}, None, "got [1, 100], expected between [1, 1] and [4, 99]"),
    ({"head": "h" * 1025}, "head", "got 1025 characters, expected at most 1024"),
    ({"stop": ["a", ""]}, "stop", "got a text of 0 characters"),
    ({"stream": "yes"}, "stream", "got a string"),
    ({"stream_options": {"include_usage": True}}, "stream_options", "got stream false, expected stream true"),
    ({"stream": True, "stream_options": {"other": 1}}, "stream_options", "got 'other', expected include_usage"),
    ({"n": 129, "prompt": ["a", "b"]}, "n", "n of body: got 129, expected 1 to 128. Ask for fewer choices at once."),
    ({"n": 0}, "n", "got 0"),
    ({"n": True}, "n", "got true or false"),
    ({"n": 2, "best_of": 3}, "best_of", "got 3, expected 2, as many as n: all choices are returned. Leave it out."),
    ({"min_tokens": 17}, "min_tokens", "got 17, expected 0 to 16"),
    ({"ignore_eos": 1}, "ignore_eos", "got a whole number, expected true or false"),
    ({"repetition_penalty": 1.1}, "repetition_penalty", "got 1.1, expected 1, the only value that is offered"),
    ({"echo": True}, "echo", "got True, expected false"),
    ({"suffix": "end"}, "suffix", "got 'end'"),
    ({"logprobs": 2}, "logprobs", "got 2, expected 0 or 1: the likeliest other tokens are not offered"),
    ({"logprobs": True}, "logprobs", "got true or false"),
    ({"logit_bias": {"1": 2}}, "logit_bias", "got an object, expected {}"),
    ({"presence_penalty": 0.5}, "presence_penalty", "got 0.5"),
    ({"frequency_penalty": -2}, "frequency_penalty", "got -2"),
    ({"user": 5}, "user", "got a whole number"),
    ({"stream": True, "stream_options": {"include_usage": 1}}, "stream_options", "include_usage of stream_options"),
    ({"include_usage": True}, None, "field of body: got 'include_usage'"),
    ({"max_token": 5}, None, "field of body: got 'max_token', expected one of: model, prompt, "),
]


def test_refused_fields(writer):
    for fields, param, message in REFUSED:
        heard = ask(address(writer), COMPLETIONS, completion(**fields))
        error = error_of(heard)
        assert (heard.status, error["type"], error["param"]) == (400, "invalid_request_error", param), fields
        assert message in error["message"], fields


def test_other_errors_have_the_same_form(writer):
    for path, body, status, code in (
        (COMPLETIONS, b"{", 400, "invalid_request"),
        (COMPLETIONS, completion(model=ORACLE), 404, "model_not_found"),
        (f"/v1/models/{ORACLE}", None, 404, "model_not_found"),
        ("/v1/chat/completions", {}, 404, "not_found"),
        (COMPLETIONS, None, 405, "method_not_allowed"),
        (COMPLETIONS, completion(prompt=[PROMPT, FAILING]), 500, "internal_error"),
        (COMPLETIONS, completion(prompt=FAILING, stream=True), 500, "internal_error"),
    ):
        heard = ask(address(writer), path, body)
        assert (heard.status, error_of(heard)["code"]) == (status, code), (path, body)
        if code == "not_found":
            assert (
                "expected POST /v1/completions, /v1/embeddings or /v1/rerank, or GET /v1/models"
                in error_of(heard)["message"]
            )
    assert wait_until(lambda: is_at_rest(writer))


def test_tokens_rates_and_readiness(letters_bundle, tmp_path):
    tokens = tokens_file(tmp_path / "tokens", asker=["infer"], keeper=["control"])
    files = text_model.files() | {"lean.onnx": text_model.model("full")}  # it fails its golden check
    broken = write_bundle(tmp_path / "broken", text_model.manifest(), files)
    arguments = ["--http-port=0", f"--tokens={tmp_path / 'tokens'}", "--rate-limit=0.01:2"]
    with running_server([letters_bundle.path, broken.path], cache=tmp_path, arguments=arguments) as ready:
        for token, body, status, code in (
            ("", completion(), 401, "invalid_api_key"),
            (tokens["keeper"], completion(), 403, "permission_denied"),
            (tokens["asker"], completion(model="sentiment"), 503, "not_ready"),
            (tokens["asker"], completion(), 200, ""),
            (tokens["asker"], completion(stream=True), 429, "rate_limit_exceeded"),
        ):
            headers = {"Authorization": f"Bearer {token}"} if token else {}
            heard = ask(address(ready), COMPLETIONS, body, headers=headers)
            assert (heard.status, error_of(heard)["code"] if code else "") == (status, code)
        assert 1 < int(heard.headers["retry-after"]) <= 100


def test_deadline_ends_texts(slow_writer):
    endless = completion(max_tokens=MOST)
    with ThreadPoolExecutor(1) as pool:
        whole = pool.submit(ask, address(slow_writer), COMPLETIONS, endless, timeout=20)
        *events, last, rest = ask(address(slow_writer), COMPLETIONS, {**endless, "stream": True}).body.split(b"\n\n")
    texts = [json.loads(event.removeprefix(b"data: "))["choices"][0]["text"] for event in events]
    assert TEXT in "".join(texts)
    error = json.loads(last.removeprefix(b"data: "))["error"]
    assert (error["code"], "[DONE]" in str(rest)) == ("deadline_exceeded", False)
    assert (whole.result().status, error_of(whole.result())["code"]) == (504, "deadline_exceeded")


def test_disconnecting_makes_room(slow_writer):
    body = json.dumps(completion(max_tokens=MOST, stream=True)).encode()
    with ExitStack() as stack:
        streams = []
        for _ in range(MAX_BATCH_SIZE):  # as many rows as the model computes side by side
            connection = stack.enter_context(closing(http.client.HTTPConnection(address(slow_writer), timeout=20)))
            connection.request("POST", COMPLETIONS, body)
            streams.append(stack.enter_context(connection.getresponse()))
        assert all(stream.readline().startswith(b"data: {") for stream in streams)  # each has a first text
        assert gauge(slow_writer, "streams") == MAX_BATCH_SIZE
        streams[-1].close()
        connection.close()
        heard = ask(address(slow_writer), COMPLETIONS, completion(max_tokens=1), timeout=20)
        assert heard.json["choices"][0]["text"] == TEXT[0]
        assert gauge(slow_writer, "streams") == MAX_BATCH_SIZE - 1  # the others go on
    assert wait_until(lambda: is_at_rest(slow_writer), 1)
    assert re.search(r'fewheads_dropped_requests_total{[^}]*place="running",reason="Cancelled"', page_of(slow_writer))


def stock(ready):
    openai = pytest.importorskip("openai", reason="it asks with OpenAI's client")
    return openai.OpenAI(base_url=f"http://127.0.0.1:{ready.http_port}/v1", api_key="none", max_retries=0, timeout=20)


@pytest.fixture
def client(writer):
    with stock(writer) as client:
        yield client


def test_stock_client_gets_texts(client):
    answer = client.completions.create(**completion(max_tokens=6, user="somebody", n=1, echo=False))
    (choice,) = answer.choices
    assert (choice.text, choice.index, choice.finish_reason, choice.logprobs) == (TEXT, 0, "length", None)
    assert (answer.object, answer.model, answer.id[:5]) == ("text_completion", NAME, "cmpl-")
    usage = answer.usage
    assert (usage.prompt_tokens, usage.completion_tokens, usage.total_tokens) == (3, 6, 9)
    # One choice for each prompt; the sum of "yb", 27, ends the text at once.
    answer = client.completions.create(
        **completion(prompt=["yb", PROMPT, "de"], stop=[TEXT[2:4], "none"], max_tokens=5)
    )
    choices = [(choice.index, choice.text, choice.finish_reason) for choice in answer.choices]
    assert choices == [(0, "", "stop"), (1, TEXT[:2], "stop"), (2, continued("de", 5), "length")]
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (7, 1 + 4 + 5)
    assert client.completions.create(**completion(stop=TEXT[1])).choices[0].text == TEXT[0]


def test_completions_are_counted_as_texts(writer, client):
    def counted():
        found = [re.findall(rf"^fewheads_{name}[{{].* (\S+)$", page_of(writer), re.MULTILINE) for name in names]
        return [sum(map(float, values)) for values in found]

    names = ("prompt_tokens_total", "generated_tokens_total", "text_ends_total", "first_token_seconds_sum")
    before = counted()
    client.completions.create(**completion(max_tokens=6))
    *texts, seconds = (now - then for now, then in zip(counted(), before, strict=True))
    assert texts == [3, 6, 1]
    assert seconds > 0


def test_defaults_are_those_of_openai(client):
    def text(**fields):
        return str(client.completions.create(model=NAME, prompt=PROMPT, **fields).choices[0].text)

    assert text(temperature=0) == text(top_p=1e-6) == text(extra_body={"top_k": 1}) == continued(PROMPT, 16)
    drawn = text(seed=5)
    assert drawn == text(seed=5, temperature=1)
    assert not continued(PROMPT, 16).startswith(drawn)


def test_several_choices_for_a_prompt(client):
    def texts(**fields):
        answer = client.completions.create(**completion(temperature=1, max_tokens=5, prompt=[PROMPT, "de"], **fields))
        assert [choice.index for choice in answer.choices] == list(range(len(answer.choices)))
        assert answer.usage.prompt_tokens == 5  # those of a prompt once
        return [choice.text for choice in answer.choices]

    drawn = texts(n=3, best_of=3, seed=5)
    assert len(drawn) == len(set(drawn)) == 6
    assert [drawn[place::3] for place in range(3)] == [texts(seed=5 + choice) for choice in range(3)]


def test_prompts_as_ids_of_tokens(client):
    ids = {"abc": [1, 2, 3], "de": [4, 5]}
    for prompt, texts in ((ids["abc"], ["abc"]), ([ids["de"]], ["de"]), ([ids["de"], "abc"], ["de", "abc"])):
        answer = client.completions.create(**completion(prompt=prompt, max_tokens=9))
        assert [choice.text for choice in answer.choices] == [continued(text, 9) for text in texts]
        assert answer.usage.prompt_tokens == sum(map(len, texts))


def test_stock_client_streams(client):
    prompts = [PROMPT, "de"]
    options = {"include_usage": True}
    texts, reasons = ["", ""], []
    for chunk in client.completions.create(
        **completion(prompt=prompts, max_tokens=9), stream=True, stream_options=options
    ):
        for choice in chunk.choices:
            texts[choice.index] += choice.text
            reasons += [choice.finish_reason] if choice.finish_reason else []
    assert texts == [continued(prompt, 9) for prompt in prompts]
    assert (reasons, chunk.choices) == (["length", "length"], [])
    assert (chunk.usage.prompt_tokens, chunk.usage.completion_tokens) == (5, 18)


def test_stock_client_lists_models(client):
    assert [model.id for model in client.models.list()] == [NAME]
    model = client.models.retrieve(NAME)
    assert (model.id, model.object, model.owned_by, model.created > 1e9) == (NAME, "model", "fewheads", True)
