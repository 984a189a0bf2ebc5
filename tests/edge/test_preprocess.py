"""Text to the inputs of a graph, logits to labels and scores, and the validation of requests by a loaded model."""

import re
from typing import get_args

import msgspec
import numpy as np
import pytest
from tokenizers import Tokenizer

from edge.bundles import text
from edge.bundles.bundle import Bundle, write_bundle
from edge.bundles.expression import TOKENS, tokenize
from edge.bundles.golden import Golden
from edge.bundles.preprocess import STEPS, TokenizerPreprocessor, postprocessors, preprocessor
from edge.bundles.steps import ExpressionPreprocess, Preprocess
from edge.datatypes import TensorSpec
from edge.errors import BundleError, InvalidRequest
from edge.repository.model import Model
from edge.runtimes.build import load_runner
from tests.support import text_model, text_pair_model
from tests.support.jobs import prepared
from tests.support.models import EXPRESSIONS, MAX_BATCH_SIZE, ORACLE_BUNDLE
from tests.support.sample_requests import column
from tests.support.sample_requests import column as texts
from tests.support.server_models import ECHO_MAX, echo_input, write_echo_bundle

STEP = STEPS[ExpressionPreprocess](
    ExpressionPreprocess(input="text", output="tokens", max_abs_operand=1024.0), Bundle.open(ORACLE_BUNDLE)
)


def test_every_step_of_the_manifest_has_an_implementation():
    assert set(STEPS) == set(get_args(Preprocess)), "add the step to STEPS in edge/bundles/preprocess.py"


def test_bundle_gives_the_step_that_its_manifest_describes():
    bundle = Bundle.open(ORACLE_BUNDLE)
    step = preprocessor(bundle)
    assert (step.inputs, step.graph_inputs) == ((TensorSpec("expression", "BYTES", (-1, 1)),), ("x",))
    made = step(bundle.golden.raw["expression"])["x"]
    assert np.array_equal(made, bundle.golden.inputs["x"])
    assert made.dtype == np.float32
    plain = msgspec.structs.replace(bundle.manifest, preprocess=None)
    assert preprocessor(Bundle(bundle.path, plain, bundle.goldens)) is None


def test_bad_expression_is_rejected_in_any_row():
    for bad, message in (
        (b"1 + \xff", r"text in input 'text'{element}: got b'1 + \xff', expected UTF-8. Encode it as UTF-8; byte 5 "),
        (b"1,5", "expression{row}: got '1,5', expected + or - at character 2. Write operands joined by + or -"),
        (b"1025", "expression{row}: got '1025', expected operands between -1024 and 1024. Replace 1025 at char"),
    ):
        for rows, row in (([bad], 0), ([bad, "2", "3"], 1), (["1", "2", bad], 3)):
            with pytest.raises(InvalidRequest) as caught:
                STEP(column(*rows))
            place = {"row": f" in row {row}", "element": f" element {row}"} if row else {"row": "", "element": ""}
            assert str(caught.value).startswith(message.format(**place))


def test_text_keeps_its_shape():
    texts = np.array([["a", "é", ""], ["b", "\u202e", "long"]], np.object_)
    elements = text.encode(texts)
    assert elements.tolist() == [[each.encode() for each in row] for row in texts]
    assert text.decode(elements, "x").tolist() == texts.tolist()


def tokenizer(config, definition):
    return TokenizerPreprocessor(config, definition, "tokenizer")


def test_tokenizer_pads_and_cuts_as_the_manifest_says_and_not_as_its_file():
    definition = Tokenizer.from_str(text_model.tokenizer_json().decode())
    definition.enable_padding(length=50)
    definition.enable_truncation(1)
    config = text_model.manifest().preprocess
    made = tokenizer(config, definition.to_str().encode())(column("good bad", "fine", "good " * 20))
    assert made["input_ids"][:, :3].tolist() == [[2, 3, 0], [4, 0, 0], [2, 2, 2]]
    assert made["attention_mask"].sum(axis=1).tolist() == [2, 1, text_model.MAX_LENGTH]
    assert {array.dtype for array in made.values()} == {np.dtype(np.int64)}


def test_length_of_text_in_bytes_is_limited():
    step = tokenizer(text_model.manifest().preprocess, text_model.tokenizer_json())
    assert step(column("x" * 200))
    with pytest.raises(InvalidRequest, match="text in input 'text': got 201 bytes, expected at most 200"):
        step(column("x", "é" * 99 + "xyz"))


def test_long_texts_have_the_tokens_of_short_ones():
    rows = ["good bad fine", "poor " * 30, "é good", "bad"]
    step = tokenizer(text_model.manifest().preprocess, text_model.tokenizer_json())
    short, long = step(column(*rows)), step(column(*rows * 40))
    assert (step.slow(200), step.slow(200 * 40)) == (False, True)
    for name, array in short.items():
        np.testing.assert_array_equal(long[name], np.tile(array, (40, 1)))
    pairs = of_pairs(max_text_bytes=10_000)
    short, long = (
        pairs(column("good bad"), column("bad")),
        pairs(column("good bad", "good"), column("bad", "bad " * 2000)),
    )
    for name, array in short.items():
        np.testing.assert_array_equal(long[name][0, : array.shape[1]], array[0])


def test_client_that_left_ends_the_reading_of_its_texts():
    rows = [1, 2, 3]
    step = tokenizer(text_model.manifest().preprocess, text_model.tokenizer_json())
    with pytest.raises(IndexError):
        step(column(*["good"] * 5), go_on=rows.pop)
    assert rows == []


def of_pairs(**changed):
    config = msgspec.structs.replace(text_pair_model.manifest().preprocess, **changed)
    return tokenizer(config, text_pair_model.tokenizer_json())


def test_pair_has_room_for_text_beside_the_special_tokens():
    assert of_pairs(max_length=4)(column("good " * 5), column("bad " * 5))["input_ids"].shape == (1, 4)
    with pytest.raises(BundleError, match="max_length: got 3, expected more tokens than the 3 that the tokenizer"):
        of_pairs(max_length=3)


def test_segments_are_optional():
    made = {name: array.tolist() for name, array in of_pairs()(column("good"), column("bad")).items()}
    both = {"input_ids": [[2, 4, 3, 5, 3]], "attention_mask": [[1, 1, 1, 1, 1]]}
    assert made == {**both, "token_type_ids": [[0, 0, 0, 1, 1]]}
    assert list(of_pairs(segments=None)(column("good"), column("bad"))) == list(both)


def test_broken_tokenizer_is_rejected(tmp_path):
    files = {**text_pair_model.files(), "tokenizer.json": b"{}"}
    bundle = write_bundle(tmp_path / "b", text_pair_model.manifest(), files)
    message = f"file {tmp_path}/b/tokenizer.json: got "
    with pytest.raises(BundleError, match=rf"{re.escape(message)}.*, expected a tokenizer\.json of Hugging Face's"):
        preprocessor(bundle)


def test_labels_probabilities_and_scores_are_made_from_logits():
    logits = np.array([[0, 1], [3, 2], [5, 5], [1000, 0]], np.float32)
    label, probabilities = postprocessors(text_model.manifest())
    assert (label.output, label.reads) == (TensorSpec("label", "BYTES", (-1, 1)), "logits")
    assert label.compute(logits).tolist() == [[b"positive"], [b"negative"], [b"negative"], [b"negative"]]
    assert (probabilities.output, probabilities.reads) == (TensorSpec("probabilities", "FP32", (-1, 2)), "logits")
    e = np.exp(1)
    expected = [[1 / (1 + e), e / (1 + e)], [e / (1 + e), 1 / (1 + e)], [0.5, 0.5], [1, 0]]
    np.testing.assert_allclose(probabilities.compute(logits), expected, rtol=1e-6)
    assert np.isnan(probabilities.compute(np.array([[np.inf, 0], [np.nan, 0]], np.float32))[:, 0]).all()
    (score,) = postprocessors(text_pair_model.manifest())
    assert (score.output, score.reads) == (TensorSpec("score", "FP32", (-1, 1)), "logits")
    assert score.compute(logits[:, :1]).tolist() == [[0], [3], [5], [1000]]
    assert postprocessors(msgspec.structs.replace(text_model.manifest(), postprocess=None)) == ()


def test_probabilities_of_the_graph_itself_are_kept():
    good = text_model.manifest()
    own = (*good.outputs, TensorSpec("probabilities", "FP32", (-1, 2)))
    (label,) = postprocessors(msgspec.structs.replace(good, outputs=own))
    assert label.output.name == "label"


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
    for name, arrays, message in (
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
        with pytest.raises(InvalidRequest, match=re.escape(message)):
            prepared(models[name], arrays)


def test_golden_text_must_give_the_golden_inputs(tmp_path):
    good, files = text_pair_model.golden(), text_pair_model.files()
    both = "bundle .* golden raw 'text', 'text_pair': got"
    for number, (changed, message) in enumerate(
        [
            (lambda array: array[::-1], f"{both} other values, expected exactly"),
            (lambda array: np.char.multiply(array, 99), f"{both} text in input 'text'"),
            (lambda array: np.ones((len(array), 1)), f"{both} float64 .*, expected bytes"),
            (lambda array: array[:, [0, 0]], rf"{both} .S\d+ .*2\], expected bytes"),
        ]
    ):
        raw = {name: changed(array) for name, array in good.raw.items()}
        encoded = Golden(good.inputs, good.outputs, raw).encode()
        bundle = write_bundle(tmp_path / str(number), text_pair_model.manifest(), {**files, "golden.npz": encoded})
        with pytest.raises(BundleError, match=message):
            preprocessor(bundle)
    encoded = Golden(good.inputs, good.outputs, {"text": good.raw["text"]}).encode()
    with pytest.raises(BundleError, match=r"raw: got \['text'\], expected \['text', 'text_pair'\]"):
        write_bundle(tmp_path / "missing", text_pair_model.manifest(), {**files, "golden.npz": encoded})
