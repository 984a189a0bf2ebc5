"""Runner for ONNX Runtime. The only module that imports ``onnxruntime``, inside its functions."""

from __future__ import annotations

import logging
import re
from collections.abc import Collection, Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from edge.bundles import text
from edge.bundles.onnx_file import check_self_contained
from edge.datatypes import ONNX_TYPES, Array, TensorSpec
from edge.errors import BackendError, BundleError, InvalidRequest, Raw, RequestError, RunnerError
from edge.runner import DecoderTensors, LoopTensors, Tensor, check_feeds
from edge.runtimes.host import Bind, BoundRun, HostDecoder, HostLoop, copying

if TYPE_CHECKING:
    import onnxruntime

log = logging.getLogger(__name__)

TENSORRT_PROVIDER = "TensorrtExecutionProvider"
_CPU_PROVIDER = "CPUExecutionProvider"

#: Execution providers with their options. The first must be available, and runs every operator that it supports.
Providers = tuple[tuple[str, Mapping[str, str]], ...]
CPU: Providers = ((_CPU_PROVIDER, {}),)
CUDA: Providers = (("CUDAExecutionProvider", {}),)

#: What its operators say about an input that indexes a table of the model, such as token ids an embedding: Gather, and
#: EmbedLayerNormalization, which optimizations make of several.
_OUTSIDE = re.compile(r"element out of data bounds, idx=(-?\d+) .*\[(-?\d+),(-?\d+)\]|input index out of range")

#: Parts of the names of operators that compute INT8 scales at run time.
_DYNAMIC_INT8 = (b"DynamicQuantize", b"MatMulInteger", b"ConvInteger")


class OnnxRuntimeHandle:
    """A tensor in the memory of an ONNX Runtime device; see :class:`edge.runner.Handle`."""

    def __init__(self, value: onnxruntime.OrtValue) -> None:
        self.value = value
        self.datatype = ONNX_TYPES[value.data_type()]
        self.shape: tuple[int, ...] = tuple(value.shape())

    def numpy(self) -> Array:
        return np.array(self.value.numpy())  # on the CPU, ONNX Runtime returns a view in some versions


class OnnxRuntimeRunner:
    """A model in ONNX Runtime, on the CPU or on the GPU.

    It takes the bytes of the ONNX file, because the bytes that were hashed must be those that run. The file
    ``optimized_path`` gets the optimized graph, with TensorRT's provider as a model that contains the engines. Raise a
    BundleError if the bytes are not an ONNX model that this ONNX Runtime can run, or its weights are in other files,
    and a BackendError if ONNX Runtime or the first provider is missing, or the model has dynamic INT8 and runs on a
    GPU.
    """

    platform = "onnxruntime_onnx"

    def __init__(
        self, model: bytes, *, subject: str, providers: Providers = CPU, optimized_path: str | None = None
    ) -> None:
        check_self_contained(model, subject)
        ort = import_onnxruntime()
        provider = providers[0][0]
        on_cpu = provider == _CPU_PROVIDER
        self.device = "CPU" if on_cpu else "GPU"
        self._place = "cpu" if on_cpu else "cuda"
        if not on_cpu and any(name in model for name in _DYNAMIC_INT8):
            fix = "Export the bundle with --artifacts tensorrt too, or serve it on the CPU."
            expected = "FP32, FP16, or INT8 with fixed scales on a GPU"
            raise BackendError(subject, given=Raw("dynamic INT8"), expected=expected, fix=fix)
        check_provider(provider)
        options = ort.SessionOptions()
        options.intra_op_num_threads = options.inter_op_num_threads = 1  # more cost more than they gain on few cores
        # Fatal errors only: callers get the others as exceptions, and a client that causes them could fill the log.
        options.log_severity_level = 4
        # Spinning would use a core that the server and other programs need.
        options.add_session_config_entry("session.intra_op.allow_spinning", "0")
        if optimized_path and provider == TENSORRT_PROVIDER:  # an EP context model
            for key, value in {"enable": "1", "embed_mode": "1", "file_path": optimized_path}.items():
                options.add_session_config_entry(f"ep.context_{key}", value)
        elif optimized_path:
            # Extended, not all: graphs of the last level load only on the same kind of CPU.
            options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_ENABLE_EXTENDED
            options.optimized_model_filepath = optimized_path
        try:
            self._session: onnxruntime.InferenceSession | None = ort.InferenceSession(
                model, options, providers=[(name, dict(given)) for name, given in providers]
            )
            # The session keeps the file for a fallback to other providers, and so the weights twice. Both are unwanted.
            self._session.disable_fallback()
            self._session._model_bytes = None
            self.inputs = tuple(_spec(tensor) for tensor in self._session.get_inputs())
            self.outputs = tuple(_spec(tensor) for tensor in self._session.get_outputs())
        except Exception as error:  # ONNX Runtime raises a class of its own for each status, all under Exception
            given, expected = Raw(str(error).strip()), f"an ONNX model that ONNX Runtime {ort.__version__} runs"
            fix = "Export the bundle again, at opset 20 or lower."
            raise BundleError(subject, given=given, expected=expected, fix=fix) from None
        # ONNX Runtime falls back to the CPU silently if it cannot load the libraries of a provider.
        if provider not in self._session.get_providers():
            loaded = self._session.get_providers()
            fix = "Install the CUDA libraries that this ONNX Runtime was built for, or build for the CPU."
            raise BackendError(f"{provider} for {subject}", given=loaded, expected="it among them", fix=fix)
        self._output_names = [spec.name for spec in self.outputs]
        self._text_inputs = [spec.name for spec in self.inputs if spec.datatype == "BYTES"]
        self._text_outputs = [spec.name for spec in self.outputs if spec.datatype == "BYTES"]
        self._subject = subject

    def infer(self, feeds: Mapping[str, Array]) -> dict[str, Array]:
        """Compute all outputs; see :class:`edge.runner.Runner`.

        Raise an InvalidRequest if a BYTES input is not UTF-8, as ONNX Runtime's Python binding accepts text only, or an
        index is outside its table.
        """
        inputs = dict(feeds)
        for name in self._text_inputs:
            inputs[name] = text.decode(inputs[name], f"input {name!r}")
        try:
            assert self._session is not None, "infer after close"
            values = self._session.run(self._output_names, inputs)
        except Exception as error:
            raise self._failed(error) from error
        outputs = dict(zip(self._output_names, values, strict=True))
        for name in self._text_outputs:
            outputs[name] = text.encode(outputs[name])
        return outputs

    def upload(self, array: Array) -> OnnxRuntimeHandle:
        if array.dtype.kind in "SUO":
            raise self._unbindable("upload to", "BYTES")
        try:
            # An OrtValue on the CPU refers to the array without copying it, so it must get a copy of its own.
            value = import_onnxruntime().OrtValue.ortvalue_from_numpy(np.array(array, order="C"), self._place, 0)
        except Exception as error:
            raise self._failed(error) from error
        return OnnxRuntimeHandle(value)

    def run(self, feeds: Mapping[str, Tensor], keep: Collection[str] = ()) -> dict[str, Tensor]:
        """Compute all outputs and keep some on the device; see :class:`edge.runner.Runner`.

        Raise an InvalidRequest if ``feeds`` or ``keep`` do not match the graph, or it has BYTES, which cannot be bound.
        """
        check_feeds(self, feeds, keep, self._subject)
        if texts := [*self._text_inputs, *self._text_outputs]:
            raise self._unbindable(f"{texts[0]!r} of", "BYTES")
        try:
            assert self._session is not None, "run after close"
            binding = self._session.io_binding()
            for name, tensor in feeds.items():
                if isinstance(tensor, np.ndarray):
                    binding.bind_cpu_input(name, np.ascontiguousarray(tensor))
                elif isinstance(tensor, OnnxRuntimeHandle):
                    binding.bind_ortvalue_input(name, tensor.value)
                else:
                    raise self._unbindable(f"input {name!r} of", f"a handle of {type(tensor).__name__}")
            for name in self._output_names:
                binding.bind_output(name, self._place if name in keep else "cpu")
            self._session.run_with_iobinding(binding)
            values = binding.get_outputs()
        except InvalidRequest:
            raise
        except Exception as error:
            raise self._failed(error) from error
        return {
            name: OnnxRuntimeHandle(value) if name in keep else value.numpy()
            for name, value in zip(self._output_names, values, strict=True)
        }

    def loop(self, tensors: LoopTensors, steps: int = 1) -> HostLoop:
        return HostLoop(self, tensors, steps, self._binding())

    def decoder(self, tensors: DecoderTensors, *further: OnnxRuntimeRunner) -> HostDecoder:
        return HostDecoder([(runner, runner._binding()) for runner in (self, *further)], tensors)

    def close(self) -> None:
        self._session = None

    def _binding(self) -> Bind:
        return self._bound if self.device == "CPU" else copying(self)

    def _bound(self, arrays: Mapping[str, Array]) -> BoundRun:
        """Return a run that reads and writes arrays in place."""
        session = self._session
        assert session is not None, "a loop after close"
        binding, value_of = session.io_binding(), import_onnxruntime().OrtValue.ortvalue_from_numpy
        for name, array in arrays.items():
            bind = binding.bind_ortvalue_output if name in self._output_names else binding.bind_ortvalue_input
            bind(name, value_of(array))

        def run() -> None:
            try:
                session.run_with_iobinding(binding)
            except Exception as error:
                raise self._failed(error) from error

        return run

    def _failed(self, error: Exception) -> RequestError:
        if outside := _OUTSIDE.search(str(error)):
            index, first, last = outside.groups()
            given = Raw(index or "an index outside its table")
            expected = f"values from {first} to {last}" if index else "values inside"
            fix = "Send the token ids of this model's own tokenizer."
            subject = f"an input of {self._subject}"
            return InvalidRequest(
                subject, given=given, expected=f"{expected}, the rows of a table of the model", fix=fix
            )
        log.error("%s failed in ONNX Runtime", self._subject, exc_info=error)
        given = Raw(type(error).__name__)
        return RunnerError(self._subject, given=given, expected="an answer", fix="See the server's log.")

    def _unbindable(self, what: str, given: str) -> InvalidRequest:
        expected = "numbers in an array or in a handle of ONNX Runtime"
        fix = "Call infer for text, and feed handles to the runtime that made them."
        return InvalidRequest(f"{what} {self._subject}", given=Raw(given), expected=expected, fix=fix)


def import_onnxruntime() -> Any:
    """Import ONNX Runtime; raise a BackendError if it is not installed."""
    try:
        import onnxruntime
    except ImportError as error:
        fix = "Install the extra 'cpu' (or 'cuda'); on a Jetson take JetPack's or Jetson AI Lab's wheel."
        raise BackendError("onnxruntime", given=Raw(error), expected="an importable package", fix=fix) from None
    return onnxruntime


def check_provider(name: str) -> None:
    """Raise a BackendError if ONNX Runtime or an execution provider is missing."""
    available = import_onnxruntime().get_available_providers()
    if name not in available:
        fix = "Install the extra 'cuda', or build for the CPU."
        raise BackendError(name, given=available, expected="it among them", fix=fix)


def _spec(tensor: onnxruntime.NodeArg) -> TensorSpec:
    # A symbolic dimension is a name or None.
    shape = tuple(size if isinstance(size, int) else -1 for size in tensor.shape)
    return TensorSpec(tensor.name, ONNX_TYPES.get(tensor.type, tensor.type), shape)
