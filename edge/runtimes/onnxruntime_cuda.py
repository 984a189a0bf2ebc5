"""ONNX Runtime on an NVIDIA GPU."""

from __future__ import annotations

from edge.errors import BackendError
from edge.runtimes.onnxruntime_cpu import OnnxRuntimeCpu
from edge.runtimes.onnxruntime_runner import CUDA_PROVIDER, import_onnxruntime
from edge.runtimes.runtime import Suitability


class OnnxRuntimeCuda(OnnxRuntimeCpu):
    """ONNX Runtime with its CUDA provider."""

    name = "onnxruntime-cuda"
    device = "GPU"
    thread_bound = True
    _cuda = True

    @classmethod
    def version(cls) -> str:
        """Return the version of ONNX Runtime; see :meth:`Runtime.version`."""
        providers = import_onnxruntime().get_available_providers()
        if CUDA_PROVIDER not in providers:
            fix = "Install the extra 'cuda', or build for the CPU."
            raise BackendError(CUDA_PROVIDER, given=providers, expected="it among them", fix=fix)
        return super().version()

    @classmethod
    def suitability(cls) -> Suitability | None:
        """Return whether this ONNX Runtime has its CUDA provider."""
        if CUDA_PROVIDER not in import_onnxruntime().get_available_providers():
            return Suitability(False, "This ONNX Runtime has no CUDA provider.")
        return Suitability(True, f"ONNX Runtime {cls.version()} has its CUDA provider.")
