"""Which runtime shall compute the models of this machine, and why."""

from __future__ import annotations

from pathlib import Path

import msgspec

from edge.errors import BackendError, Literally, UsageError
from edge.runtimes import tensorrt_builder
from edge.runtimes.onnxruntime_runner import import_onnxruntime

TARGETS = "auto, onnxruntime, onnxruntime-cuda, tensorrt or tensorrt-rtx:SMxx"
CUDA_PROVIDER = "CUDAExecutionProvider"

_NO_ENGINES_ON_DEVICE = "this release does not build engines on the device"


class Backend(msgspec.Struct, frozen=True):
    """A runtime and what it runs on.

    Attributes:
        name: ``onnxruntime``, ``onnxruntime-cuda`` or ``tensorrt-rtx``.
        device: ``CPU``, ``GPU``, or the compute capability that is compiled for, such as ``SM86``.
        reason: one sentence that says why this one.
    """

    name: str
    device: str
    reason: str


def choose(target: str = "auto", *, root: Path = Path("/")) -> Backend:
    """Return the backend for a target.

    Args:
        target: one of :data:`TARGETS`; ``auto`` is the fastest that this machine and this release have.
        root: where ``etc`` and ``proc`` are looked for.

    Raises:
        UsageError: there is no such target, or no such compute capability.
        BackendError: the package that the target needs is missing.
    """
    name, _, device = target.partition(":")
    if name == "tensorrt-rtx":
        return _tensorrt_rtx(device)
    if target == "auto":
        return _automatic(root)
    if target == "onnxruntime":
        return Backend("onnxruntime", "CPU", "It was asked for.")
    if target == "onnxruntime-cuda":
        return Backend("onnxruntime-cuda", "GPU", "It was asked for.")
    if target == "tensorrt":
        raise BackendError(
            "--target",
            given=target,
            expected=f"another target, because {_NO_ENGINES_ON_DEVICE}",
            fix="Take auto, which is ONNX Runtime with the GPU where it has one.",
        )
    raise UsageError("--target", given=target, expected=TARGETS, fix="Take auto if in doubt.")


def jetson_model(root: Path = Path("/")) -> str | None:
    """Return what a Jetson calls itself, and None on any other machine."""
    try:
        # The device tree ends its strings in NUL.
        model = (root / "proc/device-tree/model").read_text(errors="replace").strip("\0\n ")
    except OSError:
        model = ""
    if "jetson" in model.lower():
        return model
    # Containers often have no device tree, and NVIDIA's runtime mounts this file into them.
    return "NVIDIA Jetson" if (root / "etc/nv_tegra_release").is_file() else None


def _automatic(root: Path) -> Backend:
    cuda = CUDA_PROVIDER in import_onnxruntime().get_available_providers()
    name, device = ("onnxruntime-cuda", "GPU") if cuda else ("onnxruntime", "CPU")
    provider = "ONNX Runtime with its CUDA provider" if cuda else "ONNX Runtime on the CPU (it has no CUDA provider)"
    jetson = jetson_model(root)
    if jetson is None:
        return Backend(name, device, f"This machine is no Jetson, so {provider} computes.")
    try:
        found = f"TensorRT {tensorrt_builder.version('tensorrt')}, but {_NO_ENGINES_ON_DEVICE}"
    except BackendError:
        found = "no tensorrt package"
    return Backend(name, device, f"This {jetson} has {found}, so {provider} computes.")


def _tensorrt_rtx(device: str) -> Backend:
    known = tensorrt_builder.compute_capabilities()
    if device not in known:
        given: object = device or Literally("no compute capability")
        fix = "Take one of these; a Jetson Orin (SM87) is none of them, use --target auto there."
        raise UsageError("--target tensorrt-rtx", given=given, expected=f":{' :'.join(known)}", fix=fix)
    return Backend("tensorrt-rtx", device, f"It was asked for; TensorRT-RTX compiles for {device} without a GPU.")
