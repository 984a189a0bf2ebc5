"""The software driver detects misuse of the device, through the real pycuda."""

import ctypes
import subprocess
import sys
import threading
from contextlib import contextmanager
from ctypes import byref, c_void_p

import numpy as np
import pycuda.driver as cuda
import pytest

from tests.device.software import Kernel

pytestmark = pytest.mark.usefixtures("software")

GLOBAL, THREAD_LOCAL = 0, 1
NON_BLOCKING = 1
SIZE = 64


@contextmanager
def made_context():
    context = cuda.Device(0).make_context()
    try:
        yield
    finally:
        context.pop()
        context.detach()


@pytest.fixture(autouse=True)
def context():
    with made_context():
        yield


def pinned(value):
    array = cuda.pagelocked_empty(SIZE, np.uint8)
    array[:] = value
    return array


def in_thread(work):
    thread = threading.Thread(target=work)
    thread.start()
    thread.join()


def call(function, *arguments):
    return int(getattr(ctypes.CDLL("libcuda.so.1"), function)(*arguments))


def value_of(memory):
    """Return the value of all bytes, as a copy on the default stream finds it."""
    found = pinned(0)
    cuda.memcpy_dtoh(found, memory)
    assert (found == found[0]).all()
    return int(found[0])


def test_streams_execute_only_when_they_are_synchronised_or_polled(software):
    stream, memory, source, result = cuda.Stream(), cuda.mem_alloc(SIZE), pinned(1), pinned(0)
    cuda.memcpy_htod_async(memory, source, stream)
    cuda.memcpy_dtoh_async(result, memory, stream)
    done = cuda.Event().record(stream)
    assert not result.any(), "read without synchronisation"
    assert not done.query()
    assert software.pending() == 3
    done.synchronize()
    assert (result == 1).all()
    assert software.pending() == 0
    cuda.memcpy_dtoh_async(result, memory, stream)
    assert not stream.is_done()
    assert any(stream.is_done() for _ in range(10))


def test_asynchronous_copy_of_pageable_memory_is_a_defect(software):
    stream, memory = cuda.Stream(), cuda.mem_alloc(SIZE)
    with pytest.raises(AssertionError, match="not pinned"), software.watched():
        cuda.memcpy_htod_async(memory, np.zeros(SIZE, np.uint8), stream)
    software.clear()


@pytest.mark.parametrize("waits", [False, True])
def test_only_events_order_streams(waits):
    writer, reader = cuda.Stream(NON_BLOCKING), cuda.Stream(NON_BLOCKING)
    memory, source, result = cuda.mem_alloc(SIZE), pinned(1), pinned(0)
    cuda.memcpy_htod_async(memory, source, writer)
    if waits:
        reader.wait_for_event(cuda.Event().record(writer))
    cuda.memcpy_dtoh_async(result, memory, reader)
    reader.synchronize()
    assert (result == (1 if waits else 0xFF)).all()  # new memory is poisoned
    writer.synchronize()


@pytest.mark.parametrize("flags", [0, NON_BLOCKING])
def test_default_stream_waits_only_for_blocking_streams(flags):
    stream, memory, source = cuda.Stream(flags), cuda.mem_alloc(SIZE), pinned(1)
    cuda.memcpy_htod_async(memory, source, stream)
    assert value_of(memory) == (0xFF if flags else 1)
    stream.synchronize()


def test_synchronous_copy_of_pageable_memory_may_return_early():
    """Its DMA may still run, and a stream that does not wait for the default stream overtakes it."""
    stream, memory, result = cuda.Stream(NON_BLOCKING), cuda.mem_alloc(SIZE), pinned(0)
    cuda.memcpy_htod(memory, np.ones(SIZE, np.uint8))
    cuda.memcpy_dtoh_async(result, memory, stream)
    stream.synchronize()
    assert (result == 0xFF).all()
    assert value_of(memory) == 1


def test_a_3d_copy_moves_the_lines_of_slices_within_the_device():
    source, target, stream = cuda.mem_alloc(SIZE), cuda.mem_alloc(SIZE), cuda.Stream()
    cuda.memcpy_htod(source, pinned(np.arange(SIZE)))
    cuda.memset_d8(target, 255, SIZE)
    cuda.Context.synchronize()
    copy = cuda.Memcpy3D()
    copy.width_in_bytes, copy.height, copy.depth = 2, 3, 2
    copy.set_src_device(int(source) + 1)
    copy.src_pitch, copy.src_height = 4, 3
    copy.set_dst_device(int(target))
    copy.dst_pitch, copy.dst_height = 5, 4
    copy(stream)
    stream.synchronize()
    found, expected = pinned(0), np.full(SIZE, 255, np.uint8)
    cuda.memcpy_dtoh(found, target)
    expected[: 2 * 20].reshape(2, 4, 5)[:, :3, :2] = np.arange(1, 25).reshape(2, 3, 4)[:, :, :2]
    np.testing.assert_array_equal(found, expected)
    for copy.depth, copy.dst_height in ((4, 4), (2, 2)):  # beyond the allocation; less than the lines of a slice
        with pytest.raises(cuda.LogicError, match="invalid argument"):
            copy(stream)


@pytest.mark.parametrize("past_the_end", [False, True])
def test_copies_outside_an_allocation_are_rejected(past_the_end):
    memory, source = cuda.mem_alloc(SIZE), pinned(0)
    address = int(memory) + past_the_end
    if not past_the_end:
        memory.free()
    assert call("cuMemFree_v2", ctypes.c_uint64(address)) == 1, "freed twice, or not at its beginning"
    with pytest.raises(cuda.LogicError, match="invalid argument"):
        cuda.memcpy_htod_async(address, source, cuda.Stream())


def test_memory_freed_too_early_is_a_sticky_illegal_access(software):
    stream, memory, source = cuda.Stream(), cuda.mem_alloc(SIZE), pinned(0)
    cuda.memcpy_htod_async(memory, source, stream)
    memory.free()
    for work in (stream.synchronize, stream.synchronize, lambda: cuda.mem_alloc(SIZE)):
        with pytest.raises(cuda.LogicError, match="illegal memory access"):
            work()
    assert software.error() == call("cuCtxCreate_v2", byref(c_void_p()), 0, 0) == 700, "the process is lost"


def test_contexts_are_current_to_one_thread():
    errors, size = [], ctypes.c_size_t()
    in_thread(lambda: errors.append(call("cuMemGetInfo_v2", byref(size), byref(size))))
    assert errors == [201]


def test_leaks_are_found_while_their_context_lives(software):
    kept = []
    for make in (lambda: cuda.mem_alloc(SIZE), cuda.Event):
        with pytest.raises(AssertionError, match="left on the device"), software.watched():
            kept.append(make())
    with software.watched():
        cuda.Stream(), pinned(0), cuda.mem_alloc(SIZE)


def test_memory_is_finite(software):
    software.set_memory(3 * SIZE)
    kept = [cuda.mem_alloc(SIZE), pinned(0)]
    assert cuda.mem_get_info() == (SIZE, 3 * SIZE)
    with pytest.raises(cuda.MemoryError, match="out of memory"):
        cuda.mem_alloc(SIZE + 1)
    kept.append(cuda.mem_alloc(SIZE))


@pytest.mark.parametrize(("code", "sticky"), [(2, False), (719, True), (999, True)])
def test_the_nth_call_of_a_function_fails(software, code, sticky):
    software.fail("cuMemAlloc", code, nth=2, times=2)
    kept = cuda.mem_alloc(SIZE)
    with pytest.raises(cuda.Error, match="cuMemAlloc failed"):
        cuda.mem_alloc(SIZE)
    assert software.error() == (code if sticky else 0)
    software.fail("cuMemFree", 719)
    kept.free()  # pycuda prints the error; memory of a lost device is freed
    assert (software.error(), software.live()["device"]) == (code if sticky else 719, 0)


def test_other_functions_are_not_supported():
    with pytest.raises(cuda.LogicError, match="not supported"):
        cuda.module_from_buffer(b"a kernel")


def test_kernels_run_in_their_stream_and_may_not_wait(software):
    stream = cuda.Stream()
    with pytest.raises(cuda.LogicError, match="invalid argument"):
        pinned(0).base.get_device_pointer()  # it is not mapped
    mapped = cuda.pagelocked_zeros(1, np.int32, mem_flags=cuda.host_alloc_flags.DEVICEMAP)
    address = mapped.base.get_device_pointer()

    @Kernel
    def kernel(_):
        host = software.translate(address, 4)
        assert host
        assert software.translate(address, 5) is None
        ctypes.c_int32.from_address(host).value += 1
        return call("cuCtxSynchronize")

    assert software.launch(stream.handle, kernel) == 0
    assert mapped[0] == 0
    with pytest.raises(cuda.LogicError, match="not permitted"):
        stream.synchronize()
    assert mapped[0] == 1
    assert len(software.defects()) == 1
    software.clear()


def test_last_release_of_the_primary_context_destroys_its_contents(software):
    context, memory, size = c_void_p(), ctypes.c_uint64(), ctypes.c_size_t(SIZE)
    assert [call("cuDevicePrimaryCtxRetain", byref(context), 0) for _ in range(2)] == [0, 0]
    assert call("cuCtxPushCurrent_v2", context) == 0
    assert call("cuMemAlloc_v2", byref(memory), size) == 0
    assert call("cuDevicePrimaryCtxRelease_v2", 0) == 0
    assert software.live()["device"] == 1
    assert call("cuDevicePrimaryCtxRelease_v2", 0) == 0
    assert software.live()["device"] == 0
    assert call("cuMemGetInfo_v2", byref(size), byref(size)) == 709, "it is still current, and destroyed"
    assert call("cuCtxPopCurrent_v2", byref(context)) == 0


def test_a_child_of_fork_has_no_device():
    code = """import ctypes, os
cuda = ctypes.CDLL("libcuda.so.1")
cuda.cuInit(0)
os.fork() or os._exit(cuda.cuInit(0))
print(os.waitstatus_to_exitcode(os.wait()[1]))"""
    assert subprocess.check_output([sys.executable, "-c", code]) == b"3\n"


def captured(stream, work, mode=GLOBAL):
    graph = c_void_p()
    assert call("cuStreamBeginCapture_v2", c_void_p(stream.handle), mode) == 0
    work()
    return call("cuStreamEndCapture", c_void_p(stream.handle), byref(graph)), graph


def test_every_launch_of_a_graph_repeats_the_captured_work(software):
    stream, side, memory, source, result = cuda.Stream(), cuda.Stream(), cuda.mem_alloc(SIZE), pinned(1), pinned(0)
    fork, join = cuda.Event(), cuda.Event()

    def work():
        fork.record(stream)
        side.wait_for_event(fork)
        cuda.memcpy_htod_async(memory, source, side)
        join.record(side)
        stream.wait_for_event(join)
        cuda.memcpy_dtoh_async(result, memory, stream)

    error, graph = captured(stream, work)
    executable = c_void_p()
    assert (error, software.pending()) == (0, 0)
    assert call("cuGraphInstantiateWithFlags", byref(executable), graph, ctypes.c_ulonglong(0)) == 0
    assert call("cuGraphDestroy", graph) == 0
    for value in (1, 2):
        source[:] = value
        assert call("cuGraphLaunch", executable, c_void_p(stream.handle)) == 0
        assert (result != value).all()
        stream.synchronize()
        assert (result == value).all()
    assert call("cuGraphExecDestroy", executable) == 0


CAPTURING, LEGACY = "when stream is capturing", "legacy stream"
FORBIDDEN = {
    "synchronise": (CAPTURING, lambda stream, *_: stream.synchronize()),
    "query": (CAPTURING, lambda stream, *_: stream.is_done()),
    "wait for the device": (CAPTURING, lambda *_: cuda.Context.synchronize()),
    "allocate": (CAPTURING, lambda *_: cuda.mem_alloc(SIZE)),
    "copy synchronously": (LEGACY, lambda stream, memory, host, outside: cuda.memcpy_dtoh(host, memory)),
    "use the default stream": (LEGACY, lambda stream, memory, host, outside: cuda.memcpy_dtoh_async(host, memory)),
    "wait for an event": ("last recorded", lambda stream, *_: cuda.Event().record(stream).synchronize()),
    "wait for work outside": ("uncaptured work", lambda stream, memory, host, out: stream.wait_for_event(out)),
}


@pytest.mark.parametrize("name", FORBIDDEN)
def test_a_capture_forbids(name):
    stream, memory, host, outside = cuda.Stream(), cuda.mem_alloc(SIZE), pinned(0), cuda.Event().record(cuda.Stream())
    reason, function = FORBIDDEN[name]

    def work():
        with pytest.raises(cuda.LogicError, match=reason):
            function(stream, memory, host, outside)

    error, graph = captured(stream, work)
    assert (error, graph.value) == (901, None), "the capture is invalid"
    cuda.memcpy_dtoh_async(host, memory, stream)  # the stream works again
    stream.synchronize()


def test_a_capture_has_to_be_joined():
    stream, side, memory, host = cuda.Stream(), cuda.Stream(), cuda.mem_alloc(SIZE), pinned(0)

    def work():
        side.wait_for_event(cuda.Event().record(stream))
        cuda.memcpy_dtoh_async(host, memory, side)

    assert captured(stream, work)[0] == 904


@pytest.mark.parametrize(("mode", "error"), [(GLOBAL, 900), (THREAD_LOCAL, 0)])
def test_a_capture_disturbs_other_threads_as_its_mode_says(mode, error):
    errors = []

    def allocate():
        with made_context():
            pointer = ctypes.c_uint64()
            errors.append(call("cuMemAlloc_v2", byref(pointer), ctypes.c_size_t(SIZE)))
            call("cuMemFree_v2", pointer)

    ended, graph = captured(cuda.Stream(), lambda: in_thread(allocate), mode)
    assert (errors, ended) == ([error], 901 if error else 0)
    if graph:
        call("cuGraphDestroy", graph)
