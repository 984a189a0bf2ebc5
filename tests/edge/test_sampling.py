"""The choice of tokens from logits, and the parameters that control it."""

from itertools import accumulate

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from edge.errors import InvalidRequest
from edge.pb import inference_pb2 as pb
from edge.programs.sampling import Sampler, Sampling, sampling_of
from edge.serving.parameters import Parameters, _similar, parse
from edge.serving.request import request_of
from tests.support.letters_model import MAX_TOKENS, NAME, POSITIONS, text_request

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
    with pytest.raises(InvalidRequest) as caught:
        sampling(letters_bundle, **{name: value})
    assert f"parameter {name!r} of {NAME!r}: {message}" in str(caught.value)


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
        with pytest.raises(InvalidRequest) as caught:
            parse(request(**{name: value}))
        assert message in str(caught.value)
