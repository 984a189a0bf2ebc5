"""TensorRT-RTX, which compiles for desktop GPUs on machines without one: proof that a model compiles."""

from __future__ import annotations

from typing import ClassVar

from edge.errors import Literally, UsageError
from edge.runner import Runner
from edge.runtimes import tensorrt_builder, tensorrt_package
from edge.runtimes.runtime import Product, Progress, Runtime, Source
from edge.runtimes.tensorrt_package import Flavor


class TensorRtRtx(Runtime):
    """TensorRT-RTX for a compute capability. It only builds.

    Raises:
        UsageError: TensorRT-RTX does not compile for this compute capability.
        BackendError: TensorRT-RTX is not installed.
    """

    name = "tensorrt-rtx"
    parameter = "SMxx"
    artifact_runtime = "tensorrt"
    build_only = True
    flavor: ClassVar[Flavor] = "tensorrt_rtx"

    def __init__(self, parameter: str = "", reason: str = "The target names it.") -> None:
        known = tensorrt_builder.compute_capabilities()
        if parameter not in known:
            given: object = parameter or Literally("no compute capability")
            fix = "Take one of these; a Jetson Orin (SM87) is none of them, use --target auto there."
            raise UsageError(f"--target {self.name}", given=given, expected=f":{' :'.join(known)}", fix=fix)
        super().__init__(parameter, f"{reason} TensorRT-RTX compiles for {parameter} without a GPU.")
        self.device = parameter

    @classmethod
    def version(cls) -> str:
        """Return the version of the package; see :meth:`Runtime.version`."""
        return tensorrt_package.version(cls.flavor)

    def build(self, source: Source, progress: Progress | None = None) -> Product:
        """Compile an engine; see :meth:`Runtime.build`."""
        engine = tensorrt_builder.compile_onnx(
            source.read(),
            source.tensors.profile,
            flavor=self.flavor,
            compute_capability=self.device,
            subject=source.subject,
            progress=progress,
        )
        return Product("model.engine", engine.data, engine.report)

    def load(self, source: Source, built: bytes | None) -> Runner:
        """Refuse: no GPU that this runtime compiles for is driven by this program.

        Raises:
            UsageError: always.
        """
        raise UsageError(
            "--target",
            given=f"{self.name}:{self.device}",
            expected="a target that this program can run",
            fix="Its engines only prove that the model compiles; take auto to run it.",
        )
