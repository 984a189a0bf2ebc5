"""Models of two texts: over a real socket, from the command line, and their manifests."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import tritonclient.grpc as triton
from click.testing import CliRunner
from tritonclient.utils import InferenceServerException

from edge.cli.infer import infer
from edge.cli.info import info
from edge.datatypes import Array
from edge.errors import UsageError
from edge.launch import running_server
from tests.support import text_model
from tests.support.sample_requests import column, triton_input
from tests.support.text_pair_model import INPUTS, NAME, PAIRS, scores, write_pair_bundle


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A server with a model for pairs and one for single texts."""
    directory = tmp_path_factory.mktemp("pairs")
    write_pair_bundle(directory / NAME)
    text_model.write_sentiment_bundle(directory / "sentiment")
    with running_server([directory / NAME, directory / "sentiment"], cache=directory / "cache") as ready:
        yield f"127.0.0.1:{ready.grpc_port}"


@pytest.fixture(scope="module")
def client(url: str) -> Iterator[triton.InferenceServerClient]:
    with triton.InferenceServerClient(url) as client:
        yield client


def pairs(*pairs: tuple[str | bytes, str | bytes]) -> list[triton.InferInput]:
    first, second = zip(*pairs, strict=True)
    return [triton_input("text", column(*first)), triton_input("text_pair", column(*second))]


def tokens(**arrays: Array) -> list[triton.InferInput]:
    return [triton_input(name, values) for name, values in arrays.items()]


def test_pairs_give_logits_and_scores(client: triton.InferenceServerClient) -> None:
    result = client.infer(NAME, pairs(*PAIRS))
    assert [output.name for output in result.get_response().outputs] == ["logits", "score"]
    for output in ("logits", "score"):
        np.testing.assert_array_equal(result.as_numpy(output), scores(PAIRS))
    assert result.as_numpy("score").dtype == np.float32


def test_order_of_the_texts_matters(client: triton.InferenceServerClient) -> None:
    turned = [(second, first) for first, second in PAIRS]
    np.testing.assert_array_equal(client.infer(NAME, pairs(*turned)).as_numpy("score"), -scores(PAIRS))
    # The order of the tensors in a request does not.
    np.testing.assert_array_equal(client.infer(NAME, pairs(*PAIRS)[::-1]).as_numpy("score"), scores(PAIRS))


@pytest.mark.parametrize(
    ("first", "second", "kept"),
    [
        # 12 tokens, 3 of which frame the texts.
        ("good " * 20, "good bad", (7, 2)),
        ("good bad", "good " * 20, (2, 7)),
        ("good " * 20, "good " * 19, (5, 4)),
    ],
)
def test_longer_text_is_cut_first(
    client: triton.InferenceServerClient, first: str, second: str, kept: tuple[int, int]
) -> None:
    left = " ".join(first.split()[: kept[0]]), " ".join(second.split()[: kept[1]])
    np.testing.assert_array_equal(client.infer(NAME, pairs((first, second))).as_numpy("score"), scores([left]))


def test_metadata_and_config(client: triton.InferenceServerClient) -> None:
    metadata = client.get_model_metadata(NAME)
    assert [(t.name, t.datatype, list(t.shape)) for t in metadata.inputs] == [
        ("text", "BYTES", [-1, 1]),
        ("text_pair", "BYTES", [-1, 1]),
        *((name, "INT64", [-1, -1]) for name in INPUTS),
    ]
    assert [(t.name, t.datatype, list(t.shape)) for t in metadata.outputs] == [
        ("logits", "FP32", [-1, 1]),
        ("score", "FP32", [-1, 1]),
    ]
    assert all(tensor.optional for tensor in client.get_model_config(NAME).config.input)


ONES = np.ones((1, 2), np.int64)
OUTSIDE = np.ones((1, 13), np.int64)


@pytest.mark.parametrize(
    ("model", "inputs", "message"),
    [
        (
            NAME,
            [triton_input("text", column("good"))],
            "inputs of 'better': got only 'text', expected 'text' and 'text_pair'. "
            "This model reads them together; add 'text_pair'.",
        ),
        (NAME, [triton_input("text_pair", column("good"))], "got only 'text_pair', expected 'text' and 'text_pair'."),
        (
            "sentiment",
            pairs(("good", "bad")),
            "input name: got 'text_pair', expected one of ['attention_mask', 'input_ids', 'text']. ModelMetadata",
        ),
        (
            NAME,
            [triton_input("text", column("good", "bad")), triton_input("text_pair", column("a", "b", "c"))],
            "batch of 'better': got {'text': 2, 'text_pair': 3}, expected the same first dimension everywhere. "
            "Send as many rows each.",
        ),
        (
            NAME,
            pairs(("good", b"\xff")),
            r"text in input 'text_pair': got b'\xff', expected UTF-8. Encode it as UTF-8.",
        ),
        (NAME, pairs((b"\xff", "good")), "text in input 'text': got"),
        (
            NAME,
            pairs(("good", "x" * 201)),
            "text in input 'text_pair': got 201 bytes, expected at most 200. Shorten the text.",
        ),
        (NAME, pairs(*[("good", "bad")] * 9), "got 9 rows, expected at most 8"),
        (
            NAME,
            [*pairs(("good", "bad")), *tokens(token_type_ids=ONES)],
            "got 'text' and 'token_type_ids', expected one of them. 'text' stands for 'token_type_ids'.",
        ),
        (
            NAME,
            tokens(input_ids=ONES, attention_mask=ONES),
            "expected 'token_type_ids' (or 'text' and 'text_pair'). Add it.",
        ),
        (
            NAME,
            tokens(input_ids=OUTSIDE, attention_mask=OUTSIDE, token_type_ids=OUTSIDE),
            "got [1, 13], expected between [1, 1] and [8, 12].",
        ),
    ],
)
def test_bad_requests(
    client: triton.InferenceServerClient, model: str, inputs: list[triton.InferInput], message: str
) -> None:
    with pytest.raises(InferenceServerException) as caught:
        client.infer(model, inputs)
    assert message in caught.value.message()
    assert caught.value.status() == "StatusCode.INVALID_ARGUMENT"


# From the command line


def invoke(*arguments: object) -> str:
    command = infer if arguments[0] == "infer" else info
    result = CliRunner().invoke(command, [str(argument) for argument in arguments[1:]], catch_exceptions=False)
    assert result.exit_code == 0, result.stderr
    return result.stdout


def test_infer_command_sends_pairs(url: str) -> None:
    arguments = ("infer", "--url", url, NAME, "good good", "--text-pair", "bad", "bad", "--text-pair", "- good")
    shown = json.loads(invoke(*arguments, "--json"))
    assert shown["outputs"] == {"logits": [[3], [-2]], "score": [[3], [-2]]}
    text = invoke(*arguments)
    for cells in (("text", "text_pair", "logits", "score"), ("good good", "bad", "3"), ("bad", "- good", "-2")):
        assert any(all(cell in line for cell in cells) for line in text.splitlines()), cells


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((NAME, "good"), "TEXT for better: got 1 TEXT, 0 --text-pair, expected as many of both. This model reads two"),
        ((NAME, "--text-pair=good"), "got 0 TEXT, 1 --text-pair"),
        ((NAME, "good", "bad", "--text-pair=good"), "got 2 TEXT, 1 --text-pair"),
        (
            ("sentiment", "good", "--text-pair=bad"),
            "--text-pair for sentiment: got 'bad', expected TEXT alone. Leave --text-pair out",
        ),
        (("sentiment", "--text-pair=bad"), "--text-pair for sentiment: got 'bad'"),
    ],
)
def test_infer_command_refuses_unpaired_texts(url: str, arguments: tuple[str, ...], message: str) -> None:
    with pytest.raises(UsageError) as caught:
        invoke("infer", "--url", url, *arguments)
    assert message in str(caught.value)


def test_info_shows_inputs_and_outputs(tmp_path: Path) -> None:
    lines = invoke("info", write_pair_bundle(tmp_path / NAME).path).splitlines()
    for cells in (
        ("text for inputs", "text_pair", "BYTES", "[-1, 1]"),
        ("input", "token_type_ids", "INT64", "[-1, -1]"),
        ("made of outputs", "score", "FP32", "[-1, 1]"),
    ):
        assert any(all(cell in line for cell in cells) for line in lines), cells
