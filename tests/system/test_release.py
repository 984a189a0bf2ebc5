"""The wheel and the source distribution, as they would be published."""

import subprocess
import sys
import tarfile
import zipfile
from email import message_from_bytes
from pathlib import Path

import pytest

from edge.launch import running_server
from tests.support.commands import answer, run
from tests.support.models import ORACLE, ORACLE_BUNDLE

ROOT = Path(__file__).parents[2]
#: Of JetPack 6 and 7.
PYTHONS = ("3.10", "3.12")


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    """The distributions, the wheel made from the source distribution."""
    place = tmp_path_factory.mktemp("dist")
    answer(run([sys.executable, "-m", "build", "--no-isolation", "--outdir", str(place), str(ROOT)]))
    (wheel,), (source,) = place.glob("*.whl"), place.glob("*.tar.gz")
    return wheel, source


def test_the_wheel_has_the_packages_and_the_metadata_of_an_index(built):
    wheel, source = built
    with zipfile.ZipFile(wheel) as opened:
        names = opened.namelist()
        (metadata,) = (name for name in names if name.endswith(".dist-info/METADATA"))
        about = message_from_bytes(opened.read(metadata))
    assert {name.partition("/")[0] for name in names} == {"edge", "export", metadata.partition("/")[0]}
    assert {"edge/py.typed", "export/py.typed"} <= set(names)
    assert not [name for name in names if name.endswith((".jsonl", ".png"))]
    assert wheel.stat().st_size < 2e6
    assert (about["Name"], about["Author"], about["License-Expression"]) == (
        "fewheads", "Fewheads contributors", "Apache-2.0",
    )  # fmt: skip
    assert about["Description-Content-Type"] == "text/markdown"
    assert {f"Programming Language :: Python :: {version}" for version in PYTHONS} <= set(about.get_all("Classifier"))
    assert about["Keywords"]
    assert about["Project-URL"] is None
    with tarfile.open(source) as opened:
        files = {name.partition("/")[2] for name in opened.getnames()}
    assert {"LICENSE", "README.md", "CHANGELOG.md", "edge/py.typed", "tests/system/test_release.py"} <= files


@pytest.mark.slow
@pytest.mark.parametrize("version", PYTHONS)
def test_a_clean_environment_serves_from_the_wheel(built, tmp_path, version):
    found = [*Path.home().glob(f".pyenv/versions/{version}.*/bin/python")]
    if not found:
        pytest.skip(f"no Python {version} on this machine")
    subprocess.run([found[0], "-m", "venv", tmp_path / "venv"], check=True)
    python = tmp_path / "venv" / "bin" / "python"
    install = ["-m", "pip", "install", "-q", "-c", str(ROOT / "constraints.txt"), f"{built[0]}[cpu,fast]"]
    answer(run([str(python), *install], PYTHONPATH=""))
    # Isolated, because the packages of the checkout would else be found first.
    with running_server([ORACLE_BUNDLE], cache=tmp_path / "cache", python=[str(python), "-I"]) as ready:
        address = f"127.0.0.1:{ready.grpc_port}"
        asked = [str(python), "-I", "-m", "edge", "infer", ORACLE, "3 - -4 + 2", "--url", address]
        assert "9" in answer(run(asked))
