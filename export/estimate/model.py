"""One tier of a bundle as a prediction sees it: its ONNX file for TensorRT, and the kernels of its engine."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from edge.bundles.bundle import Bundle
from edge.bundles.manifest import Tier
from edge.datatypes import TensorSpec
from edge.errors import BackendError
from edge.runtimes import tensorrt_package
from export.estimate.devices import Mode
from export.estimate.kernels import COMPUTE_CAPABILITY, kernels
from export.estimate.operations import Halves, halves_of, work_of
from export.estimate.roofline import Prediction, predict, usual_kernels

RUNTIME = "tensorrt"


class TierModel:
    """One tier's file, with the kernels of its engine where they can be counted."""

    def __init__(self, bundle: Bundle, tier: Tier) -> None:
        artifact = bundle.artifact(RUNTIME, tier.name)
        self.precision = artifact.precision
        self._subject = f"model {bundle.path / artifact.file}"
        self._data = bundle.read(artifact.file)
        names = kernels(self._data, bundle.manifest.tensors(artifact).profile)
        self.launches = len(names) if names else None

    def halves(self, shapes: Mapping[str, tuple[int, ...]], dim: int) -> Halves:
        """Return the halves of the layers."""
        return halves_of(self._data, shapes, dim, self._subject)

    def predict(self, shapes: Mapping[str, tuple[int, ...]], mode: Mode) -> Prediction:
        """Predict a run for inputs of these shapes."""
        work = work_of(self._data, shapes, self._subject)
        return predict(work, self.launches or usual_kernels(work), mode)


def input_shapes(
    inputs: Sequence[TensorSpec], max_batch_size: int, batch: int, tokens: int | None
) -> dict[str, tuple[int, ...]]:
    """Return the shapes of the inputs of a run.

    Args:
        max_batch_size: of its bundle; 0 where the first dimension is no batch.
        tokens: of each row; None where the inputs have no other dimension to choose.
    """
    shapes = {}
    for spec in inputs:
        sizes = list(spec.shape)
        if max_batch_size:
            sizes[0] = batch
        shapes[spec.name] = tuple(tokens or 1 if size == -1 else size for size in sizes)
    return shapes


def how_counted(counted: bool) -> str:
    """Return how kernels were counted, for people."""
    if not counted:
        return "ten kernels for a layer, as in the fit: TensorRT-RTX is not installed or does not compile the model"
    try:
        release = tensorrt_package.version("tensorrt_rtx")
    except BackendError:
        release = "unknown"
    return f"kernels counted in the engine of TensorRT-RTX {release} for {COMPUTE_CAPABILITY}"
