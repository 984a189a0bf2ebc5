"""The choice of a backend, on machines made of a few files."""

from __future__ import annotations

import sys
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType

import onnxruntime
import pytest

from edge.errors import BackendError, UsageError
from edge.runtimes.backends import Backend, choose, jetson_model
from tests.edge.marks import with_rtx

# What ONNX Runtime there is decides between the two, on a Jetson as anywhere.
CUDA = "CUDAExecutionProvider" in onnxruntime.get_available_providers()
NAME, DEVICE = ("onnxruntime-cuda", "GPU") if CUDA else ("onnxruntime", "CPU")
MODEL = "NVIDIA Jetson Orin Nano Engineering Reference Developer Kit Super"
RELEASE = "# R36 (release), REVISION: 4.3, GCID: 12345, BOARD: generic\n"

without_tensorrt = pytest.mark.skipif(find_spec("tensorrt") is not None, reason="this machine has TensorRT")
without_rtx = pytest.mark.skipif(find_spec("tensorrt_rtx") is not None, reason="tensorrt_rtx is installed")


def root_with(directory: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        (directory / name).parent.mkdir(parents=True, exist_ok=True)
        (directory / name).write_text(text)
    return directory


@pytest.mark.parametrize(
    ("files", "model"),
    [
        ({}, None),
        ({"proc/device-tree/model": "Raspberry Pi 5 Model B Rev 1.0\0"}, None),
        ({"proc/device-tree/model": f"{MODEL}\0"}, MODEL),
        ({"proc/device-tree/model": f"{MODEL}\0", "etc/nv_tegra_release": RELEASE}, MODEL),
        ({"etc/nv_tegra_release": RELEASE}, "NVIDIA Jetson"),
    ],
)
def test_jetson_model(tmp_path: Path, files: dict[str, str], model: str | None):
    assert jetson_model(root_with(tmp_path, files)) == model


def test_auto_on_another_machine(tmp_path: Path):
    backend = choose("auto", root=tmp_path)
    assert (backend.name, backend.device) == (NAME, DEVICE)
    assert backend.reason.startswith("This machine is no Jetson, so ONNX Runtime")


@without_tensorrt
def test_auto_on_a_jetson_without_tensorrt(tmp_path: Path):
    backend = choose("auto", root=root_with(tmp_path, {"proc/device-tree/model": f"{MODEL}\0"}))
    assert (backend.name, backend.device) == (NAME, DEVICE)
    assert backend.reason.startswith(f"This {MODEL} has no tensorrt package, so ONNX Runtime")


@without_tensorrt
def test_auto_on_a_jetson_with_tensorrt_says_that_no_engine_is_built(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    # A stand-in for JetPack's package, of which only the version is asked.
    tensorrt = ModuleType("tensorrt")
    tensorrt.__version__ = "10.3.0"  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "tensorrt", tensorrt)
    backend = choose("auto", root=root_with(tmp_path, {"etc/nv_tegra_release": RELEASE}))
    assert backend.name == NAME
    assert "has TensorRT 10.3.0, but this release does not build engines on the device, so ONNX" in backend.reason


def test_explicit_targets():
    assert choose("onnxruntime") == Backend("onnxruntime", "CPU", "It was asked for.")
    assert choose("onnxruntime-cuda") == Backend("onnxruntime-cuda", "GPU", "It was asked for.")


def test_tensorrt_is_refused_until_it_is_built_on_the_device():
    with pytest.raises(BackendError, match="this release does not build engines on the device"):
        choose("tensorrt")


@pytest.mark.parametrize("target", ["", "cuda", "TENSORRT", "onnxruntime:SM86", "auto:"])
def test_unknown_target(target: str):
    with pytest.raises(UsageError, match=r"--target: got .*, expected auto, onnxruntime"):
        choose(target)


@with_rtx
@pytest.mark.parametrize("device", ["SM75", "SM80", "SM86", "SM89", "SM120"])
def test_compute_capability(device: str):
    backend = choose(f"tensorrt-rtx:{device}")
    assert (backend.name, backend.device) == ("tensorrt-rtx", device)


@with_rtx
@pytest.mark.parametrize(("device", "given"), [("SM87", "'SM87'"), ("CURRENT", "'CURRENT'"), ("", "no compute")])
def test_unsupported_compute_capability(device: str, given: str):
    with pytest.raises(UsageError, match=rf"got {given}.*expected :SM75 :SM80 :SM86.*a Jetson Orin .SM87. is none"):
        choose(f"tensorrt-rtx:{device}")


@without_rtx
def test_missing_tensorrt_rtx():
    with pytest.raises(BackendError, match=r"tensorrt_rtx: got .*Install the extra 'rtx' on an x86-64 machine"):
        choose("tensorrt-rtx:SM86")
