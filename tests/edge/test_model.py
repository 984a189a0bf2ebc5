"""Validation and preprocessing of requests by a loaded model, before anything is computed."""

import numpy as np
import pytest

from edge.bundles.bundle import Bundle
from edge.bundles.expression import TOKENS, tokenize
from edge.errors import InvalidRequest
from edge.repository.model import Model
from edge.runtimes.build import load_runner
from tests.support.jobs import prepared
from tests.support.models import EXPRESSIONS, MAX_BATCH_SIZE, ORACLE_BUNDLE
from tests.support.sample_requests import column as texts
from tests.support.server_models import ECHO_MAX, echo_input, echo_output, write_echo_bundle

ECHO = echo_input("FP32")


def loaded(bundle, cache):
    tier = bundle.manifest.tiers[0].name
    return Model(bundle, {(tier, "model"): load_runner(bundle, "onnxruntime", cache)})


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """The oracle, and a model without a batch dimension and without preprocessing."""
    cache = tmp_path_factory.mktemp("cache")
    bundles = (Bundle.open(ORACLE_BUNDLE), write_echo_bundle(tmp_path_factory.mktemp("echo"), "FP32"))
    models = {name: loaded(bundle, cache) for name, bundle in zip(("oracle", "echo"), bundles, strict=True)}
    yield models
    for model in models.values():
        model.runner.close()


def tokens(rows):
    return np.repeat(tokenize(["3 - -4 + 2"]), rows, axis=0)


def test_model_has_the_tensors_of_its_graph_and_of_its_preprocessing(models):
    oracle, echo = models["oracle"], models["echo"]
    assert (oracle.name, oracle.version) == ("calculator-oracle", "1")
    assert (list(oracle.inputs), oracle.optional) == (["expression", "x"], {"expression", "x"})
    assert (list(oracle.outputs), list(oracle.tiers), oracle.golden_diffs) == (["value"], ["full"], {"full": 0})
    assert (list(echo.inputs), list(echo.outputs), echo.optional) == ([ECHO], [echo_output("FP32")], set())


def test_tensors_pass_through_and_texts_are_preprocessed(models):
    array = tokens(MAX_BATCH_SIZE)
    rows, inputs = prepared(models["oracle"], {"x": array})
    assert (rows, list(inputs), inputs["x"] is array) == (MAX_BATCH_SIZE, ["x"], True)
    arrays = {"expression": texts(*EXPRESSIONS)}
    rows, inputs = prepared(models["oracle"], arrays)
    assert (rows, list(inputs)) == (len(EXPRESSIONS), ["x"])
    assert np.array_equal(inputs["x"], tokenize(EXPRESSIONS))
    assert list(arrays) == ["expression"]  # the request's own tensors stay as they were
    for size in (1, ECHO_MAX):  # without a batch dimension
        assert prepared(models["echo"], {ECHO: np.zeros(size, np.float32)})[0] == 1


OVERSIZE = f"got {MAX_BATCH_SIZE + 1} rows, expected at most {MAX_BATCH_SIZE}. Split the request."


def at_row_2(value):
    array = tokens(3)
    array[1, 4] = value
    return array


RANGE = "input 'x' row 2 column 5 of 'calculator-oracle': got {}, expected a number between -1024 and 1024."
NUMBERS = ((np.nan, "nan"), (-np.inf, "-inf"), (3e38, "3e+38"), (1025, "1025"))


def test_invalid_requests_are_rejected(models):
    for name, arrays, text in (
        ("oracle", {}, "got only [], expected 'x' (or 'expression'). Add it."),
        ("echo", {}, f"got only [], expected {ECHO!r}. Add it."),
        ("oracle", {"expression": texts("1"), "x": tokens(1)}, "got 'expression' and 'x', expected one of them. 'expr"),
        ("oracle", {"x": tokens(MAX_BATCH_SIZE + 1)}, OVERSIZE),
        ("oracle", {"expression": texts(*["1"] * (MAX_BATCH_SIZE + 1))}, OVERSIZE),
        ("oracle", {"expression": texts("1", "2"), "x": tokens(1)}, "got {'expression': 2, 'x': 1}, expected the same"),
        ("echo", {ECHO: np.zeros(0, np.float32)}, f"got [0], expected between [1] and [{ECHO_MAX}]. Shorten"),
        ("echo", {ECHO: np.zeros(ECHO_MAX + 1, np.float32)}, f"got [{ECHO_MAX + 1}], expected between [1] and"),
        ("oracle", {"x": np.empty((0, TOKENS), np.float32)}, f"'x' shape of 'calculator-oracle': got [0, {TOKENS}]"),
        ("oracle", {"expression": texts(b"1 +")}, "expression: got '1 +'"),
        *(("oracle", {"x": at_row_2(value)}, RANGE.format(shown)) for value, shown in NUMBERS),
    ):
        with pytest.raises(InvalidRequest) as caught:
            prepared(models[name], arrays)
        assert text in str(caught.value)
