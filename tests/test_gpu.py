"""``make gpu`` without a GPU: what it refuses, what it installs, and the form of its record."""

import json
import re
import shutil
import subprocess
import sys

import pytest
import tomllib
from packaging.requirements import Requirement

from edge.errors import BackendError
from tests.gpu import ROOT, WHEELS, __main__, collect, record
from tests.gpu.record import Step, marked_tests, steps


@pytest.mark.skipif(shutil.which("nvidia-smi") is not None, reason="needs a machine without a GPU")
def test_without_a_gpu_nothing_is_installed():
    before = __main__.ENVIRONMENT.exists()
    done = subprocess.run([sys.executable, "-m", "tests.gpu"], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == BackendError.exit_code
    assert re.fullmatch(r"make gpu: got (no|a) CUDA driver.*, expected an NVIDIA GPU\. Run .*\n", done.stderr)
    assert done.stdout == ""
    assert __main__.ENVIRONMENT.exists() == before


def test_missing_wheels_and_packages_of_the_machine_are_named(tmp_path, monkeypatch):
    monkeypatch.setattr(__main__, "gpu_problem", lambda: None)  # as on a machine with a GPU
    monkeypatch.setattr(sys, "version_info", (3, 12, 3))
    with pytest.raises(BackendError, match=r"got no wheels in .*Run `make gpu-wheels` on a machine with network"):
        __main__.check(tmp_path)
    (tmp_path / "pip-1-py3-none-any.whl").touch()
    __main__.check(tmp_path)
    monkeypatch.setattr(__main__, "find_spec", lambda name: None if name in ("torch", "scipy", "onnx") else object())
    (tmp_path / "onnx-1-py3-none-any.whl").touch()
    with pytest.raises(BackendError, match=r"got no torch, scipy in .*, expected a torch for CUDA, numpy"):
        __main__.check(tmp_path)
    monkeypatch.setattr(sys, "version_info", (3, 11, 7))
    with pytest.raises(BackendError, match=r"got Python .*, expected Python 3\.12"):
        __main__.check(tmp_path)


def test_every_dependency_is_collected_or_known_to_be_elsewhere():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    lines = list(project["dependencies"])
    for extra in collect.EXTRAS:
        lines += project["optional-dependencies"][extra]
    names = {collect.name_of(Requirement(line).name) for line in lines} - {"fewheads"}
    collected = {collect.name_of(line) for line in collect.wanted()}
    left_out = {*collect.ELSEWHERE, "pycuda"}
    assert names <= collected | left_out
    assert not collected & left_out
    assert "torch" in left_out
    assert {"grpcio", "msgspec", "pytest", "tritonclient"} <= collected


@pytest.mark.skipif(not WHEELS.exists(), reason="needs `make gpu-wheels`")
def test_collected_wheels_have_neither_torch_nor_cuda():
    names = {collect.name_of(wheel.name.split("-")[0]) for wheel in WHEELS.iterdir()}
    assert {"pip", "pycuda", *(collect.name_of(line) for line in collect.wanted())} <= names
    assert not [name for name in names if name in ("torch", "triton") or name.startswith(("nvidia-", "tensorrt"))]


def test_a_step_that_fails_or_hangs_is_recorded_and_the_others_run(tmp_path, monkeypatch, capsys):
    test = "import pytest\ndef test_good(): pass\ndef test_bad(): assert 0\ndef test_none(): pytest.skip('no TensorRT')"
    for name, code in {
        "fine": "import json; print('progress'); print(json.dumps({'ratio': 2.5}))",
        "failing": "print('[1, 2]'); assert False, 'a reason'",
        "hanging": "import time; time.sleep(60)",
        "test_three": test,
    }.items():
        (tmp_path / f"{name}.py").write_text(code)
    monkeypatch.setattr(record, "ROOT", tmp_path)
    tests = ("pytest", "-q", "-p", "no:cacheprovider", "--junitxml={report}", "test_three.py")
    chosen = [Step(name, (name,), 20.0) for name in ("fine", "failing")]
    chosen += [Step("hanging", ("hanging",), 0.5), Step("tests", tests, 60)]
    assert not record.record(chosen, tmp_path / "gpu.json")
    found = json.loads((tmp_path / "gpu.json").read_text())
    assert found.keys() == {"format", "made", "versions", "untested", "passed", "steps"}
    assert found["versions"]["tensorrt"] is None
    assert "building and running engines" in found["untested"][0]
    assert [*found["steps"]] == ["fine", "failing", "hanging", "tests"]
    fine, failing, hanging, tested = found["steps"].values()
    assert (fine["error"], fine["result"]) == (None, {"ratio": 2.5})
    assert (failing["error"], failing["result"]) == ("exit code 1", [1, 2])
    assert "a reason" in failing["output"]
    assert hanging["error"] == "not finished after 0.5 s"
    assert tested["result"] == {"passed": 1, "failed": ["test_three::test_bad"], "skipped": {"no TensorRT": 1}}
    printed = capsys.readouterr().out
    assert str(tmp_path / "gpu.json") in printed
    assert "4/4 tests, at most 60 s" in printed
    assert record.record(chosen[:1], tmp_path / "gpu.json")


def test_the_steps_fit_into_eight_minutes_and_run_every_file_with_the_marker():
    assert sum(step.limit_s for step in steps()) <= 480
    assert {"tests/edge/test_runtimes.py", "tests/export/test_papers_frontier.py"} <= {*marked_tests()}
