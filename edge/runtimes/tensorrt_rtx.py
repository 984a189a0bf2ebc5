"""TensorRT-RTX, which compiles for desktop GPUs on machines without one: proof that a model compiles."""

from __future__ import annotations

from typing import ClassVar

from edge.errors import Literally, UsageError
from edge.runner import Runner
from edge.runtimes import tensorrt_builder
from edge.runtimes.runtime import BuildMemory, BuildOptions, Product, Source
from edge.runtimes.tensorrt_engines import TensorRtEngines
from edge.runtimes.tensorrt_package import Flavor


class TensorRtRtx(TensorRtEngines):
    """TensorRT-RTX for a compute capability. It only builds.

    Raises:
        UsageError: TensorRT-RTX does not compile for this compute capability.
        BackendError: TensorRT-RTX is not installed.
    """

    name = "tensorrt-rtx"
    parameter = "SMxx"
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

    def build_memory(self, source: Source, options: BuildOptions) -> BuildMemory | None:
        """Return None: it compiles on workstations; see :meth:`Runtime.build_memory`."""
        return None

    def load(self, source: Source, built: Product | None) -> Runner:
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

    def _compute_capability(self) -> str:
        return self.device
