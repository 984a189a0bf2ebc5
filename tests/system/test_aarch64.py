"""The service on aarch64: its wheels for both JetPacks, and its answers on an emulated processor."""

import json
import shutil
import subprocess
import sys
from importlib import import_module
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.version import Version

from edge.errors import BackendError, UsageError
from tests.support.text_model import write_sentiment_bundle

SCRIPTS = Path(__file__).parent.parent.parent / "deploy" / "aarch64"
sys.path.append(str(SCRIPTS))
debian, emulate, wheels = (import_module(name) for name in ("debian", "emulate", "wheels"))


@pytest.fixture(scope="module")
def index():
    """Skip where pip cannot reach an index with wheels for aarch64."""
    try:
        wheels.resolve([Requirement("msgspec")], wheels.JETPACK_6, [])
    except BackendError as error:
        pytest.skip(f"needs a package index: {error}")


@pytest.mark.usefixtures("index")
@pytest.mark.parametrize(
    "pinned",
    [pytest.param(True, id="tested versions"), pytest.param(False, id="newest versions", marks=pytest.mark.slow)],
)
@pytest.mark.parametrize("target", [wheels.JETPACK_6, wheels.JETPACK_7], ids=["JetPack 6", "JetPack 7"])
def test_all_packages_of_a_jetson_have_wheels(target, pinned):
    constraints = wheels.tested_versions(target) if pinned else []
    found = wheels.resolve(wheels.device_requirements(target), target, constraints)
    assert {"grpcio", "ngh2", "numpy", "onnxruntime", "starlette", "tokenizers", "uvloop"} <= found.keys()
    assert not {"torch", "onnx", "pycuda"} & found.keys()
    assert all("aarch64" in wheel.file or wheel.file.endswith("-none-any.whl") for wheel in found.values())
    assert any(f"-cp{target.python.replace('.', '')}-" in wheel.file for wheel in found.values())
    if target == wheels.JETPACK_6:  # the last releases for Python 3.10
        assert Version(found["numpy"].version) < Version("2.3")
        assert found["onnxruntime"].version == "1.23.2"
        assert "exceptiongroup" in found  # only the markers of Python 3.10 require it
    else:
        assert "exceptiongroup" not in found


@pytest.mark.usefixtures("index")
def test_a_package_without_a_wheel_is_named():
    with pytest.raises(BackendError, match=r"wheels for Python 3\.10 on aarch64: got .*pycuda.*, expected a wheel of"):
        wheels.resolve([Requirement("pycuda")], wheels.JETPACK_6, [])


def test_an_aarch64_machine_is_not_emulated():
    with pytest.raises(UsageError, match="got 'aarch64', expected an x86_64 machine"):
        emulate.check_machine("aarch64")


@pytest.mark.skipif(not shutil.which("apt-get"), reason="needs apt")
def test_mirrors_without_the_packages_are_rejected(tmp_path):
    sources = tmp_path / "mirrors.list"
    sources.write_text(f"deb [arch=arm64 trusted=yes] file:{tmp_path}/none ./\n")
    packages = debian.Packages(tmp_path / "debian", "arm64", sources)
    with pytest.raises(BackendError, match=r"arm64 packages, apt-get update: got .*, expected a mirror with arm64"):
        packages.unpack(["python3"])
    assert not list(packages.root.iterdir())


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.skipif(not shutil.which("apt-get"), reason="needs apt")
@pytest.mark.usefixtures("index")
def test_an_emulated_jetson_gives_the_answers_of_this_machine(tmp_path):
    text = write_sentiment_bundle(tmp_path / "sentiment")
    command = [sys.executable, str(SCRIPTS / "emulate.py"), str(emulate.ORACLE), str(text.path), "--json"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    assert {check["name"]: check["found"] for check in report["doctor"]["checks"]}["python"].endswith("on aarch64")
    compared = {(one["model"], one["over"]): (one["requests"], one["identical"]) for one in report["comparisons"]}
    for over in ("nghttp2", "grpcio"):
        assert compared["calculator-oracle", over] == (1500, 1500)
        assert compared[text.manifest.name, over] == (text.golden.rows, text.golden.rows)
    assert compared["calculator-oracle", "http"] == (150, 150)
