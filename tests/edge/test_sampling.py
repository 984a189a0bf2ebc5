"""The choice of tokens from logits, the parameters that control it, and the log-probabilities of the tokens."""

import asyncio
import json
import re
from itertools import accumulate

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from edge.client import InferRequest
from edge.client.inference import encode
from edge.errors import InvalidRequest
from edge.health.health import Health
from edge.pb import inference_pb2 as pb
from edge.programs.sampling import Sampler, Sampling, sampling_of
from edge.scheduling.job import MOST_PARTIAL_ANSWERS
from edge.serving.call import MESSAGE
from edge.serving.metadata import Metadata
from edge.serving.parameters import Parameters, _similar, parse
from edge.serving.request import request_of
from edge.serving.wire import from_raw
from tests.support.http_requests import ask
from tests.support.in_process import running_service
from tests.support.letters_model import (
    GAIN,
    LETTERS,
    MAX_TOKENS,
    NAME,
    POSITIONS,
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

#: Different probabilities, as whole numbers, in any order.
Weights = st.lists(st.integers(1, 40), min_size=2, max_size=6, unique=True)


def drawn(weights, times, **how):
    """Return tokens drawn from logits whose probabilities are proportional to the weights at temperature 1."""
    with np.errstate(divide="ignore"):
        logits = np.log(np.array(weights)).astype(np.float32)
    sampler = Sampler(Sampling(**{"max_tokens": times, "temperature": 1.0, "seed": 5, **how}), row=0)
    return [sampler.choose(logits) for _ in range(times)]


@given(Weights)
def test_without_temperature_the_likeliest_token_is_taken(weights):
    best = weights.index(max(weights))
    assert drawn(weights, 3, temperature=0) == drawn(weights, 3, top_k=1) == drawn(weights, 3, top_p=1e-9) == [best] * 3
    assert drawn(weights, 3, temperature=1e-300) == [best] * 3
    assert drawn([7, 7, 3], 1, temperature=0) == [0]  # the first one of equals


@settings(max_examples=40, deadline=None, derandomize=True)
@given(Weights, st.integers(0, 7), st.integers(0, 10_000))
def test_exactly_the_likeliest_tokens_are_drawn(weights, top_k, place):
    ordered = sorted(weights, reverse=True)[: top_k or None]
    goal = place % sum(ordered)
    count = 1 + sum(total <= goal for total in accumulate(ordered))  # the fewest whose sum exceeds the goal
    tokens = drawn(weights, 1_500, top_k=top_k, top_p=(goal + 0.5) / sum(ordered))
    assert {weights[token] for token in tokens} == set(ordered[:count])


def test_temperature_makes_probabilities_more_or_less_equal():
    weights = [1, 16]
    for temperature, share in ((0.5, 1 / 257), (1.0, 1 / 17), (2.0, 1 / 5), (100.0, 0.493)):
        assert drawn(weights, 4_000, temperature=temperature).count(0) / 4_000 == pytest.approx(share, abs=0.02)
    assert set(drawn([0, 5, 0, 5], 200, temperature=100)) == {1, 3}  # a logit of -infinity


def test_seeds_reproduce_tokens():
    weights = list(range(1, 30))
    sampling = Sampling(max_tokens=20, temperature=1.0, seed=5)
    logits = np.log(np.array(weights, np.float32))
    rows = [[Sampler(sampling, row).choose(logits) for row in range(20)] for _ in range(2)]
    assert rows[0] == rows[1]
    assert len(set(rows[0])) > 5  # rows of a request have draws of their own
    assert drawn(weights, 20) == drawn(weights, 20) != drawn(weights, 20, seed=6)
    assert drawn(weights, 20, seed=None) != drawn(weights, 20, seed=None)


def sampling(bundle, **parameters):
    values = request_of(text_request("a", **parameters)).parameters
    return sampling_of(bundle.manifest.program, NAME, parse(values).text)


def test_parameters_of_a_request(letters_bundle):
    assert sampling(letters_bundle) == Sampling(MAX_TOKENS)
    every = {
        "max_tokens": 99,
        "min_tokens": 99,
        "ignore_eos": True,
        "temperature": 2,
        "top_k": 2**31 - 1,
        "top_p": 1,
        "seed": 2**63 - 1,
    }
    assert sampling(letters_bundle, **every, stop='["b", "cd"]') == Sampling(**every, stop=("b", "cd"))
    for given_stop, stop in (("ab", ("ab",)), ("[", ("[",)), ("[1]", ("[1]",)), ("[]", ()), ('["[1]"]', ("[1]",))):
        assert sampling(letters_bundle, stop=given_stop).stop == stop
    assert sampling(letters_bundle, stop="x" * 256).stop == ("x" * 256,)


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("max_tokens", 0, f"got 0, expected 1 to {POSITIONS - 1}. Leave it out for the default"),
        ("max_tokens", POSITIONS, f"got {POSITIONS}, expected 1 to {POSITIONS - 1}"),
        ("min_tokens", MAX_TOKENS + 1, f"got {MAX_TOKENS + 1}, expected 0 to {MAX_TOKENS}"),
        ("min_tokens", -1, "got -1"),
        ("temperature", -0.1, "got -0.1, expected 0 to 100"),
        ("temperature", 101, "got 101.0, expected 0 to 100"),
        ("temperature", float("nan"), "got nan, expected 0 to 100"),
        ("top_k", -1, "got -1, expected 0 to 2147483647"),
        ("top_k", 2**31, "got 2147483648, expected 0 to"),
        ("top_p", 0, "got 0.0, expected above 0 and at most 1"),
        ("top_p", 1.01, "got 1.01, expected above 0 and at most 1"),
        ("top_p", float("inf"), "got inf, expected above 0 and at most 1"),
        ("seed", -1, "got -1, expected 0 to 9223372036854775807"),
        ("stop", "", "got a text of 0 characters, expected 1 to 256. Give fewer or shorter texts."),
        ("stop", "x" * 257, "got a text of 257 characters, expected 1 to 256"),
        ("stop", str(["x"] * 5).replace("'", '"'), "got 5 texts, expected at most 4"),
    ],
)
def test_values_out_of_range_are_refused(letters_bundle, name, value, message):
    with pytest.raises(InvalidRequest, match=re.escape(f"parameter {name!r} of {NAME!r}: {message}")):
        sampling(letters_bundle, **{name: value})


@pytest.mark.parametrize("name", ["max_tokens", "min_tokens", "temperature", "top_k", "top_p", "seed", "stop"])
def test_parameters_of_another_kind_are_refused(name):
    wrong = [True, 5 if name == "stop" else "5"]
    if name not in ("temperature", "top_p"):
        wrong.append(0.5)
    for value in wrong:
        with pytest.raises(InvalidRequest, match=f"parameter '{name}': got '[a-z0-9]*_param', expected .*_param"):
            parse(request_of(text_request("a", **{name: value})).parameters)
    misspelt = f"{name}_" if "_" in name else f"{name}s"
    with pytest.raises(InvalidRequest, match=f"parameter name: got '{misspelt}', expected '{name}'"):
        parse(request_of(text_request("a", **{misspelt: 1})).parameters)


def request(**parameters):
    given = {name: pb.InferParameter(**value) for name, value in parameters.items()}
    return request_of(pb.ModelInferRequest(parameters=given)).parameters


def test_values():
    named = {"tier": {"string_param": "lean"}, "policy": {"string_param": "load"}}
    for parameters, expected in (
        ({}, Parameters(None, False, None, None, 5)),
        ({"timeout": {"int64_param": 0}, "priority": {"uint64_param": 0}}, Parameters()),
        ({"timeout": {"uint64_param": 2_500_001}}, Parameters(timeout_seconds=2.500001)),
        ({"priority": {"int64_param": 1}, "timings": {"bool_param": True}}, Parameters(timings=True, priority=1)),
        ({"priority": {"uint64_param": 10}, "timings": {"bool_param": False}}, Parameters(priority=10)),
        (named, Parameters(tier="lean", policy="load")),
        ({"sequence_id": {"string_param": ""}, "sequence_end": {"bool_param": False}}, Parameters()),
        ({"time": {"uint64_param": 1}, "mine": {}, "id": {}, "timeout" + "_" * 26: {}}, Parameters()),  # 33 characters
    ):
        assert parse(request(**parameters)) == expected


def test_own_names_are_compared_once():
    misses = _similar.cache_info().misses
    for _ in range(3):
        parse(request(**{f"own-name-{number}": {"bool_param": True} for number in range(64)}))
    assert _similar.cache_info().misses - misses == 64


def test_errors():
    for name, value, message in (
        ("timeout", {"string_param": "1"}, "'timeout': got 'string_param', expected int64_param or uint64_param"),
        ("timeout", {"int64_param": -1}, "parameter 'timeout': got -1, expected 0 or more. 0 is the default."),
        ("priority", {"int64_param": 11}, "parameter 'priority': got 11, expected 1, the highest, to 10, or 0."),
        ("priority", {}, "parameter 'priority': got None, expected int64_param or uint64_param"),
        *((f"sequence_{part}", {"bool_param": True}, f"'sequence_{part}': got True") for part in ("start", "end")),
        ("sequence_id", {"uint64_param": 7}, "'sequence_id': got 7, expected none: no model keeps state"),
        ("sequence_id", {"string_param": "7"}, "Leave the sequence parameters out."),
        ("triton_zz", {}, "parameter name: got 'triton_zz', expected a known one"),
        ("teir", {}, "parameter name: got 'teir', expected 'tier', or a name that is not like any of timeout, "),
        ("Policy", {}, "got 'Policy', expected 'policy'"),
        ("timings_ms", {}, "expected 'timings', or a name that is not like any of timeout, priority, sequence_id, "),
        ("deadline", {}, "expected 'timeout', or a name"),
        ("Deadline-MS", {}, "Correct or rename it; timeout is in microseconds."),
        ("timeout_" + "x" * 24, {}, "expected 'timeout'"),  # 32 characters
    ):
        with pytest.raises(InvalidRequest, match=re.escape(message)):
            parse(request(**{name: value}))


HEAD = "plus-one"


@pytest.fixture
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
    metadata = await Metadata(running.repository, running.scheduler, health).model_metadata(
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
