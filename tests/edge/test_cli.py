"""Commands, alone and with a server: processes, their output and their exit codes."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import click
import grpc
import numpy as np
import pytest

from edge import __version__
from edge.__main__ import cli
from edge.bundles.bundle import Bundle
from edge.bundles.expression import tokenize
from edge.bundles.manifest import schema
from edge.cli import output
from edge.launch import running_server
from edge.pb import inference_pb2, inference_pb2_grpc
from tests.support.commands import SECONDS, answer, closed_address, fewheads, mistake, python, refusal, shown
from tests.support.models import ORACLE, ORACLE_BUNDLE, write_bundle_of_roles
from tests.support.tiered_model import WIDTH, write_tiered_bundle

COMMANDS = ("train", "export", "build", "serve", "infer", "bench", "info", "doctor")
ROOT = Path(__file__).parent.parent.parent


def test_help_names_every_command() -> None:
    text = answer(fewheads("--help"))
    assert all(f"  {command} " in text for command in COMMANDS)
    assert "Exit codes:" in text
    assert answer(fewheads("-h")) == text
    done = fewheads()
    assert done.returncode == 2
    assert "Commands:" in done.stdout + done.stderr
    assert answer(fewheads("--version")) == f"fewheads, version {__version__}\n"
    for command in COMMANDS:
        text = shown(command, "--help")
        assert text.startswith(f"Usage: cli {command} ")
        assert "--json" in text
        assert "\b" not in text
        assert "\\b" not in text


@pytest.mark.parametrize("arguments", [["--help"], ["train", "--help"], ["export", "--help"], ["serve", "--help"]])
def test_help_loads_nothing_heavy(arguments: list[str]) -> None:
    code = """
import sys
from edge.__main__ import main
try:
    main()
finally:
    heavy = {"torch", "tensorrt", "tensorrt_rtx", "onnxruntime", "onnx", "grpc", "prometheus_client", "matplotlib"}
    print(sorted(heavy & set(sys.modules)), file=sys.stderr)
"""
    assert python(code, *arguments).stderr == "[]\n"


@pytest.mark.parametrize("arguments", [["zz"], ["bench", ORACLE_BUNDLE, "--requests", "x"]])
def test_wrong_usage_exits_with_2(arguments: list[object]) -> None:
    done = fewheads(*arguments)
    assert (done.returncode, done.stdout) == (2, "")
    assert "Error: " in done.stderr
    assert "Traceback" not in done.stderr


BLOCKED = """
import sys

class Blocked:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] == "PACKAGE":
            raise ModuleNotFoundError("No module named 'PACKAGE'", name="PACKAGE")

sys.meta_path.insert(0, Blocked())
from edge.__main__ import main
main()
"""


def test_missing_package_is_reported_with_its_extra(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for package, extra, command in (
        ("torch", "export", ["train", "calculator-gate"]),
        ("torch", "export", ["finetune", "digits"]),
        ("starlette", "rest", ["serve", ".", "--http-port=0", "--grpc-port=0", "--metrics-port=0"]),
        ("ngh2", "fast", ["serve", ".", "--transport=nghttp2"]),
        ("matplotlib", "plot", ["bench", str(ORACLE_BUNDLE), "--rate=1", "--plot=load.png"]),
    ):
        code = BLOCKED.replace("PACKAGE", package)
        line = refusal(python(code, *command, PYTHONPATH=f"{ROOT}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"), 2)
        assert package in line
        assert f"fewheads[{extra}]" in line


@pytest.mark.parametrize("arguments", [["info", ORACLE_BUNDLE], ["doctor", "--json"]])
def test_closed_stdout_exits_with_1_silently(arguments: list[object]) -> None:
    reading, writing = os.pipe()
    os.close(reading)
    command = [sys.executable, "-m", "edge", *map(str, arguments)]
    done = subprocess.run(command, stdout=writing, stderr=subprocess.PIPE, text=True, timeout=SECONDS, check=False)
    os.close(writing)
    assert (done.returncode, done.stderr) == (1, "")


def test_info_shows_bundles(tmp_path: Path) -> None:
    text = shown("info", ORACLE_BUNDLE, write_bundle_of_roles(tmp_path / "oracle").path)
    assert text.startswith(f"calculator-oracle version 1 in {ORACLE_BUNDLE}\n")
    for cells in (
        ("input", "x", "FP32", "[-1, 15]"),
        ("output", "value", "FP32", "[-1, 1]"),
        ("full", "model.onnx"),
        ("output of embed.onnx", "code"),
        ("input of head.onnx", "code", "[-1, 4]"),
        ("full", "head", "tensorrt"),
    ):
        assert any(all(cell in line for cell in cells) for line in text.splitlines()), cells
    found = json.loads(shown("info", ORACLE_BUNDLE, ORACLE_BUNDLE, "--json"))
    manifest = json.loads((ORACLE_BUNDLE / "manifest.json").read_bytes())
    assert found == [manifest, manifest]
    assert json.loads(shown("info", "--schema")) == json.loads(json.dumps(schema()))


def test_info_rejects_broken_and_missing_bundles(tmp_path: Path) -> None:
    shutil.copytree(ORACLE_BUNDLE, tmp_path / "broken")
    (tmp_path / "broken" / "model.onnx").write_bytes(b"broken")
    done = fewheads("info", tmp_path / "broken")
    assert "model.onnx: got 6 bytes" in refusal(done, 3)
    assert len(done.stderr.splitlines()) == 1
    assert "nothing there" in refusal(fewheads("info", tmp_path / "none"), 3)
    assert mistake("info").startswith("BUNDLE: got none")


def test_doctor_reports_every_check(tmp_path: Path) -> None:
    found = json.loads(shown("doctor", "--json", "--cache", tmp_path / "cache"))
    assert found["version"] == __version__
    checks = {check["name"]: check for check in found["checks"]}
    assert len(checks) == len(found["checks"])
    assert {"python", "grpcio", "numpy", "runtime", "memory", "cache"} <= set(checks)
    assert checks["runtime"]["status"] == "ok"
    assert checks["cache"] == {"name": "cache", "status": "ok", "found": str(tmp_path / "cache"), "advice": ""}
    for check in checks.values():
        assert check["status"] in ("ok", "absent", "warning")
        assert (check["status"] == "ok") == (check["advice"] == ""), check
    text = shown("doctor")
    assert all(name in text for name in checks)


def test_doctor_fails_without_a_writable_cache(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    done = fewheads("doctor", "--json", FEWHEADS_CACHE=str(tmp_path / "file" / "cache"))
    assert done.returncode == 1
    (check,) = [check for check in json.loads(done.stdout)["checks"] if check["name"] == "cache"]
    assert check["status"] == "failed"
    assert check["advice"].startswith("Give a writable --cache or $FEWHEADS_CACHE, in a container a volume;")


def test_build_reuses_the_cache(tmp_path: Path) -> None:
    arguments = ("build", ORACLE_BUNDLE, "--target", "onnxruntime", "--cache", tmp_path, "--json")
    text = shown(*arguments[:-1])
    assert all(words in text for words in ("on CPU", "The target names it.", "largest difference 0 in 8 rows"))
    (first,) = json.loads(shown(*arguments, "--replace"))
    (second,) = json.loads(shown(*arguments))
    assert (first["reused"], second["reused"]) == (False, True)
    assert (first["directory"], first["build"]) == (second["directory"], second["build"])
    assert first["build"]["name"] == Bundle.open(ORACLE_BUNDLE).manifest.name
    assert (Path(first["directory"]) / first["build"]["file"]).is_file()
    assert "0 s, it was there already" in shown(*arguments[:-1])
    done = fewheads(*arguments, "--require-fused-attention")
    expected = "got a build for onnxruntime, which does not show its kernels, expected every block fused"
    assert expected in refusal(done, 5)


def test_build_checks_all_bundles_first(tmp_path: Path) -> None:
    (tmp_path / "repository").mkdir()
    (tmp_path / "repository" / "oracle").symlink_to(ORACLE_BUNDLE)
    cache = tmp_path / "cache"
    done = fewheads("build", ORACLE_BUNDLE, tmp_path / "repository", "--target", "onnxruntime", "--cache", cache)
    advice = f"Give one of its bundles, such as {tmp_path}/repository/oracle."
    assert f"got a directory of bundles, expected a bundle. {advice}" in refusal(done, 3)
    assert not cache.exists()


def test_lines_have_the_current_task_its_position_and_its_note(monkeypatch, capsys):
    def lines(needed):
        """Wait until so many lines were printed, and return them."""
        found, deadline = [], time.monotonic() + 10
        while len(found) < needed:
            assert time.monotonic() < deadline, found
            time.sleep(0.01)
            found += capsys.readouterr().err.splitlines()
        return found

    monkeypatch.setattr(output, "LINE_SECONDS", 0.02)
    with output.progress() as bar:
        first, second, _ = (bar.add_task(name, total=4, note="") for name in ("first", "second", "third"))
        bar.update(first, completed=4)
        bar.update(second, completed=3, note="nearly")
        assert re.fullmatch(r"second: 3 of 4, nearly, 0:00:\d\d", lines(3)[-1])
    capsys.readouterr()
    with output.progress() as bar:
        bar.add_task("one", total=None, note="")
        assert all(re.fullmatch(r"one: 0:00:\d\d", line) for line in lines(3))
    capsys.readouterr()
    time.sleep(0.1)
    assert capsys.readouterr().err == ""


def test_table_of_fields(capsys):
    latency = SimpleNamespace(p99_9_ms=1234.4)
    rows = [SimpleNamespace(latency=latency, tiers={"lean": 2, "full": 1}, name="[red]", more=None)]
    output.print_fields("title", ("latency.p99_9_ms", "tiers", "name", "more"), rows)
    title, _, heads, _, cells, _ = capsys.readouterr().out.splitlines()
    assert title == "title"
    assert re.split(r"\s*[│┃]\s*", heads)[1:-1] == ["p99.9 ms", "tiers", "name", "more"]
    assert re.split(r"\s*[│┃]\s*", cells)[1:-1] == ["1234", "full 1, lean 2", "[red]", ""]


def test_info_shows_models_and_memory_of_a_server(url: str) -> None:
    found = json.loads(shown("info", "--url", url, "--json"))
    states = {model["name"]: model["state"] for model in found["models"]}
    assert states[ORACLE] == "READY"
    assert states["broken"] == "UNAVAILABLE"
    assert 0 < found["memory_bytes"]["process_rss"] < found["memory_bytes"]["system_total"]
    text = shown("info", "--url", url)
    assert any("broken" in line and "UNAVAILABLE" in line for line in text.splitlines())


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


def test_bench_in_process_and_served(url: str) -> None:
    (report,) = json.loads(shown("bench", ORACLE_BUNDLE, "--requests", 50, "--json"))
    assert (report["model"], report["rows"], report["concurrency"]) == (ORACLE, 1, 1)
    for side in ("in_process", "served"):
        assert report[side]["count"] == 50
        assert 0 < report[side]["p50_ms"] <= report[side]["p95_ms"] <= report[side]["p99_ms"]
        assert report[side]["per_second"] > 0
    assert report["overhead_ratio"] == pytest.approx(report["served"]["p50_ms"] / report["in_process"]["p50_ms"])
    arguments = ("--requests", 60, "--rows", 3, "--concurrency", 2)
    before = requests_of(url)
    text = shown("bench", ORACLE_BUNDLE, "--url", url, *arguments)
    assert all(word in text for word in ("in process", "served", "ratio", ORACLE))
    assert requests_of(url) - before == 60 + 6  # a tenth of them before, to warm up
    line = mistake("bench", ORACLE_BUNDLE, "--url", url, "--requests", 10, "--rows", 65, code=7)
    assert "got 65 rows, expected at most 64" in line


def test_bench_without_the_bundle(url: str, tmp_path: Path) -> None:
    (tmp_path / "texts").write_text("1 + 1\n2 - 3\n")
    run = ("bench", "--url", url, "--requests", 20, "--json")
    for arguments in ((ORACLE,), (ORACLE, "--texts", tmp_path / "texts", "--rows", 2), ("echo-int64", "--rows", 3)):
        (report,) = json.loads(shown(*run, *arguments))
        assert (report["model"], report["in_process"], report["overhead_ratio"]) == (arguments[0], None, None)
        assert report["served"]["count"] == 20
    expected = "inputs of echo-bytes: got in_bytes BYTES [-1], expected numbers of a fixed shape. Give lines"
    assert expected in mistake(*run, "echo-bytes")
    assert "got 'zz', expected a bundle directory" in mistake(*run, "zz", "--rate", 10)
    assert "got it with a bundle" in mistake(*run, ORACLE_BUNDLE, "--texts", tmp_path / "texts")
    assert "NOT_FOUND" in mistake(*run, "zz", code=7)


def requests_of(url: str) -> int:
    latency = json.loads(shown("info", "--url", url, "--json"))["latency"]
    return int(latency[f"{ORACLE}:1"]["request"]["count"])


def test_missing_server_exits_with_6() -> None:
    with closed_address() as url:
        for arguments in (["infer", ORACLE, "1"], ["info"], ["bench", ORACLE_BUNDLE]):
            line = refusal(fewheads(*arguments, "--url", url), 6)
            assert f"at {url}: got UNAVAILABLE" in line
            assert "fewheads serve REPOSITORY" in line


def test_control_characters_of_a_server_are_escaped() -> None:
    evil = "\x1b[2J\x07evil\r\n\u202e" + "x" * 300
    models = inference_pb2.RepositoryIndexResponse(models=[{"name": evil, "state": evil}]).SerializeToString()

    class Handler(grpc.GenericRpcHandler):
        def service(self, details: Any) -> Any:
            def behave(request: bytes, context: Any) -> bytes:
                if not details.method.endswith("RepositoryIndex"):
                    context.abort(grpc.StatusCode.PERMISSION_DENIED, evil)
                return models

            return grpc.unary_unary_rpc_method_handler(behave)

    server = grpc.server(ThreadPoolExecutor(4), handlers=[Handler()])
    url = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    server.start()
    refused = refusal(fewheads("infer", ORACLE, "1", "--url", url), 7)
    listed = fewheads("info", "--url", url)
    server.stop(None)
    assert "The server says: \\x1b[2J\\x07evil\\r\\n\\u202e" + "x" * 300 + ". " in refused
    assert "evil" in answer(listed)
    for text in (refused, listed.stdout, listed.stderr):
        assert not {"\x1b", "\x07", "\r", "\u202e"} & set(text)


def test_ctrl_c_exits_with_130() -> None:
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        pytest.skip("SIGINT is ignored here, as in the background of a shell")
    with socket.create_server(("127.0.0.1", 0)) as listener:
        command = [sys.executable, "-m", "edge", "infer", ORACLE, "1", f"--url=127.0.0.1:{listener.getsockname()[1]}"]
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        try:
            with listener.accept()[0]:
                time.sleep(0.5)  # the client waits by then
                process.send_signal(signal.SIGINT)
                out, error = process.communicate(timeout=SECONDS)
        finally:
            process.kill()
            process.communicate()
    assert (process.returncode, out) == (130, ""), error
    assert "Traceback" not in error
