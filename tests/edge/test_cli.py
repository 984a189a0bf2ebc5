"""The command line as a user sees it: real processes, their output and their exit codes."""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from edge import __version__
from edge.bundle import Bundle
from edge.expression import tokenize
from edge.manifest import schema
from tests.edge.conftest import ORACLE
from tests.edge.models import ORACLE_BUNDLE

COMMANDS = ("train", "export", "build", "serve", "infer", "bench", "info", "doctor")
SECONDS = 120
ROOT = Path(__file__).parent.parent.parent

Done = subprocess.CompletedProcess


def fewheads(*arguments: object, **variables: str) -> Done[str]:
    command = [sys.executable, "-m", "edge", *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, timeout=SECONDS, env={**os.environ, **variables})


def python(code: str, *arguments: str, **variables: str) -> Done[str]:
    command = [sys.executable, "-c", code, *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=SECONDS, env={**os.environ, **variables})


def answer(done: Done[str]) -> str:
    """The output of a command that ended well."""
    assert done.returncode == 0, done.stderr
    return done.stdout


def refusal(done: Done[str], code: int) -> str:
    """The one line that a user's mistake ends in, without a traceback and without any result."""
    assert done.returncode == code, done.stderr
    assert done.stdout == ""
    assert "Traceback" not in done.stderr
    line = done.stderr.splitlines()[-1]
    assert line.startswith("fewheads: ")
    assert ": got " in line
    assert ", expected " in line
    return line


@pytest.fixture
def taken_port() -> Iterator[int]:
    with socket.socket() as holder:
        holder.bind(("127.0.0.1", 0))
        holder.listen()
        yield holder.getsockname()[1]


# Help and usage


def test_help_names_every_command() -> None:
    text = answer(fewheads("--help"))
    assert all(f"  {command} " in text for command in COMMANDS)
    assert "Exit codes:" in text
    assert answer(fewheads("-h")) == text


@pytest.mark.parametrize("command", COMMANDS)
def test_help_of_a_command(command: str) -> None:
    text = answer(fewheads(command, "--help"))
    assert text.startswith(f"Usage: python -m edge {command} ")
    assert "--json" in text


@pytest.mark.parametrize("arguments", [["--help"], ["train", "--help"], ["export", "--help"], ["serve", "--help"]])
def test_help_loads_nothing_heavy(arguments: list[str]) -> None:
    code = """
import sys
from edge.__main__ import main
try:
    main()
finally:
    heavy = {"torch", "tensorrt", "tensorrt_rtx", "onnxruntime", "onnx", "grpc", "prometheus_client"}
    print(sorted(heavy & set(sys.modules)), file=sys.stderr)
"""
    assert python(code, *arguments).stderr == "[]\n"


def test_version() -> None:
    assert answer(fewheads("--version")) == f"fewheads, version {__version__}\n"


@pytest.mark.parametrize(
    "arguments",
    [
        ["zz"],
        ["--zz"],
        ["info", "--zz"],
        ["build"],
        ["bench"],
        ["bench", ORACLE_BUNDLE, "--requests", "many"],
        ["infer"],
    ],
)
def test_wrong_usage(arguments: list[object]) -> None:
    done = fewheads(*arguments)
    assert done.returncode == 2
    assert done.stdout == ""
    assert "Error: " in done.stderr
    assert "Traceback" not in done.stderr


def test_no_argument_shows_the_help() -> None:
    done = fewheads()
    assert "Commands:" in done.stdout + done.stderr
    assert done.returncode == 2


@pytest.mark.skipif(shutil.which("bash") is None, reason="bash is not on this machine")
def test_shell_completion() -> None:
    code = "import sys; sys.argv[0] = 'fewheads'; from edge.__main__ import main; main()"
    script = answer(python(code, _FEWHEADS_COMPLETE="bash_source"))
    assert "_FEWHEADS_COMPLETE=bash_complete" in script
    asked = {"_FEWHEADS_COMPLETE": "bash_complete", "COMP_WORDS": "fewheads b", "COMP_CWORD": "1"}
    assert answer(python(code, **asked)).split() == ["plain,bench", "plain,build"]


@pytest.mark.parametrize("command", [["train", "calculator-gate"], ["export", "run", "--repository", "bundles"]])
def test_a_missing_package_ends_in_one_line_that_names_its_extra(tmp_path: Path, command: list[str]) -> None:
    code = """
import sys

class Blocked:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] == "torch":
            raise ModuleNotFoundError("No module named 'torch'", name="torch")

sys.meta_path.insert(0, Blocked())
from edge.__main__ import main
main()
"""
    done = subprocess.run(
        [sys.executable, "-c", code, *command],
        capture_output=True,
        text=True,
        timeout=SECONDS,
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])},
    )
    line = refusal(done, 2)
    assert "No module named 'torch'" in line
    assert "fewheads[export]" in line


@pytest.mark.parametrize("arguments", [["info", "--schema"], ["info", ORACLE_BUNDLE], ["--help"], ["doctor", "--json"]])
def test_a_reader_that_has_gone_is_no_failure_to_report(arguments: list[object]) -> None:
    reading, writing = os.pipe()
    os.close(reading)
    try:
        done = subprocess.run(
            [sys.executable, "-m", "edge", *map(str, arguments)],
            stdout=writing,
            stderr=subprocess.PIPE,
            text=True,
            timeout=SECONDS,
            check=False,
        )
    finally:
        os.close(writing)
    assert done.stderr == ""
    assert done.returncode == 1


@pytest.mark.skipif(shutil.which("bash") is None, reason="bash is not on this machine")
def test_head() -> None:
    command = 'set -o pipefail; "$0" -m edge info --schema | head -1'
    done = subprocess.run(["bash", "-c", command, sys.executable], capture_output=True, text=True, timeout=SECONDS)
    assert done.stdout == "{\n"
    assert done.stderr == ""


def test_ctrl_c_is_130() -> None:
    with socket.socket() as silent:  # takes the connection and never answers
        silent.bind(("127.0.0.1", 0))
        silent.listen()
        port = silent.getsockname()[1]
        command = [sys.executable, "-m", "edge", "infer", ORACLE, "1", f"--url=127.0.0.1:{port}", "--timeout=100"]
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        try:
            silent.settimeout(SECONDS)
            connection, _ = silent.accept()
            with connection:
                time.sleep(0.5)  # the call has begun to wait by then
                process.send_signal(signal.SIGINT)
                out, error = process.communicate(timeout=SECONDS)
        finally:
            process.kill()
            process.communicate()
    assert (process.returncode, out) == (130, "")
    assert "Traceback" not in error


# info


def test_info_shows_a_bundle() -> None:
    text = answer(fewheads("info", ORACLE_BUNDLE))
    assert text.startswith(f"calculator-oracle version 1 in {ORACLE_BUNDLE}\n")
    for cells in (("input", "x", "FP32", "[-1, 15]"), ("output", "value", "FP32", "[-1, 1]"), ("full", "model.onnx")):
        assert any(all(cell in line for cell in cells) for line in text.splitlines()), cells


def test_info_as_json_is_the_manifest() -> None:
    shown = json.loads(answer(fewheads("info", ORACLE_BUNDLE, ORACLE_BUNDLE, "--json")))
    manifest = json.loads((ORACLE_BUNDLE / "manifest.json").read_bytes())
    assert shown == [manifest, manifest]


def test_info_schema() -> None:
    assert json.loads(answer(fewheads("info", "--schema"))) == json.loads(json.dumps(schema()))


def test_info_of_a_broken_bundle(tmp_path: Path) -> None:
    shutil.copytree(ORACLE_BUNDLE, tmp_path / "broken")
    (tmp_path / "broken" / "model.onnx").write_bytes(b"broken")
    done = fewheads("info", tmp_path / "broken")
    assert "model.onnx: got 6 bytes" in refusal(done, 3)
    assert len(done.stderr.splitlines()) == 1


def test_info_of_no_bundle(tmp_path: Path) -> None:
    assert "nothing there" in refusal(fewheads("info", tmp_path / "none"), 3)
    assert refusal(fewheads("info"), 2).startswith("fewheads: BUNDLE: got none")


def test_info_of_a_server(url: str) -> None:
    shown = json.loads(answer(fewheads("info", "--url", url, "--json")))
    states = {model["name"]: model["state"] for model in shown["models"]}
    assert states[ORACLE] == "READY"
    assert states["broken"] == "UNAVAILABLE"
    assert 0 < shown["memory_bytes"]["process_rss"] < shown["memory_bytes"]["system_total"]
    text = answer(fewheads("info", "--url", url))
    assert any("broken" in line and "UNAVAILABLE" in line for line in text.splitlines())


# doctor


def test_doctor(tmp_path: Path) -> None:
    shown = json.loads(answer(fewheads("doctor", "--json", "--cache", tmp_path / "cache")))
    assert shown["version"] == __version__
    checks = {check["name"]: check for check in shown["checks"]}
    assert len(checks) == len(shown["checks"])
    assert {"python", "grpcio", "numpy", "backend", "memory", "cache"} <= set(checks)
    assert checks["backend"]["status"] == "ok"
    assert checks["cache"] == {"name": "cache", "status": "ok", "found": str(tmp_path / "cache"), "advice": ""}
    for check in checks.values():
        assert check["status"] in ("ok", "absent", "warning")
        assert (check["status"] == "ok") == (check["advice"] == ""), check
    text = answer(fewheads("doctor"))
    assert all(name in text for name in checks)


def test_doctor_finds_a_cache_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    shown = json.loads(answer(fewheads("doctor", "--json", FEWHEADS_CACHE=str(tmp_path / "file" / "cache"))))
    (check,) = [check for check in shown["checks"] if check["name"] == "cache"]
    assert check["status"] == "warning"
    assert "FEWHEADS_CACHE" in check["advice"]


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


@pytest.mark.parametrize("text", ["-5 - -6", "-5+6", "-1--2", "- -1"])
def test_infer_text_that_begins_with_a_minus(url: str, text: str) -> None:
    done = fewheads("infer", "--url", url, ORACLE, text, "--json")
    if text == "- -1":
        assert "expression: got '- -1', expected an operand at character 1" in refusal(done, 6)
    else:
        assert json.loads(answer(done))["outputs"] == {"value": [[1]]}


def test_infer_tensors(url: str, tmp_path: Path) -> None:
    tokens = tokenize(["1 + 2", "-3"])
    np.save(tmp_path / "x.npy", tokens)
    want = {"value": [[3], [-3]]}
    assert inferred(url, ORACLE, "--input", f"x={json.dumps(tokens.tolist())}")["outputs"] == want
    assert inferred(url, ORACLE, f"--input=x=@{tmp_path / 'x.npy'}")["outputs"] == want


def test_infer_a_version(url: str) -> None:
    assert inferred(url, "versioned", "1")["version"] == "3"
    assert inferred(url, "versioned", "1", "--version", "1")["version"] == "1"
    assert "NOT_FOUND" in refusal(fewheads("infer", "--url", url, "versioned", "1", "--version", "2"), 6)


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
    assert "expected UTF-8" in refusal(done, 6)


def test_infer_an_unknown_model(url: str) -> None:
    line = refusal(fewheads("infer", "--url", url, "zz", "1"), 6)
    assert f"model 'zz' at {url}: got NOT_FOUND" in line
    assert ORACLE in line  # it says what there is


def test_an_unreachable_server(taken_port: int) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        url = f"127.0.0.1:{free.getsockname()[1]}"  # bound and not listening: refused, and nobody else can take it
        for arguments in (["infer", ORACLE, "1"], ["info"], ["bench", ORACLE_BUNDLE]):
            line = refusal(fewheads(*arguments, "--url", url), 6)
            assert f"at {url}: got UNAVAILABLE" in line
            assert "fewheads serve REPOSITORY" in line


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


def requests_of(url: str) -> int:
    latency = json.loads(answer(fewheads("info", "--url", url, "--json")))["latency"]
    return int(latency[f"{ORACLE}:1"]["request"]["count"])


def test_bench_with_more_rows_than_the_model_takes(url: str) -> None:
    line = refusal(fewheads("bench", ORACLE_BUNDLE, "--url", url, "--requests", 10, "--rows", 65), 6)
    assert "got 65 rows, expected at most 64" in line


# build


def test_build_and_build_again(tmp_path: Path) -> None:
    arguments = ("build", ORACLE_BUNDLE, "--target", "onnxruntime", "--cache", tmp_path, "--json")
    (first,) = json.loads(answer(fewheads(*arguments)))
    (second,) = json.loads(answer(fewheads(*arguments)))
    assert (first["reused"], second["reused"]) == (False, True)
    assert (first["directory"], first["build"]) == (second["directory"], second["build"])
    assert first["build"]["name"] == Bundle.open(ORACLE_BUNDLE).manifest.name
    assert (Path(first["directory"]) / first["build"]["file"]).is_file()
    assert "0 s, it was there already" in answer(fewheads(*arguments[:-1]))


def test_build_for_an_unknown_target() -> None:
    done = fewheads("build", ORACLE_BUNDLE, "--target", "zz")
    assert "--target: got 'zz'" in refusal(done, 2)


# serve


def test_serve_a_missing_directory(tmp_path: Path) -> None:
    assert "which is not there" in refusal(fewheads("serve", tmp_path / "none"), 2)


@pytest.mark.parametrize("option", ["--grpc-port", "--metrics-port"])
def test_serve_on_a_taken_port(tmp_path: Path, taken_port: int, option: str) -> None:
    other = "--metrics-port" if option == "--grpc-port" else "--grpc-port"
    line = refusal(fewheads("serve", tmp_path, f"{option}={taken_port}", f"{other}=0"), 2)
    assert line.startswith(f"fewheads: {option} {taken_port}: got ")
    assert f"Give another {option}" in line


@pytest.mark.parametrize(
    "wrong",
    ["--grpc-port=70000", "--max-message-bytes=0", f"--max-message-bytes={2**40}", "--drain-seconds=-1"],
)
def test_serve_with_a_wrong_setting(tmp_path: Path, wrong: str) -> None:
    option = wrong.partition("=")[0]
    line = refusal(fewheads("serve", tmp_path, wrong, *([] if option == "--grpc-port" else ["--grpc-port=0"])), 2)
    assert line.startswith(f"fewheads: {option}: got ")
