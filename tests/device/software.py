"""Control functions of the software CUDA driver."""

import ctypes
import gc
import re
import sys
from collections import Counter
from contextlib import contextmanager
from functools import cache
from pathlib import Path

#: Kinds of objects that the driver counts.
KINDS = ("device", "pinned", "context", "stream", "event", "graph", "executable")

#: The calls of the driver for any run: its context, one launch, and one event to wait for.
LAUNCH = {"cuCtxPopCurrent": 1, "cuCtxPushCurrent": 1, "cuEventRecord": 1, "cuEventSynchronize": 1, "cuGraphLaunch": 1}

#: A kernel: gets its ``userdata`` and returns 0, or the error that the device raises, such as 700.
Kernel = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p)


@cache
def library():
    """Return the software driver, ``None`` if ``libcuda.so.1`` is NVIDIA's or missing."""
    try:
        driver = ctypes.CDLL("libcuda.so.1")
        driver.software_translate.restype = ctypes.c_void_p
    except (OSError, AttributeError):
        return None
    driver.software_translate.argtypes = [ctypes.c_uint64, ctypes.c_size_t]
    driver.software_launch.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_void_p]
    driver.software_fail.argtypes = [ctypes.c_char_p, ctypes.c_long, ctypes.c_int]
    driver.software_calls.argtypes = [ctypes.c_char_p]
    driver.software_calls.restype = ctypes.c_ulong
    driver.software_live_objects.argtypes = [ctypes.c_char_p]
    driver.software_live_objects.restype = ctypes.c_long
    driver.software_defect.argtypes = [ctypes.c_size_t, ctypes.c_char_p, ctypes.c_size_t]
    driver.software_defect.restype = ctypes.c_bool
    driver.software_set_memory.argtypes = [ctypes.c_size_t]
    for name in ("allocated_bytes", "pending"):
        getattr(driver, f"software_{name}").restype = ctypes.c_size_t
    for name in ("reset", "clear", "set_memory", "report"):
        getattr(driver, f"software_{name}").restype = None
    return driver


class SoftwareDriver:
    def __init__(self, driver):
        self._driver = driver

    def fail(self, function, code, nth=1, times=1):
        """Let calls of ``function`` return ``code``, from the ``nth`` from now on; ``"kernel"`` fails as it executes.

        pycuda collects garbage and tries an allocation again that fails with 2: it gives up after ``times=2``.
        """
        for call in range(nth, nth + times):
            assert self._driver.software_fail(function.encode(), call, code) == 0, (function, call, code)

    def launch(self, stream, kernel):
        """Submit a kernel to a stream and return the error of the submission. Keep ``kernel`` until it has run."""
        return int(self._driver.software_launch(stream, ctypes.cast(kernel, ctypes.c_void_p), None))

    def translate(self, address, size):
        """Return the host's address of ``size`` bytes of device memory, ``None`` unless one allocation holds them."""
        return self._driver.software_translate(address, size)

    def calls(self, function):
        return int(self._driver.software_calls(function.encode()))

    def copies(self, work):
        """Return how many copies of each kind some work makes: to the device, back to the host, and within."""
        ways = {"HtoD": "to", "DtoH": "back", "DtoD": "within", "3D": "slices"}
        counts = dict.fromkeys(ways.values(), 0)
        for name, count in self.counted(work).items():
            if kind := re.match(r"cuMemcpy(\w+?)(Async)?$", name):
                counts[ways[kind[1]]] += count
        return counts

    def counted(self, work):
        found = re.search(r"/\S*libcuda\.so\.1\b", Path("/proc/self/maps").read_text())
        assert found
        names = {one.decode().removesuffix("_v2") for one in re.findall(rb"\bcu[A-Z]\w+", Path(found[0]).read_bytes())}
        before = {name: self.calls(name) for name in names}
        work()
        counts = {name: self.calls(name) - before[name] for name in names}
        return {name: count for name, count in sorted(counts.items()) if count}

    def counted_with_tensorrt(self, work):
        """Return the same as :meth:`counted`, and how often the work calls methods of TensorRT's contexts."""
        context = Counter[str]()

        def note(frame, event, _):
            code = frame.f_code
            if event == "call" and code.co_filename.endswith("/tensorrt/context.py") and code.co_name[0].isalpha():
                context[code.co_name] += 1

        sys.setprofile(note)
        try:
            return self.counted(work) | context
        finally:
            sys.setprofile(None)

    def live(self):
        """Return the objects of each kind that exist, and the bytes of memory."""
        counts = {kind: int(self._driver.software_live_objects(kind.encode())) for kind in KINDS}
        return counts | {"bytes": int(self._driver.software_allocated_bytes())}

    def pending(self):
        return int(self._driver.software_pending())

    def error(self):
        return int(self._driver.software_error())

    def defects(self):
        """Return the defects: errors of the program that CUDA tolerates."""
        text, found = ctypes.create_string_buffer(256), []
        while self._driver.software_defect(len(found), text, len(text)):
            found.append(text.value.decode())
        return found

    @contextmanager
    def watched(self):
        """Assert that the block leaks no object and has no defect."""
        before = self.live()
        yield
        gc.collect()
        after, defects = self.live(), self.defects()
        assert after == before, f"objects were left on the device: {before} became {after}"
        assert not defects, f"defects: {defects}"

    def set_memory(self, size):
        self._driver.software_set_memory(size)

    def clear(self):
        """Forget injected errors, defects and a set capacity."""
        self._driver.software_clear()

    def reset(self):
        """Reset the device to the state for a new process: no context, memory or error."""
        self._driver.software_reset()
