"""The runtime and its engines."""

from __future__ import annotations

import weakref
from typing import Any

import numpy as np

from . import device, plan
from .context import new_context
from .enums import (
    DataType,
    Dims,
    ExecutionContextAllocationStrategy,
    ProfilingVerbosity,
    TensorIOMode,
    TensorLocation,
    nptype,
)
from .logger import Log, checked
from .session import model
from .versions import SERIALIZATION_VERSION, VERSION_TEXT, Native, instance, integer, only

_STRATEGY = ExecutionContextAllocationStrategy
_WEIGHTS_PATTERN = 0xA5


class ICudaEngine(Native):
    """An engine, with its weights in device memory."""

    name = property(lambda self: self._description["name"])
    num_io_tensors = property(lambda self: len(self._tensors))
    num_layers = property(lambda self: len(self._description["layers"]))
    num_optimization_profiles = property(lambda self: len(self._profiles))
    profiling_verbosity = property(lambda self: ProfilingVerbosity[self._description["verbosity"]])
    device_memory_size_v2 = property(lambda self: max(self._description["activation_bytes"]))

    def get_device_memory_size_for_profile_v2(self, profile_index: int) -> int:
        if not self._is_profile(profile_index, "getDeviceMemorySizeForProfileV2"):
            return 0
        return int(self._description["activation_bytes"][profile_index])

    def get_tensor_name(self, index: int) -> Any:
        if not 0 <= integer(index) < len(self._tensors):
            self._log.usage(
                "ICudaEngine::getIOTensorName", f"condition: index in [0, {len(self._tensors)}), got {index}"
            )
            return None
        return list(self._tensors)[index]

    def get_tensor_mode(self, name: str) -> Any:
        return self._tensors[name].mode if self._is_tensor(name, "getTensorIOMode") else TensorIOMode.NONE

    def get_tensor_shape(self, name: str) -> Any:
        return Dims(self._tensors[name].shape) if self._is_tensor(name, "getTensorShape") else Dims()

    def get_tensor_dtype(self, name: str) -> Any:
        return self._tensors[name].dtype if self._is_tensor(name, "getTensorDataType") else DataType.FLOAT

    def get_tensor_location(self, name: str) -> Any:
        self._is_tensor(name, "getTensorLocation")
        return TensorLocation.DEVICE

    def get_tensor_profile_shape(self, name: str, profile_index: int) -> list[Any]:
        if not self._is_tensor(name, "getProfileShape") or not self._is_profile(profile_index, "getProfileShape"):
            return [Dims()] * 3
        if self._tensors[name].mode != TensorIOMode.INPUT:
            self._log.usage("ICudaEngine::getProfileShape", f"condition: {name} is an input.")
            return [Dims()] * 3
        return [Dims(shape) for shape in self._profiles[profile_index][name]]

    def create_execution_context(self, strategy: Any = _STRATEGY.STATIC) -> Any:
        return new_context(self, instance(strategy, _STRATEGY))

    @only(until=(11,))
    def create_execution_context_without_device_memory(self) -> Any:
        return new_context(self, _STRATEGY.USER_MANAGED)

    def _is_tensor(self, name: str, function: str) -> bool:
        if name not in self._tensors:
            self._log.usage(
                f"ICudaEngine::{function}",
                f"condition: the name of a tensor. Given invalid tensor name: {name}. "
                "Get valid tensor names with getIOTensorName()",
            )
            return False
        return True

    def _is_profile(self, index: int, function: str) -> bool:
        if not 0 <= integer(index) < len(self._profiles):
            self._log.usage(
                f"ICudaEngine::{function}", f"condition: profileIndex in [0, {len(self._profiles)}), got {index}"
            )
            return False
        return True


class _Tensor:
    """An input or an output of an engine."""

    def __init__(self, mode: Any, dtype: str, shape: list[int]) -> None:
        self.mode, self.dtype, self.shape = mode, DataType[dtype], tuple(shape)
        self.numpy = np.dtype(nptype(self.dtype))


class Runtime(Native):
    """Loads engines."""

    logger = property(lambda self: self._log.logger)

    def __init__(self, logger: Any) -> None:
        self._log = Log(checked(logger))
        if not device.available():
            self._log.cuda("createInferRuntime", "CUDA initialization failure with error: 100")
            raise TypeError("pybind11::init(): factory function returned nullptr")

    def deserialize_cuda_engine(self, serialized_engine: Any) -> Any:
        data, function = bytes(memoryview(serialized_engine)), "IRuntime::deserializeCudaEngine"
        try:
            description, onnx = plan.read(data, SERIALIZATION_VERSION)
        except plan.Unreadable as error:
            self._log.error(function, 1, "Serialization", str(error))
            return None
        if description["version"] != VERSION_TEXT:
            reason = (
                "The engine plan file is not compatible with this version of TensorRT, expecting library version "
                f"{description['version']} got {VERSION_TEXT}, please rebuild."
            )
            self._log.error(function, 6, "API Usage Error", reason)
            return None
        built_for, here = tuple(description["compute_capability"]), device.compute_capability()
        if built_for != here:
            reason = (
                f"The engine plan file is generated on an incompatible device, expecting compute {_dotted(here)} got "
                f"compute {_dotted(built_for)}, please rebuild."
            )
            self._log.error(function, 6, "API Usage Error", reason)
            return None
        if device.current_context() is None:
            self._log.cuda(function, "invalid device context")
            return None
        loaded = model(onnx)
        size = loaded.weights_bytes
        weights = device.allocate_or_log(self._log, function, size)
        if weights is None:
            return None
        if size:
            device.view(weights, size)[:] = _WEIGHTS_PATTERN
        tensors = {name: _Tensor(TensorIOMode.INPUT, *rest) for name, *rest in description["inputs"]}
        tensors |= {name: _Tensor(TensorIOMode.OUTPUT, *rest) for name, *rest in description["outputs"]}
        engine = ICudaEngine._make(
            _runtime=self,  # pybind11 keeps the runtime while its engines live
            _log=self._log,
            _description=description,
            _profiles=description["profiles"],
            _tensors=tensors,
            _model=loaded,
            _weights=(weights, size),
            _fill=_WEIGHTS_PATTERN,
            _cuda_context=device.current_context(),
        )
        weakref.finalize(engine, device.free, weights, f"engine {description['name']}").atexit = False
        self._log.info(f"Loaded engine size: {len(data) >> 20} MiB")
        return engine


def _dotted(version: tuple[int, ...]) -> str:
    return ".".join(map(str, version))
