"""Models of texts and of pairs of texts: outputs, tiers, cascade, errors and command line."""

import json

import msgspec
import numpy as np
import pytest
import tritonclient.grpc as triton
from click.testing import CliRunner
from hypothesis import given
from hypothesis import strategies as st
from tritonclient.utils import InferenceServerException

from edge.bundles.bundle import Bundle, write_bundle
from edge.bundles.programs import CascadeProgram
from edge.cli.infer import infer
from edge.errors import GoldenError, UsageError
from edge.launch import running_server
from edge.programs.program import AUTO, TIER, Cascade, Options, margins
from edge.repository.model import Model
from edge.runtimes.build import load_runner
from edge.runtimes.onnxruntime_runner import OnnxRuntimeRunner
from tests.support import text_model
from tests.support.in_process import running_service
from tests.support.models import graph_of, serialized
from tests.support.sample_requests import column, triton_input
from tests.support.text_model import LABELS, TEXTS, TIERS, logits, manifest, model, write_sentiment_bundle
from tests.support.text_pair_model import INPUTS, NAME, PAIRS, scores, write_pair_bundle


@pytest.fixture(scope="module")
def url(tmp_path_factory):
    directory = tmp_path_factory.mktemp("pairs")
    write_pair_bundle(directory / NAME)
    write_sentiment_bundle(directory / "sentiment")
    with running_server([directory / NAME, directory / "sentiment"], cache=directory / "cache") as ready:
        yield f"127.0.0.1:{ready.grpc_port}"


@pytest.fixture(scope="module")
def client(url):
    with triton.InferenceServerClient(url) as client:
        yield client


def text(*texts):
    return triton_input("text", column(*texts))


@pytest.mark.parametrize("tier", [None, *TIERS])
def test_text_gives_logits_and_labels(client, tier):
    long = client.infer("sentiment", [text("good " * 20)], parameters=(parameters := {"tier": tier} if tier else None))
    assert long.as_numpy("logits")[0].tolist() == [0, text_model.MAX_LENGTH]  # the text is cut
    result = client.infer("sentiment", [text(*TEXTS)], parameters=parameters)
    expected = np.stack([logits(t, tier or "full") for t in TEXTS])
    np.testing.assert_array_equal(result.as_numpy("logits"), expected)
    assert result.as_numpy("label")[:, 0].tolist() == [LABELS[row.argmax()].encode() for row in expected]
    assert result.get_response().parameters["tier"].string_param == (tier or "full")


def test_cascade_runs_the_full_tier_where_the_lean_one_is_unsure(client):
    def infer(*texts):
        result = client.infer("sentiment", [text(*texts)], parameters={"tier": "auto"})
        return result.as_numpy("label")[:, 0].tolist(), result.get_response().parameters["tier"].string_param

    with pytest.raises(InferenceServerException, match="one of full, lean, auto"):
        client.infer("sentiment", [text("good")], parameters={"tier": "huge"})
    # The margin of one word is tanh(1/2) = 0.46, below the manifest's 0.5; that of two is tanh(1) = 0.76.
    assert infer("good good") == ([b"positive"], "lean")
    assert infer("good") == ([b"positive"], "full")
    # The lean tier does not know "fine", and would return negative.
    assert infer("fine fine bad") == ([b"positive"], "full")
    assert infer("good good", "fine fine bad", "bad bad") == ([b"positive", b"positive", b"negative"], "lean,full")


def test_cascade_can_be_the_default(tmp_path):
    changed = msgspec.structs.replace(manifest(), program=msgspec.structs.replace(manifest().program, default=True))
    bundle = write_bundle(tmp_path / "b", changed, text_model.files())
    loaded = {(tier, "model"): load_runner(bundle, "onnxruntime", tmp_path / "cache", tier=tier) for tier in TIERS}
    model = Model(bundle, loaded)
    assert (model.selector.policy, model.full_tier) == ("router", "full")
    model.close()


@given(st.lists(st.lists(st.floats(-50, 50, width=32), min_size=3, max_size=3), min_size=1, max_size=5))
def test_margins_are_those_of_the_probabilities(rows):
    logits = np.array(rows, np.float32)
    exponentials = np.exp(logits.astype(np.float64) - logits.max(axis=1, keepdims=True))
    two = np.sort(exponentials / exponentials.sum(axis=1, keepdims=True), axis=1)[:, -2:]
    np.testing.assert_allclose(margins(logits), two[:, 1] - two[:, 0], atol=1e-6)


async def test_tiers_share_one_tokenizer(tmp_path, monkeypatch):
    files = []
    read = Bundle.read
    monkeypatch.setattr(Bundle, "read", lambda bundle, name: files.append(name) or read(bundle, name))
    async with running_service(tmp_path, lambda repository: write_sentiment_bundle(repository / "sentiment")) as it:
        assert all(entry.state == "READY" for entry in it.repository)
    assert sorted(files) == ["full.onnx", "lean.onnx", "tokenizer.json"]


def test_each_tier_has_its_own_golden_set(tmp_path):
    bundle = write_bundle(tmp_path / "b", manifest(), text_model.files() | {"lean.onnx": model("full")})
    load_runner(bundle, "onnxruntime", tmp_path / "cache", tier="full")
    with pytest.raises(GoldenError, match=r"lean\.onnx"):
        load_runner(bundle, "onnxruntime", tmp_path / "cache", tier="lean")


def pairs(*pairs):
    first, second = zip(*pairs, strict=True)
    return [text(*first), triton_input("text_pair", column(*second))]


def tokens(array, *names):
    return [triton_input(name, array) for name in names]


def test_pairs_give_logits_and_scores(client):
    result = client.infer(NAME, pairs(*PAIRS)[::-1])  # tensors may come in any order
    assert [output.name for output in result.get_response().outputs] == ["logits", "score"]
    for output in ("logits", "score"):
        np.testing.assert_array_equal(result.as_numpy(output), scores(PAIRS))
    turned = [(second, first) for first, second in PAIRS]
    np.testing.assert_array_equal(client.infer(NAME, pairs(*turned)).as_numpy("score"), -scores(PAIRS))
    long, cut = ("good " * 20, "good bad"), ("good " * 7, "good bad")  # 12 tokens, 3 of which frame the texts
    np.testing.assert_array_equal(client.infer(NAME, pairs(long)).as_numpy("score"), scores([cut]))


ONES = np.ones((1, 2), np.int64)


def test_bad_requests(client):
    for inputs, message in (
        ([triton_input("text_pair", column("good"))], "inputs of 'better': got only 'text_pair', expected 'text' and "),
        ([text("a", "b"), triton_input("text_pair", column("a", "b", "c"))], "got {'text': 2, 'text_pair': 3}, "),
        (pairs(("good", b"\xff")), r"text in input 'text_pair': got b'\xff', expected UTF-8. Encode it as UTF-8; byte"),
        ([*pairs(("good", "bad")), *tokens(ONES, "token_type_ids")], "'text' stands for 'token_type_ids'."),
        (tokens(ONES, "input_ids", "attention_mask"), "expected 'token_type_ids' (or 'text' and 'text_pair'). Add it."),
        (tokens(np.ones((1, 13), np.int64), *INPUTS), "got [1, 13], expected between [1, 1] and [8, 12]."),
    ):
        with pytest.raises(InferenceServerException) as caught:
            client.infer(NAME, inputs)
        assert message in caught.value.message()


def invoke(url, *arguments):
    return CliRunner().invoke(infer, ["--url", url, *arguments], catch_exceptions=False).stdout


def test_infer_command_sends_pairs(url):
    arguments = (NAME, "good good", "--text-pair", "bad", "bad", "--text-pair", "- good")
    assert json.loads(invoke(url, *arguments, "--json"))["outputs"] == {"logits": [[3], [-2]], "score": [[3], [-2]]}
    lines = invoke(url, *arguments).splitlines()
    for cells in (("text", "text_pair", "logits", "score"), ("good good", "bad", "3"), ("bad", "- good", "-2")):
        assert any(all(cell in line for cell in cells) for line in lines), cells


def test_infer_command_refuses_unpaired_texts(url):
    for arguments, message in (
        ((NAME, "good"), "TEXT for better: got 1 TEXT, 0 --text-pair, expected as many of both. This model reads two"),
        ((NAME, "--text-pair=good"), "got 0 TEXT, 1 --text-pair"),
        (("sentiment", "good", "--text-pair=bad"), "--text-pair for sentiment: got 'bad', expected TEXT alone. Leave"),
    ):
        with pytest.raises(UsageError, match=message):
            invoke(url, *arguments)


def runner_of(operation):
    text = f"tier (float[N, 2] x) => (float[N, 2] logits) {{ logits = {operation}(x) }}"
    return OnnxRuntimeRunner(serialized(graph_of(text)), subject=operation)


def test_a_lean_tier_is_unsure_of_rows_without_numbers():
    runners = {"full": runner_of("Abs"), "lean": runner_of("Log")}
    program = Cascade(CascadeProgram(lean="lean", full="full", logits="logits", margin=0.5), runners)
    # Sure, an infinity that is, one that is not, NaN, and unsure.
    x = np.array([[1, 9], [0, 1], [0, np.inf], [1, -1], [1, 1]], np.float32)
    computed = program.compute({"x": x}, Options(AUTO))
    assert computed.facts[TIER].tolist() == ["lean", "lean", "full", "full", "full"]
    np.testing.assert_array_equal(computed.outputs["logits"][2:], [[0, np.inf], [1, 1], [1, 1]])
    for runner in runners.values():
        runner.close()
