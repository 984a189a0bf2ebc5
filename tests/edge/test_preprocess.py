"""Text to the calculator's tokens, as a manifest asks for it."""

from __future__ import annotations

from typing import get_args

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from edge.bundles.bundle import Bundle
from edge.bundles.expression import MAX_TERMS, TOKENS, tokenize
from edge.bundles.manifest import ExpressionPreprocess, Preprocess
from edge.bundles.preprocess import STEPS, ExpressionPreprocessor, preprocessor
from edge.datatypes import Array, TensorSpec
from edge.errors import InvalidRequest
from tests.support.models import EXPRESSIONS, ORACLE_BUNDLE, oracle_golden

STEP = ExpressionPreprocessor(ExpressionPreprocess(input="text", output="tokens", max_abs_operand=1024.0))


def rows(*texts: str | bytes) -> Array:
    array = np.empty((len(texts), 1), np.object_)
    array[:, 0] = [text.encode() if isinstance(text, str) else text for text in texts]
    return array


def test_every_step_of_the_manifest_has_an_implementation() -> None:
    assert set(STEPS) == set(get_args(Preprocess)), "add the step to STEPS in edge/bundles/preprocess.py"


def test_a_manifest_without_preprocessing_has_none() -> None:
    bundle = Bundle.open(ORACLE_BUNDLE)
    plain = msgspec.structs.replace(bundle.manifest, preprocess=None)
    assert preprocessor(Bundle(bundle.path, plain, bundle.goldens)) is None


def test_a_manifest_names_both_ends() -> None:
    step = preprocessor(Bundle.open(ORACLE_BUNDLE))
    assert step is not None
    assert step.inputs == (TensorSpec("expression", "BYTES", (-1, 1)),)
    assert step.outputs == ("x",)


def test_the_golden_set_of_a_bundle_is_preprocessed_exactly() -> None:
    bundle = Bundle.open(ORACLE_BUNDLE)
    step = preprocessor(bundle)
    assert step is not None
    made = step(bundle.golden.raw[step.inputs[0].name])
    assert np.array_equal(made["x"], bundle.golden.inputs["x"])
    assert made["x"].dtype == np.float32


def test_numpys_byte_strings_are_read_too() -> None:
    raw = oracle_golden().raw["expression"]
    assert raw.dtype.kind == "S"
    assert np.array_equal(STEP(raw)["tokens"], tokenize(EXPRESSIONS))


OPERANDS = st.lists(st.integers(-1024, 1024), min_size=1, max_size=MAX_TERMS)


@given(st.lists(OPERANDS, min_size=1, max_size=5), st.data())
@settings(deadline=None)
def test_every_expression_becomes_its_row(expressions: list[list[int]], data: st.DataObject) -> None:
    texts = []
    want = np.full((len(expressions), TOKENS), 0.5, np.float32)
    for row, operands in enumerate(expressions):
        signs = data.draw(st.lists(st.booleans(), min_size=len(operands) - 1, max_size=len(operands) - 1))
        text = str(operands[0])
        want[row, 0] = operands[0]
        for index, (plus, operand) in enumerate(zip(signs, operands[1:], strict=True), 1):
            text += f" {'+' if plus else '-'} {operand}"
            want[row, 2 * index - 1 : 2 * index + 1] = float(plus), operand
        texts.append(text)
    made = STEP(rows(*texts))
    assert list(made) == ["tokens"]
    assert np.array_equal(made["tokens"], want)


@pytest.mark.parametrize("row", [0, 2])
def test_text_that_is_no_utf8_is_shown(row: int) -> None:
    texts: list[str | bytes] = ["1", "2", "3"]
    texts[row] = b"1 + \xff"
    with pytest.raises(InvalidRequest, match=r"text in input 'text': got b'1 \+ \\xff', expected UTF-8"):
        STEP(rows(*texts))


@pytest.mark.parametrize("text", ["", "+", "1 +", "1 2", "1 * 2", "１", "1\0", "nan", "1e5", "0x1", "1,5"])
def test_text_that_is_no_expression_is_refused(text: str) -> None:
    with pytest.raises(InvalidRequest, match="expression"):
        STEP(rows("1", text))


@pytest.mark.parametrize(("operand", "fits"), [("1024", True), ("-1024", True), ("1024.5", False), ("-1025", False)])
def test_operands_have_the_manifests_limit(operand: str, fits: bool) -> None:
    if fits:
        assert STEP(rows(operand))["tokens"][0, 0] == float(operand)
    else:
        with pytest.raises(InvalidRequest, match="operands between -1024 and 1024"):
            STEP(rows(operand))


@given(st.binary(max_size=300))
@settings(deadline=None, max_examples=300)
def test_any_bytes_become_tokens_or_are_refused(text: bytes) -> None:
    try:
        made = STEP(rows(text))["tokens"]
    except InvalidRequest:
        return
    assert made.shape == (1, TOKENS)
    assert np.isfinite(made).all()
