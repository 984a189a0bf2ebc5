"""ONNX Runtime: the reference on every machine, and the embedded default where there is no TensorRT."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from edge.bundles import text
from edge.bundles.onnx_file import check_self_contained
from edge.datatypes import ONNX_TYPES, Array, TensorSpec
from edge.errors import BackendError, BundleError, Literally, RunnerError

if TYPE_CHECKING:
    import onnxruntime

log = logging.getLogger(__name__)


class OnnxRuntimeRunner:
    """A model in ONNX Runtime, on the CPU or, where the CUDA provider is present, on the GPU.

    Args:
        model: the bytes of the ONNX file; bytes, so that what was hashed is what runs.
        subject: how errors call the model.
        threads: intra-op threads. One by default: on few cores more threads cost more than they give for small models.
        cuda: run on the GPU.
        optimized_path: where ONNX Runtime shall write the graph as it optimised it.

    Raises:
        BundleError: the bytes are no ONNX model that this runtime can run, or it keeps weights in other files.
        BackendError: ONNX Runtime, or its CUDA provider, is missing.
    """

    platform = "onnxruntime_onnx"

    def __init__(
        self, model: bytes, *, subject: str, threads: int = 1, cuda: bool = False, optimized_path: str | None = None
    ) -> None:
        check_self_contained(model, subject)
        ort = import_onnxruntime()
        self.device = "GPU" if cuda else "CPU"
        provider = "CUDAExecutionProvider" if cuda else "CPUExecutionProvider"
        if provider not in ort.get_available_providers():
            fix = "Install the extra 'cuda', or build for the CPU."
            raise BackendError(provider, given=ort.get_available_providers(), expected="it among them", fix=fix)
        options = ort.SessionOptions()
        options.intra_op_num_threads = threads
        options.inter_op_num_threads = 1
        options.log_severity_level = 3  # errors only; they reach the caller as exceptions
        # Spinning would burn a core that the server and the neighbours need.
        options.add_session_config_entry("session.intra_op.allow_spinning", "0")
        if optimized_path:
            # Extended, not all: the last level writes graphs that only this kind of CPU may load.
            options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_ENABLE_EXTENDED
            options.optimized_model_filepath = optimized_path
        try:
            self._session: onnxruntime.InferenceSession | None = ort.InferenceSession(
                model, options, providers=[provider]
            )
            # It keeps the file for a fallback to other providers, which would hold the weights twice and is not wanted.
            self._session.disable_fallback()
            self._session._model_bytes = None
            self.inputs = tuple(_spec(tensor) for tensor in self._session.get_inputs())
            self.outputs = tuple(_spec(tensor) for tensor in self._session.get_outputs())
        except Exception as error:  # ONNX Runtime raises a class of its own for each status, all under Exception
            raise BundleError(
                subject,
                given=Literally(str(error).strip()),
                expected=f"an ONNX model that ONNX Runtime {ort.__version__} runs",
                fix="Export the bundle again, at opset 20 or lower.",
            ) from None
        # It falls back to the CPU without a word when the libraries of a provider cannot be loaded.
        if provider not in self._session.get_providers():
            found = self._session.get_providers()
            fix = "Install the CUDA libraries that this ONNX Runtime was built for, or build for the CPU."
            raise BackendError(f"{provider} for {subject}", given=found, expected="it among them", fix=fix)
        self._output_names = [spec.name for spec in self.outputs]
        self._text_inputs = [spec.name for spec in self.inputs if spec.datatype == "BYTES"]
        self._text_outputs = [spec.name for spec in self.outputs if spec.datatype == "BYTES"]
        self._subject = subject

    def infer(self, feeds: Mapping[str, Array]) -> dict[str, Array]:
        """Compute all outputs; see :class:`edge.runner.Runner`.

        Raises:
            InvalidRequest: a BYTES input is not UTF-8; ONNX Runtime's Python binding takes text only.
            RunnerError: the runtime failed; its text is in the log.
        """
        inputs = dict(feeds)
        for name in self._text_inputs:
            inputs[name] = text.decode(inputs[name], f"input {name!r}")
        try:
            assert self._session is not None, "infer after close"
            values = self._session.run(self._output_names, inputs)
        except Exception as error:
            log.exception("%s failed in ONNX Runtime", self._subject)
            raise RunnerError(
                self._subject, given=Literally(type(error).__name__), expected="an answer", fix="See the server's log."
            ) from error
        outputs = dict(zip(self._output_names, values, strict=True))
        for name in self._text_outputs:
            outputs[name] = text.encode(outputs[name])
        return outputs

    def close(self) -> None:
        """Drop the session, and with it its memory."""
        self._session = None


def import_onnxruntime() -> Any:
    """Import ONNX Runtime, with an error that says how to get it.

    Raises:
        BackendError: it is not installed.
    """
    try:
        import onnxruntime
    except ImportError as error:
        fix = "Install the extra 'cpu' (or 'cuda'); on a Jetson take JetPack's or Jetson AI Lab's wheel."
        raise BackendError("onnxruntime", given=Literally(error), expected="an importable package", fix=fix) from None
    return onnxruntime


def _spec(tensor: onnxruntime.NodeArg) -> TensorSpec:
    # A symbolic dimension comes as a name or as None.
    shape = tuple(size if isinstance(size, int) else -1 for size in tensor.shape)
    return TensorSpec(tensor.name, ONNX_TYPES.get(tensor.type, tensor.type), shape)
