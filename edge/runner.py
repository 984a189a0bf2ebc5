"""The contract of everything that can compute a model: ONNX Runtime today, TensorRT engines on the device."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

from edge.datatypes import Array, TensorSpec


class Runner(Protocol):
    """One loaded model. On the CPU several threads may call it at once; elsewhere the device's thread owns it.

    Attributes:
        platform: Triton's name for what runs, for example ``onnxruntime_onnx`` or ``tensorrt_plan``.
        device: where it runs, for example ``CPU`` or ``GPU``.
        inputs: what :meth:`infer` takes.
        outputs: what it returns.
    """

    @property
    def platform(self) -> str: ...

    @property
    def device(self) -> str: ...

    @property
    def inputs(self) -> tuple[TensorSpec, ...]: ...

    @property
    def outputs(self) -> tuple[TensorSpec, ...]: ...

    def infer(self, feeds: Mapping[str, Array]) -> dict[str, Array]:
        """Compute all outputs. The arrays returned belong to the caller.

        Raises:
            RunnerError: the runtime failed; its text is in the log.
        """
        ...

    def close(self) -> None:
        """Free the device memory; :meth:`infer` must not be called again."""
        ...
