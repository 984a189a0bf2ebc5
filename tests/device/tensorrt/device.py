"""The double's view of the device: the CUDA driver, and the control functions of the software driver."""

import ctypes
import itertools
import sys
from contextlib import contextmanager
from ctypes import POINTER, byref, c_int, c_size_t, c_uint64, c_void_p
from functools import cache

import numpy as np

SUCCESS, OUT_OF_MEMORY, ILLEGAL_ADDRESS = 0, 2, 700
_NO_CONTEXT = (1, 201, 709)  # invalid value, invalid context, context is destroyed
_COMPUTE_CAPABILITY_MAJOR, _COMPUTE_CAPABILITY_MINOR = 75, 76

#: Why kernels failed. A program sees error 700 alone; these are for whoever debugs a test.
faults = []

_KERNEL = ctypes.CFUNCTYPE(c_int, c_void_p)
_numbers = itertools.count(1)
_kernels = {}


class DeviceFault(Exception):
    """A kernel went wrong on the device, which a program sees as error 700 at its next call of the driver."""


class CudaError(Exception):
    """A function of the driver failed; ``code`` is its CUresult."""

    def __init__(self, function, code):
        super().__init__(f"{function} failed with {code}")
        self.code = code


@cache
def _driver():
    driver = ctypes.CDLL("libcuda.so.1")
    driver.cuMemAlloc_v2.argtypes = [POINTER(c_uint64), c_size_t]
    driver.cuMemFree_v2.argtypes = [c_uint64]
    driver.software_translate.argtypes = [c_uint64, c_size_t]
    driver.software_translate.restype = c_void_p
    driver.software_launch.argtypes = [c_void_p, _KERNEL, c_void_p]
    return driver


def _call(name, *arguments):
    code = getattr(_driver(), name)(*arguments)
    if code != SUCCESS:
        raise CudaError(name, code)


def compute_capability():
    major, minor = c_int(), c_int()
    _call("cuDeviceGetAttribute", byref(major), _COMPUTE_CAPABILITY_MAJOR, 0)
    _call("cuDeviceGetAttribute", byref(minor), _COMPUTE_CAPABILITY_MINOR, 0)
    return major.value, minor.value


def current_context():
    context = c_void_p()
    _call("cuCtxGetCurrent", byref(context))
    return context.value


def total_bytes():
    total = c_size_t()
    _call("cuDeviceTotalMem_v2", byref(total), 0)
    return total.value


def free_bytes():
    """Return the free memory of the device; all of it where no context is current."""
    free, total = c_size_t(), c_size_t()
    try:
        _call("cuMemGetInfo_v2", byref(free), byref(total))
    except CudaError:
        return total_bytes()
    return free.value


def allocate(size):
    pointer = c_uint64()
    _call("cuMemAlloc_v2", byref(pointer), max(size, 1))
    return pointer.value


def allocate_or_log(log, function, size):
    """Allocate device memory for a function of TensorRT; None, with the reason in its log, if that fails."""
    try:
        return allocate(size)
    except CudaError as error:
        if error.code == OUT_OF_MEMORY:
            log.error(function, 2, "OutOfMemory", f"Requested size was {size} bytes.")
        else:
            log.cuda(function, str(error))
        return None


@contextmanager
def scratch(size):
    """Hold device memory in the primary context, which TensorRT's builder takes where none is current."""
    context = c_void_p()
    _call("cuDevicePrimaryCtxRetain", byref(context), 0)
    try:
        _call("cuCtxPushCurrent_v2", context)
        try:
            pointer = allocate(size)
            try:
                yield
            finally:
                free(pointer, "a build")
        finally:
            _call("cuCtxPopCurrent_v2", byref(c_void_p()))
    finally:
        _call("cuDevicePrimaryCtxRelease_v2", 0)


def free(pointer, owner):
    """Free device memory, as a destructor does: without the context that is a defect, after a fault it is not."""
    try:
        _call("cuMemFree_v2", pointer)
    except CudaError as error:
        if error.code in _NO_CONTEXT:
            _report(f"the memory of {owner} could not be freed: {error}. Destroy it while its context is current")


def view(pointer, size):
    """Return a range of device memory as an array of bytes; None unless all of it is allocated."""
    address = _driver().software_translate(pointer, size)
    if not address:
        return None
    return np.frombuffer((ctypes.c_uint8 * size).from_address(address), np.uint8)


def capturing(stream):
    status = c_int()
    _call("cuStreamIsCapturing", c_void_p(stream), byref(status))
    return status.value != 0


def launch(stream, kernel):
    """Enqueue a function and return its number; a captured one runs at every launch of the graph."""
    captured = capturing(stream)
    number = next(_numbers)
    _kernels[number] = (kernel, captured)
    try:
        _call("software_launch", c_void_p(stream), _run, c_void_p(number))
    except CudaError:
        del _kernels[number]
        raise
    return number


def forget(numbers):
    """Drop kernels whose context is destroyed. A graph that still runs one meets an illegal address."""
    for number in numbers:
        _kernels.pop(number, None)


@_KERNEL
def _run(number):
    kernel, captured = _kernels.get(number or 0, (None, False))
    if kernel is None:
        return _fault("work of an execution context ran after the context was destroyed")
    if not captured:
        forget([number or 0])
    try:
        kernel()
    except DeviceFault as fault:
        return _fault(str(fault))
    return SUCCESS


def _fault(reason):
    faults.append(reason)
    print(f"software device: {reason}", file=sys.stderr)
    return ILLEGAL_ADDRESS


def _report(text):
    """Add a defect to those of the driver, which the tests look at."""
    _driver().software_report(text.encode())
