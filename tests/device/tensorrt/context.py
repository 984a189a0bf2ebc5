"""Execution contexts: shapes, addresses, memory, and runs on a stream."""

from __future__ import annotations

import itertools
import weakref
from collections import Counter
from typing import ClassVar

import numpy as np

from . import device
from .native import Dims, ExecutionContextAllocationStrategy, Native, TensorIOMode, UnknownDims, instance, integer

_ALIGNMENT = 256
_patterns = itertools.cycle(range(1, 256))


class IExecutionContext(Native):
    active_optimization_profile = property(lambda self: self._profile)

    def set_input_shape(self, name, shape):
        sizes = tuple(integer(size) for size in instance(shape, (tuple, list, Dims)))
        low, _, high = self._engine._profiles[self._profile].get(name, [()] * 3)
        if len(low) != len(sizes) or not all(a <= b <= c for a, b, c in zip(low, sizes, high, strict=True)):
            reason = f"{list(sizes)} of {name} does not satisfy any optimization profiles, such as {low}..{high}"
            return self._refuse("setInputShape", reason)
        if self._shapes.get(name) != sizes:
            self._shapes[name] = sizes
            self._enqueued = False
        return True

    def get_tensor_shape(self, name):
        if name in self._shapes:
            return Dims(self._shapes[name])
        if self._engine._tensors[name].mode == TensorIOMode.OUTPUT and not self._missing():
            return UnknownDims() if self._contradicts("getTensorShape") else Dims(self._output_shapes()[name])
        return Dims(self._engine._tensors[name].shape)

    def infer_shapes(self):
        missing = self._missing()
        if not missing and self._contradicts("inferShapes"):
            raise RuntimeError("infer_shapes error code: -1")
        return missing

    def set_tensor_address(self, name, memory):
        self._addresses[name] = integer(memory)
        return True

    def set_device_memory(self, memory, size):
        needed = self._engine.device_memory_size_v2
        if self._strategy != ExecutionContextAllocationStrategy.USER_MANAGED or integer(memory) % _ALIGNMENT:
            self._refuse("setDeviceMemoryV2", f"the context is kUSER_MANAGED and memory is aligned to {_ALIGNMENT}")
        elif integer(size) < needed:
            self._refuse("setDeviceMemoryV2", f"{size} is below getDeviceMemorySizeV2(), {needed}")
        else:
            self._arena = (int(memory), int(size))

    def set_optimization_profile_async(self, profile_index, stream_handle):
        stream = integer(stream_handle)
        if not 0 <= integer(profile_index) < len(self._engine._profiles) or set(self._in_flight) - {stream}:
            return self._refuse("setOptimizationProfileAsync", "no such profile, or another stream still runs")
        if not self._enqueue("setOptimizationProfileAsync", stream, _Switch(self)):
            return False
        self._profile, self._switching, self._enqueued = int(profile_index), stream, False
        self._shapes = _static_shapes(self._engine)
        return True

    def execute_async_v3(self, stream_handle):
        function, stream = "enqueueV3", integer(stream_handle)
        for name, tensor in self._engine._tensors.items():
            if not self._addresses.get(name):
                kind = "input" if tensor.mode == TensorIOMode.INPUT else "output"
                return self._refuse(function, f"Address is not set for {kind} tensor {name}")
        if missing := self._missing():
            return self._refuse(function, f"allInputDimensionsSpecified(routine). {missing[0]} has no shape")
        if self._contradicts(function):
            return False
        needed = self._engine.get_device_memory_size_for_profile_v2(self._profile)
        if needed and (self._arena is None or self._arena[1] < needed):
            return self._refuse(function, f"device memory is set. Profile {self._profile} needs {needed}")
        if self._switching not in (None, stream) or set(self._in_flight) - {stream}:
            return self._refuse(function, "one stream at a time. Another stream still uses this context")
        return self._enqueue(function, stream, _Run(self, stream))

    def _enqueue(self, function, stream, work):
        log = self._engine._log
        try:
            captured = device.capturing(stream)
            if captured and not self._enqueued:
                # The first run with new shapes updates the host's state, which a capture cannot hold.
                log.cuda(function, "operation not permitted when stream is capturing")
                return False
            number = device.launch(stream, work)
        except device.CudaError as error:
            log.cuda(function, f"invalid resource handle: {error}")
            return False
        if captured:
            self._captured.append(number)
        else:
            work.submitted(number)
            self._enqueued = True
        return True

    def _named(self, mode):
        return [name for name, tensor in self._engine._tensors.items() if tensor.mode == mode]

    def _refuse(self, function, reason):
        self._engine._log.usage(f"IExecutionContext::{function}", f"condition: {reason}.")
        return False

    def _missing(self):
        return [name for name in self._named(TensorIOMode.INPUT) if name not in self._shapes]

    def _contradicts(self, function):
        """Return whether the shapes of the inputs contradict each other, and log why."""
        sizes = {}
        reason = ""
        for name, labels in self._engine._description["dimension_names"].items():
            for label, size in zip(labels, self._shapes[name], strict=True):
                if label and sizes.setdefault(label, size) != size:
                    reason = f"Dimensions with name {label}: Condition '==' violated: {sizes[label]} != {size}."
        try:
            if not reason:
                self._output_shapes()
        except Exception as error:
            reason = f"dimensions not compatible: {error}"
        if reason:
            self._engine._log.error(f"IExecutionContext::{function}", 7, "Internal Error", reason)
        return bool(reason)

    def _output_shapes(self):
        return self._engine._model.output_shapes(tuple(sorted(self._shapes.items())))


class _Switch:
    def __init__(self, context):
        self.context = weakref.ref(context)

    def submitted(self, number):
        pass

    def __call__(self):
        if context := self.context():
            context._switching = None


class _Run:
    """One run: the parameters at its launch, which later changes of the context do not affect.

    A run is pending from its submission to its execution; a graph's runs never are.
    """

    pending: ClassVar[dict[int, _Run]] = {}

    def __init__(self, context, stream):
        self.context, self.stream = weakref.ref(context), stream
        shapes = {**context._shapes, **context._output_shapes()}
        self.places = {name: (context._addresses[name], shape) for name, shape in shapes.items()}
        needed = context._engine.get_device_memory_size_for_profile_v2(context._profile)
        self.arena = (context._arena[0], needed) if needed else None
        self.number = 0

    def submitted(self, number):
        self.number = number
        self.pending[number] = self
        self.context()._in_flight[self.stream] += 1

    def __call__(self):
        """Compute, and check that no other run uses the activation memory and the weights are unchanged."""
        context = self.context()
        if context is None:
            raise device.DeviceFault("work of an execution context ran after the context was destroyed")
        if self.pending.pop(self.number, None):
            context._in_flight -= Counter([self.stream])
            self._check_order()
        engine = context._engine
        arena = self._bytes("the activation memory", *self.arena) if self.arena else np.empty(0, np.uint8)
        arena[:] = pattern = next(_patterns)
        inputs = {name: self._array(engine, name) for name in context._named(TensorIOMode.INPUT)}
        names = context._named(TensorIOMode.OUTPUT)
        try:
            values = engine._model.session.run(names, inputs)
        except Exception as error:
            raise device.DeviceFault(f"a kernel of engine {engine.name!r} failed: {error}") from None
        for name, value in zip(names, values, strict=True):
            target = self._array(engine, name)
            if target.shape != value.shape:
                raise device.DeviceFault(f"output {name!r} is {value.shape}, and the engine expected {target.shape}")
            target[...] = value
        if not (arena == pattern).all():
            raise device.DeviceFault("the activation memory changed during a run: an output overlaps it")
        if not (self._bytes("the weights", *engine._weights) == engine._fill).all():
            raise device.DeviceFault(f"the weights of engine {engine.name!r} were overwritten")

    def _check_order(self):
        """Reject overtaking a run that was submitted earlier and has the same activation memory.

        It is on another stream, which no event of this one waits for: on a device, the two could run at once.
        """
        for number, other in self.pending.items():
            if number >= self.number or not (self.arena and other.arena and other.context()):
                continue
            (ours, our_bytes), (theirs, their_bytes) = self.arena, other.arena
            if ours < theirs + their_bytes and theirs < ours + our_bytes:
                raise device.DeviceFault("two runs on unordered streams have the same activation memory")

    def _array(self, engine, name):
        tensor, (address, shape) = engine._tensors[name], self.places[name]
        if address % _ALIGNMENT:
            raise device.DeviceFault(f"the address {address:#x} of {name!r} is not aligned to {_ALIGNMENT} bytes")
        size = int(np.prod(shape, dtype=np.int64)) * tensor.numpy.itemsize
        return self._bytes(f"{name!r}", address, size).view(tensor.numpy).reshape(shape)

    def _bytes(self, what, address, size):
        if not size:
            return np.empty(0, np.uint8)
        view = device.view(address, size)
        if view is None:
            raise device.DeviceFault(f"{what} needs {size} bytes at {address:#x}, which are not all allocated")
        return view


def new_context(engine, strategy):
    """Return a context of an engine; None if its memory cannot be allocated."""
    function, arena = "ICudaEngine::createExecutionContext", None
    size = engine.device_memory_size_v2
    if strategy != ExecutionContextAllocationStrategy.USER_MANAGED and size:
        memory = device.allocate_or_log(engine._log, function, size)
        if memory is None:
            return None
        arena = (memory, size)
    # pybind11 keeps the engine while its contexts live.
    settings = {"_engine": engine, "_strategy": strategy, "_addresses": {}, "_shapes": _static_shapes(engine)}
    state = {"_switching": None, "_enqueued": False, "_captured": [], "_in_flight": Counter()}
    context = IExecutionContext._make(**settings, _profile=0, _arena=arena, **state)
    weakref.finalize(context, device.forget, context._captured).atexit = False
    if arena:
        weakref.finalize(context, device.free, arena[0], "an execution context").atexit = False
    return context


def _static_shapes(engine):
    inputs = {name: tensor for name, tensor in engine._tensors.items() if tensor.mode == TensorIOMode.INPUT}
    return {name: tensor.shape for name, tensor in inputs.items() if -1 not in tensor.shape}
