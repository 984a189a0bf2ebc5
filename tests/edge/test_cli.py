"""Commands, alone and with a server: processes, their output and their exit codes."""

import json
import os
import re
import shutil
import subprocess
import sys
import time
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import msgspec
import pytest

from edge import __version__
from edge.__main__ import GROUPS, grouped
from edge.bundles.bundle import write_bundle
from edge.bundles.manifest import Tier, schema
from edge.cli import output
from tests.data.make_broken_bundles import MEASURED, PREDICTION, Good
from tests.support.commands import (
    SECONDS,
    answer,
    closed_address,
    fewheads,
    mistake,
    progress_line,
    python,
    ran,
    refusal,
    run,
    shown,
)
from tests.support.marks import with_rtx
from tests.support.models import (
    ORACLE,
    ORACLE_BUNDLE,
    oracle_golden,
    oracle_manifest,
    oracle_onnx,
    write_bundle_of_roles,
)
from tests.support.text_model import TIERS, write_sentiment_bundle

COMMANDS = [command for group in GROUPS.values() for command in group]
ROOT = Path(__file__).parent.parent.parent


def test_help_has_every_command_in_its_group():
    text = shown("--help")
    assert all(f"  {command} " in text for command in COMMANDS)
    assert [line.rstrip(":") for line in text.splitlines() if line.rstrip(":") in GROUPS] == list(GROUPS)
    assert ("Exit codes:" in text, "Other:" in text, shown("-h")) == (True, False, text)
    assert grouped(["serve", "own", "infer"]) == {"Serve and ask": ["serve", "infer"], "Other": ["own"]}
    assert (ran().exit_code, "Serve and ask:" in ran().output) == (2, True)
    assert shown("--version") == f"fewheads, version {__version__}\n"
    for command in COMMANDS:
        text = shown(command, "--help")
        assert text.startswith(f"Usage: cli {command} ")
        assert "--json" in text or text.startswith(f"Usage: cli {command} [OPTIONS] COMMAND ")
        assert not {"\b", "\\b"} & set(text.split())


def test_commands_are_completed():
    program = str(Path(sys.executable).with_name("fewheads"))
    for words, completed in (("fewheads pro", "profile"), ("fewheads infer --tok", "--token-file")):
        variables = {"_FEWHEADS_COMPLETE": "bash_complete", "COMP_WORDS": words, "COMP_CWORD": str(words.count(" "))}
        assert answer(run([program], **variables)) == f"plain,{completed}\n"


@pytest.mark.parametrize("arguments", [["export", "--help"], ["serve", "--help"]])
def test_help_loads_nothing_heavy(arguments):
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


def test_wrong_usage_exits_with_2():
    done = fewheads("bench", ORACLE_BUNDLE, "--requests", "x")
    assert (done.returncode, done.stdout, "Traceback" in done.stderr) == (2, "", False)
    assert "Error: " in done.stderr


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


def test_missing_package_is_reported_with_its_extra(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for package, extra, command in (
        ("torch", "export", ["train", "calculator-gate"]),
        ("torch", "export", ["finetune", "digits"]),
        ("ngh2", "fast", ["serve", ".", "--transport=nghttp2"]),
    ):
        code = BLOCKED.replace("PACKAGE", package)
        line = refusal(python(code, *command, PYTHONPATH=f"{ROOT}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"), 2)
        assert package in line
        assert f"fewheads[{extra}]" in line


@pytest.mark.parametrize("arguments", [["info", ORACLE_BUNDLE], ["doctor", "--json"]])
def test_closed_stdout_exits_with_1_silently(arguments):
    reading, writing = os.pipe()
    os.close(reading)
    command = [sys.executable, "-m", "edge", *map(str, arguments)]
    done = subprocess.run(command, stdout=writing, stderr=subprocess.PIPE, text=True, timeout=SECONDS, check=False)
    os.close(writing)
    assert (done.returncode, done.stderr) == (1, "")


def test_doctor_reports_every_check(tmp_path):
    found = json.loads(shown("doctor", "--json", "--cache", tmp_path / "cache"))
    checks = {check["name"]: check for check in found["checks"]}
    assert (found["version"], len(checks)) == (__version__, len(found["checks"]))
    assert {"python", "grpcio", "numpy", "runtime", "memory"} <= set(checks)
    assert checks["runtime"]["status"] == "ok"
    assert checks["cache"] == {"name": "cache", "status": "ok", "found": str(tmp_path / "cache"), "advice": ""}
    for check in checks.values():
        assert check["status"] in ("ok", "absent", "warning")
        assert (check["status"] == "ok") == (check["advice"] == ""), check
    text = shown("doctor")
    assert all(name in text for name in checks)
    (tmp_path / "file").touch()
    done = fewheads("doctor", "--json", FEWHEADS_CACHE=str(tmp_path / "file" / "cache"))
    (check,) = [check for check in json.loads(done.stdout)["checks"] if check["name"] == "cache"]
    assert (done.returncode, check["status"]) == (1, "failed")
    assert check["advice"].startswith("Give a writable --cache or $FEWHEADS_CACHE, in a container a volume;")


def test_build_reuses_the_cache(tmp_path):
    arguments = ("build", ORACLE_BUNDLE, "--target", "onnxruntime", "--cache", tmp_path, "--json")
    text = shown(*arguments[:-1])
    assert all(words in text for words in ("on CPU", "The target names it.", "largest difference 0 in 8 rows"))
    (first,) = json.loads(shown(*arguments, "--replace"))
    (second,) = json.loads(shown(*arguments))
    assert (first["reused"], second["reused"]) == (False, True)
    assert (first["directory"], first["build"]) == (second["directory"], second["build"])
    assert (Path(first["directory"]) / first["build"]["file"]).is_file()
    assert "0 s, it was there already" in shown(*arguments[:-1])
    expected = "got a build for onnxruntime, which does not show its kernels, expected every block fused"
    assert expected in mistake(*arguments, "--require-fused-attention", code=5)


def test_build_builds_every_tier_or_the_one_that_is_named(tmp_path):
    bundle = write_sentiment_bundle(tmp_path / "sentiment")
    for options, tiers in (((), TIERS), (("--tier", "lean"), ("lean",))):
        cache = tmp_path / "-".join(tiers)
        built = json.loads(shown("build", bundle.path, *options, "--target", "onnxruntime", "--cache", cache, "--json"))
        assert [one["build"]["tier"] for one in built] == list(tiers)
    assert "got 'other', expected one of full, lean" in mistake("build", bundle.path, "--tier", "other", code=3)


@with_rtx
def test_build_for_a_runtime_without_a_file_names_a_way_that_exists(tmp_path):
    manifest = oracle_manifest()
    (model,) = manifest.tiers[0].artifacts
    tier = Tier(name="full", artifacts=(msgspec.structs.replace(model, runtime="onnxruntime"),))
    files = {model.file: oracle_onnx(), "golden.npz": oracle_golden().encode()}
    bundle = write_bundle(tmp_path / "oracle", msgspec.structs.replace(manifest, tiers=(tier,)), files)
    line = mistake("build", bundle.path, "--target", "tensorrt-rtx:SM86", "--cache", tmp_path / "cache", code=3)
    assert "got ['model for onnxruntime'], expected model for tensorrt. Take a --target that runs these" in line


def test_build_checks_all_bundles_first(tmp_path):
    (tmp_path / "repository").mkdir()
    (tmp_path / "repository" / "oracle").symlink_to(ORACLE_BUNDLE)
    cache = tmp_path / "cache"
    both = (ORACLE_BUNDLE, tmp_path / "repository")
    advice = f"Give one of its bundles, such as {tmp_path}/repository/oracle."
    message = mistake("build", *both, "--target", "onnxruntime", "--cache", cache, code=3)
    assert f"got a directory of bundles, expected a bundle. {advice}" in message
    assert not cache.exists()


def test_missing_server_exits_with_6():
    with closed_address() as url:
        for arguments in (["infer", ORACLE, "1"], ["info"], ["bench", ORACLE_BUNDLE], ["top"]):
            line = mistake(*arguments, "--url", url, code=6)
            assert f"at {url}: got UNAVAILABLE" in line
            assert "fewheads serve REPOSITORY" in line


def test_info_shows_bundles(tmp_path):
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


def test_info_labels_predicted_latencies(tmp_path):
    assert "latency" not in shown("info", ORACLE_BUNDLE)
    for name, content in Good().with_field("tiers.0.latencies", [MEASURED, PREDICTION]).items():
        assert isinstance(content, bytes)
        (tmp_path / name).write_bytes(content)
    lines = shown("info", tmp_path).splitlines()
    assert "calculator-oracle, latency of a run: measured, or a prediction, not measured on an Orin" in lines
    rows = ["|".join(cell.strip() for cell in line.split("│")[1:-1]) for line in lines if line.startswith("│ full")]
    assert rows[-2:] == [
        "full|measured|AMD EPYC|onnxruntime|fp32|1|32|1.25|||1",
        "full|prediction|Jetson Orin Nano Super at 15W|tensorrt|fp16|8||0.5|0.3|0.7|1.5",
    ]
    (found,) = json.loads(shown("info", tmp_path, "--json"))
    assert found["tiers"][0]["latencies"] == [MEASURED, PREDICTION]


def test_info_rejects_broken_and_missing_bundles(tmp_path):
    shutil.copytree(ORACLE_BUNDLE, tmp_path / "broken")
    (tmp_path / "broken" / "model.onnx").write_bytes(b"broken")
    done = fewheads("info", tmp_path / "broken")
    assert "model.onnx: got 6 bytes" in refusal(done, 3)
    assert len(done.stderr.splitlines()) == 1
    assert "nothing there" in mistake("info", tmp_path / "none", code=3)
    assert mistake("info").startswith("BUNDLE: got none")


def test_info_shows_models_and_memory_of_a_server(url):
    found = json.loads(shown("info", "--url", url, "--json"))
    states = {model["name"]: model["state"] for model in found["models"]}
    assert states[ORACLE] == "READY"
    assert states["broken"] == "UNAVAILABLE"
    assert 0 < found["memory_bytes"]["process_rss"] < found["memory_bytes"]["system_total"]
    text = shown("info", "--url", url)
    assert any("broken" in line and "UNAVAILABLE" in line for line in text.splitlines())


def test_lines_have_the_current_task_its_position_and_its_note(monkeypatch, capsys):
    line = partial(progress_line, capsys)
    monkeypatch.setattr(output, "LINE_SECONDS", 0.02)
    with output.progress() as bar:
        bar.add_task("one", total=None, note="")
        assert re.fullmatch(r"one: 0:00:\d\d", line())
        first, second, _ = (bar.add_task(name, total=4, note="") for name in ("first", "second", "third"))
        bar.update(first, completed=4)
        bar.update(second, completed=3, note="nearly")
        assert re.fullmatch(r"second: 3 of 4, nearly, 0:00:\d\d(, about 0:00:\d\d left)?", line())
    capsys.readouterr()
    time.sleep(0.1)
    assert capsys.readouterr().err == ""


def test_table_of_fields(capsys):
    latency = SimpleNamespace(p99_9_ms=1234.4)
    rows = [SimpleNamespace(latency=latency, tiers={"lean": 2, "full": 1}, name="[red]\x1b[2J\u202e", more=None)]
    output.print_fields("title", ("latency.p99_9_ms", "tiers", "name", "more"), rows)
    title, _, heads, _, cells, _ = capsys.readouterr().out.splitlines()
    assert title == "title"
    assert re.split(r"\s*[│┃]\s*", heads)[1:-1] == ["p99.9 ms", "tiers", "name", "more"]
    assert re.split(r"\s*[│┃]\s*", cells)[1:-1] == ["1234", "full 1, lean 2", "[red]\\x1b[2J\\u202e", ""]
