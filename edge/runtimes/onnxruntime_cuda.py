"""ONNX Runtime on an NVIDIA GPU."""

from __future__ import annotations

from edge.bundles.bundle import Bundle
from edge.bundles.manifest import Artifact
from edge.errors import BackendError, BundleError
from edge.runtimes.onnxruntime_cpu import OnnxRuntimeCpu
from edge.runtimes.onnxruntime_runner import CUDA, import_onnxruntime
from edge.runtimes.runtime import Suitability

_OTHER_FILES = "tensorrt"


class OnnxRuntimeCuda(OnnxRuntimeCpu):
    """ONNX Runtime with its CUDA provider."""

    name = "onnxruntime-cuda"
    device = "GPU"
    thread_bound = True
    _providers = CUDA

    @classmethod
    def version(cls) -> str:
        """Return the version of ONNX Runtime; see :meth:`Runtime.version`."""
        providers, needed = import_onnxruntime().get_available_providers(), cls._providers[0][0]
        if needed not in providers:
            fix = "Install the extra 'cuda', or build for the CPU."
            raise BackendError(needed, given=providers, expected="it among them", fix=fix)
        return super().version()

    @classmethod
    def suitability(cls) -> Suitability | None:
        """Return whether this ONNX Runtime has its provider."""
        needed = cls._providers[0][0]
        if needed not in import_onnxruntime().get_available_providers():
            return Suitability(False, f"This ONNX Runtime has no {needed}.")
        return Suitability(True, f"ONNX Runtime {cls.version()} has its {needed}.")

    def artifact(self, bundle: Bundle, tier: str | None = None) -> Artifact:
        """Return the file that it uses of a tier: that for ONNX Runtime unless it is INT8, else that for TensorRT.

        INT8 files for ONNX Runtime compute their scales at run time, which is slow on a GPU.

        Raises:
            BundleError: there is no such tier, or it has no file for a GPU.
        """
        bundle.tier(tier)
        found = [
            artifact
            for runtime in (self.artifact_runtime, _OTHER_FILES)
            for artifact in _artifacts(bundle, runtime, tier)
            if artifact.precision != "int8" or artifact.runtime == _OTHER_FILES
        ]
        if found:
            return found[0]
        raise BundleError(
            f"bundle {bundle.path} tier {bundle.tier(tier).name!r}",
            given=[f"{one.precision} for {one.runtime}" for one in bundle.tier(tier).artifacts],
            expected="FP32, FP16, or INT8 with fixed scales: a GPU computes no dynamic INT8",
            fix="Export the bundle with --artifacts tensorrt too, or serve it on the CPU.",
        )

    def row_independent(self, artifact: Artifact) -> bool:
        """Return True: no file that it takes has scales of a whole run."""
        return True


def _artifacts(bundle: Bundle, runtime: str, tier: str | None) -> list[Artifact]:
    try:
        return [bundle.artifact(runtime, tier)]
    except BundleError:  # there is none
        return []
