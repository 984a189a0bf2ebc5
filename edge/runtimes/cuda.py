"""CUDA memory, streams and events by pycuda, graphs by libcuda, and errors. The only importer of pycuda, lazily.

pycuda has no graphs, so this module calls those functions of the driver itself. A :class:`CudaDevice` belongs to the
thread that opened it. Its context is current on that thread only inside ``with device:``, because pycuda aborts the
process when a thread ends with contexts on its stack. Errors are recognized by their texts. After a fatal one every
later call fails, and only a new process helps. The numbers, names and texts are those of CUDA's ``cudaError_t`` and
``CUresult``.
"""

from __future__ import annotations

import ctypes
import re
import threading
from collections.abc import Callable
from contextlib import suppress
from functools import cache
from typing import Any, NamedTuple

import numpy as np

from edge.datatypes import Array
from edge.errors import BackendError, FewheadsError, Raw

#: Number and name in the driver's API, and text. The runtime's API shares the numbers and, in camel case, the names.
_FATAL: tuple[tuple[int, str, str], ...] = (
    (214, "ECC_UNCORRECTABLE", "uncorrectable ECC error"),
    (220, "NVLINK_UNCORRECTABLE", "uncorrectable NVLink error"),
    (700, "ILLEGAL_ADDRESS", "an illegal memory access was encountered"),
    (702, "LAUNCH_TIMEOUT", "the launch timed out and was terminated"),
    (709, "CONTEXT_IS_DESTROYED", "context is destroyed"),
    (710, "ASSERT", "device-side assert triggered"),
    (714, "HARDWARE_STACK_ERROR", "hardware stack error"),
    (715, "ILLEGAL_INSTRUCTION", "an illegal instruction was encountered"),
    (716, "MISALIGNED_ADDRESS", "misaligned address"),
    (717, "INVALID_ADDRESS_SPACE", "operation not supported on global/shared address space"),
    (718, "INVALID_PC", "invalid program counter"),
    (719, "LAUNCH_FAILED", "unspecified launch failure"),
    (721, "CONTAINED", "the execution context was contained"),
    (999, "UNKNOWN", "failed: unknown error"),
)
#: Messages of the driver about a device that is no longer on the bus.
_LOST = "gpu is lost|device is lost|fallen off the bus"


def _pattern(number: int, name: str, text: str) -> re.Pattern[str]:
    # The runtime's API has cudaErrorLaunchFailure where the driver's has CUDA_ERROR_LAUNCH_FAILED.
    names = name.replace("_", "_?").replace("FAILED", "FAIL(?:ED|URE)")
    return re.compile(
        rf"{re.escape(text)}|\b(?:cudaError|CUDA_ERROR_)(?:{names})\b"
        rf"|\bcuda (?:runtime )?(?:failure|error)(?: code)?[ :=]+{number}\b",
        re.IGNORECASE,
    )


_PATTERNS = {
    **{f"CUDA_ERROR_{name}": _pattern(number, name, text) for number, name, text in _FATAL},
    "device lost": re.compile(_LOST, re.IGNORECASE),
}
#: CUDA's, pycuda's and TensorRT's terms for too little device memory.
_OUT_OF_MEMORY = re.compile(r"\bout ?of ?memory\b|OUT_OF_MEMORY|cudaErrorMemoryAllocation", re.IGNORECASE)


def is_out_of_memory(text: str) -> bool:
    """Return whether a message of CUDA, or of a runtime that quotes it, reports a lack of memory."""
    return bool(_OUT_OF_MEMORY.search(text))


def fatal_name(text: str) -> str | None:
    """Return the name of the fatal error in a message of CUDA, or of a runtime that quotes it; None if it is not fatal.

    The name is the driver's, such as ``CUDA_ERROR_LAUNCH_FAILED``, or ``device lost``.
    """
    return next((name for name, pattern in _PATTERNS.items() if pattern.search(text)), None)


def fatal(error: BaseException) -> str | None:
    """Return the name and text of the fatal device error that caused an exception, or None.

    The texts of our own errors do not count, because they quote what clients sent; their causes do.
    """
    seen: BaseException | None = error
    for _ in range(16):  # chains are short, but may be circular
        if seen is None:
            return None
        name = None if isinstance(seen, FewheadsError) else fatal_name(f"{type(seen).__name__}: {seen}")
        if name:
            return str(seen) if name in str(seen) else f"{name}: {seen}"
        seen = seen.__cause__ or seen.__context__
    return None


_THREAD_LOCAL_CAPTURE = 1  # CU_STREAM_CAPTURE_MODE_THREAD_LOCAL: other threads may use CUDA meanwhile
_NON_BLOCKING_STREAM = 1  # CU_STREAM_NON_BLOCKING
_COPIES = 64  # the most descriptions of copies that a device keeps


class CudaError(Exception):
    """A function of the driver failed: ``function failed: CUDA_ERROR_NAME (number), text``."""


def abandon(*objects: object) -> None:
    """Never destroy objects of a lost device: it frees nothing, and pycuda's destructors would print a warning each."""
    for item in objects:
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(item))


class DeviceFacts(NamedTuple):
    """The GPU of this machine, and the highest CUDA version that its driver supports."""

    name: str
    compute_capability: str
    cuda: str
    integrated: bool  # shares the processor's memory


class Slices(NamedTuple):
    """Slices of equal lines in device memory."""

    address: int
    pitch: int  # bytes from a line to the next, at most those of the device's MAX_PITCH
    lines: int  # from a slice to the next


class Memory:
    """Memory of the device, of the host, or of both. Only :meth:`free` frees it."""

    def __init__(self, allocation: Any, address: int, size_bytes: int, host: Array) -> None:
        self._allocation = allocation
        self.address = address  # on the device; 0 for host memory that is not mapped
        self.size_bytes = size_bytes
        self.bytes = host  # page-locked, [size_bytes]; empty for device memory

    def free(self) -> None:
        """Free the memory, inside ``with device:``. A second call does nothing."""
        allocation, self._allocation = self._allocation, None
        self.address, self.bytes = 0, self.bytes[:0]
        if allocation is not None:
            allocation.free()


class CudaGraph:
    """A captured sequence of work for one stream. Its methods raise :class:`CudaError`."""

    def __init__(self, executable: ctypes.c_void_p) -> None:
        self._executable: ctypes.c_void_p | None = executable

    def launch(self, stream: Any) -> None:
        """Enqueue all its work into a stream."""
        _call("cuGraphLaunch", self._executable, ctypes.c_void_p(stream.handle))

    def free(self) -> None:
        """Free the graph, of which no launch may be in progress. A second call does nothing."""
        executable, self._executable = self._executable, None
        if executable:
            _call("cuGraphExecDestroy", executable)


class CudaDevice:
    """The context of the GPU on the thread that made this object.

    Raise a BackendError if pycuda is missing, or there is no GPU, and a pycuda.driver.Error if the device cannot be
    used.
    """

    def __init__(self) -> None:
        self.facts = facts()
        self._driver = _import_driver()
        #: What the methods raise if a call of the driver fails.
        self.errors: tuple[type[Exception], ...] = (self._driver.Error, CudaError)
        self._owner = threading.current_thread()
        self._context = self._driver.Device(0).retain_primary_context()
        self._copies: dict[tuple[object, ...], Any] = {}  # descriptions of copies of slices, without their addresses

    def __enter__(self) -> None:
        if threading.get_ident() != self._owner.ident:
            here = threading.current_thread().name
            raise RuntimeError(f"the GPU belongs to the thread {self._owner.name}, but {here} uses it")
        self._context.push()

    def __exit__(self, *_: object) -> None:
        self._context.pop()

    def allocate(self, size_bytes: int) -> Memory:
        """Allocate device memory; raise a pycuda.driver.MemoryError if there is not enough."""
        allocation = self._driver.mem_alloc(max(size_bytes, 1))
        return Memory(allocation, int(allocation), size_bytes, np.empty(0, np.uint8))

    def allocate_host(self, size_bytes: int, *, mapped: bool = False) -> Memory:
        """Allocate page-locked host memory, which the device can read and write in place if it is ``mapped``."""
        flags = self._driver.host_alloc_flags.DEVICEMAP if mapped else 0
        array = self._driver.pagelocked_empty(max(size_bytes, 1), np.uint8, mem_flags=flags)
        address = array.base.get_device_pointer() if mapped else 0
        return Memory(array.base, address, size_bytes, array[:size_bytes])

    def stream(self) -> Any:
        """Return a new stream, which never waits for the default stream."""
        return self._driver.Stream(_NON_BLOCKING_STREAM)

    def event(self) -> Any:
        """Return a new event. Threads that wait for it sleep: spinning would use a core that the server needs."""
        return self._driver.Event(self._driver.event_flags.BLOCKING_SYNC | self._driver.event_flags.DISABLE_TIMING)

    def copy_in(self, address: int, array: Array, stream: Any) -> None:
        """Enqueue a copy to the device. The array must be page-locked, and must not change until the copy is done."""
        self._driver.memcpy_htod_async(address, array, stream)

    def copy_out(self, array: Array, address: int, stream: Any) -> None:
        """Enqueue a copy to the host. The array must be page-locked, and holds the data once the copy is done."""
        self._driver.memcpy_dtoh_async(array, address, stream)

    def copy(self, target: int, source: int, size_bytes: int, stream: Any) -> None:
        """Enqueue a copy within the device."""
        self._driver.memcpy_dtod_async(target, source, size_bytes, stream)

    def copy_slices(self, target: Slices, source: Slices, shape: tuple[int, int, int], stream: Any) -> None:
        """Enqueue one copy within the device; its shape is bytes of each line, lines of each slice, and slices."""
        like = target[1:], source[1:], shape
        copy = self._copies.get(like)
        if copy is None:
            if len(self._copies) >= _COPIES:
                self._copies.clear()
            copy = self._copies[like] = self._driver.Memcpy3D()
            copy.width_in_bytes, copy.height, copy.depth = shape
            copy.dst_pitch, copy.dst_height = target[1:]
            copy.src_pitch, copy.src_height = source[1:]
        copy.set_dst_device(target.address)
        copy.set_src_device(source.address)
        copy(stream)

    def clear(self, address: int, size_bytes: int, stream: Any) -> None:
        """Enqueue a fill with zeros."""
        self._driver.memset_d8_async(address, 0, size_bytes, stream)

    def upload(self, address: int, array: Array) -> None:
        """Copy an array to the device and wait for the copy."""
        self._driver.memcpy_htod(address, array)
        # The copy from pageable memory may still be in progress, and a non-blocking stream would not wait for it.
        self._driver.Context.synchronize()

    def download(self, array: Array, address: int) -> None:
        """Copy device memory, which no run may be writing, to an array and wait for the copy."""
        self._driver.memcpy_dtoh(array, address)

    def capture(self, stream: Any, work: Callable[[], None]) -> CudaGraph:
        """Capture what ``work`` enqueues into a stream, without executing it. After an error nothing is captured."""
        handle, captured, executable = ctypes.c_void_p(stream.handle), ctypes.c_void_p(), ctypes.c_void_p()
        _call("cuStreamBeginCapture_v2", handle, _THREAD_LOCAL_CAPTURE)
        try:
            work()
            _call("cuStreamEndCapture", handle, ctypes.byref(captured))
        except BaseException:
            with suppress(CudaError):  # an invalid capture has ended already
                _call("cuStreamEndCapture", handle, ctypes.byref(captured))
                _call("cuGraphDestroy", captured)
            raise
        try:
            _call("cuGraphInstantiateWithFlags", ctypes.byref(executable), captured, ctypes.c_ulonglong(0))
        finally:
            _call("cuGraphDestroy", captured)
        return CudaGraph(executable)

    def close(self) -> None:
        """Release the context, on the owning thread, after everything that was created in it."""
        with suppress(*self.errors):  # the device may be lost
            self._context.push()
            self._context.detach()
            _call("cuCtxPopCurrent_v2", ctypes.byref(ctypes.c_void_p()))  # detach leaves the context current


@cache
def facts() -> DeviceFacts:
    """Return the properties of the GPU, without creating a context; raise a BackendError if there is none."""
    driver = _import_driver()
    try:
        driver.init()
        device = driver.Device(0)
        major, minor = device.compute_capability()
        cuda = driver.get_driver_version()
        integrated = device.get_attribute(driver.device_attribute.INTEGRATED)
        return DeviceFacts(device.name(), f"{major}.{minor}", f"{cuda // 1000}.{cuda % 1000 // 10}", bool(integrated))
    except driver.Error as error:
        fix = "Start a container with the nvidia runtime (docker run --runtime nvidia), and look at `fewheads doctor`."
        raise BackendError("CUDA", given=Raw(error), expected="an NVIDIA GPU", fix=fix) from error


@cache
def _import_driver() -> Any:
    try:
        import pycuda.driver as driver
    except ImportError as error:
        # Only the nvidia runtime mounts the host's libcuda.so.1 into a container.
        fix = "Install the extra 'jetson'; start a container with the nvidia runtime (docker run --runtime nvidia)."
        raise BackendError("pycuda", given=Raw(error), expected="an importable package", fix=fix) from None
    return driver


@cache
def _libcuda() -> ctypes.CDLL:
    return ctypes.CDLL("libcuda.so.1")


def _call(function: str, *arguments: object) -> None:
    library = _libcuda()
    code = getattr(library, function)(*arguments)
    if code:
        name, text = ctypes.c_char_p(), ctypes.c_char_p()
        library.cuGetErrorName(code, ctypes.byref(name))
        library.cuGetErrorString(code, ctypes.byref(text))
        shown = [(value.value or b"unknown").decode() for value in (name, text)]
        raise CudaError(f"{function} failed: {shown[0]} ({code}), {shown[1]}")
