"""ONNX Runtime on the CPU, on an NVIDIA GPU, and with its TensorRT provider."""

from __future__ import annotations

import tempfile
from contextlib import suppress
from operator import itemgetter
from pathlib import Path
from typing import ClassVar

from edge.bundles.bundle import Bundle
from edge.bundles.fields import Role
from edge.bundles.manifest import Artifact, Profile
from edge.errors import BackendError, BundleError
from edge.files import reserve
from edge.runner import Runner
from edge.runtimes import cuda
from edge.runtimes.onnxruntime_runner import (
    CPU,
    CUDA,
    TENSORRT_PROVIDER,
    OnnxRuntimeRunner,
    Providers,
    check_provider,
    import_onnxruntime,
)
from edge.runtimes.runtime import BuildOptions, Product, Progress, Runtime, Source, Suitability
from edge.runtimes.tensorrt import package
from edge.runtimes.tensorrt.runtime import device_key

_OTHER_FILES = "tensorrt"
_SHAPES = {"min": "trt_profile_min_shapes", "opt": "trt_profile_opt_shapes", "max": "trt_profile_max_shapes"}


class OnnxRuntimeCpu(Runtime):
    """ONNX Runtime with its CPU provider, the reference on every machine. A build is the optimized graph."""

    name = "onnxruntime"
    artifact_runtime = "onnxruntime"
    device = "CPU"
    _providers: ClassVar[Providers] = CPU

    @classmethod
    def version(cls) -> str:
        return str(import_onnxruntime().__version__)

    @classmethod
    def suitability(cls) -> Suitability | None:
        return Suitability(True, f"ONNX Runtime {cls.version()} runs on the CPU.")

    def row_independent(self, artifact: Artifact) -> bool:
        """Return False for INT8: dynamic INT8 computes the scale of its activations over the whole run."""
        return artifact.precision != "int8"

    def build(self, source: Source, options: BuildOptions, progress: Progress | None = None) -> Product:
        model = source.read()
        with tempfile.TemporaryDirectory() as scratch:
            path = Path(scratch, "model.onnx")
            # ONNX Runtime reports a full disk as a broken model. Folded constants seldom double the size of a graph.
            reserve(Path(scratch, "room"), 2 * len(model))
            providers = self.providers(source, options)
            OnnxRuntimeRunner(model, subject=source.subject, providers=providers, optimized_path=str(path)).close()
            return Product(path.name, path.read_bytes())

    def load(self, source: Source, built: Product | None) -> Runner:
        model = built.data if built else source.read()
        return OnnxRuntimeRunner(model, subject=source.subject, providers=self.providers(source, BuildOptions()))

    def providers(self, source: Source, options: BuildOptions) -> Providers:
        """Return ONNX Runtime's execution providers for a model, with their options."""
        return self._providers


class OnnxRuntimeCuda(OnnxRuntimeCpu):
    """ONNX Runtime with its CUDA provider."""

    name = "onnxruntime-cuda"
    device = "GPU"
    thread_bound = True
    _providers = CUDA

    @classmethod
    def version(cls) -> str:
        check_provider(cls._providers[0][0])
        return super().version()

    @classmethod
    def suitability(cls) -> Suitability | None:
        needed = cls._providers[0][0]
        if needed not in import_onnxruntime().get_available_providers():
            return Suitability(False, f"This ONNX Runtime has no {needed}.")
        return Suitability(True, f"ONNX Runtime {cls.version()} has its {needed}.")

    def artifact(self, bundle: Bundle, tier: str | None = None, role: Role = "model") -> Artifact:
        """Return the file for ONNX Runtime unless it is INT8, else the file for TensorRT.

        INT8 files for ONNX Runtime compute their scales at run time, which is slow on a GPU.
        """
        name, files = bundle.tier(tier).name, bundle.tier(tier).artifacts
        for runtime in (self.artifact_runtime, _OTHER_FILES):
            with suppress(BundleError):
                artifact = bundle.artifact(runtime, tier, role)
                if artifact.precision != "int8" or artifact.runtime == _OTHER_FILES:
                    return artifact
        subject, given = (
            f"bundle {bundle.path} tier {name!r}",
            [f"{file.precision} for {file.runtime}" for file in files],
        )
        expected = "FP32, FP16, or INT8 with fixed scales: a GPU computes no dynamic INT8"
        fix = "Export the bundle with --artifacts tensorrt too, or serve it on the CPU."
        raise BundleError(subject, given=given, expected=expected, fix=fix)

    def row_independent(self, artifact: Artifact) -> bool:
        """Return True: it runs no files with dynamic INT8."""
        return True


class OnnxRuntimeTensorRt(OnnxRuntimeCuda):
    """ONNX Runtime with its TensorRT provider, and with CUDA for the operators that TensorRT does not support.

    A build is an ONNX file that contains the engines (an EP context model), so loading it compiles nothing.
    """

    name = "onnxruntime-tensorrt"
    artifact_runtime = "tensorrt"
    isolated_build = True
    _providers = ((TENSORRT_PROVIDER, {}), *CUDA)

    def artifact(self, bundle: Bundle, tier: str | None = None, role: Role = "model") -> Artifact:
        return Runtime.artifact(self, bundle, tier, role)

    def cache_key(self) -> dict[str, str]:
        """Return everything that the engines depend on; without pycuda or TensorRT's package a part is ``unknown``."""
        facts, version = None, "unknown"
        with suppress(BackendError):
            facts = cuda.facts()
        with suppress(BackendError):
            version = package.version("tensorrt")
        return super().cache_key() | device_key(facts) | {"tensorrt": version}

    def providers(self, source: Source, options: BuildOptions) -> Providers:
        precision, profiles = source.artifact.precision, source.tensors.profiles
        given = {
            "trt_max_workspace_size": str(options.workspace_bytes),
            "trt_fp16_enable": str(precision != "fp32"),
            "trt_int8_enable": str(precision == "int8"),
            **{option: _shapes(profiles, bound) for bound, option in _SHAPES.items() if profiles},
        }
        if options.timing_cache:
            options.timing_cache.parent.mkdir(parents=True, exist_ok=True)
            given["trt_timing_cache_enable"] = str(True)
            given["trt_timing_cache_path"] = str(options.timing_cache.parent)
        return (TENSORRT_PROVIDER, given), *CUDA


def _shapes(profiles: tuple[dict[str, Profile], ...], bound: str) -> str:
    """Return one bound of every profile in the provider's format, such as ``ids:1x32,mask:1x32``.

    The provider does not choose among several sets of profiles, so it gets one around them, with the first ``opt``.
    """
    chosen = {"min": min, "max": max}.get(bound, itemgetter(0))
    shapes = {name: zip(*(getattr(profile[name], bound) for profile in profiles), strict=True) for name in profiles[0]}
    return ",".join(f"{name}:{'x'.join(str(chosen(sizes)) for sizes in axes)}" for name, axes in shapes.items())
