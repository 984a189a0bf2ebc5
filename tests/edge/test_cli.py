"""Commands that need no server, as a user sees them: real processes, their output and their exit codes."""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from edge import __version__
from edge.bundles.bundle import Bundle
from edge.bundles.manifest import schema
from tests.support.commands import SECONDS, answer, fewheads, python, refusal
from tests.support.marks import with_rtx
from tests.support.models import ORACLE_BUNDLE, write_bundle_of_roles

COMMANDS = ("train", "export", "build", "serve", "infer", "bench", "info", "doctor")
ROOT = Path(__file__).parent.parent.parent


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


@pytest.mark.parametrize(
    ("package", "extra", "command"),
    [
        ("torch", "export", ["train", "calculator-gate"]),
        ("torch", "export", ["finetune", "digits"]),
        ("starlette", "rest", ["serve", ".", "--http-port=0", "--grpc-port=0", "--metrics-port=0"]),
        ("ngh2", "fast", ["serve", ".", "--transport=nghttp2"]),
    ],
)
def test_a_missing_package_ends_in_one_line_that_names_its_extra(
    tmp_path: Path, package: str, extra: str, command: list[str]
) -> None:
    code = f"""
import sys

class Blocked:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] == "{package}":
            raise ModuleNotFoundError("No module named '{package}'", name="{package}")

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
    assert package in line
    assert f"fewheads[{extra}]" in line


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


# info


def test_info_shows_a_bundle() -> None:
    text = answer(fewheads("info", ORACLE_BUNDLE))
    assert text.startswith(f"calculator-oracle version 1 in {ORACLE_BUNDLE}\n")
    for cells in (("input", "x", "FP32", "[-1, 15]"), ("output", "value", "FP32", "[-1, 1]"), ("full", "model.onnx")):
        assert any(all(cell in line for cell in cells) for line in text.splitlines()), cells


def test_info_shows_the_tensors_of_each_role(tmp_path: Path) -> None:
    text = answer(fewheads("info", write_bundle_of_roles(tmp_path / "oracle").path))
    for cells in (
        ("output of embed.onnx", "code"),
        ("input of head.onnx", "code", "[-1, 4]"),
        ("full", "head", "tensorrt"),
    ):
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


# doctor


def test_doctor(tmp_path: Path) -> None:
    shown = json.loads(answer(fewheads("doctor", "--json", "--cache", tmp_path / "cache")))
    assert shown["version"] == __version__
    checks = {check["name"]: check for check in shown["checks"]}
    assert len(checks) == len(shown["checks"])
    assert {"python", "grpcio", "numpy", "runtime", "memory", "cache"} <= set(checks)
    assert checks["runtime"]["status"] == "ok"
    assert checks["cache"] == {"name": "cache", "status": "ok", "found": str(tmp_path / "cache"), "advice": ""}
    for check in checks.values():
        assert check["status"] in ("ok", "absent", "warning")
        assert (check["status"] == "ok") == (check["advice"] == ""), check
    text = answer(fewheads("doctor"))
    assert all(name in text for name in checks)


def test_doctor_finds_a_cache_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    done = fewheads("doctor", "--json", FEWHEADS_CACHE=str(tmp_path / "file" / "cache"))
    assert done.returncode == 1
    (check,) = [check for check in json.loads(done.stdout)["checks"] if check["name"] == "cache"]
    assert check["status"] == "failed"
    assert check["advice"].startswith("Give a writable --cache or $FEWHEADS_CACHE, in a container a volume;")


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


def test_a_wrong_bundle_is_found_before_any_is_built(tmp_path: Path) -> None:
    (tmp_path / "repository").mkdir()
    (tmp_path / "repository" / "oracle").symlink_to(ORACLE_BUNDLE)
    arguments = (
        "build",
        ORACLE_BUNDLE,
        tmp_path / "repository",
        "--target",
        "onnxruntime",
        "--cache",
        tmp_path / "cache",
    )
    expected = (
        f"got a directory of bundles, expected a bundle. Give one of its bundles, such as {tmp_path}/repository/oracle."
    )
    assert expected in refusal(fewheads(*arguments), 3)
    assert not (tmp_path / "cache").exists()


def test_fused_attention_that_a_runtime_does_not_show_is_refused(tmp_path: Path) -> None:
    arguments = ("build", ORACLE_BUNDLE, "--target", "onnxruntime", "--cache", tmp_path / "cache")
    answer(fewheads(*arguments))
    told = refusal(fewheads(*arguments, "--require-fused-attention"), 5)
    assert "got a build for onnxruntime, which does not show its kernels, expected every block fused" in told


def test_build_for_an_unknown_target() -> None:
    done = fewheads("build", ORACLE_BUNDLE, "--target", "zz")
    assert "--target: got 'zz'" in refusal(done, 2)


# serve


def test_serve_a_missing_directory(tmp_path: Path) -> None:
    assert "which does not exist" in refusal(fewheads("serve", tmp_path / "none"), 2)


@with_rtx
def test_serve_with_a_target_that_only_builds(tmp_path: Path) -> None:
    told = refusal(fewheads("serve", tmp_path, "--target", "tensorrt-rtx:SM86"), 2)
    assert "--target: got 'tensorrt-rtx:SM86', expected a target that this program can run" in told


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


def test_serve_with_several_wrong_settings(tmp_path: Path) -> None:
    done = fewheads("serve", tmp_path, "--grpc-port=70000", "--log-level=zz", "--http-port=8002", "--load-model=a")
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("fewheads: 4 settings: got ")
    wrong = ["--grpc-port", "--log-level", "--http-port", "--load-model"]
    assert [line.partition(": got ")[0].strip() for line in done.stderr.splitlines()[1:]] == wrong
