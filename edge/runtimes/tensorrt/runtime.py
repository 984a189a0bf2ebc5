"""TensorRT on the GPU of this machine, and TensorRT-RTX, which compiles for desktop GPUs on machines without one."""

from __future__ import annotations

from typing import ClassVar

from edge.bundles.programs import GenerateProgram
from edge.errors import BackendError, Raw, UsageError
from edge.instruments.board import read_board
from edge.runner import Runner
from edge.runtimes import cuda
from edge.runtimes.runtime import BuildMemory, BuildOptions, Product, Progress, Runtime, Source, Suitability
from edge.runtimes.tensorrt import build as engines
from edge.runtimes.tensorrt import package
from edge.runtimes.tensorrt.package import Flavor
from edge.runtimes.tensorrt.profiles import described, optimization_profiles
from edge.runtimes.tensorrt.runner import SLOTS, TensorRtRunner

#: The major versions that this release supports, by package, and how to get one.
_MAJORS: dict[Flavor, tuple[tuple[str, ...], str]] = {
    "tensorrt": (("10", "11"), "Use JetPack 6.1 or newer, which has TensorRT 10.3 or newer."),
    "tensorrt_rtx": (("1",), "Install the extra 'rtx' again."),
}
#: The lowest compute capability that TensorRT 10 supports.
_LEAST_COMPUTE_CAPABILITY = (7, 5)


class _Engines(Runtime):
    """A runtime whose builds are TensorRT engines."""

    artifact_runtime = "tensorrt"
    flavor: ClassVar[Flavor]  # the Python package

    @classmethod
    def version(cls) -> str:
        version = package.version(cls.flavor)
        known, fix = _MAJORS[cls.flavor]
        if version.partition(".")[0] not in known:
            raise BackendError(cls.flavor, given=version, expected=f"version {' or '.join(known)}", fix=fix)
        return version

    def build_key(self, source: Source) -> dict[str, str]:
        profiles = optimization_profiles(source.tensors.profile, source.tensors.more_profiles)
        return {"profiles": "; ".join(map(described, profiles))}

    def build(self, source: Source, options: BuildOptions, progress: Progress | None = None) -> Product:
        return engines.compile_onnx(
            source.read(),
            source.tensors.profile,
            more_profiles=source.tensors.more_profiles,
            flavor=self.flavor,
            compute_capability=self.device if self.build_only else None,
            subject=source.subject,
            options=options,
            progress=progress,
        )


class TensorRt(_Engines):
    """TensorRT as JetPack installs it. A child process builds the engines, on the device that runs them."""

    name = "tensorrt"
    flavor = "tensorrt"
    isolated_build = True
    thread_bound = True
    few_shapes = True
    tensor_buffers = 2 * SLOTS  # of each pending run, on host and device
    device = "GPU"

    @classmethod
    def version(cls) -> str:
        version = super().version()
        gpu = cuda.facts()
        if tuple(map(int, gpu.compute_capability.split("."))) < _LEAST_COMPUTE_CAPABILITY:
            expected = f"a GPU of compute capability {'.'.join(map(str, _LEAST_COMPUTE_CAPABILITY))} or above"
            fix = "Take --target onnxruntime."
            given = f"{gpu.name} of {gpu.compute_capability}"
            raise BackendError(f"TensorRT {version}", given=Raw(given), expected=expected, fix=fix)
        return version

    @classmethod
    def suitability(cls) -> Suitability | None:
        try:
            version = cls.version()
        except BackendError as error:
            return Suitability(False, f"TensorRT cannot be used here ({error.subject}: {error.given}).")
        gpu = cuda.facts()
        reason = f"TensorRT {version} runs on {gpu.name} of compute capability {gpu.compute_capability}."
        return Suitability(True, reason)

    def cache_key(self) -> dict[str, str]:
        return super().cache_key() | device_key(cuda.facts())

    def build_memory(self, source: Source, options: BuildOptions) -> BuildMemory | None:
        size_bytes = source.bundle.manifest.files[source.artifact.file].size_bytes
        return engines.memory_needed(size_bytes, options.workspace_bytes)

    def load(self, source: Source, built: Product | None) -> Runner:
        assert built, "an isolated build"
        rebuild = f"Build it on this device: {self.build_command(source)} --replace"
        limits = built.report.index_limits if built.report else {}
        return TensorRtRunner(
            built.data,
            self.flavor,
            subject=source.subject,
            rebuild=rebuild,
            index_limits=limits,
            preallocates=not isinstance(source.bundle.manifest.program, GenerateProgram),
        )


class TensorRtRtx(_Engines):
    """TensorRT-RTX for one compute capability. It only builds, as a proof that a model compiles."""

    name = "tensorrt-rtx"
    parameter = "SMxx"
    build_only = True
    flavor = "tensorrt_rtx"

    def __init__(self, parameter: str = "", reason: str = "The target names it.") -> None:
        known = engines.compute_capabilities()
        if parameter not in known:
            given: object = parameter or Raw("no compute capability")
            fix = "Take one of these; a Jetson Orin (SM87) is none of them, use --target auto there."
            raise UsageError(f"--target {self.name}", given=given, expected=f":{' :'.join(known)}", fix=fix)
        super().__init__(parameter, f"{reason} TensorRT-RTX compiles for {parameter} without a GPU.")
        self.device = parameter

    def load(self, source: Source, built: Product | None) -> Runner:
        raise self.only_builds()


def device_key(facts: cuda.DeviceFacts | None) -> dict[str, str]:
    """Return everything beside TensorRT that an engine depends on, by its name; None is an unknown GPU."""
    board = read_board()
    return {
        "device_name": facts.name if facts else "unknown",
        "compute_capability": facts.compute_capability if facts else "unknown",
        "l4t": (board and board.l4t) or "none",
        "cuda": facts.cuda if facts else "unknown",
    }
