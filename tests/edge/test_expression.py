"""The calculator's tokenizer against Python's own arithmetic."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from edge.bundles.expression import MAX_TERMS, TOKENS, evaluate, parse, tokenize
from edge.errors import InvalidRequest

spaces = st.sampled_from(["", " ", "  ", "\t"])
whole = st.integers(-9999, 9999).map(str)
decimal = st.decimals(-999, 999, places=3, allow_nan=False).map(lambda value: f"{value:f}")
operands = st.one_of(whole, decimal, st.integers(0, 99).map(lambda value: f"+{value}"))


@st.composite
def expressions(draw):
    text = draw(spaces) + draw(operands)
    for _ in range(draw(st.integers(0, MAX_TERMS - 1))):
        text += draw(spaces) + draw(st.sampled_from("+-")) + draw(spaces) + draw(operands)
    return text + draw(spaces)


@given(st.lists(expressions(), max_size=4))
def test_expressions_become_values_and_tokens(texts):
    tokens = tokenize(texts)
    assert (tokens.shape, tokens.dtype) == ((len(texts), TOKENS), np.float32)
    for row, text in zip(tokens, texts, strict=True):
        assert evaluate(text) == pytest.approx(eval(text.strip()), abs=1e-9)
        numbers, operators = parse(text)
        filled = 2 * len(numbers) - 1
        np.testing.assert_array_equal(row[0:filled:2], np.array(numbers, np.float32))
        np.testing.assert_array_equal(row[1:filled:2], np.array(operators, np.float32))
        assert (row[filled:] == 0.5).all()


def test_operator_codes_and_limits():
    assert parse("3 - -4 + 2") == ([3.0, -4.0, 2.0], [0.0, 1.0])
    assert len(parse("1" + "+1" * 7)[0]) == 8
    assert parse("1" + " " * 255) == ([1.0], [])
    assert tokenize(["-1024", "1024"], max_abs_operand=1024)[:, 0].tolist() == [-1024, 1024]


def test_broken_expression_is_rejected_with_the_place():
    for text, expected in (
        ("", "an operand at the end"),
        ("1 +", "an operand at the end"),
        ("1 2", "+ or - at character 3"),
        ("3 * 4", "+ or - at character 3"),
        ("1e5", "+ or - at character 2"),
        ("--1", "an operand at character 1"),
        ("1 - - 1", "an operand at character 5"),
        ("٣", "an operand at character 1"),
        ("1\0", "+ or - at character 2"),
        ("1 - ", "an operand at the end"),
        (" 1 -  b", "an operand at character 7"),
        ("1e999", "+ or - at character 2"),
        ("nan", "an operand at character 1"),
        ("1 \u2212 2", "+ or - at character 3. Write '-' instead of '\u2212' (U+2212)."),
        ("1 + \u20132", "an operand at character 5. Write '-' instead of '\u2013' (U+2013)."),
        ("\uff11", "an operand at character 1. Write '1' instead of '\uff11' (U+FF11)."),
        ("1 \uff0b 2", "+ or - at character 3. Write '+' instead of '\uff0b' (U+FF0B)."),
        ("1\u00a0+ 2", "+ or - at character 2. Write ' ' instead of '\\xa0' (U+00A0)."),
        ("3\u00b2", "+ or - at character 2. Write operands joined by + or -, for example '3 - -4 + 2'."),  # a power
        ("1 + " * 8 + "1", "at most 8 operands, and the next is at character 33. Split it into shorter expressions."),
        ("1" + " " * 256, "at most 256 characters. Write operands joined by + or -, for example '3 - -4 + 2'."),
        ("9" * 400, "at most 256 characters."),
        ("1 + " + "9" * 200, "operands between -1024 and 1024. Replace 1e+200 at character 5; the model was made for"),
        ("1024.5", "operands between -1024 and 1024. Replace 1024.5 at character 1; the model was made for smaller op"),
        ("1 + -1025", "operands between -1024 and 1024. Replace 1025 at character 6; the model was made for smaller"),
    ):
        with pytest.raises(InvalidRequest, match=r"^expression in row 2: got ") as caught:
            tokenize(["1", text], max_abs_operand=1024)
        assert f"expected {expected}" in str(caught.value)
