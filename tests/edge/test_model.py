"""Checks of a request before anything is computed."""

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


def loaded(bundle: Bundle, cache: Path) -> Model:
    tier = bundle.manifest.tiers[0].name
    return Model(bundle, {tier: load_runner(bundle, "onnxruntime", cache)}, load_memory_bytes=7)


@pytest.fixture(scope="module")
def oracle(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Model]:
    model = loaded(Bundle.open(ORACLE_BUNDLE), tmp_path_factory.mktemp("cache"))
    yield model
    model.runner.close()


@pytest.fixture(scope="module")
def echo(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Model]:
    """A model without a batch dimension and without preprocessing."""
    model = loaded(write_echo_bundle(tmp_path_factory.mktemp("echo"), "FP32"), tmp_path_factory.mktemp("cache"))
    yield model
    model.runner.close()


def tokens(rows: int) -> Array:
    return np.repeat(tokenize(["3 - -4 + 2"]), rows, axis=0)


def texts(*values: str) -> Array:
    array = np.empty((len(values), 1), np.object_)
    array[:, 0] = [value.encode() for value in values]
    return array


def refused(model: Model, arrays: dict[str, Array]) -> InvalidRequest:
    with pytest.raises(InvalidRequest) as caught:
        model.prepare(arrays)
    assert model.name in str(caught.value)
    return caught.value


def test_threads_share_a_model(oracle: Model) -> None:
    inputs = [{"x": tokenize([f"{number} - -{number % 7} + 2"] * (1 + number % 3))} for number in range(60)]

    def compute(feeds: dict[str, Array]) -> Array:
        return oracle.program.compute(feeds, Options("full")).outputs["value"]

    alone = [compute(feeds) for feeds in inputs]
    with ThreadPoolExecutor(8) as pool:
        together = list(pool.map(compute, inputs * 20))
    for number, value in enumerate(together):
        assert np.array_equal(value, alone[number % len(alone)])


def test_names_and_tensors_of_a_model(oracle: Model) -> None:
    assert (oracle.name, oracle.version, oracle.load_memory_bytes) == ("calculator-oracle", "1", 7)
    assert list(oracle.inputs) == ["expression", "x"]
    assert list(oracle.outputs) == ["value"]
    assert oracle.optional == {"expression", "x"}
    assert oracle.golden_max_abs_diff == 0
    assert list(oracle.tiers) == [oracle.full_tier]


def test_tensors_of_a_model_without_preprocessing(echo: Model) -> None:
    assert list(echo.inputs) == [echo_input("FP32")]
    assert list(echo.outputs) == [echo_output("FP32")]
    assert echo.optional == set()


@pytest.mark.parametrize("rows", [1, 2, MAX_BATCH_SIZE])
def test_tokens_are_accepted(oracle: Model, rows: int) -> None:
    array = tokens(rows)
    feeds = oracle.prepare({"x": array})
    assert feeds.rows == rows
    assert list(feeds.inputs) == ["x"]
    assert feeds.inputs["x"] is array
    assert oracle.runner.infer(feeds.inputs)["value"].tolist() == [[9.0]] * rows


def test_text_is_preprocessed(oracle: Model) -> None:
    arrays = {"expression": texts(*EXPRESSIONS)}
    feeds = oracle.prepare(arrays)
    assert feeds.rows == len(EXPRESSIONS)
    assert list(feeds.inputs) == ["x"]
    assert np.array_equal(feeds.inputs["x"], tokenize(EXPRESSIONS))
    assert list(arrays) == ["expression"]  # the request's own tensors stay as they were
    assert oracle.runner.infer(feeds.inputs)["value"][:, 0].tolist() == [evaluate(text) for text in EXPRESSIONS]


def test_missing_input_is_rejected(oracle: Model, echo: Model) -> None:
    assert "got only [], expected 'x' (or 'expression'). Add it." in str(refused(oracle, {}))
    assert f"got only [], expected {echo_input('FP32')!r}. Add it." in str(refused(echo, {}))


def test_text_with_tokens_is_rejected(oracle: Model) -> None:
    error = refused(oracle, {"expression": texts("1"), "x": tokens(1)})
    assert "got 'expression' and 'x', expected one of them. 'expression' stands for 'x'." in str(error)


def test_too_large_batch_is_rejected(oracle: Model) -> None:
    error = refused(oracle, {"x": tokens(MAX_BATCH_SIZE + 1)})
    assert f"got {MAX_BATCH_SIZE + 1} rows, expected at most {MAX_BATCH_SIZE}. Split the request." in str(error)
    assert "rows" in str(refused(oracle, {"expression": texts(*["1"] * (MAX_BATCH_SIZE + 1))}))


def test_uneven_batch_is_rejected(oracle: Model) -> None:
    error = refused(oracle, {"expression": texts("1", "2"), "x": tokens(1)})
    assert error.subject.startswith("batch")
    assert error.given == {"expression": 2, "x": 1}


def test_shape_outside_the_profile_is_rejected(echo: Model) -> None:
    name = echo_input("FP32")
    for size in (0, ECHO_MAX + 1):
        error = refused(echo, {name: np.zeros(size, np.float32)})
        assert error.subject == f"input {name!r} shape of {echo.name!r}"
        assert error.given == [size]
        assert error.expected == f"between [1] and [{ECHO_MAX}]"


def test_empty_batch_is_rejected(oracle: Model) -> None:
    assert refused(oracle, {"x": np.empty((0, TOKENS), np.float32)}).given == [0, TOKENS]


@pytest.mark.parametrize("size", [1, ECHO_MAX])
def test_request_without_a_batch_dimension_has_one_row(echo: Model, size: int) -> None:
    name = echo_input("FP32")
    feeds = echo.prepare({name: np.arange(size, dtype=np.float32)})
    assert feeds.rows == 1
    assert np.array_equal(echo.runner.infer(feeds.inputs)[echo_output("FP32")], np.arange(size))


@pytest.mark.parametrize("text", [b"1 +", b"\xff", b"", b"5000", b"1+1+1+1+1+1+1+1+1"])
def test_unreadable_text_is_rejected(oracle: Model, text: bytes) -> None:
    array = np.empty((1, 1), np.object_)
    array[0, 0] = text
    with pytest.raises(InvalidRequest):
        oracle.prepare({"expression": array})
