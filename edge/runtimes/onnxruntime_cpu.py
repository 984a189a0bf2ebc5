"""ONNX Runtime on the processor: the reference on every machine."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import ClassVar

from edge.bundles.manifest import Artifact
from edge.files import reserve
from edge.runner import Runner
from edge.runtimes.onnxruntime_runner import CPU, OnnxRuntimeRunner, Providers, import_onnxruntime
from edge.runtimes.runtime import BuildOptions, Product, Progress, Runtime, Source, Suitability


class OnnxRuntimeCpu(Runtime):
    """ONNX Runtime with its CPU provider. A build is the graph as ONNX Runtime optimised it."""

    name = "onnxruntime"
    artifact_runtime = "onnxruntime"
    device = "CPU"
    _providers: ClassVar[Providers] = CPU

    @classmethod
    def version(cls) -> str:
        """Return the version of ONNX Runtime; see :meth:`Runtime.version`."""
        return str(import_onnxruntime().__version__)

    @classmethod
    def suitability(cls) -> Suitability | None:
        """Return that it runs everywhere: it comes last of those that ``auto`` considers."""
        return Suitability(True, f"ONNX Runtime {cls.version()} runs on the CPU.")

    def row_independent(self, artifact: Artifact) -> bool:
        """Return False for INT8: the scale of dynamic INT8 activations is taken from the whole run."""
        return artifact.precision != "int8"

    def build(
        self,
        source: Source,
        options: BuildOptions = BuildOptions(),  # noqa: B008 - it is frozen
        progress: Progress | None = None,
    ) -> Product:
        """Optimise the graph; see :meth:`Runtime.build`."""
        model = source.read()
        with tempfile.TemporaryDirectory() as scratch:
            path = Path(scratch, "model.onnx")
            # ONNX Runtime reports a full disk as a broken model. Folded constants seldom double the size of a graph.
            reserve(Path(scratch, "room"), 2 * len(model))
            OnnxRuntimeRunner(
                model, subject=source.subject, providers=self._providers, optimized_path=str(path)
            ).close()
            return Product(path.name, path.read_bytes())

    def load(self, source: Source, built: Product | None) -> Runner:
        """Load the optimised graph, or the bundle's; see :meth:`Runtime.load`."""
        model = built.data if built else source.read()
        return OnnxRuntimeRunner(model, subject=source.subject, providers=self._providers)
