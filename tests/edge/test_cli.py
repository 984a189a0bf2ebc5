"""Commands without a server: processes, their output and their exit codes."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from edge import __version__
from edge.bundles.bundle import Bundle
from edge.bundles.manifest import schema
from edge.cli import output
from tests.support.commands import SECONDS, answer, fewheads, mistake, python, refusal, shown
from tests.support.models import ORACLE_BUNDLE, write_bundle_of_roles

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


@pytest.mark.parametrize(
    ("package", "extra", "command"),
    [
        ("torch", "export", ["train", "calculator-gate"]),
        ("torch", "export", ["finetune", "digits"]),
        ("starlette", "rest", ["serve", ".", "--http-port=0", "--grpc-port=0", "--metrics-port=0"]),
        ("ngh2", "fast", ["serve", ".", "--transport=nghttp2"]),
        ("matplotlib", "plot", ["bench", str(ORACLE_BUNDLE), "--rate=1", "--plot=load.png"]),
    ],
)
def test_missing_package_is_reported_with_its_extra(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, package: str, extra: str, command: list[str]
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
    monkeypatch.chdir(tmp_path)
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
