"""Times of pycuda and of the driver's graphs, as the product uses them: copies, launches, events, streams, graphs.

Medians of wall-clock times, in microseconds. ``python -m tests.gpu.times`` prints them as JSON.
"""

import json
import time
from contextlib import closing
from statistics import median

import numpy as np
import pycuda.driver as cuda

from edge.runtimes.cuda import CudaDevice
from tests.device.software import library

#: Spins for a number of the multiprocessor's cycles. The driver compiles it for its GPU; sm_75 is Turing.
SPIN = b"""
.version 6.3
.target sm_75
.address_size 64
.visible .entry spin(.param .u64 cycles)
{
    .reg .pred %more;
    .reg .u64 %limit, %start, %now;
    ld.param.u64 %limit, [cycles];
    mov.u64 %start, %clock64;
again:
    mov.u64 %now, %clock64;
    sub.u64 %now, %now, %start;
    setp.lt.u64 %more, %now, %limit;
    @%more bra again;
    ret;
}
\0"""
SIZES_BYTES = tuple(4096 * 4**power for power in range(8))  # 4 KiB to 64 MiB
COUNTS = (1, 16, 128)  # operations in a graph
LONG_CYCLES = 1_000_000  # about half a millisecond


def median_us(action, repetitions):
    """Return the median time of an action, after three that are not counted."""
    seconds = []
    for _ in range(repetitions + 3):
        begun = time.perf_counter()
        action()
        seconds.append(time.perf_counter() - begun)
    return median(seconds[3:]) * 1e6


def times(repetitions=50, sizes_bytes=SIZES_BYTES):
    """Return all times, and of which kind the device and its operation are.

    Raises:
        AssertionError: copied bytes differ.
        BackendError, pycuda.driver.Error, CudaError: the device fails.
    """
    with closing(CudaDevice()) as device, device:
        return _times(device, repetitions, sizes_bytes)  # everything is freed before the context


def _times(device, repetitions, sizes_bytes):
    kind, work = operation(device)
    return {
        "device": "real" if library() is None else "software, whose times mean nothing",
        "operation": kind,
        "copies": [copied for size in sizes_bytes for copied in copies(device, size, repetitions)],
        "launch": launches(device, work, repetitions),
        "event": event_times(device, work, repetitions),
        "streams": streams(device, work, repetitions),
        "graphs": [graphs(device, work, count, repetitions) for count in COUNTS],
    }


def operation(device):
    """Return a spinning kernel, or a fill of four bytes where the driver runs no kernels."""
    try:
        kernel = cuda.module_from_buffer(SPIN).get_function("spin").prepare("Q")
    except cuda.Error as error:
        memory = cuda.mem_alloc(4)
        return f"fill of 4 bytes ({error})", lambda stream, cycles: device.clear(int(memory), 4, stream)
    return "kernel", lambda stream, cycles: kernel.prepared_async_call((1, 1), (1, 1, 1), stream, cycles)


def copies(device, size_bytes, repetitions):
    """Time copies of one size from and to pinned memory on a stream, and pageable memory; each waits for its end."""
    stream, memory, pinned = device.stream(), device.allocate(size_bytes), device.allocate_host(size_bytes)
    pageable = np.random.default_rng(0).integers(256, size=size_bytes, dtype=np.uint8)
    back = np.zeros_like(pageable)
    pinned.bytes[:] = pageable[::-1]
    actions = {
        ("to device", "pageable"): lambda: device.upload(memory.address, pageable),
        ("to host", "pageable"): lambda: device.download(back, memory.address),
        ("to device", "pinned"): lambda: (device.copy_in(memory.address, pinned.bytes, stream), stream.synchronize()),
        ("to host", "pinned"): lambda: (device.copy_out(pinned.bytes, memory.address, stream), stream.synchronize()),
    }
    found = []
    try:
        for (direction, host), action in actions.items():
            if (direction, host) == ("to host", "pinned"):
                pinned.bytes[:] = 0
            us = median_us(action, repetitions)
            rate = size_bytes / us / 1e3
            found.append({"direction": direction, "host": host, "bytes": size_bytes, "us": us, "gb_per_s": rate})
        assert np.array_equal(back, pageable), f"{size_bytes} bytes from pageable memory came back changed"
        assert np.array_equal(pinned.bytes, pageable[::-1]), f"{size_bytes} bytes from pinned memory came back changed"
    finally:
        memory.free()
        pinned.free()
    return found


def launches(device, work, repetitions):
    """Time one short operation: its enqueueing alone, and with the wait for its end, spinning and asleep."""
    stream, event = device.stream(), device.event()
    found = {"enqueue_us": median_us(lambda: work(stream, 0), repetitions)}
    stream.synchronize()
    found["wait_us"] = median_us(lambda: (work(stream, 0), stream.synchronize()), repetitions)
    slept = lambda: (work(stream, 0), event.record(stream).synchronize())  # noqa: E731
    return found | {"blocking_event_us": median_us(slept, repetitions)}


def event_times(device, work, repetitions):
    """Time a long operation by events, beside the wall clock."""
    stream, start, end = device.stream(), cuda.Event(), cuda.Event()
    by_events = []

    def timed():
        start.record(stream)
        work(stream, LONG_CYCLES)
        end.record(stream).synchronize()
        by_events.append(start.time_till(end) * 1e3)

    wall = median_us(timed, repetitions)
    return {"long_operation_by_events_us": median(by_events), "long_operation_wall_us": wall}


def streams(device, work, repetitions):
    """Time four long operations on one stream and on four, which a GPU runs at the same time."""
    four = [device.stream() for _ in range(4)]

    def run(chosen):
        for stream in chosen:
            work(stream, LONG_CYCLES)
        for stream in chosen:
            stream.synchronize()

    one, all_ = (median_us(lambda chosen=chosen: run(chosen), repetitions) for chosen in (four[:1] * 4, four))
    return {"four_on_one_stream_us": one, "four_on_four_streams_us": all_, "ratio": one / all_}


def graphs(device, work, count, repetitions):
    """Time short operations one by one and as one captured graph, each with the wait for their end."""
    stream = device.stream()

    def enqueue():
        for _ in range(count):
            work(stream, 0)

    graph = device.capture(stream, enqueue)
    try:
        one_by_one = median_us(lambda: (enqueue(), stream.synchronize()), repetitions)
        as_graph = median_us(lambda: (graph.launch(stream), stream.synchronize()), repetitions)
    finally:
        graph.free()
    return {"operations": count, "plain_us": one_by_one, "graph_us": as_graph, "ratio": one_by_one / as_graph}


if __name__ == "__main__":
    print(json.dumps(times()))
