"""TensorRT on the GPU of this machine."""

from __future__ import annotations

from edge.errors import BackendError, Literally
from edge.instruments.board import read_board
from edge.runner import Runner
from edge.runtimes import cuda
from edge.runtimes.runtime import Product, Source, Suitability
from edge.runtimes.tensorrt_engines import TensorRtEngines
from edge.runtimes.tensorrt_runner import TensorRtRunner

#: The least compute capability that TensorRT 10 supports.
_LEAST_COMPUTE_CAPABILITY = (7, 5)


class TensorRt(TensorRtEngines):
    """TensorRT as JetPack installs it: engines are built on the device that runs them, in a process of their own."""

    name = "tensorrt"
    flavor = "tensorrt"
    isolated_build = True
    thread_bound = True
    few_shapes = True
    device = "GPU"

    @classmethod
    def version(cls) -> str:
        """Return the version of TensorRT; see :meth:`Runtime.version`.

        Raises:
            BackendError: TensorRT or pycuda is not installed, or there is no GPU that TensorRT supports.
        """
        version = super().version()
        found = cuda.facts()
        if tuple(map(int, found.compute_capability.split("."))) < _LEAST_COMPUTE_CAPABILITY:
            expected = f"a GPU of compute capability {'.'.join(map(str, _LEAST_COMPUTE_CAPABILITY))} or above"
            fix = "Take --target onnxruntime."
            given = f"{found.name} of {found.compute_capability}"
            raise BackendError(f"TensorRT {version}", given=Literally(given), expected=expected, fix=fix)
        return version

    @classmethod
    def suitability(cls) -> Suitability | None:
        """Return whether TensorRT, pycuda and a GPU that both support are there."""
        try:
            version = cls.version()
        except BackendError as error:
            return Suitability(False, f"TensorRT cannot be used here ({error.subject}: {error.given}).")
        found = cuda.facts()
        reason = f"TensorRT {version} runs on {found.name} of compute capability {found.compute_capability}."
        return Suitability(True, reason)

    def cache_key(self) -> dict[str, str]:
        """Return the runtime, the GPU, and the releases of L4T and CUDA, all of which an engine depends on."""
        return super().cache_key() | device_key(cuda.facts())

    def load(self, source: Source, built: Product | None) -> Runner:
        """Load an engine; see :meth:`Runtime.load`.

        Raises:
            BackendError: there is no engine for this device, or TensorRT or the device refuses it.
        """
        rebuild = f"Build it on this device: {self.build_command(source)}"
        if built is None:
            given = Literally("no engine")
            raise BackendError(source.subject, given=given, expected="one built on this device", fix=rebuild)
        return TensorRtRunner(
            built.data,
            self.flavor,
            subject=source.subject,
            rebuild=f"{rebuild} --replace",
            index_limits=built.engine.index_limits if built.engine else {},
        )


def device_key(facts: cuda.DeviceFacts | None) -> dict[str, str]:
    """Return what an engine depends on beside TensorRT, by its name; None is a GPU that cannot be asked."""
    board = read_board()
    return {
        "device_name": facts.name if facts else "unknown",
        "compute_capability": facts.compute_capability if facts else "unknown",
        "l4t": (board and board.l4t) or "none",
        "cuda": facts.cuda if facts else "unknown",
    }
