"""``fewheads infer``: texts, tensors, tiers and generated text, and what it rejects."""

import json
import os
import pty
import re
import subprocess
import sys
from contextlib import suppress

import click
import numpy as np
import pytest
from click.testing import CliRunner

from edge.__main__ import cli
from edge.bundles.expression import tokenize
from edge.launch import running_server
from edge.pb import inference_pb2
from tests.support.commands import SECONDS, fewheads, mistake, refusal, shown
from tests.support.letters_model import FAILING, NAME, PROMPT, TEXT, continued
from tests.support.models import ORACLE, graph_of, serialized
from tests.support.sample_requests import column
from tests.support.server_models import WIDTH, write_bundle_of, write_tiered_bundle


def infer(url, *arguments):
    return json.loads(shown("infer", "--url", url, *arguments, "--json"))


def test_texts_are_sent_once(url, stub):
    def requests():
        (of_model,) = stub.ModelStatistics(inference_pb2.ModelStatisticsRequest(name=ORACLE)).model_stats
        return int(of_model.inference_stats.success.count)

    before = requests()
    text = shown("infer", "--url", url, ORACLE, "3 - -4 + 2")
    assert requests() == before + 1
    assert any("3 - -4 + 2" in line and " 9 " in line for line in text.splitlines())
    assert all(stage in text for stage in ("queue", "compute_infer", "transport", "round_trip"))
    found = infer(url, ORACLE, "1 + 1", "-5 - -6", "7")
    assert (found["model"], found["version"], found["outputs"]) == (ORACLE, "1", {"value": [[2], [1], [7]]})
    times = found["times_ms"]
    stages = ("compute_input", "queue", "compute_infer", "compute_output")
    assert all(times[stage] >= 0 for stage in stages)
    assert times["round_trip"] == pytest.approx(sum(times[stage] for stage in stages) + times["transport"])


def write_tagger_bundle(directory):
    """``tagger``: the same labels of five tokens for any text, as classifiers of tokens return them."""
    labels = np.array([b"O", b"B-PER", b"I-PER", b"O", b"O"]).astype(object)
    logits = np.array([[9, 0], [0, 0], [0, 9], [3, 0], [9, 9]], np.float32)
    offsets = np.array([[0, 0], [0, 4], [4, 8], [8, 11], [0, 0]])
    sizes = {"to_label": np.array([5]), "to_pair": np.array([5, 2]), "zero": np.array([0]), "one": np.array([1])}
    graph = graph_of(
        """tagger (string[n, 1] text) => (string[n, 5] labels, float[n, 5, 2] logits, int64[n, 5, 2] offsets) {
            shape = Shape(text)
            n = Slice(shape, zero, one)
            like_labels = Concat<axis = 0>(n, to_label)
            like_pairs = Concat<axis = 0>(n, to_pair)
            labels = Expand(label, like_labels)
            logits = Expand(logit, like_pairs)
            offsets = Expand(offset, like_pairs)
        }""",
        label=labels,
        logit=logits,
        offset=offsets,
        **sizes,
    )
    outputs = {"labels": labels[None], "logits": logits[None], "offsets": offsets[None]}
    return write_bundle_of(directory, "tagger", serialized(graph), {"text": column("x")}, outputs, 8)


def write_encoder_bundle(directory):
    """``encoder``: returns its input as an embedding."""
    graph = graph_of("encoder (float[n, 12] x) => (float[n, 12] embedding) { embedding = Identity(x) }")
    x = np.ones((1, 12), np.float32)
    return write_bundle_of(directory, "encoder", serialized(graph), {"x": x}, {"embedding": x}, 8)


def write_named_boxes_bundle(directory):
    """``named``: boxes, scores and classes, of which the last are texts, unlike those of a detector's bundle."""
    graph = graph_of(
        """named (float[n, 1, 4] x) => (float[n, 1, 4] boxes, float[n, 1] scores, string[n, 1] classes) {
            boxes = Identity(x)
            scores = ReduceMax<axes = [2], keepdims = 0>(x)
            classes = Cast<to = 8>(scores)
        }"""
    )
    x = np.ones((1, 1, 4), np.float32)
    outputs = {"boxes": x, "scores": x[..., 0], "classes": column("1")}
    return write_bundle_of(directory, "named", serialized(graph), {"x": x}, outputs, 8)


def test_words_and_vectors_are_shown(tmp_path):
    bundles = [write(tmp_path).path for write in (write_tagger_bundle, write_encoder_bundle, write_named_boxes_bundle)]
    with running_server(bundles, cache=tmp_path / "cache") as ready:
        url = f"127.0.0.1:{ready.grpc_port}"
        lines = [
            line.split()
            for line in shown("infer", "--url", url, "tagger", "Ange\u00e9las up", "somebody is").splitlines()
        ]
        assert [line[1::2] for line in lines if line[1:2] in (["1"], ["2"])] == [
            ["1", "Ange\u00e9las", "B-PER", "0.5"],
            ["1", "up", "O", "0.9526"],
            ["2", "somebody", "B-PER", "0.5"],
            ["2", "is", "O", "0.9526"],
        ]
        assert infer(url, "tagger", "x")["outputs"]["labels"] == [["O", "B-PER", "I-PER", "O", "O"]]
        assert "--top: got tagger with the outputs" in mistake("infer", "--url", url, "tagger", "x", "--top", "2")
        vectors = [[1.0] * 12, [1.0] * 6 + [0.0] * 6]
        text = shown("infer", "--url", url, "encoder", "--input", f"x={json.dumps(vectors)}")
        assert text.count("1, 1, 1, \u2026 12 values") == 2
        rows = [line.split()[1::2] for line in text[text.index("cosines") :].splitlines()]
        assert ["1", "1", "0.7071"] in rows
        assert ["2", "0.7071", "1"] in rows
        assert "cosines" not in shown("infer", "--url", url, "encoder", "--input", f"x={json.dumps(vectors[:1])}")
        assert "1, 2, 3, 7" in shown("infer", "--url", url, "named", "--input", "x=[[[1, 2, 3, 7]]]")


def test_a_minus_and_a_number_are_text_and_unknown_options_are_not(url):
    texts = ("-5 - -6", "-5+6", "-1--2")
    for words in (texts, ("--json", "--", *texts)):
        found = json.loads(shown("infer", ORACLE, "--url", url, "--json", *words))
        assert found["outputs"] == {"value": [[1]] * 3}
    for text in ("-(1)", "-.5 + h"):  # `-h` in it is not the option
        line = mistake("infer", "--url", url, ORACLE, text, code=7)
        assert f"The server says: expression: got {text!r}, expected an operand at character" in line
    line = mistake("infer", "--url", url, ORACLE, "--", "--policy", code=7)
    assert "expression: got '--policy', expected an operand" in line
    assert "model '--tier' at" in mistake("infer", "--url", url, "--", "--tier", "1", code=7)
    for words, message in (
        (("--polcy", "deadline"), "No such option '?--polcy'?.*--policy"),
        (("--deadline-ms=0",), "0.0 is not in the range x>0"),
        (("-x",), "No such option '?-x"),
    ):
        with pytest.raises(click.UsageError) as caught:
            cli.main(["infer", ORACLE, "1 + 1", *words], standalone_mode=False)
        assert re.search(message, caught.value.format_message())


def test_tier_is_chosen(tmp_path):
    write_tiered_bundle(tmp_path / "tiered")
    np.save(tmp_path / "x.npy", np.ones((1, WIDTH), np.float32))
    with running_server([tmp_path / "tiered"], cache=tmp_path / "cache") as ready:
        question = (f"127.0.0.1:{ready.grpc_port}", "tiered", f"--input=x=@{tmp_path / 'x.npy'}")
        for options, expected in (
            (["--tier", "half"], ("half", "requested")),
            (["--policy", "pinned"], ("full", "pinned")),
            (["--policy", "deadline", "--deadline-ms", "60000"], ("full", "full")),
        ):
            found = infer(*question, *options)
            assert (found["tier"], found["tier_reason"]) == expected
        # No tier computes in a millisecond: the server refuses, or ends the request at its deadline.
        done = fewheads("infer", "--url", *question, "--policy=deadline", "--deadline-ms=1")
        assert refusal(done, done.returncode)
        assert (done.returncode, "RESOURCE_EXHAUSTED" in done.stderr) in ((7, True), (6, False))
        line = mistake("infer", "--url", *question, "--policy", "quickest", code=7)
        assert "got 'quickest', expected one of pinned, deadline, load. Leave it out for pinned." in line


def test_error_shows_what_the_model_takes(url):
    suggestion = "Try: fewheads infer echo-fp32 --input in_fp32=@in_fp32.npy (NumPy: FP32 [-1])"
    for model, words, end in (
        (ORACLE, (), 'got none, expected TEXT or --input. Try: fewheads infer calculator-oracle "some text"'),
        ("echo-fp32", (), f"expected TEXT or --input. {suggestion}"),
        ("echo-fp32", ("1",), f"got 0 text inputs, expected one or two. {suggestion}"),
    ):
        assert mistake("infer", "--url", url, model, *words).endswith(end)


def test_tensors_and_versions(url, tmp_path):
    tokens = tokenize(["1 + 2", "-3"])
    np.save(tmp_path / "x.npy", tokens)
    for tensor in (f"x={json.dumps(tokens.tolist())}", f"x=@{tmp_path / 'x.npy'}"):
        assert infer(url, ORACLE, "--input", tensor)["outputs"] == {"value": [[3], [-3]]}
    found = infer(url, "echo-bytes", "--input", 'in_bytes=["grün", "", "\\u6f22"]')
    assert found["outputs"] == {"out_bytes": ["grün", "", "漢"]}
    assert "grün" in shown("infer", "--url", url, "echo-bytes", "--input", 'in_bytes=["grün"]')
    assert infer(url, "echo-fp32", "--input", "in_fp32=[1, 2.5, NaN]")["outputs"] == {"out_fp32": [1, 2.5, None]}
    assert infer(url, "versioned", "1")["version"] == "3"
    assert infer(url, "versioned", "1", "--version", "1")["version"] == "1"
    assert "NOT_FOUND" in mistake("infer", "--url", url, "versioned", "1", "--version", "2", code=7)


def test_malformed_tensors_are_rejected(url):
    for model, tensors in (
        (ORACLE, ("x=[[1, 2", "x", "y=[1]", 'x={"a": 1}', 'x=["a"]', "x=[[1], [1, 2]]", "x=" + "[" * 100_000)),
        ("echo-uint8", ("in_uint8=[300]", "in_uint8=[-1]")),
        ("echo-int64", (f"in_int64=[{2**70}]", "in_int64=[42.5]", "in_int64=[NaN]", "in_int64=[true, 2]")),
        ("echo-bool", ("in_bool=[1]", "in_bool=[null]")),
        ("echo-fp16", ("in_fp16=[65520]", "in_fp16=[true]")),
        ("echo-bytes", ("in_bytes=[1]", 'in_bytes=[["a"], ["b", "c"]]', 'in_bytes=["\\ud800"]')),
    ):
        for tensor in tensors:
            message = mistake("infer", "--url", url, model, "--input", tensor)
            assert message.startswith("--input")
            assert len(message) < 1000


@pytest.mark.parametrize(
    ("array", "datatype", "reason"),
    [
        (np.array([42.5]), "int64", "an element is no int64"),
        (np.array([2**32]), "int32", "4294967296 is out of its range"),
        (np.array([2**64 - 1], np.uint64), "int64", "18446744073709551615 is out of its range"),
        (np.array([-1]), "uint64", "-1 is out of its range"),
        (np.array([1]), "bool", "an element is no bool"),
        (np.array([1e39]), "fp32", "1e+39 is out of its range"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_array_that_its_type_cannot_hold_is_rejected(url, tmp_path, array, datatype, reason):
    np.savez(tmp_path / "all.npz", **{f"in_{datatype}": array})
    np.save(tmp_path / "one.npy", array)
    for given in (f"@{tmp_path / 'all.npz'}", f"in_{datatype}=@{tmp_path / 'one.npy'}"):
        assert f"({reason})" in mistake("infer", "--url", url, f"echo-{datatype}", "--input", given)


def test_unreadable_files_and_texts_are_rejected(url, tmp_path):
    file = tmp_path / "x.npy"
    arguments = ("infer", "--url", url, ORACLE, "--input", f"x=@{file}")
    assert mistake(*arguments).startswith("--input: got x=@")
    for data in (b"", b"PK\3\4 no archive", b"\x93NUMPY", b"[[1]]"):
        file.write_bytes(data)
        assert mistake(*arguments).startswith("--input: got x=@")
    np.save(file, np.array([{}]), allow_pickle=True)
    assert "allow_pickle" in mistake(*arguments)
    command = [sys.executable, "-m", "edge", "infer", "--url", url, ORACLE, b"1 + \xff"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=SECONDS)
    assert "expected UTF-8" in refusal(done, 7)


#: A prompt after which the text ends.
ENDED = "aya"


def generate(server, *arguments):
    return ["infer", "--url", f"127.0.0.1:{server.grpc_port}", NAME, PROMPT, *arguments]


def test_options_of_generated_text_reach_the_model(writer):
    def answer(*options):
        return json.loads(shown(*generate(writer, *options, "--json")))

    found = answer("--max-tokens", 6)
    assert (found["outputs"], found["stopped"]) == ({"text": [[TEXT]], "generated": [[6]]}, "length")
    found = answer("--stop", "none", "--stop", TEXT[1:3])
    assert (found["outputs"]["text"], found["stopped"]) == ([[TEXT[0]]], "stop")
    greedy, drawn = continued(PROMPT), ("--temperature", 1, "--seed", 5)
    assert answer(*drawn)["outputs"]["text"] == answer(*drawn)["outputs"]["text"] != [[greedy]]
    for option in ("--top-k=1", "--top-p=1e-6"):
        assert answer("--temperature=1", option)["outputs"]["text"] == [[greedy]]
    for options, text, tokens in (
        ((), "", 1),
        (("--ignore-eos",), "", 3),  # ends of a text have no letters
        (("--min-tokens", 2), "aab", 3),
    ):
        outputs = answer(ENDED, "--max-tokens", 3, *options)["outputs"]
        assert (outputs["text"][1], outputs["generated"][1]) == ([text], [tokens])
    lines = shown(*generate(writer, "--max-tokens", 6)).splitlines()
    assert any(all(cell in line for cell in ("prompt", "text", "generated")) for line in lines)


def test_text_is_printed_as_it_comes(writer, slow_writer):
    command = [*map(str, generate(writer, "de", "--stream", "--max-tokens=6"))]
    done = CliRunner().invoke(cli, command, catch_exceptions=False)
    assert done.stdout == f"{TEXT}\n{continued('de', 6)}\n"
    assert [line.partition(";")[0] for line in done.stderr.splitlines()] == ["6 tokens, stopped by its length"] * 2
    # On a terminal nothing has to ask for it.
    terminal, side = pty.openpty()
    command = [sys.executable, "-m", "edge", *map(str, generate(slow_writer, "--max-tokens=6"))]
    with subprocess.Popen(command, stdout=side, stderr=subprocess.DEVNULL):
        os.close(side)
        pieces = []
        with suppress(OSError):  # Linux ends a terminal with an error
            while piece := os.read(terminal, 1024):
                pieces.append(piece)
    os.close(terminal)
    assert len(pieces) > 3
    assert b"".join(pieces).decode().strip() == TEXT


def test_streams_end_with_errors(writer):
    message = mistake(*generate(writer, "--stream", "--max-tokens=500"), code=7)
    assert "parameter 'max_tokens' of 'letters': got 500" in message
    assert "logits that are not finite" in mistake(*generate(writer, FAILING, "--stream"), code=7)
    assert mistake(*generate(writer, "--stream", "--json")).startswith("--stream: expected either --stream or --json")
    message = mistake("infer", "--url", f"127.0.0.1:{writer.grpc_port}", ORACLE, "1 + 1", "--stream")
    assert message.startswith(f"--stream for {ORACLE}: got the outputs value, expected a model with text and generated")
