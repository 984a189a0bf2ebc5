"""Answers to questions: the likeliest spans, windows of long contexts, what clients get, and what is refused."""

import json

import msgspec
import numpy as np
import pytest
import tritonclient.grpc as triton
from hypothesis import example, given
from hypothesis import strategies as st
from tritonclient.utils import InferenceServerException

from edge.bundles.bundle import Bundle
from edge.bundles.preprocess import TokenizerPreprocessor
from edge.bundles.rules import check
from edge.bundles.spans import Context, Window, extract, likeliest
from edge.client import Client
from edge.errors import BundleError
from edge.launch import running_server
from tests.support.commands import mistake, shown
from tests.support.http_requests import ask, tensor
from tests.support.sample_requests import column, triton_input
from tests.support.span_model import (
    INPUTS,
    LOGITS,
    MAX_BATCH_SIZE,
    MAX_LENGTH,
    NAME,
    logits,
    manifest,
    rows_of,
    searched,
    spans,
    step,
    tokenizer,
    write_finder_bundle,
)

NONE = "none-finder"
TEXTS, ANSWERS = ("question", "context"), ("answer", "score", "start", "end")
LONG = "A first sentence, then the naïve cafe\u0301 at the corner 🙂👍🏽 which is open."
HOSTILE = (
    ("", ""),
    ("", "an answer without a question"),
    ("a question without a context", ""),
    ("blank", " \n\t "),
    ("who" * 50, LONG),
    ("nul\0", "\0 before \0 and behind\0"),
    ("emoji", "👩‍👩‍👧‍👦🙂e\u0301"),
)
texts = st.text(alphabet="ab é\u0301🙂\n\0.", max_size=60)


@pytest.fixture(scope="module")
def read():
    return TokenizerPreprocessor(step(), tokenizer().to_str().encode(), "tokenizer.json")


@pytest.fixture(scope="module")
def served(tmp_path_factory):
    directory = tmp_path_factory.mktemp("finders")
    write_finder_bundle(directory / NAME)
    write_finder_bundle(directory / NONE, name=NONE, postprocess=spans(no_answer=True))
    arguments = ["--http-port=0"]
    with running_server([directory / NAME, directory / NONE], cache=directory / "cache", arguments=arguments) as ready:
        yield ready


@pytest.fixture(scope="module")
def client(served):
    with triton.InferenceServerClient(f"127.0.0.1:{served.grpc_port}") as client:
        yield client


def pairs(*rows):
    return [triton_input(name, column(*(row[place] for row in rows))) for place, name in enumerate(TEXTS)]


def agree(got, question, context, n_best, *, no_answer=False, tolerance=1e-9):
    """Check the answers to a question, which are the best ones of a search of all."""
    every = searched(question, context, no_answer=no_answer)
    assert len(got) == len({(begin, end) for begin, end, _ in got})
    best = sorted(every.values(), reverse=True)[:n_best]
    np.testing.assert_allclose([score for *_, score in got], best, atol=tolerance)
    for begin, end, score in got:
        assert every[begin, end] == pytest.approx(score, abs=tolerance)


@example("who" * 9, LONG, 40, True)
@example("", "", 3, False)
@example("", "\n " * 25 + "é\n" + " " * 8, 7, False)
@given(texts, texts, st.integers(1, 40), st.booleans())
def test_the_likeliest_spans_are_those_of_a_search_of_all(read, question, context, n_best, no_answer):
    ((rows, found),) = read.windows(column(question), column(context))
    wanted, offsets, *_ = rows_of(question, context)
    assert [row.ids.tolist() for row in rows] == wanted
    assert found.offsets.tolist() == [list(pair) for pair in offsets]
    start, end = zip(*(logits(row.ids) for row in rows), strict=True)
    got = likeliest(spans(no_answer=no_answer), start, end, found, n_best)
    agree(got, question, context, n_best, no_answer=no_answer)


def test_windows_are_those_of_the_library(read):
    question, context = "who", LONG
    ((rows, _),) = read.windows(column(question), column(context))
    library = tokenizer()
    library.enable_truncation(MAX_LENGTH, stride=3, strategy="only_second")
    first = library.encode(question, context)
    want = [first, *first.overflowing]
    assert len(want) > 3
    assert [row.ids.tolist() for row in rows] == [one.ids for one in want]
    assert [row.segments.tolist() for row in rows] == [one.type_ids for one in want]
    assert [row.offsets.tolist() for row in rows] == [[list(pair) for pair in one.offsets] for one in want]


def test_scores_of_one_window_are_those_of_the_pipeline_of_transformers_4():
    """The product of two softmaxes over the summary and the context; see QuestionAnsweringPipeline.decode_spans."""
    start, end = np.array([[1.0, 9, 2, 3, 9]]), np.array([[0.5, 9, 1, 4, 9]])
    context = Context("ab", np.array([[0, 1], [1, 2]]), (Window(0, 2, 2),))
    exact = [np.exp(row[0, [0, 2, 3]]) / np.exp(row[0, [0, 2, 3]]).sum() for row in (start, end)]
    wanted = [("b", exact[0][2] * exact[1][2]), ("ab", exact[0][1] * exact[1][2]), ("a", exact[0][1] * exact[1][1])]
    got = extract(spans(), start, end, [context], 9)
    assert got["answer"][0].tolist() == [text.encode() for text, _ in wanted]
    np.testing.assert_allclose(got["score"][0], [score for _, score in wanted], rtol=1e-6)
    # Equal sums: what begins first, then what is shorter, and an answer before none.
    level = likeliest(spans(no_answer=True), np.zeros((1, 5)), np.zeros((1, 5)), context, 9)
    assert [one[:2] for one in level] == [(0, 1), (0, 2), (1, 2), (0, 0)]


def test_clients_get_answers_over_grpc_and_http(client, served):
    rows = [("who", LONG), ("", ""), ("what is", "short")]
    for name, no_answer in ((NAME, False), (NONE, True)):
        outputs = client.infer(name, pairs(*rows), parameters={"n_best": 30})
        answer = {key: outputs.as_numpy(key) for key in ANSWERS}
        assert {output.name for output in outputs.get_response().outputs} == set(ANSWERS)
        _check_rows(answer, rows, 30, no_answer=no_answer)
        inputs = [tensor(key, "BYTES", [3, 1], [row[place] for row in rows]) for place, key in enumerate(TEXTS)]
        heard = ask(f"127.0.0.1:{served.http_port}", f"/v2/models/{name}/infer", {"inputs": inputs}).json["outputs"]
        best = {output["name"]: output["data"] for output in heard}
        assert [output["shape"] for output in heard] == [[3, 1]] * 4
        assert best["answer"] == [text.decode() for text in answer["answer"][:, 0]]
        assert (best["start"], best["end"]) == (answer["start"][:, 0].tolist(), answer["end"][:, 0].tolist())
    assert answer["answer"][1].tolist() == [b""] * answer["answer"].shape[1]
    assert answer["score"][1, 0] == 1


def test_the_windows_of_a_request_that_a_thread_reads(client):
    rows = [("who" * 66, "a small cat")] * 19 + [("who" * 66, "the cat sat on the mat and saw a dog")]
    assert sum(len(text) for row in rows for text in row) > 4096
    (before,) = client.get_inference_statistics(NAME).model_stats
    outputs = client.infer(NAME, pairs(*rows))
    _check_rows({key: outputs.as_numpy(key) for key in ANSWERS}, rows, 1, no_answer=False)
    (after,) = client.get_inference_statistics(NAME).model_stats
    assert after.inference_count - before.inference_count == 19 + 4


@pytest.mark.parametrize(("question", "context"), HOSTILE)
def test_hostile_texts_are_answered(client, question, context):
    outputs = client.infer(NONE, pairs((question, context)), parameters={"n_best": 100})
    _check_rows({key: outputs.as_numpy(key) for key in ANSWERS}, [(question, context)], 100, no_answer=True)


def _check_rows(answer, rows, n_best, *, no_answer):
    for row, (question, context) in enumerate(rows):
        every = zip(*(answer[key][row] for key in ANSWERS), strict=True)
        got = [(begin, end, score) for text, score, begin, end in every if text or score]
        for text, begin, end in zip(*(answer[key][row] for key in ("answer", "start", "end")), strict=True):
            assert text.decode() == context[begin:end]
        agree(got, question, context, n_best, no_answer=no_answer, tolerance=1e-5)


def test_logits_on_request_and_for_token_ids(client):
    logits_only = client.infer(NAME, pairs(("who", "a cat")), outputs=[triton.InferRequestedOutput(LOGITS[0])])
    ((ids,), *_) = rows_of("who", "a cat")
    np.testing.assert_allclose(logits_only.as_numpy(LOGITS[0])[0], logits(ids)[0], atol=1e-4)
    arrays = (np.array([ids]), np.ones((1, len(ids)), np.int64), np.zeros((1, len(ids), 2), np.int64))
    sent = [triton_input(name, array) for name, array in zip(INPUTS, arrays, strict=True)]
    outputs = client.infer(NAME, sent).get_response().outputs
    assert {output.name for output in outputs} == {*LOGITS, "offsets"}
    for inputs, names, parameters, message in (
        (pairs(("who", LONG)), [*LOGITS], {}, "windows of tokens, expected 1, one for each row, beside the logits"),
        (sent, ["answer"], {}, "output 'answer' of 'finder': got token ids, expected 'question' and 'context'"),
        (sent, [], {"n_best": 2}, "parameter 'n_best' of 'finder': got 2, expected none"),
        (pairs(("who", "a cat")), [], {"n_best": 0}, "parameter 'n_best': got 0, expected 1 to 100"),
        (pairs(*[("who", LONG)] * MAX_BATCH_SIZE), [], {}, "input 'context' of 'finder': got more than 24 windows"),
        (pairs(("who", "a" * 201)), [], {}, "text in input 'context': got 201 bytes, expected at most 200"),
        (pairs(("who", b"\xff")), [], {}, "expected UTF-8"),
        (pairs(("~", "a cat")), [], {}, "output 'answer' of 'finder': got a NaN or an infinity in 'start_logits'"),
        (pairs(("who", "a cat"))[:1], [], {}, "expected 'question' and 'context'"),
    ):
        wanted = [triton.InferRequestedOutput(name) for name in names]
        with pytest.raises(InferenceServerException, match=message):
            client.infer(NAME, inputs, outputs=wanted, parameters=parameters)
    ranked = [triton.InferRequestedOutput(LOGITS[0], class_count=2), triton.InferRequestedOutput("answer")]
    assert client.infer(NAME, pairs(("who", "a cat")), outputs=ranked).as_numpy("answer").shape == (1, 1)
    with pytest.raises(InferenceServerException, match="classes of output 'score' of 'finder': got 2, expected none"):
        client.infer(NAME, pairs(("who", "a cat")), outputs=[triton.InferRequestedOutput("score", class_count=2)])


def test_the_command_line_shows_answers(served):
    url, context = f"127.0.0.1:{served.grpc_port}", "on the mat 🙂"
    asked = ("infer", "--url", url, NAME, "who", "--text-pair", context)
    got = json.loads(shown(*asked, "--top", 3, "--json"))["outputs"]
    agree(list(zip(got["start"][0], got["end"][0], got["score"][0], strict=True)), "who", context, 3, tolerance=1e-5)
    table = shown(*asked, "--top", 3)
    assert all(f" {text} " in table for text in got["answer"][0])
    with Client([url]) as client:
        inputs = {"question": column("who"), "context": column(context)}
        assert client.infer(NAME, inputs, n_best=2).outputs["answer"].shape == (1, 2)
    assert "--text-pair once for each TEXT" in mistake(*asked, "another")


def test_a_manifest_that_breaks_the_rules_of_spans(tmp_path):
    whole = write_finder_bundle(tmp_path / NAME).manifest
    for fields, message in (
        ({"preprocess": step(windows=None)}, "preprocess: got another step, expected a tokenizer with windows"),
        ({"postprocess": None}, "preprocess: got another step, expected a tokenizer with windows"),
        ({"postprocess": spans(end_logits="offsets")}, r"logits: got 'offsets', expected an FP32 output of .*a token"),
        ({"postprocess": spans(start="score")}, "postprocess output"),
        ({"postprocess": spans(score="offsets")}, "postprocess output: got 'offsets', expected a name that no tensor"),
    ):
        with pytest.raises(BundleError, match=message):
            check(msgspec.structs.replace(whole, **fields), "manifest.json")
    small = step(max_length=step().windows.question_tokens + step().windows.stride + 2)
    with pytest.raises(BundleError, match="max_length: got 10, expected more tokens than the 11 of the question"):
        TokenizerPreprocessor(small, tokenizer().to_str().encode(), "tokenizer.json")
    assert Bundle.open(tmp_path / NAME).manifest.postprocess == manifest().postprocess
