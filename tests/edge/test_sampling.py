"""The choice of tokens from logits, and the parameters that control it."""

from __future__ import annotations

from itertools import accumulate
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from edge.bundles.bundle import Bundle
from edge.bundles.programs import GenerateProgram
from edge.errors import InvalidRequest
from edge.programs.sampling import Sampler, Sampling, sampling_of
from edge.serving.parameters import parse
from tests.support.letters_model import MAX_TOKENS, NAME, POSITIONS, text_request

#: Different probabilities, as whole numbers, in any order.
Weights = st.lists(st.integers(1, 40), min_size=2, max_size=6, unique=True)


def drawn(weights: list[int] | np.ndarray, times: int, **how: Any) -> list[int]:
    """Return tokens drawn from logits whose probabilities are proportional to the weights at temperature 1."""
    with np.errstate(divide="ignore"):
        logits = np.log(np.array(weights)).astype(np.float32)
    sampler = Sampler(Sampling(**{"max_tokens": times, "temperature": 1.0, "seed": 5, **how}), row=0)
    return [sampler.choose(logits) for _ in range(times)]


@given(Weights)
def test_without_temperature_the_likeliest_token_is_taken(weights: list[int]) -> None:
    best = weights.index(max(weights))
    assert drawn(weights, 3, temperature=0) == drawn(weights, 3, top_k=1) == drawn(weights, 3, top_p=1e-9) == [best] * 3
    assert drawn(weights, 3, temperature=1e-300) == [best] * 3
    assert drawn([7, 7, 3], 1, temperature=0) == [0]  # the first one of equals


@settings(max_examples=40, deadline=None, derandomize=True)
@given(Weights, st.integers(0, 7), st.integers(0, 10_000))
def test_exactly_the_likeliest_tokens_are_drawn(weights: list[int], top_k: int, place: int) -> None:
    ordered = sorted(weights, reverse=True)[: top_k or None]
    goal = place % sum(ordered)
    count = 1 + sum(total <= goal for total in accumulate(ordered))  # the fewest whose sum exceeds the goal
    tokens = drawn(weights, 1_500, top_k=top_k, top_p=(goal + 0.5) / sum(ordered))
    assert {weights[token] for token in tokens} == set(ordered[:count])


def test_temperature_makes_probabilities_more_or_less_equal() -> None:
    weights = [1, 16]
    for temperature, share in ((0.5, 1 / 257), (1.0, 1 / 17), (2.0, 1 / 5), (100.0, 0.493)):
        assert drawn(weights, 4_000, temperature=temperature).count(0) / 4_000 == pytest.approx(share, abs=0.02)
    assert set(drawn([0, 5, 0, 5], 200, temperature=100)) == {1, 3}  # a logit of -infinity


def test_seeds_reproduce_tokens() -> None:
    weights = list(range(1, 30))
    sampling = Sampling(max_tokens=20, temperature=1.0, seed=5)
    logits = np.log(np.array(weights, np.float32))
    rows = [[Sampler(sampling, row).choose(logits) for row in range(20)] for _ in range(2)]
    assert rows[0] == rows[1]
    assert len(set(rows[0])) > 5  # rows of a request have draws of their own
    assert drawn(weights, 20) == drawn(weights, 20) != drawn(weights, 20, seed=6)
    assert drawn(weights, 20, seed=None) != drawn(weights, 20, seed=None)


def sampling(bundle: Bundle, **parameters: Any) -> Sampling:
    """Return how to generate the text of a request with such parameters."""
    assert isinstance(bundle.manifest.program, GenerateProgram)
    return sampling_of(bundle.manifest.program, NAME, parse(text_request("a", **parameters)).text)


def test_parameters_of_a_request(letters_bundle: Bundle) -> None:
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
def test_values_out_of_range_are_refused(letters_bundle: Bundle, name: str, value: Any, message: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        sampling(letters_bundle, **{name: value})
    assert f"parameter {name!r} of {NAME!r}: {message}" in str(caught.value)


@pytest.mark.parametrize("name", ["max_tokens", "min_tokens", "temperature", "top_k", "top_p", "seed", "stop"])
def test_parameters_of_another_kind_are_refused(name: str) -> None:
    wrong: list[Any] = [True, 5 if name == "stop" else "5"]
    if name not in ("temperature", "top_p"):
        wrong.append(0.5)
    for value in wrong:
        with pytest.raises(InvalidRequest, match=f"parameter '{name}': got '[a-z0-9]*_param', expected .*_param"):
            parse(text_request("a", **{name: value}))
    misspelt = f"{name}_" if "_" in name else f"{name}s"
    with pytest.raises(InvalidRequest, match=f"parameter name: got '{misspelt}', expected '{name}'"):
        parse(text_request("a", **{misspelt: 1}))
