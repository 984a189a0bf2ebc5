"""The calculator's tokeniser against Python's own arithmetic."""

from __future__ import annotations

import re
from contextlib import suppress

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from edge.bundles.expression import MAX_TERMS, MINUS, PADDING, PLUS, TOKENS, evaluate, parse, tokenize
from edge.errors import InvalidRequest

spaces = st.sampled_from(["", " ", "  ", "\t"])
whole = st.integers(-9999, 9999).map(str)
decimal = st.decimals(-999, 999, places=3, allow_nan=False).map(lambda value: f"{value:f}")
operands = st.one_of(whole, decimal, st.integers(0, 99).map(lambda value: f"+{value}"))


@st.composite
def expressions(draw: st.DrawFn) -> str:
    text = draw(spaces) + draw(operands)
    for _ in range(draw(st.integers(0, MAX_TERMS - 1))):
        # A space before a sign: Python would read "1 --2" alike, and "1 -+2" too.
        text += draw(spaces) + draw(st.sampled_from("+-")) + draw(spaces) + draw(operands)
    return text + draw(spaces)


@given(expressions())
def test_evaluate_agrees_with_python(text: str):
    assert evaluate(text) == pytest.approx(eval(text.strip()), abs=1e-9)


@given(st.lists(expressions(), max_size=4))
def test_tokens_hold_the_expression(texts: list[str]):
    tokens = tokenize(texts)
    assert tokens.shape == (len(texts), TOKENS)
    assert tokens.dtype == np.float32
    for row, text in zip(tokens, texts, strict=True):
        numbers, operators = parse(text)
        filled = 2 * len(numbers) - 1
        np.testing.assert_array_equal(row[0:filled:2], np.array(numbers, np.float32))
        np.testing.assert_array_equal(row[1:filled:2], np.array(operators, np.float32))
        assert (row[filled:] == PADDING).all()


@given(st.text(max_size=40))
def test_any_text_is_tokens_or_an_invalid_request(text: str):
    with suppress(InvalidRequest):
        numbers, operators = parse(text)
        assert 1 <= len(numbers) == len(operators) + 1 <= MAX_TERMS


def test_operator_codes():
    assert parse("3 - -4 + 2") == ([3.0, -4.0, 2.0], [MINUS, PLUS])


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("", "an operand at the end"),
        ("   ", "an operand at character 1"),
        ("1 +", "an operand at the end"),
        ("+", "an operand at character 1"),
        ("1 2", "+ or - at character 3"),
        ("3 * 4", "+ or - at character 3"),
        ("1e5", "+ or - at character 2"),
        ("--1", "an operand at character 1"),
        ("1 - - 1", "an operand at character 4"),
        (".5", "an operand at character 1"),
        ("٣", "an operand at character 1"),
        ("nan", "an operand at character 1"),
        ("1 + 1 + 1 + 1 + 1 + 1 + 1 + 1 + 1", "at most 8 operands, and it has 9"),
        ("1" + " " * 256, "at most 256 characters"),
    ],
)
def test_broken_expression_names_the_place(text: str, expected: str):
    with pytest.raises(InvalidRequest, match=re.escape(f"expected {expected}")):
        parse(text)


@pytest.mark.parametrize("text", ["1024.5", "-1025", "1 + 2 - 99999"])
def test_operand_beyond_the_limit(text: str):
    with pytest.raises(InvalidRequest, match="expected operands between -1024 and 1024"):
        tokenize([text], max_abs_operand=1024)


def test_operand_at_the_limit():
    assert tokenize(["-1024"], max_abs_operand=1024)[0, 0] == -1024
