"""``fewheads infer``: texts, tensors and tiers, and what it rejects."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import click
import grpc
import numpy as np
import pytest

from edge.__main__ import cli
from edge.bundles.expression import tokenize
from edge.launch import running_server
from edge.pb import inference_pb2, inference_pb2_grpc
from tests.support.commands import SECONDS, fewheads, mistake, refusal, shown
from tests.support.models import ORACLE
from tests.support.tiered_model import WIDTH, write_tiered_bundle


def infer(url: str, *arguments: object) -> Any:
    return json.loads(shown("infer", "--url", url, *arguments, "--json"))


def test_infer_texts(url: str) -> None:
    text = shown("infer", "--url", url, ORACLE, "3 - -4 + 2")
    assert any("3 - -4 + 2" in line and " 9 " in line for line in text.splitlines())
    assert all(stage in text for stage in ("queue", "compute_infer", "transport", "round_trip"))
    found = infer(url, ORACLE, "1 + 1", "-5 - -6", "7")
    assert (found["model"], found["version"]) == (ORACLE, "1")
    assert found["outputs"] == {"value": [[2], [1], [7]]}
    times = found["times_ms"]
    stages = ("compute_input", "queue", "compute_infer", "compute_output")
    assert all(times[stage] >= 0 for stage in stages)
    assert times["round_trip"] == pytest.approx(sum(times[stage] for stage in stages) + times["transport"])


def test_infer_takes_a_minus_and_a_number_as_text(url: str) -> None:
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


def test_infer_rejects_wrong_options() -> None:
    for words, message in (
        (["--polcy", "deadline"], "No such option '?--polcy'?.*--policy"),
        (["--deadline-ms=0"], "0.0 is not in the range x>0"),
        (["-x"], "No such option '?-x"),
    ):
        with pytest.raises(click.UsageError) as caught:
            cli.main(["infer", ORACLE, "1 + 1", *words], standalone_mode=False)
        assert re.search(message, caught.value.format_message())


def test_infer_chooses_a_tier(tmp_path: Path) -> None:
    write_tiered_bundle(tmp_path / "tiered")
    np.save(tmp_path / "x.npy", np.ones((1, WIDTH), np.float32))
    with running_server([tmp_path / "tiered"], cache=tmp_path / "cache") as ready:
        with grpc.insecure_channel(f"127.0.0.1:{ready.grpc_port}") as channel:
            stub = inference_pb2_grpc.GRPCInferenceServiceStub(channel)
            (group,) = stub.ModelConfig(inference_pb2.ModelConfigRequest(name="tiered")).config.instance_group
            assert group.count == len(os.sched_getaffinity(0))
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


def test_infer_suggests_what_the_model_takes(url: str) -> None:
    message = mistake("infer", "--url", url, ORACLE)
    assert message.endswith('got none, expected TEXT or --input. Try: fewheads infer calculator-oracle "3 - -4 + 2"')
    for words, expected in (([], "expected TEXT or --input"), (["1"], "got 0 text inputs, expected one or two")):
        message = mistake("infer", "--url", url, "echo-fp32", *words)
        suggestion = "Try: fewheads infer echo-fp32 --input in_fp32=@in_fp32.npy (NumPy: FP32 [-1])"
        assert message.endswith(f"{expected}. {suggestion}")


def test_infer_tensors_and_versions(url: str, tmp_path: Path) -> None:
    tokens = tokenize(["1 + 2", "-3"])
    np.save(tmp_path / "x.npy", tokens)
    want = {"value": [[3], [-3]]}
    assert infer(url, ORACLE, "--input", f"x={json.dumps(tokens.tolist())}")["outputs"] == want
    assert infer(url, ORACLE, f"--input=x=@{tmp_path / 'x.npy'}")["outputs"] == want
    found = infer(url, "echo-bytes", "--input", 'in_bytes=["grün", "", "\\u6f22"]')
    assert found["outputs"] == {"out_bytes": ["grün", "", "漢"]}
    assert "grün" in shown("infer", "--url", url, "echo-bytes", "--input", 'in_bytes=["grün"]')
    assert infer(url, "versioned", "1")["version"] == "3"
    assert infer(url, "versioned", "1", "--version", "1")["version"] == "1"
    assert "NOT_FOUND" in mistake("infer", "--url", url, "versioned", "1", "--version", "2", code=7)


def test_infer_rejects_malformed_tensors_files_and_texts(url: str, tmp_path: Path) -> None:
    for model, tensors in (
        (ORACLE, ("x=[[1, 2", "x", "y=[1]", 'x={"a": 1}', 'x=["a"]', "x=[[1], [1, 2]]", "x=" + "[" * 100_000)),
        ("echo-uint8", ("in_uint8=[300]",)),
        ("echo-int64", (f"in_int64=[{2**70}]",)),
        ("echo-bytes", ("in_bytes=[1]", 'in_bytes=[["a"], ["b", "c"]]', 'in_bytes=["\\ud800"]')),
    ):
        for tensor in tensors:
            message = mistake("infer", "--url", url, model, "--input", tensor)
            assert message.startswith("--input")
            assert len(message) < 1000
    file = tmp_path / "x.npy"
    arguments = ("infer", "--url", url, ORACLE, "--input", f"x=@{file}")
    assert mistake(*arguments).startswith("--input x: got @")
    for data in (b"", b"PK\3\4 no archive", b"\x93NUMPY", b"[[1]]"):
        file.write_bytes(data)
        assert mistake(*arguments).startswith("--input x: got @")
    np.save(file, np.array([{}]), allow_pickle=True)
    assert "allow_pickle" in mistake(*arguments)
    command = [sys.executable, "-m", "edge", "infer", "--url", url, ORACLE, b"1 + \xff"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=SECONDS)
    assert "expected UTF-8" in refusal(done, 7)
