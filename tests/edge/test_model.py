"""Validation and preprocessing of requests by a loaded model, before anything is computed."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest

from edge.bundles.bundle import Bundle
from edge.bundles.expression import TOKENS, evaluate, tokenize
from edge.datatypes import Array
from edge.errors import InvalidRequest
from edge.programs.program import Options
from edge.repository.model import Model
from edge.runtimes.build import load_runner
from tests.support.models import EXPRESSIONS, MAX_BATCH_SIZE, ORACLE_BUNDLE
from tests.support.server_models import ECHO_MAX, echo_input, echo_output, write_echo_bundle

ECHO = echo_input("FP32")


def loaded(bundle: Bundle, cache: Path) -> Model:
    tier = bundle.manifest.tiers[0].name
    return Model(bundle, {tier: load_runner(bundle, "onnxruntime", cache)}, load_memory_bytes=7)


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Model]]:
    """The oracle, and a model without a batch dimension and without preprocessing."""
    cache = tmp_path_factory.mktemp("cache")
    bundles = (Bundle.open(ORACLE_BUNDLE), write_echo_bundle(tmp_path_factory.mktemp("echo"), "FP32"))
    models = {name: loaded(bundle, cache) for name, bundle in zip(("oracle", "echo"), bundles, strict=True)}
    yield models
    for model in models.values():
        model.runner.close()


def tokens(rows: int) -> Array:
    return np.repeat(tokenize(["3 - -4 + 2"]), rows, axis=0)


def texts(*values: str | bytes) -> Array:
    return np.array([[text if isinstance(text, bytes) else text.encode()] for text in values], np.object_)


def test_threads_share_a_model(models: dict[str, Model]) -> None:
    inputs = [{"x": tokenize([f"{number} - -{number % 7} + 2"] * (1 + number % 3))} for number in range(60)]

    def compute(feeds: dict[str, Array]) -> Array:
        return models["oracle"].program.compute(feeds, Options("full")).outputs["value"]

    alone = [compute(feeds) for feeds in inputs]
    with ThreadPoolExecutor(8) as pool:
        together = list(pool.map(compute, inputs * 20))
    for number, value in enumerate(together):
        assert np.array_equal(value, alone[number % len(alone)])


def test_model_has_the_tensors_of_its_graph_and_of_its_preprocessing(models: dict[str, Model]) -> None:
    oracle, echo = models["oracle"], models["echo"]
    assert (oracle.name, oracle.version, oracle.load_memory_bytes) == ("calculator-oracle", "1", 7)
    assert (list(oracle.inputs), oracle.optional) == (["expression", "x"], {"expression", "x"})
    assert (list(oracle.outputs), list(oracle.tiers), oracle.golden_max_abs_diff) == (["value"], ["full"], 0)
    assert (list(echo.inputs), list(echo.outputs), echo.optional) == ([ECHO], [echo_output("FP32")], set())


@pytest.mark.parametrize("rows", [1, 2, MAX_BATCH_SIZE])
def test_tensors_pass_through(models: dict[str, Model], rows: int) -> None:
    array = tokens(rows)
    feeds = models["oracle"].prepare({"x": array})
    assert (feeds.rows, list(feeds.inputs), feeds.inputs["x"] is array) == (rows, ["x"], True)
    assert models["oracle"].runner.infer(feeds.inputs)["value"].tolist() == [[9.0]] * rows


def test_texts_are_preprocessed(models: dict[str, Model]) -> None:
    arrays = {"expression": texts(*EXPRESSIONS)}
    feeds = models["oracle"].prepare(arrays)
    assert (feeds.rows, list(feeds.inputs)) == (len(EXPRESSIONS), ["x"])
    assert np.array_equal(feeds.inputs["x"], tokenize(EXPRESSIONS))
    assert list(arrays) == ["expression"]  # the request's own tensors stay as they were
    values = models["oracle"].runner.infer(feeds.inputs)["value"][:, 0]
    assert values.tolist() == [evaluate(text) for text in EXPRESSIONS]


@pytest.mark.parametrize("size", [1, ECHO_MAX])
def test_model_without_a_batch_counts_one_row(models: dict[str, Model], size: int) -> None:
    feeds = models["echo"].prepare({ECHO: np.arange(size, dtype=np.float32)})
    assert feeds.rows == 1
    assert np.array_equal(models["echo"].runner.infer(feeds.inputs)[echo_output("FP32")], np.arange(size))


OVERSIZE = f"got {MAX_BATCH_SIZE + 1} rows, expected at most {MAX_BATCH_SIZE}. Split the request."


@pytest.mark.parametrize(
    ("name", "arrays", "text"),
    [
        ("oracle", {}, "got only [], expected 'x' (or 'expression'). Add it."),
        ("echo", {}, f"got only [], expected {ECHO!r}. Add it."),
        (
            "oracle",
            {"expression": texts("1"), "x": tokens(1)},
            "got 'expression' and 'x', expected one of them. 'expression' stands for 'x'.",
        ),
        ("oracle", {"x": tokens(MAX_BATCH_SIZE + 1)}, OVERSIZE),
        ("oracle", {"expression": texts(*["1"] * (MAX_BATCH_SIZE + 1))}, OVERSIZE),
        (
            "oracle",
            {"expression": texts("1", "2"), "x": tokens(1)},
            "batch of 'calculator-oracle': got {'expression': 2, 'x': 1}, expected the same first dimension",
        ),
        ("echo", {ECHO: np.zeros(0, np.float32)}, f"got [0], expected between [1] and [{ECHO_MAX}]. Shorten"),
        ("echo", {ECHO: np.zeros(ECHO_MAX + 1, np.float32)}, f"got [{ECHO_MAX + 1}], expected between [1] and"),
        ("oracle", {"x": np.empty((0, TOKENS), np.float32)}, f"'x' shape of 'calculator-oracle': got [0, {TOKENS}]"),
        *(
            ("oracle", {"expression": texts(text)}, "")
            for text in (b"1 +", b"\xff", b"", b"5000", b"1+1+1+1+1+1+1+1+1")
        ),
    ],
)
def test_invalid_requests_are_rejected(
    models: dict[str, Model], name: str, arrays: dict[str, Array], text: str
) -> None:
    with pytest.raises(InvalidRequest) as caught:
        models[name].prepare(arrays)
    assert text in str(caught.value)
    assert not text or models[name].name in str(caught.value)
