"""ONNX Runtime with its TensorRT provider, and with CUDA for the operators that TensorRT does not take."""

from __future__ import annotations

import tempfile
from pathlib import Path

from edge.bundles.bundle import Bundle
from edge.bundles.manifest import Artifact, Profile
from edge.errors import BackendError
from edge.runner import Runner
from edge.runtimes import cuda, tensorrt_package
from edge.runtimes.onnxruntime_cuda import OnnxRuntimeCuda
from edge.runtimes.onnxruntime_runner import CUDA, TENSORRT_PROVIDER, OnnxRuntimeRunner, Providers
from edge.runtimes.runtime import BuildOptions, Product, Progress, Runtime, Source
from edge.runtimes.tensorrt import device_key

_SHAPES = {"min": "trt_profile_min_shapes", "opt": "trt_profile_opt_shapes", "max": "trt_profile_max_shapes"}


class OnnxRuntimeTensorRt(OnnxRuntimeCuda):
    """ONNX Runtime with its TensorRT provider.

    A build is an ONNX file that holds the engines, which ONNX Runtime calls an EP context model: loading it compiles
    nothing.
    """

    name = "onnxruntime-tensorrt"
    artifact_runtime = "tensorrt"
    isolated_build = True
    _providers = ((TENSORRT_PROVIDER, {}), *CUDA)

    def artifact(self, bundle: Bundle, tier: str | None = None) -> Artifact:
        """Return the file that it uses of a tier, which is TensorRT's; see :meth:`Runtime.artifact`."""
        return Runtime.artifact(self, bundle, tier)

    def cache_key(self) -> dict[str, str]:
        """Return what the engines in a build depend on; ``unknown`` is what needs pycuda or TensorRT's package."""
        try:
            facts = cuda.facts()
        except BackendError:
            facts = None
        try:
            version = tensorrt_package.version("tensorrt")
        except BackendError:
            version = "unknown"
        return super().cache_key() | device_key(facts) | {"tensorrt": version}

    def build(
        self,
        source: Source,
        options: BuildOptions = BuildOptions(),  # noqa: B008 - it is frozen
        progress: Progress | None = None,
    ) -> Product:
        """Compile the engines; see :meth:`Runtime.build`."""
        with tempfile.TemporaryDirectory() as scratch:
            path = Path(scratch, "model.onnx")
            context = {"ep.context_enable": "1", "ep.context_embed_mode": "1", "ep.context_file_path": str(path)}
            OnnxRuntimeRunner(
                source.read(),
                subject=source.subject,
                providers=self.providers(source, options),
                session_config=context,
            ).close()
            return Product(path.name, path.read_bytes())

    def load(self, source: Source, built: Product | None) -> Runner:
        """Load the engines; see :meth:`Runtime.load`."""
        model = built.data if built else source.read()
        providers = self.providers(source, BuildOptions())
        return OnnxRuntimeRunner(model, subject=source.subject, providers=providers)

    def providers(self, source: Source, options: BuildOptions) -> Providers:
        """Return the providers for a model, TensorRT's with its options."""
        precision, profile = source.artifact.precision, source.tensors.profile
        given = {
            "trt_max_workspace_size": str(options.workspace_bytes),
            "trt_fp16_enable": str(precision != "fp32"),
            "trt_int8_enable": str(precision == "int8"),
            **{option: _shapes(profile, bound) for bound, option in _SHAPES.items() if profile},
        }
        if options.timing_cache:
            options.timing_cache.parent.mkdir(parents=True, exist_ok=True)
            given["trt_timing_cache_enable"] = str(True)
            given["trt_timing_cache_path"] = str(options.timing_cache.parent)
        return (TENSORRT_PROVIDER, given), *CUDA


def _shapes(profile: dict[str, Profile], bound: str) -> str:
    """Return one bound of every profile as the provider writes it, such as ``ids:1x32,mask:1x32``."""
    return ",".join(f"{name}:{'x'.join(map(str, getattr(shapes, bound)))}" for name, shapes in profile.items())
