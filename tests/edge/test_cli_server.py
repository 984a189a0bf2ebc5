"""Commands that ask a server, as a user sees them: real processes, their output and their exit codes."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest

from edge.bundles.expression import tokenize
from edge.launch import running_server
from edge.pb import inference_pb2, inference_pb2_grpc
from tests.support.commands import SECONDS, answer, fewheads, refusal
from tests.support.models import ORACLE, ORACLE_BUNDLE
from tests.support.tiered_model import WIDTH, write_tiered_bundle

# info


def test_info_of_a_server(url: str) -> None:
    shown = json.loads(answer(fewheads("info", "--url", url, "--json")))
    states = {model["name"]: model["state"] for model in shown["models"]}
    assert states[ORACLE] == "READY"
    assert states["broken"] == "UNAVAILABLE"
    assert 0 < shown["memory_bytes"]["process_rss"] < shown["memory_bytes"]["system_total"]
    text = answer(fewheads("info", "--url", url))
    assert any("broken" in line and "UNAVAILABLE" in line for line in text.splitlines())


def test_as_many_runs_at_once_as_there_are_cores(tmp_path: Path) -> None:
    with (
        running_server([ORACLE_BUNDLE], cache=tmp_path) as ready,
        grpc.insecure_channel(f"127.0.0.1:{ready.grpc_port}") as channel,
    ):
        stub = inference_pb2_grpc.GRPCInferenceServiceStub(channel)
        config = stub.ModelConfig(inference_pb2.ModelConfigRequest(name=ORACLE)).config
    assert [group.count for group in config.instance_group] == [len(os.sched_getaffinity(0))]


# infer


def inferred(url: str, *arguments: object) -> Any:
    return json.loads(answer(fewheads("infer", "--url", url, *arguments, "--json")))


def test_infer_text(url: str) -> None:
    text = answer(fewheads("infer", "--url", url, ORACLE, "3 - -4 + 2"))
    assert any("3 - -4 + 2" in line and " 9 " in line for line in text.splitlines())
    assert all(stage in text for stage in ("queue", "compute_infer", "transport", "round_trip"))


def test_infer_several_texts(url: str) -> None:
    shown = inferred(url, ORACLE, "1 + 1", "-5 - -6", "7")
    assert (shown["model"], shown["version"]) == (ORACLE, "1")
    assert shown["outputs"] == {"value": [[2], [1], [7]]}
    times = shown["times_ms"]
    stages = ("compute_input", "queue", "compute_infer", "compute_output")
    assert all(times[stage] >= 0 for stage in stages)
    assert times["round_trip"] == pytest.approx(sum(times[stage] for stage in stages) + times["transport"])


def test_infer_text_that_begins_with_a_minus(url: str) -> None:
    texts = ("-5 - -6", "-5+6", "-1--2", "- 1", "-1")
    for words in ([*texts[:3]], ["--json", "--", *texts[:3]]):
        done = fewheads("infer", ORACLE, "--url", url, "--json", *words)
        assert json.loads(answer(done))["outputs"] == {"value": [[1]] * 3}
    for text in ("- -1", "-(1)", "-.5 + h"):  # `-h` in it is not the option
        told = refusal(fewheads("infer", "--url", url, ORACLE, text), 7)
        assert f"The server says: expression: got {text!r}, expected an operand at character" in told


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["--polcy", "deadline"], ("No such option", "--polcy", "--policy")),
        (["--ulr", "127.0.0.1:1"], ("No such option", "--ulr", "--url")),
        (["--deadline-ms=0"], ("0.0 is not in the range x>0",)),
        (["--timeout", "-5 + 3"], ("'-5 + 3' is not a valid float",)),
        (["-x"], ("No such option", "-x")),
    ],
    ids=lambda value: value[0] if isinstance(value, list) else "told",
)
def test_infer_with_a_wrong_option(url: str, words: list[str], told: tuple[str, ...]) -> None:
    done = fewheads("infer", ORACLE, "1 + 1", *words, "--url", url)
    assert (done.returncode, done.stdout) == (2, "")
    error = done.stderr.partition("Error: ")[2]
    assert all(words in error for words in told), error


def test_infer_after_two_dashes_everything_is_text(url: str) -> None:
    told = refusal(fewheads("infer", "--url", url, ORACLE, "--", "--policy"), 7)
    assert "expression: got '--policy', expected an operand" in told
    assert "model '--tier' at" in refusal(fewheads("infer", "--url", url, "--", "--tier", "1"), 7)


def test_infer_chooses_a_tier(tmp_path: Path) -> None:
    write_tiered_bundle(tmp_path / "tiered")
    np.save(tmp_path / "x.npy", np.ones((1, WIDTH), np.float32))
    with running_server([tmp_path / "tiered"], cache=tmp_path / "cache") as ready:
        question = (f"127.0.0.1:{ready.grpc_port}", "tiered", f"--input=x=@{tmp_path / 'x.npy'}")
        for options, told in (
            (["--tier", "half"], ("half", "requested")),
            (["--policy", "pinned"], ("full", "pinned")),
            (["--policy", "deadline", "--deadline-ms", "60000"], ("full", "full")),
        ):
            shown = inferred(*question, *options)
            assert (shown["tier"], shown["tier_reason"]) == told
            assert f"  {told[1]} " in answer(fewheads("infer", "--help"))
        # No tier computes in a millisecond: the server predicts that and refuses, or gives up in time.
        done = fewheads("infer", "--url", *question, "--policy", "deadline", "--deadline-ms", 1)
        assert refusal(done, done.returncode)
        assert (done.returncode, "RESOURCE_EXHAUSTED" in done.stderr) in ((7, True), (6, False))
        told = refusal(fewheads("infer", "--url", *question, "--policy", "quickest"), 7)
        assert "got 'quickest', expected one of pinned, deadline, load. Leave it out for pinned." in told


def test_infer_suggests_what_the_model_takes(url: str) -> None:
    assert 'Try: fewheads infer calculator-oracle "3 - -4 + 2"' in refusal(fewheads("infer", "--url", url, ORACLE), 2)
    for words in ([], ["some text"]):
        told = refusal(fewheads("infer", "--url", url, "echo-fp32", *words), 2)
        assert "Try: fewheads infer echo-fp32 --input in_fp32=@in_fp32.npy (NumPy: FP32 [-1])" in told


def test_infer_tensors(url: str, tmp_path: Path) -> None:
    tokens = tokenize(["1 + 2", "-3"])
    np.save(tmp_path / "x.npy", tokens)
    want = {"value": [[3], [-3]]}
    assert inferred(url, ORACLE, "--input", f"x={json.dumps(tokens.tolist())}")["outputs"] == want
    assert inferred(url, ORACLE, f"--input=x=@{tmp_path / 'x.npy'}")["outputs"] == want


def test_infer_a_version(url: str) -> None:
    assert inferred(url, "versioned", "1")["version"] == "3"
    assert inferred(url, "versioned", "1", "--version", "1")["version"] == "1"
    assert "NOT_FOUND" in refusal(fewheads("infer", "--url", url, "versioned", "1", "--version", "2"), 7)


def test_infer_shows_text_as_text(url: str) -> None:
    shown = inferred(url, "echo-bytes", "--input", 'in_bytes=["grün", "", "\\u6f22"]')
    assert shown["outputs"] == {"out_bytes": ["grün", "", "漢"]}
    assert "grün" in answer(fewheads("infer", "--url", url, "echo-bytes", "--input", 'in_bytes=["grün"]'))


@pytest.mark.parametrize(
    ("model", "tensor"),
    [
        (ORACLE, "x=[[1, 2"),
        (ORACLE, "x="),
        (ORACLE, "x"),
        (ORACLE, "y=[1]"),
        (ORACLE, 'x={"a": 1}'),
        (ORACLE, 'x=["a"]'),
        (ORACLE, "x=[[1], [1, 2]]"),
        (ORACLE, "x=" + "[" * 100_000),
        ("echo-uint8", "in_uint8=[300]"),
        ("echo-uint8", "in_uint8=[-1]"),
        ("echo-int64", f"in_int64=[{2**70}]"),
        ("echo-bytes", "in_bytes=[1]"),
        ("echo-bytes", 'in_bytes=[["a"], ["b", "c"]]'),
        ("echo-bytes", 'in_bytes=["\\ud800"]'),
    ],
    ids=lambda value: value[:40],
)
def test_infer_with_a_bad_tensor(url: str, model: str, tensor: str) -> None:
    line = refusal(fewheads("infer", "--url", url, model, "--input", tensor), 2)
    assert line.startswith("fewheads: --input")
    assert len(line) < 1000


@pytest.mark.parametrize(
    "data", [b"", b"PK\3\4 no archive", b"\x93NUMPY", b"[[1]]", None], ids=["empty", "zip", "cut", "JSON", "missing"]
)
def test_infer_with_a_bad_file(url: str, tmp_path: Path, data: bytes | None) -> None:
    if data is not None:
        (tmp_path / "x.npy").write_bytes(data)
    line = refusal(fewheads("infer", "--url", url, ORACLE, "--input", f"x=@{tmp_path / 'x.npy'}"), 2)
    assert line.startswith("fewheads: --input x: got @")


def test_infer_with_a_file_of_objects(url: str, tmp_path: Path) -> None:
    np.save(tmp_path / "x.npy", np.array([{}]), allow_pickle=True)
    line = refusal(fewheads("infer", "--url", url, ORACLE, "--input", f"x=@{tmp_path / 'x.npy'}"), 2)
    assert "allow_pickle" in line


def test_infer_nothing(url: str) -> None:
    assert "expected TEXT or --input" in refusal(fewheads("infer", "--url", url, ORACLE), 2)
    assert "0 text inputs" in refusal(fewheads("infer", "--url", url, "echo-fp32", "1"), 2)


def test_infer_text_that_is_no_utf8(url: str) -> None:
    command = [sys.executable, "-m", "edge", "infer", "--url", url, ORACLE, b"1 + \xff"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=SECONDS)
    assert "expected UTF-8" in refusal(done, 7)


def test_infer_an_unknown_model(url: str) -> None:
    line = refusal(fewheads("infer", "--url", url, "zz", "1"), 7)
    assert line.startswith(f"fewheads: model 'zz' at {url}: got NOT_FOUND, expected an answer. The server says: ")
    assert ORACLE in line  # the models that there are
    assert "characters)" not in line
    with grpc.insecure_channel(url) as channel:
        stub = inference_pb2_grpc.GRPCInferenceServiceStub(channel)
        with pytest.raises(grpc.RpcError) as caught:
            stub.ModelMetadata(inference_pb2.ModelMetadataRequest(name="zz"))
    assert line.endswith(f"The server says: {caught.value.details()}")


# bench


def test_bench() -> None:
    (shown,) = json.loads(answer(fewheads("bench", ORACLE_BUNDLE, "--requests", 50, "--json")))
    assert (shown["model"], shown["rows"], shown["concurrency"]) == (ORACLE, 1, 1)
    for side in ("in_process", "served"):
        assert shown[side]["count"] == 50
        assert 0 < shown[side]["p50_ms"] <= shown[side]["p95_ms"] <= shown[side]["p99_ms"]
        assert shown[side]["per_second"] > 0
    assert shown["overhead_ratio"] == pytest.approx(shown["served"]["p50_ms"] / shown["in_process"]["p50_ms"])


def test_bench_against_a_running_server(url: str) -> None:
    arguments = ("--requests", 60, "--rows", 3, "--concurrency", 2)
    before = requests_of(url)
    text = answer(fewheads("bench", ORACLE_BUNDLE, "--url", url, *arguments))
    assert all(word in text for word in ("in process", "served", "ratio", ORACLE))
    assert requests_of(url) - before == 60 + 6  # a tenth of them before, to warm up


def test_bench_of_a_served_model_without_its_bundle(url: str, tmp_path: Path) -> None:
    (tmp_path / "texts").write_text("1 + 1\n2 - 3\n")
    run = ("bench", "--url", url, "--requests", 20, "--json")
    for arguments in ((ORACLE,), (ORACLE, "--texts", tmp_path / "texts", "--rows", 2), ("echo-int64", "--rows", 3)):
        before = requests_of(url)
        (shown,) = json.loads(answer(fewheads(*run, *arguments)))
        assert (shown["model"], shown["in_process"], shown["overhead_ratio"]) == (arguments[0], None, None)
        assert shown["served"]["count"] == 20
        assert 0 < shown["served"]["p50_ms"] <= shown["served"]["p99_ms"]
        assert requests_of(url) - before == (22 if arguments[0] == ORACLE else 0)
    told = refusal(fewheads(*run, "echo-bytes"), 2)
    assert "inputs of echo-bytes: got in_bytes BYTES [-1], expected numbers of a fixed shape. Give lines" in told
    assert "got 'zz', expected a bundle directory" in refusal(fewheads(*run, "zz", "--rate", 10), 2)
    assert "got it with a bundle" in refusal(fewheads(*run, ORACLE_BUNDLE, "--texts", tmp_path / "texts"), 2)
    assert "NOT_FOUND" in refusal(fewheads(*run, "zz"), 7)


def requests_of(url: str) -> int:
    latency = json.loads(answer(fewheads("info", "--url", url, "--json")))["latency"]
    return int(latency[f"{ORACLE}:1"]["request"]["count"])


def test_bench_with_more_rows_than_the_model_takes(url: str) -> None:
    line = refusal(fewheads("bench", ORACLE_BUNDLE, "--url", url, "--requests", 10, "--rows", 65), 7)
    assert "got 65 rows, expected at most 64" in line


# A server that is not there, or does not answer


def test_an_unreachable_server() -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        url = f"127.0.0.1:{free.getsockname()[1]}"  # bound and not listening: refused, and nobody else can take it
        for arguments in (["infer", ORACLE, "1"], ["info"], ["bench", ORACLE_BUNDLE]):
            line = refusal(fewheads(*arguments, "--url", url), 6)
            assert f"at {url}: got UNAVAILABLE" in line
            assert "fewheads serve REPOSITORY" in line


EVIL = "\x1b[2J\x07evil\r\n\u202e" + "x" * 300


class Hostile(grpc.GenericRpcHandler):
    """A server whose texts hold control characters: it lists one model, and refuses every other call."""

    def service(self, handler_call_details: Any) -> Any:
        def behave(request: bytes, context: Any) -> bytes:
            if not handler_call_details.method.endswith("RepositoryIndex"):
                context.abort(grpc.StatusCode.PERMISSION_DENIED, EVIL)
            models = [inference_pb2.RepositoryIndexResponse.ModelIndex(name=EVIL, state=EVIL)]
            return inference_pb2.RepositoryIndexResponse(models=models).SerializeToString()

        return grpc.unary_unary_rpc_method_handler(behave)


def test_a_hostile_server_reaches_no_terminal() -> None:
    server = grpc.server(ThreadPoolExecutor(4), handlers=[Hostile()])
    url = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    server.start()
    try:
        refused = refusal(fewheads("infer", ORACLE, "1", "--url", url), 7)
        listed = fewheads("info", "--url", url)
    finally:
        server.stop(None)
    assert "The server says: \\x1b[2J\\x07evil\\r\\n\\u202e" + "x" * 300 + ". " in refused
    assert "evil" in answer(listed)
    for text in (refused, listed.stdout, listed.stderr):
        assert not {"\x1b", "\x07", "\r", "\u202e"} & set(text)


class Silent(grpc.GenericRpcHandler):
    """A server that takes every call and answers none."""

    def __init__(self) -> None:
        self.called, self.over = threading.Event(), threading.Event()

    def service(self, handler_call_details: Any) -> Any:
        def wait(request: bytes, context: Any) -> bytes:
            self.called.set()
            self.over.wait(SECONDS)
            return b""

        return grpc.unary_unary_rpc_method_handler(wait)


def test_ctrl_c_is_130() -> None:
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        pytest.skip("SIGINT is ignored here, as in the background of a shell, and so in every process that it starts")
    silent = Silent()
    server = grpc.server(ThreadPoolExecutor(4), handlers=[silent])
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    command = [sys.executable, "-m", "edge", "infer", ORACLE, "1", f"--url=127.0.0.1:{port}", "--timeout=100"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        assert silent.called.wait(SECONDS)
        time.sleep(0.5)  # the client waits by then, and no finalizer swallows the signal
        process.send_signal(signal.SIGINT)
        out, error = process.communicate(timeout=SECONDS)
    finally:
        process.kill()
        process.communicate()
        silent.over.set()
        server.stop(None)
    assert (process.returncode, out) == (130, ""), error
    assert "Traceback" not in error
