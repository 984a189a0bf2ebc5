"""TensorRT on the GPU of this machine, which this release refuses."""

from __future__ import annotations

from edge.errors import BackendError
from edge.runtimes.runtime import Suitability
from edge.runtimes.tensorrt_rtx import TensorRtRtx

_NO_ENGINES = "this release does not build engines on the device"


class TensorRt(TensorRtRtx):
    """TensorRT as JetPack installs it.

    Raises:
        BackendError: always.
    """

    name = "tensorrt"
    parameter = ""
    flavor = "tensorrt"

    def __init__(self, parameter: str = "", reason: str = "") -> None:
        raise BackendError(
            "--target",
            given=self.name,
            expected=f"another target, because {_NO_ENGINES}",
            fix="Take auto, which is ONNX Runtime with the GPU where it has one.",
        )

    @classmethod
    def suitability(cls) -> Suitability | None:
        """Return that it is not suitable, and whether it is installed."""
        try:
            return Suitability(False, f"TensorRT {cls.version()} is installed, but {_NO_ENGINES}.")
        except BackendError:
            return Suitability(False, "No tensorrt package is installed.")
