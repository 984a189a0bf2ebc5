"""The tokenizer of expressions with products and parentheses against Python's own arithmetic."""

from fractions import Fraction

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from edge.bundles.arithmetic import MAX_DEPTH, MAX_TOKENS, evaluate, parse, tokenize
from edge.bundles.bundle import Bundle
from edge.bundles.preprocess import STEPS
from edge.bundles.steps import ArithmeticPreprocess
from edge.errors import InvalidRequest
from tests.support.models import ORACLE_BUNDLE
from tests.support.sample_requests import column

spaces = st.sampled_from(["", " ", "\t "])
numbers = st.one_of(
    st.integers(-999, 999).map(str),
    st.decimals(-99, 99, places=3, allow_nan=False).map(lambda value: f"{value:f}"),
    st.integers(0, 99).map(lambda value: f"+{value}"),
)


def grouped(inner):
    parts = st.tuples(st.sampled_from(["(", "-("]), spaces, inner, spaces, st.just(")"))
    joined = st.tuples(inner, spaces, st.sampled_from("+-*"), spaces, inner)
    return st.one_of(parts.map("".join), joined.map("".join))


expressions = st.recursive(numbers, grouped, max_leaves=10)


def exact(text):
    """Return the value by Python's grammar and fractions."""
    names = iter(range(1000))
    values = {}
    padded = ""
    position = 0
    while position < len(text):
        end = position
        while end < len(text) and (text[end].isdigit() or text[end] == "."):
            end += 1
        if end > position:
            name = f"x{next(names)}"
            values[name], padded = Fraction(text[position:end]), padded + name
        else:
            end += 1
            padded += text[position:end]
        position = end
    return float(eval(padded.strip(), {}, values))


@given(expressions)
def test_value_is_that_of_python(text):
    assume(text.count("(") <= MAX_DEPTH)
    assert evaluate(text) == exact(text)


def test_tokens_and_their_limits():
    kinds, values = tokenize(["-2 * -(3 - -4.5)", "1"])
    assert (kinds.shape, kinds.dtype, values.dtype) == ((2, MAX_TOKENS), np.int64, np.float32)
    assert kinds[0, :10].tolist() == [1, 4, 1, 4, 5, 1, 3, 1, 6, 0]
    assert values[0, :10].tolist() == [-2, 0, -1, 0, 0, 3, 0, -4.5, 0, 0]
    assert not kinds[1, 1:].any()
    assert len(parse("1" + "+1" * 31 + " ")[0]) == MAX_TOKENS - 1
    assert evaluate("(" * MAX_DEPTH + "2" + ")" * MAX_DEPTH) == 2
    assert evaluate("0 * 100000 * 100000 * 100000") == 0


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("", "an operand at the end"),
        ("1 + ", "an operand at the end"),
        ("1 + )", "an operand at character 5"),
        ("()", "an operand at character 2"),
        ("2 - - 3", "an operand at character 5"),
        ("nan", "an operand at character 1"),
        ("3 × 4", "+, -, * or ) at character 3"),
        ("3 − 4", "+, -, * or ) at character 3. Write '-' instead of '−' (U+2212)."),
        ("2(3)", "+, -, * or ) at character 2"),
        ("1e5", "+, -, * or ) at character 2"),
        ("1 / 2", "+, -, * or ) at character 3"),
        ("(1 + (2)", "a ) at the end for the ( at character 1"),
        ("2 * -(1 + 2", "a ) at the end for the ( at character 6"),
        ("1) + 2", "no ) at character 2, because no ( is open"),
        ("(" * 8 + "1" + ")" * 8, "at most 7 open parentheses at character 8"),
        ("1" + "+1" * 32, "at most 64 tokens, and the next ends at character 65"),
        (" " * 1024 + "1", "at most 1024 characters"),
        ("1 + -1001", "operands between -1000 and 1000. Replace 1001 at character 6;"),
        ("1000" + "*1000" * 11, "a value of at most 1e+30 with all signs dropped. Write smaller operands."),
        ("0" + "*1000" * 11, "a value of at most 1e+30 with all signs dropped"),
    ],
)
def test_broken_expression_is_rejected_with_the_place(text, expected):
    with pytest.raises(InvalidRequest) as caught:
        tokenize(["1", text], max_abs_operand=1000)
    assert f"expected {expected}" in str(caught.value)
    assert str(caught.value).startswith("expression in row 2: got")


def test_operand_that_no_float_holds_is_rejected_without_a_limit():
    with pytest.raises(InvalidRequest, match=r"a value of at most 1e\+30"):
        parse("9" * 400 + " * 0")


def test_step_gives_both_inputs_of_the_graph():
    config = ArithmeticPreprocess(input="text", kinds="k", values="v", max_abs_operand=10)
    made = STEPS[ArithmeticPreprocess](config, Bundle.open(ORACLE_BUNDLE))(column("2 * (3 + 1)", "1"))
    kinds, values = tokenize(["2 * (3 + 1)", "1"])
    assert list(made) == ["k", "v"]
    np.testing.assert_array_equal(made["k"], kinds)
    np.testing.assert_array_equal(made["v"], values)
