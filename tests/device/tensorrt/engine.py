"""The runtime and its engines, whose bytes are a header, the description as JSON, the ONNX model, and a hash."""

import hashlib
import json
import struct
import weakref

import numpy as np

from . import device
from .context import new_context
from .model import model
from .native import (
    SERIALIZATION_VERSION,
    VERSION_TEXT,
    DataType,
    Dims,
    ExecutionContextAllocationStrategy,
    Log,
    Native,
    TensorIOMode,
    TensorLocation,
    checked,
    instance,
    integer,
    nptype,
)

_MAGIC = b"ftrt"
_HEADER = struct.Struct("<4sIII")


class IHostMemory(bytes):
    """A buffer: ``bytes`` and ``memoryview`` take it, but it has no length and no elements of its own.

    ``bytes`` is its base because only types written in C offer the buffer protocol before Python 3.12.
    """

    def _refuse(self, *arguments):
        raise TypeError("'IHostMemory' object is a buffer; take bytes() or memoryview() of it")

    __len__ = __getitem__ = __iter__ = __contains__ = __add__ = _refuse


class Unreadable(Exception):
    """The bytes are not an engine of this version; the text is what TensorRT asserts."""


def write(version_tag, description, model):
    text = json.dumps(description).encode()
    content = _HEADER.pack(_MAGIC, version_tag, len(text), len(model)) + text + model
    return content + hashlib.sha256(content).digest()


def read(data, version_tag):
    if len(data) < _HEADER.size or data[:4] != _MAGIC:
        raise Unreadable("Serialization assertion plan->header.magicTag == rt::kPLAN_MAGIC_TAG failed.")
    _, tag, text_size, model_size = _HEADER.unpack_from(data)
    if tag != version_tag:
        versions = f"Current Version: {version_tag}, Serialized Engine Version: {tag}"
        raise Unreadable(f"Serialization assertion failed.Version tag does not match. Note: {versions}")
    end = _HEADER.size + text_size + model_size
    if hashlib.sha256(data[:end]).digest() != data[end:]:
        raise Unreadable("Serialization assertion checksum == computedChecksum failed.Engine data is corrupt.")
    text = data[_HEADER.size : _HEADER.size + text_size]
    return json.loads(text), data[_HEADER.size + text_size : end]


_STRATEGY = ExecutionContextAllocationStrategy
_WEIGHTS_PATTERN = 0xA5


class ICudaEngine(Native):
    name = property(lambda self: self._description["name"])
    num_io_tensors = property(lambda self: len(self._tensors))
    num_optimization_profiles = property(lambda self: len(self._profiles))
    device_memory_size_v2 = property(lambda self: max(self._description["activation_bytes"]))

    def get_device_memory_size_for_profile_v2(self, profile_index):
        return int(self._description["activation_bytes"][profile_index])

    def get_tensor_name(self, index):
        return list(self._tensors)[integer(index)]

    def get_tensor_mode(self, name):
        return self._tensors[name].mode

    def get_tensor_shape(self, name):
        return Dims(self._tensors[name].shape)

    def get_tensor_dtype(self, name):
        return self._tensors[name].dtype

    def get_tensor_location(self, name):
        return TensorLocation.DEVICE

    def get_tensor_profile_shape(self, name, profile_index):
        return [Dims(shape) for shape in self._profiles[integer(profile_index)][name]]

    def create_execution_context(self, strategy=_STRATEGY.STATIC):
        return new_context(self, instance(strategy, _STRATEGY))


class _Tensor:
    def __init__(self, mode, dtype, shape):
        self.mode, self.dtype, self.shape = mode, DataType[dtype], tuple(shape)
        self.numpy = np.dtype(nptype(self.dtype))


class Runtime(Native):
    def __init__(self, logger):
        self._log = Log(checked(logger))

    def deserialize_cuda_engine(self, serialized_engine):
        data, function = bytes(memoryview(serialized_engine)), "IRuntime::deserializeCudaEngine"
        try:
            description, onnx = read(data, SERIALIZATION_VERSION)
        except Unreadable as error:
            self._log.error(function, 1, "Serialization", str(error))
            return None
        here, built_for = ([VERSION_TEXT, *device.compute_capability()], description["made_by"])
        if here != built_for:
            reason = f"The engine plan file is not compatible, expecting {here} got {built_for}, please rebuild."
            self._log.error(function, 6, "API Usage Error", reason)
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
        # pybind11 keeps the runtime while its engines live.
        kept = {"_runtime": self, "_log": self._log, "_cuda_context": device.current_context()}
        kept |= {"_description": description, "_profiles": description["profiles"], "_tensors": tensors}
        engine = ICudaEngine._make(**kept, _model=loaded, _weights=(weights, size), _fill=_WEIGHTS_PATTERN)
        weakref.finalize(engine, device.free, weights, f"engine {description['name']}").atexit = False
        return engine
