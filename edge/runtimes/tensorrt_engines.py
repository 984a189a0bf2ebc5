"""Base class of the TensorRT and TensorRT-RTX runtimes, which build engines from the same files."""

from __future__ import annotations

from typing import ClassVar

from edge.errors import BackendError
from edge.runtimes import tensorrt_builder, tensorrt_package
from edge.runtimes.runtime import BuildMemory, BuildOptions, Product, Progress, Runtime, Source
from edge.runtimes.tensorrt_package import Flavor
from edge.runtimes.tensorrt_profiles import buckets, described

#: The major versions whose interface this release knows, by package.
_MAJORS: dict[Flavor, tuple[int, ...]] = {"tensorrt": (10, 11), "tensorrt_rtx": (1,)}
_OTHER = {
    "tensorrt": "Use JetPack 6.1 or newer, which has TensorRT 10.3 or newer.",
    "tensorrt_rtx": "Install the extra 'rtx' again.",
}


class TensorRtEngines(Runtime):
    """A runtime whose builds are TensorRT engines.

    Attributes:
        flavor: the package of TensorRT.
    """

    artifact_runtime = "tensorrt"
    flavor: ClassVar[Flavor]

    @classmethod
    def version(cls) -> str:
        """Return the version of the package; see :meth:`Runtime.version`.

        Raises:
            BackendError: it is not installed, or its major version is one that this release does not know.
        """
        found = tensorrt_package.version(cls.flavor)
        known = _MAJORS[cls.flavor]
        if found.partition(".")[0] not in map(str, known):
            expected = f"version {' or '.join(map(str, known))}"
            raise BackendError(cls.flavor, given=found, expected=expected, fix=_OTHER[cls.flavor])
        return found

    def build_key(self, source: Source) -> dict[str, str]:
        """Return the optimization profiles; see :meth:`Runtime.build_key`."""
        return {"profiles": "; ".join(map(described, buckets(source.tensors.profile)))}

    def build_memory(self, source: Source, options: BuildOptions) -> BuildMemory | None:
        """Return the estimated peak memory of a build; see :meth:`Runtime.build_memory`."""
        size_bytes = source.bundle.manifest.files[source.artifact.file].size_bytes
        return tensorrt_builder.memory_needed(size_bytes, options.workspace_bytes)

    def build(
        self,
        source: Source,
        options: BuildOptions = BuildOptions(),  # noqa: B008 - it is frozen
        progress: Progress | None = None,
    ) -> Product:
        """Compile an engine; see :meth:`Runtime.build`."""
        engine = tensorrt_builder.compile_onnx(
            source.read(),
            source.tensors.profile,
            flavor=self.flavor,
            compute_capability=self._compute_capability(),
            precision=source.artifact.precision,
            subject=source.subject,
            options=options,
            progress=progress,
        )
        return Product("model.engine", engine.data, engine.report)

    def _compute_capability(self) -> str | None:
        """Return the compute capability to compile for; None for the GPU of this machine."""
        return None
