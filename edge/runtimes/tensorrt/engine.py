"""TensorRT engine on this machine's GPU: tensors, optimization profiles, and runs on addresses."""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from math import prod
from traceback import clear_frames
from typing import Any, NamedTuple

from edge.datatypes import TensorSpec, byte_size
from edge.errors import BackendError, InvalidRequest, Raw, shown
from edge.runtimes.cuda import CudaError, CudaGraph, Memory
from edge.runtimes.tensorrt.device import SharedDevice

log = logging.getLogger(__name__)

#: TensorRT's names of the supported datatypes to the protocol's.
DATATYPES = {"FLOAT": "FP32", "HALF": "FP16"} | {name: name for name in ("INT64", "INT32", "INT8", "UINT8", "BOOL")}
#: The most graphs of one engine, and the most runs without a graph that it remembers.
GRAPHS = 16
#: A graph may be replaced after so many runs without it. A capture takes as long as several runs.
_STALE_RUNS = 1000
#: The most combinations of input shapes whose output shapes are remembered.
_OUTPUT_SHAPES = 256

#: What TensorRT requires of addresses.
ALIGNMENT = 256

Shape = tuple[int, ...]


class TensorRtError(Exception):
    """TensorRT rejected a call. The message names the call and quotes TensorRT's log."""


class EngineRefused(TensorRtError):
    """TensorRT cannot deserialize an engine. The message quotes its log."""


class ShapeRange(NamedTuple):
    """The smallest and the largest shape of one input in an optimization profile."""

    least: Shape
    most: Shape

    def admits(self, shape: Shape) -> bool:
        return all(low <= size <= high for low, size, high in zip(self.least, shape, self.most, strict=True))


class Enqueued(NamedTuple):
    """The parameters of a run, all of which are fixed in its graph."""

    profile: int
    shapes: tuple[Shape, ...]  # of the inputs
    addresses: tuple[int, ...]  # of the inputs and outputs


#: Runs, one after the other.
Work = tuple[Enqueued, ...]
#: Enqueues what precedes or follows the run at a place of the work, such as a copy of its inputs; always the same for
#: equal work.
Copies = Callable[[int], None]


@dataclass
class _Captured:
    """A graph, the contexts that it was captured from and that must not change, and the number of its last launch."""

    graph: CudaGraph
    contexts: Mapping[Enqueued, Any]
    used: int


class Engine:
    """A deserialized engine. Use it only inside ``with device:``.

    Work that recurs is captured, if it is one of the last :data:`GRAPHS` that have no graph, and launched as a graph
    from then on. At most :data:`GRAPHS` graphs are kept. A new one replaces the least recently used one, if that has
    not been used for :data:`_STALE_RUNS` calls: more shapes than graphs must not cause a capture every few calls.

    The arena of ``shared`` has the activations, so call :meth:`SharedDevice.join` before a run.

    Raises:
        BackendError: the engine has tensors that cannot be served.
        EngineRefused: TensorRT cannot deserialize the engine.
        Exception: TensorRT or CUDA failed.
    """

    def __init__(self, data: bytes, shared: SharedDevice, trt: Any, logger: Any, *, subject: str, graphs: bool) -> None:
        self._subject, self._shared, self._trt = subject, shared, trt
        self._logger, self._uses_graphs = logger, graphs
        self._graphs: OrderedDict[Work, _Captured] = OrderedDict()
        self._seen: OrderedDict[Work, None] = OrderedDict()
        self._runs = 0
        self._bound: dict[int, Enqueued] = {}  # by the profile of the context
        self._output_shapes: dict[tuple[int, tuple[Shape, ...]], list[Shape]] = {}
        self._runtime = trt.Runtime(logger)
        logger.messages.clear()
        self._engine = self._runtime.deserialize_cuda_engine(data)
        if self._engine is None:
            raise EngineRefused("; ".join(logger.messages) or "no reason from TensorRT")
        self.inputs = self._specs(self._trt.TensorIOMode.INPUT)
        self.outputs = self._specs(self._trt.TensorIOMode.OUTPUT)
        profiles = range(self._engine.num_optimization_profiles)
        self.profiles = [[self._range(spec, profile) for spec in self.inputs] for profile in profiles]
        # One for each profile: the first run after a switch of profiles updates all layers of a context.
        self._contexts = [self._new_context() for _ in profiles]
        self.activation_bytes = int(self._engine.device_memory_size_v2)  # of the largest profile

    def largest(self) -> dict[str, int]:
        """Return the bytes of each tensor at the largest shapes of any profile.

        Raises:
            BackendError: the shape of an output depends on data, or the largest input shapes contradict each other.
        """
        sizes: dict[str, int] = {}
        for profile, ranges in enumerate(self.profiles):
            shapes = tuple(allowed.most for allowed in ranges)
            try:
                outputs = self.output_shapes(profile, shapes)
            except InvalidRequest as error:
                fix = "Export the bundle with a profile whose largest shapes agree, and build it again."
                subject = f"optimization profile {profile} of {self._subject}"
                raise BackendError(subject, given=error.given, expected=error.expected, fix=fix) from None
            for spec, shape in zip((*self.inputs, *self.outputs), (*shapes, *outputs), strict=True):
                if min(shape, default=0) < 0:
                    subject = f"output {spec.name!r} of {self._subject}"
                    expected = "a shape that follows from those of the inputs"
                    fix = "Serve it with --target onnxruntime, which can do without."
                    raise BackendError(subject, given=list(shape), expected=expected, fix=fix)
                sizes[spec.name] = max(byte_size(spec.datatype, shape), sizes.get(spec.name, 0))
        return sizes

    def profile_of(self, shapes: tuple[Shape, ...]) -> int:
        """Return the smallest optimization profile for input shapes.

        Raise an InvalidRequest if no profile admits them.
        """
        admitting = [
            (sum(prod(allowed.most) for allowed in ranges), profile)
            for profile, ranges in enumerate(self.profiles)
            if all(allowed.admits(shape) for allowed, shape in zip(ranges, shapes, strict=True))
        ]
        if admitting:
            return min(admitting)[1]
        names = [spec.name for spec in self.inputs]
        expected = " or ".join(
            ", ".join(
                f"{name} from {list(allowed.least)} to {list(allowed.most)}"
                for name, allowed in zip(names, ranges, strict=True)
            )
            for ranges in self.profiles
        )
        given = self._listed(shapes)
        fix = "Shorten or split the request, or export the bundle with a larger profile and build it again."
        raise InvalidRequest(f"shapes for {self._subject}", given=given, expected=expected, fix=fix)

    def ranges(self, name: str) -> list[ShapeRange]:
        """Return the range of an input in each profile."""
        index = [spec.name for spec in self.inputs].index(name)
        return [ranges[index] for ranges in self.profiles]

    def run_of(self, shapes: Mapping[str, Shape], addresses: Mapping[str, int]) -> Enqueued:
        """Return a run for input shapes, and addresses of all tensors, by name; raise as :meth:`profile_of`."""
        ordered = tuple(shapes[spec.name] for spec in self.inputs)
        bound = tuple(addresses[spec.name] for spec in (*self.inputs, *self.outputs))
        return Enqueued(self.profile_of(ordered), ordered, bound)

    def output_shapes(self, profile: int, shapes: tuple[Shape, ...]) -> list[Shape]:
        """Return the output shapes for input shapes that a profile admits.

        Raise an InvalidRequest if the input shapes contradict each other.
        """
        output_shapes = self._output_shapes.get((profile, shapes))
        if output_shapes is None:
            self._bound.pop(profile, None)
            self._set_shapes(self._contexts[profile], profile, shapes)
            self._infer_shapes(profile, shapes)
            output_shapes = [tuple(self._contexts[profile].get_tensor_shape(spec.name)) for spec in self.outputs]
            if len(self._output_shapes) >= _OUTPUT_SHAPES:
                self._output_shapes.clear()
            self._output_shapes[profile, shapes] = output_shapes
        return output_shapes

    def enqueue(
        self, *work: Enqueued, before: Copies | None = None, after: Copies | None = None, recurs: bool = True
    ) -> None:
        """Enqueue runs, ``before`` ahead of each and ``after`` behind it, all of which become part of the graph.

        Raise a TensorRtError or a CudaError if one is rejected. Work that ``recurs`` may get a graph.
        """
        self._runs += 1
        captured = self._graphs.get(work)
        if captured:
            captured.used = self._runs
            self._graphs.move_to_end(work)
            captured.graph.launch(self._shared.compute)
            self._shared.counts["launches"] += 1
        elif not (self._uses_graphs and recurs):
            self._enqueue_plain(work, before, after)
        elif work in self._seen and self._has_room():
            del self._seen[work]
            self._capture(work, before, after)
        else:
            self._seen[work] = None
            self._seen.move_to_end(work)
            if len(self._seen) > GRAPHS:
                self._seen.popitem(last=False)
            self._enqueue_plain(work, before, after)

    def forget(self, memory: Memory) -> None:
        """Free the graphs of work with addresses in some memory, before it is freed. None of them is in progress."""
        addresses = range(memory.address, memory.address + memory.size_bytes)

        def uses(work: Work) -> bool:
            return any(address in addresses for run in work for address in run.addresses)

        for work in filter(uses, tuple(self._seen)):
            del self._seen[work]
        for work in filter(uses, tuple(self._graphs)):
            self._graphs.pop(work).graph.free()

    def arena_moves(self, arena: Memory) -> None:
        """Use another arena; see :data:`edge.runtimes.tensorrt.device.ArenaMoves`."""
        self._drop_graphs()
        for context in self._contexts:
            context.set_device_memory(arena.address, arena.size_bytes)

    def close(self) -> None:
        """Free the engine, of which no run may be in progress."""
        self._drop_graphs()
        self._contexts.clear()
        self._engine = self._runtime = None

    def _specs(self, mode: Any) -> tuple[TensorSpec, ...]:
        names = [self._engine.get_tensor_name(index) for index in range(self._engine.num_io_tensors)]
        return tuple(self._spec(name) for name in names if self._engine.get_tensor_mode(name) == mode)

    def _spec(self, name: str) -> TensorSpec:
        datatype = self._engine.get_tensor_dtype(name).name
        location = self._engine.get_tensor_location(name)
        if datatype not in DATATYPES or location != self._trt.TensorLocation.DEVICE:
            given = Raw(f"{datatype} in the memory of the {location.name.lower()}")
            expected = f"one of {', '.join(DATATYPES)} in the memory of the device"
            fix = "Export the model with other inputs and outputs, or serve it with --target onnxruntime."
            raise BackendError(f"tensor {name!r} of {self._subject}", given=given, expected=expected, fix=fix)
        return TensorSpec(name, DATATYPES[datatype], tuple(self._engine.get_tensor_shape(name)))

    def _range(self, spec: TensorSpec, profile: int) -> ShapeRange:
        if -1 not in spec.shape:  # a profile may omit such an input
            return ShapeRange(spec.shape, spec.shape)
        least, _, most = self._engine.get_tensor_profile_shape(spec.name, profile)
        return ShapeRange(tuple(least), tuple(most))

    def _new_context(self) -> Any:
        strategy = self._trt.ExecutionContextAllocationStrategy.USER_MANAGED
        context = self._engine.create_execution_context(strategy)
        self._check(context is not None, "execution context", "none", f"one of {self._subject}")
        return context

    def _set_shapes(self, context: Any, profile: int, shapes: tuple[Shape, ...]) -> None:
        if context.active_optimization_profile != profile:
            accepted = context.set_optimization_profile_async(profile, self._shared.compute.handle)
            self._check(accepted, "optimization profile", profile, f"one below {len(self.profiles)}")
        for spec, shape, allowed in zip(self.inputs, shapes, self.profiles[profile], strict=True):
            accepted = context.set_input_shape(spec.name, shape)
            self._check(accepted, f"shape of {spec.name!r}", list(shape), f"{allowed.least} to {allowed.most}")

    def _infer_shapes(self, profile: int, shapes: tuple[Shape, ...]) -> None:
        """Let TensorRT compute the shapes of all tensors; raise an InvalidRequest if those of the inputs disagree."""
        self._logger.messages.clear()
        try:
            missing = self._contexts[profile].infer_shapes()
        except RuntimeError:
            missing = None
        if missing is None:  # outside the handler, whose frames may refer to a context of TensorRT
            reason = shown(Raw("; ".join(self._logger.messages) or "no reason"))
            expected = f"shapes that agree with each other; TensorRT says: {reason}"
            fix = "Send inputs of like shapes, such as a mask that is as long as its ids."
            given = self._listed(shapes)
            raise InvalidRequest(f"shapes for {self._subject}", given=given, expected=expected, fix=fix)
        self._check(not missing, "shapes", f"none of {missing}", "one of each input")

    def _listed(self, shapes: tuple[Shape, ...]) -> Raw:
        return Raw(", ".join(f"{spec.name} {list(shape)}" for spec, shape in zip(self.inputs, shapes, strict=True)))

    def _enqueue_plain(self, work: Work, before: Copies | None, after: Copies | None, begin: int = 0) -> None:
        for index in range(begin, len(work)):
            run = work[index]
            context = self._contexts[run.profile]
            if self._bound.pop(run.profile, None) != run:
                self._bind(context, run)
            self._bound[run.profile] = run
            self._enqueue_bound(context, before, after, index)
            self._shared.counts["enqueues"] += 1

    def _enqueue_bound(self, context: Any, before: Copies | None, after: Copies | None, index: int) -> None:
        if before:
            before(index)
        self._execute(context)
        if after:
            after(index)

    def _bind(self, context: Any, run: Enqueued) -> None:
        self._set_shapes(context, run.profile, run.shapes)
        for spec, address in zip((*self.inputs, *self.outputs), run.addresses, strict=True):
            accepted = context.set_tensor_address(spec.name, address)
            self._check(accepted, f"address of {spec.name!r}", hex(address), "memory of the device")

    def _execute(self, context: Any) -> None:
        accepted = context.execute_async_v3(self._shared.compute.handle)
        self._check(accepted, "execute_async_v3", accepted, "True")

    def _capture(self, work: Work, before: Copies | None, after: Copies | None) -> None:
        """Enqueue work with a context of its own for each different run, and capture it for the next time.

        TensorRT requires an ordinary run before the capture, and an unchanged context afterwards.
        """
        enqueued = 0
        contexts: dict[Enqueued, Any] = {}

        def repeat() -> None:
            for index, run in enumerate(work):
                self._enqueue_bound(contexts[run], before, after, index)

        try:
            for run in work:
                if run not in contexts:
                    context = contexts[run] = self._new_context()
                    context.set_device_memory(self._shared.arena.address, self._shared.arena.size_bytes)
                    self._bind(context, run)
            for index, run in enumerate(work):
                self._enqueue_bound(contexts[run], before, after, index)
                self._shared.counts["enqueues"] += 1
                enqueued += 1
            graph = self._shared.device.capture(self._shared.compute, repeat)
        except Exception as error:
            # Wait first: a context in use must not be freed.
            if self._shared.synchronize():
                raise
            clear_frames(error.__traceback__)  # they refer to contexts, and so may a log that keeps the error
            log.warning("%s runs without CUDA graphs: %s", self._subject, str(error))
            self._uses_graphs = False
            self._enqueue_plain(work, before, after, enqueued)
            return
        self._shared.counts["captures"] += 1
        self._graphs[work] = _Captured(graph, contexts, self._runs)
        if len(self._graphs) > GRAPHS:
            self._shared.compute.synchronize()  # the oldest graph may be in use
            self._graphs.popitem(last=False)[1].graph.free()

    def _has_room(self) -> bool:
        return len(self._graphs) < GRAPHS or self._runs - next(iter(self._graphs.values())).used > _STALE_RUNS

    def _drop_graphs(self) -> None:
        """Free all graphs. Errors are ignored: if the device is lost, the next run fails too."""
        self._seen.clear()
        while self._graphs:
            with suppress(CudaError):
                self._graphs.popitem()[1].graph.free()

    def _check(self, accepted: bool, subject: str, given: object, expected: str) -> None:
        if not accepted:
            logged = "; ".join(self._logger.messages) or "no reason from TensorRT"
            raise TensorRtError(f"{subject}: got {given}, expected {expected}: {logged}")


def aligned(size_bytes: int) -> int:
    """Return a size in bytes, rounded up to what TensorRT requires of the next address."""
    return -(-size_bytes // ALIGNMENT) * ALIGNMENT
